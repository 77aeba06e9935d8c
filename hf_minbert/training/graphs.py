"""CUDA graphs: a task's forward and backward pass recorded once per shape, then replayed in one launch.

A small batch keeps a GPU busy for less time than Python needs to launch its kernels one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..model.step_weights import StepWeights, in_use
from .gradients import StaticGradients
from .step_memory import HalfCopies
from .terms.base import repeats_in_recording

logger = logging.getLogger(__name__)

#: From a task's inputs and the factor on its loss to detached outputs, and the loss to differentiate.
Forward = Callable[[Mapping[str, Any], float], tuple[dict[str, torch.Tensor], torch.Tensor]]


@dataclass
class Recording:
    """A graph for inputs of one shape, with the tensors that it reads and writes."""

    version: int
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    inputs: list[torch.Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class GraphedSteps:
    """Runs tasks' forward and backward passes, from their second batch of a shape on as a graph.

    Dropout stays random: torch gives each replay random numbers of its own. If one task cannot be recorded, as an
    operation of it asks the GPU for a number, all run as they would without graphs, and the log says so once.

    Args:
        forward: computes a task's loss.
        gradients: the backward passes add to them.
        repeats: how many passes of a step repeat the dropout of an earlier one.
    """

    def __init__(self, forward: Forward, gradients: StaticGradients, repeats: int = 0):
        self.forward = forward
        self.gradients = gradients
        self.repeats = repeats
        self._copies, self._renewed = HalfCopies(), -1  # and the step for which they are up to date
        self._seen: set[tuple] = set()
        self._recordings: dict[tuple, Recording] = {}
        self._refused = False
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, task: str, inputs: Mapping[str, Any], factor: float) -> dict[str, torch.Tensor]:
        """Adds a task's gradients, and returns the outputs of `forward`. The next call may overwrite them."""
        if self._renewed != self.gradients.steps:
            self._renewed = self.gradients.steps
            self._copies.renew()
        self._copies.extend()
        key = (task, factor, *_shapes(inputs))
        recording = self._recordings.get(key)
        if recording is None or recording.version != self.gradients.version:
            if self._refused or key not in self._seen or task not in self.gradients.rows:
                self._seen.add(key)  # the first time warms up: libraries allocate and choose kernels
                return self._plain(task, inputs, factor)
            recording = self._record(key, inputs)
            if recording is None:
                return self._plain(task, inputs, factor)
        self.gradients.begin(task)
        torch._foreach_copy_(recording.inputs, [*_tensors(inputs)], non_blocking=True)
        for generator in recording.generators:
            generator.set_state(_generator().get_state())
        recording.graph.replay()
        return recording.outputs

    def forget(self) -> None:
        """Drops all recordings: they have no gradients of the parameters that were frozen then."""
        self._seen.clear()
        self._recordings.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one ends with its last recording

    def _plain(self, task: str, inputs: Mapping[str, Any], factor: float) -> dict[str, torch.Tensor]:
        with in_use(StepWeights(self._copies)):
            outputs, loss = self.forward(inputs, factor)
        self.gradients.add(task, loss)
        return outputs

    def _accumulate(self, task: str, inputs: Mapping[str, Any], factor: float) -> dict[str, torch.Tensor]:
        """As `_plain`, in a form that may be recorded."""
        with in_use(StepWeights(self._copies, self.gradients.destinations(task))):
            outputs, loss = self.forward(inputs, factor)
            self.gradients.accumulate(task, loss)
        return outputs

    def _record(self, key: tuple, inputs: Mapping[str, Any]) -> Recording | None:
        task, factor = key[:2]
        static = _copied(inputs)
        recording = Recording(self.gradients.version, inputs=[*_tensors(static)])
        for _ in range(self.repeats):
            recording.generators.append(_generator().clone_state())
            recording.graph.register_generator_state(recording.generators[-1])
        stream = torch.cuda.current_stream()
        try:
            # Other threads (a loader that pins memory) may use the GPU meanwhile.
            with (
                repeats_in_recording(recording.generators),
                torch.cuda.graph(recording.graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                recording.outputs = self._accumulate(task, static, factor)
        except RuntimeError as error:
            # A failed recording leaves its stream current. The memory pool and the random generator still wait for its
            # end, and all earlier recordings share them.
            torch.cuda.set_stream(stream)
            self._refused = True
            self._recordings.clear()
            _generator().graphsafe_set_state(_generator().clone_state())
            logger.warning(
                "cuda_graphs: the step of %s cannot be recorded, so steps run without: %s",
                task,
                str(error).split("\n")[0],
            )
            return None
        self._recordings[key] = recording
        return recording


@contextmanager
def quick_zero_grad(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Inside, `model.zero_grad()` clears the gradients of these parameters, those that are trained.

    The stock method walks through all modules: half a millisecond for BERT-base, in each step.
    """
    vars(model)["zero_grad"] = partial(_clear, parameters)
    try:
        yield
    finally:
        del vars(model)["zero_grad"]


def _clear(parameters: Sequence[nn.Parameter], set_to_none: bool = True) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _tensors(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _shapes(batch: Mapping[str, Any]) -> tuple:
    """What a recording is fixed to: names, shapes, and values that are not tensors."""
    return tuple(
        (name, _shapes(value) if isinstance(value, Mapping) else value.shape if torch.is_tensor(value) else value)
        for name, value in batch.items()
    )


def _copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value)
        if isinstance(value, Mapping)
        else value.clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }
