"""The gradients of a step: collected task by task, averaged over processes, combined into `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

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

    Parameters that two or more tasks reach are shared: their gradients, one row per task, go to the aggregator.
    A parameter that one task reaches (its head) keeps that task's gradient; one that no task reaches keeps
    `grad=None`. Rows are averaged over processes before they are combined, so that `N` processes do what one
    process does on the union of their batches.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], aggregator: Aggregator):
        self.parameters = parameters
        self.aggregator = aggregator
        self.rows: dict[str, list[torch.Tensor | None]] = {}

    def add(self, task: str, loss: torch.Tensor) -> None:
        fresh = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        row = self.rows.setdefault(task, [None] * len(fresh))
        for index, gradient in enumerate(fresh):
            if gradient is not None:
                # autograd may give one number seen many times over, which nothing can write to
                row[index] = gradient.contiguous() if row[index] is None else row[index] + gradient

    def combine(self, generator: torch.Generator) -> None:
        average_over_processes(g for task in sorted(self.rows) for g in self.rows[task] if g is not None)
        reached = [sum(row[i] is not None for row in self.rows.values()) for i in range(len(self.parameters))]
        shared = [i for i, tasks in enumerate(reached) if tasks > 1]
        for i, tasks in enumerate(reached):
            if tasks == 1:
                # A copy: autograd may give two parameters the same tensor, and clipping would scale it twice.
                self.parameters[i].grad = next(row[i] for row in self.rows.values() if row[i] is not None).clone()
        if shared:
            matrix = torch.stack([self._flat(row, shared) for row in self.rows.values()])  # [tasks, parameters]
            combined = self.aggregator(matrix, generator)
            sizes = [self.parameters[i].numel() for i in shared]
            for i, piece in zip(shared, combined.split(sizes), strict=True):
                self.parameters[i].grad = piece.view_as(self.parameters[i])
        self.rows.clear()

    def _flat(self, row: list[torch.Tensor | None], shared: list[int]) -> torch.Tensor:
        pieces = [row[i] if row[i] is not None else torch.zeros_like(self.parameters[i]) for i in shared]
        return torch.cat([piece.reshape(-1) for piece in pieces])


def collector(
    parameters: Iterable[torch.nn.Parameter], make: Callable[[], Aggregator]
) -> SummedGradients | GradientRows:
    """The cheapest collector that serves the aggregator, over the parameters that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    aggregator = make()
    return GradientRows(trained, aggregator) if aggregator.needs_rows else SummedGradients(trained)
