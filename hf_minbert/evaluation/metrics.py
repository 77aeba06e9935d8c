"""Metrics for each task and over all tasks. Every number is finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import MinBertError
from ..model.inference import unread
from ..settings.metrics import higher_is_better, is_constant, metrics_of
from ..settings.tasks import LEADERBOARD, Task, has_leaderboard
from .decoding import as_matrix, decode

logger = logging.getLogger(__name__)

NONFINITE = "nonfinite_predictions"


def task_metrics(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes the metrics in `KIND_METRICS` for one task.

    - `kind: classes`: `accuracy`; `macro_f1`, the plain mean of F1 over all classes of the task (0 for a class that
      never occurs and is never predicted); `matthews`, the correlation of predicted and true classes.
    - `kind: binary`: `accuracy`, `f1` of the second label, and `matthews`.
    - `kind: ordinal`: `accuracy`, `quadratic_kappa`, and `mean_absolute_error`, which counts classes.
    - `kind: labels`: `micro_f1`, `macro_f1`, `sample_f1` and `exact_match` of the predicted labels, and `lrap`, the
      label ranking average precision of the probabilities.
    - `kind: score`: `pearson` and `spearman` of the scores before clipping.
    - `kind: tags`: `entity_f1`, `entity_precision` and `entity_recall`, and `accuracy` by word. If the labels mark no
      entities, `accuracy` and `macro_f1` by word. A word that was not read counts as wrong and as outside any
      predicted entity; `unread_words` is their number.

    An undefined correlation is 0.0, and the key `constant_predictions` or `constant_labels` (value 1.0) gives the
    reason. If logits are not finite, every metric has its worst value, with the key `nonfinite_predictions`. Both are
    logged as warnings.

    Args:
        logits: the outputs of the head, [N, outputs]; for tags [N] arrays [words, outputs].
        labels: class ids or scores, [N]; for `kind: labels` [N, C], 0 or 1; for tags [N] arrays [words].

    Raises:
        MinBertError: the shapes do not match, or N is 0.
    """
    logits, labels = as_matrix(task, logits), np.asarray(labels)
    if labels.shape != (len(logits), *task.traits.shape(len(task.labels))) or not labels.size:
        raise MinBertError(
            f"Task {task.name!r}: {len(logits)} predictions need as many labels, and at least one. "
            f"Found labels of the shape {list(labels.shape)}."
        )
    if task.traits.is_tags:
        _check_words(task, logits, labels)
    flat = np.concatenate(logits) if task.traits.is_tags else logits
    missing = unread(flat) if task.traits.is_tags else np.zeros(len(flat), dtype=bool)
    if not np.isfinite(flat[~missing]).all():
        broken = int((~np.isfinite(flat[~missing])).any(axis=1).sum())
        logger.warning(
            "%s: %d of %d predictions are not finite, so its metrics are reported as 0. The model has diverged: "
            "lower the learning rate.", task.name, broken, len(flat),
        )  # fmt: skip
        return worst_metrics(task) | {NONFINITE: 1.0}
    scores = value_metrics(task, decode(task, logits).values, labels)
    return scores | ({"unread_words": float(missing.sum())} if missing.any() else {})


def _check_words(task: Task, logits: np.ndarray, labels: np.ndarray) -> None:
    for number, (ours, theirs) in enumerate(zip(logits, labels, strict=True)):
        if len(ours) != len(theirs):
            raise MinBertError(
                f"Task {task.name!r}, row {number}: each word needs a prediction and a label. Found {len(ours)} and "
                f"{len(theirs)}."
            )


def worst_metrics(task: Task) -> dict[str, float]:
    """Returns the metrics of a task without answers: 0, or the largest possible error."""
    low, high = task.range or (0, len(task.labels) - 1)
    return {name: 0.0 if higher_is_better(name) else float(high - low) for name in metrics_of(task)}


def has_diverged(metrics: Mapping[str, object]) -> bool:
    """Whether an evaluation, or a run's `metrics.json`, belongs to a model whose outputs are not finite.

    Such a model is never better than another. Its metrics are 0, and another model's correlation may be negative.
    """
    return any(name.endswith((NONFINITE, "diverged")) and value for name, value in metrics.items())


def value_metrics(task: Task, values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Does the same as `task_metrics` for decoded, finite predictions: `Decoded.values`."""
    if task.traits.is_score:
        labels = labels.astype(np.float64)
    scores = {name: metric(task, values, labels) for name, metric in metrics_of(task).items()}
    if not task.traits.is_score:
        return scores
    constant = [name for name, x in (("predictions", values), ("labels", labels)) if is_constant(x)]
    if not constant:
        return scores
    logger.warning(
        "%s: all %d %s are the same, so the correlation is not defined and is reported as 0.",
        task.name, len(values), " and ".join(constant),
    )  # fmt: skip
    return scores | {f"constant_{name}": 1.0 for name in constant}


def overall(tasks: Iterable[Task], scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Computes the metrics over all evaluated tasks.

    Args:
        scores: `{task: {metric: value}}`, without prefixes.

    Returns:
        `overall`, the plain mean of each task's own `metric` (a correlation counts as r); and `leaderboard` if sst,
        para and sts were all evaluated (see `LEADERBOARD`).
    """
    tasks = list(tasks)
    result = {"overall": float(np.mean([scores[task.name][task.metric] for task in tasks]))}
    if has_leaderboard(tasks):
        sst, para, sts = (scores[name][metric] for name, metric in LEADERBOARD.items())
        result["leaderboard"] = float((sst + para + (sts + 1) / 2) / 3)
    return result
