"""What is added to each task's loss in training, and the names that recipes have for it.

To add one: a class here, a line in `REGULARIZERS`, and for each of its options a training argument `<name>_<option>`.
The recipe's `regularizer: none` adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...errors import unknown_name
from ...model.losses import options_of
from ..protocol import TaskModel, draws, shortest_batch
from .base import Place, RandomState, RecordedPlace, Regularized, Regularizer, check_number, embedded, words_of
from .smart import Smart

if TYPE_CHECKING:
    from ..args import MultiTaskTrainingArguments


class RDrop(Regularizer):
    """R-Drop (Liang et al. 2021, arXiv:2106.14448, equation 4): two passes with other dropout shall agree.

    The task's loss is the mean over both passes, and the term half their symmetric divergence, which is the head's.

    Args:
        weight: of the term.
    """

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

    def __call__(self, model: TaskModel, batch: Mapping[str, Any], place: Place | RecordedPlace) -> Regularized:
        outputs, second = model(**batch), model(**batch)
        divergence = model.heads.get(batch["task"]).divergence
        term = divergence(outputs["logits"], second["logits"]).mean() / 2
        return Regularized((outputs["loss"] + second["loss"]) / 2 + self.weight * term, outputs, term)


class FGM(Regularizer):
    """The fast gradient method (Miyato et al. 2017, arXiv:1605.07725): the loss at the worst near words is added.

    Worst are, to first order, those `epsilon` away along the loss's gradient. The dropout mask is that of the clean
    pass.

    Args:
        weight: of the term.
        epsilon: l2 norm of the step away from a sentence's word embeddings.
    """

    searches = True
    repeats = 1
    needs = ("inputs_embeds",)
    SCALE = 2.0**12  # keeps the gradient above what float16 loses; only its direction counts

    def __init__(self, *, weight: float = 1.0, epsilon: float = 1.0):
        check_number("fgm_weight", weight)
        check_number("fgm_epsilon", epsilon)
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, model: TaskModel, batch: Mapping[str, Any], place: Place | RecordedPlace) -> Regularized:
        before = RandomState.now(batch["input_ids"].device)
        shape = (*batch["input_ids"].shape, words_of(model, batch["task"]).embedding_dim)
        delta = torch.zeros(shape, device=batch["input_ids"].device, requires_grad=True)
        outputs = model(**embedded(model, batch, delta))
        (gradient,) = torch.autograd.grad(self.SCALE * outputs["loss"], delta, retain_graph=True)
        ok = gradient.isfinite().all()
        norm = gradient.norm(dim=(-2, -1), keepdim=True)  # of each sentence
        delta = torch.where(ok & (norm > 0), self.epsilon * gradient / norm, 0.0)
        with before.again():
            term = model(**embedded(model, batch, delta))["loss"]
        return Regularized(outputs["loss"] + self.weight * term * ok, outputs, term.detach() * ok, 1.0 - ok.float())


REGULARIZERS: dict[str, type[Regularizer]] = {"smart": Smart, "r_drop": RDrop, "fgm": FGM}


def regularizer_of(args: MultiTaskTrainingArguments) -> Regularizer | None:
    """The regularizer that the training arguments name, with its options. Raises `MinBertError` if one is wrong."""
    if args.regularizer == "none":
        return None
    if not isinstance(args.regularizer, str) or args.regularizer not in REGULARIZERS:
        raise unknown_name("regularizer", args.regularizer, ("none", *REGULARIZERS))
    build = REGULARIZERS[args.regularizer]
    return build(**{option: getattr(args, f"{args.regularizer}_{option}") for option in options_of(build)})
