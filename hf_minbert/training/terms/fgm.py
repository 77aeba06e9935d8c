"""The fast gradient method: adversarial training on word embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..protocol import TaskModel
from .base import (
    LossFunction,
    NoiseKey,
    RandomState,
    RecordedNoiseKey,
    TaskLoss,
    Term,
    check_number,
    embedded,
    own_loss,
    word_size,
)


class FGM(Term):
    """The fast gradient method (Miyato et al. 2017, arXiv:1605.07725): the loss at the worst near words is added.

    Worst are, to first order, those `epsilon` away along the loss's gradient. The dropout mask is that of the clean
    pass.

    Args:
        weight: of the term.
        epsilon: l2 norm of the step away from a sentence's word embeddings.
    """

    name = "fgm"
    searches = True
    repeats = 1
    needs = ("inputs_embeds",)
    SCALE = 2.0**12  # keeps the gradient above what float16 loses; only its direction counts

    def __init__(self, *, weight: float = 1.0, epsilon: float = 1.0):
        check_number("fgm_weight", weight)
        check_number("fgm_epsilon", epsilon)
        self.weight, self.epsilon = weight, epsilon

    def __call__(
        self,
        model: TaskModel,
        batch: Mapping[str, Any],
        key: NoiseKey | RecordedNoiseKey,
        inner: LossFunction = own_loss,
    ) -> TaskLoss:
        before = RandomState.now(batch["input_ids"].device)
        shape = (*batch["input_ids"].shape, word_size(model, batch["task"]))
        delta = torch.zeros(shape, device=batch["input_ids"].device, requires_grad=True)
        clean = inner(model, embedded(model, batch, delta))
        (gradient,) = torch.autograd.grad(self.SCALE * clean.loss, delta, retain_graph=True)
        ok = gradient.isfinite().all()
        norm = gradient.norm(dim=(-2, -1), keepdim=True)  # of each sentence
        delta = torch.where(ok & (norm > 0), self.epsilon * gradient / norm, 0.0)
        with before.again():
            term = inner(model, embedded(model, batch, delta)).loss
        logged = {self.name: term.detach() * ok, f"{self.name}_skipped": 1.0 - ok.float()}
        return TaskLoss(clean.loss + self.weight * term * ok, clean.outputs, {**clean.logged, **logged})
