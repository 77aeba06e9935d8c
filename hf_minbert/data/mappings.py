"""Borrowed rows: training rows of a task that come from another task's data, and the conversion of their labels.

A mapping is a class in `MAPPINGS`. It declares which labels it reads and the column names of known corpora, and it
converts labels. Texts are not changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ..errors import MinBertError, unknown_name
from ..model.kinds import KINDS
from ..model.registry import Registry
from ..settings.tasks import TASKS, Source, Task
from .files import ID_COLUMN, Row, complete, label_columns, labels_of, pinned, read_records, tables_of
from .labels import Label, label_value
from .tables import Table


class LabelMapping(ABC):
    """Converts labels of one meaning to labels of another.

    Attributes:
        kind: the kind of the tasks that get the labels, or another kind with such labels; `None` for any.
        layouts: the columns of known corpora: the texts in the order of the task's columns, then the label. The first
            layout whose columns all exist is used.
    """

    kind: str | None = "score"
    layouts: Sequence[tuple[str, ...]] = ()

    @abstractmethod
    def reads(self, target: Task) -> Task:
        """Returns a task with the labels that are read from files. Its name and columns are not used."""

    @abstractmethod
    def fits(self, origin: Task, target: Task) -> bool:
        """Whether the mapping reads the labels of `origin` and makes those of `target`. The kind has been checked."""

    @abstractmethod
    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        """Returns the target's labels for a table's rows, `None` for a row without a label.

        Args:
            origin: names the label column and says what it contains.
            draws: random numbers for labels that are drawn. A row's label depends only on its position in the source.

        Raises:
            MinBertError: a label is not one of the origin's. The message names the row.
        """


class Same(LabelMapping):
    """Keeps the labels, because they are already those of the task. Example: MRPC for `para`."""

    kind = None

    def reads(self, target: Task) -> Task:
        return target

    def fits(self, origin: Task, target: Task) -> bool:
        theirs, ours = ((task.traits.answer, task.labels, task.range) for task in (origin, target))
        return theirs == ours

    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        return labels_of(table, origin)


class ParaphraseToScore(LabelMapping):
    """Converts binary labels, as in Quora, to random scores: uniform in [4, 5] for a paraphrase, otherwise in [0, 4].

    Each score is drawn once, by the run's seed, as in report 001.
    """

    layouts = (
        ("sentence1", "sentence2", "is_duplicate"),
        ("question1", "question2", "is_duplicate"),
        ("question1", "question2", "label"),
        ("#1 String", "#2 String", "Quality"),
        ("sentence1", "sentence2", "label"),
    )

    def reads(self, target: Task) -> Task:
        return TASKS["para"]

    def fits(self, origin: Task, target: Task) -> bool:  # whatever the two labels are called
        return origin.kind == "binary"

    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        chances = draws.random(table.size).tolist()
        return [
            None if same is None else _of_five(4 + chance if same else 4 * chance, target)
            for same, chance in zip(labels_of(table, origin), chances, strict=True)
        ]


class RelatednessToScore(LabelMapping):
    """Scales a score from 1 to 5, as in SICK, to the range of the task: (score - 1) * 5 / 4 for 0 to 5."""

    layouts = (("sentence_A", "sentence_B", "relatedness_score"),)

    def reads(self, target: Task) -> Task:
        return replace(target, range=(1.0, 5.0))

    def fits(self, origin: Task, target: Task) -> bool:
        return origin.kind == "score"

    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        low, high = origin.bounds
        return [
            None if score is None else _of_five(5 * (score - low) / (high - low), target)
            for score in labels_of(table, origin)
        ]


class NliToScore(LabelMapping):
    """Averages the annotators' votes: contradiction is 0, neutral 3 and entailment 5, as for SNLI in report 002.

    The votes are in the column `annotator_labels`, a list for each row; blanks are skipped. Without votes, the label
    is used instead. The label `-` means no majority and counts as blank.
    """

    scores = {"contradiction": 0.0, "neutral": 3.0, "entailment": 5.0}
    votes = "annotator_labels"
    layouts = (
        ("premise", "hypothesis", "label"),
        ("sentence1", "sentence2", "gold_label"),
        ("sentence_A", "sentence_B", "entailment_judgment"),
    )

    def reads(self, target: Task) -> Task:
        return TASKS["nli"]

    def fits(self, origin: Task, target: Task) -> bool:
        return origin.traits.is_class and {name.casefold() for name in origin.labels} == set(self.scores)

    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        (column,) = label_columns(origin)
        words = {"-": ""} | {name.casefold(): name for name in origin.labels}  # SICK writes NEUTRAL
        table = _repaired(table, column, lambda cell: words.get(cell.strip().casefold(), cell))
        single = labels_of(table, origin)
        voted = self._voted(table, origin, words) if self.votes in table.columns else [[]] * table.size
        scores = [self.scores[name.casefold()] for name in origin.labels]
        votes = [
            of_row or ([] if label is None else [int(label)]) for of_row, label in zip(voted, single, strict=True)
        ]
        return [
            _of_five(sum(scores[vote] for vote in of_row) / len(of_row), target) if of_row else None
            for of_row in votes
        ]

    def _voted(self, table: Table, origin: Task, words: Mapping[str, str]) -> list[list[int]]:
        """The class ids of each row's votes."""
        voted: list[list[int]] = []
        for number, votes in enumerate(table.column(self.votes)):
            where = f"{table.where(number)}, column {self.votes!r}"
            if not isinstance(votes, list | None) or not all(isinstance(vote, str | None) for vote in votes or ()):
                raise MinBertError(f"{where}: expected a list like [neutral, entailment]. Found {votes!r:.50}.")
            names = [words.get(vote.strip().casefold(), vote.strip()) for vote in votes or () if vote]
            voted.append([int(label_value(origin, name, where)) for name in names if name])
        return voted


