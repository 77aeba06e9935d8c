"""Every kind of tokenizer: pairs, padding, words and special tokens are as it has them, not as BERT's has them."""

from __future__ import annotations

import json
import re
from copy import copy
from importlib.util import find_spec

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from trained_tokenizers import trained
from transformers import PreTrainedTokenizerFast, RobertaConfig, XLMRobertaConfig, pipeline

from hf_minbert import (
    MinBertConfig,
    MinBertError,
    MultiTaskTrainer,
    MultiTaskTrainingArguments,
    Predictor,
    get_tasks,
)
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import check_max_length, encode, unknown_share
from hf_minbert.data.masking import MaskingCollator, Text
from hf_minbert.evaluation.attribution import integrated_gradients, read
from hf_minbert.model.inputs import taken_apart
from hf_minbert.pretrained.loading import load_tokenizer
from hf_minbert.publishing.demo import answer
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

FIRST = ["A good film", "Why is the dog not in the lake?", "", "swimming", "", "it is " * 40]
SECOND = ["bad", "Somebody makes music.", "How deep is it?", "", "", "a good dog, " * 40]
BI = {"pair_encoding": "bi", "pooling": "mean"}
TASKS = {"sst": None, "para": None, "sts": {**BI, "head": "cosine"}}
ROWS = [{"sentence1": a, "sentence2": b} for a, b in zip(FIRST, SECOND, strict=True)]


def task_of(encoding: str):
    return get_tasks({"para": {"pair_encoding": encoding}})[0]


def is_bytes(tokenizer) -> bool:
    return "Ġthe" in tokenizer.get_vocab()


def marks_first_pieces(tokenizer) -> bool:
    return is_bytes(tokenizer) or "▁" in tokenizer.get_vocab()


# ---- Encoding


@pytest.mark.parametrize("encoding", ["cross", "bi"])
@pytest.mark.parametrize("segments", [0, 1, 2])
def test_rows_are_the_tokenizers_and_segments_the_models(any_tokenizer, tiny_config, tmp_path, encoding, segments):
    config = tiny_config(type_vocab_size=segments, vocab_size=len(any_tokenizer))
    rows = ROWS[:5]
    sides = [["sentence1"], ["sentence2"]] if encoding == "bi" else [["sentence1", "sentence2"]]
    found = encode(rows, task_of(encoding), any_tokenizer, 64, config=config)
    for row, given in zip(rows, found, strict=True):
        expected = [any_tokenizer(*([row[name]] for name in side), return_token_type_ids=True) for side in sides]
        ids, types = ([one[name][0] for one in expected] for name in ("input_ids", "token_type_ids"))
        types = types if segments == 2 else [[0] * len(one) for one in types]
        wanted = (ids, types) if encoding == "bi" else (ids[0], types[0])
        assert (given["input_ids"], given["token_type_ids"]) == wanted
    # Rows that were kept for one model are those of another.
    kept = [tiny_config(type_vocab_size=number, vocab_size=len(any_tokenizer)) for number in (2 - segments, segments)]
    dataset, task = datasets.Dataset.from_list(rows), task_of(encoding)
    for config in kept:
        again = encode(dataset, task, any_tokenizer, 64, tmp_path, config)
    assert [*again] == [*found]


def test_a_pair_that_is_too_long_keeps_its_special_tokens(any_tokenizer):
    cls, sep = any_tokenizer.cls_token_id, any_tokenizer.sep_token_id
    long, short = "dog " * 40, "the film"
    special = any_tokenizer.num_special_tokens_to_add(pair=True)
    for texts in ((long, long), (long, short), (short, long)):
        rows = [dict(zip(("sentence1", "sentence2"), texts, strict=True))]
        (row,) = encode(rows, task_of("cross"), any_tokenizer, 20)
        ids = row["input_ids"]
        assert len(ids) == 20 and ids[0] == cls and ids[-1] == sep and ids.count(sep) == special - 1
        alone = any_tokenizer(short, add_special_tokens=False)["input_ids"]
        if texts[1] == short:
            assert ids[-1 - len(alone) : -1] == alone
        if texts[0] == short:
            assert ids[1 : 1 + len(alone)] == alone


