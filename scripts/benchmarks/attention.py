"""Measures the attention of one layer with each kernel, on packed sentences of usual lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import typer

from hf_minbert.model.packing import Packing, packed_attention

from .shared import JsonFile, Setting, Table, in_turns, over, report, whole_numbers

LONGEST = 128  # and the width of a batch, as recorded steps have them: `max_length`, whatever the batch's lengths
CALLS = 20  # of a CUDA graph, which takes the time of launches away
Attention = Callable[..., torch.Tensor]


def attention(
    rows: Annotated[str, typer.Option(help="Sentences of a batch; with commas.")] = "32,256",
    tokens: Annotated[float, typer.Option(min=1, max=LONGEST, help="Mean length of a sentence.")] = 30,
    heads: Annotated[int, typer.Option(min=1)] = 12,
    head_size: Annotated[int, typer.Option(min=1)] = 64,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="Of the ways that have it.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way runs, in turns.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Attention of one layer in bf16, forward and backward: flash's, the one for short sentences, and padded."""
    sizes = whole_numbers("--rows", rows)
    if not torch.cuda.is_available():
        raise typer.BadParameter("The kernels run on a GPU, and there is none here.")
    from torch.nn.attention.varlen import varlen_attn

    from hf_minbert.model.short_attention import HEAD_SIZES, short_attention

    if head_size not in HEAD_SIZES:
        raise typer.BadParameter(f"--head-size must be one of {HEAD_SIZES}. Found {head_size}.")
    setting, scaling = Setting("cuda", bf16=True), head_size**-0.5
    table: Table = {}
    for count in sizes:
        packing = packed(count, tokens)
        starts = packing.starts
        ways: dict[str, Attention] = {
            "flash": lambda *given, starts=starts: varlen_attn(
                *given, starts, starts, LONGEST, LONGEST, scale=scaling
            ),
            "short": lambda *given, starts=starts: short_attention(*given, starts, LONGEST, 0.0, scaling),
            "short, dropout": lambda *given, starts=starts: short_attention(*given, starts, LONGEST, dropout, scaling),
            "padded, dropout": lambda *given, packing=packing: packed_attention(
                *(one.transpose(0, 1)[None] for one in given), packing, dropout, scaling, fused=False
            )[0],
        }  # fmt: skip
        states = torch.randn(4, len(packing.tokens), heads, head_size, device="cuda", dtype=torch.bfloat16).unbind()
        runs = {
            (name, backward): recorded(_passes(way, states, backward), setting)
            for name, way in ways.items()
            for backward in (False, True)
        }
        seconds = in_turns(runs, rounds, warm_up=3)
        for name in ways:
            both = seconds[name, True]
            table[f"{count} rows, {len(packing.tokens):,} tokens: {name}"] = {
                "seconds": both, "us_forward": 1e6 * float(np.median(seconds[name, False])),
                "us_both": 1e6 * float(np.median(both)), "us_fastest": 1e6 * min(both),
                "time_over_flash": over({way: seconds[way, True] for way in ways}, name, "flash"),
            }  # fmt: skip
    heading = f"{heads} heads of {head_size}; sentences of {tokens:g} tokens in the mean; dropout {dropout:g}"
    report(setting, heading, table, json_file)


def packed(rows: int, tokens: float) -> Packing:
    """Sentences of random lengths with about this mean."""
    lengths = np.random.default_rng(0).gamma(6, tokens / 6, rows).round().clip(1, LONGEST)
    described = Packing.describe(np.arange(LONGEST) < lengths[:, None])
    on_gpu = {name: described[name].cuda() for name in ("tokens", "starts")}
    return Packing(shape=(rows, LONGEST), **on_gpu, longest=LONGEST)


def _passes(way: Attention, states: tuple, backward: bool) -> Callable[[], None]:
    leaves = [one.clone().requires_grad_(backward) for one in states[:3]]

    def run() -> None:
        mixed = way(*leaves)
        if backward:
            torch.autograd.grad(mixed, leaves, states[3])

    return run


def recorded(run: Callable[[], None], setting: Setting) -> Callable[[], float]:
    """Replays `CALLS` of these, and says how long one of them took in seconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return lambda: setting.seconds_of(graph.replay) / CALLS
