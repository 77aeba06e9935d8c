"""The two passes over the tasks' gradients on an NVIDIA or AMD GPU, as Triton kernels that read each number once.

torch's own operations read or write every number several times, and also a float64 copy of the rows. torch includes
Triton on Linux; elsewhere `gram` does not use this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers of each row that one program of the GPU takes.
BLOCK = 2048


def gram_matrix(gradients: Tensor) -> Tensor:
    """Computes `gram.gram_matrix` for rows on a GPU."""
    tasks, numbers = gradients.shape
    blocks = triton.cdiv(numbers, BLOCK)
    if not blocks:
        return gradients.new_zeros(tasks, tasks, dtype=torch.float64)
    rows = _with_adjacent_numbers(gradients)
    partial = rows.new_empty(tasks, tasks, blocks, dtype=torch.float64)
    with torch.cuda.device(rows.device):
        _gram_of_block[(blocks,)](rows, partial, numbers, rows.stride(0), blocks, tasks, BLOCK)
    return partial.sum(dim=-1)


def weighted_sum(gradients: Tensor, weights: Tensor) -> Tensor:
    """Computes `gram.weighted_sum` for rows on a GPU."""
    tasks, numbers = gradients.shape
    rows, combined = _with_adjacent_numbers(gradients), gradients.new_empty(numbers)
    if numbers:
        weights = weights.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
        with torch.cuda.device(rows.device):
            _sum_of_block[(triton.cdiv(numbers, BLOCK),)](
                rows, weights, combined, numbers, rows.stride(0), tasks, BLOCK
            )
    return combined


def _with_adjacent_numbers(gradients: Tensor) -> Tensor:
    return gradients if gradients.stride(1) == 1 else gradients.contiguous()


@triton.jit
def _gram_of_block(rows, partial, numbers, stride, blocks, TASKS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the dot products over one block in float64. Row j of a block is read from memory once."""
    block = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK) < numbers - block * BLOCK
    first_row = rows + block * BLOCK
    for i in range(TASKS):
        first = tl.load(first_row + tl.arange(0, BLOCK), mask=inside, other=0.0).to(tl.float64)
        second_row = first_row
        for j in range(i, TASKS):
            second = tl.load(second_row + tl.arange(0, BLOCK), mask=inside, other=0.0).to(tl.float64)
            product = tl.sum(first * second, axis=0)
            tl.store(partial + (i * TASKS + j) * blocks + block, product)
            tl.store(partial + (j * TASKS + i) * blocks + block, product)
            second_row += stride
        first_row += stride


@triton.jit
def _sum_of_block(rows, weights, combined, numbers, stride, TASKS: tl.constexpr, BLOCK: tl.constexpr):
    """Row is added to row, in the order of the tasks."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    inside = tl.arange(0, BLOCK) < numbers - start
    row = rows + start
    weight = tl.load(weights)
    total = tl.load(row + tl.arange(0, BLOCK), mask=inside, other=0.0).to(weight.dtype) * weight
    for i in range(1, TASKS):
        row += stride
        weight = tl.load(weights + i)
        total += tl.load(row + tl.arange(0, BLOCK), mask=inside, other=0.0).to(weight.dtype) * weight
    tl.store(combined + start + tl.arange(0, BLOCK), total.to(combined.dtype.element_ty), mask=inside)
