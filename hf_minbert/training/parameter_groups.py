"""Learning rates and weight decays for parts of a model, as groups of its optimizer."""

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
    """Returns the groups of a parameter by its name in the model, the narrowest first.

    A head belongs to its task and to `heads`. Private layers and private encoders belong to their task and to
    `encoder`. Everything else belongs to `encoder`.
    """
    path = path_of(name)
    if path[0] == HEADS:
        return path[1], HEADS
    private = re.search(r"(?:^|\.)private\.(\w+)\.", ".".join(path))
    return (private[1], ENCODER) if private else (ENCODER,)


def check_groups(args: BaseArguments, tasks: Iterable[str] | None = None) -> None:
    """Raises `MinBertError` if a rate or a decay is not a number from 0, or its group does not exist in the model.

    Args:
        tasks: the names of the model's tasks, if they are known.
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
    """Whether the arguments treat parts of a model differently, apart from the parameters without weight decay."""
    return bool(args.learning_rates or args.weight_decays) or args.layer_decay != 1


def check_optimizer(optimizer: torch.optim.Optimizer | None, args: BaseArguments, learned: bool) -> None:
    """Raises `MinBertError` if an optimizer was made already although the arguments need groups.

    Args:
        learned: whether the weights of the losses are learned, and need a group of their own.
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

    The top layer has the rate of its group. Rates decrease by `layer_decay` from layer to layer, down to the
    embeddings. `group` in each group of the optimizer is the name that its rate was given for. Groups with
    `args.learning_rate` are first, because the log shows the first rate as the learning rate.

    Args:
        optimizer: an optimizer before its first step.
        model: the model with the optimizer's parameters.
        args: the arguments with the rates and the decays.
        decayed: the names of the parameters with weight decay.
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
    """Returns the group that decides on a parameter, `""` if there is none, and its number."""
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
            logger.warning("`%s` of %r has no effect: it applies to no trained parameter.", option, group)
    if args.layer_decay != 1 and not any(ENCODER in groups_of(name) for name in trained):
        logger.warning("`layer_decay` has no effect: no parameter of the encoder is trained.")


def rates_by_group(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Returns the current learning rate of each named group. If layers differ, it is that of the top layer."""
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        if name := group.get("group"):
            rates[name] = max(rates.get(name, 0.0), float(group["lr"]))
    return rates
