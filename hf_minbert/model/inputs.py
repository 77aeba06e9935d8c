"""A task's inputs in the shape of the encoder: separately encoded pairs, and joined pairs that are split.

This file is uploaded to the Hub with a model. It may import only published libraries. Letters in shapes: B examples, T
tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def taken_apart(
    inputs: dict[str, Tensor | None], task: dict[str, Any], sep_token_id: int | None = None
) -> dict[str, Tensor | None]:
    """Splits joined pairs into two inputs each, for `bi`: [CLS] a [SEP] b [SEP] -> [CLS] a [SEP] and [CLS] b [SEP].

    The second sentence has segment id 1. Many tokenizers return no segment ids. If no token of the batch has segment
    id 1, the second sentence begins after the first separator, or after the first two if they follow each other.

    Args:
        inputs: `input_ids` [B, T], `token_type_ids`, 1 in the second sentence, and `attention_mask`, with padding on
            either side. Inputs that are not joined pairs, and those of other tasks, are not changed.
        sep_token_id: the id of the tokenizer's separator. Without it, segment ids are needed.

    Returns:
        the same three, [B, 2, T], where T is the length of the longest sentence. They are padded on the right with
        arbitrary tokens. Each side equals the tokenizer's output for its sentence alone.

    Raises:
        ValueError: the segments or the mask have another shape, or an example has no second sentence.
    """
    ids, segments, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    if task["pair_encoding"] != "bi" or ids is None or ids.dim() != 2 or not len(ids):
        return inputs
    segments = torch.zeros_like(ids) if segments is None else segments
    mask = torch.ones_like(ids) if mask is None else mask
    for name, given in (("token_type_ids", segments), ("attention_mask", mask)):
        if given.shape != ids.shape:
            raise ValueError(
                f"Task {task['name']!r}: `{name}` must be {list(ids.shape)}, as its input. Found {list(given.shape)}."
            )
    is_token = mask.bool()
    begin = _first(is_token)  # [CLS], which begins both
    second = is_token & (segments == 1)
    first = is_token & ~second
    by_separator = sep_token_id is not None and not second.any()
    if by_separator:
        first, second = _parted(is_token, is_token & (ids == sep_token_id))
    if not second.any(dim=1).all():
        lacking = "no token with segment id 1" + " and no separator with a sentence behind it" * by_separator
        raise ValueError(
            f"Task {task['name']!r} compares two sentences, and an example has {lacking}. Tokenize "
            "both, as `tokenizer(text, text_pair)`; pipelines take {'text': ..., 'text_pair': ...}."
        )
    sides = torch.stack([first, second | begin], dim=1)  # [B, 2, T]
    lengths = sides.sum(dim=-1, keepdim=True)
    width = int(lengths.max())
    places = sides.int().argsort(dim=-1, descending=True, stable=True)[..., :width]
    taken = ids[:, None].expand(sides.shape).gather(-1, places)
    seen = torch.arange(width, device=ids.device) < lengths
    return {**inputs, "input_ids": taken, "token_type_ids": torch.zeros_like(taken), "attention_mask": seen.long()}


def _parted(is_token: Tensor, is_separator: Tensor) -> tuple[Tensor, Tensor]:
    """Returns masks of the first sentence with its separator, and of the second sentence, both [B, T]."""
    behind = (is_separator.cumsum(dim=1) - is_separator.long()) > 0
    second = is_token & behind
    # RoBERTa joins by two separators, </s></s>. A lone one behind the first is the end of an empty second sentence.
    doubled = _first(second) & is_separator & (second.sum(dim=1, keepdim=True) > 1)
    return is_token & ~behind, second & ~doubled


def _first(chosen: Tensor) -> Tensor:
    """Returns [B, T], true at the first position of each row where `chosen` is true."""
    return chosen & (chosen.cumsum(dim=1) == 1)


def sentences(inputs: dict[str, Tensor | None], task: dict[str, Any]) -> dict[str, Tensor | None]:
    """Reshapes a task's inputs for the encoder: for `bi`, [B, 2, ...] -> [2 * B, ...]; otherwise no change.

    Raises:
        ValueError: they have another shape, or there are no examples.
    """
    bi = task["pair_encoding"] == "bi"
    for name, depth in (("input_ids", 0), ("inputs_embeds", 1)):
        given = inputs[name]
        if given is None:
            continue
        if given.dim() != 2 + bi + depth or (bi and given.shape[1] != 2):
            expected = ("[B, 2, T" if bi else "[B, T") + (", H]" if depth else "]")
            apart = "encodes the two sentences of an example apart, each as an input of its own"
            why = apart if bi else "has one input per example"
            raise ValueError(f"Task {task['name']!r} {why}: `{name}` must be {expected}. Found {list(given.shape)}.")
        if given.shape[0] == 0:  # not len(given), which would fix the number of examples in an exported graph
            raise ValueError(f"Task {task['name']!r}: `{name}` holds no example. Found {list(given.shape)}.")
        if bi:
            _check_beside(task["name"], inputs, given.shape[:3])
    if not bi:
        return inputs
    return {
        name: given.flatten(0, 1) if given is not None and given.dim() > 2 else given for name, given in inputs.items()
    }


def _check_beside(task: str, inputs: dict[str, Tensor | None], shape: Sequence[int]) -> None:
    """Raises `ValueError` if a tensor with values for tokens does not have the shape of a separately encoded pair."""
    for name in ("attention_mask", "token_type_ids", "position_ids"):
        given = inputs[name]
        if given is not None and given.shape != shape:
            raise ValueError(
                f"Task {task!r}: `{name}` must be {list(shape)}, as its input. Found {list(given.shape)}."
            )


def counted_positions(input_ids: Tensor, padding: int) -> Tensor:
    """Returns positions that count the tokens which are not padding, starting after the padding's id, [..., T].

    Padding has the position of its id.
    """
    is_token = (input_ids != padding).long()
    return is_token.cumsum(dim=-1) * is_token + padding


def tokens_of(attention_mask: Tensor) -> Tensor:
    """Returns [B, T], true for a token."""
    # A row without any token would be a softmax over nothing, NaN in some kernels: it reads all of itself.
    seen = attention_mask.bool()
    return seen | ~seen.any(dim=-1, keepdim=True)
