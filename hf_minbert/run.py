"""A recipe carried out: data, model, trainer, and the run's folder.

The folder ends with the model, its tokenizer and `recipe.yaml`, `environment.json` (versions and seed), `log.jsonl`
(every logged value), `predictions/<task>-dev.csv` and, last of all, `metrics.json`: where it stands, the run finished.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedTokenizerBase, ProgressCallback, TrainerCallback, set_seed

from .data.encoding import check_max_length
from .data.files import load_split, pinned
from .errors import MinBertError, explain
from .evaluation.submission import write_predictions
from .io import check_writable, write_atomically, write_json
from .loading import load_config, load_tokenizer, load_weights
from .modeling_minbert import MinBertForMultiTask
from .prediction import Predictor, score
from .recipe import RunSettings, Value, read_recipe, split_recipe, write_recipe
from .tasks import Task, get_tasks, with_revisions
from .training.args import MultiTaskTrainingArguments
from .training.checkpoints import checkpoints, incomplete, newest_complete_checkpoint
from .training.trainer import MultiTaskTrainer

logger = logging.getLogger(__name__)

RUN_FILES = ("metrics.json", "recipe.yaml", "environment.json", "log.jsonl", "model.safetensors", "predictions")
#: Keys that decide which rows a step sees: a run that resumes with another value would be neither run.
FIXED_ON_RESUME = (
    "tasks", "train_tasks", "data_dir", "max_length", "mixing", "task_batch_sizes", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed", "data_seed", "aggregator", "regularizer", "task_weights",
)  # fmt: skip


def train(values: Mapping[str, Value]) -> dict[str, Any]:
    """Carries out a recipe as `read_recipe` read it.

    Returns:
        what `metrics.json` holds; on other processes than the first, an empty dict.

    Raises:
        MinBertError: anything wrong before the first step. Later errors pass as they are.
    """
    # Batches have hundreds of shapes, and cuDNN's attention compiles each anew: minutes a run on new GPUs.
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    with explain("Reading the training arguments", "Mend the recipe."):
        args = MultiTaskTrainingArguments(**given)
        set_seed(args.seed)  # the trainer's own call comes after the new heads are drawn
    if args.process_index > 0:
        _hide_bars()
    tasks = get_tasks(settings.tasks)
    args.check_tasks({task.name: task for task in tasks})
    folder = Path(args.output_dir)
    settings = _as_begun(folder, args, settings)
    if args.should_save:
        _check_folder(folder, args, settings, given)
    settings, tasks = _pin(settings, args)
    data = load_data(settings, args, tasks)
    tokenizer, model = load_model(settings, tasks)
    run_folder = _RunFolder(folder, settings, given, args)
    with explain("Setting up the trainer", "Mend the recipe."):
        trainer = MultiTaskTrainer(
            model,
            args,
            train_dataset=data["train"],
            eval_dataset=data["dev"],
            processing_class=tokenizer,
            max_length=settings.max_length,
            cache_dir=settings.cache_dir,
            callbacks=[run_folder],
        )
    with _told_on_interrupt(folder, args):
        try:
            with _bar_closed(trainer):
                outcome = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or None)
        except Exception as error:
            if run_folder.begun or isinstance(error, MinBertError):
                raise
            with explain("Starting to train", "Mend the recipe."):
                raise
        trainer.save_model()
        metrics = _finish(folder, trainer, outcome.metrics, data["dev"]) if args.should_save else {}
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()  # without it, some runs of several processes end by a signal
    return metrics


# ---- What goes in ------------------------------------------------------------------------------------------------


def _pin(settings: RunSettings, args: MultiTaskTrainingArguments) -> tuple[RunSettings, list[Task]]:
    """The settings with the commits of the datasets that are on the Hub, and the tasks with all that leads there."""
    tasks = {task.name: task for task in get_tasks(settings.tasks)}
    used = {name for option in ("train_tasks", "eval_tasks") for name in args.chosen_tasks(option, tasks)}
    tasks = {name: pinned(task, settings.data_dir) if name in used else task for name, task in tasks.items()}
    commits = {name: task.dataset_revision for name, task in tasks.items() if task.dataset_revision}
    return replace(settings, tasks=with_revisions(settings.tasks, commits)), list(tasks.values())


def load_data(settings: RunSettings, args: MultiTaskTrainingArguments, tasks: list[Task]) -> dict[str, dict[str, Any]]:
    """`{"train": {task: Dataset}, "dev": {task: Dataset}}` of the tasks that are trained and scored."""
    by_name = {task.name: task for task in tasks}
    wanted = {
        "train": args.chosen_tasks("train_tasks", by_name), "dev": args.chosen_tasks("eval_tasks", by_name)
    }  # fmt: skip
    return {
        split: {
            name: load_split(by_name[name], settings.data_dir, split, strict=settings.strict_data) for name in names
        }
        for split, names in wanted.items()
    }


def load_model(settings: RunSettings, tasks: list[Task]) -> tuple[PreTrainedTokenizerBase, MinBertForMultiTask]:
    """The checkpoint's encoder with a head for each task, in float32, and its tokenizer.

    Raises:
        MinBertError: there is no such checkpoint, or it lacks weights of the encoder.
    """
    name, revision = settings.model_name_or_path, settings.model_revision
    dropouts = {key: getattr(settings, key) for key in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
    config = load_config(
        name,
        revision,
        tasks=[task.to_config() for task in tasks],
        **{key: value for key, value in dropouts.items() if value is not None},
    )
    check_max_length(settings.max_length, config.max_position_embeddings)
    tokenizer = load_tokenizer(name, config, revision)
    model, missing = load_weights(name, config, revision, settings.attn_implementation)
    _check_encoder(name, missing)
    return tokenizer, model


def _hide_bars() -> None:
    """Hides the bars of loading and tokenizing, which every process would show."""
    import datasets

    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _check_encoder(name: str, missing: list[str]) -> None:
    encoder = [key for key in missing if not key.startswith("heads.")]
    pooler = [key for key in encoder if ".pooler." in key]
    if encoder != pooler:
        raise MinBertError(
            f"The checkpoint {name!r} lacks {len(encoder)} of the encoder's weights, among them {encoder[0]}: they "
            f"would start from random numbers. Check that it is a BERT checkpoint of the size its config says."
        )
    if pooler:
        logger.warning("%s has no pooler; it starts from random numbers.", name)
    heads = sorted({key.split(".")[1] for key in missing if key.startswith("heads.")})
    if heads:
        logger.info("New heads, from random numbers: %s.", ", ".join(heads))


# ---- The run's folder --------------------------------------------------------------------------------------------


def holds_run(folder: Path) -> bool:
    return bool(checkpoints(folder)) or any((folder / name).exists() for name in RUN_FILES)


def _check_folder(
    folder: Path, args: MultiTaskTrainingArguments, settings: RunSettings, given: dict[str, Any]
) -> None:
    """Refuses a folder that cannot be written, a run that would be lost, and one that cannot be gone on with."""
    if folder.exists() and not folder.is_dir():
        raise MinBertError(f"`output_dir` {folder} is a file. Give the path of a folder.")
    check_writable(folder / "metrics.json")
    if args.resume_from_checkpoint:
        if settings.overwrite:
            raise MinBertError("`overwrite` and `resume_from_checkpoint` exclude each other. Leave one out.")
        _check_checkpoint(folder, args)
        _check_same_run(folder, settings, given, args.world_size)
    elif holds_run(folder) and not settings.overwrite:
        raise MinBertError(
            f"`output_dir` {folder} holds a run already. Go on with it by resume_from_checkpoint=true, delete it by "
            f"overwrite=true, or give another output_dir."
        )


def _check_checkpoint(folder: Path, args: MultiTaskTrainingArguments) -> None:
    remedy = "Leave `resume_from_checkpoint` out to start anew."
    if args.resume_from_checkpoint is True:
        if newest_complete_checkpoint(folder, args.world_size) is None:
            raise MinBertError(f"There is no complete checkpoint in {folder} to resume from. {remedy}")
        return
    checkpoint = Path(args.resume_from_checkpoint)
    problem = incomplete(checkpoint, args.world_size) if checkpoint.is_dir() else "there is no such folder"
    if problem is not None:
        raise MinBertError(f"`resume_from_checkpoint` {checkpoint}: {problem}. {remedy}")


def _as_begun(folder: Path, args: MultiTaskTrainingArguments, settings: RunSettings) -> RunSettings:
    """On resuming, the settings with the commits of the Hub's datasets that the run began with."""
    recipe = folder / "recipe.yaml"
    if not (args.resume_from_checkpoint and recipe.is_file()):
        return settings
    old, _ = split_recipe(read_recipe(recipe), typing.get_type_hints(MultiTaskTrainingArguments))
    return replace(settings, tasks=with_revisions(settings.tasks, _commits(old)))


