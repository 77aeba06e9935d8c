"""Attention of short sentences: torch's own in value and gradient, and a dropout mask that both passes share.

On a CPU, Triton's interpreter runs the kernels, in a process of its own: Triton reads its setting on import.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from hf_minbert.model.packing import Packing, packed_attention

HEADS = 2
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def made(lengths, size, dtype, device):
    """Random query, key, value and gradient of the result, [S, A, D]; and where the sentences start."""
    torch.manual_seed(0)
    states = [torch.randn(sum(lengths), HEADS, size).to(dtype).to(device) for _ in range(4)]
    return *states, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def random_lengths(count, longest):
    return [longest, *np.random.default_rng(0).integers(1, longest + 1, count).tolist()]


def reference(query, key, value, starts, scaling, masks=None):
    """Written out in float32; `masks` are by sentence [A, T, T], what dropout leaves, divided by the rate of it."""
    mixed, places = [], starts.tolist()
    for number, (start, end) in enumerate(zip(places, places[1:], strict=False)):
        q, k, v = (states[start:end].transpose(0, 1).float() for states in (query, key, value))  # [A, T, D]
        weights = (q @ k.mT * scaling).softmax(dim=-1)
        mixed.append(((weights if masks is None else weights * masks[number]) @ v).transpose(0, 1))
    return torch.cat(mixed)


def with_gradients(attention, query, key, value, slope):
    """What comes out, and the gradients of all three."""
    leaves = [states.detach().clone().requires_grad_() for states in (query, key, value)]
    mixed = attention(*leaves)
    return [found.float() for found in (mixed.detach(), *torch.autograd.grad(mixed, leaves, slope.to(mixed.dtype)))]


def errors(found, expected):
    """The root mean square and the largest error of each, relative to the root mean square of what is expected."""
    sizes = [(one - other) / other.square().mean().sqrt() for one, other in zip(found, expected, strict=True)]
    return torch.tensor([[size.square().mean().sqrt(), size.abs().max()] for size in sizes])


def dropout_masks(lengths, size, dtype, device, rate, seed=7):
    """The masks that dropout draws from this seed: probabilities are equal, values say which key is whose."""
    from hf_minbert.model.short_attention import LONGEST, short_attention

    *_, starts = made(lengths, size, dtype, device)
    masks = [torch.zeros(HEADS, length, length, device=device) for length in lengths]
    nothing = torch.zeros(sum(lengths), HEADS, size, dtype=dtype, device=device)
    places = torch.cat([torch.arange(length) for length in lengths]).to(device)
    for first in range(0, LONGEST, size):
        value = (places[:, None] - first == torch.arange(size, device=device))[:, None].expand_as(nothing).to(dtype)
        torch.manual_seed(seed)
        mixed = short_attention(nothing, nothing, value, starts, LONGEST, rate, 1.0)
        for mask, length, part in zip(masks, lengths, mixed.split(lengths), strict=True):
            width = max(0, min(size, length - first))
            mask[:, :, first : first + width] = part[:, :, :width].transpose(0, 1) != 0
    return masks


# ---- What holds wherever the kernels run; in the interpreter for float16 alone, as NumPy has no bfloat16


def check_dropout(device, dtype, size, lengths, rate=0.25):
    """The share that it drops, no two masks the same, and values and gradients of a reference with the same masks."""
    from hf_minbert.model.short_attention import LONGEST, short_attention

    masks = dropout_masks(lengths, size, dtype, device, rate)
    drawn = torch.cat([mask.flatten() for mask in masks])
    assert abs(drawn.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / len(drawn)) ** 0.5
    of_heads = [head for mask in masks if len(mask[0]) == max(lengths) for head in mask]
    assert not any(torch.equal(one, other) for n, one in enumerate(of_heads) for other in of_heads[:n])
    rows = torch.cat([mask.mean(dim=-1).flatten() for mask in masks if mask.shape[-1] > 30])
    assert rows.min() > 0.25 and rows.max() <= 1  # no query is left out
    query, key, value, slope, starts = made(lengths, size, dtype, device)

    def fused(query, key, value):
        torch.manual_seed(7)
        return short_attention(query, key, value, starts, LONGEST, rate, size**-0.5)

    scaled = [mask / (1 - rate) for mask in masks]
    expected = with_gradients(lambda *given: reference(*given, starts, size**-0.5, scaled), query, key, value, slope)
    rms, largest = errors(with_gradients(fused, query, key, value, slope), expected).unbind(1)
    precision = torch.finfo(dtype).eps
    assert (rms < 2 * precision).all() and (largest < 40 * precision).all(), (rms, largest)


def check_no_dropout(device, dtype, size, lengths):
    from hf_minbert.model.short_attention import short_attention

    query, key, value, slope, starts = made(lengths, size, dtype, device)
    expected = with_gradients(lambda *given: reference(*given, starts, 0.2), query, key, value, slope)
    found = with_gradients(
        lambda *given: short_attention(*given, starts, max(lengths), 0.0, 0.2), query, key, value, slope
    )
    rms, largest = errors(found, expected).unbind(1)
    precision = torch.finfo(dtype).eps
    assert (rms < 2 * precision).all() and (largest < 40 * precision).all(), (rms, largest)


def check_operator(device, dtype):
    """What torch asks of an operator: its schema, its fake, its gradient under tracing. It has one derivative."""
    from hf_minbert.model import short_attention

    query, key, value, slope, starts = made([5, 0, 2], 16, dtype, device)
    seed = torch.tensor([5], device=device)
    for states in ((query, key, value), [states.clone().requires_grad_() for states in (query, key, value)]):
        torch.library.opcheck(short_attention._attention, (*states, starts, seed, 32, 0.5, 0.25))
    (first,) = torch.autograd.grad(
        short_attention.short_attention(*states, starts, 5, 0.0, 0.25), states[0], slope, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.sum(), states[0])


def in_the_interpreter():
    check_operator("cpu", torch.float16)
    check_dropout("cpu", torch.float16, 64, [17, 33, 0, 70, 1])
    for lengths in ([32, 0, 1], [33, 64, 0], [65, 128, 4]):
        check_no_dropout("cpu", torch.float16, 16, lengths)
    check_no_dropout("cpu", torch.float16, 128, [20, 40])


def as_module(name):
    """Another copy of the file, as a saved model has it."""
    from hf_minbert.model import short_attention

    spec = spec_from_file_location(name, short_attention.__file__)
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_it_travels_with_a_model_and_requires_no_triton(caplog):
    """The module of a saved model registers operators of its own: both may be loaded in one process."""
    with caplog.at_level(logging.WARNING):
        saved = as_module("saved_model-1.short_attention")
    file = Path(saved.__file__)
    assert get_relative_imports(file.with_name("packing.py")) == [file.stem]
    assert set(get_imports(file)) - sys.stdlib_module_names == {"torch"}
    assert hasattr(torch.ops.saved_model_1_short_attention, "attention")
    query = torch.zeros(3, 1, 16)
    assert ("Triton cannot be used" in caplog.text) == (find_spec("triton") is None) != saved.fits(query, 3)
    assert not saved.fits(query, 129) and not saved.fits(torch.zeros(3, 1, 24), 3)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which builds of torch for CPUs do not bring")
def test_the_kernels_in_the_interpreter():
    child = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    child += f"import {Path(__file__).stem} as tests; tests.in_the_interpreter(); print('done')"
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child], env=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


# ---- On a GPU


@pytest.fixture
def taken(monkeypatch):
    """Which fused kernels `packed_attention` has taken."""
    from torch.nn.attention import varlen

    from hf_minbert.model import short_attention

    names = []
    for module, name in ((short_attention, "short_attention"), (varlen, "varlen_attn")):
        function = getattr(module, name)
        spy = lambda *args, function=function, name=name, **kw: (names.append(name), function(*args, **kw))[1]  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    return names


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("size", "longest"), [(16, 128), (32, 128), (64, 128), (64, 64), (64, 32), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_exact_as_flash_attention(dtype, size, longest):
    """At most 1.2 times the root mean square of flash's error, and 2 times the largest."""
    from torch.nn.attention.varlen import varlen_attn

    from hf_minbert.model.short_attention import short_attention

    lengths, scaling = random_lengths(50, longest), size**-0.5
    query, key, value, slope, starts = made(lengths, size, dtype, "cuda")
    others = (starts, starts, longest, longest)
    expected, flash, ours = (
        with_gradients(attention, query, key, value, slope)
        for attention in (
            lambda *given: reference(*given, starts, scaling),
            lambda *given: varlen_attn(*given, *others, scale=scaling),
            lambda *given: short_attention(*given, starts, longest, 0.0, scaling),
        )
    )
    ratio = errors(ours, expected) / errors(flash, expected)
    assert (ratio < torch.tensor([1.2, 2.0])).all(), ratio


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [32, 64])
def test_dropout_on_a_gpu(dtype, size):
    check_dropout("cuda", dtype, size, [30, 128, 0, 61, 128, 1, 97, 32])


