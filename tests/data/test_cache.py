"""Encoded rows on disk: used again for the same input, never for another."""

from __future__ import annotations

from copy import copy

import datasets
import pyarrow
import pytest
from transformers import BertTokenizer

from hf_minbert.data import encoding
from hf_minbert.data.encoding import encode
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, Task

SST, STS = TASKS["sst"], TASKS["sts"]
ROWS = [{"sentence": "the dog plays " * words, "label": words % 5} for words in (1, 2, 6)]


@pytest.fixture
def tokenizings(monkeypatch):
    """A list that grows by one with every dataset that is tokenized."""
    calls = []

    def counted(dataset, encoder):
        calls.append(encoder.task.name)
        return original(dataset, encoder)

    original = encoding._map
    monkeypatch.setattr(encoding, "_map", counted)
    return calls


@pytest.fixture
def other_tokenizer(tiny_tokenizer):
    """The tiny vocabulary with two words exchanged: as many tokens, other ids."""
    vocabulary = dict(tiny_tokenizer.get_vocab())
    vocabulary["dog"], vocabulary["man"] = vocabulary["man"], vocabulary["dog"]
    return BertTokenizer(vocab=vocabulary, model_max_length=64)


def test_length_and_vocabulary_make_other_rows(tmp_path, tokenizings, tiny_tokenizer, other_tokenizer):
    rows = datasets.Dataset.from_list(ROWS)
    variants = [(tiny_tokenizer, 8), (tiny_tokenizer, 16), (other_tokenizer, 16)]
    for number, (tokenizer, max_length) in enumerate([*variants, *variants]):
        expected = [*encode(ROWS, SST, tokenizer, max_length)]
        kept = encode(rows, SST, tokenizer, max_length, cache_dir=tmp_path)
        assert [*kept] == expected
        assert len(tokenizings) == min(number + 1, 3)
    assert len(list(tmp_path.iterdir())) == 3


def test_neither_a_call_of_the_tokenizer_nor_its_own_length_makes_another_key(tmp_path, tokenizings, tiny_tokenizer):
    rows, tokenizer = datasets.Dataset.from_list(ROWS), copy(tiny_tokenizer)
    encode(rows, SST, tokenizer, 16, cache_dir=tmp_path)
    tokenizer("a b", truncation=True, padding="max_length", max_length=9)
    tokenizer.model_max_length = 12
    encode(rows, SST, tokenizer, 16, cache_dir=tmp_path)
    assert len(tokenizings) == 1


def changed(number, **cells):
    return [{**row, **cells} if place == number else row for place, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (changed(2, sentence="the dog plays the man"), SST),
        (changed(0, label=3), SST),
        ([ROWS[1], ROWS[0], ROWS[2]], SST),
        (ROWS[:2], SST),
        ([*changed(0, sentence="the dog"), *changed(0, sentence=" plays")][:3], SST),
        ([{"sentence": row["sentence"]} for row in ROWS], SST),
        (ROWS, Task("sst", "score", ("sentence",), range=(0, 5))),
        (ROWS, Task("mood", "classes", ("sentence",), labels=SST.labels)),
    ],
)
def test_other_texts_labels_and_tasks_are_other_rows(tmp_path, tokenizings, tiny_tokenizer, rows, task):
    encode(datasets.Dataset.from_list(ROWS), SST, tiny_tokenizer, 16, cache_dir=tmp_path)
    kept = encode(datasets.Dataset.from_list(rows), task, tiny_tokenizer, 16, cache_dir=tmp_path)
    assert len(tokenizings) == 2
    assert [*kept] == [*encode(rows, task, tiny_tokenizer, 16)]


def test_types_and_the_message_about_cut_inputs_are_kept(tmp_path, caplog, tokenizings, tiny_tokenizer):
    rows = datasets.Dataset.from_list(
        [
            {"sentence1": "dog " * 20, "sentence2": "a", "label": 3.8},
            {"sentence1": "a", "sentence2": "b", "label": 1.0},
        ]
    )
    outcomes = []
    for _ in range(2):
        caplog.clear()
        kept = encode(rows, STS, tiny_tokenizer, 16, cache_dir=tmp_path)
        outcomes.append(([*kept], kept.labels.dtype, [m for m in caplog.messages if m.startswith("sts")]))
    assert outcomes[0] == outcomes[1] and len(tokenizings) == 1
    assert outcomes[1][2] == ["sts: 1 of 2 inputs were cut to 16 tokens."]


def test_nothing_is_kept_unless_asked(tmp_path, monkeypatch, tokenizings, tiny_tokenizer):
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_list(ROWS)
    for _ in range(2):
        encode(rows, SST, tiny_tokenizer, 16)
    encoded = encode(rows, SST, tiny_tokenizer, 16)
    encode(encoded, SST, tiny_tokenizer, 16, cache_dir=tmp_path / "cache")  # encoded already
    assert len(tokenizings) == 3 and not list(tmp_path.iterdir())


def test_rows_that_are_refused_leave_nothing(tmp_path, tiny_tokenizer):
    rows = datasets.Dataset.from_list(changed(1, label=7))
    with pytest.raises(MinBertError, match="Found 7"):
        encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_kept_rows_of_which_some_are_gone_or_changed_are_not_trained_on(tmp_path, tiny_tokenizer):
    rows = datasets.Dataset.from_list(ROWS * 400)  # a thousand make a part of the file, which can be read alone
    expected = [*encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path)]
    (file,) = tmp_path.glob("*/*.arrow")
    whole = file.read_bytes()
    with pyarrow.memory_map(str(file)) as source:
        pyarrow.ipc.open_stream(source).read_next_batch()
        first_part = whole[: source.tell()]
    middle = len(whole) // 2
    for damaged in (first_part, whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        file.write_bytes(damaged)
        with pytest.raises(MinBertError, match=f"{file.name} changed since it was written. Delete this folder"):
            encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path)
    file.write_bytes(whole)
    assert [*encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path)] == expected


def test_a_cache_that_is_broken_or_no_folder_says_what_to_do(tmp_path, tiny_tokenizer):
    rows = datasets.Dataset.from_list(ROWS)
    encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "state.json").unlink()
    with pytest.raises(MinBertError, match=f"Reading encoded rows from {folder} failed: .*Delete this folder"):
        encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(MinBertError, match="`cache_dir`: cannot write .*Give a folder that can be written"):
        encode(rows, SST, tiny_tokenizer, 16, cache_dir=tmp_path / "file")
