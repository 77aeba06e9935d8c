"""Options that several verbs share: the source of the rows, how the file of `--input` is read, and the batch size."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import MinBertError, unknown_name
from ..settings.recipe import cast, read_value
from ..settings.tasks import DataFile, Task, data_files

READING = [f.name for f in fields(DataFile) if f.name != "path"]
DataDir = Annotated[
    str | None,
    typer.Option(
        help="The folder with the tasks' files; sample (in the package); or hub.  [default: the recipe's]",
        show_default=False,
    ),
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Rows of maximum length per batch; a batch has more rows if they are shorter.")
]
Columns = Annotated[
    str | None,
    typer.Option(
        help="Names of the columns in --input, such as '{sentence: text, label: stars}'.", show_default=False
    ),
]
Read = Annotated[
    str | None,
    typer.Option(
        help="How to read --input: '{quotes: false}' if quotes are ordinary characters, as in GLUE's MRPC; "
        "'{line_breaks: true}' if lines of a cell look like rows.",
        show_default=False,
    ),
]


def check_options(input: Path | None, columns: str | None, read: str | None) -> None:
    """Raises `MinBertError` for an option about a file if no file is given."""
    for option, given in (("--columns", columns), ("--read", read)):
        if given is not None and input is None:
            raise MinBertError(f"{option} goes with --input.")


def file_of(path: Path, task: Task, columns: str | None, read: str | None) -> tuple[DataFile, dict[str, str]]:
    """Returns the file with its reading options, and the names of its columns.

    The options are the texts that were typed.

    Raises:
        MinBertError: an option is not a mapping, or names an unknown column or an unknown reading option.
    """
    mapped = _mapping("--columns", columns, dict[str, str | list[str]])
    options = _mapping("--read", read, dict[str, Any])
    known = (*task.text_columns, "label", "id")
    for name in mapped:
        if name not in known:
            raise MinBertError(f"--columns, task {task.name!r}: {unknown_name('column', name, known)}")
    for name in options:
        if name not in READING:
            raise MinBertError(f"--read: {unknown_name('key', name, READING)}")
    (file,) = data_files({"path": str(path), **options}, "--read")
    return file, mapped


def _mapping(option: str, written: str | None, hint: Any) -> dict[str, Any]:
    return {} if written is None else cast(option, read_value(written, f"`{option}`"), hint)
