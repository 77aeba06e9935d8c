"""Teachers that a recipe trains before the student: entries of `teachers` that name a recipe.

    teachers:
      - runs/ensemble                                   # a saved model, its folder or Hub id
      - {recipe: cs224n/baseline, keys: {tasks.sst.pooling: mean}, seeds: 2}
      - {recipe: teacher.yaml, name: large, keys: {model_name_or_path: google-bert/bert-large-uncased}}

An entry has the form of a row of a study; its keys are the fields of `Teacher`.

A teacher's recipe defines its training. The student's checkpoint, data and machine settings override the recipe's own
lines: all keys with the trait `of_teachers`, and the places of the rows of common tasks. The entry's `keys` override
both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MinBertError
from .dotted import Value, as_value, stage_recipes
from .recipe import override, read_recipe
from .study import check_keys, check_name, read_keys, read_mapping, read_seeds
from .table import names
from .tasks import OWN_DATA

#: Keys that the student's recipe does not replace by its own: one is the name of its run, the other adds up.
OWN = ("run_name", "plugins")


@dataclass(frozen=True)
class Teacher:
    """A recipe that is trained to teach.

    Args:
        recipe: the path of a recipe, also relative to the student's recipe, or the name of a recipe of the package.
        name: the name of the teacher's folder; the last part of the recipe's name by default.
        keys: changed keys of the recipe, with dots, as in a row of a study.
        seeds: the number of seeds (1, 2 and so on), or a list of them. One model is trained with each; 1 by default.
    """

    recipe: str | Mapping[str, Any]  # its lines where `with_teachers_read` has read them
    name: str
    keys: Mapping[str, Any]
    seeds: tuple[int, ...]

    def values(self, student: Mapping[str, Value]) -> dict[str, Value]:
        """Returns its recipe, with the values that it takes from the student's.

        Raises:
            MinBertError: as `read_recipe`; or its recipe trains teachers too.
        """
        if isinstance(self.recipe, str):
            values = read_recipe(self.recipe)
        else:
            values = {key: as_value(raw) for key, raw in copy.deepcopy({**self.recipe}).items()}  # changed in place
        handed_on = {key: student[key] for key in names(among=student, of_teachers=True) if key not in OWN}
        override(values, handed_on | _places(student, values), absent=True)
        override(values, {key: as_value(raw) for key, raw in self.keys.items()}, absent=True)
        plugins = [name for of in (student, values) if "plugins" in of for name in of["plugins"].value or ()]
        if plugins:
            values["plugins"] = as_value([*dict.fromkeys(plugins)])
        if any(isinstance(entry, dict) for entry in _entries(values)):
            raise MinBertError("its recipe trains teachers of its own. Name saved models there.")
        return {key: value for key, value in values.items() if value.value is not None}


def _entries(values: Mapping[str, Value]) -> list[Any]:
    """Returns the entries of `teachers` in a recipe and its stages."""
    lines = [values, *(recipe for _, recipe in stage_recipes(values))]
    found = [of["teachers"].value for of in lines if "teachers" in of]
    return [entry for entries in found if isinstance(entries, list) for entry in entries]


def _places(student: Mapping[str, Value], teacher: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the data settings of the student, by keys with dots, for the tasks that the teacher has too."""
    chosen, known = (of["tasks"].value if "tasks" in of else None for of in (student, teacher))
    if not isinstance(chosen, dict):
        return {}
    return {
        f"tasks.{name}.{key}": as_value(entry[key])
        for name, entry in chosen.items()
        if isinstance(entry, dict) and (known is None or name in known)
        for key in OWN_DATA
        if key in entry
    }


def read_teachers(entries: Sequence[Any]) -> list[str | Teacher]:
    """Reads the entries of `teachers`. Raises `MinBertError` if one is invalid."""
    read = [read_teacher(entry) if isinstance(entry, dict) else entry for entry in entries]
    known: dict[str, Teacher] = {}
    for teacher in (teacher for teacher in read if isinstance(teacher, Teacher)):
        if known.setdefault(teacher.name, teacher) is not teacher:
            raise MinBertError(f"`teachers` has two recipes called {teacher.name!r}. Give one of them another `name`.")
    return read


def read_teacher(entry: dict[str, Any]) -> Teacher:
    """Reads one entry that names a recipe. Raises the errors of `read_teachers`."""
    recipe = entry.get("recipe")
    if not isinstance(recipe, str | dict) or not recipe:
        raise MinBertError(f"`teachers`: an entry must be a saved model or have a `recipe`. Found {entry!r}.")
    name = str(entry.get("name", Path(recipe).stem if isinstance(recipe, str) else ""))
    where = f"Teacher {name!r}"
    check_keys(where, entry, Teacher, without=())
    check_name(where, name)
    keys = read_keys(f"{where}: `keys`", read_mapping(f"{where}: `keys`", entry.get("keys")), by="`seeds` and `name`")
    return Teacher(recipe, name, keys, read_seeds(where, entry.get("seeds", 1)))


def teachers_to_train(values: Mapping[str, Value]) -> dict[str, tuple[Teacher, dict[str, Value]]]:
    """Returns the teachers that a recipe and its stages train, by name, with their recipes.

    Raises:
        MinBertError: an entry or its recipe is wrong, or two stages have different teachers with one name.
    """
    found: dict[str, tuple[Teacher, dict[str, Value]]] = {}
    recipes = [recipe for _, recipe in stage_recipes(values)] or [dict(values)]
    for recipe in recipes:
        entries = recipe["teachers"].value if "teachers" in recipe else None
        if not isinstance(entries, list) or ("objective" in recipe and recipe["objective"].value == "mlm"):
            continue  # what is no list is refused where values become settings
        for teacher in (entry for entry in read_teachers(entries) if isinstance(entry, Teacher)):
            try:
                own = teacher, teacher.values(recipe)
            except MinBertError as error:
                raise MinBertError(f"Teacher {teacher.name!r}: {error}") from error
            if found.setdefault(teacher.name, own) != own:
                raise MinBertError(
                    f"Two stages have different teachers called {teacher.name!r}. Give one of them another `name`."
                )
    return found
