"""Reads labels. Files, other datasets and batches follow the same rules."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..errors import MinBertError
from ..model.inference import LONE_SURROGATE
from ..model.spans import SEPARATORS, joined
from ..settings.tasks import Task

logger = logging.getLogger(__name__)


#: A class id, a score, or a 0 or 1 for each of a task's labels.
Label = int | float | list[float]


def label_value(task: Task, value: Any, where: str) -> Any:
    """Converts a label to the type of the task: a class id (`int`), a score (`float`), or for `kind: labels` a list.

    Args:
        value: one of the following. Scalars of numpy and torch are accepted too.

            - a number: a class id or a score.
            - text: the name of a label, or a number (`"4 "` and `"1.0"` are class ids too). If the names themselves
              are numbers other than the ids, such as `"1"` to `"5"`, the text is read as a name.
            - a boolean, or the words true and false in any case if they are not label names: the label with that name.
              If neither of two labels is named so, false is 0 and true is 1, and this is logged.
            - for `kind: labels`: text with the names or ids of the row's labels, separated by the task's
              `label_delimiter`; a list of names or ids; or a list of floats or booleans, one for each label.
        where: the place that an error names, such as `dev.csv, line 7`.

    Raises:
        MinBertError: the value is none of these, is not finite, is not a whole number although a class is needed, or
            is out of range. On a GPU, a class id out of range would cause an assert far from its cause.
    """
    if task.traits.is_set:
        return _set_value(task, value, where)
    value = _plain(value)
    if isinstance(value, str) and value.strip() in task.labels:
        return task.labels.index(value.strip())
    if (boolean := _boolean(value)) is not None:
        return _of_boolean(task, boolean, value, where)
    number = _number(value)
    if task.traits.is_score:
        low, high = task.bounds
        # a bound that went through float32 may come back a rounding outside
        if low <= number <= high or any(math.isclose(number, bound, rel_tol=2**-23) for bound in task.bounds):
            return min(max(number, low), high)
    elif (id_ := _class_id(task, value)) is not None:
        return id_
    raise _no_label(task, value, where)


def _class_id(task: Task, value: Any) -> int | None:
    """Returns the class id of a number, or of a text with a number."""
    number = _number(value)
    if isinstance(value, str) and names_only(task):
        named = [place for place, name in enumerate(task.labels) if _number(name) == number]
        return named[0] if len(named) == 1 else None
    return int(number) if number % 1 == 0 and 0 <= number < len(task.labels) else None


def _set_value(task: Task, value: Any, where: str) -> list[float]:
    """A 0 or 1 for each label."""
    value = _as_list(value)
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(task.label_delimiter)] if value.strip() else []
    elif not isinstance(value, list | tuple):
        raise _no_label(task, value, where)
    elif len(value) == len(task.labels) and all(type(item) in (bool, float) and item in (0, 1) for item in value):
        return [*map(float, value)]
    else:
        parts = [*map(_plain, value)]
        named = all(isinstance(part, str) and part in task.labels for part in parts)
        if len(parts) == len(task.labels) and not named and all(_number(part) in (0, 1) for part in parts):
            raise MinBertError(
                f"{where}: {parts} is ambiguous: two labels, or a 0 or 1 for each label. Write the names of the "
                f"row's labels, or give each label a column of its own, as `columns: {{label: [...]}}`."
            )
    found = [0.0] * len(task.labels)
    for part in parts:
        if isinstance(part, str) and part in task.labels:
            id_ = task.labels.index(part)
        else:
            id_ = None if isinstance(part, bool) else _class_id(task, part)
        if id_ is None:
            raise _no_label(task, part, where)
        if found[id_]:
            raise MinBertError(f"{where}: the label {task.labels[id_]!r} is given twice. Name each label once.")
        found[id_] = 1.0
    return found


def flag_value(task: Task, value: Any, where: str) -> float:
    """Reads a cell of a label's own column: 0 or 1, or a boolean. Raises `MinBertError` for anything else."""
    value = _plain(value)
    boolean = _boolean(value)
    number = _number(value) if boolean is None else float(boolean)
    if number not in (0, 1):
        raise MinBertError(f"{where}: a label of task {task.name!r} must be 0 or 1. Found {value!r:.50}.")
    return number


