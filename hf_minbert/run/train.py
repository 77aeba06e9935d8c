"""Carries out a recipe: data, model, training, scores."""

from __future__ import annotations

import logging
import math
import typing
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, set_seed

from ..data.rows import tag_rows
from ..errors import DivergedError, MinBertError, explain
from ..evaluation.analysis import baseline
from ..evaluation.calibration import skipped, to_fit
from ..evaluation.metrics import has_diverged
from ..evaluation.submission import ending, write_predictions
from ..io import write_json
from ..model.configuration_minbert import MinBertConfig
from ..model.inference import length_of
from ..model.library import parts_of
from ..pretrained import adapters
from ..pretrained.data import CALIBRATION
from ..pretrained.prediction import Predictor, score
from ..pretrained.teachers import teacher_logits
from ..settings import plugins
from ..settings.dotted import Value
from ..settings.recipe import split_recipe, with_teachers_read
from ..settings.run import RunSettings
from ..settings.table import names
from ..settings.tasks import Task, get_tasks
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import is_worthless
from ..training.distributed import check_alike, is_lost, report_interruption
from ..training.freezing import check_layers
from ..training.terms.registry import terms_of
from ..training.timeline import Timeline, part
from ..training.trainer import MultiTaskTrainer
from . import pretraining
from .bars import bar_closed, hide_bars
from .calibrate import answers_of, calibrate
from .folder import AVERAGED, RunFolder
from .inputs import arrange, checkpoints_config, load, load_model, model_config, pinned_tasks
from .pairs import with_new_pairs
from .stages import OF_ALL, Stage, carry_out, plan, with_later_held_out
from .teachers import ANSWERS, Teachers

logger = logging.getLogger(__name__)


