"""Rows of words and tags: from files, in tokens, and refused where they are wrong."""

import json

import datasets
import numpy as np
import pytest

from hf_minbert import MinBertError, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split, read_rows
from hf_minbert.data.leaks import HeldOut, drop_leaks
from hf_minbert.data.rows import EncodedRows
from hf_minbert.model.inference import ragged
from hf_minbert.model.spans import joined, split
from hf_minbert.run.pretraining import _columns

TASK = {"kind": "tags", "text_columns": "tokens", "label_column": "tags", "labels": ["O", "B-PER", "I-PER"]}
WORDS, TAGS = [["Ada", "Lovelace", "slept"], ["Hello"]], [["B-PER", "I-PER", "O"], ["O"]]
CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\nLovelace NNP I-PER\nslept VBD O\n\n\nHello UH O\n"


def task(**fields):
    return get_tasks({"ner": {**TASK, **fields}})[0]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", ["spaces", "tabs", "no end", "crlf"])
def test_a_column_file_has_a_row_per_sentence(tmp_path, form):
    changed = {"tabs": CONLL.replace(" ", "\t"), "no end": CONLL.rstrip(), "crlf": CONLL.replace("\n", "\r\n")}
    rows = read_rows(write(tmp_path / "a.conll", changed.get(form, CONLL)), task(), labelled=True)
    assert rows == [
        {"id": "0", "tokens": "Ada Lovelace slept", "label": [1, 2, 0]}, {"id": "1", "tokens": "Hello", "label": [0]}
    ]  # fmt: skip


def test_columns_are_named_by_their_number(tmp_path):
    file = write(tmp_path / "a.conll", "1\tAda\tPROPN\n2\tslept\tVERB\n")
    tagger = task(labels=["PROPN", "VERB"], columns={"tokens": "1", "label": "2"})
    assert read_rows(file, tagger, labelled=True)[0] == {"id": "0", "tokens": "Ada slept", "label": [0, 1]}
    words = write(tmp_path / "words.conll", "Ada\nslept\n")
    assert read_rows(words, task(), labelled=False)[0]["tokens"] == "Ada slept"
    with pytest.raises(MinBertError, match=r"words.conll has no column 'tags' \(columns found: 0, tokens"):
        read_rows(words, task(), labelled=True)


@pytest.mark.parametrize("form", ["jsonl", "ids", "csv", "parquet", "named classes"])
def test_lists_of_tokens_and_tags_are_read_from_every_format(tmp_path, form):
    ids = [[task().labels.index(tag) for tag in row] for row in TAGS]
    tags = TAGS if form == "jsonl" else ids
    lines = [{"tokens": words, "tags": of} for words, of in zip(WORDS, tags, strict=True)]
    if form in ("jsonl", "ids"):
        file = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    elif form == "csv":
        rows = (f"{' '.join(words)},{' '.join(of)}\n" for words, of in zip(WORDS, TAGS, strict=True))
        file = write(tmp_path / "a.csv", "tokens,tags\n" + "".join(rows))
    else:
        names = ["I-PER", "O", "B-PER"] if form == "named classes" else [*task().labels]  # ids by the file's order
        tags = datasets.List(datasets.ClassLabel(names=names))
        features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "tags": tags})
        of = [[names.index(tag) for tag in row] for row in TAGS]
        dataset = datasets.Dataset.from_dict({"tokens": WORDS, "tags": of}, features=features)
        file = tmp_path / "a.parquet"
        dataset.to_parquet(file)
    assert [row["label"] for row in read_rows(file, task(), labelled=True)] == ids


