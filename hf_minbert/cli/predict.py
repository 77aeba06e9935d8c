"""`minbert predict`"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MinBertError, unknown_name
from ..io import check_writable
from ..tasks import Task
from .columns import HELP as COLUMNS_HELP
from .columns import parse_columns

if TYPE_CHECKING:
    from ..data.files import Row
    from ..prediction import Predictor


class Format(str, Enum):
    csv = "csv"
    course = "course"


def predict(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="A task of the model.  [default: its only or active one]")] = None,
    input: Annotated[Path | None, typer.Option(help="A table with the text columns.", show_default=False)] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS_HELP, show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Where the predictions go.", show_default=False)] = None,
    text: Annotated[str | None, typer.Option(help="One sentence, answered here.", show_default=False)] = None,
    text_pair: Annotated[str | None, typer.Option(help="Its second sentence.", show_default=False)] = None,
    format: Annotated[Format, typer.Option(help="csv, or the course's own.")] = Format.csv,
    clip: Annotated[bool, typer.Option("--clip", help="Force scores into the task's range.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 32,
) -> None:
    """Predict a file, one row of output per row of input, or a single --text."""
    _check(input, output, text, text_pair, format)
    if columns is not None and input is None:
        raise MinBertError("--columns goes with --input.")
    from ..data.files import read_rows
    from ..evaluation.submission import check_course
    from ..prediction import Predictor

    spec = _chosen(model, task)
    if format is Format.course:
        check_course(spec)
    if spec.is_pair != (text_pair is not None) and text is not None:
        raise MinBertError(f"Task {spec.name!r} {'needs' if spec.is_pair else 'takes no'} --text-pair.")
    # Weights come last: a wrong word or file is answered at once.
    mapped = parse_columns(columns, spec)
    rows = None if input is None else read_rows(input, spec, labelled=False, columns=mapped)
    predictor = Predictor.from_pretrained(model, batch_size=batch_size)
    if rows is None:
        _say(predictor(spec.name, [text], [text_pair] if spec.is_pair else None, clip_scores=clip)[0])
    else:
        _predict_rows(predictor, spec, rows, output, format, clip)


def _check(input: Path | None, output: Path | None, text: str | None, text_pair: str | None, format: Format) -> None:
    if (input is None) == (text is None):
        raise MinBertError("Give either --input FILE with --output FILE, or --text SENTENCE.")
    if text_pair is not None and text is None:
        raise MinBertError("--text-pair goes with --text.")
    if (input is None) != (output is None):
        raise MinBertError("--input and --output go together.")
    if text is not None and format is not Format.csv:
        raise MinBertError("--format goes with --input and --output.")
    if output is not None:
        check_writable(output)
        if output.exists() and input.exists() and output.samefile(input):
            raise MinBertError(f"--output {output} is the input. Give another file.")


def _chosen(model: str, name: str | None) -> Task:
    from ..loading import load_config, tasks_of

    config = load_config(model)
    tasks = tasks_of(config, model)
    name = name or config.active_task
    if name is None:
        raise MinBertError(f"The model has several tasks. Name one with --task: {', '.join(tasks)}.")
    if name not in tasks:
        raise unknown_name("task", name, tasks)
    return tasks[name]


def _say(answer: dict) -> None:
    if "label" not in answer:
        typer.echo(f"{answer['prediction']:.3f}")
        return
    typer.echo(f"{answer['label']} ({answer['prediction']})")
    for label, probability in answer["probabilities"].items():
        typer.echo(f"  {probability:.3f}  {label}")


def _predict_rows(predictor: Predictor, task: Task, rows: list[Row], output: Path, format: Format, clip: bool) -> None:
    from dataclasses import replace

    from ..evaluation.decoding import clip as clipped
    from ..evaluation.submission import write_course, write_predictions
    from ..prediction import progress_bar

    with progress_bar(task.name, len(rows)) as advance:
        decoded = predictor.decode(task.name, rows, advance)
    if clip:
        decoded = replace(decoded, values=clipped(task, decoded.values))
    write = write_predictions if format is Format.csv else write_course
    write(output, task, [row["id"] for row in rows], decoded)
    typer.echo(f"{len(rows):,} predictions are in {output}.")
