"""Further pre-training: a run with `objective: mlm` trains the encoder to predict masked words in the tasks' texts.

(Devlin et al. 2019, arXiv:1810.04805; further on a task's texts: Sun et al. 2019, arXiv:1905.05583; Gururangan et al.
2020, arXiv:2004.10964.) There is one task, so the stock Trainer is used, without rounds and aggregators. The run's
folder has an ordinary checkpoint with encoder, pooler and word head, from which the next run starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback
from transformers.trainer_pt_utils import AcceleratorConfig

from ..data.encoding import check_max_length, encode
from ..data.files import load_split
from ..data.leaks import HeldOut, drop_leaks, load_training
from ..data.masking import HeldOutTexts, MaskingCollator, TrainingTexts
from ..errors import MinBertError, explain, unknown_name
from ..model.configuration_minbert import MinBertConfig
from ..model.modeling_minbert import MinBertForMaskedLM
from ..model.spans import as_read
from ..pretrained.loading import check_encoder, load_masked_lm, load_tokenizer
from ..settings.keys import default_of
from ..settings.run import RunSettings
from ..settings.table import names
from ..settings.tasks import Task
from ..settings.training import TrainingKeys
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import flow_callbacks
from ..training.data import data_seed_of
from ..training.timeline import part
from ..training.trainer import compile_layers
from .masked_lm import METRICS, MaskedLMTrainer

logger = logging.getLogger(__name__)

TASKS = "tasks"  # of `mlm_texts`
#: What `encode` takes: a text, and no label.
TEXT = Task("texts", "score", ("text",), range=(0, 1))


def check(args: MultiTaskTrainingArguments, tasks: Mapping[str, Task]) -> None:
    """Checks the arguments of a run with `objective: mlm`.

    Raises:
        MinBertError: a task or a metric is unknown, or something is to be frozen.
    """
    for option in ("train_tasks", "eval_tasks"):
        args.chosen_tasks(option, tasks)
    if args.freeze != "none":
        raise MinBertError(
            f"`objective: mlm` trains the whole encoder. Found `freeze: {args.freeze}`. Set `freeze: none`, or leave "
            "it out."
        )
    metric = args.metric_for_best_model
    chosen = metric not in (None, "eval_overall")  # what the arguments say where nobody chose
    if chosen and metric.removeprefix("eval_") not in METRICS:
        raise MinBertError(f"`objective: mlm`: {unknown_name('metric_for_best_model', metric, METRICS)}")


def without_effect(args: MultiTaskTrainingArguments) -> list[str]:
    """Returns those of our own training arguments that are set and have no effect in this run."""
    given = {f.name for f in fields(TrainingKeys) if getattr(args, f.name) != default_of(f)}
    return sorted(names(among=given, objectives="tasks"))


def arrange(config: MinBertConfig, settings: RunSettings) -> MinBertConfig:
    """Removes the tasks and the input length, which belongs to tasks, from the config of the checkpoint's encoder.

    Raises:
        MinBertError: it has private layers, or `max_length` does not fit.
    """
    if config.encoder_config is not None:
        raise MinBertError(
            f"`objective: mlm` trains the hand-written encoder, and {settings.model_name_or_path!r} has one of the "
            f"library's ({config.family}). Leave the stage out, or start from a checkpoint of a BERT or its relatives."
        )
    if config.private_owner is not None:
        raise MinBertError(
            f"`objective: mlm` trains one encoder, and some of the layers of {settings.model_name_or_path!r} are for "
            "each task alone. Start from a plain encoder."
        )
    config.rearrange(tasks=None, max_input_length=None, private_layers=0, private_encoders=False)
    check_max_length(settings.max_length, config)
    return config


# ---- The texts -----------------------------------------------------------------------------------------------------


def load_texts(
    settings: RunSettings, args: MultiTaskTrainingArguments, tasks: Sequence[Task]
) -> dict[str, dict[str, Any]]:
    """Loads the texts to train on and those to evaluate on, as datasets with the column `text`.

    The two sentences of a pair are separate texts. Each text occurs once, under the first source that has it. Texts of
    dev or test rows are not trained on, so that the encoder is evaluated on unseen texts.

    Returns:
        `train`, the texts of each source; `dev`, the texts of each task; and `leaks`, the counts of `drop_leaks` for
        each source.

    Raises:
        MinBertError: a file cannot be read, or there are no texts.
    """
    by_name = {task.name: task for task in tasks}
    trained, scored = (args.chosen_tasks(option, by_name) for option in ("train_tasks", "eval_tasks"))
    texts: dict[str, list[str]] = {}
    for source in settings.mlm_texts:
        if source == TASKS:
            # Nothing is held out yet: rows may stay that share a sentence with dev rows, and texts may not.
            rows, _ = load_training(
                by_name, trained, settings.data_dir, seed=args.seed, held_out=HeldOut(), strict=settings.strict_data
            )
            texts |= {name: _columns(rows[name], by_name[name]) for name in trained}
        else:
            texts[source] = _lines(source, settings.data_dir)
    held_out = HeldOut.of_run(tasks, settings.held_out, settings.data_dir)
    guarded = {source: drop_leaks(found, held_out, True) for source, found in _each_once(texts).items()}
    train = {source: _dataset(found) for source, (found, _) in guarded.items() if found}
    if not train:
        raise MinBertError(
            f"`mlm_texts`: all texts of {', '.join(texts)} are also in dev or test rows. Name other texts."
        )
    dev = {name: load_split(by_name[name], settings.data_dir, "dev", strict=settings.strict_data) for name in scored}
    dev = _each_once({name: _columns(rows, by_name[name]) for name, rows in dev.items()})
    leaks = {source: counts for source, (_, counts) in guarded.items()}
    return {"train": train, "dev": {name: _dataset(found) for name, found in dev.items()}, "leaks": leaks}


def _columns(rows: Any, task: Task) -> list[str]:
    columns = rows[:]  # as lists: a column by itself is read row by row
    return [as_read(text) for column in task.text_columns for text in columns[column]]


def _lines(name: str, data_dir: str | None) -> list[str]:
    """The lines of a text file, looked for in `data_dir` and in the working directory."""
    beside = Path(data_dir or "") / name
    path = beside if beside.is_file() else Path(name)
    with explain(
        f"`mlm_texts`: reading {name}", f"Give `{TASKS}`, or the path of a UTF-8 file with one text per line."
    ):
        return path.read_text(encoding="utf-8-sig").split("\n")


def _each_once(sources: Mapping[str, list[str]]) -> dict[str, list[str]]:
    seen: set[str] = {""}
    kept = {}
    for source, texts in sources.items():
        new = [text for text in dict.fromkeys(text.strip() for text in texts) if text not in seen]
        seen.update(new)
        if new:
            kept[source] = new
    if not kept:
        raise MinBertError(f"`mlm_texts`: there is no text in {', '.join(sources)}. Name a source that has some.")
    return kept


def _dataset(texts: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": texts})


# ---- The trainer ---------------------------------------------------------------------------------------------------


def make_trainer(
    settings: RunSettings,
    args: MultiTaskTrainingArguments,
    config: MinBertConfig,
    data: Mapping[str, Mapping[str, Any]],
    callbacks: Sequence[TrainerCallback],
) -> MaskedLMTrainer:
    """Makes the trainer for the texts of `load_texts`. Logs which arguments have no effect and which weights are new.

    Raises:
        MinBertError: the checkpoint lacks a tokenizer with a mask token, or weights of the encoder.
    """
    name, revision = settings.model_name_or_path, settings.model_revision
    tokenizer = load_tokenizer(name, config, revision)
    length = check_max_length(settings.max_length, config, tokenizer=tokenizer)
    with part("tokens"):
        train, dev = (
            encode(_joined(data[split]), TEXT, tokenizer, length, settings.cache_dir) for split in ("train", "dev")
        )
    sizes, held_out = ({source: len(texts) for source, texts in data[split].items()} for split in ("train", "dev"))
    fill_to = length if args.uses_graphs else None
    collator = MaskingCollator(tokenizer, settings.mlm_probability, settings.mlm_whole_words, args.packing, fill_to)
    with part("model"):
        model = _load_model(settings, config)
    _prepare_arguments(args)
    if args.compile_layers:
        compile_layers(model)
    in_sequence = settings.mlm_order == "sequence"
    order = [*sizes.values()] if in_sequence else [len(train)]
    with explain("Setting up the trainer", "Correct the recipe."):
        trainer = MaskedLMTrainer(
            model,
            args,
            train_dataset=TrainingTexts(train, order, _epochs(args, len(train)), data_seed_of(args)),
            eval_dataset=HeldOutTexts(dev),
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[*callbacks, *flow_callbacks(args)],
            held_out=held_out,
            about={"train_texts": sizes, "held_out_texts": held_out, "leaks": data["leaks"]},
        )
    _tell_of_texts(sizes, data["leaks"])
    return trainer


def _prepare_arguments(args: MultiTaskTrainingArguments) -> None:
    """Logs which arguments have no effect, and adapts those that name tasks."""
    if idle := without_effect(args):
        logger.warning("No effect with `objective: mlm`: %s.", ", ".join(f"`{key}`" for key in idle))
    if args.metric_for_best_model is not None:
        args.metric_for_best_model, args.greater_is_better = "eval_loss", False
    if args.device.type != "cuda":
        # For a GPU: elsewhere torch warns. The stock constructor made an object of whatever the recipe says.
        args.dataloader_pin_memory = cast(AcceleratorConfig, args.accelerator_config).non_blocking = False


def _tell_of_texts(sizes: Mapping[str, int], leaks: Mapping[str, Mapping[str, Any]]) -> None:
    logger.info("Texts to pre-train on: %s.", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    dropped = {name: counts["dropped"] for name, counts in leaks.items() if counts["dropped"]}
    if dropped:
        said = ", ".join(f"{count:,} of {name}" for name, count in dropped.items())
        logger.info("Texts that are also in dev or test rows, and are not trained on: %s.", said)


def _joined(sources: Mapping[str, Any]) -> Any:
    import datasets

    return datasets.concatenate_datasets([*sources.values()])


def _epochs(args: MultiTaskTrainingArguments, texts: int) -> float:
    """How often each text is seen."""
    if args.max_steps <= 0:
        return args.num_train_epochs
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return args.max_steps * per_step / texts


def _load_model(settings: RunSettings, config: MinBertConfig) -> MinBertForMaskedLM:
    name = settings.model_name_or_path
    model, missing = load_masked_lm(name, config, settings.model_revision, settings.attn_implementation)
    check_encoder(name, missing)
    if any(key.startswith("cls.") for key in missing):
        logger.warning(
            "%s has no head that predicts words. The new head starts from random numbers, so the perplexity starts "
            "high.",
            name,
        )
    if model.bert.pooler is not None:
        # The loss does not reach it.
        model.bert.pooler.requires_grad_(False)
    return model
