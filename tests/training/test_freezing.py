"""What is frozen keeps its bits, the rest learns, and nothing to train is refused."""

import logging

import pytest
import torch

from hf_minbert import MinBertError, get_tasks
from hf_minbert.training.freezing import check_trainable, freeze_encoder

DECAYED = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.5, "max_grad_norm": 1.0}
#: A head with layers in it, one with a pooling of its own, and a mix of layers.
TASKS = {
    "sst": {"pooling": "attention", "layers": "mix"},
    "para": {"pair_encoding": "bi", "pooling": "bigru", "head": "cosine"},
    "sts": {"head": "blocks", "head_options": {"hidden_sizes": [8]}},
}


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("private", [{}, {"private_layers": 1}, {"private_encoders": True}])
@pytest.mark.parametrize("optim", ["adamw_torch", "course_adamw"])
def test_a_frozen_encoder_keeps_its_bits_and_every_head_moves(make_trainer, tiny_model, aggregator, private, optim):
    model = tiny_model(get_tasks(TASKS), hidden_dropout_prob=0.1, **private)
    before = weights_of(model)
    given = {**DECAYED, "optim": optim, "aggregator": aggregator, "gradient_accumulation_steps": 2}
    make_trainer(model, freeze="encoder", **given).train()
    for name, value in weights_of(model).items():
        assert torch.equal(before[name], value) != name.startswith("heads."), name


def test_a_frozen_encoder_keeps_its_dropout(make_trainer, tiny_model):
    trainer = make_trainer(tiny_model(hidden_dropout_prob=0.1), freeze="encoder")
    modes = set()
    trainer.model.bert.encoder.layer[0].register_forward_hook(lambda module, args, out: modes.add(module.training))
    trainer.train()
    assert modes == {True}


@pytest.mark.parametrize("freeze", ["none", "encoder"])
def test_the_log_says_how_many_parameters_are_trained(make_trainer, caplog, freeze):
    trainer = make_trainer(freeze=freeze)
    with caplog.at_level(logging.INFO, logger="hf_minbert"):
        trainer.train()
    whole = sum(parameter.numel() for parameter in trainer.model.parameters())
    heads = sum(parameter.numel() for parameter in trainer.model.heads.parameters())
    trained = heads if freeze == "encoder" else whole
    assert f"{trained:,} of {whole:,} parameters are trainable." in caplog.messages


def test_adapters_are_of_the_encoder(make_trainer, tiny_model):
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(**settings))
    make_trainer(model, freeze="encoder").train()
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable and all(".heads." in name for name in trainable)


COMPARED = {"sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}, "sst": None}


@pytest.mark.parametrize("train_tasks", [["sts"], ["sst", "sts"]])
def test_a_task_whose_head_has_nothing_to_train_is_refused(make_trainer, tiny_model, train_tasks):
    model = tiny_model(get_tasks(COMPARED))
    trainer = make_trainer(model, freeze="encoder", train_tasks=train_tasks, train={"sst": 8, "sts": 8})
    with pytest.raises(MinBertError, match="There is nothing to train for task 'sts'.*Leave `freeze` out"):
        trainer.train()
    make_trainer(tiny_model(get_tasks(COMPARED)), train_tasks=train_tasks, train={"sst": 8, "sts": 8}).train()


BI = {"pair_encoding": "bi", "pooling": "mean"}
MNR = {**BI, "loss": "mnr"}
PROJECTED = {"head": "cosine", "head_options": {"projection_size": 4}}


@pytest.mark.parametrize(
    ("name", "fields", "trains"),
    [
        ("para", {**MNR, "head": "cosine"}, False),  # the threshold is trained by the binary cross-entropy alone
        ("para", {**MNR, "head": "cosine", "loss_options": {"bce_weight": 1}}, True),
        ("para", {**MNR, "head": "mlp"}, False),  # cosines of what goes into its layers
        ("para", {**MNR, "head": "mlp", "loss_options": {"scores": "head"}}, True),
        ("para", {**MNR, **PROJECTED}, True),
        ("para", {**MNR, "head": "cosine", "pooling": "attention"}, True),
        ("para", {**MNR, "head": "cosine", "layers": "mix"}, True),
        ("sts", {**BI, "head": "cosine", "loss": "cosine_mse"}, False),
        ("sts", {**BI, "head": "cosine", "loss": "cosent"}, False),
        ("sts", {**BI, **PROJECTED, "loss": "cosent"}, True),
    ],
    ids=str,
)
def test_a_head_that_its_loss_does_not_reach_has_nothing_to_train(make_trainer, tiny_model, name, fields, trains):
    model = tiny_model(get_tasks({name: fields}), hidden_dropout_prob=0.1)
    trainer = make_trainer(model, freeze="encoder", train={name: 8}, max_steps=1)
    if trains:
        trainer.train()
    else:
        with pytest.raises(MinBertError, match=f"There is nothing to train for task '{name}'"):
            trainer.train()


def test_the_check_draws_no_random_number_and_leaves_the_mode(tiny_model):
    model = tiny_model(get_tasks(TASKS), hidden_dropout_prob=0.5).train()
    freeze_encoder(model)
    before = torch.get_rng_state()
    check_trainable(model, TASKS)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())


def test_a_model_that_was_frozen_by_hand_is_refused_too(make_trainer, tiny_model):
    model = tiny_model().requires_grad_(False)
    with pytest.raises(MinBertError, match="nothing to train"):
        make_trainer(model).train()
    model.heads.requires_grad_(True)
    make_trainer(model).train()
