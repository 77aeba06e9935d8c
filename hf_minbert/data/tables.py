"""Tables: the columns of a file or a dataset with the place of each row, in any format.

The file's ending determines the format:

- `.csv`, `.txt` or none: UTF-8 text with a header. The separator is the first of these in the header: tab, comma,
  semicolon, vertical bar. See `hf_minbert.data.delimited`.
- `.tsv`: the same, separated by tabs.
- `.jsonl`: one JSON object per line. `.json`: the same, or one list of objects. Numbers keep their spelling.
- `.parquet`.
- `.conll`: one word per line with its tags in columns, and a blank line between sentences.
- a folder: a dataset written by `Dataset.save_to_disk`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MinBertError, did_you_mean, explain
from ..model.registry import Registry
from ..settings.tasks import DataFile
from ..settings.wording import counted
from .delimited import SEPARATORS, check_there, read_cells, shortened, text_lines

if TYPE_CHECKING:
    import datasets

#: What `Dataset` and `DatasetDict.save_to_disk` leave in their folder.
SAVED_SPLIT, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"
PARQUET = "Is it a Parquet file? Write it anew, or save it as .csv."

Item = TypeVar("Item")


@dataclass(frozen=True)
class Table:
    """Columns of cells.

    Args:
        name: the path, or the dataset and its split. Every error begins with it.
        columns: the names of the columns, which may be blank or repeated.
        size: the number of rows.
        cells: returns the cells of the column at an index.
        lines: the line where each row begins. `None` if rows have no lines; they are then counted from 0.
        class_names: for a column of class ids, or of lists of them, the names of its classes, if the data has them.
        has_unlabelled: whether a label of -1 means no label, as in datasets of the Hub.
        by_word: whether each word of a row has its own line.
        first: the number of rows in the file before these, if the table is a part of a file.
    """

    name: str
    columns: list[str]
    size: int
    cells: Callable[[int], Sequence[Any]]
    lines: Sequence[int] | None = None
    class_names: Mapping[str, list[str]] = field(default_factory=dict)
    has_unlabelled: bool = False
    by_word: bool = False
    first: int = 0

    def where(self, number: int, word: int | None = None) -> str:
        """Returns the place of a row, or of one of its words, for an error."""
        if word is not None:
            if self.by_word and self.lines is not None:
                return f"{self.name}, line {self.lines[number] + word}"
            return f"{self.where(number)}, word {word}"
        row = f"row {self.first + number}" if self.lines is None else f"line {self.lines[number]}"
        return f"{self.name}, {row}"

    def column(self, name: str) -> Sequence[Any]:
        """Returns the cells of a column. Raises `MinBertError` unless exactly one column has this name."""
        if (count := self.columns.count(name)) > 1:
            raise MinBertError(f"{self.name} has {count} columns named {name!r}. Rename all but one.")
        if not count:
            raise MinBertError(
                f"{self.name} has no column {name!r}. Columns found: {self.found}.{self.meant(name)} "
                f"If one of them is meant, name it under `columns` (--columns on the command line)."
            )
        return self.cells(self.columns.index(name))

    def texts(self, name: str) -> Sequence[Any]:
        """Does the same as `column`, but returns the names of classes instead of their ids."""
        cells, names = self.column(name), self.class_names.get(name)
        if names is None:
            return cells
        return [names[cell] if type(cell) is int and 0 <= cell < len(names) else cell for cell in cells]

    def meant(self, name: str) -> str:
        """Returns a hint for the error about a missing column: a different separator, or a similar name."""
        for mark, word in SEPARATORS.items():
            names = [part for column in self.columns if mark in column for part in column.split(mark)]
            if name in names or did_you_mean(name, names):
                return (
                    f" The cells look separated by {mark!r} ({word}), and the file is read with another separator. "
                    f"Save it as .csv with one separator in its header."
                )
        if len(self.columns) == 1 and name in re.split(r"\W+", self.columns[0]):
            known = ", ".join(SEPARATORS.values())
            return f" The header is one cell, {self.columns[0]!r}. Separate its names by one of: {known}."
        return did_you_mean(name, self.columns)

    @property
    def found(self) -> str:
        return shortened([name for name in self.columns if name]) or "(none with a name)"


def read_table(file: str | Path | DataFile) -> Table:
    """Reads a file, or a folder with a saved dataset.

    Raises:
        MinBertError: it does not exist, is broken or empty, or its ending is unknown. The message names the line.
    """
    (table,) = read_parts(file, None)
    return table


def read_parts(file: str | Path | DataFile, size: int | None) -> Iterator[Table]:
    """Yields tables of `size` rows, so that a file may be larger than memory. `None` yields all rows at once.

    Otherwise it does the same as `read_table`. A reader that is not `InParts`, such as that of a `.json` list, yields
    the whole file at once.
    """
    file = file if isinstance(file, DataFile) else DataFile(str(file))
    path, options = Path(file.path), file.options
    ending = path.suffix.lower()
    if path.is_dir():
        tables = _saved_parts(path, size)
    elif ending in READERS:
        reader = READERS[ending]
        if options and reader not in (_read_csv, _read_tsv):
            raise MinBertError(f"{path}: `{next(iter(options))}` is for .csv, .tsv and .txt files. Leave it out.")
        tables = reader.parts(path, size, **options) if isinstance(reader, InParts) else [reader(path)]
    else:
        known = ", ".join(name for name in READERS if name)
        raise MinBertError(
            f"{path}: files that end in {ending!r} cannot be read. Save it as one of: {known}. {READERS.remedy()}"
        )
    columns, rows = [], 0
    for table in tables:
        columns, rows = table.columns, rows + table.size
        if table.size:
            yield table
    if not rows:
        raise MinBertError(f"{path} has {'a header and ' if columns else ''}no rows.")


@dataclass(frozen=True)
class InParts:
    """A reader of files that can be read in parts.

    Args:
        parts: a function of the path, the number of rows in a part (`None`: all) and the reader's options.
    """

    parts: Callable[..., Iterator[Table]]

    def __call__(self, path: Path, **options: Any) -> Table:
        (table,) = self.parts(path, None, **options)
        return table


def _lists(items: Iterator[Item], size: int | None) -> Iterator[list[Item]]:
    """The items in lists of this size, in one with `None`; of no items one empty list."""
    found = list(islice(items, size))
    yield found
    while size is not None and (found := list(islice(items, size))):
        yield found


def dataset_table(dataset: datasets.Dataset, name: str, has_unlabelled: bool = True, first: int = 0) -> Table:
    """Makes a table of a `datasets.Dataset`."""
    plain = dataset.with_format(None)
    columns = plain.column_names
    return Table(
        name, columns, len(plain), lambda at: plain[columns[at]][:],
        class_names=_class_names(plain.features), has_unlabelled=has_unlabelled, first=first,
    )  # fmt: skip


# ---- CSV and TSV -----------------------------------------------------------------------------------------


def _csv_parts(path: Path, size: int | None, separator: str | None = None, **options: bool) -> Iterator[Table]:
    rows = read_cells(path, separator, **options)
    _, header = next(rows)
    columns, first = [re.sub(r"[\r\n]+", " ", name).strip() for name in header], 0
    for part in _lists(rows, size):
        yield Table(
            str(path), columns, len(part), lambda at, part=part: [cells[at] for _, cells in part],
            [line for line, _ in part], first=first,
        )  # fmt: skip
        first += len(part)


def _tsv_parts(path: Path, size: int | None, **options: bool) -> Iterator[Table]:
    return _csv_parts(path, size, "\t", **options)


_read_csv, _read_tsv = InParts(_csv_parts), InParts(_tsv_parts)

# ---- JSON ------------------------------------------------------------------------------------------------


def _json_line_parts(path: Path, size: int | None) -> Iterator[Table]:
    names, first = [] if size is None else _keys(path), 0
    for rows in _lists((_parse(line, path, number) for number, line in _filled_lines(path)), size):
        yield _object_table(path, rows, range(first + 1, first + len(rows) + 1), names, first)
        first += len(rows)


_read_json_lines = InParts(_json_line_parts)


def _filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, without the blank ones at the end."""
    blank: list[tuple[int, str]] = []
    for number, line in enumerate(text_lines(path), 1):
        blank.append((number, line.rstrip("\r\n")))
        if line.strip():
            yield from blank
            blank.clear()


