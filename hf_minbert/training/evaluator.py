"""Scoring: each task by its own metrics, then one number over all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, speed_metrics

from ..data.collators import PaddedCollator
from ..data.encoding import encode
from ..data.rows import EncodedRows
from ..errors import MinBertError, unknown_name
from ..evaluation.metrics import overall, task_metrics
from ..model.packing import Packing
from ..settings.tasks import Task
from .data import data_loader
from .protocol import takes

#: Losses that compare the rows of a batch: their mean depends on which rows meet in one.
COMPARING_LOSSES = ("mnr", "cosent")


class TaskEvaluation:
    """The half of `MultiTaskTrainer` that evaluates. Metrics are called `eval_<task>_<metric>`."""

    def known_metrics(self) -> list[str]:
        """Every metric that `evaluate` reports on the evaluated tasks, with the prefix `eval_`."""
        return self.args.metrics_of(self.tasks[name] for name in self.eval_tasks)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Scores the tasks one after the other, then over all of them.

        Args:
            eval_dataset: `{task: rows}` to score instead of the trainer's own.
            ignore_keys: outputs of the model that are not gathered.
            metric_key_prefix: first word of every metric's name.

        Returns:
            `<prefix>_<task>_<metric>` and `<prefix>_<task>_loss` of each task, `<prefix>_overall` (the mean of the
            tasks' main metrics) and, with sst, para and sts, `<prefix>_leaderboard`. With `args.proximal_evaluate`,
            once there is a teacher, the same of its weights too, as `<prefix>_averaged_...`.
        """
        rows = self.eval_dataset if eval_dataset is None else self._encode(eval_dataset, None, "eval_dataset")
        if not rows:
            raise MinBertError("There is nothing to evaluate: pass `eval_dataset={task: rows}`.")
        metrics = self._score(rows, metric_key_prefix, ignore_keys)
        if self.args.proximal_evaluate and self.proximal.teacher:
            with self.proximal.in_place():
                metrics |= self._score(rows, f"{metric_key_prefix}_averaged", ignore_keys)
        self.log(metrics)
        # One event for all tasks: early stopping counts an evaluation once, and sees every metric.
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _score(self, rows: Mapping[str, Any], prefix: str, ignore_keys: list[str] | None = None) -> dict[str, float]:
        start, metrics, scores = time.time(), {}, {}
        for name, dataset in rows.items():
            output = self._run(name, dataset, f"{prefix}_{name}", ignore_keys)
            if output.label_ids is None:
                raise MinBertError(f"The rows of {name!r} have no labels, so they cannot be scored. Use `predict`.")
            scores[name] = task_metrics(self.tasks[name], output.predictions, output.label_ids)
            metrics.update(output.metrics)
            metrics.update({f"{prefix}_{name}_{metric}": value for metric, value in scores[name].items()})
        summary = overall([self.tasks[name] for name in rows], scores)
        metrics.update({f"{prefix}_{name}": value for name, value in summary.items()})
        metrics.update(speed_metrics(prefix, start, num_samples=sum(map(len, rows.values()))))
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        task: str | None = None,
    ) -> PredictionOutput:
        """The head's outputs for the rows of one task, labelled or not.

        Args:
            test_dataset: the rows.
            ignore_keys: outputs of the model that are not gathered.
            metric_key_prefix: first word of every metric's name.
            task: whose head answers. May be left out where the model has one task or an active one.

        Returns:
            `predictions` `[rows, classes]`, or `[rows, 1]` for a binary task or a score; `label_ids` or `None`;
            and the task's metrics where there are labels.

        Raises:
            MinBertError: no task is named where there are several, or there is no such task.
        """
        if isinstance(test_dataset, Mapping):
            raise MinBertError("`predict` answers one task: give its rows alone, and its name as `task=`.")
        task = self._one_task(task)
        rows = encode(test_dataset, self.tasks[task], self.processing_class, self.max_length)
        output = self._run(task, rows, f"{metric_key_prefix}_{task}", ignore_keys)
        if output.label_ids is not None:
            scores = task_metrics(self.tasks[task], output.predictions, output.label_ids)
            output.metrics.update({f"{metric_key_prefix}_{task}_{name}": value for name, value in scores.items()})
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _one_task(self, task: str | None) -> str:
        task = task if task is not None else self.model.config.active_task
        if task is None:
            raise MinBertError(
                f"The model has several tasks: {', '.join(self.tasks)}. Say which one the rows belong to, "
                f"with {{task: rows}} or `task=`."
            )
        if task not in self.tasks:
            raise unknown_name("task", task, self.tasks)
        return task

    def get_eval_dataloader(self, eval_dataset: str | None = None) -> DataLoader:
        """The loader of one task's evaluation rows; `eval_dataset` is the task's name."""
        task = self._one_task(eval_dataset)
        if task not in (self.eval_dataset or {}):
            raise MinBertError(f"There are no evaluation rows of {task!r}. Pass `eval_dataset={{{task!r}: rows}}`.")
        return self._task_dataloader(task, self.eval_dataset[task])

    def _task_dataloader(self, task: str, rows: EncodedRows) -> DataLoader:
        # Packed even where training is not: without dropout nothing tells the two apart.
        packing = takes(self.accelerator.unwrap_model(self.model), "packing")
        collate = PaddedCollator(self.tasks[task], self.collators[task].pad_token_id, packing=packing)
        return self.accelerator.prepare(data_loader(self.args, rows, self.args.eval_batch_size, collate))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As the stock step, but rows that only fill up a process's last batch do not count in the loss.

        Outputs and labels of such rows are dropped when they are gathered; in a loss, one number for the whole
        batch, they would stay.
        """
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        size = len(inputs["input_ids"])
        own = self._rows_that_count(size)
        if loss is not None and 0 < own < size:
            counted = {key: value[:own] if torch.is_tensor(value) else value for key, value in inputs.items()}
            if "packing" in counted:
                is_token = counted["attention_mask"].flatten(0, -2).bool().cpu().numpy()
                counted["packing"] = Packing.describe(is_token)
            loss = super().prediction_step(model, counted, True, ignore_keys)[0]
        return loss, logits, labels

    def _rows_that_count(self, batch_size: int) -> int:
        """How many rows of the current batch are not there already in an earlier one."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch_size
        return min(max(state.remainder - self.accelerator.process_index * batch_size, 0), batch_size)

    def _run(self, task: str, rows: EncodedRows, prefix: str, ignore_keys: list[str] | None) -> EvalLoopOutput:
        """The outputs and labels of a task's rows, in the order of the rows, and their mean loss."""
        order = length_order(self.tasks[task], rows)
        output = self.evaluation_loop(
            self._task_dataloader(task, rows.take(order)),
            description=f"Evaluation of {task}",
            prediction_loss_only=False,
            # A config may ask for hidden states, which would be kept for all rows and be taken for predictions.
            ignore_keys=["hidden_states", "attentions"] if ignore_keys is None else ignore_keys,
            metric_key_prefix=prefix,
        )
        # Closes the progress bar: the next task's has another length.
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        back = np.argsort(order)
        predictions = np.asarray(output.predictions, dtype=np.float32)[back]
        labels = None if output.label_ids is None else output.label_ids[back]
        return output._replace(predictions=predictions, label_ids=labels)


