"""What a label may be. One rule for files, for datasets from elsewhere and for batches."""

from __future__ import annotations

import math
from typing import Any

from ..errors import MinBertError
from ..settings.tasks import Task


def label_value(task: Task, value: object, where: str) -> int | float:
    """The label as the task's own type: a class id (`int`) or a score (`float`).

    Args:
        value: a number, which is a class id or a score; or text, which is a label's name or holds such a number
            (`"4 "` and `"1.0"` are class ids too). Where names are numbers themselves, such as `"1"` to `"5"`, and
            not those of the ids, text is a name and nothing else: `"1"` could mean either.
        where: the place to name in the error, such as `dev.csv, line 7`.

    Raises:
        MinBertError: neither a name nor a number, not finite, not a whole number where classes are asked, or out
            of range. A class id out of range would otherwise end in a device-side assert far from its cause.
    """
    if isinstance(value, str) and value.strip() in task.labels:
        return task.labels.index(value.strip())
    number = math.nan if isinstance(value, str) and names_only(task) else _number(value)
    if task.kind == "score":
        low, high = task.bounds
        # a bound that went through float32 may come back a rounding outside
        if low <= number <= high or any(math.isclose(number, bound, rel_tol=2**-23) for bound in task.bounds):
            return min(max(number, low), high)
    elif number % 1 == 0 and 0 <= number < len(task.labels):
        return int(number)
    found = repr(value) if isinstance(value, str) else str(value)
    raise MinBertError(f"{where}: a label of task {task.name!r} must be {allowed_labels(task)}. Found {found}.")


def names_only(task: Task) -> bool:
    """Whether a label's name could be taken for another label's id."""
    return any(not math.isnan(_number(name)) and name != str(place) for place, name in enumerate(task.labels))


def allowed_labels(task: Task) -> str:
    """The task's labels in words, for an error."""
    if task.kind == "score":
        return f"a number from {task.bounds[0]:g} to {task.bounds[1]:g}"
    if names_only(task):
        return f"one of the names {', '.join(task.labels)} (as these are numbers, class ids are not taken)"
    names = ", ".join(f"{number} = {name}" for number, name in enumerate(task.labels))
    return f"a whole number from 0 to {len(task.labels) - 1}, or its name ({names})"


def ids_of(task: Task, names: list[str], where: str) -> list[int]:
    """The task's class id of each class of a column that holds class ids and has names of its own.

    Raises:
        MinBertError: there are more or fewer classes, or a name that both know has another id.
    """
    if set(names) <= set(task.labels):
        return [task.labels.index(name) for name in names]
    moved = [name for number, name in enumerate(names) if name in task.labels and task.labels.index(name) != number]
    if moved or len(names) != len(task.labels):
        raise MinBertError(
            f"{where}: its classes are {', '.join(names)}, and the labels of task {task.name!r} are "
            f"{', '.join(task.labels)}. Give the task `labels` with these names, or in this order and number."
        )
    return list(range(len(names)))


def _number(value: Any) -> float:
    """NaN for what is none."""
    try:
        # float() reads "1_0" as ten
        return math.nan if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
