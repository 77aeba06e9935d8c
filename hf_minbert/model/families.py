"""The published encoders that the hand-written encoder computes, and how each names its settings and weights.

Differences in the computation are settings of `MinBertConfig`. Only this table uses the names of families. This file
is uploaded to the Hub with a model. It may import only published libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PreTrainedConfig

#: The word head's weights, by our names.
TRANSFORM, NORM = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"
DECODER, BIAS = "cls.predictions.decoder", "cls.predictions.bias"


@dataclass(frozen=True)
class Family:
    """A published encoder, by the `model_type` of its config.

    Args:
        prefix: the prefix of the encoder's weights in a model with a head.
        settings: settings with other names in the published config: our name to theirs.
        fixed: settings that the published code fixes, without a field in its config.
        counted: whether positions count the tokens that are not padding, starting after the padding's id.
        names: weights with other names: our name to theirs, with `*` for the number of a layer.
        pooler: whether the published encoder has a pooler.
        classifier_act: the activation between the two linear layers of the published sequence classifier.
    """

    prefix: str
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    pooler: bool = True
    classifier_act: str = "tanh"

    def renames(self) -> Iterator[tuple[str, str]]:
        """Returns patterns for the published names and our replacements, as a `key_mapping` of `from_pretrained`."""
        yield rf"^{self.prefix}\.", "bert."
        for ours, theirs in self.names.items():
            # What is of a head begins a name, and what is of the encoder stands there or behind its prefix.
            start = "^" if ours.startswith("cls.") else r"(?<![^.])"
            yield start + re.escape(theirs).replace(r"\*", r"(\d+)"), ours.replace("*", r"\1")

    def published(self, name: str) -> str:
        """Returns the published name of an encoder weight, from our name without a prefix."""
        for ours, theirs in self.names.items():
            if found := re.match(re.escape(ours).replace(r"\*", r"(\d+)") + r"(?![^.])", name):
                return theirs.replace("*", "".join(found.groups())) + name[found.end() :]
        return name


_ROBERTA_WORDS = {
    TRANSFORM: "lm_head.dense",
    NORM: "lm_head.layer_norm",
    DECODER: "lm_head.decoder",
    BIAS: "lm_head.bias",
}
_ROBERTA = Family("roberta", counted=True, fixed={"word_head_act": "gelu"}, names=_ROBERTA_WORDS)

#: By `model_type`.
FAMILIES: dict[str, Family] = {
    "bert": Family("bert"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": Family("data2vec_text", counted=True, fixed={"word_head_act": "gelu"}, names=_ROBERTA_WORDS),
    "ernie": Family("ernie"),
    "electra": Family(
        "electra",
        fixed={"word_head_act": "gelu"},
        names={
            "embeddings.project": "embeddings_project",
            TRANSFORM: "generator_predictions.dense",
            NORM: "generator_predictions.LayerNorm",
            f"{DECODER}.weight": "generator_lm_head.weight",
            BIAS: "generator_lm_head.bias",
        },
        pooler=False,
        classifier_act="gelu",
    ),
    "distilbert": Family(
        "distilbert",
        settings={
            "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        fixed={"type_vocab_size": 0, "layer_norm_eps": 1e-12, "attention_output_dropout": False},
        names={
            "encoder.layer.*.attention.self.query": "transformer.layer.*.attention.q_lin",
            "encoder.layer.*.attention.self.key": "transformer.layer.*.attention.k_lin",
            "encoder.layer.*.attention.self.value": "transformer.layer.*.attention.v_lin",
            "encoder.layer.*.attention.output.dense": "transformer.layer.*.attention.out_lin",
            "encoder.layer.*.attention.output.LayerNorm": "transformer.layer.*.sa_layer_norm",
            "encoder.layer.*.intermediate.dense": "transformer.layer.*.ffn.lin1",
            "encoder.layer.*.output.dense": "transformer.layer.*.ffn.lin2",
            "encoder.layer.*.output.LayerNorm": "transformer.layer.*.output_layer_norm",
            TRANSFORM: "vocab_transform",
            NORM: "vocab_layer_norm",
            f"{DECODER}.weight": "vocab_projector.weight",
            BIAS: "vocab_projector.bias",
        },
        pooler=False,
        classifier_act="relu",
    ),
}  # fmt: skip


def key_mapping() -> dict[str, str]:
    """Returns the renames of all families. No pattern matches a name of ours or of another family."""
    return {theirs: ours for family in FAMILIES.values() for theirs, ours in family.renames() if theirs != r"^bert\."}


def settings_of(published: Mapping[str, Any], ours: type[PreTrainedConfig]) -> dict[str, Any]:
    """Converts a published config.json to settings of our config.

    Missing settings get the defaults of the published config class, which may differ from ours.

    Args:
        published: a config.json whose `model_type` is in `FAMILIES`; `bert` if it has none.
        ours: our config class.

    Raises:
        ValueError: it belongs to a decoder, or its positions are not absolute.
    """
    name = published.get("model_type", "bert")  # the first BERT checkpoints do not say
    family, theirs = FAMILIES[name], _class_of(name)
    for key, wanted, meaning in (
        ("position_embedding_type", "absolute", "'absolute'"), ("is_decoder", False, "an encoder"),
        ("use_task_id", False, "no embeddings of tasks"),
    ):  # fmt: skip
        if (found := published.get(key, wanted)) != wanted:
            raise ValueError(f"`{key}` {found!r}; expected {meaning}")
    made = theirs.from_dict(dict(published))
    read = {key: family.settings.get(key, key) for key in _own(ours)}
    settings = {key: getattr(made, name) for key, name in read.items() if name in _own(theirs)}
    if family.counted:
        settings["position_offset"] = made.pad_token_id + 1
        settings["max_position_embeddings"] -= settings["position_offset"]
    kept = {key: value for key, value in published.items() if key not in _own(theirs) | _UNUSED}
    return {**kept, **settings, **family.fixed, "family": name}


def published_config(config: Any) -> PreTrainedConfig:
    """Returns the encoder's config in its published class, from our config."""
    kind = _class_of(config.family)
    ours = {theirs: ours for ours, theirs in FAMILIES[config.family].settings.items()}
    read = {name: ours.get(name, name) for name in _own(kind)}
    settings = {name: getattr(config, key) for name, key in read.items() if key in _own(type(config))}
    settings["max_position_embeddings"] += config.position_offset
    return kind(**settings)


def _class_of(model_type: str) -> type[PreTrainedConfig]:
    # Imported here: a package may register its config, which imports this file, as soon as it is.
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def _own(kind: type[PreTrainedConfig]) -> set[str]:
    """The settings of a config that not every config has."""
    return {f.name for f in fields(kind)} - {f.name for f in fields(PreTrainedConfig)}


#: Of a published config, what an encoder with absolute positions has no use for.
_UNUSED = {
    "add_cross_attention", "architectures", "auto_map", "gradient_checkpointing", "is_decoder", "model_type",
    "position_embedding_type", "use_cache",
}  # fmt: skip
