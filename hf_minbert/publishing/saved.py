"""Reads from a model's folder how the model was made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data.files import HUB, SAMPLE
from ..data.hub import is_hub_id, is_known, licence_of, on_hub
from ..errors import MinBertError, explain
from ..pretrained.data import calibration_of, load_plugins
from ..settings.keys import default_of
from ..settings.table import OURS
from ..settings.tasks import TASKS, Source, Task, data_files, get_tasks
from .files import ADAPTER_CONFIG, hub_name, is_local_path, plain_recipe

UNLABELLED = ("unlabelled", "unlabelled_pairs")
COURSE = "the files of Stanford's CS224N default project"


@dataclass(frozen=True)
class Data:
    """Rows that a model was trained on.

    Args:
        task: the task that they were used for.
        name: the dataset's Hub id, or a description of the rows.
        on_hub: whether `name` is a Hub id.
        revision: its commit.
        licence: the licence, if the package knows it.
        files: the names of the files, if the rows come from files.
        config: the dataset's configuration on the Hub.
        dev: the dataset's name of its dev split.
        english: whether its texts are known to be English.
    """

    task: str
    name: str
    on_hub: bool = False
    revision: str | None = None
    licence: str = "unknown"
    files: tuple[str, ...] = ()
    config: str | None = None
    dev: str = "dev"
    english: bool = False


@dataclass(frozen=True)
class SavedModel:
    """A saved model with the records in its folder. A missing record is empty.

    Args:
        tasks: the model's tasks by name. An encoder that was only pre-trained has none.
        recipe: the lines of `recipe.yaml`, with plain values.
        calibration: the record of `minbert calibrate`, for temperatures and thresholds that the model still has.
        merge: the record of `minbert average` or `ensemble`: what the model was made from.
    """

    folder: Path
    config: dict[str, Any]
    tasks: dict[str, Task]
    recipe: dict[str, Any]
    metrics: dict[str, Any]
    environment: dict[str, Any]
    merge: dict[str, Any]
    calibration: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> SavedModel:
        """Reads a folder. Raises `MinBertError` if it has no model of this package, or a record is damaged."""
        if not (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file():
            raise MinBertError(
                f"The folder {folder} holds no model: it has no config.json. Give that of a finished run, or of "
                f"another model that this package saved."
            )
        load_plugins(folder)
        config = _read(folder / "config.json")
        if config and config.get("model_type") != "minbert":
            raise MinBertError(
                f"The model in {folder} is not one of this package: its config.json says "
                f"{config.get('model_type')!r}. Give the folder of a finished run."
            )
        with explain(f"Reading the tasks of {folder}", "Give the folder of a finished run."):
            tasks = {saved["name"]: Task.from_config(saved) for saved in config.get("tasks") or ()}
        recipe = folder / "recipe.yaml"
        records = (_read(folder / f"{name}.json") for name in ("metrics", "environment", "merge"))
        fitted = calibration_of(folder, tasks)
        return cls(folder, config, tasks, plain_recipe(recipe) if recipe.is_file() else {}, *records, fitted)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Returns the recipe of each stage, or of the single run. Empty without a recipe."""
        whole = {key: value for key, value in self.recipe.items() if key != "stages"}
        stages = self.recipe.get("stages") or ([{}] if whole else [])
        return [{**whole, **stage} for stage in stages]

    @property
    def teachers(self) -> list[str | dict[str, Any]]:
        """Returns the entries of `teachers`, each once: saved models, and recipes that were trained first."""
        entries = [entry for run in self.runs for entry in run.get("teachers") or ()]
        return [entry for place, entry in enumerate(entries) if entry not in entries[:place]]

    def without_labels(self, task: str) -> dict[str, Any]:
        """Returns the keys of a task, with their values, that add training rows without labels."""
        found: dict[str, Any] = {}
        for run in self.runs:
            for each in get_tasks(run.get("tasks") or default_of(OURS["tasks"])):
                if each.name == task:
                    found |= {key: value for key in UNLABELLED if (value := getattr(each, key))}
        return found

    @property
    def parents(self) -> list[str]:
        """Returns the models that this one was trained from or merged from, as folders or Hub ids. A base is last."""
        names = [*(self.merge.get("kept") or self.merge.get("models") or ())]
        names += [self.merge["base"]] if "base" in self.merge else []
        if not names and "model_name_or_path" in self.recipe:
            names = [self.recipe["model_name_or_path"]]
        return names

    def bases(self) -> list[str]:
        """Returns the original checkpoints of the model, found by following the folders of other runs."""
        found = (name for saved in self.line() for name in saved.parents if _folder(name, saved.folder) is None)
        return [*dict.fromkeys(map(hub_name, found))]

    def line(self) -> Iterator[SavedModel]:
        """Returns this model and the models that it comes from, as far as they are available here."""
        yield self
        for name in self.parents:
            folder = _folder(name, self.folder)
            if folder is not None:
                yield from SavedModel.of(folder).line()

    def data(self) -> list[Data]:
        """Returns the training data of this model and of the models that it comes from."""
        found = [data for saved in self.line() for run in saved.runs for data in _data_of(run)]
        return [*dict.fromkeys(found)]


