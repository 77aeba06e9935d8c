"""GradVac: gradients turned towards each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Generator, Tensor

from ...errors import MinBertError
from .base import Aggregator, Tasks, random_orders, ratio


class GradVac(Aggregator):
    """Turns each gradient towards the others, up to the usual cosine of the pair (Wang et al. 2021, arXiv:2010.05874).

    This is the paper's form for whole vectors. As in `PCGrad`, each gradient visits the original gradients of the
    other tasks in random order. If its cosine with one of them is below the pair's target, that gradient is added with
    the factor that makes the cosine equal to the target. After each visit, the target moves towards the measured
    cosine. Targets start at 0; with targets of 0 this is PCGrad.

    Args:
        beta: how far a target moves at each step, above 0 and at most 1; 0.01 in the paper.

    Raises:
        MinBertError: `beta` is out of range.
    """

    def __init__(self, beta: float = 0.01):
        if not isinstance(beta, int | float) or not 0 < beta <= 1:
            raise MinBertError(f"`beta` must be above 0 and at most 1. Found {beta!r}. The paper has 0.01.")
        self.beta = beta
        #: The target of (task, other task), on the device; by name, since a step may lack some task.
        self.targets: dict[tuple[Hashable, Hashable], Tensor] = {}

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        pairs = [(task, other) for task in tasks for other in tasks]
        zero = gram.new_zeros(())
        targets = torch.stack([self.targets.get(pair, zero).to(gram.device, non_blocking=True) for pair in pairs])
        targets = targets.view_as(gram)
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        orders = random_orders(len(gram), generator).to(gram.device, non_blocking=True)
        norms, result, cosines = gram.diagonal().sqrt(), units, torch.zeros_like(gram)
        for others in orders.T:
            along, target = result @ gram, (targets * units[others]).sum(dim=1)
            norm = (along * result).sum(dim=1).clamp(min=0).sqrt()
            cosine = ratio((along * units[others]).sum(dim=1), norm * norms[others]).clamp(-1, 1)
            sine, target_sine = (1 - cosine.square()).sqrt(), (1 - target.square()).sqrt()
            missing = ratio(norm * (target * sine - cosine * target_sine), norms[others] * target_sine)
            result = result + torch.where(cosine < target, missing, 0.0)[:, None] * units[others]
            cosines = cosines + cosine[:, None] * units[others]
        moved = torch.where(gram.isfinite().all(), targets.lerp(cosines, self.beta), targets)
        self.targets.update(zip(pairs, moved.flatten().unbind(), strict=True))
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"targets": [[*pair, target.item()] for pair, target in self.targets.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        targets = state["targets"]
        self.targets = {(task, other): torch.tensor(value, dtype=torch.float64) for task, other, value in targets}