@pytest.mark.parametrize("encoding", ["cross", "bi"])
def test_batches_are_filled_with_the_tokenizers_padding(any_tokenizer, encoding):
    task = task_of(encoding)
    batch = PaddedCollator(task, any_tokenizer.pad_token_id)(encode(ROWS, task, any_tokenizer, 64))
    hidden = batch["attention_mask"] == 0
    assert hidden.any() and (batch["input_ids"][hidden] == any_tokenizer.pad_token_id).all()
    assert not (batch["input_ids"][~hidden] == any_tokenizer.pad_token_id).any()


def test_segments_of_encoded_rows_are_dropped_where_the_model_has_none(any_tokenizer, tiny_config):
    rows = [dict(any_tokenizer("a film", "a dog", return_token_type_ids=True))]
    rows[0]["token_type_ids"][-1] = 1
    for segments, kept in ((0, False), (1, False), (2, True)):
        config = tiny_config(type_vocab_size=segments, vocab_size=len(any_tokenizer))
        (row,) = encode(rows, task_of("cross"), None, 64, config=config)
        assert row["token_type_ids"] == (rows[0]["token_type_ids"] if kept else [0] * len(row["input_ids"]))


def test_the_least_length_has_room_for_the_special_tokens_of_a_pair(any_tokenizer, model_for):
    model = model_for(any_tokenizer, ["para"])
    least = 9 if any_tokenizer.cls_token == "<s>" else 8
    assert check_max_length(least, model.config, tokenizer=any_tokenizer) == least
    for refuse in (
        lambda: check_max_length(least - 1, model.config, tokenizer=any_tokenizer),
        lambda: Predictor(model, any_tokenizer, max_length=least - 1),
    ):
        with pytest.raises(MinBertError, match=f"`max_length` must be from {least} to 64"):
            refuse()


def test_unknown_tokens_are_counted_where_there_are_any(any_tokenizer):
    text = "the good 狗 film"
    (task,) = get_tasks(["sst"])
    share = unknown_share(encode([{"sentence": text}], task, any_tokenizer, 64), any_tokenizer)
    ids = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert share == ids.count(any_tokenizer.unk_token_id) / len(ids)
    assert (share == 0) == is_bytes(any_tokenizer)


# ---- Joined pairs, as stock tools give them


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_side_of_a_joined_pair_is_what_the_tokenizer_makes_of_it_alone(any_tokenizer, side):
    tokenizer = any_tokenizer
    joined = tokenizer(FIRST[:5], SECOND[:5], padding=True, padding_side=side, return_tensors="pt")
    given = {"token_type_ids": None, **joined}
    found = taken_apart(given, {"name": "sts", "pair_encoding": "bi"}, tokenizer.sep_token_id)
    assert not found["token_type_ids"].any()
    for number, pair in enumerate(zip(FIRST, SECOND, strict=True)):
        for place, text in enumerate(pair[: 2 if number < 5 else 0]):
            seen = found["attention_mask"][number, place].bool()
            assert found["input_ids"][number, place, seen].tolist() == tokenizer(text)["input_ids"]
            assert not seen[seen.long().argmin() :].any() or seen.all()  # padded on the right


def test_a_pair_without_padding_needs_no_mask(any_tokenizer):
    ids = torch.tensor([any_tokenizer("a film", "the dog")["input_ids"]])
    given = {"input_ids": ids, "token_type_ids": None, "attention_mask": None}
    found = taken_apart(given, {"name": "sts", "pair_encoding": "bi"}, any_tokenizer.sep_token_id)
    seen = found["attention_mask"].bool()
    for place, text in enumerate(("a film", "the dog")):
        assert found["input_ids"][0, place, seen[0, place]].tolist() == any_tokenizer(text)["input_ids"]


def test_one_sentence_is_no_pair(any_tokenizer):
    task = {"name": "sts", "pair_encoding": "bi"}
    given = {"token_type_ids": None, **any_tokenizer(["a film", "the dog"], return_tensors="pt", padding=True)}
    with pytest.raises(ValueError, match="'sts' compares two sentences.*segment id 1 and no separator.*text_pair"):
        taken_apart(given, task, any_tokenizer.sep_token_id)
    pairs = {"token_type_ids": None, **any_tokenizer(["a film"], ["the dog"], return_tensors="pt")}
    if "token_type_ids" not in any_tokenizer.model_input_names:
        with pytest.raises(ValueError, match="no token with segment id 1. Tokenize"):  # a model saved before
            taken_apart(pairs, task)


