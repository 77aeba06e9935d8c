"""Predictions on disk: our own CSV, and the files that the course's grader reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from ..errors import MinBertError, unknown_name
from ..io import write_atomically
from ..settings.tasks import Task
from .decoding import Decoded

#: The course's column for each of its tasks, misspelt where the course misspells it.
COURSE_COLUMNS = {
    "sst": "Predicted_Sentiment",
    "para": "Predicted_Is_Paraphrase",
    "sts": "Predicted_Similiary",
    "cfimdb": "Predicted_Sentiment",
}


def write_predictions(path: str | Path, task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    """Writes a CSV with the header `id,prediction` and `probability_<class id>` where there are classes.

    One row per prediction, in order; ids to the character; numbers in full precision; the file is whole or absent.

    Raises:
        MinBertError: ids and predictions differ in number, or the file cannot be written.
    """
    _check(task, ids, decoded)
    columns = [ids, decoded.values.tolist()]
    header = ["id", "prediction"]
    if decoded.probabilities is not None:
        header += [f"probability_{number}" for number in range(decoded.probabilities.shape[1])]
        columns += decoded.probabilities.T.tolist()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *zip(*columns, strict=True)])
    write_atomically(path, text.getvalue())


def write_course(path: str | Path, task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    """Writes the course's own format, every one of its spaces included.

    Raises:
        MinBertError: the course has no such task, or as `write_predictions`.
    """
    check_course(task)
    _check(task, ids, decoded)
    values = decoded.values.tolist() if task.kind == "classes" else map(float, decoded.values)
    lines = [f"id \t {COURSE_COLUMNS[task.name]} ", *(f"{i} , {value} " for i, value in zip(ids, values, strict=True))]
    write_atomically(path, "\n".join(lines) + "\n")


def check_course(task: Task) -> None:
    """Raises `MinBertError` if the course has no such task."""
    if task.name not in COURSE_COLUMNS:
        raise unknown_name("task of the course's format", task.name, COURSE_COLUMNS)


def _check(task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    if len(ids) != len(decoded.values):
        raise MinBertError(f"Task {task.name!r}: {len(ids)} ids for {len(decoded.values)} predictions. Give one each.")
