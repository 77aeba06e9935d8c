"""The base of the loss's terms, and what they need to pass one batch through the model several times."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor, nn

from ...errors import MinBertError
from ...model.losses import IGNORED
from ...model.packing import Packing
from ...settings.tasks import Task
from ..protocol import Head, TaskModel, outputs_of, takes, task_encoder


@dataclass(frozen=True)
class NoiseKey:
    """The position of a batch in training. A row's noise depends on it and the task, and on nothing else.

    Args:
        seed: of the run.
        step: optimizer steps before this one.
        first_row: position of the batch's first row among the task's rows of the whole step, over all processes and
            accumulated batches.
    """

    seed: int
    step: int
    first_row: int

    def numbers(self, task: str, device: torch.device | str) -> Tensor:
        """int64 [2]: a hash of seed, step and task, and the first row."""
        text = f"{self.seed} {self.step} {task}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        return torch.tensor([key, self.first_row]).to(device, non_blocking=True)


@dataclass(frozen=True)
class RecordedNoiseKey:
    """The key in a CUDA graph, whose numbers are inputs of the graph."""

    values: Tensor

    def numbers(self, task: str, device: torch.device | str) -> Tensor:
        return self.values


@dataclass(frozen=True)
class TaskLoss:
    """The loss of one task's batch.

    Args:
        loss: a scalar with its gradient: the task's own loss and the weighted terms that were added to it.
        outputs: the model's, for the unchanged batch.
        logged: by name, each term before its weight; and as `<term>_skipped`, 1 where one had to be left out.
    """

    loss: Tensor
    outputs: Mapping[str, Tensor]
    logged: Mapping[str, Tensor] = field(default_factory=dict)


AnyNoiseKey = NoiseKey | RecordedNoiseKey
#: One task's mini-batch, with its name under `task`.
Batch = Mapping[str, Any]
#: Computes the loss of a batch by a model.
LossFunction = Callable[[TaskModel, Batch], TaskLoss]


def own_loss(model: TaskModel, batch: Batch) -> TaskLoss:
    """The task's own loss, without any term: of the rows that have a label."""
    outputs = outputs_of(model, batch) if not unlabelled_in(batch) else _with_unlabelled(model, batch)
    return TaskLoss(outputs["loss"], outputs)


def rows_in(batch: Batch) -> int:
    """How many rows a batch has."""
    return len(next(batch[name] for name in ("pooled", "input_ids", "inputs_embeds") if name in batch))


def unlabelled_in(batch: Batch) -> int:
    """How many rows of a batch have no label. They are its last ones."""
    return rows_in(batch) - len(batch["labels"]) if "labels" in batch else 0


def _with_unlabelled(model: TaskModel, batch: Batch) -> dict[str, Tensor]:
    """What the model says of a batch: of its labelled rows with their loss, of the others without.

    One pass through the encoder, and then the head by itself on either kind, so that no loss, be it one that compares
    rows, sees a row without a label.
    """
    task, labels = batch["task"], batch["labels"]
    pooled = batch.get("pooled")
    if pooled is None:
        pooled = model.pooled_of([task], **_inputs_of(batch))[task]
    known = outputs_of(model, {"task": task, "pooled": pooled[: len(labels)], "labels": labels})
    others = outputs_of(model, {"task": task, "pooled": pooled[len(labels) :]})
    return {"loss": known["loss"], "logits": torch.cat([known["logits"], others["logits"]])}


def _inputs_of(batch: Batch) -> dict[str, Any]:
    """What of a batch goes through the encoder."""
    return {name: value for name, value in batch.items() if name not in ("task", "labels", "teacher")}


