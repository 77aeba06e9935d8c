"""`minbert predict`"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MinBertError

if TYPE_CHECKING:
    from ..prediction import Predictor


class Format(str, Enum):
    csv = "csv"
    course = "course"


def predict(
    model: Annotated[str, typer.Argument(help="The folder of a finished run, or a model's Hub id.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="A task of the model.  [default: its only or active one]")] = None,
    input: Annotated[Path | None, typer.Option(help="A table with the task's text columns.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Where the predictions go.", show_default=False)] = None,
    text: Annotated[str | None, typer.Option(help="One sentence, answered here.", show_default=False)] = None,
    text_pair: Annotated[str | None, typer.Option(help="Its second sentence.", show_default=False)] = None,
    format: Annotated[Format, typer.Option(help="csv, or the course's own.")] = Format.csv,
    clip: Annotated[bool, typer.Option("--clip", help="Force scores into the task's range.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 32,
) -> None:
    """Predict a file, one row of output per row of input, or a single --text."""
    _check(input, output, text, text_pair)
    from ..prediction import Predictor

    predictor = Predictor.from_pretrained(model, batch_size=batch_size)
    task = _chosen(predictor, task)
    if text is not None:
        pairs = None if text_pair is None else [text_pair]
        _say(predictor(task, [text], pairs, clip_scores=clip)[0])
    else:
        _predict_file(predictor, task, input, output, format, clip)


def _check(input: Path | None, output: Path | None, text: str | None, text_pair: str | None) -> None:
    if (input is None) == (text is None):
        raise MinBertError("Give either --input FILE with --output FILE, or --text SENTENCE.")
    if text_pair is not None and text is None:
        raise MinBertError("--text-pair goes with --text.")
    if (input is None) != (output is None):
        raise MinBertError("--input and --output go together.")
    if input is not None and output.exists() and input.exists() and output.samefile(input):
        raise MinBertError(f"--output {output} is the input. Give another file.")


def _chosen(predictor: Predictor, task: str | None) -> str:
    task = task or predictor.model.config.active_task
    if task is None:
        raise MinBertError(f"The model has several tasks. Name one with --task: {', '.join(predictor.tasks)}.")
    return predictor.task(task).name


def _say(answer: dict) -> None:
    if "label" not in answer:
        typer.echo(f"{answer['prediction']:.3f}")
        return
    typer.echo(f"{answer['label']} ({answer['prediction']})")
    for label, probability in answer["probabilities"].items():
        typer.echo(f"  {probability:.3f}  {label}")


def _predict_file(predictor: Predictor, task: str, input: Path, output: Path, format: Format, clip: bool) -> None:
    from dataclasses import replace

    from ..data.files import read_rows
    from ..evaluation.decoding import clip as clipped
    from ..evaluation.submission import write_course, write_predictions
    from ..prediction import progress_bar

    spec = predictor.task(task)
    rows = read_rows(input, spec, labelled=False)
    with progress_bar(task, len(rows)) as advance:
        decoded = predictor.decode(task, rows, advance)
    if clip and spec.kind == "score":
        decoded = replace(decoded, values=clipped(spec, decoded.values))
    write = write_predictions if format is Format.csv else write_course
    write(output, spec, [row["id"] for row in rows], decoded)
    typer.echo(f"{len(rows):,} predictions are in {output}.")
