"""What formats hand over for a label: the same frame has the same labels in each, or it is refused."""

from __future__ import annotations

import datetime
import decimal
import itertools
from dataclasses import replace

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import read_rows
from hf_minbert.data.labels import label_value
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, Task

NAMES = (f"mood{number}" for number in itertools.count())  # what is said once is said of a task


def mood(*labels: str, kind: str = "binary") -> Task:
    return Task(next(NAMES), kind, ("text",), labels=labels)


SCORE = Task("score", "score", ("text",), range=(0, 5))

WRITERS = {
    "rows.csv": lambda frame, path: frame.to_csv(path, index=False),
    "rows.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "semicolons.csv": lambda frame, path: frame.to_csv(path, index=False, sep=";"),
    "rows.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "rows.json": lambda frame, path: frame.to_json(path, orient="records"),
    "rows.parquet": lambda frame, path: frame.to_parquet(path, index=False),
    "saved": lambda frame, path: datasets.Dataset.from_pandas(frame).save_to_disk(path),
}


def labels_of(tmp_path, name: str, task: Task, values) -> list:
    """The labels that come back from a frame of these, written in a format."""
    frame = pandas.DataFrame({"text": [f"text {n}" for n in range(len(values))], "label": values})
    WRITERS[name](frame, tmp_path / name)
    return [row["label"] for row in read_rows(tmp_path / name, task, labelled=True)]


# ---- Booleans


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("True", "False"), [0, 1, 0]),
        (("False", "True"), [1, 0, 1]),
        (("true", "false"), [0, 1, 0]),
        (("FALSE", "tRUE"), [1, 0, 1]),
        (("different", "same"), [1, 0, 1]),
        (("0", "1"), [1, 0, 1]),
    ],
)
@pytest.mark.parametrize("category", [False, True])
def test_a_boolean_is_the_label_that_spells_it(tmp_path, caplog, name, labels, expected, category):
    values = pandas.Categorical([True, False, True]) if category else [True, False, True]
    assert labels_of(tmp_path, name, mood(*labels), values) == expected
    said = [message for message in caplog.messages if "boolean labels" in message]
    if labels[0].lower() in ("true", "false"):
        assert not said
    else:
        (message,) = said
        assert message.endswith(f"false is read as 0 = {labels[0]}, and true as 1 = {labels[1]}.")


@pytest.mark.parametrize("name", WRITERS)
def test_a_boolean_among_three_labels_is_the_one_that_spells_it(tmp_path, name):
    task = mood("true", "half-true", "false", kind="classes")
    assert labels_of(tmp_path, name, task, [False, True]) == [2, 0]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("labels", "value"),
    [
        (("true", "other"), False),
        (("tRUE", "other"), True),
        (("other", "FALSE"), False),
        (("other", "false"), True),
        (("1", "0"), True),
        (("1", "2"), False),
        (("a", "b", "c"), True),
        (("true", "b", "c"), False),
    ],
)
def test_a_boolean_that_may_be_another_label_is_refused(tmp_path, name, labels, value):
    with pytest.raises(MinBertError, match=rf"{name}, (line|row) \d: .*Found '?(?i:{value})'?\. A boolean needs"):
        labels_of(tmp_path, name, mood(*labels, kind="classes"), [value])


@pytest.mark.parametrize("number", ["1", "0", "1.0"])
def test_a_number_that_is_one_label_as_a_boolean_and_another_as_an_id_is_refused(tmp_path, number):
    (tmp_path / "rows.csv").write_text(f"text,label\na,{number}\n")
    reversed_ = Task("t", "binary", ("text",), "label", labels=("True", "False"))
    with pytest.raises(MinBertError, match=f"line 2: the label {number} of task 't' is ambiguous: as a boolean and"):
        read_rows(tmp_path / "rows.csv", reversed_, labelled=True)
    plain = Task("t", "binary", ("text",), "label", labels=("False", "True"))
    assert read_rows(tmp_path / "rows.csv", plain, labelled=True)[0]["label"] == float(number)


@pytest.mark.parametrize("name", WRITERS)
def test_blank_booleans_stay_blank(tmp_path, name):
    assert labels_of(tmp_path, name, mood("True", "False"), [True, None, False]) == [0, 1]


@pytest.mark.parametrize("name", WRITERS)
def test_a_boolean_is_no_score(tmp_path, name):
    with pytest.raises(MinBertError, match="must be a number from 0 to 5. Found '?[tT]rue'?"):
        labels_of(tmp_path, name, SCORE, [True])


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), "TRUE", " true ", np.str_("True")])
def test_booleans_of_every_library(value):
    assert label_value(mood("True", "False"), value, "here") == 0
    assert label_value(mood("no", "yes"), value, "here") == 1


def test_what_a_boolean_is_taken_for_is_said_once(tmp_path, caplog):
    task = mood("no", "yes")
    for name in ("rows.csv", "rows.jsonl"):
        assert labels_of(tmp_path, name, task, [True, False] * 5) == [1, 0] * 5
    assert len(caplog.messages) == 1