def train(
    values: Mapping[str, Value],
    callbacks: Sequence[TrainerCallback] = (),
    timeline: Timeline | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Trains and evaluates a recipe from `read_recipe`, stage by stage if it has stages.

    Args:
        callbacks: callbacks of the trainer, in each stage.
        timeline: the timeline of the first stage, if its time began before this call. Every other stage has its own.
        jobs: how many of the recipe's teachers are trained at a time.

    Returns:
        the contents of `metrics.json`; on processes other than the first, an empty dict.

    Raises:
        MinBertError: there is an error before the first step. Later errors pass unchanged.
        DivergedError: training has ended, and its last weights or outputs are not finite. All processes raise it. If
            an earlier model is the best one, the run is still written completely.
    """
    plugins.load_named(values)
    values = with_teachers_read(values)  # their files may change while they are trained
    timelines = iter([] if timeline is None else [timeline])
    stages, teachers, late = _plan_together(values), Teachers(values, jobs), []

    def run(
        stage: Mapping[str, Value], more: Sequence[TrainerCallback] = (), behind_stage: bool = False
    ) -> dict[str, Any]:
        timeline = next(timelines, None) or Timeline()
        with timeline.active():
            metrics, said = _train(stage, teachers, [*callbacks, *more], behind_stage, timeline)
        late.extend(said)
        return metrics

    try:
        metrics = carry_out(values, stages, run) if stages else run(values)
    except DivergedError:
        _leave_processes()
        raise
    _leave_processes()
    if late:
        raise DivergedError(" ".join(late))
    return metrics


def _leave_processes() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # without it, some runs of several processes end by a signal


def _plan_together(values: Mapping[str, Value]) -> list[Stage]:
    """Returns the stages of a recipe, if it has some, after the checks of all stages.

    All processes return or all raise.
    """
    stages, error = plan(values), None
    if not stages:
        return []
    # Each run compares its own recipe too, but a later one only after hours.
    words = {key: given.value for key, given in values.items() if key in OF_ALL and key != "stages"}
    words |= {f"stages.{each.name}.{key}": given.value for each in stages for key, given in each.values.items()}
    try:
        check_stages(stages)
        stages = with_later_held_out(stages)
    except MinBertError as found:
        error = found
    own = names(scope=("machine", "secret"))
    check_alike({key: word for key, word in words.items() if key.split(".")[-1] not in own}, {}, error)
    return stages


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises `MinBertError` for errors in tasks, heads, layers and data of later stages, before the first begins."""
    if any(stage.args.push_to_hub for stage in stages):
        raise MinBertError(
            "`push_to_hub` would upload each stage by itself. Leave it out, and upload the whole with `minbert "
            "publish`."
        )
    config, before = None, None
    for number, stage in enumerate(stages, 1):
        settings, tasks = stage.settings, get_tasks(stage.settings.tasks)
        try:
            _check(settings, stage.args, tasks)
            # What a stage begins with is not there yet, but its shape is known: that which the one before ends with.
            begins = before is None or settings.model_name_or_path != str(before.folder)
            config = _config(settings, stage.args, tasks, None if begins else config)
            if not begins:
                adapters.check_follows(before.settings, settings, config)
            if before is not None:
                with _unheard():  # what there is to say is said when the stage begins
                    load(settings, stage.args, tasks)
        except MinBertError as error:
            raise MinBertError(f"Stage {number} ({stage.name}): {error}") from error
        before = stage


@contextmanager
def _unheard() -> Generator[None]:
    """Within this context, the package logs only errors."""
    log = logging.getLogger(__package__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _config(
    settings: RunSettings, args: MultiTaskTrainingArguments, tasks: list[Task], config: MinBertConfig | None = None
) -> MinBertConfig:
    """Returns the config of the model that a run trains, for either objective. Raises the errors of `model_config`.

    Args:
        config: the checkpoint's config, if the checkpoint does not exist yet.
    """
    if settings.objective == "mlm":
        return pretraining.arrange(checkpoints_config(settings) if config is None else config, settings)
    config = model_config(settings, tasks) if config is None else arrange(config, settings, tasks)
    _check_encoder(args, config)
    return config


def _check_encoder(args: MultiTaskTrainingArguments, config: MinBertConfig) -> None:
    """Raises `MinBertError` if the arguments need more layers, or other inputs, than the encoder has."""
    if config.encoder_config is None:
        return check_layers(args.freeze, args.unfreeze, config.num_hidden_layers)
    parts, of = parts_of(config.encoder_config), f"an encoder of the library's ({config.family})"
    check_layers(args.freeze, args.unfreeze, len(parts.layers))
    if args.packing:
        raise MinBertError(f"`packing: true` is for the hand-written encoder; {of} computes on padding. Leave it out.")
    for term in terms_of(args):
        for name in {*term.needs} - parts.accepts:
            raise MinBertError(f"`regularizer: {term.name}` needs `{name}`, which {of} does not take. Leave it out.")
    if args.regularizer == "smart" and args.smart_form != "paper" and not parts.embeddings:
        raise MinBertError(
            f"`smart_form: {args.smart_form}` moves the input of the first layer, which no module of {of} gives in "
            "the size of words. Use `paper`."
        )


def _train(
    values: Mapping[str, Value],
    teachers: Teachers,
    callbacks: Sequence[TrainerCallback],
    behind_stage: bool,
    timeline: Timeline,
) -> tuple[dict[str, Any], list[str]]:
    """Carries out one run, possibly after another stage. Raises the errors of `train`.

    Returns:
        on the first process, the contents of `metrics.json`; and on all processes, a sentence if the run diverged
        after its best model.
    """
    # Batches have hundreds of shapes, and cuDNN's attention compiles each anew: minutes a run on new GPUs.
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    with explain("Reading the training arguments", "Correct the recipe."):
        args = MultiTaskTrainingArguments(**given)
        set_seed(args.seed)  # the trainer's own call comes after the new heads are drawn
    if args.process_index > 0:
        hide_bars()
    launched = {key: True for key in ("bf16", "fp16") if getattr(args, key)}  # perhaps by the launcher alone
    folder = RunFolder(settings, {**given, **launched}, args)
    with report_interruption(args, lambda: folder.begun, behind_stage):
        config, data = _prepare_together(folder, teachers)
        if settings.objective == "mlm":
            trainer = pretraining.make_trainer(settings, args, config, data, [*callbacks, folder, timeline])
        else:
            trainer = _make_trainer(folder.settings, args, config, data, [*callbacks, folder, timeline], teachers)
        metrics = _train_and_score(folder, trainer, data, timeline, teachers)
        # The first process alone has scores. All wait for it here.
        diverged = torch.tensor([has_diverged(metrics), _diverged_late(trainer)], dtype=torch.float32)
        model, later = trainer.accelerator.reduce(diverged.to(args.device), "sum").tolist()
        if model:
            raise DivergedError(
                f"Training diverged: outputs or weights of the model in {folder.path} are not finite, so it gives no "
                "answers. Lower `learning_rate`, or clip gradients with `max_grad_norm`."
            )
        if args.push_to_hub:
            trainer.push_to_hub()
    said = (
        f"Training diverged: at its end predictions were not finite. The model in {folder.path} is that of step "
        f"{trainer.state.best_global_step}, the best one before that, and can be used. Lower `learning_rate`."
    )
    return metrics, [said] if later else []


def _diverged_late(trainer: Trainer) -> bool:
    """Whether the model is an earlier one, as what came after it was not finite."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_runtime" in entry]
    return trainer.args.load_best_model_at_end and bool(evaluations) and is_worthless(evaluations[-1], trainer.args)


def _prepare_together(folder: RunFolder, teachers: Teachers) -> tuple[MinBertConfig, dict[str, Any]]:
    """Calls `_prepare`. If it fails on one process, all processes raise."""
    prepared, found, error = None, {}, None
    try:
        config, data = prepared = _prepare(folder, teachers)
        if folder.args.world_size > 1:
            shape = {key: repr(value) for key, value in config.to_dict().items() if key != "_name_or_path"}
            found = {f"the model's `{key}`": value for key, value in shape.items()} | folder.digests(data)
    except MinBertError as raised:
        error = raised
    check_alike(folder.shared_recipe(), found, error)  # which raises the error
    assert prepared is not None
    return prepared


def _prepare(folder: RunFolder, teachers: Teachers) -> tuple[MinBertConfig, dict[str, Any]]:
    """The config of the model to train, and its data, after all that can be checked before weights load."""
    settings, args = folder.settings, folder.args
    tasks = get_tasks(settings.tasks)
    _check(settings, args, tasks)
    if args.teachers and settings.objective == "tasks":
        by_name = {task.name: task for task in tasks}
        trained = {name: by_name[name] for name in args.chosen_tasks("train_tasks", by_name)}
        teachers.check(args.teachers, trained, args.world_size)
    if args.resume_from_checkpoint is True and teachers.were_interrupted(folder):
        args.resume_from_checkpoint = None
    folder.pin(folder.commits())
    if args.should_save:
        folder.check()
    config = _config(settings, args, tasks)
    tasks = pinned_tasks(tasks, folder)
    with part("data"):
        data = load(folder.settings, args, tasks)
        if args.should_save:
            folder.check_rows(data["train"])
    return config, data


def _train_and_score(
    folder: RunFolder, trainer: Trainer, data: Mapping[str, Any], timeline: Timeline, teachers: Teachers
) -> dict[str, Any]:
    """What `metrics.json` holds, on the first process."""
    args = folder.args
    try:
        with bar_closed(trainer):
            outcome = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or None)
    except Exception as error:
        if folder.begun or isinstance(error, MinBertError) or is_lost(error):
            raise
        with explain("Starting to train", "Correct the recipe."):
            raise
    timeline.begin("files")
    trainer.save_model(_internal_call=True)  # a push comes last, with the scores
    if isinstance(trainer, MultiTaskTrainer) and trainer.proximal is not None and args.proximal_evaluate is True:
        with trainer.proximal.in_place():
            trainer.save_model(str(folder.path / AVERAGED), _internal_call=True)
    metrics = {}
    if args.should_save:
        of_tasks = {}
        if isinstance(trainer, MultiTaskTrainer):
            of_tasks = {**_score(folder, trainer, data["scored"]), "leaks": data["leaks"]}
            of_tasks |= _rows_and_baselines(trainer, data)
            of_tasks |= {"teachers": teachers.times(args.teachers)} if args.teachers else {}
            of_tasks["unknown_tokens"] = trainer.unknown_tokens
        metrics = _finish(folder.path, trainer, {**of_tasks, **outcome.metrics}, timeline)
    return metrics


def _check(settings: RunSettings, args: MultiTaskTrainingArguments, tasks: Sequence[Task]) -> None:
    by_name = {task.name: task for task in tasks}
    if settings.peft is not None:
        adapters.check_run(settings, args)
    if settings.objective == "mlm":
        pretraining.check(args, by_name)
    else:
        args.check_tasks(by_name)
        if any((asked := _asked(settings)).values()):
            scored = [by_name[name] for name in args.chosen_tasks("eval_tasks", by_name)]
            to_fit(scored, *asked.values(), remedy="Leave `calibrate` and `tune_thresholds` out.")
            for sentence in skipped(scored, *asked.values()):
                logger.info(sentence)


def _make_trainer(
    settings: RunSettings,
    args: MultiTaskTrainingArguments,
    config: MinBertConfig,
    data: Mapping[str, Mapping[str, Any]],
    callbacks: Sequence[TrainerCallback],
    teachers: Teachers,
) -> MultiTaskTrainer:
    tasks = [Task.from_config(saved) for saved in config.tasks or ()]
    trained = args.chosen_tasks("train_tasks", {task.name: task for task in tasks})
    train = data["train"]
    kept = Path(settings.cache_dir) if settings.cache_dir else teachers.folder / ANSWERS
    if args.teachers:  # before the student takes any memory
        with part("teachers"):
            teachers.train(args.teachers)
            train = with_new_pairs(train, get_tasks(settings.tasks), settings, kept)
    with part("model"):
        tokenizer, model = load_model(settings, config, trained)
    if settings.max_length is None and length_of(config) < config.max_position_embeddings:
        said = "Inputs are cut to %d tokens, as in the training of %s; `max_length` sets another length."
        logger.info(said, length_of(config), settings.model_name_or_path)
    taught = None
    if args.teachers:
        with part("teachers"):
            taught = teacher_logits(teachers.folders(args.teachers), tasks, train, kept)
    with explain("Setting up the trainer", "Correct the recipe."):
        return MultiTaskTrainer(
            model,
            args,
            teacher_logits=taught,
            train_dataset=train,
            eval_dataset=data["dev"],
            processing_class=tokenizer,
            max_length=settings.max_length,
            cache_dir=settings.cache_dir,
            callbacks=[*callbacks],
        )


# ---- What comes out ---------------------------------------------------------------------------------------------


@part("scores")
def _score(run: RunFolder, trainer: MultiTaskTrainer, dev: dict[str, Any]) -> dict[str, float]:
    """Scores the saved model, as anybody who loads it will, and writes its predictions; calibrates it before."""
    folder, args, asked = run.path, run.args, _asked(run.settings)
    size, shown = args.per_device_eval_batch_size, not args.disable_tqdm
    predictor = Predictor.from_pretrained(folder, batch_size=size)
    (folder / CALIBRATION).unlink(missing_ok=True)  # of the model that a resumed run had before
    if any(asked.values()):
        for name, of in calibrate(folder, predictor, dev, **asked, progress=shown).items():
            for note in of["notes"]:
                logger.warning("%s: %s", name, note)
        for name, task in predictor.tasks.items():  # a push saves the model once more
            cast(MinBertConfig, trainer.model.config).get_task(name).update(answers_of(task))
    scores, decoded = score(predictor, dev, progress=shown)
    for name, found in decoded.items():
        task, columns = predictor.task(name), dev[name][:]
        file = folder / "predictions" / f"{name}-dev{ending(task)}"
        with part("files"):
            write_predictions(file, task, columns["id"], found, columns[task.text_columns[0]])
    if args.proximal_evaluate is True:
        averaged, _ = score(Predictor.from_pretrained(folder / AVERAGED, batch_size=size), dev, progress=shown)
        scores |= {f"averaged_{name}": value for name, value in averaged.items()}
    return {f"eval_{name}": value for name, value in scores.items()}


def _rows_and_baselines(trainer: MultiTaskTrainer, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of training and evaluation rows of each task, and baseline scores on the latter.

    Training rows without labels are counted by their origin: the task's own rows, files, and new pairs.
    """
    tasks = trainer.tasks
    rows: dict[str, Any] = {"train": {}, "dev": {task: len(of) for task, of in data["scored"].items()}}
    for name, of in data["train"].items():
        blank = sum(label is None for label in of[:]["label"])
        rows["train"][name] = len(of) - blank
        if name in trainer.unlabelled:
            read = data["leaks"].get("unlabelled", {}).get(name, {"rows": 0, "dropped": 0})
            files, pairs = read["rows"] - read["dropped"], len(trainer.unlabelled[name]) - blank
            found = {"own": blank - files, "files": files, "pairs": pairs}
            rows.setdefault("unlabelled", {})[name] = found
    baselines = {}
    for name, of in data["scored"].items():
        task, columns = tasks[name], of[:]
        labels = tag_rows(columns["label"]) if task.traits.is_tags else np.asarray(columns["label"])
        pairs = list(zip(*(columns[text] for text in task.text_columns), strict=True)) if task.is_pair else ()
        baselines[name] = baseline(task, labels, pairs)
    return {"rows": rows, "baselines": baselines}


def _asked(settings: RunSettings) -> dict[str, Any]:
    """What a recipe asks `calibrate` for."""
    return {"temperature": settings.calibrate == "temperature", "thresholds": settings.tune_thresholds}


def _training_scores(trainer: Trainer) -> dict[str, float]:
    """With `train_metrics`, returns the scores on the training rows of the kept model's epoch, or the last."""
    state = trainer.state
    scored = {entry["step"]: entry for entry in state.log_history if "train_overall" in entry}
    if not scored:
        return {}
    kept = state.best_global_step if trainer.args.load_best_model_at_end else None
    entry = scored.get(kept, scored[max(scored)])
    return {name: value for name, value in entry.items() if name.startswith("train_")}


def _is_finite(model: torch.nn.Module | None) -> bool:
    return model is None or all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _finish(folder: Path, trainer: Trainer, found: dict[str, Any], timeline: Timeline) -> dict[str, Any]:
    """Writes what the run came to."""
    state = trainer.state
    metrics = {
        **_training_scores(trainer),
        **found,
        "global_step": state.global_step,
        "best_step": state.best_global_step if state.best_metric is not None else None,
        "best_metric": state.best_metric,
        "metric_for_best_model": trainer.args.metric_for_best_model,
        "seed": trainer.args.seed,
    }
    if has_diverged(found) or not _is_finite(trainer.model) or not math.isfinite(found.get("eval_loss", 0.0)):
        metrics["diverged"] = True
    metrics["timeline"] = timeline.record()
    write_json(folder / "metrics.json", metrics)
    return metrics
