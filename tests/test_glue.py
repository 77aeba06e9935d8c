"""The recipes of GLUE, on made rows with the datasets' columns, and what `scripts/glue.py` makes of their models."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from hf_minbert import Predictor, get_tasks
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import packaged_recipes, read_recipe
from hf_minbert.settings.words import check_words

SCRIPT = Path(__file__).parents[1] / "scripts" / "glue.py"
RECIPES = [name for name in packaged_recipes() if name.startswith("glue/")]
#: Text columns and names of the labels, as the card of nyu-mll/glue has them; no names: numbers from 0 to 5.
COLUMNS = {
    "cola": (["sentence"], ["unacceptable", "acceptable"]),
    "sst2": (["sentence"], ["negative", "positive"]),
    "mrpc": (["sentence1", "sentence2"], ["not_equivalent", "equivalent"]),
    "stsb": (["sentence1", "sentence2"], None),
    "qqp": (["question1", "question2"], ["not_duplicate", "duplicate"]),
    "mnli": (["premise", "hypothesis"], ["entailment", "neutral", "contradiction"]),
    "qnli": (["question", "sentence"], ["entailment", "not_entailment"]),
    "rte": (["sentence1", "sentence2"], ["entailment", "not_entailment"]),
}
FILES = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE"]
WORDS = ["good", "bad", "a film", "the man plays", "why is it", "not", "very"]


def split(task: str, size: int, seed: int, labelled: bool) -> Dataset:
    texts, names = COLUMNS[task]
    random = np.random.default_rng([seed, len(task), sum(map(ord, task))])
    cells = {name: [f"{WORDS[random.integers(7)]} {row} {name}" for row in range(size)] for name in texts}
    label = ClassLabel(names=names) if names else Value("float32")
    labels = random.permutation(np.arange(size) % (len(names) if names else 6)).tolist()
    cells |= {"label": labels if labelled else [-1] * size, "idx": [*range(size)]}
    features = dict.fromkeys(texts, Value("string")) | {"label": label, "idx": Value("int32")}
    return Dataset.from_dict(cells, features=Features(features))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A saved dataset for each of the eight."""
    folder = tmp_path_factory.mktemp("glue")
    for task in COLUMNS:
        ends = ("_matched", "_mismatched") if task == "mnli" else ("",)
        splits = {"train": split(task, 12, 0, True)}
        for number, end in enumerate(ends):
            splits[f"validation{end}"] = split(task, 9 + number, 1 + number, True)
            splits[f"test{end}"] = split(task, 4 + number, 3 + number, False)
        DatasetDict(splits).save_to_disk(folder / task)
    return folder


@pytest.fixture(scope="module")
def run(data, tiny_bert, tmp_path_factory):
    """`run("glue/all")`: the folder of that recipe's run on these rows."""
    runs = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Path:
        recipe, folder = packaged_recipes()[name], runs / name
        tasks = read_recipe(recipe)["tasks"].value
        words = [f"tasks.{task}.dataset={data / task}" for task in tasks]
        words += [f"output_dir={folder}", f"model_name_or_path={tiny_bert}", "max_length=32", "num_train_epochs=1"]
        words += ["per_device_train_batch_size=4", "eval_strategy=no", "save_strategy=no", "disable_tqdm=true"]
        train(read_recipe(recipe, words))
        return folder

    return make


@pytest.fixture(scope="module")
def together(run):
    return run("glue/all")


