"""Distillation: a model learns from what teachers answer to its training rows, beside the labels.

So that one model keeps up with an ensemble, or with one model per task (Hinton et al. 2015, arXiv:1503.02531; for
BERT with a teacher per task, Clark et al. 2019, arXiv:1907.04829).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import MinBertError
from ...settings.tasks import Task

if TYPE_CHECKING:
    from ...data.rows import EncodedRows
    from ...pretrained.prediction import Predictor
    from ..args import MultiTaskTrainingArguments

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
        by task, `[rows, outputs]` as a head gives them: scores are averaged; classes and the two sides of a binary
        task are averaged as probabilities, of which these are logits.

    Raises:
        MinBertError: a teacher cannot be loaded, has none of the tasks, or has one of another kind, or with other
            labels; or no teacher has a task.
    """
    from ...pretrained.prediction import Predictor, progress_bar

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


def taught(
    args: MultiTaskTrainingArguments,
    tasks: Mapping[str, Task],
    rows: Mapping[str, EncodedRows],
    logits: Mapping[str, np.ndarray] | None,
) -> Mapping[str, EncodedRows]:
    """The rows with what `teacher_logits` gave for them.

    Raises:
        MinBertError: there are teachers and no `logits`, or the reverse; or those of a task are not of its shape.
    """
    if (args.teachers is None) != (logits is None):
        raise MinBertError("`teachers` and `teacher_logits` go together: give both or neither.")
    if logits is None:
        return rows
    for name, of in rows.items():
        expected = (len(of), tasks[name].num_outputs)
        if name not in logits or logits[name].shape != expected:
            found = list(logits[name].shape) if name in logits else "nothing"
            raise MinBertError(f"`teacher_logits` of {name!r} must be {list(expected)}. Found {found}.")
    return {name: replace(of, teacher=logits[name].astype(np.float32)) for name, of in rows.items()}


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
    if kind == "score":
        mean = stacked.mean(dim=0)
    elif kind == "binary":
        # log of the mean chance of a yes over that of a no, neither of which may round to 0.
        yes, no = (F.logsigmoid(sign * stacked).logsumexp(dim=0) for sign in (1, -1))
        mean = yes - no
    else:
        mean = stacked.log_softmax(dim=-1).logsumexp(dim=0) - np.log(len(answers))
    return mean.float().numpy()


class Distillation:
    """A task's loss, in part that against a teacher's answers.

    (1 - weight) * loss + weight * T^2 * KL(teacher || student), both softened by the temperature T; for a score, which
    has no distribution, the squared error in the place of the KL.

    Args:
        weight: the teacher's share of the loss.
        temperature: what logits are divided by. T^2 keeps the gradient's size (Hinton et al., section 2).

    Raises:
        MinBertError: the weight is not from 0 to 1, or the temperature not above 0.
    """

    def __init__(self, weight: float = 0.5, temperature: float = 1.0):
        if not 0 <= weight <= 1:
            raise MinBertError(f"`distill_weight` must be a number from 0 to 1. Found {weight}.")
        if not 0 < temperature < float("inf"):
            raise MinBertError(f"`distill_temperature` must be a number above 0. Found {temperature}.")
        self.weight, self.temperature = weight, temperature

    def __call__(self, head: nn.Module, logits: Tensor, teacher: Tensor) -> Tensor:
        """The term of a batch before its weight; both `[B, C]`."""
        logits, teacher = logits.float(), teacher.float()
        if head.kind == "score":
            return head.divergence(teacher, logits, "squared_error").mean()
        softened = (teacher / self.temperature, logits / self.temperature)
        return self.temperature**2 * head.divergence(*softened, "kl").mean()

    def mixed(self, loss: Tensor, own: Tensor, term: Tensor) -> Tensor:
        """The whole loss, in which the task's `own` has its share: `loss` is that with all other terms."""
        return loss + self.weight * (term - own)


def distillation_of(args: MultiTaskTrainingArguments) -> Distillation | None:
    """What the training arguments ask for. Raises `MinBertError` as `Distillation`."""
    return None if args.teachers is None else Distillation(args.distill_weight, args.distill_temperature)
