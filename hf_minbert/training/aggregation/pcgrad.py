"""PCGrad: gradient surgery by projection."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...errors import unknown_name
from .base import Aggregator, Tasks, random_orders, ratio


class PCGrad(Aggregator):
    """Projects away what conflicts (Yu et al. 2020, arXiv:2001.06782, algorithm 1).

    Each task's gradient visits the others in random order; where its dot product with another's original gradient is
    negative, it loses its component along that. The results are added. Without conflict that is bit for bit what `Sum`
    gives. With three tasks and more the sum may still conflict with some: that is the algorithm.

    Args:
        reduction: `sum`, as in the paper, or `mean`: the sum divided by the number of tasks, for a learning rate that
            was chosen so. It matters to SGD and to clipping, hardly to Adam.

    Raises:
        MinBertError: another `reduction`.
    """

    def __init__(self, reduction: str = "sum"):
        if reduction not in ("sum", "mean"):
            raise unknown_name("reduction", reduction, ("sum", "mean"))
        self.reduction = reduction

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        orders = random_orders(len(gram), generator).to(gram.device, non_blocking=True)
        result = units
        for others in orders.T:  # all tasks at once: the first that each visits, the second, ...
            dots = (result * gram[others]).sum(dim=1)
            result = result - ratio(dots.clamp(max=0), gram.diagonal()[others])[:, None] * units[others]
        return result / len(gram) if self.reduction == "mean" else result
