"""`minbert export`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Form(StrEnum):
    """The formats that a model can be exported to."""

    encoder = "encoder"
    bert = "bert"
    sentence_transformers = "sentence-transformers"
    classifier = "classifier"
    onnx = "onnx"


def export(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    to: Annotated[
        Form, typer.Option(help="The form to export to; `bert` is the former name of `encoder`.", show_default=False)
    ],
    output_dir: Annotated[Path, typer.Option(help="A new folder for the export.", show_default=False)],
    task: Annotated[
        str | None,
        typer.Option(
            help="The task whose encoder, pooling or head is exported, if tasks differ in it; not for onnx.",
            show_default=False,
        ),
    ] = None,
    logits: Annotated[
        int | None,
        typer.Option(
            help="With classifier, for a binary task: 1 for one output z, as rerankers need, or 2 for the outputs 0 "
            "and z.  [default: 2]",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        bool,
        typer.Option(
            "--quantize", help="With onnx: also write an int8 variant, and score both on the dev rows of the run."
        ),
    ] = False,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="With --quantize: the folder with the tasks' files, sample or hub.  [default: the recipe's]",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Export a model: its encoder, a sentence-transformers model, one task as a stock classifier, or ONNX.

    The export is loaded again and its answers are compared with those of the model.
    """
    from ..publishing.export import export as write

    given: dict[str, Any] = {"task": task, "logits": logits, "quantize": quantize or None, "data_dir": data_dir}
    options = {name: value for name, value in given.items() if value is not None}
    found = write(model, to.value, output_dir, overwrite=overwrite, **options)
    for note in found["notes"]:
        typer.echo(note)
    if found.get("scores"):
        from ..publishing.export_onnx import score_table

        typer.echo(score_table(found["scores"]), nl=False)
    typer.echo(
        f"The export is in {output_dir}; it differs from the model by {found['largest_difference']:.1g} at most."
    )
