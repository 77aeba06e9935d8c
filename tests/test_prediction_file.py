"""A file predicted chunk by chunk: the same bytes however often it was stopped, and nothing of another prediction."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections import deque
from pathlib import Path
from threading import Thread

import datasets
import numpy as np
import pytest
import torch

from hf_minbert import DivergedError, MinBertError, Predictor, get_tasks
from hf_minbert.data import delimited, stream
from hf_minbert.data.files import read_rows
from hf_minbert.data.stream import RowStream
from hf_minbert.data.tables import read_parts
from hf_minbert.evaluation.submission import COURSE, CSV
from hf_minbert.pretrained.prediction_file import PartialFile, predict_file, survey
from hf_minbert.settings.tasks import DataFile

SST, STS = get_tasks(["sst", "sts"])
WORDS = ["good", "bad", "the film is not very good at all", "why", "a man plays", "how is it you dog ?"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(RowStream, "chunk_limits", (100, 10**6))
    monkeypatch.setattr(stream, "PART", 7)


@pytest.fixture(scope="module")
def model(tiny_model, tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "in.csv")


def write(path: Path, rows: int = 650) -> Path:
    """Pairs of texts of all lengths, with ids in no order."""
    lines = (f"{row * 7919 % rows},{WORDS[row % 6]} {row},{WORDS[row % 5]}" for row in range(rows))
    path.write_text("id,sentence1,sentence2\n" + "".join(f"{line}\n" for line in lines))
    return path


def predict(model: Path | Predictor, source: Path, output: Path, tasks=("sts",), form=CSV, clip=False, **options):
    predictor = model if isinstance(model, Predictor) else Predictor.from_pretrained(model, **options)
    rows = RowStream(DataFile(str(source)), predictor.task(tasks[0]))
    outputs = {name: output if len(tasks) == 1 else output / f"{name}.csv" for name in tasks}
    predict_file(predictor, rows, survey(rows), outputs, form, clip)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_at(monkeypatch, chunks: int) -> list[int]:
    """Interrupts the prediction of a chunk; the list counts those that were asked for."""
    asked, logits_of = [], Predictor.logits_of

    def stopped(self, names, rows, *rest):
        asked.append(len(rows))
        if len(asked) > chunks:
            raise KeyboardInterrupt
        return logits_of(self, names, rows, *rest)

    monkeypatch.setattr(Predictor, "logits_of", stopped)
    return asked


@pytest.fixture
def stopped(model, source, tmp_path, monkeypatch):
    """An output of three chunks of a run that was stopped."""
    output = tmp_path / "out.csv"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        predict(model, source, output)
    return output


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- Stopped, and gone on with


def test_a_run_killed_twice_ends_with_the_bytes_of_an_unbroken_one(model, tmp_path, together):
    """Killed between the two halves of a chunk's bytes, then between a chunk and its line of the record."""
    output, whole = tmp_path / "out.csv", tmp_path / "whole.csv"
    source = write(tmp_path / "in.csv", 2050)

    def run(output: Path, die_at: int | None = None, torn: bool = False) -> int:
        def job(rank: int) -> None:
            add = PartialFile.add

            def dying(self, text, rows, cut):
                if len(self.chunks) == die_at:
                    with self.part.open("a") as file:
                        file.write(text[: text.index("\n", len(text) // 2) - 1 if torn else None])  # within a line
                    die()
                add(self, text, rows, cut)

            PartialFile.add = dying
            predict(model, source, output)

        return together(job, processes=1).status[0]

    assert run(whole) == 0
    assert run(output, 3, torn=True) == -signal.SIGKILL
    assert not (tmp_path / "out.csv.partial").read_text().endswith("\n")
    assert run(output, 11) == -signal.SIGKILL
    assert not output.exists()
    assert run(output) == 0
    assert output.read_bytes() == whole.read_bytes()
    with output.open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [str(row * 7919 % 2050) for row in range(2050)]
    assert left(tmp_path) == {"in.csv", "out.csv", "whole.csv"}


@pytest.mark.parametrize("kept", [0, 99, 100, 101, 299])
def test_an_output_that_was_cut_or_changed_goes_on_from_its_last_whole_chunk(
    model, source, stopped, monkeypatch, kept
):
    """Rows of the partial file that are left; of the next a part. What follows is nothing, or no row."""
    predict(model, source, stopped.with_name("whole.csv"))
    for end in (b"", b"\0" * 500):
        part = stopped.with_name("out.csv.partial")
        lines = part.read_bytes().splitlines(keepends=True)
        assert len(lines) == 301
        part.write_bytes(b"".join(lines[: kept + 1]) + lines[kept + 1][:5] + end)
        with monkeypatch.context() as patch:
            asked = stop_at(patch, 99)
            predict(model, source, stopped)
        assert sum(asked) == 650 - kept // 100 * 100, "whole chunks are not predicted again"
        assert stopped.read_bytes() == stopped.with_name("whole.csv").read_bytes()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_at(patch, 3)
            predict(model, source, stopped)


def test_a_record_that_was_cut_goes_on_from_its_last_whole_line(model, source, stopped):
    record = stopped.with_name("out.csv.partial.jsonl")
    record.write_bytes(record.read_bytes()[:-5])
    predict(model, source, stopped)
    predict(model, source, stopped.with_name("whole.csv"))
    assert stopped.read_bytes() == stopped.with_name("whole.csv").read_bytes()


def test_several_tasks_stopped_between_two_files(model, source, tmp_path, monkeypatch):
    add = PartialFile.add

    def stopped(self, *chunk):
        if len(self.chunks) == 4 and self.path.name == "sts.csv":
            raise KeyboardInterrupt
        add(self, *chunk)

    tasks = ("para", "sts")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PartialFile, "add", stopped)
        predict(model, source, tmp_path / "out", tasks)
    assert len((tmp_path / "out" / "para.csv.partial").read_text().splitlines()) == 501
    predict(model, source, tmp_path / "out", tasks)
    predict(model, source, tmp_path / "whole", tasks)
    assert left(tmp_path / "out") == {"para.csv", "sts.csv"}
    for name in ("para.csv", "sts.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ctrl_c_says_how_to_go_on(minbert, model, source, tmp_path, monkeypatch):
    words = ["predict", model, "--task", "sts", "--input", source, "--output", tmp_path / "out.csv"]
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        ended = minbert(*words)
    part = tmp_path / "out.csv.partial"
    assert ended.status == 130
    assert f"Stopped. 200 of 650 rows are predicted, in {part}. The same command continues from there" in ended.err
    again = minbert(*words)
    assert (again.status, again.out) == (0, f"650 predictions are in {tmp_path / 'out.csv'}.\n")
    assert f"Continuing from row 200 of 650, where {part} ends." in again.err
    assert left(tmp_path) == {"in.csv", "out.csv"}


def test_stopped_in_the_first_chunk_nothing_is_left(model, source, tmp_path, monkeypatch):
    stop_at(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        predict(model, source, tmp_path / "out.csv")
    assert left(tmp_path) == {"in.csv"}


# ---- Refused


def with_another_text(source: Path) -> None:
    source.write_text(source.read_text().replace("why 3,", "who 3,"))


def with_another_id(source: Path) -> None:
    source.write_text(source.read_text().replace("\n0,", "\n-1,"))


def with_another_row(source: Path) -> None:
    source.write_text(source.read_text() + "x,y,z\n")


@pytest.mark.parametrize("change", [with_another_text, with_another_id, with_another_row])
def test_another_input_is_refused(model, source, stopped, change):
    change(source)
    with pytest.raises(
        MinBertError, match=r"out\.csv\.partial holds 300 predictions of an interrupted run with another input\."
    ):
        predict(model, source, stopped)
    assert len(stopped.with_name("out.csv.partial").read_text().splitlines()) == 301


def test_the_same_rows_in_another_form_are_the_same_input(model, source, stopped):
    source.write_text(source.read_text().replace("\n", "\r\n"))
    predict(model, source, stopped)


def test_another_model_is_refused(model, source, stopped):
    predictor = Predictor.from_pretrained(model)
    with torch.no_grad():
        predictor.model.heads.get_submodule("sts").linear.bias += 1e-6
    with pytest.raises(MinBertError, match="with another model"):
        predict(predictor, source, stopped)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 8}, "with `batch_size` 32, which is 8 now"),
        ({"dtype": "bfloat16"}, "with `dtype` float32, which is bfloat16 now"),
        ({"max_length": 16}, r"with `max_length` \[64\], which is \[16\] now"),
        ({"clip": True}, "with `clip` False, which is True now"),
        ({"form": COURSE}, "with `format` csv, which is course now"),
        ({"tasks": ("para",)}, "with `task` sts, which is para now"),
    ],
)
def test_other_options_are_refused(model, source, stopped, options, said):
    with pytest.raises(MinBertError, match=said):
        predict(model, source, stopped, **options)


