"""Gradient surgery through the trainer: its keys, its state in checkpoints, its log, and what it leaves alone."""

import gc
import json
import random
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from hf_minbert import MinBertError, MultiTaskTrainingArguments, get_tasks
from hf_minbert.training.aggregation.base import Aggregator
from hf_minbert.training.aggregation.conflicts import ConflictMeter
from hf_minbert.training.aggregation.gradvac import GradVac
from hf_minbert.training.aggregation.gram import gram_matrix
from hf_minbert.training.aggregation.pcgrad import PCGrad
from hf_minbert.training.aggregation.registry import make_aggregator
from hf_minbert.training.aggregation.sum import Sum
from hf_minbert.training.checkpoints import AGGREGATOR, newest_complete_checkpoint
from hf_minbert.training.gradients import GradientRows

SAVING = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
PAIRS = ["sst_para", "sst_sts", "para_sts"]


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


# ---- keys


def test_options_reach_the_aggregator(make_trainer):
    trainer = make_trainer(aggregator="gradvac", aggregator_options={"beta": 0.5}, gradient_smoothing=0.25)
    gradients = trainer.make_gradients(static=False)
    assert isinstance(gradients.aggregator, GradVac) and gradients.aggregator.beta == 0.5
    assert gradients.smoothing.decay == 0.25
    assert make_trainer(aggregator="pcgrad").make_gradients(static=False).smoothing is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregator": "torchjd.UPGard"}, r"Unknown aggregator 'torchjd.UPGard'. Did you mean 'torchjd.UPGrad'\?"),
        (
            {"aggregator": "pcgrad", "aggregator_options": {"reduktion": "mean"}},
            r"Unknown option of aggregator 'pcgrad': 'reduktion'. Did you mean 'reduction'\?",
        ),
        ({"aggregator_options": {"reduction": "mean"}}, r"option of aggregator 'sum': 'reduction'.*\(none\)"),
        ({"aggregator": "pcgrad", "aggregator_options": {"reduction": "average"}}, "Unknown reduction 'average'"),
        ({"aggregator": "pcgrad", "gradient_smoothing": 1.0}, "`gradient_smoothing` must be 0 or more and below 1"),
        ({"gradient_smoothing": 0.9}, "`gradient_smoothing` needs an aggregator that sees each task's gradient"),
    ],
)
def test_wrong_keys_are_refused_before_a_model_is_there(make_trainer, given, said):
    if "torchjd" in given.get("aggregator", ""):
        pytest.importorskip("torchjd")
    with pytest.raises(MinBertError, match=said):
        make_trainer(**given)


def test_a_mean_is_a_third_of_the_sum_where_all_three_are_shared(make_trainer):
    moved = []
    for options in (None, {"reduction": "mean"}):
        trainer = make_trainer(aggregator="pcgrad", aggregator_options=options, max_steps=1)
        before = weights_of(trainer)
        trainer.train()
        after = weights_of(trainer)
        moved.append({name: after[name] - before[name] for name in before})
    for name, change in moved[0].items():
        factor = 1 if name.startswith("heads.") else 1 / 3
        torch.testing.assert_close(moved[1][name], factor * change, rtol=1e-2, atol=2e-7)


def test_a_library_aggregator_trains(make_trainer):
    pytest.importorskip("torchjd")
    trainer = make_trainer(aggregator="torchjd.UPGrad", aggregator_options={"pref_vector": [1.0, 1.0, 1.0]})
    before = weights_of(trainer)
    trainer.train()
    assert not torch.equal(weights_of(trainer)["heads.sst.linear.weight"], before["heads.sst.linear.weight"])
    assert 0 <= trainer.state.log_history[0]["surgery_turn"] < 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"mixing": "proportional"},
            "with `mixing: proportional` and without `gradient_accumulation_steps` each step ",
        ),
        (
            {"mixing": "annealed"},
            "with `mixing: annealed` and without `gradient_accumulation_steps` each step has one",
        ),
        ({"freeze": "encoder"}, "with `freeze: encoder` nothing is trained that tasks share"),
        ({"train_tasks": ["sst"]}, "one task is trained"),
        ({"mixing": "temperature", "gradient_accumulation_steps": 2}, None),
        ({"freeze": "encoder", "unfreeze": {1: "none"}}, None),
        ({"freeze": "embeddings", "mixing": "once"}, None),
        ({"regularizer": "smart"}, None),
        ({"aggregator": "sum", "mixing": "proportional", "freeze": "encoder"}, None),
    ],
    ids=str,
)
def test_surgery_without_effect_is_told_at_the_start(make_trainer, caplog, given, reason):
    trainer = make_trainer(**{"aggregator": "pcgrad", **given})
    told = [record.message for record in caplog.records if "`aggregator" in record.message]
    assert len(told) == (reason is not None)
    if reason is not None:
        assert f"`aggregator: pcgrad` has no effect: {reason}" in told[0]
        assert not any("conflict" in name for name in trainer.train().metrics)  # and so it is


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, 3), ({"train_tasks": ["sst"]}, 1), ({"mixing": "once", "weights": [1, 1, 1]}, 2)],
    ids=str,
)
def test_library_options_that_do_not_serve_the_tasks_are_refused_at_the_start(make_trainer, given, count):
    """With `once`, tasks leave: what fits three would fail in the middle of the run."""
    pytest.importorskip("torchjd")
    options = {"pref_vector": given.get("weights", [1, 1])}
    given = {name: value for name, value in given.items() if name != "weights"}
    with pytest.raises(
        MinBertError, match=rf"Combining the gradients of {count} tasks with 'torchjd.UPGrad' failed: "
    ):
        make_trainer(aggregator="torchjd.UPGrad", aggregator_options=options, **given)


