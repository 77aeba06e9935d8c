"""recipes/accelerate: accelerate's own loader takes the files, and processes start by them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from hf_minbert import MinBertError, MultiTaskTrainingArguments

ROOT = Path(__file__).parents[2]
FILES = ROOT / "recipes" / "accelerate"


@pytest.mark.parametrize(("name", "kind", "machines", "processes"), [
    ("one_gpu", DistributedType.NO, 1, 1),
    ("multi_gpu", DistributedType.MULTI_GPU, 1, 2),
    ("two_nodes", DistributedType.MULTI_GPU, 2, 8),
])  # fmt: skip
def test_accelerate_reads_the_file_as_it_is_meant(name, kind, machines, processes):
    config = load_config_from_file(str(FILES / f"{name}.yaml"))
    found = (config.distributed_type, config.num_machines, config.num_processes, config.mixed_precision)
    assert found == (kind, machines, processes, "bf16")
    assert f"recipes/accelerate/{name}.yaml" in (FILES / f"{name}.yaml").read_text()


def test_there_is_no_other_file():
    assert {path.name for path in FILES.iterdir()} == {
        "one_gpu.yaml", "multi_gpu.yaml", "two_nodes.yaml", "launch.slurm", "README.md"
    }  # fmt: skip


@pytest.mark.slow
def test_two_launchers_make_one_run_in_the_precision_of_the_file(tiny_bert, course_dir, tmp_path):
    """`two_nodes.yaml` with both machines here and a process on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\noutput_dir: {tmp_path / 'run'}\nmax_steps: 2\n"
        "save_strategy: no\nuse_cpu: true\n"
    )
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES / "two_nodes.yaml"),
        "--num_processes", "2", "--main_process_port", str(port),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    script = [str(ROOT / "scripts" / "train.py"), str(recipe)]
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", str(rank), *script],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [machine.communicate(timeout=600)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()  # not kill: the launcher has to end its own process
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2
    assert "bf16: true" in (tmp_path / "run" / "recipe.yaml").read_text()


@pytest.mark.parametrize(("variable", "library"), [
    ("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")
])  # fmt: skip
def test_what_shards_weights_is_refused_in_one_sentence(monkeypatch, tmp_path, variable, library):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(MinBertError, match=f"asks for {library}, which shards weights.*multi_gpu.yaml"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True)


def test_the_launcher_adds_its_precision_and_the_recipe_keeps_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert MultiTaskTrainingArguments(str(tmp_path), use_cpu=True).bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert not MultiTaskTrainingArguments(str(tmp_path), use_cpu=True).bf16
    assert MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, bf16=True).bf16
