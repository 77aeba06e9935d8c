"""Adapters: small trained modules on a frozen encoder, by the library peft.

A run with `peft` saves only the adapter and the heads that it trained, not the base model. Loading such a run for
predictions, or for training without `peft`, gives an ordinary model with the adapter merged into its weights.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import PeftType
from torch import nn
from transformers import TrainingArguments

from ..errors import MinBertError, explain, unknown_name
from ..model.inference import length_of
from ..model.library import parts_of
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..settings.dotted import Value
from ..settings.recipe import cast
from ..settings.run import RunSettings
from ..settings.tasks import head_difference
from .adapted import AdaptedModel, lacking, read_adapter
from .loading import load_config, load_weights

#: What a recipe's `peft` takes, by its `peft_type`: options of peft under their own names, and what they are.
_EVERYWHERE = {"target_modules": list[str] | Literal["all-linear"]}
_LAYERS = {"layers_to_transform": list[int]}
METHODS: dict[str, dict[str, Any]] = {
    "LORA": {
        **_EVERYWHERE, **_LAYERS, "r": int, "lora_alpha": float, "lora_dropout": float, "use_rslora": bool,
        "use_dora": bool, "init_lora_weights": bool | Literal["gaussian"],
    },
    "LOHA": {**_EVERYWHERE, **_LAYERS, "r": int, "alpha": float, "rank_dropout": float, "module_dropout": float},
    "LOKR": {
        **_EVERYWHERE, **_LAYERS, "r": int, "alpha": float, "rank_dropout": float, "module_dropout": float,
        "decompose_both": bool, "decompose_factor": int,
    },
    "OFT": {**_EVERYWHERE, **_LAYERS, "r": int, "oft_block_size": int, "module_dropout": float, "coft": bool},
    "IA3": {**_EVERYWHERE, "feedforward_modules": list[str]},
}  # fmt: skip
#: What peft takes for a BERT, by `peft_type`.
TARGETS = {"IA3": {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}}
USUAL_TARGETS = {"target_modules": ["query", "value"]}
#: Why not, where people will ask.
_PROMPTS = "adds virtual tokens before the input, and pooling, packing and heads would treat them as words"
REFUSED: dict[str, str] = {
    "PROMPT_TUNING": _PROMPTS, "MULTITASK_PROMPT_TUNING": _PROMPTS, "P_TUNING": _PROMPTS,
    "PREFIX_TUNING": _PROMPTS, "ADAPTION_PROMPT": _PROMPTS, "CPT": _PROMPTS,
    "ADALORA": "chooses its ranks by scores that no checkpoint keeps, so that a run could not go on where it stopped",
}  # fmt: skip


# ---- What a recipe says ------------------------------------------------------------------------------------------


def read_options(options: Mapping[str, Any], config: MinBertConfig | None = None) -> tuple[str, dict[str, Any]]:
    """Returns the `peft_type` and the typed options of a recipe's `peft`, with the usual targets by default.

    The default targets are the layers that make queries and values (Hu et al. 2021, arXiv:2106.09685, section 7.1). In
    a library encoder that makes queries, keys and values in one layer, the target is that layer, so the adapter covers
    keys too.

    Args:
        config: the model's config, because encoders name these layers differently. Without it, BERT's names are used.

    Raises:
        MinBertError: the method or an option is unknown, a value does not fit, or the adapter would have no effect.
    """
    given = dict(options)
    method = given.pop("peft_type", "LORA")
    if method not in METHODS:
        if method in REFUSED:
            raise MinBertError(f"`peft.peft_type: {method}` is not supported: it {REFUSED[method]}. Use LORA.")
        raise unknown_name("`peft.peft_type`", method, METHODS)
    for name in given:
        if name not in METHODS[method]:
            raise MinBertError(f"`peft`: {unknown_name(f'option of {method}', name, ['peft_type', *METHODS[method]])}")
    typed = {name: cast(f"peft.{name}", Value(value, None), METHODS[method][name]) for name, value in given.items()}
    for name, value in typed.items():
        if name.endswith("alpha") and not 0 < value < math.inf:
            raise MinBertError(
                f"`peft.{name}` must be a finite number above 0: it is the factor on the adapter. Found {value}."
            )
        if name.endswith("dropout") and not 0 <= value < 1:
            raise MinBertError(
                f"`peft.{name}` must be from 0 to less than 1: with 1 nothing of the adapter is left. Found {value}."
            )
    if method == "IA3" and "target_modules" in typed:
        typed.setdefault("feedforward_modules", [])
    if config is None or config.encoder_config is None:
        return method, {**TARGETS.get(method, USUAL_TARGETS), **typed}
    if "target_modules" not in typed:
        found = parts_of(config.encoder_config).projections
        if method in TARGETS or not found:
            raise MinBertError(
                f"`peft` needs `target_modules`: the default targets of {method} are layers of BERT, and this encoder "
                f"is a {config.family}. Give names of its layers, or `all-linear`."
            )
        typed["target_modules"] = [*found]
    return method, typed


def full_options(options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a recipe's `peft` with the values of all options, using peft's defaults.

    Args:
        config: the config.json of the run's model, as for `read_options`.

    Raises:
        MinBertError: as `read_options`; the config does not belong to a model; or peft refuses a value.
    """
    with explain("Reading the config of a run with `peft`", "Put the right config.json back, or delete it."):
        model = MinBertConfig.from_dict(dict(config)) if config else None
    method, typed = read_options(options, model)
    with explain(f"Reading the adapter {method}", "Correct `peft` in the recipe."):
        made = _config(method, typed)
    return {"peft_type": method, **{name: _in_order(getattr(made, name)) for name in METHODS[method]}}


