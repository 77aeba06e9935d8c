"""Weights that follow the losses: their values by hand, and what becomes of them in training."""

import logging
import math
from typing import get_args

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_minbert import MinBertError, MultiTaskTrainer, get_tasks
from hf_minbert.settings.training import FollowingWeights, TaskWeights
from hf_minbert.training.args import MultiTaskTrainingArguments
from hf_minbert.training.balancing import BALANCING, DWA, ImtlL, Uncertainty
from hf_minbert.training.checkpoints import BALANCING as FILE
from hf_minbert.training.checkpoints import incomplete

TASKS = get_tasks(["sst", "para", "sts"])
CPU = torch.device("cpu")
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 12}  # epochs have five steps


def step(balancing, losses, times=1, scale=1.0):
    """A step whose rounds all have these losses."""
    for _ in range(times):
        balancing.see({task.name: torch.tensor(loss) for task, loss in zip(TASKS, losses, strict=True)})
    balancing.end_step(scale)


def end_epoch(balancing, epoch):
    balancing.on_epoch_end(None, TrainerState(epoch=epoch), TrainerControl())


def values(balancing):
    return balancing.weights().tolist()


# ---- The methods


def test_a_recipe_may_name_each_method():
    assert get_args(FollowingWeights) == tuple(BALANCING)
    assert get_args(TaskWeights) == ("inverse_batch_size", *BALANCING)


@pytest.mark.parametrize(("method", "expected"), [(Uncertainty, 0.5), (ImtlL, 1.0)])
def test_with_constant_losses_learned_weights_settle_where_all_weighted_losses_are_one_number(method, expected):
    """The zero of the derivative: w L = 1/2 of `c L exp(-s) + s / 2`, and w L = 1 of `L exp(s) - s`."""
    balancing, losses = method(TASKS, CPU), [0.25, 1.0, 4.0]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    balancing.add_to(optimizer)
    optimizer.param_groups[1]["lr"] = 0.2
    for _ in range(300):
        step(balancing, losses, times=2)
        optimizer.step()
    assert [w * loss for w, loss in zip(values(balancing), losses, strict=True)] == pytest.approx([expected] * 3)


def test_learned_weights_begin_as_the_papers_have_them():
    assert values(Uncertainty(TASKS, CPU)) == [1.0, 1.0, 0.5]  # two likelihoods of labels, and one of a score
    assert values(ImtlL(TASKS, CPU)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        (Uncertainty, lambda s, losses: torch.tensor([1.0, 1.0, 0.5]) * losses / s.exp() + s.exp().sqrt().log()),
        (ImtlL, lambda s, losses: s.exp() * losses - s),
    ],
)
def test_the_gradient_is_that_of_the_equation(method, objective):
    balancing = method(TASKS, CPU)
    start = torch.tensor([0.3, -0.7, 1.1])
    balancing.load_state_dict({"scales": start})
    losses, other = torch.tensor([0.5, 2.0, 3.0]), torch.tensor([1.5, 1.0, 0.0])
    leaf = start.clone().requires_grad_()
    weights = torch.func.jacrev(lambda both: objective(start, both))(losses).diagonal()
    torch.testing.assert_close(balancing.weights(), weights)  # they are the objective's slopes by the losses
    objective(leaf, (losses + other) / 2).sum().backward()
    for each in (losses, other):
        balancing.see({task.name: loss for task, loss in zip(TASKS, each, strict=True)})
    balancing.end_step(scale=8.0)
    torch.testing.assert_close(balancing.scales.grad, 8 * leaf.grad)


def test_dwa_by_hand():
    """Of the means 1, 2, 4 and then 1/2, 2, 6 the rates are 1/2, 1, 3/2."""
    balancing = DWA(TASKS, CPU, temperature=0.5)
    for epoch, means in enumerate(([1.0, 2.0, 4.0], [0.5, 2.0, 6.0]), 1):
        assert values(balancing) == [1.0, 1.0, 1.0]
        step(balancing, [mean + 0.5 for mean in means])
        step(balancing, [mean - 0.25 for mean in means], times=2)  # rounds count alike, whichever step has them
        end_epoch(balancing, epoch - 0.5)  # training that ends within an epoch may go on there
        assert values(balancing) == [1.0, 1.0, 1.0]
        end_epoch(balancing, epoch)
    powers = [math.exp(rate / 0.5) for rate in (0.5, 1.0, 1.5)]
    assert values(balancing) == pytest.approx([3 * power / sum(powers) for power in powers])
    assert sum(values(balancing)) == pytest.approx(3)
    step(balancing, [0.5, 2.0, 6.0])
    end_epoch(balancing, 3)
    assert values(balancing) == pytest.approx([1.0, 1.0, 1.0])  # no loss has moved


