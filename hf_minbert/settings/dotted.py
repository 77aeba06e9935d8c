"""Keys with dots, which set parts of a recipe's mappings and lists: `tasks.sst.head`, `stages.heads.max_steps`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import MinBertError, unknown_name
from .keys import default_of
from .table import OURS
from .tasks import TASKS, DataFile, Source, Task

MISSING = object()
#: Keys that hold tasks: a list of names stands for a mapping of them to nothing.
OF_TASKS = ("tasks", "held_out")


@dataclass(frozen=True)
class Value:
    """A value as read, and its original characters (`None` for lists and mappings)."""

    value: Any
    text: str | None


def as_value(raw: Any) -> Value:
    """Wraps a value that was not read from its own line."""
    return Value(raw, None if isinstance(raw, list | dict) else _as_text(raw))


def set_key(values: dict[str, Value], key: str, raw: Any, where: str, *, absent: bool = False) -> None:
    """Sets a key of a recipe, in place.

    A mapping is merged into the existing one, and `None` removes the part. If the recipe does not have the key, its
    default is changed. If a stage does not have it, the recipe's value is changed for that stage. A stage is named by
    its name, or its number from 1; an entry of another list by its index from 0.

    Args:
        key: with dots, or a plain key whose line is replaced.
        where: the beginning of an error.
        absent: `None` may be given for a part that does not exist and is not a field of a task.

    Raises:
        MinBertError: the key names something that does not exist or has no parts.
    """
    first, *path = key.split(".")
    if first == "stages" and path:
        _set_in_stage(values, path, raw, where, absent)
    elif not path:
        values[first] = as_value(copy.deepcopy(raw))
    elif raw is not None or _is_there(values, first, path, where, absent):
        values[first] = as_value(_with(_line(values, first, path, where), path, copy.deepcopy(raw), where))


def value_of(values: Mapping[str, Value], key: str, where: str) -> Any:
    """Returns a recipe's value of a key, or a stage's value of `stages.<name>.<key>`; `None` if it is not set."""
    first, *path = key.split(".")
    if first == "stages" and path:
        return value_of(_stage(values, path, where)[1], ".".join(path[1:]), where)
    found = _found(values, key, where)
    return None if found is MISSING else found


def set_for_all(values: dict[str, Value], key: str, raw: Any, where: str, *, absent: bool = False) -> None:
    """Sets a key with dots for the recipe and those stages whose own line has that part.

    Raises the errors of `set_key`.
    """
    first, *path = key.split(".")
    stages = values["stages"].value if "stages" in values else None
    stages = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    own = [stage for stage in stages if first in stage]
    # Of a line without the task or the name, another one is not meant; of one with it, a field may be new.
    part = key if raw is None else f"{first}.{path[0]}"
    reached = [stage for stage in own if _found({first: as_value(stage[first])}, part, where) is not MISSING]
    for stage in reached:
        line = {first: as_value(stage[first])}
        set_key(line, key, raw, where)
        stage[first] = line[first].value
    if raw is not None and own and not reached and len(own) == len(stages):
        raise MinBertError(
            f"{where}: each stage has a line `{first}` of its own, and none has {path[0]!r} there. Write for example "
            f"stages.{stage_names(own)[0]}.{key}."
        )
    if raw is not None or not reached or _found(values, key, where) is not MISSING:
        set_key(values, key, raw, where, absent=absent)


def in_order(keys: Mapping[str, Any]) -> list[str]:
    """Orders keys with dots for setting them: keys of stages last, and removals from lists from the end."""

    def order(key: str) -> tuple[bool, list[int]]:
        places = key.split(".")
        entry = keys[key] is None and places[-1].isdecimal()
        return places[0] == "stages", [-int(place) if place.isdecimal() else 0 for place in places if entry]

    return sorted(keys, key=order)


def stage_names(stages: Sequence[Any]) -> list[str]:
    """Returns the names of the stages of a recipe: their `name`, or their number from 1."""
    given = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    return [str(number if name is None else name) for number, name in enumerate(given, 1)]


def stage_recipes(values: Mapping[str, Value]) -> list[tuple[str, dict[str, Value]]]:
    """Returns name and recipe of each stage: the lines outside `stages`, overridden by its own.

    Empty without stages.
    """
    stages = values["stages"].value if "stages" in values else None
    common = {key: value for key, value in values.items() if key != "stages"}
    own = [{key: as_value(line) for key, line in stage.items() if key != "name"} for stage in stages or ()]
    return [(name, common | lines) for name, lines in zip(stage_names(stages or ()), own, strict=True)]


def stage_place(stages: Any, name: str, where: str) -> int:
    """Returns the index of a stage in a recipe's `stages`. A `MinBertError` begins with `where`."""
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise MinBertError(f"{where}: the recipe has no list of `stages`. Leave `stages.{name}.` out.")
    names = stage_names(stages)
    if name not in names:
        raise MinBertError(f"{where}: {unknown_name('stage', name, names)}")
    return names.index(name)


