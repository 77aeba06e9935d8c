"""The gradients of a step: collected task by task, averaged over processes, combined into `.grad`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

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
        average_over_processes(p.grad for p in self.parameters if p.grad is not None)


class GradientRows:
    """For an aggregator with rows: one gradient per task, accumulated until the optimizer steps.

    Parameters that two or more of the step's tasks reach are shared: their gradients, one row per task, go to the
    aggregator, with zeros where a task does not reach one of them. A parameter that one task reaches (its head) keeps
    that task's gradient; one that no task reaches keeps `grad=None`. Rows are averaged over processes before they are
    combined, so that `N` processes do what one process does on the union of their batches.

    The rows lie in one matrix, and the backward pass adds to them in place: nothing is copied, and the memory beside
    that of a summed gradient is one number per task and shared parameter.

    Raises:
        MinBertError: the trained parameters have several dtypes.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], aggregator: Aggregator):
        dtypes = sorted({str(p.dtype) for p in parameters})
        if len(dtypes) > 1:
            raise MinBertError(
                f"An aggregator of rows needs trained parameters of one dtype. Found {' and '.join(dtypes)}. "
                "Load the model in float32."
            )
        self.parameters = parameters
        self.aggregator = aggregator
        #: Per task, the gradient of each parameter that it has ever reached, by the parameter's place.
        self.rows: dict[str, dict[int, torch.Tensor]] = {}
        self.open: list[str] = []  # tasks with a gradient since the last step, in the order in which they came
        self._matrix = torch.empty(0)  # [tasks, numbers of the parameters in `_common`]
        self._common: list[int] = []  # parameters that two or more tasks have ever reached

    def add(self, task: str, loss: torch.Tensor) -> None:
        row = self.rows.setdefault(task, {})
        if task not in self.open:
            self.open.append(task)
            for gradient in row.values():
                gradient.zero_()
        for index, parameter in enumerate(self.parameters):
            parameter.grad = row.get(index)  # where there is one, the backward pass adds to it
        loss.backward()
        fresh = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None and i not in row}
        for parameter in self.parameters:
            parameter.grad = None
        if fresh:
            row |= fresh
            self._lay_out()

    def _lay_out(self) -> None:
        """Moves the rows to a matrix that has a place for every parameter that is now known to be shared."""
        self._common = self._reached_by_several(list(self.rows))
        sizes = [self.parameters[i].numel() for i in self._common]
        matrix = self.parameters[0].new_zeros(len(self.rows), sum(sizes))
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
        for task in self.open:
            for i, gradient in self.rows[task].items():
                self.parameters[i].grad = gradient  # of its only task; the shared ones are set next
        if shared:
            combined = self.aggregator(self._stacked(shared), generator)
            sizes = [self.parameters[i].numel() for i in shared]
            for i, piece in zip(shared, combined.split(sizes), strict=True):
                self.parameters[i].grad = piece.view_as(self.parameters[i])
        self.open.clear()

    def _average(self) -> None:
        if self.open == list(self.rows):
            average_over_processes([*self._matrix])
            common = set(self._common)
        else:
            common = set()
        average_over_processes(g for task in self.open for i, g in sorted(self.rows[task].items()) if i not in common)

    def _stacked(self, shared: list[int]) -> torch.Tensor:
        """The rows of this step's tasks over the shared parameters, [tasks, numbers]."""
        if self.open == list(self.rows) and shared == self._common:
            return self._matrix
        return torch.stack([self._flat(self.rows[task], shared) for task in self.open])

    def _flat(self, row: dict[int, torch.Tensor], shared: list[int]) -> torch.Tensor:
        pieces = [row[i] if i in row else torch.zeros_like(self.parameters[i]) for i in shared]
        return torch.cat([piece.reshape(-1) for piece in pieces])


def collector(
    parameters: Iterable[torch.nn.Parameter], make: Callable[[], Aggregator]
) -> SummedGradients | GradientRows:
    """The cheapest collector that serves the aggregator, over the parameters that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    aggregator = make()
    return GradientRows(trained, aggregator) if aggregator.needs_rows else SummedGradients(trained)
