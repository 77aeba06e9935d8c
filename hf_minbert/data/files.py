"""Rows from the course's files and from any like them.

A file is a UTF-8 table with a header, tab separated if the header holds a tab and comma separated if not. A cell
may stand in double quotes, with a quote inside it doubled. A line break inside a cell is an error: it is nearly
always a quote that was never closed and has swallowed the rows after it. Columns are found by name.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MinBertError
from ..tasks import Task
from .labels import label_value

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Row = dict[str, str | int | float]
ID_COLUMN = "id"


def read_rows(path: str | Path, task: Task, *, labelled: bool, strict: bool = False) -> list[Row]:
    """The rows of one file, in its order: `id`, the task's text columns and, if `labelled`, `label`.

    Text is stripped of surrounding whitespace; an id is kept to the character, and without an `id` column it is
    the row number from 0. If `labelled`, a row with a blank text or label is left out and a warning says so;
    else every row stays, a blank text as `""`, and a label column is not looked at.

    Args:
        strict: raise on the first row that would be left out.

    Raises:
        MinBertError: the file, a column, a row or a label is not as it must be. Names file and line.
    """
    table = _read_table(Path(path))
    if labelled and task.label_column not in table.columns:
        raise _no_labels(task, table, str(path))
    records = list(_records(table, task, labelled))
    rows = _complete(records, table, strict) if labelled else [record.row for record in records]
    return _some(rows, table)


def load_split(
    task: Task, data_dir: str | Path, split: str, *, labelled: bool | None = None, strict: bool = False
) -> datasets.Dataset:
    """One split of a task as a `datasets.Dataset`; see `read_rows`.

    Args:
        labelled: whether labels must be there. `None`: they must for any split but `test`. A `test` split
            keeps every row, and has labels only where every one of its rows is complete.

    Raises:
        MinBertError: as `read_rows`; also if the folder, the split or its labels are missing.
    """
    table = _read_table(_split_path(task, Path(data_dir), split))
    optional = labelled is None and split == "test"
    labelled = task.label_column in table.columns if optional else labelled is not False
    if labelled and task.label_column not in table.columns:
        raise _no_labels(task, table, f"split {split!r}")
    records = list(_records(table, task, labelled))
    if optional and labelled and any(record.blank for record in records):
        logger.warning("%s: some rows are not complete, so split %r is read without labels.", table.path, split)
        labelled, records = False, list(_records(table, task, labelled=False))
    rows = _complete(records, table, strict) if labelled else [record.row for record in records]
    return to_dataset(_some(rows, table), task)


def load_task(
    task: Task, data_dir: str | Path, splits: Iterable[str] = ("train", "dev", "test"), strict: bool = False
) -> datasets.DatasetDict:
    """The splits asked for, and no other file, each read by `load_split`.

    Returns:
        A dict of datasets with the columns `id` (string), the task's text columns (string) and, where there are
        labels, `label` (a `ClassLabel`, which holds int64, or float32 for a score).
    """
    import datasets

    return datasets.DatasetDict({split: load_split(task, data_dir, split, strict=strict) for split in splits})


def to_dataset(rows: list[Row], task: Task) -> datasets.Dataset:
    """Rows of `read_rows` as a dataset with fixed column types, never guessed from the values."""
    import datasets

    text = datasets.Value("string")
    features = {ID_COLUMN: text} | dict.fromkeys(task.text_columns, text)
    if "label" in rows[0]:
        names = list(task.labels)
        features["label"] = datasets.Value("float32") if task.kind == "score" else datasets.ClassLabel(names=names)
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@dataclass(frozen=True)
class _Table:
    path: Path
    columns: list[str]
    rows: list[tuple[int, list[str]]]  # the line where the row begins, and its cells

    def place(self, column: str) -> int:
        if (count := self.columns.count(column)) > 1:
            raise MinBertError(f"{self.path} has {count} columns named {column!r}. Rename all but one.")
        if not count:
            raise MinBertError(f"{self.path} has no column {column!r}. Columns found: {self.found}.")
        return self.columns.index(column)

    @property
    def found(self) -> str:
        return _shortened([name for name in self.columns if name]) or "(none with a name)"


@dataclass(frozen=True)
class _Record:
    line: int
    row: Row
    blank: list[str]  # the columns that should hold something and do not


def _records(table: _Table, task: Task, labelled: bool) -> Iterator[_Record]:
    texts = [(name, table.place(name)) for name in task.text_columns]
    id_at = table.place(ID_COLUMN) if ID_COLUMN in table.columns else None
    label_at = table.place(task.label_column) if labelled else None
    for number, (line, cells) in enumerate(table.rows):
        row: Row = {ID_COLUMN: str(number) if id_at is None else cells[id_at]}
        row |= {name: cells[at].strip() for name, at in texts}
        blank = [name for name, _ in texts if not row[name]]
        if label_at is not None:
            if label := cells[label_at].strip():
                row["label"] = label_value(task, label, f"{table.path}, line {line}")
            else:
                blank.append(task.label_column)
        yield _Record(line, row, blank)


def _complete(records: list[_Record], table: _Table, strict: bool) -> list[Row]:
    gaps = [record for record in records if record.blank]
    if gaps and strict:
        raise MinBertError(
            f"{table.path}, line {gaps[0].line}: {' and '.join(map(repr, gaps[0].blank))} must not be blank "
            f"(rows like it: {len(gaps):,}). Repair the file, or read it without `strict` to leave such rows out."
        )
    if gaps:
        ids = _shortened([str(record.row[ID_COLUMN]) for record in gaps])
        logger.warning(
            "%s: %s of %s rows left out, as a text or the label is blank. Their ids: %s.",
            table.path, f"{len(gaps):,}", f"{len(records):,}", ids,
        )  # fmt: skip
    return [record.row for record in records if not record.blank]


def _some(rows: list[Row], table: _Table) -> list[Row]:
    if not rows:
        raise MinBertError(f"{table.path} has no row left to use: each has a blank text or label.")
    return rows


def _no_labels(task: Task, table: _Table, where: str) -> MinBertError:
    return MinBertError(
        f"Task {task.name!r}: no labels in {where}: {table.path} has no column {task.label_column!r} "
        f"(columns found: {table.found}). Choose a split that has labels, or predict on this one instead."
    )


def _split_path(task: Task, data_dir: Path, split: str) -> Path:
    if split not in task.files:
        known = ", ".join(task.files) or "(none)"
        raise MinBertError(f"Task {task.name!r} names no file for split {split!r}. Splits it has: {known}.")
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise MinBertError(f"`data_dir` {what}: {data_dir}. Give the folder that holds {task.files[split]}.")
    return data_dir / task.files[split]


def _read_table(path: Path) -> _Table:
    text = _read_text(path)
    header_line = text.replace("\r", "\n").partition("\n")[0]
    if not header_line.strip():
        raise MinBertError(f"{path}, line 1: a blank line where the header should be. Name the columns there.")
    delimiter = "\t" if "\t" in header_line else ","
    rows = list(_split_rows(path, text, delimiter))
    while rows and not rows[-1][1]:  # blank lines at the end
        rows.pop()
    (_, header), rows = rows[0], rows[1:]
    if not rows:
        raise MinBertError(f"{path} has a header and no rows.")
    for place, (line, cells) in enumerate(rows):
        if not cells and len(header) == 1:
            rows[place] = (line, [""])  # the csv module cannot tell a blank line from one blank cell
        elif len(cells) != len(header):
            kind = "tab" if delimiter == "\t" else "comma"
            raise MinBertError(
                f"{path}, line {line}: expected {len(header)} {kind} separated cells, as in the header. Found "
                f"{len(cells)}. Put a cell that holds a {kind} in double quotes."
            )
    return _Table(path, [name.strip() for name in header], rows)


def _split_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with the line where it begins, which is the one to repair."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    remedy = "Close the quote, or put the whole cell in quotes and double each quote inside it."
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise MinBertError(
                f"{path}, line {line}: a double quote is not closed or stray ({error}). {remedy}"
            ) from None
        if any("\n" in cell or "\r" in cell for cell in cells):
            raise MinBertError(f"{path}, line {line}: a line break inside a cell. {remedy}")
        yield line, cells


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise MinBertError(f"{path} is a folder. Give the path of a file.")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise MinBertError(f"{path} does not exist. {_neighbours(path.parent)}") from None
    except OSError as error:
        raise MinBertError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise MinBertError(f"{path}, line {line}: not UTF-8 text. Save the file as UTF-8.") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise MinBertError(f"{path}, line {line}: a NUL byte. Is it a text file? Save it as UTF-8 text.")
    if not text.strip():
        raise MinBertError(f"{path} is empty. It needs a header and rows.")
    return text


def _neighbours(folder: Path) -> str:
    if not folder.is_dir():
        return f"Its folder {folder} does not exist either."
    return f"Its folder holds: {_shortened(sorted(entry.name for entry in folder.iterdir())) or '(nothing)'}."


def _shortened(names: list[str]) -> str:
    rest = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + rest
