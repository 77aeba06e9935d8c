"""Freezing: which parameters are not trained, and until when."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, get_args

from torch import nn
from transformers import TrainerCallback

from ..errors import MinBertError, unknown_name
from ..settings.training import Freeze, Unfreeze
from .protocol import TaskModel, in_mode, layers_of, outputs_of, shortest_batch, uncompiled

logger = logging.getLogger(__name__)

HEADS = "heads"
_ABOVE_LAYERS = sys.maxsize


def levels_of(model: TaskModel) -> dict[nn.Parameter, float]:
    """Returns the level of each parameter. Everything below some level is frozen.

    The embeddings have level 0, and layer n, counted from 1, has level n. The same holds for private layers and
    encoders. The rest of the encoder, such as the pooler, is above all layers. Heads, including their pooling, have
    level infinity.
    """
    levels = {p: math.inf if path_of(name)[0] == HEADS else _ABOVE_LAYERS for name, p in model.named_parameters()}
    for task in model.config.tasks:
        for level, module in enumerate(layers_of(model, task["name"])):
            levels |= dict.fromkeys(module.parameters(), level)
    return levels


def layer_names(model: TaskModel) -> dict[nn.Parameter, str]:
    """Returns the name of each parameter's layer in a log: `embeddings`, `layer.0` and so on, `pooler`, or `rest`."""
    above = {p: "pooler" if "pooler" in path_of(name) else "rest" for name, p in model.named_parameters()}
    levels = levels_of(model)
    layers = {p: f"layer.{level - 1}" for p, level in levels.items() if 0 < level < _ABOVE_LAYERS}
    return above | layers | {p: "embeddings" for p, level in levels.items() if level == 0}


def num_layers(model: TaskModel) -> int:
    """Returns the number of layers of the model's deepest path."""
    return max(len(model.encoder_path(task["name"])) for task in model.config.tasks) - 1


def _first_trained(frozen: Freeze | int) -> float:
    """The lowest level that is trained."""
    return {"none": 0, "embeddings": 1, "encoder": math.inf}[frozen] if isinstance(frozen, str) else frozen + 1


def schedule_of(freeze: Freeze | int, unfreeze: Mapping[Any, Freeze | int] | Unfreeze | None) -> dict[int, Any]:
    """Returns what is frozen from each number of optimizer steps on, from the arguments `freeze` and `unfreeze`.

    For `gradual` it has only the start, because later steps depend on the length of an epoch.

    Raises:
        MinBertError: one of them is wrong, or something would be frozen after it was trained.
    """
    _check_freeze("freeze", freeze)
    schedule = {0: freeze}
    if isinstance(unfreeze, str) and unfreeze not in get_args(Unfreeze):
        raise unknown_name("unfreeze", unfreeze, get_args(Unfreeze))
    if unfreeze and freeze == "none":
        raise MinBertError("`unfreeze` needs something that is frozen. Set `freeze`, or leave it out.")
    for step, frozen in unfreeze.items() if isinstance(unfreeze, Mapping) else ():
        if not re.fullmatch(r"[1-9]\d*", str(step)):
            raise MinBertError(
                f"`unfreeze` must map a number of optimizer steps from 1 to what is still frozen after them, like "
                f"{{100: 4, 200: none}}. Found {step!r}."
            )
        _check_freeze(f"unfreeze.{step}", frozen)
        schedule[int(step)] = frozen
    schedule = dict(sorted(schedule.items()))
    for (_, before), (step, after) in pairwise(schedule.items()):
        if _first_trained(after) >= _first_trained(before):
            raise MinBertError(
                f"`unfreeze` must leave less frozen each time. Found {after!r} after {step} steps, where it was "
                f"{before!r}."
            )
    return schedule


def _check_freeze(name: str, frozen: object) -> None:
    if type(frozen) is int:
        if frozen < 1:
            raise MinBertError(
                f"`{name}` must be a number of layers from 1. Found {frozen}. For the embeddings alone: embeddings."
            )
    elif frozen not in get_args(Freeze):
        raise unknown_name(name, frozen, [*get_args(Freeze), "a number of layers"])


def check_layers(freeze: Freeze | int, unfreeze: Mapping[Any, Freeze | int] | Unfreeze | None, layers: int) -> None:
    """Raises `MinBertError` if more layers are to be frozen than the model has."""
    for step, frozen in schedule_of(freeze, unfreeze).items():
        if isinstance(frozen, int) and frozen > layers:
            name = f"unfreeze.{step}" if step else "freeze"
            remedy = f"Give at most {layers}" if layers else "Give embeddings or encoder"
            raise MinBertError(f"`{name}` is {frozen} layers, and the model has {layers}. {remedy}.")


