"""Loss options that are counted from the training rows, and checks of losses that compare rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MinBertError
from ..model.losses import AUTO, COMPARING, COUNTED
from ..settings import wording
from ..settings.metrics import by_words
from ..settings.tasks import Task
from .base_args import BaseArguments
from .data import batch_sizes_of, is_balanced, samplers_of

if TYPE_CHECKING:
    from ..data.rows import EncodedRows
    from .protocol import Config

logger = logging.getLogger(__name__)


def prepare_losses(
    args: BaseArguments,
    config: Config,
    tasks: dict[str, Task],
    rows: Mapping[str, EncodedRows],
    groups: Sequence[Sequence[str]] = (),
) -> None:
    """Counts the loss options that are `auto`, and warns about combinations that do not work well.

    Args:
        config: its `tasks`, which the model reads, get the numbers, and so does `tasks`.
        rows: the training rows by task.
        groups: the groups of tasks that share rows.

    Raises:
        MinBertError: as `check_batch` and `counted`.
    """
    samplers = samplers_of(args, tasks, rows, groups)
    for name, size in batch_sizes_of(args, samplers).items():
        check_batch(tasks[name], size)
    for saved in config.tasks:
        name = saved["name"]
        if name not in rows:
            continue
        if auto_options(tasks[name]) and (labels := rows[name].labels) is not None:
            reach, labelled = samplers[name].within_reach(), rows[name].labelled
            labels = labels[reach if labelled is None else reach[labelled[reach]]]
            if tasks[name].traits.is_tags:
                (labels,) = by_words(labels)
            numbers = counted(tasks[name], labels)
            saved["loss_options"].update(numbers)
            tasks[name] = Task.from_config(saved)
            among = wording.counted(len(labels), "tag" if tasks[name].traits.is_tags else "training row")
            logger.info("Counted from %s of %s: %s.", among, name, in_words(numbers))
        for warning in warnings_of(tasks[name], is_balanced(args, name)):
            logger.warning(warning)


def check_counted(tasks: Iterable[Task]) -> None:
    """Raises `MinBertError` if an option of one of the tasks is still `auto`, because the task is not trained."""
    for task in tasks:
        for option in auto_options(task):
            raise MinBertError(
                f"Task {task.name!r}: `{option}: auto` is counted from training rows, and the task is not trained. "
                f"Give `{option}` in numbers, or add the task to `train_tasks`."
            )


def auto_options(task: Task) -> list[str]:
    """Returns the names of the task's loss options that are `auto`."""
    return [name for name, value in task.loss_options.items() if name in COUNTED and value == AUTO]


def counted(task: Task, labels: np.ndarray) -> dict[str, Any]:
    """Returns the numbers for the loss options that are `auto`.

    `class_weights`: the inverse of each label's frequency, with mean 1. `pos_weight`: the number of rows with the
    first label for each row with the second, negatives / positives; for `kind: labels` this is computed for each
    label.

    Args:
        labels: the labels of the rows, or of all words, that training may use.

    Raises:
        MinBertError: a label has no row, so its weight would be infinite.
    """
    wanted = auto_options(task)
    if not wanted:
        return {}
    if task.traits.is_set:
        return {"pos_weight": _of_sets(task, labels)}
    counts = np.bincount(labels, minlength=len(task.labels))
    missing = [label for label, count in zip(task.labels, counts, strict=True) if count == 0]
    if missing:
        raise MinBertError(
            f"Task {task.name!r}: `{wanted[0]}: auto` is counted from the training rows, and none of these has the "
            f"label {' or '.join(map(repr, missing))}. Give `{wanted[0]}` in numbers, or rows of every label."
        )
    inverse = 1 / counts
    numbers = {"class_weights": (inverse / inverse.mean()).tolist(), "pos_weight": float(counts[0] / counts[-1])}
    return {name: numbers[name] for name in wanted}


def _of_sets(task: Task, labels: np.ndarray) -> list[float]:
    having = (labels > 0).sum(axis=0)
    for label, count in zip(task.labels, having.tolist(), strict=True):
        if count in (0, len(labels)):
            raise MinBertError(
                f"Task {task.name!r}: `pos_weight: auto` is counted from the training rows, and "
                f"{'all' if count else 'none'} of these have the label {label!r}. Give `pos_weight` in numbers, or "
                "rows with it and without it."
            )
    return ((len(labels) - having) / having).tolist()


def in_words(numbers: dict[str, Any]) -> str:
    """Describes the result of `counted` for the log."""
    return ", ".join(f"{name} {' '.join(f'{n:.4g}' for n in np.atleast_1d(of))}" for name, of in numbers.items())


def check_batch(task: Task, rows: int) -> None:
    """Raises `MinBertError` if a loss that compares rows would get single rows, so that it would train nothing.

    Args:
        rows: the task's rows in a round, per device. Accumulation and other processes do not add rows to compare.
    """
    if task.loss in COMPARING and rows < 2:
        raise MinBertError(
            f"Task {task.name!r}: `loss: {task.loss}` compares the rows of a batch with each other, and its batches "
            f"have one. Set `per_device_train_batch_size` or `task_batch_sizes: {{{task.name}: 16}}` to more."
        )


def warnings_of(task: Task, balanced: bool) -> list[str]:
    """Returns warnings about a task's loss before training.

    Args:
        balanced: whether its rows are drawn so that each label is equally likely.
    """
    warnings = []
    weights = [f"`{name}`" for name in COUNTED if task.loss_options.get(name) is not None]
    if weights and balanced:
        warnings.append(
            f"Task {task.name!r}: {' and '.join(weights)} and `task_sampling: balanced` correct the same imbalance, "
            f"and together too much. Leave one of them out."
        )
    if task.loss == "mnr" and not task.loss_options.get("bce_weight"):
        warnings.append(
            f"Task {task.name!r}: `loss: mnr` ranks pairs and never learns where a yes begins, so the accuracy may "
            f"stay at chance. Add `loss_options: {{bce_weight: 1}}`."
        )
    return warnings
