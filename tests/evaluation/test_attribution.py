"""Integrated gradients by word: they add up, equal an oracle without autograd, and know what a word is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_minbert import Predictor, Task
from hf_minbert.evaluation.attribution import integrated_gradients, quantity, read

PAIR = {"text_columns": ("a", "b")}
YES_NO = {"kind": "binary", "labels": ("no", "yes"), **PAIR}
SCORE = {"kind": "score", "range": (0.0, 5.0), **PAIR}
CLASSES = {"kind": "classes", "labels": ("bad", "fair", "good"), "text_columns": ("a",)}
TASKS = [
    Task(name="linear", **CLASSES),
    Task(name="mlp", head="mlp", pooling="bigru", head_options={"activation": "gelu"}, **CLASSES),
    Task(name="blocks", head="blocks", head_options={"hidden_sizes": [8], "activation": "tanh"}, **YES_NO),
    Task(name="mixed", layers="mix", pooling="attention", **SCORE),
    Task(name="joined", pair_encoding="bi", pooling="mean", join="concat_cosine", **YES_NO),
    Task(name="cosine", pair_encoding="bi", pooling="mean", head="cosine", **SCORE),
]
NAMES = [task.name for task in TASKS]
SHORT, LONG = "The film is good.", "Why is the dog not bad?"


@pytest.fixture(scope="module")
def model(tiny_model):
    """Every head, in float64: what is left between two ways to compute one number is then not rounding."""
    return tiny_model(TASKS).double().eval()


@pytest.fixture
def attribute(model, tiny_tokenizer):
    def attribute(name: str, chosen: int = 1, steps: int = 8, max_length: int = 64, texts=(SHORT, LONG)):
        texts = texts[: 1 if name in ("linear", "mlp") else 2]
        reading = read(tiny_tokenizer, model.config, name, texts, max_length)
        return reading, integrated_gradients(model, tiny_tokenizer, name, reading, chosen, steps)

    return attribute


def words_of(reading, texts=(SHORT, LONG)) -> list[list[str]]:
    return [[text[word.start : word.end] for word in words] for text, words in zip(texts, reading.words, strict=False)]


# ---- Numbers


@pytest.mark.parametrize("name", NAMES)
def test_values_add_up_to_what_the_words_change(attribute, name):
    _, found = attribute(name, steps=48)
    assert abs(found.end - found.start) > 1e-3
    assert abs(found.error) < 1e-4 * abs(found.end - found.start)
    _, coarse = attribute(name, steps=2)
    assert abs(coarse.error) > abs(found.error)  # and `error` says so where they do not


@pytest.mark.parametrize("name", ["linear", "blocks", "cosine"])
def test_values_equal_differences_along_the_path(model, tiny_tokenizer, attribute, name):
    """The oracle: no autograd, the middles of equal steps, one word alone moved a little to and fro at each."""
    reading, found = attribute(name, steps=48)
    embed, ids = model.bert.embeddings.word_embeddings.weight.detach(), reading.inputs["input_ids"]
    places = [place for words in reading.words for word in words for place in word.tokens]
    hidden = ids.flatten().clone()
    hidden[places] = tiny_tokenizer.mask_token_id
    start, way = embed[hidden], embed[ids.flatten()] - embed[hidden]  # [T, H]
    kind, steps, nudge = model.config.get_task(name)["kind"], 100, 1e-3
    shares = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    beside = {key: reading.inputs[key].expand(steps, *ids.shape[1:]) for key in ("attention_mask", "token_type_ids")}

    @torch.no_grad()
    def values(shift):
        points = (start + (shares[:, None, None] + shift[:, None]) * way).view(steps, *ids.shape[1:], -1)
        return quantity(model(inputs_embeds=points, task=name, **beside).logits, kind, 1)

    for words, by_word in zip(reading.words, found.values, strict=True):
        shift = torch.zeros(ids.numel(), dtype=torch.float64)
        shift[list(words[1].tokens)] = nudge
        expected = ((values(shift) - values(-shift)) / (2 * nudge)).mean().item()
        assert by_word[1] == pytest.approx(expected, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_quantity_is_the_predictors_answer(model, tiny_tokenizer, attribute, name):
    reading, found = attribute(name)
    texts = [[SHORT], [LONG]][: len(reading.words)]
    (answer,) = Predictor(model, tiny_tokenizer)(name, *texts)
    if "probabilities" in answer:
        chance = list(answer["probabilities"].values())[1]
        assert found.end == pytest.approx(np.log(chance / (1 - chance)), rel=1e-5)
    else:
        assert found.end == pytest.approx(answer["prediction"], rel=1e-5)


def test_against_the_other_answer_of_two_the_values_turn_around(attribute):
    for name in ("blocks", "joined"):
        no, yes = attribute(name, chosen=0)[1], attribute(name, chosen=1)[1]
        for one, other in zip(no.values, yes.values, strict=True):
            np.testing.assert_allclose(one, -other)


def test_the_same_number_on_all_logits_changes_nothing():
    logits = torch.randn(3, 4, dtype=torch.float64)
    for chosen in range(4):
        shares = logits.softmax(dim=1)[:, chosen]
        torch.testing.assert_close(quantity(logits, "classes", chosen), torch.logit(shares))
        torch.testing.assert_close(quantity(logits + 7, "classes", chosen), quantity(logits, "classes", chosen))


def test_points_in_several_passes_are_those_of_one(attribute, monkeypatch):
    _, one = attribute("cosine")
    monkeypatch.setattr("hf_minbert.evaluation.attribution.TOKENS_AT_ONCE", 100)
    _, several = attribute("cosine")
    np.testing.assert_allclose(np.concatenate(one.values), np.concatenate(several.values))


def test_weights_keep_their_gradients(model, attribute):
    attribute("linear")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_task_with_an_encoder_of_its_own_is_asked_there(tiny_model, tiny_tokenizer):
    model = tiny_model(TASKS[:2], private_encoders=True).double().eval()
    with torch.no_grad():
        model.encoder_of("mlp").embeddings.word_embeddings.weight.normal_()
    reading = read(tiny_tokenizer, model.config, "mlp", [SHORT], 64)
    found = integrated_gradients(model, tiny_tokenizer, "mlp", reading, 1, steps=64)
    assert abs(found.error) < 1e-3 * abs(found.end - found.start)


def test_without_a_mask_token_there_is_no_hidden_word(model, tiny_tokenizer, attribute):
    reading, _ = attribute("linear")
    tokenizer = type(tiny_tokenizer)(vocab=tiny_tokenizer.get_vocab(), mask_token=None)
    with pytest.raises(ValueError, match="mask token"):
        integrated_gradients(model, tokenizer, "linear", reading, 1)


# ---- Words


@pytest.mark.parametrize("name", ["blocks", "joined"])
def test_pieces_are_joined_and_special_tokens_are_no_words(attribute, tiny_tokenizer, name):
    texts = ("A fine film!", "How  good, Ärztin?")
    reading, found = attribute(name, texts=texts)
    assert words_of(reading, texts) == [["A", "fine", "film", "!"], ["How", "good", ",", "Ärztin", "?"]]
    assert [len(values) for values in found.values] == [4, 5]
    ids = reading.inputs["input_ids"].flatten()
    shown = [place for words in reading.words for word in words for place in word.tokens]
    assert len(set(shown)) == len(shown)
    assert not {tiny_tokenizer.cls_token_id, tiny_tokenizer.sep_token_id, 0} & set(ids[shown].tolist())
    pieces = tiny_tokenizer.convert_ids_to_tokens(ids[list(reading.words[0][1].tokens)])
    assert pieces == ["f", "##i", "##n", "##e"]
    tokens = reading.inputs["attention_mask"].sum().item()
    assert len(shown) == tokens - (4 if name == "joined" else 3)  # [CLS] and [SEP], padding not counted


def test_a_typed_special_token_is_a_word(attribute):
    texts = ("a [SEP] film", "a film")
    reading, found = attribute("blocks", texts=texts)
    assert words_of(reading, texts) == [["a", "[SEP]", "film"], ["a", "film"]]
    assert abs(found.error) < 1e-2 * abs(found.end - found.start)


def test_what_was_cut_is_counted_and_not_shown(attribute):
    texts = ("good " * 30, "bad " * 10)
    reading, _ = attribute("blocks", texts=texts, max_length=20)
    assert reading.unread == 30 + 10 + 3 - 20
    assert sum(map(len, reading.words)) == 17
    reading, _ = attribute("joined", texts=texts, max_length=20)
    assert [len(words) for words in reading.words] == [18, 10] and reading.unread == 12
    assert attribute("blocks", texts=texts, max_length=43)[0].unread == 0


def test_a_text_without_words_has_no_values(attribute):
    reading, found = attribute("linear", texts=("\u200b", ""))
    assert words_of(reading) == [[]] and found.error == 0
