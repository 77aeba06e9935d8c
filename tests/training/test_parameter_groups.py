"""Learning rates and weight decays of parts of a model: by hand under SGD, along a schedule, and in the log."""

import logging

import pytest
import torch
from transformers import TrainerCallback

from hf_minbert import MinBertError

RATES = {"learning_rate": 1e-2, "learning_rates": {"encoder": 1e-3, "heads": 2e-2, "sst": 4e-2}}
#: What `RATES` mean for a model whose sts has a private top layer.
GIVEN = {
    "bert.encoder.private.sts.": 1e-3, "bert.encoder.private.para.": 1e-3, "bert.": 1e-3, "heads.sst.": 4e-2,
    "heads.para.": 2e-2, "heads.sts.": 2e-2,
}  # fmt: skip
SPARED = ("bias", "LayerNorm.weight")


def first(prefixes, name, otherwise):
    """The value of the first prefix that fits."""
    return next((value for prefix, value in prefixes.items() if name.startswith(prefix)), otherwise)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Gradients(TrainerCallback):
    """What the optimizer gets at the last step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_step(trainer, rates, decays, otherwise=0.0):
    """That a step of SGD moves each weight by its rate times its gradient and its decay times itself."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    before = weights_of(trainer.model)
    trainer.train()
    assert gradients.found.keys() == before.keys()
    for name, after in weights_of(trainer.model).items():
        decay = 0.0 if name.endswith(SPARED) else first(decays, name, otherwise)
        step = rates(name) * (gradients.found[name] + decay * before[name])
        torch.testing.assert_close(after, before[name] - step, rtol=1e-6, atol=1e-7, msg=name)
        assert step.any() or name.endswith("key.bias"), name


def test_each_group_steps_at_its_own_rate(make_trainer, aggregator):
    trainer = make_trainer(max_steps=1, aggregator=aggregator, **RATES)
    check_step(trainer, lambda name: first(GIVEN, name, None), {})


def test_a_group_that_is_not_named_keeps_the_common_rate(make_trainer):
    trainer = make_trainer(max_steps=1, learning_rate=1e-2, learning_rates={"sts": 3e-2})
    check_step(trainer, lambda name: 3e-2 if name.startswith("heads.sts.") else 1e-2, {})


@pytest.mark.parametrize(
    ("private", "own"),
    [({"private_layers": 1}, "bert.encoder.private.sts."), ({"private_encoders": True}, "private.sts.")],
)
def test_private_layers_go_with_their_task(make_trainer, tiny_model, private, own):
    """One task's are the encoder itself, that of its owner: what is a copy is the others'."""
    model = tiny_model(**private)
    assert any(name.startswith(own) for name, _ in model.named_parameters())
    trainer = make_trainer(model, learning_rates={"encoder": 1e-3, "sts": 3e-3}, learning_rate=2e-3)
    trainer.create_optimizer()
    expected = {own: 3e-3, "heads.sts.": 3e-3, "heads.": 2e-3, "": 1e-3}
    assert rates_of(trainer) == {name: first(expected, name, None) for name, _ in model.named_parameters()}


def rates_of(trainer):
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    return {names[p]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}


def test_decays_by_group_spare_biases_and_layer_norms(make_trainer):
    given = {"weight_decay": 0.1, "weight_decays": {"encoder": 0.0, "sts": 0.5}}
    trainer = make_trainer(max_steps=1, learning_rate=1e-2, **given)
    check_step(trainer, lambda name: 1e-2, {"bert.": 0.0, "heads.sts.": 0.5}, otherwise=0.1)


def test_a_decay_of_one_group_where_the_common_one_is_zero(make_trainer):
    trainer = make_trainer(max_steps=1, learning_rate=1e-2, weight_decays={"heads": 0.5})
    check_step(trainer, lambda name: 1e-2, {"heads.": 0.5})


def test_rates_fall_layer_by_layer(make_trainer):
    """From the top layer, at the encoder's rate, to the embeddings; what is above the layers is at that rate too."""
    trainer = make_trainer(max_steps=1, layer_decay=0.5, **RATES)
    expected = {
        "bert.embeddings.": 1e-3 / 4, "bert.encoder.layer.0.": 1e-3 / 2, "bert.encoder.layer.1.": 1e-3,
        "bert.pooler.": 1e-3, "heads.sst.": 4e-2, "heads.": 2e-2,
    }  # fmt: skip
    check_step(trainer, lambda name: first(expected, name, None), {})


def test_private_layers_are_as_low_as_their_place_in_the_stack(make_trainer, tiny_model):
    trainer = make_trainer(tiny_model(private_layers=2), layer_decay=0.5, learning_rate=1e-2)
    trainer.create_optimizer()
    rates = rates_of(trainer)
    by_layer = [{rate for name, rate in rates.items() if f"private.sts.{n}." in name} for n in (0, 1)]
    assert by_layer == [{5e-3}, {1e-2}]


