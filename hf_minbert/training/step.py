"""The training step: a forward and a backward pass for each task of a round, then one gradient of all tasks.

Tasks that share rows have one forward pass, and one backward pass too where their gradients are only added.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from ..errors import MinBertError
from .balancing import Balancing, Learned
from .evaluator import TrainingScores
from .fused_adamw import scaling_optimizer
from .gradients import Gradients, StaticGradients
from .graphs import GraphedSteps, quick_zero_grad
from .metric_tracker import MetricTracker
from .neftune import WordNoise
from .protocol import TaskModel
from .terms.base import AnyNoiseKey, Batch, NoiseKey, RecordedNoiseKey, Term, rows_in, word_size

#: From the model, a task's batch and the key of its noise to the `loss`, the task's `own_loss` without terms, the
#: `logits` and other values to log.
LossOfTask = Callable[[TaskModel, Batch, AnyNoiseKey | None], dict[str, Tensor]]


class RoundStep:
    """Takes the steps of one training.

    Args:
        model: returns the model to call. It is called at each step, as training may wrap the model.
        task_loss: computes a task's loss. In a CUDA graph of a loss without `terms`, its key is `None`.
        terms: of the loss.
        weights: the factor on each task's loss.
        balancing: further factors, which follow the losses, where that is asked for.
        gradients: collects and combines the tasks' gradients.
        accelerator: that of the trainer: processes, accumulation and loss scale.
        autocast: the precision of the passes.
        tracker: collects the values to log.
        scores: collects outputs, where scores on the training rows are logged.
        seed: of the run.
        word_noise: what adds noise to word embeddings, where that is asked for.
        recorded: whether steps are recorded as CUDA graphs.
    """

    def __init__(
        self,
        model: Callable[[], TaskModel],
        task_loss: LossOfTask,
        terms: Sequence[Term],
        weights: Mapping[str, float],
        balancing: Balancing | None,
        gradients: Gradients,
        accelerator: Accelerator,
        autocast: Callable[[], AbstractContextManager[Any]],
        tracker: MetricTracker,
        scores: TrainingScores | None,
        seed: int,
        word_noise: WordNoise | None,
        recorded: bool,
    ):
        self.model, self.task_loss, self.terms = model, task_loss, terms
        self.weights, self.balancing, self.gradients = weights, balancing, gradients
        self.accelerator, self.autocast, self.tracker, self.scores = accelerator, autocast, tracker, scores
        self.seed, self.word_noise = seed, word_noise
        self.graphs = None
        if recorded and isinstance(gradients, StaticGradients):
            self.graphs = GraphedSteps(self._forward, gradients, sum(term.repeats for term in terms))
        self._rounds = 0  # taken of the current step

    def __call__(self, batches: Mapping[str, Batch], step: int, accumulated: int) -> Tensor:
        """Takes one round. After the last round of an optimizer step, combines the tasks' gradients.

        Args:
            batches: one per task, or per group of tasks that share rows, on the device.
            step: optimizer steps before this one.
            accumulated: rounds that the step has.

        Returns:
            the weighted sum of the tasks' losses, divided by `accumulated`.
        """
        total = torch.zeros((), device=self.accelerator.device)
        balanced = {} if self.balancing is None else self.balancing.by_task()
        own: dict[str, Tensor] = {}
        for batch in batches.values():
            for task, outputs in self._pass(batch, step, accumulated, balanced).items():
                if self.accelerator.sync_gradients:
                    self.gradients.complete(task)
                if self.balancing is not None:
                    own[task] = _own_loss(outputs)
                self._track(task, batch["answers"][task] if "answers" in batch else batch, outputs)
                total += self.weights[task] / accumulated * balanced.get(task, 1.0) * outputs["loss"]
        for task, weight in balanced.items():
            self.tracker.add(f"weight_{task}", weight)
        if self.balancing is not None:
            self.balancing.see(own)
        self._rounds += 1
        if self.accelerator.sync_gradients:
            self._rounds = 0
            # The same generator on every process, whatever was drawn elsewhere.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            scale = self._scaled(total.new_ones(()))
            self.gradients.combine(generator, scale)
            if self.balancing is not None:
                self.balancing.end_step(scale)
        return total

    @contextmanager
    def in_loop(self, model: nn.Module) -> Generator[None]:
        """Inside, the stock loop trains the model by these steps."""
        quick = nullcontext() if self.graphs is None else quick_zero_grad(model, self.gradients.parameters)
        try:
            with quick:
                yield
        finally:
            if self.word_noise is not None:
                self.word_noise.remove()

    def clip(self, longest: float, optimizer: Optimizer, callbacks: Iterable[TrainerCallback]) -> Tensor:
        """As `Gradients.clip`, by the optimizer where steps are recorded.

        Args:
            longest: the norm.
            optimizer: as accelerate wraps it.
            callbacks: of the trainer. The optimizer scales no gradients that one of them may look at before.
        """
        scaling = None
        # Learned weights of losses are not clipped, and the optimizer would scale their gradients too.
        if self.graphs is not None and not isinstance(self.balancing, Learned):
            scaling = scaling_optimizer(optimizer, callbacks)
        return self.gradients.clip(longest, scaling)

    def forget_recordings(self) -> None:
        """Drops all CUDA graphs, after the trained parameters have changed."""
        if self.graphs is not None:
            self.graphs.forget()

    def _track(self, task: str, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        for name, value in outputs.items():
            if name.endswith("_skipped"):
                self.tracker.count(name, value)
            elif name not in ("logits", "own_loss"):
                self.tracker.add(f"{name}_{task}", value)
        if self.scores is not None and batch.get("share", 1.0) > 0:
            self.scores.add(task, outputs["logits"][: len(batch["labels"])], batch["labels"])

    def _pass(
        self, batch: Batch, step: int, accumulated: int, balanced: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Adds the gradients of a batch's weighted losses. Returns by task what `task_loss` does, detached."""
        if "answers" not in batch:
            task = batch["task"]
            factor = self.weights[task] / accumulated
            return {task: self._backward(task, batch, step, factor, balanced.get(task))}
        outputs = self._forward_together(batch, step)
        weights = {task: self.weights[task] / accumulated * balanced.get(task, 1.0) for task in outputs}
        losses = {task: self._scaled(of["loss"] * weights[task]) for task, of in outputs.items()}
        self.gradients.add_together(losses)
        return {task: {name: value.detach() for name, value in of.items()} for task, of in outputs.items()}

    def _backward(self, task: str, batch: Batch, step: int, factor: float, weight: Tensor | None) -> dict[str, Tensor]:
        """Adds the gradient of `factor` and `weight` times the loss. Returns what `task_loss` does, detached."""
        key = self._key(step, rows_in(batch))
        inputs: dict[str, Any] = {"batch": batch}
        if self.word_noise is not None:
            inputs["noise"] = self.word_noise.draw(batch, word_size(self.model(), task), key)
        if weight is not None:
            inputs["weight"] = weight  # and no part of `factor`, for which a CUDA graph is recorded anew
        if self.graphs is None:
            outputs, loss = self._forward({**inputs, "key": key}, factor)
            self.gradients.add(task, loss)
            return outputs
        if self.terms:
            # A tensor on the GPU: a number would be a constant of the graph, with the same noise in every replay.
            inputs["key"] = key.numbers(task, self.accelerator.device)
        outputs = self.graphs(task, inputs, factor)
        return {name: value.clone() for name, value in outputs.items()}  # the next replay overwrites them

    def _forward(self, inputs: Mapping[str, Any], factor: float) -> tuple[dict[str, Tensor], Tensor]:
        """What `task_loss` returns, detached, and the scaled loss to differentiate.

        Args:
            inputs: the `batch`; the `key` of its terms' noise, as numbers if they are inputs of a CUDA graph; the
                `noise` on its words; and the `weight` of the loss beside `factor`, where it follows the losses.
            factor: on the loss.
        """
        key, batch = inputs.get("key"), inputs["batch"]
        noisy = nullcontext() if self.word_noise is None else self.word_noise.added(batch, inputs["noise"])
        with self.autocast(), noisy:
            outputs = self.task_loss(self.model(), batch, RecordedNoiseKey(key) if isinstance(key, Tensor) else key)
        loss = outputs["loss"] * factor
        if "weight" in inputs:
            loss = loss * inputs["weight"]
        return {name: value.detach() for name, value in outputs.items()}, self._scaled(loss)

    def _forward_together(self, batch: Batch, step: int) -> dict[str, dict[str, Tensor]]:
        """What `task_loss` returns for each task of a group, from one pass; its losses times the task's share."""
        model, answers, first = self.model(), batch["answers"], batch["task"]
        inputs = {name: value for name, value in batch.items() if name not in ("task", "answers")}
        reading = [task for task, answer in answers.items() if "pooled" not in answer]
        key, noisy = self._key(step, len(batch["input_ids"]) if reading else 0), nullcontext()
        if self.word_noise is not None:
            noisy = self.word_noise.added(batch, self.word_noise.draw(batch, word_size(model, first), key))
        found = {}
        with self.autocast():
            with noisy:
                pooled = model.pooled_of(reading, **inputs) if reading else {}
            for task, answer in answers.items():
                of_all = {"pooled": pooled[task]} if task in pooled else {}
                if "rows" in answer:
                    of_all["pooled"] = of_all["pooled"].index_select(0, answer["rows"])
                share = answer["share"]
                own = {name: value for name, value in answer.items() if name not in ("rows", "share")}
                outputs = self.task_loss(model, {"task": task, **of_all, **own}, key)
                found[task] = {
                    name: value if name == "logits" or share == 1 else value * share for name, value in outputs.items()
                }
        return found

    def _key(self, step: int, rows: int) -> NoiseKey:
        """That of this process's share, so many rows, of the current round of the current step."""
        batches_before = self._rounds * self.accelerator.num_processes + self.accelerator.process_index
        return NoiseKey(self.seed, step, batches_before * rows)

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss times the fp16 scale: all gradients of a step share one scale, undone before clipping."""
        return loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)


def _own_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    if "own_loss" not in outputs:
        raise MinBertError(
            "`task_weights` that follow the losses need `own_loss`, the loss without terms, beside `loss` in what "
            f"`task_loss` returns. Found {', '.join(outputs)}. Add it."
        )
    return outputs["own_loss"]