def test_a_saved_dataset_with_columns_of_other_names(tmp_path, tiny_tokenizer):
    dataset = datasets.Dataset.from_dict({"words": WORDS, "ner_tags": TAGS})
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "d")
    own = task(dataset=str(tmp_path / "d"), columns={"tokens": "words", "label": "ner_tags"})
    loaded = load_split(own, None, "train")
    assert loaded.features["label"].feature.names == [*own.labels] and loaded[0]["label"] == [1, 2, 0]
    rows = encode(loaded, own, tiny_tokenizer, 64)
    assert [row.tolist() for row in rows.labels] == [[1, 2, 0], [0]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"tokens": ["a", "b"], "tags": ["O", "B-ORG"]}', r"line 2, word 1: a label of task 'ner' must be .*'B-ORG'"),
        ('{"tokens": ["a", "b"], "tags": ["O", 3]}', r"line 2, word 1: .* a whole number from 0 to 2.*Found '3'"),
        ('{"tokens": ["a", "b"], "tags": ["O"]}', r"line 2: .*a tag for each word. Found 2 words, 1 tags"),
        ('{"tokens": [], "tags": []}', r"line 2: a sentence of task 'ner' must be a list of words, one or more"),
        ('{"tokens": null, "tags": ["O"]}', r"line 2: task 'ner' needs a tag for each word. Found 0 words, 1 tags"),
        ('{"tokens": ["a", "\\u00a0"], "tags": ["O", "O"]}', r"line 2: word 1 must be text that is not blank"),
        ('{"tokens": ["a", ""], "tags": ["O", "O"]}', r"line 2: word 1 must be text that is not blank. Found ''"),
        ('{"tokens": ["a", " "], "tags": ["O", "O"]}', r"line 2: word 1 must be text that is not blank. Found ' '"),
        ('{"tokens": ["a", null], "tags": ["O", "O"]}', r"line 2: word 1 must be text .*Found None"),
        ('{"tokens": ["a"], "tags": {"O": 1}}', r"line 2, word 0: the tags of task 'ner' must be a list"),
    ],
)
def test_wrong_rows_are_refused_with_their_line(tmp_path, line, said):
    file = write(tmp_path / "a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n' + line + "\n")
    with pytest.raises(MinBertError, match=said) as refusal:
        read_rows(file, task(), labelled=True)
    assert str(refusal.value).startswith(f"{file}, ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a O\nb B-ORG\n", r"a.conll, line 2: a label of task 'ner' must be .*Found 'B-ORG'"),
        ("-DOCSTART- O\n\na O\n\nb O\nc X\n", r"a.conll, line 6: a label of task 'ner'"),
        ("a O\nb\n", r"a.conll, line 2: expected 2 columns, separated by spaces or tabs.*Found 'b'"),
        ("a\tO\nb\t\n", r"a.conll, line 2: expected 2 columns"),
        ("\n\n", "is empty. It needs a line for each word, such as Ada B-PER"),
        ("a O\n\u00a0 O\n", r"a.conll, line 2: expected 2 columns.* none of them blank"),
        ("a\tO\n\u2003\n", r"a.conll, line 2: expected 2 columns"),
    ],
)
def test_a_wrong_column_file_is_refused_with_its_line(tmp_path, text, said):
    with pytest.raises(MinBertError, match=said):
        read_rows(write(tmp_path / "a.conll", text), task(), labelled=True)


#: Words with what is white space to Unicode, and with plain spaces, which only lists and tabs can hold.
SPACED = ["10\u00a0000", "a\u2028b", "c\u2009d", "\u202fe", "f\x0bg", "h\x85i", "New York"]


@pytest.mark.parametrize("form", ["conll", "jsonl", "parquet", "saved", "rows"])
def test_a_word_with_spaces_stays_one_word(tmp_path, tiny_tokenizer, form):
    tags, names = [0, 1, 2, 0, 1, 2, 0], list(task().labels)
    file, dataset = tmp_path / f"a.{form}", datasets.Dataset.from_dict({"tokens": [SPACED], "tags": [tags]})
    if form == "conll":
        write(file, "".join(f"{word}\t{names[tag]}\n" for word, tag in zip(SPACED, tags, strict=True)))
    elif form == "jsonl":
        write(file, json.dumps({"tokens": SPACED, "tags": tags}, ensure_ascii=False) + "\n")
    elif form == "parquet":
        dataset.to_parquet(file)
    else:
        dataset.save_to_disk(file)
    loaded = load_split(task(files={"train": str(file)}), None, "train") if form != "rows" else dataset
    if form != "rows":
        assert split(loaded[0]["tokens"]) == SPACED and loaded[0]["label"] == tags
    rows = encode(loaded, task(), tiny_tokenizer, 64)
    assert rows.num_words.tolist() == [7] and rows.labels[0].tolist() == tags and rows.unread == 0
    assert rows.words[rows.words >= 0].tolist() == [*range(7)]
    plain = tiny_tokenizer(" ".join(SPACED))["input_ids"]  # as a stock pipeline reads the text
    assert rows.ids.tolist() == plain


