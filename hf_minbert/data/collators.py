"""Encoded rows to batches of tensors."""

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
        pad_token_id: the tokenizer's.
        pad_to_multiple_of: rounds the padded length up. It must divide the model's number of positions, or the
            longest inputs would be padded past it.
        packing: say where the real tokens stand, so that the encoder computes on them alone.
        fill_to: pad to this length, whatever the batch's, and round the number of packed tokens up to a few sizes, so
            that batches come in a few shapes.
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
        """A batch of B rows, T tokens long; of rows that are pooled, `pooled` [B, S, D] in the place of the tokens.

        Returns:
            `task`, the name; `input_ids`, `attention_mask` and `token_type_ids`, int64 [B, T], or [B, 2, T] of a pair
            that is encoded apart; `labels` [B], or [B, C] of kind `labels`, and `teacher` [B, C] where
            the rows have them; and `packing` where it is asked for. Where each word has a label, `labels` are [B, T],
            `IGNORED` at all but first pieces.
        """
        if not isinstance(rows, EncodedRows | PooledRows):
            task = self.task
            rows = EncodedRows.of(list(map(self._checked, rows)), task.traits.dtype, task.pair_encoding == "bi")
        inputs = self.inputs(rows)
        return {"task": self.task.name, **inputs, **self.answers(rows, inputs)}

    def inputs(self, rows: EncodedRows | PooledRows) -> dict[str, Any]:
        """What a batch has of the rows beside labels and teacher."""
        if isinstance(rows, PooledRows):
            return {"pooled": torch.from_numpy(rows.pooled)}
        width = self.fill_to or -(-rows.lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return padded(rows, self.pad_token_id, width, self.packing, fill=self.fill_to is not None)

    def answers(self, rows: EncodedRows | PooledRows, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The `labels` of the rows and their `teacher`, where they have them; `inputs` are those of the batch."""
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
    """Makes one training step's input: a round `{task: [rows]}` becomes `{task: batch}`.

    The batch of tasks that share rows has, beside the inputs, `answers`: to each task its `labels` and `teacher`, the
    places in the batch of the `rows` that these are of, unless that is all, and its `share` as in `SharedRows`; or
    `pooled`, of these rows, in the place of `rows`. Where no row has a label, the first one stands for it.

    The batch of a task with rows without labels has these last: `labels` are shorter than the rest.

    A round is the item of its dataset, so the `DataLoader` must have `batch_size=1`.
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
