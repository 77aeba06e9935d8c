"""Tables: the cells of a file or a dataset by column, each row with its place, whatever the format.

A path's ending tells the format:

- `.csv`, `.txt` or none: UTF-8 text with a header, tab separated if the header holds a tab and comma separated if not.
  A cell may stand in double quotes, with a quote inside it doubled. A line break inside a cell is an error: it is
  nearly always a quote that was never closed and has swallowed the rows after it.
- `.tsv`: the same, tab separated.
- `.jsonl`: a JSON object a line. `.json`: the same, or one list of objects. Numbers are read as they are written.
- `.parquet`.
- a folder: a dataset that `Dataset.save_to_disk` wrote.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError, did_you_mean, explain
from ..model.registry import Registry
from ..settings.tasks import DataFile

if TYPE_CHECKING:
    import datasets

#: What `Dataset` and `DatasetDict.save_to_disk` leave in their folder.
SAVED_SPLIT, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True)
class Table:
    """Columns of cells.

    Args:
        name: the path, or the dataset and its split; every error begins with it.
        columns: their names, which may be blank or stand twice.
        size: how many rows there are.
        cells: the cells of the column at this place.
        lines: the line where each row begins. `None`: rows have no lines and are counted from 0.
        class_names: the names of the classes, for a column that holds class ids and says what they are.
        has_unlabelled: whether a label of -1 stands for none, as in the datasets of the Hub.
    """

    name: str
    columns: list[str]
    size: int
    cells: Callable[[int], Sequence[Any]]
    lines: Sequence[int] | None = None
    class_names: Mapping[str, list[str]] = field(default_factory=dict)
    has_unlabelled: bool = False

    def where(self, number: int) -> str:
        """The place of a row, for an error."""
        return f"{self.name}, row {number}" if self.lines is None else f"{self.name}, line {self.lines[number]}"

    def column(self, name: str) -> Sequence[Any]:
        """The cells of a column. Raises `MinBertError` unless exactly one has the name."""
        if (count := self.columns.count(name)) > 1:
            raise MinBertError(f"{self.name} has {count} columns named {name!r}. Rename all but one.")
        if not count:
            raise MinBertError(
                f"{self.name} has no column {name!r}. Columns found: {self.found}.{did_you_mean(name, self.columns)} "
                f"If one of them is meant, name it under `columns` (--columns on the command line)."
            )
        return self.cells(self.columns.index(name))

    @property
    def found(self) -> str:
        return shortened([name for name in self.columns if name]) or "(none with a name)"


def read_table(file: str | Path | DataFile) -> Table:
    """A file, or a folder with a saved dataset.

    Raises:
        MinBertError: there is none, it is broken or empty, or its ending is not known. Names the line.
    """
    file = file if isinstance(file, DataFile) else DataFile(str(file))
    path, quotes = Path(file.path), file.quotes
    ending = path.suffix.lower()
    if path.is_dir():
        table = _read_saved(path)
    elif ending in READERS:
        reader = READERS[ending]
        if not quotes and reader not in (_read_csv, _read_tsv):
            raise MinBertError(f"{path}: `quotes` is for .csv, .tsv and .txt files. Leave it out.")
        table = reader(path) if quotes else reader(path, quotes=False)
    else:
        known = ", ".join(name for name in READERS if name)
        raise MinBertError(
            f"{path}: files that end in {ending!r} cannot be read. Save it as one of: {known}. {READERS.remedy()}"
        )
    if not table.size:
        raise MinBertError(f"{path} has {'a header and ' if table.columns else ''}no rows.")
    return table


def dataset_table(dataset: datasets.Dataset, name: str, has_unlabelled: bool = True) -> Table:
    """A dataset of the library's."""
    plain = dataset.with_format(None)
    columns = plain.column_names
    return Table(
        name, columns, len(plain), lambda at: plain[columns[at]][:],
        class_names=_class_names(plain.features), has_unlabelled=has_unlabelled,
    )  # fmt: skip