def test_further_pretraining_reads_the_words_as_they_were_given(tmp_path):
    file = write(tmp_path / "a.jsonl", json.dumps({"tokens": SPACED}) + "\n")
    rows = load_split(task(files={"test": str(file)}), None, "test")
    assert _columns(rows, task()) == [" ".join(SPACED)]


def test_words_with_spaces_are_the_same_text_to_the_leak_guard(tmp_path):
    file = write(tmp_path / "a.conll", "New\u00a0York\tO\nsleeps\tO\n")
    held_out = HeldOut.of([task(files={"dev": str(file)})], None)
    given = [(joined(["New York", "sleeps"]),), ("New York",)]
    assert drop_leaks(given, held_out)[0] == given[1:]


def test_a_sentence_without_a_word_is_a_row_to_predict_and_no_row_to_learn(tmp_path, tiny_tokenizer):
    lines = [{"tokens": ["a"], "tags": ["O"]}, {"tokens": [], "tags": []}, {"tokens": None, "tags": []}]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert [row["tokens"] for row in read_rows(file, task(), labelled=False)] == ["a", "", ""]
    own = task(files={"train": str(file), "test": str(file)})
    with pytest.raises(MinBertError, match=r"a.jsonl, line 2: a sentence of task 'ner' must be a list of words, one"):
        load_split(own, None, "train")
    assert load_split(own, None, "test")["tokens"][:] == ["a", "", ""]
    rows = encode([{"tokens": line["tokens"] or []} for line in lines], task(), tiny_tokenizer, 64)
    assert rows.num_words.tolist() == [1, 0, 0] and rows.unread == 0
    with pytest.raises(MinBertError, match="Row 1: a sentence of task 'ner' must be a list of words, one or more"):
        encode(lines[:2], task(), tiny_tokenizer, 64)


def test_words_are_a_text_to_the_leak_guard():
    held_out = HeldOut()
    held_out.add("ner dev", ["Ada Lovelace slept ."])
    assert drop_leaks([("ada lovelace slept",), ("Ada slept",)], held_out)[0] == [("Ada slept",)]


# ---- Tokens


def test_the_first_piece_of_a_word_has_its_label(tiny_tokenizer):
    rows = encode([{"tokens": ["the", "cat", "is", "ox"], "tags": [0, 1, 2, 1]}], task(), tiny_tokenizer, 64)
    assert tiny_tokenizer.convert_ids_to_tokens(rows.ids) == [
        "[CLS]", "the", "c", "##a", "##t", "is", "o", "##x", "[SEP]"
    ]  # fmt: skip
    assert rows.words.tolist() == [-1, 0, 1, -1, -1, 2, 3, -1, -1]
    assert rows.token_labels.tolist() == [-100, 0, 1, -100, -100, 2, 1, -100, -100]
    batch = PaddedCollator(task(), 0, fill_to=12)(rows)
    assert batch["labels"].tolist() == [[*rows.token_labels.tolist(), -100, -100, -100]]


