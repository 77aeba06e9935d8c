"""The fast gradient method: adversarial training on word embeddings."""

from __future__ import annotations

from functools import partial

import torch

from ..protocol import TaskModel
from .base import (
    AnyNoiseKey,
    Batch,
    LossFunction,
    TaskLoss,
    Term,
    check_number,
    embedded,
    of_sentences,
    own_loss,
    packing_of,
    random_state,
    word_size,
)


class FGM(Term):
    """The fast gradient method (Miyato et al. 2017, arXiv:1605.07725): adds the loss at perturbed word embeddings.

    The perturbation is the worst one to first order: `epsilon` along the loss's gradient. The dropout mask is that of
    the clean pass.

    Args:
        weight: of the term.
        epsilon: l2 norm of the step away from a sentence's word embeddings, each of which has a norm near 1 in BERT. A
            step of 1 trained a model to answer always alike (recipes/results, regularizers).
    """

    name = "fgm"
    searches = True
    repeats = 1
    needs = ("inputs_embeds",)
    SCALE = 2.0**12  # keeps the gradient in the range of float16; only its direction counts

    def __init__(self, *, weight: float = 1.0, epsilon: float = 0.1):
        check_number("fgm_weight", weight)
        check_number("fgm_epsilon", epsilon)
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        before = random_state(batch["input_ids"].device)
        ids, packing = batch["input_ids"], packing_of(batch)
        places = ids.shape if packing is None else (1, len(packing.tokens))
        delta = torch.zeros(*places, word_size(model, batch["task"]), device=ids.device, requires_grad=True)
        clean = inner(model, embedded(model, batch, delta))
        (gradient,) = torch.autograd.grad(self.SCALE * clean.loss, delta, retain_graph=True)
        ok = gradient.isfinite().all()
        norm = of_sentences(partial(torch.norm, dim=-2, keepdim=True), gradient.norm(dim=-1, keepdim=True), packing)
        delta = torch.where(ok & (norm > 0), self.epsilon * gradient / norm, 0.0)
        with before.again():
            term = inner(model, embedded(model, batch, delta)).loss
        logged = {self.name: term.detach() * ok, f"{self.name}_skipped": 1.0 - ok.float()}
        return TaskLoss(clean.loss + self.weight * term * ok, clean.outputs, {**clean.logged, **logged})
