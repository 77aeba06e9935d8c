"""Reads a task's rows from your files, a saved dataset, the package's sample, or the Hub.

`hf_minbert.data.tables` reads the cells. This module turns them into rows, by the same rules for every format. Columns
are found by name. A text cell may be text or a number, and a line break inside a text becomes a space. A missing or
null cell is blank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError, unknown_name
from ..model.inference import LONE_SURROGATE
from ..model.spans import split
from ..settings.tasks import SPLITS, TASKS, DataFile, Task, data_files
from ..settings.wording import counted
from . import hub
from .delimited import shortened
from .labels import (
    Label,
    check_tags,
    class_values,
    flag_value,
    is_number,
    label_value,
    no_words,
    sentence_of,
    tag_values,
)
from .tables import Table, dataset_table, read_table, saved_splits

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ID_COLUMN = "id"
SAMPLE, HUB = "sample", "hub"
SAMPLE_DIR = Path(__file__).parent / "samples"


def read_rows(
    file: str | Path | DataFile,
    task: Task,
    *,
    labelled: bool,
    strict: bool = False,
    columns: Mapping[str, str] | None = None,
) -> list[Row]:
    """Reads the rows of one file in their order: `id`, the task's text columns and, if `labelled`, `label`.

    Whitespace around a text is removed; an id is kept unchanged. Without an `id` column, the id is the row number from
    0. If `labelled`, rows with a blank text or label are dropped with a warning. Otherwise every row is kept, a blank
    text is `""`, and the label column is not read.

    Args:
        file: its path, or a `DataFile` with reading options.
        strict: raise on the first row that would be dropped.
        columns: a mapping from a text column, `label` or `id` to its name in the file. It is added to that of the
            task.

    Raises:
        MinBertError: the file, a column, a row or a label is invalid. The message names the file and the line.
    """
    if columns:
        task = replace(task, columns={**task.columns, **columns})
    table = read_table(file)
    if labelled and not has_labels(table, task):
        raise no_labels(task, table, table.name, TO_SCORE)
    return _rows([table], task, labelled, strict)


def load_split(
    task: Task, data_dir: str | Path | None, split: str, *, labelled: bool | None = None, strict: bool = False,
    keep_unlabelled: bool = False,
) -> datasets.Dataset:  # fmt: skip
    """Reads one split of a task as a `datasets.Dataset`; see `read_rows`.

    Several files are concatenated in their order.

    Args:
        data_dir: the folder that the task's paths are relative to; `None` is the working directory. Unless a folder
            has that name, `sample` is the sample in the package and `hub` is the task's dataset on the Hub. These two
            are for tasks without data of their own.
        labelled: whether labels are required. `None` requires them for all splits but `test`. A `test` split keeps
            every row. It has labels only if all of its rows are complete.
        keep_unlabelled: whether a row with texts and a blank label is kept, with the label `None`.

    Raises:
        MinBertError: as `read_rows`; or the folder, the split or its labels are missing.
    """
    if _is_on_hub(task, data_dir):
        task = hub.on_hub(task)  # whose columns have other names
    tables = tables_of(task, data_dir, split)
    optional, trains = labelled is None and split == "test", labelled is None
    without = [table for table in tables if not has_labels(table, task)]
    labelled = not without if optional else labelled is not False
    if labelled and without:
        raise no_labels(task, without[0], f"split {split!r}", TO_TRAIN if trains else TO_SCORE)
    if optional and labelled:
        records = [record for table in tables for record in read_records(table, task, labels_of(table, task))]
        if any(record.blank for record in records):
            if any("label" in record.row for record in records):
                where = tables[0].name
                logger.warning("%s: some rows are not complete, so split %r is read without labels.", where, split)
            labelled = False
    return to_dataset(_rows(tables, task, labelled, strict, keep_unlabelled), task)


def read_unlabelled(task: Task, data_dir: str | Path | None, strict: bool = False) -> list[Row]:
    """Reads the rows of a task's `unlabelled` files. Rows with a blank text are dropped. Labels are not read.

    Raises:
        MinBertError: as `read_rows`; no row has a text; or, if `strict`, a row has a blank text.
    """
    there = replace(
        task, files={"train": task.unlabelled}, dataset=None, dataset_config=None, dataset_revision=None, splits={},
        unlabelled=None,
    )  # fmt: skip
    rows = _rows(tables_of(there, data_dir, "train"), there, False, False)
    kept = [row for row in rows if all(row[name] for name in task.text_columns)]
    if blank := len(rows) - len(kept):
        said = f"Task {task.name!r}: a text is blank in {counted(blank, 'row')} of `unlabelled`"
        if strict:
            raise MinBertError(f"{said}. Repair the file, or leave `strict_data` out.")
        logger.warning("%s, which %s left out.", said, "is" if blank == 1 else "are")
    if not kept:
        raise MinBertError(f"Task {task.name!r}: `unlabelled` has no row with a text. Leave it out.")
    return kept


def load_task(
    task: Task, data_dir: str | Path | None, splits: Iterable[str] = SPLITS, strict: bool = False
) -> datasets.DatasetDict:
    """Reads the requested splits with `load_split`. Other files are not read.

    Returns:
        a dict of datasets with the columns `id` (string), the task's text columns (string) and, if there are labels,
        `label`: a `ClassLabel` (int64), a float32 score, or a list of float32, 0 or 1 for each label.
    """
    import datasets

    return datasets.DatasetDict({split: load_split(task, data_dir, split, strict=strict) for split in splits})


def read_texts(task: Task, data_dir: str | Path | None, split: str) -> list[tuple[str, ...]] | None:
    """Returns the one or two texts of each row of a split, or `None` if there is no such split. Labels are not read.

    Raises:
        MinBertError: the split cannot be read.
    """
    if _is_on_hub(task, data_dir):
        task = hub.on_hub(task)
        there = hub.has_split(task, split)
    elif task.dataset:
        there = hub.split_among(task, split, saved_splits(_saved(task, _folder(task, data_dir)))) is not None
    else:
        there = split in task.files and all(Path(file.path).exists() for file in _files(task, data_dir, split))
    if not there:
        return None
    rows = _rows(tables_of(task, data_dir, split), task, False, False)
    return [tuple(str(row[name]) for name in task.text_columns) for row in rows]


def has_files(task: Task, data_dir: str | Path | None) -> bool:
    """Whether the task reads files and at least one of them exists."""
    no_folder = data_dir not in (None, SAMPLE) and not Path(data_dir).is_dir()
    if no_folder or not task.files or task.dataset:
        return False
    return any(Path(file.path).exists() for split in task.files for file in _files(task, data_dir, split))


def has_training_data(task: Task, data_dir: str | Path | None) -> bool:
    """Whether a task has training rows besides those of its sources."""
    return not task.sources or "train" in task.files or task.dataset is not None or _is_on_hub(task, data_dir)


def pinned(task: Task, data_dir: str | Path | None) -> Task:
    """Returns the task; if its dataset is on the Hub, with the dataset's commit."""
    return hub.pinned(task) if _is_on_hub(task, data_dir) else task


