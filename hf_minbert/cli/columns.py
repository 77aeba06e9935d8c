"""The option `--columns`."""

from __future__ import annotations

from ..errors import MinBertError, unknown_name
from ..settings.recipe import cast, read_value
from ..tasks import Task

HELP = "How the file's columns are called, as in '{sentence: text, label: stars}'."


def parse_columns(written: str | None, task: Task) -> dict[str, str]:
    """Task column, `label` or `id` to column of the file. Raises `MinBertError` where it is no such mapping."""
    if written is None:
        return {}
    columns = cast("--columns", read_value(written, "`--columns`"), dict[str, str])
    known = (*task.text_columns, "label", "id")
    for name in columns:
        if name not in known:
            raise MinBertError(f"--columns, task {task.name!r}: {unknown_name('column', name, known)}")
    return columns
