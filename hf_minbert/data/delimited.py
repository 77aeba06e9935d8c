"""Reads delimited files such as .csv and .tsv row by row, with a few thousand rows in memory.

Cells follow RFC 4180. A cell may be in double quotes. Inside quotes, separators and line breaks are text, and a quote
is written as two quotes. Input that the RFC does not allow is refused with its line number: an unclosed quote, text
after a closing quote, or a row with more or fewer cells than the header. pandas and other readers guess instead.

One fault looks valid. If a quote is not closed, it can match a quote at the end of a later row, and the rows in
between become one cell. A row of several lines is therefore refused if one of its inner lines could be a row by
itself. A row of two lines is refused if both could. `line_breaks` allows such cells.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from ..errors import MinBertError

logger = logging.getLogger(__name__)

#: Looked for in a header in this order.
SEPARATORS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "vertical bar"}
#: Characters of a cell. The csv module's own limit, 131,072, is below what people have; without any, a quote that is
#: not closed would bring a whole large file into memory.
LONGEST = 2**26
#: Rows that are parsed in one go.
BATCH = 1000
#: So many rows say what the columns hold.
PROFILED = 10_000
#: What fewer cells than this have in common says nothing.
FEW = 3
PLAIN_QUOTES = (
    "If quotes are ordinary characters in this file, read it with `quotes: false`: {path: FILE, quotes: false} in a "
    "recipe, --read '{quotes: false}' on the command line."
)


class _Row(NamedTuple):
    line: int  # where it begins, which is the one to repair
    cells: list[str]
    text: list[str]  # its lines as they stand in the file


def read_cells(
    path: Path, separator: str | None = None, quotes: bool = True, line_breaks: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yields the header and then the rows, each with the number of its first line. All have the same number of cells.

    Blank lines at the end of the file are ignored. The number of rows with several lines is logged at the end.

    Args:
        separator: `None` uses the first of `SEPARATORS` that occurs in the header outside quotes.
        quotes, line_breaks: as for `DataFile`.

    Raises:
        MinBertError: the file is missing, empty, not UTF-8 text, or breaks the rules above. The message names the
            line.
    """
    lines = text_lines(path)
    first = next(lines)
    if not first.strip():
        any(map(str.strip, lines))  # raises if the whole file is blank
        raise MinBertError(f"{path}, line 1: a blank line where the header should be. Name the columns there.")
    if re.fullmatch(r'"?sep=."?\s*', first):
        raise MinBertError(f"{path}, line 1: {first.strip()} is an instruction to Excel. Delete the line.")
    separator = separator or _separator(first, quotes)
    rows = _parse(path, chain([first], lines), separator, quotes)
    head = list(islice(rows, PROFILED))
    width = len(head[0].cells)
    looks: _Looks | None = None
    blank: list[_Row] = []  # lines, which are rows only if another one follows
    total = several = first_several = 0
    for row in chain(head, rows):
        if not row.cells or (len(row.cells) == 1 and not row.text[0].strip()):  # spaces alone too
            blank.append(row)
            continue
        for found in (*blank, row):
            if width == 1:  # the csv module cannot tell a blank line from one blank cell
                found = found._replace(cells=found.cells or [""])
            _check_shape(path, found, head[0], separator, quotes)
            if len(found.text) > 1:
                several, first_several = several + 1, first_several or found.line
                if not line_breaks:
                    looks = looks or _Looks(head, separator)
                    _check_lines(path, found, looks)
            total += 1
            yield found.line, found.cells
        blank.clear()
    if several:
        _say_several(path, several, total - 1, first_several)