def tag_values(task: Task, tags: Any, where: Callable[[int], str], of_class: Sequence[float] = ()) -> list[int]:
    """Returns the class ids of a sentence's words.

    Args:
        tags: a label for each word, as for `label_value`; a list, or a text with spaces in between.
        where: returns the place that an error names, from the number of a word.
        of_class: the result of `class_values`, if the tags are ids of a column that names its classes.

    Raises:
        MinBertError: as `label_value`; or `tags` is not a list.
    """
    if isinstance(tags, str):
        tags = _parts(tags)
    if not isinstance(tags, list | tuple | np.ndarray):
        raise MinBertError(
            f"{where(0)}: the tags of task {task.name!r} must be a list, one for each word. Found {tags!r:.50}."
        )
    ids = {name: number for number, name in enumerate(task.labels)}
    found = []
    for word, tag in enumerate(tags):
        value = ids.get(tag) if isinstance(tag, str) else None
        if value is None:
            known = type(tag) is int and 0 <= tag < len(of_class)
            value = int(label_value(task, of_class[tag] if known else tag, where(word)))
        found.append(value)
    return found


def sentence_of(task: Task, cell: Any, where: str) -> str:
    """Returns a sentence's words as one text, `spans.joined`; "" for a sentence without words.

    Args:
        cell: a list of words, or a text with `spans.SEPARATORS` between them.
        where: the place that an error names.

    Raises:
        MinBertError: the cell is neither, or a word is blank or not a string.
    """
    words = _parts(cell) if isinstance(cell, str) else cell
    if not isinstance(words, list | tuple | np.ndarray):
        raise MinBertError(f"{where}: a sentence of task {task.name!r} must be a list of words. Found {cell!r:.50}.")
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word.strip() or LONE_SURROGATE.search(word):
            raise MinBertError(f"{where}: word {number} must be text that is not blank. Found {ascii(word):.50}.")
    return joined(words)


def _parts(text: str) -> list[str]:
    return [part for part in re.split(f"[{SEPARATORS}]+", text) if part]


def no_words(task: Task, where: str) -> MinBertError:
    return MinBertError(
        f"{where}: a sentence of task {task.name!r} must be a list of words, one or more, to train on or to score. "
        f"Found none. Delete the row."
    )


def check_tags(task: Task, tags: int, words: int, where: str) -> None:
    """Raises `MinBertError` unless there are as many tags as words."""
    if tags != words:
        raise MinBertError(f"{where}: task {task.name!r} needs a tag for each word. Found {words} words, {tags} tags.")


def _no_label(task: Task, value: Any, where: str) -> MinBertError:
    hint = ""
    if _boolean(value) is not None and task.traits.is_class:
        hint = " A boolean needs a task with two labels: true and false, or two other words."
    elif isinstance(value, str) and "," in value and is_number(value.replace(",", ".")):
        hint = " Write numbers with a decimal point."
    elif isinstance(value, str) and (mark := _separator_in(task, value)):
        if task.traits.is_set:
            hint = f" These are several labels with {mark!r} between them: set `label_delimiter: {mark!r}`."
        else:
            hint = (
                f" These are several labels with {mark!r} between them. For rows with several labels, use "
                f"`kind: labels` and `label_delimiter: {mark!r}`."
            )
    found = repr(value) if isinstance(value, str) else str(value)
    return MinBertError(
        f"{where}: a label of task {task.name!r} must be {allowed_labels(task)}. Found {found:.50}.{hint}"
    )


