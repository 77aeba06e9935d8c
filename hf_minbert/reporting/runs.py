"""Reads the folder of a finished or unfinished run for a report. Missing parts are noted in sentences."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from ..data.files import read_texts
from ..data.rows import tag_rows
from ..errors import MinBertError, explain
from ..evaluation.submission import EXPECTED, csv_columns, ending
from ..model.inference import ragged
from ..pretrained.adapters import full_options
from ..pretrained.data import RunData, calibration_of, last_stage, stage_folders
from ..run.folder import all_values
from ..settings.complete import differing_parts
from ..settings.dotted import Value, stage_recipes
from ..settings.meaning import meaning
from ..settings.metrics import by_words
from ..settings.recipe import read_recipe, split_recipe, with_teachers_read
from ..settings.table import names
from ..settings.tasks import TASKS, Task, get_tasks
from ..settings.wording import counted
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import checkpoints

#: What tells a run's folder, or that of a merged model, from any other.
SIGNS = ("metrics.json", "log.jsonl", "recipe.yaml", "config.json", "stages")
PREDICTIONS = "predictions"
Entry = dict[str, Any]


@dataclass
class Answers:
    """A model's predictions for the dev rows of a task, with the labels.

    Args:
        task: the task, with the place of its data.
        ids: the ids of the rows, [N].
        values: class ids, int64 [N], or scores, float64 [N]; for `kind: labels` the probabilities; for tags [N] arrays
            [words], -1 for a word that was not read.
        probabilities: float64 [N, C]; C is 0 for a score and for tags.
        labels: class ids or scores, [N]; for `kind: labels` [N, C], 0 or 1; for tags [N] arrays [words]. Empty if the
            data is not available.
        texts: the one or two texts of each row. Empty if the data is not available.
        missing: the reason why `labels` and `texts` are missing.
    """

    task: Task
    ids: list[str]
    values: np.ndarray
    probabilities: np.ndarray
    labels: np.ndarray = field(default_factory=lambda: np.empty(0))
    texts: list[tuple[str, ...]] = field(default_factory=list)
    missing: str = ""

    @property
    def is_score(self) -> bool:
        return self.task.traits.is_score

    @property
    def unit(self) -> str:
        """The name of what has a label: row or word."""
        return "dev word" if self.task.traits.is_tags else "dev row"

    def by_word(self) -> Answers:
        """The answers of a task with tags, with a row for each labelled word."""
        values, labels = by_words(self.values, self.labels)
        return replace(self, values=values, labels=labels)

    @property
    def usable(self) -> bool:
        """Whether there are labels to compare the predictions with."""
        return len(self.labels) > 0 and not self.broken

    @property
    def broken(self) -> int:
        """The number of predictions that are not finite."""
        numbers = self.values[:, None] if self.is_score else self.probabilities  # of tags there are finite ones alone
        return int((~np.isfinite(numbers)).any(axis=1).sum())


@dataclass
class Stage:
    """The log of one stage of a run. A run without stages has one stage without a name.

    Args:
        start: the number of steps in the stages before it.
        log: its log entries, in order.
        metrics: its metrics; `None` if it has not finished.
    """

    name: str
    start: int
    log: list[Entry]
    metrics: Entry | None


@dataclass
class Run:
    """The contents of a run's folder.

    Args:
        name: its name in the report.
        recipe: the values of its recipe.yaml; empty if there is none.
        metrics, environment, config: the contents of metrics.json, environment.json and config.json; empty if missing.
        data: the place of its data.
        answers: the predictions of each task, in the order of the tasks.
        notes: sentences about what is missing or unusual.
        calibration: for each task, what was fitted to its probabilities and answers; see `run.calibrate`.
    """

    path: Path
    name: str
    tasks: dict[str, Task]
    recipe: dict[str, Value]
    metrics: Entry
    environment: Entry
    config: Entry
    stages: list[Stage]
    data: RunData
    answers: dict[str, Answers] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calibration: dict[str, Entry] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        return self.metrics.get("seed", self.environment.get("seed"))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns steps and values that were logged under a name, over all stages.

        Values that are not finite are left out.
        """
        steps, values = [], []
        for stage in self.stages:
            for entry in stage.log:
                if isinstance(entry.get(key), int | float) and np.isfinite(entry[key]) and "step" in entry:
                    steps.append(stage.start + entry["step"])
                    values.append(entry[key])
        return steps, values

    def broken(self) -> dict[str, int]:
        """Returns the names that were logged with a value that is not finite, and the first step of each."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for entry in stage.log:
                for key, value in entry.items():
                    if isinstance(value, float) and not np.isfinite(value):
                        found.setdefault(key, stage.start + entry.get("step", 0))
        return found

    def logged(self) -> list[str]:
        """Returns all names in the log, in the order of their first appearance."""
        return list(dict.fromkeys(key for stage in self.stages for entry in stage.log for key in entry))

    def differences(self, other: Run) -> list[str] | None:
        """Returns the keys in which the recipes differ, and `training rows` if these differ.

        Seeds and paths are ignored. It is `None` if one run has no recipe.
        """
        if not (self.recipe and other.recipe):
            return None
        shared = self.config.keys() & other.config.keys()
        configs = [{key: run.config[key] for key in shared} for run in (self, other)]
        whole = _differing(self.recipe, other.recipe, configs)
        ours, theirs = (stage_recipes(run.recipe) for run in (self, other))
        if len(ours) != len(theirs):
            return [*whole, "stages"]
        pairs = zip(ours, theirs, strict=True)
        stages = {name: _differing(our, their, configs, of_stages=True) for (name, our), (_, their) in pairs}
        if stages:  # a line outside them has an effect only where a stage has none of its own
            whole = [key for key in whole if any(key in keys for keys in stages.values())]
        parts = [f"stages.{name}.{key}" for name, keys in stages.items() for key in keys if key not in whole]
        rows = zip(self.training_rows(), other.training_rows(), strict=True)
        if any(a[task] != b[task] for a, b in rows for task in a.keys() & b.keys()):
            parts.append("training rows")
        return [*whole, *parts]

    def training_rows(self) -> list[dict[str, str]]:
        """Returns digests of the training rows by task, for the run or each stage.

        Rows that the seed draws are ignored.
        """
        folders, found = dict(stage_folders(self.path)), []
        for name, recipe in stage_recipes(self.recipe) or [("", self.recipe)]:
            began = self.environment
            if name:
                began = _json(folders[name] / "environment.json") if name in folders else {}
            settings, _ = split_recipe(recipe, get_type_hints(MultiTaskTrainingArguments))
            drawn = {t.name for t in get_tasks(settings.tasks) if any(s.rows or s.fraction for s in t.sources)}
            found.append({task: rows for task, rows in began.get("training_rows", {}).items() if task not in drawn})
        return found

    def training_texts(self, task: Task) -> list[tuple[str, ...]] | None:
        """Returns the texts of the task's own training rows; `None` if there are none.

        Raises:
            MinBertError: they cannot be read.
        """
        with explain(f"Reading the training rows of {task.name!r}", "Give the folder of the data with --data-dir."):
            return read_texts(task, self.data.folder_of(task.name), "train")


def read_run(path: str | Path, data_dir: str | None = None) -> Run:
    """Reads a run's folder.

    Args:
        path: the folder, which may belong to an unfinished run or a merged model.
        data_dir: the current folder of the data; by default that of the recipe.

    Raises:
        MinBertError: the folder has no run, or a file in it is broken.
    """
    path = Path(path)
    if not checkpoints(path) and not any((path / name).exists() for name in SIGNS):
        raise MinBertError(
            f"{path} holds no run: there is none of {', '.join(SIGNS)}. Give the folder of a run, the `output_dir` of "
            f"its recipe."
        )
    home, data, notes = last_stage(path), RunData.of(path, data_dir), []
    stages, saved = list(_stages(path, notes)), _json(path / "config.json").get("tasks") or ()
    run = Run(
        path, path.resolve().name, data.tasks or _saved_tasks(home, notes), _recipe(path) or _recipe(home),
        _json(path / "metrics.json"), _json(path / "environment.json") or _json(home / "environment.json"),
        _json(path / "config.json"), stages, data, notes=notes,
        calibration=calibration_of(path, {task["name"]: Task.from_config(task) for task in saved}),
    )  # fmt: skip
    predictions = path if (path / PREDICTIONS).is_dir() else home
    _note_what_is_missing(run, predictions)
    for task in run.tasks.values():
        file = predictions / PREDICTIONS / f"{task.name}-dev{ending(task)}"
        if file.is_file():
            run.answers[task.name] = answers = read_predictions(file, task)
            _add_rows(answers, data)
            if answers.missing:
                notes.append(answers.missing)
    return run


def _json(path: Path) -> Entry:
    if not path.is_file():
        return {}
    with explain(f"Reading {path}", "Restore the file, or delete it."):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _differing(
    ours: Mapping[str, Value],
    theirs: Mapping[str, Value],
    configs: Sequence[Mapping[str, Any]],
    of_stages: bool = False,
) -> list[str]:
    """Returns the keys whose meaning differs between two recipes, without stages, seeds and paths.

    Args:
        configs: the configs of the models that the runs saved. With `of_stages` they belong to the last stage: all
            stages have its encoder, but not its lengths and dropout.
    """
    hints, found = get_type_hints(MultiTaskTrainingArguments), []
    for recipe, config in zip((ours, theirs), configs, strict=True):
        values = all_values(*split_recipe(recipe, hints))
        values["peft"] = None if values["peft"] is None else full_options(values["peft"], config)
        found.append(meaning(values, {} if of_stages else config))
    first, second = found
    keys = [key for key in names(among=first, scope="run") if key in second]
    keys = [key for key in keys if first[key] != second[key] or (key == "tasks" and [*first[key]] != [*second[key]])]
    return [part for key in keys for part, _, _ in differing_parts(key, first[key], second[key])]


def _recipe(path: Path) -> dict[str, Value]:
    return with_teachers_read(read_recipe(path / "recipe.yaml")) if (path / "recipe.yaml").is_file() else {}


def _note_what_is_missing(run: Run, predictions: Path) -> None:
    if not run.metrics and not run.stages:
        run.notes.append("There is neither a log nor metrics.json: scores and learning curves are left out.")
    elif not run.metrics:
        run.notes.append("The run has not finished: there is no metrics.json yet. What follows is of its log so far.")
    if run.metrics and not run.stages:
        run.notes.append(
            "There is no log (log.jsonl), as of a merged model, or it is empty: learning curves and gradients are "
            "left out."
        )
    files = {name: predictions / PREDICTIONS / f"{name}-dev{ending(task)}" for name, task in run.tasks.items()}
    without = [name for name, file in files.items() if not file.is_file()]
    if without:
        run.notes.append(
            f"There are no predictions on dev rows of {', '.join(without)}: classes, texts and single errors are left "
            f"out. A finished run has them; for another model: minbert predict MODEL --task {without[0]} --input "
            f"DEV.csv --output MODEL/{PREDICTIONS}/{files[without[0]].name}."
        )


# ---- The log -----------------------------------------------------------------------------------------------------


def _stages(path: Path, notes: list[str]) -> Iterator[Stage]:
    """The log of each stage that has begun, or the run's own."""
    start = 0
    for name, folder in stage_folders(path) or [("", path)]:
        log = _log(folder, notes)
        metrics = _json(folder / "metrics.json") or None
        if log:
            yield Stage(name, start, log, metrics)
            start += max((entry.get("step", 0) for entry in log), default=0)