def text_lines(path: Path, needs: str = "a header and rows") -> Iterator[str]:
    """Yields the lines of a UTF-8 file with their line endings, which may be `\\n`, `\\r\\n` or `\\r`.

    Args:
        needs: what a file of this format contains, for the error about an empty file.

    Raises:
        MinBertError: the file is missing, cannot be read, is empty, or is not UTF-8 text. The message names the line.
    """
    check_there(path)
    is_blank = True
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise MinBertError(f"{path}, line {number}: a NUL byte. Is it a text file? Save it as UTF-8 text.")
                is_blank = is_blank and not line.strip()
                yield line
    except OSError as error:
        raise MinBertError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise MinBertError(f"{path}, line {_undecodable(path)}: not UTF-8 text. Save the file as UTF-8.") from None
    if is_blank:
        raise MinBertError(f"{path} is empty. It needs {needs}.")


def check_there(path: Path) -> None:
    """Raises `MinBertError` if the path does not exist. The message lists the files in its folder."""
    if path.exists():
        return
    folder = path.parent
    if not folder.is_dir():
        raise MinBertError(f"{path} does not exist. Its folder {folder} does not exist either.")
    held = shortened(sorted(entry.name for entry in folder.iterdir())) or "(nothing)"
    raise MinBertError(f"{path} does not exist. Its folder holds: {held}.")


