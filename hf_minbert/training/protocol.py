"""All that the trainer asks of a model: whatever has these members can be trained.

The stock `Trainer` asks for a little more: an `nn.Module` whose `config` is a `PreTrainedConfig`. Only a
`PreTrainedModel` is saved with its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from ..errors import MinBertError
from ..model.kinds import KINDS


class Config(Protocol):
    """A model's `config`."""

    #: One dict per task, as `Task.to_config` gives it. Numbers that are counted for a loss are written to it.
    tasks: list[dict[str, Any]]
    #: The task that is meant where none is named, if there is such a one.
    active_task: str | None
    #: The longest input, in tokens.
    max_position_embeddings: int
    #: What fills up a batch where the trainer is given no tokenizer; 0 where that is `None`.
    pad_token_id: int | None
    #: The length that inputs are cut to. The trainer writes it, so it need not be there before.
    max_input_length: int | dict[str, int] | None = None
    #: The tokenizer's separator, where the trainer is given a tokenizer. It writes this too.
    sep_token_id: int | None = None


class Head(Protocol):
    """The layers of one task, which get no gradient from another task's loss."""

    #: A name of `model.kinds.KINDS`, as its task says.
    kind: str
    #: For a model with `pool` alone: whether what the head pools changes while the head alone is trained.
    trains_pooling: bool

    def divergence(self, logits: Tensor, other: Tensor, name: str | None = None) -> Tensor:
        """How far two outputs are apart, [B, C] and [B, C] -> [B], with a gradient, and 0 where they are equal.

        Of tags the outputs are [B, T, C] and their divergences [B, T].

        Asked for by regularizers, `proximal` and distillation. `name` is `symmetric_kl`, `kl` (from the first to the
        second) or `squared_error`; of a score `squared_error` unless it says otherwise, else `symmetric_kl`.
        """


class Heads(Protocol):
    """All heads, an `nn.Module` such as `model.heads.PerTask`: a head's parameters are called `<task>....`."""

    def get(self, task: str) -> Head:
        """The task's head."""


class Encoder(Protocol):
    """What a task's sentences go through below its head."""

    #: The layers from token ids to what goes into the first layer, [N, T, H].
    embeddings: nn.Module

    def get_input_embeddings(self) -> nn.Embedding:
        """The words' embeddings. Asked for where `forward` takes `inputs_embeds`, and by NEFTune."""