def _folder(name: str, child: Path) -> Path | None:
    """The folder of a model of this package that `name` means, if it is here and is not the child itself."""
    folder = Path(name)
    if not (folder / "config.json").is_file() or folder.resolve() == child.resolve():
        return None
    return folder if _read(folder / "config.json").get("model_type") == "minbert" else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with explain(f"Reading {path}", "Correct it, or remove it from the folder."):
        return json.loads(path.read_text(encoding="utf-8"))


def _data_of(run: dict[str, Any]) -> Iterator[Data]:
    """Returns the training rows of one run's recipe. For masked language modelling, these are its texts."""
    data_dir = run.get("data_dir")
    tasks = {task.name: task for task in get_tasks(run.get("tasks") or default_of(OURS["tasks"]))}
    trained = run.get("train_tasks") or list(tasks)
    for name in [trained] if isinstance(trained, str) else trained:
        task = tasks[name]
        if task.files or task.dataset or data_dir:
            yield _own(task, data_dir)
        for source in task.sources:
            yield _borrowed(task, source, tasks, data_dir)
        if task.unlabelled is not None:
            files = tuple(Path(file.path).name for file in data_files(task.unlabelled))
            yield Data(f"{task.name}, without labels", "files of its own", files=files)
    for text in run.get("mlm_texts") or ():
        if text != "tasks" and run.get("objective") == "mlm":
            yield Data("(masked words)", "texts of its own", files=(Path(text).name,))


def _own(task: Task, data_dir: str | None) -> Data:
    if task.dataset is None and data_dir == SAMPLE and task.name in TASKS:
        return Data(task.name, "the sample in hf_minbert", licence="Apache-2.0, as the package", english=True)
    if task.dataset is None and (data_dir == HUB or not task.files):
        task = on_hub(task)
    if task.dataset is not None:
        if is_local_path(task.dataset) or not is_hub_id(task.dataset):
            return Data(task.name, "a dataset of its own", files=(Path(task.dataset).name,))
        name = task.dataset + (f" ({task.dataset_config})" if task.dataset_config else "")
        return Data(
            task.name, name, True, task.dataset_revision, licence_of(task.dataset), config=task.dataset_config,
            dev=task.splits.get("dev", "validation"), english=is_known(task.dataset),
        )  # fmt: skip
    files = tuple(Path(file.path).name for file in data_files(task.files["train"])) if "train" in task.files else ()
    known = task.name in TASKS and task.files == TASKS[task.name].files
    return Data(task.name, COURSE if known else "files of its own", files=files, english=known)


def _borrowed(task: Task, source: Source, tasks: dict[str, Task], data_dir: str | None) -> Data:
    if source.task is not None:
        lender = {**TASKS, **tasks}[source.task]
        return replace(_own(lender, data_dir), task=f"{task.name}, from {source.task}")
    if source.dataset is not None and is_hub_id(source.dataset) and not is_local_path(source.dataset):
        name = source.dataset + (f" ({source.dataset_config})" if source.dataset_config else "")
        known = is_known(source.dataset)
        return Data(
            task.name, name, True, source.dataset_revision, licence_of(source.dataset), english=known
        )  # fmt: skip
    return Data(task.name, "files of its own", files=tuple(Path(part).name for part in source.name.split(", ")))
