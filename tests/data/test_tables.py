"""Formats: the same rows come out of each, by the same rules, and what is wrong names its place."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_minbert.data.files import load_split, read_rows
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, Task

SST, PARA, STS = TASKS["sst"], TASKS["para"], TASKS["sts"]
#: Cells as a person would write them: numbers in a text, a blank text, a blank label, a name for a label.
SHEET = [
    {"id": "a", "sentence": " good film ", "sentiment": "4"},
    {"id": "b", "sentence": "2016", "sentiment": "very negative"},
    {"id": "c", "sentence": "", "sentiment": "1"},
    {"id": "d", "sentence": "null", "sentiment": ""},
]


def write_csv(path, rows):
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    path.write_text("".join(",".join(cells) + "\n" for cells in lines), encoding="utf-8")


def write_tsv(path, rows):
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    path.write_text("".join("\t".join(cells) + "\n" for cells in lines), encoding="utf-8")


def as_json(row):
    """Blank cells are null or left out; digits are numbers."""
    typed = {key: int(cell) if cell.isdigit() else cell for key, cell in row.items() if cell}
    return typed | ({"sentence": None} if not row["sentence"] else {})


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(as_json(row)) + "\n" for row in rows), encoding="utf-8")


def write_json(path, rows):
    path.write_text(json.dumps([as_json(row) for row in rows], indent=1), encoding="utf-8")


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist([{key: cell or None for key, cell in row.items()} for row in rows]), path)


def write_saved(path, rows):
    datasets.Dataset.from_list([{key: cell or None for key, cell in row.items()} for row in rows]).save_to_disk(path)


WRITERS = {
    "rows.csv": write_csv, "rows.tsv": write_tsv, "rows.CSV": write_csv, "rows.jsonl": write_jsonl,
    "lines.json": write_jsonl, "list.json": write_json, "rows.parquet": write_parquet, "saved": write_saved,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, caplog, name):
    WRITERS[name](path := tmp_path / name, SHEET)
    caplog.clear()
    assert read_rows(path, SST, labelled=True) == [
        {"id": "a", "sentence": "good film", "label": 4},
        {"id": "b", "sentence": "2016", "label": 0},
    ]
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_minbert")]
    assert message.startswith(f"{path}: 2 of 4 rows are left out") and message.endswith("Their ids: c, d.")
    unlabelled = read_rows(path, SST, labelled=False)
    assert [row["sentence"] for row in unlabelled] == ["good film", "2016", "", "null"]


PLACES = {
    "rows.csv": "line 4", "rows.tsv": "line 4", "rows.jsonl": "line 3", "lines.json": "line 3", "list.json": "row 2",
    "rows.parquet": "row 2", "saved": "row 2",
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_every_format_names_the_place(tmp_path, name, place):
    path = tmp_path / name
    WRITERS[name](path, [*SHEET[:2], {"id": "x", "sentence": "bad", "sentiment": "5"}])
    with pytest.raises(MinBertError) as error:
        read_rows(path, SST, labelled=True)
    assert str(error.value).startswith(f"{path}, {place}: a label of task 'sst' must be a whole number from 0 to 4")
    assert "'5'" in str(error.value)
    WRITERS[name](path.with_name("2" + name), [SHEET[0], SHEET[1], SHEET[2]])
    with pytest.raises(MinBertError, match=f"2{name}, {place}: 'sentence' must not be blank"):
        read_rows(path.with_name("2" + name), SST, labelled=True, strict=True)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_without_ids_counts_rows_from_zero(tmp_path, name):
    rows = [{"sentence": row["sentence"], "sentiment": row["sentiment"]} for row in SHEET]
    WRITERS[name](tmp_path / name, rows)
    assert [row["id"] for row in read_rows(tmp_path / name, SST, labelled=True)] == ["0", "1"]


@pytest.mark.parametrize("name", ["rows.jsonl", "list.json", "rows.parquet", "saved"])
def test_a_line_break_becomes_a_space(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"id": "a\nb", "sentence": "good\r\nfilm\n", "sentiment": "4"}])
    assert read_rows(tmp_path / name, SST, labelled=True) == [{"id": "a b", "sentence": "good film", "label": 4}]


# ---- JSON


def test_numbers_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 7, "sentence1": 2016, "sentence2": 1.50, "similarity": 3.8}\n', encoding="utf-8")
    assert read_rows(path, STS, labelled=True) == [{"id": "7", "sentence1": "2016", "sentence2": "1.50", "label": 3.8}]


def test_byte_order_mark_line_ends_and_a_line_separator_inside_a_text(tmp_path):
    lines = ['{"sentence": "a\u2028film", "sentiment": 1}', '{"sentence": "bad", "sentiment": 0}', ""]
    for end in ("\n", "\r\n", "\r"):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
        assert [row["sentence"] for row in read_rows(path, SST, labelled=True)] == ["a\u2028film", "bad"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"sentence": "x"}\n{"sentence": \n', "line 2: not readable as JSON"),
        ("a.jsonl", '{"sentence": "x"}\n{"sentence": "y \\ud83d"}\n', r"line 2: half a character .*y \\ud83d"),
        ("a.jsonl", '{"sentence": "x"}\n\n{"sentence": "y"}\n', "line 2: not readable as JSON"),
        ("a.jsonl", '{"sentence": "x"}\n["y"]\n', r"line 2: expected an object like .*Found \['y'\]"),
        ("a.jsonl", '{"sentence": "x", "sentence": "y"}\n', "line 1: the key 'sentence' occurs twice"),
        ("a.jsonl", '{"sentence": ["x"]}\n', r"line 1: expected text or a number in a cell. Found \['x'\]"),
        ("a.jsonl", '{"sentence": true}\n', "line 1: expected text or a number in a cell. Found True"),
        ("a.json", '[{"sentence": "x"},\n {"sentence" 2}]', "line 2: not readable as JSON"),
        ("a.json", '[{"sentence": "x"}, 3]', "row 1: expected an object"),
        ("a.json", "[]", "a.json has no rows"),
        ("a.jsonl", '{"text": "x"}\n', "no column 'sentence'. Columns found: text. .*`columns`"),
        ("a.jsonl", "", "is empty"),
        ("a.parquet", "no parquet", "Reading .*a.parquet failed: .*Is it a Parquet file"),
        ("a.xlsx", "x", r"files that end in '.xlsx' cannot be read. Save it as one of: .csv, .tsv, .jsonl"),
        ("a.tsv", "sentence,sentiment\nx,1\n", "no column 'sentence'"),  # tabs only, whatever the header holds
    ],
)
def test_a_broken_file_is_refused(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(MinBertError, match=said) as error:
        read_rows(path, SST, labelled=False)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# ---- Parquet and saved datasets


def with_classes(path, names, labels):
    features = datasets.Features({"sentence": datasets.Value("string"), "sentiment": datasets.ClassLabel(names=names)})
    rows = {"sentence": [f"text {row}" for row in range(len(labels))], "sentiment": labels}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.to_parquet(path) if path.suffix else dataset.save_to_disk(path)
    return path


MOOD = Task("mood", "classes", ("sentence",), "sentiment", labels=("bad", "fair", "good"))


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_class_ids_with_names_are_read_by_name(tmp_path, name):
    path = with_classes(tmp_path / name, ["good", "bad"], [0, 1, 0])
    assert [row["label"] for row in read_rows(path, MOOD, labelled=True)] == [2, 0, 2]


def test_class_ids_whose_names_are_others_are_read_as_ids(tmp_path):
    path = with_classes(tmp_path / "rows.parquet", ["0", "1", "2"], [2, 0, 1])
    assert [row["label"] for row in read_rows(path, MOOD, labelled=True)] == [2, 0, 1]


@pytest.mark.parametrize("names", [["good", "fair", "awful"], ["a", "b"], ["bad", "fair", "good", "great"]])
def test_class_ids_that_may_mean_others_are_refused(tmp_path, names):
    path = with_classes(tmp_path / "rows.parquet", names, [0, 1])
    with pytest.raises(MinBertError, match=f"column 'sentiment': its classes are {', '.join(names)}.*bad, fair, good"):
        read_rows(path, MOOD, labelled=True)


def test_a_number_column_with_a_gap(tmp_path):
    """A gap makes a column of whole numbers one of floats in many tools."""
    table = pa.table({"sentence": pa.array([2016.0, None, 1984.5]), "sentiment": pa.array([1.0, 2.0, None])})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = read_rows(tmp_path / "rows.parquet", SST, labelled=False)
    assert [row["sentence"] for row in rows] == ["2016", "", "1984.5"]
    assert read_rows(tmp_path / "rows.parquet", SST, labelled=True) == [{"id": "0", "sentence": "2016", "label": 1}]


def test_what_is_not_a_number_is_no_label(tmp_path):
    table = pa.table({"sentence1": ["a"], "sentence2": ["b"], "similarity": [float("nan")]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(MinBertError, match="row 0: a label of task 'sts' must be a number from 0 to 5. Found 'nan'"):
        read_rows(tmp_path / "x.parquet", STS, labelled=True)


def test_minus_one_is_no_label_in_a_dataset_and_a_mistake_in_a_file(tmp_path):
    rows = {"sentence": ["a", "b"], "sentiment": [-1, 3]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    assert [row["label"] for row in read_rows(tmp_path / "saved", SST, labelled=True)] == [3]
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    with pytest.raises(MinBertError, match="row 0: a label .*Found '-1'"):
        read_rows(tmp_path / "rows.parquet", SST, labelled=True)
    temperature = Task("warmth", "score", ("sentence",), "sentiment", range=(-5, 5))
    assert [row["label"] for row in read_rows(tmp_path / "saved", temperature, labelled=True)] == [-1, 3]
    datasets.Dataset.from_dict({"sentence": ["a", "b"], "sentiment": [-1, 1]}).save_to_disk(tmp_path / "signs")
    signs = Task("signs", "binary", ("sentence",), "sentiment", labels=("-1", "1"))
    assert [row["label"] for row in read_rows(tmp_path / "signs", signs, labelled=True)] == [0, 1]


def test_a_cell_of_parquet_that_python_cannot_hold_is_named_with_its_column(tmp_path):
    stamps = pa.array([0, 2**62], pa.timestamp("us"))  # beyond the year 9999
    pq.write_table(pa.table({"id": stamps, "sentence": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(MinBertError, match=r"Reading column 'id' of .*rows.parquet failed"):
        read_rows(tmp_path / "rows.parquet", SST, labelled=False)


@pytest.fixture
def saved_splits(tmp_path):
    """A `DatasetDict` of train, validation and test rows of sst, on disk."""
    sizes = {"train": 3, "validation": 2, "test": 1}
    rows = {
        split: {"text": [f"{split} {row}" for row in range(size)], "stars": list(range(size))}
        for split, size in sizes.items()
    }
    rows["test"]["stars"] = [-1]
    data = datasets.DatasetDict({split: datasets.Dataset.from_dict(columns) for split, columns in rows.items()})
    data.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def saved_sst(path, **changes):
    fields = {"dataset": str(path), "columns": {"sentence": "text", "label": "stars"}, **changes}
    return Task("sst", "classes", ("sentence",), "sentiment", labels=SST.labels, **fields)


def test_a_saved_dataset_of_several_splits(saved_splits):
    for name, data_dir in ((saved_splits, None), ("saved", saved_splits.parent)):
        task = saved_sst(name)
        assert load_split(task, data_dir, "train")["sentence"][:] == ["train 0", "train 1", "train 2"]
        assert load_split(task, data_dir, "dev")["label"][:] == [0, 1], "validation is dev under its usual name"
        assert "label" not in load_split(task, data_dir, "test").column_names
    other = saved_sst(saved_splits, splits={"dev": "train"})
    assert len(load_split(other, None, "dev")) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"splits": {"dev": "validaton"}}, "no split for 'dev'.*Did you mean 'validation'.*splits: {dev: ...}"),
        (
            {"columns": {"sentence": "txet", "label": "stars"}},
            "no column 'txet'. Columns found: text, stars. Did you mean 'text'",
        ),
        ({"dataset": "./nowhere"}, "`dataset` ./nowhere is no folder here"),
    ],
)
def test_wrong_names_in_a_saved_dataset(saved_splits, changes, said):
    with pytest.raises(MinBertError, match=said):
        load_split(saved_sst(saved_splits, **changes), None, "dev")


def test_folders_that_hold_something_else(tmp_path, saved_splits):
    with pytest.raises(MinBertError, match="is a folder of several splits. Give one of them: .*saved/train"):
        read_rows(saved_splits, SST, labelled=False)
    with pytest.raises(MinBertError, match="It holds one dataset: name it under `files`"):
        load_split(saved_sst(saved_splits / "train"), None, "dev")
    with pytest.raises(MinBertError, match="did not write this folder"):
        load_split(saved_sst(tmp_path), None, "dev")
