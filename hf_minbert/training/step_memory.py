"""What the passes of a recorded step share: half-precision copies of weights, and arrays that hold weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def one_array(parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """An array of zeros with as many numbers, and a view of it in the shape of each parameter.

    Matrices come before vectors, each in the given order. Those of query, key and value then follow one another, and
    `model.step_weights.as_one` makes one matrix of them.
    """
    order = sorted(range(len(parameters)), key=lambda i: parameters[i].dim() < 2)
    sizes = [parameters[i].numel() for i in order]
    array = parameters[0].new_zeros(sum(sizes), dtype=dtype).detach()
    views = {i: piece.view_as(parameters[i]) for i, piece in zip(order, array.split(sizes), strict=True)}
    return array, [views[i] for i in range(len(parameters))]


class HalfCopies(dict[Parameter, Tensor]):
    """By parameter, its copy in the dtype of autocast, for each one that a pass has ever asked for.

    Under autocast each layer, task and pass would cast the weights again. A pass that asks for a parameter without a
    copy casts it itself, and from the next pass on there is one. Copies stay where they are in memory, as recordings
    read them there.
    """

    def __init__(self):
        super().__init__()
        self._missing: dict[Parameter, torch.dtype] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        """The copy, or `default`. A float32 parameter that has none gets one before the next pass."""
        found, device = super().get(key, default), key.device.type
        if found is None and key.dtype == torch.float32 and torch.is_autocast_enabled(device):
            self._missing[key] = torch.get_autocast_dtype(device)
        return found

    @torch.no_grad()
    def renew(self) -> None:
        """Brings all copies up to date. Code that changes weights between steps does not announce it."""
        if self:
            torch._foreach_copy_([*self.values()], [*self])

    @torch.no_grad()
    def extend(self) -> None:
        """Makes the copies that passes have asked for since the last call."""
        for dtype in {*self._missing.values()}:
            asked = [parameter for parameter, wanted in self._missing.items() if wanted == dtype]
            copies = one_array(asked, dtype)[1]
            torch._foreach_copy_(copies, [*asked])
            self.update(zip(asked, copies, strict=True))
        self._missing.clear()
