"""The leak guard: removes borrowed training rows that are also dev or test rows.

Texts are compared after `plain`. A row matches if all of its texts match, for a pair in either order. Only whole texts
are compared: a held-out sentence inside a longer text is not found. Labels are not compared.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MinBertError
from ..settings.tasks import TASKS, Task, data_files, get_tasks
from ..settings.wording import counted
from .files import Row, has_files, has_training_data, load_split, read_texts, read_unlabelled, to_dataset
from .mappings import borrowed_rows, origin_of
from .sharing import by_training_rows, load_together

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Key = tuple[str, ...]
Texts = TypeVar("Texts", str, tuple[str, ...])


class _Letters(dict):
    """A mapping from code points to replacements. Letters, digits and accents are kept; the rest becomes a space."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        invisible = category == "Cf"  # soft hyphens, zero-width spaces
        self[code] = chr(code) if category[0] in "LNM" else "" if invisible else " "
        return self[code]


_LETTERS = _Letters()


def plain(text: str) -> str:
    """Normalizes a text for comparison: Unicode variants (NFKC), case, quotes, punctuation and spaces.

    A text that consists of punctuation alone is kept.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.translate(_LETTERS).split()) or " ".join(folded.split())


@dataclass
class HeldOut:
    """The dev and test texts that no borrowed row may contain.

    Args:
        rows: for each name, such as `sts dev`, how often each row occurs. A row is its plain texts, sorted.
        sentences: for each name, all plain texts of these rows.
    """

    rows: dict[str, Counter[Key]] = field(default_factory=dict)
    sentences: dict[str, set[str]] = field(default_factory=dict)

    def add(self, name: str, texts: Iterable[str | tuple[str, ...]]) -> None:
        keys = [key for key in map(key_of, texts) if key is not None]
        # two tasks of one name may share rows, each of which counts as often as one of them has it
        self.rows[name] = self.rows.get(name, Counter()) | Counter(keys)
        self.sentences[name] = self.sentences.get(name, set()) | {text for key in keys for text in key}

    @classmethod
    def of(cls, tasks: Iterable[Task], data_dir: str | Path | None, asked: Collection[Task] | None = None) -> HeldOut:
        """Collects the dev and test rows of tasks. A missing split is skipped. It is logged for the tasks in `asked`.

        Args:
            asked: all tasks by default.
        """
        held_out, absent = cls(), []
        for task in tasks:
            for split in ("dev", "test"):
                texts = read_texts(task, data_dir, split)
                if texts is None and (asked is None or task in asked):
                    absent.append(f"{task.name} {split}")
                elif texts is not None:
                    held_out.add(f"{task.name} {split}", texts)
        if absent:
            logger.info("No rows of %s were found, so training rows are not checked against them.", ", ".join(absent))
        return held_out

    @classmethod
    def of_run(
        cls, tasks: Sequence[Task], more: Collection[str] | Mapping[str, Any] | None, data_dir: str | Path | None
    ) -> HeldOut:
        """Collects the dev and test rows that a run of `tasks` must not borrow; see `guarded_tasks`."""
        guarded = guarded_tasks(tasks, more, data_dir)
        return cls.of(guarded, data_dir, tasks if more is None else guarded)


def drop_leaks(
    texts: Sequence[Texts], held_out: HeldOut, drop_sentences: bool = False
) -> tuple[list[Texts], dict[str, Any]]:
    """Returns the rows of `texts` that may be used for training, in their order, and counts of the matches.

    Args:
        texts: rows of training data, each a text or a tuple of one or two texts.
        drop_sentences: also drop a row if a single one of its texts occurs in a held-out row.

    Returns:
        the rows that are kept; and counts: `rows` (the number before), `dropped`, and `matches`, which maps each name
        of held-out rows to `rows` (rows that match as a whole) and `sentences` (texts that match, including those of
        whole rows).
    """
    keep, counts = find_leaks(texts, held_out, drop_sentences)
    return [row for row, stays in zip(texts, keep, strict=True) if stays], counts


def find_leaks(
    texts: Sequence[Texts], held_out: HeldOut, drop_sentences: bool = False
) -> tuple[list[bool], dict[str, Any]]:
    """Does the same as `drop_leaks`, but returns a boolean for each row instead of the rows: whether it is kept."""
    keep = [True] * len(texts)
    matches = {name: {"rows": 0, "sentences": 0} for name in held_out.rows}
    for place, row in enumerate(texts):
        key = key_of(row)
        if key is None:
            continue
        for name, found in matches.items():
            whole = key in held_out.rows[name]
            sentences = sum(text in held_out.sentences[name] for text in key)
            found["rows"] += whole
            found["sentences"] += sentences
            if whole or (drop_sentences and sentences):
                keep[place] = False
    found = {name: of_name for name, of_name in matches.items() if any(of_name.values())}
    return keep, {"rows": len(texts), "dropped": keep.count(False), "matches": found}


def overlap(texts: Iterable[str | tuple[str, ...]], held_out: HeldOut) -> dict[str, Counter[Key]]:
    """Returns, for each name of held-out rows, those rows that occur among `texts`, and how often each is held out."""
    trained = set(map(key_of, texts))
    found = {
        name: Counter({key: count for key, count in rows.items() if key in trained})
        for name, rows in held_out.rows.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def key_of(row: str | tuple[str, ...]) -> Key | None:
    """Returns a key that equal rows share; `None` for a row with a blank text, which equals no other row."""
    texts = sorted(map(plain, [row] if isinstance(row, str) else row))
    return tuple(texts) if all(texts) else None


# ---- The training rows of a run --------------------------------------------------------------------------


def guarded_tasks(
    tasks: Iterable[Task], more: Collection[str] | Mapping[str, Any] | None, data_dir: str | Path | None
) -> list[Task]:
    """Returns the tasks whose dev and test rows are held out: those of a recipe and `more`.

    Tasks with the same rows are returned once.

    Args:
        more: the `held_out` of a recipe. By default, the tasks of the package whose files are in `data_dir`.

    Raises:
        MinBertError: an entry of `more` is not a task.
    """
    if more is None:
        more = usually_held_out(data_dir)
    try:
        others = get_tasks(more) if more else []
    except MinBertError as error:
        raise MinBertError(f"`held_out`: {error}") from error
    return list({scored_rows(task): task for task in (*others, *tasks)}.values())


def usually_held_out(data_dir: str | Path | None) -> list[str]:
    """Returns the names of the package's tasks whose files are in `data_dir`."""
    return [name for name, task in TASKS.items() if has_files(task, data_dir)]


