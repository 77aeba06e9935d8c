"""Loads the inputs of a run: its data, its tokenizer and its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.encoding import check_max_length
from ..data.files import load_split, pinned
from ..data.leaks import HeldOut, load_training
from ..data.mappings import pinned_sources
from ..data.selection import chosen_and_rest
from ..errors import explain
from ..model.configuration_minbert import MinBertConfig
from ..model.heads import check_heads
from ..model.modeling_minbert import MinBertForMultiTask
from ..pretrained import adapters
from ..pretrained.loading import check_encoder, is_adapter, load_adapter, load_config, load_tokenizer, load_weights
from ..settings.plugins import module_of
from ..settings.run import RunSettings
from ..settings.tasks import Task, get_tasks, revisions
from ..training.args import MultiTaskTrainingArguments
from . import pretraining
from .folder import RunFolder

logger = logging.getLogger(__name__)


def pinned_tasks(tasks: list[Task], folder: RunFolder) -> list[Task]:
    """Returns the tasks with the commits of their datasets on the Hub: those the run began with, or the newest."""
    args, by_name = folder.args, {task.name: task for task in tasks}
    trained = args.chosen_tasks("train_tasks", by_name)
    used, data_dir = {*trained, *args.chosen_tasks("eval_tasks", by_name)}, folder.settings.data_dir
    by_name = {task.name: task for task in get_tasks(folder.settings.tasks)}
    by_name = {name: pinned(task, data_dir) if name in used else task for name, task in by_name.items()}
    found = [pinned_sources(task, by_name, data_dir) if task.name in trained else task for task in by_name.values()]
    folder.pin(revisions(found))
    return found


def load(settings: RunSettings, args: MultiTaskTrainingArguments, tasks: list[Task]) -> dict[str, dict[str, Any]]:
    """Loads the data of a run, for either objective."""
    return (pretraining.load_texts if settings.objective == "mlm" else load_data)(settings, args, tasks)


def load_data(settings: RunSettings, args: MultiTaskTrainingArguments, tasks: list[Task]) -> dict[str, dict[str, Any]]:
    """Loads the data of a run and applies the leak guard.

    Returns:
        `{"train": {task: Dataset}, "dev": {task: Dataset}}` for the trained and evaluated tasks; `scored`, the dev
        rows that the saved model is evaluated on; and `leaks`, the counts of `load_training`.
    """
    by_name, data_dir, strict = {task.name: task for task in tasks}, settings.data_dir, settings.strict_data
    held_out = HeldOut.of_run(tasks, settings.held_out, data_dir)
    train, leaks = load_training(
        by_name, args.chosen_tasks("train_tasks", by_name), data_dir, seed=args.seed, held_out=held_out,
        drop_sentences=settings.drop_shared_sentences, strict=strict, together=args.share_rows,
        keep_unlabelled=args.teachers is not None and not args.share_rows,
    )  # fmt: skip
    evaluated = args.chosen_tasks("eval_tasks", by_name)
    dev, scored = {}, {}
    for name in evaluated:
        rows = load_split(by_name[name], data_dir, "dev", strict=strict)
        dev[name], scored[name] = chosen_and_rest(rows, settings.select_on, name)
    return {"train": train, "dev": dev, "scored": scored, "leaks": leaks}


def model_config(settings: RunSettings, tasks: list[Task]) -> MinBertConfig:
    """Returns the config of the model: the checkpoint's config with the recipe's tasks and changes.

    Raises:
        MinBertError: there is no such checkpoint, a task's head cannot be built, or `max_length` does not fit.
    """
    return arrange(checkpoints_config(settings), settings, tasks)


def checkpoints_config(settings: RunSettings) -> MinBertConfig:
    return load_config(settings.model_name_or_path, settings.model_revision, **settings.dropouts)


def arrange(config: MinBertConfig, settings: RunSettings, tasks: list[Task]) -> MinBertConfig:
    plugins = f" or its plugin {', '.join(map(module_of, settings.plugins))}" if settings.plugins else ""
    with explain("Building the tasks' layers and heads", f"Correct the recipe{plugins}."):
        sharing = {} if settings.private_layers is None else {"private_layers": settings.private_layers}
        config.rearrange(tasks=[task.to_config() for task in tasks], **sharing)
        check_heads(config)
    check_max_length(settings.max_length, config)
    if settings.peft is not None:
        adapters.check(settings.peft, config)
    return config


def load_model(
    settings: RunSettings, config: MinBertConfig, trained: Sequence[str]
) -> tuple[PreTrainedTokenizerBase, MinBertForMultiTask | adapters.AdaptedModel]:
    """Loads the checkpoint's encoder with a head for each task of `config`, in float32, and its tokenizer.

    With `peft`, the model has an adapter: that of the checkpoint, or a new one.

    Args:
        trained: with an adapter, the tasks whose heads are trained.

    Raises:
        MinBertError: the checkpoint lacks a tokenizer or weights of the encoder, or has an adapter of another kind.
    """
    name, revision, attention = settings.model_name_or_path, settings.model_revision, settings.attn_implementation
    tokenizer = load_tokenizer(name, config, revision)
    load = load_weights
    if settings.peft is not None and is_adapter(name, revision):
        adapters.check_same(settings.peft, config, name, revision)
        load = load_adapter
    model, missing = load(name, config, revision, attention)
    check_encoder(name, missing)
    _tell_of_new_weights(name, missing, config.private_owner)
    if settings.peft is not None and isinstance(model, MinBertForMultiTask):
        model = adapters.add_adapter(model, settings.peft, name, revision, trained, missing)
    return tokenizer, model


def _tell_of_new_weights(name: str, missing: list[str], owner: str | None) -> None:
    if any(key.startswith("bert.") and ".pooler." in key for key in missing):
        logger.warning("%s has no pooler. The pooler starts with random weights.", name)
    private = {key.split("private.")[1].split(".")[0] for key in missing if "private." in key}
    if private:
        logger.info("The private layers of %s start as copies of those of %s.", ", ".join(sorted(private)), owner)
    heads = sorted({key.split(".")[1] for key in missing if key.startswith("heads.")})
    if heads:
        logger.info("New heads with random weights: %s.", ", ".join(heads))