def check(options: Mapping[str, Any], config: MinBertConfig) -> None:
    """Adds the adapter to a model without weights. Errors then come before data and weights are loaded.

    Raises:
        MinBertError: as `read_options`; there is no such layer; or peft refuses a value.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        add_adapter(MinBertForMultiTask(config), options, "", heads=config.task_names)


def check_run(settings: RunSettings, args: TrainingArguments) -> None:
    """Raises `MinBertError` if other settings of the recipe do not work with `peft`."""
    if settings.objective == "mlm":
        raise MinBertError("`peft` is for tasks: `objective: mlm` trains the encoder itself. Set `peft: null`.")
    options = args.gradient_checkpointing_kwargs
    if isinstance(options, dict) and options.get("use_reentrant"):
        raise MinBertError(
            "`peft` does not work with reentrant gradient checkpointing: layers above frozen embeddings would "
            "get no gradient. Leave `gradient_checkpointing_kwargs` out."
        )


def check_follows(before: RunSettings, settings: RunSettings, config: MinBertConfig) -> None:
    """Raises `MinBertError` if a stage cannot continue from the model of the stage before.

    `config` is the stage's model.
    """
    follows = Path(settings.model_name_or_path) == Path(before.output_dir)
    if follows and before.peft and settings.objective == "mlm":
        raise MinBertError(
            "`objective: mlm` trains a whole model, and the stage before ends with an adapter. Put a stage without "
            "`peft` between them, which merges the adapter into the model."
        )
    if not (follows and before.peft and settings.peft):
        return
    if read_options(before.peft, config) != read_options(settings.peft, config):
        raise MinBertError(
            f"`peft` is {settings.peft}, and {before.peft} in the stage before. With the same `peft`, training "
            f"of the adapter continues. With `peft: null` the adapter is merged into the model. Set one of the two."
        )


def check_same(options: Mapping[str, Any], config: MinBertConfig, name: str, revision: str | None = None) -> None:
    """Raises `MinBertError` if these options would not have made the saved adapter."""
    method, typed = read_options(options, config)
    now, then = _config(method, typed), read_adapter(name, revision)
    for key in ("peft_type", *METHODS[method]) if now.peft_type == then.peft_type else ("peft_type",):
        wanted, found = (_in_order(getattr(of, key)) for of in (now, then))
        if wanted != found:
            raise MinBertError(
                f"The model {name!r} is an adapter with `{key}: {found}`, and `peft` says {wanted}. Use the "
                f"options of the adapter to continue its training, or merge it first: `minbert merge`."
            )


def _config(method: str, options: Mapping[str, Any], **further: Any) -> PeftConfig:
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[method]](**options, **further)


def _in_order(value: Any) -> Any:
    """peft keeps names as a set, and a word of its own as an enum."""
    value = value.value if isinstance(value, Enum) else value
    return sorted(value) if isinstance(value, set | list) else value


def add_adapter(
    model: MinBertForMultiTask,
    options: Mapping[str, Any],
    base: str,
    revision: str | None = None,
    heads: Iterable[str] = (),
    missing: Iterable[str] = (),
) -> AdaptedModel:
    """Adds a new adapter to a model. The outputs do not change until it is trained.

    Args:
        model: changed in place. Only the adapter and the heads are trained afterwards.
        options: the `peft` of a recipe.
        base, revision: the source of the model, which the saved adapter names.
        heads: tasks whose heads are trained and saved completely.
        missing: the names of weights that the base lacks, which must be saved too.

    Raises:
        MinBertError: as `check`.
    """
    method, typed = read_options(options, model.config)
    saved = sorted({f"heads.{task}" for task in heads} | lacking(missing))
    whole = ["heads", *(re.escape(part) for part in saved if not part.startswith("heads."))]
    _check_targets(model.named_modules(), typed, model.config.num_hidden_layers)
    with explain(f"Adding the adapter {method}", "Correct `peft` in the recipe."):
        config = _config(
            method,
            typed,
            modules_to_save=saved,
            exclude_modules=rf"(?:{'|'.join(whole)})\..*",
            base_model_name_or_path=base,
            revision=revision,
        )
        adapted = AdaptedModel(model, config)
    if not all(p.numel() for p in adapted.parameters() if p.requires_grad):
        raise MinBertError(
            f"`peft`: this {method} has nothing to train in one of the layers, because its blocks have size 1. Found "
            f"{typed}. Give `oft_block_size` of 2 or more, or a smaller `r`."
        )
    return adapted


def _check_targets(modules: Iterable[tuple[str, nn.Module]], options: Mapping[str, Any], layers: int) -> None:
    """Raises `MinBertError` for a name that no layer of the encoder ends with; peft does if all are such."""
    names = [name for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)]
    names = [name for name in names if not name.startswith("heads.")]
    last = {".".join(name.split(".")[-1:]) for name in names}
    choices = last | {".".join(name.split(".")[-2:]) for name in names if name.endswith(("dense", "embeddings"))}
    for option in ("target_modules", "feedforward_modules"):
        for wanted in options.get(option, ()) if isinstance(options.get(option), list) else ():
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                raise MinBertError(f"`peft.{option}`: {unknown_name('layer of the encoder', wanted, choices)}")
    for number in options.get("layers_to_transform", ()):
        if not 0 <= number < layers:
            raise MinBertError(
                f"`peft.layers_to_transform` counts from 0, and the encoder has {layers} layers. Found {number}."
            )


# ---- Several saved adapters --------------------------------------------------------------------------------------


def load_adapters(runs: Mapping[str, str | Path]) -> AdaptedModel:
    """Loads several saved adapters onto one copy of their base model. `set_adapter` selects the active one.

    Args:
        runs: a name and the folder of the run for each adapter. The first is active.

    Returns:
        the model with the tasks of all runs. While a run's adapter is active, the answers of its tasks equal those of
        the run, up to rounding.

    peft alone loads one adapter, including heads, onto a model that has the adapter's tasks:

        config = MinBertConfig.from_pretrained("runs/lora")
        base = MinBertForMultiTask.from_pretrained("sentence-transformers/all-MiniLM-L6-v2", config=config)
        model = PeftModel.from_pretrained(base, "runs/lora")

    Raises:
        MinBertError: the adapters have different base models, their kinds or tasks do not go together, or peft refuses
            a name.
    """
    if not runs:
        raise MinBertError("There is no adapter to load. Give at least one.")
    places = {name: str(run) for name, run in runs.items()}
    configs = {name: load_config(place) for name, place in places.items()}
    adapters = {name: read_adapter(place) for name, place in places.items()}
    bases = {name: (str(adapter.base_model_name_or_path), adapter.revision) for name, adapter in adapters.items()}
    first, tasks, lengths = next(iter(runs)), {}, {}
    for name, config in configs.items():
        if bases[name] != bases[first]:
            raise MinBertError(
                f"{places[first]} has the base model {bases[first][0]!r}, and {places[name]} has "
                f"{bases[name][0]!r}. Give adapters of one base model."
            )
        if config.private_layers or config.private_encoders:
            raise MinBertError(f"{places[name]} has layers for each task alone, which adapters cannot share.")
        for task in config.tasks or ():
            lengths.setdefault(task["name"], length_of(config, task["name"]))
            key = head_difference(tasks.setdefault(task["name"], task), task)
            if key is not None:
                raise MinBertError(
                    f"Task {task['name']!r} has another `{key}` in {places[name]} than in a run before it. Leave one "
                    f"of them out."
                )
    config = configs[first]
    config.rearrange(tasks=[*tasks.values()], max_input_length=lengths)
    base, _ = load_weights(bases[first][0], config, bases[first][1])
    with explain(f"Loading the adapters {', '.join(map(repr, runs))}", "Give adapters of one kind, and plain names."):
        # peft's annotation is the base class, and not the one that is asked.
        model = typing.cast(AdaptedModel, AdaptedModel.from_pretrained(base, places[first], adapter_name=first))
        for name in [*runs][1:]:
            model.load_adapter(places[name], adapter_name=name)
    return model.eval()
