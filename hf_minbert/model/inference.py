"""Text through a saved model, and what its numbers say: what `Predictor` and the pipeline have in common.

This file travels to the Hub with a model: it may import its neighbours and published libraries only. Letters in
shapes: R rows, I inputs (R, or 2 * R where a pair is encoded apart: a row's two follow each other), S tokens of all
inputs together, T tokens of a batch's longest, C outputs of a task.
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
    """What is asked of a model here: a `MinBertForMultiTask`, or an adapter's wrapper around one."""

    config: Any

    @property
    def device(self) -> torch.device: ...

    def encoder_path(self, task: str) -> list[nn.Module]: ...

    @property
    def logits_of(self) -> Callable[..., dict[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class TokenRows:
    """Encoded rows in memory: all tokens in one array, so that a batch is a few array operations.

    Args:
        ids: int32 [S], token ids, input by input.
        segments: int8 [S], the sentence of a pair that a token is of, as the tokenizer has it.
        starts: int64 [I + 1], where each input begins, and S.
        sides: inputs of a row, 1 or 2.
        words: int32 [S], the word, counted from 0 in its row, whose first piece a token is, and -1 for other tokens;
            `None` unless each word has an answer.
        num_words: int64 [R], of each row, those that no token is a piece of included; `None` likewise.
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
        """The rows at these places, in this order."""
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
        """The rows for the model of this config: all segments are 0 if it does not tell two of them apart."""
        return self if tells_segments(config) else replace(self, segments=np.zeros_like(self.segments))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each input, [I]."""
        return np.diff(self.starts)

    def by_word(self, outputs: np.ndarray) -> np.ndarray:
        """What a head says of each word, from what it says of each token: [R, T, C] -> [R] arrays [words, C].

        A word answers by its first piece. One that was cut off, or has no piece, was not read: it has minus infinity.
        """
        assert self.words is not None and self.num_words is not None
        found = [np.full((words, outputs.shape[-1]), -np.inf, dtype=np.float32) for words in self.num_words]
        for row, (start, end) in enumerate(pairwise(self.starts)):
            words = self.words[start:end]
            found[row][words[words >= 0]] = outputs[row, : end - start][words >= 0]
        return ragged(found)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row's longest input, [R]."""
        return self.lengths.reshape(-1, self.sides).max(axis=1)


def ragged(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of any lengths as [R] objects, where numpy would stack equally long ones."""
    found = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        found[place] = row
    return found


def tells_segments(config: Any) -> bool:
    """Whether a model tells the two sentences of a pair by segment ids, which some tokenizers give to any model."""
    return getattr(config, "type_vocab_size", 2) > 1  # a model of another class may say nothing of it


def length_of(config: Any, task: str | None = None) -> int:
    """Tokens that a task's inputs, or the longest of any task, are cut to: as in training, else all positions."""
    # A model of another class says nothing of it, nor does a folder whose own code is older.
    given = getattr(config, "max_input_length", None)
    if isinstance(given, dict):
        given = max(given.values()) if task is None else given[task]
    return config.max_position_embeddings if given is None else given


def checked_length(
    max_length: int | None, config: Any, task: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """The length to cut inputs to, in tokens: `max_length`, or unless given what `length_of` says.

    Args:
        tokenizer: says how many special tokens an input has; `None` where it is not loaded yet.

    Raises:
        ValueError: more than the model has positions (an index assert on a GPU otherwise), or too short to hold words.
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
    """One input for each row of one or two columns of text: its `input_ids` and `token_type_ids`.

    With `max_length`, special tokens included, an input that is longer is cut; of a pair, token by token the longer
    side. The segments are the tokenizer's, whatever the model reads; see `TokenRows.read_by`.
    """
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    return tokenizer(*columns, **cut, return_attention_mask=False, return_token_type_ids=True, verbose=False)


def tokenize_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None = None
) -> dict[str, list[Any]]:
    """As `tokenize` for one column of `spans.joined` words: also `words` and `num_words`, as `TokenRows` has them.

    The text is tokenized as it stands, as in pre-training and in stock pipelines, and where a token ends in it says of
    which word it is a piece.

    Raises:
        ValueError: the tokenizer does not say where in the text a token stands.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"A label per word needs a fast tokenizer, which says where its tokens stand. Found a "
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
    """For each token the word whose first piece it is, or -1.

    Args:
        offsets: where each token begins and ends in the text; a special one at 0 both.
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
    """Rows of `spans.joined` words, one row or more."""
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
    """Rows of one or two columns of text, not empty; with `apart` each column is an input of its own."""
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
    """A batch of these rows.

    Args:
        width: T; that of the longest input unless given.
        packing: say where the real tokens stand, so that the encoder computes on them alone; with `fill` as
            `Packing.describe` has it.

    Returns:
        `input_ids`, `attention_mask` and `token_type_ids`, int64 [R, T], or [R, 2, T] of pairs that are encoded apart,
        and `packing` where it is asked for.
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
    """[S], the values of all tokens in a row, -> int64 [I, T], with `padding` where `is_token` [I, T] is false"""
    table = np.full(is_token.shape, padding, dtype=np.int64)
    table[is_token] = values
    return torch.from_numpy(table)


def shared_passes(model: AnsweringModel, reads: Mapping[str, Hashable]) -> list[list[str]]:
    """The tasks by what goes through which layers: those of a group can share one pass through the encoder.

    Args:
        reads: task to what its inputs are made from and how; tasks for which that is equal read the same.
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
    """What several tasks' heads say of the same rows, from one pass through the encoder; only real tokens go through.

    Args:
        tasks: tasks that share a pass; see `shared_passes`.
        batch_size: how many rows of the model's full length go through it at once. Of shorter rows more do, as many as
            fill the same space; on a CPU at most `room_of`.
        dtype: what to compute in; half precision under autocast.
        progress: called with the rows done and the rows in all, after each batch; a GPU may lag behind it.

    Returns:
        each task's outputs, float32 [R, C], in the order of the rows; of rows with words, as `TokenRows.by_word`.
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
    """Tokens of a batch: those of `batch_size` rows of full length; on a CPU no more than 32 MB of a layer's widest.

    The C library asks the system for each larger piece of memory anew, and the CPU waits while it is cleared: from
    text to logits, batches of four times that size took a third longer.
    """
    full = config.max_position_embeddings
    room = batch_size * full
    return min(room, max(full, 2**23 // config.intermediate_size)) if device.type == "cpu" else room


def batches_of(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """The places of rows of about equal length, the longest first: no batch is padded to a stray long row.

    Args:
        lengths: tokens of each row, [R].
        room: tokens of a batch, padding included.
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
        values: class ids, int64 [N], or scores, float64 [N]; where any labels may be right, `probabilities`, of which
            `kinds.above_threshold` says what is answered. Of tags, class ids in [N] arrays, [words] each, with -1 for
            a word that was not read.
        probabilities: float64 [N, C], C = 2 for a binary task; `None` for a score. Of tags, [N] arrays, [words, C]
            each, with zeros for a word that was not read.
        expected: the mean place by these probabilities, float64 [N], where classes have an order.
    """

    values: np.ndarray
    probabilities: np.ndarray | None
    expected: np.ndarray | None = None


def unread(logits: np.ndarray) -> np.ndarray:
    """Which words were not read, as `TokenRows.by_word` marks them; [words, C] -> [words]."""
    return np.asarray(np.isneginf(logits).all(axis=-1))


def tagged(
    labels: Sequence[str], words: Sequence[str], values: np.ndarray, probabilities: np.ndarray
) -> dict[str, list[Any]]:
    """A sentence with its tags, from a row of `Decoded`: `tokens`, `tags` and the `probabilities` of these tags.

    A word that was not read has the tag O, or the first one where there is no O, and the probability `None`.
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
    """As `read_logits`, for [N] arrays [words, C] of `TokenRows.by_word`."""
    flat = np.concatenate(logits).astype(np.float64)
    read, values, probabilities = ~unread(flat), np.full(len(flat), -1), np.zeros(flat.shape)
    found = read_logits(kind, flat[read]) if read.any() else None
    if found is not None and found.probabilities is not None:
        values[read], probabilities[read] = found.values, found.probabilities
    ends = np.cumsum([len(row) for row in logits])[:-1]
    return Decoded(ragged(np.split(values, ends)), ragged(np.split(probabilities, ends)))


def class_logits(logits: torch.Tensor) -> torch.Tensor:
    """The logarithms of the classes' probabilities by an ordinal head's outputs, [..., C - 1] -> [..., C].

    Output k is the logit of P(y > k | y > k - 1), of a class above k where it is none below. So P(y > k), the product
    of the first k + 1 of these, never rises with k, whatever a head gives (CORN: Shi, Cao and Raschka 2021,
    arXiv:2111.08851). Logits of P(y > k) itself do not say so much: with a bias each, as in CORAL (Cao, Mirjalili and
    Raschka 2020, arXiv:1901.07884), they may cross until the loss has its minimum. One score less ordered cut points
    would not cross either, but holds the text to have one effect on every step, and needs parameters beside a head's.
    """
    # Added one after another: a sum by parts could round to more than the one before.
    above = torch.stack([*accumulate(F.logsigmoid(logits).unbind(-1))], dim=-1)  # log P(y > k)
    return F.pad(above, (1, 0)) + F.pad(F.logsigmoid(-logits), (0, 1))


def read_logits(
    kind: str, logits: np.ndarray, temperature: float = 1.0, thresholds: float | Sequence[float] = 0.5
) -> Decoded:
    """What a head's own outputs say, float64 [N, outputs].

    A class is the one of the largest logit; of equal ones, the first. The logit z of a binary task is the two logits
    (0, z): its second label is the answer above probability 1/2, and its first one at exactly 1/2, as stock pipelines
    and the rounding of the course's code have it (`round(0.5)` is 0). Where any labels may be right, each has the
    sigmoid of its logit. A score stays as predicted. Computed in float64.

    Args:
        temperature: what logits are divided by before they become probabilities (Guo et al. 2017,
            https://arxiv.org/abs/1706.04599). The answer is that of the logits themselves, so that rounding cannot
            change it.
        thresholds: of a binary task, the probability above which the second label is the answer. Where any labels may
            be right, the probabilities pass as they are, for `above_threshold`.

    Raises:
        ValueError: a logit is not finite, which is no answer.
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
