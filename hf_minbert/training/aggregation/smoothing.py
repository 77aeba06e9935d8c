"""Averages of each task's gradient over steps, for an aggregator to see instead of one step's gradients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...errors import MinBertError
from .base import Tasks


class Smoothing:
    """Averages each task's gradient over steps before an aggregator sees it.

    Report 000's 'gradient smoothing', which it does not define; here an exponential moving average, corrected for its
    start as in Adam: the gradient of `n` steps ago weighs `decay ** n`, and the weights sum to 1 from the first step
    on. A task that is missing from a step keeps its average.

    Memory: one more number per task and parameter, in float32; `state_dict` has them all.

    Args:
        decay: 0 or more, below 1. At 0 nothing is smoothed.

    Raises:
        MinBertError: `decay` out of range.
    """

    def __init__(self, decay: float):
        if not 0 <= decay < 1:
            raise MinBertError(f"`decay` must be 0 or more and below 1. Found {decay}.")
        self.decay = decay
        self.means: dict[Hashable, Tensor] = {}
        self.weights: dict[Hashable, Tensor] = {}  # 1 - decay ** steps

    def __call__(self, gradients: Tensor, tasks: Tasks, scale: Tensor | float = 1.0) -> None:
        """Replaces the rows of `gradients`, `[tasks, parameters]`, by their averages, in place.

        If one number of one row is not finite, the rows stay as they are, for the aggregator to see, and the averages
        do too. A row of another length than the task's last starts an average of its own.

        Args:
            tasks: the rows' names.
            scale: what the rows were multiplied with; the loss scale of fp16, which changes between steps.
        """
        finite = gradients.sum(dim=1, dtype=torch.float64).isfinite().all()
        for task, row in zip(tasks, gradients, strict=True):
            dtype = torch.promote_types(row.dtype, torch.float32)
            if task not in self.means or self.means[task].shape != row.shape:
                self.means[task] = torch.zeros_like(row, dtype=dtype)
                self.weights[task] = row.new_zeros((), dtype=torch.float64)
            mean, weight = (state[task].to(row.device, non_blocking=True) for state in (self.means, self.weights))
            total = weight.lerp(torch.ones_like(weight), 1 - self.decay)
            smooth = mean.lerp(row.to(dtype) / scale, ((1 - self.decay) / total).to(dtype))
            row.copy_(torch.where(finite, smooth * scale, row))
            self.means[task] = torch.where(finite, smooth, mean)
            self.weights[task] = torch.where(finite, total, weight)

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means), "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self.weights = dict(state["means"]), dict(state["weights"])
