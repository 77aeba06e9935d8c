"""All heads: from a task's sentences to its outputs, their loss, and the divergence of two outputs.

A head pools the encoder's token states to one vector per sentence (`pooling.py`). If a pair was encoded separately, it
combines the two vectors. Then it applies its own layers. This file is uploaded to the Hub with a model. It may import
only its neighbours and published libraries. Letters in shapes: B examples, S sentences of an example that were encoded
separately (1 or 2), T tokens, H hidden size, D size of a sentence's vector, C outputs of the task.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .kinds import KINDS
from .losses import AUTO, COUNTED, DIVERGENCES, IGNORED, LOSSES, Outcome, loss_of, options_of
from .pooling import JOINS, POOLINGS, LayerMix, SelfInitialized, check_rate, check_size, cosine, make_activation
from .registry import Registry, unknown_in_words

LAYERS = ("last", "mix")


def num_outputs(task: dict[str, Any]) -> int:
    """Returns C, the number of outputs of a head for each example."""
    return KINDS[task["kind"]].outputs(len(task["labels"]))


class OutputLayer(nn.Linear, SelfInitialized):
    """The last layer of a head.

    A new layer predicts the middle of the range for scores, and equal probabilities for classes. If it started at
    zero, the squared error on scores up to 5 would dominate the other tasks' losses for hundreds of steps.

    Args:
        scale: the head's factor on the output of this layer.
    """

    def __init__(self, in_features: int, task: dict[str, Any], scale: float = 1.0):
        super().__init__(in_features, num_outputs(task))
        self.start = [start / scale for start in _start(task)]

    def init_weights(self) -> None:
        init.copy_(self.bias, torch.tensor(self.start))

    def forward(self, input: Tensor) -> Tensor:
        # Not in half precision, where a score near 2.5 has steps of 0.016, and near outputs would be equal.
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))


def _start(task: dict[str, Any]) -> list[float]:
    """The outputs of a head that knows nothing."""
    outputs = num_outputs(task)
    if KINDS[task["kind"]].is_score:
        return [sum(task["range"]) / 2]
    if task["kind"] == "ordinal":  # of the classes from k on, which are equally likely, all but k are above it
        return [math.log(outputs - k) for k in range(outputs)]
    return [0.0] * outputs


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for a batch of sentences, in the order of the examples.

    Args:
        states: the token states of all layers, or of the last layer only; each [B * S, T, H].
        mask: [B * S, T], true for a token; each row has at least one.
        pooled: [B * S, H], the output of the encoder's own pooler.
    """

    states: tuple[Tensor, ...]
    mask: Tensor
    pooled: Tensor


