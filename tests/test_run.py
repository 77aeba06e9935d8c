"""A whole run on toy data: what its folder holds, and how it is refused, replaced, interrupted and gone on with."""

from __future__ import annotations

import csv
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from hf_minbert import DivergedError, MinBertError, MinBertModel, MultiTaskTrainer, MultiTaskTrainingArguments
from hf_minbert.model import modeling_minbert
from hf_minbert.run import train as run
from hf_minbert.run.folder import RunFolder
from hf_minbert.settings.recipe import read_recipe, split_recipe
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.table import TRAITS, names

ROOT = Path(__file__).parents[1]
#: Those of the transformers that is installed.
EVERY_KEY = [f.name for cls in (RunSettings, MultiTaskTrainingArguments) for f in fields(cls)]
TIMES = {"timeline", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
MODEL_CODE = {path.name for path in Path(modeling_minbert.__file__).parent.glob("*.py")} - {"__init__.py"}
FILES = {
    "config.json", "environment.json", "log.jsonl", "metrics.json", "model.safetensors", "predictions", "recipe.yaml",
    "tokenizer.json", "tokenizer_config.json", "training_args.bin", *MODEL_CODE,
}  # fmt: skip


@pytest.fixture
def train(tiny_bert, course_dir, tmp_path) -> Callable[..., dict]:
    """`train("key=value", ...)`: a run of six steps into `tmp_path / "run"`, with a checkpoint every two."""
    recipe = tmp_path / "recipe.yaml"
    lines = {
        "model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": tmp_path / "run", "max_steps": 6,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "hidden_dropout_prob": 0.1, "save_steps": 2,
        "logging_steps": 1, "disable_tqdm": "true",
    }  # fmt: skip
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")

    def train(*words: str, recipe: Path = recipe) -> dict:
        return run.train(read_recipe(recipe, words))

    return train


def metrics_of(folder: Path) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"), parse_constant=refuse)


def log_of(folder: Path) -> list[dict]:
    """The logged entries without what depends on the clock."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in entries]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_model(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def assert_same_result(one: Path, other: Path) -> None:
    assert_same_model(one, other)
    assert contents(one / "predictions") == contents(other / "predictions")
    same = [{key: value for key, value in metrics_of(folder).items() if key not in TIMES} for folder in (one, other)]
    assert same[0] == same[1]


def crash_at(monkeypatch, step: int, error: BaseException) -> None:
    """Makes the training step of this number (from 1) raise."""
    original, calls = MultiTaskTrainer.training_step, []

    def training_step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MultiTaskTrainer, "training_step", training_step)


# ---- What a finished run leaves


def test_the_folder_holds_everything(finished_run):
    found = {path.name for path in finished_run.iterdir()}
    assert {name for name in found if not name.startswith("checkpoint-")} == FILES
    assert {name for name in found if name.startswith("checkpoint-")} == {"checkpoint-3", "checkpoint-6"}
    assert {path.name for path in (finished_run / "predictions").iterdir()} == {
        "sst-dev.csv", "para-dev.csv", "sts-dev.csv",
    }  # fmt: skip


def test_metrics_json_is_what_evaluate_says(finished_run, course_dir, tmp_path, minbert):
    words = ["--data-dir", course_dir, "--output", tmp_path / "metrics.json", "--batch-size", 8]
    assert minbert("evaluate", finished_run, *words).status == 0
    metrics = metrics_of(finished_run)
    assert metrics_of(tmp_path) == {key: value for key, value in metrics.items() if key.startswith("eval_")}
    assert {"eval_sst_accuracy", "eval_para_accuracy", "eval_sts_pearson", "eval_overall"} <= metrics.keys()
    assert metrics["eval_leaderboard"] == pytest.approx(
        (metrics["eval_sst_accuracy"] + metrics["eval_para_accuracy"] + (metrics["eval_sts_pearson"] + 1) / 2) / 3
    )


def test_metrics_json_is_what_train_returns_and_says_how_far_it_went(train, tmp_path):
    returned = train()
    metrics = metrics_of(tmp_path / "run")
    assert metrics == returned
    assert (metrics["global_step"], metrics["seed"], metrics["best_step"]) == (6, 42, None)


def test_metrics_json_has_the_scores_on_the_training_rows(train, tmp_path):
    metrics = train("train_metrics=full", "max_steps=-1", "num_train_epochs=2")
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    last = [entry for entry in entries if "train_sst_accuracy" in entry][-1]
    names = ["train_sst_accuracy", "train_para_accuracy", "train_sts_pearson", "train_overall"]
    assert [metrics[name] for name in names] == [last[name] for name in names]


@pytest.mark.parametrize(("best", "step", "score"), [(True, 4, 0.8), (False, 4, 0.7), (True, None, 0.7)])
def test_they_are_those_of_the_epoch_that_is_kept(best, step, score):
    log = [{"step": at, "train_overall": of, "epoch": at / 4} for at, of in ((4, 0.8), (8, 0.9), (12, 0.7))]
    state = SimpleNamespace(log_history=[*log, {"step": 12, "eval_overall": 0.1}], best_global_step=step)
    trainer = SimpleNamespace(state=state, args=SimpleNamespace(load_best_model_at_end=best))
    assert run._training_scores(trainer) == {"train_overall": score}


def test_a_run_borrows_rows_and_says_which_leak(train, course_dir, tmp_path, caplog):
    shutil.copytree(course_dir, tmp_path / "data")
    dev = (course_dir / "sts-dev.csv").read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t")[2:4] for line in dev[1:3]]
    rows = [(second.upper(), first, "1") for first, second in cells] + [("Good film", "Bad film", "0")] * 3
    lines = "".join("\t".join(row) + "\n" for row in [("sentence1", "sentence2", "is_duplicate"), *rows])
    (tmp_path / "data" / "mine.tsv").write_text(lines, encoding="utf-8")
    source = "{files: mine.tsv, mapping: paraphrase_to_score}"
    words = (f"tasks={{sst: null, sts: {{sources: [{source}]}}}}", f"data_dir={tmp_path / 'data'}")
    train(*words)
    leaks = metrics_of(tmp_path / "run")["leaks"]
    (found,) = leaks["borrowed"]["sts"]
    assert (found["rows"], found["dropped"], found["matches"]["sts dev"]["rows"]) == (5, 2, 2)
    assert leaks["given"].keys() == {"sst", "sts"}
    assert "sts borrows 3 rows from mine.tsv. 2 more are dropped" in caplog.text
    # the same recipe draws the same scores, another seed others
    rows_of = [json.loads((tmp_path / "run" / "environment.json").read_text())["training_rows"]]
    for word in ("seed=42", "seed=1"):
        train(*words, word, "overwrite=true")
        rows_of.append(json.loads((tmp_path / "run" / "environment.json").read_text())["training_rows"])
    assert rows_of[0] == rows_of[1] and rows_of[0]["sst"] == rows_of[2]["sst"]
    assert rows_of[0]["sts"] != rows_of[2]["sts"]


def test_metrics_json_is_written_last(finished_run, train, tmp_path, monkeypatch):
    written = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}
    assert max(written, key=written.get) == finished_run / "metrics.json"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(run, "write_predictions", fail)
    with pytest.raises(OSError, match="disk full"):
        train()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_dev_predictions_stand_in_the_order_of_the_file_and_give_the_metrics(finished_run, course_dir):
    files = {"sst": ("ids-sst-dev.csv", "sentiment"), "sts": ("sts-dev.csv", "similarity")}
    scores = {}
    for task, (file, label) in files.items():
        with (course_dir / file).open(encoding="utf-8") as source:
            rows = list(csv.DictReader(source, delimiter="\t"))
        with (finished_run / "predictions" / f"{task}-dev.csv").open(encoding="utf-8") as source:
            predictions = list(csv.DictReader(source))
        assert [row["id"] for row in predictions] == [row["id"] for row in rows]
        values = np.array([[float(p["prediction"]), float(r[label])] for p, r in zip(predictions, rows, strict=True)])
        scores[task] = values.T
    metrics = metrics_of(finished_run)
    assert metrics["eval_sst_accuracy"] == pytest.approx(np.equal(*scores["sst"]).mean())
    assert metrics["eval_sts_pearson"] == pytest.approx(np.corrcoef(*scores["sts"])[0, 1])


def test_the_log_holds_every_step_and_evaluation(finished_run):
    log = log_of(finished_run)
    assert [entry["step"] for entry in log if "loss_sts" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in log if "eval_overall" in entry] == [3, 6]


def test_versions_and_seed_are_kept(finished_run):
    environment = json.loads((finished_run / "environment.json").read_text(encoding="utf-8"))
    assert (environment["seed"], environment["processes"]) == (42, 1)
    for package in ("torch", "transformers", "datasets"):
        assert environment["versions"][package] == metadata.version(package)


def test_its_recipe_gives_the_same_result_again(finished_run, tmp_path):
    torch.manual_seed(7)  # what was drawn before must not matter
    again = tmp_path / "again"
    run.train(read_recipe(finished_run / "recipe.yaml", [f"output_dir={again}"]))
    assert_same_result(finished_run, again)
    assert log_of(finished_run) == log_of(again)
    ours, theirs = (read_recipe(folder / "recipe.yaml") for folder in (finished_run, again))
    assert {key for key in ours if ours[key] != theirs[key]} == {"output_dir"}


def test_another_seed_gives_another_result(finished_run, tmp_path):
    run.train(read_recipe(finished_run / "recipe.yaml", [f"output_dir={tmp_path / 'b'}", "seed=43"]))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (finished_run, tmp_path / "b"))
    assert all(not torch.equal(ours[key], theirs[key]) for key in ours if key.endswith("linear.weight"))


def test_the_best_checkpoint_is_the_model_that_is_kept(train, tmp_path):
    words = ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true", "metric_for_best_model=sts_pearson"]
    metrics = train(*words, "learning_rate=0.02")
    folder = tmp_path / "run"
    scored = {entry["step"]: entry["eval_sts_pearson"] for entry in log_of(folder) if "eval_sts_pearson" in entry}
    best = max(scored, key=scored.get)
    assert len(set(scored.values())) == 3
    assert metrics["best_step"] == best
    assert metrics["best_metric"] == scored[best]
    assert metrics["eval_sts_pearson"] == pytest.approx(scored[best], abs=1e-6)
    assert_same_model(folder, folder / f"checkpoint-{best}")


#: Every step makes the weights worse, and after the first they are not finite.
DIVERGING = ["learning_rate=1e30", "optim=sgd", "lr_scheduler_type=constant", "max_grad_norm=0"]


@pytest.mark.parametrize("words", [[], ["objective=mlm"], ["eval_strategy=steps", "load_best_model_at_end=true"]])
def test_a_run_that_ends_diverged_says_so_and_ends_with_status_3(train, minbert, tmp_path, words):
    ended, folder = minbert("train", tmp_path / "recipe.yaml", *DIVERGING, *words), tmp_path / "run"
    assert ended.status == 3
    assert ended.err.splitlines()[-1] == (
        f"minbert: error: Training diverged: outputs or weights of the model in {folder} are not finite, so it "
        "gives no answers. Lower `learning_rate`, or clip gradients with `max_grad_norm`."
    )
    metrics = json.loads((folder / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert metrics["diverged"] is True
    assert metrics["best_step"] is None
    assert not (folder / "predictions").exists()
    if not words:
        assert metrics["eval_sts_nonfinite_predictions"] == 1.0
        assert minbert("report", folder).status == 0
        (tmp_path / "in.csv").write_text("id,sentence\n1,a good film\n")
        for format in ("csv", "course"):
            output = tmp_path / f"out.{format}"
            words = ("--input", tmp_path / "in.csv", "--output", output, "--format", format)
            said = minbert("predict", folder, "--task", "sst", *words)
            assert said.status == 3 and "sst: 1 of 1 outputs of the model are not finite" in said.err
            assert not output.exists()
        assert minbert("predict", folder, "--task", "sst", "--text", "a good film").status == 3
        said = minbert("evaluate", folder)
        assert said.status == 3 and f"The model {folder} has diverged" in said.err


def test_weights_that_no_score_shows_are_looked_at_too(train, tmp_path):
    """The head of a task that is trained, and not scored."""
    with pytest.raises(DivergedError, match="outputs or weights"):
        train("train_tasks=[sts]", "eval_tasks=[sst]", "freeze=encoder", *DIVERGING)
    metrics = metrics_of(tmp_path / "run")
    assert metrics["diverged"] is True and "eval_sst_nonfinite_predictions" not in metrics


def test_a_run_that_diverged_after_its_best_model_keeps_that_and_ends_with_status_3(
    train, minbert, monkeypatch, tmp_path
):
    def spoil(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))

    monkeypatch.setattr(RunFolder, "on_step_end", spoil)
    folder, words = tmp_path / "run", ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true"]
    ended = minbert("train", tmp_path / "recipe.yaml", *words)
    assert ended.status == 3
    assert ended.err.splitlines()[-1] == (
        f"minbert: error: Training diverged: at its end predictions were not finite. The model in {folder} is that of "
        "step 2, the best one before that, and can be used. Lower `learning_rate`."
    )
    metrics = metrics_of(folder)
    assert metrics["best_step"] == 2 and "diverged" not in metrics
    assert len(list((folder / "predictions").iterdir())) == 3


def test_averaged_weights_are_scored_and_left_as_a_model(train, tmp_path):
    words = ["proximal=momentum", "proximal_momentum=[0.5, 0.5]", "proximal_evaluate=true", "eval_strategy=epoch"]
    metrics, folder = train(*words), tmp_path / "run"
    assert metrics == metrics_of(folder)
    averaged = {name for name in metrics if name.startswith("eval_averaged_")}
    own = {name for name in metrics if name.startswith("eval_")} - averaged
    assert own == {name.replace("averaged_", "") for name in averaged} and "eval_overall" in own
    last, one = load_file(folder / "model.safetensors"), load_file(folder / "averaged" / "model.safetensors")
    assert last.keys() == one.keys() and not torch.equal(last["heads.sts.linear.bias"], one["heads.sts.linear.bias"])
    *_, entry = (entry for entry in log_of(folder) if "eval_averaged_sts_pearson" in entry)
    assert entry["eval_averaged_sts_pearson"] == pytest.approx(metrics["eval_averaged_sts_pearson"], abs=1e-5)
    train("overwrite=true")
    assert not (folder / "averaged").exists()


def test_only_the_tasks_asked_for_are_read_trained_and_scored(train, write_course_files, tmp_path):
    data = write_course_files(tmp_path / "data")
    for name in ("quora-train.csv", "quora-dev.csv", "sts-train.csv", "ids-sst-dev.csv"):
        (data / name).unlink()
    metrics = train(f"data_dir={data}", "train_tasks=[sst]", "eval_tasks=sts")
    assert {path.name for path in (tmp_path / "run" / "predictions").iterdir()} == {"sts-dev.csv"}
    assert {key for key in metrics if key.startswith("eval_")} == {
        "eval_sts_pearson", "eval_sts_spearman", "eval_overall",
    }  # fmt: skip
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [task["name"] for task in config["tasks"]] == ["sst", "para", "sts"]


def test_a_finished_run_is_a_checkpoint_to_train_on_from(train, finished_run, tmp_path):
    train(f"model_name_or_path={finished_run}", "max_steps=1", "learning_rate=0")
    assert_same_model(finished_run, tmp_path / "run")


# ---- A folder that holds a run already


def test_an_existing_run_is_refused_and_stays_as_it_is(train, tmp_path):
    train()
    before = contents(tmp_path / "run")
    with pytest.raises(MinBertError, match=r"holds a run already.*resume_from_checkpoint=true.*overwrite=true"):
        train("learning_rate=1e-2")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("left", ["checkpoint-2", "metrics.json", "model.safetensors", "recipe.yaml", "log.jsonl"])
def test_any_part_of_a_run_is_a_run(train, tmp_path, left):
    path = tmp_path / "run" / left
    path.parent.mkdir()
    path.mkdir() if left == "checkpoint-2" else path.write_text("x")
    with pytest.raises(MinBertError, match="holds a run already"):
        train()


def test_other_files_in_the_folder_are_no_run_and_are_kept(train, tmp_path):
    folder = tmp_path / "run"
    (folder / "notes").mkdir(parents=True)
    mine = {"notes/idea.txt": b"mine", "checkpoint-best": b"mine", "train.csv": b"mine"}
    for name, content in mine.items():
        (folder / name).write_bytes(content)
    train()
    train("overwrite=true")
    assert mine.items() <= contents(folder).items()


def test_overwrite_deletes_all_of_the_older_run(train, tmp_path):
    train("save_steps=1")
    torch.manual_seed(7)
    train("overwrite=true", "tasks=[sst]", "max_steps=2")
    folder = tmp_path / "run"
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2"}
    assert {path.name for path in (folder / "predictions").iterdir()} == {"sst-dev.csv"}
    assert [entry["step"] for entry in log_of(folder) if "loss" in entry] == [1, 2]
    assert read_recipe(folder / "recipe.yaml")["overwrite"].value is False


def test_a_run_that_cannot_start_leaves_the_older_one_whole(train, tmp_path):
    train()
    before = contents(tmp_path / "run")
    with pytest.raises(MinBertError, match="Starting to train failed: .*'foo'"):
        train("overwrite=true", "lr_scheduler_kwargs={foo: 1}")
    assert contents(tmp_path / "run") == before


def test_a_run_that_could_not_start_can_be_tried_again(train, tmp_path):
    with pytest.raises(MinBertError, match="Starting to train failed"):
        train("lr_scheduler_kwargs={foo: 1}")
    train()
    assert (tmp_path / "run" / "metrics.json").is_file()


# ---- Going on with a run


@pytest.mark.parametrize("how", ["newest", "path", "broken newest"])
def test_a_crashed_run_goes_on_to_the_same_result(train, tmp_path, monkeypatch, caplog, how):
    whole, crashed = tmp_path / "whole", tmp_path / "run"
    words = ["eval_strategy=steps", "eval_steps=2"]
    train(*words, f"output_dir={whole}")
    with monkeypatch.context() as patch:
        crash_at(patch, 6, RuntimeError("cable pulled"))
        with pytest.raises(RuntimeError, match="^cable pulled$"):  # a later error stays what it is
            train(*words)
    assert not (crashed / "metrics.json").exists()
    step = 4
    if how == "broken newest":
        cut = crashed / "checkpoint-4" / "optimizer.pt"
        cut.write_bytes(cut.read_bytes()[:100])
        step = 2
    point = crashed / f"checkpoint-{step}"
    torch.manual_seed(7)
    with monkeypatch.context() as patch:
        calls = []
        original = MultiTaskTrainer.training_step
        patch.setattr(
            MultiTaskTrainer, "training_step", lambda self, *a, **k: calls.append(1) or original(self, *a, **k)
        )
        train(*words, f"resume_from_checkpoint={point if how == 'path' else 'true'}")
    assert len(calls) == 6 - step
    assert ("checkpoint-4" in caplog.text and "Skipped" in caplog.text) == (how == "broken newest")
    assert_same_model(whole, crashed)
    assert contents(whole / "predictions") == contents(crashed / "predictions")
    steps = [[entry for entry in log_of(folder) if "train_loss" not in entry] for folder in (whole, crashed)]
    assert steps[0] == steps[1]
    assert "resume_from_checkpoint" not in read_recipe(crashed / "recipe.yaml")


def test_a_finished_run_is_unfinished_while_it_goes_on(train, tmp_path, monkeypatch):
    train("lr_scheduler_type=constant")
    crash_at(monkeypatch, 2, RuntimeError("cable pulled"))
    with pytest.raises(RuntimeError, match="cable pulled"):
        train("lr_scheduler_type=constant", "resume_from_checkpoint=true", "max_steps=9")
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_finished_run_can_be_made_longer(train, tmp_path):
    train("lr_scheduler_type=constant", "max_steps=8", f"output_dir={tmp_path / 'long'}")
    train("lr_scheduler_type=constant")
    metrics = train("lr_scheduler_type=constant", "resume_from_checkpoint=true", "max_steps=8")
    assert metrics["global_step"] == 8
    assert_same_model(tmp_path / "long", tmp_path / "run")


@pytest.mark.parametrize(
    ("word", "key", "old", "new"),
    [
        ("per_device_train_batch_size=2", "per_device_train_batch_size", "4", "2"),
        ("seed=1", "seed", "42", "1"),
        ("data_seed=1", "data_seed", "None", "1"),
        ("gradient_accumulation_steps=2", "gradient_accumulation_steps", "1", "2"),
        ("task_batch_sizes={sts: 2}", "task_batch_sizes", "None", "{'sts': 2}"),
        ("task_weights={sts: 2}", "task_weights", "None", "{'sts': 2.0}"),
        ("train_tasks=[sst]", "train_tasks", "None", "['sst']"),
        ("tasks=[sst]", "tasks", "['sst', 'para', 'sts']", "['sst']"),
        ("tasks=[sts, para, sst]", "tasks", "['sst', 'para', 'sts']", "['sts', 'para', 'sst']"),
        ("max_length=16", "max_length", "64", "16"),
        ("learning_rate=1e-2", "learning_rate", "0.001", "0.01"),
        ("optim=sgd", "optim", "adamw_torch_fused", "sgd"),
        ("private_layers=1", "private_layers", "0", "1"),
        ("metric_for_best_model=eval_sst_accuracy", "metric_for_best_model", "None", "eval_sst_accuracy"),
        ("greater_is_better=false", "greater_is_better", "None", "False"),
        ("lr_scheduler_type=cosine", "lr_scheduler_type", "linear", "cosine"),
    ],
)
def test_a_run_that_would_see_other_rows_is_not_gone_on_with(train, tmp_path, word, key, old, new):
    train("max_steps=2")
    before = contents(tmp_path / "run")
    with pytest.raises(MinBertError) as refusal:
        train("max_steps=4", "resume_from_checkpoint=true", word)
    assert f"was started with {key} = {old} and cannot be resumed with {new}" in str(refusal.value)
    assert "Keep the old value, or start again." in str(refusal.value)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("begun", "now", "said"),
    [
        (  # their heads would change places in the optimizer's state
            "tasks={sst: {}, sts: {}}", "tasks={sts: {}, sst: {}}",
            "with tasks = ['sst', 'sts'] and cannot be resumed with ['sts', 'sst']",
        ),
        (
            "tasks={sst: {head: mlp}, sts: {}}", "tasks={sst: {head: mlp, loss: focal}, sts: {}}",
            "with tasks.sst.loss = None and cannot be resumed with focal",
        ),
        (  # 1.0 are all rows, and 1 is one
            "rows_per_epoch={sts: 1.0}", "rows_per_epoch={sts: 1}",
            "with rows_per_epoch.sts = 1.0 and cannot be resumed with 1",
        ),
    ],
)  # fmt: skip
def test_mappings_that_are_equal_and_mean_something_else_are_not_gone_on_with(train, tmp_path, begun, now, said):
    train("max_steps=2", begun)
    with pytest.raises(MinBertError) as refusal:
        train("max_steps=4", "resume_from_checkpoint=true", now)
    assert said in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in names(among=EVERY_KEY, scope=("run", "seed")) if name != "tasks"])
def test_a_key_is_fixed_on_resume_or_its_change_is_told(finished_run, name):
    """Of every key there is: none is ignored, and none takes effect unsaid."""
    settings, given = split_recipe(
        read_recipe(finished_run / "recipe.yaml"), get_type_hints(MultiTaskTrainingArguments)
    )
    args = MultiTaskTrainingArguments(**{**given, "resume_from_checkpoint": str(finished_run / "checkpoint-3")})
    folder = RunFolder(settings, {**given, name: "new"}, args)
    if TRAITS[name].objectives == "mlm" or TRAITS[name].resume == "contents":
        folder.check_same_run()
        assert not folder.changed
    elif TRAITS[name].resume == "fixed":
        with pytest.raises(MinBertError, match=rf"was started with {name} = .* cannot be resumed with new"):
            folder.check_same_run()
    else:
        folder.check_same_run()
        assert folder.changed[name][1] == "new"


def test_what_takes_effect_on_resume_is_said_with_its_step(train, caplog):
    caplog.set_level("INFO", logger="hf_minbert")
    train("max_steps=2")
    train("max_steps=4", "resume_from_checkpoint=true", "packing=true", "logging_steps=2")
    (said,) = (record.getMessage() for record in caplog.records if "From step" in record.getMessage())
    assert said.startswith("From step 2 on: ")
    for change in ("max_steps = 4 (was 2)", "logging_steps = 2.0 (was 1.0)", "packing = True (was False)"):
        assert change in said
    assert "The schedule linear now ends at step 4" in caplog.text


STEPS = [f.name for f in fields(TrainerState) if f.name in EVERY_KEY]


def test_what_a_checkpoint_keeps_of_free_keys_takes_effect(train, tmp_path):
    """Its state and the callbacks' have values of their own, which the stock loop goes on with."""
    assert {"logging_steps", "eval_steps", "save_steps", "max_steps"} <= {*STEPS}
    evaluated = ["eval_strategy=steps", "metric_for_best_model=eval_sst_accuracy", "learning_rate=1e-7"]  # it stays
    train("max_steps=4", *evaluated, "eval_steps=2", "early_stopping_patience=1", "early_stopping_threshold=0.5")
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 1}
    other = {
        "max_steps": 12, "eval_steps": 4, "save_steps": 4, "logging_steps": 3, "early_stopping_patience": 9,
        "early_stopping_threshold": 0.25,
    }  # fmt: skip
    train(*evaluated, "resume_from_checkpoint=true", *(f"{key}={value}" for key, value in other.items()))
    state = json.loads((tmp_path / "run" / "checkpoint-12" / "trainer_state.json").read_text())
    state |= state["stateful_callbacks"]["EarlyStoppingCallback"]["args"]
    assert {key: state[key] for key in other} == other
    for key, steps in (("loss", [6, 9, 12]), ("eval_overall", [8, 12])):
        assert [entry["step"] for entry in state["log_history"] if key in entry and entry["step"] > 4] == steps
    assert not (tmp_path / "run" / "checkpoint-6").exists() and (tmp_path / "run" / "checkpoint-8").exists()