# ---- Rows given to a trainer


@pytest.mark.parametrize("container", [list, datasets.Dataset.from_list])
def test_rows_in_memory_follow_the_same_rule(tiny_tokenizer, tmp_path, container):
    rows = container([{"text": "a film", "label": True}, {"text": "a dog", "label": False}])
    for labels, expected in ((("True", "False"), [0, 1]), (("no", "yes"), [1, 0])):
        assert encode(rows, mood(*labels), tiny_tokenizer, 16).labels.tolist() == expected
    with pytest.raises(MinBertError, match="Row 0: a label"):
        encode(rows, mood("true", "other"), tiny_tokenizer, 16)


def test_class_ids_in_memory_are_read_by_name(tiny_tokenizer, tmp_path):
    def of(names, task, ids=(0, 1)):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = datasets.Dataset.from_dict({"text": ["a film"] * len(ids), "label": [*ids]}, features=features)
        return encode(rows, task, tiny_tokenizer, 16, cache_dir=tmp_path).labels.tolist()

    task = mood("bad", "good")
    assert of(["bad", "good"], task) == [0, 1]
    assert of(["good", "bad"], task) == [1, 0], "also where the same ids were kept under the cache"
    assert of(["x", "y"], task) == [0, 1]
    assert of(["1", "2", "3"], SCORE, (0, 2)) == [1.0, 3.0]
    with pytest.raises(MinBertError, match="Column 'label': its classes are good, fair"):
        of(["good", "fair"], task)
    with pytest.raises(MinBertError, match="Row 1: a label .*Found -1"):
        of(["good", "bad"], task, (0, -1))


def test_a_batch_follows_the_same_rule():
    rows = [{"input_ids": [2, 3], "token_type_ids": [0, 0], "labels": value} for value in (True, False)]
    assert PaddedCollator(mood("True", "False"), 0)(rows)["labels"].tolist() == [0, 1]


# ---- Classes with names


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
@pytest.mark.parametrize(
    ("task", "names", "expected"),
    [
        (mood("positive", "negative"), ["NEGATIVE", "POSITIVE"], [1, 0]),
        (mood("True", "False"), ["false", "true"], [1, 0]),
        (mood("no", "yes"), ["True", "False"], [1, 0]),
        (mood("no", "yes"), ["1", "0"], [1, 0]),
        (mood("no", "yes"), ["bad", "good"], [0, 1]),
        (mood("1", "2"), ["2", "1"], [1, 0]),
        (mood("a", "b", "c", kind="classes"), ["1", "2", "3"], [0, 1]),
        (SCORE, ["4", "2.5"], [4, 2.5]),
        (SCORE, ["low", "high"], [0, 1]),
    ],
)
def test_names_of_classes(tmp_path, name, task, names, expected):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    path = tmp_path / name
    rows.to_parquet(path) if path.suffix else rows.save_to_disk(path)
    assert [row["label"] for row in read_rows(path, task, labelled=True)] == expected


@pytest.mark.parametrize("names", [["a", "B", "b"], ["true", "other"], ["GOOD", "fair"], ["bad", "BAD"]])
def test_names_of_classes_that_may_mean_others_are_refused(tmp_path, names):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict({"text": ["a"], "label": [0]}, features=features).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(MinBertError, match="label"):
        read_rows(tmp_path / "x.parquet", mood("bad", "good"), labelled=True)


def test_a_text_that_is_a_class_is_its_name(tmp_path):
    features = datasets.Features({"text": datasets.ClassLabel(names=["sport", "vote"])})
    rows = datasets.Dataset.from_dict({"text": [1, 0, None]}, features=features)
    rows.to_parquet(tmp_path / "x.parquet")
    assert [row["text"] for row in read_rows(tmp_path / "x.parquet", SCORE, labelled=False)] == ["vote", "sport", ""]


@pytest.mark.parametrize("name", WRITERS)
def test_categories_are_their_values(tmp_path, name):
    task = mood("c", "a", "b", kind="classes")
    assert labels_of(tmp_path, name, task, pandas.Categorical(["a", "c", "b"])) == [1, 0, 2]
    assert labels_of(tmp_path, f"{name}", mood("x", "y"), pandas.Categorical([1, 0, 1])) == [1, 0, 1]


# ---- Numbers


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        (("x", "y", "z"), [1.0, None, 2.0], [1, 2]),
        (("x", "y", "z"), ["1", "1.0", " 2 ", "z"], [1, 1, 2, 2]),
        (("1", "2", "3"), [1.0, None, 3.0], [0, 2]),
        (("1", "2", "3"), [1, 3], [0, 2]),
        (("1", "2", "3"), ["1", "3.00"], [0, 2]),
        (("0.5", "1.5", "none"), [1.5, 0.5], [1, 0]),
    ],
)
def test_numbers_and_numbers_as_text(tmp_path, name, labels, values, expected):
    assert labels_of(tmp_path, name, mood(*labels, kind="classes"), values) == expected


