"""Distillation: a model learns from the outputs of teachers on its training rows, beside the labels.

One model can then keep up with an ensemble, or with one model per task (Hinton et al. 2015, arXiv:1503.02531; for
BERT with a teacher per task, Clark et al. 2019, arXiv:1907.04829).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from ...data.rows import EncodedRows
from ...errors import MinBertError
from ...model.kinds import KINDS
from ...settings.tasks import Task
from ..base_args import BaseArguments
from ..protocol import Head, TaskModel
from .base import AnyNoiseKey, Batch, LossFunction, TaskLoss, Term, own_loss, unlabelled_in


def with_teacher_logits(
    args: BaseArguments,
    tasks: Mapping[str, Task],
    rows: Mapping[str, EncodedRows],
    logits: Mapping[str, np.ndarray] | None,
) -> Mapping[str, EncodedRows]:
    """The rows with the teachers' logits.

    Raises:
        MinBertError: there are teachers and no `logits`, or the reverse; or those of a task are not of its shape.
    """
    if (args.teachers is None) != (logits is None):
        raise MinBertError("`teachers` and `teacher_logits` go together: give both or neither.")
    if logits is None:
        return rows
    for name, dataset in rows.items():
        expected = (len(dataset), tasks[name].num_outputs)
        if name not in logits or logits[name].shape != expected:
            found = list(logits[name].shape) if name in logits else "nothing"
            raise MinBertError(f"`teacher_logits` of {name!r} must be {list(expected)}. Found {found}.")
    return {name: replace(dataset, teacher=logits[name].astype(np.float32)) for name, dataset in rows.items()}


class Distillation(Term):
    """Mixes a task's loss with the divergence from a teacher's outputs.

    (1 - weight) * loss + weight * T^2 * KL(teacher || student), both softened by the temperature T; for a score, which
    has no distribution, the squared error instead of the KL; for classes in order T softens each of the conditional
    probabilities whose logits a head gives. The task's own loss alone has the factor: terms within it keep their
    weights. The teacher's outputs are the batch's `teacher`, `[B, C]`.

    A row without a label has the divergence alone, with weight 1, or 0 where the teacher's share is 0. The loss is
    the mean over all rows: with l that of the L labelled rows and d the mean divergence of the U others,
    (L * l + U * d) / (L + U).

    Args:
        weight: the teacher's share of the loss.
        temperature: what logits are divided by. T^2 keeps the gradient's size (Hinton et al., section 2).

    Raises:
        MinBertError: the weight is not from 0 to 1, or the temperature not above 0.
    """

    name = "distill"
    of_outputs = True

    def __init__(self, *, weight: float = 0.5, temperature: float = 1.0):
        if not 0 <= weight <= 1:
            raise MinBertError(f"`distill_weight` must be a number from 0 to 1. Found {weight}.")
        if not 0 < temperature < float("inf"):
            raise MinBertError(f"`distill_temperature` must be a number above 0. Found {temperature}.")
        self.weight, self.temperature = weight, temperature

    @classmethod
    def of(cls, args: BaseArguments) -> Distillation | None:
        """What the training arguments ask for. Raises `MinBertError` as the class."""
        return None if args.teachers is None else cls(weight=args.distill_weight, temperature=args.distill_temperature)

    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        plain = inner(model, {name: value for name, value in batch.items() if name != "teacher"})
        head, own = model.heads.get(batch["task"]), plain.outputs["loss"]
        logits, teacher, unlabelled = plain.outputs["logits"], batch["teacher"], unlabelled_in(batch)
        count = len(logits) - unlabelled
        term = self.divergence(head, logits[:count], teacher[:count])
        loss = self.mixed(plain.loss, own, term)
        if unlabelled:
            share = unlabelled / len(logits)
            others = self.divergence(head, logits[count:], teacher[count:])
            if self.weight:
                loss = loss + share * (others - self.mixed(own, own, term))
            term = (1 - share) * term + share * others
        return TaskLoss(loss, plain.outputs, {**plain.logged, self.name: term})

    def divergence(self, head: Head, logits: Tensor, teacher: Tensor) -> Tensor:
        """The term of a batch before its weight, from two `[B, C]`."""
        logits, teacher = logits.float(), teacher.float()
        if KINDS[head.kind].is_score:
            return head.divergence(teacher, logits, "squared_error").mean()
        softened = (teacher / self.temperature, logits / self.temperature)
        return self.temperature**2 * head.divergence(*softened, "kl").mean()

    def mixed(self, loss: Tensor, own: Tensor, term: Tensor) -> Tensor:
        """The whole loss: `loss` has the task's `own` in it, and all other terms."""
        return loss + self.weight * (term - own)
