"""The rows of a saved model's tasks, from the places where its run read them.

The recipe in the model's folder names the places, and `environment.json` the folder that the recipe's paths are
relative to. For a merged model, `merge.json` has both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError, explain
from ..model.configuration_minbert import RECIPE, TASK_DEFAULTS, recipe_of
from ..settings import plugins
from ..settings.recipe import read_recipe
from ..settings.tasks import DATA_FIELDS, OWN_DATA, TASKS, Task, get_tasks

if TYPE_CHECKING:
    import datasets

MERGED = "merge.json"  # what a model was made from, in its folder
CALIBRATION = "calibration.json"  # how good probabilities were before they were fitted, and are, in a folder
#: The key under which a run and a merged model note the folder that they read relative paths from. It is never
#: published.
READ_FROM = "read_from"


@dataclass(frozen=True)
class RunData:
    """The data of a saved model.

    Args:
        recipe: the recipe's file; `None` if the model's folder has none, or the model is not in a local folder.
        lines: the recipe's plain values; for a run in stages, those of the last stage that has begun.
        tasks: the recipe's tasks by name, with the places of their data.
        data_dir: the folder that the files are relative to.
        folders: for a merged model, the folder of each task.
    """

    recipe: Path | None
    lines: dict[str, Any]
    tasks: dict[str, Task]
    data_dir: str | None
    folders: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str | Path, data_dir: str | None = None) -> RunData:
        """Reads the data settings from a model's folder.

        Args:
            name: the folder, or a Hub id.
            data_dir: replaces the folder in the recipe.

        Raises:
            MinBertError: the recipe cannot be read.
        """
        recipe = recipe_of(last_stage(Path(name)))
        if recipe is None:
            return cls._of_merged(Path(name), data_dir)
        load_plugins(Path(name))
        lines = {key: value.value for key, value in read_recipe(recipe).items()}
        lines |= (lines.get("stages") or [{}])[-1]  # where the folders of the stages were deleted
        tasks = {task.name: task for task in get_tasks(lines["tasks"])} if lines.get("tasks") else {}
        if data_dir is None:
            data_dir, base = lines.get("data_dir"), _json(recipe.with_name("environment.json")).get(READ_FROM)
            if base is not None and (folder := Path(base, data_dir or "")).is_dir():
                data_dir = str(folder)
        return cls(recipe, lines, tasks, data_dir)

    @classmethod
    def _of_merged(cls, folder: Path, data_dir: str | None) -> RunData:
        """Returns the record of `merged_data`; empty if there is none."""
        noted = _json(folder / MERGED).get("data", {})
        saved = {task["name"]: Task.from_config(task) for task in _json(folder / "config.json").get("tasks") or ()}
        tasks, folders = {}, {}
        for name in noted.keys() & saved.keys():
            tasks[name] = replace(saved[name], **{key: noted[name][key] for key in OWN_DATA if key in noted[name]})
            if data_dir is None and READ_FROM in noted[name]:  # not in one that was published
                folders[name] = noted[name][READ_FROM]
        return cls(folder / MERGED if tasks else None, {}, tasks, data_dir, folders)

    def folder_of(self, task: str) -> str | None:
        """Returns the `data_dir` of a task."""
        return self.folders.get(task, self.data_dir)

    def scored(self, tasks: Iterable[str]) -> list[str]:
        """Returns the model's tasks that the run evaluated: all of them unless the recipe selects some."""
        chosen = self.lines.get("eval_tasks") or list(tasks)
        return [name for name in ([chosen] if isinstance(chosen, str) else chosen) if name in tasks]

    def knows(self, task: str) -> bool:
        """Whether the place of a task's data is known, from the recipe or from the package.

        The package is used for a task that the recipe does not name.
        """
        return task in self.tasks or task in TASKS

    def rows(self, task: Task, split: str) -> datasets.Dataset:
        """Loads the labelled rows of a split; see `hf_minbert.data.files.load_split`.

        With `select_on`, these are the `dev` rows that the run evaluated its model on, without those that selected it.

        Args:
            task: a task of the model. It determines columns and labels; the recipe or the package determines the
                place.

        Raises:
            MinBertError: the place of the rows is unknown, or the rows are missing or invalid.
        """
        from ..data.files import load_split
        from ..data.selection import chosen_and_rest

        if not self.knows(task.name):
            raise MinBertError(
                f"Task {task.name!r} is not one of the package's, and the model's folder has no {RECIPE} that "
                f"names its data. Evaluate it with minbert evaluate --task {task.name} --input FILE."
            )
        known = self.tasks.get(task.name) or TASKS[task.name]
        task = replace(task, **{name: getattr(known, name) for name in DATA_FIELDS})
        try:
            rows = load_split(task, self.folder_of(task.name), split, labelled=True)
            return chosen_and_rest(rows, self.lines.get("select_on") if split == "dev" else None, task.name)[1]
        except MinBertError as error:
            if self.recipe is None:
                raise
            raise MinBertError(
                f"{error} {self.recipe} names these rows. If they have moved, give their folder by --data-dir, or "
                f"correct a full path in that file."
            ) from error


