"""A second stream of a GPU, for passes that need not wait for each other."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each GPU: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class Beside:
    """Work that a GPU does at the same time as other work, as far as it has room for both. A CPU does them in turn.

    What is `inside` waits for what was queued before this object was made. It waits for what was queued outside since
    only from `meet` on. What comes behind it waits for it. A CUDA graph keeps both as branches.

    Memory is freed for the stream that asked for it, and is written again without a look at the other stream: what one
    side makes may be read by the other only while it is kept until behind `inside`.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device):
        self._outside = self._stream = None
        if device.type == "cuda":
            self._outside, self._stream = torch.cuda.current_stream(device), _second_stream(device)
            self._stream.wait_stream(self._outside)

    @contextmanager
    def inside(self) -> Generator[None]:
        if self._outside is None or self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._outside.wait_stream(self._stream)

    def meet(self) -> None:
        """To be called inside, before what was made outside is read."""
        if self._outside is not None and self._stream is not None:
            self._stream.wait_stream(self._outside)
