"""A run's folder knows its own data: `evaluate RUN` scores what training scored, wherever the rows lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hf_minbert.errors import MinBertError
from hf_minbert.pretrained.data import RunData
from hf_minbert.pretrained.loading import load_config, tasks_of
from hf_minbert.publishing.files import collect
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

TICKET = """
  ticket:
    kind: binary
    text_columns: [first, second]
    labels: [different, same]
    columns: {label: is_same}
    files: {train: tickets/train.csv, dev: [tickets/dev.csv, tickets/more.csv], test: tickets/test.csv}
"""


def tickets(folder: Path) -> Path:
    """Rows of the task `ticket`, in a folder of files."""
    (folder / "tickets").mkdir(parents=True)
    for number, (name, size) in enumerate({"train": 8, "dev": 5, "more": 4, "test": 6}.items()):
        rows = (f'"the film, {row}",a good dog {row * number},{(row + number) % 3 % 2}\n' for row in range(size))
        (folder / "tickets" / f"{name}.csv").write_text("first,second,is_same\n" + "".join(rows))
    return folder


def trained(bert: Path, folder: Path, lines: str) -> Path:
    """The folder of a run of two steps."""
    recipe = folder / "my.yaml"
    recipe.write_text(f"model_name_or_path: {bert}\noutput_dir: {folder / 'run'}\ndisable_tqdm: true\n{lines}")
    words = [] if "stages" in lines else ["max_steps=2"]
    train(read_recipe(recipe, words))
    return folder / "run"


@pytest.fixture(scope="module")
def ticket_run(tiny_bert, course_dir, tmp_path_factory):
    """Of an own task and sst, whose files lie in one folder: `data_dir` is `data` beside the run."""
    folder = tmp_path_factory.mktemp("tickets")
    shutil.copytree(course_dir, tickets(folder / "data"), dirs_exist_ok=True)
    return trained(tiny_bert, folder, f"data_dir: {folder / 'data'}\ntasks:{TICKET}  sst:\n")


@pytest.fixture
def scores(minbert, tmp_path):
    """`scores(run, *words)`: what `minbert evaluate` wrote. As many rows a batch as training took, so equal bits."""

    def evaluate(run, *words):
        ended = minbert("evaluate", run, "--batch-size", 8, "--output", tmp_path / "found.json", *words)
        assert ended.status == 0, ended.err
        return json.loads((tmp_path / "found.json").read_text())

    return evaluate


def of_run(run: Path) -> dict:
    metrics = json.loads((run / "metrics.json").read_text())
    return {key: value for key, value in metrics.items() if key.startswith("eval_")}


# ---- evaluate RUN is metrics.json


def test_the_courses_data(finished_run, scores):
    assert scores(finished_run) == of_run(finished_run)


def test_the_sample(tiny_bert, tmp_path, scores):
    run = trained(tiny_bert, tmp_path, "data_dir: sample\ntasks: [sst, sts]\n")
    assert scores(run) == of_run(run)


def test_an_own_task_and_its_test_split(ticket_run, scores):
    assert {"eval_ticket_accuracy", "eval_sst_accuracy"} <= of_run(ticket_run).keys()
    assert scores(ticket_run) == of_run(ticket_run)
    test = ticket_run.parent / "data" / "tickets" / "test.csv"
    of_file = scores(ticket_run, "--task", "ticket", "--input", test, "--columns", "{label: is_same}")
    assert scores(ticket_run, "--task", "ticket", "--split", "test") == of_file
    task = tasks_of(load_config(str(ticket_run)), "run")["ticket"]
    assert [len(RunData.of(ticket_run).rows(task, split)) for split in ("dev", "test")] == [9, 6]


def test_an_own_task_without_a_data_dir(tiny_bert, tmp_path, scores, monkeypatch, minbert):
    monkeypatch.chdir(tickets(tmp_path / "work"))
    run = trained(tiny_bert, tmp_path, f"tasks:{TICKET}")
    assert scores(run) == of_run(run)
    monkeypatch.chdir(tmp_path)
    ended = minbert("evaluate", run)
    assert ended.status == 2
    assert "tickets/dev.csv does not exist in the working directory" in ended.err and "--data-dir" in ended.err
    assert scores(run, "--data-dir", tmp_path / "work") == of_run(run)


def test_only_the_tasks_that_the_run_scored(tiny_bert, course_dir, tmp_path, scores):
    run = trained(tiny_bert, tmp_path, f"data_dir: {course_dir}\ntasks: [sst, para]\neval_tasks: para\n")
    assert "eval_sst_accuracy" not in of_run(run)
    assert scores(run) == of_run(run)
    assert "eval_sst_accuracy" in scores(run, "--task", "sst")


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_in_stages(tiny_bert, course_dir, tmp_path, scores, kept):
    tickets(tmp_path / "data")
    lines = f"""