def test_dwa_survives_an_epoch_without_a_loss():
    balancing = DWA(TASKS, CPU)
    for epoch in (1, 2):
        step(balancing, [0.0, 1.0, 2.0])
        end_epoch(balancing, epoch)
    assert sum(values(balancing)) == pytest.approx(3)


# ---- In training


@pytest.mark.parametrize("method", BALANCING)
def test_a_resumed_run_ends_with_the_same_bits(make_trainer, tiny_model, tmp_path, method):
    """From a checkpoint in the third epoch, with the optimizer's moments of what is learned."""
    given = {"task_weights": method, "optim": "adamw_torch", "learning_rate": 1e-3, **SAVING}
    whole = make_trainer(**given)
    whole.train()
    weights = whole.balancing.by_task()
    assert len({weight.item() for weight in weights.values()}) == 3
    torch.manual_seed(99)
    resumed = make_trainer(tiny_model(seed=3), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert {name: torch.equal(weight, weights[name]) for name, weight in resumed.balancing.by_task().items()} == (
        dict.fromkeys(weights, True)
    )


def test_without_their_state_weights_would_end_elsewhere(make_trainer, tmp_path):
    given = {"task_weights": "imtl_l", "task_weights_options": {"learning_rate": 0.5}, **SAVING}
    whole = make_trainer(**given)
    whole.train()
    path = tmp_path / "run" / "checkpoint-8" / FILE
    state = torch.load(path)
    torch.save({**state, "scales": torch.zeros(3)}, path)
    resumed = make_trainer(**given)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert not torch.equal(whole.balancing.scales, resumed.balancing.scales)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("dwa", "imtl_l", "with `task_weights: dwa`. Found `task_weights: imtl_l`."),
        (None, "dwa", "with `task_weights` that do not follow the losses. Found `task_weights: dwa`."),
        ("dwa", None, "with `task_weights: dwa`. Found `task_weights` that do not follow the losses."),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused(make_trainer, tmp_path, before, after, said):
    given = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(task_weights=before, **given).train()
    with pytest.raises(MinBertError, match=said):
        make_trainer(task_weights=after, **given).train(resume_from_checkpoint=True)
    if before:
        path = tmp_path / "run" / "checkpoint-1" / FILE
        path.write_bytes(path.read_bytes()[:-1])
        assert incomplete(path.parent) == f"{FILE} ends too early"


def test_a_step_is_that_of_the_same_numbers(make_trainer, tiny_model, aggregator):
    """Uncertainty begins with the weights 1, 1 and 1/2, and changes none before its first step."""
    given = {"max_steps": 1, "gradient_accumulation_steps": 2, "aggregator": aggregator, "learning_rate": 0.1}
    one = make_trainer(task_weights="uncertainty", **given)
    other = make_trainer(task_weights={"sts": 0.5}, **given)
    for trainer in (one, other):
        trainer.train()
    for (name, found), expected in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    moved = tiny_model().heads.state_dict()["sts.linear.weight"]
    assert not torch.equal(one.model.heads.state_dict()["sts.linear.weight"], moved)
    logs = [next(entry for entry in trainer.state.log_history if "loss_sst" in entry) for trainer in (one, other)]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"])
    assert [logs[0][f"weight_{task}"] for task in ("sst", "para", "sts")] == [1.0, 1.0, 0.5]


def test_what_is_learned_has_a_group_of_its_own_and_moves_by_the_own_losses(make_trainer, tiny_model):
    """With a regularizer, whose part the log's `loss_sst` has and the weights' gradient has not."""
    given = {"weight_decay": 0.1, "max_steps": 1, "max_grad_norm": 1e-3, "regularizer": "r_drop", "r_drop_weight": 5.0}
    options = {"learning_rate": 0.5}
    model = tiny_model(hidden_dropout_prob=0.5)
    trainer = make_trainer(model, task_weights="imtl_l", task_weights_options=options, **given)
    own = []
    original = trainer.task_loss

    def task_loss(*given):
        outputs = original(*given)
        own.append((outputs["own_loss"].item(), outputs["loss"].item()))
        return outputs

    trainer.step = trainer._make_step(None)
    trainer._make_step = lambda checkpoint: trainer.step
    trainer.step.task_loss = task_loss
    output = trainer.train()
    group = trainer.optimizer.param_groups[-1]
    assert group["params"] == [trainer.balancing.scales] and (group["lr"], group["weight_decay"]) == (0.5, 0.0)
    assert all(abs(whole - alone) > 0.01 for alone, whole in own)
    expected = [math.exp(-0.5 * (alone - 1)) for alone, _ in own]  # one step of SGD, not clipped
    assert values(trainer.balancing) == pytest.approx(expected)
    assert [output.metrics[f"train_weight_{task}"] for task in ("sst", "para", "sts")] == pytest.approx(expected)
    assert any(entry.get("learning_rate_task_weights") == 0.5 for entry in trainer.state.log_history)


def test_dwa_changes_weights_with_the_third_epoch(make_trainer):
    trainer = make_trainer(
        task_weights="dwa", task_weights_options={"temperature": 0.1}, learning_rate=0.05, max_steps=12
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "weight_sst" in entry]
    by_step = [[entry[f"weight_{task}"] for task in ("sst", "para", "sts")] for entry in logs]
    assert by_step[:10] == [[1.0, 1.0, 1.0]] * 10 and by_step[10] == by_step[11] != by_step[0]
    means = [
        [sum(entry[f"loss_{task}"] for entry in epoch) / 5 for task in ("sst", "para", "sts")]
        for epoch in (logs[:5], logs[5:10])
    ]
    powers = [math.exp(10 * last / first) for first, last in zip(*means, strict=True)]
    assert by_step[10] == pytest.approx([3 * power / sum(powers) for power in powers], rel=1e-3)


def test_a_recording_would_read_the_weights_and_not_be_made_anew(make_trainer):
    """A CUDA graph is fixed to the factor, a number, and to the shapes of its inputs, which each replay reads."""
    trainer = make_trainer(task_weights="imtl_l", task_weights_options={"learning_rate": 0.5}, max_steps=4)
    trainer.step = trainer._make_step(None)
    trainer._make_step = lambda checkpoint: trainer.step
    factors, weights = set(), []

    def graphs(task, inputs, factor):
        factors.add(factor)
        weights.append(inputs["weight"].clone())
        outputs, loss = trainer.step._forward(inputs, factor)
        trainer.step.gradients.add(task, loss)
        return outputs

    trainer.step.graphs = graphs
    trainer.train()
    assert factors == {1.0} and [weight.shape for weight in weights] == [()] * 12
    assert len({weight.item() for weight in weights}) == 1 + 3 * 3  # all begin with 1


# ---- Refusals and warnings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"task_weights": "dwa", "train_tasks": ["sst"]},
            "`task_weights: dwa` balances tasks, and needs at least two in training. Found 'sst' alone.",
        ),
        (
            {"task_weights": "dwa", "task_weights_options": {"learning_rate": 0.1}},
            "Unknown option of task_weights 'dwa': 'learning_rate'",
        ),
        (
            {"task_weights": "dwa", "task_weights_options": {"temperature": 0}},
            "`task_weights_options.temperature` must be a number above 0. Found 0.",
        ),
        (
            {"task_weights": "imtl_l", "task_weights_options": {"learning_rate": "a"}},
            "`task_weights_options.learning_rate` must be a number above 0. Found 'a'.",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path, given, said):
    args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, **given)
    with pytest.raises(MinBertError, match=said):
        args.check_tasks({task.name: task for task in TASKS})


