"""Calibrates probabilities and chooses thresholds. Both are fitted on labelled rows.

A temperature T divides a task's logits before they become probabilities (Guo et al. 2017,
https://arxiv.org/abs/1706.04599). It makes all predictions more or less confident and changes no answer. A threshold
is the probability above which a label is predicted: the second label of a binary task, or each label of `kind:
labels`. Letters in shapes: N rows, C outputs of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..errors import MinBertError
from ..model.kinds import CALIBRATED, THRESHOLDED, above_threshold
from ..settings.metrics import KIND_METRICS
from ..settings.run import ThresholdMetric
from ..settings.tasks import Task
from .analysis import calibration
from .decoding import Decoded, as_matrix, decode

#: Metrics of the order of probabilities, which neither changes.
OF_ORDER = ("lrap",)
#: What measures of probabilities are called; see `measures`.
MEASURES = {"ece": "expected calibration error, ten bins", "brier": "Brier score", "nll": "negative log-likelihood"}
#: The lowest and the highest temperature. Where all answers are right, the lower the better.
LOWEST, HIGHEST = 0.01, 100.0
#: The least and the greatest number between 0 and 1 that a threshold may be.
INSIDE = (np.finfo(float).tiny, 1 - np.finfo(float).epsneg)


def _asked(temperature: bool, metric: ThresholdMetric | None) -> dict[str, tuple[str, ...]]:
    """What is to be fitted, and to which kinds."""
    every = {"temperature": (temperature, CALIBRATED), "threshold": (metric is not None, THRESHOLDED)}
    return {what: kinds for what, (is_asked, kinds) in every.items() if is_asked}


def to_fit(tasks: Iterable[Task], temperature: bool, metric: ThresholdMetric | None, remedy: str) -> list[str]:
    """Returns the names of the tasks that have something to fit.

    Raises:
        MinBertError: there are none. The message ends with `remedy`.
    """
    tasks, asked = list(tasks), _asked(temperature, metric)
    found = [task.name for task in tasks if any(task.kind in kinds for kinds in asked.values())]
    if not found:
        what = " and ".join(f"a {what} is for tasks of kind {_either(kinds)}" for what, kinds in asked.items())
        raise MinBertError(f"{what.capitalize()}. Found {_with_kinds(tasks)}. {remedy}")
    return found


def skipped(tasks: Iterable[Task], temperature: bool, metric: ThresholdMetric | None) -> list[str]:
    """Returns sentences that say which of the tasks cannot have a temperature or a threshold, of those requested."""
    tasks, found = list(tasks), []
    for what, kinds in _asked(temperature, metric).items():
        without = [task for task in tasks if task.kind not in kinds]
        if without:
            found.append(f"No {what}, which is for tasks of kind {_either(kinds)}: {_with_kinds(without)}.")
    return found


def _either(kinds: Sequence[str]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def _with_kinds(tasks: Iterable[Task]) -> str:
    return ", ".join(f"{task.name} ({task.kind})" for task in tasks)


def fit(task: Task, logits: np.ndarray, labels: np.ndarray, temperature: bool, metric: ThresholdMetric | None) -> Task:
    """Fits the temperature by the negative log-likelihood and the thresholds by `metric`. Returns the changed task.

    Args:
        task: a task of a kind in `CALIBRATED`.
        logits: the outputs of the head, [N, C]. Labels are [N], or [N, C] for `kind: labels`.
        temperature: whether to fit the temperature. Otherwise the task keeps its own.
        metric: one of `THRESHOLD_METRICS`, for choosing the threshold of each label. `None` keeps the task's
            thresholds.
    """
    logits = as_matrix(task, logits)
    if temperature:
        task = with_temperature(task, best_temperature(task, logits, labels))
    if metric is not None:
        yes = _probabilities(decode(task, logits))
        if not task.traits.is_set:
            return replace(task, thresholds=best_threshold(yes[:, 1], labels == 1, metric))
        columns = zip(yes.T, labels.T > 0, strict=True)
        task = replace(task, thresholds=[best_threshold(*column, metric) for column in columns])
    return task


def _probabilities(decoded: Decoded) -> np.ndarray:
    assert decoded.probabilities is not None  # by the task's kind
    return decoded.probabilities


def with_temperature(task: Task, temperature: float) -> Task:
    """Returns the task with another temperature and the same answers: its thresholds change accordingly."""
    from scipy.special import expit, logit

    moved = expit(logit(task.thresholds) * task.temperature / temperature).clip(*INSIDE)
    return replace(task, temperature=temperature, thresholds=moved.tolist() if task.own_thresholds else 0.5)


def best_temperature(task: Task, logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature with the smallest mean negative log-likelihood, from `LOWEST` to `HIGHEST`.

    With b = 1 / T the likelihood is convex. Its slope is the model's expected logit minus the logit of the label:
    sum_c p_c(b) z_c - z_y. The function finds the slope's only root.
    """
    from scipy.optimize import brentq

    if task.traits.is_set:
        logits, labels = logits.reshape(-1, 1), labels.reshape(-1)
    if task.kind in THRESHOLDED:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    logits = logits - logits.max(axis=1, keepdims=True)
    right = np.take_along_axis(logits, np.asarray(labels, dtype=np.int64)[:, None], axis=1)[:, 0]

    def slope(log_b: float) -> float:
        exponentials = np.exp(np.exp(log_b) * logits)
        expected = (exponentials * logits).sum(axis=1) / exponentials.sum(axis=1)
        return float((expected - right).mean())

    low, high = -np.log(HIGHEST), -np.log(LOWEST)
    if slope(low) >= 0:
        return HIGHEST
    if slope(high) <= 0:
        return LOWEST
    return float(np.exp(-brentq(slope, low, high, xtol=1e-12)))


