"""The command that measures one layer of the encoder alone: packed sentences of usual lengths, fused and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import typer

from hf_minbert import MinBertConfig
from hf_minbert.model.modeling_minbert import MinBertLayer
from hf_minbert.model.step_weights import StepWeights, in_use

from .attention import packed, recorded
from .shared import JsonFile, Setting, Table, in_turns, over, report, whole_numbers


def layer(
    rows: Annotated[str, typer.Option(help="Sentences of a batch; with commas.")] = "32,256",
    tokens: Annotated[float, typer.Option(min=1, max=128, help="Mean length of a sentence.")] = 30,
    hidden: Annotated[int, typer.Option(min=16, help="Hidden size; four times as wide in the middle.")] = 768,
    heads: Annotated[int, typer.Option(min=1)] = 12,
    dropout: Annotated[float, typer.Option(min=0, max=0.9)] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way runs, in turns.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """A layer in bf16 autocast, forward and backward: plain, fused, and fused with a trainer's copies and memory."""
    sizes = whole_numbers("--rows", rows)
    if not torch.cuda.is_available():
        raise typer.BadParameter("The kernels run on a GPU, and there is none here.")
    config = MinBertConfig(
        hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module, setting = MinBertLayer(config).cuda(), Setting("cuda", bf16=True)
    parameters, kept = [*module.parameters()], _weights(module)
    table: Table = {}
    for count in sizes:
        packing = packed(count, tokens)
        states, slope = torch.randn(2, 1, len(packing.tokens), hidden, device="cuda")
        states.requires_grad_()

        def way(weights: StepWeights, compute: Callable, backward: bool, states=states, slope=slope, packing=packing):
            def run() -> None:
                with in_use(weights), setting.autocast():
                    output = compute(states, packing)
                if backward:
                    torch.autograd.grad(output, [states, *parameters], slope, allow_unused=True)

            return recorded(run, setting)

        ways = {"plain": (StepWeights(), _plain(module)), "fused": (StepWeights(), _fused(module))}
        ways["fused, kept weights"] = (kept, _fused(module))
        runs = {(name, both): way(*given, both) for name, given in ways.items() for both in (False, True)}
        seconds = in_turns(runs, rounds, warm_up=3)
        for name in ways:
            table[f"{count} rows, {len(packing.tokens):,} tokens: {name}"] = {
                "seconds": seconds[name, True], "us_forward": 1e6 * float(np.median(seconds[name, False])),
                "us_both": 1e6 * float(np.median(seconds[name, True])), "us_fastest": 1e6 * min(seconds[name, True]),
                "time_over_plain": over({one: seconds[one, True] for one in ways}, name, "plain"),
            }  # fmt: skip
    report(setting, f"{heads} heads of {hidden // heads}; dropout {dropout:g}", table, json_file)


def _plain(module: MinBertLayer) -> Callable:
    def compute(states: torch.Tensor, packing) -> torch.Tensor:
        attended = module.attention(states, packing=packing)
        return module.output(module.intermediate(attended), attended)

    return compute


def _fused(module: MinBertLayer) -> Callable:
    from hf_minbert.model.fused_layer import fits, fused_layer

    def compute(states: torch.Tensor, packing) -> torch.Tensor:
        if not fits(module, states, packing):
            raise typer.BadParameter("The fused layer cannot compute a layer of these sizes here.")
        return fused_layer(module, states, packing)

    return compute


def _weights(module: MinBertLayer) -> StepWeights:
    """Copies in bf16, and memory for the gradients, each in one array: matrices first."""
    ordered = sorted(module.parameters(), key=lambda parameter: -parameter.dim())
    flat = torch.cat([parameter.detach().flatten() for parameter in ordered])
    arrays = flat.bfloat16(), torch.zeros_like(flat)
    halves, gradients = (
        {parameter: part.view_as(parameter) for parameter, part in zip(ordered, parts, strict=True)}
        for parts in (array.split([parameter.numel() for parameter in ordered]) for array in arrays)
    )
    return StepWeights(halves, gradients)
