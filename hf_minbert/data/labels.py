"""What a label may be. One rule for files, for datasets from elsewhere and for batches."""

from __future__ import annotations

import math

from ..errors import MinBertError
from ..tasks import Task


def label_value(task: Task, value: object, where: str) -> int | float:
    """The label as the task's own type: a class id (`int`) or a score (`float`).

    Args:
        value: a number, or text that holds one (`"4 "` and `"1.0"` are class ids too).
        where: the place to name in the error, such as `dev.csv, line 7`.

    Raises:
        MinBertError: not a number, not finite, not a whole number where classes are asked, or out of range.
            A class id out of range would otherwise end in a device-side assert far from its cause.
    """
    try:
        # float() reads "1_0" as ten
        number = math.nan if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if task.kind == "score":
        low, high = task.range
        # a bound that went through float32 may come back a rounding outside
        if low <= number <= high or any(math.isclose(number, bound, rel_tol=2**-23) for bound in task.range):
            return min(max(number, low), high)
    elif number.is_integer() and 0 <= number < len(task.labels):
        return int(number)
    found = repr(value) if isinstance(value, str) else str(value)
    raise MinBertError(f"{where}: a label of task {task.name!r} must be {allowed_labels(task)}. Found {found}.")


def allowed_labels(task: Task) -> str:
    """The task's labels in words, for an error."""
    if task.kind == "score":
        return f"a number from {task.range[0]:g} to {task.range[1]:g}"
    names = ", ".join(f"{number} = {name}" for number, name in enumerate(task.labels))
    return f"a whole number from 0 to {len(task.labels) - 1} ({names})"
