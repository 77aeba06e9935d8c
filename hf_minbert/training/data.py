"""What the trainer trains on: the rounds, batch sizes and weights of losses that the training arguments ask for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

from ..data.rounds import (
    MIXING,
    Drawn,
    Rounds,
    RowSampler,
    inverse_batch_size_weights,
    label_groups,
    proportional_batch_sizes,
)
from ..data.rows import EncodedRows, PooledRows
from ..errors import MinBertError
from ..settings.tasks import Task
from .base_args import BaseArguments

logger = logging.getLogger(__name__)


def is_balanced(args: BaseArguments, task: str) -> bool:
    """Whether the task's rows are drawn so that each label is equally likely."""
    return args.by_task("task_sampling").get(task) == "balanced"


def samplers_of(
    args: BaseArguments, tasks: Mapping[str, Task], rows: Mapping[str, EncodedRows | PooledRows]
) -> dict[str, RowSampler]:
    """How each task's rows are drawn."""
    return {
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


def batch_sizes_of(args: BaseArguments, samplers: Mapping[str, RowSampler]) -> dict[str, int]:
    """Rows that a round takes from each task, per device."""
    usual = args.per_device_train_batch_size
    if args.task_batch_sizes == "proportional":
        return proportional_batch_sizes({name: sampler.rows for name, sampler in samplers.items()}, usual)
    own = args.by_task("task_batch_sizes")
    return {name: own.get(name, usual) for name in samplers}


def rounds_of(
    args: BaseArguments, tasks: Mapping[str, Task], rows: Mapping[str, EncodedRows | PooledRows] | None
) -> Rounds:
    """The rounds of an epoch, in the order of `args.mixing`.

    Raises:
        MinBertError: there are no rows, or too few of a task.
    """
    if rows is None:
        raise MinBertError("There is nothing to train on: pass `train_dataset={task: rows}`.")
    samplers = samplers_of(args, tasks, rows)
    return MIXING[args.mixing](
        rows,
        batch_sizes_of(args, samplers),
        samplers,
        num_processes=args.world_size,
        seed=data_seed_of(args),
        temperature=args.mixing_temperature,
        epochs=math.ceil(args.num_train_epochs),
    )


def warn_of_left_out(args: BaseArguments, rounds: Rounds) -> None:
    """Logs which tasks the whole run never draws, where a step's task is drawn and there are few steps."""
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
            "steps, or take `mixing: cycle`.",
            args.mixing, " and ".join(left_out), ", ".join(f"{task} {count:,}" for task, count in counts.items()),
        )  # fmt: skip


def loss_weights_of(args: BaseArguments, rounds: Rounds) -> dict[str, float]:
    """The factor on each task's loss. Says in the log what was computed and not given."""
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
    """A loader of the dataset in its own order, with the workers and the memory that the arguments ask for."""
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
    """The seed of what is drawn of the data: rows, rounds, texts."""
    return args.seed if args.data_seed is None else args.data_seed