def test_nothing_is_refused_where_nothing_whole_is_there(model, source, stopped):
    stopped.with_name("out.csv.partial").write_text("id,pred")
    predict(model, source, stopped, batch_size=8)


def test_a_file_of_somebody_elses_is_left_alone(model, source, tmp_path):
    other = tmp_path / "out.csv.partial"
    for record in (None, "{}\n", "no JSON", '{"input": "x"}\n{"a": 1}\n'):
        other.write_text("mine")
        if record:
            other.with_name("out.csv.partial.jsonl").write_text(record)
        with pytest.raises(MinBertError, match="cannot be continued"):
            predict(model, source, tmp_path / "out.csv")
        assert other.read_text() == "mine"


def test_two_processes_do_not_write_one_file(model, source, tmp_path, monkeypatch):
    add = PartialFile.add

    def other_first(self, *chunk):
        if len(self.chunks) == 2:
            with self.part.open("a") as file:
                file.write("1,2\n")
        add(self, *chunk)

    monkeypatch.setattr(PartialFile, "add", other_first)
    with pytest.raises(MinBertError, match="another process writes"):
        predict(model, source, tmp_path / "out.csv")


def test_an_input_that_grows_is_refused(model, source, tmp_path):
    predictor = Predictor.from_pretrained(model)
    rows = RowStream(DataFile(str(source)), STS)
    found = survey(rows)
    with_another_row(source)
    with pytest.raises(MinBertError, match="in.csv changed while it was read: 650 rows at first, 651 then"):
        predict_file(predictor, rows, found, {"sts": tmp_path / "out.csv"}, CSV)
    assert not (tmp_path / "out.csv").exists()


