"""Dev rows in two parts: those that choose the best model, and those that its scores are of."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..errors import MinBertError

if TYPE_CHECKING:
    import datasets


def chosen_and_rest(
    rows: datasets.Dataset, share: float | None, task: str
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The dev rows that choose, and those that are scored; without a share, all rows are both.

    The parts depend on the rows' ids alone: they are those of every run, whatever its seed. Both keep the rows' order.

    Args:
        rows: of `load_split`, with an `id`.
        share: of the rows, that choose; between 0 and 1.
        task: for the error.

    Raises:
        MinBertError: a part has no row.
    """
    if share is None:
        return rows, rows
    digests = [hashlib.sha256(str(name).encode()).digest() for name in rows[:]["id"]]
    drawn = sorted(range(len(rows)), key=digests.__getitem__)
    cut = round(share * len(rows))
    if not 0 < cut < len(rows):
        raise MinBertError(
            f"`select_on: {share}` leaves {cut} of the {len(rows)} dev rows of {task!r} to choose the model and "
            f"{len(rows) - cut} to score it. Each needs one or more."
        )
    chosen, rest = sorted(drawn[:cut]), sorted(drawn[cut:])
    return rows.select(chosen), rows.select(rest)