def test_early_stopping_can_be_added_and_left_out_on_resume(train, tmp_path):
    begun = ["eval_strategy=steps", "eval_steps=1", "save_steps=1"]
    begun += ["metric_for_best_model=eval_sst_accuracy", "learning_rate=1e-7"]  # at which it stays
    words = [*begun, "resume_from_checkpoint=true"]
    train("max_steps=2", *begun)
    assert train("max_steps=9", "early_stopping_patience=2", *words)["global_step"] == 4
    for more in (["max_steps=12"], ["max_steps=9", "packing=true"]):
        with pytest.raises(
            MinBertError, match="stopped early by early_stopping_patience = 2 with step 4, so .* no eff"
        ):
            train("early_stopping_patience=2", *words, *more)
    assert train("max_steps=7", *words)["global_step"] == 7
    state = json.loads((tmp_path / "run" / "checkpoint-7" / "trainer_state.json").read_text())
    assert "EarlyStoppingCallback" not in state["stateful_callbacks"]


def test_a_longer_run_takes_its_first_step_at_the_rate_of_the_new_schedule(train, tmp_path):
    train("max_steps=3")
    train("max_steps=6", "resume_from_checkpoint=true")
    rates = [entry["learning_rate"] for entry in log_of(tmp_path / "run") if "learning_rate" in entry]
    assert rates[3:] == pytest.approx([1e-3 * (6 - step) / 6 for step in (3, 4, 5)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["max_steps=1"], "is at step 2 in epoch 0.6667, which is after its end with max_steps = 1"),
        (
            ["max_steps=-1", "num_train_epochs=0.5"],
            "after its end with num_train_epochs = 0.5 and max_steps = -1|max_steps = -1 and num_train_epochs = 0.5",
        ),
        (["max_steps=2", "packing=true"], "has ended with step 2, so packing = True would have no effect. Keep False"),
    ],
)
def test_what_no_step_would_heed_is_refused_on_resume(train, tmp_path, words, said):
    train("max_steps=2")
    before = contents(tmp_path / "run")
    with pytest.raises(MinBertError, match=said):
        train("resume_from_checkpoint=true", *words)
    assert contents(tmp_path / "run") == before


