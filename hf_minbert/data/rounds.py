"""Which examples make a step. A round holds a mini-batch of each of its tasks.

To add a way to mix: a class here and a line in `MIXING`.
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
    """The rows at `indices`, in one call where the dataset has torch's batched protocol (as `datasets` has)."""
    batched = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if batched is None else batched(list(indices))


def label_groups(task: Task, labels: np.ndarray, bins: int) -> np.ndarray:
    """What balanced sampling balances: the class ids, or the bin of each score among `bins` of equal width."""
    if task.traits.is_class:
        return labels
    low, high = task.bounds
    # A score that went through float32 may be a rounding below the edge that it stands on.
    places = (labels.astype(np.float64) - low) / (high - low) * bins + 1e-4
    return np.clip(places, 0, bins - 1).astype(np.int64)  # the highest score is in the last bin


def proportional_batch_sizes(rows: Mapping[str, int], largest: int) -> dict[str, int]:
    """Batch sizes with which all tasks are through after about as many rounds: n * b is near rows, for each of them.

    The task with the most rows gets `largest`, so n is its rows / `largest`; each other one gets the whole number
    nearest to its own rows / n. Its batches of n rounds miss its rows, or exceed them, by n / 2 at most: so its end
    is the nearer to that of the others, the larger its batch is.

    Report 003, section 4.3.2, equation 6; its sizes, 1, 24 and 1, are these for `largest` 24 and the course's data.

    Args:
        rows: of each task in an epoch.
        largest: the size of the largest batch.

    Raises:
        MinBertError: a task has so few rows that its size would be 0.
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
    """The smallest batch's size over each task's own: factors that make losses summed over a batch comparable.

    Report 003, section 4.3.2, equation 7. On losses that are means over a batch, as all are here, they weight a task
    the less, the larger its batch is.
    """
    smallest = min(batch_sizes.values())
    return {task: smallest / size for task, size in batch_sizes.items()}


def rows_of_epoch(asked: float | None, size: int) -> int:
    """How many of `size` rows an epoch takes: a number of them, the nearest to a share, or unless asked all."""
    return size if asked is None else max(1, round(asked * size)) if isinstance(asked, float) else int(asked)


class RowSampler:
    """The rows of one task in the order in which an epoch takes them, pass after pass.

    A pass is a pure function of seed, task, epoch and its number. Without `groups` it is a shuffle of the epoch's
    rows: all of them, or a draw of `rows` without replacement, whose every pass is over the same ones. With `groups`
    each pass is a draw with replacement in which every group is equally likely, and every row of a group.

    Args:
        task: its name.
        size: how many rows there are.
        seed: of every draw.
        groups: [size], the group of each row, to balance them.
        rows: how many rows a pass has; a float is a share of `size`, of which at least one row is left.
        redraw: whether each epoch draws its `rows` anew. If not, the first draw serves all epochs and passes, each in
            an order of its own. Without `rows` there is nothing to keep.

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
                f"`rows_per_epoch` of {task!r} asks for {rows} rows, and there are {size}. Lower it, or leave it out "
                f"to take all."
            )
        self.task, self.size, self.seed = task, size, seed
        self.rows = rows_of_epoch(rows, size)
        self.chances = None
        if groups is not None:
            _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
            self.chances = 1 / (counts[group] * len(counts))
        self.kept = None if redraw or rows is None else self._draw()

    def order(self, epoch: int, number: int) -> np.ndarray:
        """The rows of pass `number` of an epoch, [rows]."""
        if self.kept is not None:
            return self._generator(epoch, number).permutation(self.kept)
        if self.chances is not None:
            return self._draw(epoch, number)
        if self.rows == self.size:
            return self._generator(epoch, number).permutation(self.size)
        return self._generator(epoch, number).permutation(self._draw(epoch))

    def within_reach(self) -> np.ndarray:
        """The rows that training may come to see, each once."""
        return np.arange(self.size) if self.kept is None else np.unique(self.kept)

    def _draw(self, *when: int) -> np.ndarray:
        replace = self.chances is not None
        return self._generator(*when).choice(self.size, self.rows, replace=replace, p=self.chances)

    def _generator(self, *when: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *when, zlib.crc32(self.task.encode())])