@pytest.mark.parametrize("value", ["0", "4", "1.5", "nan", "1_0", "one"])
def test_a_number_that_is_no_name_is_refused(value):
    with pytest.raises(MinBertError, match="one of the names 1, 2, 3"):
        label_value(mood("1", "2", "3", kind="classes"), value, "here")
    with pytest.raises(MinBertError, match="one of the names 2, 2.0"):
        label_value(mood("2", "2.0"), "2.00", "here")


# ---- What is no label

COLUMNS = {
    "dates": pa.array([datetime.date(2024, 1, 1)]),
    "times": pa.array([datetime.datetime(2024, 1, 1)]),
    "bytes": pa.array([b"1"]),
    "lists": pa.array([[1]]),
    "texts": pa.array([["good"]]),
    "structs": pa.array([{"label": 1}]),
    "spans": pa.array([datetime.timedelta(days=1)]),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("task", [mood("bad", "good"), mood("1", "2"), SCORE])
def test_what_is_no_label_is_refused(tmp_path, name, task):
    pq.write_table(pa.table({"text": ["a"], "label": COLUMNS[name]}), tmp_path / "x.parquet")
    with pytest.raises(MinBertError, match="row 0: expected text or a number in a cell. Found .*Save the column as"):
        read_rows(tmp_path / "x.parquet", task, labelled=True)
    with pytest.raises(MinBertError, match="here: a label of task .* Found"):
        label_value(task, COLUMNS[name].to_pylist()[0], "here")


@pytest.mark.parametrize("value", [np.array([0, 1]), torch.tensor([0.0, 1.0]), {}, b"1", bytearray(b"1"), 1j])
def test_what_is_no_label_in_memory_is_refused(value):
    for task in (mood("bad", "good"), mood("1", "2"), SCORE):
        with pytest.raises(MinBertError, match="here: a label of task"):
            label_value(task, value, "here")


@pytest.mark.parametrize("mark", [",", ";", "/", " "])
def test_several_labels_in_a_cell_are_refused_with_their_separator(mark):
    cell = mark.join(["good", "bad"])
    with pytest.raises(MinBertError, match=f"`kind: labels` and `label_delimiter: '{mark}'`"):
        label_value(mood("bad", "good"), cell, "here")
    several = Task(name="topics", kind="labels", text_columns=("text",), labels=("bad", "good"))
    with pytest.raises(
        MinBertError, match=f"several labels with '{mark}' between them: set `label_delimiter: '{mark}'`"
    ):
        label_value(several, cell, "here")
    assert label_value(replace(several, label_delimiter=mark), cell, "here") == [1.0, 1.0]


def test_a_cell_that_is_no_list_of_labels_has_no_hint_of_a_separator():
    with pytest.raises(MinBertError) as found:
        label_value(mood("bad", "good"), "good, fine", "here")
    assert "label_delimiter" not in str(found.value)


def test_decimals_are_numbers(tmp_path):
    cells = pa.array([decimal.Decimal("3.80"), decimal.Decimal("4.00")])
    pq.write_table(pa.table({"text": cells, "label": cells}), tmp_path / "x.parquet")
    rows = read_rows(tmp_path / "x.parquet", SCORE, labelled=True)
    assert [(row["text"], row["label"]) for row in rows] == [("3.80", 3.8), ("4.00", 4.0)]


# ---- Columns that no task needs


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        pa.array([[1]], pa.list_view(pa.int32())),
        pa.array([b"0" * 16], pa.uuid()),
        pa.array([datetime.time(1)]),
    ],
    ids=["map", "list view", "uuid", "time"],
)
def test_a_column_of_any_type_may_stand_beside(tmp_path, column):
    table = pa.table({"sentence": ["good film"], "sentiment": [4], "other": column})
    pq.write_table(table, tmp_path / "x.parquet")
    expected = [{"id": "0", "sentence": "good film", "label": 4}]
    assert read_rows(tmp_path / "x.parquet", TASKS["sst"], labelled=True) == expected
    with pytest.raises(MinBertError, match="row 0: expected text or a number in a cell"):
        read_rows(tmp_path / "x.parquet", TASKS["sst"], labelled=False, columns={"sentence": "other"})


def test_a_column_that_cannot_be_read_may_stand_beside(tmp_path):
    table = pa.table({"text": ["good film"] * 50, "other": [f"{n} {'x' * 50}" for n in range(50)]})
    pq.write_table(table, path := tmp_path / "x.parquet", compression="none", use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[place : place + 20] = b"\xff" * 20
    path.write_bytes(raw)
    assert len(read_rows(path, SCORE, labelled=False)) == 50
    with pytest.raises(MinBertError, match="Reading column 'other' of .*x.parquet failed"):
        read_rows(path, SCORE, labelled=False, columns={"text": "other"})
