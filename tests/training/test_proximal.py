"""The proximal term and its teacher, and weight decay towards the pretrained weights."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import MinBertError, MinBertForMultiTask
from hf_minbert.training.checkpoints import TEACHER, newest_complete_checkpoint
from hf_minbert.training.optimizers import PretrainedDecay
from hf_minbert.training.terms.base import NoiseKey, RandomState, TaskLoss
from hf_minbert.training.terms.proximal import ProximalPoint
from tests.training.test_models import with_lora
from tests.training.test_regularizers import DROPOUT, assert_equal, batch, logged, trained, weights_of  # noqa: F401

DEV = {"sst": 11, "para": 7, "sts": 9}


KEY = NoiseKey(seed=0, step=0, first_row=0)  # this term has no noise


# ---- the term


def test_it_starts_at_zero_and_its_teacher_is_a_copy(tiny_model, batch):  # noqa: F811
    model, point = tiny_model().train(), ProximalPoint()
    point.start(model)
    for task in ("sst", "para", "sts"):
        rows = batch(task)
        assert point(model, rows, KEY).logged["proximal"] == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05
    moved = point(model, rows, KEY).logged["proximal"]
    assert moved > 0
    assert torch.equal(point.teacher["bert.pooler.dense.bias"], torch.zeros(32))
    moved.backward()
    assert all(p.grad is not None for p in model.heads.sts.parameters())
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in point.teacher.values())


def test_the_term_is_the_divergence_from_the_teacher_without_dropout(tiny_model, batch):  # noqa: F811
    model, rows = tiny_model(**DROPOUT).train(), batch("para")
    point = ProximalPoint()
    point.start(model)
    model.heads.eval()  # a mode that the term must not change
    outputs = model(**rows)
    state = RandomState.now(torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = point(model, rows, KEY, lambda *_: TaskLoss(outputs["loss"], outputs)).logged["proximal"]
    assert torch.equal(torch.get_rng_state(), state.cpu)
    assert_equal(dict(model.named_parameters()), before)
    assert model.training and model.bert.training and not model.heads.training
    expected = model.heads.para.divergence(outputs["logits"], model.eval()(**rows)["logits"]).mean()
    assert found.item() == pytest.approx(expected.item()) and expected > 0


def test_a_callers_autocast_keeps_both_weights_apart(tiny_model, batch):  # noqa: F811
    model, rows = tiny_model().train(), batch("para")
    point = ProximalPoint()
    point.start(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    whole = point(model, rows, KEY).logged["proximal"].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clean = model(**rows)["logits"]
        assert point(model, rows, KEY).logged["proximal"].item() == pytest.approx(whole, rel=0.2) and whole > 1e-3
        assert torch.equal(model(**rows)["logits"], clean)  # the cache has nothing of the teacher's either


# ---- the teacher


def test_the_average_has_its_closed_form_and_changes_its_momentum_after_a_tenth():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    point = ProximalPoint(momentum=(0.9, 0.99))
    point.start(model)
    expected = 2.0
    for step in range(1, 41):
        torch.nn.init.constant_(model.weight, float(step))
        point.move(step, 40)
        beta = 0.9 if step <= 4 else 0.99
        expected = beta * expected + (1 - beta) * step
        assert point.teacher["weight"].item() == pytest.approx(expected, rel=1e-5)
    still = ProximalPoint(momentum=(0.5, 0.5))
    torch.nn.init.constant_(model.weight, 2.0)
    still.start(model)
    torch.nn.init.constant_(model.weight, 10.0)
    for step in range(1, 6):
        still.move(step, 100)
    assert still.teacher["weight"].item() == pytest.approx(10 - 8 * 0.5**5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_average_moves_by_a_thousandth_whatever_the_weights_dtype(dtype):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(model.weight, 1.0)
    point = ProximalPoint(momentum=(0.999, 0.999))
    point.start(model)
    torch.nn.init.constant_(model.weight, 2.0)
    for step in range(1, 2001):
        point.move(step, 2000)
    assert point.teacher["weight"].item() == pytest.approx(2 - 0.999**2000, abs=1e-4)  # 1.865
    with point.in_place():
        assert model.weight.dtype == dtype and model.weight.item() == pytest.approx(1.865, abs=0.004)
    assert model.weight.item() == 2


def test_the_previous_iterate_is_the_weights_of_every_second_step(make_trainer):
    trainer = make_trainer(proximal="previous", proximal_steps=2, max_steps=5)
    seen, move = [weights_of(trainer)], trainer.proximal.on_step_end

    def on_step_end(args, state, control, **kwargs):
        move(args, state, control, **kwargs)
        seen.append(weights_of(trainer))
        assert_equal(trainer.proximal.teacher, seen[state.global_step // 2 * 2])

    trainer.proximal.on_step_end = on_step_end
    trainer.train()
    terms = logged(trainer, "proximal_sst")
    assert [term > 0 for term in terms] == [False, True, False, True, False]


def test_one_step_from_the_previous_iterate_is_refused(make_trainer):
    with pytest.raises(MinBertError, match="`proximal: previous` needs `proximal_steps` of at least 2"):
        make_trainer(proximal="previous")


def test_the_average_moves_every_few_steps(make_trainer):
    trainer = make_trainer(proximal="momentum", proximal_steps=3, proximal_momentum=[0.5, 0.25], max_steps=7)
    start = weights_of(trainer)
    seen = []
    trainer.proximal.move = lambda step, of: seen.append((step, of))
    trainer.train()
    assert seen == [(3, 7), (6, 7)]
    assert_equal(trainer.proximal.teacher, start)


def test_only_what_is_trained_is_copied(make_trainer, tiny_model):
    trainer = make_trainer(with_lora(tiny_model()), proximal="momentum", max_steps=3, learning_rate=0.1)
    trainer.train()
    assert set(trainer.proximal.teacher) == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all(name.count("lora") or name.count("heads") for name in trainer.proximal.teacher)
    assert logged(trainer, "proximal_sst")[-1] > 0


def test_the_term_is_added_with_its_weight_and_beside_a_regularizer(make_trainer, tiny_model, aggregator):
    given = {"max_steps": 3, "aggregator": aggregator, "learning_rate": 0.05}
    plain = trained(make_trainer(tiny_model(**DROPOUT), **given))
    smart = {"regularizer": "smart", "smart_epsilon": 0.05}
    both = make_trainer(tiny_model(**DROPOUT), proximal="momentum", proximal_weight=5.0, **smart, **given)
    found = trained(both)
    assert any(not torch.equal(found[name], plain[name]) for name in plain)
    last = both.state.log_history[-2]
    assert last["smart_sts"] > 0 and last["loss_sts"] > last["smart_sts"] + 5 * last["proximal_sts"] > 0


def test_a_strong_term_keeps_outputs_where_they_were(make_trainer, tiny_model, toy_rows):
    def moved(**given):
        trainer = make_trainer(tiny_model(["sst"]), train={"sst": 20}, max_steps=40, learning_rate=1e-3, **given)
        rows = toy_rows(sst=8)["sst"]
        before = trainer.predict(rows, task="sst").predictions
        trainer.train()
        return abs(trainer.predict(rows, task="sst").predictions - before).mean()

    assert moved(proximal="momentum", proximal_weight=10.0) < 0.6 * moved()


# ---- checkpoints


def test_a_resumed_run_ends_with_the_same_bits(make_trainer, tiny_model, tmp_path):
    given = {
        "proximal": "momentum", "proximal_momentum": [0.5, 0.9], "proximal_weight": 3.0, "optim": "adamw_torch",
        "regularizer": "smart", "smart_epsilon": 0.05, "max_steps": 6, "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    whole = make_trainer(tiny_model(**DROPOUT), **given)
    expected = trained(whole)
    folder = tmp_path / "run"
    assert (folder / "checkpoint-4" / TEACHER).is_file()
    shutil.rmtree(folder / "checkpoint-6")
    torch.manual_seed(99)
    resumed = make_trainer(tiny_model(seed=3, **DROPOUT), **given)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights_of(resumed), expected)
    assert_equal(resumed.proximal.teacher, whole.proximal.teacher)
    assert logged(resumed, "proximal_sst")[-2:] == logged(whole, "proximal_sst")[-2:]


def test_a_checkpoint_without_a_whole_teacher(make_trainer, tmp_path):
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(proximal="momentum", **given).train()
    newest = tmp_path / "run" / "checkpoint-2"
    (newest / TEACHER).write_bytes((newest / TEACHER).read_bytes()[:-8])
    assert newest_complete_checkpoint(tmp_path / "run").name == "checkpoint-1"
    shutil.rmtree(tmp_path / "run")
    make_trainer(**given).train()
    with pytest.raises(MinBertError, match=f"has no {TEACHER}"):
        make_trainer(proximal="momentum", **given).train(resume_from_checkpoint=True)


def test_the_teacher_stays_out_of_the_saved_model(make_trainer, tmp_path):
    trainer = make_trainer(proximal="momentum", max_steps=3, learning_rate=0.05)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / TEACHER).exists()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_equal(saved, weights_of(trainer))
    with trainer.proximal.in_place():
        trainer.save_model(tmp_path / "averaged")
    averaged = dict(MinBertForMultiTask.from_pretrained(tmp_path / "averaged").named_parameters())
    assert_equal(averaged, trainer.proximal.teacher)
    assert not torch.equal(averaged["heads.sts.linear.bias"], saved["heads.sts.linear.bias"])


def test_evaluations_score_the_averaged_weights_too(make_trainer, scores):
    given = {"dev": DEV, "max_steps": 3, "learning_rate": 0.05, "proximal": "momentum"}
    trainer = make_trainer(**given, proximal_evaluate=True, eval_strategy="steps", eval_steps=3)
    after = trained(trainer)
    (entry,) = [entry for entry in trainer.state.log_history if "eval_overall" in entry]
    found = scores(trainer.evaluate())
    assert_equal(weights_of(trainer), after)
    own = {name: value for name, value in found.items() if not name.startswith("eval_averaged")}
    averaged = {name.replace("averaged_", ""): value for name, value in found.items() if name not in own}
    assert own.keys() == averaged.keys() and "eval_averaged_overall" in entry
    assert set(trainer.args.metrics_of(trainer.tasks.values())) == set(found)
    trainer.args.proximal_evaluate = False
    assert scores(trainer.evaluate()) == own
    with trainer.proximal.in_place():
        assert scores(trainer.evaluate()) == averaged
    assert averaged["eval_sts_loss"] != own["eval_sts_loss"]


def test_there_is_nothing_to_average_without_a_teacher(make_trainer):
    with pytest.raises(MinBertError, match="`proximal_evaluate: true` needs an earlier state of the weights"):
        make_trainer(proximal_evaluate=True)
    with pytest.raises(MinBertError, match="`proximal: momentum` with `proximal_weight: 0` adds no term"):
        make_trainer(proximal="momentum", proximal_weight=0)
    with pytest.raises(MinBertError, match="`proximal_evaluate: true` needs evaluations. Set `eval_strategy`"):
        make_trainer(dev=DEV, proximal="momentum", proximal_evaluate=True)
    untrained = make_trainer(dev=DEV, proximal="momentum", proximal_evaluate=True, eval_strategy="epoch")
    assert not [name for name in untrained.evaluate() if "averaged" in name]


def test_the_best_model_may_be_that_of_the_averaged_weights(make_trainer):
    given = {
        "dev": DEV, "proximal": "momentum", "proximal_momentum": [0.5, 0.5], "max_steps": 4, "learning_rate": 0.5,
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_averaged_sts_loss",
    }  # fmt: skip
    with pytest.raises(MinBertError, match="eval_averaged_sts_loss` is for averaged weights. Set `proximal_eval"):
        make_trainer(**given)
    trainer = make_trainer(**given, proximal_evaluate=True)
    trainer.train()
    losses = logged(trainer, "eval_averaged_sts_loss")
    best = losses.index(min(losses))
    assert trainer.state.best_global_step == best + 1 < 4
    assert trainer.evaluate()["eval_averaged_sts_loss"] == pytest.approx(losses[best])
    with pytest.raises(MinBertError, match="Unknown metric 'averaged_stt_loss'"):
        make_trainer(**{**given, "metric_for_best_model": "averaged_stt_loss"}, proximal_evaluate=True)


# ---- an average of the weights alone


AVERAGE = {"proximal": "momentum", "proximal_weight": 0, "proximal_momentum": [0.5, 0.75]}


def test_an_average_with_weight_0_changes_nothing_of_training_and_costs_no_pass(make_trainer, tiny_model, monkeypatch):
    given = {"max_steps": 12, "learning_rate": 0.05, "regularizer": "r_drop"}
    plain = trained(make_trainer(tiny_model(**DROPOUT), **given))
    trainer = make_trainer(tiny_model(**DROPOUT), **given, **AVERAGE, proximal_evaluate="instead")
    trainer.args.proximal_evaluate = False  # else the average becomes the model
    monkeypatch.setattr(type(trainer.proximal), "in_place", None)  # which a pass of the teacher would need
    assert trainer.proximal.of_outputs
    assert_equal(trained(trainer), plain)
    assert not logged(trainer, "proximal_sst")


def test_an_average_that_is_scored_instead_chooses_the_model_and_becomes_it(make_trainer, tmp_path):
    given = {
        **AVERAGE, "dev": DEV, "max_steps": 5, "learning_rate": 0.5, "eval_strategy": "steps", "eval_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "eval_sts_loss", "packing": True,
    }  # fmt: skip
    both = make_trainer(**given, proximal_evaluate=True)
    raw = trained(both)
    trainer = make_trainer(**given, proximal_evaluate="instead", load_best_model_at_end=True)
    trainer.train()
    losses = logged(both, "eval_averaged_sts_loss")
    assert logged(trainer, "eval_sts_loss") == losses and losses != logged(both, "eval_sts_loss")
    assert trainer.state.best_global_step == losses.index(min(losses)) + 1
    assert_equal(weights_of(trainer), load_file(trainer.state.best_model_checkpoint + f"/{TEACHER}"))
    assert not torch.equal(weights_of(trainer)["heads.sts.linear.bias"], raw["heads.sts.linear.bias"])
    assert trainer.evaluate()["eval_sts_loss"] == pytest.approx(min(losses))
    with pytest.raises(MinBertError, match="`save_only_model: true` leaves out"):
        make_trainer(**given, proximal_evaluate="instead", load_best_model_at_end=True, save_only_model=True)


def test_an_average_is_resumed_to_the_same_bits(make_trainer, tiny_model, tmp_path):
    given = {**AVERAGE, "proximal_evaluate": "instead", "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    expected = trained(make_trainer(tiny_model(**DROPOUT), **given))
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    resumed = make_trainer(tiny_model(seed=3, **DROPOUT), **given)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights_of(resumed), expected)


@pytest.mark.parametrize("momentum", [[0.9], [0.9, 1.1], [-0.1, 0.5], 0.9, None, ["a", "b"], {0.9: 1, 0.99: 2}])
def test_a_momentum_is_two_shares(make_trainer, momentum):
    with pytest.raises(MinBertError, match="`proximal_momentum` must be two numbers from 0 to 1"):
        make_trainer(proximal="momentum", proximal_momentum=momentum)


@pytest.mark.parametrize("steps", [0, 1.5, 2.5, 2.0, True, "2", None])
def test_steps_between_moves_are_counted(make_trainer, steps):
    with pytest.raises(MinBertError, match="`proximal_steps` must be a whole number from 1. Found"):
        make_trainer(proximal="momentum", proximal_steps=steps)


@pytest.mark.parametrize(("key", "given"), [("proximal_weight", {"proximal": "momentum"}), ("pretrained_decay", {})])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "1", None])
def test_a_weight_is_a_number_from_0(make_trainer, key, given, value):
    with pytest.raises(MinBertError, match=f"`{key}` must be a number from 0. Found"):
        make_trainer(**given, **{key: value})


# ---- the pretrained weights


def test_weights_are_pulled_to_where_they_began_by_the_rate_of_their_group():
    weight, other = (torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [other], "lr": 0.25}])
    decay = PretrainedDecay(0.2, [weight, other])
    with torch.no_grad():
        weight += torch.tensor([10.0, -10.0])
        other += 10.0
    decay.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    torch.testing.assert_close(weight.data, torch.tensor([11.0 - 1.0, -8.0 + 1.0]))
    torch.testing.assert_close(other.data, torch.tensor([10.5, 11.5]))


def test_the_encoder_stays_near_and_the_heads_are_free(make_trainer):
    given = {"max_steps": 20, "learning_rate": 5e-3}

    def distances(trainer):
        before = weights_of(trainer)
        after = trained(trainer)
        sums = {"bert": 0.0, "heads": 0.0}
        for name, value in after.items():
            sums[name.split(".")[0]] += (value - before[name]).square().sum().item()
        return sums

    free, near, still = (distances(make_trainer(**given, pretrained_decay=decay)) for decay in (0.0, 20.0, 100.0))
    assert free["bert"] > 1.5 * near["bert"] > 1.5 * still["bert"] > 0
    assert near["heads"] > 0.3 * free["heads"]


def test_a_step_goes_no_further_than_the_whole_way_back(make_trainer):
    said = "`pretrained_decay: 300` with `learning_rate: 0.005` takes a step of 1.5 times the way.*at most 200."
    with pytest.raises(MinBertError, match=said):
        make_trainer(pretrained_decay=300.0, learning_rate=5e-3)
    trainer = make_trainer(pretrained_decay=200.0, learning_rate=5e-3)
    before, after = weights_of(trainer), trained(trainer)
    name = "bert.encoder.layer.0.attention.output.dense.weight"
    moved = (after[name] - before[name]).abs().max()
    assert 0 < moved < 0.01  # all the way back, and then one step of the gradient


def test_it_is_not_for_a_frozen_encoder(make_trainer):
    with pytest.raises(MinBertError, match="`pretrained_decay` is of the encoder"):
        make_trainer(freeze="encoder", pretrained_decay=0.1)
