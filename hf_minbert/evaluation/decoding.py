"""Decodes logits into predictions."""

from __future__ import annotations

import numpy as np

from ..errors import DivergedError, MinBertError
from ..model.inference import Decoded, read_logits, read_words
from ..model.kinds import above_threshold
from ..settings.tasks import Task


def decode(task: Task, logits: np.ndarray) -> Decoded:
    """Decodes the logits of a head, [N, outputs], or for tags [N] arrays [words, outputs].

    See `read_logits` and `clip`.

    Raises:
        MinBertError: the logits have another shape, or, as a `DivergedError`, are not finite.
    """
    logits = as_matrix(task, logits)
    try:
        if task.traits.is_tags:
            return read_words(task.kind, logits)
        return read_logits(task.kind, logits, task.temperature, task.thresholds)
    except ValueError as error:
        raise DivergedError(f"{task.name}: {error}") from None


def clip(task: Task, values: np.ndarray) -> np.ndarray:
    """Clips scores to the task's range. Class ids do not change."""
    return np.clip(values, *task.bounds) if task.traits.is_score else values


def names_of(task: Task, probabilities: np.ndarray) -> list[list[str]]:
    """Returns the predicted labels of each row for `kind: labels`, [N, C] -> [N]."""
    said = above_threshold(probabilities, task.thresholds)
    return [[name for name, holds in zip(task.labels, row, strict=True) if holds] for row in said.tolist()]


def as_matrix(task: Task, logits: np.ndarray) -> np.ndarray:
    """Returns the logits as float64 [N, outputs of the task].

    Logits of tags, [N] arrays [words, outputs], are not changed.

    Raises:
        MinBertError: they have another shape.
    """
    if task.traits.is_tags:
        shapes = {np.shape(row)[1:] for row in logits}
        if len(logits) and shapes != {(task.num_outputs,)}:
            raise MinBertError(
                f"Task {task.name!r}: logits must be [words, {task.num_outputs}] for each row. Found {shapes}."
            )
        return logits
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2 or logits.shape[1] != task.num_outputs:
        raise MinBertError(
            f"Task {task.name!r}: logits must have the shape [N, {task.num_outputs}]. Found {list(logits.shape)}."
        )
    return logits
