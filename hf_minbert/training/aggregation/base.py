"""The base of aggregators, which combine one gradient per task into the one that the optimizer sees.

An aggregator sees the Gram matrix only, the dot products of every two gradients. Its result is a linear combination of
the gradients, so these `tasks * tasks` numbers are enough. A step costs one pass over the gradients for the Gram
matrix and one for the weighted sum, and nothing is read back from a GPU in between.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from ...errors import unknown_name
from .gram import gram_matrix, weighted_sum

#: The names of the rows, one per task.
Tasks = Sequence[Hashable]


class Aggregator(ABC):
    """Combines one gradient per task into one.

    Attributes:
        needs_rows: whether it must see each task's gradient by itself. Without rows, the tasks' losses
            accumulate in `.grad`, as cheap as a single loss; with rows the step keeps one gradient per task,
            `tasks * parameters * 4` bytes.
    """

    needs_rows: bool = True

    def __call__(self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Combines `gradients`, `[tasks, parameters]`, into `[parameters]`.

        All numbers are NaN if one number of one task is not finite, so that the step can be skipped. In the trainer
        fp16's loss scaler does that; in fp32 and bf16 nothing does, and weights become NaN as in the stock `Trainer`.

        Args:
            gradients: one row per task. Every process must have equal rows: average them first.
            generator: of the CPU, for random choices; torch's global one unless given. Processes agree if all their
                generators are in the same state.
            tasks: the rows' names, for an aggregator that remembers something of each task; by number unless given.
        """
        return self.step(gradients, generator, tasks)[0]

    def step(
        self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result of a call, the Gram matrix and the `coefficients`."""
        gram = gram_matrix(gradients)
        coefficients = self.coefficients(gram, generator, tasks)
        return weighted_sum(gradients, coefficients.sum(dim=0)), gram, coefficients

    def weights(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """The `[tasks]` weights whose `weighted_sum` with the gradients is the combined one; the rest as for
        `coefficients`, of which they are the sums over the rows."""
        return self.coefficients(gram, generator, tasks).sum(dim=0)

    def coefficients(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Each changed gradient as a combination of all gradients, `[tasks, tasks]`: row `i` is that of task `i`.

        For a log; their sum over the rows is `weights`. All are NaN if `gram` is not finite.

        Args:
            gram: `gram_matrix(gradients)`; over shards of the gradients, the sum of theirs.
            generator: as for a call.
            tasks: as for a call.
        """
        altered = self.altered(gram, generator, range(len(gram)) if tasks is None else tasks)
        return torch.where(gram.isfinite().all(), altered, torch.nan)

    @abstractmethod
    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        """The `coefficients` of a finite `gram`. Of another one any numbers, and it must not change the state."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Continues from `state_dict()`."""


def random_orders(tasks: int, generator: Generator | None = None) -> Tensor:
    """For each task the others in random order, `[tasks, tasks - 1]` on the CPU."""
    orders = [torch.randperm(tasks, generator=generator) for _ in range(tasks)]
    return torch.stack([order[order != i] for i, order in enumerate(orders)])


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0, as for a task without gradient."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def check_options(name: str, made_by: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises `MinBertError` where an option is none of those of `made_by`, the class of the aggregator `name`."""
    known = inspect.signature(made_by).parameters
    for option in options:
        if option not in known:
            raise unknown_name(f"option of aggregator {name!r}:", option, known)