# ---- What is said of all rows is said once


def test_counts_are_of_all_chunks_also_of_those_before_a_stop(model, source, tmp_path, monkeypatch, caplog):
    lines = source.read_text().splitlines()
    lines[5] = lines[500] = "x," + "good " * 80 + ",bad"
    source.write_text("\n".join(lines))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        predict(model, source, tmp_path / "out.csv")
    predict(model, source, tmp_path / "out.csv")
    said = [record.getMessage() for record in caplog.records]
    assert said.count("sts: 2 of 650 inputs were cut to 64 tokens.") == 1


def test_a_model_that_diverged_answers_no_row_of_a_file(model, source, tmp_path, monkeypatch):
    nothing = {"sts": np.full((1, 1), np.nan)}
    monkeypatch.setattr(Predictor, "logits_of", lambda *_, **__: nothing)
    with pytest.raises(DivergedError, match="1 of 1 outputs of the model are not finite"):
        predict(model, source, tmp_path / "out.csv")
    assert not [*tmp_path.glob("out.csv*")]


@pytest.mark.parametrize(
    ("ids", "repeated", "shown"),
    [
        (["a", "b", "c"], 0, []),
        (["c", "a", "b", "a", "c", "c"], 3, ["c", "a"]),
        (["", "x", ""], 1, [""]),
        ([str(n % 400) for n in range(1200)], 800, [str(n) for n in range(10)]),
    ],
)
def test_ids_that_stand_twice(tmp_path, caplog, ids, repeated, shown):
    path = tmp_path / "in.csv"
    path.write_text("id,sentence\n" + "".join(f"{id_},good\n" for id_ in ids))
    found = survey(RowStream(DataFile(str(path)), SST))
    assert (found.rows, found.repeated, found.repeated_ids) == (len(ids), repeated, shown)
    said = f"{repeated} of {len(ids):,} rows repeat the id of an earlier row: {', '.join(map(repr, shown))}"
    assert (said in caplog.text) is bool(repeated)


def test_ids_of_one_hash_are_not_one_id(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stream, "_hash", lambda id_: b"12345678")
    path = tmp_path / "in.csv"
    path.write_text("sentence\ngood\nbad\n")
    assert survey(RowStream(DataFile(str(path)), SST)).repeated_ids == []
    assert not caplog.records


# ---- Reading a part at a time


