"""What a trainer keeps beside the weights for the passes of a step: half-precision copies, and memory for gradients.

Under autocast each pass casts each float32 weight again, and autograd makes each weight's gradient anew before it is
added. A trainer may keep both from step to step: copies that it renews after each optimizer step, and float32 memory
that a backward pass adds to (Megatron-LM's gradient accumulation fusion, `main_grad`). `fused_layer` uses them.

This file travels to the Hub with a model: it may import published libraries only. The code of a saved model is a copy
of this module with a state of its own: it finds no step weights in use, and its passes are computed without.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

_weights: StepWeights | None = None


@dataclass
class StepWeights:
    """Either may lack any parameter; it is then computed as without.

    They should be contiguous in one array, in the order of the model, all matrices before all vectors: those
    that are multiplied together (query, key and value) are then one matrix without a copy.

    Args:
        halves: of a parameter, its copy in float16 or bfloat16. A pass in another precision does not use it.
        gradients: of a parameter, the float32 memory that backward passes add its gradient to. Autograd then gets
            `None` in its place: `.grad` stays as it is, and `torch.autograd.grad` needs `allow_unused`. A backward
            pass adds if it asks for parameters of the layer: `backward()` does, and so does `torch.autograd.grad` of
            them. One that asks for inputs alone adds nothing.
    """

    halves: dict[Parameter, Tensor] = field(default_factory=dict)
    gradients: dict[Parameter, Tensor] = field(default_factory=dict)


@contextmanager
def in_use(weights: StepWeights) -> Generator[None]:
    """Forward passes inside, and the backward passes of their graphs, use these. Not for several threads at once."""
    global _weights
    before, _weights = _weights, weights
    try:
        yield
    finally:
        _weights = before


def half_of(parameter: Parameter, dtype: torch.dtype) -> Tensor:
    """The parameter in this dtype: its copy in use, else made now."""
    half = None if _weights is None else _weights.halves.get(parameter)
    return half if half is not None and half.dtype == dtype else parameter.detach().to(dtype)


def destination_of(parameter: Parameter) -> Tensor | None:
    """The memory that the parameter's gradient is added to, if any.

    To be asked in the forward pass: a backward pass runs in another thread, and after `in_use`.
    """
    return None if _weights is None else _weights.gradients.get(parameter)


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of the same trailing shape, joined along the first dimension, as a view of their memory.

    `None` if they are not contiguous in one array.
    """
    first, place = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        together = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not together or tensor.storage_offset() != place or not tensor.is_contiguous():
            return None
        place += tensor.numel()
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())
