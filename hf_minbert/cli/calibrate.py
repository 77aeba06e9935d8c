"""`minbert calibrate`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..errors import MinBertError, unknown_name
from ..model.kinds import CALIBRATED, THRESHOLDED
from ..settings.run import ThresholdMetric
from ..settings.tasks import Task
from .input import BatchSize, DataDir


class Metric(StrEnum):
    f1 = "f1"
    accuracy = "accuracy"
    matthews = "matthews"


def calibrate(
    model: Annotated[Path, typer.Argument(help="The folder of a finished run, or of another model.")],
    thresholds: Annotated[
        Metric | None,
        typer.Option(help="Also fit thresholds, for the best value of this metric.", show_default=False),
    ] = None,
    temperature: Annotated[
        bool, typer.Option(help="Fit temperatures, or with --no-temperature only thresholds.")
    ] = True,
    data_dir: DataDir = None,
    task: Annotated[
        list[str] | None, typer.Option(help="A task; may be repeated.  [default: all that can be fitted]")
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Restore the earlier temperatures and thresholds, and fit nothing.")
    ] = False,
    batch_size: BatchSize = 32,
) -> None:
    """Fit the temperatures and thresholds of a saved model on its dev rows. The weights do not change.

    The fitted values are written into the model's config. `calibration.json` has the scores before and after. `--undo`
    restores the earlier values.
    """
    from ..pretrained.data import RECIPE, RunData
    from ..pretrained.loading import load_config, tasks_of
    from ..pretrained.prediction import Predictor
    from ..run.calibrate import calibrate as carry_out
    from ..run.calibrate import undo as take_back

    if not model.is_dir():
        raise MinBertError(f"{model} is not a folder. Give the folder of a finished run.")
    if undo and (thresholds is not None or not temperature):
        raise MinBertError("--undo fits nothing. Leave --thresholds and --no-temperature out; --task may be given.")
    if not temperature and thresholds is None:
        raise MinBertError("There is nothing to fit. Leave --no-temperature out, or give --thresholds.")
    tasks = tasks_of(load_config(str(model)), str(model))
    for name in task or ():
        if name not in tasks:
            raise unknown_name("task", name, tasks)
    data, metric = RunData.of(model, data_dir), cast(ThresholdMetric | None, thresholds and thresholds.value)
    if data_dir is None and data.recipe is None:
        raise MinBertError(f"{model} has no {RECIPE} that says where its data is. Give --data-dir.")
    asked = task or data.scored(tasks)
    names = _fitted(model, tasks, task) if undo else _to_fit(tasks, asked, temperature, metric)
    rows = {name: data.rows(tasks[name], "dev") for name in names}
    predictor = Predictor.from_pretrained(model, batch_size=batch_size)
    if undo:
        take_back(model, predictor, rows, progress=True)
        typer.echo(f"Restored: {', '.join(names)}.")
        return
    found = carry_out(model, predictor, rows, temperature=temperature, thresholds=metric, progress=True)
    for name, of in found.items():
        _print(name, of)
    typer.echo("“after” is measured on other dev rows than the fit: each half with the values from the other half.")


def _to_fit(tasks: dict[str, Task], names: list[str], temperature: bool, metric: ThresholdMetric | None) -> list[str]:
    """Returns the tasks with something to fit. Logs which are skipped, and refuses if none is left."""
    from ..evaluation.calibration import skipped, to_fit

    considered = [tasks[name] for name in names]
    kinds = CALIBRATED if temperature else THRESHOLDED
    others = [task.name for task in tasks.values() if task.kind in kinds]
    remedy = "Give the folder of a model with such a task."
    if any(task.kind in CALIBRATED for task in considered):
        remedy = "Leave --no-temperature out to fit temperatures."
    elif others:
        remedy = f"Give --task with another: {', '.join(others)}."
    chosen = to_fit(considered, temperature, metric, remedy)
    for sentence in skipped(considered, temperature, metric):
        typer.echo(sentence)
    return chosen


def _fitted(model: Path, tasks: dict[str, Task], names: list[str] | None) -> list[str]:
    """Returns the tasks with something to undo, or the named ones among them."""
    from ..pretrained.data import CALIBRATION, calibration_of

    found = [*calibration_of(model, tasks)]
    if not found:
        raise MinBertError(
            f"There is nothing to undo: {model / CALIBRATION} lists no task that still has its fitted values."
        )
    for name in names or ():
        if name not in found:
            raise unknown_name("fitted task", name, found)
    return names or found


def _print(task: str, found: dict[str, Any]) -> None:
    fitted = f"temperature {found['temperature']:.3f}"
    fitted += "".join(f", {label!r} above {number:.3f}" for label, number in found["thresholds"].items())
    typer.echo(f"{task}: {fitted}, on {found['rows']:,} rows")
    for note in found["notes"]:
        typer.echo(f"  {note}")
    typer.echo(f"  {'':<10}  {'before':>7}  {'after':>7}")
    for name in ("ece", "brier", "nll", *([found["metric"]] if found["metric"] else [])):
        typer.echo(f"  {name:<10}  {found['before'][name]:z7.4f}  {found['after'][name]:z7.4f}")
