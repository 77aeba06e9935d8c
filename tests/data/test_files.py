"""Reading files: what is kept, what is said, what is refused."""

import errno
import logging

import pytest

from hf_minbert.data.files import load_split, load_task, read_rows
from hf_minbert.data.labels import label_value
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, Task

SST, PARA, STS = TASKS["sst"], TASKS["para"], TASKS["sts"]
SST_HEADER = "\tid\tsentence\tsentiment\n"
PARA_HEADER = "\tid\tsentence1\tsentence2\tis_duplicate\n"
GAPS = PARA_HEADER + "0\ta\tone\tuno\t1.0\n1\tb\ttwo\tdos\t\n2\tc\tthree\ttres\t0.0\n3\td\tfour\t\t\n"


@pytest.fixture
def write(tmp_path):
    """`write(content, name)` makes a file and gives its path."""

    def make(content: str | bytes, name: str = "file.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


@pytest.fixture
def task_folder(write, tmp_path):
    """A folder with the three sst files; the test file has two nameless columns and no labels."""
    write(SST_HEADER + "0\ta\tgood film\t4\n1\tb\tbad film\t0\n", "ids-sst-train.csv")
    write(SST_HEADER + "0\tc\ta film\t2\n", "ids-sst-dev.csv")
    write("0\t\tid\tsentence\n1\t0.0\td\t the film\n2\t1.0\t e\tthe dog\n", "ids-sst-test-student.csv")
    return tmp_path


# ---- kept and said


def test_incomplete_rows_are_left_out_with_one_message(write, caplog):
    rows = read_rows(path := write(GAPS), PARA, labelled=True)
    assert [row["id"] for row in rows] == ["a", "c"]
    assert [row["label"] for row in rows] == [1, 0]
    (message,) = caplog.messages
    assert str(path) in message and "2 of 4 rows" in message and "b, d" in message


def test_no_row_of_an_unlabelled_split_is_left_out(write, caplog):
    rows = read_rows(write(GAPS), PARA, labelled=False)
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[3] == {"id": "d", "sentence1": "four", "sentence2": ""}
    assert not caplog.messages


def test_many_ids_are_abbreviated(write, caplog):
    content = SST_HEADER + "0\tkept\ttext\t1\n" + "".join(f"0\tid{number}\ttext\t\n" for number in range(12))
    read_rows(write(content), SST, labelled=True)
    assert "id0, id1," in caplog.text and "id9 and 2 more" in caplog.text and "id10" not in caplog.text


def test_strict_names_the_line_of_the_first_incomplete_row(write):
    with pytest.raises(MinBertError, match=r"file\.csv, line 3: 'is_duplicate' must not be blank"):
        read_rows(write(GAPS), PARA, labelled=True, strict=True)


def test_words_that_other_readers_take_for_missing(write):
    words = ["null", "NA", "None", "nan", ""]
    content = SST_HEADER + "".join(f"0\t{place}\t{word}\t1\n" for place, word in enumerate(words))
    assert [row["sentence"] for row in read_rows(write(content), SST, labelled=False)] == words
    assert [row["sentence"] for row in read_rows(write(content), SST, labelled=True)] == words[:4]


def test_text_of_digits_stays_text(write):
    content = PARA_HEADER + "0\ta\t2016\tx\t1\n1\tb\t1984\ty\t0\n2\tc\t\tz\t0\n"
    assert [row["sentence1"] for row in read_rows(write(content), PARA, labelled=True)] == ["2016", "1984"]


def test_doubled_quotes_become_single_once(write):
    content = SST_HEADER + '0\ta\t"He said ""good"" twice"\t1\n1\tb\tsix " wide\t2\n'
    assert [row["sentence"] for row in read_rows(write(content), SST, labelled=True)] == [
        'He said "good" twice',
        'six " wide',
    ]


@pytest.mark.parametrize("labelled", [True, False])
def test_byte_order_mark_and_line_ends_change_nothing(write, labelled):
    content = "id\tsentence\tsentiment\na\tgood film\t4\nb\tbad film\t0\nc\ta film\t2\n"
    plain = read_rows(write(content), SST, labelled=labelled)
    assert len(plain) == 3
    for other in (b"\xef\xbb\xbf" + content.encode(), content.replace("\n", "\r\n"), content.replace("\n", "\r")):
        assert read_rows(write(other), SST, labelled=labelled) == plain


def test_commas_separate_where_the_header_has_no_tab(write):
    rows = read_rows(write('id,sentence,sentiment\n x,"good, very good",4\n'), SST, labelled=True)
    assert rows == [{"id": " x", "sentence": "good, very good", "label": 4}]


def test_without_an_id_column_the_row_number_is_the_id(write):
    rows = read_rows(write("sentence,sentiment\ngood,4\nbad,\nfine,3\n\n"), SST, labelled=True)
    assert [row["id"] for row in rows] == ["0", "2"]


def test_one_column_file_keeps_a_blank_line_as_a_blank_text(write):
    rows = read_rows(write("sentence\ngood\n\nbad\n\n\nfine\n\n"), SST, labelled=False)
    assert [row["sentence"] for row in rows] == ["good", "", "bad", "", "", "fine"]


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "  \n", "\n  "])
def test_blank_lines_at_the_end_are_no_rows(write, end):
    rows = read_rows(write("sentence\ngood\nbad\n" + end), SST, labelled=False)
    assert [row["sentence"] for row in rows] == ["good", "bad"]
    rows = read_rows(write(f"{SST_HEADER}{FIVE[0]}{end}"), SST, labelled=True)
    assert len(rows) == 1


