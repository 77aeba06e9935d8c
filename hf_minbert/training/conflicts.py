"""How far the tasks' gradients conflict, and what surgery makes of it: measured at every step, read for a log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .aggregators import conflicts


class ConflictMeter:
    """Means over steps of what the Gram matrix of the tasks' gradients says.

    By name: `conflict_<a>_<b>`, the share of steps in which the gradients of tasks `a` and `b` conflict (their dot
    product is negative); `cosine_<a>_<b>` between them; `norm_<a>`, the length of `a`'s gradient over the mean length
    of the step's; `removed_<a>`, the length of what the aggregator changed in `a`'s gradient over the length of that
    gradient; and `surgery_turn`, the sine of the angle between the combined gradient and the sum: 0 where there was
    nothing to do. Neither of the last two sees a common factor on all gradients, such as that of a mean. torchjd's
    aggregators weigh gradients and change none, so they show in the turn alone.

    Gradients are those over the shared parameters, whole vectors, as the aggregator gets them. Steps whose gradients
    are not finite do not count, nor for a pair those in which one of the two is missing.

    Args:
        tasks: in the order in which the names of a pair stand.
    """

    def __init__(self, tasks: Sequence[str]):
        self.tasks = list(tasks)
        self._sums: dict[tuple[str, ...], Tensor] = {}  # by the step's tasks, on the device, since the last reading
        self._totals: dict[str, list[float]] = {}  # name to sum and count over all of training

    def add(self, tasks: Sequence[str], gram: Tensor, coefficients: Tensor) -> None:
        """Takes in a step: what `Aggregator.step` returns, for these tasks. Nothing is read from the device."""
        key, finite = tuple(tasks), gram.isfinite().all()
        cosines, conflicting = conflicts(gram)
        norms = gram.diagonal().sqrt()
        figures = [
            conflicting.flatten(), cosines.flatten(), torch.where(norms == 0, 0.0, norms / norms.mean()),
            _removed(gram, coefficients), _turn(gram, coefficients),
        ]  # fmt: skip
        values = torch.cat([figure.to(gram.dtype) for figure in figures] + [gram.new_ones(1)])
        values = torch.where(finite, values, 0.0)
        self._sums[key] = self._sums[key] + values if key in self._sums else values

    def read(self) -> dict[str, float]:
        """The means since the last reading."""
        found = self._recent()
        self._totals = _added(self._totals, found)
        self._sums.clear()
        return _means(found)

    def means(self) -> dict[str, float]:
        """The means over all of training."""
        return _means(self.state_dict())

    def _recent(self) -> dict[str, list[float]]:
        """Sum and count of each name since the last reading."""
        found: dict[str, list[float]] = {}
        for tasks, sums in self._sums.items():
            *values, count = sums.tolist()
            named = {name: [value, count] for name, value in self._named(tasks, values).items()}
            found = _added(found, named)
        return found

    def _named(self, tasks: Sequence[str], values: list[float]) -> dict[str, float]:
        size = len(tasks)
        place = {task: tasks.index(task) for task in self.tasks if task in tasks}
        named = {}
        for a, b in combinations(place, 2):
            at = place[a] * size + place[b]
            named[f"conflict_{a}_{b}"], named[f"cosine_{a}_{b}"] = values[at], values[size * size + at]
        for task, at in place.items():
            named[f"norm_{task}"] = values[2 * size * size + at]
            named[f"removed_{task}"] = values[2 * size * size + size + at]
        return {**named, "surgery_turn": values[-1]}

    def state_dict(self) -> dict[str, Any]:
        return _added(self._totals, self._recent())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = {name: list(pair) for name, pair in state.items()}


def _removed(gram: Tensor, coefficients: Tensor) -> Tensor:
    """By task, the length of what it lost over its own; a row is divided by its own coefficient, 1 but for a mean."""
    own = coefficients.diagonal()
    lost = torch.where(own[:, None] == 0, 0.0, coefficients / own[:, None])
    lost = lost - torch.diag(lost.diagonal())
    lengths, norms = ((lost @ gram) * lost).sum(dim=1).clamp(min=0).sqrt(), gram.diagonal().sqrt()
    return torch.where(norms == 0, 0.0, lengths / norms)


def _turn(gram: Tensor, coefficients: Tensor) -> Tensor:
    """The sine of the angle between the combined gradient and the sum, `[1]`."""
    weights, ones = coefficients.sum(dim=0), gram.new_ones(len(gram))
    along = ones @ gram @ ones
    # What of the combined gradient is not along the sum: its length, not a difference of squares, which would cancel.
    rest = weights - torch.where(along == 0, 0.0, (weights @ gram @ ones) / along) * ones
    squares = torch.stack([rest @ gram @ rest, weights @ gram @ weights]).clamp(min=0)
    return torch.where(squares[1] == 0, 0.0, squares[0] / squares[1]).clamp(max=1).sqrt()[None]


def _added(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, list[float]]:
    none = [0.0, 0.0]
    return {
        name: [x + y for x, y in zip(one.get(name, none), other.get(name, none), strict=True)]
        for name in {**one, **other}
    }


def _means(sums: dict[str, list[float]]) -> dict[str, float]:
    return {name: value / count for name, (value, count) in sums.items() if count}