def shortened(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + rest


# ---- CSV and TSV -----------------------------------------------------------------------------------------

PLAIN_QUOTES = (
    "Where quotes are characters like any other, read the file with `quotes: false`: {path: FILE, quotes: false} in a "
    "recipe, --read '{quotes: false}' on the command line."
)


def _read_csv(path: Path, delimiter: str | None = None, quotes: bool = True) -> Table:
    text = _read_text(path)
    header_line = text.replace("\r", "\n").partition("\n")[0]
    if not header_line.strip():
        raise MinBertError(f"{path}, line 1: a blank line where the header should be. Name the columns there.")
    delimiter = delimiter or ("\t" if "\t" in header_line else ",")
    rows = list(_split_rows(path, text, delimiter, quotes))
    while rows and not rows[-1][1]:  # blank lines at the end
        rows.pop()
    (_, header), rows = rows[0], rows[1:]
    for place, (line, cells) in enumerate(rows):
        if not cells and len(header) == 1:
            rows[place] = (line, [""])  # the csv module cannot tell a blank line from one blank cell
        elif len(cells) != len(header):
            kind = "tab" if delimiter == "\t" else "comma"
            raise MinBertError(
                f"{path}, line {line}: expected {len(header)} {kind} separated cells, as in the header. Found "
                f"{len(cells)}."
                + (f" Put a cell that holds a {kind} in double quotes." if quotes else "")
                + (f" {PLAIN_QUOTES}" if quotes and any(delimiter in cell for cell in cells) else "")
            )
    columns, lines = [name.strip() for name in header], [line for line, _ in rows]
    return Table(str(path), columns, len(rows), lambda at: [cells[at] for _, cells in rows], lines)


def _read_tsv(path: Path, quotes: bool = True) -> Table:
    return _read_csv(path, "\t", quotes)


def _split_rows(path: Path, text: str, delimiter: str, quotes: bool) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with the line where it begins, which is the one to repair."""
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, quoting=quoting)
    remedy = "Close the quote, or put the whole cell in quotes and double each quote inside it." + (
        f" {PLAIN_QUOTES}" if quotes else ""
    )
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


# ---- JSON ------------------------------------------------------------------------------------------------


def _read_json_lines(path: Path) -> Table:
    # Not splitlines(): a JSON text may hold the other characters that it splits at.
    lines = _read_text(path).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    while not lines[-1].strip():
        lines.pop()
    rows = [_parse(line, path, number) for number, line in enumerate(lines, 1)]
    return _object_table(path, rows, range(1, len(rows) + 1))


def _read_json(path: Path) -> Table:
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    return _object_table(path, _parse(text, path), None)


def _object_table(path: Path, rows: list[Any], lines: Sequence[int] | None) -> Table:
    """A key that an object lacks is a blank cell: JSON writers leave out what is null."""
    columns: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"{path}, row {number}" if lines is None else f"{path}, line {lines[number]}"
            raise MinBertError(f'{where}: expected an object like {{"sentence": "..."}}. Found {row!r:.50}.')
        columns.update(dict.fromkeys(row))
    names = list(columns)
    return Table(str(path), names, len(rows), lambda at: [row.get(names[at]) for row in rows], lines)


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
        raise ValueError(f"the key {twice!r} stands twice in an object. Delete one.")
    return found


# ---- Parquet and saved datasets --------------------------------------------------------------------------


def _read_parquet(path: Path) -> Table:
    import datasets
    import pyarrow.parquet

    _check_there(path)
    with explain(f"Reading {path}", "Is it a Parquet file? Write it anew, or save it as .csv."):
        table = pyarrow.parquet.read_table(path)
        features = datasets.Features.from_arrow_schema(table.schema)  # keeps the names of class ids
    return Table(
        str(path), table.column_names, table.num_rows, lambda at: table.column(at).to_pylist(),
        class_names=_class_names(features),
    )  # fmt: skip


def _read_saved(path: Path) -> Table:
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
        return dataset_table(datasets.Dataset.load_from_disk(path), str(path))


def saved_splits(folder: Path) -> list[str]:
    """The splits in a folder that `DatasetDict.save_to_disk` wrote."""
    if not (folder / SAVED_SPLITS).is_file():
        is_one = (folder / SAVED_SPLIT).is_file()
        remedy = "It holds one dataset: name it under `files`, by split" if is_one else "Give one that it did"
        raise MinBertError(f"`dataset` {folder}: `DatasetDict.save_to_disk` did not write this folder. {remedy}.")
    with explain(f"Reading {folder / SAVED_SPLITS}", "Write the folder anew by `DatasetDict.save_to_disk`."):
        return list(json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"])


def _class_names(features: datasets.Features) -> dict[str, list[str]]:
    import datasets

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


# ---- Any file --------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    _check_there(path)
    try:
        raw = path.read_bytes()
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


def _check_there(path: Path) -> None:
    if path.exists():
        return
    folder = path.parent
    if not folder.is_dir():
        raise MinBertError(f"{path} does not exist. Its folder {folder} does not exist either.")
    held = shortened(sorted(entry.name for entry in folder.iterdir())) or "(nothing)"
    raise MinBertError(f"{path} does not exist. Its folder holds: {held}.")


#: The ending of a path to a function of it.
READERS: Registry[Callable[..., Table]] = Registry("reader of files", Callable, {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_csv,
    "": _read_csv,
}, form=r"\.[a-z0-9_]+")  # fmt: skip
