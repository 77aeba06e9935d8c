"""A run that a command starts among others: its recipe, its folder, and a check that they belong together.

The rows of a study and the teachers of a recipe are such runs. `hf_minbert.run.workers` carries them out.
"""

from __future__ import annotations

import shutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MinBertError
from ..settings.complete import differing_parts
from ..settings.dotted import Value
from ..settings.recipe import read_recipe, split_recipe, with_teachers_read, write_recipe
from ..settings.run import RunSettings
from ..settings.table import names
from ..training.args import MultiTaskTrainingArguments
from .folder import plain
from .workers import FINISHED, RECIPE, failure


@dataclass(frozen=True)
class Run:
    """A row or a teacher, with a seed.

    Args:
        values: its recipe.
    """

    row: str
    seed: int
    folder: Path
    values: dict[str, Value]

    @property
    def name(self) -> str:
        return f"{self.row}, seed {self.seed}"

    @property
    def has_failed(self) -> bool:
        return failure(self.folder) is not None

    @property
    def has_ended(self) -> bool:
        return (self.folder / FINISHED).is_file() or self.has_failed

    @property
    def whole(self) -> str:
        """Returns the same value for runs that are the same training in different folders."""
        return said(self.folder, *split(self.values))

    def write_recipe(self, folder: Path | None = None) -> None:
        """Writes the recipe that the run's process reads."""
        write_recipe((folder or self.folder) / RECIPE, *split(self.values))

    def check_same(self, who: str, remedy: str) -> None:
        """Refuses a folder whose run began with another recipe. A run that failed is cleared.

        Args:
            who: the beginning of the error.
            remedy: the end of the error.
        """
        path = self.folder / RECIPE
        if not path.is_file():
            return
        both = map(with_teachers_read, (read_recipe(path), self.values))
        old, new = ({**vars(s), **g} for s, g in map(split, both))
        for key in names(among={**old, **new}, scope=("run", "seed"), records=False):
            if old.get(key) == new.get(key):
                continue
            if failure(self.folder) is not None:
                shutil.rmtree(self.folder)
                return
            part, then, now = differing_parts(key, old.get(key), new.get(key))[0]
            raise MinBertError(
                f"{who} has {part} = {plain(now)}, and {self.folder} was begun with {plain(then)}. {remedy}"
            )


def split(values: Mapping[str, Value]) -> tuple[RunSettings, dict[str, Any]]:
    """Splits a recipe into settings and training arguments. Raises the errors of `split_recipe`."""
    return split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))


def said(folder: Path, settings: RunSettings, given: Mapping[str, Any]) -> str:
    """Returns what defines a run or a stage, without its folder."""
    keys = {**vars(settings), **given}
    kept = {key: keys[key] for key in names(among=keys, scope=("run", "seed")) if key != "run_name"}
    return repr(sorted(kept.items())).replace(str(folder), "")
