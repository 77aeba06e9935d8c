"""Runs the main comparisons of `train` and `predict` at several batch sizes, and prints one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from .floor import Hardware
from .loops import check_loops
from .predict import Answers, pairs_of, run_ways
from .shared import DEVICE, Bf16, JsonFile, RandomSize, Setting, Table, report, whole_numbers
from .train import DataDir, Model, Steps, make_loops, run_loops

ONE, THREE = "para", "sst,sts,para"
#: What is compared on this machine; the first loop is what the others are compared with.
LOOPS = {
    "cpu": {ONE: "stock,stock-bucketed,cross-encoder,packed", THREE: "packed,packed-pcgrad,packed-smart,naive-pcgrad"},
    "cuda": {ONE: "stock,stock-bucketed,cross-encoder,compiled", THREE: "compiled,pcgrad,smart,naive-pcgrad"},
}[DEVICE]


def everything(
    model: Model,
    random_size: RandomSize = None,
    data_dir: DataDir = "sample",
    batch_sizes: Annotated[
        str, typer.Option(help="Rows of each task in a step, and of prediction; with commas.")
    ] = "8,32,256",
    steps: Steps = 200,
    pairs: Annotated[int, typer.Option(min=1, help="To predict.")] = 4000,
    one_task: Annotated[str, typer.Option(help=f"Loops of `train` that train {ONE}.")] = LOOPS[ONE],
    three_tasks: Annotated[str, typer.Option(help=f"Loops that train {THREE}.")] = LOOPS[THREE],
    rounds: Annotated[int, typer.Option(min=1, help="How often each loop and way runs, in turns.")] = 1,
    bf16: Bf16 = False,
    json_file: JsonFile = None,
) -> None:
    """Training of one task and of three, and prediction, at several batch sizes: one table."""
    setting, plan = Setting(DEVICE, bf16), {ONE: one_task.split(","), THREE: three_tasks.split(",")}
    check_loops([*plan[ONE], *plan[THREE]])
    sizes = whole_numbers("--batch-sizes", batch_sizes)
    hardware, rows = Hardware.measure(setting), pairs_of(data_dir, pairs)
    loops = {tasks: make_loops(model, random_size, data_dir, tasks, setting) for tasks in plan}
    table: Table = {}
    for batch_size in sizes:
        for tasks, names in plan.items():
            made = replace(loops[tasks], batch_size=batch_size, steps=steps)
            found = run_loops(made, names, rounds, hardware)
            table |= {f"train {tasks}, {batch_size}: {name}": row for name, row in found.items()}
        found = run_ways(Answers(model, random_size, batch_size, setting), rows, rounds, hardware)
        table |= {f"predict {ONE}, {batch_size}: {name}": row for name, row in found.items()}
    heading = f"{random_size or model}; {data_dir}; {steps} steps; {pairs:,} pairs\n{hardware}"
    report(setting, heading, table, json_file, hardware=hardware, steps=steps, pairs=pairs)
