"""Encoded rows to batches of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import MinBertError
from ..model.inference import filled, padded
from ..model.losses import IGNORED
from ..settings.tasks import Task
from .labels import label_value, tag_values
from .rows import EncodedRows, PooledRows


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
        if isinstance(rows, PooledRows):
            return {"task": self.task.name, "pooled": torch.from_numpy(rows.pooled), **_answers(rows)}
        if not isinstance(rows, EncodedRows):
            task = self.task
            rows = EncodedRows.of(list(map(self._checked, rows)), task.traits.dtype, task.pair_encoding == "bi")
        width = self.fill_to or -(-rows.lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of
        inputs = padded(rows, self.pad_token_id, width, self.packing, fill=self.fill_to is not None)
        answers = _answers(rows)
        if rows.words is not None and rows.labels is not None:
            is_token = inputs["attention_mask"].bool().numpy()
            answers["labels"] = filled(rows.token_labels, is_token, IGNORED)
        return {"task": self.task.name, **inputs, **answers}

    def _checked(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if "labels" not in row:
            return row
        if self.task.traits.is_tags:
            return {**row, "labels": tag_values(self.task, row["labels"], lambda word: f"A batch, word {word}")}
        return {**row, "labels": label_value(self.task, row["labels"], "A batch")}


class RoundCollator:
    """Makes one training step's input: a round `{task: [rows]}` becomes `{task: batch}`.

    A round is the item of its dataset, so the `DataLoader` must have `batch_size=1`.
    """

    def __init__(self, collators: Mapping[str, PaddedCollator]):
        self.collators = dict(collators)

    def __call__(self, rounds: Sequence[Mapping[str, EncodedRows]]) -> dict[str, dict[str, Any]]:
        if len(rounds) != 1:
            raise MinBertError(f"A step takes one round: `batch_size` of the loader must be 1. Found {len(rounds)}.")
        return {name: self.collators[name](rows) for name, rows in rounds[0].items()}


def _answers(rows: EncodedRows | PooledRows) -> dict[str, torch.Tensor]:
    columns = {"labels": rows.labels, "teacher": rows.teacher}
    there = {name: column for name, column in columns.items() if column is not None and column.dtype != object}
    return {name: torch.from_numpy(column) for name, column in there.items()}
