"""Masked language modelling: what is chosen, by which chances, and that all of it belongs to the text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertTokenizer, DataCollatorForLanguageModeling

from hf_minbert import MinBertError
from hf_minbert.data.masking import HeldOutTexts, MaskingCollator, Text, TrainingTexts
from hf_minbert.data.rows import EncodedRows

SENTENCES = ["the film is not good", "why is it a dog", "how very bad", "qu zx is the man"]
DRAWS = 4000


def rows_of(tokenizer, sentences=SENTENCES) -> EncodedRows:
    encoded = tokenizer(sentences, return_token_type_ids=True)
    rows = [
        {"input_ids": ids, "token_type_ids": segments}
        for ids, segments in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)
    ]
    return EncodedRows.of(rows, dtype="int64", apart=False)


def draws(tokenizer, sentence: str, count: int = DRAWS, **options):
    """A sentence's ids, and what the model sees and is asked for in `count` epochs, [count, T] each."""
    ids = np.array(tokenizer(sentence)["input_ids"])
    batch = MaskingCollator(tokenizer, **options)([Text(ids, (3, epoch, 0)) for epoch in range(count)])
    return ids, batch["input_ids"].numpy(), batch["labels"].numpy()


def near(share: float, expected: float, count: int) -> bool:
    """Whether a share of `count` draws is within five standard deviations."""
    return abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5


# ---- What is chosen, and what becomes of it


def test_the_shares_are_those_of_the_paper(tiny_tokenizer):
    ids, seen, labels = draws(tiny_tokenizer, "the film is not good how very bad")
    chosen = labels != -100
    words = np.arange(1, len(ids) - 1)
    assert near(chosen[:, words].mean(), 0.15, DRAWS * len(words))
    assert all(near(share, 0.15, DRAWS) for share in chosen[:, words].mean(axis=0))  # wherever it stands
    masked, kept = seen == tiny_tokenizer.mask_token_id, seen == ids
    total, vocabulary = chosen.sum(), len(tiny_tokenizer)
    assert near(masked[chosen].mean(), 0.8 + 0.1 / vocabulary, total)  # a random token may be any
    assert near(kept[chosen].mean(), 0.1 + 0.1 / vocabulary, total)
    assert near((~masked & ~kept)[chosen].mean(), 0.1 * (1 - 2 / vocabulary), total)
    random = seen[chosen & ~masked & ~kept]
    assert len(np.unique(random)) > 0.9 * vocabulary


def test_what_is_not_chosen_stays_and_what_is_chosen_is_asked_for(tiny_tokenizer):
    ids, seen, labels = draws(tiny_tokenizer, "the film is not good", 500)
    asked = labels != -100
    expected = np.broadcast_to(ids, labels.shape)
    assert (labels[asked] == expected[asked]).all()
    assert (seen[~asked] == expected[~asked]).all()


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_and_padding_are_never_chosen(tiny_tokenizer, whole_words):
    collator = MaskingCollator(tiny_tokenizer, probability=0.9, whole_words=whole_words)
    short = np.array(tiny_tokenizer("the dog")["input_ids"])
    long = np.array(tiny_tokenizer("the [UNK] is [SEP] good [MASK] zx")["input_ids"])
    batch = collator([Text(ids, (0, epoch, 0)) for epoch in range(300) for ids in (short, long)])
    ids = np.full((2, len(long)), tiny_tokenizer.pad_token_id)
    ids[0, : len(short)], ids[1] = short, long
    special = np.tile(np.isin(ids, tiny_tokenizer.all_special_ids), (300, 1))
    assert (batch["labels"].numpy()[special] == -100).all()
    assert (batch["input_ids"].numpy()[special] == np.tile(ids, (300, 1))[special]).all()
    assert (batch["labels"].numpy()[~special] != -100).mean() > 0.8
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(short), len(long)] * 300


def test_whole_words_are_chosen_or_not(tiny_tokenizer):
    ids, seen, labels = draws(tiny_tokenizer, "quz film zx", whole_words=True)
    tokens = tiny_tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["[CLS]", "q", "##u", "##z", "film", "z", "##x", "[SEP]"]
    chosen = labels != -100
    for word in (slice(1, 4), slice(4, 5), slice(5, 7)):
        assert (chosen[:, word].all(axis=1) == chosen[:, word].any(axis=1)).all()
        assert near(chosen[:, word].any(axis=1).mean(), 0.15, DRAWS)
    both = (chosen[:, 1] & chosen[:, 5]).mean()
    assert near(both, 0.15**2, DRAWS)  # each word by itself
    masked = (seen == tiny_tokenizer.mask_token_id)[chosen[:, 1], 1:4]
    assert len(np.unique(masked, axis=0)) > 2  # what becomes of a piece is drawn for itself