class Term(ABC):
    """A term of a task's loss: it computes the loss of a batch together with itself.

    Terms are nested: each calls the `inner` loss, with the same batch or a changed one, and adds itself to the result.
    Options are keyword-only; the constructor raises `MinBertError` on one that is out of range.

    Attributes:
        name: what its value is logged as, before the task's name.
        searches: whether it differentiates by the input while it computes the term.
        repeats: how many of its passes repeat the dropout of an earlier one.
        of_outputs: whether it is computed from the task's own loss and outputs, without a pass of its own.
        recordable: whether a step with it can be recorded as a CUDA graph: the GPU is never asked for a number, and
            the same weights are read each time.
        needs: parameters that the model's `forward` must have.
    """

    name: str
    searches = False
    repeats = 0
    of_outputs = False
    recordable = True
    needs: tuple[str, ...] = ()

    def refusal(self, tasks: Iterable[Task]) -> str | None:
        """Why it cannot be computed for these tasks, if so."""
        return None

    def warnings(self, model: TaskModel, task: str, dtype: torch.dtype) -> list[str]:
        """What goes wrong with one of the tasks where layers compute in `dtype`."""
        return []

    @abstractmethod
    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        """The loss with the term.

        Args:
            model: called as `model(**batch)`; may be wrapped for mixed precision or by PEFT, never in DDP.
            batch: one task's.
            key: of the noise that the term draws.
            inner: the loss to which the term is added.
        """

    def save(self, folder: Path) -> None:  # noqa: B027 - most keep nothing
        """Writes to a checkpoint what a resumed run needs."""

    def load(self, folder: Path) -> None:  # noqa: B027
        """Restores what `save` wrote. Raises `MinBertError` if it is missing, or of another model."""


def nested(terms: Iterable[Term], key: AnyNoiseKey | None) -> LossFunction:
    """The loss with all terms, of which the last one is the outermost. Without terms, `key` may be `None`."""
    loss: LossFunction = own_loss
    for term in terms:
        if key is None:
            raise MinBertError(f"The term {term.name!r} needs the key of its noise. Found none. Give a `NoiseKey`.")
        loss = partial(_with_term, term, key, loss)
    return loss


def _with_term(term: Term, key: AnyNoiseKey, inner: LossFunction, model: TaskModel, batch: Batch) -> TaskLoss:
    return term(model, batch, key, inner)


# ---- Passes over one batch ----------------------------------------------------------------------------------------


def twice(model: TaskModel, batch: Batch) -> tuple[Batch, Batch]:
    """A batch two times, for passes that need not wait for each other and draw a dropout mask each.

    Both go through the encoder as one batch, and have what it pooled of them instead of their inputs: their losses are
    computed apart, so that one which compares rows sees each row once. A model without `pooled`, or one that is
    compiled as a whole, gets the batch itself two times.
    """
    if "pooled" in batch or not takes(model, "pooled") or is_compiled_module(cast(Any, model)):
        return batch, batch
    task, inputs = batch["task"], _inputs_of(batch)
    answers = {name: value for name, value in batch.items() if name not in inputs}
    first, second = model.pooled_of([task], **doubled(inputs))[task].chunk(2)
    return {**answers, "pooled": first}, {**answers, "pooled": second}


def doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a batch of twice the rows: all of them, then all of them again.

    Its shapes depend on those of the inputs alone, and the GPU is asked for no number.
    """
    both: dict[str, Any] = {name: torch.cat([of, of]) for name, of in inputs.items() if name != "packing"}
    if "packing" in inputs:
        tokens, starts = inputs["packing"]["tokens"], inputs["packing"]["starts"]
        places = inputs["attention_mask"].numel()  # of one half; a filler stands behind all places of both
        both["packing"] = {
            "tokens": torch.cat([tokens.masked_fill(tokens == places, 2 * places), tokens + places]),
            "starts": torch.cat([starts, starts[1:] + len(tokens)]),
            "longest": inputs["packing"]["longest"],
        }
    return both


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
    def again(self) -> Generator[None]:
        """Inside, random numbers are those that were drawn from this state on. After it, the present state is back."""
        present = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()


class RecordedRandomState:
    """The random state where the recording of a CUDA graph begins.

    A recording counts what each generator has drawn, and a replay continues from there. A pass that draws again what
    another one drew therefore needs a generator of its own, which each replay sets to where the graph's begins.
    """

    def __init__(self, generators: list[torch.Generator]):
        self.generators = generators

    @contextmanager
    def again(self) -> Generator[None]:
        """As `RandomState.again`, for as many times as there are generators."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        present = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self.generators.pop())
        try:
            yield
        finally:
            generator.graphsafe_set_state(present)


