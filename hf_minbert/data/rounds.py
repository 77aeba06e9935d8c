"""Selects the examples of each step. A round has a mini-batch of each of its tasks.

To add a way of mixing tasks, add a class here and a line in `MIXING`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from torch.utils.data import Dataset

from ..errors import MinBertError
from ..model.registry import Registry
from ..settings.tasks import Task
from ..settings.wording import counted
from .rows import EncodedRows, PartlyLabelled, SharedRows

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

Rows = list[dict[str, Any]]


def fetch(dataset: SupportsLenAndGetItem, indices: Sequence[int]) -> Rows:
    """Returns the rows at `indices`, in one call if the dataset has torch's batched protocol, as `datasets` has."""
    batched = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if batched is None else batched(list(indices))


def label_groups(task: Task, labels: np.ndarray, bins: int) -> np.ndarray:
    """Returns the group of each row for balanced sampling.

    This is its class id, or the bin of its score among `bins` of equal width.
    """
    if task.traits.is_class:
        return labels
    low, high = task.bounds
    # A score that went through float32 may be a rounding below the edge that it stands on.
    places = (labels.astype(np.float64) - low) / (high - low) * bins + 1e-4
    return np.clip(places, 0, bins - 1).astype(np.int64)  # the highest score is in the last bin


def proportional_batch_sizes(rows: Mapping[str, int], largest: int) -> dict[str, int]:
    """Computes batch sizes with which all tasks finish their rows after about the same number of rounds.

    The task with the most rows gets `largest`, so the number of rounds n is its rows / `largest`. Each other task gets
    the whole number nearest to its rows / n. The rows of its n batches differ from its own rows by at most n / 2. The
    larger its batch is, the smaller is this difference relative to its rows.

    Report 003, section 4.3.2, equation 6. Its sizes 1, 24 and 1 are the result for `largest` 24 and the course's data.

    Args:
        rows: the rows of each task in an epoch.
        largest: the size of the largest batch.

    Raises:
        MinBertError: a task has so few rows that its batch size would be 0.
    """
    most = max(rows.values())
    sizes = {task: (2 * largest * count + most) // (2 * most) for task, count in rows.items()}  # .5 is rounded up
    fewest = min(rows, key=rows.__getitem__)
    if sizes[fewest] == 0:
        enough = -(-most // (2 * rows[fewest]))
        raise MinBertError(
            f"`task_batch_sizes: proportional` leaves {fewest!r} no row in a round: it has "
            f"{counted(rows[fewest], 'row')}, and {max(rows, key=rows.__getitem__)!r} has {most:,}, of which a round "
            f"takes {largest}. Raise `per_device_train_batch_size` to {enough} or more, or give `task_batch_sizes` by "
            "task."
        )
    return sizes


def inverse_batch_size_weights(batch_sizes: Mapping[str, int]) -> dict[str, float]:
    """Returns the smallest batch size divided by each task's own.

    Such factors make losses that are summed over a batch comparable (report 003, section 4.3.2, equation 7). The
    losses of this package are means over a batch. For them, a task with a larger batch gets a smaller weight.
    """
    smallest = min(batch_sizes.values())
    return {task: smallest / size for task, size in batch_sizes.items()}


def rows_of_epoch(asked: float | None, size: int) -> int:
    """Returns how many of `size` rows an epoch uses: a number of rows, the nearest to a share, or all by default."""
    return size if asked is None else max(1, round(asked * size)) if isinstance(asked, float) else int(asked)


class RowSampler:
    """The order in which an epoch uses the rows of one task, pass after pass.

    A pass is a pure function of seed, task, epoch and the pass's number. Without `groups` it is a shuffle of the
    epoch's rows. These are all rows, or `rows` rows drawn without replacement, which are the same in all passes of the
    epoch. With `groups`, each pass is drawn with replacement: every group is equally likely, and so is every row of a
    group.

    Args:
        task: the name of the task.
        size: the number of rows.
        seed: the seed of every draw.
        groups: [size], the group of each row, for balanced sampling.
        rows: the number of rows in a pass. A float is a share of `size`; at least one row is used.
        redraw: whether each epoch draws its `rows` anew. If not, all epochs use the rows of the first draw, in a new
            order in each pass. Without `rows` this has no effect.

    Raises:
        MinBertError: there are no rows, or fewer than `rows`.
    """

    def __init__(
        self,
        task: str,
        size: int,
        *,
        seed: int,
        groups: np.ndarray | None = None,
        rows: float | None = None,
        redraw: bool = True,
    ):
        if size == 0:
            raise MinBertError(f"Task {task!r} has no training rows. Give it some, or do not train it.")
        if rows is not None and rows > size:
            raise MinBertError(
                f"`rows_per_epoch` of {task!r} asks for {rows} rows, and there are {size}. Lower it, or leave "
                f"it out to use all."
            )
        self.task, self.size, self.seed = task, size, seed
        self.rows = rows_of_epoch(rows, size)
        self.chances = None
        if groups is not None:
            _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
            self.chances = 1 / (counts[group] * len(counts))
        self.kept = None if redraw or rows is None else self._draw()

    def order(self, epoch: int, number: int) -> np.ndarray:
        """Returns the rows of pass `number` of an epoch, [rows]."""
        if self.kept is not None:
            return self._generator(epoch, number).permutation(self.kept)
        if self.chances is not None:
            return self._draw(epoch, number)
        if self.rows == self.size:
            return self._generator(epoch, number).permutation(self.size)
        return self._generator(epoch, number).permutation(self._draw(epoch))

    def within_reach(self) -> np.ndarray:
        """Returns the rows that training may use, each once."""
        return np.arange(self.size) if self.kept is None else np.unique(self.kept)

    def _draw(self, *when: int) -> np.ndarray:
        replace = self.chances is not None
        return self._generator(*when).choice(self.size, self.rows, replace=replace, p=self.chances)

    def _generator(self, *when: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *when, zlib.crc32(self.task.encode())])


class Unlabelled(NamedTuple):
    """Rows of a task without labels. A round has some of them besides labelled rows.

    Args:
        rows: all rows without labels.
        sampler: their order.
        size: the number of these rows in a round.
    """

    rows: SupportsLenAndGetItem
    sampler: RowSampler
    size: int


class Rounds(Dataset, ABC):
    """A map-style dataset of rounds. Item `i` is `{task: rows}`, a pure function of seed, epoch and `i`.

    With `W` processes and a global step `s`, process `r` uses round `s * W + r`. All rounds share one order of the
    rows. At each step, `W` processes with batches of `b` therefore use the rows that one process with batches of `W *
    b` uses. The order is drawn here and not by a torch sampler, because a sampler loses its epoch when several
    processes resume in the middle of an epoch.

    All batches are full. If a task's rows do not fill its last batches, its next pass begins there.

    Args:
        datasets: rows by task name.
        batch_sizes: the number of rows of each task in a round.
        samplers: the order of each task's rows.
        num_processes: the number of processes. The number of rounds, and of rounds with a task, is a multiple of it.
            At each step every process then has a round with the same tasks.
        seed: the seed for drawing the tasks of a round, if they are drawn.
        temperature: the temperature, for `Temperature`.
        epochs: the number of epochs, for `Annealed`.
        groups: groups of tasks that share rows. A group has one sampler and one batch size. A round has the group
            under the name of its first task, as `SharedRows`. A task is left out of a round if no process has a
            labelled row of it.
        unlabelled: for each task, rows without labels. A round has labelled and unlabelled rows as `PartlyLabelled`.

    Attributes:
        whole: whether every round has every task.
    """

    whole = False

    def __init__(
        self,
        datasets: Mapping[str, SupportsLenAndGetItem],
        batch_sizes: Mapping[str, int],
        samplers: Mapping[str, RowSampler],
        *,
        num_processes: int = 1,
        seed: int = 0,
        temperature: float = 2.0,
        epochs: int = 1,
        groups: Sequence[Sequence[str]] = (),
        unlabelled: Mapping[str, Unlabelled] | None = None,
    ):
        self.datasets = dict(datasets)
        self.batch_sizes = {task: batch_sizes[task] for task in datasets}
        self.samplers = {task: samplers[task] for task in datasets}
        self.num_processes = num_processes
        self.seed, self.temperature, self.epochs = seed, temperature, epochs
        self.groups = {task: group for group in groups for task in group}
        self.unlabelled = dict(unlabelled or {})
        self.epoch = 0
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self._orders.clear()

    def rounds_to_see(self, task: str) -> int:
        """Returns the number of rounds, over all processes, that use each of the epoch's rows of a task once."""
        per_step = self.batch_sizes[task] * self.num_processes
        return -(-self.samplers[task].rows // per_step) * self.num_processes

    @abstractmethod
    def rounds_with(self, task: str) -> int:
        """Returns how many of the epoch's rounds have the task. These are the first ones."""

    def __len__(self) -> int:
        return max(self.rounds_with(task) for task in self.datasets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for task in self.datasets:
            group = self.groups.get(task, (task,))
            if task == group[0] and index < self.rounds_with(task):
                items[task] = self._batch(task, index) if len(group) == 1 else self._shared(group, index)
        return items

    @property
    def num_rows(self) -> int:
        """Returns the number of rows that an epoch uses over all tasks, counting repeated rows again."""
        beside = {task: of.size for task, of in self.unlabelled.items()}
        return sum(self.rounds_with(task) * (size + beside.get(task, 0)) for task, size in self.batch_sizes.items())

    def _batch(self, task: str, index: int) -> Any:
        rows = fetch(self.datasets[task], self._rows(task, index))
        if task not in self.unlabelled:
            return rows
        of = self.unlabelled[task]
        return PartlyLabelled(cast(Any, rows), cast(Any, fetch(of.rows, self._places(of.sampler, of.size, index))))

    def _shared(self, group: Sequence[str], index: int) -> SharedRows:
        first, rows, shares = index - index % self.num_processes, {}, {}
        for task in group:
            labelled = cast(EncodedRows, self.datasets[task]).labelled
            if labelled is not None:  # how many each process has at this step
                counts = [labelled[self._rows(task, first + rank)].sum() for rank in range(self.num_processes)]
                if not any(counts):
                    continue
            mean = 1.0 if labelled is None else float(sum(counts) / self.num_processes)
            shares[task] = 1.0 if labelled is None else float(counts[index - first]) / mean
            rows[task] = self._batch(task, index)
        return SharedRows(rows, shares)

    def _rows(self, task: str, index: int) -> list[int]:
        """Which rows of a task a round has."""
        return self._places(self.samplers[task], self.batch_sizes[task], index)

    def _places(self, sampler: RowSampler, size: int, index: int) -> list[int]:
        places = (divmod(position, sampler.rows) for position in range(index * size, (index + 1) * size))
        return [int(self._order(sampler, number)[place]) for number, place in places]

    def _order(self, sampler: RowSampler, number: int) -> np.ndarray:
        key = (sampler.task, number)
        if key not in self._orders:
            self._orders[key] = sampler.order(self.epoch, number)
        return self._orders[key]


class Cycle(Rounds):
    """An epoch ends when the task with the most rounds has used all of its rows. Shorter tasks start again.

    Every row of every task is used at least once in an epoch.
    """

    whole = True

    def rounds_with(self, task: str) -> int:
        return max(map(self.rounds_to_see, self.datasets))


class Once(Rounds):
    """Each task uses its rows once. A finished task is missing from the later rounds.

    The last rounds therefore have the longest task only. Rows that fill a task's last batches are used twice.
    """

    def rounds_with(self, task: str) -> int:
        return self.rounds_to_see(task)


class Shortest(Rounds):
    """An epoch ends with the task that has the fewest rounds.

    Further rows of the other tasks are not used in that epoch. Each epoch has a new order, so over many epochs all
    rows have the same chance.
    """

    whole = True

    def rounds_with(self, task: str) -> int:
        return min(map(self.rounds_to_see, self.datasets))


class Drawn(Rounds):
    """Base of the ways of mixing in which each step has one task, drawn at random.

    An epoch has as many rounds as all rows fill. The number of steps of a task varies from epoch to epoch, and some of
    its rows may not be used in an epoch. A step has one task, so there are no gradients to combine.
    """

    @abstractmethod
    def chances(self, rows: np.ndarray) -> np.ndarray:
        """Returns numbers proportional to each task's chance, from the tasks' rows in an epoch; both [tasks]."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._plan = None

    _plan: tuple[np.ndarray, np.ndarray] | None = None

    def plan(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each step of the epoch, the index of its task and how often that task was drawn before."""
        if self._plan is None:
            chances = self.chances(np.array([self.samplers[task].rows for task in self.datasets], dtype=np.float64))
            draw = np.random.default_rng([self.seed, self.epoch, zlib.crc32(b"which task")])
            tasks = draw.choice(len(chances), len(self) // self.num_processes, p=chances / chances.sum())
            before = np.empty(len(tasks), dtype=np.int64)
            for task in range(len(chances)):
                before[tasks == task] = np.arange((tasks == task).sum())
            self._plan = tasks, before
        return self._plan

    def drawn(self, steps: int, rounds_per_step: int = 1) -> dict[str, int]:
        """Returns how many rounds of each task the first steps of a run have, until all tasks have one.

        Args:
            steps: optimizer steps. The last step of an epoch may have fewer rounds.
            rounds_per_step: rounds per step and process.
        """
        counts, epoch, kept = np.zeros(len(self.datasets), dtype=np.int64), 0, self.epoch
        while steps > 0 and not counts.all():
            self.set_epoch(epoch)
            tasks = self.plan()[0][: steps * rounds_per_step]
            counts += np.bincount(tasks, minlength=len(counts))
            steps, epoch = steps - -(-len(tasks) // rounds_per_step), epoch + 1
        self.set_epoch(kept)
        return dict(zip(self.datasets, counts.tolist(), strict=True))

    def __len__(self) -> int:
        return sum(self.rounds_to_see(task) for task in self.datasets)

    def rounds_with(self, task: str) -> int:
        tasks, _ = self.plan()
        return int((tasks == list(self.datasets).index(task)).sum()) * self.num_processes

    def __getitem__(self, index: int) -> dict[str, Rows]:
        step, process = divmod(index, self.num_processes)
        tasks, before = self.plan()
        task = list(self.datasets)[tasks[step]]
        return {task: self._batch(task, int(before[step]) * self.num_processes + process)}


class Proportional(Drawn):
    """Each step has one task, with a chance proportional to its rows.

    With batches of equal size, all rows are used equally often on average.
    """

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return rows


class Temperature(Drawn):
    """Each step has one task, with a chance proportional to rows^(1/T).

    Small tasks are drawn more often than their share. T = 1 is `Proportional`. With a large T all tasks are drawn
    equally often (arXiv:1907.05019, section 4.2).
    """

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return rows ** (1 / self.temperature)


class Annealed(Drawn):
    """Each step has one task, with a chance proportional to rows^a. a falls from 1 in the first epoch to 0.2.

    As in arXiv:1902.02671, section 4.1: a = 1 - .8 (e - 1) / (E - 1) in epoch e of E.
    """

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return rows ** (1 - 0.8 * min(self.epoch / max(self.epochs - 1, 1), 1))


MIXING: Registry[type[Rounds]] = Registry("mixing", type[Rounds], {
    "cycle": Cycle,
    "once": Once,
    "shortest": Shortest,
    "proportional": Proportional,
    "temperature": Temperature,
    "annealed": Annealed,
})  # fmt: skip
