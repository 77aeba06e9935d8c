"""`minbert evaluate`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MinBertError, unknown_name
from .columns import HELP as COLUMNS_HELP
from .columns import parse_columns
from .predict import MaxLength

if TYPE_CHECKING:
    import datasets

    from ..tasks import Task


def evaluate(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    data_dir: Annotated[
        str | None,
        typer.Option(help="The folder with the tasks' files; sample (in the package); or hub.", show_default=False),
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="A labelled file of one task, instead of --data-dir.", show_default=False)
    ] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS_HELP, show_default=False)] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task; may be repeated.  [default: all of them]")] = None,
    split: Annotated[str, typer.Option(help="The split of --data-dir to score on.")] = "dev",
    output: Annotated[Path | None, typer.Option(help="Write the metrics there, as JSON.", show_default=False)] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows of maximum length per batch; shorter rows fill it with more.")
    ] = 32,
    max_length: MaxLength = None,
) -> None:
    """Score a saved model on labelled rows: those of --data-dir, or those of one --input."""
    from ..data.encoding import check_max_length
    from ..io import check_writable, write_json
    from ..loading import load_saved_config, tasks_of
    from ..prediction import Predictor, score
    from .table import print_metrics

    if (data_dir is None) == (input is None):
        raise MinBertError(
            "Give either --data-dir FOLDER, or --input FILE and, if the model has several, --task TASK."
        )
    if columns is not None and input is None:
        raise MinBertError("--columns goes with --input.")
    if output is not None:
        check_writable(output)
    config = load_saved_config(model)  # weights come last: a wrong word or file is answered at once
    check_max_length(max_length, config)
    tasks = tasks_of(config, model)
    for name in task or ():
        if name not in tasks:
            raise unknown_name("task", name, tasks)
    chosen = [tasks[name] for name in task or tasks]
    rows = _rows_of_splits(chosen, data_dir, split) if input is None else _rows_of_file(chosen, input, columns)
    predictor = Predictor.from_pretrained(model, batch_size=batch_size, max_length=max_length)
    metrics, _ = score(predictor, rows, progress=True)
    if output is not None:
        write_json(output, {f"eval_{name}": value for name, value in metrics.items()})
    print_metrics(metrics)


def _rows_of_splits(tasks: list[Task], data_dir: str | None, split: str) -> dict[str, datasets.Dataset]:
    from dataclasses import replace

    from ..data.files import load_split
    from ..tasks import TASKS

    for task in tasks:
        if task.name not in TASKS:
            raise MinBertError(
                f"Task {task.name!r} is not one of the package's, and a model does not know where its data lies. Give "
                f"--task {task.name} --input FILE, or name other tasks by --task."
            )
    # The model says what the task is, the package where its data lies.
    return {
        task.name: load_split(replace(task, files=TASKS[task.name].files), data_dir, split, labelled=True)
        for task in tasks
    }


def _rows_of_file(tasks: list[Task], path: Path, columns: str | None) -> dict[str, datasets.Dataset]:
    from ..data.files import read_rows, to_dataset

    if len(tasks) > 1:
        names = ", ".join(task.name for task in tasks)
        raise MinBertError(f"--input holds rows of one task. Name it with --task: {names}.")
    rows = read_rows(path, tasks[0], labelled=True, columns=parse_columns(columns, tasks[0]))
    return {tasks[0].name: to_dataset(rows, tasks[0])}
