"""`report`: makes a report from the folders of runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import MinBertError, unknown_name
from ..io import check_writable
from .builder import Builder
from .by_task import task_sections, title_of
from .comparison import comparison, seeds
from .document import PAGE, Document, Text
from .overview import conflicts, costs, curves, scores
from .plots import check_matplotlib
from .runs import Run, read_run

logger = logging.getLogger(__name__)


def report(
    run: str | Path,
    compare: Sequence[str | Path] = (),
    *,
    output_dir: str | Path | None = None,
    data_dir: str | None = None,
    ordered: Sequence[str] = (),
    examples: int = 3,
    seed: int = 0,
) -> tuple[Path, list[str]]:
    """Writes the report of a run: a page, Markdown, and pictures.

    Args:
        run: the folder of the run.
        compare: the folders of runs to compare it with.
        output_dir: the folder of the report; by default `report` in the run's folder.
        data_dir: the current folder of the runs' data; by default that of each run's recipe.
        ordered: tasks whose labels are steps of a scale.
        examples: the number of rows in full text for each class. Scores and comparisons show twice as many in each
            direction.
        seed: the seed of the bootstrap.

    Returns:
        the page's path; and a sentence for each thing that could not be made.

    Raises:
        MinBertError: a folder has no run, a file in it is broken, a task is unknown, matplotlib is missing, or the
            report cannot be written.
    """
    check_matplotlib()
    folder = Path(output_dir) if output_dir is not None else Path(run) / "report"
    runs = _named([read_run(path, data_dir) for path in (run, *compare)])
    for name in ordered:
        if runs[0].tasks.get(name) is None or not runs[0].tasks[name].traits.is_class:
            choices = [task.name for task in runs[0].tasks.values() if task.traits.is_class]
            raise unknown_name("task of `--ordered`", name, choices)
    check_writable(folder / PAGE)
    build = Builder(ordered, examples, seed)
    _sections(build, runs)
    page = _document(runs, build).write(folder)
    return page, build.failures


def _named(runs: list[Run]) -> list[Run]:
    """Returns the runs with unique names, as short a part of their paths as possible."""
    paths = [run.path.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise MinBertError("A run is given twice. Give each folder once.")
    parts = 1
    while len(names := {"/".join(path.parts[-parts:]) for path in paths}) < len(paths):
        parts += 1
    del names
    return [replace(run, name="/".join(path.parts[-parts:])) for run, path in zip(runs, paths, strict=True)]


def _sections(build: Builder, runs: list[Run]) -> None:
    run = runs[0]
    build.section("scores", "Scores and baselines", lambda: scores(build, run))
    build.section("curves", "Learning curves", lambda: curves(build, runs))
    for name, answers in run.answers.items():
        if answers.usable:
            task_sections(build, run, answers)
        else:
            said = answers.missing or f"{answers.broken:,} predictions are not finite: see the scores."
            build.section(name, title_of(answers), lambda said=said: [Text(said)])
    build.section("gradients", "Gradient conflicts", lambda: conflicts(build, run))
    build.section("seeds", "Seeds", lambda: seeds(runs))
    for number, other in enumerate(runs[1:], 1):
        build.section(
            f"compare-{number}", f"Compared with {other.name}", lambda other=other: comparison(build, run, other)
        )
    build.section("costs", "Time and memory", lambda: costs(runs))


def _document(runs: list[Run], build: Builder) -> Document:
    run = runs[0]
    model = run.recipe["model_name_or_path"].value if "model_name_or_path" in run.recipe else None
    parts = [f"{', '.join(run.tasks) or 'no tasks'}; dev rows"]
    parts += [f"from {model}"] if model else []
    parts += [f"seed {run.seed}"] if run.seed is not None else []
    notes = [*run.notes, *(f"{other.name}: {note}" for other in runs[1:] for note in other.notes)]
    return Document(f"Report of {run.name}", "; ".join(parts) + ".", [*notes, *build.failures], build.sections)