class Head(nn.Module, ABC):
    """Base class of all heads. A subclass adds layers in `__init__`, with keyword-only options, and defines `forward`.

    Attributes:
        compares: whether the head uses a pair's two vectors separately. Otherwise they are joined to one vector.
        output_range: the lowest and highest output, if there are such bounds.
    """

    compares = False
    output_range: tuple[float, float] | None = None

    def __init__(self, config, task: dict[str, Any]):
        super().__init__()
        self.kind, self.range = task["kind"], task["range"]
        self.sentences = 2 if task["pair_encoding"] == "bi" else 1
        self.tags = KINDS[task["kind"]].is_tags
        self.pooling = None if self.tags else POOLINGS[task["pooling"]](config, **task["pooling_options"])
        self.layer_mix = LayerMix(config.num_hidden_layers) if task["layers"] == "mix" else None
        self.sentence_dropout = nn.Dropout(check_rate("sentence_dropout", task["sentence_dropout"]))
        self.join = task["join"] or "concat"  # by name: the functions are no part of a pickled model
        size = config.hidden_size if self.pooling is None else self.pooling.output_size
        self.input_size = size if self.compares or self.sentences == 1 else JOINS[self.join].size(size)

    @property
    def trains_pooling(self) -> bool:
        """Whether the pooled vector changes while only the head is trained."""
        learned = self.pooling is not None and any(True for _ in self.pooling.parameters())
        return self.layer_mix is not None or learned

    def pooled(self, encoded: Encoded) -> Tensor:
        """Returns the pooled vector of each sentence, [B, S, D]; for tags one of each token, [B, T, H]."""
        states = encoded.states[-1] if self.layer_mix is None else self.layer_mix(encoded.states)
        if self.pooling is None:
            return states
        return self.pooling(states, encoded.mask, encoded.pooled).unflatten(0, (-1, self.sentences))

    def vectors(self, encoded: Encoded) -> Tensor:
        """Returns the input of the head's layers: a vector per sentence, [B, S, D], or for tags per token."""
        return self.sentence_dropout(self.pooled(encoded))

    def joined(self, vectors: Tensor) -> Tensor:
        """Joins an example's sentences to one vector, [B, S, D] -> [B, input_size]. For tags, tokens do not change."""
        if self.tags:
            return vectors
        return vectors[:, 0] if self.sentences == 1 else JOINS[self.join].function(*vectors.unbind(dim=1))

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """[B, S, D] -> logits [B, C]; of tags [B, T, H] -> [B, T, C]"""

    def embed(self, vectors: Tensor) -> Tensor:
        """Returns vectors whose cosine is the similarity of two sentences, [B, S, D] -> [B, S, any size]."""
        return vectors

    def loss(self, vectors: Tensor, logits: Tensor, labels: Tensor, task: Mapping[str, Any]) -> Tensor:
        """Computes the mean loss of a batch, in float32.

        Args:
            vectors: [B, S, D], and logits [B, C], which the head computed from them.
            labels: [B] or [B, 1], class ids or scores; for `kind: labels` [B, C], 0 or 1; for tags [B, T], class ids,
                with `IGNORED` at tokens without a label.
            task: names the loss and its options.

        Raises:
            ValueError: the number of labels differs from the number of examples, an option of the loss is wrong, or,
                on the CPU, a label is not a class id. On a GPU this check would force a wait, and CUDA reports such a
                label itself.
        """
        if self.tags:
            if labels.shape != logits.shape[:-1]:
                shapes = list(logits.shape[:-1]), list(labels.shape)
                raise ValueError(f"Expected a label per token, {shapes[0]}. Found labels of the shape {shapes[1]}.")
            labels, logits = labels.flatten(), logits.flatten(0, 1)
        shape = KINDS[self.kind].shape(logits.shape[1])
        if labels.shape[1:] != shape:
            labels = labels.reshape(-1, *shape)
        if len(labels) != len(logits):
            raise ValueError(f"Expected one label per example. Found {len(labels)} labels for {len(logits)} examples.")
        if labels.device.type == "cpu" and not KINDS[self.kind].is_score and not torch.compiler.is_compiling():
            _check_ids(labels[labels != IGNORED] if self.tags else labels, task)
        outcome = Outcome(self, vectors, logits.float(), labels, self.range)
        return loss_of(task)(outcome, **task["loss_options"])

    def divergence(self, logits: Tensor, other: Tensor, name: str | None = None) -> Tensor:
        """Computes the divergence of two outputs, [B, C] and [B, C] -> [B]; for tags [B, T].

        It is 0 if they are equal.

        Args:
            name: `symmetric_kl`, the KL divergence in both directions, is the default for all kinds but `score`. It is
                computed for the classes, for the Bernoulli distribution of a binary task, or as the mean over the
                Bernoulli distributions of `kind: labels`. `kl` is the divergence from the first output to the second.
                `squared_error` is the default for scores, and only for them. A score has no distribution. For both KL
                divergences, its position in the range is the probability of a Bernoulli distribution, limited to 0.01
                to 0.99. A score outside these limits has no gradient.
        """
        kind = self.kind
        if KINDS[kind].is_score and name in DIVERGENCES["binary"]:
            kind, logits, other = "binary", self._as_coin(logits), self._as_coin(other)
        divergences = DIVERGENCES[kind]
        return divergences[name or next(iter(divergences))](logits, other)

    def _as_coin(self, scores: Tensor) -> Tensor:
        """The logit of a score's share of its range, from 0.01 to 0.99."""
        low, high = self.output_range or self.range
        # A KL's slope by the share grows as the chance of the other side falls: to 1 / eps where the range ends. With
        # 0.01 it stays below 110, on scores from 0 to 5 twice the steepest of the squared error.
        return ((scores.float() - low) / (high - low)).logit(eps=1e-2)


def _check_ids(labels: Tensor, task: Mapping[str, Any]) -> None:
    last, of_each = (1, "numbers") if KINDS[task["kind"]].is_set else (len(task["labels"]) - 1, "ids")
    wrong = labels[(labels < 0) | (labels > last)]
    if len(wrong):
        raise ValueError(
            f"Task {task['name']!r}: labels must be {of_each} from 0 to {last}, of {', '.join(task['labels'])}. Found "
            f"{wrong[0].item():g}."
        )