class StarsToClasses(LabelMapping):
    """Converts reviews with one to five stars to the first to the fifth of five classes, as for Yelp in report 002."""

    kind = "classes"
    layouts = (("text", "stars"), ("text", "label"), ("review_text", "class_index"))

    def reads(self, target: Task) -> Task:
        return replace(target, kind="classes", labels=("1", "2", "3", "4", "5"), range=None, metric="")

    def fits(self, origin: Task, target: Task) -> bool:
        return origin.traits.is_class and len(target.labels) == len(origin.labels) == 5

    def labels(self, table: Table, origin: Task, target: Task, draws: np.random.Generator) -> list[Label | None]:
        return labels_of(table, origin)


#: A `mapping` of a recipe's sources to what carries it out.
MAPPINGS: Registry[LabelMapping] = Registry("mapping", LabelMapping, {
    "same": Same(),
    "paraphrase_to_score": ParaphraseToScore(),
    "relatedness_to_score": RelatednessToScore(),
    "nli_to_score": NliToScore(),
    "stars_to_classes": StarsToClasses(),
})  # fmt: skip


def _of_five(score: float, target: Task) -> float:
    """A score from 0 to 5 on the target's range."""
    low, high = target.bounds
    return low + (high - low) * score / 5


def _repaired(table: Table, column: str, repair: Callable[[str], str]) -> Table:
    """The table with the text of a column's cells repaired."""

    def cells(at: int) -> Sequence[Any]:
        found = table.cells(at)
        return [repair(cell) if isinstance(cell, str) else cell for cell in found] if at == place else found

    place = table.columns.index(column) if column in table.columns else None
    return replace(table, cells=cells)


# ---- Reading a source ------------------------------------------------------------------------------------


def borrowed_rows(
    target: Task, number: int, tasks: Mapping[str, Task], data_dir: str | Path | None, seed: int, strict: bool = False
) -> list[Row]:
    """Returns the rows that a task borrows from one of its sources, in their order, with its own columns and labels.

    The drawn rows and the drawn labels depend only on the seed, the task's name and the source's number. A larger
    `rows` adds rows to the same draw. An id consists of the source's name and the row's id.

    Args:
        number: the number of the source, from 1.
        tasks: the tasks of the recipe, by name.
        strict: raise on the first row with a blank text or label. Otherwise such rows are dropped with a warning.

    Raises:
        MinBertError: as `read_rows` and `origin_of`.
    """
    source, mapping = target.sources[number - 1], MAPPINGS[target.sources[number - 1].mapping]
    origin = origin_of(target, number, tasks)
    key = [seed, crc32(target.name.encode()), number]
    draws = np.random.default_rng([*key, 0])
    names = dict(zip(origin.text_columns, target.text_columns, strict=True))
    rows: list[Row] = []
    first_id = 0
    for table in tables_of(origin, data_dir, "train"):
        reader = _laid_out(origin, source, mapping, table)
        labels = mapping.labels(table, reader, target, draws)
        records = complete(list(read_records(table, reader, labels, first_id)), table, reader, strict)
        first_id += table.size
        for row in (record.row for record in records):
            texts = {ours: row[theirs] for theirs, ours in names.items()}
            rows.append({ID_COLUMN: f"{source.name}:{row[ID_COLUMN]}", **texts, "label": row["label"]})
    if not rows:
        raise MinBertError(f"{_place(target, number)}: {source.name} has no row with all texts and a label.")
    return _drawn(rows, source, np.random.default_rng([*key, 1]))


