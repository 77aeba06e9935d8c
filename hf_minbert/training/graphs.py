"""CUDA graphs: a task's forward and backward pass recorded once per shape, then replayed in one launch.

A small batch keeps a GPU busy for less time than Python needs to launch its kernels one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .gradients import StaticGradients

logger = logging.getLogger(__name__)

#: From a task's batch and the factor on its loss to the loss, the logits, and what is to be differentiated.
Forward = Callable[[Mapping[str, Any], float], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass
class Recording:
    """What was recorded for batches of one shape."""

    version: int
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    inputs: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class GraphedSteps:
    """Runs tasks' forward and backward passes, from their second batch of a shape on as a graph.

    Dropout stays random: torch gives each replay random numbers of its own. If one task cannot be recorded, as an
    operation of it asks the GPU for a number, all run as they would without graphs, and the log says so once.

    Args:
        forward: computes a task's loss.
        gradients: where the backward pass adds to.
    """

    def __init__(self, forward: Forward, gradients: StaticGradients):
        self.forward = forward
        self.gradients = gradients
        self._seen: set[tuple] = set()
        self._recordings: dict[tuple, Recording] = {}
        self._refused = False
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, task: str, batch: Mapping[str, Any], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the logits of a batch, whose gradients have been added. The next call may overwrite both."""
        key = (task, factor, *_shapes(batch))
        recording = self._recordings.get(key)
        if recording is None or recording.version != self.gradients.version:
            if self._refused or key not in self._seen or task not in self.gradients.rows:
                self._seen.add(key)  # the first time warms up: libraries allocate and choose kernels
                return self._plain(task, batch, factor)
            recording = self._record(key, batch)
            if recording is None:
                return self._plain(task, batch, factor)
        self.gradients.begin(task)
        torch._foreach_copy_(recording.inputs, [*_tensors(batch)], non_blocking=True)
        recording.graph.replay()
        return recording.loss, recording.logits

    def _plain(self, task: str, batch: Mapping[str, Any], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits, differentiated = self.forward(batch, factor)
        self.gradients.add(task, differentiated)
        return loss.detach(), logits.detach()

    def _record(self, key: tuple, batch: Mapping[str, Any]) -> Recording | None:
        task, factor = key[:2]
        static = _copied(batch)
        recording = Recording(self.gradients.version, inputs=[*_tensors(static)])
        try:
            # Other threads (a loader that pins memory) may use the GPU meanwhile.
            with torch.cuda.graph(recording.graph, pool=self._pool, capture_error_mode="thread_local"):
                loss, logits, differentiated = self.forward(static, factor)
                self.gradients.accumulate(task, differentiated)
        except RuntimeError as error:
            # A recording that failed leaves its memory and its random generator waiting for its end, and those of all
            # earlier recordings are the same.
            self._refused = True
            self._recordings.clear()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            logger.warning(
                "cuda_graphs: the step of %s cannot be recorded, so steps run without: %s",
                task,
                str(error).split("\n")[0],
            )
            return None
        recording.loss, recording.logits = loss.detach(), logits.detach()
        self._recordings[key] = recording
        return recording


def _tensors(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _shapes(batch: Mapping[str, Any]) -> tuple:
    """What a recording is bound to: names, shapes, and values that are no tensors."""
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