def test_a_piece_behind_a_special_token_begins_a_word(tiny_tokenizer):
    piece = tiny_tokenizer.convert_tokens_to_ids("##x")
    ids = np.array([tiny_tokenizer.cls_token_id, piece, piece, tiny_tokenizer.sep_token_id])
    labels = MaskingCollator(tiny_tokenizer, 0.5, True)([Text(ids, (0, epoch, 0)) for epoch in range(50)])["labels"]
    assert sorted(map(tuple, labels.unique(dim=0).tolist())) == [(-100,) * 4, (-100, piece, piece, -100)]


# ---- Beside the library's


@pytest.mark.parametrize("whole_words", [False, True])
def test_tokens_are_chosen_as_often_as_by_the_librarys_collator(tiny_tokenizer, whole_words):
    sentence = "quz film is not zx"
    ids, seen, labels = draws(tiny_tokenizer, sentence, whole_words=whole_words)
    random = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0} if whole_words else {}
    theirs = DataCollatorForLanguageModeling(tiny_tokenizer, whole_word_mask=whole_words, seed=5, **random)
    row = tiny_tokenizer(sentence, return_offsets_mapping=whole_words, return_special_tokens_mask=True)
    batch = theirs([dict(row) for _ in range(DRAWS)])
    asked = batch["labels"].numpy() != -100
    close = 5 * (2 * 0.15 * 0.85 / DRAWS) ** 0.5  # of the difference of two shares
    assert np.abs((labels != -100).mean(axis=0) - asked.mean(axis=0)).max() < close
    together = [np.cov(chosen[:, 1:-1].T) for chosen in (labels != -100, asked)]  # which are chosen together
    assert np.abs(together[0] - together[1]).max() < close
    if not whole_words:  # whole words of the library are all masked
        for becomes in (tiny_tokenizer.mask_token_id, ids):
            ours = (seen == becomes)[labels != -100].mean()
            library = (batch["input_ids"].numpy() == becomes)[asked].mean()
            assert abs(ours - library) < 5 * (2 * 0.8 * 0.2 / asked.sum()) ** 0.5


# ---- A pure function of seed, epoch and text


def test_what_is_drawn_belongs_to_the_text_and_not_to_the_batch(tiny_tokenizer):
    collator, rows = MaskingCollator(tiny_tokenizer, 0.5), rows_of(tiny_tokenizer)
    texts = [HeldOutTexts(rows)[index] for index in range(4)]
    together = collator(texts)
    for index in (2, 0, 3, 1):
        alone, length = collator([texts[index]]), len(texts[index].ids)
        for name in ("input_ids", "labels"):
            assert torch.equal(alone[name][0], together[name][index, :length])