def default_dropout(config) -> float:
    """Returns the dropout rate of a head that sets none."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


class LinearHead(Head):
    """Dropout and one linear layer, as in the BERT paper (arXiv:1810.04805, section 4.1).

    Args:
        dropout: the dropout rate. The default is the model's `classifier_dropout`, or its hidden dropout.
        scale: a factor on the output (report 004, iteration 1: 5 for scores up to 5).
    """

    def __init__(self, config, task: dict[str, Any], *, dropout: float | None = None, scale: float = 1.0):
        super().__init__(config, task)
        if type(scale) not in (int, float) or not 0 < scale < float("inf"):
            raise ValueError(f"`scale` must be a number above 0. Found {scale!r}.")
        self.scale = scale
        self.dropout = nn.Dropout(default_dropout(config) if dropout is None else check_rate("dropout", dropout))
        self.linear = OutputLayer(self.input_size, task, scale)

    def forward(self, vectors: Tensor) -> Tensor:
        logits = self.linear(self.dropout(self.joined(vectors)))
        return logits if self.scale == 1 else self.scale * logits


class MLPHead(Head):
    """Dropout, linear layer, activation, for each hidden size; then dropout and the last layer (report 003, 4.2).

    Args:
        hidden_sizes: the sizes of the hidden layers; by default one layer of the encoder's size.
        dropouts: the rates, one more than there are hidden sizes; by default as for `linear`.
        activation: the name of an activation of transformers, such as `leaky_relu`, `gelu` or `tanh`.
    """

    def __init__(
        self,
        config,
        task: dict[str, Any],
        *,
        hidden_sizes: Sequence[int] | None = None,
        dropouts: Sequence[float] | None = None,
        activation: str = "leaky_relu",
    ):
        super().__init__(config, task)
        sizes = _sizes([config.hidden_size] if hidden_sizes is None else hidden_sizes)
        if dropouts is None:
            dropouts = [default_dropout(config)] * (len(sizes) + 1)
        if not isinstance(dropouts, list | tuple) or len(dropouts) != len(sizes) + 1:
            raise ValueError(f"`dropouts` must be {len(sizes) + 1} rates, one per linear layer. Found {dropouts!r}.")
        rates = [check_rate("dropouts", rate) for rate in dropouts]
        layers: list[nn.Module] = []
        for rate, (size, hidden) in zip(rates, _steps(self.input_size, sizes), strict=False):
            layers += [nn.Dropout(rate), nn.Linear(size, hidden), make_activation("activation", activation)]
        self.layers = nn.Sequential(*layers, nn.Dropout(rates[-1]), OutputLayer(sizes[-1], task))

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(self.joined(vectors))


class BlocksHead(Head):
    """Blocks of linear layer, LayerNorm, activation and dropout; then the last layer (report 000, 3.5).

    Args:
        hidden_sizes: the size of each block.
        dropout: as for `linear`.
        activation: as for `mlp`.
    """

    def __init__(
        self,
        config,
        task: dict[str, Any],
        *,
        hidden_sizes: Sequence[int] = (512, 64),
        dropout: float | None = None,
        activation: str = "relu",
    ):
        super().__init__(config, task)
        sizes = _sizes(hidden_sizes)
        rate = default_dropout(config) if dropout is None else check_rate("dropout", dropout)
        layers: list[nn.Module] = []
        for size, hidden in _steps(self.input_size, sizes):
            norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
            layers += [nn.Linear(size, hidden), norm, make_activation("activation", activation), nn.Dropout(rate)]
        self.layers = nn.Sequential(*layers, OutputLayer(sizes[-1], task))

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(self.joined(vectors))


class CosineLogit(nn.Module, SelfInitialized):
    """A binary task's logit from a cosine: weight * cosine + bias, both trained. [..., 1] -> [..., 1]"""

    def __init__(self, scale: float, offset: float):
        super().__init__()
        self.start = scale, offset
        self.weight, self.bias = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.init_weights()

    def init_weights(self) -> None:
        for parameter, value in zip((self.weight, self.bias), self.start, strict=True):
            init.constant_(parameter, value)

    def forward(self, cosines: Tensor) -> Tensor:
        return self.weight * cosines + self.bias