@pytest.fixture
def script(monkeypatch, capsys):
    """`script(...)` runs it with these words, and gives what it printed."""

    def ask(*words: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return ask


def test_there_is_a_recipe_for_each_task_whose_entry_is_that_of_all():
    assert sorted(RECIPES) == sorted(["glue/all", *(f"glue/{task}" for task in COLUMNS)])
    entries = read_recipe("glue/all")["tasks"].value
    assert [*entries] == [*COLUMNS]
    for task in COLUMNS:
        values = read_recipe(f"glue/{task}")
        check_words(values)
        assert values["tasks"].value == {task: entries[task]} and values["output_dir"].value == f"runs/glue/{task}"
    check_words(read_recipe("glue/all"))


def test_tasks_have_the_columns_and_labels_of_the_datasets():
    for task in get_tasks(read_recipe("glue/all")["tasks"].value):
        texts, names = COLUMNS[task.name]
        assert [*task.text_columns] == texts and [*task.labels] == (names or [])
        assert (task.dataset, task.dataset_config) == ("nyu-mll/glue", task.name)
        assert task.range == (None if names else (0, 5))


def test_the_files_are_the_leaderboards(together, script, tmp_path):
    script(together, "--output-dir", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"{name}.tsv" for name in FILES), "scores.json"]
    )
    lines = {name: (tmp_path / f"{name}.tsv").read_text().splitlines() for name in FILES}
    for name, (header, *rows) in lines.items():
        assert header == "index\tprediction"
        assert [row.split("\t")[0] for row in rows] == [str(place) for place in range(5 if name == "MNLI-mm" else 4)]
    said = {name: [row.split("\t")[1] for row in rows[1:]] for name, rows in lines.items()}
    assert {*said["CoLA"], *said["SST-2"], *said["MRPC"], *said["QQP"]} <= {"0", "1"}
    assert {*said["QNLI"], *said["RTE"]} <= {"entailment", "not_entailment"}
    assert {*said["MNLI-m"], *said["MNLI-mm"]} <= {"entailment", "neutral", "contradiction"}
    assert all(0 <= float(value) <= 5 for value in said["STS-B"])


def test_predictions_and_scores_are_those_of_the_model(together, data, script, tmp_path):
    out = script(together, "--output-dir", tmp_path)
    found, predictor = json.loads((tmp_path / "scores.json").read_text()), Predictor.from_pretrained(together)

    def asked(task: str, part: str) -> tuple[list[int], list[int]]:
        rows = DatasetDict.load_from_disk(data / task)[part]
        return [row["prediction"] for row in predictor(task, *(rows[name][:] for name in COLUMNS[task][0]))], rows[
            "label"
        ][:]

    parts = found["parts"]
    values, labels = asked("cola", "validation")
    assert parts["CoLA"] == pytest.approx(dict.fromkeys(("matthews", "score"), matthews_corrcoef(labels, values)))
    values, labels = asked("mrpc", "validation")
    f1, accuracy = f1_score(labels, values), accuracy_score(labels, values)
    assert parts["MRPC"] == pytest.approx({"f1": f1, "accuracy": accuracy, "score": (f1 + accuracy) / 2})
    for part, end in (("MNLI-m", "matched"), ("MNLI-mm", "mismatched")):
        values, labels = asked("mnli", f"validation_{end}")
        assert parts[part]["accuracy"] == pytest.approx(accuracy_score(labels, values))
        values, _ = asked("mnli", f"test_{end}")
        lines = (tmp_path / f"{part}.tsv").read_text().splitlines()[1:]
        assert lines == [f"{place}\t{COLUMNS['mnli'][1][value]}" for place, value in enumerate(values)]
    scores = {name: of["score"] for name, of in parts.items()}
    mnli = (scores.pop("MNLI-m") + scores.pop("MNLI-mm")) / 2
    assert found["average"] == pytest.approx((sum(scores.values()) + mnli) / 8)
    assert f"average  {found['average']:.4f}" in out and "validation_mismatched)" in out
    metrics = json.loads((together / "metrics.json").read_text())
    assert metrics["eval_mnli_accuracy"] == pytest.approx(parts["MNLI-m"]["accuracy"])


@pytest.mark.slow
def test_models_of_single_tasks_are_scored_together_and_what_lacks_is_said(run, script, tmp_path):
    runs = [run(f"glue/{task}") for task in ("rte", "stsb", "mnli")]
    out = script(*runs)
    assert [line.split()[0] for line in out.splitlines()] == ["RTE", "STS-B", "MNLI-m", "MNLI-mm", "Not"]
    assert out.splitlines()[-1] == "Not there: CoLA, SST-2, MRPC, QQP, QNLI."