def _gradually(freeze: Freeze | int, layers: int) -> list[Freeze | int]:
    """Returns what is frozen in each epoch if each epoch frees one more layer, the top layer first (ULMFiT)."""
    first = {"encoder": layers, "embeddings": 0}[freeze] if isinstance(freeze, str) else freeze
    last: list[Freeze | int] = ["embeddings", "none"] if first else ["none"]
    return [freeze, *range(first - 1, 0, -1), *last]


class Freezing(TrainerCallback):
    """Excludes parameters from training, some of them until a later step.

    A frozen parameter has no gradient, so neither the optimizer nor weight decay changes it. `requires_grad` of a
    permanently frozen parameter is turned off at once. For a parameter that is freed later, it is off from the first
    step until then. The optimizer, which is made before, therefore includes this parameter.

    Args:
        model: parameters that are not trained now are not trained later either.
        freeze: `none`; `embeddings`; n, for the embeddings and the first n layers; or `encoder`, all but the heads.
        unfreeze: a mapping from a number of optimizer steps to what is still frozen after them; or `gradual`: from the
            second epoch on, each epoch frees one more layer, the top layer first (with the pooler) and the embeddings
            last (Howard and Ruder 2018, arXiv:1801.06146, section 3.3).
        freed: called between two steps when something was freed.

    Raises:
        MinBertError: as `schedule_of` and `check_layers`.
    """

    def __init__(
        self,
        model: TaskModel,
        freeze: Freeze | int = "none",
        unfreeze: Mapping[Any, Freeze | int] | Unfreeze | None = None,
        freed: Callable[[], None] = lambda: None,
    ):
        layers = num_layers(model)
        check_layers(freeze, unfreeze, layers)
        self.schedule = schedule_of(freeze, unfreeze)
        self.epochs = _gradually(freeze, layers) if unfreeze == "gradual" else []
        self.model, self.freed = model, freed
        self.levels = {p: level for p, level in levels_of(model).items() if p.requires_grad}
        self.changes = bool(unfreeze)
        self._frozen: Freeze | int | None = None
        self.release()

    def release(self) -> None:
        """Makes all parameters trainable that are ever trained."""
        self._frozen = None
        self._set([*self.schedule.values(), *self.epochs][-1])

    def freeze(self, step: int) -> bool:
        """Freezes what is frozen after this number of optimizer steps. Returns whether anything changed."""
        frozen = self.schedule[max(start for start in self.schedule if start <= step)]
        if frozen == self._frozen:
            return False
        self._frozen = frozen
        self._set(frozen)
        return True

    def _set(self, frozen: Freeze | int) -> None:
        for parameter, level in self.levels.items():
            parameter.requires_grad_(level >= _first_trained(frozen))

    # ---- As a callback -----------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        if self.epochs:
            steps = math.ceil(len(kwargs["train_dataloader"]) / args.gradient_accumulation_steps)
            self.schedule = {epoch * steps: frozen for epoch, frozen in enumerate(self.epochs)}
        self.freeze(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.freeze(state.global_step):
            self.freed()
            trained, total = count_parameters(self.model)
            logger.info(
                "From step %d on, `freeze` is %s: %s of %s parameters are trainable.",
                state.global_step + 1, self._frozen, f"{trained:,}", f"{total:,}",
            )  # fmt: skip


def encoder_parameters(model: TaskModel) -> list[nn.Parameter]:
    """Returns the trained parameters outside the heads."""
    levels = levels_of(model)
    return [p for p in model.parameters() if p.requires_grad and levels[p] < math.inf]


def check_trainable(model: TaskModel, tasks: Iterable[str]) -> None:
    """Raises `MinBertError` if nothing is trained for one of the tasks. torch would fail at the first step.

    Parameters of a head that its loss does not depend on do not count. A ranking of cosines, for example, skips most
    layers of a head.
    """
    for task in tasks:
        if any(p.requires_grad for module in layers_of(model, task) for p in module.parameters()):
            continue
        with in_mode(model, training=False), uncompiled():
            trains = outputs_of(model, shortest_batch(model, task))["loss"].requires_grad
        if not trains:
            raise MinBertError(
                f"Task {task!r} has nothing to train: the encoder is frozen, and the loss depends on no "
                f"trainable parameter of its head. Leave `freeze` out, choose a head whose layers the loss "
                f"trains, or leave the task out of `train_tasks`."
            )


def count_parameters(model: TaskModel) -> tuple[int, int]:
    """Returns the numbers of trainable and of all parameters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def path_of(name: str) -> list[str]:
    """Returns the path of a parameter in the model, without the parts that `peft` adds."""
    return re.sub(r"^base_model\.model\.|\bmodules_to_save\.[^.]+\.", "", name).split(".")