def test_an_ended_run_takes_what_is_for_its_end(train):
    train("max_steps=2")
    metrics = train("max_steps=2", "resume_from_checkpoint=true", "eval_tasks=[sst]", "num_train_epochs=9")
    assert "eval_sst_accuracy" in metrics and "eval_para_accuracy" not in metrics


def test_the_recipe_beside_a_named_checkpoint_counts(train, tmp_path):
    train("max_steps=2")
    there = ["max_steps=4", f"resume_from_checkpoint={tmp_path}/run/checkpoint-2", f"output_dir={tmp_path / 'new'}"]
    for word in ("learning_rate=1e-2", "optim=sgd", "seed=1", "tasks.sst.head=mlp"):
        with pytest.raises(MinBertError, match=f"was started with {word.replace('.', '=').split('=')[0]} = "):
            train(*there, word)
    assert not (tmp_path / "new").exists()
    assert train(*there)["global_step"] == 4
    with pytest.raises(MinBertError, match="holds a run already, and not that of .*run/checkpoint-2"):
        train(*there)
    (tmp_path / "run" / "environment.json").unlink()
    shutil.rmtree(tmp_path / "new")
    for words in (there, ["max_steps=4", "resume_from_checkpoint=true"]):
        with pytest.raises(MinBertError, match=r"lacks recipe.yaml or environment.json, .*model_name_or_path=.*nt-2"):
            train(*words)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers = 1, and .*checkpoint-2 has 2. Resume with the model"),
        ({"layer_norm_eps": 1e-3}, "layer_norm_eps = 0.001, and .*checkpoint-2 has 1e-12"),
        ({"attention_probs_dropout_prob": 0.2}, "attention_probs_dropout_prob = 0.0 and cannot .* with 0.2, that of"),
        ({"max_input_length": 16}, "started with max_length = 64 and cannot be resumed with 16, that of .*other"),
        ({}, "started with model_name_or_path = .* and cannot be resumed with .*other"),
    ],
)
def test_another_model_is_not_resumed_with(train, tiny_config, tiny_tokenizer, tmp_path, changes, said):
    train("max_steps=2")
    MinBertModel(tiny_config(**changes)).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(MinBertError, match=said):
        train("max_steps=4", "resume_from_checkpoint=true", f"model_name_or_path={tmp_path / 'other'}")


