"""Moving averages of each task's gradient, which an aggregator gets instead of the gradients of one step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...errors import MinBertError
from .base import Tasks


class Smoothing:
    """Averages each task's gradient over steps before an aggregator sees it.

    Report 000 uses 'gradient smoothing' and does not define it. Here it is an exponential moving average with Adam's
    bias correction. The gradient of `n` steps ago has a weight proportional to `decay ** n`, and the weights sum to 1
    from the first step. A task that is missing from a step keeps its average.

    It needs one more float32 number for each task and parameter. `state_dict` includes them.

    Args:
        decay: from 0, below 1. With 0 nothing is smoothed.

    Raises:
        MinBertError: `decay` is out of range.
    """

    def __init__(self, decay: float):
        if not 0 <= decay < 1:
            raise MinBertError(f"`decay` must be 0 or more and below 1. Found {decay}.")
        self.decay = decay
        self.means: dict[Hashable, Tensor] = {}
        self.weights: dict[Hashable, Tensor] = {}  # 1 - decay ** steps

    def __call__(self, gradients: Tensor, tasks: Tasks, scale: Tensor | float = 1.0) -> None:
        """Replaces the rows of `gradients`, `[tasks, parameters]`, by their averages, in place.

        If one number of one row is not finite, rows and averages are not changed, so that the aggregator gets the
        original rows. If the length of a task's row changes, a new average starts.

        Args:
            tasks: the names of the rows.
            scale: the factor on the rows: the loss scale of fp16, which changes between steps.
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
