"""`minbert affinity`"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..settings.recipe import packaged_recipes, read_recipe
from ..settings.study import Study
from ..settings.wording import counted
from ..settings.words import check_words
from .recipe import Overrides, Recipe


def affinity(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds of training in each run.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each group of tasks, with seeds from 1.")] = 3,
    output_dir: Annotated[
        Path | None, typer.Option(help="The folder of all runs.", show_default="runs/affinity/ and the recipe's name")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs are trained at a time. They share the GPUs.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again, from their checkpoints.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for confirmation if it takes more than an hour.")
    ] = False,
) -> None:
    """Measure whether these tasks should train together.

    Trains each task alone, each pair of tasks and all tasks, and compares the scores with intervals. The same command
    continues an interrupted comparison. Increasing --seeds from 3 to 5 adds two seeds. The exit status is 1 if runs
    failed.
    """
    check_words(read_recipe(recipe, overrides or ()))
    from ..run.affinity import conflicts_of, study_of
    from ..run.study import begin, run_study
    from ..run.workers import alone_in

    study = study_of(recipe, overrides or (), steps=steps, seeds=seeds)
    root = output_dir or Path("runs/affinity") / (recipe if str(recipe) in packaged_recipes() else recipe.stem)

    def agree(said: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(f"{said}. Continue?"))

    runs, measured = begin(study, root, retry), {}
    with alone_in(root):
        try:
            run_study(study, runs, root, parallel=jobs, agree=agree)
            if all(run.has_ended and not run.has_failed for run in runs):
                measured = conflicts_of(runs, root)
        finally:  # also where it was stopped
            _write(study, root, measured)
    if failed := [run for run in runs if run.has_failed]:
        typer.echo(f"{counted(len(failed), 'run')} failed. Add --retry to run failed runs again.", err=True)
    if not all(run.has_ended and not run.has_failed for run in runs):
        raise typer.Exit(1)


def _write(study: Study, root: Path, measured: Mapping[str, float]) -> None:
    from ..reporting.affinity import lines, summarize, write
    from ..run.study import failures

    made = summarize(study, root, failures(study, root), measured)
    if any(cell.scores for cell in made.alone.values()):
        write(made, root)
        typer.echo("\n".join(lines(made)))
        typer.echo(f"The matrix, with intervals: {root / 'affinity.html'}, .md, .csv and .json.")
    else:
        typer.echo("No run of a single task has finished, so there is nothing to compare yet.")