def test_the_same_model_elsewhere_is_resumed_with(train, tiny_bert, tmp_path):
    train("max_steps=2")
    shutil.copytree(tiny_bert, tmp_path / "moved")
    assert train("max_steps=4", "resume_from_checkpoint=true", f"model_name_or_path={tmp_path / 'moved'}")


def test_other_data_is_not_gone_on_with_and_moved_data_is(train, write_course_files, tmp_path):
    train("max_steps=2")
    data = write_course_files(tmp_path / "data")
    assert train("max_steps=4", "resume_from_checkpoint=true", f"data_dir={data}")["global_step"] == 4
    file = data / "sts-train.csv"
    file.write_text(file.read_text(encoding="utf-8").replace("a film", "a book"), encoding="utf-8")
    with pytest.raises(MinBertError, match="training rows of 'sts' are not those"):
        train("max_steps=6", "resume_from_checkpoint=true", f"data_dir={data}")


def test_values_that_were_not_written_out_are_the_same_as_their_defaults(train):
    train("max_steps=2")
    words = [
        "seed=42", "gradient_accumulation_steps=1", "mixing=cycle", "tasks=[sst, para, sts]", "task_batch_sizes={}",
        "aggregator_options={}", "lr_scheduler_kwargs={}", "learning_rates={}",
        "train_tasks=[sst, para, sts]", "attention_probs_dropout_prob=0", "max_length=64", "private_layers=0",
        "metric_for_best_model=eval_overall", "greater_is_better=true",
    ]  # fmt: skip
    assert train("max_steps=4", "resume_from_checkpoint=true", *words)["global_step"] == 4


