"""The interface of a model for the trainer. Any model with these members can be trained.

The stock `Trainer` needs a little more: an `nn.Module` whose `config` is a `PreTrainedConfig`. Only a
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
    """The `config` of a model."""

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
    """The layers of one task. They get no gradient from another task's loss."""

    #: A name of `model.kinds.KINDS`, as its task says.
    kind: str
    #: For a model with `pooled_of` alone: whether what the head pools changes while the head alone is trained.
    trains_pooling: bool

    def divergence(self, logits: Tensor, other: Tensor, name: str | None = None) -> Tensor:
        """Returns the divergence of two outputs, [B, C] and [B, C] -> [B], with a gradient. It is 0 if they are equal.

        For tags the outputs are [B, T, C] and their divergences [B, T].

        Regularizers, `proximal` and distillation need it. `name` is `symmetric_kl`, `kl` (from the first to the
        second) or `squared_error`. The default is `squared_error` for scores and `symmetric_kl` otherwise.
        """


class Heads(Protocol):
    """All heads, an `nn.Module` such as `model.heads.PerTask`. The parameters of a head are called `<task>....`."""

    def get(self, task: str) -> Head:
        """Returns the task's head."""


class Encoder(Protocol):
    """The part of the model below a task's head."""

    #: The layers from token ids to what goes into the first layer, [N, T, H].
    embeddings: nn.Module

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the word embeddings. Needed if `forward` has `inputs_embeds`, and for NEFTune."""


class TaskModel(Protocol):
    """A model with several tasks.

    Parameters whose names begin with `heads.` belong to the heads. Those below `private.<task>.` belong to the task's
    own encoder or layers, for rates by group. All others belong to the shared encoder. The last members are those of
    `nn.Module`.
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
        """Returns the outputs of a task's head for a batch.

        The last four arguments are optional capabilities of a model.

        Args:
            task: the name of the task.
            input_ids: int64 [B, T], or [B, 2, T] for a task whose pairs are encoded separately. The next two have the
                same shape.
            attention_mask: 1 for a token and 0 for padding.
            token_type_ids: the sentence of each token, 0 or 1.
            labels: [B], class ids in int64 or scores in float32; for `kind: labels` [B, C], 0 or 1 in float32; for
                tags [B, T], with -100 at tokens without a label.
            inputs_embeds: instead of `input_ids`, with one more dimension: the perturbed output of the encoder's
                `get_input_embeddings()`. SMART and FGM need it.
            position_ids: with `inputs_embeds`, the result of `positions_of` for the ids, unless it is `None`.
            packing: the positions of the real tokens from `Packing.describe`, for a model that computes on them only.
                `packing: true` needs it. Evaluation uses it if the model has it.
            pooled: the result of `pooled_of` for the batch, instead of all inputs. With it, outputs of a frozen
                encoder without dropout can be cached, and tasks that share rows share a pass.

        Returns:
            a `dict`, such as a `ModelOutput`: `logits` [B, C], of tags [B, T, C], and, with labels, `loss`, the mean
            over the batch.
        """

    def encoder_path(self, task: str) -> Sequence[nn.Module]:
        """Returns the task's encoder, an `Encoder`, and then its layers from the first to the last, if it has layers.

        `freeze`, `unfreeze` and `layer_decay` count the layers. Parts of the encoder outside all layers, such as a
        pooler, count as above all layers.
        """

    def positions_of(self, task: str, input_ids: Tensor) -> Tensor | None:
        """Returns the `position_ids` of these words, if positions depend on them. Needed only with `position_ids`."""

    def lacks(self, capability: str) -> bool:
        """Whether this model lacks a capability that its class's `forward` has. The method is optional."""

    def pooled_of(self, tasks: Sequence[str], **inputs: Any) -> dict[str, Tensor]:
        """Returns the pooled states of one batch for the heads of tasks, from one pass. Needed only with `pooled`.

        The inputs are those of `forward`. Tasks in one call have the same `encoder_path`.
        """

    training: bool

    def __call__(self, **inputs: Any) -> Mapping[str, Tensor]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> object: ...


_REMEDY = "Give it the members of a `TaskModel`, see `hf_minbert.training.protocol`."


def check_model(model: nn.Module) -> TaskModel:
    """Returns the model with its type. Raises `MinBertError` if it has no tasks, or lacks a required member."""
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
    """Raises `MinBertError` if a setting of the stock trainer needs a member that the model does not have."""
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
    """Returns the task's encoder."""
    return cast(Encoder, model.encoder_path(task)[0])  # as in `check_model`


def layers_of(model: TaskModel, task: str) -> list[nn.Module]:
    """Returns the embeddings of a task, then its layers."""
    return [task_encoder(model, task).embeddings, *model.encoder_path(task)[1:]]


def takes(model: TaskModel, capability: str) -> bool:
    """Whether the model's `forward` has a parameter with this name and supports it.

    The inner model is checked, because wrappers (PEFT's, a compiled model) accept any argument.
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
    """Returns the model's outputs for a batch. Raises `MinBertError` if they have no names."""
    outputs = model(**batch)
    if not isinstance(outputs, Mapping):
        raise MinBertError(
            f"`forward` must return a dict: `logits` and, with labels, `loss`. Found a {type(outputs).__name__} of "
            f"a {type(model).__name__}. {_REMEDY}"
        )
    return outputs


def shortest_batch(model: TaskModel, name: str) -> dict[str, Any]:
    """Returns two rows of one token for a task, on the model's device, to find the parameters that its loss uses."""
    task = next(task for task in model.config.tasks if task["name"] == name)
    device = next(model.parameters()).device
    ids = torch.zeros((2, 2, 1) if task["pair_encoding"] == "bi" else (2, 1), dtype=torch.long, device=device)
    kind = KINDS[task["kind"]]
    shape = (1,) if kind.is_tags else kind.shape(len(task["labels"]))
    labels = torch.ones(2, *shape, dtype=getattr(torch, kind.dtype), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {"task": name, **inputs, "labels": labels}


def uncompiled() -> AbstractContextManager[None]:
    """Turns compilation off within this context, for one pass with a shape that no step has."""
    return torch.compiler.set_stance("force_eager")


def draws(model: TaskModel, forward: Callable[[], Any]) -> bool:
    """Whether a pass in training mode draws random numbers. The random state is restored."""
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
    """Sets all modules to one mode within this context. Afterwards each has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