def located(task: Task, data_dir: str | Path | None) -> Task:
    """Returns the task with paths that do not depend on `data_dir`."""
    if _is_on_hub(task, data_dir):
        return hub.on_hub(task)
    folder = _folder(task, data_dir)
    if task.dataset:
        return replace(task, dataset=str(_saved(task, folder).resolve()))
    files = {split: _files(task, data_dir, split) for split in task.files}
    files = {
        split: [replace(file, path=str(Path(file.path).resolve())).entry for file in several]
        for split, several in files.items()
    }
    return replace(task, files=files)


def to_dataset(rows: list[Row], task: Task) -> datasets.Dataset:
    """Makes a dataset from the result of `read_rows`. Column types are fixed; they are not guessed from the values."""
    import datasets

    text = datasets.Value("string")
    features: dict[str, Any] = {ID_COLUMN: text} | dict.fromkeys(task.text_columns, text)
    if "label" in rows[0]:
        names = list(task.labels)
        number = datasets.Value(task.traits.dtype)
        one = number if task.traits.is_score or task.traits.is_set else datasets.ClassLabel(names=names)
        features["label"] = [one] if task.traits.is_set or task.traits.is_tags else one
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


# ---- Where the data lies ---------------------------------------------------------------------------------


def tables_of(task: Task, data_dir: str | Path | None, split: str) -> list[Table]:
    """Returns the tables of a split, one for each file."""
    if split not in SPLITS and split not in task.files:
        raise unknown_name("split", split, SPLITS)
    if _is_on_hub(task, data_dir):
        return [hub.read(task, split)]
    if task.dataset:
        import datasets

        saved = _saved(task, _folder(task, data_dir))
        there = hub.split_there(task, split, saved_splits(saved), str(saved))
        return [dataset_table(datasets.Dataset.load_from_disk(saved / there), str(saved / there))]
    if split not in task.files:
        known = ", ".join(task.files) or "(none)"
        raise MinBertError(f"Task {task.name!r} names no file for split {split!r}. Splits it has: {known}.")
    files = _files(task, data_dir, split)
    absent = [file.path for file in files if not Path(file.path).exists()]
    if absent and data_dir is None:
        raise MinBertError(
            f"Task {task.name!r}: {absent[0]} does not exist in the working directory, and no `data_dir` is given. "
            f"Set `data_dir` (of a saved model: --data-dir) to the folder that holds it{_other_sources(task)}."
        )
    return [*map(read_table, files)]