_generators: list[torch.Generator] | None = None


def random_state(device: torch.device) -> RandomState | RecordedRandomState:
    """The present state, for passes that repeat the random numbers drawn from here on."""
    return RandomState.now(device) if _generators is None else RecordedRandomState(_generators)


@contextmanager
def repeats_in_recording(generators: list[torch.Generator]) -> Generator[None]:
    """Inside, a CUDA graph is recorded, with these generators for the passes that repeat the dropout of another."""
    global _generators
    _generators = [*generators]
    try:
        yield
    finally:
        _generators = None


def words_of(model: TaskModel, task: str) -> nn.Embedding:
    """The embeddings of a task's words, of a model that takes `inputs_embeds`."""
    return task_encoder(model, task).get_input_embeddings()


def word_size(model: TaskModel, task: str) -> int:
    """H. An adapter around the embeddings has their weight, and not all that they know of themselves."""
    return words_of(model, task).weight.shape[-1]


def packing_of(batch: Batch) -> Packing | None:
    """Where the tokens of a packed batch stand among its sentences."""
    return Packing.read(batch.get("packing"), batch["attention_mask"].flatten(0, -2))


def embedded(model: TaskModel, batch: Batch, delta: Tensor) -> dict[str, Any]:
    """The batch with its word embeddings, moved by `delta`, instead of its ids.

    Args:
        delta: float32, [B, T, H] or [B, 2, T, H]; of a packed batch [1, S, H], as padding would be most of the work.
            The sum is in float32 too, also where layers compute in half precision.
    """
    task, ids, packing = batch["task"], batch["input_ids"], packing_of(batch)
    words = words_of(model, task)(ids if packing is None else packing.pack(ids.flatten(0, -2)))
    summed = (words.float() + delta).to(words.dtype)
    moved = {"inputs_embeds": summed if packing is None else packing.unpack(summed).view(*ids.shape, -1)}
    if takes(model, "position_ids") and (positions := model.positions_of(task, ids)) is not None:
        moved["position_ids"] = positions
    return {**moved, **{key: value for key, value in batch.items() if key != "input_ids"}}


def of_sentences(reduce: Callable[[Tensor], Tensor], values: Tensor, packing: Packing | None) -> Tensor:
    """What `reduce` makes of the values of each sentence's tokens, in a shape that broadcasts to them.

    Args:
        reduce: [..., T, 1] -> [..., 1, 1], on which zeros at padding have no effect.
        values: [..., T, 1], or [1, S, 1] of a packed batch.
        packing: that of the batch, if it is packed.
    """
    if packing is None:
        return reduce(values)
    padded = packing.unpack(values)
    return packing.pack(reduce(padded).expand_as(padded))


def divergence(head: Head, labels: Tensor, outputs: Tensor, other: Tensor, name: str | None = None) -> Tensor:
    """How far two outputs for a batch are apart, by row, as the head has it; [B], whose mean is the batch's.

    Of tags a row has its share of the mean over the batch's labelled words, as in their loss.

    Args:
        labels: of the batch.
    """
    found = head.divergence(outputs, other, name)
    if found.dim() == 1:
        return found
    labelled = labels != IGNORED
    return torch.where(labelled, found, 0.0).sum(dim=1) * len(found) / labelled.sum().clamp(min=1)


@contextmanager
def parameters_fixed(model: TaskModel) -> Generator[None]:
    """Inside, no gradients of the model's parameters are computed.

    A search by the input needs none, but a compiled layer's backward pass computes the gradients of all its inputs.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def is_token(batch: Batch) -> Tensor:
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