def _keys(path: Path) -> list[str]:
    """Returns the keys of all objects in a file. A part without a key has blank cells for it."""
    keys: dict[str, None] = {}
    for number, line in _filled_lines(path):
        row = _parse(line, path, number)
        if isinstance(row, dict):
            keys.update(dict.fromkeys(row))
    return list(keys)


def _read_json(path: Path) -> Table:
    if not next((line for line in text_lines(path) if line.strip()), "").lstrip().startswith("["):
        return _read_json_lines(path)
    return _object_table(path, _parse("".join(text_lines(path)), path), None)


def _object_table(
    path: Path, rows: list[Any], lines: Sequence[int] | None, keys: Iterable[str] = (), first: int = 0
) -> Table:
    """A key that an object lacks is a blank cell: JSON writers leave out what is null."""
    columns = dict.fromkeys(keys)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"{path}, row {number}" if lines is None else f"{path}, line {lines[number]}"
            raise MinBertError(f'{where}: expected an object like {{"sentence": "..."}}. Found {row!r:.50}.')
        columns.update(dict.fromkeys(row))
    names = list(columns)
    return Table(str(path), names, len(rows), lambda at: [row.get(names[at]) for row in rows], lines, first=first)


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(
            text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_without_twice
        )  # as written: 2016 is the text "2016" and 3.80 is not rounded
    except json.JSONDecodeError as error:
        raise MinBertError(
            f"{path}, line {line or error.lineno}: not readable as JSON ({error.msg}). Write one object a line."
        ) from None
    except ValueError as error:
        raise MinBertError(f"{path}{f', line {line}' if line else ''}: {error}") from None


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in an object. Delete one.")
    return found