def test_two_pairs_of_tasks_with_one_name_are_refused(tmp_path):
    args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, aggregator="pcgrad")
    tasks = {name: replace(get_tasks(["sst"])[0], name=name) for name in ("a", "b_c", "a_b", "c")}
    with pytest.raises(MinBertError, match="`conflict_a_b_c` of the tasks 'a' and 'b_c' and of 'a_b' and 'c'"):
        args.check_tasks(tasks)
    args.check_tasks({name: task for name, task in tasks.items() if name != "c"})
    MultiTaskTrainingArguments(str(tmp_path), use_cpu=True).check_tasks(tasks)


# ---- state


@pytest.mark.parametrize("smoothing", [None, 0.9])
def test_a_resumed_run_ends_with_the_same_bits(make_trainer, tiny_model, tmp_path, smoothing):
    """With the checkpoint where two tasks have left the rounds, so that one task alone comes next."""
    given = {
        "aggregator": "gradvac", "aggregator_options": {"beta": 0.3}, "gradient_smoothing": smoothing,
        "mixing": "once", "learning_rate": 0.05, **SAVING,
    }  # fmt: skip
    whole = make_trainer(**given)
    expected = whole.train()
    weights = weights_of(whole)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    torch.manual_seed(99)
    resumed = make_trainer(tiny_model(seed=3), **given)
    found = resumed.train(resume_from_checkpoint=True)
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, weights[name]), name
    targets = whole.step.gradients.aggregator.state_dict()
    assert resumed.step.gradients.aggregator.state_dict() == targets and len(targets["targets"]) == 9
    measured = {name: value for name, value in expected.metrics.items() if "cosine" in name or "removed" in name}
    assert len(measured) == 6
    assert {name: found.metrics[name] for name in measured} == measured


def test_without_its_state_a_resumed_gradvac_would_end_elsewhere(make_trainer, tiny_model, tmp_path):
    given = {"aggregator": "gradvac", "aggregator_options": {"beta": 0.3}, "learning_rate": 0.05, **SAVING}
    whole = make_trainer(**given)
    whole.train()
    path = tmp_path / "run" / "checkpoint-3" / AGGREGATOR
    state = torch.load(path)
    torch.save({**state, "aggregator": {"targets": []}}, path)
    resumed = make_trainer(**given)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert any(not torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(resumed).items())


def test_a_checkpoint_without_a_whole_state(make_trainer, tmp_path):
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(aggregator="pcgrad", **given).train()
    newest = tmp_path / "run" / "checkpoint-2"
    (newest / AGGREGATOR).write_bytes((newest / AGGREGATOR).read_bytes()[:-100])
    assert newest_complete_checkpoint(tmp_path / "run").name == "checkpoint-1"
    shutil.rmtree(tmp_path / "run")
    make_trainer(**given).train()
    assert not (newest / AGGREGATOR).exists()
    with pytest.raises(MinBertError, match=f"has no {AGGREGATOR}"):
        make_trainer(aggregator="pcgrad", **given).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            {"aggregator": "pcgrad"},
            {"aggregator": "gradvac"},
            "with `aggregator: pcgrad`. Found `aggregator: gradvac`.",
        ),
        (
            {"aggregator": "pcgrad"},
            {"aggregator": "pcgrad", "gradient_smoothing": 0.5},
            "with no `gradient_smoothing`. Found `gradient_smoothing: 0.5`.",
        ),
        (
            {"aggregator": "pcgrad", "gradient_smoothing": 0.5},
            {"aggregator": "pcgrad"},
            "with `gradient_smoothing: 0.5`. Found no `gradient_smoothing`.",
        ),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_surgery_is_refused_in_a_sentence(make_trainer, before, after, said):
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(**before, **given).train()
    resumed = make_trainer(**after, **given)
    start = weights_of(resumed)
    with pytest.raises(MinBertError, match=f"checkpoint-2 was written {said} Resume as it was trained"):
        resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, start[name]) for name, value in weights_of(resumed).items())


