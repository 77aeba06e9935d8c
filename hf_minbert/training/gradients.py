"""The gradients of a step: collected task by task, averaged over processes, combined into `.grad`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..errors import MinBertError
from .aggregation.base import Aggregator
from .aggregation.conflicts import ConflictMeter
from .aggregation.gram import gram_matrix, weighted_sum
from .aggregation.smoothing import Smoothing
from .averaging import Averaging, average_over_processes, buckets, processes
from .optimizers import DividingOptimizer
from .step_memory import one_array


class Gradients(ABC):
    """Collects the gradients of a step.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters

    @abstractmethod
    def add(self, task: str, loss: torch.Tensor) -> None:
        """Differentiates the loss of a task, and adds to its gradient."""

    def add_together(self, losses: Mapping[str, torch.Tensor]) -> None:
        """As `add`, for several tasks whose losses have a part of their graph in common."""
        self.add(" + ".join(losses), torch.stack([*losses.values()]).sum())  # a sum needs no gradient by task

    def complete(self, task: str) -> None:  # noqa: B027 - a sum is complete with the last task
        """After a task's last backward pass of the step: its gradient may be averaged while the next ones compute."""

    @abstractmethod
    def combine(self, generator: torch.Generator, scale: torch.Tensor | float = 1.0) -> None:
        """Combines the tasks' gradients into the `.grad` of each parameter, and ends the step.

        Args:
            generator: draws what is random; in the same state on every process.
            scale: the factor on all losses, the loss scale of fp16.
        """

    @abstractmethod
    def combined(self) -> list[torch.Tensor]:
        """Tensors that together are the `.grad` of all parameters: as few as the memory allows."""

    def clip(self, longest: float, optimizer: DividingOptimizer | None = None) -> torch.Tensor:
        """Scales all gradients to the norm `longest` if they are longer. Returns their norm before.

        The stock function walks through all parameters: that takes longer than a GPU's step of a small batch.

        Args:
            optimizer: scales them in its next step, where it is given: that saves a pass over all gradients.
        """
        gradients = self.combined()
        norm = torch.nn.utils.get_total_norm(gradients)
        if optimizer is None:
            torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))
        else:
            optimizer.divisor = ((norm.float() + 1e-6) / longest).clamp(min=1.0)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, if anything."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Continues from `state_dict()`."""


