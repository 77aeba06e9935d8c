"""Loads a checkpoint from a folder or the Hub: its config, its tokenizer and its weights, each with checks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from ..data.tables import shortened
from ..errors import MinBertError, did_you_mean, explain
from ..model.heads import build_head
from ..model.inference import length_of
from ..model.library import parts_of, quiet_library
from ..model.modeling_minbert import MinBertConfig, MinBertForMaskedLM, MinBertForMultiTask
from ..settings.tasks import Task, head_difference
from .data import load_plugins
from .weights import MODEL, hub_answers, kept_weights

if TYPE_CHECKING:
    from .adapted import AdaptedModel

logger = logging.getLogger(__name__)

SENTENCEPIECE = ("sentencepiece.bpe.model", "spm.model", "spiece.model")
#: One of them is in any folder with a tokenizer: all of it, or the vocabulary from which the library makes it.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", *SENTENCEPIECE)
REMEDY = "Give the folder of an encoder's checkpoint or of a finished run, or an id on the Hub."


def load_config(name: str, revision: str | None = None, **changes: Any) -> MinBertConfig:
    """Loads the checkpoint's config. No weights are loaded, so that all checks on the config can come first.

    Raises:
        MinBertError: there is no such checkpoint, or it is not an encoder.
    """
    path = Path(name)
    if not path.exists() and not _is_id(name):
        raise MinBertError(f"There is no model {name}: no such folder. {REMEDY}")
    if path.exists() and not path.is_dir():
        raise MinBertError(f"The model {name} is not a folder. {REMEDY}")
    if path.is_dir() and not (path / "config.json").is_file():  # the library would take BERT-base's sizes
        raise MinBertError(f"The folder {name} holds no model: it has no config.json. {REMEDY}")
    place, remedy = _place(name, revision), REMEDY
    if not Path(place).exists():
        remedy = _beside(path) + REMEDY
        if (silent := _why_not_on_hub(name, revision)) is not None:
            raise MinBertError(f"There is no folder {name} here, and {silent}. {remedy}")
    load_plugins(path)
    with explain(f"Reading the config of {name!r}", remedy):
        return MinBertConfig.from_pretrained(place, revision=revision or "main", **changes)


def _place(name: str, revision: str | None) -> str:
    """Returns where to load `name` from. The quick start's copy of its model replaces the Hub's."""
    kept = kept_weights() if name == MODEL and revision is None and not Path(name).exists() else None
    return name if kept is None else str(kept)


def _is_id(name: str) -> bool:
    """Whether it could be a name on the Hub. `../run` could not."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _why_not_on_hub(name: str, revision: str | None) -> str | None:
    """Returns why neither the Hub nor its cache can be used for `name`; `None` if one can."""
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return None
    if constants.HF_HUB_OFFLINE:
        return "with HF_HUB_OFFLINE the Hub is not asked for one of that name"
    return None if hub_answers() else "the Hub does not answer"


def _beside(path: Path) -> str:
    """Returns a sentence about where a missing folder was searched; for a name on the Hub, about weights without the
    Hub.
    """
    if not path.parent.is_dir() or path.parent == Path():
        return f"For small weights without the Hub run `minbert quickstart`: it keeps them as {MODEL}. "
    folders = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    near = did_you_mean(path.name, folders)
    return f"The folder {path.parent} holds {shortened(folders) or 'no folders'}.{near} "


def tasks_of(config: MinBertConfig, name: str) -> dict[str, Task]:
    """Returns the tasks of a saved model. Raises `MinBertError` if it has none."""
    if not config.tasks:
        raise MinBertError(f"The model {name!r} has no tasks: it is a plain encoder. Train it with `minbert train`.")
    with explain(f"Reading the tasks of {name!r}", REMEDY):
        return {saved["name"]: Task.from_config(saved) for saved in config.tasks}