ROWS = [{"id": f"r{n}", "sentence": f"text {n}"} for n in range(23)]


def as_jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FORMATS = {
    "in.csv": "id,sentence\n" + "".join(f'{row["id"]},"{row["sentence"]}"\n' for row in ROWS) + "\n\n",
    "in.tsv": "id\tsentence\r\n" + "".join(f"{row['id']}\t{row['sentence']}\r\n" for row in ROWS),
    "one.csv": "sentence\n" + "".join(f"{n}\n\n" for n in range(20)),
    "in.jsonl": as_jsonl(ROWS) + "\n  \n",
    "in.json": json.dumps(ROWS),
    # A part that lacks a key has blank cells in it, as the whole file would.
    "late.jsonl": as_jsonl([{"sentence": f"text {n}"} for n in range(20)] + ROWS),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_a_part_at_a_time_as_they_do_at_once(tmp_path, name):
    path = tmp_path / name
    path.write_text(FORMATS[name])
    assert [*RowStream(DataFile(str(path)), SST)] == read_rows(path, SST, labelled=False)


@pytest.mark.parametrize("columns", [["id", "sentence"], ["sentence"]])
def test_parquet_and_saved_datasets_come_a_part_at_a_time(tmp_path, columns):
    rows = datasets.Dataset.from_list(ROWS).select_columns(columns)
    rows.to_parquet(tmp_path / "in.parquet", batch_size=10)
    rows.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "in.parquet", tmp_path / "saved"):
        parts = list(read_parts(path, 7))
        assert max(part.size for part in parts) == 7
        assert [part.first for part in parts] == [*np.cumsum([0, *(part.size for part in parts[:-1])])]
        found = [*RowStream(DataFile(str(path)), SST)]
        assert found == read_rows(path, SST, labelled=False)
        assert found[-1] == {"id": "r22" if "id" in columns else "22", "sentence": "text 22"}


def test_a_place_in_a_late_part_is_that_of_the_file(tmp_path):
    rows = [*ROWS, {"id": "x", "sentence": [1]}]
    (tmp_path / "in.jsonl").write_text(as_jsonl(rows))
    datasets.Dataset.from_dict({"sentence": [["a"]] * 3}).to_parquet(tmp_path / "in.parquet", batch_size=1)
    for name, place in {"in.jsonl": "in.jsonl, line 24", "in.parquet": "in.parquet, row 0"}.items():
        with pytest.raises(MinBertError, match=f"{place}: expected text or a number"):
            survey(RowStream(DataFile(str(tmp_path / name)), SST))
    (tmp_path / "in.csv").write_text(FORMATS["in.csv"].rstrip() + "\nx\n")
    with pytest.raises(MinBertError, match="in.csv, line 25: expected 2 comma separated cells"):
        survey(RowStream(DataFile(str(tmp_path / "in.csv")), SST))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_part_is_read_when_it_is_asked_for(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(delimited, "PROFILED", 3)  # rows that are read before the first is given
    monkeypatch.setattr(delimited, "BATCH", 1)
    text = FORMATS[f"in.{ending}"].rstrip()
    (tmp_path / f"in.{ending}").write_text(text + "\n" + "x" * 100_000 + "\udc80", errors="surrogateescape")
    parts = read_parts(tmp_path / f"in.{ending}", 7)
    if ending == "csv":
        assert [next(parts).size for _ in range(3)] == [7, 7, 7]
    with pytest.raises(MinBertError, match=rf"in\.{ending}, line 2[45]: not UTF-8"):
        deque(parts, maxlen=0)


def test_a_chunk_ends_by_rows_or_by_characters(tmp_path, monkeypatch):
    path = tmp_path / "in.csv"
    path.write_text("sentence\n" + "".join(f"{'x' * (50 if 4 <= n < 8 else 1)}\n" for n in range(12)))
    monkeypatch.setattr(RowStream, "chunk_limits", (3, 100))
    assert [len(chunk) for chunk in RowStream(DataFile(str(path)), SST).chunks()] == [3, 3, 2, 3, 1]


def test_a_pipe_is_read_once(model, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    text = "id,sentence1,sentence2\na,good,bad\nb,why,not\n"
    Thread(target=(tmp_path / "pipe.csv").write_text, args=(text,), daemon=True).start()
    predict(model, tmp_path / "pipe.csv", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
