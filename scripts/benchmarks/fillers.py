"""The command that shows what it costs to bring batches of different texts to a few shapes."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from transformers import AutoTokenizer

from hf_minbert import get_tasks
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.data.rounds import RowSampler

from .shared import DEVICE, MAX_LENGTH, DataDir, JsonFile, Setting, Table, report, whole_numbers
from .train import Model

SIZES = (4, 8, 16, 32)  # between two powers of two; `Packing.describe` has 8
LEAST = 64  # tokens between two sizes, as there


def fillers(
    model: Model,
    data_dir: DataDir = "sample",
    tasks: Annotated[str, typer.Option(help="With commas.")] = "sst,para,sts",
    batch_sizes: Annotated[str, typer.Option(help="Rows of each task in a step, with commas.")] = "8,32,256",
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    json_file: JsonFile = None,
) -> None:
    """Fillers and shapes of training batches, by how many sizes there are between two powers of two.

    `fillers` is their share beside real tokens, `shapes` how many are met in all steps, and `replayed` the share of
    passes that find a recording: of each shape the first pass is launched, and the second one recorded.
    """
    numbers, tokenizer = whole_numbers("--batch-sizes", batch_sizes), AutoTokenizer.from_pretrained(model)
    lengths = {
        task.name: encode(load_split(task, data_dir, "train"), task, tokenizer, MAX_LENGTH).row_lengths
        for task in get_tasks(tasks.split(","))
    }
    table: Table = {}
    for rows in numbers:
        tokens = {name: tokens_of_batches(name, of, rows, steps) for name, of in lengths.items()}
        for sizes in SIZES:
            table[f"{rows} rows, {sizes} sizes"] = shapes_of(tokens, sizes)
    report(Setting(DEVICE, False), f"{tasks}; {steps} steps", table, json_file)


def tokens_of_batches(task: str, lengths: np.ndarray, rows: int, steps: int) -> np.ndarray:
    """Real tokens of the batches of so many steps, as training draws them."""
    sampler = RowSampler(task, len(lengths), seed=0)
    passes = -(-steps * rows // len(lengths))
    order = np.concatenate([sampler.order(0, number) for number in range(passes)])
    return lengths[order[: steps * rows]].reshape(steps, rows).sum(axis=1)


def shapes_of(tokens: dict[str, np.ndarray], sizes: int) -> dict[str, float | int]:
    """A row of the table, for real tokens by task and step."""
    filled = {name: rounded(of, sizes) for name, of in tokens.items()}
    passes, shapes = sum(map(len, tokens.values())), sum(len(np.unique(of)) for of in filled.values())
    real = sum(of.sum() for of in tokens.values())
    first_two = sum(np.minimum(np.unique(of, return_counts=True)[1], 2).sum() for of in filled.values())
    return {
        "fillers_percent": 100 * float(sum(of.sum() for of in filled.values()) / real - 1),
        "shapes": shapes,
        "replayed_percent": 100 * float(1 - first_two / passes),
    }


def rounded(tokens: np.ndarray, sizes: int) -> np.ndarray:
    """Tokens with fillers, if there are so many sizes between two powers of two."""
    powers = 2 ** np.ceil(np.log2(tokens)).astype(np.int64)
    step = np.maximum(LEAST, powers // (2 * sizes))
    return -(-tokens // step) * step
