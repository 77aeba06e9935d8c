"""Keys with dots, which reach into a recipe's mappings and lists: `tasks.sst.head`, `stages.heads.max_steps`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MinBertError, unknown_name

#: What a recipe without a line of that key stands for, where a dotted key may reach into it.
USUAL_TASKS = ("sst", "para", "sts")


@dataclass(frozen=True)
class Value:
    """A value as read, and the characters it was read from (`None` for lists and mappings)."""

    value: Any
    text: str | None


def set_key(values: dict[str, Value], key: str, raw: Any, where: str) -> None:
    """Sets a key of a recipe, in place.

    A mapping is merged into the one that is there, and `None` takes the part away. A stage goes by its name, or its
    number from 1; another list's entry by its place from 0.

    Args:
        key: with dots, or a plain one, whose line is replaced.
        where: begins an error.

    Raises:
        MinBertError: the key leads into something that is not there or has no parts.
    """
    first, *path = _parts(values, key, where)
    whole = copy.deepcopy(raw)
    if path:
        whole = _tree(values, first)
        whole = _with(whole, path, copy.deepcopy(raw), where)
    values[first] = Value(whole, None if isinstance(whole, list | dict) else _as_text(whole))


def value_of(values: Mapping[str, Value], key: str, where: str) -> Any:
    """What a recipe says of a key; `None` where it says nothing."""
    first, *path = _parts(values, key, where)
    tree = _tree(values, first)
    for name in path:
        if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
            tree = tree[int(name)]
        elif isinstance(tree, dict):
            tree = tree.get(name)
        else:
            return None
    return tree


def stage_names(stages: Sequence[Any]) -> list[str]:
    """What the stages of a recipe are called: by their `name`, or by their number from 1."""
    given = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    return [str(number if name is None else name) for number, name in enumerate(given, 1)]


def stage_place(stages: Any, name: str, where: str) -> int:
    """The place from 0 of a stage in a recipe's `stages`. Raises `MinBertError`, which begins with `where`."""
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise MinBertError(f"{where}: the recipe has no list of `stages`. Leave `stages.{name}.` out.")
    names = stage_names(stages)
    if name not in names:
        raise MinBertError(f"{where}: {unknown_name('stage', name, names)}")
    return names.index(name)


def _parts(values: Mapping[str, Value], key: str, where: str) -> list[str]:
    """A key's way into the recipe, with the place of a stage instead of its name."""
    first, *path = key.split(".")
    if first == "stages" and path:
        if len(path) == 1 or not path[1]:
            raise MinBertError(f"{where} names no key of a stage. Write for example stages.{path[0]}.max_steps=2.")
        path[0] = str(stage_place(values["stages"].value if "stages" in values else None, path[0], where))
    return [first, *path]


def _tree(values: Mapping[str, Value], key: str) -> Any:
    """The value of a recipe's line; a list of tasks as the mapping that it stands for."""
    value = copy.deepcopy(values[key].value) if key in values else None
    if key not in ("tasks", "held_out") or isinstance(value, dict):
        return value
    names = USUAL_TASKS if value is None else [value] if isinstance(value, str) else value
    return dict.fromkeys(names)


def _with(tree: Any, path: Sequence[str], raw: Any, where: str) -> Any:
    """The tree with `raw` at the end of the path."""
    if not path:
        return {**tree, **raw} if isinstance(tree, dict) and isinstance(raw, dict) else raw
    name, *rest = path
    if tree is None:
        tree = {}
    if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
        tree[int(name)] = _with(tree[int(name)], rest, raw, where)
    elif isinstance(tree, dict):
        tree[name] = _with(tree.get(name), rest, raw, where)
        if raw is None and not rest:
            del tree[name]
    else:
        raise MinBertError(f"{where} asks for {name!r} in {tree!r}, which has no such part.")
    return tree


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
