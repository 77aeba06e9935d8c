"""Measures whole training loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_minbert import MinBertForMultiTask, get_tasks
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split

from .floor import ADAMW_BYTES, PASSES, Cost, Hardware, forward_flops
from .loops import LOOPS, Loops, check_loops, minbert_config, trains_one, work_of
from .shared import (
    DEVICE,
    MAX_LENGTH,
    Bf16,
    JsonFile,
    RandomSize,
    Setting,
    Table,
    bert_checkpoint,
    in_turns,
    report,
    speeds,
)

Model = Annotated[
    str, typer.Option(help="A BERT checkpoint; its tokenizer is used in any case.", callback=bert_checkpoint)
]
DataDir = Annotated[str, typer.Option(help="The course's files; or `sample`, for the package's.")]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps, after a quarter as many that warm up.")]


def train(
    model: Model,
    random_size: RandomSize = None,
    data_dir: DataDir = "sample",
    tasks: Annotated[
        str, typer.Option(help="With commas. Loops of stock classes and of sentence-transformers train the last one.")
    ] = "para",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of each task in a step.")] = 32,
    steps: Steps = 200,
    bf16: Bf16 = False,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens to which inputs are cut.")] = MAX_LENGTH,
    loops: Annotated[
        str, typer.Option(help=f"Which to run, with commas: {', '.join(LOOPS)}.")
    ] = "stock,padded,packed",
    rounds: Annotated[int, typer.Option(min=1, help="How often each runs, in turns.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Examples per second and time of a step in whole training loops, evaluation off: loader, step, optimizer, log.

    `floor` is what the machine allows: the matrix products of real tokens at the speed of a large product, and AdamW's
    memory at that of a copy.
    """
    names, setting = loops.split(","), Setting(DEVICE, bf16)
    check_loops(names)
    hardware, made = Hardware.measure(setting), make_loops(model, random_size, data_dir, tasks, setting)
    made = replace(made, batch_size=batch_size, steps=steps, max_length=max_length)
    table = run_loops(made, names, rounds, hardware)
    heading = f"{random_size or model}; batch {batch_size} per task; {tasks}; at most {max_length} tokens; "
    heading += f"{steps} steps; no dropout on attention\n"
    costs = {", ".join(names): cost_of(made, names) for names in (list(made.rows)[-1:], list(made.rows))}
    heading += "".join(f"{names}: {cost}\n" for names, cost in costs.items())
    report(setting, f"{heading}{hardware}", table, json_file, hardware=hardware, costs=costs, batch_size=batch_size)


def make_loops(model: str, size: str | None, data_dir: str, tasks: str, setting: Setting) -> Loops:
    rows = {task: load_split(get_tasks([task])[0], data_dir, "train") for task in tasks.split(",")}
    return Loops(model, size, AutoTokenizer.from_pretrained(model), rows, batch_size=1, steps=1, setting=setting)


def run_loops(loops: Loops, names: Sequence[str], rounds: int, hardware: Hardware) -> Table:
    """A line for each loop: speed, memory, and the floor beside."""
    peaks: dict[str, float] = {}

    def run(name: str) -> float:
        seconds, peaks[name] = loops.run(name)
        typer.echo(f"{name}: {loops.steps} steps in {seconds:.1f} s", err=True)  # a later loop may never end
        return seconds

    tasks = {name: list(loops.rows)[-1:] if trains_one(name) else list(loops.rows) for name in names}
    seconds = in_turns({name: partial(run, name) for name in names}, rounds)
    table = speeds(seconds, {name: loops.batch_size * loops.steps * len(tasks[name]) for name in names})
    for name, row in table.items():
        cost = cost_of(loops, tasks[name])
        cost = replace(cost, flops=work_of(name) * cost.flops)
        row["ms_a_step"] = 1e3 * median(seconds[name]) / loops.steps
        row["peak_gb"] = peaks[name] if loops.setting.on_gpu else None
        row |= hardware.beside(row["examples_per_s"], cost, loops.batch_size * len(tasks[name]))
    return table


def cost_of(loops: Loops, names: Sequence[str]) -> Cost:
    """Of an example of these tasks, as many of each, in a plain step."""
    config = minbert_config(loops.model, loops.size, list(names))
    tokens, flops = [], []
    for task in get_tasks([*names]):
        lengths = encode(loops.rows[task.name], task, loops.tokenizer, loops.max_length).row_lengths
        tokens.append(lengths.mean())
        flops.append(PASSES["train"] * forward_flops(config, lengths, task.num_outputs))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MinBertForMultiTask(config).parameters())
    return Cost(float(mean(tokens)), mean(flops), ADAMW_BYTES * parameters)