def _log(path: Path, notes: list[str]) -> list[Entry]:
    """Returns log.jsonl or, if there is none, the history in the newest checkpoint that has one."""
    file = path / "log.jsonl"
    if file.is_file():
        entries = []
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                entries.append(dict(json.loads(line)))
            except (TypeError, ValueError):  # a run that was killed while it wrote leaves a part of a line
                notes.append(f"Line {number} of {file} is not readable and was left out.")
        return entries
    for checkpoint in checkpoints(path):
        state = checkpoint / "trainer_state.json"
        if state.is_file():
            notes.append(f"There is no log.jsonl in {path}; the log is that of {checkpoint.name}.")
            return list(_json(state).get("log_history", ()))
    return []


# ---- Tasks, predictions and rows ---------------------------------------------------------------------------------


def _saved_tasks(path: Path, notes: list[str]) -> dict[str, Task]:
    """Those of a model's config, with the data of the package's of that name."""
    saved = _json(path / "config.json").get("tasks", ())
    if not saved:
        notes.append("Neither recipe.yaml nor config.json names tasks: scores by task are left out.")
    found = {}
    for task in map(Task.from_config, saved):
        files = TASKS[task.name].files if task.name in TASKS else {}
        found[task.name] = replace(task, files=files)
    return found


def read_predictions(path: str | Path, task: Task) -> Answers:
    """Reads a file that `write_predictions` wrote.

    Raises:
        MinBertError: the file has another form, or belongs to another task.
    """
    if task.traits.is_tags:
        return _read_tags(Path(path), task)
    with explain(f"Reading {path}", "Restore the file that the run wrote, or delete it."):
        with Path(path).open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        expected = csv_columns(task)
        if header not in _headers(task) or not rows:
            raise MinBertError(
                f"{path} must have the columns {', '.join(expected)} and a row or more. Found "
                f"{', '.join(header) or 'none'} and {counted(len(rows), 'row')}. Delete it, or write it again with "
                "minbert predict."
            )
        odd = next((number for number, row in enumerate(rows, 2) if len(row) != len(header)), None)
        if odd is not None:
            raise MinBertError(
                f"{path}, row {odd}: expected {len(header)} cells, found {len(rows[odd - 2])}. Delete the file, or "
                "write it again with minbert predict."
            )
        ids = [row[0] for row in rows]
        places = [place for place, name in enumerate(header) if name not in ("id", "label", "labels", EXPECTED)]
        numbers = np.array([[row[place] for place in places] for row in rows], dtype=np.float64)
        if task.traits.is_set:
            return Answers(task, ids, numbers, numbers)
        values = numbers[:, 0]
        if task.traits.is_class:
            values = values.astype(np.int64)
            if (values != numbers[:, 0]).any() or values.min() < 0 or values.max() >= len(task.labels):
                raise MinBertError(
                    f"{path}: a prediction of {task.name!r} must be a class id from 0 to {len(task.labels) - 1}. "
                    f"Delete the file, or write it again with minbert predict."
                )
    return Answers(task, ids, values, numbers[:, 1:])


