"""Resuming: bit for bit what an unbroken run gives, and from the newest checkpoint that is whole."""

import json
import logging
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from hf_minbert import MinBertError
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.checkpoints import (
    checkpoints,
    incomplete,
    is_worthless,
    newest_complete_checkpoint,
    to_resume,
)

#: Five rounds an epoch in windows of two: optimizer steps 1 to 3 are the first epoch, 4 to 6 the second.
RUN = {
    "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2,
    "save_strategy": "steps", "save_steps": 1,
    "optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def dropout_model(tiny_model):
    return lambda seed=0: tiny_model(seed=seed, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)


@pytest.fixture(scope="module")
def whole_run(build_trainer, dropout_model, tmp_path_factory):
    """An unbroken run, with a checkpoint at each of its six steps. Its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = build_trainer(folder, dropout_model(), **RUN)
    trainer.train()
    return folder, trainer


@pytest.fixture
def run_folder(whole_run, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(whole_run[0], tmp_path / "run")


def assert_same_end(resumed, trainer):
    assert resumed.state.global_step == trainer.state.global_step
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    for old, new in zip(trainer.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(old[key]), torch.as_tensor(new[key])) for key in old)
    logs = [[entry for entry in each.state.log_history if "loss" in entry] for each in (trainer, resumed)]
    assert len(logs[0]) == len(logs[1])
    for one, two in zip(*logs, strict=True):  # the old part from the checkpoint, the new part computed
        assert one == two


# ---- resuming


@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(build_trainer, dropout_model, whole_run, tmp_path, step):
    """Steps 2, 4 and 5 are within an epoch, 3 is between the two. Dropout shows whether random states come back."""
    folder, trainer = whole_run
    resumed = build_trainer(tmp_path / "run", dropout_model(seed=9), **RUN)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert_same_end(resumed, trainer)


def test_a_checkpoint_of_an_epochs_last_step_has_what_the_epochs_end_brought(build_trainer, dropout_model, tmp_path):
    """Which draws numbers too: those of the next epoch's dropout are others without it."""
    given = {**RUN, "logging_strategy": "epoch", "eval_strategy": "epoch", "dev": {"sst": 4}, "eval_tasks": "sst"}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same_end(resumed, trainer)
    logs = [each.state.log_history for each in (trainer, resumed)]
    scores = [[entry["eval_sst_loss"] for entry in log if "eval_sst_loss" in entry] for log in logs]
    assert scores[0] == scores[1] and len(scores[0]) == 2


@pytest.mark.parametrize("why", ["max_steps", "patience"])
def test_a_run_that_was_cut_off_behind_its_last_step_takes_no_other(build_trainer, dropout_model, tmp_path, why):
    """Within an epoch, where the stock loop asks only after a step whether it was the last one."""
    given = {**RUN, "max_steps": 2}
    if why == "patience":  # no score rises that much
        patience = {"early_stopping_patience": 1, "early_stopping_threshold": 9.0, "eval_strategy": "steps"}
        given = {**RUN, **patience, "eval_steps": 1, "dev": {"sst": 4}, "eval_tasks": "sst"}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    assert trainer.state.global_step == 2
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, trainer)


def test_what_is_left_of_a_run_that_was_cut_off_is_no_part_of_a_checkpoint(build_trainer, dropout_model, tmp_path):
    trainer = build_trainer(tmp_path / "run", dropout_model(), **{**RUN, "max_steps": 1})
    left = tmp_path / "run" / "checkpoint-1" / "rng_state_1.pth"
    left.parent.mkdir(parents=True)
    left.touch()
    trainer.train()
    assert not left.exists() and incomplete(left.parent) is None


def test_worker_processes_do_not_change_a_run_nor_its_resuming(build_trainer, dropout_model, whole_run, tmp_path):
    folder, trainer = whole_run
    resumed = build_trainer(tmp_path / "run", dropout_model(seed=9), dataloader_num_workers=2, **RUN)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert_same_end(resumed, trainer)


@pytest.mark.parametrize("step", [2, 5])
def test_resuming_where_rows_are_drawn_tasks_leave_and_the_optimizer_is_ours(
    build_trainer, dropout_model, tmp_path, step
):
    """Four rounds an epoch, of which sts is in the first one and para in two. Both checkpoints are within an epoch."""
    given = {
        **RUN, "gradient_accumulation_steps": 1, "optim": "course_adamw", "mixing": "once", "weight_decay": 0.1,
        "task_sampling": {"sst": "balanced", "sts": "balanced"}, "rows_per_epoch": {"sst": 0.8, "sts": 4, "para": 8},
    }  # fmt: skip
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    assert trainer.state.global_step == 8
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same_end(resumed, trainer)