def _files(task: Task, data_dir: str | Path | None, split: str) -> list[DataFile]:
    """Returns the files of a split with their full paths."""
    folder = _folder(task, data_dir)
    return [replace(file, path=str(folder / file.path)) for file in data_files(task.files[split])]


def _is_on_hub(task: Task, data_dir: str | Path | None) -> bool:
    if task.dataset:
        saved = _saved(task, _folder(task, data_dir))
        if not saved.is_dir() and not hub.is_hub_id(task.dataset):
            raise MinBertError(
                f"Task {task.name!r}: `dataset` {task.dataset} is no folder here. Give one that "
                f"`DatasetDict.save_to_disk` wrote, or an id on the Hub such as owner/name."
            )
        return not saved.is_dir()
    by_word = _is_word(HUB, data_dir) and not _has_own_data(task)
    if task.sources and not task.files and not (by_word and task.name in TASKS):
        return False  # it lives on what it borrows
    if by_word:
        return True
    if not task.files:
        hub.on_hub(task)  # raises where the package knows none
    return not task.files


def _has_own_data(task: Task) -> bool:
    """Whether the recipe names the task's data. `sample` and `hub` are not used for such a task."""
    ours = TASKS.get(task.name)
    return bool(task.dataset) or (bool(task.files) and (ours is None or task.files != ours.files))


def _is_word(word: str, data_dir: str | Path | None) -> bool:
    return str(data_dir) == word and not Path(word).is_dir()


def _folder(task: Task, data_dir: str | Path | None) -> Path:
    if data_dir is None:
        return Path()
    if _is_word(SAMPLE, data_dir) or _is_word(HUB, data_dir):
        own = _has_own_data(task) or _is_word(HUB, data_dir)
        return Path() if own else SAMPLE_DIR
    folder = Path(data_dir)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise MinBertError(
            f"`data_dir` {what}: {data_dir}. Give the folder that holds the data of {task.name!r}"
            f"{_other_sources(task)}."
        )
    return folder


def _other_sources(task: Task) -> str:
    if task.name not in TASKS:
        return ""
    return f", `{SAMPLE}` for the sample in the package or `{HUB}` for the Hub"


def _saved(task: Task, folder: Path) -> Path:
    """The folder that `dataset` names, looked for in `data_dir` and in the working directory."""
    name = task.dataset or ""
    beside = folder / name
    return beside if beside.is_dir() else Path(name)


