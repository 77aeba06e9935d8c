"""Measures one training step: beside the stock classes, with SMART, with surgery, and with shared rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import BertForSequenceClassification

from hf_minbert import TASKS as TASKS_OF_PACKAGE
from hf_minbert.training.terms.base import NoiseKey
from hf_minbert.training.terms.smart import Smart

from .models import (
    Batch,
    make_minbert,
    make_stock,
    naive_step,
    plain_step,
    random_batch,
    sample_batch,
    sharing_step,
    surgery_step,
)
from .shared import (
    DEVICE,
    WARM_UP,
    Bf16,
    Device,
    JsonFile,
    Setting,
    Table,
    bert_checkpoint,
    in_turns,
    over,
    report,
    step_times,
)

TASKS = ("sst", "para", "sts")

Model = Annotated[
    str | None,
    typer.Option(
        help="A BERT checkpoint, on sentences of the sample. Without one, random weights.", callback=bert_checkpoint
    ),
]
Size = Annotated[Literal["base", "tiny"], typer.Option(help="Shape of the random weights.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of each task.")]
Length = Annotated[int, typer.Option(min=2, max=512, help="Tokens of the longest row, where they are random.")]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each kind.")]
AtMost = Annotated[float | None, typer.Option(help="Exit with status 1 if the ratio of the two is above this.")]

Run = Callable[[], None]


def step(
    model: Annotated[
        str | None, typer.Option(help="A BERT checkpoint. Without one, random weights.", callback=bert_checkpoint)
    ] = None,
    size: Size = "base",
    batch_size: BatchSize = 32,
    length: Length = 64,
    steps: Steps = 20,
    bf16: Bf16 = False,
    device: Device = DEVICE,
    at_most: AtMost = None,
    json_file: JsonFile = None,
) -> None:
    """One training step (forward, backward, AdamW) of MinBertForMultiTask and of BertForSequenceClassification."""
    torch.manual_seed(0)
    setting = Setting(device, bf16)
    models = {"minbert": make_minbert(model, size), "stock": make_stock(model, size)}
    batch = random_batch(batch_size, length, models["stock"].config.vocab_size, device)
    calls = {"minbert": {**batch, "task": "sst"}, "stock": batch}
    runs = {
        name: plain_step(m.to(device).train(), lambda m=m, name=name: m(**calls[name]).loss, setting)
        for name, m in models.items()
    }
    table = _measure(setting, runs, steps, "stock")
    for name, row in table.items():
        row["parameters"] = sum(p.numel() for p in models[name].parameters())
    heading = f"{_weights(model, size)}; batch {batch_size} x {length} tokens, half of the rows shorter"
    report(setting, heading, table, json_file)
    _check(table["minbert"]["time_over_stock"], at_most)


def smart(
    model: Model = None,
    size: Size = "base",
    batch_size: BatchSize = 32,
    steps: Steps = 20,
    bf16: Bf16 = False,
    peer: Annotated[
        bool, typer.Option("--peer", help="With smart-pytorch, around the stock model; it must be installed.")
    ] = False,
    device: Device = DEVICE,
    at_most: AtMost = None,
    json_file: JsonFile = None,
) -> None:
    """One training step (forward, backward, AdamW) of sst, plain and with SMART's term: time and memory."""
    if peer and find_spec("smart_pytorch") is None:
        raise typer.BadParameter("--peer needs `pip install smart-pytorch`. Or leave it out.")
    torch.manual_seed(0)
    setting = Setting(device, bf16)
    minbert = make_minbert(model, size).to(device).train()
    if model is None:
        batch = random_batch(batch_size, 64, minbert.config.vocab_size, device)
    else:
        batch = sample_batch(model, batch_size, device)
    call = {**batch, "task": "sst"}
    losses = {
        "plain": (minbert, lambda: minbert(**call).loss),
        "smart": (minbert, lambda: Smart()(minbert, call, NoiseKey(0, 0, 0)).loss),
    }
    if peer:
        stock = make_stock(model, size).to(device).train()
        losses["stock"] = (stock, lambda: stock(**batch).loss)
        losses["smart-pytorch"] = (stock, _peer_loss(stock, batch))
    runs = {name: plain_step(*given, setting) for name, given in losses.items()}
    table = _measure(setting, runs, steps, "plain")
    if peer:
        seconds = {name: row["seconds"] for name, row in table.items()}
        table["smart-pytorch"]["time_over_stock"] = over(seconds, "smart-pytorch", "stock")
    if setting.on_gpu:
        for name, row in table.items():  # beside weights and optimizer
            row["working_gb"] = _working_memory(runs[name], device) / 1e9
    rows, tokens = batch["input_ids"].shape
    report(setting, f"{_weights(model, size)}; batch {rows} x {tokens} tokens, padding included", table, json_file)
    _check(table["smart"]["time_over_plain"], at_most)