#: In steps 1 and 2 the heads are trained, from step 3 on the top layer, from step 5 on everything.
FREED = {"freeze": "encoder", "unfreeze": {2: 1, 4: "none"}, "weight_decay": 0.5}
GROUPS = {"learning_rates": {"encoder": 1e-4, "sst": 5e-3}, "weight_decays": {"heads": 0.0}, "layer_decay": 0.5}


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("given", [{}, {"optim": "course_adamw", "aggregator": "pcgrad", **GROUPS}], ids=str)
def test_resuming_around_steps_that_free_parameters(build_trainer, dropout_model, tmp_path, caplog, given, step):
    """After 2 and 4 steps the next one frees something."""
    given = {**RUN, **FREED, **given}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    assert all(parameter in trainer.optimizer.state for parameter in trainer.model.bert.encoder.layer.parameters())
    caplog.clear()  # an earlier test may have had the log of the first run kept too
    with caplog.at_level("INFO", logger="hf_minbert"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same_end(resumed, trainer)
    freed = [message for message in caplog.messages if "`freeze` is" in message]
    assert len(freed) == sum(step < freeing for freeing in (2, 4))


@pytest.mark.parametrize("step", [3, 4])
def test_resuming_a_gradual_schedule(build_trainer, dropout_model, tmp_path, step):
    """An epoch has three steps: after step 3 the top layer is freed, after 6 the first, and after 9 the embeddings."""
    given = {**RUN, "num_train_epochs": 4, "freeze": "encoder", "unfreeze": "gradual"}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    assert trainer.state.global_step == 12
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same_end(resumed, trainer)
    assert trainer.optimizer.state[trainer.model.bert.embeddings.word_embeddings.weight]["step"] == 3


def test_resuming_with_gradient_rows(build_trainer, dropout_model, tmp_path, aggregator):
    given = {**RUN, "aggregator": aggregator, "num_train_epochs": 1}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_end(resumed, trainer)


def test_an_aggregator_that_draws_does_so_alike_after_a_resume(build_trainer, dropout_model, tmp_path, monkeypatch):
    class Draw(AGGREGATORS["sum"]):
        needs_rows = True

        def altered(self, gram, generator, tasks):
            return torch.diag(torch.rand(len(gram), generator=generator, dtype=gram.dtype))

    monkeypatch.setitem(AGGREGATORS, "draw", Draw)
    given = {**RUN, "aggregator": "draw", "num_train_epochs": 1}
    trainer, resumed = (build_trainer(tmp_path / "run", dropout_model(seed), **given) for seed in (0, 9))
    trainer.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_end(resumed, trainer)


def test_resuming_with_true_takes_the_newest(build_trainer, dropout_model, whole_run, run_folder):
    shutil.rmtree(run_folder / "checkpoint-6")
    resumed = build_trainer(run_folder, dropout_model(seed=9), **RUN)
    steps = []
    resumed.model.register_forward_pre_hook(lambda model, args: steps.append(resumed.state.global_step))
    resumed.train(resume_from_checkpoint=True)
    assert set(steps) == {5}
    assert_same_end(resumed, whole_run[1])


def test_resuming_without_a_checkpoint_is_refused(make_trainer):
    with pytest.raises(MinBertError, match="no complete checkpoint in .*run to resume from"):
        make_trainer().train(resume_from_checkpoint=True)


def test_a_checkpoint_of_a_wrapped_model_is_whole(build_trainer, tiny_model, tmp_path):
    peft = pytest.importorskip("peft")

    def wrapped(seed):
        lora = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["heads"], lora_dropout=0.2)
        return peft.get_peft_model(tiny_model(seed=seed), lora)

    given = {**RUN, "num_train_epochs": 1}
    trainer = build_trainer(tmp_path / "run", wrapped(0), **given)
    trainer.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    resumed = build_trainer(tmp_path / "run", wrapped(0), **given)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, trainer)


# ---- which checkpoints are whole


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