# ---- From cells to rows ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One row as it was read.

    Args:
        number: its position in the table, from 0.
        row: `id`, the text columns and, unless it is blank, `label`.
        blank: the required columns that are blank.
    """

    number: int
    row: Row
    blank: list[str]


def _rows(tables: list[Table], task: Task, labelled: bool, strict: bool, keep_unlabelled: bool = False) -> list[Row]:
    rows: list[Row] = []
    first_id = 0  # numbers of rows go on from file to file
    for table in tables:
        records = list(read_records(table, task, labels_of(table, task) if labelled else None, first_id))
        if labelled and keep_unlabelled:
            records = [*map(_without_label, records)]
        rows += [record.row for record in (complete(records, table, task, strict) if labelled else records)]
        first_id += table.size
    if not rows:
        names = ", ".join(table.name for table in tables)
        raise MinBertError(f"{names} has no row left to use: each has a blank text or label.")
    return rows


def _without_label(record: Record) -> Record:
    """A record that lacks its label alone, with the label `None`."""
    lacks = "label" not in record.row and len(record.blank) == 1
    return replace(record, row={**record.row, "label": None}, blank=[]) if lacks else record


def read_records(
    table: Table, task: Task, labels: Sequence[Label | None] | None, first_id: int = 0
) -> Iterator[Record]:
    """Reads the rows of a table in their order.

    Args:
        labels: one for each row, `None` for a blank one. Leave it out if no labels are needed.
        first_id: the id of the first row, if the table has no column of ids.
    """
    names = task.text_columns
    texts = [table.texts(_column(task, name)) for name in names]
    id_column = _column(task, ID_COLUMN)
    has_ids = id_column in table.columns or ID_COLUMN in task.columns
    ids = table.column(id_column) if has_ids else range(first_id, first_id + table.size)
    for number, (id_, *cells) in enumerate(zip(ids, *texts, strict=True)):
        where = table.where(number)
        row: Row = {ID_COLUMN: _text(id_, where)}
        if task.traits.is_tags:
            row[names[0]] = sentence = sentence_of(task, [] if cells[0] is None else cells[0], where)
            if labels is not None and isinstance(tags := labels[number], list):
                check_tags(task, len(tags), len(split(sentence)), where)
        else:
            row |= {name: _text(cell, where).strip() for name, cell in zip(names, cells, strict=True)}
        blank = [name for name in names if not row[name]]
        if labels is not None:
            if (label := labels[number]) is None:
                blank.append(", ".join(label_columns(task)))
            else:
                row["label"] = label
        yield Record(number, row, blank)


def labels_of(table: Table, task: Task) -> list[Any]:
    """Returns the labels of a table's rows as `label_value` or `tag_values` makes them; `None` for a blank cell."""
    column, *others = label_columns(task)
    if others:
        columns = [table.column(name) for name in (column, *others)]
        return [_flags(cells, task, table.where(number)) for number, cells in enumerate(zip(*columns, strict=True))]
    names = table.class_names.get(column)
    of_class = class_values(task, names, f"{table.name}, column {column!r}") if names else []
    if task.traits.is_tags:
        cells = enumerate(table.column(column))
        return [
            None if cell in (None, "") else tag_values(task, cell, partial(table.where, number), of_class)
            for number, cell in cells
        ]
    return [_label(cell, task, table, of_class, table.where(n)) for n, cell in enumerate(table.column(column))]


def _text(cell: Any, where: str) -> str:
    """Returns the cell as text. The year 2016 is "2016" even if blank cells in its column made it 2016.0."""
    if isinstance(cell, str):
        if LONE_SURROGATE.search(cell):  # JSON can spell one
            raise MinBertError(f"{where}: half a character (a lone surrogate) in a cell. Found {ascii(cell):.50}.")
        return re.sub(r"[\r\n]+", " ", cell) if "\n" in cell or "\r" in cell else cell
    if cell is None:
        return ""
    if type(cell) is float and cell.is_integer():
        return str(int(cell))
    if type(cell) in (int, float, Decimal) and cell == cell:  # NaN is neither text nor a number
        return str(cell)
    raise MinBertError(f"{where}: expected text or a number in a cell. Found {cell!r:.50}. Save the column as text.")