@pytest.mark.gpu
@GPU
def test_the_operator_on_a_gpu():
    check_operator("cuda", torch.bfloat16)


@pytest.mark.gpu
@GPU
def test_a_triton_that_cannot_compile_is_said_and_not_used(caplog):
    from triton.runtime import driver

    class Broken:
        def get_current_target(self):
            raise RuntimeError("Failed to find C compiler.")

    driver.set_active(Broken())
    try:
        saved = as_module("without_compiler.short_attention")
    finally:
        driver.reset_active()
    assert "Failed to find C compiler." in caplog.text and not saved.fits(torch.zeros(3, 1, 16), 3)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("width", "dropout", "fused", "expected"),
    [
        (128, 0.0, True, ["short_attention"]),
        (128, 0.1, True, ["short_attention"]),
        (512, 0.0, True, ["varlen_attn"]),
        (512, 0.1, True, []),
        (128, 0.0, False, []),
    ],
)
@pytest.mark.parametrize("fill", [False, True])
def test_packed_batches_take_the_kernel_that_fits(taken, width, dropout, fused, expected, fill):
    """And get what padded sentences get; fillers change no answer, and have no gradient."""
    is_token = np.arange(width) < np.array(random_lengths(20, width))[:, None]
    described = Packing.describe(is_token, fill)
    described = {name: value.cuda() if torch.is_tensor(value) else value for name, value in described.items()}
    packing = Packing(shape=is_token.shape, **described)
    torch.manual_seed(0)
    states = torch.randn(4, 1, 2, len(packing.tokens), 64, device="cuda", dtype=torch.bfloat16)
    slope = packing.pack(packing.unpack(states[3].transpose(1, 2)))  # the last real token's at fillers, and then
    slope[:, packing.tokens == is_token.size] = 0

    def attention(*states, fused=fused, dropout=dropout):
        return packed_attention(*states, packing, dropout, 0.125, fused)

    found = with_gradients(attention, *states[:3], slope)
    assert taken == expected
    if not dropout:
        exact = with_gradients(
            lambda *given: attention(*(one.float() for one in given), fused=False), *states[:3], slope.float()
        )
        tokens = packing.tokens < is_token.size
        mixed, *gradients = zip(found, exact, strict=True)
        for one, other in ((found[0][:, tokens], exact[0][:, tokens]), *gradients):
            torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
        for gradient in found[1:]:
            assert not gradient[:, :, ~tokens].any()


