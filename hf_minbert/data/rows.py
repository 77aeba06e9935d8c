"""Encoded rows in memory. All tokens of a task are in one array, so a batch needs a few array operations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..model.inference import TokenRows, ragged
from ..model.losses import IGNORED

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class EncodedRows(TokenRows):
    """A map-style dataset of rows with `input_ids`, `token_type_ids` and, where there are labels, `labels`.

    Args:
        labels: [R], class ids in int64 or scores in float32; for `kind: labels` float32 [R, C], 0 or 1; for `kind:
            tags` [R] arrays of class ids, int64 [words]; or `None`.
        teacher: float32 [R, C], the outputs of a teacher's head; or `None`.
        labelled: [R], which rows have a label, if some have none and share their inputs with another task; else
            `None`. The other arguments are those of `TokenRows`.
    """

    labels: np.ndarray | None = None
    teacher: np.ndarray | None = None
    labelled: np.ndarray | None = None

    @classmethod
    def of(cls, rows: datasets.Dataset | Sequence[Mapping[str, Any]], dtype: str, apart: bool) -> EncodedRows:
        """Makes rows from a dataset with these columns.

        With `apart`, the first two columns have two lists for each row. Labels have the task's `dtype`, independent of
        their values.
        """
        library = sys.modules.get("datasets")
        if library is not None and isinstance(rows, library.Dataset):
            (ids, starts), (segments, _) = (_flat(rows, name, apart) for name in ("input_ids", "token_type_ids"))
            words = _flat(rows, "words", False)[0] if "words" in rows.column_names else None
            num_words = None if words is None else _column(rows, "num_words")
            labels = None
            if "labels" in rows.column_names:
                labels = _column(rows, "labels") if words is None else _parts(rows, "labels")
        else:
            ids, segments = ([row[name] for row in rows] for name in ("input_ids", "token_type_ids"))
            if apart:
                ids, segments = list(chain.from_iterable(ids)), list(chain.from_iterable(segments))
            starts = np.cumsum([0, *map(len, ids)])
            ids, segments = (
                np.fromiter(chain.from_iterable(lists), np.int32, starts[-1]) for lists in (ids, segments)
            )
            labels = [row["labels"] for row in rows] if "labels" in rows[0] else None
            words = num_words = None
            if "words" in rows[0]:
                words = np.fromiter(chain.from_iterable(row["words"] for row in rows), np.int32, starts[-1])
                num_words = np.array([row["num_words"] for row in rows])
        if labels is not None:
            labels = np.asarray(labels).astype(dtype) if words is None else tag_rows(labels)
        return cls(
            ids.astype(np.int32), segments.astype(np.int8), starts.astype(np.int64), 2 if apart else 1, words,
            num_words, labels,
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Sequence[EncodedRows]) -> EncodedRows:
        """Concatenates the rows of all parts. The parts belong to one task and have no teacher."""
        starts = np.cumsum([0, *np.concatenate([part.lengths for part in parts])])

        def column(name: str) -> Any:
            columns = [getattr(part, name) for part in parts]
            return None if columns[0] is None else np.concatenate(columns)

        names = ("ids", "segments", "words", "num_words", "labels")
        return cls(starts=starts, sides=parts[0].sides, **{name: column(name) for name in names})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns one row, as lists and numbers."""
        row = self.take([range(len(self))[index]])
        spans = [slice(*row.starts[side : side + 2]) for side in range(self.sides)]
        ids, segments = ([values[span].tolist() for span in spans] for values in (row.ids, row.segments))
        made = {"input_ids": ids, "token_type_ids": segments} if self.sides == 2 else {
            "input_ids": ids[0], "token_type_ids": segments[0]
        }  # fmt: skip
        if row.words is not None and row.num_words is not None:
            made |= {"words": row.words.tolist(), "num_words": row.num_words[0].item()}
        return made if row.labels is None else made | {"labels": row.labels[0].tolist()}

    def __getitems__(self, indices: Sequence[int]) -> EncodedRows:
        """Returns several rows in one call, as torch's data loaders request them."""
        return self.take(indices)

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """Returns the rows at these positions, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        return replace(super().take(indices), **_taken(self, indices))

    @property
    def token_labels(self) -> np.ndarray:
        """Returns the label of each word at its first piece and `IGNORED` at all other tokens; int64 [S]."""
        assert self.words is not None and self.num_words is not None and self.labels is not None
        before = np.repeat(np.cumsum(self.num_words) - self.num_words, self.lengths)
        return np.where(self.words < 0, IGNORED, np.concatenate(self.labels)[before + self.words])

    @property
    def unread(self) -> int:
        """Returns the number of words without a token, because they were cut off or the tokenizer drops them."""
        if self.words is None:
            return 0
        return self.total_words - int((self.words >= 0).sum())

    @property
    def total_words(self) -> int:
        """The number of words; 0 unless the task labels each word."""
        return 0 if self.num_words is None else int(self.num_words.sum())

    def ids_of(self, index: int) -> np.ndarray:
        """Returns the ids of one input without a copy."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class PooledRows:
    """A map-style dataset of rows that have already passed through the encoder.

    Args:
        pooled: float32 [R, S, D], the pooled states for the task's head.
        labels, teacher, labelled: as for `EncodedRows`.
    """

    pooled: np.ndarray
    labels: np.ndarray | None
    teacher: np.ndarray | None = None
    labelled: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, index: int) -> PooledRows:
        return self.take([index])

    def __getitems__(self, indices: Sequence[int]) -> PooledRows:
        """Returns several rows in one call, as torch's data loaders request them."""
        return self.take(indices)

    def take(self, indices: Sequence[int] | np.ndarray) -> PooledRows:
        """Returns the rows at these positions, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        return PooledRows(self.pooled[indices], **_taken(self, indices))


@dataclass(frozen=True)
class SharedRows:
    """The rows of a round for tasks that share rows.

    Args:
        rows: the rows of each task. All tasks have the same inputs.
        shares: for each task, the factor on its mean loss over the labelled rows of this process. With it, the mean
            over processes equals the mean over all labelled rows. It is 0 if none of these rows has a label.
    """

    rows: dict[str, EncodedRows | PooledRows]
    shares: dict[str, float]


@dataclass(frozen=True)
class PartlyLabelled:
    """The rows of a round for a task that also has rows without labels.

    Args:
        rows: rows with labels.
        unlabelled: rows without labels.
    """

    rows: EncodedRows | PooledRows
    unlabelled: EncodedRows | PooledRows

    @property
    def inputs(self) -> EncodedRows | PooledRows:
        """All rows without labels and teacher outputs, labelled rows first."""
        parts = (self.rows, self.unlabelled)
        pooled = [of.pooled for of in parts if isinstance(of, PooledRows)]
        if pooled:
            return PooledRows(np.concatenate(pooled), None)
        return EncodedRows.joined([replace(of, labels=None) for of in parts if isinstance(of, EncodedRows)])


def apart_by_label(rows: EncodedRows) -> tuple[EncodedRows, EncodedRows | None]:
    """Splits rows into those with a label and those without, if there are any."""
    if rows.labelled is None:
        return rows, None
    without = rows.take(np.flatnonzero(~rows.labelled))
    return having_labels(rows), replace(without, labels=None, labelled=None)


def having_labels(rows: EncodedRows) -> EncodedRows:
    """Returns the rows that have a label."""
    return rows if rows.labelled is None else replace(rows.take(np.flatnonzero(rows.labelled)), labelled=None)


def _taken(rows: EncodedRows | PooledRows, indices: np.ndarray) -> dict[str, np.ndarray | None]:
    """What belongs to a task of the rows at these places."""
    columns = {"labels": rows.labels, "teacher": rows.teacher, "labelled": rows.labelled}
    return {name: None if column is None else column[indices] for name, column in columns.items()}


def tag_rows(rows: Iterable[Any]) -> np.ndarray:
    """Converts lists or arrays of the class ids of each row's words to [R] arrays, int64 [words]."""
    return ragged([np.asarray(row, dtype=np.int64) for row in rows])


def _column(rows: datasets.Dataset, name: str) -> np.ndarray:
    """A column of numbers, [R], or of equally long lists of them, [R, C]."""
    array = rows.with_format(None).data.table.column(name).combine_chunks()
    return np.asarray(array.flatten()).reshape(len(rows), -1) if array.type.num_fields else np.asarray(array)


def _parts(rows: datasets.Dataset, name: str) -> list[np.ndarray]:
    """A column of lists, each as an array."""
    flat, starts = _flat(rows, name, False)
    return np.split(flat, starts[1:-1])


def _flat(rows: datasets.Dataset, column: str, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns a column of lists as one array, and where each list begins in it."""
    array = rows.with_format(None).data.table.column(column).combine_chunks()
    array = array.flatten() if apart else array
    starts = np.asarray(array.offsets)
    return np.asarray(array.flatten()), starts - starts[0]
