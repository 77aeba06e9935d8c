"""What a head's numbers say: from logits to predictions."""

from __future__ import annotations

import numpy as np

from ..errors import DivergedError, MinBertError
from ..model.inference import Decoded, read_logits
from ..settings.tasks import Task


def decode(task: Task, logits: np.ndarray) -> Decoded:
    """Reads the head's own logits, [N, C] for classes, [N, 1] for binary and score: see `read_logits`, and `clip`.

    Raises:
        MinBertError: the logits have another shape, or, as a `DivergedError`, are not finite.
    """
    logits = as_matrix(task, logits)
    try:
        return read_logits(task.kind, logits, task.temperature, task.thresholds)
    except ValueError as error:
        raise DivergedError(f"{task.name}: {error}") from None


def clip(task: Task, values: np.ndarray) -> np.ndarray:
    """Scores moved into the task's range; class ids as they are."""
    return np.clip(values, *task.bounds) if task.traits.is_score else values


def as_matrix(task: Task, logits: np.ndarray) -> np.ndarray:
    """The logits as float64 [N, outputs of the task]. Raises `MinBertError` if they have another shape."""
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2 or logits.shape[1] != task.num_outputs:
        raise MinBertError(
            f"Task {task.name!r}: logits must have the shape [N, {task.num_outputs}]. Found {list(logits.shape)}."
        )
    return logits
