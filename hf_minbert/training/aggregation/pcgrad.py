"""PCGrad: gradient surgery by projection."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...errors import unknown_name
from .base import Aggregator, Tasks, random_orders, ratio


class PCGrad(Aggregator):
    """Removes conflicting components by projection (Yu et al. 2020, arXiv:2001.06782, algorithm 1).

    Each task's gradient visits the others in random order. If its dot product with the original gradient of another
    task is negative, its component along that gradient is removed. The results are added. Without conflicts the result
    equals that of `Sum`, bit for bit. With three or more tasks the sum may still conflict with some of them; this is a
    property of the algorithm.

    Args:
        reduction: `sum`, as in the paper, or `mean`, the sum divided by the number of tasks, for a learning rate that
            was chosen for the mean. The choice matters to SGD and to clipping, and hardly to Adam.

    Raises:
        MinBertError: `reduction` has another value.
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
