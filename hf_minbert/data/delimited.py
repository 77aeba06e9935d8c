"""Files of separated cells, such as .csv and .tsv: row after row, in the memory of a few thousand of them.

Cells are those of RFC 4180. One may stand in double quotes, with a quote inside it doubled; separators and line breaks
inside it are text then. What the RFC does not allow is refused with its line, where pandas and others guess: a quote
that is not closed, text after a closing quote, a row with more or fewer cells than the header.

One fault looks valid: a quote that was never closed meets one at the end of a later row, and the rows in between
become one cell. So a row of several lines is refused if a line inside it could be a row by itself, or both of its two
lines could. `line_breaks` allows such cells.
"""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
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
#: So many rows say what the columns hold.
PROFILED = 10_000
PLAIN_QUOTES = (
    "Where quotes are characters like any other, read the file with `quotes: false`: {path: FILE, quotes: false} in a "
    "recipe, --read '{quotes: false}' on the command line."
)


class _Row(NamedTuple):
    line: int  # where it begins, which is the one to repair
    cells: list[str]
    text: list[str]  # its lines as they stand in the file


def read_cells(
    path: Path, separator: str | None = None, quotes: bool = True, line_breaks: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """The header and then the rows, each with the line where it begins. All have the same number of cells.

    How many rows have several lines is logged at the end.

    Args:
        separator: `None` takes the first of `SEPARATORS` that the header holds outside quotes.
        quotes, line_breaks: as for `DataFile`.

    Raises:
        MinBertError: the file is not there, empty, no UTF-8 text or not as above. Names the line.
    """
    lines = text_lines(path)
    first = next(lines)
    if not first.strip():
        any(map(str.strip, lines))  # raises if the whole file is blank
        raise MinBertError(f"{path}, line 1: a blank line where the header should be. Name the columns there.")
    if re.fullmatch(r'"?sep=."?\s*', first):
        raise MinBertError(f"{path}, line 1: {first.strip()} is a word to Excel. Delete the line.")
    if separator is None:
        names = re.sub(r'"[^"]*"?', "", first) if quotes else first
        separator = next((mark for mark in SEPARATORS if mark in names), ",")
    rows = _parse(path, chain([first], lines), separator, quotes)
    head = list(islice(rows, PROFILED))
    width = len(head[0].cells)
    fits: list[Callable[[str], bool]] | None = None
    blank: list[_Row] = []  # lines, which are rows only if another one follows
    total, several = 0, []
    for row in chain(head, rows):
        if not row.cells:
            blank.append(row)
            continue
        for found in (*blank, row):
            if width == 1 and not found.cells:
                found = found._replace(cells=[""])  # the csv module cannot tell a blank line from one blank cell
            elif len(found.cells) != width:
                raise _wrong_width(path, found, width, separator, quotes)
            if len(found.text) > 1:
                several.append(found.line)
                if not line_breaks:
                    fits = fits or [_fits(column) for column in zip(*_one_liners(head, width), strict=True)]
                    _check_lines(path, found, separator, fits)
            total += 1
            yield found.line, found.cells
        blank.clear()
    if several:
        _say_several(path, len(several), total - 1, several[0])


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, which may be `\\n`, `\\r\\n` or `\\r`.

    Raises:
        MinBertError: the file is not there, cannot be read, is empty, or is no UTF-8 text. Names the line.
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
        raise MinBertError(f"{path} is empty. It needs a header and rows.")


def check_there(path: Path) -> None:
    """Raises `MinBertError` unless the path exists. Names what its folder holds."""
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
    raw = path.read_bytes()
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raw = raw[: error.start]
    return raw.count(b"\n") + 1


def _parse(path: Path, lines: Iterator[str], separator: str, quotes: bool) -> Iterator[_Row]:
    taken: list[str] = []

    def noted() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(noted(), delimiter=separator, strict=True, quoting=quoting)
    while True:
        line = reader.line_num + 1
        try:
            with _long_cells():
                cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "Close the quote, or put the whole cell in quotes and double each quote inside it."
            raise MinBertError(
                f"{path}, line {line}: a double quote is not closed or stray ({error}). {remedy}"
                + (f" {PLAIN_QUOTES}" if quotes else "")
            ) from None
        yield _Row(line, cells, taken.copy())
        taken.clear()


@contextmanager
def _long_cells() -> Generator[None]:
    """Lifts the csv module's limit, which is one of the whole process, for as long as a row takes."""
    limit = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _wrong_width(path: Path, row: _Row, width: int, separator: str, quotes: bool) -> MinBertError:
    kind = SEPARATORS.get(separator, repr(separator))
    return MinBertError(
        f"{path}, line {row.line}: expected {width} {kind} separated cells, as in the header. Found {len(row.cells)}."
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


def _check_lines(path: Path, row: _Row, separator: str, fits: list[Callable[[str], bool]]) -> None:
    """Raises `MinBertError` if the row may be several rows, which a quote that was not closed made one."""
    could_be = []
    for line in row.text:
        cells = _alone(line, separator)
        could_be.append(len(cells) == len(fits) and all(fit(cell) for fit, cell in zip(fits, cells, strict=True)))
    inner = could_be[1:-1]
    if any(inner) or (not inner and all(could_be)):
        place = could_be.index(True, 1)
        raise MinBertError(
            f"{path}, line {row.line}: a line break inside a cell in double quotes, and line {row.line + place} in it "
            f"could be a row by itself ({row.text[place].strip()!r:.60}). If the quote was never closed, close it. If "
            f"the cell is right, read the file with `line_breaks: true`: {{path: FILE, line_breaks: true}} in a "
            f"recipe, --read '{{line_breaks: true}}' on the command line. {PLAIN_QUOTES}"
        )


def _alone(line: str, separator: str) -> list[str]:
    """The cells of a line by itself, in which a quote that is not closed is a character."""
    end = "\n\0"
    with _long_cells():
        cells = next(csv.reader([line.rstrip("\r\n") + "\n", "\0"], delimiter=separator))
    if cells and cells[-1].endswith(end):
        cells[-1:] = cells[-1].removesuffix(end).split(separator)
    return cells


def _one_liners(rows: list[_Row], width: int) -> list[list[str | None]]:
    """Rows of the file, with `None` for a cell of several lines."""
    found = [row for row in rows[1:] if len(row.cells) == width]
    return [[None if "\n" in cell or "\r" in cell else cell for cell in row.cells] for row in found]


def _fits(column: Sequence[str | None]) -> Callable[[str], bool]:
    """Whether a cell could be one of a column, by those that are. Few of them say little."""
    cells = [cell for cell in column if cell is not None]
    counts = Counter(cells)
    if len(cells) >= 100 and sum(count == 1 for count in counts.values()) <= len(cells) / 100:
        return counts.__contains__  # a column of few values, such as labels
    kinds = {*map(_kind, cells)}
    if len(cells) < 20 and kinds & {"word", "words"}:
        kinds |= {"word", "words"}
    return lambda cell: len(cells) < 3 or _kind(cell) in kinds


def _kind(cell: str) -> str:
    try:
        float(cell)
    except ValueError:
        if cell[:1].isspace() and cell.strip():
            return "set off"  # as after a comma of a sentence
        return ("blank", "word", "words")[min(len(cell.split()), 2)]
    return "number"