BROKEN = {
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "it has no weights"),
    "weights cut at the end": (lambda c: cut(c / "model.safetensors", -1), "model.safetensors ends too early"),
    "weights cut in the header": (lambda c: cut(c / "model.safetensors", 100), "model.safetensors ends too early"),
    "weights of no bytes": (lambda c: cut(c / "model.safetensors", 0), "model.safetensors ends too early"),
    "no optimizer": (lambda c: (c / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "optimizer cut": (lambda c: cut(c / "optimizer.pt", -100), "optimizer.pt ends too early"),
    "no scheduler": (lambda c: (c / "scheduler.pt").unlink(), "scheduler.pt is missing"),
    "no random state": (lambda c: (c / "rng_state.pth").unlink(), "rng_state.pth is missing"),
    "random state cut": (lambda c: cut(c / "rng_state.pth", 20), "rng_state.pth ends too early"),
    "random state of another process": (
        lambda c: (c / "rng_state.pth").rename(c / "rng_state_0.pth"),
        "rng_state.pth is missing",
    ),
    "no state": (lambda c: (c / "trainer_state.json").unlink(), "trainer_state.json is missing or cut"),
    "state cut": (lambda c: cut(c / "trainer_state.json", -3), "trainer_state.json is missing or cut"),
    "nothing at all": (lambda c: [path.unlink() for path in c.iterdir()], "it has no weights"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_checkpoint_is_skipped_with_the_reason(run_folder, caplog, way):
    damage, reason = BROKEN[way]
    damage(run_folder / "checkpoint-6")
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        assert newest_complete_checkpoint(run_folder) == run_folder / "checkpoint-5"
    assert caplog.messages == [f"Skipped {run_folder / 'checkpoint-6'}: {reason}."]


def test_every_broken_checkpoint_is_named_and_whole_ones_are_not(run_folder, caplog):
    (run_folder / "checkpoint-6" / "optimizer.pt").unlink()
    cut(run_folder / "checkpoint-5" / "model.safetensors", 5)
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        assert newest_complete_checkpoint(run_folder) == run_folder / "checkpoint-4"
    assert [message.split("/")[-1] for message in caplog.messages] == [
        "checkpoint-6: optimizer.pt is missing.",
        "checkpoint-5: model.safetensors ends too early.",
    ]


def test_a_run_resumes_past_its_broken_checkpoints(build_trainer, dropout_model, whole_run, run_folder, caplog):
    cut(run_folder / "checkpoint-6" / "trainer_state.json", 50)
    cut(run_folder / "checkpoint-5" / "model.safetensors", -1)
    resumed = build_trainer(run_folder, dropout_model(seed=9), **RUN)
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        resumed.train(resume_from_checkpoint=True)
    assert caplog.text.count("Skipped") == 2
    assert_same_end(resumed, whole_run[1])
    assert incomplete(run_folder / "checkpoint-6") is None  # written again


def test_each_process_needs_its_random_state_unless_another_number_of_them_wrote(run_folder):
    checkpoint = run_folder / "checkpoint-6"
    assert incomplete(checkpoint, world_size=2) is None  # one process wrote it
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    assert incomplete(checkpoint, world_size=2) == "rng_state_1.pth is missing"
    assert incomplete(checkpoint, world_size=1) == "rng_state.pth is missing"
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    for processes in (1, 2, 3):
        assert incomplete(checkpoint, processes) is None
    cut(checkpoint / "rng_state_1.pth", -1)
    assert incomplete(checkpoint, world_size=1) == "rng_state_1.pth ends too early"


def test_what_terms_and_aggregators_keep_must_be_whole_where_it_is_there(run_folder):
    checkpoint = run_folder / "checkpoint-6"
    for name, like in (("teacher.safetensors", "model.safetensors"), ("aggregator.pt", "optimizer.pt")):
        shutil.copy(checkpoint / like, checkpoint / name)
        assert incomplete(checkpoint) is None
        cut(checkpoint / name, -1)
        assert incomplete(checkpoint) == f"{name} ends too early"
        (checkpoint / name).unlink()


@pytest.mark.parametrize(("processes", "told"), [(1, False), (2, True)])
def test_a_resume_by_another_number_of_processes_is_told_of(whole_run, caplog, processes, told):
    checkpoint = str(whole_run[0] / "checkpoint-6")
    args = SimpleNamespace(output_dir=whole_run[0], world_size=processes)
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        assert to_resume(True, args) == to_resume(checkpoint, args) == checkpoint
    assert ("another number of processes" in caplog.text) == told


@pytest.mark.parametrize(
    ("chosen", "metric"), [(None, "overall"), ("sst_loss", "sst_loss"), ("eval_sst_loss", "sst_loss")]
)
def test_an_evaluation_whose_number_to_choose_by_is_not_finite_is_worthless(chosen, metric):
    args = SimpleNamespace(metric_for_best_model=chosen)
    assert is_worthless({f"eval_{metric}": math.inf}, args)
    assert not is_worthless({f"eval_{metric}": 1.0, "eval_para_loss": math.inf}, args)


def test_a_checkpoint_in_several_files_needs_each_whole(run_folder):
    checkpoint = run_folder / "checkpoint-6"
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shutil.copy(checkpoint / "model.safetensors", checkpoint / names[0])
    (checkpoint / "model.safetensors").rename(checkpoint / names[1])
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert incomplete(checkpoint) is None
    cut(checkpoint / names[1], -1)
    assert incomplete(checkpoint) == f"{names[1]} ends too early"
    (checkpoint / names[1]).unlink()
    assert incomplete(checkpoint) == f"{names[1]} is missing"
    cut(checkpoint / "model.safetensors.index.json", 20)
    assert incomplete(checkpoint) == "model.safetensors.index.json is cut"


def test_checkpoints_are_ordered_by_step_and_other_folders_left_out(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-best", "checkpoint-1-old", "logs"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]
    assert newest_complete_checkpoint(tmp_path / "nowhere") is None
