"""The fused layer: the plain one in value and gradient, and where the gradients of its weights go.

On a CPU, Triton's interpreter runs the kernels, in a process of its own: Triton reads its setting on import. There for
float16 alone, as NumPy has no bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from test_short_attention import GPU, HEADS, dropout_masks
from test_short_attention import reference as attention_reference
from torch.nn import functional as F
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from hf_minbert import MinBertConfig
from hf_minbert.model import step_weights
from hf_minbert.model.modeling_minbert import MinBertLayer
from hf_minbert.model.packing import Packing
from hf_minbert.model.step_weights import StepWeights

LENGTHS = [5, 1, 9, 2]


def layers_of(hidden=64, wide=80, count=1, device="cpu", dropout=0.0, heads=HEADS):
    """Layers with weights that all matter."""
    torch.manual_seed(0)
    config = MinBertConfig(
        hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layers = torch.nn.ModuleList(MinBertLayer(config) for _ in range(count)).to(device)
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.5 / hidden**0.5)
    for module in layers.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data += 1
    return layers


def packing_of(lengths=LENGTHS, device="cpu", fill=False):
    is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
    described = Packing.describe(is_token, fill)
    moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in described.items()}
    return Packing(shape=is_token.shape, **moved)


def made(packing, hidden, device="cpu"):
    """Random states, and the gradient of the result: 0 for fillers, [1, S, H]."""
    torch.manual_seed(1)
    states, slope = torch.randn(2, 1, len(packing.tokens), hidden, device=device)
    is_token = packing.tokens < packing.shape[0] * packing.shape[1]
    return states, slope * is_token[None, :, None]


def fused(layer, states, packing):
    from hf_minbert.model.fused_layer import fused_layer

    return fused_layer(layer, states, packing)


def plain(layer, states, packing):
    attended = layer.attention(states, packing=packing)
    return layer.output(layer.intermediate(attended), attended)


def in_half(device, dtype):
    return torch.autocast(device, dtype=dtype)


def with_gradients(compute, layers, packing, states, slope, precision=None):
    """What comes out, and the gradients of the states and of all weights, in one list."""
    states = states.clone().requires_grad_()
    found = states
    with precision or nullcontext():
        for layer in layers:
            found = compute(layer, found, packing)
    leaves = [states, *(parameter for parameter in layers.parameters() if parameter.requires_grad)]
    is_token = (packing.tokens < packing.shape[0] * packing.shape[1])[None, :, None]
    return [found.detach() * is_token, *torch.autograd.grad((found.float() * slope).sum(), leaves)]


def errors(found, expected, layers):
    """The root mean square of each error, by name, relative to that of what is expected."""
    names = ["value", "states", *(name for name, parameter in layers.named_parameters() if parameter.requires_grad)]
    of_all = zip(names, found, expected, strict=True)
    # The gradient of a key's bias is 0: it adds the same to all scores of a query.
    return {
        name: ((one - other).square().mean() / other.square().mean()).sqrt().item()
        for name, one, other in of_all
        if not name.endswith("key.bias")
    }


def assert_no_worse(ours, autocast, dtype):
    """At most 1.3 times the errors under autocast, whose roundings are as many.

    What is normalised is kept in float16, and rounded for that: twice the error for the gradient of its scale alone.
    """
    for name, error in ours.items():
        worse = 2.5 if name.endswith("LayerNorm.weight") and dtype == torch.float16 else 1.3
        assert error < worse * autocast[name] + 1e-6, (name, error, autocast[name])


def masked(masks, rate):
    """The layer written out, with masks by call: of attention by sentence [A, T, T], and of both outputs [S, H]."""
    waiting = iter(masks)

    def compute(layer, states, packing):
        of_attention, first, second = next(waiting)
        own = layer.attention.self
        query, key, value = (
            project(states)[0].unflatten(-1, (HEADS, -1)) for project in (own.query, own.key, own.value)
        )
        scaled = [mask / (1 - rate) for mask in of_attention]
        mixed = attention_reference(query, key, value, packing.starts, own.scaling, scaled).flatten(1)[None]
        output, attended = layer.attention.output, states
        attended = output.LayerNorm(output.dense(mixed) * first / (1 - rate) + states)
        narrowed = layer.output.dense(layer.intermediate(attended))
        return layer.output.LayerNorm(narrowed * second / (1 - rate) + attended)

    return compute


def masks_of(seed, lengths, hidden, device, dtype, rate):
    """The masks of a call that draws from this seed: where all numbers are 1, those that stay are above the mean."""
    from hf_minbert.model.fused_kernels import add_norm
    from hf_minbert.model.short_attention import drawn_seed

    of_attention = dropout_masks(lengths, hidden // HEADS, dtype, device, rate, seed)
    torch.manual_seed(seed)
    drawn = drawn_seed(torch.device(device))
    ones = torch.ones(sum(lengths), hidden, device=device)
    given = (ones.to(dtype), 0 * ones[0], 0 * ones, ones[0], 0 * ones[0], 1e-5, drawn)
    return of_attention, *(add_norm(*given, stream, rate)[2] > 0 for stream in (1, 2))


# ---- What holds wherever the kernels run


def check_errors(device, dtype, hidden, wide, heads, fill):
    """Two layers err no more than under autocast, whose roundings are as many."""
    packing, layers = packing_of(device=device, fill=fill), layers_of(hidden, wide, 2, device, heads=heads)
    given = (layers, packing, *made(packing, hidden, device))
    expected = with_gradients(plain, *given)
    ours, autocast = (
        errors(with_gradients(way, *given, in_half(device, dtype)), expected, layers) for way in (fused, plain)
    )
    assert_no_worse(ours, autocast, dtype)


def check_dropout(device, dtype, hidden=64, lengths=LENGTHS, rate=0.25):
    """The share that is dropped, no two masks the same, and values and gradients of a reference with these masks."""
    packing, layers = packing_of(lengths, device), layers_of(hidden, device=device, dropout=rate)
    masks = masks_of(7, lengths, hidden, device, dtype, rate)
    first, second = (mask.float() for mask in masks[1:])
    for mask in (first, second):
        assert abs(mask.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / mask.numel()) ** 0.5
        assert len(mask.unique(dim=0)) == len(mask) and len(mask.unique(dim=1).T) > hidden - 3
    assert abs((first * second).mean() - (1 - rate) ** 2) < 4 * 0.5 / first.numel() ** 0.5

    def drawn(*given):
        torch.manual_seed(7)
        return fused(*given)

    given = (layers, packing, *made(packing, hidden, device))
    expected, autocast = (with_gradients(masked([masks], rate), *given, how) for how in (None, in_half(device, dtype)))
    found, again = (with_gradients(drawn, *given, in_half(device, dtype)) for _ in range(2))
    assert_no_worse(*(errors(one, expected, layers) for one in (found, autocast)), dtype)
    assert all(map(torch.equal, found, again))  # nothing depends on the order of programs


def check_weights(device, dtype):
    """Gradients go where they are wanted, and the copies of the weights are what is computed with."""
    packing, (layer,) = packing_of(device=device), layers_of(device=device)
    states, slope = made(packing, 64, device)
    states.requires_grad_()
    parameters = [*layer.parameters()]
    copies = {parameter: parameter.detach().to(dtype) for parameter in parameters}

    def loss_of(**weights):
        with step_weights.in_use(StepWeights(**weights)), in_half(device, dtype):
            return (fused(layer, states, packing) * slope).sum()

    expected = torch.autograd.grad(loss_of(), [states, *parameters])
    apart = {parameter: torch.zeros_like(parameter) for parameter in parameters}
    some = {parameter: torch.zeros_like(parameter) for parameter in parameters[1::3]}
    for gradients in (in_one_array(parameters), apart, some):
        loss = loss_of(gradients=gradients, halves=copies)
        (alone,) = torch.autograd.grad(loss, [states], retain_graph=True)  # the search of an adversarial term
        assert torch.equal(alone, expected[0])
        assert not any(gradient.any() for gradient in gradients.values())
        for times in (1, 2):
            found = torch.autograd.grad(loss, [states, *parameters], allow_unused=True, retain_graph=True)
            for parameter, one, other in zip([states, *parameters], found, expected, strict=True):
                assert (one is None) == (parameter in gradients)
                torch.testing.assert_close(one, other) if one is not None else None
            for parameter, other in zip(parameters, expected[1:], strict=True):
                if parameter in gradients:
                    torch.testing.assert_close(gradients[parameter], times * other)
        loss.backward()
        assert {parameter for parameter in parameters if parameter.grad is None} == gradients.keys()
        layer.zero_grad()

    before = loss_of()
    assert torch.equal(loss_of(halves=copies), before)
    copies[layer.attention.self.key.weight].mul_(2)
    assert not torch.equal(loss_of(halves=copies), before)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    assert torch.equal(loss_of(halves={p: copy.to(other) for p, copy in copies.items()}), before)


def in_one_array(parameters):
    """Memory for gradients in the order that `StepWeights` asks for."""
    ordered = sorted(parameters, key=lambda parameter: -parameter.dim())
    parts = torch.zeros(sum(p.numel() for p in ordered), device=ordered[0].device).split([p.numel() for p in ordered])
    return {parameter: part.view_as(parameter) for parameter, part in zip(ordered, parts, strict=True)}


def check_frozen(device, dtype):
    packing, layers = packing_of(device=device), layers_of(device=device)
    given = (layers, packing, *made(packing, 64, device), in_half(device, dtype))
    whole = with_gradients(fused, *given)
    for kept in ("bias", "query.weight", "LayerNorm"):
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(kept in name)
        some = with_gradients(fused, *given)
        names = ["value", "states", *(name for name, _ in layers.named_parameters())]
        expected = [one for name, one in zip(names, whole, strict=True) if kept in name or name in names[:2]]
        torch.testing.assert_close(some, expected)
    layers.requires_grad_(False)
    assert torch.equal(with_gradients(fused, *given)[1], whole[1])
    with torch.no_grad(), in_half(device, dtype):
        assert not fused(layers[0], given[2], packing).requires_grad


def check_it_is_differentiated_once(device, dtype):
    packing, (layer,) = packing_of(device=device), layers_of(device=device)
    states, slope = made(packing, 64, device)
    states.requires_grad_()
    with in_half(device, dtype):
        found = fused(layer, states, packing)
    with pytest.raises(RuntimeError, match="can be differentiated once.*eager"):
        torch.autograd.grad(found, states, slope, create_graph=True)


def in_the_interpreter():
    for hidden, wide, heads, fill in ((48, 1040, 3, False), (32, 40, 2, True)):
        check_errors("cpu", torch.float16, hidden, wide, heads, fill)
    check_dropout("cpu", torch.float16)
    check_weights("cpu", torch.float16)
    check_frozen("cpu", torch.float16)
    check_it_is_differentiated_once("cpu", torch.float16)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which builds of torch for CPUs do not bring")
def test_the_layer_in_the_interpreter():
    child = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    child += f"import {Path(__file__).stem} as tests; tests.in_the_interpreter(); print('done')"
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child], env=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
