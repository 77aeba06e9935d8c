"""Tokenization, batching and decoding that `Predictor` and the pipeline share.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries. Letters in
shapes: R rows, I inputs (R, or 2 * R if pairs are encoded separately; the two inputs of a row follow each other), S
tokens of all inputs, T tokens of the longest input in a batch, C outputs of a task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from .kinds import KINDS, above_threshold
from .packing import Packing
from .spans import as_read, outside, split

#: Half of a character, such as JSON's "\ud83d" without its other half: no tokenizer takes it.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

MIN_WORDS = 5  # that an input must have room for, beside the special tokens of a pair
FEWEST_SPECIAL = 3  # of any tokenizer that marks where each sentence of a pair ends: [CLS] a [SEP] b [SEP]

Progress = Callable[[int, int], None]


class AnsweringModel(Protocol):
    """The interface of a model for inference: `MinBertForMultiTask`, or an adapter's wrapper around it."""

    config: Any

    @property
    def device(self) -> torch.device: ...

    def encoder_path(self, task: str) -> list[nn.Module]: ...

    @property
    def logits_of(self) -> Callable[..., dict[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class TokenRows:
    """Encoded rows in memory. All tokens are in one array, so a batch needs a few array operations.

    Args:
        ids: int32 [S], token ids, input after input.
        segments: int8 [S], the sentence of a pair that a token belongs to, according to the tokenizer.
        starts: int64 [I + 1], where each input begins, and S.
        sides: the number of inputs per row, 1 or 2.
        words: int32 [S], for the first piece of a word the word's number in its row, and -1 for other tokens. `None`
            unless each word has an answer.
        num_words: int64 [R], the number of words of each row, including words without a token. `None` as for `words`.
    """

    ids: np.ndarray
    segments: np.ndarray
    starts: np.ndarray
    sides: int
    words: np.ndarray | None = None
    num_words: np.ndarray | None = None

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.sides

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """Returns the rows at these positions, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        inputs = indices if self.sides == 1 else (2 * indices[:, None] + [0, 1]).ravel()
        lengths = self.lengths[inputs]
        starts = np.concatenate([[0], lengths.cumsum()])
        places = np.arange(starts[-1]) + np.repeat(self.starts[inputs] - starts[:-1], lengths)
        words = None if self.words is None else self.words[places]
        num_words = None if self.num_words is None else self.num_words[indices]
        return replace(
            self, ids=self.ids[places], segments=self.segments[places], starts=starts, words=words, num_words=num_words
        )

    def read_by(self, config: Any) -> Self:
        """Returns the rows for a model with this config. All segments are 0 if it has a single segment."""
        return self if tells_segments(config) else replace(self, segments=np.zeros_like(self.segments))

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each input, [I]."""
        return np.diff(self.starts)

    def by_word(self, outputs: np.ndarray) -> np.ndarray:
        """Converts outputs for tokens to outputs for words: [R, T, C] -> [R] arrays [words, C].

        The output of a word is that of its first piece. A word that was cut off or has no piece was not read; its
        outputs are minus infinity.
        """
        assert self.words is not None and self.num_words is not None
        found = [np.full((words, outputs.shape[-1]), -np.inf, dtype=np.float32) for words in self.num_words]
        for row, (start, end) in enumerate(pairwise(self.starts)):
            words = self.words[start:end]
            found[row][words[words >= 0]] = outputs[row, : end - start][words >= 0]
        return ragged(found)

    @property
    def row_lengths(self) -> np.ndarray:
        """The number of tokens of each row's longest input, [R]."""
        return self.lengths.reshape(-1, self.sides).max(axis=1)


def ragged(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Makes an [R] object array of arrays with any lengths. numpy would stack arrays of equal length."""
    found = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        found[place] = row
    return found


def tells_segments(config: Any) -> bool:
    """Whether a model distinguishes the two sentences of a pair by segment ids.

    Some tokenizers return them for any model.
    """
    return getattr(config, "type_vocab_size", 2) > 1  # a model of another class may say nothing of it


def length_of(config: Any, task: str | None = None) -> int:
    """Returns the number of tokens that the inputs of a task, or the longest of all tasks, are truncated to.

    This is the length of the training, or all positions.
    """
    # A model of another class says nothing of it, nor does a folder whose own code is older.
    given = getattr(config, "max_input_length", None)
    if isinstance(given, dict):
        given = max(given.values()) if task is None else given[task]
    return config.max_position_embeddings if given is None else given


def checked_length(
    max_length: int | None, config: Any, task: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """Returns the length to truncate inputs to, in tokens: `max_length`, or by default that of `length_of`.

    Args:
        tokenizer: determines the number of special tokens in an input; `None` if it is not loaded yet.

    Raises:
        ValueError: the length is above the model's number of positions (on a GPU this would be an index assert), or
            too short for words.
    """
    own, positions = length_of(config, task), config.max_position_embeddings
    if max_length is None:
        return own
    special = FEWEST_SPECIAL if tokenizer is None else tokenizer.num_special_tokens_to_add(pair=True)
    least = MIN_WORDS + special
    if type(max_length) is not int or not least <= max_length <= positions:
        raise ValueError(
            f"`max_length` must be from {least} to {positions}, the model's number of position embeddings. "
            f"Found {max_length!r}. Change it, or leave it out to use {own}."
        )
    return max_length


def tokenize(
    tokenizer: PreTrainedTokenizerBase, columns: Sequence[list[str]], max_length: int | None = None
) -> dict[str, list[list[int]]]:
    """Makes one input for each row of one or two text columns: its `input_ids` and `token_type_ids`.

    Inputs longer than `max_length`, which includes special tokens, are truncated. In a pair, tokens of the longer side
    are removed one at a time. Segments are those of the tokenizer; see `TokenRows.read_by`.
    """
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    return tokenizer(*columns, **cut, return_attention_mask=False, return_token_type_ids=True, verbose=False)


def tokenize_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None = None
) -> dict[str, list[Any]]:
    """Does the same as `tokenize` for one column of `spans.joined` words. Also returns `words` and `num_words`.

    The text is tokenized as it is, as in pre-training and in stock pipelines. The end of a token in the text
    determines its word.

    Raises:
        ValueError: the tokenizer does not return the positions of tokens in the text.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"A label per word needs a fast tokenizer, which returns the positions of its tokens. Found a "
            f"{type(tokenizer).__name__}. Save the checkpoint with a tokenizer.json."
        )
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoded = tokenizer(
        [*map(as_read, texts)], **cut, return_attention_mask=False, return_token_type_ids=True,
        return_offsets_mapping=True, verbose=False,
    )  # fmt: skip
    ends = [np.cumsum([len(word) + 1 for word in split(text)], dtype=np.int64) - 1 for text in texts]
    words = [*map(_first_pieces, encoded["offset_mapping"], ends)]
    columns = {name: encoded[name] for name in ("input_ids", "token_type_ids")}
    return {**columns, "words": words, "num_words": [*map(len, ends)]}


def _first_pieces(offsets: list[tuple[int, int]], ends: np.ndarray) -> list[int]:
    """Returns, for each token, the word whose first piece it is, or -1.

    Args:
        offsets: where each token begins and ends in the text. Both are 0 for a special token.
        ends: where each word ends.
    """
    begins, token_ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    words = np.searchsorted(ends, token_ends)  # by the end: a byte-level token may begin with the space before it
    words[(token_ends <= begins) | (words == len(ends))] = -1
    # What ends at the space behind a word, such as a lone mark of a word's beginning, belongs to the next word.
    first = np.full(len(words), -1)
    seen, places = np.unique(words, return_index=True)
    first[places[seen >= 0]] = seen[seen >= 0]
    return first.tolist()


def encode_words(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> TokenRows:
    """Encodes one or more rows of `spans.joined` words."""
    encoded = tokenize_words(tokenizer, texts, max_length)
    starts = np.cumsum([0, *map(len, encoded["input_ids"])])
    ids, segments, words = (
        np.fromiter(chain.from_iterable(encoded[name]), dtype, starts[-1])
        for name, dtype in (("input_ids", np.int32), ("token_type_ids", np.int8), ("words", np.int32))
    )
    return TokenRows(ids, segments, starts, 1, words, np.array(encoded["num_words"]))


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, columns: Sequence[list[str]], apart: bool, max_length: int
) -> TokenRows:
    """Encodes rows of one or two text columns, which are not empty. With `apart` each column is a separate input."""
    sides = [tokenize(tokenizer, part, max_length) for part in ([[one] for one in columns] if apart else [columns])]
    ids, segments = (
        list(chain.from_iterable(zip(*(side[name] for side in sides), strict=True)))
        for name in ("input_ids", "token_type_ids")
    )
    starts = np.cumsum([0, *map(len, ids)])
    ids, segments = (
        np.fromiter(chain.from_iterable(lists), dtype, starts[-1])
        for lists, dtype in ((ids, np.int32), (segments, np.int8))
    )
    return TokenRows(ids, segments, starts, len(sides))


def padded(
    rows: TokenRows, pad_token_id: int, width: int | None = None, packing: bool = False, fill: bool = False
) -> dict[str, Any]:
    """Makes a padded batch of these rows.

    Args:
        width: T; by default the length of the longest input.
        packing: add the positions of the real tokens, so that the encoder computes on them only. With `fill` as in
            `Packing.describe`.

    Returns:
        `input_ids`, `attention_mask` and `token_type_ids`, int64 [R, T], or [R, 2, T] for pairs that are encoded
        separately, and `packing` if requested.
    """
    lengths = rows.lengths
    is_token = np.arange(lengths.max() if width is None else width) < lengths[:, None]  # [I, T]
    batch: dict[str, Any] = {
        "input_ids": filled(rows.ids, is_token, pad_token_id),
        "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
        "token_type_ids": filled(rows.segments, is_token, 0),
    }
    if rows.sides == 2:
        batch = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in batch.items()}
    return batch | ({"packing": Packing.describe(is_token, fill)} if packing else {})


def filled(values: np.ndarray, is_token: np.ndarray, padding: int) -> torch.Tensor:
    """Spreads the values of all tokens, [S], to int64 [I, T], with `padding` where `is_token` [I, T] is false."""
    table = np.full(is_token.shape, padding, dtype=np.int64)
    table[is_token] = values
    return torch.from_numpy(table)


def shared_passes(model: AnsweringModel, reads: Mapping[str, Hashable]) -> list[list[str]]:
    """Groups tasks that can share one pass through the encoder.

    Args:
        reads: for each task, a value that describes its inputs and layers. Tasks with equal values can share a pass.
    """
    passes: dict[Any, list[str]] = {}
    for name, what in reads.items():
        passes.setdefault((what, tuple(map(id, model.encoder_path(name)))), []).append(name)
    return list(passes.values())


@torch.inference_mode()
def answer(
    model: AnsweringModel,
    tasks: Sequence[str],
    rows: TokenRows,
    pad_token_id: int,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Computes the outputs of several tasks' heads for the same rows in one pass through the encoder, without padding.

    Args:
        tasks: tasks that share a pass; see `shared_passes`.
        batch_size: the number of rows of the model's full length in a batch. A batch of shorter rows has more of them,
            as many as fill the same space; on a CPU at most `room_of`.
        dtype: the dtype of the computation; half precision under autocast.
        progress: called after each batch with the number of finished rows and the total. A GPU may not have finished
            yet.

    Returns:
        the outputs of each task, float32 [R, C], in the order of the rows; for tasks with words see
        `TokenRows.by_word`.
    """
    device, done = model.device, 0
    batches = batches_of(rows.row_lengths, room_of(model.config, batch_size, device))
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in tasks}
    # Around the loop: autocast keeps the weights that it converts until its end.
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for places in batches:
            inputs = _on_device(padded(rows.take(places), pad_token_id, packing=True), device)
            for name, outputs in model.logits_of(tasks, **inputs).items():
                logits[name].append(outputs.float())
            done += len(places)
            if progress is not None:
                progress(done, len(rows))
    # Fetched at the end: after each batch a GPU would wait until the next one is made ready.
    back = np.argsort(np.concatenate(batches))
    if rows.words is None:
        return {name: torch.cat(found).cpu().numpy()[back] for name, found in logits.items()}
    parts = [*map(rows.take, batches)]
    return {
        name: np.concatenate([part.by_word(of.cpu().numpy()) for part, of in zip(parts, found, strict=True)])[back]
        for name, found in logits.items()
    }


def room_of(config: Any, batch_size: int, device: torch.device) -> int:
    """Returns the number of tokens in a batch: that of `batch_size` rows of full length.

    On a CPU, a layer's widest tensor is limited to 32 MB. The C library requests larger pieces of memory from the
    system each time, and the system clears them. Prediction with batches of four times this size took a third longer.
    """
    full = config.max_position_embeddings
    room = batch_size * full
    return min(room, max(full, 2**23 // config.intermediate_size)) if device.type == "cpu" else room


def batches_of(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """Returns the positions of rows grouped by similar length, the longest first. No batch is padded to one long row.

    Args:
        lengths: the number of tokens of each row, [R].
        room: the number of tokens in a batch, including padding.
    """
    order, start, batches = np.argsort(-lengths, kind="stable"), 0, []
    while start < len(order):
        size = room // int(lengths[order[start]])
        batches.append(order[start : start + size])
        start += size
    return batches


def _on_device(value: Any, device: torch.device) -> Any:
    """A batch's tensors there. From pinned memory the copy to a GPU does not wait for it."""
    if isinstance(value, dict):
        return {name: _on_device(item, device) for name, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


@dataclass(frozen=True)
class Decoded:
    """Predictions for N examples.

    Args:
        values: class ids, int64 [N], or scores, float64 [N]. For `kind: labels`, `probabilities`;
            `kinds.above_threshold` returns the predicted labels. For tags, class ids in [N] arrays, [words] each, with
            -1 for a word that was not read.
        probabilities: float64 [N, C], where C is 2 for a binary task; `None` for a score. For tags, [N] arrays,
            [words, C] each, with zeros for a word that was not read.
        expected: the mean class position by these probabilities, float64 [N], for ordered classes.
    """

    values: np.ndarray
    probabilities: np.ndarray | None
    expected: np.ndarray | None = None


def unread(logits: np.ndarray) -> np.ndarray:
    """Returns which words were not read, from the marks of `TokenRows.by_word`; [words, C] -> [words]."""
    return np.asarray(np.isneginf(logits).all(axis=-1))


def tagged(
    labels: Sequence[str], words: Sequence[str], values: np.ndarray, probabilities: np.ndarray
) -> dict[str, list[Any]]:
    """Returns the `tokens` of a sentence, their `tags` and the `probabilities` of these tags, from a row of `Decoded`.

    A word that was not read has the tag O, or the first label if there is no O, and the probability `None`.
    """
    usual = outside(labels)
    return {
        "tokens": [*words],
        "tags": [labels[value] if value >= 0 else labels[usual] for value in values.tolist()],
        "probabilities": [
            float(row[value]) if value >= 0 else None for value, row in zip(values, probabilities, strict=True)
        ],
    }


def read_words(kind: str, logits: np.ndarray) -> Decoded:
    """Does the same as `read_logits` for [N] arrays [words, C] from `TokenRows.by_word`."""
    flat = np.concatenate(logits).astype(np.float64)
    read, values, probabilities = ~unread(flat), np.full(len(flat), -1), np.zeros(flat.shape)
    found = read_logits(kind, flat[read]) if read.any() else None
    if found is not None and found.probabilities is not None:
        values[read], probabilities[read] = found.values, found.probabilities
    ends = np.cumsum([len(row) for row in logits])[:-1]
    return Decoded(ragged(np.split(values, ends)), ragged(np.split(probabilities, ends)))


def class_logits(logits: torch.Tensor) -> torch.Tensor:
    """Computes the log probabilities of the classes from the outputs of an ordinal head, [..., C - 1] -> [..., C].

    Output k is the logit of P(y > k | y > k - 1). P(y > k) is the product of the first k + 1 of these probabilities,
    so it never increases with k (CORN: Shi, Cao and Raschka 2021, arXiv:2111.08851). Logits of P(y > k) itself have no
    such guarantee: with a separate bias each, as in CORAL (Cao, Mirjalili and Raschka 2020, arXiv:1901.07884), they
    may cross before the loss reaches its minimum. One score minus ordered thresholds would not cross either, but
    assumes the same effect of the text on every step and needs further parameters.
    """
    # Added one after another: a sum by parts could round to more than the one before.
    above = torch.stack([*accumulate(F.logsigmoid(logits).unbind(-1))], dim=-1)  # log P(y > k)
    return F.pad(above, (1, 0)) + F.pad(F.logsigmoid(-logits), (0, 1))


def read_logits(
    kind: str, logits: np.ndarray, temperature: float = 1.0, thresholds: float | Sequence[float] = 0.5
) -> Decoded:
    """Decodes the outputs of a head, float64 [N, outputs].

    The predicted class has the largest logit; of equal logits, the first. The logit z of a binary task is read as the
    two logits (0, z). Its second label is predicted above probability 1/2, and the first label at exactly 1/2, as in
    stock pipelines and in the course's code (`round(0.5)` is 0). For `kind: labels`, each probability is the sigmoid
    of a logit. A score is not changed. All is computed in float64.

    Args:
        temperature: logits are divided by it before they become probabilities (Guo et al. 2017,
            https://arxiv.org/abs/1706.04599). The predicted class comes from the original logits, so that rounding
            cannot change it.
        thresholds: for a binary task, the probability above which the second label is predicted. For `kind: labels`
            they are not used here; see `above_threshold`.

    Raises:
        ValueError: a logit is not finite.
    """
    if broken := int((~np.isfinite(logits)).any(axis=1).sum()):
        raise ValueError(
            f"{broken} of {len(logits)} outputs of the model are not finite: it has diverged. Train it again with a "
            "lower learning rate."
        )
    if KINDS[kind].is_score:
        return Decoded(logits[:, 0], None)
    if KINDS[kind].is_set:
        probabilities = np.exp(-np.logaddexp(0.0, -logits / temperature))
        return Decoded(probabilities, probabilities)
    if kind == "binary":
        z = logits[:, 0] / temperature
        # sigmoid(z) = exp(-log(1 + exp(-z))), the logarithm computed without overflow
        probabilities = np.exp(-np.logaddexp(0.0, np.stack([z, -z], axis=1)))
        is_second = z > 0 if thresholds == 0.5 else above_threshold(probabilities[:, 1], thresholds)
        return Decoded(is_second.astype(np.int64), probabilities)
    if kind == "ordinal":
        logits = class_logits(torch.from_numpy(logits)).numpy()
    exponentials = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    expected = probabilities @ np.arange(probabilities.shape[1]) if kind == "ordinal" else None
    return Decoded(logits.argmax(axis=1), probabilities, expected)
