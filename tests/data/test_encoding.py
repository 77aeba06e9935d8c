"""From rows to batches: token ids, segment ids, labels, padding."""

import subprocess
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
import torch

from hf_minbert import MinBertConfig
from hf_minbert.data.collators import PaddedCollator, RoundCollator
from hf_minbert.data.encoding import check_max_length, encode, unknown_in_words, unknown_share
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, get_tasks

SST, PARA, STS = TASKS["sst"], TASKS["para"], TASKS["sts"]
ROWS = [
    {"id": "a", "sentence1": "the dog runs", "sentence2": "a dog", "label": 0.8},
    {"id": "b", "sentence1": "a film", "sentence2": "the very good film", "label": 2.0},
    {"id": "c", "sentence1": "", "sentence2": "you", "label": 3.8},
]


class Rows(torch.utils.data.Dataset):
    """A map-style dataset that is not iterable by itself."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


CONTAINERS = {"list": list, "torch": Rows, "datasets": datasets.Dataset.from_list}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_kind_of_dataset_gives_the_same_rows(tiny_tokenizer, container):
    encoded = encode(CONTAINERS[container](ROWS), STS, tiny_tokenizer, 64)
    assert len(encoded) == len(ROWS) and encoded.labels.dtype == np.float32
    for number, row in enumerate(ROWS):
        expected = tiny_tokenizer(row["sentence1"], row["sentence2"])
        assert encoded[number] == {
            "input_ids": expected["input_ids"],
            "token_type_ids": expected["token_type_ids"],
            "labels": pytest.approx(row["label"]),
        }


def test_many_rows_keep_their_order(tiny_tokenizer):
    rows = [{"sentence": "dog " * (number % 7 + 1), "label": number % 5} for number in range(2345)]
    encoded = encode(rows, SST, tiny_tokenizer, 64)
    assert [len(row["input_ids"]) - 2 for row in encoded] == [number % 7 + 1 for number in range(2345)]
    assert [row["labels"] for row in encoded] == [number % 5 for number in range(2345)]
    assert [*encode(datasets.Dataset.from_list(rows), SST, tiny_tokenizer, 64)] == [*encoded]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [("", "dog " * 40, (0, 13)), ("dog " * 40, "", (13, 0)), ("dog " * 40, "good film", (11, 2))],
)
def test_a_pair_is_cut_from_its_longer_side(tiny_tokenizer, caplog, first, second, words):
    (row,) = encode([{"sentence1": first, "sentence2": second}], PARA, tiny_tokenizer, 16)
    cls, sep = tiny_tokenizer.cls_token_id, tiny_tokenizer.sep_token_id
    ids = row["input_ids"]
    assert len(ids) == 16 and ids[0] == cls and ids.count(sep) == 2 and ids[-1] == sep
    assert row["token_type_ids"] == [0] * (words[0] + 2) + [1] * (words[1] + 1)
    if words[1] == 2:
        assert tiny_tokenizer.decode(ids[-3:-1]) == "good film"
    assert "para: 1 of 1 inputs were cut to 16 tokens" in caplog.text


@pytest.mark.parametrize("pair_encoding", ["cross", "bi"])
def test_unknown_tokens_are_counted_among_those_of_text(tiny_tokenizer, pair_encoding):
    (task,) = get_tasks({"para": {"pair_encoding": pair_encoding}})
    rows = [
        {"sentence1": "the dog 狗", "sentence2": "狗"},  # 2 of 4 unknown, whatever [CLS] and [SEP] part them
        {"sentence1": "a good film dog", "sentence2": ""},  # 0 of 4
    ]
    assert unknown_share(encode(rows, task, tiny_tokenizer, 64), tiny_tokenizer) == 0.25
    assert unknown_share(encode(rows[1:], task, tiny_tokenizer, 64), tiny_tokenizer) == 0
    empty = [{"sentence1": "", "sentence2": ""}]
    assert unknown_share(encode(empty, task, tiny_tokenizer, 64), tiny_tokenizer) == 0


def test_a_tokenizer_without_an_unknown_token_knows_all(tiny_tokenizer):
    class Bytes:
        unk_token_id, all_special_ids = None, [2, 3]

    assert unknown_share(encode([{"sentence": "狗"}], SST, tiny_tokenizer, 64), Bytes()) == 0


def test_the_share_of_unknown_tokens_in_words():
    assert unknown_in_words("sts", 0.0012, "the rows") == (
        "sts: 0.1% of the tokens in the rows are unknown to the model's vocabulary."
    )
    assert unknown_in_words("sts", 0.0001, "the rows").startswith("sts: under 0.1% of the tokens")
    assert unknown_in_words("sts", 0.607, "the rows") == (
        "sts: 60.7% of the tokens in the rows are unknown to the model's vocabulary, which does not fit this text."
    )


def test_only_what_was_cut_is_counted(tiny_tokenizer, caplog):
    rows = [{"sentence": "dog " * words, "label": 1} for words in (13, 14, 15, 16)]  # 14 words and two marks fill 16
    encode(rows, SST, tiny_tokenizer, 16)
    assert caplog.messages == ["sst: 2 of 4 inputs were cut to 16 tokens."]
    caplog.clear()
    encode(rows, SST, tiny_tokenizer, 18)
    assert not caplog.messages


def test_words_of_missing_values_are_tokenized_as_words(tiny_tokenizer):
    rows = [{"sentence": word} for word in ("null", "NA", "None", "nan")]
    for row, encoded in zip(rows, encode(rows, SST, tiny_tokenizer, 64), strict=True):
        assert tiny_tokenizer.decode(encoded["input_ids"][1:-1]) == row["sentence"].lower()


@pytest.mark.parametrize("column", ["labels", "label", "sentiment"])
def test_where_the_label_stands(tiny_tokenizer, column):
    (row,) = encode([{"sentence": "good", column: "4"}], SST, tiny_tokenizer, 64)
    assert row["labels"] == 4


def test_rows_without_a_label_have_no_labels(tiny_tokenizer):
    (row,) = encode([{"sentence": "good"}], SST, tiny_tokenizer, 64)
    assert set(row) == {"input_ids", "token_type_ids"}
    assert encode(datasets.Dataset.from_list([{"sentence": "good"}]), SST, tiny_tokenizer, 64)[0] == row


@pytest.mark.parametrize("container", CONTAINERS)
def test_encoded_rows_pass_through(tiny_tokenizer, container):
    rows = [{"input_ids": [2, 9, 3], "token_type_ids": [0, 0, 1], "label": 3, "other": "x"}]
    once = encode(CONTAINERS[container](rows), SST, None, 8)
    assert once[0] == {"input_ids": [2, 9, 3], "token_type_ids": [0, 0, 1], "labels": 3}
    assert encode(once, SST, tiny_tokenizer, 8)[0] == once[0]


# ---- Pairs that are encoded apart

APART = get_tasks({"sts": {"pair_encoding": "bi"}})[0]
LONG = " ".join(["good"] * 40)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_pair_apart_is_two_inputs_each_within_the_length(tiny_tokenizer, container, caplog):
    texts = [("good film", "bad"), ("", LONG), (LONG, ""), (LONG, "a dog")]
    rows = [{"sentence1": a, "sentence2": b, "label": 1.5} for a, b in texts]
    encoded = encode(CONTAINERS[container](rows), APART, tiny_tokenizer, 16)
    for row, pair in zip(encoded, texts, strict=True):
        assert row["labels"] == 1.5
        for ids, segments, text in zip(row["input_ids"], row["token_type_ids"], pair, strict=True):
            expected = tiny_tokenizer(text, truncation=True, max_length=16)["input_ids"]
            assert list(ids) == expected and list(segments) == [0] * len(ids) and len(ids) <= 16
    assert "sts: 3 of 4 inputs were cut to 16 tokens." in caplog.text
    assert encoded.row_lengths.tolist() == [4, 16, 16, 16]


@pytest.mark.parametrize("container", CONTAINERS)
def test_encoded_pairs_pass_through(tiny_tokenizer, container):
    given = {"input_ids": [[2, 9, 3], [2, 3]], "attention_mask": [[1, 1, 1], [1, 1]], "label": 2.0}
    once = encode(CONTAINERS[container]([given]), APART, None, 8)
    row = {"input_ids": [[2, 9, 3], [2, 3]], "token_type_ids": [[0, 0, 0], [0, 0]], "labels": 2.0}
    assert once[0] == row
    assert encode(once, APART, tiny_tokenizer, 8)[0] == row


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([2, 9, 3], "row 0: with `pair_encoding: bi`, `input_ids` must be two lists of ids. Found \\[2, 9, 3\\]"),
        ([[2, 9, 3]], "must be two lists"),
        ([[2, 9, 3], []], "`input_ids` must hold 1 to 8 ids"),
        ([[2, 3], [2] * 9], "`input_ids` must hold 1 to 8 ids.*Found 9"),
    ],
)
def test_bad_encoded_pairs_are_refused(ids, said):
    with pytest.raises(MinBertError, match=said):
        encode([{"input_ids": ids, "label": 1.0}], APART, None, 8)


CONFIG = SimpleNamespace(vocab_size=10, type_vocab_size=2)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [2, 10, 3]}, "row 1: `input_ids` must be from 0 to 9, as .* `vocab_size` is 10. Found 2 to 10"),
        ({"input_ids": [2, -1, 3]}, "`input_ids` must be from 0 to 9, .* Found -1 to 3. Encode the rows with"),
        ({"input_ids": [2, 9, 3], "token_type_ids": [0, 0, 2]}, "`token_type_ids` must be from 0 to 1.* Found 0 to 2"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(container, row, said):
    rows = [{name: [0] * 3 for name in row}, row]
    with pytest.raises(MinBertError, match=said):
        encode(CONTAINERS[container](rows), SST, None, 8, config=CONFIG)


@pytest.mark.parametrize("ids", [[2.0, 9.5, 3.0], ["2", "9", "3"], [[2], [9], [3]], [True, False, True]])
def test_ids_that_are_no_whole_numbers_are_refused(ids):
    with pytest.raises(MinBertError, match="row 0: `input_ids` must hold whole numbers. Found"):
        encode([{"input_ids": ids}], SST, None, 8, config=CONFIG)


def test_ids_of_the_second_side_are_checked_and_padding_is_not():
    with pytest.raises(MinBertError, match="row 0: `input_ids` must be from 0 to 9"):
        encode([{"input_ids": [[2, 3], [2, 10]]}], APART, None, 8, config=CONFIG)
    hidden = {"input_ids": [2, 9, 3, -100], "attention_mask": [1, 1, 1, 0]}
    assert encode([hidden], SST, None, 8, config=CONFIG)[0]["input_ids"] == [2, 9, 3]
    without_segments = SimpleNamespace(vocab_size=10)
    row = {"input_ids": [2, 9, 3], "token_type_ids": [0, 0, 2]}
    assert encode([row], SST, None, 8, config=without_segments)[0] == row


def test_a_pair_apart_collates_to_two_rows_of_one_width():
    rows = [{"input_ids": [[2, 9, 3], [2, 3]], "token_type_ids": [[0] * 3, [0] * 2], "labels": 1.5}] * 2
    batch = PaddedCollator(APART, pad_token_id=7)(rows)
    assert batch["input_ids"].tolist() == [[[2, 9, 3], [2, 3, 7]]] * 2
    assert batch["attention_mask"].tolist() == [[[1, 1, 1], [1, 1, 0]]] * 2
    assert batch["token_type_ids"].shape == (2, 2, 3) and batch["labels"].shape == (2,)


def test_padding_of_encoded_rows_is_dropped():
    row = {"input_ids": [2, 9, 3, 0], "token_type_ids": [0, 0, 1, 0], "attention_mask": [1, 1, 1, 0]}
    assert encode([row], SST, None, 8)[0] == {"input_ids": [2, 9, 3], "token_type_ids": [0, 0, 1]}


def test_segment_ids_of_encoded_rows_default_to_the_first_segment():
    assert encode([{"input_ids": [2, 9, 3]}], SST, None, 8)[0]["token_type_ids"] == [0, 0, 0]


GOOD = {"sentence": "good", "label": 1}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([GOOD, {"sentence": "good", "label": 5}], "Row 1: a label of task 'sst' must be .*0 to 4.*Found 5"),
        ([GOOD, {"sentence": "good", "label": -1}], "Row 1: .*Found -1"),
        ([{"sentence": "good", "label": 2.5}], "Row 0: .*Found 2.5"),
        ([GOOD, {"sentence": "good", "label": None}], "Row 1: .*Found None"),
        ([GOOD, {"sentence": None, "label": 1}], "Task 'sst', row 1: 'sentence' must be text. Found None"),
        (
            [{"text": "good", "label": 1}],
            "Task 'sst': the dataset has no column 'sentence'. Columns found: text, label",
        ),
        ([{"input_ids": list(range(17))}], "row 0: `input_ids` must hold 1 to 16 ids.*Found 17"),
        ([{"input_ids": [1, 2], "token_type_ids": [0]}], "row 0: .*Found 2, 1 and 2"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "row 0: `input_ids` must hold 1 to 16 ids"),
        ([{"input_ids": [[1, 2], [3]]}], "row 0: with `pair_encoding: single`, `input_ids` must be one list"),
        ([], "Task 'sst': the dataset is empty"),
    ],
)
def test_bad_rows_are_refused(tiny_tokenizer, container, rows, said):
    with pytest.raises(MinBertError, match=said):
        encode(CONTAINERS[container](rows), SST, tiny_tokenizer, 16)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"train": [GOOD], "dev": [GOOD]}, "expected one dataset. Found a dict with the keys train, dev"),
        (iter([GOOD]), "has no length"),
        (datasets.Dataset.from_list([GOOD]).to_iterable_dataset(), "an? IterableDataset has no length"),
        ([("good", 1)], "row 0: a row must be a dict of columns. Found a tuple"),
        (pandas.DataFrame([GOOD]), r"a DataFrame has no `dataset\[0\]`.*`Dataset.from_pandas"),
        ([GOOD, {"sentence": "x"}], "row 1: no 'label', which row 0 has"),
    ],
)
def test_other_shapes_of_data_are_refused(tiny_tokenizer, dataset, said):
    with pytest.raises(MinBertError, match=said):
        encode(dataset, SST, tiny_tokenizer, 16)


def test_text_needs_a_tokenizer():
    with pytest.raises(MinBertError, match="there is no tokenizer"):
        encode([GOOD], SST, None, 16)


def test_max_length_is_at_most_what_the_model_has():
    config, trained = MinBertConfig(), MinBertConfig(max_input_length=16)
    assert check_max_length(None, config) == check_max_length(512, config) == check_max_length(512, trained) == 512
    assert check_max_length(None, trained) == 16
    for found in (600, 513, 7, 0, -1):
        with pytest.raises(MinBertError, match=f"from 8 to 512.*Found {found}.*leave it out to use 512"):
            check_max_length(found, config)


def test_a_long_sentence_is_cut_to_the_limit(tiny_tokenizer):
    (row,) = encode([{"sentence": "dog " * 1000}], SST, tiny_tokenizer, 64)
    assert len(row["input_ids"]) == 64


def test_lists_need_no_datasets_library():
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from hf_minbert.data.encoding import encode\n"
        "from hf_minbert.data.files import read_rows\n"
        "from hf_minbert.settings.tasks import TASKS\n"
        "print([*encode([{'input_ids': [1, 2], 'label': 1}], TASKS['sst'], None, 8)])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[{'input_ids': [1, 2], 'token_type_ids': [0, 0], 'labels': 1}]\n", ran.stderr


# ---- rows in memory


@pytest.mark.parametrize("task", [STS, APART], ids=["together", "apart"])
def test_rows_are_taken_in_the_order_asked_for(tiny_tokenizer, task):
    encoded = encode(ROWS, task, tiny_tokenizer, 64)
    taken = encoded.__getitems__([2, 0, 2])
    assert [*taken] == [encoded[2], encoded[0], encoded[2]] and len(taken) == 3
    assert encoded[-1] == encoded[2]
    with pytest.raises(IndexError):
        encoded[3]
    assert encoded.row_lengths.tolist() == [
        max(map(len, row["input_ids"])) if task is APART else len(row["input_ids"]) for row in encoded
    ]


# ---- batches


@pytest.mark.parametrize(
    ("task", "labels", "dtype"),
    [
        (STS, [0.8, 2.0, 3.8], torch.float32),
        (STS, [0, 3, 5], torch.float32),
        (PARA, [1.0, 0.0, 1.0], torch.int64),
        (SST, [4, 0, 2], torch.int64),
    ],
)
def test_label_types_come_from_the_task(task, labels, dtype):
    rows = [{"input_ids": [1], "token_type_ids": [0], "labels": label} for label in labels]
    batch = PaddedCollator(task, 0)(rows)
    assert batch["labels"].dtype == dtype
    assert batch["labels"].shape == (3,)
    torch.testing.assert_close(batch["labels"], torch.tensor(labels, dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("multiple", "width"), [(None, 3), (8, 8), (3, 3)])
def test_padding(multiple, width):
    rows = [
        {"input_ids": [11, 12, 13], "token_type_ids": [0, 0, 1]},
        {"input_ids": [21], "token_type_ids": [1]},
    ]
    batch = PaddedCollator(PARA, pad_token_id=7, pad_to_multiple_of=multiple)(rows)
    more = width - 3
    assert batch["task"] == "para" and "labels" not in batch
    assert batch["input_ids"].tolist() == [[11, 12, 13] + [7] * more, [21, 7, 7] + [7] * more]
    assert batch["attention_mask"].tolist() == [[1, 1, 1] + [0] * more, [1, 0, 0] + [0] * more]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1] + [0] * more, [1, 0, 0] + [0] * more]
    assert {batch[name].dtype for name in ("input_ids", "attention_mask", "token_type_ids")} == {torch.int64}


def test_batches_equal_the_tokenizers_own_padding(tiny_tokenizer):
    rows = [encode([row], STS, tiny_tokenizer, 64)[0] for row in ROWS]
    batch = PaddedCollator(STS, tiny_tokenizer.pad_token_id)(rows)
    firsts, seconds = ([row[name] for row in ROWS] for name in STS.text_columns)
    expected = tiny_tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name]), name


def test_a_label_out_of_range_never_reaches_the_model():
    with pytest.raises(MinBertError, match="A batch: .*Found 5"):
        PaddedCollator(SST, 0)([{"input_ids": [1], "token_type_ids": [0], "labels": 5}])


def test_a_round_becomes_a_batch_per_task():
    rows = {
        "sst": [{"input_ids": [1, 2], "token_type_ids": [0, 0], "labels": 4}],
        "sts": [{"input_ids": [3], "token_type_ids": [0], "labels": 2.5}] * 2,
    }
    collate = RoundCollator({"sst": PaddedCollator(SST, 0), "sts": PaddedCollator(STS, 0)})
    batches = collate([rows])
    assert list(batches) == ["sst", "sts"]
    assert [(name, batch["task"], len(batch["input_ids"])) for name, batch in batches.items()] == [
        ("sst", "sst", 1),
        ("sts", "sts", 2),
    ]
    with pytest.raises(MinBertError, match="must be 1. Found 2"):
        collate([rows, rows])
