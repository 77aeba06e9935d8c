"""`scripts/train.py` under `accelerate launch` with `multi_gpu.yaml`, on two processes of a CPU.

A run comes out once, and so does an error. Errors are those of two forked processes, which start in no time.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Together
from safetensors.torch import load_file

from hf_minbert import cli
from hf_minbert.cli import main
from hf_minbert.run import train as run
from hf_minbert.settings.recipe import read_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPE = """\
model_name_or_path: {model}
data_dir: {data}
output_dir: {output}
max_steps: 4
per_device_train_batch_size: 2
learning_rate: 1e-3
eval_strategy: steps
eval_steps: 2
save_strategy: steps
save_steps: 2
load_best_model_at_end: true
logging_steps: 1
"""


def launch(recipe: Path, *words: str) -> subprocess.CompletedProcess:
    """Standard output and error come as one text, `stdout`. Fails if the launch hangs."""
    file = ROOT / "recipes" / "accelerate" / "multi_gpu.yaml"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--mixed_precision", "no",
        str(ROOT / "scripts" / "train.py"), str(recipe), *words,
    ]  # fmt: skip
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=600)
        finally:
            process.terminate()  # not kill: the launcher has to end its own processes
    return subprocess.CompletedProcess(command, process.returncode, said)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_bert, course_dir) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(model=tiny_bert, data=course_dir, output=folder / "run"), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def finished(recipe) -> subprocess.CompletedProcess:
    return launch(recipe, "use_cpu=true")


def test_a_run_finishes_and_its_files_are_whole(finished, recipe):
    assert finished.returncode == 0, finished.stdout
    folder = recipe.parent / "run"
    assert [file.parent for file in folder.rglob("metrics.json")] == [folder]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["global_step"] == 4 and {"eval_sst_accuracy", "eval_overall"} <= set(metrics)
    assert json.loads((folder / "environment.json").read_text())["processes"] == 2
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "loss_sst" in entry] == [1, 2, 3, 4]


def test_a_run_says_everything_once(finished):
    lines = Counter(re.split(r"[\n\r]+", finished.stdout))
    ours = {line: count for line, count in lines.items() if re.match(r"minbert: |Model, |\w+ +\d\.\d{4}$", line)}
    assert len(ours) >= 8
    assert set(ours.values()) == {1}, finished.stdout
    for bar in ("Tokenizing sst: 100%", "Loading weights: 100%"):  # 12 rows to train on and the 39 weights of a BERT
        assert len(re.findall(rf"{bar}\S* (12/12|39/39)", finished.stdout)) == 1, finished.stdout


@pytest.fixture
def train(together, recipe, monkeypatch) -> Callable[..., Together]:
    """`train(word, ..., late=0)` is the command in two processes, of which the first is so many seconds late."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def start(*words: object, late: float = 0, **options) -> Together:
        def job(rank: int) -> None:
            time.sleep(late if rank == 0 else 0)
            main(["train", str(recipe), "use_cpu=true", *map(str, words)])

        return together(job, **options)

    return start


@pytest.fixture
def one_error(train) -> Callable[..., str]:
    """`one_error(word, ...)` is the one line of the one error, where the end of a process stops the other."""

    def end(*words: object, **options) -> str:
        ended = train(*words, stop={0: 0.1, 1: 0.1}, **options)
        assert 2 in ended.status and 0 not in ended.status, ended.said
        errors = re.findall(r"minbert: error: .*", "\n".join(ended.said))
        assert len(errors) == 1, ended.said
        return errors[0]

    return end


def test_pretraining_takes_the_steps_of_one_process_with_as_many_texts(train, recipe, tmp_path):
    """Two epochs of 11 texts in steps of 10: the second one has 1, and the second process none of it."""
    words = [
        "objective=mlm", "max_steps=-1", "num_train_epochs=2", "optim=sgd", "learning_rate=0.1",
        "load_best_model_at_end=false", "eval_strategy=epoch", "save_strategy=no",
    ]  # fmt: skip
    ended = train(*words, f"output_dir={tmp_path / 'two'}", "per_device_train_batch_size=5")
    assert ended.status == [0, 0], ended.said
    alone = [f"output_dir={tmp_path / 'one'}", "use_cpu=true", "per_device_train_batch_size=10"]
    run.train(read_recipe(recipe, [*words, *alone]))
    ours, metrics = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("two", "one"))
    assert sum(metrics["train_texts"].values()) == 11 and metrics["global_step"] == ours["global_step"] == 4
    for name in ("train_loss", "eval_loss", "eval_loss_before"):
        assert ours[name] == pytest.approx(metrics[name], rel=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-5)


def test_an_error_of_both_processes_is_told_once_even_if_the_first_is_late(one_error, tmp_path):
    error = one_error(f"output_dir={tmp_path / 'run'}", "learning_rat=1", late=3)
    assert not error.endswith("(process 1)")  # it is the first that says it
    assert "'learning_rat'" in error and "'learning_rate'" in error


def test_a_bad_label_is_told_once(one_error, course_dir, tmp_path):
    data = shutil.copytree(course_dir, tmp_path / "data")
    file = data / "ids-sst-train.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3].rpartition("\t")[0] + "\t7", *lines[4:]]) + "\n")
    error = one_error(f"output_dir={tmp_path / 'run'}", f"data_dir={data}")
    assert f"{file}, line 4" in error and "7" in error
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_misspelt_metric_is_told_once(one_error, tmp_path):
    error = one_error(f"output_dir={tmp_path / 'run'}", "metric_for_best_model=eval_sts_pearsn")
    assert "'eval_sts_pearson'" in error


def test_a_folder_that_holds_a_run_is_refused_once_and_left_as_it_is(finished, one_error, recipe):
    """Only the first process looks, so the other one has to be stopped."""
    metrics = recipe.parent / "run" / "metrics.json"
    before = metrics.stat().st_mtime_ns
    assert "holds a run already" in one_error()
    assert metrics.stat().st_mtime_ns == before


def test_what_is_for_one_process_is_refused_with_several(together, monkeypatch):
    """Two would write the same predictions, and send the same model."""
    monkeypatch.setattr(cli, "WAIT_FOR_FIRST", 0)
    ended = together(lambda rank: main(["publish", "somewhere", "me/model"]))
    assert ended.status == [2, 2]
    said = (
        "minbert: error: `minbert publish` is for one process, and the launcher started 2. Run it without a launcher."
    )
    assert [text.splitlines() for text in ended.said] == [[said], [f"{said} (process 1)"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_record_their_steps(recipe):
    """All batches of so few rows are filled to the same size, so that the second one of a task is recorded."""
    words = ["packing=true", "attention_probs_dropout_prob=0", "bf16=true", "aggregator=pcgrad"]
    ended = launch(recipe, *words, f"output_dir={recipe.parent / 'on-gpus'}")
    assert ended.returncode == 0 and "cannot be recorded" not in ended.stdout, ended.stdout