def load_tokenizer(name: str, config: MinBertConfig, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the checkpoint's tokenizer. With `truncation=True` it truncates to the model's own length.

    Raises:
        MinBertError: there is none; it has more tokens than the model; it adds no special tokens between the sentences
            of a pair; or its padding token is missing or differs from that of the model's position ids.
    """
    place = _place(name, revision)
    lacking = MinBertError(
        f"The model {name!r} has no tokenizer: there is no tokenizer.json, nor what it is made from "
        f"({', '.join(TOKENIZER_FILES[1:])}). {REMEDY}"
    )
    there = [file for file in TOKENIZER_FILES if (Path(place) / file).is_file()]
    if Path(place).is_dir() and not there:
        raise lacking  # the library would ask for sentencepiece
    remedy = REMEDY
    if there and {*there} <= {*SENTENCEPIECE}:
        remedy = f"Install sentencepiece, which reads {there[0]}, or put the tokenizer.json beside it."
    with explain(f"Loading the tokenizer of {name!r}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision)
    # With some of its files the library makes a tokenizer that knows its special tokens only: every word would be
    # unknown, or nothing at all.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise lacking
    _check_special_tokens(name, tokenizer)
    tokens = 1 + max(tokenizer.get_vocab().values())  # more than there are where special ones stand apart
    if tokens > config.vocab_size:
        raise MinBertError(
            f"The tokenizer of {name!r} has {tokens:,} tokens and its model {config.vocab_size:,}. "
            f"They do not belong together. {REMEDY}"
        )
    if config.position_offset and tokenizer.pad_token_id != config.pad_token_id:
        raise MinBertError(
            f"The tokenizer of {name!r} pads with the id {tokenizer.pad_token_id}, and its model has `pad_token_id` "
            f"{config.pad_token_id}, from which a {config.family} counts positions. They do not belong "
            f"together. {REMEDY}"
        )
    tokenizer.model_max_length = length_of(config)  # the file may say more than the model has positions
    return tokenizer


def _check_special_tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    # An empty text must have a token, and a pair one between its sentences.
    if not tokenizer("")["input_ids"] or tokenizer.num_special_tokens_to_add(pair=True) < 2:
        raise MinBertError(
            f"The tokenizer of {name!r} adds no special tokens to a text, such as [CLS] and [SEP] or <s> and </s>, "
            f"where an encoder expects them. Save one that does, such as that of the checkpoint it was trained from."
        )
    if tokenizer.pad_token_id is None:
        raise MinBertError(
            f"The tokenizer of {name!r} names no token for padding. Name it as `pad_token` in its "
            f"tokenizer_config.json, which may be missing."
        )


def load_weights(
    name: str, config: MinBertConfig, revision: str | None = None, attn_implementation: str | None = None
) -> tuple[MinBertForMultiTask, list[str]]:
    """Loads the model in float32, and returns it with the weights that the checkpoint lacks.

    float32 is used because the model would otherwise be trained in half precision. A head in the checkpoint with
    another architecture, other labels or another range counts as missing, and a new one is made. An adapter is merged
    into its base model.

    Raises:
        MinBertError: there are no weights, the file is broken, a weight has another shape than in the config, or the
            base model of an adapter cannot be loaded.
    """
    if is_adapter(name, revision):
        from .adapted import merged  # here, as it imports peft

        model, missing = load_adapter(name, config, revision, attn_implementation)
        return merged(model), missing
    model, missing, other = _load_plain(name, config, revision, attn_implementation)
    _tell_of_other_heads(name, other)
    return model, missing


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Whether a folder or a Hub id contains an adapter, which is loaded with its base model."""
    place = _place(name, revision)
    with explain(f"Looking for an adapter in {name!r}", REMEDY):
        return find_adapter_config_file(place, revision=revision) is not None


def load_adapter(
    name: str, config: MinBertConfig, revision: str | None = None, attn_implementation: str | None = None
) -> tuple[AdaptedModel, list[str]]:
    """Does the same as `load_weights`, but keeps the adapter as a trainable part.

    Returns the model with the weights that base and adapter lack.
    """
    from .adapted import load_adapted, read_adapter  # as above

    adapter, saved = read_adapter(name, revision), _saved_tasks(name, revision)
    base, base_revision = str(adapter.base_model_name_or_path), adapter.revision
    try:
        load_config(base, base_revision)
        if is_adapter(base, base_revision):
            raise MinBertError("it is an adapter itself. Merge it first: `minbert merge`.")
        model, missing, other = _load_plain(base, config, base_revision, attn_implementation)
    except MinBertError as error:
        raise MinBertError(f"The base model {base!r} of the adapter {name!r}: {error}") from error
    kept = [task for task in saved if task["name"] in config.task_names]
    differing = {task["name"] for task in kept if head_difference(task, config.get_task(task["name"])) is not None}
    trained = {part.removeprefix("heads.") for part in adapter.modules_to_save or ()} - differing
    _tell_of_other_heads(base, other - trained - differing)
    _tell_of_other_heads(name, differing)
    # A task's private layers began as copies of the base's, which no training changed.
    copied = {task["name"] for task in saved}
    missing = [key for key in missing if "private." not in key or key.split("private.")[1].split(".")[0] not in copied]
    return load_adapted(name, adapter, model, missing, revision, differing)


def _load_plain(
    name: str, config: MinBertConfig, revision: str | None, attn_implementation: str | None
) -> tuple[MinBertForMultiTask, list[str], set[str]]:
    """Does the same as `load_weights` for a model without adapter. Also returns the tasks whose saved heads differ."""
    saved = _saved_tasks(name, revision)
    model, report = _load(MinBertForMultiTask, name, config, revision, attn_implementation)
    mismatched = sorted(report["mismatched_keys"])
    kept = [task for task in saved if task["name"] in config.task_names]
    other = {task["name"] for task in kept if head_difference(task, config.get_task(task["name"])) is not None}
    other |= {key.split(".")[1] for key, *_ in mismatched if key.startswith("heads.")}
    missing = {key for key in report["missing_keys"] if not _in_heads(key, other)}
    for task in sorted(other):
        missing |= {f"heads.{task}.{key}" for key in _renew_head(model, task)}
    _check_shapes(name, [found for found in mismatched if not _in_heads(found[0], other)])
    return model, sorted(missing), other


def _saved_tasks(name: str, revision: str | None) -> list[dict[str, Any]]:
    with explain(f"Loading the weights of {name!r}", REMEDY):
        return MinBertConfig.from_pretrained(_place(name, revision), revision=revision or "main").tasks or []


def _tell_of_other_heads(name: str, tasks: set[str]) -> None:
    for task in sorted(tasks):
        logger.warning(
            "%s: the saved head of %r has another architecture or other labels, so a new head is trained.", name, task
        )


def load_masked_lm(
    name: str, config: MinBertConfig, revision: str | None = None, attn_implementation: str | None = None
) -> tuple[MinBertForMaskedLM, list[str]]:
    """Does the same as `load_weights` for the model that predicts words. It has a pooler if the checkpoint has one.

    Adapters are not accepted.
    """
    if is_adapter(name, revision):
        raise MinBertError(
            f"{name!r} is an adapter, and `objective: mlm` trains a whole model. Merge the adapter first: "
            f"`minbert merge`."
        )
    model, report = _load(MinBertForMaskedLM, name, config, revision, attn_implementation, add_pooling_layer=True)
    _check_shapes(name, sorted(report["mismatched_keys"]))
    missing = sorted(report["missing_keys"])
    if any(".pooler." in key for key in missing):  # saved, random numbers would pass for a pooler that was trained
        model.bert.pooler = None
    return model, missing


def check_encoder(name: str, missing: list[str]) -> None:
    """Raises `MinBertError` if the checkpoint lacks weights of the encoder other than the pooler's."""
    encoder = [key for key in missing if key.startswith("bert.") and ".private." not in key and ".pooler." not in key]
    if encoder:
        raise MinBertError(
            f"The checkpoint {name!r} lacks {len(encoder)} of the encoder's weights, among them {encoder[0]}: they "
            f"would start from random numbers. Check that it is an encoder's, of the size that its config says."
        )


def _load(
    kind: type[PreTrainedModel],
    name: str,
    config: MinBertConfig,
    revision: str | None,
    attn_implementation: str | None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """The model in float32, and the library's report on its weights."""
    with explain(f"Loading the weights of {name!r}", REMEDY), quiet_library():
        made: Any = kind.from_pretrained(  # with the report, which its annotation leaves out
            _place(name, revision),
            config=config,
            revision=revision or "main",
            dtype=torch.float32,
            attn_implementation=_attention(config, attn_implementation),
            ignore_mismatched_sizes=True,  # the library's error does not say which
            output_loading_info=True,
            **options,
        )
    return made


def _attention(config: MinBertConfig, wanted: str | None) -> str | None:
    """Returns the attention implementation. If the encoder has no `sdpa`, the default of a recipe, it is `eager`."""
    if config.encoder_config is None or wanted != "sdpa" or parts_of(config.encoder_config).fused:
        return wanted
    return "eager"


def _check_shapes(name: str, mismatched: list[tuple[str, Any, Any]]) -> None:
    if mismatched:
        key, found, wanted = mismatched[0]
        raise MinBertError(
            f"The weight {key} of {name!r} has the shape {list(found)} and its config asks for {list(wanted)}. "
            f"They do not belong together. {REMEDY}"
        )


def _in_heads(key: str, tasks: set[str]) -> bool:
    return key.startswith("heads.") and key.split(".")[1] in tasks


def _renew_head(model: MinBertForMultiTask, task: str) -> list[str]:
    """Replaces the task's head by a new one. Returns the names of its weights."""
    head = build_head(model.config, model.config.get_task(task))
    for module in head.modules():
        model._init_weights(module)
    setattr(model.heads, task, head.to(model.device))
    return [name for name, _ in head.named_parameters()]
