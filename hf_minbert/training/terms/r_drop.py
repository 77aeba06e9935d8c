"""R-Drop: two passes with different dropout masks should agree."""

from __future__ import annotations

import torch

from ..protocol import TaskModel, draws, shortest_batch
from .base import AnyNoiseKey, Batch, LossFunction, TaskLoss, Term, check_number, divergence, own_loss, twice


class RDrop(Term):
    """R-Drop (Liang et al. 2021, arXiv:2106.14448, equation 4): two passes with different dropout masks.

    The task's loss is the mean over both passes, and the term is half the head's symmetric divergence between them.
    Where the model has `pooled_of`, one pass of a batch of twice the rows is both, as in the paper's section 2.2.

    Args:
        weight: of the term.
    """

    name = "r_drop"

    def __init__(self, *, weight: float = 1.0):
        check_number("r_drop_weight", weight)
        self.weight = weight

    def warnings(self, model: TaskModel, task: str, dtype: torch.dtype) -> list[str]:
        if draws(model, lambda: model(**shortest_batch(model, task))):
            return []
        return [
            f"`regularizer: r_drop` of {task!r} is zero: the model has no dropout, so two passes are the same. Set "
            "`hidden_dropout_prob`."
        ]

    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        first, second = (inner(model, half) for half in twice(model, batch))
        pair = first.outputs["logits"], second.outputs["logits"]
        term = divergence(model.heads.get(batch["task"]), batch["labels"], *pair).mean() / 2
        loss = (first.loss + second.loss) / 2 + self.weight * term
        return TaskLoss(loss, first.outputs, {**first.logged, self.name: term})