class CosineHead(Head):
    """The cosine of the two vectors of a pair, as a score or as a binary logit.

    Args:
        projection_size: the size of one (Siamese) linear layer that both vectors go through first, as in report 001,
            3.3; `null` for no layer.
        mapping: from the cosine to a score: `raw`, the cosine; `shifted` (default), (cosine + 1) / 2 of the range;
            `relu`, relu(cosine) of the range. The loss `cosine_mse` needs `relu`.
        initial_scale: initial value of the learned factor in a binary task's logit, scale * cosine + offset: 20 in a
            recipe, and 5 in a config without it.
        initial_offset: initial value of the learned offset in that logit: -15 in a recipe, and 0 in a config without
            it. For rare positives, add the logarithm of their odds.
    """

    compares = True

    def __init__(
        self,
        config,
        task: dict[str, Any],
        *,
        projection_size: int | None = None,
        mapping: str | None = None,
        initial_scale: float | None = None,
        initial_offset: float | None = None,
    ):
        super().__init__(config, task)
        for name, value, lowest in (
            ("initial_scale", initial_scale, 0.0),
            ("initial_offset", initial_offset, -math.inf),
        ):
            if value is None:
                continue
            if self.kind != "binary" or type(value) not in (int, float) or not lowest < value < math.inf:
                above = " above 0" if lowest == 0 else ""
                raise ValueError(f"`{name}` must be a number{above}, and is for binary tasks. Found {value!r}.")
        if mapping is not None and (not KINDS[self.kind].is_score or mapping not in ("raw", "shifted", "relu")):
            raise ValueError(f"`mapping` must be raw, shifted or relu, and is for scores. Found {mapping!r}.")
        trains_share = task["loss"] == "cosine_mse"
        if trains_share and mapping in ("raw", "shifted"):
            raise ValueError(
                f"`mapping: {mapping}` does not go with `loss: cosine_mse`: the loss trains another scale than "
                f"the mapping predicts. Leave `mapping` out, or use `loss: mse`."
            )
        self.mapping = mapping or ("relu" if trains_share else "shifted")
        self.projection = None
        if projection_size is not None:
            self.projection = nn.Linear(self.input_size, check_size("projection_size", projection_size))
        self.logit = None
        if initial_scale is not None and abs(initial_offset or 0.0) > initial_scale:
            threshold = -(initial_offset or 0.0) / initial_scale
            raise ValueError(
                "`initial_offset` must not be farther from 0 than `initial_scale`, or no cosine reaches the "
                f"threshold of {threshold:g}. Found {initial_offset} and {initial_scale}."
            )
        if self.kind == "binary":
            # Of models made before there was a choice: 5 and 0.
            self.logit = CosineLogit(5.0 if initial_scale is None else initial_scale, initial_offset or 0.0)
        if KINDS[self.kind].is_score:
            self.output_range = (-1.0, 1.0) if self.mapping == "raw" else tuple(self.range)

    def embed(self, vectors: Tensor) -> Tensor:
        return vectors if self.projection is None else self.projection(vectors)

    def forward(self, vectors: Tensor) -> Tensor:
        cosines = cosine(*self.embed(vectors).unbind(dim=1))
        if self.logit is not None:
            return self.logit(cosines)
        if self.mapping == "raw":
            return cosines
        low, high = self.range
        return low + (high - low) * ((cosines + 1) / 2 if self.mapping == "shifted" else cosines.relu())


def _sizes(hidden_sizes: object) -> list[int]:
    if not isinstance(hidden_sizes, list | tuple) or not hidden_sizes:
        raise ValueError(f"`hidden_sizes` must be a list of sizes like [512, 64]. Found {hidden_sizes!r}.")
    return [check_size("hidden_sizes", size) for size in hidden_sizes]


