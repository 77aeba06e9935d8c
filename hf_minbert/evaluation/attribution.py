"""Word attributions by integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365, equation 1).

The path is a straight line in the space of word embeddings. It starts at the text with all words replaced by the mask
token and ends at the text. Special tokens, positions and segments do not change. This file is copied to a Space beside
`demo.py`, so it may import only published libraries and files that are copied too. Tasks are dicts as in a model's
config. Letters in shapes: T tokens, H hidden size, P points of the path, C outputs of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..model.inference import class_logits, tells_segments
from ..model.kinds import KINDS

if TYPE_CHECKING:
    from ..model.modeling_minbert import MinBertForMultiTask  # no part of a Space

STEPS = 16  # on all-MiniLM-L6-v2 the sum is then right to some thousandths; see `Attribution.error`
TOKENS_AT_ONCE = 2048  # of all points in one pass: a long text has few at a time, and its graph fits into memory


class Word(NamedTuple):
    """A word of the text with all its pieces: its position in the sentence and in the flattened input."""

    start: int
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """One example as the encoder of a task reads it.

    Args:
        inputs: `input_ids`, `attention_mask` and `token_type_ids`, [1, T], or [1, 2, T] for a pair encoded separately.
        words: the words that are read, by sentence. Special tokens, padding and spaces belong to no word.
        unread: the number of tokens that were cut off because the model has no more positions.
    """

    inputs: dict[str, Tensor]
    words: tuple[tuple[Word, ...], ...]
    unread: int


def read(tokenizer: PreTrainedTokenizerBase, config: Any, task: str, texts: Sequence[str], max_length: int) -> Reading:
    """Tokenizes one example of a task, one or two texts, as in prediction, and records the positions of its words.

    A word is a word of the tokenizer, or a part of it that begins after a space.
    """
    apart = config.get_task(task)["pair_encoding"] == "bi"
    columns = [list(texts)] if apart else [[text] for text in texts]
    # Position 0 is the first token's, whatever side the tokenizer was saved with.
    kept = tokenizer(
        *columns, truncation=True, max_length=max_length, padding=True, padding_side="right", return_tensors="pt",
        return_token_type_ids=True, return_attention_mask=True,
    )  # fmt: skip
    whole = tokenizer(*columns, verbose=False)["input_ids"]
    words: list[list[Word]] = [[] for _ in texts]
    width = kept["input_ids"].shape[1]
    for row, encoding in enumerate(kept.encodings):
        for side, text in [(row, texts[row])] if apart else enumerate(texts):
            words[side] = _words(encoding, 0 if apart else side, text, row * width)
    inputs = {name: kept[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    if not tells_segments(config):
        inputs["token_type_ids"].zero_()
    if apart:
        inputs = {name: values[None] for name, values in inputs.items()}
    unread = sum(map(len, whole)) - int(kept["attention_mask"].sum())
    return Reading(inputs, tuple(map(tuple, words)), unread)


def _words(encoding: Encoding, sentence: int, text: str, first: int) -> list[Word]:
    """The words of one of an input's sentences; `first` is the place of the input's first token."""
    found: list[Word] = []
    last = None
    for place, (of, word, (start, end)) in enumerate(
        zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True), first
    ):
        if of != sentence:  # by this, not by its id: a text may hold the letters [SEP]
            continue
        if not found or word != last or text[found[-1].end : end][:1].isspace():
            found.append(Word(start, end, (place,)))
        else:
            found[-1] = Word(found[-1].start, max(end, found[-1].end), (*found[-1].tokens, place))
        last = word
    # A byte-level token holds the space before it, and may be nothing else.
    trimmed = [word._replace(start=word.end - len(text[word.start : word.end].lstrip())) for word in found]
    return [word for word in trimmed if word.start < word.end]


@dataclass(frozen=True)
class Attribution:
    """The contribution of each word to a quantity of the answer.

    Args:
        values: a number for each word of `Reading.words`, by sentence.
        start: the quantity with all words hidden.
        end: the quantity for the text. `values` sum to `end - start`, up to the error of the numerical integral.
    """

    values: tuple[np.ndarray, ...]
    start: float
    end: float

    @property
    def error(self) -> float:
        """The difference between `end - start` and the sum of the values."""
        return self.end - self.start - float(sum(values.sum() for values in self.values))


def quantity(logits: Tensor, kind: str, chosen: int) -> Tensor:
    """Returns the attributed quantity, [P, C] -> [P]: the score, or the log-odds of label `chosen` against all others.

    For `kind: labels`, these are the log-odds of the label against its absence. A logit would not do: adding the same
    number to all logits changes no answer and must change no attribution. A probability would not do either: near 1 it
    hardly changes.
    """
    if KINDS[kind].is_score:
        return logits[:, 0]
    if KINDS[kind].is_set:
        return logits[:, chosen]
    if kind == "binary":
        return logits[:, 0] if chosen else -logits[:, 0]
    if kind == "ordinal":
        logits = class_logits(logits)
    others = torch.cat([logits[:, :chosen], logits[:, chosen + 1 :]], dim=1)
    return logits[:, chosen] - others.logsumexp(dim=1)


def integrated_gradients(
    model: MinBertForMultiTask,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    reading: Reading,
    chosen: int,
    steps: int = STEPS,
) -> Attribution:
    """Attributes an answer to the words of the text.

    Args:
        model: in eval mode.
        reading: the result of `read` for this task.
        chosen: the class whose log-odds are attributed. Not used for a score.
        steps: the number of Gauss-Legendre points on the path. Each costs a forward and a backward pass.

    Raises:
        ValueError: the tokenizer has no mask token to hide words with.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("`tokenizer` has no mask token, which stands for a hidden word. Found None.")
    kind = model.config.get_task(task)["kind"]
    inputs = {name: values.to(model.device) for name, values in reading.inputs.items()}
    ids, embed = inputs.pop("input_ids"), model.encoder_of(task).get_input_embeddings()
    if (positions := model.positions_of(task, ids)) is not None:
        inputs["position_ids"] = positions
    is_word = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    is_word[[place for words in reading.words for word in words for place in word.tokens]] = True

    def value(points: Tensor) -> Tensor:
        beside = {name: values.expand(len(points), *values.shape[1:]) for name, values in inputs.items()}
        return quantity(model(inputs_embeds=points, task=task, **beside).logits, kind, chosen)

    with torch.no_grad():
        text = embed(ids)  # [1, T, H] or [1, 2, T, H]
        hidden = embed(ids.masked_fill(is_word.view_as(ids), tokenizer.mask_token_id))
        start, end = value(torch.cat([hidden, text])).tolist()
    places, weights = (torch.as_tensor(numbers).to(text) for numbers in _gauss_legendre(steps))
    total = torch.zeros_like(text[0])
    with torch.enable_grad():
        size = max(1, TOKENS_AT_ONCE // ids.numel())
        for part, weight in zip(places.split(size), weights.split(size), strict=True):
            points = torch.lerp(hidden, text, part.view(-1, *[1] * (text.dim() - 1))).requires_grad_()
            (gradient,) = torch.autograd.grad(value(points).sum(), points)
            total += torch.tensordot(weight, gradient, dims=1)
    by_token = (total * (text - hidden)[0]).sum(dim=-1).flatten().double().cpu().numpy()
    values = tuple(np.array([by_token[list(word.tokens)].sum() for word in words]) for words in reading.words)
    return Attribution(values, start, end)


def _gauss_legendre(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of the integral from 0 to 1."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    return (points + 1) / 2, weights / 2