def test_learned_weights_need_an_optimizer_that_is_made_for_them(tiny_model, tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("uncertainty", "imtl_l"):
        args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, task_weights=method)
        with pytest.raises(MinBertError, match="learned `task_weights` are for an optimizer that `args.optim`"):
            MultiTaskTrainer(model, args, optimizers=(optimizer, None))
    args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, task_weights="dwa")
    assert MultiTaskTrainer(model, args, optimizers=(optimizer, None)).optimizer is optimizer


def test_a_task_loss_without_the_own_loss_is_refused(make_trainer, monkeypatch):
    trainer = make_trainer(task_weights="dwa")
    original = trainer.task_loss
    monkeypatch.setattr(trainer, "task_loss", lambda *given: {"loss": original(*given)["loss"]})
    with pytest.raises(MinBertError, match="need `own_loss`, .* Found loss. Add it"):
        trainer.train()


def test_what_has_no_effect_is_said(make_trainer, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(task_weights="dwa", max_steps=-1, num_train_epochs=2)
        make_trainer(task_weights_options={"temperature": 1.0})
        make_trainer(task_weights="dwa", max_steps=-1, num_train_epochs=3, task_weights_options={"temperature": 1.0})
    assert [message for message in caplog.messages if "task_weights" in message] == [
        "`task_weights: dwa` has no effect: its weights are 1 in the first two epochs.",
        "`task_weights_options` has no effect with `task_weights` as they are. It is for weights that follow the "
        "losses.",
    ]
