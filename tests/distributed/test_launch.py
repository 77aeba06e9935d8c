"""`scripts/train.py` under `accelerate launch` with `multi_gpu.yaml`, on two processes of a CPU.

A run comes out once, and so does an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import run
from hf_minbert.recipe import read_recipe

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
#: Run by Python at its start: the first process is the last one to get to work.
LATE_FIRST_PROCESS = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(5)\n"


def launch(recipe: Path, *overrides: str, path: str = "") -> subprocess.CompletedProcess:
    """Standard output and error come as one text, `stdout`. Fails if the launch hangs."""
    file = ROOT / "recipes" / "accelerate" / "multi_gpu.yaml"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--mixed_precision", "no",
        str(ROOT / "scripts" / "train.py"), str(recipe), "use_cpu=true", *overrides,
    ]  # fmt: skip
    python_path = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=120)
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
    return launch(recipe)


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
    assert len(ours) >= 10
    assert set(ours.values()) == {1}, finished.stdout
    for bar in ("Tokenizing sst: 100%", "Loading weights: 100%"):  # 12 rows to train on and the 39 weights of a BERT
        assert len(re.findall(rf"{bar}\S* (12/12|39/39)", finished.stdout)) == 1, finished.stdout


def test_pretraining_takes_the_steps_of_one_process_with_as_many_texts(recipe, tmp_path):
    words = ["objective=mlm", "max_steps=2", "optim=sgd", "learning_rate=0.1", "load_best_model_at_end=false"]
    launched = launch(recipe, *words, f"output_dir={tmp_path / 'two'}")
    assert launched.returncode == 0, launched.stdout
    alone = [f"output_dir={tmp_path / 'one'}", "use_cpu=true", "per_device_train_batch_size=4"]
    metrics = run.train(read_recipe(recipe, [*words, *alone]))
    together = json.loads((tmp_path / "two" / "metrics.json").read_text())
    for name in ("train_loss", "eval_loss", "eval_loss_before"):
        assert together[name] == pytest.approx(metrics[name], rel=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-5)


def one_error(launched: subprocess.CompletedProcess) -> str:
    """The one line of the one error."""
    assert launched.returncode != 0, launched.stdout
    errors = re.findall(r"minbert: error: .*", launched.stdout)
    assert len(errors) == 1, launched.stdout
    return errors[0]


def test_an_error_of_both_processes_is_told_once_even_if_the_first_is_late(recipe, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LATE_FIRST_PROCESS)
    error = one_error(launch(recipe, f"output_dir={tmp_path / 'run'}", "learning_rat=1", path=str(tmp_path)))
    assert "'learning_rat'" in error and "'learning_rate'" in error


def test_a_bad_label_is_told_once(recipe, course_dir, tmp_path):
    data = shutil.copytree(course_dir, tmp_path / "data")
    file = data / "ids-sst-train.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3].rpartition("\t")[0] + "\t7", *lines[4:]]) + "\n")
    error = one_error(launch(recipe, f"output_dir={tmp_path / 'run'}", f"data_dir={data}"))
    assert f"{file}, line 4" in error and "7" in error
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_misspelt_metric_is_told_once(recipe, tmp_path):
    error = one_error(launch(recipe, f"output_dir={tmp_path / 'run'}", "metric_for_best_model=eval_sts_pearsn"))
    assert "'eval_sts_pearson'" in error


def test_a_folder_that_holds_a_run_is_refused_once_and_left_as_it_is(finished, recipe):
    """Only the first process looks, so the other one has to be stopped."""
    metrics = recipe.parent / "run" / "metrics.json"
    before = metrics.stat().st_mtime_ns
    assert "holds a run already" in one_error(launch(recipe))
    assert metrics.stat().st_mtime_ns == before