def length_order(task: Task, rows: EncodedRows) -> np.ndarray:
    """The places of the rows, the longest first, so that equal lengths share a batch.

    Where a row's part of the loss depends on its neighbours, the order stays: rows of one length are more alike.
    """
    if task.loss in COMPARING_LOSSES or "class_weights" in task.loss_options:
        return np.arange(len(rows))
    return np.argsort(-rows.row_lengths, kind="stable")


class TrainingScores(TrainerCallback):
    """Logs scores on the training rows at the end of each epoch, as `train_<task>_<metric>`.

    `running`: of the outputs that the epoch's own steps gave, with dropout and while the model changed: no extra pass.
    A row that a round took twice counts twice; after a resume in mid-epoch only the steps since then count.
    `full`: of the model as the epoch left it, in an extra pass over the training rows.
    """

    def __init__(self, trainer: TaskEvaluation):
        self.trainer = trainer
        self.running = trainer.args.train_metrics == "running"
        self.outputs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, task: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Keeps a step's outputs, on the device: reading them now would make the GPU wait."""
        if self.running:
            self.outputs.setdefault(task, []).append((logits.detach().float(), labels))

    def on_epoch_end(self, args, state, control, **kwargs):
        wanted = control.should_log
        if self.running:
            self.trainer.log(self._running_scores())
        else:
            self.trainer.log(self.trainer._score(self.trainer.train_dataset, "train"))
        control.should_log = wanted  # a log takes it for done, and the one of the epoch's losses is still to come

    def _running_scores(self) -> dict[str, float]:
        gather = self.trainer.accelerator.gather
        scores = {}
        for name, pairs in self.outputs.items():
            logits, labels = (gather(torch.cat(column)).cpu().numpy() for column in zip(*pairs, strict=True))
            scores[name] = task_metrics(self.trainer.tasks[name], logits, labels)
        self.outputs.clear()
        metrics = {f"train_{name}_{metric}": value for name, of in scores.items() for metric, value in of.items()}
        summary = overall([self.trainer.tasks[name] for name in scores], scores)
        return metrics | {f"train_{name}": value for name, value in summary.items()}
