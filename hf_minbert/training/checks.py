"""Checks the training arguments: each value, their combinations, and their fit to the model's tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from numbers import Real
from typing import get_args

import torch

from ..data.rounds import MIXING, Drawn
from ..errors import MinBertError, explain, unknown_name
from ..settings.services import check_services
from ..settings.table import names
from ..settings.tasks import Task, check_metric
from ..settings.training import (
    BatchSizes,
    ConflictDetail,
    GradientReduction,
    Proximal,
    Sampling,
    TaskWeights,
    TrainMetrics,
)
from .aggregation.registry import make_aggregator
from .balancing import BALANCING, balancing_of
from .base_args import BaseArguments
from .freezing import schedule_of
from .parameter_groups import check_groups
from .terms.base import check_number
from .terms.registry import regularizer_of, terms_of


def check_ranges(args: BaseArguments) -> None:
    """Raises `MinBertError` if a number is out of range."""
    for name, lowest in (
        ("per_device_train_batch_size", 1), ("per_device_eval_batch_size", 1), ("gradient_accumulation_steps", 1),
        ("early_stopping_patience", 1), ("early_stopping_threshold", 0), ("learning_rate", 0), ("warmup_steps", 0),
        ("weight_decay", 0), ("max_grad_norm", 0), ("dataloader_num_workers", 0), ("seed", 0), ("data_seed", 0),
        ("eval_accumulation_steps", 1), ("save_total_limit", 1), ("logging_steps", 0), ("save_steps", 0),
        ("eval_steps", 0), ("eval_delay", 0), ("score_bins", 2), ("mixing_temperature", 1),
        ("neftune_noise_alpha", 0),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not value >= lowest:
            raise MinBertError(f"`{name}` must be at least {lowest}. Found {value}.")
        if value == math.inf:
            raise MinBertError(f"`{name}` must be finite. Found {value}.")
    if args.max_steps == 0:  # the stock loop would take one step
        raise MinBertError("`max_steps` must be at least 1. Found 0. Leave it out to train by `num_train_epochs`.")
    if args.max_steps < 0 and not args.num_train_epochs > 0:
        raise MinBertError(f"`num_train_epochs` must be more than 0. Found {args.num_train_epochs}.")
    if args.max_steps < 0 and args.num_train_epochs == math.inf:
        raise MinBertError("`num_train_epochs` must be finite. Found inf. Set `max_steps` instead.")


def check_values(args: BaseArguments) -> None:
    """Raises `MinBertError` if a value is unknown, or does not go with another value."""
    for name in ("mixing", "aggregator"):
        if not isinstance(getattr(args, name), str):
            raise MinBertError(f"`{name}` must be a name. Found {getattr(args, name)!r}.")
    choices = {"mixing": MIXING, "proximal": get_args(Proximal)}
    choices |= {"train_metrics": get_args(TrainMetrics), "conflict_detail": get_args(ConflictDetail)}
    for name, known in choices.items():
        if getattr(args, name) not in known:
            raise unknown_name(name, getattr(args, name), known)
    check_services(args.report_to)
    _check_freezing(args)
    check_groups(args)
    _check_per_task(args)
    _check_balancing(args)
    _check_aggregator(args)
    _check_terms(args)
    _check_pretrained_decay(args)
    _check_sharing(args)
    if args.do_eval and args.eval_strategy == "no":
        raise MinBertError("`do_eval: true` does nothing by itself. Set `eval_strategy` to epoch or steps.")
    if args.early_stopping_patience is not None and args.eval_strategy == "no":
        raise MinBertError("`early_stopping_patience` needs evaluations. Set `eval_strategy` to epoch or steps.")
    if args.compile_layers and args.torch_compile:
        raise MinBertError("`compile_layers` and `torch_compile` compile the same layers. Leave one out.")


def _check_freezing(args: BaseArguments) -> None:
    frozen = {*schedule_of(args.freeze, args.unfreeze).values()}
    in_part = args.unfreeze == "gradual" or not frozen <= {"none", "encoder"}
    if in_part and _reenters(args):
        raise MinBertError(
            "`freeze` in part does not work with reentrant gradient checkpointing: layers above frozen ones "
            "would get no gradient. Leave `gradient_checkpointing_kwargs` out."
        )


def _check_per_task(args: BaseArguments) -> None:
    for name, words in (("task_batch_sizes", get_args(BatchSizes)), ("task_weights", get_args(TaskWeights))):
        value = getattr(args, name)
        if isinstance(value, str) and value not in words:
            raise unknown_name(name, value, words)
        if not isinstance(value, str | Mapping | None):
            said = f"`{name}` must be a mapping from tasks to numbers, or {' or '.join(map(repr, words))}."
            raise MinBertError(f"{said} Found {value!r}.")
    for name in ("task_sampling", "rows_per_epoch"):
        if not isinstance(getattr(args, name), Mapping | None):
            raise MinBertError(f"`{name}` must be a mapping from tasks. Found {getattr(args, name)!r}.")
    for task, size in args.by_task("task_batch_sizes").items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MinBertError(f"`task_batch_sizes` of {task!r} must be a whole number from 1. Found {size!r}.")
    for task, weight in args.by_task("task_weights").items():
        if not _is_number(weight) or not 0 <= weight < math.inf:
            raise MinBertError(f"`task_weights` of {task!r} must be a number from 0. Found {weight!r}.")
    for task, sampling in (args.task_sampling or {}).items():
        if sampling not in get_args(Sampling):
            raise unknown_name(f"`task_sampling` of {task!r}:", sampling, get_args(Sampling))
    for task, rows in (args.rows_per_epoch or {}).items():
        counts = type(rows) is int and rows >= 1
        if not counts and not (type(rows) is float and 0 < rows <= 1):
            raise MinBertError(
                f"`rows_per_epoch` of {task!r} must be a whole number of rows from 1, or a share of them above 0 "
                f"and up to 1.0. Found {rows!r}."
            )


def _check_balancing(args: BaseArguments) -> None:
    if not isinstance(args.task_weights_options, Mapping | None):
        raise MinBertError(
            f"`task_weights_options` must be a mapping like {{learning_rate: 0.01}}. Found "
            f"{args.task_weights_options!r}."
        )
    if args.task_weights in (*BALANCING,) and not MIXING[args.mixing].whole:
        whole = " or ".join(f"`mixing: {name}`" for name, rounds in MIXING.items() if rounds.whole)
        raise MinBertError(
            f"`task_weights: {args.task_weights}` compares the losses of a round, so each round must have every task. "
            f"Found `mixing: {args.mixing}`. Use {whole}."
        )


def _check_aggregator(args: BaseArguments) -> None:
    if not isinstance(args.aggregator_options, Mapping | None):
        raise MinBertError(
            f"`aggregator_options` must be a mapping like {{reduction: mean}}. Found {args.aggregator_options!r}."
        )
    aggregator = make_aggregator(args.aggregator, **(args.aggregator_options or {}))
    if args.gradient_reduction not in get_args(GradientReduction):
        raise unknown_name("gradient_reduction", args.gradient_reduction, get_args(GradientReduction))
    if args.gradient_reduction == "sharded" and (args.gradient_smoothing is not None or not aggregator.needs_rows):
        raise MinBertError(
            "`gradient_reduction: sharded` is for an aggregator with rows, such as pcgrad, and without "
            "`gradient_smoothing`. Leave it out."
        )
    if args.conflict_detail != "none" and not aggregator.needs_rows:
        raise MinBertError(
            f"`conflict_detail: {args.conflict_detail}` needs an aggregator that sees each task's gradient. Found "
            f"{args.aggregator!r}. Use another, such as pcgrad, or measure with `minbert conflicts --detail`."
        )
    if args.gradient_smoothing is None:
        return
    if not _is_number(args.gradient_smoothing) or not 0 <= args.gradient_smoothing < 1:
        raise MinBertError(
            f"`gradient_smoothing` must be 0 or more and below 1. Found {args.gradient_smoothing!r}. Leave it out "
            "to smooth nothing."
        )
    if not aggregator.needs_rows:
        raise MinBertError(
            f"`gradient_smoothing` needs an aggregator that sees each task's gradient. Found {args.aggregator!r}. "
            "Use another, such as pcgrad, or leave it out."
        )


def _check_terms(args: BaseArguments) -> None:
    if args.teachers is not None and not args.teachers:
        raise MinBertError("`teachers` is empty. Name a saved model, or leave it out.")
    if any(term.searches for term in terms_of(args)) and _reenters(args):
        raise MinBertError(
            f"`regularizer: {args.regularizer}` differentiates by the input, which does not work with reentrant "
            f"gradient checkpointing. Leave `gradient_checkpointing_kwargs` out."
        )
    if args.regularizer == "smart" and args.smart_form != "paper" and args.torch_compile:
        raise MinBertError(f"`smart_form: {args.smart_form}` uses a hook, which compiled models skip. Leave one out.")
    if args.proximal_evaluate and args.proximal == "none":
        asked = str(args.proximal_evaluate).lower()
        raise MinBertError(
            f"`proximal_evaluate: {asked}` needs an earlier state of the weights to score. Set `proximal: momentum`, "
            "their moving average, or `proximal: previous`."
        )
    if args.proximal != "none" and not args.proximal_weight and not args.proximal_evaluate:
        raise MinBertError(
            f"`proximal: {args.proximal}` with `proximal_weight: 0` adds no term, and nothing scores or saves its "
            "weights. Set `proximal_evaluate` to true or instead, or leave `proximal` out."
        )
    if args.proximal_evaluate == "instead" and args.load_best_model_at_end and args.save_only_model:
        raise MinBertError(
            "`proximal_evaluate: instead` needs the averaged weights of the best checkpoint, which "
            "`save_only_model: true` leaves out. Leave one out."
        )
    if args.proximal_evaluate is True and args.eval_strategy == "no":
        raise MinBertError("`proximal_evaluate: true` needs evaluations. Set `eval_strategy` to epoch or steps.")


def _check_sharing(args: BaseArguments) -> None:
    if not args.share_rows:
        return
    own = next((term.name for term in terms_of(args) if not term.of_outputs), None)
    if own is not None:
        raise MinBertError(
            f"`share_rows: true` computes one pass for all tasks of a row, and the term {own!r} needs passes for each "
            "task. Leave one of them out."
        )
    if issubclass(MIXING[args.mixing], Drawn):
        raise MinBertError(
            f"`share_rows: true` is for rounds of several tasks, and with `mixing: {args.mixing}` each step has one. "
            "Leave it out, or use `mixing: cycle`."
        )
    if args.torch_compile:
        raise MinBertError(
            "`torch_compile` compiles the pass of one task, and `share_rows: true` has one for several. Leave one "
            "out, or use `compile_layers: true`."
        )
    if args.compile_layers and make_aggregator(args.aggregator, **(args.aggregator_options or {})).needs_rows:
        raise MinBertError(
            f"With `aggregator: {args.aggregator}`, `share_rows: true` differentiates one pass for each task, and "
            "compiled layers can be differentiated once. Leave `compile_layers` out."
        )


def _check_pretrained_decay(args: BaseArguments) -> None:
    check_number("pretrained_decay", args.pretrained_decay)
    own = args.learning_rates or {}  # a task's may be that of its private layers
    rate = max(own.get("encoder", args.learning_rate), *(own[name] for name in own if name != "heads"), 0)
    if rate * args.pretrained_decay > 1:
        raise MinBertError(
            f"`pretrained_decay: {args.pretrained_decay:g}` with `learning_rate: {rate:g}` takes a step of "
            f"{rate * args.pretrained_decay:g} times the way back, and more than 1 overshoots. Give at most "
            f"{1 / rate:g}."
        )


def _reenters(args: BaseArguments) -> bool:
    options = args.gradient_checkpointing_kwargs
    return isinstance(options, dict) and bool(options.get("use_reentrant"))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# ---- For the model's tasks ---------------------------------------------------------------------------------------


def check_tasks(args: BaseArguments, tasks: Mapping[str, Task]) -> None:
    """Checks all names of tasks and metrics. It needs no model, so it can be called before one is loaded.

    Raises:
        MinBertError: a task or a metric is unknown; the regularizer does not support a task; all trained tasks have
            the weight 0; `task_weights` has a single task to balance; or the aggregator does not support the number or
            the names of the tasks.
    """
    check_groups(args, tasks)
    for option in names(by_task=True):
        if not isinstance(getattr(args, option), str):  # else it is one word for all
            args.chosen_tasks(option, tasks)
    regularizer = regularizer_of(args)
    trained = [tasks[name] for name in args.chosen_tasks("train_tasks", tasks)]
    for task in trained:
        if task.traits.is_set and args.by_task("task_sampling").get(task.name) == "balanced":
            raise MinBertError(
                f"`task_sampling: balanced` of {task.name!r} needs rows with one label each, and its rows have any "
                f"number. Leave it out, or weigh the labels by `loss_options: {{pos_weight: auto}}`."
            )
    if not any(args.by_task("task_weights").get(task.name, 1.0) for task in trained):
        raise MinBertError(
            f"`task_weights` are 0 for all tasks in training: {', '.join(task.name for task in trained)}. Nothing "
            "would be trained. Give one of them more."
        )
    for task in trained:
        for name in ("unlabelled", "unlabelled_pairs"):
            if not getattr(task, name):
                continue
            if args.teachers is None:
                raise MinBertError(
                    f"`{name}` of {task.name!r} is learnt from teachers, and there are none. Give `teachers`, or "
                    "leave it out."
                )
            if args.share_rows:
                raise MinBertError(f"`{name}` of {task.name!r} does not go with `share_rows: true`. Leave one out.")
    for task in (task for task in trained if task.traits.is_tags):
        if args.by_task("task_sampling").get(task.name) == "balanced":
            raise MinBertError(
                f"`task_sampling: balanced` draws rows by their label, and a row of {task.name!r} has one for each "
                f"word. Leave it out for that task; `loss_options: {{class_weights: auto}}` weights tags."
            )
        if args.teachers is not None:
            raise MinBertError(
                f"`teachers` cannot teach {task.name!r}: distillation is for one answer a row, and tags are one for "
                f"each word. Leave the task out of `train_tasks`, or train without."
            )
    balancing_of(args, trained, torch.device("cpu"))
    _check_aggregator_of(args, [task.name for task in trained])
    if regularizer is not None and (reason := regularizer.refusal(trained)) is not None:
        raise MinBertError(reason)
    if args.metric_for_best_model is not None:
        evaluated = [tasks[name] for name in args.chosen_tasks("eval_tasks", tasks)]
        check_metric(args.metric_for_best_model, evaluated, args.proximal_evaluate is True)


def _check_aggregator_of(args: BaseArguments, trained: Sequence[str]) -> None:
    """Raises the aggregator's `MinBertError` before training, and one if two pairs of tasks have the same name in the
    log.
    """
    aggregator = make_aggregator(args.aggregator, **(args.aggregator_options or {}))
    if not aggregator.needs_rows:
        return
    pairs: dict[str, tuple[str, str]] = {}
    for a, b in combinations(trained, 2):
        if (other := pairs.setdefault(f"{a}_{b}", (a, b))) != (a, b):
            raise MinBertError(
                f"Aggregator {args.aggregator!r} would log `conflict_{a}_{b}` of the tasks {other[0]!r} and "
                f"{other[1]!r} and of {a!r} and {b!r}. Give one of them another name."
            )
    fewest = len(trained) if MIXING[args.mixing].whole else min(2, len(trained))
    for count in range(fewest, len(trained) + 1):
        remedy = f"`aggregator_options` must serve steps of {count} tasks."
        with explain(f"Combining the gradients of {count} tasks with {args.aggregator!r}", remedy):
            aggregator.weights(torch.eye(count, dtype=torch.float64), torch.Generator())
