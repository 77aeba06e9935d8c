"""Evaluation: each task by its own metrics, then one number over all tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
from accelerate.state import GradientState
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, speed_metrics

from ..data.rows import EncodedRows
from ..errors import MinBertError
from ..evaluation.metrics import overall, task_metrics
from ..model.inference import ragged, unread
from ..model.losses import COMPARING, IGNORED, Outcome, loss_of
from ..model.packing import Packing
from ..settings.metrics import by_words
from ..settings.tasks import Task

logger = logging.getLogger(__name__)

#: Losses of which `class_weights` make no mean over rows; the kind's own is one.
WEIGHTED = ("", "cross_entropy", "corn")


class EvaluationLoop(Protocol):
    """Runs a model over the batches of a loader, as the stock Trainer's `evaluation_loop` does."""

    def __call__(
        self, loader: DataLoader, task: str, prefix: str, ignore_keys: list[str] | None
    ) -> EvalLoopOutput: ...


class TaskEvaluator:
    """Evaluates tasks. Metrics are called `<prefix>_<task>_<metric>`.

    Args:
        tasks: the tasks by name.
        loader: makes the loader of a task's rows.
        loop: runs the model over it.
    """

    def __init__(
        self, tasks: Mapping[str, Task], loader: Callable[[str, EncodedRows], DataLoader], loop: EvaluationLoop
    ):
        self.tasks, self.loader, self.loop = tasks, loader, loop
        self._told: set[str] = set()

    def score(
        self, rows: Mapping[str, EncodedRows], prefix: str, ignore_keys: list[str] | None = None
    ) -> dict[str, float]:
        """Returns each task's loss and metrics, the summary over all tasks, and the time."""
        start = time.time()
        metrics: dict[str, float] = {}
        scores: dict[str, dict[str, float]] = {}
        for name, dataset in rows.items():
            logits, labels, measured = self.outputs(name, dataset, f"{prefix}_{name}", ignore_keys)
            if labels is None:
                raise MinBertError(f"The rows of {name!r} have no labels, so they cannot be scored. Use `predict`.")
            scores[name] = task_metrics(self.tasks[name], logits, labels)
            metrics.update(measured)
            metrics.update({f"{prefix}_{name}_{metric}": value for metric, value in scores[name].items()})
        summary = overall([self.tasks[name] for name in rows], scores)
        metrics.update({f"{prefix}_{name}": value for name, value in summary.items()})
        metrics.update(speed_metrics(prefix, start, num_samples=sum(map(len, rows.values()))))
        return metrics

    def outputs(
        self, task: str, rows: EncodedRows, prefix: str, ignore_keys: list[str] | None
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, float]]:
        """Returns a task's logits [R, C] and labels [R], in the order of the rows, and the loop's metrics.

        For tags both are [R] arrays, with [words, C] and [words] for a row, as `TokenRows.by_word` returns them.
        """
        order = length_order(self.tasks[task], rows)
        # A config may ask for hidden states, which would be kept for all rows and be taken for predictions.
        ignored = ["hidden_states", "attentions"] if ignore_keys is None else ignore_keys
        output = self.loop(self.loader(task, rows.take(order)), task, prefix, ignored)
        back = np.argsort(order)
        logits = np.asarray(output.predictions, dtype=np.float32)[back]
        labels = None if output.label_ids is None else np.asarray(output.label_ids)[back]
        if self.tasks[task].traits.is_tags:  # labels of words that were cut off stand in the rows alone
            logits, labels = rows.by_word(logits), rows.labels
        metrics = dict(output.metrics or {})
        if labels is not None:
            self._settle_loss(self.tasks[task], f"{prefix}_loss", metrics, logits, labels)
        return logits, labels, metrics

    def _settle_loss(
        self, task: Task, name: str, metrics: dict[str, float], logits: np.ndarray, labels: np.ndarray
    ) -> None:
        """Sees to a loss that is no mean over rows, of which the mean over batches depends on their size."""
        if task.traits.is_tags and task.loss in WEIGHTED:
            flat, ids = by_words(logits, labels)
            read = ~unread(flat)
            metrics[name] = weighted_loss(task, flat[read], ids[read])
        elif task.loss in WEIGHTED and "class_weights" in task.loss_options:
            metrics[name] = weighted_loss(task, logits, labels)
        elif task.loss in COMPARING and name not in self._told:
            self._told.add(name)
            logger.info(
                "%s is a mean over batches, and depends on `per_device_eval_batch_size`: `loss: %s` compares the rows "
                "of a batch with each other.", name, task.loss,
            )  # fmt: skip


