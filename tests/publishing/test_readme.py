"""The five blocks of README's "Load, publish, launch", run as they stand there, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_minbert import MinBertForMultiTask, Predictor

ROOT = Path(__file__).parents[2]
NAME = "runs/baseline"
#: What makes the recipe's run on two GPUs a short one on a CPU.
SMALL = ["use_cpu=true", "max_steps=1", "max_length=64", "per_device_train_batch_size=2", "disable_tqdm=true"]


@pytest.fixture(scope="module")
def blocks() -> dict[str, list[str]]:
    """The blocks of the section by language."""
    section = re.search(r"## Load, publish, launch\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[1]
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
    torch.testing.assert_close(torch.tensor(run(0, "logits")[0]), expected, atol=1e-6, rtol=0)


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
    for line in blocks["bash"][0].splitlines():
        verb, *words = shlex.split(line.replace(NAME, str(finished_run)), comments=True)
        assert verb == "minbert"
        status, out, err = publisher.minbert(*words)
        assert status == 0, err
        assert ("me/minbert" in hub.repos["models"]) == ("--dry-run" not in words)
    return hub


def test_a_model_is_published(published):
    assert {"README.md", "model.safetensors", "pipeline_minbert.py"} <= published.repos["models"]["me/minbert"].keys()
    assert "me/minbert" in published.private


@pytest.mark.slow
def test_two_processes_train_on(blocks, published, course_dir, tmp_path):
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = blocks["bash"][1].replace("$CS224N_DATA", str(course_dir)).replace("\\\n", " ")
    accelerate, launch, *words = shlex.split(command)
    assert (accelerate, launch) == ("accelerate", "launch")
    started = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(port), *words, *SMALL],
        cwd=tmp_path,
        env={
            **os.environ,
            **published.environment(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert started.returncode == 0, started.stdout
    assert (tmp_path / "runs" / "further" / "metrics.json").is_file()
