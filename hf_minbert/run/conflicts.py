"""Measures in the first steps of a recipe whether its tasks conflict."""

from __future__ import annotations

import tempfile
import typing
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed

from ..errors import MinBertError, explain
from ..settings import plugins
from ..settings.dotted import Value
from ..settings.keys import KEPT
from ..settings.recipe import split_recipe
from ..settings.table import TRAITS
from ..settings.tasks import get_tasks
from ..settings.training import ConflictDetail
from ..training.aggregation.base import Tasks
from ..training.aggregation.pcgrad import PCGrad
from ..training.aggregation.sum import Sum
from ..training.args import MultiTaskTrainingArguments
from ..training.gradients import GradientRows, Gradients
from ..training.trainer import MultiTaskTrainer
from .bars import bar_closed
from .inputs import load_data, load_model, model_config


def measure_conflicts(values: Mapping[str, Value], steps: int, detail: ConflictDetail = "none") -> dict[str, float]:
    """Trains on the sum of the losses for the first `steps` steps of a recipe and measures the tasks' gradients.

    The trained model is discarded. The learning-rate schedule is that of the whole recipe.

    Args:
        values: the recipe.
        steps: the number of steps.
        detail: as for `ConflictMeter`.

    Returns:
        the means of `ConflictMeter`, and `steps`, the number of steps. The removed parts and turns are those that
        PCGrad would have made.

    Raises:
        MinBertError: there is an error before the first step, there are fewer than two tasks, or no two tasks share
            weights.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in `train`
    plugins.load_named(values)
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    with tempfile.TemporaryDirectory() as folder:
        with explain("Reading the training arguments", "Correct the recipe."):
            measured = {name: traits.off for name, traits in TRAITS.items() if traits.off is not KEPT}
            measured |= {"aggregator": "pcgrad", "aggregator_options": None, "gradient_smoothing": None}
            measured |= {"conflict_detail": detail, "output_dir": folder}
            args = MultiTaskTrainingArguments(**{**given, **measured})
            set_seed(args.seed)
        tasks = get_tasks(settings.tasks)
        by_name = {task.name: task for task in tasks}
        args.check_tasks(by_name)
        if reason := args.why_none_conflict(args.chosen_tasks("train_tasks", by_name)):
            raise MinBertError(
                f"A conflict needs gradients of two tasks for the same weight, but {reason}. Change that."
            )
        data = load_data(settings, args, tasks)["train"]
        trained = args.chosen_tasks("train_tasks", by_name)
        tokenizer, model = load_model(settings, model_config(settings, tasks), trained)
        with explain("Setting up the trainer", "Correct the recipe."):
            trainer = _MeasuringTrainer(
                model, args, train_dataset=data, processing_class=tokenizer, max_length=settings.max_length,
                callbacks=[_Stop(steps)],
            )  # fmt: skip
        with bar_closed(trainer):
            trainer.train()
    found = trainer.conflicts.means()
    if not found:
        raise MinBertError(
            "No step had finite gradients of two tasks for shared weights, so there is nothing to measure."
        )
    return {**found, "steps": trainer.state.global_step}


class _SumBesidePCGrad(Sum):
    """The sum, with the coefficients that PCGrad would have had."""

    def step(
        self, gradients: Tensor, generator: torch.Generator | None = None, tasks: Tasks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        combined, gram, _ = super().step(gradients, generator, tasks)
        return combined, gram, PCGrad().coefficients(gram, generator, tasks)


class _MeasuringTrainer(MultiTaskTrainer):
    """Collects rows for the sum, and logs nothing."""

    def make_gradients(self, static: bool) -> Gradients:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return GradientRows(trained, _SumBesidePCGrad(), meter=self.conflicts)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        pass


class _Stop(TrainerCallback):
    """Ends training after some steps, with the schedule that it would have had."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.steps