# ---- a task's gradient that is not finite


@pytest.mark.parametrize(
    "given",
    [
        {"aggregator": "sum"},
        {"aggregator": "pcgrad"},
        {"aggregator": "gradvac"},
        {"aggregator": "pcgrad", "gradient_smoothing": 0.5},
    ],
    ids=str,
)
def test_the_loss_scale_of_fp16_skips_the_step_for_all_weights(make_trainer, monkeypatch, given):
    """In float32, with the scaler that fp16 has on a GPU; one task's loss is infinite in the second step."""
    adam = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.5}
    trainer = make_trainer(max_steps=3, **adam, **given)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    original, after = trainer.task_loss, [weights_of(trainer)]

    def task_loss(model, batch, place):
        found = original(model, batch, place)
        spoilt = batch["task"] == "para" and trainer.state.global_step == 1
        return {**found, "loss": found["loss"] * torch.inf} if spoilt else found

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            after.append(weights_of(trainer))
            scales.append(trainer.accelerator.scaler.get_scale())

    scales = []
    monkeypatch.setattr(trainer, "task_loss", task_loss)
    trainer.add_callback(Watch())
    trainer.train()
    assert scales == [1024, 512, 512]
    start, first, second, third = after
    assert all(torch.equal(second[name], first[name]) for name in first)
    for before, now in ((start, first), (second, third)):
        assert all(value.isfinite().all() and not torch.equal(value, before[name]) for name, value in now.items())


def test_without_a_loss_scale_all_shared_weights_show_that_a_gradient_was_not_finite(make_trainer, monkeypatch):
    trainer = make_trainer(aggregator="pcgrad", max_steps=1)
    original = trainer.task_loss

    def task_loss(model, batch, place):
        found = original(model, batch, place)
        return {**found, "loss": found["loss"] * torch.inf} if batch["task"] == "para" else found

    monkeypatch.setattr(trainer, "task_loss", task_loss)
    trainer.train()
    for name, value in weights_of(trainer).items():
        if not name.startswith("heads."):
            assert value.isnan().all(), name


# ---- the log


CONFLICT = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
AGREE = torch.tensor([[1.0, 0.0], [1.0, 1.0]])


def measured(aggregator, *steps, tasks=("a", "b")):
    meter = ConflictMeter(["a", "b", "c"])
    for gradients in steps:
        meter.add(tasks, *aggregator.step(gradients)[1:])
    return meter


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_is_measured_of_two_tasks(reduction):
    """(1, 0) and (-1, 1) each lose half of the square of their length; their sum (0, 1) becomes (0.5, 1.5)."""
    meter = measured(PCGrad(reduction), CONFLICT, AGREE)
    half = 0.5**0.5
    one = {"conflict_a_b": 1.0, "cosine_a_b": -half, "removed_a": half, "removed_b": half, "surgery_turn": 0.1**0.5}
    two = {"conflict_a_b": 0.0, "cosine_a_b": half, "removed_a": 0.0, "removed_b": 0.0, "surgery_turn": 0.0}
    mean = (1 + 2**0.5) / 2
    for each in (one, two):
        each |= {"norm_a": 1 / mean, "norm_b": 2**0.5 / mean}
    expected = {name: (one[name] + two[name]) / 2 for name in one}
    saved = meter.state_dict()  # which takes nothing from the next log
    assert meter.read() == pytest.approx(expected, abs=1e-7)
    assert meter.read() == {} and meter.state_dict() == saved
    meter.add(("a", "b"), *PCGrad(reduction).step(AGREE)[1:])
    assert meter.read() == pytest.approx(two, abs=1e-7)
    assert meter.means() == pytest.approx({name: (one[name] + 2 * two[name]) / 3 for name in one}, abs=1e-7)


