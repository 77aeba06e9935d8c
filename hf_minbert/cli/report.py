"""`minbert report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import MinBertError


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not.", show_default=False)],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="More runs to compare, after --compare RUN.")
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="A run to compare with; may be repeated. Runs of one recipe count as its seeds."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="The folder of the report.  [default: RUN/report]", show_default=False)
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(help="The current folder of the data, if it has moved since training.", show_default=False),
    ] = None,
    ordered: Annotated[
        list[str] | None, typer.Option(help="A task whose labels are ordered, like a scale; may be repeated.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many errors to show in full text, per class.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap.")] = 0,
) -> None:
    """Report a run's results and its model's weaknesses, as an HTML page, Markdown and pictures."""
    if more and not compare:
        raise MinBertError(f"A report is of one run. Give those to compare it with by --compare {more[0]}.")
    for folder in (run, *(compare or ()), *(more or ())):
        if not folder.is_dir():  # said before the libraries of a report are imported
            what = "is a file" if folder.exists() else "does not exist"
            raise MinBertError(f"{folder} {what}. Give the folder of a run, the `output_dir` of its recipe.")
    from ..reporting.report import report as write_report

    page, failures = write_report(
        run, [*(compare or ()), *(more or ())], output_dir=output_dir, data_dir=data_dir, ordered=ordered or (),
        examples=examples, seed=seed,
    )  # fmt: skip
    typer.echo(f"The report is in {page}.")
    if failures:
        typer.echo(f"{len(failures)} parts of the report failed: " + "; ".join(failures) + ".", err=True)
        raise typer.Exit(1)
