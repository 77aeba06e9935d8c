"""Means over processes: tensors of every process averaged in place, in few large all-reduces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

#: Numbers per all-reduce: few enough that the copy is small beside the model, enough to fill the network.
BUCKET = 1 << 23


def average_over_processes(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces each tensor by its mean over all processes, in place.

    Every process must pass tensors of the same shapes in the same order.
    """
    if processes() == 1:
        return
    for bucket in buckets(tensors):
        Averaging(bucket).finish()


class Averaging:
    """An all-reduce of tensors of one dtype, under way. Nothing may touch them before `finish`."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.copied = len(tensors) > 1 or not tensors[0].is_contiguous()
        self.flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if self.copied else tensors[0].view(-1)
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        self.flat /= dist.get_world_size()
        if self.copied:
            means = self.flat.split([tensor.numel() for tensor in self.tensors])
            for tensor, mean in zip(self.tensors, means, strict=True):
                tensor.copy_(mean.view_as(tensor))


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, in lists of one dtype and of at most `BUCKET` numbers, if not of one tensor."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (sum(t.numel() for t in bucket) + tensor.numel() > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