def load_plugins(folder: Path) -> None:
    """Imports the plugins of the run in a folder, or of the models that a merged model was made from.

    Works as `hf_minbert.settings.plugins.load_saved`: a copy in the folder is never imported, and a missing plugin is
    not an error yet.
    """
    recipe, merge = recipe_of(folder), folder / "merge.json"
    if recipe is not None:
        given = read_recipe(recipe).get("plugins")
        plugins.load_saved(given.value or () if given else (), folder)
    if merge.is_file():
        with explain(f"Reading {merge}", "Correct it, or take it out of the folder."):
            models = json.loads(merge.read_text(encoding="utf-8")).get("models", ())
        for name in models:
            if Path(name).resolve() != folder.resolve():
                load_plugins(Path(name))


def common_base(names: Sequence[str]) -> tuple[str, str | None]:
    """Returns the checkpoint that the runs started from, by their recipes: a folder or Hub id, and its revision.

    For a run in stages it is the checkpoint before the first stage, unless a later stage names another.

    Args:
        names: the folders of the runs.

    Raises:
        MinBertError: a run has no recipe with a checkpoint, or the runs started from different ones.
    """
    bases = [_base_of(name) for name in names]
    for name, base in zip(names, bases, strict=True):
        if base != bases[0]:
            first, other = (f"{found}{f' ({revision})' if revision else ''}" for found, revision in (bases[0], base))
            raise MinBertError(
                f"{names[0]} was trained from {first} and {name} from {other}, so their task vectors cannot be "
                "added. Give runs from one checkpoint. If both are the same weights, name them by --base."
            )
    return bases[0]


def _base_of(name: str) -> tuple[str, str | None]:
    recipe = recipe_of(Path(name))
    lines = {} if recipe is None else {key: value.value for key, value in read_recipe(recipe).items()}
    named = [stage for stage in lines.get("stages") or () if stage.get("model_name_or_path")]
    lines |= named[-1] if named else {}
    base = lines.get("model_name_or_path")
    if recipe is None or base is None:
        raise MinBertError(
            f"{name} has no {RECIPE} here that says what the model was trained from. Name it with --base: a "
            f"folder or a Hub id."
        )
    folder = Path(_json(recipe.with_name("environment.json")).get(READ_FROM, ""), base)
    return str(folder.resolve()) if folder.is_dir() else base, lines.get("model_revision")


def merged_data(members: Iterable[RunData], tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the data settings for `merge.json`. For each task, the first member with the task in its recipe decides.

    The settings are copied, because the members' folders may be moved or deleted later.
    """
    first = {name: member for member in reversed([*members]) for name in member.tasks}
    noted: dict[str, dict[str, Any]] = {}
    for name in (name for name in tasks if name in first):
        noted[name] = {key: value for key in OWN_DATA if (value := getattr(first[name].tasks[name], key))}
        if (folder := first[name].folder_of(name)) is not None:
            noted[name][READ_FROM] = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    return noted


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with explain(f"Reading {path}", "Correct it, or take it out of the folder."):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def calibration_of(folder: Path, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Returns the entries of `CALIBRATION` for tasks that still have the fitted values.

    Further training may change them.
    """
    older = {"notes": [], "was": {key: TASK_DEFAULTS[key] for key in ("temperature", "thresholds")}}  # lacks these
    return {
        name: older | found
        for name, found in _json(folder / CALIBRATION).items()
        if name in tasks
        and (found["temperature"], found["thresholds"]) == (tasks[name].temperature, tasks[name].own_thresholds)
    }


def last_stage(folder: Path) -> Path:
    """Returns the folder of a run's last stage that has begun, or the run's own folder if it has none."""
    begun = [path for _, path in stage_folders(folder) if (path / RECIPE).is_file()]
    return begun[-1] if begun else folder


def stage_folders(folder: Path) -> list[tuple[str, Path]]:
    """Returns the name and folder of each stage of a run that has begun, in their order."""
    numbered = [(re.fullmatch(r"(\d+)-(.+)", path.name), path) for path in (folder / "stages").glob("*")]
    folders = sorted((int(found[1]), found[2], path) for found, path in numbered if found and path.is_dir())
    return [(name, path) for _, name, path in folders]
