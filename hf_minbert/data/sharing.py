"""Rows with the labels of several tasks. They are read once, tokenized once, and used together in a round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MinBertError
from ..settings.tasks import Task, data_files
from ..settings.wording import counted
from .encoding import column_of, with_labels
from .files import (
    TO_TRAIN,
    Record,
    Row,
    complete,
    has_labels,
    label_columns,
    labels_of,
    located,
    no_labels,
    read_records,
    tables_of,
    to_dataset,
)
from .rows import EncodedRows

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)


# ---- Files ---------------------------------------------------------------------------------------------------


def by_training_rows(tasks: Iterable[Task], data_dir: str | Path | None) -> list[list[Task]]:
    """Groups tasks that read the same training rows: the same texts of the same data. Ignores borrowed rows."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(_training_rows(task, data_dir), []).append(task)
    return list(groups.values())


def _training_rows(task: Task, data_dir: str | Path | None) -> str:
    """The same text for tasks with the same training rows."""
    if task.sources:
        return task.name
    there = located(task, data_dir)
    texts = [there.columns.get(name, name) for name in task.text_columns]
    files = data_files(there.files["train"]) if "train" in there.files else task.name
    data = [there.dataset, there.dataset_config, there.dataset_revision, there.splits.get("train")]
    return repr([texts, data if there.dataset else files])


def load_together(
    tasks: Sequence[Task], data_dir: str | Path | None, split: str, strict: bool = False
) -> dict[str, datasets.Dataset]:
    """Reads a split once for the tasks of one group of `by_training_rows`.

    Each task gets the same rows with its own labels. A row is kept for all tasks if it has a label of at least one.
    For a task without a label, its `label` is `None`.

    Raises:
        MinBertError: as `files.load_split`. With `strict`, a row has a blank text or no label of any task.
    """
    rows: dict[str, list[Row]] = {task.name: [] for task in tasks}
    first_id = 0
    for table in tables_of(tasks[0], data_dir, split):
        for task in tasks:
            if not has_labels(table, task):
                raise no_labels(task, table, f"split {split!r}", TO_TRAIN)
        records = [[*read_records(table, task, labels_of(table, task), first_id)] for task in tasks]
        merged = [_merged(tasks, of_row) for of_row in zip(*records, strict=True)]
        kept = {record.number for record in complete(merged, table, tasks[0], strict)}
        for task, of_task in zip(tasks, records, strict=True):
            rows[task.name] += [{"label": None, **record.row} for record in of_task if record.number in kept]
        first_id += table.size
    for task in tasks:
        missing = sum(row["label"] is None for row in rows[task.name])
        if missing == len(rows[task.name]):  # or there is no row
            raise MinBertError(
                f"Task {task.name!r} has no label in split {split!r}. Give it some, or do not train it."
            )
        if missing:
            logger.info(f"{task.name} has no label in {counted(missing, 'row')} of {len(rows[task.name]):,}.")
    return {task.name: to_dataset(rows[task.name], task) for task in tasks}


def _merged(tasks: Sequence[Task], records: Sequence[Record]) -> Record:
    """Merges the rows that several tasks read. A row lacks a label only if it has none of any task."""
    first = records[0]
    blank = [name for name in tasks[0].text_columns if not first.row[name]]
    if not any("label" in record.row for record in records):
        blank += [column for task in tasks for column in label_columns(task)]
    return replace(first, blank=blank)


# ---- Encoded rows --------------------------------------------------------------------------------------------


def encode_together(
    datasets: Mapping[str, Any], tasks: Mapping[str, Task], encode: Callable[[Any, Task], EncodedRows]
) -> dict[str, EncodedRows]:
    """Encodes the rows of each task. Rows with the same texts are tokenized once. A label may be `None`.

    Args:
        datasets: the rows of each task, as for `encoding.encode`.
        tasks: the tasks by name.
        encode: a function that tokenizes the rows of a task, without their labels.

    Raises:
        MinBertError: as `encoding.encode`; or a task has no labels.
    """
    encoded: dict[str, EncodedRows] = {}
    for name, dataset in datasets.items():
        same = next((other for other in encoded if _same_texts(datasets, tasks[other], tasks[name])), None)
        tokens = encode(dataset, tasks[name]) if same is None else replace(encoded[same], labels=None, labelled=None)
        encoded[name] = tokens if tokens.labels is not None else with_labels(tokens, dataset, tasks[name])
    return encoded


def _same_texts(datasets: Mapping[str, Any], task: Task, other: Task) -> bool:
    """Whether two tasks make the same inputs of their rows, as far as can be seen before they are encoded."""
    rows, others = datasets[task.name], datasets[other.name]
    forms = {(one.pair_encoding == "bi", one.traits.is_tags) for one in (task, other)}
    if len(forms) > 1 or len(rows) != len(others):
        return False
    columns = [column_of(rows, name) for name in task.text_columns]
    return None not in columns and columns == [column_of(others, name) for name in other.text_columns]


def same_tokens(rows: EncodedRows, others: EncodedRows) -> bool:
    """Whether the inputs of two tasks' rows are equal, one by one."""
    alike = (np.array_equal(getattr(rows, name), getattr(others, name)) for name in ("starts", "ids", "segments"))
    return rows.sides == others.sides and all(alike)


def with_some_label(rows: Mapping[str, EncodedRows]) -> dict[str, EncodedRows]:
    """Drops rows without a label of any of these tasks, which have the same inputs."""
    masks = [of.labelled for of in rows.values() if of.labelled is not None]
    if len(masks) < len(rows):
        return dict(rows)
    some = np.flatnonzero(np.any(masks, axis=0))
    kept = {name: of.take(some) for name, of in rows.items()}
    return {name: replace(of, labelled=None) if np.all(of.labelled) else of for name, of in kept.items()}