@pytest.mark.parametrize("optim", ["adamw_torch", "course_adamw"])
def test_a_schedule_scales_all_rates_alike(make_trainer, optim):
    seen = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            seen.append([group["lr"] for group in optimizer.param_groups])

    given = {"optim": optim, "lr_scheduler_type": "linear", "max_steps": 4, "layer_decay": 0.5, **RATES}
    trainer = make_trainer(**given)
    trainer.add_callback(Rates())
    trainer.train()
    assert sorted({*seen[0]}) == pytest.approx([1e-3 / 4, 1e-3 / 2, 1e-3, 2e-2, 4e-2])
    for step, rates in enumerate(seen):
        assert rates == pytest.approx([rate * (1 - step / 4) for rate in seen[0]])


def test_adamw_moves_each_group_by_its_rate(make_trainer):
    """The first step of Adam moves a weight by its rate, whatever the gradient, where that is well above epsilon."""
    trainer = make_trainer(max_steps=1, optim="adamw_torch", **RATES)
    before = weights_of(trainer.model)
    trainer.train()
    for name, after in weights_of(trainer.model).items():
        if "linear.weight" in name or "word_embeddings" in name:
            assert (after - before[name]).abs().max().item() == pytest.approx(first(GIVEN, name, None), rel=1e-2)


def test_the_log_has_the_rate_of_each_group(make_trainer):
    trainer = make_trainer(
        lr_scheduler_type="linear", layer_decay=0.5, learning_rate=1e-2, learning_rates={"sst": 4e-2}
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    found = [{key: entry[key] for key in entry if key.startswith("learning_rate")} for entry in entries]
    assert found == [
        {"learning_rate": pytest.approx(share * 1e-2), "learning_rate_sst": pytest.approx(share * 4e-2)}
        for share in (1, 0.5)
    ]


def test_without_groups_the_optimizer_is_the_stock_one(make_trainer):
    trainer = make_trainer(weight_decay=0.1)
    trainer.train()
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    assert not any(key.startswith("learning_rate_") for entry in trainer.state.log_history for key in entry)


def test_groups_take_in_what_is_freed_later_and_nothing_that_is_frozen_for_good(make_trainer):
    trainer = make_trainer(freeze="encoder", unfreeze={1: 1}, layer_decay=0.5, **RATES)
    trainer.train()
    rates = rates_of(trainer)
    assert {name.split(".")[1] for name in rates} == {"encoder", "pooler", "sst", "para", "sts"}
    assert not any(".layer.0." in name for name in rates)


def test_groups_under_adapters(make_trainer, tiny_model):
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    trainer = make_trainer(peft.get_peft_model(tiny_model(), peft.LoraConfig(**settings)), layer_decay=0.5, **RATES)
    trainer.create_optimizer()
    expected = {"layer.0": 1e-3 / 2, "layer.1": 1e-3, "default.sst": 4e-2, "default.para": 2e-2, "default.sts": 2e-2}
    for part, rate in expected.items():
        assert {found for name, found in rates_of(trainer).items() if f".{part}." in name} == {rate}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rates": {"encoder": 1e-3}}, "`learning_rates` of 'encoder' has no effect"),
        ({"weight_decays": {"encoder": 0.1}}, "`weight_decays` of 'encoder' has no effect"),
        ({"learning_rates": {"heads": 1e-3, "sst": 1e-3, "para": 1e-3, "sts": 1e-3}}, "'heads' has no effect"),
        ({"layer_decay": 0.9}, "`layer_decay` has no effect"),
    ],
    ids=str,
)
def test_a_group_that_decides_on_nothing_is_warned_of(make_trainer, caplog, given, said):
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        make_trainer(freeze="encoder", **given).train()
    assert [message for message in caplog.messages if said in message]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rates": {"head": 1e-3}}, "`learning_rates`: Unknown group 'head'. Did you mean 'heads'?"),
        ({"weight_decays": {"parra": 0.1}}, "`weight_decays`: Unknown group 'parra'. Did you mean 'para'?"),
        ({"learning_rates": {"sst": -1.0}}, "`learning_rates.sst` must be a number from 0. Found -1.0."),
        ({"weight_decays": {"heads": "much"}}, "`weight_decays.heads` must be a number from 0. Found 'much'."),
        ({"layer_decay": 0.0}, "`layer_decay` must be above 0 and at most 1. Found 0.0."),
        ({"layer_decay": 1.1}, "`layer_decay` must be above 0 and at most 1. Found 1.1."),
        ({"pretrained_decay": 30.0, "learning_rates": {"encoder": 0.1}}, "with `learning_rate: 0.1`.*at most 10"),
    ],
    ids=str,
)
def test_a_wrong_group_is_refused(make_trainer, given, said):
    with pytest.raises(MinBertError, match=said):
        make_trainer(**given)


def test_an_optimizer_that_is_given_has_groups_of_its_own(tiny_model, tiny_tokenizer, toy_rows, tmp_path):
    from hf_minbert import MultiTaskTrainer, MultiTaskTrainingArguments

    model = tiny_model()
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **RATES)
    with pytest.raises(MinBertError, match="are for an optimizer that `args.optim` names"):
        MultiTaskTrainer(
            model, args, train_dataset=toy_rows(), processing_class=tiny_tokenizer,
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        )  # fmt: skip