def test_there_must_be_something_to_go_on_with(train, tmp_path):
    with pytest.raises(MinBertError, match=f"no complete checkpoint in {tmp_path / 'run'} to resume from"):
        train("resume_from_checkpoint=true")
    train("max_steps=2")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(MinBertError, match="no complete checkpoint"):
        train("resume_from_checkpoint=true")


# ---- Ctrl-C


def interrupted(recipe: Path, ready: Callable[[], bool], *words: str) -> tuple[int, str]:
    """Status and stderr of `minbert train`, sent SIGINT as soon as `ready()`."""
    command = [sys.executable, "-m", "hf_minbert", "train", str(recipe), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # A shell without job control starts what runs in its background with SIGINT ignored, and children inherit that.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=recipe.parent,
        preexec_fn=heeding,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not ready() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=300), process.stderr.read()
    finally:
        process.kill()


def test_ctrl_c_says_what_was_saved_and_the_run_goes_on_from_there(train, tmp_path):
    folder = tmp_path / "run"
    recipe = tmp_path / "recipe.yaml"
    status, err = interrupted(recipe, (folder / "checkpoint-4").exists, "max_steps=1000000", "save_total_limit=2")
    lines = err.strip().splitlines()
    assert status == 130
    assert lines[-1] == "minbert: Interrupted."
    assert lines[-2].startswith(f"minbert: The newest complete checkpoint is {folder}/checkpoint-")
    assert "Continue with the same command and resume_from_checkpoint=true." in lines[-2]
    assert "Traceback" not in err
    assert not (folder / "metrics.json").exists()
    step = int(lines[-2].split("checkpoint-")[1].split(".")[0])
    assert (
        train(f"max_steps={step + 2}", "save_total_limit=2", "resume_from_checkpoint=true")["global_step"] == step + 2
    )


def test_ctrl_c_before_the_first_checkpoint_says_so(minbert, train, tmp_path, monkeypatch):
    crash_at(monkeypatch, 2, KeyboardInterrupt())
    ended = minbert("train", tmp_path / "recipe.yaml")
    assert ended.status == 130
    assert ended.err.splitlines()[-2:] == ["minbert: No checkpoint was saved.", "minbert: Interrupted."]


def test_ctrl_c_while_the_saved_model_is_scored_leaves_no_metrics(minbert, train, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "score", interrupt)
    ended = minbert("train", tmp_path / "recipe.yaml")
    assert ended.status == 130
    assert "checkpoint-6. Continue with" in ended.err
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_token_is_not_written_down(train, tmp_path):
    train("max_steps=1", "hub_token=a-secret")
    assert "a-secret" not in (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ['{"seed', '{"seed": 42}'])
def test_a_broken_environment_is_answered_in_a_sentence(train, tmp_path, content):
    train("max_steps=2")
    (tmp_path / "run" / "environment.json").write_text(content, encoding="utf-8")
    with pytest.raises(MinBertError, match="Reading .*environment.json failed.*overwrite=true"):
        train("max_steps=4", "resume_from_checkpoint=true")
