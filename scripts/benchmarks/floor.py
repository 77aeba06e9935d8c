"""Lower bounds for the time of training and prediction, from operations and bytes and the machine's speed.

Only matrix products of real tokens are counted. A product of [a, b] and [b, c] has 2abc operations. A token therefore
has two for each weight of the layers (four H x H in attention, two H x I). The attention of a sentence of L tokens has
2 H L more for the scores and as many for the weighted sums. The pooler and the head process one vector per sentence.
The backward pass has twice as many, for the gradients of the inputs and of the weights. The total is six operations
per weight and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from transformers import PreTrainedConfig

from .shared import Setting

#: Of AdamW in fp32 for each parameter: it reads weight, gradient and two moments, and writes all but the gradient.
ADAMW_BYTES = 7 * 4
PASSES = {"train": 3, "predict": 1}


def forward_flops(config: PreTrainedConfig, lengths: Sequence[int], num_outputs: int) -> float:
    """Floating-point operations of one pass, the mean over sentences of these lengths, in tokens.

    Args:
        num_outputs: of the linear head.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    per_token = 2 * layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    attention = 4 * layers * hidden * mean(int(length) ** 2 for length in lengths)
    return per_token * mean(map(int, lengths)) + attention + 2 * hidden**2 + 2 * hidden * num_outputs


@dataclass(frozen=True)
class Cost:
    """Of one example: real tokens and floating-point operations; of one step of the optimizer: bytes."""

    tokens: float
    flops: float
    optimizer_bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.tokens:.1f} real tokens an example, {self.flops / self.tokens / 1e9:.3g} GFLOP a token"
        return text + (f", {self.optimizer_bytes / 1e9:.3g} GB a step of AdamW" if self.optimizer_bytes else "")


@dataclass(frozen=True)
class Hardware:
    """What this machine does per second when it does nothing else."""

    product: int
    flops: float
    bytes: float

    @classmethod
    def measure(cls, setting: Setting) -> Hardware:
        """By a product of square matrices in the setting's precision, and a copy of 256 MB; each the best of some."""
        size = 4096 if setting.on_gpu else 1024
        calls = 10 if setting.on_gpu else 1  # one after the other: a single one ends before the clock is read
        left, right = (torch.randn(size, size, device=setting.device, dtype=setting.dtype) for _ in range(2))
        source = torch.zeros(2**26, device=setting.device)
        target = torch.zeros_like(source)

        def best(run) -> float:
            return min(setting.seconds_of(lambda: [run() for _ in range(calls)]) / calls for _ in range(5))

        product = torch.empty_like(left)
        flops = 2 * size**3 / best(lambda: torch.mm(left, right, out=product))
        return cls(size, flops, 2 * source.nbytes / best(lambda: target.copy_(source)))

    def __str__(self) -> str:
        speed = f"{self.flops / 1e12:.3g} TFLOP/s in a product of {self.product} x {self.product}"
        return f"{speed}, {self.bytes / 1e9:.3g} GB/s in a copy"

    def beside(self, examples_per_s: float, cost: Cost, batch_size: int) -> dict[str, float]:
        """Columns of a table: what was reached, its share of the matrix product, and what could be reached."""
        least = cost.flops / self.flops + cost.optimizer_bytes / batch_size / self.bytes
        reached = examples_per_s * cost.flops
        return {
            "tokens_per_s": examples_per_s * cost.tokens, "tflop_per_s": reached / 1e12,
            "share_of_product": reached / self.flops, "floor_examples_per_s": 1 / least,
        }  # fmt: skip
