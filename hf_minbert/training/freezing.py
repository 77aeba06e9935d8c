"""What is not trained."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from ..errors import MinBertError

HEADS = "heads"


def freeze_encoder(model: nn.Module) -> None:
    """Leaves only the heads trainable, with the poolings in them.

    The rest is the encoder, with its pooler, the private layers and the private encoders. It keeps its values whatever
    the weight decay: a parameter that is not trainable never reaches the optimizer.
    """
    for name, parameter in model.named_parameters():
        if _path(name)[0] != HEADS:
            parameter.requires_grad_(False)


def encoder_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters outside the heads."""
    return [p for name, p in model.named_parameters() if p.requires_grad and _path(name)[0] != HEADS]


def check_trainable(model: nn.Module, tasks: Iterable[str]) -> None:
    """Raises `MinBertError` if nothing is trained for one of the tasks. Torch would fail at the first step."""
    paths = [_path(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if any(path[0] != HEADS for path in paths):
        return
    for task in tasks:
        if [HEADS, task] not in [path[:2] for path in paths]:
            raise MinBertError(
                f"There is nothing to train for task {task!r}: the encoder is frozen, and its head has no parameters "
                f"that are not. Leave `freeze` out, take a head with layers, or leave the task out of `train_tasks`."
            )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers are trainable, and how many there are."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def _path(name: str) -> list[str]:
    # without what `peft` puts in front, and where it keeps modules that are trained beside the adapters
    return re.sub(r"^base_model\.model\.|\bmodules_to_save\.[^.]+\.", "", name).split(".")