# ---- Thresholds --------------------------------------------------------------------------------------------------


def _accuracy(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray, tn: np.ndarray) -> np.ndarray:
    return (tp + tn) / (tp + fp + fn + tn)


def _f1(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray, tn: np.ndarray) -> np.ndarray:
    return 2 * tp / np.maximum(2 * tp + fp + fn, 1)


def _matthews(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray, tn: np.ndarray) -> np.ndarray:
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / np.sqrt(np.where(product == 0, 1.0, product))


#: Metrics that a threshold can be chosen by, from the counts of true and false yes and false and true no.
THRESHOLD_METRICS: dict[ThresholdMetric, Callable[..., np.ndarray]] = {
    "f1": _f1,
    "accuracy": _accuracy,
    "matthews": _matthews,
}


def best_threshold(yes: np.ndarray, labels: np.ndarray, metric: ThresholdMetric) -> float:
    """Returns the threshold with the best score. If several are equally good, it returns the one nearest to 0.5.

    A threshold is halfway between two probabilities that occur, or between the smallest or largest one and 0 or 1.

    Args:
        yes: the probabilities of the label, [N].
        labels: whether the label is right, bool [N].
        metric: one of `THRESHOLD_METRICS`.
    """
    found, place = np.unique(yes, return_inverse=True)
    # Above a threshold below `found[k]` lie all rows from there on.
    rows, right = (np.bincount(place, weights, len(found)) for weights in (None, labels))
    said = np.append(rows[::-1].cumsum()[::-1], 0.0)
    tp = np.append(right[::-1].cumsum()[::-1], 0.0)
    fp, fn = said - tp, labels.sum() - tp
    scores = THRESHOLD_METRICS[metric](tp, fp, fn, len(labels) - tp - fp - fn)
    edges = np.concatenate([[0.0], found, [1.0]])
    thresholds = ((edges[:-1] + edges[1:]) / 2).clip(*INSIDE)
    best = np.flatnonzero(scores >= scores.max() - 1e-12)  # equal ones may differ by rounding
    return float(thresholds[best[np.abs(thresholds[best] - 0.5).argmin()]])


# ---- Before and after --------------------------------------------------------------------------------------------