def _commits(settings: RunSettings) -> dict[str, str]:
    return {task.name: task.dataset_revision for task in get_tasks(settings.tasks) if task.dataset_revision}


def _check_same_run(folder: Path, settings: RunSettings, given: dict[str, Any], world_size: int) -> None:
    recipe, environment = folder / "recipe.yaml", folder / "environment.json"
    if not (recipe.is_file() and environment.is_file()):
        return  # a checkpoint from elsewhere
    old_settings, old_given = split_recipe(read_recipe(recipe), typing.get_type_hints(MultiTaskTrainingArguments))
    defaults = {f.name: f.default for f in fields(MultiTaskTrainingArguments)}
    old, new = {**defaults, **vars(old_settings), **old_given}, {**defaults, **vars(settings), **given}
    old["number of processes"] = json.loads(environment.read_text(encoding="utf-8"))["processes"]
    new["number of processes"] = world_size
    for key in (*FIXED_ON_RESUME, "number of processes"):
        same = old[key] == new[key]
        if not same and not (key == "tasks" and get_tasks(old[key]) == get_tasks(new[key])):
            raise MinBertError(
                f"The run in {folder} was started with {key} = {old[key]} and cannot be resumed with "
                f"{new[key]}: steps would see other rows. Keep the old value, or start anew."
            )


