"""Finds a model's weaknesses: by class, by neighbouring class, by score, by length and by word.

This module computes numbers from predictions and labels. `hf_minbert.reporting` writes and draws them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model.inference import ragged
from ..model.spans import OUTSIDE, spans
from ..settings.metrics import answered, by_words, class_scores, correlation, higher_is_better, metrics_of, tag_names
from ..settings.tasks import TASKS, Task
from .metrics import value_metrics
from .significance import mean_interval, share_interval

Texts = Sequence[tuple[str, ...]]


# ---- Classes -----------------------------------------------------------------------------------------------------


def confusion(task: Task, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the confusion matrix `[classes, classes]`: how many rows of class i were predicted as class j."""
    from sklearn.metrics import confusion_matrix

    return confusion_matrix(labels, values, labels=range(len(task.labels)))


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class of a task; `None` if a score is not defined.

    Args:
        support: the number of rows with the label.
        predicted: the number of rows with the prediction.
        precision: undefined for a class that is never predicted. `recall` is undefined for a class that never occurs,
            and `f1` for a class with neither.
    """

    name: str
    support: int
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None


def by_class(task: Task, values: np.ndarray, labels: np.ndarray) -> list[ClassScores]:
    """Returns the scores of each class, in the order of the task's labels."""
    scores = class_scores(values, labels, len(task.labels))
    support, predicted = (np.bincount(x[x >= 0], minlength=len(task.labels)).tolist() for x in (labels, values))
    return [
        ClassScores(
            name, support[i], predicted[i],
            float(scores["precision"][i]) if predicted[i] else None,
            float(scores["recall"][i]) if support[i] else None,
            float(scores["f1"][i]) if support[i] or predicted[i] else None,
        )
        for i, name in enumerate(task.labels)
    ]  # fmt: skip


def by_label(task: Task, values: np.ndarray, labels: np.ndarray) -> list[ClassScores]:
    """Returns the scores of each label of a `kind: labels` task, in the order of its labels.

    Args:
        values, labels: the probability of each label, and a 0 or 1 for each label, both [N, C].
    """
    said, right = answered(task, values, labels)
    hits, support, predicted = ((x.sum(axis=0)).tolist() for x in (said & right, right, said))
    return [
        ClassScores(
            name, support[i], predicted[i],
            hits[i] / predicted[i] if predicted[i] else None,
            hits[i] / support[i] if support[i] else None,
            2 * hits[i] / (support[i] + predicted[i]) if support[i] or predicted[i] else None,
        )
        for i, name in enumerate(task.labels)
    ]  # fmt: skip


# ---- Tags --------------------------------------------------------------------------------------------------------


def by_type(task: Task, values: np.ndarray, labels: np.ndarray) -> list[ClassScores]:
    """Returns the scores of each type of entity, in the order of its first label."""
    counts: dict[str, list[int]] = {name.partition("-")[2]: [0, 0, 0] for name in task.labels if name != OUTSIDE}
    for pair in zip(values, labels, strict=True):
        predicted, there = ({*spans(tag_names(task, ids))} for ids in pair)
        for place, found in enumerate((predicted & there, predicted, there)):
            for span in found:
                counts[span.type][place] += 1
    return [
        ClassScores(
            name, there, predicted, hits / predicted if predicted else None, hits / there if there else None,
            2 * hits / (predicted + there) if predicted or there else None,
        )
        for name, (hits, predicted, there) in counts.items()
    ]  # fmt: skip