data_dir: {course_dir}
tasks: [sst]
stages:
  - {{name: first, max_steps: 1}}
  - name: last
    max_steps: 1
    data_dir: {tmp_path / "data"}
    tasks:{TICKET.replace("  ", "      ")}
"""
    run = trained(tiny_bert, tmp_path, lines)
    if not kept:  # the folders of stages may be deleted: the run's own has all that is needed
        shutil.rmtree(run / "stages")
    assert "eval_ticket_accuracy" in of_run(run)
    assert scores(run) == of_run(run)


# ---- Data that moved


def test_moved_data_are_one_line_and_found_by_data_dir(ticket_run, tmp_path, scores, minbert):
    run, data = tmp_path / "run", ticket_run.parent / "data"
    shutil.copytree(ticket_run, run)
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace(str(data), str(tmp_path / "gone")))
    ended = minbert("evaluate", run)
    assert ended.status == 2 and len(ended.err.splitlines()) == 1
    for words in (f"does not exist: {tmp_path / 'gone'}", str(run / "recipe.yaml"), "--data-dir"):
        assert words in ended.err
    assert scores(run, "--data-dir", data) == of_run(ticket_run)


def test_a_published_recipe_has_no_folder_of_this_machine(ticket_run, tmp_path, scores, minbert, monkeypatch):
    for upload in collect(ticket_run):
        content = upload.content if isinstance(upload.content, bytes) else upload.content.read_bytes()
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / upload.path).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    ended = minbert("evaluate", "model")
    assert ended.status == 2 and "`data_dir` does not exist: data." in ended.err and "--data-dir" in ended.err
    assert scores("model", "--data-dir", ticket_run.parent / "data") == of_run(ticket_run)


def test_a_model_without_a_recipe(ticket_run, tmp_path, scores, minbert):
    shutil.copytree(ticket_run, tmp_path / "model")
    (tmp_path / "model" / "recipe.yaml").unlink()
    ended = minbert("evaluate", tmp_path / "model")
    assert ended.status == 2 and len(ended.err.splitlines()) == 1
    assert f"{tmp_path / 'model'} has no recipe.yaml" in ended.err
    assert "--data-dir FOLDER, or --input FILE" in ended.err
    data = ticket_run.parent / "data"
    ended = minbert("evaluate", tmp_path / "model", "--data-dir", data)
    assert ended.status == 2 and "--task ticket --input FILE" in ended.err
    found = scores(tmp_path / "model", "--data-dir", data, "--task", "sst")
    assert found["eval_sst_accuracy"] == of_run(ticket_run)["eval_sst_accuracy"]


# ---- Other verbs


def test_averages_are_scored_on_own_tasks(ticket_run, tmp_path, minbert):
    shutil.copytree(ticket_run, tmp_path / "other")
    words = ["--output-dir", tmp_path / "soup", "--data-dir", ticket_run.parent / "data"]
    ended = minbert("average", ticket_run, tmp_path / "other", *words)
    assert ended.status == 0, ended.err
    metrics = json.loads((tmp_path / "soup" / "metrics.json").read_text())
    assert metrics["eval_ticket_accuracy"] == of_run(ticket_run)["eval_ticket_accuracy"]


def test_what_an_int8_variant_is_measured_on(ticket_run, tmp_path, caplog):
    from hf_minbert.publishing.export_onnx import _dev_rows

    tasks = tasks_of(load_config(str(ticket_run)), "run")
    assert {name: len(rows) for name, rows in _dev_rows(str(ticket_run), tasks, None).items()} == {
        "ticket": 9, "sst": 7,
    }  # fmt: skip
    moved = tmp_path / "moved"
    shutil.copytree(ticket_run, moved)
    lines = (moved / "recipe.yaml").read_text().replace(str(ticket_run.parent / "data"), str(tmp_path / "gone"))
    (moved / "recipe.yaml").write_text(lines)
    assert _dev_rows(str(moved), tasks, None) == {}  # the export goes on, and says why
    assert f"does not exist: {tmp_path / 'gone'}" in caplog.text and "--data-dir" in caplog.text
    with pytest.raises(MinBertError, match="does not exist"):
        _dev_rows(str(moved), tasks, str(tmp_path / "gone"))
    (moved / "recipe.yaml").unlink()
    assert _dev_rows(str(moved), tasks, None) == {}
    assert list(_dev_rows(str(moved), tasks, str(ticket_run.parent / "data"))) == ["sst"]
