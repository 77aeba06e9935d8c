"""The kinds of tasks, with the properties that code for all kinds needs.

What is computed for each kind is in separate tables: `LOSSES` and `DIVERGENCES` (losses.py), `read_logits`
(inference.py), `KIND_METRICS` (settings/metrics.py). This file is uploaded to the Hub with a model. It may import only
published libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal


@dataclass(frozen=True)
class Kind:
    """A kind of task.

    Args:
        answer: the type of labels and predictions: `class`, the id of a label, int64; `set`, 0 or 1 for each label,
            float32; `tags`, a class id for each word, int64; or `score`, a number within the range, float32.
        outputs: the number of a head's outputs per example, or per word, from the number of labels.
        labels: the smallest and the largest number of labels that a task may have.
        problem_type: the name of the kind in a transformers config.
        words: a description of the answer, with the placeholder `count` for labels, or `low` and `high` for the
            bounds.
    """

    answer: Literal["class", "set", "tags", "score"]
    outputs: Callable[[int], int]
    labels: tuple[int, float]
    problem_type: str
    words: str

    @property
    def is_class(self) -> bool:
        """Whether each row has exactly one of the task's labels."""
        return self.answer == "class"

    @property
    def is_set(self) -> bool:
        """Whether a row may have any number of the task's labels. Labels and outputs of a row are then [labels]."""
        return self.answer == "set"

    @property
    def is_tags(self) -> bool:
        """Whether each word of a text has a label. Labels and predictions of a row are then arrays, [words]."""
        return self.answer == "tags"

    @property
    def is_score(self) -> bool:
        """Whether the task has a `range` and no labels. Its outputs have no distribution."""
        return self.answer == "score"

    @property
    def dtype(self) -> str:
        """The dtype of labels, by its name in numpy, torch and datasets."""
        return "int64" if self.is_class or self.is_tags else "float32"

    def shape(self, labels: int) -> tuple[int, ...]:
        """Returns the shape of a row's label, for this number of labels."""
        return (labels,) if self.is_set else ()

    def allows(self, labels: int) -> bool:
        """Whether a task may have this number of labels."""
        return self.labels[0] <= labels <= self.labels[1]


SINGLE = "single_label_classification"

KindName = Literal["classes", "binary", "ordinal", "labels", "score", "tags"]
KINDS: dict[str, Kind] = {
    "classes": Kind("class", lambda labels: labels, (2, inf), SINGLE, "one of {count} classes"),
    "binary": Kind("class", lambda labels: 1, (2, 2), SINGLE, "yes or no"),
    "ordinal": Kind("class", lambda labels: labels - 1, (3, inf), SINGLE, "one of {count} classes in order"),
    "labels": Kind("set", lambda labels: labels, (2, inf), "multi_label_classification", "any of {count} labels"),
    "score": Kind("score", lambda labels: 1, (0, 0), "regression", "a number from {low:g} to {high:g}"),
    "tags": Kind("tags", lambda labels: labels, (2, inf), SINGLE, "one of {count} tags for each word"),
}
#: The kinds whose probabilities are the softmax of their outputs, or sigmoids of them: they may have a temperature.
CALIBRATED = ("classes", "binary", "labels")
#: The kinds whose answers are labels above a probability.
THRESHOLDED = ("binary", "labels")


def above_threshold(probabilities: Any, thresholds: Any) -> Any:
    """Returns which labels are predicted, those with a probability above their threshold; [..., labels] -> bool.

    Args:
        probabilities: an array. A 0 or 1 for each label gives the same labels.
        thresholds: one number for all labels, or one for each.
    """
    return probabilities > thresholds
