"""The results of the quick start: scores beside those of a constant answer, and predictions for new sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.analysis import constant_answer
from ..settings.tasks import Task

#: What the trained model is asked at the end, by task.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "sst": ("What a wonderful evening: the food, the music and the company were perfect.",),
    "para": ("How can I learn to swim as an adult?", "What is the best way for a grown-up to learn swimming?"),
    "sts": ("My neighbour is slicing onions.", "Someone cuts vegetables in the kitchen."),
}


def constant_score(task: Task, labels: Sequence[float]) -> float:
    """Returns the best score that one answer for all rows can have. For a correlation it is 0."""
    return constant_answer(task, np.asarray(labels))[1][task.metric]


def score_table(tasks: Iterable[Task], metrics: Mapping[str, float], labels: Mapping[str, Sequence[float]]) -> str:
    """Returns a line for each task: its dev score, and the best score of the same answer for every row."""
    rows = [("task", "metric", "dev rows", "one answer", "this model")]
    for task in tasks:
        here = labels[task.name]
        scores = constant_score(task, here), metrics[f"eval_{task.name}_{task.metric}"]
        rows.append((task.name, task.metric, str(len(here)), *(f"{score:.3f}" for score in scores)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:2], widths, strict=False)),
                   *(cell.rjust(w) for cell, w in zip(row[2:], widths[2:], strict=True))]) for row in rows
    )  # fmt: skip


def answers(folder: str | Path, tasks: Iterable[Task]) -> str:
    """Returns the saved model's answers to `QUESTIONS`, for the tasks that have one."""
    from ..pretrained.prediction import Predictor

    predictor = Predictor.from_pretrained(folder)
    lines = []
    for task in tasks:
        if task.name not in QUESTIONS:
            continue
        texts = QUESTIONS[task.name]
        answer: dict[str, Any] = predictor(task.name, *([text] for text in texts))[0]
        lines.append(f"{task.name}: " + " | ".join(texts))
        if task.traits.is_score:
            lines.append(f"  {answer['prediction']:.2f} on a scale of {task.bounds[0]:g} to {task.bounds[1]:g}")
        else:
            lines.append(f"  {answer['label']} (probability {answer['probabilities'][answer['label']]:.2f})")
    return "\n".join(lines)
