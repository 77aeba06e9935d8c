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
    """Combines one gradient for each task into one.

    Attributes:
        needs_rows: whether it needs each task's gradient separately. Without rows, the tasks' losses accumulate in
            `.grad` at the cost of a single loss. With rows, the step stores one gradient for each task, `tasks *
            parameters * 4` bytes.
    """

    needs_rows: bool = True

    def __call__(self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Combines `gradients`, `[tasks, parameters]`, into `[parameters]`.

        If one number of one task is not finite, the result is NaN, so that the step can be skipped. In the trainer,
        the loss scaler of fp16 skips it. In fp32 and bf16 it is not skipped, and weights become NaN as in the stock
        `Trainer`.

        Args:
            gradients: one row for each task. All processes must have equal rows, so average them first.
            generator: a CPU generator for random choices; torch's global one by default. Processes get the same result
                if their generators have the same state.
            tasks: the names of the rows, for an aggregator with a state for each task. The default is their numbers.
        """
        return self.step(gradients, generator, tasks)[0]

    def step(
        self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the result of a call, the Gram matrix and the `coefficients`."""
        gram = gram_matrix(gradients)
        coefficients = self.coefficients(gram, generator, tasks)
        return weighted_sum(gradients, coefficients.sum(dim=0)), gram, coefficients

    def weights(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Returns the `[tasks]` weights whose `weighted_sum` with the gradients is the combined gradient.

        They are the sums of `coefficients` over the rows. The arguments are those of `coefficients`.
        """
        return self.coefficients(gram, generator, tasks).sum(dim=0)

    def coefficients(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Returns each changed gradient as a combination of all gradients, `[tasks, tasks]`.

        Row `i` belongs to task `i`. They are used for logs. Their sum over the rows is `weights`. All are NaN if
        `gram` is not finite.

        Args:
            gram: `gram_matrix(gradients)`; for sharded gradients, the sum over the shards.
            generator: as for a call.
            tasks: as for a call.
        """
        altered = self.altered(gram, generator, range(len(gram)) if tasks is None else tasks)
        return torch.where(gram.isfinite().all(), altered, torch.nan)

    @abstractmethod
    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        """Returns the `coefficients` of a finite `gram`.

        If `gram` is not finite, any numbers; the state must not change then.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run, in plain numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Continues from `state_dict()`."""


def random_orders(tasks: int, generator: Generator | None = None) -> Tensor:
    """Returns for each task the other tasks in random order, `[tasks, tasks - 1]` on the CPU."""
    orders = [torch.randperm(tasks, generator=generator) for _ in range(tasks)]
    return torch.stack([order[order != i] for i, order in enumerate(orders)])


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divides. The result is 0 if the denominator is 0, as for a task without gradient."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def check_options(name: str, made_by: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises `MinBertError` if an option is not one of those of `made_by`, the class of the aggregator `name`."""
    known = inspect.signature(made_by).parameters
    for option in options:
        if option not in known:
            raise unknown_name(f"option of aggregator {name!r}:", option, known)