def origin_of(target: Task, number: int, tasks: Mapping[str, Task]) -> Task:
    """Returns the task whose training rows a source borrows: a task of the recipe or package, or the source's files.

    Raises:
        MinBertError: the mapping is unknown or does not fit the labels, there is no such task, or its rows have a
            different number of texts.
    """
    where, source = _place(target, number), target.sources[number - 1]
    if source.mapping not in MAPPINGS:
        raise MinBertError(f"{where}: {unknown_name('mapping', source.mapping, MAPPINGS)}")
    mapping = MAPPINGS[source.mapping]
    if not _makes(mapping, target):
        raise MinBertError(
            f"{where}: the mapping {source.mapping!r} makes labels of kind {mapping.kind!r}, and the task's kind is "
            f"{target.kind!r}. Choose another mapping."
        )
    if source.task is None:
        origin = _from_files(target, source, mapping)
    else:
        others = {name: task for name, task in {**TASKS, **tasks}.items() if name != target.name}
        if source.task not in others:
            raise MinBertError(f"{where}: {unknown_name('task', source.task, others)}")
        origin = replace(others[source.task], sources=())
        if source.dataset_revision:
            origin = replace(origin, dataset_revision=source.dataset_revision)
    texts = {len(layout) - 1 for layout in mapping.layouts} or {len(origin.text_columns)}
    if len(origin.text_columns) != len(target.text_columns) or len(target.text_columns) not in texts:
        raise MinBertError(
            f"{where}: rows of {max(texts)} text(s) cannot be borrowed for a task of {len(target.text_columns)}. "
            f"Choose another source."
        )
    if not mapping.fits(origin, target):
        fitting = [name for name, other in MAPPINGS.items() if _makes(other, target)]
        fitting = [name for name in fitting if MAPPINGS[name].fits(origin, target)]
        raise MinBertError(
            f"{where}: the mapping {source.mapping!r} does not make the labels of {target.name!r} out of those of "
            f"{source.name!r}. Mappings that do: {', '.join(fitting) or '(none)'}."
        )
    return origin


def _makes(mapping: LabelMapping, target: Task) -> bool:
    return mapping.kind is None or KINDS[mapping.kind].answer == target.traits.answer


def pinned_sources(task: Task, tasks: Mapping[str, Task], data_dir: str | Path | None) -> Task:
    """Returns the task with the commit of each source that is on the Hub."""
    found = []
    for number, source in enumerate(task.sources, 1):
        commit = pinned(origin_of(task, number, tasks), data_dir).dataset_revision
        found.append(replace(source, dataset_revision=commit) if commit else source)
    return replace(task, sources=tuple(found))


def _from_files(target: Task, source: Source, mapping: LabelMapping) -> Task:
    files = [file.entry for file in source.data_files()]
    return replace(
        mapping.reads(target), name=target.name, text_columns=target.text_columns,
        pair_encoding=target.pair_encoding, files={"train": files} if files else {},
        dataset=source.dataset, dataset_config=source.dataset_config, dataset_revision=source.dataset_revision,
        splits={"train": source.split} if source.split else {}, columns=source.columns, sources=(),
    )  # fmt: skip


def _laid_out(origin: Task, source: Source, mapping: LabelMapping, table: Table) -> Task:
    """Returns the origin with the columns of a known layout, if the table has them."""
    if source.task is not None or not mapping.layouts:
        return origin
    options = [
        {**dict(zip((*origin.text_columns, "label"), layout, strict=True)), **source.columns}
        for layout in mapping.layouts
    ]
    there = [columns for columns in options if set(columns.values()) - {columns.get(ID_COLUMN)} <= set(table.columns)]
    return replace(origin, columns=(there or options)[0])


def _drawn(rows: list[Row], source: Source, draws: np.random.Generator) -> list[Row]:
    wanted = source.rows if source.fraction is None else max(1, round(source.fraction * len(rows)))
    if wanted is None or wanted >= len(rows):
        return rows
    return [rows[place] for place in sorted(draws.permutation(len(rows))[:wanted].tolist())]


def _place(target: Task, number: int) -> str:
    return f"Task {target.name!r}, source {number}"