def test_segment_ids_say_it_where_there_are_any():
    tokenizer = trained("bert")
    mixed = tokenizer([("a film", "a dog")], return_tensors="pt", padding="max_length", max_length=12)
    single = tokenizer("a [SEP] film", return_tensors="pt", padding="max_length", max_length=12)
    given = {name: torch.cat([mixed[name], single[name]]) for name in mixed}
    with pytest.raises(ValueError, match="no token with segment id 1"):
        taken_apart(given, {"name": "sts", "pair_encoding": "bi"}, tokenizer.sep_token_id)


# ---- Masked words


TEXT = "Swimming, the dog isn't in the lake; somebody learned it."


def words_of_tokens(tokenizer, text: str) -> list[int | None]:
    """For each token the number of its word in the text, by where it stands; `None` for a special token.

    Spaces part words, and for BERT each sign of punctuation is one too.
    """
    pattern = r"\S+" if marks_first_pieces(tokenizer) else r"\w+|[^\w\s]"
    word_at = {at: number for number, found in enumerate(re.finditer(pattern, text)) for at in range(*found.span())}
    encoding = tokenizer(text).encodings[0]
    return [
        None if of is None else word_at[start + (text[start] == " ")]
        for of, (start, _) in zip(encoding.sequence_ids, encoding.offsets, strict=True)
    ]


def test_whole_words_are_chosen_or_not(any_tokenizer):
    ids = np.array(any_tokenizer(TEXT)["input_ids"])
    words = words_of_tokens(any_tokenizer, TEXT)
    assert words.count(0) > 1  # the first one has several pieces, and in a text of bytes none has a mark
    texts = [Text(ids, (0, epoch, 0)) for epoch in range(100)]
    batch = MaskingCollator(any_tokenizer, 0.5, whole_words=True)(texts)
    chosen = (batch["labels"] != -100).numpy()
    numbers = [*dict.fromkeys(word for word in words if word is not None)]
    by_word = [chosen[:, [place for place, of in enumerate(words) if of == word]] for word in numbers]
    assert all((each.all(axis=1) == each.any(axis=1)).all() for each in by_word)
    drawn = np.stack([each.any(axis=1) for each in by_word])
    assert len({row.tobytes() for row in drawn}) == len(numbers)  # each word by itself
    assert not chosen[:, [place for place, of in enumerate(words) if of is None]].any()


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_stay_and_chosen_ones_become_the_mask_token(any_tokenizer, whole_words):
    ids = np.array(any_tokenizer("a film", "the dog")["input_ids"])
    texts = [Text(ids, (1, epoch, 0)) for epoch in range(200)]
    batch = MaskingCollator(any_tokenizer, 1.0, whole_words)([*texts, Text(ids[:1], None)])
    special = np.isin(ids, any_tokenizer.all_special_ids)
    seen, labels = batch["input_ids"][:200].numpy(), batch["labels"][:200].numpy()
    assert (seen[:, special] == ids[special]).all() and (labels[:, special] == -100).all()
    assert (labels[:, ~special] == ids[~special]).all()
    assert 0.75 < (seen[:, ~special] == any_tokenizer.mask_token_id).mean() < 0.85
    assert (batch["input_ids"][200, 1:] == any_tokenizer.pad_token_id).all()


def test_a_heading_of_markdown_makes_no_wordpiece():
    tokenizer = trained("modernbert")
    tokenizer.add_tokens(["##", "####"])
    ids = np.array(tokenizer("the kitten")["input_ids"])
    words = words_of_tokens(tokenizer, "the kitten")
    texts = [Text(ids, (0, epoch, 0)) for epoch in range(50)]
    chosen = MaskingCollator(tokenizer, 0.5, whole_words=True)(texts)["labels"] != -100
    second = chosen[:, [place for place, word in enumerate(words) if word == 1]]
    assert second.shape[1] > 1 and torch.equal(second.all(dim=1), second.any(dim=1))


