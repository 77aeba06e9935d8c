"""The step: against a training loop written out by hand, and what each argument does to it."""

import logging
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.nn.utils import clip_grad_norm_
from transformers import TrainerCallback, TrainingArguments, set_seed

from hf_minbert import MinBertError, MinBertModel, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.data.collators import RoundCollator
from hf_minbert.data.rounds import MIXING
from hf_minbert.training.data import data_loader
from hf_minbert.training.metric_tracker import MetricTracker
from hf_minbert.training.terms.base import TaskLoss, Term, own_loss
from hf_minbert.training.terms.registry import REGULARIZERS


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def train_by_hand(trainer, model, *, epochs=1, accumulate=1, task_weights=None, clip=None, regularizer=None):
    """Plain SGD over the trainer's rounds, with torch alone. Returns each step's weighted loss."""
    loader = trainer.get_train_dataloader()
    rounds, collate = loader.dataset, RoundCollator(trainer.collators)
    optimizer = torch.optim.SGD(model.parameters(), lr=trainer.args.learning_rate)
    model.train()
    losses = []
    for epoch in range(epochs):
        rounds.set_epoch(epoch)
        for first in range(0, len(rounds), accumulate):
            window = [collate([rounds[i]]) for i in range(first, min(first + accumulate, len(rounds)))]
            total = 0.0
            for task, batch in ((task, batch) for one in window for task, batch in one.items()):
                outputs = model(**batch)
                loss = outputs.loss if regularizer is None else regularizer(model, batch, None).loss
                total = total + loss * (task_weights or {}).get(task, 1.0) / len(window)
            total.backward()
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    return losses


