"""Checkpoints: how they are written, which of them are complete, and which one to resume from."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..errors import MinBertError
from ..evaluation.metrics import has_diverged
from ..io import INDEX, whole_safetensors
from .aggregation.conflicts import is_whole
from .base_args import BaseArguments
from .timeline import part

if TYPE_CHECKING:
    from .balancing import Balancing
    from .gradients import Gradients

logger = logging.getLogger(__name__)

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
TEACHER = "teacher.safetensors"  # of `proximal`
AGGREGATOR = "aggregator.pt"  # of one that sees each task's gradient
BALANCING = "task_weights.pt"  # of those that follow the losses


class WholeCheckpoints(Trainer):
    """A trainer that writes complete checkpoints of several processes and resumes from them.

    `trainer_state.json` is written last, after the files of all processes. A folder with this file is complete.
    """

    @part("checkpoints")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:  # leftovers of an interrupted run must not be taken for files of this one
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        # The stock state has the callbacks of the checkpoint that it was loaded from, and lacks those that are new.
        callbacks: list[Any] = [
            c for c in (*self.callback_handler.callbacks, self.control) if isinstance(c, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=callbacks).stateful_callbacks
        super()._save_checkpoint(model, trial)

    @part("checkpoints")
    def _load_best_model(self) -> None:
        super()._load_best_model()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As the stock one; but what a diverged model scores is not compared, be it the first evaluation."""
        return not is_worthless(metrics, self.args) and super()._determine_best_metric(metrics, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Else the first process deletes older checkpoints while this one may never be complete.
        self.accelerator.wait_for_everyone()

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        """Does the same as the stock method, which takes a step before it checks whether the resumed run had ended."""
        out_of_patience = any(
            each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in self.callback_handler.callbacks
            if isinstance(each, transformers.EarlyStoppingCallback)
        )
        if self.state.global_step >= self.state.max_steps or out_of_patience:
            logger.info("Training had already ended at step %d.", self.state.global_step)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **named)


class SavesAfterEpoch(TrainerCallback):
    """Delays the checkpoint of an epoch's last step until the evaluation at the epoch's end has been logged.

    A run that resumes from it begins with the next epoch. Without the delay, the scores would be missing, and so would
    the random numbers that the evaluation drew.
    """

    def __init__(self):
        self.is_due = False

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save and is_whole(state.epoch):
            control.should_save, self.is_due = False, True

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save |= self.is_due
        self.is_due = False


class TakesChanges(TrainerCallback):
    """Applies changed settings of a resumed run at the point where the stock loop restores the checkpoint's state."""

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        state.compute_steps(args, state.max_steps)  # between two logs, evaluations, checkpoints
        if state.global_step and isinstance(lr_scheduler, LambdaLR):
            # Else the first step has the rate of the old schedule, which the optimizer was saved with.
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()


def is_worthless(metrics: Mapping[str, float], args: TrainingArguments) -> bool:
    """Whether an evaluation belongs to a diverged model: predictions or the selection metric are not finite."""
    chosen = f"eval_{(args.metric_for_best_model or 'overall').removeprefix('eval_')}"
    return has_diverged(metrics) or not math.isfinite(metrics.get(chosen, 0.0))


class EarlyStoppingCallback(transformers.EarlyStoppingCallback):
    """The stock callback with two differences.

    A resumed run uses its own patience and threshold; the stock callback uses those of the checkpoint. A diverged
    model is never better.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.early_stopping_patience = args.early_stopping_patience
        self.early_stopping_threshold = args.early_stopping_threshold
        super().on_train_begin(args, state, control, **kwargs)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if not is_worthless(metrics, args):
            super().on_evaluate(args, state, control, metrics, **kwargs)
            return
        self.early_stopping_patience_counter += 1
        control.should_training_stop |= self.early_stopping_patience_counter >= self.early_stopping_patience


def flow_callbacks(args: BaseArguments) -> list[TrainerCallback]:
    """Returns the callbacks, besides the stock ones, that decide when to log, evaluate, save and stop."""
    patience = args.early_stopping_patience
    early = [] if patience is None else [EarlyStoppingCallback(patience, args.early_stopping_threshold)]
    return [*early, SavesAfterEpoch(), TakesChanges()]


def newest_complete_checkpoint(folder: str | Path, world_size: int = 1) -> Path | None:
    """Returns the complete `checkpoint-*` folder with the highest step. Logs each newer one that is incomplete.

    A checkpoint is written in place, file by file. If a run was killed while it saved, the checkpoint cannot be
    loaded.
    """
    for checkpoint in checkpoints(folder):
        problem = incomplete(checkpoint, world_size)
        if problem is None:
            return checkpoint
        logger.warning("Skipped %s: %s.", checkpoint, problem)
    return None


def to_resume(resume_from: str | bool | None, args: TrainingArguments) -> str | None:
    """Returns the checkpoint that `resume_from_checkpoint` means. For `True`, this is the newest complete one.

    Warns of what is lost if another number of processes wrote it.

    Raises:
        MinBertError: there is none.
    """
    if not resume_from:
        return None
    folder = str(args.output_dir)
    checkpoint = newest_complete_checkpoint(folder, args.world_size) if resume_from is True else Path(resume_from)
    if checkpoint is None:
        raise MinBertError(f"There is no complete checkpoint in {folder} to resume from.")
    logger.info("Resuming from %s.", checkpoint)
    if _random_states(checkpoint) != _expected_random_states(args.world_size):
        logger.warning(
            "%s was written by another number of processes than the current %d: weights, optimizer, schedule and "
            "the position in the data are kept, and dropout is drawn anew.",
            checkpoint,
            args.world_size,
        )
    return str(checkpoint)


def save_gradients(gradients: Gradients, args: BaseArguments, folder: Path) -> None:
    """Writes the state of the collector of the tasks' gradients, if it has one."""
    if state := gradients.state_dict():
        settings = {name: getattr(args, name) for name in ("aggregator", "gradient_smoothing")}
        torch.save({**state, "settings": settings}, folder / AGGREGATOR)