def with_gaps() -> PreTrainedTokenizerFast:
    """Six words, the last of which has the number 90."""
    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 5, "b": 6, "[MASK]": 90}, "a"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def test_random_words_are_words_of_the_tokenizer():
    texts = [Text(np.array([5, 6] * 10), (0, epoch, 0)) for epoch in range(50)]
    batch = MaskingCollator(with_gaps(), 1.0)(texts)
    assert {*batch["input_ids"].flatten().tolist()} == {0, 1, 2, 5, 6, 90}


# ---- Loading


@pytest.fixture
def folder(any_tokenizer, model_for, tmp_path):
    """A model and its tokenizer."""
    model_for(any_tokenizer, ["para"]).save_pretrained(tmp_path)
    any_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_is_loaded_as_it_was(any_tokenizer, folder):
    found = load_tokenizer(str(folder), MinBertConfig.from_pretrained(folder))
    assert found(FIRST, SECOND)["input_ids"] == any_tokenizer(FIRST, SECOND)["input_ids"]
    assert found.pad_token_id == any_tokenizer.pad_token_id and found.model_max_length == 64


def replaced(config, **fields):
    position_offset = fields["pad_token_id"] + 1
    return MinBertConfig(**{**config.to_dict(), **fields, "position_offset": position_offset})


def test_what_a_folder_lacks_is_named(any_tokenizer, folder):
    config, file = MinBertConfig.from_pretrained(folder), folder / "tokenizer_config.json"
    with pytest.raises(MinBertError, match="do not belong together"):
        load_tokenizer(str(folder), MinBertConfig(vocab_size=len(any_tokenizer) - 1))
    other = replaced(config, family="roberta", pad_token_id=any_tokenizer.pad_token_id + 1)
    with pytest.raises(
        MinBertError, match=f"pads with the id {any_tokenizer.pad_token_id}, .*from which a roberta counts positions"
    ):
        load_tokenizer(str(folder), other)
    file.rename(folder / "elsewhere")
    with pytest.raises(MinBertError, match="names no token for padding.*tokenizer_config.json"):
        load_tokenizer(str(folder), config)
    (folder / "elsewhere").rename(file)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MinBertError, match="has no tokenizer: there is no tokenizer.json"):
        load_tokenizer(str(folder), config)


def test_the_highest_token_must_be_one_of_the_models(tiny_model, tmp_path):
    with_gaps().save_pretrained(tmp_path)
    tiny_model(["para"], vocab_size=91).save_pretrained(tmp_path)
    config = MinBertConfig.from_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), config)("a b")["input_ids"] == [1, 5, 6, 2]
    config.vocab_size = 90
    with pytest.raises(MinBertError, match="has 91 tokens and its model 90"):
        load_tokenizer(str(tmp_path), config)


