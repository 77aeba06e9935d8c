"""A report as sections of blocks, and its two formats: one HTML page, and Markdown with picture files.

The page is self-contained: pictures are embedded as base64, there is no script, and all text is escaped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath

from ..io import write_atomically
from ..publishing.files import PICTURES

PAGE = "report.html"
NUMBER = re.compile(r"(< )?[-+−]?\d")  # as a cell begins


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Trouble:
    """A message about something that could not be made, with the reason."""

    text: str
    kind: str = "trouble"


@dataclass(frozen=True)
class Table:
    """A table with cells of text. The first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = "table"

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether most of its cells that are not empty are numbers.

        The first column never counts as numeric.
        """
        found = [False]
        for column in [*zip(*self.rows, strict=True)][1:]:
            said = [cell for cell in column if cell]
            found.append(2 * sum(NUMBER.match(cell) is not None for cell in said) > len(said))
        return found if self.rows else [False] * len(self.header)


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        name: the name of its file, without `.png`.
        alt: a description for people who do not see it.
        folder: the folder of its file, beside the Markdown.
    """

    name: str
    alt: str
    png: bytes
    folder: str = PICTURES
    kind: str = "picture"

    @property
    def path(self) -> str:
        return PurePosixPath(self.folder, f"{self.name}.png").as_posix()

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Example:
    """A row in full text with a remark."""

    texts: tuple[str, ...]
    remark: str


@dataclass(frozen=True)
class Examples:
    """Rows with a common title."""

    title: str
    rows: Sequence[Example]
    kind: str = "examples"


Block = Text | Trouble | Table | Picture | Examples


@dataclass
class Section:
    """A part of the report.

    Args:
        key: its anchor in the page.
        level: 2, or 3 for a part of the section before.
    """

    key: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    level: int = 2

    @property
    def is_half(self) -> bool:
        """Whether half the page's width is enough: a picture with a paragraph."""
        kinds = [block.kind for block in self.blocks]
        return self.level > 2 and set(kinds) <= {"text", "picture", "trouble"} and kinds.count("picture") < 2

    def groups(self) -> list[tuple[str, list[Block]]]:
        """The blocks, with consecutive blocks of one kind grouped, so that pictures are shown side by side."""
        return [(kind, list(blocks)) for kind, blocks in groupby(self.blocks, key=lambda block: block.kind)]


@dataclass
class Document:
    """The whole report.

    Args:
        notes: what is missing; shown at the beginning.
        page: the file's name. The Markdown file has the same name with `.md`.
    """

    title: str
    subtitle: str
    notes: Sequence[str]
    sections: list[Section]
    page: str = PAGE

    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]

    def write(self, folder: Path) -> Path:
        """Writes page, Markdown and pictures, each atomically. Returns the page's path.

        Raises:
            MinBertError: a file cannot be written.
        """
        for picture in self.pictures():
            write_atomically(folder / picture.path, picture.png)
        page = folder / self.page
        write_atomically(page.with_suffix(".md"), self.markdown())
        write_atomically(page, self.html())
        return page

    def html(self) -> str:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        loader = FileSystemLoader(Path(__file__).parent)
        pages = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        return pages.get_template("page.html.j2").render(report=self) + "\n"

    def markdown(self) -> str:
        lines = [f"# {escaped(self.title)}", "", escaped(self.subtitle), ""]
        lines += [line for note in self.notes for line in (f"> {escaped(note)}", "")]
        for section in self.sections:
            lines += [f"{'#' * section.level} {escaped(section.title)}", ""]
            for block in section.blocks:
                lines += [*_markdown(block), ""]
        return "\n".join(lines)


def escaped(text: str) -> str:
    """Escapes text for Markdown: no markup, no HTML, no line break."""
    text = re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", " ".join(text.split()).replace("&", "&amp;"))
    # Lists, rules and underlines of titles begin a line. 0.459 and -0.1 are none of them, and stay easy to read.
    return re.sub(r"^(\d*)([-+.)](?=\s|$)|[-=](?=[-=\s]*$))", r"\1\\\2", text)


def _markdown(block: Block) -> list[str]:
    if isinstance(block, Table):
        rows = [block.header, ["---:" if numeric else "---" for numeric in block.numeric], *block.rows]
        cells = [row if number == 1 else [*map(escaped, row)] for number, row in enumerate(rows)]
        return [f"| {' | '.join(row)} |" for row in cells]
    if isinstance(block, Picture):
        return [f"![{escaped(block.alt)}]({block.path})"]
    if isinstance(block, Examples):
        lines = [f"**{escaped(block.title)}**", ""]
        for row in block.rows:
            lines.append(f"- {escaped(row.remark)}")
            lines += [f"    - {escaped(text)}" for text in row.texts]
        return lines
    return [f"> {escaped(block.text)}" if isinstance(block, Trouble) else escaped(block.text)]