def scored_rows(task: Task) -> str:
    """Returns the same value for tasks with the same name and the same dev and test rows."""
    files = [data_files(task.files[split]) if split in task.files else None for split in ("dev", "test")]
    return repr([task.name, task.text_columns, files, task.dataset, task.dataset_config, task.splits, task.columns])


def load_training(
    tasks: Mapping[str, Task], names: Iterable[str], data_dir: str | Path | None, *, seed: int, held_out: HeldOut,
    drop_sentences: bool = False, strict: bool = False, together: bool = False, keep_unlabelled: bool = False,
) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:  # fmt: skip
    """Loads the training rows of the tasks `names`: their own rows, then those borrowed from their sources.

    Borrowed rows that occur in `held_out` are dropped, and so are rows without labels that occur there. The other rows
    without labels come last and have the label `None`. A task's own rows are not changed.

    Args:
        tasks: all tasks of the recipe by name, because sources may refer to them.
        together: whether tasks that read the same rows share them; see `sharing.load_together`.
        keep_unlabelled: whether a task's own rows with a blank label are kept, with the label `None`. Not with
            `strict`.

    Returns:
        the rows of each task; and counts by task: `given`, the result of `overlap` for its own rows; `borrowed`, a
        list with the counts of `drop_leaks` and the name for each source; and, if it has rows without labels,
        `unlabelled`, their counts.

    Raises:
        MinBertError: a source cannot be borrowed from (checked before any data is read), or its data are invalid.
    """
    names = list(names)
    for name in names:
        for number in range(1, len(tasks[name].sources) + 1):
            origin_of(tasks[name], number, tasks)
    loaded, counts, given = {}, {"given": {}, "borrowed": {}}, {}
    groups = by_training_rows([tasks[name] for name in names], data_dir) if together else []
    shared: dict[str, datasets.Dataset] = {}
    for group in groups:
        if len(group) > 1:
            shared |= load_together(group, data_dir, "train", strict)
    for task in (tasks[name] for name in names):
        parts = []
        if has_training_data(task, data_dir):
            own = shared.get(task.name) or load_split(
                task, data_dir, "train", strict=strict, keep_unlabelled=keep_unlabelled and not strict
            )
            parts.append(own)
            columns = own[:]  # as lists: a column by itself is read row by row
            texts = zip(*(columns[name] for name in task.text_columns), strict=True)
            given[task.name] = found = overlap(texts, held_out)
            counts["given"][task.name] = {where: rows.total() for where, rows in found.items()}
        for number in range(1, len(task.sources) + 1):
            rows = borrowed_rows(task, number, tasks, data_dir, seed, strict)
            source = task.sources[number - 1].name
            rows, of_source = _guarded(rows, task, f"borrows {{}} from {source}", held_out, drop_sentences)
            of_source = {"source": source, **of_source}
            counts["borrowed"].setdefault(task.name, []).append(of_source)
            parts += [to_dataset(rows, task)] if rows else []
        if task.unlabelled is not None:
            rows = read_unlabelled(task, data_dir, strict)
            rows, of_files = _guarded(rows, task, "takes {} without labels", held_out, drop_sentences)
            counts.setdefault("unlabelled", {})[task.name] = of_files
            parts += [to_dataset([{**row, "label": None} for row in rows], task)] if rows else []
        loaded[task.name] = _joined(parts, task)
    _tell_of_given(given)
    return loaded, counts


