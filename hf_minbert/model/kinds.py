"""The kinds of task that there are, and what code that serves all of them must know of each.

What is computed by kind stands in tables of its own: `LOSSES` and `DIVERGENCES` (losses.py), `read_logits`
(inference.py), `KIND_METRICS` (settings/metrics.py). This file travels to the Hub with a model: it may import
published libraries only.
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
        answer: what a row is labelled with and what is answered: `class`, the id of one of the task's labels, int64;
            `set`, a 0 or 1 for each of them, float32; `tags`, such an id for each word of a text, int64; or `score`, a
            number within its range, float32.
        outputs: how many numbers a head gives per example, or per word, from the number of the task's labels.
        labels: the fewest and the most labels that a task may have.
        problem_type: the library's word for it, in a config.
        words: what is answered, for people; with the task's `count` of labels, or the bounds `low` and `high`.
    """

    answer: Literal["class", "set", "tags", "score"]
    outputs: Callable[[int], int]
    labels: tuple[int, float]
    problem_type: str
    words: str

    @property
    def is_class(self) -> bool:
        """Whether one of the task's labels is right, and is answered, for each row."""
        return self.answer == "class"

    @property
    def is_set(self) -> bool:
        """Whether any of the task's labels may be right for a row: rows of labels and of outputs are [labels]."""
        return self.answer == "set"

    @property
    def is_tags(self) -> bool:
        """Whether each word of a text has an answer: rows of labels and of predictions are arrays, [words]."""
        return self.answer == "tags"

    @property
    def is_score(self) -> bool:
        """Whether the task has a `range`, and no labels; its outputs have no distribution."""
        return self.answer == "score"

    @property
    def dtype(self) -> str:
        """Of labels, as numpy, torch and datasets call it."""
        return "int64" if self.is_class or self.is_tags else "float32"

    def shape(self, labels: int) -> tuple[int, ...]:
        """Of a row's label, where the task has so many of them."""
        return (labels,) if self.is_set else ()

    def allows(self, labels: int) -> bool:
        """Whether a task may have so many labels."""
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
    """Which labels are answered: those of a probability above their threshold; [..., labels] -> bool.

    Args:
        probabilities: an array; a 0 or 1 for each label passes as it is.
        thresholds: one number for all labels, or one for each.
    """
    return probabilities > thresholds