def test_a_quoted_empty_cell_at_the_end_is_a_row(write):
    rows = read_rows(write('sentence\ngood\n""\n'), SST, labelled=False)
    assert [row["sentence"] for row in rows] == ["good", ""]


@pytest.mark.parametrize(
    ("task", "written", "label"),
    [(SST, "4 ", 4), (SST, "4.0", 4), (PARA, "1.0", 1), (PARA, "0", 0), (STS, "3.8", 3.8), (STS, "5", 5.0)],
)
def test_labels_as_they_are_written(task, written, label):
    value = label_value(task, written, "here")
    assert value == label and type(value) is type(label)


# ---- refused


@pytest.mark.parametrize(
    ("task", "written"),
    [(SST, v) for v in ("5", "-1", "2.5", "yes", "nan", "inf", "1_0")]
    + [(PARA, v) for v in ("2", "yes", "0.5")]
    + [(STS, v) for v in ("7.0", "-0.1", "nan", "inf", "1e999", "high")],
)
def test_a_bad_label_names_task_range_value_and_line(write, task, written):
    texts = "\t".join("text" for _ in task.text_columns)
    header = "\t".join(["id", *task.text_columns, task.label_column])
    path = write(f"{header}\na\t{texts}\t1\nb\t{texts}\t{written}\n")
    allowed = {"sst": "0 to 4", "para": "0 to 1", "sts": "0 to 5"}[task.name]
    with pytest.raises(MinBertError) as error:
        read_rows(path, task, labelled=True)
    for part in (task.name, allowed, repr(written), f"{path}, line 3"):
        assert part in str(error.value)
    assert len(read_rows(path, task, labelled=False)) == 2, "prediction does not look at labels"


def test_a_bad_label_is_refused_in_a_row_with_a_blank_text_too(write):
    with pytest.raises(MinBertError, match="'yes'"):
        read_rows(write(PARA_HEADER + "0\ta\tone\t\tyes\n"), PARA, labelled=True)


