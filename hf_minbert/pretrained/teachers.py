"""The outputs of saved models, the teachers of a distillation, for rows of text.

Outputs are kept in files. A file's name is a hash over everything that they depend on: the model's weights and config,
its tokenizer, the task, the truncation length, and the texts. Another student of the same teachers reuses them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..data.cache import model_content
from ..errors import MinBertError, explain
from ..io import write_atomically
from ..model.inference import class_logits
from ..model.kinds import KINDS
from ..settings.recipe import packaged_recipes
from ..settings.tasks import Task
from .loading import load_config
from .prediction import Predictor, progress_bar

logger = logging.getLogger(__name__)

FORMAT = 1  # to be raised when a model of the same weights gives other answers
#: What a teacher's task must agree in with the student's for its answers to mean the same.
SAME = ("kind", "labels", "range", "text_columns")
#: Losses that look at the order of scores alone, and leave their scale free.
OF_ORDER = ("cosent",)


def teacher_logits(
    teachers: Sequence[str], tasks: Iterable[Task], rows: Mapping[str, Any], keep_in: Path | None = None
) -> dict[str, np.ndarray]:
    """Returns the mean outputs of the teachers for rows of text. Each task uses the teachers that have it.

    Args:
        teachers: saved models, by folder or Hub id. Each has one or more of the tasks.
        tasks: the tasks of the student.
        rows: for each task, rows with its text columns. If they have a `label`, it determines the scale of scores from
            teachers that were trained for the order of scores only.
        keep_in: the folder for stored outputs. By default they are not stored.

    Returns:
        for each task `[rows, outputs]`, in the form of a head's outputs. Scores are averaged. For all other kinds,
        probabilities are averaged and converted back to logits.

    Raises:
        MinBertError: a teacher cannot be loaded, has none of the tasks, or has a task of another kind or with other
            labels; no teacher has a task; or stored outputs cannot be read.
    """
    wanted = {task.name: task for task in tasks if task.name in rows}
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for folder in teachers:
        teacher = _Teacher(folder, keep_in)
        for name in check_tasks(folder, teacher.predictor.tasks, wanted):
            answers = teacher.answers(wanted[name], rows[name])
            if teacher.predictor.tasks[name].loss in OF_ORDER:
                answers = on_scale_of(answers, [row.get("label") for row in rows[name]])
            found[name].append(answers)
    for name, answers in found.items():
        if not answers:
            raise MinBertError(
                f"No model of `teachers` has the task {name!r}. Add one that has it, or leave it out of `train_tasks`."
            )
        logger.info("%s is taught by %d of %d teachers.", name, len(answers), len(teachers))
    return {name: mean_answer(wanted[name].kind, answers) for name, answers in found.items()}


class _Teacher:
    """A saved model, and what it has answered.

    Args:
        folder: of the model, or its id on the Hub.
        keep_in: as for `teacher_logits`.
    """

    def __init__(self, folder: str, keep_in: Path | None):
        self.folder, self.keep_in, self.predictor = folder, keep_in, Predictor.from_pretrained(folder)

    def answers(self, task: Task, rows: Any) -> np.ndarray:
        """Its outputs for the rows, float32 [rows, outputs]. No label is looked at: some may be missing."""
        rows = [{name: row[name] for name in task.text_columns} for row in rows]
        if self.keep_in is None:
            return self._computed(task, rows)
        path = self.keep_in / f"answers-{task.name}-{self._key(task.name, rows)}.npy"
        if not path.is_file():
            text = io.BytesIO()
            np.save(text, self._computed(task, rows))
            write_atomically(path, text.getvalue())
        with explain(f"Reading the answers in {path}", "Delete this file; it is made anew."):
            kept = np.load(path)
            if kept.shape != (len(rows), task.num_outputs):
                raise ValueError(f"they are {list(kept.shape)}")
        return kept

    def _computed(self, task: Task, rows: Any) -> np.ndarray:
        with progress_bar(f"{self.folder}: {task.name}", len(rows)) as advance:
            return self.predictor.logits(task.name, rows, advance).astype(np.float32)

    def _key(self, task: str, rows: Any) -> str:
        key = hashlib.sha256(f"{FORMAT} {self._content} {task} {self.predictor.lengths[task]}".encode())
        for row in rows:
            key.update(json.dumps([*row.values()]).encode())
        return key.hexdigest()[:32]

    @cached_property
    def _content(self) -> str:
        return model_content(self.predictor.model, self.predictor.tokenizer)


def check_tasks(teacher: str, tasks: Mapping[str, Task], wanted: Mapping[str, Task]) -> list[str]:
    """Returns those of the wanted tasks that a teacher has.

    Args:
        teacher: its name in errors.
        tasks: the teacher's tasks by name.
        wanted: the student's tasks.

    Raises:
        MinBertError: the teacher has none of them, or one of another kind or with other labels.
    """
    names = [name for name in wanted if name in tasks]
    if not names:
        has = ", ".join(tasks)
        raise MinBertError(f"The teacher {teacher} has none of the tasks in training: it has {has}. Leave it out.")
    for name in names:
        for key in SAME:
            ours, theirs = getattr(wanted[name], key), getattr(tasks[name], key)
            if ours != theirs:
                ours, theirs = (list(of) if isinstance(of, tuple) else of for of in (ours, theirs))
                raise MinBertError(
                    f"The teacher {teacher} cannot teach {name!r}: `{key}` is {theirs!r} there and {ours!r} in this "
                    "recipe. Make them the same."
                )
    return names


def saved_tasks(teacher: str) -> dict[str, Task]:
    """Returns the tasks of a saved model by name. No weights are loaded.

    Raises:
        MinBertError: there is no such model, it is a recipe, or it has no task.
    """
    if teacher in packaged_recipes() or Path(teacher).is_file():
        raise MinBertError(f"`teachers` names the recipe {teacher}. Write it as {{recipe: {teacher}}}.")
    try:
        config = load_config(teacher)
    except MinBertError as error:
        raise MinBertError(f"A model of `teachers` cannot be loaded: {error}") from error
    return {task.name: task for task in map(Task.from_config, config.tasks or ())}


def on_scale_of(answers: np.ndarray, labels: Sequence[float | None]) -> np.ndarray:
    """Maps scores to the scale of the labels, by the line with the smallest squared error. Their order does not
    change.

    The scores are returned unchanged if fewer than two rows have a label, or if the line would reverse the order.

    Args:
        answers: [rows, 1].
        labels: `None` for a row without a label.
    """
    known = np.array([label is not None for label in labels])
    x, y = answers[known, 0].astype(float), np.array([label for label in labels if label is not None], dtype=float)
    if len(y) < 2 or x.std() == 0:
        return answers
    slope = np.cov(x, y, bias=True)[0, 1] / x.var()
    if slope <= 0:
        return answers
    return ((answers - x.mean()) * slope + y.mean()).astype(np.float32)


def mean_answer(kind: str, answers: Sequence[np.ndarray]) -> np.ndarray:
    """Averages several teachers' logits, each `[rows, outputs]`. The logits of a single teacher are not changed."""
    if len(answers) == 1:
        return answers[0]
    stacked = torch.from_numpy(np.stack(answers)).double()
    if KINDS[kind].is_score:
        mean = stacked.mean(dim=0)
    elif kind in ("binary", "labels"):
        # log of the mean chance of a yes over that of a no, neither of which may round to 0.
        yes, no = (F.logsigmoid(sign * stacked).logsumexp(dim=0) for sign in (1, -1))
        mean = yes - no
    elif kind == "ordinal":
        # The same of a class above over the class itself, which are what is left where none below is right.
        classes = class_logits(stacked).logsumexp(dim=0)
        above = classes.flip(-1).logcumsumexp(dim=-1).flip(-1)[:, 1:]
        mean = above - classes[:, :-1]
    else:
        mean = stacked.log_softmax(dim=-1).logsumexp(dim=0) - np.log(len(answers))
    return mean.float().numpy()
