"""Report 003's projection, which does not test for conflict."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .base import Aggregator, Tasks, ratio


class Unconditional(Aggregator):
    """Removes from each gradient its components along all others, in conflict or not (report 003, equations 2 to 4).

    This differs from PCGrad in two ways. There is no test for conflict, so tasks that agree lose their common
    component. All dot products are those of the original gradients, so the order does not matter.
    """

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return units - ratio(gram, gram.diagonal()) * (1 - units)
