"""Encoded rows in memory: all tokens of a task in one array, so that a batch is a few array operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..model.inference import TokenRows

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class EncodedRows(TokenRows):
    """A map-style dataset of rows with `input_ids`, `token_type_ids` and, where there are labels, `labels`.

    Args:
        labels: [R], class ids in int64 or scores in float32; or `None`.
        teacher: float32 [R, C], what a teacher's head answers; or `None`. The rest as for `TokenRows`.
    """

    labels: np.ndarray | None = None
    teacher: np.ndarray | None = None

    @classmethod
    def of(cls, rows: datasets.Dataset | Sequence[Mapping[str, Any]], dtype: str, apart: bool) -> EncodedRows:
        """From rows with these columns; `apart` says whether the first two hold two lists each.

        Labels are of the task's `dtype`, whatever the numbers look like.
        """
        library = sys.modules.get("datasets")
        if library is not None and isinstance(rows, library.Dataset):
            (ids, starts), (segments, _) = (_flat(rows, name, apart) for name in ("input_ids", "token_type_ids"))
            labels = np.asarray(rows.data.column("labels")) if "labels" in rows.column_names else None
        else:
            ids, segments = ([row[name] for row in rows] for name in ("input_ids", "token_type_ids"))
            if apart:
                ids, segments = list(chain.from_iterable(ids)), list(chain.from_iterable(segments))
            starts = np.cumsum([0, *map(len, ids)])
            ids, segments = (
                np.fromiter(chain.from_iterable(lists), np.int32, starts[-1]) for lists in (ids, segments)
            )
            labels = np.array([row["labels"] for row in rows]) if "labels" in rows[0] else None
        if labels is not None:
            labels = labels.astype(dtype)
        return cls(ids.astype(np.int32), segments.astype(np.int8), starts.astype(np.int64), 2 if apart else 1, labels)

    @classmethod
    def joined(cls, parts: Sequence[EncodedRows]) -> EncodedRows:
        """The rows of all parts, one after another. The parts are a task's, without a teacher."""
        starts = np.cumsum([0, *np.concatenate([part.lengths for part in parts])])
        labels = [part.labels for part in parts if part.labels is not None]
        return cls(
            np.concatenate([part.ids for part in parts]), np.concatenate([part.segments for part in parts]), starts,
            parts[0].sides, np.concatenate(labels) if labels else None,
        )  # fmt: skip

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row, as lists and numbers."""
        row = self.take([range(len(self))[index]])
        spans = [slice(*row.starts[side : side + 2]) for side in range(self.sides)]
        ids, segments = ([values[span].tolist() for span in spans] for values in (row.ids, row.segments))
        made = {"input_ids": ids, "token_type_ids": segments} if self.sides == 2 else {
            "input_ids": ids[0], "token_type_ids": segments[0]
        }  # fmt: skip
        return made if row.labels is None else made | {"labels": row.labels[0].item()}

    def __getitems__(self, indices: Sequence[int]) -> EncodedRows:
        """Several rows in one call, as torch's loaders ask for them."""
        return self.take(indices)

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The rows at these places, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        labels = None if self.labels is None else self.labels[indices]
        teacher = None if self.teacher is None else self.teacher[indices]
        return replace(super().take(indices), labels=labels, teacher=teacher)

    def ids_of(self, index: int) -> np.ndarray:
        """The ids of one input, without a copy."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class PooledRows:
    """A map-style dataset of rows of which the encoder's part is done.

    Args:
        pooled: float32 [R, S, D], what the task's head pools.
        labels, teacher: as for `EncodedRows`.
    """

    pooled: np.ndarray
    labels: np.ndarray | None
    teacher: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, index: int) -> PooledRows:
        return self.take([index])

    def __getitems__(self, indices: Sequence[int]) -> PooledRows:
        """Several rows in one call, as torch's loaders ask for them."""
        return self.take(indices)

    def take(self, indices: Sequence[int] | np.ndarray) -> PooledRows:
        """The rows at these places, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        labels, teacher = (None if column is None else column[indices] for column in (self.labels, self.teacher))
        return PooledRows(self.pooled[indices], labels, teacher)


def _flat(rows: datasets.Dataset, column: str, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists as one array, and where each list begins in it."""
    array = rows.with_format(None).data.table.column(column).combine_chunks()
    array = array.flatten() if apart else array
    starts = np.asarray(array.offsets)
    return np.asarray(array.flatten()), starts - starts[0]