# ---- Columns of words ------------------------------------------------------------------------------------

#: What a column file calls its first column and, where there are several, its last one; each has its number too.
WORD_COLUMN, TAG_COLUMN = "tokens", "tags"
DOCUMENT = "-DOCSTART-"  # the line that begins a document


def _conll_parts(path: Path, size: int | None) -> Iterator[Table]:
    """Yields tables with a row per sentence. The cells are lists: the words, and their tags in each further column."""
    first, columns = 0, None
    for part in _lists(_word_sentences(path), size):
        if part:
            columns = columns or len(part[0][1][0])
        names = [str(number) for number in range(columns or 1)]
        named = {WORD_COLUMN: 0} | ({TAG_COLUMN: -1} if len(names) > 1 else {})
        places = [*range(len(names)), *named.values()]
        yield Table(
            str(path), [*names, *named], len(part),
            lambda at, part=part, places=places: [[cells[places[at]] for cells in words] for _, words in part],
            [line for line, _ in part], by_word=True, first=first,
        )  # fmt: skip
        first += len(part)


def _word_sentences(path: Path) -> Iterator[tuple[int, list[list[str]]]]:
    """The sentences of a column file, each with its first line: the cells of its words."""
    sentence: list[list[str]] = []
    begun, width = 0, None
    for number, line in enumerate(text_lines(path, "a line for each word, such as Ada B-PER"), 1):
        line = line.strip(" \r\n")
        cells = [cell.strip(" ") for cell in re.split("\t" if "\t" in line else " +", line)]
        if not line.strip("\t ") or cells[0] == DOCUMENT:
            if sentence:
                yield begun, sentence
            sentence = []
            continue
        width = width or len(cells)
        if len(cells) != width or not all(cell.strip() for cell in cells):
            raise MinBertError(
                f"{path}, line {number}: expected {counted(width, 'column')}, separated by spaces or tabs, as in the "
                f"first line, and none of them blank. Found {line!r:.50}."
            )
        begun = begun if sentence else number
        sentence.append(cells)
    if sentence:
        yield begun, sentence


