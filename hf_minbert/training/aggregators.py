"""How the gradients of a round's tasks become the one gradient that the optimizer sees.

To add one: a class here and a line in `AGGREGATORS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Aggregator(ABC):
    """Combines one gradient per task into one.

    Attributes:
        needs_rows: whether it must see each task's gradient by itself. Without rows, the tasks' losses
            accumulate in `.grad`, as cheap as a single loss; with rows the step keeps one gradient per task,
            `tasks * parameters * 4` bytes.
    """

    needs_rows: bool = True

    @abstractmethod
    def __call__(self, gradients: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Combines `gradients`, `[tasks, parameters]`, into `[parameters]`.

        Every process calls it with equal gradients and an equally seeded `generator`, so that all get the same.
        """


class Sum(Aggregator):
    """The gradient of the summed losses."""

    needs_rows = False

    def __call__(self, gradients: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return gradients.sum(dim=0)


AGGREGATORS: dict[str, type[Aggregator]] = {"sum": Sum}
