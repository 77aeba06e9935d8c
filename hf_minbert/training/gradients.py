"""The gradients of a step: collected task by task, averaged over processes, combined into `.grad`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..errors import MinBertError
from .aggregators import Aggregator

#: Numbers per all-reduce: few enough that the copy is small beside the model, enough to fill the network.
BUCKET = 1 << 23


def average_over_processes(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces each tensor by its mean over all processes, in place.

    Every process must pass tensors of the same shapes in the same order.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (sum(t.numel() for t in bucket) + tensor.numel() > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


class SummedGradients:
    """For an aggregator without rows: losses accumulate in `.grad`, averaged once per optimizer step.

    The backward pass does not go through DDP: that would average once per task, and refuses several forward
    passes before one backward pass.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters

    def add(self, task: str, loss: torch.Tensor) -> None:
        loss.backward()

    def combine(self, generator: torch.Generator) -> None:
        average_over_processes(self.combined())

    def combined(self) -> list[torch.Tensor]:
        """Tensors that together are the `.grad` of all parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]


class StaticGradients(ABC):
    """Gradients that lie in memory of their own, to which every backward pass adds in place.

    Attributes:
        rows: per task, where the gradient of each parameter that it has ever reached lies, by the parameter's place.
        open: tasks with a gradient since the last step, in the order in which they came.
        version: counts how often that memory has moved.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters
        self.rows: dict[str, dict[int, torch.Tensor]] = {}
        self.open: list[str] = []
        self.version = 0

    def add(self, task: str, loss: torch.Tensor) -> None:
        with self.attached(task):
            loss.backward()

    def begin(self, task: str) -> None:
        """Before a task's backward pass: in its first one since the last step, forgets what stood there."""
        if task not in self.open:
            self._forget(task)
            self.open.append(task)

    @contextmanager
    def attached(self, task: str) -> Iterator[None]:
        """Lets the backward passes inside add to the task's gradients; `.grad` is `None` before and after."""
        self.begin(task)
        row = self.rows.setdefault(task, {})
        for index, parameter in enumerate(self.parameters):
            parameter.grad = row.get(index)
        try:
            yield
        finally:
            fresh = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None and i not in row}
            for parameter in self.parameters:
                parameter.grad = None
        if fresh:
            self._adopt(task, fresh)
            self.version += 1

    @abstractmethod
    def _forget(self, task: str) -> None:
        """Sets a task's gradients to zero."""

    @abstractmethod
    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        """Takes in the gradients of parameters that the task has not reached before."""

    @abstractmethod
    def combine(self, generator: torch.Generator) -> None:
        """Makes of all tasks' gradients the `.grad` of each parameter, and closes the step."""

    @abstractmethod
    def combined(self) -> list[torch.Tensor]:
        """Tensors that together are the `.grad` of all parameters: as few as the memory allows."""