_read_conll = InParts(_conll_parts)

# ---- Parquet and saved datasets --------------------------------------------------------------------------


def _parquet_parts(path: Path, size: int | None) -> Iterator[Table]:
    """Reads a column when it is used, so that unused columns may have any content.

    A part belongs to one row group, whose columns are in memory while it is read.
    """
    import pyarrow.parquet

    check_there(path)
    with explain(f"Reading {path}", PARQUET):
        file = pyarrow.parquet.ParquetFile(path)
        saved = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    features = saved.get("info", {}).get("features", {})
    ids = {name: kind.get("feature", kind) for name, kind in features.items() if isinstance(kind, dict)}
    class_names = {name: kind["names"] for name, kind in ids.items() if "names" in kind}
    every, first = [*range(file.num_row_groups)], 0
    for groups in [every] if size is None else [[group] for group in every]:
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        cells = _cells_of(path, file, groups)
        for start in range(0, max(rows, 1), size or max(rows, 1)):
            length = min(size or rows, rows - start)
            yield Table(
                str(path), file.schema_arrow.names, length,
                lambda at, cut=(start, length), cells=cells: cells(at, *cut),
                class_names=class_names, first=first + start,
            )  # fmt: skip
        first += rows


def _cells_of(path: Path, file: Any, groups: list[int]) -> Callable[[int, int, int], list[Any]]:
    """The cells of a Parquet file's row groups, by a column's place, the first row and how many. It is read once."""
    names = file.schema_arrow.names
    column = cache(lambda at: file.read_row_groups(groups, columns=[names[at]]).column(names[at]))

    def cells(at: int, start: int, length: int) -> list[Any]:
        with explain(f"Reading column {names[at]!r} of {path}", PARQUET):
            return column(at).slice(start, length).to_pylist()

    return cells


_read_parquet = InParts(_parquet_parts)


def _saved_parts(path: Path, size: int | None) -> Iterator[Table]:
    import datasets

    if (path / SAVED_SPLITS).is_file():
        splits = ", ".join(str(path / name) for name in saved_splits(path))
        raise MinBertError(f"{path} is a folder of several splits. Give one of them: {splits}.")
    if not (path / SAVED_SPLIT).is_file():
        raise MinBertError(
            f"{path} is a folder and holds no saved dataset. Give the path of a file, or of a folder that "
            f"`Dataset.save_to_disk` wrote."
        )
    with explain(f"Reading the dataset in {path}", "Write it anew by `Dataset.save_to_disk`."):
        dataset = datasets.Dataset.load_from_disk(path)
    rows = len(dataset)
    for first in range(0, max(rows, 1), size or max(rows, 1)):
        last = rows if size is None else min(first + size, rows)
        yield dataset_table(dataset.select(range(first, last)), str(path), first=first)


def saved_splits(folder: Path) -> list[str]:
    """Returns the splits in a folder that `DatasetDict.save_to_disk` wrote."""
    if not (folder / SAVED_SPLITS).is_file():
        is_one = (folder / SAVED_SPLIT).is_file()
        remedy = "It holds one dataset: name it under `files`, by split" if is_one else "Give one that it did"
        raise MinBertError(f"`dataset` {folder}: `DatasetDict.save_to_disk` did not write this folder. {remedy}.")
    with explain(f"Reading {folder / SAVED_SPLITS}", "Write the folder anew by `DatasetDict.save_to_disk`."):
        return list(json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"])


def _class_names(features: datasets.Features) -> dict[str, list[str]]:
    import datasets

    ids = {name: kind.feature if isinstance(kind, datasets.List) else kind for name, kind in features.items()}
    return {name: kind.names for name, kind in ids.items() if isinstance(kind, datasets.ClassLabel)}


#: The ending of a path to a function of it.
READERS: Registry[Callable[..., Table]] = Registry("reader of files", Callable, {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".conll": _read_conll,
    ".txt": _read_csv,
    "": _read_csv,
}, form=r"\.[a-z0-9_]+")  # fmt: skip
