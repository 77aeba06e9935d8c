"""`minbert study`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MinBertError
from ..settings.study import read_study
from ..settings.words import check_words
from .recipe import Overrides


def study(
    file: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A .yaml file with `rows`, or the name of one in the package.")
    ],
    keys: Overrides = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="The folder of the study.", show_default="runs/studies/ and the study's name")
    ] = None,
    overrides: Annotated[
        str | None, typer.Option(help="A file of further keys, for all rows and by recipe.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at a time, which share the GPUs.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask about a study that takes more than an hour.")] = False,
) -> None:
    """Many rows, many seeds, one table: train recipes side by side, and compare them with intervals.

    The same command goes on with a study that was cut off. A run that failed runs again once its folder is deleted.
    """
    read, words = read_study(file, overrides), keys or []
    for row in read.rows:
        try:
            if row.recipe and not row.not_run:
                check_words(read.recipe(row, words))
        except MinBertError as error:
            raise MinBertError(f"Row {row.name!r}: {error}") from error
    root = output_dir or Path("runs/studies") / str(file).removesuffix(".yaml").removesuffix(".study")
    from ..run.study import failures, run_study

    def agree(said: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(f"{said}. Go on?"))

    try:
        run_study(read, root, words=words, parallel=jobs, agree=agree)
    finally:  # also of a study that was stopped
        if (root / "runs").is_dir():
            from ..reporting.study import lines, summarize, write

            table = summarize(read, root, failures(read, root))
            write(table, root)
            typer.echo("\n".join(lines(table)))
            typer.echo(f"The table, with intervals: {root / 'study.html'}, .md, .csv and .json.")