def _steps(size: int, hidden_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the input and output size of each layer."""
    return list(zip([size, *hidden_sizes], hidden_sizes, strict=False))


class PerTask(nn.Module):
    """A submodule for each task, under the task's name.

    This is not an `nn.ModuleDict`, because PEFT refuses one in `modules_to_save`.

    Raises:
        ValueError: a task has the name of an attribute of torch modules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        super().__init__()
        for name, module in modules.items():
            if hasattr(self, name):
                raise ValueError(f"A task cannot be called {name!r}: a torch module uses that name. Choose another.")
            self.add_module(name, module)

    def get(self, task: str | None) -> Any:
        """Returns the task's submodule, or `None` if it has none."""
        return self._modules.get(task)


class TaskHeads(PerTask):
    """The heads of all tasks.

    Raises:
        ValueError: a head cannot be built. The message names task, head and option.
    """

    def __init__(self, config):
        super().__init__({task["name"]: build_head(config, task) for task in config.tasks})


def build_head(config, task: dict[str, Any]) -> Head:
    """Builds the head of a task.

    Raises:
        ValueError: a name is unknown, two choices do not go together, or an option is wrong.
    """
    where = f"Task {task['name']!r}"
    _check_names(where, config, task)
    _check_combination(where, task)
    builders = {"head": HEADS[task["head"]], "loss": loss_of(task)}
    if task["pooling"]:
        builders["pooling"] = POOLINGS[task["pooling"]]
    for key, builder in builders.items():
        known = options_of(builder)
        for option in task[f"{key}_options"]:
            if option not in known:
                has = f"has: {', '.join(known)}" if known else "has no options"
                name = task[key] or "of this kind"
                raise ValueError(f"{where}, `{key}_options`: unknown option {option!r}. The {key} {name} {has}.")
    try:
        return HEADS[task["head"]](config, task, **task["head_options"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_heads(config) -> None:
    """Builds every head of the config's tasks and computes its loss once.

    Errors then come before data and weights are loaded.

    Raises:
        ValueError: as `TaskHeads`, an option of a loss is wrong, or a loss is not a single number.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        heads = TaskHeads(config)
        for task in config.tasks:
            head = heads.get(task["name"])
            size = config.hidden_size if head.pooling is None else head.pooling.output_size
            vectors = torch.zeros(2, head.sentences, size)
            # What is still to be counted counts as not given.
            options = {k: v for k, v in task["loss_options"].items() if k not in COUNTED or v != AUTO}
            try:
                shape = (1,) if head.tags else KINDS[task["kind"]].shape(len(task["labels"]))
                labels = torch.zeros(2, *shape, dtype=torch.long)
                found = head.loss(vectors, head(vectors), labels, {**task, "loss_options": options})
            except ValueError as error:
                raise ValueError(f"Task {task['name']!r}, `loss_options`: {error}") from error
            if found.dim():
                raise ValueError(
                    f"Task {task['name']!r}: the loss {task['loss']!r} must return one number, the mean over the rows "
                    f"of a batch. Found a tensor of the shape {list(found.shape)}."
                )


def registries_of(task: Mapping[str, Any]) -> dict[str, Registry]:
    """Returns the registries of the names in a task's fields, which a model's code must have."""
    return {"head": HEADS, "pooling": POOLINGS, "join": JOINS, "loss": LOSSES[task["kind"]]}


def _check_names(where: str, config, task: dict[str, Any]) -> None:
    if task["layers"] not in LAYERS:
        raise ValueError(f"{where}: {unknown_in_words('layers', task['layers'], LAYERS)}")
    for key, known in registries_of(task).items():
        name = task[key]
        if name and name not in known and not known.finds(name, config.plugins or (), config.name_or_path):
            raise ValueError(f"{where}: {known.unknown(name)}")


def _check_combination(where: str, task: dict[str, Any]) -> None:
    bi, head = task["pair_encoding"] == "bi", HEADS[task["head"]]
    needs_bi = "needs a pair that is encoded apart. Set `pair_encoding: bi`, or choose another"
    pooled = task["pooling"] or task["pooling_options"] or task["pair_encoding"] != "single"
    if KINDS[task["kind"]].is_tags and pooled:
        raise ValueError(f"{where}: kind 'tags' reads the state of each word of one text. Leave the pooling out.")
    if head.compares and (outputs := num_outputs(task)) > 1:
        fitting = ", ".join(name for name, of in HEADS.items() if not of.compares)
        raise ValueError(
            f"{where}: `head: {task['head']}` gives one number, and kind {task['kind']!r} needs {outputs}. Heads for "
            f"it: {fitting}."
        )
    if head.compares and not bi:
        raise ValueError(f"{where}: `head: {task['head']}` {needs_bi} head.")
    if task["join"] and (head.compares or not bi):
        why = f"`head: {task['head']}` compares the two vectors itself" if bi else "there are no two vectors to join"
        raise ValueError(f"{where}: `join: {task['join']}` has no meaning: {why}. Leave it out.")
    if task["layers"] == "mix" and task["pooling"] == "pooler":
        raise ValueError(
            f"{where}: `layers: mix` does not go with `pooling: pooler`, which was trained on the last layer. "
            "Choose cls, mean, max, attention or bigru."
        )
    if task["loss"] == "mnr" and not bi:
        raise ValueError(f"{where}: `loss: mnr` {needs_bi} loss.")
    if task["loss"] == "cosine_mse" and not head.compares:
        raise ValueError(f"{where}: `loss: cosine_mse` trains a cosine. Set `head: cosine`, or `loss: mse`.")


HEADS: Registry[type[Head]] = Registry("head", type[Head], {
    "linear": LinearHead,
    "mlp": MLPHead,
    "blocks": BlocksHead,
    "cosine": CosineHead,
})  # fmt: skip