def weighted_loss(task: Task, logits: np.ndarray, labels: np.ndarray) -> float:
    """Computes the loss with `class_weights` over all rows or words: sum(w * loss) / sum(w).

    w is the weight of a row's class.
    """
    unread = cast(Any, None)  # it looks at neither head nor vectors
    outcome = Outcome(unread, unread, torch.from_numpy(logits), torch.from_numpy(labels), None)
    return loss_of(vars(task))(outcome, **task.loss_options).item()


def length_order(task: Task, rows: EncodedRows) -> np.ndarray:
    """Returns the indices of the rows, the longest first, so that rows of similar length share a batch.

    If a loss compares the rows of a batch, the order is not changed, because rows of one length are more alike.
    """
    if task.loss in COMPARING:
        return np.arange(len(rows))
    return np.argsort(-rows.row_lengths, kind="stable")


def new_rows(state: GradientState, process: int, batch_size: int) -> int:
    """Returns how many rows of the current batch are new. The last batch is filled with rows of earlier batches."""
    if not state.end_of_dataloader or state.remainder <= 0:
        return batch_size
    return min(max(state.remainder - process * batch_size, 0), batch_size)


def first_rows(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns the batch with its first `count` rows only."""
    kept = {key: value[:count] if torch.is_tensor(value) else value for key, value in batch.items()}
    if "packing" in kept:
        kept["packing"] = Packing.describe(kept["attention_mask"].flatten(0, -2).bool().cpu().numpy())
    return kept


class TrainingScores(TrainerCallback):
    """Logs scores on the training rows at the end of each epoch, as `train_<task>_<metric>`.

    Args:
        running: compute the scores from the outputs of the epoch's steps, with dropout and with the changing model.
            This needs no extra pass. A row that was used twice counts twice. After a resume within an epoch, only the
            steps since then count. If false, the model at the end of the epoch is evaluated in an extra pass over the
            training rows.
        evaluator: runs this pass.
        rows: the training rows by task.
        gather: gathers the outputs of all processes.
        log: writes to the log.
    """

    def __init__(
        self,
        running: bool,
        evaluator: TaskEvaluator,
        rows: Mapping[str, EncodedRows],
        gather: Callable[[torch.Tensor], torch.Tensor],
        log: Callable[[dict[str, float]], None],
    ):
        self.running, self.evaluator, self.rows, self.gather, self.log = running, evaluator, rows, gather, log
        self.outputs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, task: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Stores a step's outputs on the device. Reading them now would make the GPU wait."""
        if self.running:
            self.outputs.setdefault(task, []).append((logits.detach().float(), labels))

    def on_epoch_end(self, args, state, control, **kwargs):
        should_log = control.should_log
        self.log(self._running_scores() if self.running else self.evaluator.score(self.rows, "train"))
        control.should_log = should_log  # `log` resets it, and the epoch's losses are still to be logged

    def _running_scores(self) -> dict[str, float]:
        scores = {}
        for name, pairs in self.outputs.items():
            task = self.evaluator.tasks[name]
            if task.traits.is_tags:
                pairs = self._equally_wide(pairs)
            logits, labels = (self.gather(torch.cat(column)).cpu().numpy() for column in zip(*pairs, strict=True))
            if task.traits.is_tags:
                rows = [row != IGNORED for row in labels]
                pair = (logits, labels)
                logits, labels = (ragged([row[kept] for row, kept in zip(c, rows, strict=True)]) for c in pair)
            scores[name] = task_metrics(task, logits, labels)
        self.outputs.clear()
        metrics = {f"train_{name}_{metric}": score[metric] for name, score in scores.items() for metric in score}
        summary = overall([self.evaluator.tasks[name] for name in scores], scores)
        return metrics | {f"train_{name}": value for name, value in summary.items()}

    def _equally_wide(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Outputs [B, T, C] and labels [B, T] of several batches, with the T of the widest of any process."""
        widths = [labels.shape[1] for _, labels in pairs]
        width = int(self.gather(pairs[0][1].new_tensor([max(widths)])).max())
        return [
            (F.pad(logits, (0, 0, 0, width - of)), F.pad(labels, (0, width - of), value=IGNORED))
            for (logits, labels), of in zip(pairs, widths, strict=True)
        ]
