"""Only real tokens go through the encoder: a padded batch without its padding, and back.

This file travels to the Hub with a model: it may import published libraries only. Letters in shapes: N sentences,
T tokens of the longest, S real tokens of all of them together, H hidden size, A attention heads, D = H / A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

#: At most so many fillers make a sentence: attention costs the square of its length.
FILLERS = 32


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a padded batch [N, T] stand.

    There may be fillers behind the real tokens, in sentences of their own: tokens that nobody sees, without effect,
    so that batches of different texts have one shape.

    Args:
        tokens: int64 [S], the place of each in the flattened batch, sentence by sentence, the longest sentence first;
            N * T for a filler.
        starts: int32, where each sentence begins in S, those of fillers too; and S.
        shape: N and T.
        longest: tokens of the longest sentence, or more.
    """

    tokens: Tensor
    starts: Tensor
    shape: tuple[int, int]
    longest: int

    @staticmethod
    def describe(is_token: np.ndarray, fill: bool = False) -> dict[str, Any]:
        """The packing of a batch whose real tokens are these, [N, T], as a batch carries it to the device.

        With `fill`, S is rounded up to one of at most eight sizes between two powers of two, and `longest` is T.
        """
        lengths, width = is_token.sum(axis=1), is_token.shape[1]
        order = np.argsort(-lengths, kind="stable")  # sentences of equal length side by side
        rows, columns = np.nonzero(is_token[order])
        tokens, lengths = order[rows] * width + columns, lengths[order]
        if not fill:
            return _described(tokens, lengths, int(lengths.max()))
        step = max(64, 2 ** ((len(tokens) - 1).bit_length() - 4))
        fillers = -len(tokens) % step
        size = min(width, FILLERS)
        sentences = -(-(step - 1) // size)  # enough for the most fillers there can be: the shape is the same
        filled = np.clip(fillers - size * np.arange(sentences), 0, size)
        tokens = np.concatenate([tokens, np.full(fillers, is_token.size)])
        return _described(tokens, np.concatenate([lengths, filled]), width)

    @classmethod
    def read(cls, described: dict[str, Any] | None, attention_mask: Tensor | None) -> Packing | None:
        """What `describe` says of a batch with this mask, [N, T].

        Raises:
            ValueError: there is no mask.
        """
        if described is None:
            return None
        if attention_mask is None:
            raise ValueError("`packing` says where the tokens of `attention_mask` stand, which is missing. Give both.")
        rows, width = attention_mask.shape
        return cls(shape=(rows, width), **described)

    def by_length(self) -> list[tuple[int, int]]:
        """Sentences of equal length that follow one another: how many, and their tokens; none of the empty ones."""
        lengths, counts = self.starts.diff().unique_consecutive(return_counts=True)
        return [(count, length) for count, length in zip(counts.tolist(), lengths.tolist(), strict=True) if length]

    def pack(self, values: Tensor) -> Tensor:
        """[N, T, ...] -> [1, S, ...]"""
        values = values.flatten(0, 1)
        # A filler reads whatever stands last. Not by [], whose backward pass sorts all places first.
        return values.index_select(0, self.tokens.clamp(max=len(values) - 1))[None]

    def unpack(self, values: Tensor) -> Tensor:
        """[1, S, ...] -> [N, T, ...], with zeros at padding."""
        rows, width = self.shape
        padded = values.new_zeros(rows * width + 1, *values.shape[2:])  # the last place is for fillers
        return padded.index_copy(0, self.tokens, values[0])[:-1].unflatten(0, (rows, width))


def _described(tokens: np.ndarray, lengths: np.ndarray, longest: int) -> dict[str, Any]:
    starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return {"tokens": torch.from_numpy(tokens), "starts": torch.from_numpy(starts), "longest": longest}


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float, scaling: float, fused: bool = True
) -> Tensor:
    """Attention inside each sentence of a packed batch.

    On CUDA from compute capability 8, in half precision, it is a fused kernel: `short_attention` where it fits, else,
    without dropout, the variable-length flash kernel. On a CPU, sentences of equal length are a batch without padding.
    In all other cases the sentences are padded for the attention alone, whose share of a GPU's work is small.

    Args:
        query, key, value: [1, A, S, D].
        fused: whether to take a fused kernel where there is one. They can be differentiated once.

    Returns:
        the mixed values, [1, S, A, D].
    """
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # [1, S, A, D]
    fused = fused and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if fused and torch.cuda.get_device_capability(query.device) >= (8, 0):
        from .short_attention import fits, short_attention  # here, because it imports Triton

        states, starts, longest = (query[0], key[0], value[0]), packing.starts, packing.longest
        if fits(query[0], longest):
            return short_attention(*states, starts, longest, dropout, scaling)[None]
        if not dropout:
            from torch.nn.attention.varlen import varlen_attn

            mixed = varlen_attn(*states, starts, starts, longest, longest, scale=scaling)
            return cast(Tensor, mixed)[None]  # a tuple only where more is asked for
    # A compiled program would be made anew for each batch: it has the lengths as constants.
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        return _attention_by_length(query, key, value, packing, dropout, scaling)
    padded = (packing.unpack(states).transpose(1, 2) for states in (query, key, value))  # [N, A, T, D]
    mask = packing.unpack(torch.ones_like(packing.tokens, dtype=torch.bool)[None])  # [N, T], wherever padding stands
    mixed = F.scaled_dot_product_attention(*padded, attn_mask=mask[:, None, None], dropout_p=dropout, scale=scaling)
    return packing.pack(mixed.transpose(1, 2))


def _attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float, scaling: float
) -> Tensor:
    """As `packed_attention`, [1, S, A, D] each, one call for the sentences of each length."""
    groups = packing.by_length()
    sizes, mixed = [count * length for count, length in groups], []
    parts = zip(*(states[0].split(sizes) for states in (query, key, value)), strict=True)
    for group, states in zip(groups, parts, strict=True):
        apart = (part.unflatten(0, group).transpose(1, 2) for part in states)  # [sentences, A, tokens of each, D]
        found = F.scaled_dot_product_attention(*apart, dropout_p=dropout, scale=scaling)
        mixed.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)[None]
