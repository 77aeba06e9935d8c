"""Where a job's time goes: each second in one part, in a process of its own and in a run that resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support

import hf_minbert
from hf_minbert.run.train import train
from hf_minbert.settings.metrics import class_scores
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.training.timeline import Timeline, part

#: What a run always has that trains, scores and keeps checkpoints.
PARTS = {"setup", "data", "model", "tokens", "first_step", "steps", "evaluation", "checkpoints", "scores", "files"}


@pytest.fixture
def words(tiny_bert, course_dir, tmp_path) -> list[str]:
    """A recipe's path and words: four steps with an evaluation and a checkpoint every two."""
    recipe = tmp_path / "recipe.yaml"
    lines = {
        "model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": tmp_path / "run", "max_steps": 4,
        "per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "load_best_model_at_end": "true", "disable_tqdm": "true",
    }  # fmt: skip
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return [str(recipe)]


def assert_whole(timeline: dict, took: float) -> None:
    """Its parts are all of the total, which is no longer than what was measured around it."""
    parts = timeline["parts"]
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(timeline["total"], abs=0.001 * (len(parts) + 1))  # rounded each
    assert timeline["total"] <= took


@given(st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3)))
def test_each_second_counts_once_however_parts_are_nested(tree):
    now, spent = [100.0], dict.fromkeys(["imports", "a", "b", "c", "setup", "end"], 0.0)

    def spend(name: str, inner: list) -> None:
        for child, its in [*inner, (None, None)]:
            now[0], spent[name] = now[0] + 1, spent[name] + 1
            if child is not None:
                with part(child):
                    spend(child, its)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        timeline = Timeline(before=3.0)
        with timeline.active():
            spend("setup", tree)
            timeline.begin("end")
        spent["imports"], found = 3.0, timeline.record()
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        name: seconds for name, seconds in found["parts"].items() if seconds
    }
    assert found["total"] == sum(spent.values()) and found["first_step_at"] is None


def test_a_part_is_closed_by_an_error_and_nothing_is_counted_without_a_job():
    timeline = Timeline()
    with timeline.active(), pytest.raises(KeyError), part("data"):
        raise KeyError
    with part("tokens"):  # of no job
        pass
    assert set(timeline.record()["parts"]) == {"setup", "data"}


def test_a_run_and_one_that_resumes_have_all_parts(words):
    for more, missing in (
        ([], set()), (["resume_from_checkpoint=true", "max_steps=6"], set()),
        (["resume_from_checkpoint=true", "max_steps=6"], {"first_step", "steps", "evaluation", "checkpoints"}),
    ):  # fmt: skip
        start = time.perf_counter()
        timeline = train(read_recipe(*words, more))["timeline"]
        assert_whole(timeline, time.perf_counter() - start)
        assert PARTS - missing <= set(timeline["parts"]) and "imports" not in timeline["parts"]
        if "first_step" in missing:  # it had ended
            assert timeline["first_step_at"] is None
        else:
            assert 0 < timeline["first_step_at"] < timeline["total"] - timeline["parts"]["first_step"]


def test_the_command_counts_from_the_start_of_its_process_and_imports_no_more_than_it_needs(words, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "hf_minbert", "train", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_minbert.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    took = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    timeline = json.loads((tmp_path / "run" / "metrics.json").read_text())["timeline"]
    assert_whole(timeline, took + 0.02)  # the system counts in hundredths
    assert PARTS | {"imports"} == set(timeline["parts"])
    assert timeline["parts"]["imports"] > 0.5 * timeline["first_step_at"]  # of a tiny model and tiny data
    order = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {name.split(".")[0] for name in order}
    assert {"torch", "transformers", "typer"} <= imported
    assert not imported & {"sklearn", "evaluate", "matplotlib", "gradio", "onnx", "optuna", "tensorboard", "torchjd"}
    said = done.stderr.index("minbert: Importing torch and transformers.")
    assert said < done.stderr.index(" torch\n")


@given(st.integers(2, 6), st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 5)), min_size=1, max_size=40))
def test_scores_of_classes_are_those_of_scikit_learn(classes, pairs):
    values, labels = np.array(pairs).T
    values, labels = np.minimum(values, classes - 1), np.minimum(labels, classes - 1)
    expected = precision_recall_fscore_support(labels, values, labels=range(classes), zero_division=0)
    for found, theirs in zip(class_scores(values, labels, classes).values(), expected, strict=False):
        assert found.shape == (classes,)
        np.testing.assert_allclose(found, theirs, rtol=1e-15)