@pytest.mark.gpu
@GPU
def test_replays_draw_new_masks_and_both_passes_have_the_same_one():
    from hf_minbert.model.short_attention import short_attention

    lengths = [30, 128, 61]
    _, _, value, slope, starts = made(lengths, 64, torch.bfloat16, "cuda")
    nothing = torch.zeros_like(value)
    key_of = torch.cat([torch.arange(length) for length in lengths]).cuda()
    value = (key_of[:, None] % 64 == torch.arange(64, device="cuda"))[:, None].expand_as(value).bfloat16()
    value = value.contiguous().requires_grad_()

    def passes():
        mixed = short_attention(nothing, nothing, value, starts, 128, 0.5, 1.0)
        return mixed, *torch.autograd.grad(mixed, value, slope)

    passes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, gradient = passes()
    seen = []
    for _ in range(4):
        graph.replay()
        # The first sentence is no longer than a head is wide: what comes out are its probabilities, after dropout.
        weights = mixed[:30, :, :30].float().transpose(0, 1)  # [A, T, T]
        expected = (weights.mT @ slope[:30].float().transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(gradient[:30].float(), expected, atol=0.01, rtol=0.02)
        seen.append(mixed.clone())
    assert not any(torch.equal(one, other) for n, one in enumerate(seen) for other in seen[:n])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_is_compiled_without_a_break(dropout):
    from hf_minbert.model.short_attention import short_attention

    torch._dynamo.reset()
    query, key, value, slope, starts = made([30, 61, 4], 64, torch.bfloat16, "cuda")

    def attention(*given):
        return short_attention(*(2 * states for states in given), starts, 61, dropout, 0.125)

    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    found = with_gradients(compiled, query, key, value, slope)
    if dropout:
        assert not torch.equal(found[0], with_gradients(compiled, query, key, value, slope)[0])
    else:
        torch.testing.assert_close(found, with_gradients(attention, query, key, value, slope), atol=0.03, rtol=0.03)
    torch._dynamo.reset()
