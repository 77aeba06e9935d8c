"""The first five blocks of docs/publishing.md, run as they stand there, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from documentation import commands_of
from hub_server import TOKEN
from transformers import AutoTokenizer

from hf_minbert import MinBertForMultiTask, Predictor

ROOT = Path(__file__).parents[2]
NAME = "runs/quickstart"
#: What makes the recipe's run on two GPUs a short one on a CPU.
SMALL = ["use_cpu=true", "max_steps=1", "max_length=64", "per_device_train_batch_size=2", "disable_tqdm=true"]
#: Runs a script in two processes; `result` is how they ended and what they said.
TOGETHER = """
import os, runpy, sys
from pathlib import Path
sys.path.insert(0, {tests})
from forked import run_together
import hf_minbert.run.train  # once, and not in each process
os.environ["HF_TOKEN"] = {token}
def job(rank):
    os.chdir({folder})
    sys.argv = {script}
    runpy.run_path(sys.argv[0], run_name="__main__")
ended = run_together(job, Path({folder}))
result = [ended.status, ended.said]
"""


@pytest.fixture(scope="module")
def blocks() -> dict[str, list[str]]:
    """The blocks of the page by language, up to the demo."""
    section = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8").split("## Demo")[0]
    found = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    by_language: dict[str, list[str]] = {}
    for language, block in found:
        by_language.setdefault(language, []).append(block)
    assert {language: len(several) for language, several in by_language.items()} == {"python": 3, "bash": 2}
    return by_language


@pytest.fixture(scope="module")
def run(blocks, stranger, finished_run):
    """`run(place, name)` runs a Python block in a process without this package, and gives what it calls `name`."""

    def run(place: int, *names: str):
        block = blocks["python"][place]
        assert block.count(NAME) == 1
        shown = ", ".join(f"{name}.tolist()" if name == "logits" else name for name in names)
        return stranger.run(f"{block.replace(NAME, str(finished_run))}\nresult = [{shown}]")

    return run


@pytest.fixture(scope="module")
def predictor(finished_run):
    return Predictor.from_pretrained(finished_run, device="cpu")


def test_all_heads_load(run, finished_run):
    model, tokenizer = MinBertForMultiTask.from_pretrained(finished_run), AutoTokenizer.from_pretrained(finished_run)
    inputs = tokenizer("A cat sleeps.", "A cat is asleep.", return_tensors="pt")
    with torch.no_grad():
        expected = model(task="sts", **inputs).logits
    torch.testing.assert_close(torch.tensor(run(0, "logits")[0]), expected, atol=1e-5, rtol=0)


def test_a_stock_pipeline_answers_for_the_active_task(run, predictor):
    (answer,) = run(1, "answer")
    pair = ["How do I learn to swim?"], ["What is the best way to learn swimming?"]
    (expected,) = predictor("para", *pair)
    assert answer["label"] == expected["label"]
    assert answer["score"] == pytest.approx(expected["probabilities"][expected["label"]], abs=1e-5)


def test_the_pipeline_asks_all_tasks(run, predictor):
    feeling, alike = run(2, "feeling", "alike")
    (expected,) = predictor("sst", ["A tender film, and very funny too."])
    assert list(feeling) == ["sst"]
    assert feeling["sst"]["label"] == expected["label"]
    assert feeling["sst"]["scores"] == pytest.approx(expected["probabilities"], abs=1e-5)
    (expected,) = predictor("sts", ["A cat sleeps."], ["A cat is asleep."])
    assert alike == [{"sts": {"score": pytest.approx(expected["prediction"], abs=1e-5), "range": [0, 5]}}]


@pytest.fixture(scope="module")
def published(blocks, publisher, hub, finished_run):
    for verb, *words in commands_of(blocks["bash"][0].replace(NAME, str(finished_run)), {}):
        assert verb == "minbert"
        status, out, err = publisher.minbert(*words)
        assert status == 0, err
        assert ("me/minbert" in hub.repos["models"]) == ("--dry-run" not in words)
    return hub


def test_a_model_is_published(published):
    assert {"README.md", "model.safetensors", "pipeline_minbert.py"} <= published.repos["models"]["me/minbert"].keys()
    assert "me/minbert" in published.private


def test_two_processes_train_on(blocks, published, publisher, course_dir, tmp_path):
    """What the launcher makes of the line, in two processes that know the test's Hub; it itself is run elsewhere."""
    ((accelerate, launch, *words),) = commands_of(blocks["bash"][1], {"CS224N_DATA": str(course_dir)})
    assert (accelerate, launch) == ("accelerate", "launch")
    asked = launch_command_parser().parse_args(words)
    assert asked.multi_gpu and asked.num_processes == 2
    script = [str(ROOT / asked.training_script), *asked.training_script_args, *SMALL]
    given = {"tests": str(ROOT / "tests"), "folder": str(tmp_path), "script": script, "token": TOKEN}
    status, said = publisher.run(TOGETHER.format(**{name: repr(value) for name, value in given.items()}))
    assert status == [0, 0], said
    run = tmp_path / "runs" / "further"
    assert (run / "metrics.json").is_file()
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