def test_a_sum_removes_nothing_and_a_mean_of_units_turns():
    assert measured(Sum(), CONFLICT).read()["surgery_turn"] == 0

    class Units(Aggregator):
        def altered(self, gram, generator, tasks):
            return torch.diag(1 / gram.diagonal().sqrt())

    turn = measured(Units(), torch.tensor([[3.0, 0.0], [0.0, 1.0]])).read()["surgery_turn"]
    assert turn == pytest.approx((0.5**0.5) * (3 - 1) / 10**0.5)  # between (1, 1) and (3, 1)


def test_pairs_keep_their_names_whatever_the_order_and_count_the_steps_that_had_both():
    meter = ConflictMeter(["a", "b", "c"])
    three = torch.tensor([[0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])  # c, a, b
    meter.add(["c", "a", "b"], *PCGrad().step(three)[1:])
    meter.add(["b", "a"], *PCGrad().step(AGREE)[1:])
    found = meter.read()
    assert found["conflict_a_b"] == 0.5 and found["cosine_a_b"] == pytest.approx((0.5**0.5 - 1) / 2)
    assert found["conflict_a_c"] == found["conflict_b_c"] == 0
    assert found["removed_c"] == 0 and found["removed_a"] == pytest.approx(0.5)


def test_a_step_that_is_not_finite_and_a_zero_gradient():
    meter = measured(PCGrad(), CONFLICT, torch.tensor([[torch.inf, 0.0], [1.0, 1.0]]))
    assert meter.read()["conflict_a_b"] == 1
    found = measured(PCGrad(), torch.tensor([[0.0, 0.0], [1.0, 1.0]])).read()
    assert {name for name, value in found.items() if value} == {"norm_b"} and found["norm_b"] == 2
    assert measured(PCGrad(), torch.full((2, 2), torch.nan)).read() == {}


def test_the_log_and_the_metrics_have_every_pair(make_trainer):
    trainer = make_trainer(aggregator="pcgrad", max_steps=4, logging_steps=2)
    metrics = trainer.train().metrics
    entries = [entry for entry in trainer.state.log_history if "loss_sst" in entry]
    assert len(entries) == 2
    for pair in PAIRS:
        assert all(entry[f"conflict_{pair}"] in (0, 0.5, 1) for entry in entries)
        mean = sum(entry[f"cosine_{pair}"] for entry in entries) / 2
        assert metrics[f"train_cosine_{pair}"] == pytest.approx(mean) and mean != 0
    assert json.dumps(metrics)
    assert not [name for name in make_trainer().train().metrics if "conflict" in name]


def test_the_measured_cosine_is_that_of_the_losses_gradients(make_trainer, tiny_model):
    trainer = make_trainer(aggregator="pcgrad", max_steps=1)
    (batch, *_) = trainer.get_train_dataloader()
    trainer.train()
    model, rows = tiny_model(), []
    for task in ("sst", "para"):
        model.zero_grad()
        model(**batch[task]).loss.backward()
        rows.append(torch.cat([p.grad.flatten() for n, p in model.named_parameters() if not n.startswith("heads.")]))
    expected = torch.cosine_similarity(*rows, dim=0).item()
    assert trainer.state.log_history[0]["cosine_sst_para"] == pytest.approx(expected, abs=1e-4)


# ---- smoothing over steps with other tasks


def test_smoothing_goes_on_where_a_task_is_alone():
    """By hand: averages of 1 then 3 with decay 0.5 are 1 and (0.25 * 1 + 0.5 * 3) / 0.75; the head is not averaged."""
    from hf_minbert.training.aggregation.smoothing import Smoothing

    shared, head = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
    gradients = GradientRows([shared, head], PCGrad(), Smoothing(0.5))
    gradients.add("a", (shared * 1.0).sum() + head.sum())
    gradients.add("b", (shared * 4.0).sum())
    gradients.combine(torch.Generator())
    assert shared.grad.tolist() == [5.0, 5.0]
    gradients.add("a", (shared * 3.0).sum() + 7 * head.sum())
    gradients.combine(torch.Generator())
    assert shared.grad.tolist() == pytest.approx([1.75 / 0.75] * 2) and head.grad.tolist() == [7.0]


# ---- what surgery must not do (faults of published code, and pins of the algorithm)


def test_a_window_projects_once_and_by_the_name_of_the_task():
    """Two batches of a in conflict with one of b: projected batch by batch, the second would lose nothing."""
    p = torch.nn.Parameter(torch.zeros(2))
    gradients = GradientRows([p], PCGrad())
    for task, gradient in (("a", [3.0, 0.0]), ("b", [-1.0, 1.0]), ("a", [-1.0, 0.0])):
        gradients.add(task, (p * torch.tensor(gradient)).sum())
    gradients.combine(torch.Generator())
    expected = PCGrad()(torch.tensor([[2.0, 0.0], [-1.0, 1.0]]))
    assert torch.equal(p.grad, expected) and expected.tolist() == [1.0, 2.0]


def test_a_task_that_is_missing_from_a_part_of_the_window_is_averaged_over_the_whole(make_trainer, tiny_model):
    """With two batches of sst and one of para in a window of two, half of para's gradient counts."""
    rows, once = {"sst": 8, "para": 4}, {"mixing": "once", "train_tasks": ["sst", "para"], "max_steps": 1}
    moved = []
    for window in (1, 2):
        trainer = make_trainer(
            tiny_model(), train=rows, aggregator="pcgrad", gradient_accumulation_steps=window, **once
        )
        before = weights_of(trainer)
        trainer.train()
        moved.append(weights_of(trainer)["heads.para.linear.weight"] - before["heads.para.linear.weight"])
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-2, atol=2e-7)


