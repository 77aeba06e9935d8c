"""Benchmarks of this package and of the stock classes of transformers.

python scripts/benchmark.py step --model google-bert/bert-base-uncased    one training step
python scripts/benchmark.py smart --model google-bert/bert-base-uncased   a step with and without SMART
python scripts/benchmark.py surgery                                       a step of three tasks, also with surgery
python scripts/benchmark.py sharing --tasks 4                             a step of tasks with and without shared rows
python scripts/benchmark.py train --model $MINILM --random-size base      whole training loops
python scripts/benchmark.py predict --model $MINILM                       prediction for many pairs
python scripts/benchmark.py all --model $MINILM                           train and predict at several batch sizes
python scripts/benchmark.py growth --model $MINILM --random-size tiny     time per row as data grows
python scripts/benchmark.py job RECIPE KEY=VALUE...                       a whole `minbert train`, part by part
python scripts/benchmark.py encoders                                      other encoders, with random weights
python scripts/benchmark.py attention                                     packed attention on a GPU
python scripts/benchmark.py layer                                         a fused layer on a GPU
python scripts/benchmark.py fillers --model $MINILM                       cost of bringing batches to a few shapes

Each command is a function in the folder benchmarks. benchmarks/shared.py measures, prints and writes.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
import typer
from benchmarks.attention import attention
from benchmarks.encoders import encoders
from benchmarks.everything import everything
from benchmarks.fillers import fillers
from benchmarks.growth import growth
from benchmarks.job import job
from benchmarks.layer import layer
from benchmarks.predict import predict
from benchmarks.step import sharing, smart, step, surgery
from benchmarks.train import train
from transformers.utils import is_datasets_available
from typer.core import TyperGroup

from hf_minbert.errors import MinBertError


class Commands(TyperGroup):
    """What is wrong with a model or its data is said as what is wrong with an option is, without a traceback."""

    def invoke(self, context: typer.Context) -> Any:
        try:
            return super().invoke(context)
        except MinBertError as error:
            raise typer.BadParameter(str(error)) from error


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
for command in (step, smart, surgery, sharing, train, predict, growth, encoders, attention, layer, fillers, job):
    app.command()(command)
app.command("all")(everything)


@app.callback()
def main() -> None:
    """Benchmarks of this package and of the stock classes of transformers."""
    transformers.logging.set_verbosity_error()  # both models report their new heads as missing
    transformers.logging.disable_progress_bar()
    if is_datasets_available():
        import datasets

        datasets.disable_progress_bars()
    # As `minbert train` does: batches have hundreds of shapes, and cuDNN's attention compiles each anew.
    torch.backends.cuda.enable_cudnn_sdp(False)


if __name__ == "__main__":
    app()
