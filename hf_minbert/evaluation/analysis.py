"""Where a model is weak, in numbers: by class, by neighbour, by score, by length, by the words of a text.

Numbers only, from predictions beside labels; `hf_minbert.reporting` says and draws them.
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
from ..settings.metrics import answered, by_words, class_scores, correlation, metrics_of, tag_names
from ..settings.tasks import TASKS, Task
from .metrics import value_metrics
from .significance import mean_interval, share_interval

Texts = Sequence[tuple[str, ...]]


# ---- Classes -----------------------------------------------------------------------------------------------------


def confusion(task: Task, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How many rows of class i were taken for class j, `[classes, classes]`, those that never occur included."""
    from sklearn.metrics import confusion_matrix

    return confusion_matrix(labels, values, labels=range(len(task.labels)))


@dataclass(frozen=True)
class ClassScores:
    """One class of a task; `None` where a score is not defined.

    Args:
        support: rows that have the label.
        predicted: rows that were given it.
        precision: not defined for a class that is never predicted, `recall` for one that never occurs, and `f1` for
            one that is neither.
    """

    name: str
    support: int
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None


def by_class(task: Task, values: np.ndarray, labels: np.ndarray) -> list[ClassScores]:
    """Each class of the task, in its order."""
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
    """Each label of a task of kind `labels`, in its order.

    Args:
        values, labels: the probabilities, and a 0 or 1, of each label, both [N, C].
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
    """Each type of entity, in the order of its first label."""
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
    """How many words of each sentence have the right tag, [N]."""
    return np.array([(ours == theirs).sum() for ours, theirs in zip(values, labels, strict=True)])


def is_ordered(task: Task) -> bool:
    """Whether the labels are known to be steps of a scale: by their kind, as sentiments of ours, or rising numbers."""
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
        rows: those of either class that were taken for the other.
        share: of all rows.
        accuracy: of all rows, if the two were one class.
    """

    names: tuple[str, str]
    rows: int
    share: float
    accuracy: float


def neighbours(task: Task, matrix: np.ndarray) -> list[Neighbours]:
    """Each pair of neighbours, from the `confusion` of ordered labels."""
    total, right = matrix.sum(), np.trace(matrix)
    found = []
    for low, names in enumerate(zip(task.labels, task.labels[1:], strict=False)):
        rows = int(matrix[low, low + 1] + matrix[low + 1, low])
        found.append(Neighbours(names, rows, float(rows / total), float((right + rows) / total)))
    return found


def within(matrix: np.ndarray, steps: int) -> float:
    """The share of rows that are at most so many classes off."""
    places = np.arange(len(matrix))
    near = np.abs(places[:, None] - places) <= steps
    return float(matrix[near].sum() / matrix.sum())


@dataclass(frozen=True)
class Merged:
    """A scale of ordered labels made two classes.

    Args:
        low, high: what became the two classes.
        rows: how many are counted; fewer than all where a middle class is left out.
        accuracy: of the model; `None` without a row.
        constant: of the same answer for every row, the more frequent one.
    """

    low: tuple[str, ...]
    high: tuple[str, ...]
    rows: int
    accuracy: float | None
    constant: float | None


def merged(task: Task, values: np.ndarray, labels: np.ndarray, probabilities: np.ndarray | None) -> list[Merged]:
    """Two classes for each cut through the scale; then, of an odd number, without the middle class.

    The last leaves out the rows of the middle class, as SST-2 does, and takes for the answer the side with the
    greater sum of probabilities.
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
    """The best answer that is the same for every row, or word, of these labels, and its metrics.

    The most frequent class, or the mean score, whose correlations are not defined and 0 here. Where any labels may be
    right there is no such answer, but probabilities: each label's frequency.
    """
    if task.traits.is_tags:
        most = int(np.bincount(by_words(labels)[0], minlength=len(task.labels)).argmax())
        return most, value_metrics(task, ragged([np.full(len(row), most) for row in labels]), labels)
    labels = np.asarray(labels)
    if task.traits.is_score:
        answer = float(labels.mean())
        return answer, {"pearson": 0.0, "spearman": 0.0, **distances(np.full(len(labels), answer), labels)}
    if task.traits.is_set:
        return 0.0, value_metrics(task, np.tile(labels.mean(axis=0), (len(labels), 1)), labels)
    most = int(np.bincount(labels.astype(int), minlength=len(task.labels)).argmax())
    return most, value_metrics(task, np.full(len(labels), most), labels)


def baseline(task: Task, labels: np.ndarray, texts: Texts = ()) -> dict[str, Any]:
    """What `metrics.json` says of answers that need no model: in words what they are, and their `scores` by metric.

    They are those of `constant_answer`; of scores, whose correlation with a constant is not defined, of `overlap`.

    Args:
        labels: [N]; of kind `labels` a 0 or 1 for each, [N, C]; of tags [N] arrays [words].
        texts: of each row; needed for scores alone, which have no baseline without pairs of texts.
    """
    if task.traits.is_score:
        answer = "the share of words that are in both texts"
        return {"answer": answer, "scores": overlap(texts, labels)} if texts else {}
    most, found = constant_answer(task, labels)
    every = "word" if task.traits.is_tags else "row"
    answer = f"the most frequent label for every {every} ({task.labels[int(most)]})"
    if task.traits.is_set:
        answer = "the frequency of each label as its probability, for every row"
    return {"answer": answer, "scores": {name: found[name] for name in metrics_of(task)}}


def chance(task: Task, labels: np.ndarray) -> float:
    """The accuracy to expect of answers drawn with the frequencies of these labels."""
    shares = np.bincount(labels, minlength=len(task.labels)) / len(labels)
    return float((shares**2).sum())


def distances(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """`mae` and `rmse` of scores, in the unit of the labels."""
    residuals = values - labels
    return {"mae": float(np.abs(residuals).mean()), "rmse": float(np.sqrt((residuals**2).mean()))}


def overlap(texts: Texts, labels: np.ndarray) -> dict[str, float]:
    """The correlations with the share of words that a pair has in common (Jaccard 1912), which needs no model."""
    bags = [tuple({*words(text)} for text in pair) for pair in texts]
    shares = np.array([len(a & b) / max(1, len(a | b)) for a, b in bags])
    return {name: correlation(name, shares, labels) for name in ("pearson", "spearman")}


# ---- In bins -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bin:
    """The rows whose x lies between two bounds.

    Args:
        low, high: the bounds, the upper one included in the last bin only.
        rows: how many; bins without rows are left out.
        x: their mean x.
        y: their mean y.
        interval: of that mean, 95 %; `None` of a single row.
    """

    low: float
    high: float
    rows: int
    x: float
    y: float
    interval: tuple[float, float] | None


def binned(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> list[Bin]:
    """The mean of `y` by bins of `x`; the interval is Wilson's where `y` is bool, else Student's.

    An x outside the edges counts in the nearest bin.
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
    """Edges of bins of one width, as decimals: 0.3, not the 0.30000000000000004 that would put a 0.3 one bin lower."""
    return np.linspace(low, high, bins + 1).round(12)