def right_words(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the number of correct words of each sentence, [N]."""
    return np.array([(ours == theirs).sum() for ours, theirs in zip(values, labels, strict=True)])


def is_ordered(task: Task) -> bool:
    """Whether the labels are steps of a scale.

    They are by their kind, as sentiment labels of this package, or as increasing numbers.
    """
    if not task.traits.is_class or len(task.labels) < 3:
        return False
    if task.kind == "ordinal" or task.labels == TASKS["sst"].labels:
        return True
    numeric = all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in task.labels)
    numbers = [float(name) for name in task.labels] if numeric else []
    return numeric and all(a < b for a, b in zip(numbers, numbers[1:], strict=False))


@dataclass(frozen=True)
class Neighbours:
    """Two neighbouring classes of a scale.

    Args:
        rows: the number of rows of one class that were predicted as the other.
        share: the share of these rows among all rows.
        accuracy: the accuracy on all rows if the two classes were one.
    """

    names: tuple[str, str]
    rows: int
    share: float
    accuracy: float


def neighbours(task: Task, matrix: np.ndarray) -> list[Neighbours]:
    """Returns each pair of neighbouring classes, from the `confusion` of ordered labels."""
    total, right = matrix.sum(), np.trace(matrix)
    found = []
    for low, names in enumerate(zip(task.labels, task.labels[1:], strict=False)):
        rows = int(matrix[low, low + 1] + matrix[low + 1, low])
        found.append(Neighbours(names, rows, float(rows / total), float((right + rows) / total)))
    return found


def within(matrix: np.ndarray, steps: int) -> float:
    """Returns the share of rows whose prediction is at most `steps` classes away from the label."""
    places = np.arange(len(matrix))
    near = np.abs(places[:, None] - places) <= steps
    return float(matrix[near].sum() / matrix.sum())


@dataclass(frozen=True)
class Merged:
    """A scale of ordered labels reduced to two classes.

    Args:
        low, high: the labels in each of the two classes.
        rows: the number of rows, without those of a middle class that is left out.
        accuracy: the accuracy of the model; `None` without rows.
        constant: the accuracy of always predicting the more frequent class.
    """

    low: tuple[str, ...]
    high: tuple[str, ...]
    rows: int
    accuracy: float | None
    constant: float | None


def merged(task: Task, values: np.ndarray, labels: np.ndarray, probabilities: np.ndarray | None) -> list[Merged]:
    """Returns two classes for each cut through the scale and, for an odd number of labels, without the middle class.

    The last one leaves out the rows of the middle class, as SST-2 does. The prediction is the side with the larger sum
    of probabilities.
    """
    names = task.labels
    found = [_merged(names[:cut], names[cut:], values >= cut, labels >= cut) for cut in range(1, len(names))]
    middle = len(names) // 2
    if len(names) % 2 and probabilities is not None:
        kept = labels != middle
        high = probabilities[:, middle + 1 :].sum(axis=1) > probabilities[:, :middle].sum(axis=1)
        found.append(_merged(names[:middle], names[middle + 1 :], high[kept], (labels > middle)[kept]))
    return found


def _merged(low: tuple[str, ...], high: tuple[str, ...], said: np.ndarray, right: np.ndarray) -> Merged:
    if not len(right):
        return Merged(low, high, 0, None, None)
    share = float(right.mean())
    return Merged(low, high, len(right), float((said == right).mean()), max(share, 1 - share))


# ---- Baselines ---------------------------------------------------------------------------------------------------


def constant_answer(task: Task, labels: np.ndarray) -> tuple[float, dict[str, float]]:
    """Returns the most frequent label of rows, or of words, and for each metric the best score of a constant answer.

    A constant answer is the same for every row. Which one is best depends on the metric: for the F1 of a binary task
    it is the second label, also if the first is more frequent. For scores it is the mean. Correlations with a constant
    are undefined and count as 0, as in all metrics. For `kind: labels` the answer is a probability for each label, the
    label's frequency. For tags it is the most frequent one: an entity at every word has the best recall, which says
    nothing.
    """
    if task.traits.is_tags:
        most = int(np.bincount(by_words(labels)[0], minlength=len(task.labels)).argmax())
        return most, value_metrics(task, ragged([np.full(len(row), most) for row in labels]), labels)
    labels = np.asarray(labels)
    if task.traits.is_score:
        answer = float(labels.mean())
        values = np.full(len(labels), answer)
        found = {name: metric(task, values, labels) for name, metric in metrics_of(task).items()}
        return answer, {**found, **distances(values, labels)}
    if task.traits.is_set:
        return 0.0, value_metrics(task, np.tile(labels.mean(axis=0), (len(labels), 1)), labels)
    most = int(np.bincount(labels.astype(int), minlength=len(task.labels)).argmax())
    found = [value_metrics(task, np.full(len(labels), label), labels) for label in range(len(task.labels))]
    best = {name: (max if higher_is_better(name) else min)(of[name] for of in found) for name in metrics_of(task)}
    return most, best


def baseline(task: Task, labels: np.ndarray, texts: Texts = ()) -> dict[str, Any]:
    """Returns the baseline of a task in `metrics.json`: a description of answers without a model, and their `scores`.

    The scores are those of `constant_answer`. For a task with scores they are those of `overlap`, because a constant
    has no correlation with anything.

    Args:
        labels: [N]; for `kind: labels` [N, C], 0 or 1; for `kind: tags` [N] arrays [words].
        texts: the texts of each row. They are needed for scores only. Without pairs of texts, scores have no baseline.
    """
    if task.traits.is_score:
        answer = "the share of words that are in both texts"
        return {"answer": answer, "scores": overlap(texts, labels)} if texts else {}
    most, found = constant_answer(task, labels)
    answer = "the same label for every row, the best one for each metric"
    if task.traits.is_tags:
        answer = f"the most frequent label for every word ({task.labels[int(most)]})"
    if task.traits.is_set:
        answer = "the frequency of each label as its probability, for every row"
    return {"answer": answer, "scores": {name: found[name] for name in metrics_of(task)}}


def chance(task: Task, labels: np.ndarray) -> float:
    """Returns the expected accuracy of random predictions with the frequencies of these labels."""
    shares = np.bincount(labels, minlength=len(task.labels)) / len(labels)
    return float((shares**2).sum())


def distances(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns `mae` and `rmse` of scores, in the unit of the labels."""
    residuals = values - labels
    return {"mae": float(np.abs(residuals).mean()), "rmse": float(np.sqrt((residuals**2).mean()))}


def overlap(texts: Texts, labels: np.ndarray) -> dict[str, float]:
    """Returns the correlations of the labels with the share of words that a pair has in common (Jaccard 1912).

    Uses no model.
    """
    bags = [tuple({*words(text)} for text in pair) for pair in texts]
    shares = np.array([len(a & b) / max(1, len(a | b)) for a, b in bags])
    return {name: correlation(name, shares, labels) for name in ("pearson", "spearman")}


# ---- In bins -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bin:
    """The rows whose x is between two bounds.

    Args:
        low, high: the bounds. The upper bound belongs to the last bin only.
        rows: the number of rows. Bins without rows are left out.
        x: their mean x.
        y: their mean y.
        interval: the 95 % interval of the mean y; `None` for a single row.
    """

    low: float
    high: float
    rows: int
    x: float
    y: float
    interval: tuple[float, float] | None


def binned(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> list[Bin]:
    """Returns the mean of `y` in bins of `x`. The interval is Wilson's if `y` is boolean, otherwise Student's.

    An x outside the edges belongs to the nearest bin.
    """
    places = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    found = []
    for place in np.unique(places):
        inside = y[places == place]
        shares = inside.dtype == bool
        bounds = share_interval(int(inside.sum()), len(inside)) if shares else mean_interval(inside)
        low, high = float(edges[place]), float(edges[place + 1])
        found.append(Bin(low, high, len(inside), float(x[places == place].mean()), float(inside.mean()), bounds))
    return found


def equal_edges(low: float, high: float, bins: int) -> np.ndarray:
    """Returns the edges of bins of equal width, as decimals.

    With 0.30000000000000004 instead of 0.3, a value of 0.3 would be in the wrong bin.
    """
    return np.linspace(low, high, bins + 1).round(12)


def quantile_edges(x: np.ndarray, bins: int = 8, least: int = 25) -> np.ndarray:
    """Returns the edges of `bins` bins with about equally many rows, or of fewer bins with at least `least` rows."""
    bins = max(1, min(bins, len(x) // least))
    edges = np.unique(np.quantile(x, np.linspace(0, 1, bins + 1)))
    return edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])


def calibration(probabilities: np.ndarray, values: np.ndarray, labels: np.ndarray) -> tuple[list[Bin], float]:
    """Returns the accuracy by confidence, and the expected calibration error (Naeini et al. 2015).

    The error is the mean distance between accuracy and confidence over ten equal bins, weighted by their rows.
    """
    sure = np.take_along_axis(probabilities, values[:, None], axis=1)[:, 0]
    bins = binned(sure, values == labels, equal_edges(0, 1, 10))
    return bins, float(sum(b.rows * abs(b.y - b.x) for b in bins) / len(sure))


# ---- Texts -------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Returns the words of a text, as runs of letters and digits in lower case."""
    return re.findall(r"\w+", text.lower())


def lengths(texts: Texts) -> np.ndarray:
    """Returns the number of words of each row, summed over the texts of a pair, int64 [N]."""
    return np.array([sum(len(words(text)) for text in row) for row in texts], dtype=np.int64)


def word_counts(texts: Iterable[tuple[str, ...]]) -> Counter[str]:
    """Returns the number of occurrences of each word in the texts."""
    counts: Counter[str] = Counter()
    for row in texts:
        for text in row:
            counts.update(words(text))
    return counts


def commonness(texts: Texts, counts: Mapping[str, int]) -> np.ndarray:
    """Returns how common the words of each row are, float64 [N].

    This is the mean of log10(1 + count) over the words, and 0 for a row without words.
    """
    logarithms = {word: np.log10(1 + count) for word, count in counts.items()}
    found = np.zeros(len(texts))
    for place, row in enumerate(texts):
        values = [logarithms.get(word, 0.0) for text in row for word in words(text)]
        found[place] = sum(values) / max(1, len(values))
    return found


# ---- Single rows -------------------------------------------------------------------------------------------------


def worst_of_classes(
    values: np.ndarray, labels: np.ndarray, probabilities: np.ndarray | None, classes: int, most: int
) -> dict[int, list[int]]:
    """Returns the most confident errors for each class with errors, at most `most` rows each.

    The confidence of an error is the probability of the prediction minus that of the label.
    """
    rows = np.arange(len(values))
    margin = np.zeros(len(values))
    if probabilities is not None:
        margin = probabilities[rows, values] - probabilities[rows, labels]
    found = {}
    for number in range(classes):
        wrong = rows[(labels == number) & (values != number)]
        if len(wrong):
            found[number] = wrong[np.argsort(-margin[wrong], kind="stable")][:most].tolist()
    return found


def worst_of_sets(task: Task, values: np.ndarray, labels: np.ndarray, most: int) -> list[int]:
    """Returns the rows with a missing or wrong label, highest cross-entropy first, at most `most` rows."""
    said, right = answered(task, values, labels)
    losses = -np.log(np.where(right, values, 1 - values).clip(min=1e-300)).sum(axis=1)
    wrong = (said != right).any(axis=1)
    return [int(row) for row in np.argsort(-losses, kind="stable") if wrong[row]][:most]


def worst_scores(values: np.ndarray, labels: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """Returns the rows with the largest errors above and below the label, at most `most` of each."""
    residuals = values - labels
    order = np.argsort(residuals, kind="stable")
    high = [int(row) for row in order[::-1][:most] if residuals[row] > 0]
    return high, [int(row) for row in order[:most] if residuals[row] < 0]


def changed(
    values: np.ndarray, other: np.ndarray, labels: np.ndarray, is_score: bool, most: int
) -> tuple[list[int], list[int]]:
    """Returns the rows where the other model is better and those where it is worse, at most `most` of each.

    For scores, these are the rows whose distance to the label changes most. For classes, these are the rows that
    change from wrong to right or from right to wrong, in their order.
    """
    if is_score:
        gain = np.abs(values - labels) - np.abs(other - labels)
    else:
        gain = (other == labels).astype(int) - (values == labels).astype(int)
    order = np.argsort(-gain, kind="stable")
    better = [int(row) for row in order[:most] if gain[row] > 0]
    order = np.argsort(gain, kind="stable")
    return better, [int(row) for row in order[:most] if gain[row] < 0]