def halves(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Splits the rows into two halves with similar labels. Yields (first, second) and then (second, first)."""
    by = labels if labels.ndim == 1 else labels.sum(axis=1)
    order = np.lexsort([np.random.default_rng(0).permutation(len(labels)), by])
    one, other = np.sort(order[::2]), np.sort(order[1::2])
    yield one, other
    yield other, one


def crossfitted(
    task: Task, logits: np.ndarray, labels: np.ndarray, temperature: bool, metric: ThresholdMetric | None
) -> Decoded:
    """Returns answers to all rows. Each half is answered with a fit on the other half, so no row is in its own fit."""
    probabilities = np.zeros((len(labels), len(task.labels)))
    values = np.zeros_like(labels)
    for fitted_on, rest in halves(labels):
        fitted = fit(task, logits[fitted_on], labels[fitted_on], temperature, metric)
        decoded = decode(fitted, logits[rest])
        said = above_threshold(decoded.values, fitted.thresholds) if task.traits.is_set else decoded.values
        values[rest], probabilities[rest] = said, decoded.probabilities
    return Decoded(values, probabilities)


def measures(task: Task, decoded: Decoded, labels: np.ndarray) -> dict[str, Any]:
    """Measures the quality of probabilities and answers.

    Returns:
        the task's metrics; `nll`, the mean negative log-likelihood; `brier`, the mean squared distance of the
        probabilities from 0 and 1 (Brier 1950), for classes summed over classes and for binary labels only that of the
        second label; `ece`, the expected calibration error over ten bins of equal width; and `bins`, the bins of the
        larger probability.
    """
    scores = {
        name: metric(task, decoded.values, labels)
        for name, metric in KIND_METRICS[task.kind].items() if name not in OF_ORDER
    }  # fmt: skip
    probabilities, right = _probabilities(decoded), np.asarray(labels).astype(np.int64)
    if task.traits.is_set:
        yes, right = probabilities.reshape(-1), right.reshape(-1)
        probabilities = np.stack([1 - yes, yes], axis=1)
    of_right = np.take_along_axis(probabilities, right[:, None], axis=1)[:, 0]
    squares = (probabilities - np.eye(probabilities.shape[1])[right]) ** 2
    brier = squares[:, 1] if task.kind in THRESHOLDED else squares.sum(axis=1)
    bins, ece = calibration(probabilities, probabilities.argmax(axis=1), right)
    nll = float(np.log(1 / of_right.clip(min=INSIDE[0])).mean())  # not -log, whose nought is -0.0
    return {
        **scores, "nll": nll, "brier": float(brier.mean()), "ece": ece,
        "bins": [{**asdict(each), "interval": each.interval and [*each.interval]} for each in bins],
    }  # fmt: skip


def fit_and_measure(
    task: Task, logits: np.ndarray, labels: np.ndarray, temperature: bool, metric: ThresholdMetric | None
) -> tuple[Task, dict[str, Any]]:
    """Fits the task on all rows. Measures it `before` the fit and `after` a fit on other rows.

    The temperature is kept only if it lowers the negative log-likelihood of rows that it was not fitted on. Otherwise
    it is 1.

    Args:
        metric: as for `fit`. Not used for a task without thresholds.

    Returns:
        the task; and its entry for `calibration.json`, with the `metric` that thresholds are compared by, and `notes`,
        remarks on the fit.
    """
    metric = metric if task.kind in THRESHOLDED else None
    logits = as_matrix(task, logits)
    raw = with_temperature(task, 1.0) if temperature else task
    raw = raw if metric is None else replace(raw, thresholds=0.5)
    before, notes = measures(raw, decode(raw, logits), labels), []
    if temperature:
        temperature, notes = _temperature_helps(raw, logits, labels, before["nll"])
    fitted = fit(raw, logits, labels, temperature, metric)
    after = measures(fitted, crossfitted(raw, logits, labels, temperature, metric), labels)
    told_by = metric if metric is None or metric in KIND_METRICS[task.kind] else task.metric
    if told_by is not None and after[told_by] < before[told_by]:
        notes.append(f"The threshold lowers {told_by} on rows that were not fitted.")
    return fitted, {
        "rows": len(labels), "temperature": fitted.temperature, "thresholds": fitted.own_thresholds,
        "metric": told_by, "notes": notes, "before": before, "after": after,
    }  # fmt: skip


def _temperature_helps(task: Task, logits: np.ndarray, labels: np.ndarray, before: float) -> tuple[bool, list[str]]:
    """Whether a temperature lowers the negative log-likelihood of rows that it was not fitted on, and a note about it.

    Args:
        before: the negative log-likelihood without a temperature.
    """
    found = best_temperature(task, logits, labels)
    after = measures(task, crossfitted(task, logits, labels, True, None), labels)["nll"]
    if not after < before:
        return False, [
            f"The best temperature, {found:.3f}, is no better on rows that were not fitted (nll {before:.4f} before, "
            f"{after:.4f} after), so that it is not stored: the temperature stays at 1."
        ]
    at_bound = found in (LOWEST, HIGHEST)
    return True, [f"The temperature, {found:.3f}, is at its bound: dev rows do not limit it."] * at_bound
