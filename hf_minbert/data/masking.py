"""Masked language modelling: selects the tokens to predict, and replaces them in the input.

The draws for a text are a pure function of the seed, the epoch and the text's number. They do not depend on the batch.
They are therefore the same in a resumed run and for any number of processes and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import MinBertError
from ..model.inference import filled
from ..model.modeling_minbert import IGNORED
from ..model.packing import Packing
from .rows import EncodedRows

#: How pieces of words are told: WordPiece marks those that go on with a word, byte-level BPE and SentencePiece the
#: first of each, and with it the space before it.
GOES_ON, BEGINS = "##", ("Ġ", "▁")


class Text(NamedTuple):
    """An encoded text, [T], and the seed, epoch and number that its draws depend on. `None` masks no token."""

    ids: np.ndarray
    place: tuple[int, int, int] | None


class HeldOutTexts(Dataset):
    """Texts to evaluate on. Seed and epoch are fixed, so every evaluation of every run masks the same tokens."""

    def __init__(self, rows: EncodedRows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Text:
        return Text(self.rows.ids_of(index), (0, 0, index))


class TrainingTexts(Dataset):
    """Texts to train on: item `i` is a pure function of seed, epoch and `i`.

    The sources follow each other: all epochs of the first source, each shuffled anew, then all epochs of the next. An
    epoch of the dataset has as many items as there are texts, and may contain the end of one source and the start of
    the next. With one source, an epoch is a shuffle of its texts. The order is drawn here and not by a torch sampler,
    because a sampler loses its epoch when several processes resume in the middle of an epoch.

    Items after the last text have nothing to predict. They fill the last step of an epoch, in which every process
    needs a batch. accelerate would fill it with the epoch's first texts, which several processes would then train on
    twice.

    Args:
        rows: the texts of all sources.
        sizes: the number of texts of each source, in the order of the sources.
        epochs: how often each source is seen. The last source continues without end.
        seed: the seed of the orders and of the draws for each text.
    """

    def __init__(self, rows: EncodedRows, sizes: Sequence[int], epochs: float, seed: int):
        self.rows, self.sizes, self.epochs, self.seed = rows, list(sizes), epochs, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of each epoch."""
        parts = list(self._parts(epoch * len(self), (epoch + 1) * len(self)))
        self._numbers = np.concatenate([numbers for numbers, _ in parts])
        self._epochs = np.concatenate([np.full(len(numbers), own) for numbers, own in parts])

    def _parts(self, low: int, high: int) -> Iterator[tuple[np.ndarray, int]]:
        """Texts `low` to `high` of the whole training: their numbers, and which epoch of their source it is."""
        first = 0  # the number of the source's first text
        for source, size in enumerate(self.sizes):
            length = high if source == len(self.sizes) - 1 else min(high, round(self.epochs * size))
            for own in range(max(low, 0) // size, -(-length // size)):
                order = first + np.random.default_rng([self.seed, own, source]).permutation(size)
                yield order[max(low - own * size, 0) : length - own * size], own
            first += size
            low, high = low - round(self.epochs * size), high - round(self.epochs * size)
            if high <= 0:
                return

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Text:
        if index >= len(self):
            return Text(self.rows.ids_of(0)[:1], None)
        number = int(self._numbers[index])
        return Text(self.rows.ids_of(number), (self.seed, int(self._epochs[index]), number))


class MaskingCollator:
    """Chooses tokens for the model to predict (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

    Each token is chosen with the same probability. Special tokens and padding are never chosen. A chosen token becomes
    the mask token in 80 % of cases, a random token of the vocabulary in 10 %, and stays unchanged in 10 %.

    Args:
        tokenizer: a tokenizer with a mask token.
        probability: the probability that a token, or a word, is chosen.
        whole_words: choose whole words: a token and the pieces that continue it, as the vocabulary marks them (`##`,
            `Ġ`, `▁`). If a tokenizer separates words by spaces only, a comma belongs to the word before it. The
            replacement of each piece is drawn separately, as in the code of BERT's authors.
        packing: add the positions of the real tokens, so that the encoder computes on them only.
        fill_to: always pad to this length, and round the numbers of packed tokens and of words to predict up to one of
            a few sizes. Most batches then have one of few shapes.

    Raises:
        MinBertError: the tokenizer has no mask token, or `whole_words` is set and its vocabulary does not mark word
            pieces.
    """

    MASKED, RANDOM = 0.8, 0.9  # a draw below the first masks, one below the second gives a random token

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        probability: float = 0.15,
        whole_words: bool = False,
        packing: bool = False,
        fill_to: int | None = None,
    ):
        if tokenizer.mask_token_id is None:
            raise MinBertError(
                "The tokenizer has no mask token, such as [MASK] or <mask>, to stand for the words to predict. Give a "
                "checkpoint that was pretrained on masked words."
            )
        self.probability, self.whole_words, self.packing, self.fill_to = probability, whole_words, packing, fill_to
        self.pad, self.mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        vocabulary = tokenizer.get_vocab()
        self.ids = np.unique([*vocabulary.values()])  # not all below the highest, where special tokens stand apart
        size = self.ids[-1] + 1
        self.is_special = np.isin(np.arange(size), tokenizer.all_special_ids)
        self.continues = np.isin(np.arange(size), _going_on(vocabulary) if whole_words else [])

    def __call__(self, texts: Sequence[Text]) -> dict[str, Any]:
        """Makes a batch of B texts with T tokens.

        Returns:
            `input_ids`, `attention_mask` and `labels`, int64 [B, T]. `labels` are -100 except at chosen tokens.
            `predicted`, int64 [P], has the positions of the chosen tokens in the flattened batch, and B * T as a
            filler.
        """
        ids, labels = (np.concatenate(arrays) for arrays in zip(*map(self._masked, texts), strict=True))
        lengths = np.array([len(text.ids) for text in texts])
        is_token = np.arange(self.fill_to or lengths.max()) < lengths[:, None]  # [B, T]
        packing = Packing.describe(is_token, fill=self.fill_to is not None)
        places = np.flatnonzero(is_token)[labels != IGNORED]
        fillers = 0 if self.fill_to is None else self._words(len(packing["tokens"]), len(places)) - len(places)
        batch = {
            "input_ids": filled(ids, is_token, self.pad),
            "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
            "labels": filled(labels, is_token, IGNORED),
            "predicted": torch.from_numpy(np.concatenate([places, np.full(fillers, is_token.size)])),
        }
        return batch | ({"packing": packing} if self.packing else {})

    def _words(self, tokens: int, chosen: int) -> int:
        """How many words a batch of so many tokens has room for: one size for nearly all batches, or its double."""
        usual = tokens * self.probability
        room = min(tokens, math.ceil((usual + 4 * math.sqrt(usual)) / 8) * 8)
        while room < chosen:
            room *= 2
        return room

    def _masked(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """The text's ids as the model sees them, and its labels."""
        ids = text.ids
        if text.place is None:
            return ids, np.full_like(ids, IGNORED)
        generator = np.random.default_rng(text.place)
        # As many draws for every text of a length, so that none depends on what another one came to.
        choice, fate = generator.random((2, len(ids)))
        random = self.ids[generator.integers(len(self.ids), size=len(ids))]
        free = ~self.is_special[ids]
        if self.whole_words:
            choice = choice[self._word_starts(ids)]
        chosen = free & (choice < self.probability)
        seen = np.where(fate < self.MASKED, self.mask, np.where(fate < self.RANDOM, random, ids))
        return np.where(chosen, seen, ids), np.where(chosen, ids, IGNORED)

    def _word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Returns, for each token, where its word begins.

        A special token belongs to no word and ends the word before it.
        """
        special = self.is_special[ids]
        starts = special | ~self.continues[ids] | np.concatenate([[True], special[:-1]])
        return np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))


def _going_on(vocabulary: Mapping[str, int]) -> list[int]:
    """Returns the ids of pieces that continue a word, if the piece before them is not a special token."""
    marked = {mark: {token for token in vocabulary if token.startswith(mark)} for mark in (GOES_ON, *BEGINS)}
    # The most frequent one: a vocabulary of bytes holds ## as a heading of Markdown, and Ġ is a letter of Maltese.
    mark = max(marked, key=lambda mark: len(marked[mark]))
    if not marked[mark]:
        raise MinBertError(
            f"`mlm_whole_words` needs a tokenizer that marks the pieces of words, by {GOES_ON} or "
            f"{' or '.join(BEGINS)}. Found none. Leave it out."
        )
    return [id_ for token, id_ in vocabulary.items() if (token in marked[mark]) == (mark == GOES_ON)]