def _separator_in(task: Task, text: str) -> str | None:
    """The character that separates a text into labels of the task, or `None`."""
    for mark in ",;|/+ ":
        parts = [part.strip() for part in text.split(mark)]
        if len(parts) > 1 and all(part in task.labels for part in parts):
            return mark
    return None


def _boolean(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"false": False, "true": True}.get(value.strip().casefold())
    return value if isinstance(value, bool) else None


def _of_boolean(task: Task, boolean: bool, value: Any, where: str) -> int:
    spelled = [label.casefold() for label in task.labels]
    if spelled.count("true") == spelled.count("false") == 1:
        return spelled.index(str(boolean).casefold())
    if {"true", "false"} & {*spelled} or len(task.labels) != 2 or names_only(task):
        raise _no_label(task, value, where)
    _say_booleans(task.name, *task.labels)
    return int(boolean)


@cache  # once, however many rows and files
def _say_booleans(task: str, first: str, second: str) -> None:
    logger.warning("Task %r has boolean labels: false is read as 0 = %s, and true as 1 = %s.", task, first, second)


def names_only(task: Task) -> bool:
    """Whether the name of one label could be read as the id of another."""
    return any(is_number(name) and name != str(place) for place, name in enumerate(task.labels))


def allowed_labels(task: Task) -> str:
    """Describes the task's labels in an error message."""
    if task.traits.is_score:
        return f"a number from {task.bounds[0]:g} to {task.bounds[1]:g}"
    if names_only(task):
        return f"one of the names {', '.join(task.labels)} (class ids are not accepted, because the names are numbers)"
    names = ", ".join(f"{number} = {name}" for number, name in enumerate(task.labels))
    return f"a whole number from 0 to {len(task.labels) - 1}, or its name ({names})"


def class_values(task: Task, names: list[str], where: str) -> Sequence[float]:
    """Returns the value that `label_value` reads for each class id of a column that names its classes.

    For a score, these are the names as numbers, or the ids if the names are words. For classes, these are the task's
    ids. They are matched by name, ignoring case. If the task has none of the names, they are matched by position.

    Raises:
        MinBertError: the numbers of classes differ, or a name has different ids in the column and the task.
    """
    ids = list(range(len(names)))
    if task.traits.is_score:
        return [*map(_number, names)] if all(map(is_number, names)) else ids
    are_ids = {*names} == {*map(str, range(len(task.labels)))}
    known = [_known(task, name, are_ids, where) for name in names]
    found = [own for own in known if own is not None]
    if len({*found}) == len(names):
        return found
    moved = [name for name, own, id_ in zip(names, known, ids, strict=True) if own not in (None, id_)]
    if moved or len(names) != len(task.labels):
        raise MinBertError(
            f"{where}: its classes are {', '.join(names)}, and the labels of task {task.name!r} are "
            f"{', '.join(task.labels)}. Give the task `labels` with these names, or in this order and number."
        )
    return ids


def _known(task: Task, name: str, are_ids: bool, where: str) -> int | float | None:
    """Returns the task's id of the class with this name, or `None`."""
    for names, wanted in ((task.labels, name), ([label.casefold() for label in task.labels], name.casefold())):
        if names.count(wanted) == 1:
            return names.index(wanted)
    return label_value(task, name, where) if are_ids or _boolean(name) is not None else None


def is_number(text: str) -> bool:
    return not math.isnan(_number(text))


def _as_list(value: Any) -> Any:
    """Converts an array of numpy or torch to a list. Other values are not changed."""
    try:
        return value.tolist()
    except AttributeError:
        return value


def _plain(value: Any) -> Any:
    """Converts a scalar of numpy or torch to one of Python."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # it is one, or holds several
        return value


def _number(value: Any) -> float:
    """Returns the value as a float, and NaN if it is not a number."""
    if isinstance(value, bytes | bytearray):  # which float() takes
        return math.nan
    try:
        # float() reads "1_0" as ten
        return math.nan if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