def test_every_tokenizer_finds_the_words(any_tokenizer):
    words = ["The", "good", "film", "isn't", "(bad)", "10\u00a0000", "dog", "."]
    rows = encode([{"tokens": words}, {"tokens": "a dog"}], task(), any_tokenizer, 64)
    for row, given in zip(rows, (words, ["a", "dog"]), strict=True):
        places = [place for place, word in enumerate(row["words"]) if word >= 0]
        assert [row["words"][place] for place in places] == [*range(len(given))]
        ends = [*places[1:], len(row["input_ids"]) - 1]
        for word, start, end in zip(given, places, ends, strict=True):
            decoded = any_tokenizer.decode(row["input_ids"][start:end]).strip()
            unknown = any_tokenizer.unk_token_id in row["input_ids"][start:end]
            letters = "".join(decoded.split()).casefold()
            assert unknown or letters == "".join(word.split()).casefold()
    whole = any_tokenizer(" ".join(words))["input_ids"]  # as a stock pipeline reads the text
    assert rows[0]["input_ids"] == whole


def test_words_behind_the_longest_input_are_counted_and_said(tiny_tokenizer, caplog):
    given = [{"tokens": ["the"] * 12, "tags": [0] * 12}, {"tokens": ["a", "\u200b"], "tags": [0, 1]}]
    rows = encode(given, task(), tiny_tokenizer, 8)
    assert rows.num_words.tolist() == [12, 2] and [len(labels) for labels in rows.labels] == [12, 2]
    assert rows.unread == 6 + 1  # the second row's last word is nothing to the tokenizer
    assert "ner: 7 of 14 words are not read" in caplog.text and "ner: 1 of 2 inputs were cut to 8" in caplog.text
    (first, second) = rows.by_word(np.zeros((2, 8, 3), dtype=np.float32))
    assert np.isneginf(first).all(axis=1).tolist() == [False] * 6 + [True] * 6
    assert np.isneginf(second).all(axis=1).tolist() == [False, True]


def test_rows_come_back_from_the_cache_and_from_parts_as_they_were(tiny_tokenizer, tmp_path, sentences, ner):
    given = sentences(30)
    rows = encode(given, ner, tiny_tokenizer, 24)
    dataset = datasets.Dataset.from_list(given)
    for other in (
        encode(dataset, ner, tiny_tokenizer, 24, tmp_path),
        encode(dataset, ner, tiny_tokenizer, 24, tmp_path),
    ):
        assert [*other] == [*rows]
    assert [*EncodedRows.joined([rows.take(range(10)), rows.take(range(10, 30))])] == [*rows]
    assert rows.take([3, 1]).labels[1].tolist() == rows.labels[1].tolist()


def test_rows_that_are_encoded_say_by_their_labels_where_words_are():
    given = {"input_ids": [2, 7, 8, 9, 3, 0], "labels": [-100, 1, -100, 2, -100, -100]}
    rows = encode([{**given, "attention_mask": [1, 1, 1, 1, 1, 0]}], task(), None, 64)
    assert rows.words.tolist() == [-1, 0, -1, 1, -1] and rows.labels[0].tolist() == [1, 2]
    with pytest.raises(MinBertError, match="rows that are already encoded need `labels`, with -100"):
        encode([{"input_ids": [2, 7, 3]}], task(), None, 64)


def test_a_tokenizer_that_does_not_say_where_its_tokens_stand_is_refused(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "is_fast", False)
    with pytest.raises(MinBertError, match="'ner': A label per word needs a fast tokenizer"):
        encode([{"tokens": ["a"]}], task(), tiny_tokenizer, 64)


def test_equally_long_rows_stay_rows():
    assert ragged([np.array([1, 2]), np.array([3, 4])]).shape == (2,)
    assert split("a b") == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pooling": "mean"}, "`pooling: mean` makes a sentence one vector, and kind 'tags' reads the state"),
        ({"pooling": "pooler"}, "`pooling: pooler` makes a sentence one vector"),
        ({"text_columns": ["a", "b"]}, "kind 'tags' takes one text, and `text_columns` names two: a, b"),
        ({"labels": ["O"]}, "kind 'tags' needs two or more different `labels`"),
        ({"range": [0, 1]}, "kind 'tags' needs two or more different `labels` and no `range`"),
    ],
)
def test_a_wrong_task_is_refused(fields, said):
    with pytest.raises(MinBertError, match=f"Task 'ner': {said}"):
        task(**fields)