SEVEN = {"sst": 28, "para": 10, "sts": 4}  # seven rounds of four
THREE = {"sst": 12, "para": 10, "sts": 4}
LOOPS = {
    "plain": (SEVEN, {}, {}, 14),
    # The windows are 4 and 3 rounds, so the second is a mean over 3, and nothing is left over for the next epoch.
    "incomplete window": (SEVEN, {"gradient_accumulation_steps": 4}, {"accumulate": 4}, 4),
    "window longer than the epoch": (THREE, {"gradient_accumulation_steps": 8}, {"accumulate": 8}, 2),
    "tasks that leave": (SEVEN, {"mixing": "once"}, {}, 14),
    "a window that tasks leave": (
        SEVEN,
        {"mixing": "once", "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "task_weights": {"para": 2.0}},
        {"accumulate": 2, "clip": 0.5, "task_weights": {"para": 2.0}},
        8,
    ),
    "weights": (THREE, *({"task_weights": {"sts": 0.25, "para": 0.0}},) * 2, 6),
    # Of 12, 9 and 4 rows a round of three takes 3, 2 (2.25) and 1: para ends with a fifth one, filled up.
    "proportional batches": (
        {"sst": 12, "para": 9, "sts": 4},
        {"task_batch_sizes": "proportional", "per_device_train_batch_size": 3, "task_weights": "inverse_batch_size"},
        {"task_weights": {"sst": 1 / 3, "para": 1 / 2, "sts": 1.0}},
        10,
    ),
    "clipping": (THREE, {"max_grad_norm": 0.5}, {"clip": 0.5}, 6),
    "all together": (
        SEVEN,
        {"gradient_accumulation_steps": 4, "task_weights": {"sst": 3.0}, "max_grad_norm": 0.5},
        {"accumulate": 4, "task_weights": {"sst": 3.0}, "clip": 0.5},
        4,
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_training_equals_a_loop_written_by_hand(make_trainer, tiny_model, aggregator, case):
    sizes, arguments, by_hand, steps = LOOPS[case]
    trainer = make_trainer(train=sizes, max_steps=-1, num_train_epochs=2, aggregator=aggregator, **arguments)
    expected = tiny_model()
    before = weights_of(expected)
    losses = train_by_hand(trainer, expected, epochs=2, **by_hand)
    outcome = trainer.train()
    assert_close(weights_of(trainer.model), weights_of(expected))
    assert outcome.global_step == len(losses) == steps
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)
    moved = max((weights_of(expected)[name] - before[name]).abs().max() for name in before)
    assert moved > 1e-4  # else the comparison above would say nothing


@pytest.mark.parametrize(
    "given",
    [
        {"aggregator": "sum"},
        {"aggregator": "pcgrad", "gradient_smoothing": 0.5},
        {"regularizer": "smart", "proximal": "momentum"},
        {"freeze": "encoder"},
        {"freeze": 1, "unfreeze": "gradual"},
        {"packing": True},
    ],
    ids=str,
)
def test_a_loop_of_ones_own_takes_the_first_step_of_train(make_trainer, given):
    """As a learning rate finder does: `training_step` before `train`, or without it."""
    given = {"mixing": "shortest", "max_steps": 1, **given}
    trained, own = make_trainer(**given), make_trainer(**given)
    trained.train()
    before = weights_of(own.model)
    optimizer = torch.optim.SGD(own.model.parameters(), lr=own.args.learning_rate)
    loss = own.training_step(own.model, next(iter(own.get_train_dataloader())))
    optimizer.step()
    assert_close(weights_of(own.model), weights_of(trained.model))
    assert loss.item() == pytest.approx(trained.state.log_history[0]["loss"], abs=1e-4)
    own.model.zero_grad()
    own.model.load_state_dict(before)
    own.train()  # begins anew
    assert_close(weights_of(own.model), weights_of(trained.model))


def test_a_prediction_step_needs_no_training(make_trainer):
    trainer = make_trainer(dev=SEVEN)
    batch = next(iter(trainer.get_eval_dataloader("sst")))
    loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert loss.ndim == 0 and logits.shape == (8, 5) and torch.equal(labels, batch["labels"])
    del batch["labels"]
    assert trainer.prediction_step(trainer.model, batch, False)[::2] == (None, None)


@pytest.mark.parametrize("given", [{}, {"aggregator": "pcgrad"}, {"regularizer": "smart", "proximal": "momentum"}])
def test_training_keeps_nothing_in_the_model(make_trainer, given):
    """A copy that a callback makes of it is a model, and no trainer with it."""
    trainer = make_trainer(**given)
    attributes, copies = (
        {*vars(trainer.model), "_is_accelerate_prepared"},
        [],
    )  # with what accelerate marks every model by

    class Copies(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert {*vars(model)} == attributes
            assert all(parameter.grad is None for parameter in model.parameters())
            copies.append(deepcopy(model))

    trainer.add_callback(Copies())
    trainer.train()
    assert_close(weights_of(copies[-1]), weights_of(trainer.model))
    with torch.no_grad():
        next(copies[-1].parameters()).zero_()
    assert next(trainer.model.parameters()).any()


def test_the_schedule_ends_with_the_last_incomplete_window(make_trainer):
    trainer = make_trainer(
        train=SEVEN, max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=4, lr_scheduler_type="linear"
    )
    trainer.train()
    assert trainer.state.max_steps == trainer.state.global_step == trainer.lr_scheduler.last_epoch == 2
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == [1e-3, 5e-4]


def test_accumulation_does_not_change_a_step(make_trainer, tiny_model, aggregator):
    changes, logs = [], []
    for batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        trainer = make_trainer(
            train={"sst": 8, "para": 8, "sts": 8},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            aggregator=aggregator,
        )
        trainer.train()
        before = weights_of(tiny_model())
        changes.append({name: value - before[name] for name, value in weights_of(trainer.model).items()})
        logs.append({key: value for key, value in trainer.state.log_history[0].items() if "loss" in key})
    assert max(change.abs().max() for change in changes[0].values()) > 1e-3
    assert logs[0].keys() == {"loss", "loss_sst", "loss_para", "loss_sts"}
    for change, log in zip(changes[1:], logs[1:], strict=True):
        assert_close(change, changes[0])
        assert log == pytest.approx(logs[0], rel=1e-6)


# ---- what is trained


@pytest.mark.parametrize("trained", [["sst"], ["para", "sts"]])
def test_heads_that_are_not_trained_stay_as_they_are(make_trainer, tiny_model, aggregator, trained):
    trainer = make_trainer(
        train_tasks=trained, optim="adamw_torch", learning_rate=1e-2, weight_decay=0.5, aggregator=aggregator
    )
    trainer.train()
    before, after = weights_of(tiny_model()), weights_of(trainer.model)
    for name, value in before.items():
        is_idle = name.startswith("heads.") and name.split(".")[1] not in trained
        assert torch.equal(after[name], value) == is_idle, name


def test_only_the_tasks_in_training_are_in_a_round(make_trainer):
    trainer = make_trainer(train_tasks=["sts", "sst"], task_batch_sizes={"sts": 2, "para": 1})
    rounds = list(trainer.get_train_dataloader())
    assert len(rounds) == 5
    assert {task: len(batch["labels"]) for task, batch in rounds[0].items()} == {"sts": 2, "sst": 4}


def test_an_epoch_of_batches_of_different_sizes(make_trainer):
    trainer = make_trainer(train={"sst": 9, "para": 6, "sts": 2}, task_batch_sizes={"para": 1, "sts": 3})
    sizes = [{task: len(batch["labels"]) for task, batch in one.items()} for one in trainer.get_train_dataloader()]
    assert sizes == [{"sst": 4, "para": 1, "sts": 3}] * 6


@pytest.mark.parametrize("mixing", MIXING)
def test_batches_in_proportion_to_the_rows_of_an_epoch(make_trainer, mixing):
    trainer = make_trainer(
        train={"sst": 20, "para": 80, "sts": 10},
        rows_per_epoch={"para": 0.5, "sts": 10},  # so 20, 40 and 10 rows
        train_tasks=["sst", "para", "sts"],
        task_batch_sizes="proportional",
        per_device_train_batch_size=8,
        mixing=mixing,
    )
    rounds = list(trainer.get_train_dataloader())
    sizes = {"sst": 4, "para": 8, "sts": 2}
    found = [(task, len(batch["labels"])) for one in rounds for task, batch in one.items()]
    assert {*found} <= {*sizes.items()}
    if mixing in ("cycle", "once", "shortest"):
        assert Counter(found) == dict.fromkeys(sizes.items(), 5)  # all end with the fifth round


def test_the_log_says_which_batch_sizes_and_weights_were_computed(make_trainer, caplog):
    trainer = make_trainer(
        train={"sst": 12, "para": 9, "sts": 4},
        task_batch_sizes="proportional",
        per_device_train_batch_size=3,
        task_weights="inverse_batch_size",
        max_steps=1,
    )
    with caplog.at_level("INFO", logger="hf_minbert"):
        trainer.train()
    said = "Batch sizes, and how many rounds it takes to see all rows: sst 3 (4), para 2 (5), sts 1 (4)."
    assert said in caplog.messages
    assert "Weights of the losses: sst 0.3333, para 0.5, sts 1." in caplog.messages


def test_proportional_batches_without_a_row_of_a_task_are_refused_before_a_step(make_trainer):
    given = {"train": {"sst": 20, "para": 9, "sts": 2}, "task_batch_sizes": "proportional"}
    with pytest.raises(MinBertError, match="'sts' no row in a round.*to 5 or more"):
        make_trainer(**given, per_device_train_batch_size=4)
    make_trainer(**given, per_device_train_batch_size=5)


def test_proportional_batches_resume_to_the_same_weights(make_trainer, tiny_model):
    given = {
        "train": {"sst": 12, "para": 9, "sts": 4}, "task_batch_sizes": "proportional", "mixing": "once",
        "per_device_train_batch_size": 3, "task_weights": "inverse_batch_size", "save_strategy": "steps",
        "save_steps": 3, "max_steps": 8,
    }  # fmt: skip
    whole = make_trainer(**given)
    whole.train()
    resumed = make_trainer(tiny_model(), **given)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert_close(weights_of(resumed.model), weights_of(whole.model))


#: Every kind of layer that a head may have beside the plain ones.
RICH = {
    "sst": {"pooling": "attention", "layers": "mix", "head": "mlp"},
    "para": {"pair_encoding": "bi", "pooling": "bigru", "head": "cosine"},
    "sts": {"head": "blocks", "head_options": {"hidden_sizes": [8]}},
}


@pytest.mark.parametrize("optim", ["adamw_torch", "course_adamw"])
@pytest.mark.parametrize("tasks", [["sst", "para", "sts"], RICH])
def test_biases_and_layer_norms_are_never_decayed(make_trainer, tiny_model, tasks, optim):
    model = tiny_model(get_tasks(tasks), private_layers=1)
    groups = make_trainer(model, optim=optim, weight_decay=0.1).create_optimizer().param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    found = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    norms = {
        id(p) for module in model.modules() if isinstance(module, torch.nn.LayerNorm) for p in module.parameters()
    }
    expected = {n for n, p in model.named_parameters() if id(p) in norms or n.rpartition(".")[2].startswith("bias")}
    spared = {name for name, value in found.items() if value == 0}
    assert spared == expected
    assert {value for name, value in found.items() if name not in spared} == {0.1}


class Squares(Term):
    """Twice the squared logits, for sst only."""

    name = "squares"

    def __call__(self, model, batch, key, inner=own_loss):
        found = inner(model, batch)
        term = found.outputs["logits"].square().mean() * (batch["task"] == "sst")
        return TaskLoss(found.loss + 2.0 * term, found.outputs, {**found.logged, self.name: term})


def test_a_regularizer_is_added_to_each_tasks_loss(make_trainer, tiny_model, aggregator, monkeypatch):
    monkeypatch.setitem(REGULARIZERS, "squares", Squares)
    weights = {"sst": 0.5}
    given = {"train": THREE, "max_steps": 3, "aggregator": aggregator, "task_weights": weights}
    trainer = make_trainer(**given, regularizer="squares")
    expected = tiny_model()
    losses = train_by_hand(trainer, expected, regularizer=Squares(), task_weights=weights)
    trainer.train()
    assert_close(weights_of(trainer.model), weights_of(expected))
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(losses[0])
    assert log["loss"] == pytest.approx(log["loss_sst"] / 2 + log["loss_para"] + log["loss_sts"])  # before the weight
    plain = make_trainer(**given)
    plain.train()
    assert log["loss_sst"] > plain.state.log_history[0]["loss_sst"] + 0.1
    assert log["loss_para"] == pytest.approx(plain.state.log_history[0]["loss_para"])


def test_what_no_step_would_use_is_refused(tmp_path, make_trainer, tiny_model, tiny_config, toy_rows):
    class Weighted(MultiTaskTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = MultiTaskTrainingArguments(tmp_path, use_cpu=True)
    with pytest.raises(MinBertError, match="Weighted has a `compute_loss`, which no step .* Override `task_loss"):
        Weighted(tiny_model(), args, train_dataset=toy_rows())
    with pytest.raises(MinBertError, match="must be MultiTaskTrainingArguments.* Found TrainingArguments"):
        MultiTaskTrainer(tiny_model(), TrainingArguments(tmp_path, use_cpu=True), train_dataset=toy_rows())
    with pytest.raises(MinBertError, match="has no tasks to train. Found a MinBertModel"):
        make_trainer(MinBertModel(tiny_config()))


def test_losses_fall(make_trainer):
    trainer = make_trainer(
        optim="adamw_torch", learning_rate=3e-3, max_steps=30, max_grad_norm=1.0, per_device_train_batch_size=8,
        train={"sst": 8, "para": 8, "sts": 8},
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for task in ("sst", "para", "sts"):
        first, last = ([log[f"loss_{task}"] for log in part] for part in (logs[:5], logs[-5:]))
        assert sum(last) < 0.5 * sum(first), task


# ---- the log


def test_per_task_losses_are_means_since_the_last_log(make_trainer, aggregator):
    weights = {"sts": 0.5}
    given = {"max_steps": 4, "aggregator": aggregator, "gradient_accumulation_steps": 2, "task_weights": weights}
    given["train"] = {"sst": 16, "para": 5, "sts": 5}
    each, paired = make_trainer(**given), make_trainer(**given, logging_steps=2)
    each.train()
    paired.train()
    single = [entry for entry in each.state.log_history if "loss" in entry]
    double = [entry for entry in paired.state.log_history if "loss" in entry]
    assert [len(single), len(double)] == [4, 2]
    for number, log in enumerate(double):
        for key in ("loss", "loss_sst", "loss_para", "loss_sts"):
            assert log[key] == pytest.approx((single[2 * number][key] + single[2 * number + 1][key]) / 2)
    for log in single:
        assert log["loss"] == pytest.approx(log["loss_sst"] + log["loss_para"] + log["loss_sts"] / 2)


@pytest.mark.parametrize("every", [1, 3])
def test_a_task_that_left_the_rounds_is_not_logged_until_it_is_back(make_trainer, aggregator, every):
    """Three rounds an epoch, of which sts is in the first and para in the first two."""
    given = {"train": {"sst": 12, "para": 8, "sts": 4}, "mixing": "once", "max_steps": 6, "aggregator": aggregator}
    trainer = make_trainer(**given, logging_steps=every)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [{key[5:]: value for key, value in log.items() if key.startswith("loss_")} for log in logs]
    if every == 1:
        assert [set(one) for one in losses] == [{"sst", "para", "sts"}, {"sst", "para"}, {"sst"}] * 2
        assert [log["loss"] for log in logs] == pytest.approx([sum(one.values()) for one in losses])
    else:  # a task's loss is a mean over the rounds that hold it
        shares = {"sst": 1, "para": 2 / 3, "sts": 1 / 3}
        totals = [sum(one[task] * share for task, share in shares.items()) for one in losses]
        assert [log["loss"] for log in logs] == pytest.approx(totals)


def test_a_second_training_does_not_log_what_the_first_left_over(make_trainer):
    trainer = make_trainer(logging_steps=3, max_steps=5, learning_rate=0.0)
    trainer.train()  # two steps after the last log
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1]["loss"] == pytest.approx(sum(logs[-1][f"loss_{task}"] for task in ("sst", "para", "sts")))


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 2}])
def test_speed_counts_rows_and_not_rounds(make_trainer, length):
    trainer = make_trainer(task_batch_sizes={"para": 3}, gradient_accumulation_steps=5, **length)
    metrics = trainer.train().metrics
    rounds = 15 if "num_train_epochs" not in length else 10
    rows = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert rows == pytest.approx(rounds * (4 + 3 + 4), rel=0.01)


@pytest.mark.parametrize("length", [{"max_steps": 12}, {"max_steps": -1, "num_train_epochs": 4}])
def test_speed_counts_the_rows_that_an_epoch_draws(make_trainer, length):
    given = {"rows_per_epoch": {"sst": 0.6, "para": 8, "sts": 4}, "mixing": "once"}
    metrics = make_trainer(**given, **length).train().metrics
    rows = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert rows == pytest.approx(4 * (12 + 8 + 4), rel=0.02)


def test_floating_point_operations_are_those_of_all_tasks(make_trainer):
    trainer = make_trainer()
    rounds = list(trainer.get_train_dataloader())[:2]
    tokens = sum(batch["input_ids"].numel() for one in rounds for batch in one.values())
    trainer.train()
    assert trainer.state.total_flos == 6 * tokens * trainer.model.num_parameters(exclude_embeddings=True)


def test_a_loader_has_the_workers_and_the_memory_that_were_asked_for():
    args = SimpleNamespace(
        dataloader_num_workers=2, dataloader_pin_memory=True, dataloader_prefetch_factor=3,
        dataloader_multiprocessing_context=None, device=torch.device("cuda"),
    )  # fmt: skip
    loader = data_loader(args, [0], 1, list)
    assert (loader.num_workers, loader.pin_memory, loader.prefetch_factor) == (2, True, 3)


# ---- the order of the rows


def labels_seen(trainer):
    """Each task's labels in the order in which the model is trained on them."""
    seen = {}

    def keep(model, args, batch):
        seen.setdefault(batch["task"], []).extend(batch["labels"].tolist())

    hook = trainer.model.register_forward_pre_hook(keep, with_kwargs=True)
    trainer.train()
    hook.remove()
    return seen


@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_balanced_task_shows_its_labels_equally_often(make_trainer, toy_rows, as_dataset):
    rows = toy_rows(sst=60, para=60, sts=60)
    for number in range(60):  # nine in ten are alike
        rows["sst"][number]["label"] = 3 if number < 54 else 1
        rows["sts"][number]["label"] = 1.5 if number < 54 else 4.5
    if as_dataset:
        rows = {task: Dataset.from_list(of) for task, of in rows.items()}
    trainer = make_trainer(
        train=rows, max_steps=-1, num_train_epochs=5, per_device_train_batch_size=20,
        task_sampling={"sst": "balanced", "sts": "balanced"}, score_bins=2,
    )  # fmt: skip
    seen = labels_seen(trainer)
    assert {len(labels) for labels in seen.values()} == {300}
    assert seen["sst"].count(1) / 300 == pytest.approx(0.5, abs=0.1)
    assert seen["sts"].count(4.5) / 300 == pytest.approx(0.5, abs=0.1)
    assert seen["para"].count(1) == 150


def test_a_tenth_of_a_tasks_rows_an_epoch_shortens_the_epoch(make_trainer):
    given = {"train": {"sst": 8, "para": 80}, "train_tasks": ["sst", "para"], "max_steps": -1, "num_train_epochs": 2}
    trainer = make_trainer(**given, rows_per_epoch={"para": 0.1})
    trainer.train()
    assert trainer.state.max_steps == 2 * 2  # two rounds of four an epoch
    with pytest.raises(MinBertError, match="`rows_per_epoch` of 'sst' asks for 9 rows, and there are 8"):
        make_trainer(**given, rows_per_epoch={"sst": 9})


def seen_rows(trainer):
    """The ids of each step's rows, as the model sees them."""
    seen = []
    hook = trainer.model.register_forward_pre_hook(
        lambda model, args, batch: seen.append(batch["input_ids"].tolist()), with_kwargs=True
    )
    trainer.train()
    hook.remove()
    return seen


def test_the_order_follows_the_seed_and_data_seed_alone_if_there_is_one(make_trainer):
    given = {"train": {"sst": 20}, "train_tasks": ["sst"], "max_steps": 5}
    first, again, other = (seen_rows(make_trainer(**given, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    same, different = (seen_rows(make_trainer(**given, seed=2, data_seed=seed)) for seed in (1, 3))
    assert same == first != different


def test_which_task_a_step_has_follows_seed_temperature_and_epochs(make_trainer):
    given = {"train": {"sst": 160, "para": 40}, "train_tasks": ["sst", "para"], "max_steps": -1}

    def tasks(epoch=0, **more):
        rounds = make_trainer(**given, **more).get_train_dataloader().dataset
        rounds.set_epoch(epoch)
        return [task for index in range(len(rounds)) for task in rounds[index]]

    first, other, same = (
        tasks(mixing="proportional", **seeds) for seeds in ({"seed": 1}, {"seed": 2}, {"seed": 2, "data_seed": 1})
    )
    assert first == same != other
    flat = tasks(mixing="temperature", mixing_temperature=1.0, seed=1)
    assert flat == first != tasks(mixing="temperature", seed=1)
    # Two and a half epochs are three. In the second one the exponent is .6, of which the temperature is the inverse.
    annealed = tasks(epoch=1, mixing="annealed", num_train_epochs=2.5)
    assert annealed == tasks(epoch=1, mixing="temperature", mixing_temperature=1 / 0.6)


def test_each_epoch_has_its_own_order(make_trainer):
    seen = seen_rows(make_trainer(train={"sst": 20}, train_tasks=["sst"], max_steps=-1, num_train_epochs=3))
    epochs = [[tuple(row) for batch in seen[start : start + 5] for row in batch] for start in (0, 5, 10)]
    unpadded = [[tuple(i for i in row if i) for row in epoch] for epoch in epochs]
    assert len({tuple(sorted(epoch)) for epoch in unpadded}) == 1  # all rows, each epoch
    assert len({tuple(epoch) for epoch in unpadded}) == 3


def test_global_random_state_does_not_change_the_order(make_trainer):
    given = {"train": {"sst": 20}, "train_tasks": ["sst"]}
    orders = []
    for seed in (0, 1):
        trainer = make_trainer(**given)
        set_seed(seed)
        orders.append([batch["sst"]["input_ids"].tolist() for batch in trainer.get_train_dataloader()])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("mixing", sorted(MIXING))
def test_every_mixing_trains_and_resumes_to_the_same_weights(build_trainer, tmp_path, mixing, aggregator):
    given = {"mixing": mixing, "aggregator": aggregator, "num_train_epochs": 2, "max_steps": -1}
    trained = [build_trainer(tmp_path / "run", **given, save_strategy="steps", save_steps=3) for _ in range(2)]
    trained[0].train()
    trained[1].train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for left, right in zip(*(trainer.model.parameters() for trainer in trained), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("mixing", "steps"), [("proportional", 3), ("proportional", 60), ("cycle", 1)])
def test_a_task_that_is_never_drawn_is_said_with_the_counts(make_trainer, caplog, mixing, steps):
    trainer = make_trainer(train={"sst": 400, "para": 4, "sts": 40}, mixing=mixing, max_steps=steps, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        trainer.train()
    tasks = ("sst", "para", "sts")
    seen = {task for entry in trainer.state.log_history for task in tasks if f"loss_{task}" in entry}
    said = [text for text in caplog.messages if "in this run: it is not trained" in text]
    missing = [task for task in tasks if task not in seen]
    assert len(said) == bool(missing)
    for text in said:
        assert text.startswith(f"`mixing: proportional` draws no round of {' and '.join(missing)} in this run")
        assert all(f"{task} 0" in text for task in missing) and all(f"{task} 0" not in text for task in seen)
    if steps == 3:
        assert missing  # para has one round in a hundred


def test_the_rounds_of_whole_epochs_are_counted_where_a_task_is_never_drawn(make_trainer, caplog):
    """Two epochs of 14 rounds, in windows of three: five steps each, the last of two rounds."""
    trainer = make_trainer(
        train={"sst": 40, "para": 1, "sts": 12}, mixing="proportional", max_steps=-1, num_train_epochs=2,
        gradient_accumulation_steps=3, learning_rate=0.0,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        seen = {task: len(labels) // 4 for task, labels in labels_seen(trainer).items()}
    assert seen.keys() == {"sst", "sts"} and sum(seen.values()) == 28
    assert f"Rounds by task: sst {seen['sst']}, para 0, sts {seen['sts']}." in caplog.text


def test_means_since_training_began_are_over_all_steps_that_were_read():
    """Here of two processes that add the same values."""
    tracker = MetricTracker(SimpleNamespace(reduce=lambda value, how: {"sum": 2 * value}[how]))
    assert tracker.read() == tracker.totals() == {}
    for values, mean in (((1.0, 3.0), 2.0), ((8.0,), 8.0)):
        for value in values:
            tracker.add("loss", torch.tensor(value))
            tracker.count("rows", torch.tensor(value))
        assert tracker.read() == {"loss": mean, "rows": 2 * sum(values)}
    assert tracker.totals() == {"loss": 4.0}