def _flags(cells: tuple[Any, ...], task: Task, where: str) -> Label | None:
    """The label of a row with a column for each label; `None` if one of them is blank."""
    texts = [cell if isinstance(cell, bool) else _text(cell, where).strip() for cell in cells]
    if "" in texts:
        return None
    places = zip(texts, label_columns(task), strict=True)
    return [flag_value(task, text, f"{where}, column {column!r}") for text, column in places]


def _label(cell: Any, task: Task, table: Table, of_class: Sequence[float], where: str) -> Label | None:
    """Returns the label's value, or `None` for a blank cell.

    For `kind: labels`, an empty cell is a row without labels.
    """
    if task.traits.is_set:
        if isinstance(cell, list):  # of class ids, where the column says what they are: a name is never ambiguous
            known = range(len(of_class))
            cell = [task.labels[int(of_class[id_])] if type(id_) is int and id_ in known else id_ for id_ in cell]
        elif cell is not None:
            cell = _text(cell, where)
        return None if cell is None else label_value(task, cell, where)
    if type(cell) in (int, float) and cell == -1 and table.has_unlabelled and not _may_be_minus_one(task):
        return None
    if type(cell) is int and 0 <= cell < len(of_class):
        return label_value(task, of_class[cell], where)
    if isinstance(cell, bool):
        return label_value(task, cell, where)
    text = str(cell) if cell != cell else _text(cell, where).strip()
    if not text:
        return None
    if is_number(text) and [label.casefold() for label in task.labels] == ["true", "false"]:
        raise MinBertError(
            f"{where}: the label {text} of task {task.name!r} is ambiguous: as a boolean and as a class id it "
            f"means different labels. Class id 0 is {task.labels[0]}. Write True or False, or name the labels "
            f"in the order False, True."
        )
    return label_value(task, text, where)


def _may_be_minus_one(task: Task) -> bool:
    return task.bounds[0] <= -1 <= task.bounds[1] if task.traits.is_score else "-1" in task.labels


def _column(task: Task, name: str) -> str:
    """Returns the name of a text column or the id column in the data."""
    found = task.columns.get(name, name)
    assert isinstance(found, str)  # `label` alone may have several
    return found


def label_columns(task: Task) -> list[str]:
    """Returns the name of the label column, or the names of all label columns if each label has its own."""
    found = task.columns.get("label", task.label_column)
    return found if isinstance(found, list) else [found]


def has_labels(table: Table, task: Task) -> bool:
    return {*label_columns(task)} <= {*table.columns}


def complete(records: list[Record], table: Table, task: Task, strict: bool) -> list[Record]:
    """Returns the rows without blank cells. Dropped rows are logged, or refused if `strict`.

    A sentence without words is always refused for `kind: tags`.
    """
    gaps = [record for record in records if record.blank]
    empty = [record.number for record in gaps if not record.row[task.text_columns[0]]] if task.traits.is_tags else []
    if empty:
        raise no_words(task, table.where(empty[0]))
    if gaps and strict:
        raise MinBertError(
            f"{table.where(gaps[0].number)}: {' and '.join(map(repr, gaps[0].blank))} must not be blank "
            f"(rows like it: {len(gaps):,}). Repair the file, or read it without `strict` to leave such rows out."
        )
    if gaps:
        ids = shortened([str(record.row[ID_COLUMN]) for record in gaps])
        logger.warning(
            "%s: %s of %s rows are left out, because a text or the label is blank. Their ids: %s.",
            table.name, f"{len(gaps):,}", f"{len(records):,}", ids,
        )  # fmt: skip
    return [record for record in records if not record.blank]


#: What to do about rows without labels.
TO_TRAIN = "Name the right column under the task's `columns`, or give it files that have one."
TO_SCORE = (
    "Choose a split that has labels, name the right column under `columns` (--columns on the command line), or "
    "predict on this one instead."
)


def no_labels(task: Task, table: Table, where: str, remedy: str) -> MinBertError:
    column = next((name for name in label_columns(task) if name not in table.columns), label_columns(task)[0])
    return MinBertError(
        f"Task {task.name!r}: no labels in {where}: {table.name} has no column {column!r} (columns found: "
        f"{table.found}).{table.meant(column)} {remedy}"
    )
