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
    assert scores(run) == scores("run") == of_run(run)  # from any folder
    environment = json.loads((run / "environment.json").read_text())
    del environment["read_from"]  # as runs of before have it
    (run / "environment.json").write_text(json.dumps(environment))
    ended = minbert("evaluate", run)
    assert ended.status == 2 and len(ended.err.splitlines()) == 1
    assert "tickets/dev.csv does not exist in the working directory" in ended.err
    assert "Set `data_dir` (of a saved model: --data-dir) to the folder that holds it" in ended.err
    assert scores(run, "--data-dir", tmp_path / "work") == of_run(run)


def test_a_relative_data_dir(tiny_bert, tmp_path, scores, monkeypatch, minbert):
    tickets(tmp_path / "work" / "data")
    monkeypatch.chdir(tmp_path / "work")
    run = trained(tiny_bert, tmp_path, f"data_dir: data\ntasks:{TICKET}")
    monkeypatch.chdir(tmp_path)
    assert scores(run) == of_run(run)
    shutil.move(tmp_path / "work" / "data", tmp_path / "data")  # then the recipe is read where one is
    assert scores(run) == of_run(run)
    shutil.move(tmp_path / "data", tmp_path / "gone")
    ended = minbert("evaluate", run)
    assert ended.status == 2 and "`data_dir` does not exist: data." in ended.err and "--data-dir" in ended.err


def test_a_folder_is_not_published_for_where_it_read_from(ticket_run, tmp_path, minbert):
    shutil.copytree(ticket_run, tmp_path / "other")
    assert minbert("average", ticket_run, tmp_path / "other", "--output-dir", tmp_path / "soup").status == 0
    for folder in (ticket_run, tmp_path / "soup"):
        records = [upload.path for upload in collect(folder) if b"read_from" in upload.read()]
        assert not records
        assert not [upload.path for upload in collect(folder) if str(tmp_path.parent).encode() in upload.read()]


@pytest.fixture(scope="module")
def averaging_run(tiny_bert, tmp_path_factory):
    """Of an own task without a `data_dir`, with checkpoints and the average of its weights. Its rows are in `work`."""
    folder = tmp_path_factory.mktemp("averaging")
    lines = "proximal: momentum\nproximal_evaluate: true\nsave_strategy: steps\nsave_steps: 1\n"
    lines += "eval_strategy: steps\neval_steps: 1\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tickets(folder / "work"))
        return trained(tiny_bert, folder, f"tasks:{TICKET}{lines}")


def test_checkpoints_and_the_average_within_a_run(averaging_run, scores):
    expected = of_run(averaging_run)
    assert scores(averaging_run / "checkpoint-2").keys() == scores(averaging_run).keys()
    assert scores(averaging_run / "checkpoint-2")["eval_ticket_accuracy"] == expected["eval_ticket_accuracy"]
    found = scores(averaging_run / "averaged", "--data-dir", averaging_run.parent / "work")
    assert found == scores(averaging_run / "averaged")
    assert found["eval_ticket_accuracy"] == expected["eval_averaged_ticket_accuracy"]


def test_a_merged_model_knows_the_data_of_its_members(
    averaging_run, ticket_run, tmp_path, scores, minbert, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(averaging_run, tmp_path / name)
    shutil.copytree(ticket_run, tmp_path / "sst")
    assert minbert("average", "one", "two", "--output-dir", "soup").status == 0
    assert minbert("average", "soup", "two", "--output-dir", "again").status == 0
    words = ("--take", "ticket=one", "--take", "sst=sst")
    assert minbert("ensemble", "one", "sst", *words, "--output-dir", "both").status == 0
    for name in ("one", "two", "sst"):  # members may go, and another of their name come
        shutil.rmtree(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("data_dir: sample\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    expected = of_run(averaging_run)
    for name in ("soup", "again"):
        assert scores(tmp_path / name)["eval_ticket_accuracy"] == expected["eval_ticket_accuracy"]
        assert scores(tmp_path / name, "--split", "test")
        assert scores(tmp_path / name, "--data-dir", averaging_run.parent / "work") == scores(tmp_path / name)
    found = scores(tmp_path / "both")
    assert found["eval_ticket_accuracy"] == expected["eval_ticket_accuracy"]
    assert found["eval_sst_accuracy"] == of_run(ticket_run)["eval_sst_accuracy"]
    ended = minbert("evaluate", tmp_path / "soup", "--data-dir", tmp_path)
    assert ended.status == 2 and len(ended.err.splitlines()) == 1 and "tickets/dev.csv does not exist" in ended.err
    record = json.loads((tmp_path / "soup" / "merge.json").read_text())
    del record["data"]  # as merges of before have it
    (tmp_path / "soup" / "merge.json").write_text(json.dumps(record))
    ended = minbert("evaluate", tmp_path / "soup")
    assert ended.status == 2 and "has no recipe.yaml that says where its data is" in ended.err


def test_a_merged_adapter_knows_its_data(tiny_bert, tmp_path, scores, minbert, monkeypatch):
    monkeypatch.chdir(tickets(tmp_path / "work"))
    run = trained(tiny_bert, tmp_path, f"peft: {{r: 2}}\ntasks:{TICKET}")
    assert minbert("merge", run, "--output-dir", tmp_path / "merged").status == 0
    shutil.rmtree(run)
    monkeypatch.chdir(tmp_path)
    assert scores(tmp_path / "merged").keys() >= {"eval_ticket_accuracy"}


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
