"""Noise for the words of a batch. Each number is a pure function of its position in training.

The noise of a row therefore does not depend on its batch, its process, the padding or CUDA graphs. The drawn integers
are equal bit for bit; the results of logarithm and cosine are equal up to their last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .terms.base import AnyNoiseKey

#: From key, rows, positions and size to numbers: see `normal_noise`.
Noise = Callable[[Tensor | int, Tensor, Tensor, int], Tensor]


def normal_noise(key: Tensor | int, rows: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns standard normal numbers by the Box-Muller method, two for each number of the generator.

    Args:
        key: int64, a single number.
        rows: int64 [S], the row of each token; `positions` likewise.
        size: H.

    Returns:
        [S, H], float32, on the device of `rows`. Each number is a function of the key, the row, the token's position
        in the row, and the index in the vector.
    """
    low, high = _drawn(key, rows, positions, size)
    radius = ((low + 1).float() * 2.0**-24).log().mul(-2).sqrt()  # of a number in (0, 1]
    angle = high.float() * (2 * math.pi * 2.0**-24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :size]


def uniform_noise(key: Tensor | int, rows: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns uniform numbers from -1 to 1. Arguments and result are those of `normal_noise`."""
    return torch.cat(_drawn(key, rows, positions, size), dim=-1)[..., :size].float() * 2.0**-23 - 1


def _drawn(key: Tensor | int, rows: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Twice 24 random bits, int64 [S, H / 2], by SplitMix64 (Steele et al. 2014), seeded by token."""
    seeds = _hash(_hash(key + rows * _GOLDEN) + positions * _GOLDEN)  # [S]
    drawn = _hash(seeds[:, None] + torch.arange((size + 1) // 2, device=rows.device) * _GOLDEN)
    return drawn & _24_BITS, drawn >> 24 & _24_BITS


def _signed(number: int) -> int:
    """Converts 64 bits to torch's signed integers, because torch has no unsigned arithmetic."""
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_24_BITS = 2**24 - 1


def _hash(numbers: Tensor) -> Tensor:
    """SplitMix64's output function. int64 products wrap around, as they should."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    return numbers >> bits & 2 ** (64 - bits) - 1  # torch's shift fills up with the sign


def noise_of_words(
    batch: Mapping[str, Any], size: int, key: AnyNoiseKey, noise: Noise = normal_noise, name: str | None = None
) -> Tensor:
    """Returns noise for every token of a batch, [B, T, H] or [B, 2, T, H]; for a packed batch [1, S, H].

    Args:
        batch: the batch of one task.
        size: H.
        key: the key of the batch.
        noise: its kind.
        name: the purpose of the noise; the task's name by default. Two kinds of noise with one name would have the
            same bits.
    """
    ids = batch["input_ids"]
    apart, width = ids.shape[1:-1].numel(), ids.shape[-1]  # 2 where an example has two sentences of its own, else 1
    packed = "packing" in batch
    tokens = batch["packing"]["tokens"] if packed else torch.arange(ids.numel(), device=ids.device)
    task_key, first_row = key.numbers(name or batch["task"], ids.device)
    made = noise(task_key, tokens // width + first_row * apart, tokens % width, size)
    return made[None] if packed else made.view(*ids.shape, size)
