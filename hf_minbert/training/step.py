"""The step: forward and backward passes of each task of a round, whose gradients then become one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .aggregation.aggregators import make_aggregator
from .aggregation.conflicts import ConflictMeter
from .aggregation.smoothing import Smoothing
from .checkpoints import load_gradients
from .data import loss_weights_of, rounds_of
from .freezing import layer_names
from .gradients import Gradients, collector
from .graphs import GraphedSteps
from .metric_tracker import StepMeans
from .terms.base import Place, RecordedPlace


class RoundStep:
    """The part of `MultiTaskTrainer` that takes a step.

    In place of the stock `compute_loss` stands `task_loss`, one task's part of it; in place of one backward pass, one
    per task, and `Gradients`, which collects what they give.
    """

    _gradients: Gradients | None = None  # until the first step
    _graphs: GraphedSteps | None = None

    def begin_steps(self, checkpoint: str | None) -> None:
        """Makes what the steps of one training share.

        Args:
            checkpoint: to go on from.

        Raises:
            MinBertError: there are no rows to train on, or the checkpoint was written with another aggregator.
        """
        self.begin_measuring()
        graphed = self.args.uses_graphs and self.proximal is None
        self._weights = loss_weights_of(self.args, rounds_of(self.args, self.tasks, self.train_dataset))
        self._gradients = self.make_gradients(static=graphed)
        if checkpoint is not None:
            load_gradients(self._gradients, self.args, Path(checkpoint))
        repeats = 0 if self.regularizer is None else self.regularizer.repeats
        self._graphs = GraphedSteps(self._forward, self._gradients, repeats) if graphed else None
        self._rounds_of_step = 0  # how many of the current step have been taken
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps  # the loop has it by the step

    def begin_measuring(self) -> None:
        """Sets to nothing what the steps of one training add up for the log."""
        names = layer_names(self.model)
        layers = [names[parameter] for parameter in self.model.parameters() if parameter.requires_grad]
        self.conflicts = ConflictMeter(self.train_tasks, self.args.conflict_detail, layers)
        self._means = StepMeans(self.accelerator)

    def forget_recordings(self) -> None:
        """Has steps recorded anew as CUDA graphs: other parameters are trained now."""
        if self._graphs is not None:
            self._graphs.forget()

    def make_gradients(self, static: bool) -> Gradients:
        """What collects the gradients of a step and makes one of them."""
        args = self.args
        smoothing = None if args.gradient_smoothing is None else Smoothing(args.gradient_smoothing)
        aggregator = make_aggregator(args.aggregator, **(args.aggregator_options or {}))
        sharded = args.gradient_reduction == "sharded"
        return collector(self.model.parameters(), aggregator, smoothing, self.conflicts, static, sharded)

    def training_step(
        self, model: nn.Module, inputs: dict[str, dict[str, Any]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one round; before the optimizer steps, the tasks' gradients become one.

        It may be called without `train`, by a loop of one's own: from what it leaves in `.grad`, an optimizer steps.
        What works between the steps of `train` (schedules, `unfreeze`, the teacher of `proximal`) stays as at the
        start.

        Args:
            model: that of the trainer.
            inputs: one batch per task.
            num_items_in_batch: not used, a task's loss is a mean over its batch.

        Returns:
            the weighted sum of the tasks' losses, as the stock step does divided by the accumulation steps.
        """
        if self._gradients is None:
            self.begin_steps(None)
            if self.freezing.changes:
                self.freezing.freeze(self.state.global_step)
        if not self.model.training:  # a compiled model's own flag stays when an evaluation changes what is inside
            model.train()  # the call alone visits every module
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have two modes
            self.optimizer.train()
        total = torch.zeros((), device=self.args.device)
        for task, batch in self._prepare_inputs(inputs).items():
            factor = self._weights[task] / self.current_gradient_accumulation_steps
            found = self._backward(task, batch, factor)
            if self.accelerator.sync_gradients:
                self._gradients.complete(task)
            self._note(task, batch, found)
            total += factor * found["loss"]
        self._rounds_of_step += 1
        if self.accelerator.sync_gradients:
            self._rounds_of_step = 0
            # The same generator on every process, whatever was drawn elsewhere.
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
            self._gradients.combine(generator, self._scaled(total.new_ones(())))
        return total

    def _note(self, task: str, batch: Mapping[str, Any], found: dict[str, torch.Tensor]) -> None:
        """Keeps for the log what `task_loss` gave."""
        for name, value in found.items():
            if name == "skipped":
                self._means.count(f"{self.args.regularizer}_skipped", value)
            elif name != "logits":
                self._means.add(f"{name}_{task}", value)
        if self._training_scores is not None:
            self._training_scores.add(task, found["logits"], batch["labels"])

    def _backward(self, task: str, batch: Mapping[str, Any], factor: float) -> dict[str, torch.Tensor]:
        """Adds the gradient of `factor` times the task's loss. What `task_loss` gives, without a graph."""
        place = self._place(batch)
        if self._graphs is None:
            found, differentiated = self._forward({"batch": batch, "place": place}, factor)
            self._gradients.add(task, differentiated)
            return found
        inputs = {"batch": batch}
        if self.regularizer is not None:
            # On the GPU: a number of the CPU would be recorded as it is, and every replay would have one noise.
            inputs["place"] = place.numbers(task, self.args.device)
        found = self._graphs(task, inputs, factor)
        return {name: value.clone() for name, value in found.items()}  # the next replay writes to the same place

    def _forward(self, inputs: Mapping[str, Any], factor: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What `task_loss` gives, without a graph, and what is to be differentiated.

        Args:
            inputs: the `batch`, and its `place`, as numbers if they are inputs of a CUDA graph.
            factor: on the loss.
        """
        place = inputs.get("place")
        with self.compute_loss_context_manager():
            found = self.task_loss(
                self.accelerator.unwrap_model(self.model_wrapped),
                inputs["batch"],
                RecordedPlace(place) if isinstance(place, torch.Tensor) else place,
            )
        differentiated = self._scaled(found["loss"] * factor)
        return {name: value.detach() for name, value in found.items()}, differentiated

    def task_loss(
        self, model: nn.Module, batch: Mapping[str, Any], place: Place | RecordedPlace | None
    ) -> dict[str, torch.Tensor]:
        """The `loss` of one task's batch, with the terms that are added to it, and the `logits`.

        Beside them the terms before their weights, as `<regularizer>` and `proximal`, and `skipped`, 1 where the
        regularizer had none.
        """
        found: dict[str, torch.Tensor] = {}
        batch, teacher = {key: value for key, value in batch.items() if key != "teacher"}, batch.get("teacher")
        if self.regularizer is None:
            outputs = model(**batch)
            loss = outputs["loss"]
        else:
            loss, outputs, found[self.args.regularizer], skipped = self.regularizer(model, batch, place)
            if skipped is not None:
                found["skipped"] = skipped
        if teacher is not None:
            head = model.heads.get(batch["task"])
            found["distill"] = self.distillation(head, outputs["logits"], teacher)
            loss = self.distillation.mixed(loss, outputs["loss"], found["distill"])
        if self.proximal is not None:
            found["proximal"] = self.proximal(model, batch, outputs["logits"])
            loss = loss + self.proximal.weight * found["proximal"]
        return {"loss": loss, "logits": outputs["logits"], **found}

    def _place(self, batch: Mapping[str, Any]) -> Place:
        """Where the batch stands: this process's share of the current round of the current step."""
        batches_before = self._rounds_of_step * self.args.world_size + self.args.process_index
        return Place(self.args.seed, self.state.global_step, batches_before * len(batch["labels"]))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the fp16 scale: all gradients of a step share one scale, undone before clipping."""
        return loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As the stock one: scales all gradients to `max_grad_norm` if they are longer. Their norm before that.

        The stock one walks through all parameters to find their norm: longer than a GPU takes for a small batch.
        """
        self.accelerator.unscale_gradients()
        gradients = self._gradients.combined()
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
