"""Collators: they turn encoded rows into batches of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import MinBertError
from ..model.inference import filled, padded
from ..model.losses import IGNORED
from ..settings.tasks import Task
from .labels import label_value, tag_values
from .rows import EncodedRows, PartlyLabelled, PooledRows, SharedRows


class PaddedCollator:
    """Pads a task's rows to the longest of the batch.

    Args:
        task: gives the labels their type, which is never guessed from their values: int64 for classes and
            binary, float32 for a score or a 0 or 1 for each label.
        pad_token_id: the id of the tokenizer's padding token.
        pad_to_multiple_of: rounds the padded length up. It must divide the model's number of positions, or the
            longest inputs would be padded past it.
        packing: add the positions of the real tokens, so that the encoder computes on them only.
        fill_to: always pad to this length, and round the number of packed tokens up to one of a few sizes. Batches
            then have few different shapes.
    """

    def __init__(
        self,
        task: Task,
        pad_token_id: int,
        pad_to_multiple_of: int | None = None,
        packing: bool = False,
        fill_to: int | None = None,
    ):
        self.task = task
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self.packing, self.fill_to = packing, fill_to

    def __call__(self, rows: EncodedRows | PooledRows | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Makes a batch of B rows with T tokens. For pooled rows, the batch has `pooled` [B, S, D] instead of tokens.

        Returns:
            `task`, the name of the task; `input_ids`, `attention_mask` and `token_type_ids`, int64 [B, T], or [B, 2,
            T] for a
            pair whose sentences are encoded separately; if the rows have them, `labels` [B], or [B, C] for `kind:
            labels`, and
            `teacher` [B, C]; and `packing` if requested. For `kind: tags`, `labels` are [B, T], with `IGNORED` at all
            tokens
            but the first of each word.
        """
        if not isinstance(rows, EncodedRows | PooledRows):
            task = self.task
            rows = EncodedRows.of(list(map(self._checked, rows)), task.traits.dtype, task.pair_encoding == "bi")
        inputs = self.inputs(rows)
        return {"task": self.task.name, **inputs, **self.answers(rows, inputs)}

    def inputs(self, rows: EncodedRows | PooledRows) -> dict[str, Any]:
        """Returns the batch without labels and teacher outputs."""
        if isinstance(rows, PooledRows):
            return {"pooled": torch.from_numpy(rows.pooled)}
        width = self.fill_to or -(-rows.lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return padded(rows, self.pad_token_id, width, self.packing, fill=self.fill_to is not None)

    def answers(self, rows: EncodedRows | PooledRows, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the `labels` and `teacher` of the rows, if they have them; `inputs` are those of the batch."""
        columns = {"labels": rows.labels, "teacher": rows.teacher}
        there = {name: column for name, column in columns.items() if column is not None and column.dtype != object}
        answers = {name: torch.from_numpy(column) for name, column in there.items()}
        if isinstance(rows, EncodedRows) and rows.words is not None and rows.labels is not None:
            is_token = np.arange(inputs["input_ids"].shape[-1]) < rows.lengths[:, None]
            answers["labels"] = filled(rows.token_labels, is_token, IGNORED)
        return answers

    def _checked(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if "labels" not in row:
            return row
        if self.task.traits.is_tags:
            return {**row, "labels": tag_values(self.task, row["labels"], lambda word: f"A batch, word {word}")}
        return {**row, "labels": label_value(self.task, row["labels"], "A batch")}


class RoundCollator:
    """Makes the input of one training step: a round `{task: [rows]}` becomes `{task: batch}`.

    The batch of tasks that share rows has the inputs and `answers`, a mapping from each task to its `labels` and
    `teacher`. If they are for only some rows of the batch, it also has `rows`, their positions, or `pooled`, the
    pooled states of these rows. `share` is explained in `SharedRows`. If no row has a label, the first row is used in
    its place.

    If a task has rows without labels, they are last in its batch: `labels` is shorter than the other tensors.

    One item of the dataset is one round, so the `DataLoader` must have `batch_size=1`.
    """

    def __init__(self, collators: Mapping[str, PaddedCollator]):
        self.collators = dict(collators)

    def __call__(
        self, rounds: Sequence[Mapping[str, EncodedRows | SharedRows | PartlyLabelled]]
    ) -> dict[str, dict[str, Any]]:
        if len(rounds) != 1:
            raise MinBertError(f"A step takes one round: `batch_size` of the loader must be 1. Found {len(rounds)}.")
        return {name: self._batch(name, rows) for name, rows in rounds[0].items()}

    def _batch(self, name: str, rows: EncodedRows | SharedRows | PartlyLabelled) -> dict[str, Any]:
        if isinstance(rows, SharedRows):
            return self._shared(name, rows)
        return self._partly(name, rows) if isinstance(rows, PartlyLabelled) else self.collators[name](rows)

    def _partly(self, name: str, partly: PartlyLabelled) -> dict[str, Any]:
        collator = self.collators[name]
        inputs = collator.inputs(partly.inputs)
        labelled, others = (collator.answers(rows, inputs) for rows in (partly.rows, partly.unlabelled))
        teacher = torch.cat([labelled["teacher"], others["teacher"]])
        return {"task": name, **inputs, "labels": labelled["labels"], "teacher": teacher}

    def _shared(self, first: str, shared: SharedRows) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        answers: dict[str, dict[str, Any]] = {}
        for name, rows in shared.rows.items():
            collator = self.collators[name]
            answer: dict[str, Any] = {"share": shared.shares[name]}
            if isinstance(rows, EncodedRows):
                inputs = inputs or collator.inputs(rows)
            if rows.labelled is not None:
                places = np.flatnonzero(rows.labelled) if rows.labelled.any() else np.zeros(1, dtype=np.int64)
                if isinstance(rows, EncodedRows):
                    answer["rows"] = torch.from_numpy(places)
                rows = rows.take(places)
            if isinstance(rows, PooledRows):
                answer |= collator.inputs(rows)
            answers[name] = answer | collator.answers(rows, inputs)
        return {"task": first, **inputs, "answers": answers}
