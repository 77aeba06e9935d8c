"""`minbert predict`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MinBertError, unknown_name
from ..io import check_writable
from ..settings.tasks import Task
from ..settings.wording import counted
from .heavy import importing
from .input import BatchSize, Columns, Read, check_options, file_of


class Format(StrEnum):
    csv = "csv"
    course = "course"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


MaxLength = Annotated[
    int | None,
    typer.Option(help="Cut inputs to this many tokens.  [default: as in the model's training]", show_default=False),
]


def predict(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task of the model; may be repeated.  [default: its only or active one]"),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="A file with the text columns: .csv, .tsv, .jsonl, .parquet, .conll.", show_default=False),
    ] = None,
    columns: Columns = None,
    read: Read = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="A file for the predictions (tags: .jsonl, or .conll for words and tags only). With several tasks a "
            "folder for TASK.csv (tags: TASK.jsonl).",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A sentence to predict; the answer is printed.", show_default=False)
    ] = None,
    text_pair: Annotated[str | None, typer.Option(help="Its second sentence.", show_default=False)] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="csv: id, prediction, label and a probability for each class (tags: as --output ends); course: the "
            "file format of CS224N."
        ),
    ] = Format.csv,
    clip: Annotated[bool, typer.Option("--clip", help="Clip scores to the task's range.")] = False,
    batch_size: BatchSize = 32,
    dtype: Annotated[Dtype, typer.Option(help="Precision; bfloat16 is faster on a GPU.")] = Dtype.float32,
    max_length: MaxLength = None,
) -> None:
    """Predict a file, with one row of output for each row of input, or a single --text.

    Several tasks that read the same columns are predicted together. A file may be larger than memory. After an
    interruption, the same command continues.
    """
    _check_words(input, output, text, text_pair, format)
    check_options(input, columns, read)
    with importing():
        from ..data.stream import RowStream
        from ..evaluation.submission import CONLL, COURSE, CSV, check_course
        from ..pretrained.prediction import Predictor
        from ..pretrained.prediction_file import predict_file, survey

    sides = None if text is None else 1 if text_pair is None else 2
    tasks = _chosen(model, task or [], max_length, sides)
    outputs = {} if output is None or input is None else _outputs(tasks, input, output)
    for spec in tasks if format is Format.course else ():
        check_course(spec)
    first = tasks[0]
    if first.is_pair != (text_pair is not None) and text is not None:
        raise MinBertError(f"Task {first.name!r} {'needs' if first.is_pair else 'takes no'} --text-pair.")
    # Weights come last: a wrong word or file is answered at once.
    if input is not None:
        file, mapped = file_of(input, first, columns, read)
        rows = RowStream(file, first, mapped)
        found = survey(rows)
    predictor = Predictor.from_pretrained(model, batch_size=batch_size, dtype=dtype.value, max_length=max_length)
    if input is not None:
        in_columns = [path.suffix.lower() for path in outputs.values()] == [".conll"]
        form = COURSE if format is Format.course else CONLL if in_columns else CSV
        predict_file(predictor, rows, found, outputs, form, clip)
        for spec in tasks:
            typer.echo(f"{counted(found.rows, 'prediction', 'is', 'are')} in {outputs[spec.name]}.")
        return
    for spec in tasks:
        if len(tasks) > 1:
            typer.echo(f"{spec.name}:")
        _say(predictor(spec.name, [text or ""], [text_pair or ""] if spec.is_pair else None, clip_scores=clip)[0])


def _check_words(
    input: Path | None, output: Path | None, text: str | None, text_pair: str | None, format: Format
) -> None:
    if (input is None) == (text is None):
        raise MinBertError("Give either --input FILE with --output FILE, or --text SENTENCE.")
    if text_pair is not None and text is None:
        raise MinBertError("--text-pair goes with --text.")
    if (input is None) != (output is None):
        raise MinBertError("--input and --output go together.")
    if text is not None and format is not Format.csv:
        raise MinBertError("--format goes with --input and --output.")


def _chosen(model: str, names: list[str], max_length: int | None, sides: int | None) -> list[Task]:
    """Returns the tasks with these names. Checks that they read the same columns and that `max_length` fits the model.

    Args:
        sides: the number of sentences that are given. Without names, the task with this number of texts is chosen.
    """
    from ..data.encoding import check_max_length
    from ..pretrained.loading import load_config, tasks_of

    config = load_config(model)
    check_max_length(max_length, config)
    tasks = tasks_of(config, model)
    names = list(dict.fromkeys(names)) or ([config.active_task] if config.active_task else [])
    if not names:
        names = [name for name, task in tasks.items() if sides in (None, len(task.text_columns))]
        what = {None: "", 1: " for one sentence", 2: " for a pair"}[sides]
        if not names:
            raise MinBertError(f"The model has no task{what}. {'Leave out' if sides == 2 else 'Add'} --text-pair.")
        if len(names) > 1:
            raise MinBertError(f"The model has several tasks{what}. Name one with --task: {', '.join(names)}.")
    for name in names:
        if name not in tasks:
            raise unknown_name("task", name, tasks)
    first = tasks[names[0]]
    for name in names:
        if tasks[name].text_columns != first.text_columns:
            found = " and ".join(f"{task.name!r} {', '.join(task.text_columns)}" for task in (first, tasks[name]))
            raise MinBertError(
                f"Tasks answered together must read the same columns. Found {found}. Predict each alone."
            )
    return [tasks[name] for name in names]


def _outputs(tasks: list[Task], input: Path, output: Path) -> dict[str, Path]:
    """Returns the file for each task's predictions."""
    from ..data.tables import READERS
    from ..evaluation.submission import ending, endings

    several = len(tasks) > 1
    if several and output.exists() and not output.is_dir():
        raise MinBertError(f"--output {output} is a file. With several tasks give a folder, for one file of each.")
    files = {task.name: output / f"{task.name}{ending(task)}" if several else output for task in tasks}
    written, suffix = endings(tasks[0]), output.suffix.lower()
    if not several and suffix in READERS and suffix not in (*written, ".txt", ""):
        how = "tags are written as JSON lines or in columns" if tasks[0].traits.is_tags else "predictions are CSV"
        names = " or ".join(output.with_suffix(own).name for own in written)
        raise MinBertError(f"--output {output}: {how}, not {suffix}. Name it {names}.")
    for file in files.values():
        check_writable(file)
        if file.exists() and input.exists() and file.samefile(input):
            raise MinBertError(f"--output {output} is the input. Give another file.")
    return files


def _say(answer: dict) -> None:
    if "tags" in answer:
        for word, tag, probability in zip(answer["tokens"], answer["tags"], answer["probabilities"], strict=True):
            typer.echo(f"  {'not read' if probability is None else f'{probability:.3f}'}  {tag}  {word}")
        for found in answer.get("entities", ()):
            typer.echo(f"{found['type']}: {found['text']}")
        if not answer["tokens"]:
            typer.echo("The text has no word.")
        return
    if "labels" in answer:
        typer.echo(", ".join(answer["labels"]) or "(none)")
        for label, probability in answer["probabilities"].items():
            typer.echo(f"  {probability:.3f}  {label}")
        return
    if "label" not in answer:
        typer.echo(f"{answer['prediction']:.3f}")
        return
    expected = f"; expected {answer['expected']:.2f}" if "expected" in answer else ""
    typer.echo(f"{answer['label']} ({answer['prediction']}{expected})")
    for label, probability in answer["probabilities"].items():
        typer.echo(f"  {probability:.3f}  {label}")