class StaticSum(StaticGradients):
    """The gradient of the summed losses, in one array."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__(parameters)
        sizes = [p.numel() for p in parameters]
        self._sum = parameters[0].new_zeros(sum(sizes))
        self._whole = False  # whether the last step reached every parameter
        self._places = [piece.view_as(p) for piece, p in zip(self._sum.detach().split(sizes), parameters, strict=True)]

    def _forget(self, task: str) -> None:
        if not self.open:
            self._sum.zero_()

    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        for i, gradient in fresh.items():
            self._places[i].add_(gradient)
            self.rows[task][i] = self._places[i]

    def combine(self, generator: torch.Generator) -> None:
        reached = sorted({i for task in self.open for i in self.rows[task]})
        average_over_processes(
            [self._sum] if len(reached) == len(self.parameters) else [self._places[i] for i in reached]
        )
        for i in reached:
            self.parameters[i].grad = self._places[i]
        self._whole = len(reached) == len(self.parameters)
        self.open.clear()

    def combined(self) -> list[torch.Tensor]:
        return [self._sum] if self._whole else [p.grad for p in self.parameters if p.grad is not None]


class GradientRows(StaticGradients):
    """For an aggregator with rows: one gradient per task, accumulated until the optimizer steps.

    Parameters that two or more of the step's tasks reach are shared: their gradients, one row per task, go to the
    aggregator, with zeros where a task does not reach one of them. A parameter that one task reaches (its head) keeps
    that task's gradient; one that no task reaches keeps `grad=None`. Rows are averaged over processes before they are
    combined, so that `N` processes do what one process does on the union of their batches.

    The rows lie in one matrix: nothing is copied, and the memory beside that of a summed gradient is one number per
    task and shared parameter.

    Raises:
        MinBertError: the trained parameters have several dtypes.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], aggregator: Aggregator):
        super().__init__(parameters)
        dtypes = sorted({str(p.dtype) for p in parameters})
        if len(dtypes) > 1:
            raise MinBertError(
                f"An aggregator of rows needs trained parameters of one dtype. Found {' and '.join(dtypes)}. "
                "Load the model in float32."
            )
        self.aggregator = aggregator
        self._matrix = torch.empty(0)  # [tasks, numbers of the parameters in `_common`]
        self._common: list[int] = []  # parameters that two or more tasks have ever reached
        self._combined: list[torch.Tensor] = []

    def _forget(self, task: str) -> None:
        own = self.rows.get(task, {})
        if own:
            self._matrix[list(self.rows).index(task)].zero_()
        for i in own.keys() - set(self._common):
            own[i].zero_()

    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        """Moves the rows to a matrix that has a place for every parameter that is now known to be shared."""
        self.rows[task] |= fresh
        self._common = self._reached_by_several(list(self.rows))
        sizes = [self.parameters[i].numel() for i in self._common]
        matrix = self.parameters[0].new_zeros(len(self.rows), sum(sizes)).detach()
        for values, row in zip(matrix, self.rows.values(), strict=True):
            for i, place in zip(self._common, values.split(sizes), strict=True):
                if i in row:
                    row[i] = place.view_as(self.parameters[i]).copy_(row[i])
            for i in row.keys() - set(self._common):
                row[i] = row[i].clone()  # autograd may give two parameters one tensor
        self._matrix = matrix

    def _reached_by_several(self, tasks: list[str]) -> list[int]:
        counts = Counter(i for task in tasks for i in self.rows[task])
        return sorted(i for i, tasks in counts.items() if tasks > 1)

    def combine(self, generator: torch.Generator) -> None:
        self._average()
        shared = self._reached_by_several(self.open)
        in_several = set(shared)
        own = {i: g for task in self.open for i, g in self.rows[task].items() if i not in in_several}
        for i, gradient in own.items():
            self.parameters[i].grad = gradient
        self._combined = [*own.values()]
        if shared:
            combined = self.aggregator(self._stacked(shared), generator)
            sizes = [self.parameters[i].numel() for i in shared]
            for i, piece in zip(shared, combined.split(sizes), strict=True):
                self.parameters[i].grad = piece.view_as(self.parameters[i])
            self._combined.append(combined)
        self.open.clear()

    def combined(self) -> list[torch.Tensor]:
        return self._combined

    def _average(self) -> None:
        whole = self.open == list(self.rows)
        in_matrix = set(self._common) if whole else set()
        average_over_processes([*self._matrix] if whole else [])
        average_over_processes(
            gradient for task in self.open for i, gradient in sorted(self.rows[task].items()) if i not in in_matrix
        )

    def _stacked(self, shared: list[int]) -> torch.Tensor:
        """The rows of this step's tasks over the shared parameters, [tasks, numbers]."""
        if self.open == list(self.rows) and shared == self._common:
            return self._matrix
        return torch.stack([self._flat(self.rows[task], shared) for task in self.open])

    def _flat(self, row: dict[int, torch.Tensor], shared: list[int]) -> torch.Tensor:
        pieces = [row[i] if i in row else torch.zeros_like(self.parameters[i]) for i in shared]
        return torch.cat([piece.reshape(-1) for piece in pieces])


Gradients = SummedGradients | StaticGradients


def collector(
    parameters: Iterable[torch.nn.Parameter], make: Callable[[], Aggregator], static: bool = False
) -> Gradients:
    """The cheapest collector that serves the aggregator, over the parameters that are trained.

    Args:
        static: whether gradients must stay where they are from step to step, as CUDA graphs need it.
    """
    trained = [p for p in parameters if p.requires_grad]
    aggregator = make()
    if aggregator.needs_rows:
        return GradientRows(trained, aggregator)
    return StaticSum(trained) if static else SummedGradients(trained)
