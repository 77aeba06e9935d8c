"""What saved models, the teachers of a distillation, answer to rows of text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import MinBertError
from ..model.inference import class_logits
from ..model.kinds import KINDS
from ..settings.tasks import Task
from .prediction import Predictor, progress_bar

logger = logging.getLogger(__name__)

#: What a teacher's task must agree in with the student's for its answers to mean the same.
SAME = ("kind", "labels", "range", "text_columns")


def teacher_logits(teachers: Sequence[str], tasks: Iterable[Task], rows: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What the teachers answer to rows of text: the mean of those that have the task.

    Args:
        teachers: saved models, by folder or Hub id. Each has one or more of the tasks.
        tasks: the student's.
        rows: task to rows with its text columns.

    Returns:
        by task, `[rows, outputs]` as a head gives them: scores are averaged; classes, in order or not, and the two
        sides of a binary task are averaged as probabilities, of which these are logits.

    Raises:
        MinBertError: a teacher cannot be loaded, has none of the tasks, or has one of another kind, or with other
            labels; or no teacher has a task.
    """
    wanted = {task.name: task for task in tasks if task.name in rows}
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for folder in teachers:
        predictor = Predictor.from_pretrained(folder)
        for name in _shared(folder, predictor, wanted):
            with progress_bar(f"{folder}: {name}", len(rows[name])) as advance:
                found[name].append(predictor.logits(name, rows[name], advance))
    for name, answers in found.items():
        if not answers:
            raise MinBertError(
                f"No model of `teachers` has the task {name!r}. Add one that has it, or leave it out of `train_tasks`."
            )
        logger.info("%s is taught by %d of %d teachers.", name, len(answers), len(teachers))
    return {name: mean_answer(wanted[name].kind, answers) for name, answers in found.items()}


def _shared(folder: str, predictor: Predictor, wanted: Mapping[str, Task]) -> list[str]:
    names = [name for name in wanted if name in predictor.tasks]
    if not names:
        has = ", ".join(predictor.tasks)
        raise MinBertError(f"The teacher {folder} has none of the tasks in training: it has {has}. Leave it out.")
    for name in names:
        for key in SAME:
            ours, theirs = getattr(wanted[name], key), getattr(predictor.tasks[name], key)
            if ours != theirs:
                raise MinBertError(
                    f"The teacher {folder} cannot teach {name!r}: its `{key}` is {theirs!r}, and here it is {ours!r}."
                )
    return names


def mean_answer(kind: str, answers: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several teachers' logits, each `[rows, outputs]`; of one, its own as they are."""
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