def _headers(task: Task) -> list[list[str]]:
    """All headers that files of predictions may have.

    Older files name probabilities by class id. They lack the mean of ordered classes, or that and the label.
    """
    return [
        [name for name in csv_columns(task, by_id) if name not in missing]
        for by_id in (False, True)
        for missing in ((), (EXPECTED,), (EXPECTED, "label"))
    ]


def _read_tags(path: Path, task: Task) -> Answers:
    """`read_predictions` of a task with tags."""
    ids, values = [], []
    with explain(f"Reading {path}", "Restore the file that the run wrote, or delete it."):
        # Not `splitlines`: a word may hold what ends a line for Unicode.
        for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), 1):
            row = json.loads(line)
            if row.keys() != {"id", "tokens", "tags", "probabilities"} or not {*row["tags"]} <= {*task.labels}:
                raise MinBertError(
                    f"{path}, line {number}: expected id, tokens, tags of {task.name!r} and probabilities. Found "
                    f"{line:.60}. Delete the file, or write it again with minbert predict."
                )
            read = np.array([probability is not None for probability in row["probabilities"]])
            ids.append(row["id"])
            values.append(np.where(read, [*map(task.labels.index, row["tags"])], -1))
    return Answers(task, ids, ragged(values), np.empty((len(ids), 0)))


