"""Pooling: from the encoder's token states to one vector per sentence, and from a pair's two vectors to one.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries. Letters in
shapes: N sentences, T tokens, H hidden size, D size of a sentence's vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN

from .registry import Registry


class SelfInitialized(ABC):
    """A module with its own parameters, which the library's initialization does not change.

    The parameters must be direct members, because the library skips modules without direct parameters.
    """

    @abstractmethod
    def init_weights(self) -> None:
        """Sets the parameters through `transformers.initialization`, which skips parameters that were loaded."""


class Pooling(nn.Module, ABC):
    """Base class of all pooling methods. A subclass sets `output_size`, D, if it is not H."""

    def __init__(self, config):
        super().__init__()
        self.output_size = config.hidden_size

    @abstractmethod
    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        """Computes one vector per sentence. The states of padding do not change it.

        Args:
            states: [N, T, H].
            mask: [N, T], true for a token; each row has at least one.
            pooled: [N, H], the output of the encoder's own pooler.

        Returns:
            [N, D]
        """


class EncoderPooler(Pooling):
    """The encoder's pooler: a trained tanh layer over the first token (BERT, arXiv:1810.04805)."""

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        return pooled


class FirstToken(Pooling):
    """The state of the first token, BERT's [CLS]."""

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        return states[:, 0]


class Mean(Pooling):
    """The mean over real tokens (Sentence-BERT, arXiv:1908.10084, section 3)."""

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        # What stands at padding may be anything, infinite too: chosen away, not multiplied by 0.
        total = states.masked_fill(~mask[..., None], 0.0).sum(dim=1)
        return total / mask.sum(dim=1, keepdim=True).to(total.dtype)


class Max(Pooling):
    """The largest value over real tokens, in each dimension."""

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        return states.masked_fill(~mask[..., None], -math.inf).amax(dim=1)


class Attention(Pooling):
    """A mean weighted by learned scores of the tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)  # a bias would cancel in the softmax

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        states = states.masked_fill(~mask[..., None], 0.0)  # before the scores, whose gradient is a sum over states
        scores = self.score(states).squeeze(-1).masked_fill(~mask, -math.inf)
        weights = scores.float().softmax(dim=-1).to(states.dtype)
        return torch.einsum("nt,nth->nh", weights, states)


class GRU(nn.GRU, SelfInitialized):
    """torch's GRU, in a form that the library's initialization knows."""

    def init_weights(self) -> None:
        bound = self.hidden_size**-0.5
        for parameter in self.parameters(recurse=False):
            init.uniform_(parameter, -bound, bound)


class BiGRU(Pooling):
    """The last states of two GRUs, one over the tokens forwards and one backwards, concatenated.

    Args:
        hidden_size: the size of each direction. D is twice that; the default is H // 2.
    """

    def __init__(self, config, *, hidden_size: int | None = None):
        super().__init__(config)
        hidden_size = config.hidden_size // 2 if hidden_size is None else check_size("hidden_size", hidden_size)
        self.output_size = 2 * hidden_size
        self.forwards = GRU(config.hidden_size, hidden_size, batch_first=True)
        self.backwards = GRU(config.hidden_size, hidden_size, batch_first=True)

    def forward(self, states: Tensor, mask: Tensor, pooled: Tensor) -> Tensor:
        # Real tokens first in both reading orders: a sentence ends before its padding, and the GRU is asked there.
        # (A packed sequence would do the same, but needs the lengths on the CPU: the GPU would wait.)
        place = torch.arange(mask.shape[1], device=mask.device)
        last = mask.sum(dim=1, keepdim=True) - 1  # [N, 1]
        # No two keys are equal, so that no stable sort is needed: ONNX has none.
        ahead = torch.argsort(place + (place[-1] + 1) * ~mask, dim=1)
        back = ahead.gather(1, (last - place).clamp(min=0))
        states = states.masked_fill(~mask[..., None], 0.0)  # in the gradient, 0 times anything but a number is none
        ends = [
            _take(gru(_take(states, order))[0], last)
            for gru, order in ((self.forwards, ahead), (self.backwards, back))
        ]
        return torch.cat(ends, dim=-1).squeeze(1)


def _take(states: Tensor, order: Tensor) -> Tensor:
    """states [N, T, H] at the places [N, S] -> [N, S, H]"""
    return states.gather(1, order[..., None].expand(-1, -1, states.shape[-1]))


class LayerMix(nn.Module, SelfInitialized):
    """A learned mean of all layers' states (ELMo, arXiv:1802.05365, equation 1, without its factor gamma).

    The weights, one for the embeddings and one per layer, are a softmax that starts uniform.
    """

    def __init__(self, num_layers: int):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(num_layers + 1))

    def init_weights(self) -> None:
        init.zeros_(self.scores)

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        """Each [N, T, H] -> [N, T, H]"""
        weights = self.scores.float().softmax(dim=0)
        return sum(weight.to(layer.dtype) * layer for weight, layer in zip(weights, states, strict=True))


class Join(NamedTuple):
    """A way to combine a pair's two vectors: the function, and the size of its result for D."""

    function: Callable[[Tensor, Tensor], Tensor]
    size: Callable[[int], int]


def cosine(u: Tensor, v: Tensor) -> Tensor:
    """[..., D] and [..., D] -> [..., 1], in float32 or higher precision; 0 if a vector is 0."""
    return F.cosine_similarity(u.float(), v.float(), dim=-1, eps=1e-8)[..., None]


def _concat(u: Tensor, v: Tensor) -> Tensor:
    return torch.cat([u, v], dim=-1)


def _concat_diff_product(u: Tensor, v: Tensor) -> Tensor:
    return torch.cat([u, v, (u - v).abs(), u * v], dim=-1)


def _concat_cosine(u: Tensor, v: Tensor) -> Tensor:
    return torch.cat([u, v, cosine(u, v).to(u.dtype)], dim=-1)


def _cosine(u: Tensor, v: Tensor) -> Tensor:
    return cosine(u, v).to(u.dtype)


def check_size(name: str, value: object) -> int:
    """Returns the value if it is a whole number from 1, and raises `ValueError` otherwise."""
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` must be a whole number from 1. Found {value!r}.")
    return value


def make_activation(name: str, value: object) -> nn.Module:
    """Returns the transformers activation with this name.

    Raises:
        ValueError: there is none, or it has its own weights, which no checkpoint of BERT has.
    """
    if not isinstance(value, str) or value not in ACT2FN:
        raise ValueError(f"`{name}` must be one of: {', '.join(ACT2FN)}. Found {value!r}.")
    activation = ACT2FN[value]
    if any(True for _ in activation.parameters()):
        raise ValueError(f"`{name}: {value}` has weights of its own, which is not supported. Choose one without.")
    return activation


def check_rate(name: str, value: object) -> float:
    """Returns the value if it is a dropout rate, and raises `ValueError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be a number from 0 to below 1. Found {value!r}.")
    return float(value)


POOLINGS: Registry[type[Pooling]] = Registry("pooling", type[Pooling], {
    "pooler": EncoderPooler,
    "cls": FirstToken,
    "mean": Mean,
    "max": Max,
    "attention": Attention,
    "bigru": BiGRU,
})  # fmt: skip
JOINS: Registry[Join] = Registry("join", Join, {
    "concat": Join(_concat, lambda size: 2 * size),
    "concat_diff_product": Join(_concat_diff_product, lambda size: 4 * size),
    "concat_cosine": Join(_concat_cosine, lambda size: 2 * size + 1),
    "cosine": Join(_cosine, lambda size: 1),
})  # fmt: skip
