"""Encoders that the transformers library computes. `AutoModel` makes them, and a trial pass finds their parts.

This file names no family. Word embeddings, layers and the number of positions are found from the config, the modules
and a pass of a few tokens. So is whether the model is an encoder of one text at all. This file is uploaded to the Hub
with a model. It may import only its neighbours and published libraries. Letters in shapes: B examples, T tokens, H
hidden size.
"""

from __future__ import annotations

import inspect
import json
import logging
import operator
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers  # and its classes by this: a package may register its config as soon as those are imported
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .inputs import counted_positions, tokens_of

logger = logging.getLogger(__name__)

#: What the library's configs call a setting of ours, where that is not its name in ours. Of several all count.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_dropout_prob": ("hidden_dropout_prob", "hidden_dropout", "dropout", "embedding_dropout", "mlp_dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
    "hidden_act": ("hidden_act", "hidden_activation"),
    "initializer_range": ("initializer_range", "init_std"),
    "layer_norm_eps": ("layer_norm_eps", "norm_eps", "rms_norm_eps"),
}
#: What an encoder has none of where its config does not say it.
ABSENT = {"type_vocab_size": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
#: Of a config, what changes neither the model's modules nor what its weights mean.
_INCIDENTAL = {
    *NAMES["hidden_dropout_prob"], *NAMES["attention_probs_dropout_prob"], "classifier_dropout", "_name_or_path",
    "dtype", "transformers_version", "id2label", "label2id",
}  # fmt: skip


def settings_in(encoder: PreTrainedConfig, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of our config with an encoder's values.

    Args:
        ours: values for settings that the encoder's config lacks.

    Raises:
        ValueError: as `parts_of`.
    """
    parts, found = parts_of(encoder), {}
    for key, default in {**ours, **ABSENT, "intermediate_size": 4 * parts.hidden_size}.items():
        values = [getattr(encoder, name) for name in _names_in(encoder, key)]
        found[key] = (max(values) if len(values) > 1 else values[0]) if values else default
    found |= {"hidden_size": parts.hidden_size, "num_hidden_layers": parts.states - 1}
    limit = _positions_of(encoder)
    found["max_position_embeddings"] = ours["max_position_embeddings"] if limit is None else limit - parts.offset
    return found


def change(encoder: PreTrainedConfig, key: str, value: Any) -> None:
    """Sets one of our settings in an encoder's config, if the config has it.

    Raises:
        ValueError: the config has no such dropout, or the setting is a size of the encoder's parts.
    """
    names = _names_in(encoder, key)
    endless = key == "max_position_embeddings" and _positions_of(encoder) is None
    if endless or (not names and key not in ABSENT):
        return  # ours alone
    if not names or key in ("hidden_size", "num_hidden_layers", "max_position_embeddings"):
        why = "is its own" if names else "has none"
        raise ValueError(f"`{key}` cannot be {value!r}: a {encoder.model_type!r} {why}. Leave it out.")
    for name in names:
        setattr(encoder, name, value)


def _names_in(encoder: PreTrainedConfig, key: str) -> list[str]:
    return [name for name in NAMES.get(key, (key,)) if hasattr(encoder, name)]


def _positions_of(encoder: PreTrainedConfig) -> int | None:
    """Returns the number of positions, including unused ones; `None` if there is no limit, as for relative ones."""
    found = encoder.max_position_embeddings if hasattr(encoder, "max_position_embeddings") else None
    return None if found is None or found < 1 else found


def encoder_config(published: Mapping[str, Any]) -> PreTrainedConfig:
    """Converts a published config.json to a config of the library.

    Raises:
        ValueError: this version of the library does not know its `model_type`, or rejects its settings.
    """
    name = published.get("model_type")
    if name is None or name not in transformers.CONFIG_MAPPING:
        raise ValueError("which this version of transformers does not know")
    # Its own code, where it has some, is for other versions of the library.
    given = {key: value for key, value in published.items() if key != "auto_map"}
    kind = transformers.CONFIG_MAPPING[name]
    try:
        return kind.from_dict(given)
    except Exception as error:  # each class checks its settings in its own way
        last = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"which a {kind.__name__} cannot be made of: {last}") from error


def library_key_mapping(encoder: PreTrainedConfig | Mapping[str, Any]) -> dict[str, str]:
    """Returns the `key_mapping` from the names in a published file to those in a model with tasks.

    The library's own renames within its model are applied after it.
    """
    if not isinstance(encoder, PreTrainedConfig):
        encoder = encoder_config(encoder)
    parts = parts_of(encoder)
    pooler = "" if parts.pools else "|pooler"
    return {rf"^(?!bert\.(?:model{pooler})\.|heads\.|private\.)(?:{parts.prefix}\.)?": "bert.model."}


# ---- What an encoder consists of ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The parts of an encoder, as a trial pass finds them. Modules have their names in the library's model.

    Args:
        prefix: the prefix of its weights' names in a file of a model with a head.
        layers: for each layer, the modules that are first called there, such as a convolution after it.
        before: the modules with weights before the layers: embeddings, tables of relative positions.
        embeddings: the module whose output is the input of the first layer. Empty if there is none, or if it has
            another width than the word embeddings.
        projections: the names of the linear layers that make an attention's queries and values.
        hidden_size: H.
        states: the number of hidden states: one for the embeddings, and one for each layer or pass of a shared layer.
        offset: the number of positions in its table that no token has.
        pools: whether it has its own pooler.
        reads_padding: whether padding beside a text changes the states although it is masked.
        accepts: the arguments of its `forward`. `inputs_embeds` is included only if word embeddings passed there give
            the same states as their ids.
        fused: whether it has torch's fused attention, `sdpa`.
    """

    prefix: str
    layers: tuple[tuple[str, ...], ...]
    before: tuple[str, ...]
    embeddings: str
    projections: tuple[str, ...]
    hidden_size: int
    states: int
    offset: int
    pools: bool
    reads_padding: bool
    accepts: frozenset[str]
    fused: bool


def parts_of(encoder: PreTrainedConfig) -> Parts:
    """Finds the parts of an encoder, by a pass of seven tokens through a model with artificial weights.

    Raises:
        ValueError: it is not an encoder of one text. The message is a clause with the reason.
    """
    return _parts_of(encoder.model_type, json.dumps(_told(encoder), sort_keys=True, default=str))


def meaning_of(encoder: PreTrainedConfig | None) -> dict[str, Any] | None:
    """Returns the settings that two configs must share for weights to have the same meaning.

    It is `None` for the hand-written encoder.
    """
    return None if encoder is None else {**_told(encoder), "architectures": None}


def _told(encoder: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in encoder.to_dict().items() if key not in _INCIDENTAL}


@lru_cache(maxsize=32)
def _parts_of(model_type: str, told: str) -> Parts:
    encoder = transformers.CONFIG_MAPPING[model_type].from_dict(json.loads(told))
    _check_kind(encoder)
    try:
        # Where and how the caller makes models at this time, within a context of the library's perhaps, has no effect.
        with torch.random.fork_rng(devices=[]), no_init_weights(), quiet_library():
            with torch.device("meta"):
                whole = transformers.AutoModel.from_config(deepcopy(encoder), dtype=torch.float32)
            _check_model(whole)
            small = _shallow(encoder)
            with torch.device("cpu"):
                model = transformers.AutoModel.from_config(small, dtype=torch.float32)
            _fill(model)
            parts = _Trial(model).parts()
    except _NoEncoder:
        raise
    except Exception as error:  # whatever the library's code raises where it is given ids and a mask alone
        raise _NoEncoder(f"of which a pass of ids and mask alone fails: {error}") from error
    names = {module: name for name, module in whole.named_modules()}
    layers = [tuple(names[member] for member in layer) for layer in layers_in(whole)]
    beside = [layer[len(layers[0]) :] for layer in parts.layers] + [()] * len(layers)
    if parts.reads_padding:
        logger.warning(
            "The outputs of a %r depend on the padding: they change with the longest text of a batch.",
            model_type,
        )
    return replace(
        parts,
        layers=tuple(map(operator.add, layers, beside)),
        states=parts.states + _depth(encoder) - _depth(small),
        offset=_offset(whole),
    )


def _depth(encoder: PreTrainedConfig) -> int:
    return encoder.num_hidden_layers


def _shallow(encoder: PreTrainedConfig, depth: int = 2) -> PreTrainedConfig:
    """Returns the config with a few layers, which are enough for a trial.

    If their number cannot change, the config is returned.
    """
    shallow, layers = deepcopy(encoder), _depth(encoder)
    if layers <= depth:
        return shallow
    for name, value in vars(encoder).items():
        if isinstance(value, list | tuple) and len(value) == layers:  # of each layer, such as its kind of attention
            setattr(shallow, name, value[:depth])
    try:
        shallow.num_hidden_layers = depth
    except NotImplementedError:
        return deepcopy(encoder)
    return shallow


@contextmanager
def quiet_library() -> Generator[None]:
    """Hides messages of the library while it makes or loads a model. The caller checks the result."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


CAUSAL = "in which a token does not see the next one, as in causal models"
ALONE = "in which no token sees another on a CPU"  # as where attention is a kernel for GPUs alone


class _NoEncoder(ValueError):
    """It is no encoder of one text."""


def _check_kind(encoder: PreTrainedConfig) -> None:
    """Raises `ValueError` if the config already shows that it is not an encoder of one text."""
    if encoder.is_encoder_decoder:
        raise _NoEncoder("an encoder-decoder")
    if hasattr(encoder, "is_decoder") and encoder.is_decoder:
        raise _NoEncoder("a decoder (`is_decoder`)")
    if encoder.get_text_config() is not encoder:
        raise _NoEncoder("which reads more than text")
    if type(encoder) not in transformers.MODEL_MAPPING:
        raise _NoEncoder("of which the library has no AutoModel")
    if not hasattr(encoder, "vocab_size"):
        raise _NoEncoder("which has no vocabulary")


def _check_model(model: PreTrainedModel) -> None:
    """Raises `ValueError` if its `forward` or its attention shows that it is not an encoder of one text."""
    for name, why in (("input_ids", "it reads no text"), ("attention_mask", "padding would change an answer")):
        if name not in inspect.signature(model.forward).parameters:
            raise _NoEncoder(f"whose model takes no `{name}`: {why}")
    if any(module.is_causal for module in model.modules() if hasattr(module, "is_causal")):
        raise _NoEncoder(CAUSAL)  # known before a large one is tried


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Fills the weights with values other than zero.

    The library's initialization would take a second, for a discarded model.
    """
    draw = torch.Generator().manual_seed(0)
    words = _words_of(model)
    for parameter in model.parameters():
        if words is not None and parameter is words.weight:
            parameter = parameter[:_WORDS]
        if parameter.is_floating_point():
            bound = (
                (3 / parameter.shape[-1]) ** 0.5 if parameter.dim() > 1 else 1.0
            )  # outputs are about as large as inputs
            parameter.uniform_(-bound, bound, generator=draw)


def _words_of(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # of characters, say
        return None


_WORDS, _LENGTH, _SHORT = 128, 7, 3  # ids that a trial draws from, and tokens of its texts


class _Trial:
    """A pass of a few texts through a model, observed with hooks.

    Raises:
        ValueError: the output is not one state per token, or does not depend on all tokens.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = layers_in(model)
        self.place = {
            module: number
            for number, layer in enumerate(self.layers, 1)
            for member in layer
            for module in member.modules()
        }
        self.begun = 0  # the layer that is computed, or was last, from 1
        self.called: dict[nn.Module, int] = {}  # which one that was, when a module outside was first called
        self.outputs: list[tuple[Tensor, nn.Module]] = []  # of modules before the first layer
        self.first: Tensor | None = None  # what went into it
        self.ids, self.mask = self._texts()

    def parts(self) -> Parts:
        hooks = [*self._watch()]
        outputs = self._pass(self.mask, input_ids=self.ids)
        for hook in hooks:
            hook.remove()
        self._check(outputs)
        levels = self._levels()
        return Parts(
            prefix=self.model.base_model_prefix,
            layers=tuple(
                (
                    *(self.names[member] for member in layer),
                    *(levels.get(number, ()) if number < len(self.layers) else ()),
                )
                for number, layer in enumerate(self.layers, 1)
            ),
            before=tuple(levels.get(0, ())),
            embeddings=self._giver(),
            projections=_projections(self.layers[0]) if self.layers else (),
            hidden_size=outputs.last_hidden_state.shape[-1],
            states=len(outputs.hidden_states),
            offset=_offset(self.model),
            pools=hasattr(outputs, "pooler_output") and outputs.pooler_output is not None,
            reads_padding=self._reads_padding(outputs.last_hidden_state),
            accepts=self._accepts(outputs.last_hidden_state),
            fused=type(self.model)._supports_sdpa,
        )

    def _accepts(self, last: Tensor) -> frozenset[str]:
        taken = frozenset(inspect.signature(self.model.forward).parameters)
        return taken if self._takes_embeddings(taken, last) else taken - {"inputs_embeds"}

    @torch.no_grad()
    def _takes_embeddings(self, taken: Collection[str], last: Tensor) -> bool:
        """Whether word embeddings as input give the same output as ids. Some models have the argument and do not."""
        words = _words_of(self.model)
        embedded = None if words is None else words(self.ids)
        if "inputs_embeds" not in taken or not isinstance(embedded, Tensor):
            return False
        positions = _positions(self.ids, _offset(self.model), taken)
        given: dict[str, Any] = {"inputs_embeds": embedded} | (
            {} if positions is None else {"position_ids": positions}
        )
        try:
            found = self._pass(self.mask, **given).last_hidden_state
        except Exception:  # whatever the library's code raises where there are no ids
            return False
        there = self.mask.bool()  # of padding nobody asks what it means
        return torch.allclose(found[there], last[there], rtol=1e-3, atol=1e-3 * float(last.abs().max()))

    def _giver(self) -> str:
        """Returns the module whose output is the input of the first layer and is as wide as the word embeddings."""
        words = _words_of(self.model)
        width = None if words is None else next(words.parameters()).shape[-1]
        found = [module for output, module in self.outputs if output is self.first and output.shape[-1] == width]
        return self.names[found[-1]] if found else ""

    def _texts(self) -> tuple[Tensor, Tensor]:
        """Ids and mask [3, T]: a text, the same with another second word, and its beginning, padded."""
        config = self.model.config
        special = {value for name, value in vars(config).items() if name.endswith("_token_id")}
        words = [place for place in range(min(_WORDS, config.vocab_size)) if place not in special]
        ids = torch.tensor((words * _LENGTH)[:_LENGTH]).repeat(3, 1)
        ids[1, 1], ids[2, _SHORT:] = ids[0, 0], (config.pad_token_id if "pad_token_id" in vars(config) else 0) or 0
        mask = torch.ones_like(ids)
        mask[2, _SHORT:] = 0
        return ids, mask

    @torch.no_grad()
    def _pass(self, mask: Tensor, training: bool = False, **given: Tensor) -> Any:
        return self.model.train(training)(
            attention_mask=mask, output_hidden_states=True, return_dict=True, **given, **_uncached(self.model)
        )

    def _watch(self) -> Iterator[Any]:
        for module in self.names:
            if module in self.place:
                yield module.register_forward_pre_hook(self._inside, with_kwargs=True)
            else:
                yield module.register_forward_pre_hook(self._outside)
                yield module.register_forward_hook(self._given)

    def _inside(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.begun = max(self.begun, self.place[module])
        if self.first is None:
            self.first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)

    def _outside(self, module: nn.Module, args: tuple) -> None:
        self.called.setdefault(module, self.begun)

    def _given(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self.begun and isinstance(output, Tensor) and output.shape[:2] == self.ids.shape:
            self.outputs.append((output, module))

    def _check(self, outputs: Any) -> None:
        if not hasattr(outputs, "last_hidden_state") or outputs.last_hidden_state is None:
            raise _NoEncoder("whose model gives no `last_hidden_state`")
        last, states, shape = outputs.last_hidden_state, outputs.hidden_states, self.ids.shape
        if last.dim() != 3 or last.shape[:2] != shape:
            raise _NoEncoder(f"whose model gives {list(last.shape)} for ids {list(shape)}, not a state per token")
        if not states or any(state.shape != last.shape for state in states):
            raise _NoEncoder("not all of whose layers give a state per token of one size")
        if torch.equal(last[0, 0], last[1, 0]):  # not by a token far away, which local attention does not see either
            raise _NoEncoder(ALONE if torch.equal(last[0, 2:], last[1, 2:]) else CAUSAL)
        if self._pass(self.mask, training=True, input_ids=self.ids).last_hidden_state.shape != last.shape:
            raise _NoEncoder("whose model gives another number of states in training")

    def _reads_padding(self, last: Tensor) -> bool:
        alone = self._pass(self.mask[2:, :_SHORT], input_ids=self.ids[2:, :_SHORT]).last_hidden_state
        return not torch.allclose(alone[0], last[2, :_SHORT], rtol=1e-3, atol=1e-3 * float(alone.abs().max()))

    def _levels(self) -> dict[int, list[str]]:
        """Modules outside the layers that have weights, by the layer that was last when they were first called."""
        found: dict[int, list[str]] = {}

        def visit(module: nn.Module, above: int) -> None:
            if module in self.place:
                return
            level = self.called.get(module, above)
            around = any(part in self.place for part in module.modules())
            below = {self.called.get(part, level) for part in module.modules() if [*part.parameters(recurse=False)]}
            if not around and len(below) == 1:
                found.setdefault(below.pop(), []).append(self.names[module])
            for part in module.children() if around or len(below) > 1 else ():
                visit(part, level)

        visit(self.model, 0)
        return found


def _positions(ids: Tensor, offset: int, accepts: Collection[str]) -> Tensor | None:
    """Returns position ids for tables with rows for padding; `None` if the model counts positions as usual."""
    return counted_positions(ids, offset - 1) if offset and "position_ids" in accepts else None


def _uncached(model: PreTrainedModel) -> dict[str, Any]:
    """Turns off the cache of keys and values, because no further tokens follow."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _offset(model: PreTrainedModel) -> int:
    """Positions up to the padding's, of which such tables have a row: tokens begin at the next one."""
    words, positions = _words_of(model), getattr(model.config, "max_position_embeddings", None)
    tables = [
        module.padding_idx + 1
        for module in model.modules()
        if module is not words and hasattr(module, "padding_idx") and isinstance(module.padding_idx, int)
        and [len(weight) for weight in module.parameters(recurse=False)] == [positions]
    ]  # fmt: skip
    return max(tables, default=0)


def layers_in(model: PreTrainedModel) -> list[list[nn.Module]]:
    """Returns the layers: the modules of a list as long as the config says, or of the longest list of one class.

    If several such lists are used in parallel, each layer consists of one module of each list.
    """
    found: list[tuple[nn.Module, nn.ModuleList]] = []

    def visit(module: nn.Module) -> None:
        for part in module.children():
            if isinstance(part, nn.ModuleList) and len({type(layer) for layer in part}) == 1:
                found.append((module, part))
            else:
                visit(part)

    visit(model)
    if not found:
        return []
    depth = model.config.num_hidden_layers
    holder, chosen = max(found, key=lambda pair: (len(pair[1]) == depth, len(pair[1])))
    lists = [layers for of, layers in found if of is holder and len(layers) == len(chosen)]
    return [[*members] for members in zip(*lists, strict=True)]


def _projections(layer: Sequence[nn.Module]) -> tuple[str, ...]:
    """Returns projections by their names: those of an attention that begin with q or v, or one with three times the
    width.
    """
    found = {
        f"{type(member).__name__}.{name}": module
        for member in layer
        for name, module in member.named_modules()
        if isinstance(module, nn.Linear)
    }
    last = {path.rpartition(".")[2]: module for path, module in found.items() if "att" in path.lower()}
    return tuple(
        name for name, linear in last.items() if name[0] in "qv" or linear.out_features == 3 * linear.in_features
    )


# ---- The encoder -------------------------------------------------------------------------------------------------


class Before(nn.ModuleList):
    """The part of an encoder before its layers.

    Args:
        modules: the modules with weights.
        last: the module whose output is the input of the first layer. A hook here is registered on it. `None` if there
            is no such module; a hook is then refused.
    """

    def __init__(self, modules: Iterable[nn.Module], last: nn.Module | None):
        super().__init__(modules)
        vars(self)["last"] = last  # no submodule of its own

    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        if vars(self)["last"] is None:
            raise ValueError(
                "No module of this encoder returns the input of its first layer, so a hook cannot be registered."
            )
        return vars(self)["last"].register_forward_hook(hook, **options)


class LibraryEncoder(nn.Module):
    """An encoder of the transformers library with the interface of `MinBertModel`.

    Args:
        config: a `MinBertConfig` with an `encoder_config`.
        pooler: a function that makes a pooler from the config, if the library's model has none.
    """

    def __init__(self, config: Any, pooler: Callable[[Any], nn.Module]):
        super().__init__()
        self.parts = parts_of(config.encoder_config)
        self.model = transformers.AutoModel.from_config(config.encoder_config)
        self.pooler = None if self.parts.pools else pooler(config)
        self.uncached = _uncached(self.model)
        self.has_segments = config.type_vocab_size > 1 and "token_type_ids" in self.parts.accepts
        # In a tuple, which registers nothing: these are modules of `model`.
        self.layers = tuple(map(self._together, self.parts.layers))

    def _together(self, names: Sequence[str]) -> nn.Module:
        modules = [*map(self.model.get_submodule, names)]
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    @property
    def embeddings(self) -> Before:
        """The current part before the layers. It can change when a vocabulary is resized or an adapter is added."""
        last = self.model.get_submodule(self.parts.embeddings) if self.parts.embeddings else None
        return Before(map(self.model.get_submodule, self.parts.before), last)

    def layers_of(self, task: str | None) -> list[nn.Module]:
        """Returns the layers, which all tasks share."""
        return [*self.layers]

    def positions_of(self, input_ids: Tensor) -> Tensor | None:
        """Does the same as `MinBertForMultiTask.positions_of`.

        If the position table has rows for padding, tokens count from after them.
        """
        return _positions(input_ids, self.parts.offset, self.parts.accepts)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        task: str | None = None,
        packing: Any = None,
        states: list[Tensor] | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Does the same as `MinBertModel.forward`. `packing` repeats the information of the mask and is not used.

        Args:
            states: collects the input of the first layer and the output of each layer. The last entry is the encoder's
                output, after its final normalization if it has one.

        Raises:
            ValueError: the library's model does not accept one of the given inputs.
        """
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = tokens_of(attention_mask).long()
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "token_type_ids": token_type_ids if self.has_segments else None, "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in self.parts.accepts:
                raise ValueError(f"`{name}` cannot be given to a {type(self.model).__name__}, which does not take it.")
        recorded = True if states is not None else output_hidden_states
        options = kwargs if recorded is None else {**kwargs, "output_hidden_states": recorded}
        outputs = self.model(**given, **{**options, **self.uncached, "return_dict": True})
        last, hidden = outputs.last_hidden_state, outputs.get("hidden_states")
        if states is not None:
            states += [*hidden[:-1], last]
        pooled = outputs.pooler_output if self.pooler is None else self.pooler(last)
        return BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=pooled,
            hidden_states=hidden if output_hidden_states or states is None else None,
            attentions=outputs.get("attentions"),
        )
