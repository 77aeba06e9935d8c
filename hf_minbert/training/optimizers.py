"""Optimizers that `optim` takes beside the stock ones, and the weight decay towards pretrained weights.

To add an optimizer: a class here, whose arguments are those of `CourseAdamW`, and a line in `OwnOptimizer` and in
`OPTIMIZERS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils.generic import ExplicitEnum

from ..errors import MinBertError


class DividingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose step divides gradients as it reads them.

    Attributes:
        divisor: what the next step divides gradients by, float32 on their device, once. Afterwards `.grad` is the
            quotient, as if the gradients had been divided before.
    """

    divisor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):
        """Moves every parameter that has a gradient. A closure computes the loss anew, which is then returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor, self.divisor = self.divisor, None
        for group in self.param_groups:
            gradients = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
            if gradients:
                self._move(gradients, group, divisor)
        return loss

    @abstractmethod
    def _move(
        self, gradient_of: Mapping[torch.Tensor, torch.Tensor], group: dict[str, Any], divisor: torch.Tensor | None
    ) -> None:
        """One step of one group, of which some parameter has a gradient."""


class CourseAdamW(DividingOptimizer):
    """AdamW as the CS224N project teaches it: the efficient form of Adam (Kingma and Ba 2015, end of section 2).

    It differs from `torch.optim.AdamW` in two places. `eps` is added to the square root of the second moment as it
    is, before its bias is corrected: at step t it counts 1 / sqrt(1 - beta2^t) times as much, 32 times at the first
    one. And weight decay comes after the update, on the weights that it moved.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: how much of the first and of the second moment is kept at each step.
        eps: the course's is 1e-6, the default of the training argument `adam_epsilon` 1e-8.
        weight_decay: each step takes `lr * weight_decay` of a weight.

    Raises:
        MinBertError: a value is out of range, or a gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise MinBertError(f"`{name}` of CourseAdamW must be a number from 0. Found {value}.")
        if not 0 < eps < math.inf:  # without it, the step of a weight that never had a gradient is 0 / 0
            raise MinBertError(f"`eps` of CourseAdamW must be a number above 0. Found {eps}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise MinBertError(f"`betas` of CourseAdamW must be at least 0 and less than 1. Found {betas}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move(
        self, gradient_of: Mapping[torch.Tensor, torch.Tensor], group: dict[str, Any], divisor: torch.Tensor | None
    ) -> None:
        """One step of one group."""
        if any(gradient.is_sparse for gradient in gradient_of.values()):
            raise MinBertError("CourseAdamW takes no sparse gradients. Use dense ones, or `optim: adamw_torch`.")
        alike = defaultdict(list)  # what one call may move
        for parameter in gradient_of:
            state = self._state(parameter)
            state["step"] += 1  # each its own: a parameter that a step does not reach waits
            alike[parameter.device, parameter.dtype, state["step"]].append(parameter)
        beta1, beta2 = group["betas"]
        for (device, _, step), parameters in alike.items():
            states = [self.state[parameter] for parameter in parameters]
            # Torch's fused step, which reads and writes all once, adds `eps` to the root of the corrected moment.
            # Divided by the correction, it is what the course adds to the root before.
            torch._fused_adamw_(
                parameters,
                [gradient_of[parameter] for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.full((), float(step), device=device)] * len(parameters),
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"] / math.sqrt(1 - beta2**step),
                weight_decay=0.0, amsgrad=False, maximize=False, grad_scale=divisor,
            )  # fmt: skip
            if group["weight_decay"]:
                # Not by a factor of 1 - lr * decay: in float32 that is 1 - 1.2e-7 where it should be 1 - 1e-7.
                torch._foreach_add_(parameters, parameters, alpha=-group["lr"] * group["weight_decay"])

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class PretrainedDecay(TrainerCallback):
    """Weight decay towards where the weights began, not towards zero (L2-SP, Li et al. 2018, arXiv:1802.01483).

    Before each optimizer step, and apart from the loss's gradient as in AdamW, a weight goes the share
    `lr * decay` of the way back.

    Args:
        decay: how strong it is.
        parameters: those that it pulls, with the values that it pulls them to.

    Raises:
        MinBertError: there are none.
    """

    def __init__(self, decay: float, parameters: list[nn.Parameter]):
        if not parameters:
            raise MinBertError("`pretrained_decay` is of the encoder, which is not trained. Leave one of both out.")
        self.decay = decay
        self.start = {parameter: parameter.detach().clone() for parameter in parameters}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for group in kwargs["optimizer"].param_groups:
            pulled = [parameter for parameter in group["params"] if parameter in self.start]
            if pulled:
                values = [parameter.detach() for parameter in pulled]
                torch._foreach_lerp_(values, [self.start[p] for p in pulled], group["lr"] * self.decay)


class OwnOptimizer(ExplicitEnum):
    """The names that `optim` has for them, as `OptimizerNames` has those of the stock ones."""

    COURSE_ADAMW = "course_adamw"


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"course_adamw": CourseAdamW}
