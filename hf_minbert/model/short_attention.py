"""Attention within short sentences of a packed batch, on an NVIDIA or AMD GPU: a Triton kernel for each direction.

The variable-length flash kernel processes 128 queries at a time. For a sentence of 30 tokens, most of such a tile is
empty. Here one program computes one head of one sentence, in tiles that depend on the sentence's length. It reads the
length on the GPU, because a CUDA graph has one grid while lengths differ between replays.

This file is uploaded to the Hub with a model. It may import only published libraries. Letters in shapes: N sentences,
S tokens of all sentences, A attention heads, D head size, R and C queries and keys of a tile.
"""

from __future__ import annotations

import logging
import re
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

# In a `try`, so that it is no requirement of the model's code on the Hub: builds of torch for CPUs do not bring it.
try:
    import triton
    import triton.language as tl

    if torch.cuda.is_available():
        triton.runtime.driver.active.get_current_target()  # builds its launcher, for which it needs a C compiler
except (ImportError, OSError, RuntimeError, CalledProcessError) as error:
    triton = None
    logging.getLogger(__name__).warning(
        "Triton cannot be used, so attention in packed batches runs torch's kernels. They are slower for short "
        "sentences and, with `attention_probs_dropout_prob` above 0, compute on padding: %s",
        error,
    )

#: Tokens of a sentence that a program takes at most, and head sizes that it knows.
LONGEST, HEAD_SIZES = 128, (16, 32, 64, 128)
_SEEDS = 2**62
#: A saved model's copy of this file registers operators of its own.
_NAMESPACE = re.sub(r"\W", "_", __name__)


def fits(query: Tensor, longest: int) -> bool:
    """Whether `short_attention` supports these queries, [S, A, D], of sentences with at most `longest` tokens."""
    return triton is not None and longest <= LONGEST and query.shape[-1] in HEAD_SIZES


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, dropout: float, scaling: float
) -> Tensor:
    """Scaled dot-product attention within each sentence (Vaswani et al. 2017, arXiv:1706.03762, equation 1).

    It can be differentiated once. With dropout, each call draws a seed from torch's generator of the device. The
    backward pass recomputes the mask from this seed.

    Args:
        query, key, value: [S, A, D], float16 or bfloat16. Sums are float32.
        starts: int32 [N + 1], where each sentence begins, and S.
        longest: an upper bound on the tokens of a sentence; at most `LONGEST`.
        dropout: the share of the attention probabilities that is set to 0.

    Returns:
        the mixed values, [S, A, D].
    """
    seed = drawn_seed(query.device) if dropout else None
    states = (states.contiguous() for states in (query, key, value))
    mixed, _ = _attention(*states, starts, seed, longest, dropout, scaling)
    return mixed


def drawn_seed(device: torch.device) -> Tensor:
    """Of dropout, int64 [1]. Not drawn in a kernel: a CUDA graph's replay, and a repeating pass, set the generator."""
    return torch.randint(_SEEDS, (1,), device=device)


# ---- The operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    longest: int,
    dropout: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The mixed values, and the binary logarithms of the softmax's denominators, [S, A]."""
    mixed, log_sums = _attention_like(query, key, value, starts, seed, longest, dropout, scaling)
    launch(forward_kernel, (query, key, value, mixed, log_sums), query, starts, seed, longest, dropout, scaling)
    return mixed, log_sums


@_attention.register_fake
def _attention_like(query, key, value, starts, seed, longest, dropout, scaling):
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _attention_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    longest: int,
    dropout: float,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the mixed values."""
    slopes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    states = (slope, query, key, value, mixed, log_sums, *slopes)
    launch(backward_kernel, states, query, starts, seed, longest, dropout, scaling)
    return slopes


@_attention_backward.register_fake
def _attention_backward_like(slope, query, key, value, *others):
    return tuple(map(torch.empty_like, (query, key, value)))


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *states, ctx.longest, ctx.dropout, ctx.scaling = inputs
    ctx.save_for_backward(*states, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, slope: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, starts, seed, mixed, log_sums = ctx.saved_tensors
    given = (slope.contiguous(), query, key, value, mixed, log_sums, starts, seed)
    slopes = _attention_backward(*given, ctx.longest, ctx.dropout, ctx.scaling)
    return (*slopes, None, None, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_keep)


def launch(
    kernel: Any,
    states: tuple[Tensor, ...],
    query: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    longest: int,
    dropout: float,
    scaling: float,
) -> None:
    _, heads, size = query.shape
    step = query.stride(0) // size  # more than the heads where queries, keys and values share rows
    programs = (len(starts) - 1) * heads
    if not programs:
        return
    longest = max(32, 1 << (longest - 1).bit_length())  # branches for longer sentences are left out
    factor = 1 / (1 - dropout) if dropout < 1 else 0.0  # on what dropout keeps
    constants = (scaling, dropout, factor, size, longest, bool(dropout))
    options = {"num_warps": 4 if size <= 64 else 8, "num_stages": 1} | ({} if torch.version.hip else {"maxnreg": 128})
    with torch.cuda.device_of(query):  # Triton launches on the current one
        kernel[(programs,)](*states, starts, starts if seed is None else seed, heads, step, *constants, **options)


# ---- The kernels ---------------------------------------------------------------------------------------------------
# A kernel has the registers and the shared memory of its hungriest branch; the fewer, the more programs run at once.
# Sentences of more than 64 tokens are rare, so they go by blocks: they cost more than they need to, the others do not.


def jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`, where there is Triton."""
    if function is None:
        return lambda function: jit(function, **options)
    return function if triton is None else triton.jit(function, **options)


