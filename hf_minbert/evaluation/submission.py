"""Predictions on disk: our own CSV, and the files that the course's grader reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """Writes a CSV with the header `id,prediction` and, where there are classes, `label`, the name of the predicted
    class, and `probability_<class id>`.

    One row per prediction, in order; ids to the character; numbers in full precision; the file is whole or absent.

    Raises:
        MinBertError: ids and predictions differ in number, or the file cannot be written.
    """
    _write(path, CSV, task, ids, decoded)


def write_course(path: str | Path, task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    """Writes the course's own format, every one of its spaces included.

    Raises:
        MinBertError: the course has no such task, or as `write_predictions`.
    """
    check_course(task)
    _write(path, COURSE, task, ids, decoded)


def _write(path: str | Path, form: Form, task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    if len(ids) != len(decoded.values):
        raise MinBertError(f"Task {task.name!r}: {len(ids)} ids for {len(decoded.values)} predictions. Give one each.")
    write_atomically(path, form.header(task) + form.lines(task, ids, decoded))


@dataclass(frozen=True)
class Form:
    """How predictions are written: the header of the file, and the lines of some predictions, line breaks included."""

    name: str
    header: Callable[[Task], str]
    lines: Callable[[Task, Sequence[str], Decoded], str]


def csv_columns(task: Task) -> list[str]:
    """The columns of a file of predictions."""
    if task.traits.is_score:
        return ["id", "prediction"]
    return ["id", "prediction", "label", *(f"probability_{number}" for number in range(len(task.labels)))]


def _csv_lines(task: Task, ids: Sequence[str], decoded: Decoded) -> str:
    values = decoded.values.tolist()
    columns = [ids, values]
    if decoded.probabilities is not None:
        columns += [[task.labels[value] for value in values], *decoded.probabilities.T.tolist()]
    return _as_csv(zip(*columns, strict=True))


def _as_csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _course_lines(task: Task, ids: Sequence[str], decoded: Decoded) -> str:
    values = map(float, decoded.values) if task.kind == "binary" else decoded.values.tolist()
    return "".join(f"{i} , {value} \n" for i, value in zip(ids, values, strict=True))


CSV = Form("csv", lambda task: _as_csv([csv_columns(task)]), _csv_lines)
COURSE = Form("course", lambda task: f"id \t {COURSE_COLUMNS[task.name]} \n", _course_lines)


def check_course(task: Task) -> None:
    """Raises `MinBertError` if the course has no such task."""
    if task.name not in COURSE_COLUMNS:
        raise unknown_name("task of the course's format", task.name, COURSE_COLUMNS)