def shortened(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + rest


def _undecodable(path: Path) -> int:
    """The line of the first byte that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # noqa: B007
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                break
    return number


def _separator(header: str, quotes: bool) -> str:
    names = re.sub(r'"[^"]*"?', "", header) if quotes else header
    return next((mark for mark in SEPARATORS if mark in names), ",")


def _parse(path: Path, lines: Iterator[str], separator: str, quotes: bool) -> Iterator[_Row]:
    taken: list[str] = []

    def noted() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    def parsed() -> Iterator[_Row]:
        line = 1
        for cells in reader:
            yield _Row(line, cells, taken.copy())
            taken.clear()
            line = reader.line_num + 1

    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(noted(), delimiter=separator, strict=True, quoting=quoting)
    rows = parsed()
    while True:
        try:
            with _long_cells():
                some = list(islice(rows, BATCH))
        except csv.Error as error:
            remedy = "Close the quote, or put the whole cell in quotes and double each quote inside it."
            raise MinBertError(
                f"{path}, line {reader.line_num - len(taken) + 1}: a double quote is not closed or stray ({error}). "
                f"{remedy}" + (f" {PLAIN_QUOTES}" if quotes else "")
            ) from None
        yield from some
        if len(some) < BATCH:
            return


@contextmanager
def _long_cells() -> Generator[None]:
    """Raises the csv module's limit on the length of a cell, which applies to the whole process."""
    limit = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _check_shape(path: Path, row: _Row, header: _Row, separator: str, quotes: bool) -> None:
    """Raises `MinBertError` if the row differs from the header in its line ending or its number of cells."""
    if row.text[-1].endswith("\r") and header.text[-1].endswith("\n"):
        raise MinBertError(
            f"{path}, line {row.line}: the line ends with a lone carriage return, unlike the header. If it belongs "
            "to a cell, put the cell in double quotes, or write a space instead."
        )
    width, kind = len(header.cells), SEPARATORS[separator]
    if not row.cells:
        raise MinBertError(f"{path}, line {row.line}: a blank line between rows. Delete it.")
    if len(row.cells) != width:
        raise MinBertError(
            f"{path}, line {row.line}: expected {width} {kind} separated cells, as in the header. Found "
            f"{len(row.cells)}."
            + (f" Put a cell that holds a {kind} or a line break in double quotes." if quotes else "")
            + (f" {PLAIN_QUOTES}" if quotes and any(separator in cell for cell in row.cells) else "")
        )


@cache  # a run may read a file more than once
def _say_several(path: Path, several: int, total: int, first: int) -> None:
    logger.warning(
        "%s: line breaks inside cells in %s of %s rows, the first at line %d. Each break is read as a space.",
        path, f"{several:,}", f"{total:,}", first,
    )  # fmt: skip


# ---- Rows that a quote may have swallowed ----------------------------------------------------------------


class _Looks:
    """Describes what rows of a file look like, from its first rows. A description from few rows is less strict."""

    def __init__(self, rows: list[_Row], separator: str):
        whole = [row for row in rows if len(row.cells) == len(rows[0].cells)]
        self.separator = separator
        self.begin_quoted = len(whole) > FEW and all(row.text[0].startswith('"') for row in whole)
        columns = zip(*(row.cells for row in whole[1:]), strict=True)
        self.kinds = [_kinds([cell for cell in column if not _is_broken(cell)]) for column in columns]
        for kinds in self.kinds:
            # Two columns say little: a space behind a separator may be that behind a comma of a sentence.
            if "set off" in kinds or ("words" in kinds and len(self.kinds) > 2):
                kinds |= {"set off", "words", "word"}

    def is_row(self, line: str) -> bool:
        """Whether a line could be a row by itself, or a row whose text contains separators and has lost its quotes."""
        cells, width = _alone(line, self.separator), len(self.kinds)
        if len(cells) < width or (self.begin_quoted and not line.startswith('"')):
            return False
        if width < 3 and any('""' in cell for cell in cells):  # who doubles a quote closes it
            return False
        more = len(cells) - width
        texts = [place for place, kinds in enumerate(self.kinds) if "words" in kinds] if more else [0]
        merged = ([*cells[:at], *_merged(cells[at : at + more + 1]), *cells[at + more + 1 :]] for at in texts)
        return any(map(self._fit, merged))

    def _fit(self, cells: list[str]) -> bool:
        """Whether each cell could be in its column. In rows of three or more cells, one cell may be blank."""
        found = [_kind(cell.rstrip('"')) for cell in cells]
        odd = [kind for kind, kinds in zip(found, self.kinds, strict=True) if kind not in kinds]
        return not odd or (len(cells) > 2 and odd == ["blank"])


def _check_lines(path: Path, row: _Row, looks: _Looks) -> None:
    """Raises `MinBertError` if an unclosed quote may have joined several rows into this one."""
    could_be = [*map(looks.is_row, row.text)]
    inner = could_be[1:-1]
    if any(inner) or (not inner and all(could_be)):
        place = could_be.index(True, 1)
        raise MinBertError(
            f"{path}, line {row.line}: a line break inside a cell in double quotes, and line {row.line + place} in it "
            f"could be a row by itself ({row.text[place].strip()!r:.60}). Close the quote if it was left open. If "
            f"the cell is right, read the file with `line_breaks: true`: {{path: FILE, line_breaks: true}} in a "
            f"recipe, --read '{{line_breaks: true}}' on the command line. {PLAIN_QUOTES}"
        )


def _alone(line: str, separator: str) -> list[str]:
    """Returns the cells of a single line. A quote that is not closed counts as a character."""
    end = "\n\0"
    with _long_cells():
        cells = next(csv.reader([line.rstrip("\r\n") + "\n", "\0"], delimiter=separator))
    if cells and cells[-1].endswith(end):
        cells[-1:] = cells[-1].removesuffix(end).split(separator)
    return cells


def _is_broken(cell: str) -> bool:
    return "\n" in cell or "\r" in cell


def _merged(cells: list[str]) -> list[str]:
    """Joins several cells to one text. A single cell is not changed."""
    return cells if len(cells) < 2 else [" ".join(cells).strip()]


def _kinds(cells: list[str]) -> set[str]:
    """Returns the kinds of cells that a column with these cells may have."""
    kinds = {*map(_kind, cells)}
    if "words" in kinds:
        kinds |= {"word", "number"}  # a text may be short
    elif "word" in kinds and len(cells) < 20:
        kinds.add("words")
    if len(cells) < FEW:
        kinds |= {"blank", "number", "word", "words"}
    return kinds


def _kind(cell: str) -> str:
    try:
        float(cell)
    except ValueError:
        if cell[:1].isspace() and cell.strip():
            return "set off"  # as after a comma of a sentence
        return ("blank", "word", "words")[min(len(cell.split()), 2)]
    return "number"