def test_words_and_merges_are_a_tokenizer(tiny_config, tmp_path):
    tokenizer = trained("roberta")
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]), encoding="utf-8")
    merges = "".join(" ".join(pair) + "\n" for pair in state["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    RobertaConfig().save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path), tiny_config(vocab_size=len(tokenizer)))
    assert found(FIRST, SECOND)["input_ids"] == tokenizer(FIRST, SECOND)["input_ids"]


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_model_of_sentencepiece_needs_its_library(tiny_config, tmp_path):
    XLMRobertaConfig().save_pretrained(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(MinBertError, match="Install sentencepiece, which reads sentencepiece.bpe.model"):
        load_tokenizer(str(tmp_path), tiny_config())


def test_a_tokenizer_that_parts_no_pair_is_refused(model_for, tmp_path):
    tokenizer = trained("modernbert")
    model_for(tokenizer, ["para"]).save_pretrained(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", tokenizer.cls_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MinBertError, match="adds no special tokens to a text, such as .* or <s> and </s>"):
        load_tokenizer(str(tmp_path), MinBertConfig.from_pretrained(tmp_path))


# ---- Words of an answer


SENTENCES = ("A  good film, isn't it?\nSwimming!", " Why the dog ")
BERTS = [["A", "good", "film", ",", "isn", "'", "t", "it", "?", "Swimming", "!"], ["Why", "the", "dog"]]
BYTES = [["A", "good", "film", ",", "isn", "'t", "it", "?", "Swimming", "!"], ["Why", "the", "dog"]]
SPACES = [["A", "good", "film,", "isn't", "it?", "Swimming!"], ["Why", "the", "dog"]]


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_words_are_read_off_the_text(any_tokenizer, model_for, name):
    config = model_for(any_tokenizer, get_tasks(TASKS)).config
    texts = SENTENCES[: 1 if name == "sst" else 2]
    reading = read(any_tokenizer, config, name, texts, 64)
    expected = BYTES if is_bytes(any_tokenizer) else SPACES if marks_first_pieces(any_tokenizer) else BERTS
    shown = [[text[word.start : word.end] for word in words] for text, words in zip(texts, reading.words, strict=True)]
    assert shown == expected[: len(texts)]
    places = [place for words in reading.words for word in words for place in word.tokens]
    assert len({*places}) == len(places)
    ids = reading.inputs["input_ids"].flatten()
    others = [id_ for place, id_ in enumerate(ids.tolist()) if place not in places]
    spaces = any_tokenizer.convert_tokens_to_ids(["Ġ", "Ċ"]) if is_bytes(any_tokenizer) else []
    assert {*others} <= {any_tokenizer.cls_token_id, any_tokenizer.sep_token_id, any_tokenizer.pad_token_id, *spaces}


def test_spaces_part_words_where_the_tokenizer_parts_none(model_for):
    tokenizer = trained("xlm-roberta")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    (words,) = read(tokenizer, model_for(tokenizer, ["sst"]).config, "sst", [SENTENCES[0]], 64).words
    assert {*tokenizer([SENTENCES[0]]).encodings[0].word_ids} == {None, 0}
    assert [SENTENCES[0][word.start : word.end] for word in words][:4] == ["A", "good", "film,", "isn't"]


def test_a_typed_special_token_is_a_word(any_tokenizer, model_for):
    config = model_for(any_tokenizer, ["sst"]).config
    text = f"a {any_tokenizer.sep_token} film"
    (words,) = read(any_tokenizer, config, "sst", [text], 64).words
    assert [text[word.start : word.end] for word in words] == ["a", any_tokenizer.sep_token, "film"]


@pytest.mark.parametrize("name", ["para", "sts"])
def test_an_answer_on_the_page_is_the_predictors_and_its_words_add_up(any_tokenizer, model_for, name):
    model = model_for(any_tokenizer, get_tasks(TASKS)).double()
    given = answer(model, any_tokenizer, name, SENTENCES)
    (expected,) = Predictor(model, any_tokenizer)(name, *([text] for text in SENTENCES))
    if given.score is None:
        assert given.probabilities == pytest.approx([*expected["probabilities"].values()], abs=1e-6)
    else:
        assert given.score == pytest.approx(expected["prediction"], abs=1e-5)
    found = integrated_gradients(model, any_tokenizer, name, given.reading, given.chosen, steps=64)
    assert abs(found.end - found.start) > 1e-3
    assert abs(found.error) < 1e-2 * abs(found.end - found.start)


# ---- Answers


def by_hand(model, tokenizer, name: str, first: str, second: str) -> list[float]:
    """A pair by itself, without padding: joined by the tokenizer, or each of its sentences alone."""
    if name == "para":
        inputs = tokenizer(first, second, return_tensors="pt", truncation=True)
        return model(**inputs, task=name).logits[0].tolist()
    vectors = []
    for text in (first, second):
        encoded = tokenizer(text, return_tensors="pt", truncation=True)
        vectors.append(model.bert(**encoded).last_hidden_state.mean(dim=1))
    return model.heads.sts(torch.stack(vectors, dim=1))[0].tolist()


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_pipeline_answers_pairs_in_batches(any_tokenizer, model_for, side):
    model, tokenizer = model_for(any_tokenizer, get_tasks(TASKS)), copy(any_tokenizer)
    tokenizer.padding_side = side
    ask = pipeline("minbert-multitask", model=model, tokenizer=tokenizer, device="cpu")
    firsts, seconds = [FIRST[number] for number in (0, 1, 5)], [SECOND[number] for number in (0, 1, 5)]
    pairs = [*zip(firsts, seconds, strict=True)]
    answers = ask(pairs, batch_size=2)
    assert answers == ask([{"text": first, "text_pair": second} for first, second in pairs], batch_size=2)
    for found, pair in zip(answers, pairs, strict=True):
        with torch.no_grad():
            (logit,), (score,) = (by_hand(model, any_tokenizer, name, *pair) for name in ("para", "sts"))
        yes = model.config.get_task("para")["labels"][1]
        assert found["para"]["scores"][yes] == pytest.approx(torch.tensor(logit).sigmoid().item(), abs=1e-5)
        assert found["sts"]["score"] == pytest.approx(score, abs=1e-5)
    alone = [ask(pair) for pair in pairs]
    for found, one in zip(answers, alone, strict=True):
        assert found["para"]["score"] == pytest.approx(one["para"]["score"], abs=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_stock_pipeline_asks_a_task_that_reads_its_sentences_apart(any_tokenizer, model_for, side):
    fields = {"pair_encoding": "bi", "pooling": "mean"}
    model = model_for(any_tokenizer, get_tasks({"para": fields}), sep_token_id=any_tokenizer.sep_token_id)
    tokenizer = copy(any_tokenizer)
    tokenizer.padding_side = side
    stock = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
    ours = pipeline("minbert-multitask", model=model, tokenizer=any_tokenizer, device="cpu")
    pairs = [{"text": first, "text_pair": second} for first, second in zip(FIRST[:2], SECOND[:2], strict=True)]
    for found, expected in zip(stock(pairs, batch_size=2), ours(pairs), strict=True):
        scores = {one["label"]: one["score"] for one in found}
        assert scores == pytest.approx(expected["para"]["scores"], abs=1e-5)


# ---- Runs


def test_training_tells_the_model_of_the_separator(any_tokenizer, model_for, tmp_path):
    model = model_for(any_tokenizer, ["para"])
    assert model.config.sep_token_id is None
    args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=1)
    rows = {"para": [{**row, "label": number % 2} for number, row in enumerate(ROWS)]}
    trainer = MultiTaskTrainer(model, args, train_dataset=rows, processing_class=any_tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert MinBertConfig.from_pretrained(tmp_path / "model").sep_token_id == any_tokenizer.sep_token_id
    found, expected = Predictor.from_pretrained(tmp_path / "model"), Predictor(model, any_tokenizer)
    np.testing.assert_allclose(found.logits("para", ROWS), expected.logits("para", ROWS), atol=1e-5)


def test_a_run_on_masked_words_asks_for_room_for_them(model_for, course_dir, tmp_path):
    tokenizer = trained("roberta")
    model_for(tokenizer, ["sst"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    values = {
        "data_dir": str(course_dir), "output_dir": str(tmp_path / "run"), "model_name_or_path": str(tmp_path),
        "objective": "mlm", "max_length": 8, "eval_strategy": "no", "use_cpu": True,
    }  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(MinBertError, match="`max_length` must be from 9 to 64"):
        train(read_recipe(recipe))


@pytest.mark.parametrize("kind", ["roberta", "modernbert"])
def test_a_run_goes_from_a_checkpoint_to_answers(kind, tiny_config, model_for, course_dir, tmp_path):
    """Masked words, then tasks, joined and apart; the second run goes on where it stopped."""
    tokenizer, start = trained(kind), tmp_path / "start"
    model_for(tokenizer, ["sst"]).bert.save_pretrained(start)
    tokenizer.save_pretrained(start)
    shared = {
        "data_dir": str(course_dir), "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True,
        "use_cpu": True, "per_device_train_batch_size": 4, "eval_strategy": "no", "max_length": 16,
    }  # fmt: skip
    first = {**shared, "model_name_or_path": str(start), "objective": "mlm", "mlm_whole_words": True}
    second = {**shared, "model_name_or_path": str(tmp_path / "words"), "tasks": {"sst": None, "para": None, "sts": BI}}
    for name, values in (("words", first), ("tasks", second)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(json.dumps({**values, "output_dir": str(tmp_path / name)}), encoding="utf-8")
        train(read_recipe(recipe))
    assert MinBertConfig.from_pretrained(tmp_path / "tasks").sep_token_id == tokenizer.sep_token_id
    longer = {**second, "output_dir": str(tmp_path / "tasks"), "max_steps": 3, "resume_from_checkpoint": True}
    recipe.write_text(json.dumps(longer), encoding="utf-8")
    assert train(read_recipe(recipe))["global_step"] == 3
    answers = Predictor.from_pretrained(tmp_path / "tasks")("sts", ["a good film"], ["a film"])
    assert np.isfinite(answers[0]["prediction"])
