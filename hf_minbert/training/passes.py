"""What a regularizer is, and what it needs to pass one batch through the model several times."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MinBertError
from ..tasks import Task


@dataclass(frozen=True)
class Place:
    """Where in training a batch stands. What is drawn for it depends on this and its task, and on nothing else.

    Args:
        seed: of the run.
        step: optimizer steps before this one.
        first_row: position of the batch's first row among the task's rows of the whole step, over all processes and
            accumulated batches.
    """

    seed: int
    step: int
    first_row: int


class Regularized(NamedTuple):
    """A task's loss with its term.

    `loss`, a scalar with its gradient, is the task's own loss with the weighted term; `outputs` are the model's for
    the batch as it is; `term` is the term before its weight, and `skipped` 1 where it had to be left out, for the log.
    """

    loss: Tensor
    outputs: Mapping[str, Tensor]
    term: Tensor
    skipped: Tensor | None = None


class Regularizer(ABC):
    """Computes a task's loss together with a term that depends on model and batch.

    Options are keyword-only; the constructor raises `MinBertError` on one that is out of range.

    Attributes:
        searches: whether it differentiates by the input while it computes the term.
    """

    searches = False

    def refusal(self, tasks: Iterable[Task]) -> str | None:
        """Why it cannot be computed for these tasks, if so."""
        return None

    def warnings(self, model: nn.Module, task: str, dtype: torch.dtype) -> list[str]:
        """What goes ill with one of the tasks where layers compute in `dtype`."""
        return []

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Mapping[str, Any], place: Place) -> Regularized:
        """The loss with the term.

        Args:
            model: called as `model(**batch)`, with `heads` and `encoder_of(task)`; may be wrapped for mixed precision
                or by PEFT, never in DDP.
            batch: one task's mini-batch, with its name under `task`.
            place: where in training it stands.
        """


# ---- Passes over one batch ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomState:
    """The state that torch's random numbers are in, on the CPU and on one device."""

    device: torch.device
    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what is drawn is what was drawn from this state on; after it, the state is as it was before."""
        found = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            found.restore()


def embedded(model: nn.Module, batch: Mapping[str, Any], delta: Tensor) -> dict[str, Any]:
    """The batch with its word embeddings, moved by `delta`, in the place of its ids.

    Args:
        delta: float32, the ids' shape and the hidden size. The sum is in float32 too, whatever the layers compute in.
    """
    words = model.encoder_of(batch["task"]).get_input_embeddings()(batch["input_ids"])
    moved = (words.float() + delta).to(words.dtype)
    return {"inputs_embeds": moved, **{key: value for key, value in batch.items() if key != "input_ids"}}


def is_token(batch: Mapping[str, Any]) -> Tensor:
    """1 at real tokens and 0 at padding, to multiply a `delta` with."""
    return batch["attention_mask"][..., None].float()


def check_number(name: str, value: object, above: bool = False) -> None:
    """Raises `MinBertError` unless the training argument is a finite number from 0, or above it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value > 0 if above else value >= 0) or value == math.inf:
        raise MinBertError(f"`{name}` must be a number {'above' if above else 'from'} 0. Found {value!r}.")


def check_count(name: str, value: object) -> None:
    """Raises `MinBertError` unless the training argument is a whole number from 1."""
    if type(value) is not int or value < 1:
        raise MinBertError(f"`{name}` must be a whole number from 1. Found {value!r}.")
