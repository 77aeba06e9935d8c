"""The sum of the tasks' gradients, which is the gradient of the summed losses."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .base import Aggregator, Tasks
from .gram import weighted_sum


class Sum(Aggregator):
    """The gradient of the summed losses."""

    needs_rows = False

    def __call__(self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        return weighted_sum(gradients, gradients.new_ones(len(gradients)))

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