class SummedGradients(Gradients):
    """For an aggregator without rows: losses accumulate in `.grad`, averaged once per optimizer step.

    DDP would average once per task, and refuses several forward passes before one backward pass.
    """

    def add(self, task: str, loss: torch.Tensor) -> None:
        loss.backward()

    def combine(self, generator: torch.Generator, scale: torch.Tensor | float = 1.0) -> None:
        average_over_processes(self.combined())

    def combined(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


class StaticGradients(Gradients):
    """Gradients in memory of their own, to which every backward pass adds in place.

    Attributes:
        rows: per task, the gradient of each parameter that it has ever reached, by the parameter's index.
        open: tasks with a gradient since the last step, in the order in which they came.
        version: counts how often the gradients have moved in memory.
        steps: counts the steps that have ended.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__(parameters)
        self.rows: dict[str, dict[int, torch.Tensor]] = {}
        self.open: list[str] = []
        self.version = self.steps = 0

    def add(self, task: str, loss: torch.Tensor) -> None:
        with self.attached(task):
            loss.backward()

    def begin(self, task: str) -> None:
        """Before a task's backward pass: sets its gradients to zero if it is the first pass since the last step."""
        if task not in self.open:
            self._forget(task)
            self.open.append(task)

    @contextmanager
    def attached(self, task: str) -> Generator[None]:
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

    def accumulate(self, task: str, loss: torch.Tensor) -> None:
        """As `add`, in a form that may be recorded: the task may reach no parameter that is new to it.

        One operation adds all gradients, where a backward pass into `.grad` needs one per parameter. Layers that have
        found the memory in `destinations` add theirs themselves.
        """
        row = self.rows[task]
        gradients = torch.autograd.grad(loss, [self.parameters[i] for i in row], allow_unused=True)
        reached = [pair for pair in zip(row.values(), gradients, strict=True) if pair[1] is not None]
        if reached:
            torch._foreach_add_(*map(list, zip(*reached, strict=True)))

    def destinations(self, task: str) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Where the task's gradients are added to: the memory of each float32 parameter that it has ever reached."""
        row = self.rows[task].items()
        return {self.parameters[i]: memory for i, memory in row if memory.dtype == torch.float32}

    def _end_step(self) -> None:
        self.open.clear()
        self.steps += 1

    @abstractmethod
    def _forget(self, task: str) -> None:
        """Sets a task's gradients to zero."""

    @abstractmethod
    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        """Adds the gradients of parameters that the task has not reached before."""


class StaticSum(StaticGradients):
    """The gradient of the summed losses, in one array."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__(parameters)
        self._sum, self._views = one_array(parameters, parameters[0].dtype)
        self._whole = False  # whether the last step reached every parameter

    def _forget(self, task: str) -> None:
        if not self.open:
            self._sum.zero_()

    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        for i, gradient in fresh.items():
            self._views[i].add_(gradient)
            self.rows[task][i] = self._views[i]

    def combine(self, generator: torch.Generator, scale: torch.Tensor | float = 1.0) -> None:
        reached = sorted({i for task in self.open for i in self.rows[task]})
        average_over_processes(
            [self._sum] if len(reached) == len(self.parameters) else [self._views[i] for i in reached]
        )
        for i in reached:
            self.parameters[i].grad = self._views[i]
        self._whole = len(reached) == len(self.parameters)
        self._end_step()

    def combined(self) -> list[torch.Tensor]:
        return [self._sum] if self._whole else [p.grad for p in self.parameters if p.grad is not None]


class GradientRows(StaticGradients):
    """For an aggregator with rows: one gradient per task, accumulated until the optimizer steps.

    Parameters that two or more of the step's tasks reach are shared: their gradients, one row per task, go to the
    aggregator, with zeros where a task does not reach one of them. A parameter that one task reaches (its head) keeps
    that task's gradient; one that no task reaches keeps `grad=None`. Rows are averaged over processes before they are
    combined, so that `N` processes do what one process does on the union of their batches.

    The rows are one matrix: nothing is copied, and the memory beside that of a summed gradient is one number per
    task and shared parameter.

    Args:
        parameters: those that are trained.
        aggregator: combines the rows.
        smoothing: averages each task's row over steps before that. It takes every parameter that two tasks have ever
            reached, whether or not two reach it in this step.
        meter: measures each step.
        sharded: whether each process combines its share of the numbers, of which it alone gets the means: with K tasks
            (K + 1) / 2 times the traffic of one all-reduce instead of K times. Only steps with every task are.
        static: whether matrices come before vectors, as in `one_array`, where nothing asks for the order of the model:
            the smoothed rows of a checkpoint do, and a meter of layers.

    Raises:
        MinBertError: the trained parameters have several dtypes.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        aggregator: Aggregator,
        smoothing: Smoothing | None = None,
        meter: ConflictMeter | None = None,
        sharded: bool = False,
        static: bool = False,
    ):
        super().__init__(parameters)
        self.sharded = sharded
        self._matrices_first = static and smoothing is None and (meter is None or meter.detail != "layers")
        dtypes = sorted({str(p.dtype) for p in parameters})
        if len(dtypes) > 1:
            raise MinBertError(
                f"An aggregator of rows needs trained parameters of one dtype. Found {' and '.join(dtypes)}. "
                "Load the model in float32."
            )
        self.aggregator, self.smoothing, self.meter = aggregator, smoothing, meter
        self._matrix = torch.empty(0)  # [tasks, numbers of the parameters in `_common`]
        self._common: list[int] = []  # parameters that two or more tasks have ever reached
        self._combined: list[torch.Tensor] = []
        self._averaging: dict[str, list[Averaging]] = {}  # of tasks that are complete
        self._averaged: list[str] = []

    def add_together(self, losses: Mapping[str, torch.Tensor]) -> None:
        *_, last = losses
        for task, loss in losses.items():
            with self.attached(task):
                loss.backward(retain_graph=task != last)

    def complete(self, task: str) -> None:
        if self.sharded or processes() == 1 or not self._common:  # in the first step, it is not known what is shared
            return
        row = self._matrix[list(self.rows).index(task)]
        self._averaging[task] = [Averaging([row]), *map(Averaging, buckets(self._outside(task)))]

    def _outside(self, task: str) -> list[torch.Tensor]:
        """The task's gradients that are not in the matrix."""
        common = set(self._common)
        return [gradient for i, gradient in sorted(self.rows[task].items()) if i not in common]

    def _finish(self) -> None:
        for averaging in self._averaging.values():
            for part in averaging:
                part.finish()
        self._averaged += self._averaging
        self._averaging.clear()

    def _forget(self, task: str) -> None:
        self._combined = []  # frees the last step's memory for the backward pass
        row = self.rows.get(task, {})
        if row:
            self._matrix[list(self.rows).index(task)].zero_()
        for i in row.keys() - set(self._common):
            row[i].zero_()

    def _adopt(self, task: str, fresh: dict[int, torch.Tensor]) -> None:
        """Moves the rows to a matrix with columns for every parameter that is now known to be shared."""
        self._finish()
        self.rows[task] |= fresh
        self._common = self._reached_by_several(list(self.rows))
        sizes = [self.parameters[i].numel() for i in self._common]
        matrix = self.parameters[0].new_zeros(len(self.rows), sum(sizes)).detach()
        for values, row in zip(matrix, self.rows.values(), strict=True):
            for i, piece in zip(self._common, values.split(sizes), strict=True):
                if i in row:
                    row[i] = piece.view_as(self.parameters[i]).copy_(row[i])
            for i in row.keys() - set(self._common):
                row[i] = row[i].clone()  # autograd may give two parameters one tensor
        self._matrix = matrix

    def _reached_by_several(self, tasks: list[str]) -> list[int]:
        counts = Counter(i for task in tasks for i in self.rows[task])
        shared = sorted(i for i, tasks in counts.items() if tasks > 1)
        return sorted(shared, key=lambda i: self.parameters[i].dim() < 2) if self._matrices_first else shared

    def combine(self, generator: torch.Generator, scale: torch.Tensor | float = 1.0) -> None:
        shared = self._reached_by_several(self.open)
        in_shards = self.sharded and processes() > 1 and self.open == list(self.rows) and shared == self._common
        self._average(matrix=not in_shards)
        self._smooth(scale)
        in_several = set(shared)
        unshared = {i: g for task in self.open for i, g in self.rows[task].items() if i not in in_several}
        for i, gradient in unshared.items():
            self.parameters[i].grad = gradient
        self._combined = [*unshared.values()]
        if shared:
            combined = self._step(self._stacked(shared), shared, generator, in_shards)
            sizes = [self.parameters[i].numel() for i in shared]
            for i, piece in zip(shared, combined.split(sizes), strict=True):
                self.parameters[i].grad = piece.view_as(self.parameters[i])
            self._combined.append(combined)
        self._end_step()

    def combined(self) -> list[torch.Tensor]:
        return self._combined

    def state_dict(self) -> dict[str, Any]:
        """Of aggregator, smoothing and meter; and what each task has reached, which gives the layout of the rows."""
        keeping = {"aggregator": self.aggregator, "smoothing": self.smoothing, "meter": self.meter}
        return {
            "reached": {task: sorted(row) for task, row in self.rows.items()},
            **{name: kept.state_dict() for name, kept in keeping.items() if kept is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for task, reached in state["reached"].items():
            self.rows[task] = {}
            self._adopt(task, {i: torch.zeros_like(self.parameters[i]) for i in reached})
        self.version += 1
        for name in ("aggregator", "smoothing", "meter"):
            kept = getattr(self, name)
            if kept is not None:
                kept.load_state_dict(state[name])

    def _smooth(self, scale: torch.Tensor | float) -> None:
        if self.smoothing is None:
            return
        if self.open == list(self.rows):
            self.smoothing(self._matrix, self.open, scale)
            return
        rows = [self._matrix[list(self.rows).index(task)] for task in self.open]
        stacked = torch.stack(rows)
        self.smoothing(stacked, self.open, scale)
        for row, smooth in zip(rows, stacked, strict=True):
            row.copy_(smooth)

    def _step(
        self, rows: torch.Tensor, shared: list[int], generator: torch.Generator, in_shards: bool
    ) -> torch.Tensor:
        """Combines the rows, `[tasks, numbers]`, into one gradient, and measures the step."""
        if not in_shards:
            combined, gram, coefficients = self.aggregator.step(rows, generator, self.open)
            self._measure(rows, None, shared, gram, coefficients)
            return combined
        shard, first = self._shard(rows)
        gram = gram_matrix(shard)
        dist.all_reduce(gram)
        coefficients = self.aggregator.coefficients(gram, generator, self.open)
        combined = rows.new_empty(processes() * shard.shape[1])
        dist.all_gather_into_tensor(combined, weighted_sum(shard, coefficients.sum(dim=0)))
        self._measure(shard, first, shared, gram, coefficients)
        return combined[: rows.shape[1]]

    def _shard(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """This process's share of the rows, averaged over processes, and the index of its first column."""
        count = processes()
        width = -(-rows.shape[1] // count)
        shard = rows.new_empty(len(rows), width)
        for share, row in zip(shard, rows, strict=True):
            dist.reduce_scatter_tensor(share, F.pad(row, (0, count * width - len(row))))
        shard /= count
        return shard, dist.get_rank() * width

    def _measure(
        self, rows: torch.Tensor, first: int | None, shared: list[int], gram: torch.Tensor, coefficients: torch.Tensor
    ) -> None:
        """Adds a step to the meter.

        Args:
            rows: `[tasks, numbers]`, all columns, or this process's share.
            first: the index of the share's first column.
            gram: over all columns, as are `coefficients`.
        """
        if self.meter is None:
            return
        pieces = self.meter.pieces(shared)
        if not pieces:
            self.meter.add(self.open, gram, coefficients)
            return
        ends = accumulate((sum(self.parameters[i].numel() for i in indices) for _, indices in pieces), initial=0)
        bounds = [max(end - (first or 0), 0) for end in ends]
        grams = torch.stack([gram_matrix(rows[:, start:end]) for start, end in pairwise(bounds)])
        if first is not None:
            dist.all_reduce(grams)
        self.meter.add(self.open, gram, coefficients, [layer for layer, _ in pieces], grams)

    def _average(self, matrix: bool) -> None:
        """Averages what `complete` has not: all of the step's gradients, or those outside the matrix alone."""
        self._finish()
        remaining = [task for task in self.open if task not in self._averaged]
        self._averaged.clear()
        whole = self.open == list(self.rows)
        if whole and matrix:
            average_over_processes(self._matrix[list(self.rows).index(task)] for task in remaining)
        average_over_processes(
            gradient
            for task in remaining
            for gradient in (self._outside(task) if whole else [g for _, g in sorted(self.rows[task].items())])
        )

    def _stacked(self, shared: list[int]) -> torch.Tensor:
        """The rows of this step's tasks over the shared parameters, [tasks, numbers]."""
        if self.open == list(self.rows) and shared == self._common:
            return self._matrix
        return torch.stack([self._flat(self.rows[task], shared) for task in self.open])

    def _flat(self, row: dict[int, torch.Tensor], shared: list[int]) -> torch.Tensor:
        pieces = [row[i] if i in row else torch.zeros_like(self.parameters[i]) for i in shared]
        return torch.cat([piece.reshape(-1) for piece in pieces])


def collector(
    parameters: Iterable[torch.nn.Parameter],
    aggregator: Aggregator,
    smoothing: Smoothing | None = None,
    meter: ConflictMeter | None = None,
    static: bool = False,
    sharded: bool = False,
) -> Gradients:
    """The cheapest collector that serves the aggregator, over the parameters that are trained.

    Args:
        parameters: of the model.
        aggregator: combines the tasks' gradients.
        smoothing, meter, sharded: as for `GradientRows`; not used for an aggregator without rows.
        static: whether gradients must keep their memory from step to step, as CUDA graphs need it.
    """
    trained = [p for p in parameters if p.requires_grad]
    if aggregator.needs_rows:
        return GradientRows(trained, aggregator, smoothing, meter, sharded, static)
    return StaticSum(trained) if static else SummedGradients(trained)