FIVE = [f"{place}\tid{place}\tsentence {place}\t1\n" for place in range(5)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SST_HEADER + "".join(FIVE).replace("sentence 1", '"sentence 1'), "line 3: a double quote is not closed"),
        (
            SST_HEADER + "".join(FIVE).replace("sentence 1", '"sentence 1').replace("sentence 3", 'sentence 3"'),
            "line 3: a line break inside a cell in double quotes, and line 4 in it could be a row",
        ),
        (SST_HEADER + FIVE[0] + '1\tb\t"so" he said\t2\n', "line 3: a double quote is not closed or stray"),
        (SST_HEADER + FIVE[0] + "1\tb\ttext\n", "line 3: expected 4 tab separated cells, as in the header. Found 3"),
        (SST_HEADER + FIVE[0] + "1\tb\ttext\t2\t3\n", "line 3: expected 4 tab separated cells"),
        (SST_HEADER + FIVE[0] + "\n" + FIVE[1], "line 3: a blank line between rows"),
        (SST_HEADER + FIVE[0] + '1\tb\t"' + "long " * 40_000 + "\n", "line 3: a double quote is not closed"),
        (SST_HEADER.encode() + FIVE[0].encode() + b"1\tb\tcaf\xe9\t2\n", "line 3: not UTF-8"),
        ("id\tsentence\n".encode("utf-16"), "line 1: not UTF-8"),
        (SST_HEADER + "0\ta\tte\0xt\t1\n", "line 2: a NUL byte"),
        ("", "is empty"),
        ("\ufeff\n\n", "is empty"),
        ("\n" + SST_HEADER + FIVE[0], "line 1: a blank line where the header should be"),
        (SST_HEADER, "has a header and no rows"),
        ("id\tsentence\tsentence\tsentiment\na\tb\tc\t1\n", "2 columns named 'sentence'"),
        ("id\tid\tsentence\tsentiment\na\tb\tc\t1\n", "2 columns named 'id'"),
        ("id\ttext\tsentiment\na\tb\t1\n", r"no column 'sentence'. Columns found: id, text, sentiment"),
        ("id\tsentence\na\tb\n", "no labels in .*no column 'sentiment' .columns found: id, sentence"),
        (SST_HEADER + "0\ta\ttext\t\n", "no row left"),
    ],
)
def test_a_broken_file_is_refused(write, content, said):
    path = write(content)
    with pytest.raises(MinBertError, match=said) as error:
        read_rows(path, SST, labelled=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_paths_that_are_no_files(tmp_path, write):
    write("x", "ids-sst-dev.txt")
    with pytest.raises(MinBertError, match=r"ids-sst-dev\.csv does not exist. Its folder holds: ids-sst-dev\.txt"):
        load_split(SST, tmp_path, "dev")
    with pytest.raises(MinBertError, match="is a folder"):
        read_rows(tmp_path, SST, labelled=True)
    with pytest.raises(MinBertError, match="`data_dir` does not exist: .*absent"):
        load_task(SST, tmp_path / "absent")
    with pytest.raises(MinBertError, match="`data_dir` is not a folder"):
        load_task(SST, tmp_path / "ids-sst-dev.txt")
    with pytest.raises(MinBertError, match="Unknown split 'tset'. Did you mean 'test'"):
        load_split(SST, tmp_path, "tset")


def test_a_file_without_permission(write, monkeypatch):
    def refuse(path, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = write(GAPS)
    monkeypatch.setattr("pathlib.Path.open", refuse)  # the superuser may read every real file
    with pytest.raises(MinBertError, match=r"file\.csv cannot be read: Permission denied"):
        read_rows(path, PARA, labelled=True)


# ---- splits


def test_splits_with_other_columns_load_together(task_folder):
    data = load_task(SST, task_folder)
    assert {split: rows.column_names for split, rows in data.items()} == {
        "train": ["id", "sentence", "label"],
        "dev": ["id", "sentence", "label"],
        "test": ["id", "sentence"],
    }
    assert data["test"].to_list() == [{"id": "d", "sentence": "the film"}, {"id": " e", "sentence": "the dog"}]
    assert data["train"].features["label"].names == list(SST.labels)
    assert data["train"]["label"][:] == [4, 0]


def test_only_the_splits_asked_for_are_read(task_folder):
    (task_folder / "ids-sst-train.csv").write_bytes(b"")
    assert list(load_task(SST, task_folder, splits=("dev",))) == ["dev"]


def test_labels_of_a_split_without_them(task_folder):
    with pytest.raises(MinBertError, match="no labels in split 'test'.*Choose a split that has labels"):
        load_split(SST, task_folder, "test", labelled=True)
    (task_folder / "ids-sst-dev.csv").write_text("id\tsentence\na\tb\n")
    for given, remedy in (({}, r"Name the right column .* or give it files that have one\.$"),
                          ({"labelled": True}, r"predict on this one instead\.$")):  # fmt: skip
        with pytest.raises(MinBertError, match=f"no labels in split 'dev'.*{remedy}"):
            load_split(SST, task_folder, "dev", **given)


def test_a_test_split_has_labels_where_every_row_is_complete(tmp_path, write, caplog):
    write("id\tsentence\tsentiment\na\tgood\t4\nb\tbad\t0\n", SST.files["test"])
    assert load_split(SST, tmp_path, "test")["label"][:] == [4, 0]
    write(GAPS, PARA.files["test"])
    test = load_split(PARA, tmp_path, "test")
    assert "label" not in test.column_names and test["id"][:] == ["a", "b", "c", "d"]
    assert "without labels" in caplog.text


@pytest.mark.parametrize("values", [("0.8", "2.0", "3.8"), ("0", "3", "5")])
def test_scores_are_float32_whatever_their_values(tmp_path, write, values):
    rows = "".join(f"{place}\ta\tb\t{value}\n" for place, value in enumerate(values))
    write("id\tsentence1\tsentence2\tsimilarity\n" + rows, STS.files["dev"])
    dev = load_split(STS, tmp_path, "dev")
    assert dev.features["label"].dtype == "float32"
    assert dev["label"][:] == pytest.approx([float(value) for value in values])


def test_a_score_stays_inside_a_range_that_float32_cannot_hold():
    tenth = Task("share", "score", ("text",), "share", range=(0.0, 0.1))
    as_float32 = 0.10000000149011612
    assert label_value(tenth, as_float32, "here") == 0.1
    with pytest.raises(MinBertError):
        label_value(tenth, 0.1001, "here")


REAL_ROWS = {
    "sst": (8544, 1101, 2210),
    "para": (14150, 2020, 4042),
    "sts": (6040, 863, 1725),
    "cfimdb": (1707, 245, 488),
}


@pytest.mark.parametrize("name", REAL_ROWS)
def test_the_course_files(cs224n, name, caplog):
    data = load_task(TASKS[name], cs224n)
    assert tuple(len(rows) for rows in data.values()) == REAL_ROWS[name]
    assert "label" not in data["test"].column_names
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if name == "para":
        assert len(warnings) == 1 and "quora-train.csv" in warnings[0] and "2 of 14,152" in warnings[0]
    else:
        assert not warnings
    if name == "sts":
        assert sum(label != round(label) for label in data["train"]["label"]) == 4175
