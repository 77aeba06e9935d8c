"""Splits the dev rows into a part that selects the best model and a part that it is evaluated on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..errors import MinBertError

if TYPE_CHECKING:
    import datasets


def chosen_and_rest(
    rows: datasets.Dataset, share: float | None, task: str
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits the dev rows into those that select the best model and those for the scores.

    Without a share, both are all rows. The split depends only on the rows' ids, so it is the same for all runs and
    seeds. Both parts keep the order of the rows.

    Args:
        rows: the result of `load_split`, with an `id`.
        share: the share of the rows that select the model, between 0 and 1.
        task: the name of the task, for the error.

    Raises:
        MinBertError: a part has no rows.
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
