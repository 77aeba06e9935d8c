"""The metrics as `evaluate.Metric`s, for code that uses the `evaluate` library. They need no network.

    metric = evaluate.combine([Accuracy(), PrecisionRecallF1(labels=TASKS["sst"].labels)])
    metric.compute(predictions=[4, 0], references=[4, 1])

The trainer does not use them, because importing `evaluate` takes seconds. It uses the same functions directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from ..errors import MinBertError
from ..settings.metrics import class_scores, correlation


class _Metric(evaluate.Metric):
    description: str

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float64")  # of class ids too: as integers the library would cut 0.7 down to class 0
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(
            description=self.description, citation="", inputs_description="predictions, references", features=features
        )


def _arrays(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    predictions, references = np.asarray(predictions), np.asarray(references)
    if not predictions.size:
        raise MinBertError("There is nothing to score: `predictions` is empty.")
    return predictions, references


def _class_ids(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    arrays = _arrays(predictions, references)
    for name, ids in zip(("predictions", "references"), arrays, strict=True):
        if (ids != np.floor(ids)).any():
            raise MinBertError(f"`{name}` must be class ids, which are whole numbers. Found {ids[:5].tolist()}.")
    return arrays[0].astype(int), arrays[1].astype(int)


class Accuracy(_Metric):
    """`accuracy`: the share of correct class ids."""

    description = "Share of class ids that are right."

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predictions, references = _class_ids(predictions, references)
        return {"accuracy": float((predictions == references).mean())}


class PrecisionRecallF1(_Metric):
    """`macro_precision`, `macro_recall`, `macro_f1` and `precision_<label>`, `recall_<label>`, `f1_<label>`.

    Args:
        labels: the names of the classes in the order of their ids. The macro values are plain means over all classes.
            A class that never occurs and is never predicted counts as 0.
        kwargs: arguments of `evaluate.Metric`.
    """

    description = "Precision, recall and F1, per class and as plain means over the classes."

    def __init__(self, labels: Sequence[str], **kwargs: Any):
        if isinstance(labels, str) or len(labels) < 2:
            raise MinBertError(f"`labels` must name two or more classes. Found {labels!r}.")
        super().__init__(**kwargs)
        self.labels = tuple(labels)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predictions, references = _class_ids(predictions, references)
        for name, ids in (("predictions", predictions), ("references", references)):
            if not 0 <= ids.min() <= ids.max() < len(self.labels):
                raise MinBertError(
                    f"`{name}` must be class ids from 0 to {len(self.labels) - 1}, as there are {len(self.labels)} "
                    f"`labels`. Found {ids.min()} to {ids.max()}."
                )
        scores = class_scores(predictions, references, len(self.labels))
        result = {f"macro_{name}": float(values.mean()) for name, values in scores.items()}
        for name, values in scores.items():
            result.update({f"{name}_{label}": float(v) for label, v in zip(self.labels, values, strict=True)})
        return result


class Pearson(_Metric):
    """`pearson`: the linear correlation; 0 if all predictions or all references are equal."""

    description = "Pearson's correlation of scores."

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"pearson": correlation("pearson", *_arrays(predictions, references))}


class Spearman(_Metric):
    """`spearman`: the rank correlation; 0 if all predictions or all references are equal."""

    description = "Spearman's rank correlation of scores."

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearman": correlation("spearman", *_arrays(predictions, references))}
