"""Fits a saved model's probabilities and thresholds on its dev rows, and stores them in its folder.

Weights do not change. These files change: config.json, which has the fitted values of the tasks; existing predictions
and the scores in metrics.json; and `calibration.json`, with the quality of each task before and after.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MinBertError
from ..evaluation.calibration import fit_and_measure, to_fit
from ..evaluation.decoding import decode
from ..evaluation.metrics import overall, task_metrics
from ..evaluation.submission import write_predictions
from ..io import write_json
from ..pretrained.data import CALIBRATION, calibration_of
from ..pretrained.prediction import Predictor, progress_bar
from ..settings.metrics import KIND_METRICS
from ..settings.run import ThresholdMetric
from ..settings.tasks import Task

logger = logging.getLogger(__name__)


def calibrate(
    folder: Path,
    predictor: Predictor,
    datasets: Mapping[str, Any],
    *,
    temperature: bool,
    thresholds: ThresholdMetric | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fits a temperature for each task with probabilities, thresholds for binary tasks and `kind: labels`, or both.

    Args:
        folder: the folder of the model. Its files are changed.
        predictor: a predictor of that model. It uses the fitted values afterwards.
        datasets: labelled rows by task. Tasks of other kinds are not changed.
        thresholds: the metric for choosing thresholds. With `None` the answers do not change.

    Returns:
        the entries of `calibration.json` for these tasks, by name; see `evaluation.calibration.fit_and_measure`. `was`
        has the values of the config before the first fit, which `undo` restores.

    Raises:
        MinBertError: as `to_fit`; or the model's code in the folder does not support temperatures.
    """
    chosen = to_fit(map(predictor.task, datasets), temperature, thresholds, "Give rows of such a task.")
    _check_code(folder)
    kept, found, fitted = calibration_of(folder, predictor.tasks), {}, {}
    outputs = _outputs(predictor, {name: datasets[name] for name in chosen}, progress)
    for name, (logits, labels) in outputs.items():
        if not np.isfinite(logits).all():  # a model that has diverged: its scores say so
            logger.warning("%s: outputs are not finite, so nothing is fitted.", name)
            continue
        if len(labels) < 2:
            logger.warning("%s: there is only one row, so nothing is fitted.", name)
            continue
        task = predictor.task(name)
        fitted[name], found[name] = fit_and_measure(task, logits, labels, temperature, thresholds)
        found[name]["was"] = kept[name]["was"] if name in kept else answers_of(task)
    _change(folder, predictor, datasets, fitted, outputs)
    _record(folder, {**_json(folder / CALIBRATION), **found})
    return found


def undo(folder: Path, predictor: Predictor, datasets: Mapping[str, Any], *, progress: bool = False) -> None:
    """Restores the temperatures and thresholds that tasks had before `calibrate`.

    Args:
        datasets: labelled rows of these tasks, which `calibration.json` names.
    """
    kept = _json(folder / CALIBRATION)
    restored = {name: replace(predictor.task(name), **kept[name]["was"]) for name in datasets}
    _change(folder, predictor, datasets, restored, _outputs(predictor, datasets, progress))
    _record(folder, {name: of for name, of in kept.items() if name not in restored})


def _outputs(
    predictor: Predictor, datasets: Mapping[str, Any], progress: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Logits and labels by task."""
    found = {}
    for name, rows in datasets.items():
        with progress_bar(name, len(rows), progress) as advance:
            found[name] = predictor.logits(name, rows, advance), np.asarray(rows["label"][:])
    return found


def _change(
    folder: Path,
    predictor: Predictor,
    datasets: Mapping[str, Any],
    tasks: Mapping[str, Task],
    outputs: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    """Gives the model these tasks: its config, its predictions and its scores."""
    predictor.tasks |= tasks
    _keep(folder, tasks)
    for name, task in tasks.items():
        if (path := folder / "predictions" / f"{name}-dev.csv").is_file():
            write_predictions(path, task, datasets[name][:]["id"], decode(task, outputs[name][0]))
    _rescore(folder, predictor.tasks, {name: task_metrics(task, *outputs[name]) for name, task in tasks.items()})


def _record(folder: Path, found: dict[str, Any]) -> None:
    if found:
        write_json(folder / CALIBRATION, found)
    else:
        (folder / CALIBRATION).unlink(missing_ok=True)


def _keep(folder: Path, tasks: Mapping[str, Task]) -> None:
    """Writes only temperatures and thresholds into a model's config."""
    path = folder / "config.json"
    config = _json(path)
    for saved in config["tasks"]:
        if saved["name"] in tasks:
            saved.update(answers_of(tasks[saved["name"]]))
    write_json(path, config)


def answers_of(task: Task) -> dict[str, Any]:
    """Returns the fields of a task in a config that turn outputs into answers."""
    saved = task.to_config()
    return {key: saved[key] for key in ("temperature", "thresholds")}


def _check_code(folder: Path) -> None:
    """Refuses a folder whose own code, which other people run, is older than temperatures."""
    code = folder / "inference.py"
    if code.is_file() and "temperature" not in code.read_text(encoding="utf-8"):
        raise MinBertError(
            f"The code in {folder} is of a version without temperatures. Save the model again, with "
            f'`Predictor.from_pretrained("{folder}").model.save_pretrained(...)`, and calibrate that.'
        )


def _rescore(folder: Path, tasks: Mapping[str, Task], scores: Mapping[str, Mapping[str, float]]) -> None:
    """Writes the current scores of the model to metrics.json, for tasks that have scores there."""
    metrics = _json(folder / "metrics.json")
    new = {f"eval_{name}_{metric}": value for name, of in scores.items() for metric, value in of.items()}
    if not metrics.keys() & new.keys():
        return
    metrics |= {key: value for key, value in new.items() if key in metrics}
    scored = [task for name, task in tasks.items() if f"eval_{name}_{task.metric}" in metrics]
    every = {
        task.name: {metric: metrics.get(f"eval_{task.name}_{metric}", 0.0) for metric in KIND_METRICS[task.kind]}
        for task in scored
    }  # an older run lacks metrics that none of these numbers is of
    metrics |= {f"eval_{key}": value for key, value in overall(scored, every).items() if f"eval_{key}" in metrics}
    write_json(folder / "metrics.json", metrics)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
