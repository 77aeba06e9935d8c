"""The metrics as `evaluate.Metric`s, for code that scores with the `evaluate` library. They need no network.

    metric = evaluate.combine([Accuracy(), PrecisionRecallF1(labels=TASKS["sst"].labels)])
    metric.compute(predictions=[4, 0], references=[4, 1])

The trainer does not use them: importing `evaluate` takes seconds, and its numbers come from the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from ..errors import MinBertError
from .metrics import class_scores, correlation


class _Metric(evaluate.Metric):
    description: str
    value_type: str

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value(self.value_type)
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(
            description=self.description, citation="", inputs_description="predictions, references", features=features
        )


class Accuracy(_Metric):
    """`accuracy`: the share of class ids that are right."""

    description, value_type = "Share of class ids that are right.", "int64"

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((np.asarray(predictions) == np.asarray(references)).mean())}


class PrecisionRecallF1(_Metric):
    """`macro_precision`, `macro_recall`, `macro_f1` and `precision_<label>`, `recall_<label>`, `f1_<label>`.

    Args:
        labels: names of the classes in the order of their ids. The macro values are plain means over all of them;
            a class that is neither there nor predicted counts as 0.
        kwargs: of `evaluate.Metric`.
    """

    description, value_type = "Precision, recall and F1, per class and as plain means over the classes.", "int64"

    def __init__(self, labels: Sequence[str], **kwargs: Any):
        if isinstance(labels, str) or len(labels) < 2:
            raise MinBertError(f"`labels` must name two or more classes. Found {labels!r}.")
        super().__init__(**kwargs)
        self.labels = tuple(labels)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        scores = class_scores(np.asarray(predictions), np.asarray(references), len(self.labels))
        result = {f"macro_{name}": float(values.mean()) for name, values in scores.items()}
        for name, values in scores.items():
            result.update({f"{name}_{label}": float(v) for label, v in zip(self.labels, values, strict=True)})
        return result


class Pearson(_Metric):
    """`pearson`: the linear correlation; 0 where predictions or references are all the same."""

    description, value_type = "Pearson's correlation of scores.", "float64"

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"pearson": correlation("pearson", np.asarray(predictions), np.asarray(references))}


class Spearman(_Metric):
    """`spearman`: the correlation of ranks; 0 where predictions or references are all the same."""

    description, value_type = "Spearman's rank correlation of scores.", "float64"

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearman": correlation("spearman", np.asarray(predictions), np.asarray(references))}