def surgery(
    model: Model = None,
    size: Size = "base",
    batch_size: BatchSize = 32,
    length: Length = 64,
    steps: Steps = 20,
    bf16: Bf16 = False,
    device: Device = DEVICE,
    at_most: AtMost = None,
    json_file: JsonFile = None,
) -> None:
    """One training step (forward, backward, AdamW) of three tasks, summed and by surgery: time and memory."""
    torch.manual_seed(0)
    setting = Setting(device, bf16)
    minbert = make_minbert(model, size, TASKS).to(device).train()
    calls = [{**_task_batch(model, batch_size, length, minbert, task), "task": task} for task in TASKS]
    makers = {
        name: lambda name=name: surgery_step(minbert, calls, name, setting) for name in ("sum", "pcgrad", "gradvac")
    }
    makers["naive"] = lambda: naive_step(minbert, calls, setting)
    # Memory first, each by itself: later all optimizers and rows are there at once.
    peaks = {name: _peak_memory(make, device) for name, make in makers.items()} if setting.on_gpu else {}
    table = _measure(setting, {name: make() for name, make in makers.items()}, steps, "sum")
    shared = sum(p.numel() for name, p in minbert.named_parameters() if not name.startswith("heads."))
    for name, peak in peaks.items():
        extra = (peak - peaks["sum"]) / shared
        table[name] |= {"peak_gb": peak / 1e9, "bytes_per_shared_parameter": extra}
    shapes = ", ".join(f"{call['task']} {' x '.join(map(str, call['input_ids'].shape))}" for call in calls)
    heading = f"{_weights(model, size)}; {shapes} tokens; {shared / 1e6:.2f}M shared parameters"
    report(setting, heading, table, json_file)
    _check(table["pcgrad"]["time_over_sum"], at_most)


def sharing(
    model: Model = None,
    size: Size = "base",
    tasks: Annotated[int, typer.Option(min=2, help="How many tasks have a label for each row.")] = 2,
    batch_size: BatchSize = 32,
    length: Length = 64,
    steps: Steps = 20,
    bf16: Bf16 = False,
    device: Device = DEVICE,
    at_most: AtMost = None,
    json_file: JsonFile = None,
) -> None:
    """One training step (forward, backward, AdamW) of tasks with the same rows: a pass for each, and one for all."""
    torch.manual_seed(0)
    setting, names = Setting(device, bf16), [f"sst{number}" for number in range(1, tasks + 1)]
    minbert = make_minbert(model, size, dict.fromkeys(names, TASKS_OF_PACKAGE["sst"])).to(device).train()
    batch = _task_batch(model, batch_size, length, minbert, "sst")
    calls, runs = [{**batch, "task": name} for name in names], {}
    for aggregator in ("sum", "pcgrad"):
        runs[aggregator] = surgery_step(minbert, calls, aggregator, setting)
        runs[f"{aggregator}, shared"] = sharing_step(minbert, names, batch, aggregator, setting)
    table = _measure(setting, runs, steps, "sum")
    seconds = {name: row["seconds"] for name, row in table.items()}
    for aggregator in ("sum", "pcgrad"):
        shared = f"{aggregator}, shared"
        table[shared]["time_over_separate"] = over(seconds, shared, aggregator)
    rows, tokens = batch["input_ids"].shape
    heading = f"{_weights(model, size)}; {tasks} tasks; batch {rows} x {tokens} tokens, padding included"
    report(setting, heading, table, json_file)
    _check(table["sum, shared"]["time_over_separate"], at_most)


def _measure(setting: Setting, runs: Mapping[str, Run], steps: int, first: str) -> Table:
    timed = {name: partial(setting.seconds_of, run) for name, run in runs.items()}
    return step_times(in_turns(timed, steps, WARM_UP), first)


def _check(ratio: float, at_most: float | None) -> None:
    if at_most is not None and ratio > at_most:
        typer.echo(f"The ratio is above {at_most}.", err=True)
        raise typer.Exit(1)


def _weights(model: str | Path | None, size: str) -> str:
    return str(model or f"random weights, {size}")


def _task_batch(model: str | None, batch_size: int, length: int, minbert: Any, task: str) -> Batch:
    device = str(minbert.device)
    if model is not None:
        return sample_batch(model, batch_size, device, task)
    return random_batch(batch_size, length, minbert.config.vocab_size, device, task)


def _peer_loss(model: BertForSequenceClassification, batch: Batch) -> Callable[[], torch.Tensor]:
    """The loss with smart-pytorch's term, used as its README does."""
    from smart_pytorch import SMARTLoss, kl_loss, sym_kl_loss

    rest = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
    term = SMARTLoss(lambda words: model(inputs_embeds=words, **rest).logits, kl_loss, sym_kl_loss)

    def compute() -> torch.Tensor:
        words = model.bert.embeddings(batch["input_ids"], batch["token_type_ids"])
        outputs = model(inputs_embeds=words, labels=batch["labels"], **rest)
        return outputs.loss + 0.02 * term(words, outputs.logits)

    return compute


def _working_memory(run: Run, device: str) -> int:
    """What a step takes beside what is there before and after it."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_memory(make: Callable[[], Run], device: str) -> int:
    """The GPU's memory at its fullest over some steps, with this one's optimizer and gradients alone."""
    gc.collect()
    torch.cuda.empty_cache()
    run = make()
    for _ in range(WARM_UP):
        run()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)