@pytest.mark.parametrize("place", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_another_seed_epoch_or_text_draws_anew(tiny_tokenizer, place):
    collator, ids = MaskingCollator(tiny_tokenizer, 0.5), rows_of(tiny_tokenizer).ids_of(0)
    first, same, other = (collator([Text(ids, at)])["labels"] for at in ((0, 0, 0), (0, 0, 0), place))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_workers_and_their_number_change_nothing(tiny_tokenizer):
    texts = TrainingTexts(rows_of(tiny_tokenizer, SENTENCES * 4), [16], 2, seed=1)
    texts.set_epoch(1)
    collator = MaskingCollator(tiny_tokenizer)
    batches = [
        [batch["labels"] for batch in DataLoader(texts, batch_size=4, collate_fn=collator, num_workers=workers)]
        for workers in (0, 2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_packing_says_where_the_tokens_are(tiny_tokenizer):
    texts = [HeldOutTexts(rows_of(tiny_tokenizer))[index] for index in (0, 2)]
    batch = MaskingCollator(tiny_tokenizer, packing=True)(texts)
    assert batch["packing"]["tokens"].tolist() == batch["attention_mask"].flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("whole_words", [False, True])
def test_batches_that_are_filled_have_few_shapes_and_ask_for_the_same_words(tiny_tokenizer, whole_words):
    rows = rows_of(tiny_tokenizer, SENTENCES * 8)
    shapes, plain = set(), MaskingCollator(tiny_tokenizer, 0.15, whole_words, packing=True)
    for epoch in range(40):
        texts = TrainingTexts(rows, [len(rows)], 1, seed=epoch)
        chosen = [texts[index] for index in range(16)]
        batch = MaskingCollator(tiny_tokenizer, 0.15, whole_words, packing=True, fill_to=12)(chosen)
        size, real = batch["labels"].numel(), batch["predicted"] < batch["labels"].numel()
        assert batch["input_ids"].shape == (16, 12) and (batch["predicted"][~real] == size).all()
        expected = plain(chosen)
        words = expected["labels"].flatten()[expected["predicted"]]
        assert batch["labels"].flatten()[batch["predicted"][real]].tolist() == words.tolist()
        assert (expected["labels"] != -100).sum() == len(words) == real.sum()
        shapes.add((len(batch["packing"]["tokens"]), len(batch["predicted"])))
    assert len(shapes) <= 3


def test_a_batch_with_more_words_than_usual_finds_room(tiny_tokenizer):
    collator = MaskingCollator(tiny_tokenizer, 0.01, packing=True, fill_to=12)
    assert collator._words(64, 9) == 16 and collator._words(64, 8) == 8


# ---- The order


def seen(texts: TrainingTexts, epochs: int) -> list[tuple[int, int]]:
    """Number and own epoch of all texts of so many epochs of the dataset."""
    found = []
    for epoch in range(epochs):
        texts.set_epoch(epoch)
        found += [texts[index].place[:0:-1] for index in range(len(texts))]
    return found


def test_mixed_is_each_text_once_an_epoch_in_new_orders(tiny_tokenizer):
    found = seen(TrainingTexts(rows_of(tiny_tokenizer, SENTENCES * 5), [20], 3, seed=0), 3)
    orders = [[number for number, _ in found[start : start + 20]] for start in (0, 20, 40)]
    assert [sorted(order) for order in orders] == [[*range(20)]] * 3
    assert len({*map(tuple, orders)}) == 3
    assert [own for _, own in found] == [0] * 20 + [1] * 20 + [2] * 20


def test_in_sequence_a_source_is_done_before_the_next_begins(tiny_tokenizer):
    texts = TrainingTexts(rows_of(tiny_tokenizer, SENTENCES * 5), [3, 12, 5], 2, seed=0)
    found = seen(texts, 2)
    parts, start = [], 0
    for first, size in ((0, 3), (3, 12), (15, 5)):
        for own in (0, 1):
            part = found[start : start + size]
            assert sorted(part) == [(number, own) for number in range(first, first + size)]
            parts.append([number - first for number, _ in part])
            start += size
    assert start == 40
    assert parts[2] != parts[3]
    assert seen(texts, 1) == found[:20]  # an epoch of the dataset, whatever was asked before


def test_in_sequence_half_an_epoch_is_half_of_each_source_and_the_last_goes_on(tiny_tokenizer):
    found = seen(TrainingTexts(rows_of(tiny_tokenizer, SENTENCES * 3), [4, 8], 0.5, seed=0), 1)
    numbers = [number for number, _ in found]
    assert len({*numbers[:2]} & {*range(4)}) == 2
    assert sorted(numbers[2:10]) == [*range(4, 12)]
    assert found[10][1] == 1


# ---- Refused


def test_behind_the_last_text_nothing_is_asked_for(tiny_tokenizer):
    texts = TrainingTexts(rows_of(tiny_tokenizer), [4], epochs=1, seed=0)
    batch = MaskingCollator(tiny_tokenizer, probability=1.0)([texts[index] for index in (3, 4, 9)])
    assert (batch["labels"] != -100).any(dim=1).tolist() == [True, False, False]
    assert batch["attention_mask"].sum(dim=1).tolist()[1:] == [1, 1]


def test_tokenizers_without_what_is_needed_are_refused(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nfilm\n", encoding="utf-8")
    tokenizer = BertTokenizer(vocab=str(file))
    with pytest.raises(MinBertError, match="mlm_whole_words.*##"):
        MaskingCollator(tokenizer, whole_words=True)
    tokenizer.mask_token = None
    with pytest.raises(MinBertError, match="no mask token"):
        MaskingCollator(tokenizer)
