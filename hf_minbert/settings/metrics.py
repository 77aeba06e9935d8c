"""The metrics of each kind of task, by name: what a task may choose as its `metric`, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..model.registry import Registry

if TYPE_CHECKING:
    import numpy as np


class Labelled(Protocol):
    """A `Task`, as far as a metric needs it."""

    @property
    def labels(self) -> Sequence[str]: ...


#: From a task, its predictions and labels (class ids or scores, both [N]) to a finite number. Higher is better, unless
#: its name says otherwise: see `higher_is_better`.
Metric = Callable[["Labelled", "np.ndarray", "np.ndarray"], float]


def accuracy(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    return float((values == labels).mean())


def macro_f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The plain mean of F1 over all of the task's classes."""
    return float(class_scores(values, labels, len(task.labels))["f1"].mean())


def f1(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """That of a binary task's second label."""
    return float(class_scores(values, labels, len(task.labels))["f1"][1])


def matthews(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of predicted and right classes (Matthews 1975; Gorodkin 2004 for more than two).

    0.0 where it is not defined: all predictions, or all labels, are of one class.
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
    """Cohen's kappa, each error weighted by the square of its distance in places (Cohen 1968).

    1 less the mean square over what it would be of predictions that do not depend on the labels. 0.0 where that is not
    defined: all predictions and labels are one class.
    """
    by_chance = values.var() + labels.var() + (values.mean() - labels.mean()) ** 2
    return float(1 - ((values - labels) ** 2).mean() / by_chance) if by_chance > 0 else 0.0


def mean_absolute_error(task: Labelled, values: np.ndarray, labels: np.ndarray) -> float:
    """How many places predictions are off, in the mean."""
    return float(abs(values - labels).mean())


def class_scores(values: np.ndarray, labels: np.ndarray, num_classes: int) -> dict[str, np.ndarray]:
    """`precision`, `recall` and `f1` of each class, `[num_classes]`; 0 for one that is neither there nor predicted."""
    from sklearn.metrics import precision_recall_fscore_support

    # without `labels` scikit-learn scores only the classes that it happens to see
    scores = precision_recall_fscore_support(labels, values, labels=range(num_classes), zero_division=0)
    return dict(zip(("precision", "recall", "f1"), scores[:3], strict=True))


def correlation(name: str, values: np.ndarray, labels: np.ndarray) -> float:
    """`pearson` or `spearman` of two `[N]`; 0.0 where it is not defined, because one of them is constant."""
    from scipy.stats import pearsonr, spearmanr

    if is_constant(values) or is_constant(labels):
        return 0.0
    return float({"pearson": pearsonr, "spearman": spearmanr}[name](values, labels).statistic)


def is_constant(numbers: np.ndarray) -> bool:
    """Whether no correlation with these numbers is defined."""
    import numpy as np

    # Below this spread scipy warns that Pearson's r is rounding noise.
    mean = numbers.mean()
    return bool(np.ptp(numbers) == 0 or np.linalg.norm(numbers - mean) < 1e-13 * abs(mean))


def higher_is_better(metric: str) -> bool:
    """Whether more of it is better, by its name, as `eval_stars_mean_absolute_error`: of no loss and no error."""
    return not metric.endswith(("loss", "error"))


#: By kind of task, the metrics that it is scored with. The first one is the task's score in `eval_overall` unless the
#: task names another.
KIND_METRICS: dict[str, Registry[Metric]] = {
    kind: Registry("metric", Callable, metrics, among=f"for kind {kind!r}")
    for kind, metrics in {
        "classes": {"accuracy": accuracy, "macro_f1": macro_f1, "matthews": matthews},
        "binary": {"accuracy": accuracy, "f1": f1, "matthews": matthews},
        "ordinal": {
            "accuracy": accuracy,
            "quadratic_kappa": quadratic_kappa,
            "mean_absolute_error": mean_absolute_error,
        },
        "score": {"pearson": pearson, "spearman": spearman},
    }.items()
}
