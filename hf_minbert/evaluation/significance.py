"""The uncertainty of scores: bootstrap intervals, and a test of the difference between two models on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..settings.metrics import BY_ROW, entity_counts, is_constant, metrics_of
from ..settings.tasks import Task

RESAMPLES = 1000
CONFIDENCE = 0.95
#: Rows that a resample draws at a time, times resamples: bounds the memory.
_BATCH = 2_000_000

#: From the places of rows, [rows], to a number.
Statistic = Callable[[np.ndarray], float]


def statistics_of(task: Task, values: np.ndarray, labels: np.ndarray) -> dict[str, Statistic]:
    """Returns a function that computes the metrics of the task's kind on selected rows.

    The metrics are those of `value_metrics`, computed fast enough for thousands of resamples.

    Args:
        values, labels: class ids or scores, both [N]; for `kind: labels` probabilities and 0 or 1, both [N, C]; for
            tags [N] arrays [words], where a row is a sentence.
    """
    if task.traits.is_tags:
        return _of_tags(task, values, labels)
    found: dict[str, Statistic] = {
        name: lambda i, metric=metric: metric(task, values[i], labels[i]) for name, metric in metrics_of(task).items()
    }
    if task.traits.is_score:
        codes = [np.unique(x, return_inverse=True)[1] for x in (values, labels)]
        return found | {
            "pearson": lambda i: _pearson(values[i], labels[i]),
            "spearman": lambda i: _pearson(_ranks(codes[0][i]), _ranks(codes[1][i])),
        }
    if task.traits.is_set:
        rows = {name: by_row(task, values, labels) for name, by_row in BY_ROW.items()}
        return found | {name: lambda i, of=of: float(of[i].mean()) for name, of in rows.items()}
    classes = len(task.labels)
    by_class: dict[str, Statistic] = {
        "f1": lambda i: float(_f1(values[i], labels[i], classes)[1]),
        "macro_f1": lambda i: float(_f1(values[i], labels[i], classes).mean()),
    }
    return {name: by_class.get(name, statistic) for name, statistic in found.items()}


def _of_tags(task: Task, values: np.ndarray, labels: np.ndarray) -> dict[str, Statistic]:
    """Returns the metrics of resampled sentences, from counts per sentence.

    Sentences are drawn whole and differ in length.
    """
    found: dict[str, Statistic] = {
        name: lambda i, metric=metric: metric(task, values[i], labels[i]) for name, metric in metrics_of(task).items()
    }
    right = np.array([(ours == theirs).sum() for ours, theirs in zip(values, labels, strict=True)])
    words = np.array([len(row) for row in labels])
    found["accuracy"] = lambda i: float(right[i].sum() / words[i].sum())
    if "entity_f1" in found:
        hits, predicted, there = entity_counts(task, values, labels).T
        found["entity_f1"] = lambda i: _share(2 * hits[i], predicted[i] + there[i])
        found["entity_precision"] = lambda i: _share(hits[i], predicted[i])
        found["entity_recall"] = lambda i: _share(hits[i], there[i])
    else:
        ours, theirs = (_by_class(rows, len(task.labels)) for rows in (values, labels))
        hits = _by_class([a[a == b] for a, b in zip(values, labels, strict=True)], len(task.labels))
        found["macro_f1"] = lambda i: float(_f1_of(hits[i].sum(axis=0), (ours + theirs)[i].sum(axis=0)).mean())
    return found


def _by_class(rows: Iterable[np.ndarray], classes: int) -> np.ndarray:
    """Returns how often each class occurs in each row, [N, classes]."""
    return np.stack([np.bincount(row[row >= 0], minlength=classes) for row in rows])


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    """Divides. The result is 0 if the denominator is 0."""
    return float(part.sum() / whole.sum()) if whole.sum() else 0.0


def _pearson(values: np.ndarray, labels: np.ndarray) -> float:
    """Computes the correlation without the p-value, which takes scipy ten times as long."""
    return 0.0 if is_constant(values) or is_constant(labels) else float(np.corrcoef(values, labels)[0, 1])


def _ranks(codes: np.ndarray) -> np.ndarray:
    """Ranks of whole numbers, ties at their mean rank, without sorting."""
    counts = np.bincount(codes)
    return (np.cumsum(counts) - (counts - 1) / 2)[codes]


def _f1(values: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Returns F1 of each class, 0 for a class that never occurs and is never predicted."""
    hits = np.bincount(labels[values == labels], minlength=classes)
    rows = np.bincount(values, minlength=classes) + np.bincount(labels, minlength=classes)
    return _f1_of(hits, rows)


def _f1_of(hits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """F1 of each class, from how often it is right, and how often it is there and is predicted together."""
    return np.divide(2 * hits, rows, out=np.zeros(len(hits)), where=rows > 0)


def bootstrap(statistic: Statistic, rows: int, seed: int = 0) -> np.ndarray:
    """Computes a statistic on sets of `rows` rows drawn with replacement (Efron 1979).

    Args:
        statistic: a function of the positions of the drawn rows, [rows].
        rows: two or more.

    Returns:
        `[RESAMPLES]`; the same for the same seed.
    """
    from scipy import stats

    drawn = stats.bootstrap(
        (np.arange(rows),), statistic, n_resamples=RESAMPLES, batch=max(1, _BATCH // rows), vectorized=False,
        method="percentile", confidence_level=CONFIDENCE, rng=seed,
    )  # fmt: skip
    return drawn.bootstrap_distribution


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """Returns the percentile interval of a bootstrap."""
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [rest, 1 - rest])
    return float(low), float(high)


def mcnemar(right: np.ndarray, other_right: np.ndarray) -> tuple[int, int, float]:
    """McNemar's exact test (McNemar 1947) on the rows that only one of two models gets right.

    Args:
        right, other_right: which rows each model gets right, bool [N].

    Returns:
        the number of rows that only the first model gets right, the number that only the second gets right, and the
        two-sided p-value.
    """
    from scipy.stats import binomtest

    first, second = int((right & ~other_right).sum()), int((other_right & ~right).sum())
    p = binomtest(first, first + second).pvalue if first + second else 1.0
    return first, second, float(p)


def share_interval(count: int, rows: int) -> tuple[float, float]:
    """Returns Wilson's interval for a share of `rows` rows (Wilson 1927)."""
    from scipy.stats import binomtest

    found = binomtest(count, rows).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def correlation_interval(r: float, rows: int) -> tuple[float, float] | None:
    """Returns Fisher's interval for a Pearson correlation (Fisher 1921), which assumes that both columns are normal.

    It is `None` if undefined: for three rows or fewer, or a correlation of 1 or -1.
    """
    from scipy.stats import norm

    if rows < 4 or abs(r) >= 1:
        return None
    width = float(norm.ppf((1 + CONFIDENCE) / 2)) / (rows - 3) ** 0.5
    z = float(np.arctanh(r))
    return float(np.tanh(z - width)), float(np.tanh(z + width))


def mean_interval(numbers: np.ndarray) -> tuple[float, float] | None:
    """Returns Student's interval for a mean; `None` for a single number."""
    from scipy import stats

    if len(numbers) < 2:
        return None
    mean, error = float(np.mean(numbers)), float(stats.sem(numbers))
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(CONFIDENCE, len(numbers) - 1, mean, error)
    return float(low), float(high)
