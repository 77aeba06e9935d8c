"""The training data: the rounds, batch sizes and loss weights that the training arguments define."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

from ..data.rounds import (
    MIXING,
    Drawn,
    Rounds,
    RowSampler,
    Unlabelled,
    inverse_batch_size_weights,
    label_groups,
    proportional_batch_sizes,
)
from ..data.rows import EncodedRows, PooledRows, having_labels
from ..data.sharing import same_tokens, with_some_label
from ..errors import MinBertError
from ..model.inference import shared_passes
from ..settings.tasks import Task
from .balancing import BALANCING
from .base_args import BaseArguments
from .protocol import TaskModel, require

logger = logging.getLogger(__name__)


def is_balanced(args: BaseArguments, task: str) -> bool:
    """Whether the task's rows are drawn so that each label is equally likely."""
    return args.by_task("task_sampling").get(task) == "balanced"


def samplers_of(
    args: BaseArguments,
    tasks: Mapping[str, Task],
    rows: Mapping[str, EncodedRows | PooledRows],
    groups: Sequence[Sequence[str]] = (),
) -> dict[str, RowSampler]:
    """Returns the sampler of each task's rows. Tasks that share rows have one sampler."""
    samplers = {
        name: RowSampler(
            name,
            len(of),
            seed=data_seed_of(args),
            groups=label_groups(tasks[name], of.labels, args.score_bins)
            if is_balanced(args, name) and of.labels is not None
            else None,
            rows=args.by_task("rows_per_epoch").get(name),
            redraw=args.redraw_rows,
        )
        for name, of in rows.items()
    }
    return samplers | {name: samplers[group[0]] for group in groups for name in group}


def shared_groups(
    args: BaseArguments, model: TaskModel, rows: Mapping[str, EncodedRows]
) -> tuple[dict[str, EncodedRows], list[list[str]]]:
    """Returns the rows for tasks that share them, and the groups of these tasks.

    For a group, rows without a label of any of its tasks are left out. For any other task, rows without its label are.

    Raises:
        MinBertError: the tasks of a group would draw rows in different ways, or other arguments need labels in all
            rows.
    """
    reads = {name: next(first for first in rows if same_tokens(rows[first], of)) for name, of in rows.items()}
    groups = [group for group in shared_passes(cast(Any, model), reads) if len(group) > 1]
    if groups:
        require(model, "pooled", "share_rows: true")
    else:  # no error: a study trains tasks of one recipe together and alone
        logger.warning(
            "`share_rows: true` has no effect: no two of %s have the same texts and layers. Tasks share rows if "
            "they have the same training files and text columns, and neither `sources` nor `private_layers`.",
            ", ".join(rows),
        )  # fmt: skip
    found = {name: having_labels(of) for name, of in rows.items()}
    for group in groups:
        _check_group(args, group)
        found |= with_some_label({name: rows[name] for name in group})
        logger.info("%s share rows: one forward pass for all.", " and ".join(group))
    for name, of in found.items():
        if of.labelled is not None:
            _check_unlabelled(args, name)
    return found, groups


def _check_group(args: BaseArguments, group: Sequence[str]) -> None:
    """Raises `MinBertError` if tasks that share rows are to draw them in different ways."""
    both = " and ".join(group)
    for option in ("task_batch_sizes", "rows_per_epoch"):
        given = {name: args.by_task(option).get(name) for name in group}
        if len({*given.values()}) > 1:
            found = ", ".join(f"{name} {value or 'nothing'}" for name, value in given.items())
            raise MinBertError(f"`{option}` must be the same for tasks that share rows, {both}. Found {found}.")
    for name in group:
        if is_balanced(args, name):
            raise MinBertError(
                f"`task_sampling` of {name!r} must be shuffle, as it shares rows: {both} draw the same ones. Leave it "
                "out, or `share_rows`."
            )


def _check_unlabelled(args: BaseArguments, name: str) -> None:
    """Raises `MinBertError` if something needs a label in each row of a task that has rows without."""
    lacks = f"{name!r} has no label in some rows that it shares"
    if isinstance(args.task_weights, str) and args.task_weights in BALANCING:
        raise MinBertError(
            f"`task_weights: {args.task_weights}` compares the losses of a round, so each round must have every "
            f"task, and {lacks}. Use weights in numbers, or leave `share_rows` out."
        )
    if args.train_metrics == "running" and args.world_size > 1:
        raise MinBertError(
            f"`train_metrics: running` needs equally many rows from each process, and {lacks}. Use `full`."
        )


