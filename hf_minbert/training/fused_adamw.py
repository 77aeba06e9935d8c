"""AdamW by torch's fused kernel, with less Python around it, and with clipping in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from .base_args import BaseArguments
from .optimizers import DividingOptimizer, PretrainedDecay


class FusedAdamW(DividingOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` to the bit, in half of its Python time.

    States and checkpoints are those of the stock class. It has no `amsgrad`, `maximize` or sparse gradients, and
    serves no `GradScaler`.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint of any of torch's AdamW, whose count of steps may be on the CPU."""
        groups = [{**group, "fused": True} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _move(
        self, gradient_of: Mapping[torch.Tensor, torch.Tensor], group: dict[str, Any], divisor: torch.Tensor | None
    ) -> None:
        alike = defaultdict(list)  # what one call may move
        for parameter in gradient_of:
            alike[parameter.device, parameter.dtype].append(parameter)
        for parameters in alike.values():
            states = [self.state[parameter] or self._begin(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                parameters,
                [gradient_of[parameter] for parameter in parameters],
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


def is_fused_adamw(args: TrainingArguments) -> bool:
    """Whether `FusedAdamW` takes the place of the stock optimizer: where steps are recorded as CUDA graphs."""
    fused = args.optim == OptimizerNames.ADAMW_TORCH_FUSED
    return fused and isinstance(args, BaseArguments) and args.uses_graphs and not args.fp16


def scaling_optimizer(
    optimizer: torch.optim.Optimizer, callbacks: Iterable[TrainerCallback]
) -> DividingOptimizer | None:
    """The optimizer if its step scales gradients, and none of the callbacks may look at them before.

    Args:
        optimizer: as accelerate wraps it.
        callbacks: of the trainer.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if not isinstance(inner, DividingOptimizer) or any(map(_may_look, callbacks)):
        return None
    return inner


def _may_look(callback: TrainerCallback) -> bool:
    """Whether a callback may look at gradients between clipping and the optimizer's step."""
    own = type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
    return own and not isinstance(callback, PretrainedDecay)