def test_rows_are_averaged_before_they_are_projected():
    """What two processes would have: the mean of their projections is another gradient."""
    first, second = torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    together = PCGrad()((first + second) / 2)
    apart = (PCGrad()(first) + PCGrad()(second)) / 2
    assert together.tolist() == [1.0, 1.0] and apart.tolist() == [1.25, 1.25]
    assert gram_matrix((first + second) / 2)[0, 1] == 0


def test_weights_that_no_task_reaches_or_that_are_frozen_keep_their_bits(make_trainer, tiny_model):
    model = tiny_model()
    model.bert.encoder.layer[0].requires_grad_(False)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad} | {
        n for n, _ in model.named_parameters() if n.startswith("heads.para")
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adam = {"optim": "adamw_torch", "weight_decay": 0.5, "learning_rate": 1e-2, "max_grad_norm": 1.0}
    make_trainer(model, aggregator="pcgrad", train_tasks=["sst", "sts"], **adam).train()
    unmoved = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert frozen == unmoved and len(frozen) > 2


def test_rows_take_a_number_per_task_and_shared_parameter(make_trainer, tiny_model):
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    trainer = make_trainer(model, aggregator="pcgrad")
    trainer.train()
    rows = [gradient for row in trainer.step.gradients.rows.values() for gradient in row.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 4 for tensor in rows}
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    heads = sum(size for name, size in trained.items() if name.startswith("heads."))
    assert sum(storages.values()) == 3 * (sum(trained.values()) - heads) + heads


class Saved:
    """Stands for a tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def graphs_alive(train, model):
    """At each forward pass of the model, how many tensors earlier ones still keep."""
    alive, found = weakref.WeakSet(), []

    def pack(tensor):
        kept = Saved(tensor)
        alive.add(kept)
        return kept

    handle = model.register_forward_pre_hook(lambda *_: found.append((gc.collect(), len(alive))[1]))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        train()
    handle.remove()
    return found


def test_no_two_graphs_are_alive_at_once(make_trainer, tiny_model):
    model = tiny_model()
    trainer = make_trainer(model, aggregator="pcgrad", gradient_accumulation_steps=2)
    batch = next(iter(trainer.get_train_dataloader()))
    assert graphs_alive(trainer.train, model) == [0] * 12

    def naive():  # all losses before the first backward pass, as in Pytorch-PCGrad
        losses = [model(**given).loss for given in batch.values()]
        for loss in losses:
            loss.backward(retain_graph=True)

    assert graphs_alive(naive, model)[1:] > [0, 0]


def test_orders_are_drawn_from_no_global_generator(make_trainer, tiny_model):
    states = []
    for name in ("sum", "pcgrad", "gradvac"):
        torch.manual_seed(5)
        random.seed(5)
        make_trainer(tiny_model(hidden_dropout_prob=0.1), aggregator=name).train()
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1] == states[2]


def test_every_registered_name_trains(make_trainer):
    for name in ("pcgrad", "gradvac", "unconditional"):
        trainer = make_trainer(aggregator=name, bf16=True, max_grad_norm=1.0, gradient_accumulation_steps=2)
        trainer.train()
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert make_aggregator("sum").needs_rows is False


@pytest.mark.parametrize(
    "given", [{"aggregator": "sum"}, {"aggregator": "pcgrad", "gradient_smoothing": 0.5}], ids=str
)
def test_shards_are_for_rows_as_they_are(tmp_path, given):
    with pytest.raises(MinBertError, match="`gradient_reduction: sharded` is for an aggregator with rows"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, gradient_reduction="sharded", **given)
