"""AdamW by torch's fused kernel, with less Python around it, and with clipping in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from .base_args import BaseArguments
from .optimizers import CourseAdamW, PretrainedDecay


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` to the bit, in half of its Python time.

    States and checkpoints are those of the stock class. It has no `amsgrad`, `maximize` or sparse gradients, and
    serves no `GradScaler`.

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
            for gradient_of in _alike(group["params"]):
                self._move(gradient_of, group, divisor)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint of any of torch's AdamW, whose count of steps may lie on the CPU."""
        groups = [{**group, "fused": True} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _move(
        self, gradient_of: dict[torch.Tensor, torch.Tensor], group: dict[str, Any], divisor: torch.Tensor | None
    ) -> None:
        """One step of parameters of one device and dtype."""
        parameters = [*gradient_of]
        states = [self.state[parameter] or self._begin(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            [*gradient_of.values()],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=divisor,
        )  # fmt: skip

    def _begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state before a parameter's first step, as the stock class has it."""
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _alike(parameters: Iterable[torch.Tensor]) -> Iterable[dict[torch.Tensor, torch.Tensor]]:
    """The gradients by parameter, apart by device and dtype: one call moves those that are alike."""
    alike: dict[Any, dict[torch.Tensor, torch.Tensor]] = defaultdict(dict)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[parameter.device, parameter.dtype][parameter] = parameter.grad
    return alike.values()


def is_fused_adamw(args: TrainingArguments) -> bool:
    """Whether `FusedAdamW` takes the place of the stock optimizer: where steps are recorded as CUDA graphs."""
    fused = args.optim == OptimizerNames.ADAMW_TORCH_FUSED
    return fused and isinstance(args, BaseArguments) and args.uses_graphs and not args.fp16


def scaling_optimizer(
    optimizer: torch.optim.Optimizer, callbacks: Iterable[TrainerCallback]
) -> FusedAdamW | CourseAdamW | None:
    """The optimizer if its step scales gradients, and none of the callbacks may look at them before.

    Args:
        optimizer: as accelerate wraps it.
        callbacks: of the trainer.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if not isinstance(inner, FusedAdamW | CourseAdamW) or any(map(_may_look, callbacks)):
        return None
    return inner


def _may_look(callback: TrainerCallback) -> bool:
    """Whether a callback may look at gradients between clipping and the optimizer's step."""
    own = type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
    return own and not isinstance(callback, PretrainedDecay)