def _stage(values: Mapping[str, Value], path: Sequence[str], where: str) -> tuple[int, dict[str, Value]]:
    """The place of a stage, and its own lines."""
    if len(path) == 1 or not path[1]:
        raise MinBertError(f"{where} names no key of a stage. Write for example stages.{path[0]}.max_steps=2.")
    stages: Any = values["stages"].value if "stages" in values else None
    place = stage_place(stages, path[0], where)
    return place, {key: as_value(line) for key, line in stages[place].items()}


def _set_in_stage(values: dict[str, Value], path: Sequence[str], raw: Any, where: str, absent: bool) -> None:
    place, own = _stage(values, path, where)
    lines = {**{key: value for key, value in values.items() if key != "stages"}, **own}
    name = path[1]
    set_key(lines, ".".join(path[1:]), raw, where, absent=absent)
    stages = copy.deepcopy(values["stages"].value)
    if raw is None and len(path) == 2 and name in stages[place] and name not in values:
        del stages[place][name]
    elif name in lines:
        stages[place][name] = lines[name].value
    values["stages"] = Value(stages, None)


def _line(values: Mapping[str, Value], key: str, path: Sequence[str], where: str) -> Any:
    """A copy of a recipe's line, or of the default, as a tree that has the parts of a path."""
    value = copy.deepcopy(values[key].value) if key in values else None
    if value is None and key == "held_out":
        raise MinBertError(
            f"{where}: the recipe has no line `held_out`, whose default depends on the files in `data_dir`. Write it "
            f"whole, such as held_out=[sst, para, sts]."
        )
    if value is None and key in OURS and isinstance(default := default_of(OURS[key]), list):
        value = default
    if key not in OF_TASKS:
        return value
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        value = dict.fromkeys(names)
    name, *inner = path
    if len(inner) > 1 and name in TASKS and isinstance(value, dict) and name in value:
        entry = {} if value[name] is None else value[name]
        if isinstance(entry, dict) and inner[0] not in entry:
            given = getattr(TASKS[name], inner[0], None)
            value[name] = {**entry, inner[0]: [*given] if isinstance(given, tuple) else copy.deepcopy(given)}
    return value


def _found(values: Mapping[str, Value], key: str, where: str) -> Any:
    """Returns the value at this path; `MISSING` if there is none."""
    first, *path = key.split(".")
    if first not in values and not (path and first in OURS):
        return MISSING
    tree = _line(values, first, path, where) if path else values[first].value
    for name in path:
        tree = _part(tree, name)
    return tree


def _part(tree: Any, name: str) -> Any:
    if isinstance(tree, list):
        return tree[int(name)] if name.isdecimal() and int(name) < len(tree) else MISSING
    return tree.get(_own_key(tree, name), MISSING) if isinstance(tree, dict) else MISSING


def _own_key(tree: Mapping[Any, Any], name: Any) -> Any:
    """The mapping's key with the characters of `name`: YAML reads `{100: 4}` as a number."""
    return next((key for key in tree if _as_text(key) == _as_text(name)), name)


def _is_there(values: Mapping[str, Value], first: str, path: Sequence[str], where: str, absent: bool) -> bool:
    """Whether there is a part to remove. Raises `MinBertError` for a name that could not exist there."""
    tree = _line(values, first, path, where)
    for depth, name in enumerate(path):
        above, tree = tree, _part(tree, name)
        if tree is MISSING:
            known = _fields(path[:depth]) if first in OF_TASKS else []
            if absent or name in known:
                return False
            there = above if isinstance(above, dict) else range(len(above)) if isinstance(above, list) else ()
            raise MinBertError(f"{where}: {unknown_name('part', name, {*map(_as_text, there), *known})}")
    return True


def _fields(path: Sequence[str]) -> list[str]:
    """Returns the fields of the task or source at a path in the recipe's tasks."""
    if len(path) == 1:
        return [f.name for f in fields(Task) if f.name != "name"]
    return [f.name for f in fields(Source)] if len(path) == 3 and path[1] == "sources" else []


def _with(tree: Any, path: Sequence[str], raw: Any, where: str) -> Any:
    """The tree with `raw` at the end of the path."""
    if not path:
        if isinstance(tree, dict) and isinstance(raw, dict):
            return {**tree, **{_own_key(tree, key): value for key, value in raw.items()}}
        return raw
    name, *rest = path
    parts = _with_parts(tree, name)
    inner = _part(parts, name)
    if not isinstance(parts, dict) and inner is MISSING:
        raise MinBertError(f"{where} asks for {name!r} in {tree!r}, which has no such part.")
    place = _own_key(parts, name) if isinstance(parts, dict) else int(name)
    if raw is None and not rest:
        del parts[place]
    else:
        parts[place] = _with(None if inner is MISSING else inner, rest, raw, where)
    return parts


def _with_parts(tree: Any, name: str) -> Any:
    """Returns a mapping for a missing value, and for a file's path if one of the file's options is set."""
    if isinstance(tree, str) and name in (f.name for f in fields(DataFile)):
        return {"path": tree}
    return {} if tree is None else tree


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