class TaskModel(Protocol):
    """A model with several tasks.

    Parameters whose names begin with `heads.` are the heads'. Those below `private.<task>.` are of that task's own
    encoder or layers, for rates by group. All others are the shared encoder's. The last members are `nn.Module`'s.
    """

    config: Config
    heads: Heads

    def forward(
        self,
        *,
        task: str,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Mapping[str, Any] | None = None,
        pooled: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """The outputs of a task's head for a batch. The last four are capabilities, which a model need not have.

        Args:
            task: its name.
            input_ids: int64 [B, T]; [B, 2, T] of a task whose pairs are encoded apart; and so the next two.
            attention_mask: 1 for a token and 0 for padding.
            token_type_ids: the sentence that a token is of, 0 or 1.
            labels: [B], class ids in int64, or scores in float32; of kind `labels` [B, C], 0 or 1 in float32; of tags
                [B, T], -100 at tokens that have none.
            inputs_embeds: instead of `input_ids`, with one dimension more: what the encoder's
                `get_input_embeddings()` gives, moved. SMART and FGM need it.
            position_ids: beside `inputs_embeds`, what `positions_of` gave for the ids, unless that is `None`.
            packing: where the real tokens stand, as `Packing.describe` says it, for a model that computes on them
                alone. `packing: true` needs it; an evaluation takes it where it is there.
            pooled: what `pool` returned for the batch, instead of all inputs. With it a frozen encoder without
                dropout reads each row once.

        Returns:
            a `dict`, such as a `ModelOutput`: `logits` [B, C], of tags [B, T, C], and, with labels, `loss`, the mean
            over the batch.
        """

    def encoder_path(self, task: str) -> Sequence[nn.Module]:
        """The task's encoder, as `Encoder` has it, then its layers from the first to the last, if it has layers.

        `freeze`, `unfreeze` and `layer_decay` count them. What is in the encoder and in none of them, such as a
        pooler, counts as above all layers.
        """

    def positions_of(self, task: str, input_ids: Tensor) -> Tensor | None:
        """The `position_ids` of these words, where they depend on them. Asked for beside `position_ids` alone."""

    def lacks(self, capability: str) -> bool:
        """Whether this model lacks a capability that its class's `forward` has. It need not be there."""

    def pool(self, task: str, **inputs: Any) -> Tensor:
        """What the task's head pools of a batch, with the inputs of `forward`. Asked for beside `pooled` alone."""

    training: bool

    def __call__(self, **inputs: Any) -> Mapping[str, Tensor]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> object: ...


_REMEDY = "Give it the members of a `TaskModel`, see `hf_minbert.training.protocol`."


def check_model(model: nn.Module) -> TaskModel:
    """The model as what it is. Raises `MinBertError` if it has no tasks, or lacks what no training does without."""
    found = f"Found a {type(model).__name__}"
    if not hasattr(model, "config") or not hasattr(model.config, "tasks") or not model.config.tasks:
        raise MinBertError(
            f"The model has no tasks to train. {found}. Load it as "
            "`MinBertForMultiTask.from_pretrained(..., tasks=get_tasks([...]))`."
        )
    required = [name for name in Config.__annotations__ if not hasattr(Config, name)]
    missing = [f"config.{name}" for name in required if not hasattr(model.config, name)]
    missing += ["heads"] if not hasattr(model, "heads") or model.heads is None else []
    missing += ["encoder_path"] if not hasattr(model, "encoder_path") or not callable(model.encoder_path) else []
    if missing:
        raise MinBertError(f"The model lacks {' and '.join(f'`{name}`' for name in missing)}. {found}. {_REMEDY}")
    checked = cast(TaskModel, model)  # torch's stubs take every attribute of a module for a tensor or a module
    for task in checked.config.tasks:
        path = checked.encoder_path(task["name"])
        if not isinstance(path, Sequence) or not path or not hasattr(path[0], "embeddings"):
            raise MinBertError(
                f"`encoder_path({task['name']!r})` must give the encoder, which has `embeddings`, then its layers. "
                f"Found {path!r:.100} of a {type(model).__name__}. {_REMEDY}"
            )
    return checked


def check_stock(model: nn.Module, args: TrainingArguments) -> None:
    """Raises `MinBertError` if a setting of the stock trainer needs what the model does not have."""
    found = f"Found a {type(model).__name__}"
    if args.gradient_checkpointing and not (
        hasattr(model, "supports_gradient_checkpointing") and model.supports_gradient_checkpointing
    ):
        raise MinBertError(
            "`gradient_checkpointing: true` needs a `PreTrainedModel` with `supports_gradient_checkpointing`. "
            f"{found}. Leave it out."
        )
    if args.neftune_noise_alpha is not None:
        checked = cast(TaskModel, model)  # as in `check_model`
        if not all(hasattr(task_encoder(checked, t["name"]), "get_input_embeddings") for t in checked.config.tasks):
            raise MinBertError(
                f"`neftune_noise_alpha` needs encoders with `get_input_embeddings`. {found}. Leave it out."
            )


def task_encoder(model: TaskModel, task: str) -> Encoder:
    """The task's encoder."""
    return cast(Encoder, model.encoder_path(task)[0])  # as in `check_model`


def layers_of(model: TaskModel, task: str) -> list[nn.Module]:
    """The embeddings that a task's sentences go through, then the layers."""
    return [task_encoder(model, task).embeddings, *model.encoder_path(task)[1:]]


def takes(model: TaskModel, capability: str) -> bool:
    """Whether the model's `forward` has a parameter of this name, and can do with it.

    The model inside is asked: wrappers (PEFT's, a compiled model) take anything.
    """
    return capability in _parameters(model) and not _lacks(model, capability)


def _unwrapped(model: TaskModel) -> Any:
    return model.encoder_path.__self__ if inspect.ismethod(model.encoder_path) else model


def _parameters(model: TaskModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(_unwrapped(model)).forward).parameters


def _lacks(model: TaskModel, capability: str) -> bool:
    inside = _unwrapped(model)
    return hasattr(inside, "lacks") and inside.lacks(capability)


def require(model: TaskModel, capability: str, setting: str) -> None:
    """Raises `MinBertError` unless the model may have a capability that a setting needs: by name or through `**`."""
    through = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(model).values())
    if _lacks(model, capability) or (not through and not takes(model, capability)):
        raise MinBertError(
            f"`{setting}` needs a model whose `forward` takes `{capability}`, as `hf_minbert.training.protocol` says. "
            f"Found a {type(model).__name__}. Leave `{setting.partition(':')[0]}` out."
        )


# ---- Trial passes -------------------------------------------------------------------------------------------------


def outputs_of(model: TaskModel, batch: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """What the model says of a batch. Raises `MinBertError` if that has no names."""
    outputs = model(**batch)
    if not isinstance(outputs, Mapping):
        raise MinBertError(
            f"`forward` must return a dict: `logits` and, with labels, `loss`. Found a {type(outputs).__name__} of "
            f"a {type(model).__name__}. {_REMEDY}"
        )
    return outputs


def shortest_batch(model: TaskModel, name: str) -> dict[str, Any]:
    """Two rows of one token for a task, on the model's device, for a pass that shows what its loss depends on."""
    task = next(task for task in model.config.tasks if task["name"] == name)
    device = next(model.parameters()).device
    ids = torch.zeros((2, 2, 1) if task["pair_encoding"] == "bi" else (2, 1), dtype=torch.long, device=device)
    kind = KINDS[task["kind"]]
    shape = (1,) if kind.is_tags else kind.shape(len(task["labels"]))
    labels = torch.ones(2, *shape, dtype=getattr(torch, kind.dtype), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {"task": name, **inputs, "labels": labels}


def uncompiled() -> AbstractContextManager[None]:
    """Inside, nothing is compiled: for one pass of a shape that no step has."""
    return torch.compiler.set_stance("force_eager")


def draws(model: TaskModel, forward: Callable[[], Any]) -> bool:
    """Whether a pass in training mode draws random numbers. The random state stays as it was."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), in_mode(model, training=True), torch.no_grad(), uncompiled():
        before = _random_states(device)
        forward()
        return not all(map(torch.equal, before, _random_states(device)))


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def in_mode(model: TaskModel, training: bool) -> Generator[None]:
    """Inside, all modules are in one mode; after it, each is back in its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
