"""Which examples make a step. A round is one mini-batch of every task in training.

To add a way to mix: a class here and a line in `MIXING`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..errors import MinBertError

Rows = list[dict[str, Any]]


def fetch(dataset: Sequence, indices: Sequence[int]) -> Rows:
    """The rows at `indices`, in one call where the dataset has torch's batched protocol (as `datasets` has)."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


class Rounds(Dataset, ABC):
    """A map-style dataset of rounds: item `i` is `{task: rows}`, a pure function of seed, epoch and `i`.

    With `W` processes and a global step `s`, process `r` takes round `s * W + r`. Rounds follow each other in
    one order of the rows, so `W` processes with batches of `b` see at each step the rows that one process
    with batches of `W * b` sees. The order is drawn here and not by a sampler, because a sampler's epoch is
    lost when several processes resume in the middle of an epoch.

    Args:
        datasets: rows by task name.
        batch_sizes: rows a round takes from each task.
        seed: of the order.
        num_processes: the number of rounds is a multiple of it, so that every process takes equally many.

    Raises:
        MinBertError: a task has no rows.
    """

    def __init__(
        self,
        datasets: Mapping[str, Sequence],
        batch_sizes: Mapping[str, int],
        *,
        seed: int,
        num_processes: int = 1,
    ):
        for task, dataset in datasets.items():
            if len(dataset) == 0:
                raise MinBertError(f"Task {task!r} has no training rows. Give it some, or do not train it.")
        self.datasets = dict(datasets)
        self.batch_sizes = {task: batch_sizes[task] for task in datasets}
        self.seed = seed
        self.num_processes = num_processes
        self.epoch = 0
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self._orders.clear()

    def rounds_to_see(self, task: str) -> int:
        """How many rounds, over all processes, it takes to see each of the task's rows once."""
        per_step = self.batch_sizes[task] * self.num_processes
        return -(-len(self.datasets[task]) // per_step) * self.num_processes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Rows]: ...

    def order(self, task: str, number: int) -> np.ndarray:
        """The order of a task's rows in its pass `number` of this epoch. Another task does not change it."""
        key = (task, number)
        if key not in self._orders:
            draw = np.random.default_rng([self.seed, self.epoch, number, zlib.crc32(task.encode())])
            self._orders[key] = draw.permutation(len(self.datasets[task]))
        return self._orders[key]


class Cycle(Rounds):
    """Goes on until the task with the most rounds has been seen whole; shorter tasks start again.

    Every row of that task is seen at least once an epoch, and so is every row of the shorter ones. All batches are
    full: the last round is filled up from the next pass. A task that starts again does so in a new order.
    """

    def __len__(self) -> int:
        return max(self.rounds_to_see(task) for task in self.datasets)

    def __getitem__(self, index: int) -> dict[str, Rows]:
        return {task: self._batch(task, index) for task in self.datasets}

    def _batch(self, task: str, index: int) -> Rows:
        dataset, size = self.datasets[task], self.batch_sizes[task]
        positions = range(index * size, (index + 1) * size)
        passes = [divmod(position, len(dataset)) for position in positions]
        return fetch(dataset, [int(self.order(task, number)[offset]) for number, offset in passes])


MIXING: dict[str, type[Rounds]] = {"cycle": Cycle}
