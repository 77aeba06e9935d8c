"""Report 003's projection without a test for conflict."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .base import Aggregator, Tasks, ratio


class Unconditional(Aggregator):
    """Takes from each gradient its component along every other, in conflict or not (report 003, equations 2 to 4).

    Not PCGrad: there is no test for conflict, so tasks that agree lose what they agree on, and all dot products are
    those of the original gradients, so the order does not matter.
    """

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return units - ratio(gram, gram.diagonal()) * (1 - units)