def batch_sizes_of(args: BaseArguments, samplers: Mapping[str, RowSampler]) -> dict[str, int]:
    """Returns the number of rows of each task in a round, per device."""
    usual = args.per_device_train_batch_size
    if args.task_batch_sizes == "proportional":
        return proportional_batch_sizes({name: sampler.rows for name, sampler in samplers.items()}, usual)
    own = args.by_task("task_batch_sizes")
    return {name: own.get(name, usual) for name in samplers}


def rounds_of(
    args: BaseArguments,
    tasks: Mapping[str, Task],
    rows: Mapping[str, EncodedRows | PooledRows] | None,
    groups: Sequence[Sequence[str]] = (),
    unlabelled: Mapping[str, EncodedRows | PooledRows] | None = None,
) -> Rounds:
    """Returns the rounds of an epoch, in the order of `args.mixing`.

    Args:
        groups: the groups of tasks that share rows.
        unlabelled: rows without labels, by task. The ratio of unlabelled to labelled rows in a round is that of the
            task, with at least one unlabelled row.

    Raises:
        MinBertError: there are no rows, or too few of a task.
    """
    if rows is None:
        raise MinBertError("There is nothing to train on: pass `train_dataset={task: rows}`.")
    samplers = samplers_of(args, tasks, rows, groups)
    sizes, beside = batch_sizes_of(args, samplers), {}
    for name, of in (unlabelled or {}).items():
        sampler = RowSampler(f"{name} without labels", len(of), seed=data_seed_of(args))
        beside[name] = Unlabelled(of, sampler, max(1, round(sizes[name] * len(of) / len(rows[name]))))
    return MIXING[args.mixing](
        rows,
        sizes,
        samplers,
        num_processes=args.world_size,
        seed=data_seed_of(args),
        temperature=args.mixing_temperature,
        epochs=math.ceil(args.num_train_epochs),
        groups=groups,
        unlabelled=beside,
    )


def warn_of_left_out(args: BaseArguments, rounds: Rounds) -> None:
    """Warns of tasks that are never drawn in the run.

    This can happen if tasks are drawn at random and there are few steps.
    """
    if not isinstance(rounds, Drawn):
        return
    per_step = args.gradient_accumulation_steps
    steps = args.max_steps
    if steps < 0:
        steps = math.ceil(args.num_train_epochs * -(-len(rounds) // rounds.num_processes // per_step))
    counts = rounds.drawn(steps, per_step)
    if left_out := [task for task, count in counts.items() if count == 0]:
        logger.warning(
            "`mixing: %s` draws no round of %s in this run: it is not trained. Rounds by task: %s. Train for more "
            "steps, or use `mixing: cycle`.",
            args.mixing, " and ".join(left_out), ", ".join(f"{task} {count:,}" for task, count in counts.items()),
        )  # fmt: skip


def loss_weights_of(args: BaseArguments, rounds: Rounds) -> dict[str, float]:
    """Returns the factor on each task's loss. Logs factors that were computed."""
    if args.task_batch_sizes == "proportional":
        sizes = (f"{name} {size} ({rounds.rounds_to_see(name):,})" for name, size in rounds.batch_sizes.items())
        logger.info("Batch sizes, and how many rounds it takes to see all rows: %s.", ", ".join(sizes))
    if args.task_weights != "inverse_batch_size":
        return {name: args.by_task("task_weights").get(name, 1.0) for name in rounds.batch_sizes}
    weights = inverse_batch_size_weights(rounds.batch_sizes)
    logger.info("Weights of the losses: %s.", ", ".join(f"{name} {w:.4g}" for name, w in weights.items()))
    return weights


def data_loader(
    args: BaseArguments, dataset: Dataset | EncodedRows, batch_size: int, collate: Callable[[list[Any]], Any]
) -> DataLoader:
    """Returns a loader of the dataset in its own order, with the workers and memory settings of the arguments."""
    return DataLoader(
        cast(Dataset, dataset),  # torch asks for its class, and does with any that has a length and items
        batch_size=batch_size,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",  # elsewhere torch only warns
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
    )


def data_seed_of(args: BaseArguments) -> int:
    """Returns the seed for drawing data: rows, rounds, texts."""
    return args.seed if args.data_seed is None else args.data_seed