@jit
def _rows_of(states, tokens, length, step, HEAD: tl.constexpr):
    """Loads the states of some tokens of a sentence, [R, D], `step` heads apart, with zeros after its end."""
    places = tokens[:, None] * (step * HEAD) + tl.arange(0, HEAD)[None]
    return tl.load(states + places, mask=(tokens < length)[:, None], other=0.0)


@jit
def _write_rows(states, rows, tokens, length, step, HEAD: tl.constexpr):
    places = tokens[:, None] * (step * HEAD) + tl.arange(0, HEAD)[None]
    tl.store(states + places, rows.to(states.dtype.element_ty), mask=(tokens < length)[:, None])


@jit
def _kept(seed, dropout, program, queries, first_key, R: tl.constexpr, C: tl.constexpr):
    """Which probabilities dropout keeps, [R, C]: a function of the seed, sentence and head, query and key.

    Philox makes four numbers at a time. It has 7 rounds, the fewest that pass all tests of BigCrush (Salmon et al.
    2011, "Parallel Random Numbers: As Easy as 1, 2, 3", table 2).
    """
    fours = queries[:, None] * 32 + first_key // 4 + tl.arange(0, C // 4)[None]  # of at most 128 keys
    first, second, third, fourth = tl.philox(tl.load(seed), fours, program, 0, 0, 7)
    drawn = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(R, C)
    return tl.uint_to_uniform_float(drawn) >= dropout