def _tell_of_given(given: Mapping[str, Mapping[str, Counter[Key]]]) -> None:
    """Logs which held-out rows are also a task's own training rows. Tasks with the same rows are named together."""
    same: dict[frozenset[tuple[Key, int]], list[tuple[str, str]]] = {}
    for task, found in given.items():
        for where, rows in found.items():
            same.setdefault(frozenset(rows.items()), []).append((where, task))
    found = []
    for rows, places in same.items():
        wheres, tasks = (", ".join(dict.fromkeys(names)) for names in zip(*places, strict=True))
        found.append(f"{counted(sum(often for _, often in rows), 'row')} of {wheres} in {tasks}")
    if found:
        said = "Dev or test rows were also found in training rows and not removed, so scores on them are too high: %s."
        logger.info(said, "; ".join(found))


def _guarded(
    rows: list[Row], task: Task, what: str, held_out: HeldOut, drop_sentences: bool
) -> tuple[list[Row], dict[str, Any]]:
    """Returns the rows that do not leak, and the counts. Logs both; `what` describes the use of the {} rows."""
    keep, counts = find_leaks(
        [tuple(str(row[c]) for c in task.text_columns) for row in rows], held_out, drop_sentences
    )
    dropped, matches = counts["dropped"], counts["matches"]
    said = f"{task.name} {what.format(counted(len(rows) - dropped, 'row'))}."
    if dropped:
        is_dropped = (
            "1 more is dropped, as it stands" if dropped == 1 else f"{dropped:,} more are dropped, as they stand"
        )
        said += f" {is_dropped} in rows to be scored."
    if matches:
        first = {name: next(n for n in matches if held_out.rows[n] == held_out.rows[name]) for name in matches}
        places = (
            f"{', '.join(n for n in matches if first[n] == name)} {counted(of['rows'], 'row')}, "
            f"{counted(of['sentences'], 'sentence')}"
            for name, of in matches.items() if first[name] == name
        )  # fmt: skip
        said += f" Found there: {'; '.join(places)}."
    logger.log(logging.WARNING if dropped else logging.INFO, said)
    return [row for row, stays in zip(rows, keep, strict=True) if stays], counts


def _joined(parts: list[datasets.Dataset], task: Task) -> datasets.Dataset:
    from datasets import concatenate_datasets

    if not parts:
        raise MinBertError(
            f"Task {task.name!r} has no training rows: all rows of its `sources` are also dev or test rows. "
            f"Give it other sources."
        )
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]
