"""The Triton kernels of `fused_layer`: each does all that stands between two matrix products in one pass over memory.

Sums are float32. The gradients of vectors (biases, scales, shifts) are sums over all tokens: P programs sum rows of
their own and write one row of `sums`, [P, C], and `total` adds these. Nothing depends on the order in which programs
run, so that the same step gives the same bits.

This file travels to the Hub with a model: it may import its neighbours and published libraries only. Letters in
shapes: S tokens of all sentences together, H hidden size, I intermediate size, C numbers in all vectors of a layer, R
and W rows and columns of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .short_attention import jit

# In a `try`, so that it is no requirement of the model's code on the Hub. `short_attention` warns if it is missing.
try:  # noqa: SIM105
    import triton.language as tl
except ImportError:
    pass

#: The widest row that a kernel takes, and columns of a tile where a row need not be whole.
WIDEST, _WIDTH = 2048, 512
#: Rows of a program that sums are a multiple of this, and the warps of all that run at once on a multiprocessor.
_ROWS, _AT_ONCE = 4, 12
#: Random numbers of dropout have 16 bits.
_CHOICES = 2**16


def shares(tokens: int, hidden: int, device: torch.device) -> tuple[int, int]:
    """How many programs sum rows, and rows of each: as many as run at once, or fewer of at least `_ROWS` rows."""
    at_once = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    at_once *= max(1, _AT_ONCE // _warps(hidden))
    rows = _ROWS * -(-tokens // (_ROWS * at_once))
    return -(-tokens // rows), rows


def add_norm(
    product: Tensor,
    bias: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    epsilon: float,
    seed: Tensor | None,
    stream: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450) of `dropout(product + bias) + residual`.

    Args:
        product: [S, H], in half precision.
        residual: [S, H].
        seed: int64 [1], where there is dropout.
        stream: from 1; masks of one seed and several streams have nothing in common.
        dropout: share of the numbers that are set to 0.

    Returns:
        the normalised states, [S, H], in float32 and in the product's dtype; and for the backward pass, what they were
        before scale and shift, [S, H], and the inverse standard deviations, [S]. The former are float16 in all cases:
        they are small, and bfloat16 would double the error of the gradient of `scale`.
    """
    tokens, hidden = product.shape
    whole = torch.empty_like(product, dtype=torch.float32)
    half, normal = torch.empty_like(product), torch.empty_like(product, dtype=torch.float16)
    inverse = whole.new_empty(tokens)
    width = _width(hidden)
    _launch(
        _add_norm, (-(-tokens // 2),), _warps(hidden), product, bias, residual, scale, shift,
        bias if seed is None else seed, whole, half, normal, inverse, tokens, epsilon, *_dropped(dropout),
        stream, hidden, 2, width, bool(dropout),
    )  # fmt: skip
    return whole, half, normal, inverse


def add_norm_backward(
    slope: Tensor,
    other: Tensor | None,
    normal: Tensor,
    inverse: Tensor,
    scale: Tensor,
    seed: Tensor | None,
    stream: int,
    dropout: float,
    dtype: torch.dtype,
    sums: Tensor,
    column: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of `residual` [S, H], float32, and of `product` [S, H], in `dtype`.

    Args:
        slope: float32 [S, H], the gradient of the states; with `other`, in half precision, the sum of both is.
        sums: of this program, from `column` on: the gradients of bias, scale and shift.
    """
    tokens, hidden = normal.shape
    of_residual, of_product = torch.empty_like(slope), torch.empty_like(normal, dtype=dtype)
    programs, rows = shares(tokens, hidden, normal.device)
    width = _width(hidden)
    _launch(
        _add_norm_backward, (programs,), _warps(hidden), slope, slope if other is None else other, normal,
        inverse, scale, scale if seed is None else seed, of_residual, of_product, sums[:, column:], tokens, rows,
        sums.shape[1], *_dropped(dropout), stream, hidden, 2, width, bool(dropout), other is not None,
    )  # fmt: skip
    return of_residual, of_product


def gelu(product: Tensor, bias: Tensor) -> Tensor:
    """`x Φ(x)` of `x = product + bias` (Hendrycks & Gimpel 2016, arXiv:1606.08415), [S, I] in half precision."""
    tokens, columns = product.shape
    active = torch.empty_like(product)
    grid = (-(-tokens // 2), -(-columns // _WIDTH))
    _launch(_gelu, grid, 2, product, bias, active, tokens, columns, 2, _WIDTH)
    return active


def gelu_backward(slope: Tensor, product: Tensor, bias: Tensor, hidden: int, sums: Tensor, column: int) -> Tensor:
    """The gradient of `product`; that of the bias goes to `sums`."""
    tokens, columns = product.shape
    of_product = torch.empty_like(product)
    programs, rows = shares(tokens, hidden, product.device)
    _launch(
        _gelu_backward, (programs, -(-columns // _WIDTH)), 2, slope, product, bias, of_product, sums[:, column:],
        tokens, rows, sums.shape[1], columns, 2, _WIDTH,
    )  # fmt: skip
    return of_product


def sum_rows(values: Tensor, hidden: int, sums: Tensor, column: int) -> None:
    """Writes the sums of rows of `values`, [S, N] in half precision, to `sums`."""
    tokens, columns = values.shape
    programs, rows = shares(tokens, hidden, values.device)
    _launch(
        _sum_rows, (programs, -(-columns // _WIDTH)), 2, values, sums[:, column:], tokens, rows, sums.shape[1],
        columns, 4, _WIDTH,
    )  # fmt: skip


def total(sums: Tensor, to: Tensor | None = None) -> Tensor:
    """The sum of all programs' rows, [C]; added to `to`, float32, where it is given."""
    programs, columns = sums.shape
    result = sums.new_empty(columns) if to is None else to
    _launch(_total, (-(-columns // 32),), 8, sums, result, programs, int(to is not None), columns, 128, 32)
    return result


def _width(hidden: int) -> int:
    """Columns of a tile of whole rows: a power of two."""
    return max(16, 1 << (hidden - 1).bit_length())


def _warps(hidden: int) -> int:
    """So many that a warp has 256 numbers of a row, 8 for each thread: sums over rows then stay within a thread."""
    return max(1, _width(hidden) // 256)


def _dropped(dropout: float) -> tuple[int, float]:
    """Of `_CHOICES` random numbers, how many mean that a number is set to 0; and the factor on the others."""
    dropped = round(dropout * _CHOICES)
    return dropped, _CHOICES / (_CHOICES - dropped) if dropped < _CHOICES else 0.0


def _launch(kernel: Any, grid: tuple[int, ...], warps: int, *given: Any) -> None:
    with torch.cuda.device_of(given[0]):  # Triton launches on the current one
        kernel[grid](*given, num_warps=warps)


# ---- The kernels ---------------------------------------------------------------------------------------------------
# Numbers that go with the batch are not specialised on: else Triton compiles anew for some batches of a run. Loops up
# to them are `while` loops, as Triton's interpreter has no `range` of them under new versions of NumPy.


@jit
def _places(rows, columns, tokens, COUNT: tl.constexpr):
    """Where a tile lies in [S, COUNT], and what of it is there."""
    return rows[:, None] * COUNT + columns[None], (rows < tokens)[:, None] & (columns < COUNT)[None]


@jit
def _read(values, places, there):
    return tl.load(values + places, mask=there, other=0.0).to(tl.float32)


@jit
def _kept(seed, dropped, rows, STREAM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Which numbers dropout keeps, [R, W]: a function of the seed, the stream, row and column.

    Philox makes four numbers at a time, of which each half is one of ours. It has 7 rounds, as in `short_attention`,
    whose stream is 0.
    """
    eights = rows[:, None] * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None]
    first, second, third, fourth = tl.philox(tl.load(seed), eights, 0, STREAM, 0, 7)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.join(words & 0xFFFF, words >> 16).reshape(ROWS, WIDTH) >= dropped


@jit(do_not_specialize=["tokens", "dropped"])
def _add_norm(
    product, bias, residual, scale, shift, seed, whole, half, normal, inverse, tokens, epsilon, dropped, factor,
    STREAM: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    places, there = _places(rows, columns, tokens, HIDDEN)
    summed = _read(product, places, there) + _read(bias, columns, columns < HIDDEN)[None]
    if DROPOUT:
        summed = tl.where(_kept(seed, dropped, rows, STREAM, ROWS, WIDTH), summed * factor, 0.0)
    summed += _read(residual, places, there)
    centred = tl.where((columns < HIDDEN)[None], summed - (tl.sum(summed, 1) / HIDDEN)[:, None], 0.0)
    factors = 1 / tl.sqrt(tl.sum(centred * centred, 1) / HIDDEN + epsilon)
    normalised = centred * factors[:, None]
    states = normalised * _read(scale, columns, columns < HIDDEN)[None] + _read(shift, columns, columns < HIDDEN)[None]
    tl.store(whole + places, states, mask=there)
    tl.store(half + places, states.to(half.dtype.element_ty), mask=there)
    tl.store(normal + places, normalised.to(normal.dtype.element_ty), mask=there)
    tl.store(inverse + rows, factors, mask=rows < tokens)


@jit(do_not_specialize=["tokens", "share", "stride", "dropped"])
def _add_norm_backward(
    slope, other, normal, inverse, scale, seed, of_residual, of_product, sums, tokens, share, stride, dropped, factor,
    STREAM: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DROPOUT: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Of `share` rows. The gradient of what is normalised has no mean, and no part along what it became."""
    program = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    of_bias = tl.zeros((WIDTH,), tl.float32)
    of_scale = tl.zeros((WIDTH,), tl.float32)
    of_shift = tl.zeros((WIDTH,), tl.float32)
    scales = _read(scale, columns, columns < HIDDEN)[None]
    first = 0
    while first < share:
        rows = program * share + first + tl.arange(0, ROWS)
        places, there = _places(rows, columns, tokens, HIDDEN)
        slopes, normalised = _read(slope, places, there), _read(normal, places, there)
        if OTHER:
            slopes += _read(other, places, there)
        factors = tl.load(inverse + rows, mask=rows < tokens, other=0.0)
        scaled = slopes * scales
        along = (tl.sum(scaled * normalised, 1) / HIDDEN)[:, None]
        found = (scaled - (tl.sum(scaled, 1) / HIDDEN)[:, None] - normalised * along) * factors[:, None]
        tl.store(of_residual + places, found, mask=there)
        if DROPOUT:
            found = tl.where(_kept(seed, dropped, rows, STREAM, ROWS, WIDTH), found * factor, 0.0)
        tl.store(of_product + places, found.to(of_product.dtype.element_ty), mask=there)
        of_bias += tl.sum(found, 0)
        of_scale += tl.sum(slopes * normalised, 0)
        of_shift += tl.sum(slopes, 0)
        first += ROWS
    to = sums + program * stride + columns
    tl.store(to, of_bias, mask=columns < HIDDEN)
    tl.store(to + HIDDEN, of_scale, mask=columns < HIDDEN)
    tl.store(to + 2 * HIDDEN, of_shift, mask=columns < HIDDEN)


@jit(do_not_specialize=["tokens"])
def _gelu(product, bias, active, tokens, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    places, there = _places(rows, columns, tokens, COLUMNS)
    given = _read(product, places, there) + _read(bias, columns, columns < COLUMNS)[None]
    below, _ = _normal(given)
    tl.store(active + places, (given * below).to(active.dtype.element_ty), mask=there)


@jit
def _normal(given):
    """Φ, the distribution function of the normal distribution, and its density.

    Φ(-|x|) is the density times a polynomial, with an error below 7.5e-8 (Abramowitz & Stegun 1964, equation 26.2.17):
    no more than that of `1 + erf(x / √2)` in float32. With CUDA's erf, the kernels would wait for arithmetic.
    """
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * given * given)
    root = tl.rsqrt(1 + 0.2316419 * tl.abs(given))
    t = root * root
    polynomial = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return tl.where(given < 0, density * polynomial, 1 - density * polynomial), density


@jit(do_not_specialize=["tokens", "share", "stride"])
def _gelu_backward(
    slope, product, bias, of_product, sums, tokens, share, stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    of_bias = tl.zeros((WIDTH,), tl.float32)
    biases = _read(bias, columns, columns < COLUMNS)[None]
    first = 0
    while first < share:
        rows = program * share + first + tl.arange(0, ROWS)
        places, there = _places(rows, columns, tokens, COLUMNS)
        given = _read(product, places, there) + biases
        below, density = _normal(given)
        found = _read(slope, places, there) * (below + given * density)  # 0 where nothing is
        tl.store(of_product + places, found.to(of_product.dtype.element_ty), mask=there)
        of_bias += tl.sum(found, 0)
        first += ROWS
    tl.store(sums + program * stride + columns, of_bias, mask=columns < COLUMNS)


@jit(do_not_specialize=["tokens", "share", "stride"])
def _sum_rows(
    values, sums, tokens, share, stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    summed = tl.zeros((WIDTH,), tl.float32)
    first = 0
    while first < share:
        places, there = _places(program * share + first + tl.arange(0, ROWS), columns, tokens, COLUMNS)
        summed += tl.sum(_read(values, places, there), 0)
        first += ROWS
    tl.store(sums + program * stride + columns, summed, mask=columns < COLUMNS)


# Not specialised on what is added to either: the pass that a CUDA graph records must not be the first to compile it.
@jit(do_not_specialize=["programs", "add"], do_not_specialize_on_alignment=["result"])
def _total(sums, result, programs, add, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    summed = tl.zeros((ROWS, WIDTH), tl.float32)
    first = 0
    while first < programs:
        places, there = _places(first + tl.arange(0, ROWS), columns, programs, COLUMNS)
        summed += _read(sums, places, there)
        first += ROWS
    found = tl.sum(summed, 0) + _read(result, columns, (columns < COLUMNS) & (add != 0))
    tl.store(result + columns, found, mask=columns < COLUMNS)