def load_gradients(gradients: Gradients, args: BaseArguments, folder: Path) -> None:
    """Restores the state that `save_gradients` wrote.

    Raises:
        MinBertError: it is missing, or was written with other settings.
    """
    if not gradients.state_dict():
        return
    path = folder / AGGREGATOR
    if not path.is_file():
        raise MinBertError(
            f"{folder} has no {AGGREGATOR}: it was written with an aggregator that keeps no gradient of a task by "
            "itself. Resume as it was trained, or anew."
        )
    state = torch.load(path, map_location=args.device, weights_only=True)
    for name, saved in state.pop("settings").items():
        if (given := getattr(args, name)) != saved:
            expected, found = (f"no `{name}`" if it is None else f"`{name}: {it}`" for it in (saved, given))
            raise MinBertError(
                f"{folder} was written with {expected}. Found {found}. Resume as it was trained, or anew."
            )
    gradients.load_state_dict(state)


def save_balancing(balancing: Balancing | None, args: BaseArguments, folder: Path) -> None:
    """Writes the state of weights that follow the losses, if the run has such weights."""
    if balancing is not None:
        torch.save({**balancing.state_dict(), "method": args.task_weights}, folder / BALANCING)


def load_balancing(balancing: Balancing | None, args: BaseArguments, folder: Path) -> None:
    """Restores the state that `save_balancing` wrote.

    Raises:
        MinBertError: it is missing, belongs to another method, or is not needed because the weights do not follow the
            losses.
    """
    path, method = folder / BALANCING, None if balancing is None else args.task_weights
    state = torch.load(path, map_location=args.device, weights_only=True) if path.is_file() else {"method": None}
    if (written := state.pop("method")) != method:
        expected, found = (
            f"`task_weights: {it}`" if it else "`task_weights` that do not follow the losses"
            for it in (written, method)
        )
        raise MinBertError(f"{folder} was written with {expected}. Found {found}. Resume as it was trained, or anew.")
    if balancing is not None:
        balancing.load_state_dict(state)


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoint folders of a run, the highest step first."""
    folders = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def incomplete(checkpoint: Path, world_size: int = 1) -> str | None:
    """Returns what a checkpoint lacks for resuming, or `None` if it is complete.

    Each process has a file of random states. Files of another number of processes are accepted too.
    """
    names = [name for name in WEIGHTS if (checkpoint / name).exists()]
    if (checkpoint / INDEX).exists():
        try:
            names += sorted(set(json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except ValueError:
            return f"{INDEX} is cut"
    if not names:
        return "it has no weights"
    for name in names:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
        if not whole_safetensors(checkpoint / name):
            return f"{name} ends too early"
    if (checkpoint / TEACHER).exists() and not whole_safetensors(checkpoint / TEACHER):
        return f"{TEACHER} ends too early"
    for name in (AGGREGATOR, BALANCING):
        if (checkpoint / name).exists() and not zipfile.is_zipfile(checkpoint / name):
            return f"{name} ends too early"
    written, expected = _random_states(checkpoint), _expected_random_states(world_size)
    # The first file of several alone is a checkpoint that was cut off.
    if len(written) not in (0, len(expected)) and written != ["rng_state_0.pth"]:
        expected = written
    for name in ("optimizer.pt", "scheduler.pt", *expected):
        if not (checkpoint / name).exists():
            return f"{name} is missing"
        if not zipfile.is_zipfile(checkpoint / name):  # torch.save writes a zip, whose directory comes last
            return f"{name} ends too early"
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or cut"
    return None


def _random_states(checkpoint: Path) -> list[str]:
    """The names of the files with the state of each process's random generators."""
    return sorted(path.name for path in checkpoint.glob("rng_state*.pth"))


def _expected_random_states(world_size: int) -> list[str]:
    return ["rng_state.pth"] if world_size == 1 else sorted(f"rng_state_{rank}.pth" for rank in range(world_size))
