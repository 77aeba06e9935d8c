"""What a head's numbers say: from logits to predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import MinBertError
from ..tasks import Task


@dataclass(frozen=True)
class Decoded:
    """Predictions for N examples.

    Args:
        values: class ids, int64 [N], or scores, float64 [N].
        probabilities: float64 [N, C], C = 2 for a binary task; `None` for a score.
    """

    values: np.ndarray
    probabilities: np.ndarray | None


def decode(task: Task, logits: np.ndarray) -> Decoded:
    """Reads the head's own logits: [N, C] for classes, [N, 1] for binary and score.

    A class is the largest logit's; a binary task says its second label above probability 1/2; a score stays as
    predicted (see `clip`). Computed in float64. A logit that is not finite gives NaN probabilities.

    Raises:
        MinBertError: the logits have another shape.
    """
    logits = as_matrix(task, logits)
    if task.kind == "score":
        return Decoded(logits[:, 0], None)
    with np.errstate(invalid="ignore"):  # inf - inf, and nan
        if task.kind == "binary":
            z = logits[:, 0]
            # sigmoid(z) = exp(-log(1 + exp(-z))), the logarithm computed without overflow
            return Decoded((z > 0).astype(np.int64), np.exp(-np.logaddexp(0.0, np.stack([z, -z], axis=1))))
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return Decoded(logits.argmax(axis=1), exponentials / exponentials.sum(axis=1, keepdims=True))


def clip(task: Task, values: np.ndarray) -> np.ndarray:
    """Scores moved into the task's range; class ids as they are."""
    return np.clip(values, *task.range) if task.kind == "score" else values


def as_matrix(task: Task, logits: np.ndarray) -> np.ndarray:
    """The logits as float64 [N, outputs of the task]. Raises `MinBertError` if they have another shape."""
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2 or logits.shape[1] != task.num_outputs:
        raise MinBertError(
            f"Task {task.name!r}: logits must have the shape [N, {task.num_outputs}]. Found {list(logits.shape)}."
        )
    return logits