def _take_folder(folder: Path, settings: RunSettings, given: dict[str, Any], args: MultiTaskTrainingArguments) -> None:
    """Makes the folder this run's: deletes what is left of an older run, unless this one goes on with it."""
    if args.resume_from_checkpoint:
        (folder / "metrics.json").unlink(missing_ok=True)  # it says that the run finished
    else:
        for path in [*checkpoints(folder), *(folder / name for name in RUN_FILES)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept = {key: value for key, value in given.items() if key != "resume_from_checkpoint"}
    settings = replace(settings, overwrite=False)  # the recipe of a run never deletes a run
    write_recipe(folder / "recipe.yaml", settings, kept)
    write_json(folder / "environment.json", {**_environment(args), "datasets": _commits(settings)})


def _environment(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    packages = ("hf_minbert", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else platform.processor() or "cpu"
    return {
        "seed": args.seed,
        "processes": args.world_size,
        "device": device,
        "python": platform.python_version(),
        "versions": versions,
    }


def _finish(folder: Path, trainer: MultiTaskTrainer, training: dict[str, Any], dev: dict[str, Any]) -> dict[str, Any]:
    """Scores the saved model, as anybody who loads it will, and writes what the run came to."""
    predictor = Predictor.from_pretrained(folder, batch_size=trainer.args.per_device_eval_batch_size)
    scores, decoded = score(predictor, dev, progress=not trainer.args.disable_tqdm)
    for name, rows in dev.items():
        write_predictions(folder / "predictions" / f"{name}-dev.csv", predictor.task(name), rows["id"], decoded[name])
    state = trainer.state
    metrics = {
        **{f"eval_{name}": value for name, value in scores.items()},
        **training,
        "global_step": state.global_step,
        "best_step": state.best_global_step if state.best_metric is not None else None,
        "best_metric": state.best_metric,
        "metric_for_best_model": trainer.args.metric_for_best_model,
        "seed": trainer.args.seed,
    }
    write_json(folder / "metrics.json", metrics)
    return metrics


# ---- Watching the run --------------------------------------------------------------------------------------------


class _RunFolder(TrainerCallback):
    """Takes the run's folder at the first step, then writes every logged entry there as a line of JSON.

    Not earlier: what fails before it is a matter of the recipe, and leaves the folder as it was.
    """

    def __init__(self, folder: Path, settings: RunSettings, given: dict[str, Any], args: MultiTaskTrainingArguments):
        self.folder, self.settings, self.given, self.args = folder, settings, given, args
        self.begun = False

    def on_step_begin(self, args, state, control, **kwargs):
        if self.begun:
            return
        self.begun = True
        if state.is_world_process_zero:
            _take_folder(self.folder, self.settings, self.given, self.args)
            earlier = [f"{json.dumps(entry)}\n" for entry in state.log_history]  # up to the checkpoint, if resumed
            write_atomically(self.folder / "log.jsonl", "".join(earlier))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.begun and state.is_world_process_zero and state.log_history:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(state.log_history[-1])}\n")


@contextmanager
def _bar_closed(trainer: MultiTaskTrainer) -> Iterator[None]:
    """Ends the line of the progress bar whatever happens: what is printed next would stand behind it."""
    try:
        yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.close()


@contextmanager
def _told_on_interrupt(folder: Path, args: MultiTaskTrainingArguments) -> Iterator[None]:
    """On Ctrl-C, says what was saved and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = newest_complete_checkpoint(folder, args.world_size)
        if checkpoint is None:
            logger.warning("No checkpoint was saved.")
        else:
            logger.warning(
                "The newest complete checkpoint is %s. Go on with the same command and resume_from_checkpoint=true.",
                checkpoint,
            )
        raise
