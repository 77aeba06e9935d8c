"""The Gram matrix of the tasks' gradients, and their weighted sum: one pass over the gradients each."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch import Tensor


def gram_matrix(gradients: Tensor) -> Tensor:
    """The dot products of every two rows of `gradients`, `[tasks, parameters]`: `[tasks, tasks]` in float64.

    Products and sums are in float64, where a product of two float32 numbers is exact: 24 + 24 bits of 53. So only the
    n - 1 additions round. In any order, on any processor, an entry is off by at most (n - 1) 2**-53 / (1 - (n - 1)
    2**-53) times the sum of |a_k b_k| (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2), and
    that sum is at most the product of the two rows' norms: below 1.3e-8 of it over the 110 million numbers of a
    BERT-base. Products of float64 rows round too, which makes n of n - 1, and may underflow.
    """
    if gradients.is_cuda and has_kernels():
        from .kernels import gram_matrix as on_gpu

        return on_gpu(gradients)
    tasks = len(gradients)
    gram = gradients.new_zeros(tasks, tasks, dtype=torch.float64)
    # A slice is float64 at a time, and small products make it up: one of whole rows is slow. On a CPU a slice stays in
    # the cache; on a GPU calls cost more.
    width, size = (1 << 18, 1 << 8) if gradients.device.type == "cpu" else (1 << 24, 1 << 12)
    for part in gradients.split(width, dim=1):
        part = part.double()
        chunks = part.shape[1] // size
        pieces = part[:, : chunks * size].reshape(tasks, chunks, size).transpose(0, 1)  # [chunks, tasks, size]
        rest = part[:, chunks * size :]
        gram += torch.bmm(pieces, pieces.mT).sum(dim=0) + rest @ rest.T
    return gram


@functools.cache
def has_kernels() -> bool:
    """Whether torch has brought Triton, in which `kernels` is written: on Linux, with a build for GPUs."""
    return find_spec("triton") is not None


def weighted_sum(gradients: Tensor, weights: Tensor) -> Tensor:
    """`weights @ gradients` for `[tasks]` and `[tasks, parameters]`, in the dtype of `gradients`.

    Rows are added one by one, in float32 or more: with weights of exactly one the result is that of `Sum`, bit for
    bit. A matrix product may add in another order, and in TF32 where that is allowed.
    """
    if gradients.is_cuda and has_kernels():
        from .kernels import weighted_sum as on_gpu

        return on_gpu(gradients, weights)
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    weights = weights.to(dtype)
    total = gradients[0].to(dtype) * weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addcmul_(gradient.to(dtype), weight)
    return total.to(gradients.dtype)
