"""Means and counts of the values that training steps log. They are summed on the device and read at each log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


class MetricTracker:
    """Means and counts of the steps' values, over all processes.

    They stay on the device until they are read, because reading a value at its step would make the GPU wait. All
    processes add the same names in the same order, and read at the same time.

    Args:
        accelerator: computes sums over the processes.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._sums: dict[str, list[Tensor]] = {}  # name to sum and count since the last reading
        self._counts: dict[str, Tensor] = {}
        self._totals: dict[str, list[float]] = {}  # name to sum and count since training began

    def add(self, name: str, value: Tensor) -> None:
        """Adds a value to the mean with this name."""
        sums = self._sums.setdefault(name, [torch.zeros_like(value), torch.zeros_like(value)])
        sums[0] += value
        sums[1] += 1

    def count(self, name: str, value: Tensor) -> None:
        """Adds a value to the sum with this name."""
        self._counts[name] = value if name not in self._counts else self._counts[name] + value

    def read(self) -> dict[str, float]:
        """Returns the means and counts since the last reading. Empty if there was no step."""
        if not self._sums:
            return {}
        sums = torch.stack([torch.stack(pair) for pair in self._sums.values()])  # [names, 2]
        sums = dict(zip(self._sums, self.accelerator.reduce(sums, "sum").tolist(), strict=True))
        counts = {name: self.accelerator.reduce(value, "sum").item() for name, value in self._counts.items()}
        self._sums.clear()
        self._counts.clear()
        for name, (total, count) in sums.items():
            before = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = [before[0] + total, before[1] + count]
        return {
            **{name: total / count for name, (total, count) in sums.items()},
            **{name: round(value) for name, value in counts.items()},
        }

    def totals(self) -> dict[str, float]:
        """Returns the means since training began, over all values that have been read."""
        return {name: total / count for name, (total, count) in self._totals.items()}
