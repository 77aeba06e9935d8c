"""Learning rates and weight decays of parts of a model: the groups of its optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping

import torch

from ..errors import MinBertError, unknown_name
from .base_args import BaseArguments
from .freezing import HEADS, levels_of, num_layers, path_of
from .protocol import TaskModel
from .terms.base import check_number

logger = logging.getLogger(__name__)

ENCODER = "encoder"
OPTIONS = ("learning_rates", "weight_decays")


def groups_of(name: str) -> tuple[str, ...]:
    """The groups that a parameter is in, by its name in the model, the narrowest first.

    A head is its task's and one of the `heads`; private layers and a private encoder are their task's and the
    `encoder`'s, to which all the rest belongs.
    """
    path = path_of(name)
    if path[0] == HEADS:
        return path[1], HEADS
    private = re.search(r"(?:^|\.)private\.(\w+)\.", ".".join(path))
    return (private[1], ENCODER) if private else (ENCODER,)


def check_groups(args: BaseArguments, tasks: Iterable[str] | None = None) -> None:
    """Raises `MinBertError` if a rate or a decay is no number from 0, or its group is none of the model's.

    Args:
        tasks: names of the model's, where they are known.
    """
    if not 0 < args.layer_decay <= 1:
        raise MinBertError(f"`layer_decay` must be above 0 and at most 1. Found {args.layer_decay}.")
    for option in OPTIONS:
        for group, value in (getattr(args, option) or {}).items():
            check_number(f"{option}.{group}", value)
            if tasks is None:
                continue
            if group not in (ENCODER, HEADS, *tasks):
                raise MinBertError(f"`{option}`: {unknown_name('group', group, (ENCODER, HEADS, *tasks))}")
            if group in (ENCODER, HEADS) and group in tasks:
                raise MinBertError(f"`{option}`: {group!r} is a task and a group. Give the task another name.")


def has_groups(args: BaseArguments) -> bool:
    """Whether the arguments tell parts of a model apart, beyond what weight decay spares."""
    return bool(args.learning_rates or args.weight_decays) or args.layer_decay != 1


def check_optimizer(optimizer: torch.optim.Optimizer | None, args: BaseArguments, learned: bool) -> None:
    """Raises `MinBertError` if an optimizer was made already that the arguments would have in groups.

    Args:
        learned: whether the weights of the losses are learned, and make a group of their own.
    """
    if optimizer is not None and (learned or has_groups(args)):
        raise MinBertError(
            "`learning_rates`, `weight_decays`, `layer_decay` and learned `task_weights` are for an optimizer that "
            "`args.optim` names. Leave them out, or `optimizers`."
        )


def split_groups(
    optimizer: torch.optim.Optimizer, model: TaskModel, args: BaseArguments, decayed: Collection[str]
) -> None:
    """Splits a new optimizer's groups by learning rate and weight decay. Warns of groups without trained parameters.

    Rates of layers fall by `layer_decay` from the top one, at its group's rate, to the embeddings. Each group of the
    optimizer has under `group` the name that its rate was given for. First stand those with `args.learning_rate`,
    which is what the log calls the learning rate.

    Args:
        optimizer: before its first step.
        model: whose parameters it has.
        args: say the rates and the decays.
        decayed: names of the parameters that weight decay does not spare.
    """
    layers, levels = num_layers(model), levels_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    split: dict[tuple, dict] = {}
    for number, old in enumerate(optimizer.param_groups):
        for parameter in old["params"]:
            name = names[parameter]
            group, rate = _given(args.learning_rates or {}, name, args.learning_rate)
            rate *= args.layer_decay ** max(layers - levels[parameter], 0)
            decay = _given(args.weight_decays or {}, name, args.weight_decay)[1] if name in decayed else 0.0
            new = {**old, "params": [], "lr": rate, "weight_decay": decay, "group": group}
            split.setdefault((number, group, rate, decay), new)["params"].append(parameter)
    optimizer.param_groups[:] = sorted(split.values(), key=lambda new: new["lr"] != args.learning_rate)
    _warn_of_idle(args, {name for parameter, name in names.items() if parameter.requires_grad})


def _given(by_group: Mapping[str, float], name: str, otherwise: float) -> tuple[str, float]:
    """Which group decides on a parameter, `""` where none does, and its number."""
    for group in groups_of(name):
        if group in by_group:
            return group, by_group[group]
    return "", otherwise


def _warn_of_idle(args: BaseArguments, trained: Iterable[str]) -> None:
    trained = [*trained]
    for option in OPTIONS:
        given = getattr(args, option) or {}
        deciding = {_given(given, name, 0.0)[0] for name in trained}
        for group in given.keys() - deciding:
            logger.warning("`%s` of %r has no effect: it decides on nothing that is trained.", option, group)
    if args.layer_decay != 1 and not any(ENCODER in groups_of(name) for name in trained):
        logger.warning("`layer_decay` has no effect: nothing of the encoder is trained.")


def rates_by_group(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The present learning rate of each named group; of a group whose layers differ, that of the top one."""
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        if name := group.get("group"):
            rates[name] = max(rates.get(name, 0.0), float(group["lr"]))
    return rates
