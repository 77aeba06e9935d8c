"""`minbert study`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MinBertError, unknown_name
from ..settings.study import Study, packaged_studies, read_study
from ..settings.wording import counted
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
        str | None,
        typer.Option(help="A file with more keys: for all rows, for a recipe or for a row.", show_default=False),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--row", help="Train only this row; may be repeated.", show_default="all rows"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs are trained at a time. They share the GPUs.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again, from their checkpoints.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for confirmation if it takes more than an hour.")
    ] = False,
) -> None:
    """Run a study: train every row of a table with several seeds, and compare the rows by intervals.

    The same command continues an interrupted study. The exit status is 1 if runs failed.
    """
    read = read_study(file, overrides, keys or ())
    for row in read.rows:
        try:
            if row.recipe and not row.not_run:
                check_words(read.recipe(row))
        except MinBertError as error:
            raise MinBertError(f"Row {row.name!r}: {error}") from error
    name = str(file) if str(file) in packaged_studies() else file.name.removesuffix(".yaml").removesuffix(".study")
    root = output_dir or Path("runs/studies") / name
    from ..run.study import begin, run_study, same_trainings
    from ..run.workers import alone_in

    def agree(said: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(f"{said}. Continue?"))

    runs = begin(read, root, retry)
    for name in rows or ():
        if name not in (there := dict.fromkeys(run.row for run in runs)):
            raise unknown_name("row", name, there)
    chosen = [run for run in runs if not rows or run.row in rows]
    with alone_in(root):
        try:
            run_study(read, chosen, root, parallel=jobs, agree=agree)
        finally:  # also of a study that was stopped
            _write_table(read, root, same_trainings(runs))
    open_ = sum(not run.has_ended for run in chosen)
    if failed := [run for run in chosen if run.has_failed]:
        typer.echo(f"{counted(len(failed), 'run')} failed. Add --retry to run failed runs again.", err=True)
    if failed or open_:
        raise typer.Exit(1)


def _write_table(study: Study, root: Path, same: dict[str, str]) -> None:
    from ..reporting.study import lines, summarize, write
    from ..run.study import failures

    table = summarize(study, root, failures(study, root), same)
    if any(row.seeds for row in table.rows):
        write(table, root)
        typer.echo("\n".join(lines(table)))
        typer.echo(f"The table, with intervals: {root / 'study.html'}, .md, .csv and .json.")
    else:
        typer.echo("No run has finished, so there is no table yet.")
