"""What is not trained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import MinBertError
from ..heads import Encoded, Head

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
    """Raises `MinBertError` if nothing is trained for one of the tasks. Torch would fail at the first step.

    Args:
        model: with `heads` and `config.tasks`, such as `MinBertForMultiTask`, plain or wrapped.
    """
    if encoder_parameters(model):
        return
    for task in tasks:
        if not _trains(model.heads.get(task), model.config, task):
            raise MinBertError(
                f"There is nothing to train for task {task!r}: the encoder is frozen, and its head has no parameters "
                f"that are not and that its loss depends on. Leave `freeze` out, take a head with layers that the "
                f"loss goes through, or leave the task out of `train_tasks`."
            )


def _trains(head: Head, config: Any, task: str) -> bool:
    """Whether the task's loss depends on a trainable parameter of its head: a ranking of cosines passes by most."""
    like = next(head.parameters(), torch.empty(0))
    states = like.new_zeros(2 * head.sentences, 1, config.hidden_size)  # two examples, of one token a sentence
    mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    labels = torch.ones(2, dtype=torch.long, device=states.device)
    mode = head.training
    head.eval()  # dropout would draw from the generator that the training is to begin with
    vectors = head.vectors(Encoded((states,) * (config.num_hidden_layers + 1), mask, states[:, 0]))
    loss = head.loss(vectors, head(vectors), labels, config.get_task(task))
    head.train(mode)
    return loss.requires_grad


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers are trainable, and how many there are."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def _path(name: str) -> list[str]:
    # without what `peft` puts in front, and where it keeps modules that are trained beside the adapters
    return re.sub(r"^base_model\.model\.|\bmodules_to_save\.[^.]+\.", "", name).split(".")