def quantile_edges(x: np.ndarray, bins: int = 8, least: int = 25) -> np.ndarray:
    """Edges between which about equally many rows lie: `bins` of them, fewer where that would be under `least`."""
    bins = max(1, min(bins, len(x) // least))
    edges = np.unique(np.quantile(x, np.linspace(0, 1, bins + 1)))
    return edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])


def calibration(probabilities: np.ndarray, values: np.ndarray, labels: np.ndarray) -> tuple[list[Bin], float]:
    """How often the model is right by how sure it is, and the expected calibration error (Naeini et al. 2015).

    The error is the mean distance between the two over ten equal bins, weighted by their rows.
    """
    sure = np.take_along_axis(probabilities, values[:, None], axis=1)[:, 0]
    bins = binned(sure, values == labels, equal_edges(0, 1, 10))
    return bins, float(sum(b.rows * abs(b.y - b.x) for b in bins) / len(sure))


# ---- Texts -------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case."""
    return re.findall(r"\w+", text.lower())


def lengths(texts: Texts) -> np.ndarray:
    """Words of each row, of both texts of a pair together, int64 [N]."""
    return np.array([sum(len(words(text)) for text in row) for row in texts], dtype=np.int64)


def word_counts(texts: Iterable[tuple[str, ...]]) -> Counter[str]:
    """How often each word stands in the texts."""
    counts: Counter[str] = Counter()
    for row in texts:
        for text in row:
            counts.update(words(text))
    return counts


def commonness(texts: Texts, counts: Mapping[str, int]) -> np.ndarray:
    """How common a row's words are: the mean of log10(1 + count) over them, float64 [N]; 0 without a word."""
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
    """For each class with errors, the rows of it that were taken for another, the surest first, `most` at most.

    How sure: the probability of what was said less that of what is right.
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
    """The rows with a label too many or too few, those of the highest cross-entropy first, `most` at most."""
    said, right = answered(task, values, labels)
    losses = -np.log(np.where(right, values, 1 - values).clip(min=1e-300)).sum(axis=1)
    wrong = (said != right).any(axis=1)
    return [int(row) for row in np.argsort(-losses, kind="stable") if wrong[row]][:most]


def worst_scores(values: np.ndarray, labels: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """The rows scored farthest too high and those farthest too low, `most` of each at most."""
    residuals = values - labels
    order = np.argsort(residuals, kind="stable")
    high = [int(row) for row in order[::-1][:most] if residuals[row] > 0]
    return high, [int(row) for row in order[:most] if residuals[row] < 0]


def changed(
    values: np.ndarray, other: np.ndarray, labels: np.ndarray, is_score: bool, most: int
) -> tuple[list[int], list[int]]:
    """The rows where the other model is better and those where it is worse, `most` of each at most.

    Of scores, the rows whose distance to the label changes most; of classes, those that turn from wrong to right and
    the other way round, in their order.
    """
    if is_score:
        gain = np.abs(values - labels) - np.abs(other - labels)
    else:
        gain = (other == labels).astype(int) - (values == labels).astype(int)
    order = np.argsort(-gain, kind="stable")
    better = [int(row) for row in order[:most] if gain[row] > 0]
    order = np.argsort(gain, kind="stable")
    return better, [int(row) for row in order[:most] if gain[row] < 0]
