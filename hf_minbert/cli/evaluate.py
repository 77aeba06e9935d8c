"""`minbert evaluate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    data_dir: Annotated[Path, typer.Option(help="The folder with the tasks' files.", show_default=False)],
    task: Annotated[list[str] | None, typer.Option(help="A task; may be repeated.  [default: all of them]")] = None,
    split: Annotated[str, typer.Option(help="The split to score on.")] = "dev",
    output: Annotated[Path | None, typer.Option(help="Write the metrics there, as JSON.", show_default=False)] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 32,
) -> None:
    """Score a saved model on labelled rows."""
    from dataclasses import replace

    from ..data.files import load_split
    from ..errors import MinBertError, unknown_name
    from ..io import check_writable, write_json
    from ..loading import load_config, tasks_of
    from ..prediction import Predictor, score
    from ..tasks import TASKS
    from .table import print_metrics

    if output is not None:
        check_writable(output)
    tasks = tasks_of(load_config(model), model)  # weights come last: a wrong word or file is answered at once
    rows = {}
    for name in task or tasks:
        if name not in tasks:
            raise unknown_name("task", name, tasks)
        if name not in TASKS:
            raise MinBertError(f"Task {name!r} has no file names in this package: it cannot be read from --data-dir.")
        # The model says what the task is, the package where its data lies.
        rows[name] = load_split(replace(tasks[name], files=TASKS[name].files), data_dir, split, labelled=True)
    metrics, _ = score(Predictor.from_pretrained(model, batch_size=batch_size), rows, progress=True)
    if output is not None:
        write_json(output, {f"eval_{name}": value for name, value in metrics.items()})
    print_metrics(metrics)
