"""How good predictions are: per task, and over all tasks. Every number is finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import MinBertError
from ..settings.metrics import KIND_METRICS, higher_is_better, is_constant
from ..settings.tasks import LEADERBOARD, Task, has_leaderboard
from .decoding import as_matrix, decode

logger = logging.getLogger(__name__)

NONFINITE = "nonfinite_predictions"


def task_metrics(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of `KIND_METRICS` for one task.

    `accuracy`; `macro_f1`, the plain mean of F1 over all of the task's classes (0 for one that is neither there nor
    predicted); `f1` of a binary task's second label; `matthews`, the correlation of predicted and right classes; of
    classes in order `quadratic_kappa` and, in places, `mean_absolute_error`; `pearson` and `spearman` of the scores as
    predicted.
    A correlation that is not defined is 0.0, with the key `constant_predictions` or `constant_labels` (value 1.0)
    that says why; logits that are not finite make every metric its worst, with `nonfinite_predictions`. Either is
    warned of.

    Args:
        logits: the head's own, [N, C] for classes, [N, 1] for binary and score.
        labels: class ids or scores, [N].

    Raises:
        MinBertError: the shapes do not fit, or N is 0.
    """
    logits, labels = as_matrix(task, logits), np.asarray(labels)
    if labels.shape != logits.shape[:1] or not labels.size:
        raise MinBertError(
            f"Task {task.name!r}: {len(logits)} predictions need as many labels, and at least one. "
            f"Found labels of the shape {list(labels.shape)}."
        )
    if not np.isfinite(logits).all():
        broken = int((~np.isfinite(logits)).any(axis=1).sum())
        logger.warning(
            "%s: %d of %d predictions are not finite, so its metrics are reported as 0. The model has diverged: "
            "lower the learning rate.", task.name, broken, len(logits),
        )  # fmt: skip
        return worst_metrics(task) | {NONFINITE: 1.0}
    return value_metrics(task, decode(task, logits).values, labels)


def worst_metrics(task: Task) -> dict[str, float]:
    """What a task without an answer scores: 0, and as an error the widest that there is."""
    low, high = task.range or (0, len(task.labels) - 1)
    return {name: 0.0 if higher_is_better(name) else float(high - low) for name in KIND_METRICS[task.kind]}


def has_diverged(metrics: Mapping[str, object]) -> bool:
    """Whether an evaluation, or a run's `metrics.json`, is of a model whose outputs are not finite.

    It is never better than another: its metrics stand at 0, and a correlation or a macro-F1 may be lower.
    """
    return any(name.endswith((NONFINITE, "diverged")) and value for name, value in metrics.items())


def value_metrics(task: Task, values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """As `task_metrics`, of predictions that are decoded and finite: class ids or scores, [N]."""
    if task.traits.is_score:
        labels = labels.astype(np.float64)
    scores = {name: metric(task, values, labels) for name, metric in KIND_METRICS[task.kind].items()}
    constant = [name for name, x in (("predictions", values), ("labels", labels)) if is_constant(x)]
    if not task.traits.is_score or not constant:
        return scores
    logger.warning(
        "%s: all %d %s are the same, so the correlation is not defined and is reported as 0.",
        task.name, len(values), " and ".join(constant),
    )  # fmt: skip
    return scores | {f"constant_{name}": 1.0 for name in constant}


def overall(tasks: Iterable[Task], scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The numbers over all evaluated tasks.

    Args:
        scores: `{task: {metric: value}}`, without prefixes.

    Returns:
        `overall`, the plain mean of each task's own `metric` (a correlation enters as r); and `leaderboard` where
        sst, para and sts are all there (see `LEADERBOARD`).
    """
    tasks = list(tasks)
    result = {"overall": float(np.mean([scores[task.name][task.metric] for task in tasks]))}
    if has_leaderboard(tasks):
        sst, para, sts = (scores[name][metric] for name, metric in LEADERBOARD.items())
        result["leaderboard"] = float((sst + para + (sts + 1) / 2) / 3)
    return result
