"""What goes wrong with two processes ends in one sentence, soon, and nothing that was saved is lost."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import Together
from safetensors.torch import load_file
from transformers import Trainer

from hf_minbert import MultiTaskTrainer, cli
from hf_minbert.cli import main
from hf_minbert.run import train as run
from hf_minbert.training import distributed as processes

pytestmark = pytest.mark.slow

SETTINGS = {
    "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2,
    "logging_steps": 1, "disable_tqdm": "true", "use_cpu": "true", "aggregator": "pcgrad",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_bert, course_dir) -> Path:
    file = tmp_path_factory.mktemp("failures") / "recipe.yaml"
    words = {"model_name_or_path": tiny_bert, "data_dir": course_dir, **SETTINGS}
    file.write_text("".join(f"{key}: {value}\n" for key, value in words.items()), encoding="utf-8")
    return file


@pytest.fixture
def minbert_train(recipe, monkeypatch):
    """`minbert_train(output, word, ...)` is the command, as each process runs it; none waits for another to speak."""
    monkeypatch.setattr(cli, "WAIT_FOR_FIRST", 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda output, *words: main(["train", str(recipe), f"output_dir={output}", *map(str, words)])


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(3, act)` makes a process call `act()` in place of its backward passes of step 3."""

    def patch(step, act):
        usual = MultiTaskTrainer.training_step
        monkeypatch.setattr(
            MultiTaskTrainer,
            "training_step",
            lambda self, *given: act() if self.state.global_step == step else usual(self, *given),
        )

    return patch


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bits(ours: Path, theirs: Path) -> None:
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_is_killed_the_other_says_so_and_the_run_resumes_to_the_same_bits(
    together, minbert_train, at_step, tmp_path, killed
):
    def until_killed(rank: int) -> None:
        if rank == killed:
            at_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
        minbert_train(tmp_path / "run")

    ended = together(until_killed)
    assert ended.status[killed] == -signal.SIGKILL and ended.status[1 - killed] == 1
    last = ended.said[1 - killed].splitlines()[-1]
    assert last.startswith(f"minbert: Process {1 - killed} of 2 ends: another one is gone")
    assert last.endswith(
        f"is {tmp_path / 'run' / 'checkpoint-2'}. Continue with the same command and resume_from_checkpoint=true."
    )
    if killed == 1:  # that of the first process ends no differently
        together(lambda rank: minbert_train(tmp_path / "run", "resume_from_checkpoint=true"))
        together(lambda rank: minbert_train(tmp_path / "whole"))
        assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_pretraining_on_three_resumes_to_the_same_bits(together, minbert_train, tmp_path):
    """Of two processes' gradients the sum is the same in any order; of three it is not."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    ended = together(lambda rank: minbert_train(run, "objective=mlm", "eval_strategy=no"), processes=3)
    assert ended.status == [0, 0, 0], ended.said
    run.rename(whole)
    run.mkdir()
    for name in ("checkpoint-2", "recipe.yaml", "environment.json"):
        (whole / name).rename(run / name)
    words = ("objective=mlm", "eval_strategy=no", "resume_from_checkpoint=true")
    ended = together(lambda rank: minbert_train(run, *words), processes=3)
    assert ended.status == [0, 0, 0], ended.said
    assert_same_bits(run, whole)


@pytest.mark.parametrize(
    "killed, owner, method, step, left",
    [
        (1, Trainer, "_save_rng_state", 4, 2),  # the first one must not have deleted the checkpoint before
        (0, run, "_score", None, 6),  # no step is left, and none more is taken
    ],
)
def test_wherever_one_is_killed_a_whole_checkpoint_is_left(
    together, minbert_train, monkeypatch, tmp_path, killed, owner, method, step, left
):
    def until_killed(rank: int) -> None:
        usual = getattr(owner, method)

        def end(*given, **named):
            if step is None or given[0].state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*given, **named)

        if rank == killed:
            monkeypatch.setattr(owner, method, end)
        minbert_train(tmp_path / "run", "save_total_limit=1")

    ended = together(until_killed)
    assert ended.status[killed] == -signal.SIGKILL and ended.status[1 - killed] == 1
    assert f"is {tmp_path / 'run' / f'checkpoint-{left}'}. Continue with" in ended.said[1 - killed].splitlines()[-1]
    ended = together(lambda rank: minbert_train(tmp_path / "run", "save_total_limit=1", "resume_from_checkpoint=true"))
    assert ended.status == [0, 0], ended.said
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "loss_sst" in entry] == [1, 2, 3, 4, 5, 6]
    assert "train_runtime" in entries[-1]
    together(lambda rank: minbert_train(tmp_path / "whole"))
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_where_one_is_killed_in_a_later_stage_the_stages_before_are_not_lost(
    together, minbert_train, at_step, tmp_path
):
    stages = "stages=[{name: heads, freeze: encoder, max_steps: 1}, {name: all, max_steps: 2}]"

    def until_killed(rank: int) -> None:
        if rank == 1:
            at_step(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        minbert_train(tmp_path / "run", stages)

    last = together(until_killed).said[0].splitlines()[-1]
    assert last.endswith(
        "This stage has saved no checkpoint, and those before it are complete. Continue with the same command and "
        "resume_from_checkpoint=true."
    )
    ended = together(lambda rank: minbert_train(tmp_path / "run", stages, "resume_from_checkpoint=true"))
    assert ended.status == [0, 0] and "heads: finished earlier" in ended.said[0], ended.said


def test_a_process_that_waits_for_one_that_is_gone_says_so_when_the_launcher_stops_it(
    together, minbert_train, at_step, tmp_path
):
    """Without an error of the communication, as with NCCL: here the other leaves its connections to a child."""

    def job(rank: int) -> None:
        def leave():
            child = os.fork()
            if child == 0:
                time.sleep(30)  # the other is stopped long before, on a busy machine too
                os._exit(0)
            os._exit(7)

        if rank == 1:
            at_step(3, leave)
        minbert_train(tmp_path / "run")

    ended = together(job, stop={0: 1.0})
    assert ended.status == [128 + signal.SIGTERM, 7]
    last = ended.said[0].splitlines()[-1]
    assert last.startswith("minbert: Process 0 of 2 was stopped, as when another one has ended. The newest complete")
    assert last.endswith("checkpoint-2. Continue with the same command and resume_from_checkpoint=true.")


def refused(ended) -> str:
    """The error, the same on both."""
    assert ended.status == [2, 2], ended.said
    first, second = (said.splitlines()[-1] for said in ended.said)
    assert second == f"{first} (process 1)"
    return first.removeprefix("minbert: error: ")


def test_other_recipes_are_refused_before_weights_load(together, minbert_train, tmp_path):
    said = refused(together(lambda rank: minbert_train(tmp_path / "run", f"learning_rate={rank + 1}e-4")))
    assert said == (
        "The processes of a run need the same recipe, model and data. Process 0 has `learning_rate` = 0.0001, and "
        "process 1 has 0.0002. Give all machines the same."
    )
    said = refused(together(lambda rank: minbert_train(tmp_path / "run", *["packing=true"][rank:])))
    assert "Process 0 has `packing` = True, and process 1 has (nothing)" in said
    assert not (tmp_path / "run").exists()


def test_other_stages_are_refused_before_the_first_one(together, minbert_train, tmp_path):
    first, second = "{name: heads, freeze: encoder, max_steps: 1}", "{name: all, max_steps: 1}"

    def told(*stages: str) -> str:
        return refused(together(lambda rank: minbert_train(tmp_path / "run", f"stages={stages[rank]}")))

    said = told(f"[{first}, {second}]", f"[{first}, {second.replace('1', '2')}]")
    assert "Process 0 has `stages.all.max_steps` = 1, and process 1 has 2." in said
    assert "and process 1 has (nothing)" in told(f"[{first}, {second}]", f"[{first}]")
    assert "(nothing)" in told(f"[{first}]", "null")
    assert not (tmp_path / "run").exists()


def test_other_rows_are_refused_and_equal_ones_elsewhere_are_not(together, minbert_train, course_dir, tmp_path):
    shutil.copytree(course_dir, tmp_path / "1")
    shutil.copytree(course_dir, tmp_path / "0")

    def job(rank: int) -> None:
        minbert_train(tmp_path / "run", f"data_dir={tmp_path / str(rank)}", "max_steps=1", "save_strategy=no")

    assert together(job).status == [0, 0]
    file = tmp_path / "1" / "sts-dev.csv"
    file.write_text(file.read_text().replace("good", "bad", 1))
    said = refused(together(lambda rank: minbert_train(tmp_path / "r", f"data_dir={tmp_path / str(rank)}")))
    assert "Process 0 has a digest of the dev rows of 'sts' = " in said


def test_another_model_in_a_folder_of_the_same_name_is_refused(together, minbert_train, tiny_bert, tmp_path):
    """Weights come from the first process; the layers that they go into do not."""

    def job(rank: int) -> None:
        folder = shutil.copytree(tiny_bert, tmp_path / str(rank) / "bert")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2 - rank}))
        os.chdir(folder.parent)
        minbert_train(tmp_path / "run", "model_name_or_path=./bert")

    said = refused(together(job))
    assert "Process 0 has the model's `num_hidden_layers` = 2, and process 1 has 1. Give all" in said


def test_where_one_has_no_rows_of_a_task_all_say_which(together, minbert_train, course_dir, tmp_path):
    shutil.copytree(course_dir, tmp_path / "0")
    shutil.copytree(course_dir, tmp_path / "1", ignore=lambda folder, names: ["quora-train.csv"])
    said = refused(together(lambda rank: minbert_train(tmp_path / "run", f"data_dir={tmp_path / str(rank)}")))
    assert said.startswith("On process 1: ") and str(tmp_path / "1" / "quora-train.csv") in said


def test_another_number_of_processes_goes_on_with_the_same_rows(together, minbert_train, tmp_path):
    sgd = ("optim=sgd", "learning_rate=0.01", "lr_scheduler_type=constant")
    resume = ("resume_from_checkpoint=true", *sgd)
    together(lambda rank: minbert_train(tmp_path / "whole", *sgd))
    ended = together(lambda rank: minbert_train(tmp_path / "run", *sgd, "max_steps=2"))
    assert ended.status == [0, 0], ended.said
    (said,) = together(lambda rank: minbert_train(tmp_path / "run", *resume), processes=1).said
    assert "was started with 2 processes, and 1 process cannot resume it with these batches" in said
    assert "Resume it with per_device_train_batch_size=4, or start again." in said
    doubled = "per_device_train_batch_size=4"
    ended = together(lambda rank: minbert_train(tmp_path / "run", *resume, doubled, "max_steps=4"), processes=1)
    assert ended.status == [0], ended.said
    assert "checkpoint-2 was written by another number of processes than the current 1:" in ended.said[0]
    ended = together(lambda rank: minbert_train(tmp_path / "run", *resume))
    assert ended.status == [0, 0], ended.said
    assert "checkpoint-4 was written by another number of processes than the current 2:" in ended.said[0]
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "whole")
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


def test_another_number_of_processes_goes_on_behind_a_finished_stage(together, minbert_train, tmp_path):
    stages = "stages=[{name: heads, freeze: encoder, max_steps: 2}, {name: all, max_steps: 2}]"

    def train(processes: int, rows: int, *words: str) -> Together:
        words = (stages, "optim=sgd", "save_strategy=no", f"per_device_train_batch_size={rows}", *words)
        return together(lambda rank: minbert_train(tmp_path / "run", *words), processes=processes)

    assert train(2, 2).status == [0, 0]
    whole = weights(tmp_path / "run")
    (tmp_path / "run" / "stages" / "2-all" / "metrics.json").unlink()
    ended = train(1, 2, "resume_from_checkpoint=true")
    assert ended.status == [2] and "Resume it with per_device_train_batch_size=4" in ended.said[0], ended.said
    ended = train(1, 4, "resume_from_checkpoint=true")
    assert ended.status == [0] and "finished earlier" in ended.said[0], ended.said
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-6)


def test_the_first_process_alone_writes_but_for_random_states(together, minbert_train, tmp_path):
    """Each process has a folder of its own to write to, as the path is relative."""

    def job(rank: int) -> None:
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        minbert_train("run", "eval_strategy=epoch", "save_total_limit=1")

    ended = together(job)
    assert ended.status == [0, 0], ended.said
    first, second = (
        {path.relative_to(tmp_path / rank).as_posix() for path in (tmp_path / rank).rglob("*") if path.is_file()}
        for rank in "01"
    )
    assert {"run/log.jsonl", "run/metrics.json", "run/checkpoint-6/trainer_state.json"} <= first
    assert second == {f"run/checkpoint-{step}/rng_state_1.pth" for step in (2, 4, 6)}
    assert not any(name.endswith(".part") for name in first)


def test_more_processes_than_visible_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    processes.check_launch(use_cpu=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(
        ValueError, match=r"2 processes on this machine, and each sees 1 GPU \(CUDA_VISIBLE_DEVICES=3\)"
    ):
        processes.check_launch(use_cpu=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    processes.check_launch(use_cpu=False)


def test_a_run_that_ended_diverged_ends_with_status_3_on_every_process(together, minbert_train, tmp_path):
    words = ("learning_rate=1e30", "optim=sgd", "max_grad_norm=0", "save_strategy=no", "aggregator=sum")
    ended = together(lambda rank: minbert_train(tmp_path / "run", *words))
    assert ended.status == [3, 3], ended.said
    assert ended.said[0].splitlines()[-1].startswith("minbert: error: Training diverged: outputs or weights of")
    assert "Training diverged" not in ended.said[1]
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["diverged"] is True


def test_a_loss_with_class_weights_is_that_of_one_process(together, minbert_train, tmp_path):
    """Seven dev rows of sst: in batches of two per process, the last of which are filled up."""
    weighted = "tasks={sst: {loss_options: {class_weights: [1, 5, 1, 1, 50]}}}"
    words = (weighted, "learning_rate=0", "max_steps=1", "eval_strategy=steps", "eval_steps=1", "save_strategy=no")
    found = []
    for count, size in ((2, 2), (1, 2), (1, 7)):
        folder = tmp_path / f"{count}-{size}"
        given = (*words, f"per_device_eval_batch_size={size}", f"per_device_train_batch_size={4 // count}")
        ended = together(lambda rank, f=folder, g=given: minbert_train(f, *g, "aggregator=sum"), processes=count)
        assert ended.status == [0] * count, ended.said
        entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        found += [entry["eval_sst_loss"] for entry in entries if "eval_sst_loss" in entry]
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
