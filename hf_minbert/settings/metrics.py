"""The metrics of each kind of task by name, and how they are computed. A task chooses its `metric` among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..model.kinds import above_threshold
from ..model.registry import Registry
from ..model.spans import mark_entities, outside, spans

if TYPE_CHECKING:
    import numpy as np


class Labelled(Protocol):
    """The attributes of a `Task` that a metric needs."""

    @property
    def kind(self) -> str: ...

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def thresholds(self) -> float | Sequence[float]: ...


#: From a task, its predictions and labels to a finite number: class ids or scores, both [N]; of kind `labels` the
#: probabilities, and a 0 or 1, of each label, both [N, C]; of tags class ids in [N] arrays, [words] each, -1 predicted
#: for a word that was not read. Higher is better, unless its name says otherwise: see `higher_is_better`.
Metric = Callable[["Labelled", "np.ndarray", "np.ndarray"], float]


def accuracy(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    return float((values == labels).mean())


def macro_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The plain mean of F1 over all classes of the task."""
    return float(class_scores(values, labels, len(task.labels))["f1"].mean())


def f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The F1 of a binary task's second label."""
    return float(class_scores(values, labels, len(task.labels))["f1"][1])


def matthews(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of predicted and true classes (Matthews 1975; Gorodkin 2004 for more than two).

    It is 0.0 if undefined: all predictions, or all labels, are one class.
    """
    import numpy as np

    classes, rows = len(task.labels), len(labels)
    said, right = (np.bincount(x, minlength=classes).astype(float) for x in (values, labels))
    spread = (rows**2 - said @ said) * (rows**2 - right @ right)
    return float(((values == labels).sum() * rows - said @ right) / spread**0.5) if spread > 0 else 0.0


def pearson(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    return correlation("pearson", values, labels)


def spearman(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    return correlation("spearman", values, labels)


def quadratic_kappa(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """Cohen's kappa, with each error weighted by the square of its distance in classes (Cohen 1968).

    It is 1 minus the mean square error over that of predictions that are independent of the labels. It is 0.0 if
    undefined:
    all predictions and labels are one class.
    """
    by_chance = values.var() + labels.var() + (values.mean() - labels.mean()) ** 2
    return float(1 - ((values - labels) ** 2).mean() / by_chance) if by_chance > 0 else 0.0


def mean_absolute_error(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The mean distance between prediction and label, in classes."""
    return float(abs(values - labels).mean())


def answered(task: Labelled, values: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which labels are predicted and which are right, both bool [N, C]."""
    return above_threshold(values, task.thresholds), labels > 0


def micro_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all predicted labels of all rows. It is 0 if none is predicted and none is right."""
    said, right = answered(task, values, labels)
    return 2 * float((said & right).sum()) / max(1, int(said.sum() + right.sum()))


def label_macro_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The plain mean over labels of their F1. It is 0 for a label that never occurs and is never predicted."""
    said, right = answered(task, values, labels)
    either = said.sum(axis=0) + right.sum(axis=0)
    return float((2 * (said & right).sum(axis=0) / either.clip(min=1)).mean())


def f1_by_row(task: Labelled, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """F1 of each row's labels, [N]. It is 1 for a row without labels and predictions."""
    said, right = answered(task, values, labels)
    either = said.sum(axis=1) + right.sum(axis=1)
    return (2 * (said & right).sum(axis=1) + (either == 0)) / either.clip(min=1)


def ranking_precision_by_row(task: Labelled, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Label ranking precision of each row, [N].

    For each label of the row, it is the share of right labels among the labels that are at least as likely. The value
    is the mean of these shares. For a row without a label or with all labels it is 1, as in scikit-learn.
    """
    import numpy as np
    from scipy.stats import rankdata

    right = labels > 0
    among_all, among_right = (
        rankdata(-scores, "max", axis=1) for scores in (values, np.where(right, values, -np.inf))
    )
    counts = right.sum(axis=1)
    shares = np.where(right, among_right / among_all, 0.0).sum(axis=1) / counts.clip(min=1)
    return np.where((counts == 0) | (counts == right.shape[1]), 1.0, shares)


def exact_by_row(task: Labelled, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the predicted labels of each row equal its labels, [N]."""
    said, right = answered(task, values, labels)
    return (said == right).all(axis=1)


#: Metrics that are the mean of a number for each row.
BY_ROW: dict[str, Callable[[Labelled, np.ndarray, np.ndarray], np.ndarray]] = {
    "sample_f1": f1_by_row,
    "lrap": ranking_precision_by_row,
    "exact_match": exact_by_row,
}


def _mean_of(name: str) -> Metric:
    return lambda task, values, labels: float(BY_ROW[name](task, values, labels).mean())


def word_accuracy(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The share of words with the right tag."""
    return accuracy(task, *by_words(values, labels))


def word_macro_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The plain mean of F1 by word over the task's tags."""
    return macro_f1(task, *by_words(values, labels))


def entity_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The harmonic mean of `entity_precision` and `entity_recall`, as conlleval computes it."""
    hits, predicted, there = entity_counts(task, values, labels).sum(axis=0).tolist()
    return 2 * hits / (predicted + there) if hits else 0.0


def entity_precision(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The share of predicted entities that occur, with the same words and type. It is 0 if none is predicted."""
    hits, predicted, _ = entity_counts(task, values, labels).sum(axis=0).tolist()
    return hits / predicted if predicted else 0.0


def entity_recall(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The share of entities that are predicted, with the same words and type. It is 0 if there are none."""
    hits, _, there = entity_counts(task, values, labels).sum(axis=0).tolist()
    return hits / there if there else 0.0


def entity_counts(task: Labelled, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns how many entities of each sentence are found, are predicted, and occur; int64 [N, 3]."""
    import numpy as np

    counts = np.empty((len(labels), 3), dtype=np.int64)
    for row, pair in enumerate(zip(values, labels, strict=True)):
        predicted, there = (set(spans(tag_names(task, ids))) for ids in pair)
        counts[row] = len(predicted & there), len(predicted), len(there)
    return counts


def tag_names(task: Labelled, ids: np.ndarray) -> list[str]:
    """Returns the tags of a sentence's words. A word that was not read (-1) has the tag outside of entities."""
    names = [*task.labels, task.labels[outside(task.labels)]]  # the last one is that of -1
    return [names[id_] for id_ in ids.tolist()]


def by_words(*rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Concatenates [N] arrays to one array over all words."""
    import numpy as np

    return tuple(map(np.concatenate, rows))


def class_scores(values: np.ndarray, labels: np.ndarray, num_classes: int) -> dict[str, np.ndarray]:
    """Returns `precision`, `recall` and `f1` of each class, `[num_classes]`.

    They are 0 for a class that never occurs and is never predicted.
    """
    import numpy as np

    def counted(ids: np.ndarray) -> np.ndarray:  # a word that was not read, whose value is -1, is of no class
        return np.bincount(ids[(ids >= 0) & (ids < num_classes)].astype(np.int64), minlength=num_classes)

    # scikit-learn, which computes the same, takes a second to import
    hits, said, there = counted(labels[values == labels]), counted(values), counted(labels)
    # where a divisor would be 0, so is the number of hits
    return {
        "precision": hits / said.clip(min=1), "recall": hits / there.clip(min=1),
        "f1": 2 * hits / (said + there).clip(min=1),
    }  # fmt: skip


def correlation(name: str, values: np.ndarray, labels: np.ndarray) -> float:
    """Returns `pearson` or `spearman` of two `[N]` arrays. It is 0.0 if undefined, because one of them is constant."""
    from scipy.stats import pearsonr, spearmanr

    if is_constant(values) or is_constant(labels):
        return 0.0
    return float({"pearson": pearsonr, "spearman": spearmanr}[name](values, labels).statistic)


def is_constant(numbers: np.ndarray) -> bool:
    """Whether correlations with these numbers are undefined."""
    import numpy as np

    # Below this spread scipy warns that Pearson's r is rounding noise.
    mean = numbers.mean()
    return bool(np.ptp(numbers) == 0 or np.linalg.norm(numbers - mean) < 1e-13 * abs(mean))


def higher_is_better(metric: str) -> bool:
    """Whether a higher value of a metric is better, from its name.

    It is false for losses, and for errors such as `eval_stars_mean_absolute_error`.
    """
    return not metric.endswith(("loss", "error"))


#: By kind of task, the metrics that it is scored with. The first one is the task's score in `eval_overall` unless the
#: task names another.
KIND_METRICS: dict[str, Registry[Metric]] = {
    kind: Registry("metric", Callable, metrics, among=f"for kind {kind!r}", takes=["task", "values", "labels"])
    for kind, metrics in {
        "classes": {"accuracy": accuracy, "macro_f1": macro_f1, "matthews": matthews},
        "binary": {"accuracy": accuracy, "f1": f1, "matthews": matthews},
        "ordinal": {
            "accuracy": accuracy,
            "quadratic_kappa": quadratic_kappa,
            "mean_absolute_error": mean_absolute_error,
        },
        "labels": {"micro_f1": micro_f1, "macro_f1": label_macro_f1, **{name: _mean_of(name) for name in BY_ROW}},
        "score": {"pearson": pearson, "spearman": spearman},
        "tags": {
            "entity_f1": entity_f1,
            "entity_precision": entity_precision,
            "entity_recall": entity_recall,
            "accuracy": word_accuracy,
            "macro_f1": word_macro_f1,
        },
    }.items()
}


def metrics_of(task: Labelled) -> dict[str, Metric]:
    """Returns the metrics of a task's kind. The first one is the task's score by default.

    For tags they depend on the labels: metrics of entities if the labels mark entities, otherwise `accuracy` and
    `macro_f1`.
    """
    known, others = dict(KIND_METRICS[task.kind]), ()
    if task.kind == "tags":
        others = ("macro_f1",) if mark_entities(task.labels) else ("entity_f1", "entity_precision", "entity_recall")
    return {name: metric for name, metric in known.items() if name not in others}