def _add_rows(answers: Answers, data: RunData) -> None:
    """Adds labels and texts, or the reason why there are none."""
    task = answers.task
    try:
        with explain(f"Reading the dev rows of {task.name!r}", ""):
            rows = data.rows(task, "dev")
    except MinBertError as error:
        remedy = "" if data.recipe else " Give the folder of the data with --data-dir."  # else the error says so
        answers.missing = f"Without labels and texts of {task.name}: {error}{remedy}"
        return
    columns = rows[:]  # as lists: a column by itself is read row by row
    if columns["id"] != answers.ids:
        answers.missing = (
            f"Without labels and texts of {task.name}: the {len(rows):,} dev rows found are not the "
            f"{len(answers.ids):,} that were predicted; their ids differ. Give the folder with the run's data with "
            "--data-dir."
        )
        return
    if task.traits.is_tags:
        answers.labels = tag_rows(columns["label"])
    elif (
        answers.is_score
    ):  # kept as float32: by its digits 2.8 is 2.8 again, not the 2.7999999523 of a bin further down
        answers.labels = np.asarray(columns["label"], dtype=np.float32).astype(str).astype(np.float64)
    else:
        answers.labels = np.asarray(columns["label"], dtype=np.int64)  # of kind `labels` a row of 0 and 1
    answers.texts = list(zip(*(columns[name] for name in task.text_columns), strict=True))
