"""Writes predictions: our own CSV (JSON lines for tags), and the files that the course's grader reads."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MinBertError, unknown_name
from ..io import json_line, write_atomically
from ..model.inference import tagged
from ..model.spans import split
from ..settings.metrics import tag_names
from ..settings.tasks import Task
from .decoding import Decoded, names_of

#: The course's column for each of its tasks, misspelt where the course misspells it.
COURSE_COLUMNS = {
    "sst": "Predicted_Sentiment",
    "para": "Predicted_Is_Paraphrase",
    "sts": "Predicted_Similiary",
    "cfimdb": "Predicted_Sentiment",
}

EXPECTED = "expected"  # the column with the mean of ordered classes


def write_predictions(
    path: str | Path, task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str] = ()
) -> None:
    """Writes the predictions of all rows in order. Ids are kept unchanged. The file is written atomically.

    A CSV has the columns of `csv_columns`, with numbers in full precision. Tags are written as JSON lines: `id` and
    the keys of `inference.tagged`.

    Args:
        texts: the words of each row, `spans.joined`; for tags only.

    Raises:
        MinBertError: ids and predictions differ in number, or the file cannot be written.
    """
    _write(path, CSV, task, ids, decoded, texts)


def write_course(path: str | Path, task: Task, ids: Sequence[str], decoded: Decoded) -> None:
    """Writes the course's own format, with all of its spaces.

    Raises:
        MinBertError: the course has no such task, or as `write_predictions`.
    """
    check_course(task)
    _write(path, COURSE, task, ids, decoded, ())


def _write(
    path: str | Path, form: Form, task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str]
) -> None:
    if len(ids) != len(decoded.values):
        raise MinBertError(f"Task {task.name!r}: {len(ids)} ids for {len(decoded.values)} predictions. Give one each.")
    write_atomically(path, form.header(task) + form.lines(task, ids, decoded, texts))


@dataclass(frozen=True)
class Form:
    """A format for predictions: the header of the file, and the lines of some predictions with their line breaks."""

    name: str
    header: Callable[[Task], str]
    lines: Callable[[Task, Sequence[str], Decoded, Sequence[str]], str]


def ending(task: Task) -> str:
    """Returns the ending of a file of the task's predictions."""
    return endings(task)[0]


def endings(task: Task) -> list[str]:
    """Returns the endings that a file of the task's predictions may have, besides none, .txt and unknown ones."""
    return [".jsonl", ".conll"] if task.traits.is_tags else [".csv"]


def csv_columns(task: Task, by_id: bool = False) -> list[str]:
    """The columns of a CSV of predictions.

    Scores have `id` and `prediction`. Classes also have `label`, the name of the predicted class, and
    `probability_<name>` for each class. Ordered classes also have `expected`, the mean class. For `kind: labels` the
    columns are `id`, `labels` and the probabilities.

    Args:
        by_id: name the probabilities by class id, as version 0.1 did.
    """
    if task.traits.is_score:
        return ["id", "prediction"]
    answer = ["labels"] if task.traits.is_set else ["prediction", "label"]
    expected = [EXPECTED] if task.kind == "ordinal" else []
    classes = range(len(task.labels)) if by_id else task.labels
    return ["id", *answer, *(f"probability_{name}" for name in classes), *expected]


def _header(task: Task) -> str:
    return "" if task.traits.is_tags else _as_csv([csv_columns(task)])


def _lines(task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str]) -> str:
    return _tag_lines(task, ids, decoded, texts) if task.traits.is_tags else _csv_lines(task, ids, decoded)


def _tag_lines(task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str]) -> str:
    assert decoded.probabilities is not None
    columns = (ids, texts, decoded.values, decoded.probabilities)
    return "".join(
        json_line({"id": id_} | tagged(task.labels, split(text), values, probabilities))
        for id_, text, values, probabilities in zip(*columns, strict=True)
    )


def _column_lines(task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str]) -> str:
    """Writes one word and its tag per line, and a blank line after each sentence."""
    lines = []
    for text, values in zip(texts, decoded.values, strict=True):
        words = [re.sub(r"[\t\r\n]", " ", word) for word in split(text)]  # which end a cell or a line
        lines += [f"{word}\t{tag}\n" for word, tag in zip(words, tag_names(task, values), strict=True)] + ["\n"]
    return "".join(lines)


def _csv_lines(task: Task, ids: Sequence[str], decoded: Decoded) -> str:
    if task.traits.is_set:
        said = [task.label_delimiter.join(names) for names in names_of(task, decoded.values)]
        return _as_csv(zip(ids, said, *decoded.values.T.tolist(), strict=True))
    values = decoded.values.tolist()
    columns = [ids, values]
    if decoded.probabilities is not None:
        columns += [[task.labels[value] for value in values], *decoded.probabilities.T.tolist()]
    if decoded.expected is not None:
        columns.append(decoded.expected.tolist())
    return _as_csv(zip(*columns, strict=True))


def _as_csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _course_lines(task: Task, ids: Sequence[str], decoded: Decoded, texts: Sequence[str]) -> str:
    values = map(float, decoded.values) if task.kind == "binary" else decoded.values.tolist()
    return "".join(f"{i} , {value} \n" for i, value in zip(ids, values, strict=True))


CSV = Form("csv", _header, _lines)
CONLL = Form("conll", lambda task: "", _column_lines)
COURSE = Form("course", lambda task: f"id \t {COURSE_COLUMNS[task.name]} \n", _course_lines)


def check_course(task: Task) -> None:
    """Raises `MinBertError` if the course has no such task."""
    if task.name not in COURSE_COLUMNS or task.traits.is_set:
        raise unknown_name("task of the course's format", task.name, COURSE_COLUMNS)
