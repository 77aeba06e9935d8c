"""`minbert evaluate`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DivergedError, MinBertError, unknown_name
from .heavy import importing
from .input import BatchSize, Columns, DataDir, Read, check_options, file_of
from .predict import MaxLength

if TYPE_CHECKING:
    import datasets

    from ..settings.tasks import Task


def evaluate(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    data_dir: DataDir = None,
    input: Annotated[
        Path | None, typer.Option(help="A labelled file of one task, instead of --data-dir.", show_default=False)
    ] = None,
    columns: Columns = None,
    read: Read = None,
    task: Annotated[
        list[str] | None, typer.Option(help="A task; may be repeated.  [default: all that the run scored]")
    ] = None,
    split: Annotated[str, typer.Option(help="The split to score on; not for --input.")] = "dev",
    output: Annotated[
        Path | None, typer.Option(help="Write the metrics to this JSON file.", show_default=False)
    ] = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
) -> None:
    """Evaluate a saved model on the dev rows of its run, on those in --data-dir, or on one file (--input)."""
    with importing():
        from ..data.encoding import check_max_length
        from ..evaluation.metrics import has_diverged
        from ..io import check_writable, write_json
        from ..pretrained.data import RECIPE, RunData
        from ..pretrained.loading import load_config, tasks_of
        from ..pretrained.prediction import Predictor, score
        from .table import print_metrics

    either = "Give either --data-dir FOLDER, or --input FILE and, if the model has several, --task TASK."
    if data_dir is not None and input is not None:
        raise MinBertError(either)
    check_options(input, columns, read)
    if output is not None:
        check_writable(output)
    config = load_config(model)  # weights come last: a wrong word or file is answered at once
    check_max_length(max_length, config)
    tasks = tasks_of(config, model)
    for name in task or ():
        if name not in tasks:
            raise unknown_name("task", name, tasks)
    if input is not None:
        rows = _rows_of_file([tasks[name] for name in task or tasks], input, columns, read)
    else:
        data = RunData.of(model, data_dir)
        if data_dir is None and data.recipe is None:
            raise MinBertError(f"{model} has no {RECIPE} that says where its data is. {either}")
        rows = {name: data.rows(tasks[name], split) for name in task or data.scored(tasks)}
    predictor = Predictor.from_pretrained(model, batch_size=batch_size, max_length=max_length)
    metrics, _ = score(predictor, rows, progress=True)
    if output is not None:
        write_json(output, {f"eval_{name}": value for name, value in metrics.items()})
    print_metrics(metrics)
    if has_diverged(metrics):
        raise DivergedError(
            f"The model {model} has diverged: its outputs are not finite, so these scores mean nothing."
        )


def _rows_of_file(tasks: list[Task], path: Path, columns: str | None, read: str | None) -> dict[str, datasets.Dataset]:
    from ..data.files import read_rows, to_dataset

    if len(tasks) > 1:
        names = ", ".join(task.name for task in tasks)
        raise MinBertError(f"--input holds rows of one task. Name it with --task: {names}.")
    file, mapped = file_of(path, tasks[0], columns, read)
    rows = read_rows(file, tasks[0], labelled=True, columns=mapped)
    return {tasks[0].name: to_dataset(rows, tasks[0])}