@jit
def forward_kernel(
    query, key, value, mixed, log_sums, starts, seed, heads, step, scaling, dropout, factor,
    HEAD: tl.constexpr, LONGEST: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """`_attention` of one sentence and head."""
    program = tl.program_id(0)
    head = program % heads
    start = tl.load(starts + program // heads)
    length = tl.load(starts + program // heads + 1) - start
    number = start.to(tl.int64) * heads + head  # of the first token's head
    place = (start.to(tl.int64) * step + head) * HEAD
    states = (query + place, key + place, value + place, mixed + number * HEAD, log_sums + number)
    given = (seed, program, length, heads, step, scaling, dropout, factor)
    if length <= 32:
        _mix(states, given, HEAD, DROPOUT, 32)
    elif length <= 64:
        if LONGEST >= 64:
            _mix(states, given, HEAD, DROPOUT, 64)
    else:
        if LONGEST >= 128:
            _mix(states, given, HEAD, DROPOUT, 128)


@jit
def _mix(states, given, HEAD: tl.constexpr, DROPOUT: tl.constexpr, SIZE: tl.constexpr):
    """32 queries at a time, with all keys of the sentence."""
    query, key, value, mixed, log_sums = states
    seed, program, length, heads, step, scaling, dropout, factor = given
    columns = tl.arange(0, SIZE)
    keys = _rows_of(key, columns, length, step, HEAD)
    values = _rows_of(value, columns, length, step, HEAD)
    for first in range(0, SIZE, 32):
        rows = first + tl.arange(0, 32)
        queries = _rows_of(query, rows, length, step, HEAD)
        scores = tl.dot(queries, tl.trans(keys)) * (scaling * 1.4426950408889634)  # for exp2: [R, C] / log 2
        scores = tl.where((columns < length)[None], scores, float("-inf"))
        highest = tl.max(scores, 1)
        weights = tl.exp2(scores - highest[:, None])
        total = tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(_kept(seed, dropout, program, rows, 0, 32, SIZE), weights * factor, 0.0)
        means = tl.dot(weights.to(values.dtype), values) / total[:, None]  # [R, D]
        _write_rows(mixed, means, rows, length, heads, HEAD)
        tl.store(log_sums + rows * heads, highest + tl.log2(total), mask=rows < length)


@jit
def backward_kernel(
    slope, query, key, value, mixed, log_sums, query_slope, key_slope, value_slope, starts, seed, heads, step,
    scaling, dropout, factor, HEAD: tl.constexpr, LONGEST: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """`_attention_backward` of one sentence and head."""
    program = tl.program_id(0)
    head = program % heads
    start = tl.load(starts + program // heads)
    length = tl.load(starts + program // heads + 1) - start
    number = start.to(tl.int64) * heads + head  # of the first token's head
    place = (start.to(tl.int64) * step + head) * HEAD
    of_rows = (query + place, slope + number * HEAD, mixed + number * HEAD, log_sums + number)
    of_columns = (key + place, value + place)
    slopes = (query_slope + place, key_slope + place, value_slope + place)
    given = (seed, program, length, heads, step, scaling, dropout, factor)
    if length <= 32:
        _slopes(of_rows, of_columns, slopes, given, HEAD, DROPOUT, 32)
    elif length <= 64:
        if LONGEST >= 64:
            _slopes(of_rows, of_columns, slopes, given, HEAD, DROPOUT, 64)
    else:
        if LONGEST >= 128:
            _slopes_by_blocks(of_rows, of_columns, slopes, given, HEAD, DROPOUT)


@jit
def _slopes(of_rows, of_columns, slopes, given, HEAD: tl.constexpr, DROPOUT: tl.constexpr, SIZE: tl.constexpr):
    """The gradients of a sentence in one tile."""
    query_slope, key_slope, value_slope = slopes
    seed, program, length, heads, step, scaling, dropout, factor = given
    places = tl.arange(0, SIZE)
    rows = _queries_of(of_rows, given, places, HEAD)
    columns = _keys_of(of_columns, given, places, HEAD)
    weights, of_scores = _weights_of(rows, columns, given, places, 0, DROPOUT, SIZE)
    _write_rows(value_slope, tl.dot(tl.trans(weights), rows[1]), places, length, step, HEAD)
    _write_rows(key_slope, tl.dot(tl.trans(of_scores), rows[0]) * scaling, places, length, step, HEAD)
    _write_rows(query_slope, tl.dot(of_scores, columns[0]) * scaling, places, length, step, HEAD)


@jit
def _slopes_by_blocks(of_rows, of_columns, slopes, given, HEAD: tl.constexpr, DROPOUT: tl.constexpr):
    """The same for a longer sentence: first gradients of keys and values from all queries, then those of queries."""
    query_slope, key_slope, value_slope = slopes
    seed, program, length, heads, step, scaling, dropout, factor = given
    block = tl.arange(0, 64)
    for first in range(0, 128, 64):
        columns = _keys_of(of_columns, given, first + block, HEAD)
        of_values, of_keys = tl.zeros((64, HEAD), tl.float32), tl.zeros((64, HEAD), tl.float32)
        for other in range(0, 128, 64):
            rows = _queries_of(of_rows, given, other + block, HEAD)
            weights, of_scores = _weights_of(rows, columns, given, other + block, first, DROPOUT, 64)
            of_values += tl.dot(tl.trans(weights), rows[1])
            of_keys += tl.dot(tl.trans(of_scores), rows[0])
        _write_rows(value_slope, of_values, first + block, length, step, HEAD)
        _write_rows(key_slope, of_keys * scaling, first + block, length, step, HEAD)
    for other in range(0, 128, 64):
        rows = _queries_of(of_rows, given, other + block, HEAD)
        of_queries = tl.zeros((64, HEAD), tl.float32)
        for first in range(0, 128, 64):
            columns = _keys_of(of_columns, given, first + block, HEAD)
            _, of_scores = _weights_of(rows, columns, given, other + block, first, DROPOUT, 64)
            of_queries += tl.dot(of_scores, columns[0])
        _write_rows(query_slope, of_queries * scaling, other + block, length, step, HEAD)


@jit
def _queries_of(of_rows, given, places, HEAD: tl.constexpr):
    """Of some queries: themselves and the gradient of what they got, [R, D]; the part of the gradients of their
    scores that is the same for all keys; and their denominators.
    """
    query, slope, mixed, log_sums = of_rows
    seed, program, length, heads, step, scaling, dropout, factor = given
    queries = _rows_of(query, places, length, step, HEAD)
    slopes = _rows_of(slope, places, length, heads, HEAD)
    means = _rows_of(mixed, places, length, heads, HEAD)
    common = tl.sum(slopes.to(tl.float32) * means.to(tl.float32), 1)
    return queries, slopes, common, tl.load(log_sums + places * heads, mask=places < length, other=0.0)


@jit
def _keys_of(of_columns, given, places, HEAD: tl.constexpr):
    key, value = of_columns
    seed, program, length, heads, step, scaling, dropout, factor = given
    return _rows_of(key, places, length, step, HEAD), _rows_of(value, places, length, step, HEAD)


@jit
def _weights_of(rows, columns, given, places, first, DROPOUT: tl.constexpr, SIZE: tl.constexpr):
    """The probabilities of a block after dropout, and the gradients of its scores without `scaling`; [R, C]."""
    queries, slopes, common, log_sums = rows
    keys, values = columns
    seed, program, length, heads, step, scaling, dropout, factor = given
    scores = tl.dot(queries, tl.trans(keys)) * (scaling * 1.4426950408889634)
    weights = tl.where((first + tl.arange(0, SIZE) < length)[None], tl.exp2(scores - log_sums[:, None]), 0.0)
    of_weights = tl.dot(slopes, tl.trans(values))
    dropped = weights
    if DROPOUT:
        kept = _kept(seed, dropout, program, places, first, SIZE, SIZE)
        dropped = tl.where(kept, weights * factor, 0.0)
        of_weights = tl.where(kept, of_weights * factor, 0.0)
    return dropped.to(slopes.dtype), (weights * (of_weights - common[:, None])).to(queries.dtype)