class Unlabelled(NamedTuple):
    """Rows of a task without labels, of which a round takes some beside those with.

    Args:
        rows: all of them.
        sampler: their order.
        size: how many a round takes.
    """

    rows: SupportsLenAndGetItem
    sampler: RowSampler
    size: int


class Rounds(Dataset, ABC):
    """A map-style dataset of rounds: item `i` is `{task: rows}`, a pure function of seed, epoch and `i`.

    With `W` processes and a global step `s`, process `r` takes round `s * W + r`. Rounds follow each other in
    one order of the rows, so `W` processes with batches of `b` see at each step the rows that one process
    with batches of `W * b` sees. The order is drawn here and not by a sampler of torch's, because such a sampler's
    epoch is lost when several processes resume in the middle of an epoch.

    All batches are full: a task whose rows do not fill its last ones begins its next pass there.

    Args:
        datasets: rows by task name.
        batch_sizes: rows a round takes from each task.
        samplers: the order of each task's rows.
        num_processes: the number of rounds, and of those with a task, is a multiple of it, so that at each step every
            process takes a round, with the same tasks.
        seed: of which tasks a round holds, where that is drawn.
        temperature: of `Temperature`.
        epochs: how many there will be, for `Annealed`.
        groups: of tasks that share rows, each with one sampler and one batch size. A round has them under the first
            of them, as `SharedRows`. A task of which no process has a labelled row there is not in it.
        unlabelled: by task, rows without labels. A round has both kinds as `PartlyLabelled`.

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
        """How many rounds, over all processes, it takes to see each of the epoch's rows of a task once."""
        per_step = self.batch_sizes[task] * self.num_processes
        return -(-self.samplers[task].rows // per_step) * self.num_processes

    @abstractmethod
    def rounds_with(self, task: str) -> int:
        """How many of the epoch's rounds hold the task: it is in the first ones."""

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
        """Rows of all tasks that an epoch shows, those that it shows again counted again."""
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
    """Goes on until the task with the most rounds has been seen whole; shorter tasks start again.

    Every row of an epoch is seen at least once in it, whichever task it is of.
    """

    whole = True

    def rounds_with(self, task: str) -> int:
        return max(map(self.rounds_to_see, self.datasets))


class Once(Rounds):
    """Goes through each task's rows once; a task that is through leaves the rounds to the others.

    So the last rounds are those of the longest task alone. Rows that fill up a task's last batches are seen twice.
    """

    def rounds_with(self, task: str) -> int:
        return self.rounds_to_see(task)


class Shortest(Rounds):
    """Stops with the task that has the fewest rounds: what the others have more of is not seen in this epoch.

    Each epoch has a new order, so that over many epochs all rows have the same chance.
    """

    whole = True

    def rounds_with(self, task: str) -> int:
        return min(map(self.rounds_to_see, self.datasets))


class Drawn(Rounds):
    """Base of those where each step has one task, drawn by chance: an epoch has as many rounds as all rows fill.

    How often a task comes differs from epoch to epoch, and rows of it may not be seen in one. With one task in a step
    there is nothing for a way of combining gradients to do.
    """

    @abstractmethod
    def chances(self, rows: np.ndarray) -> np.ndarray:
        """What each task's chance is in proportion to, from how many rows each has in an epoch; both [tasks]."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._plan = None

    _plan: tuple[np.ndarray, np.ndarray] | None = None

    def plan(self) -> tuple[np.ndarray, np.ndarray]:
        """For each step of the epoch, the place of its task among the tasks, and how often that one came before."""
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
        """How many rounds of each task the first steps of a run have, up to where all tasks have one.

        Args:
            steps: of the optimizer. The last one of an epoch may have fewer rounds.
            rounds_per_step: of each process.
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
    """One task a step, with a chance in proportion to its rows.

    With batches of one size all rows are seen equally often, in the mean.
    """

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return rows


class Temperature(Drawn):
    """One task a step, with a chance in proportion to rows^(1/T): small tasks come more often than their share.

    T of 1 is `Proportional`; with a large one all tasks come equally often (arXiv:1907.05019, section 4.2).
    """

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return rows ** (1 / self.temperature)


class Annealed(Drawn):
    """One task a step, with a chance in proportion to rows^a, where a falls from 1 in the first epoch to .2.

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
