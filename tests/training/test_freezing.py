"""What is frozen keeps its bits until it is freed, the rest learns, and nothing to train is refused."""

import logging
import re
from typing import get_type_hints

import pytest
import torch
from transformers import TrainerCallback

from hf_minbert import MinBertError, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.settings.recipe import cast, read_value
from hf_minbert.training.freezing import Freezing, check_trainable, schedule_of

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
    modes = []
    layer = trainer.model.bert.encoder.layer[0]

    class Listens(TrainerCallback):  # from here on: before, the trainer asks whether there is anything to train
        def on_train_begin(self, args, state, control, **kwargs):
            layer.register_forward_hook(lambda module, args, out: modes.append(module.training))

    trainer.add_callback(Listens())
    trainer.train()
    assert modes == [True] * 6


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
    with pytest.raises(MinBertError, match="Task 'sts' has nothing to train.*Leave `freeze` out"):
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
        with pytest.raises(MinBertError, match=f"Task '{name}' has nothing to train"):
            trainer.train()


def test_the_check_draws_no_random_number_and_leaves_the_mode(tiny_model):
    model = tiny_model(get_tasks(TASKS), hidden_dropout_prob=0.5).train()
    Freezing(model, "encoder")
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


# ---- Parts of the encoder, and schedules


def levels(model):
    """`{name: part}` of the tiny model's parameters, said here once more: bottom, first, top, above or head."""
    parts = {"embeddings": "bottom", "layer.0": "first", "layer.1": "top", "pooler": "above"}
    found = {}
    for name, _ in model.named_parameters():
        if name.startswith("heads."):
            found[name] = "head"
            continue
        place = re.sub(r"private\.(para|sts)\.1\.", "layer.1.", name)
        (found[name],) = {part for key, part in parts.items() if f".{key}." in place}
    return found


#: What is trained, by what is frozen.
TRAINED = {
    "none": {"bottom", "first", "top", "above", "head"},
    "embeddings": {"first", "top", "above", "head"},
    1: {"top", "above", "head"},
    2: {"above", "head"},
    "encoder": {"head"},
}


class Moves(TrainerCallback):
    """Which parameters each step has changed."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.before = weights_of(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        after = weights_of(model)
        self.steps.append({name for name, value in after.items() if not torch.equal(value, self.before[name])})
        self.before = after


def moved(trainer):
    """The names that each step of the training moves, without those whose gradient is 0 but for rounding."""
    moves = Moves()
    trainer.add_callback(moves)
    trainer.train()
    return [{name for name in step if not name.endswith("key.bias")} for step in moves.steps]


def expected(model, frozen):
    parts = levels(model)
    return {name for name, part in parts.items() if part in TRAINED[frozen] and not name.endswith("key.bias")}


@pytest.mark.parametrize("private", [{}, {"private_layers": 1}, {"private_encoders": True}], ids=str)
@pytest.mark.parametrize("frozen", TRAINED, ids=str)
def test_a_frozen_part_keeps_its_bits_and_all_else_moves(make_trainer, tiny_model, aggregator, frozen, private):
    model = tiny_model(**private)
    given = {**DECAYED, "aggregator": aggregator, "gradient_accumulation_steps": 2}
    assert moved(make_trainer(model, freeze=frozen, **given)) == [expected(model, frozen)] * 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"packing": True},
        {"optim": "course_adamw"},
        {"aggregator": "pcgrad", "gradient_smoothing": 0.5, "conflict_detail": "tensors"},
        {"aggregator": "row_sum", "gradient_accumulation_steps": 2},
        {"proximal": "momentum", "pretrained_decay": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregator", ["row_sum"], indirect=True)  # registers the one that needs rows
def test_each_phase_moves_what_is_freed_by_then(make_trainer, tiny_model, aggregator, given):
    model = tiny_model(hidden_dropout_prob=0.1)
    schedule = {"freeze": "encoder", "unfreeze": {2: 1, 3: "embeddings", 5: "none"}}
    trainer = make_trainer(model, max_steps=6, **{**DECAYED, **schedule, **given})
    phases = ["encoder", "encoder", 1, "embeddings", "embeddings", "none"]
    assert moved(trainer) == [expected(model, frozen) for frozen in phases]
    steps = {name: trainer.optimizer.state[p]["step"] for name, p in model.named_parameters()}
    counts = {"head": 6, "above": 4, "top": 4, "first": 3, "bottom": 1}
    assert steps == {name: counts[part] for name, part in levels(model).items()}


@pytest.mark.parametrize(
    ("freeze", "phases"),
    [
        ("encoder", ["encoder", 1, "embeddings", "none", "none"]),
        (2, [2, 1, "embeddings", "none", "none"]),
        (1, [1, "embeddings", "none", "none", "none"]),
        ("embeddings", ["embeddings", "none", "none", "none", "none"]),
    ],
)
def test_a_gradual_schedule_frees_a_layer_an_epoch(make_trainer, freeze, phases):
    """Five rounds in windows of two are three steps an epoch."""
    given = {"max_steps": -1, "num_train_epochs": 5, "gradient_accumulation_steps": 2}
    trainer = make_trainer(freeze=freeze, unfreeze="gradual", **{**DECAYED, **given})
    assert moved(trainer) == [expected(trainer.model, frozen) for frozen in phases for _ in range(3)]


def test_what_is_freed_equals_what_was_never_frozen(make_trainer, tiny_model):
    """From one state, a schedule that has freed everything takes the step that a run without one takes."""
    freed = make_trainer(tiny_model(), freeze="encoder", unfreeze={1: "none"}, max_steps=2)
    states = {}

    class Copy(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            states[state.global_step] = weights_of(model)

    freed.add_callback(Copy())
    gradients = Gradients()
    freed.add_callback(gradients)
    freed.train()
    for name, gradient in gradients.of_step[1].items():  # SGD at 1e-3
        torch.testing.assert_close(states[2][name], states[1][name] - 1e-3 * gradient, rtol=0, atol=1e-6)
    assert gradients.of_step[1].keys() == states[2].keys()
    assert all(name.startswith("heads.") for name in gradients.of_step[0])


class Gradients(TrainerCallback):
    """What the optimizer gets at each step."""

    def __init__(self):
        self.of_step = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of_step.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def test_a_schedule_says_what_it_frees_and_a_second_training_begins_anew(make_trainer, caplog):
    trainer = make_trainer(freeze="encoder", unfreeze={1: "none"})
    whole = sum(parameter.numel() for parameter in trainer.model.parameters())
    heads = sum(parameter.numel() for parameter in trainer.model.heads.parameters())
    for _ in range(2):
        with caplog.at_level(logging.INFO, logger="hf_minbert"):
            trainer.train()
        said = [message for message in caplog.messages if "trainable" in message]
        assert said == [
            f"{heads:,} of {whole:,} parameters are trainable.",
            f"From step 2 on, `freeze` is none: {whole:,} of {whole:,} parameters are trainable.",
        ]
        caplog.clear()


def test_a_schedule_leaves_alone_what_is_not_trained_anyway(make_trainer, tiny_model):
    """Under adapters the weights stay as they are, and adapters come in layer by layer."""
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(**settings, init_lora_weights=False))
    trainer = make_trainer(model, freeze="encoder", unfreeze={1: 1, 2: "none"}, max_steps=3, **DECAYED)
    adapters = {n: [name for name in weights_of(model) if f"layer.{n}." in name and "lora_" in name] for n in (0, 1)}
    heads = [name for name in weights_of(model) if "heads.modules_to_save" in name]
    assert [len(adapters[n]) for n in (0, 1)] == [4, 4] and heads
    assert moved(trainer) == [{*heads}, {*heads, *adapters[1]}, {*heads, *adapters[1], *adapters[0]}]


@pytest.mark.parametrize(
    ("fields", "trains"), [({**COMPARED["sts"], "pooling": "pooler"}, True), (COMPARED["sts"], False)]
)
def test_the_pooler_alone_trains_heads_that_read_it(make_trainer, tiny_model, fields, trains):
    """With all layers frozen there is nothing else for a bare cosine."""
    trainer = make_trainer(tiny_model(get_tasks({"sts": fields})), freeze=2, train={"sts": 8})
    if trains:
        assert moved(trainer)[0] == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    else:
        with pytest.raises(MinBertError, match="Task 'sts' has nothing to train"):
            trainer.train()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"freeze": 3}, "`freeze` is 3 layers, and the model has 2."),
        ({"freeze": "encoder", "unfreeze": {1: 4}}, "`unfreeze.1` is 4 layers, and the model has 2."),
        ({"freeze": 0}, "`freeze` must be a number of layers from 1. Found 0. .* embeddings"),
        ({"freeze": True}, "Unknown freeze True"),
        ({"freeze": "layers"}, "Unknown freeze 'layers'"),
        ({"unfreeze": {2: "none"}}, "`unfreeze` needs something that is frozen"),
        ({"freeze": 1, "unfreeze": "gradualy"}, "Did you mean 'gradual'?"),
        ({"freeze": 1, "unfreeze": {0: "none"}}, "optimizer steps from 1 .* Found 0"),
        ({"freeze": 1, "unfreeze": {"1.5": "none"}}, "Found '1.5'"),
        ({"freeze": 1, "unfreeze": {5: "nothing"}}, "Unknown unfreeze.5 'nothing'"),
        ({"freeze": 1, "unfreeze": {5: 2}}, "less frozen each time. Found 2 after 5 steps, where it was 1"),
        ({"freeze": 2, "unfreeze": {9: 1, 5: "none"}}, "Found 1 after 9 steps, where it was 'none'"),
        ({"freeze": 1, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant gradient checkpointing"),
    ],
    ids=str,
)
def test_a_wrong_schedule_is_refused(make_trainer, given, said):
    with pytest.raises(MinBertError, match=said):
        make_trainer(**given)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("freeze=4", 4),
        ("freeze=embeddings", "embeddings"),
        ("unfreeze={100: 4, 200: none}", {"100": 4, "200": "none"}),
        ("unfreeze=gradual", "gradual"),
    ],
)
def test_a_recipe_takes_numbers_and_words(word, found):
    key, _, written = word.partition("=")
    value = cast(key, read_value(written, word), get_type_hints(MultiTaskTrainingArguments)[key])
    assert value == found


def test_a_schedule_is_in_the_order_of_its_steps_whatever_that_of_the_recipe():
    assert [*schedule_of("encoder", {"200": "none", "100": 4}).items()] == [(0, "encoder"), (100, 4), (200, "none")]


# ---- A frozen encoder reads each row once

POOLED = {
    "sst": {"pooling": "mean"},
    "para": None,
    "sts": {"pair_encoding": "bi", "pooling": "max", "sentence_dropout": 0.5},
}


def without_encoder_dropout(tiny_model, tasks):
    return tiny_model(get_tasks(tasks), hidden_dropout_prob=0.0, classifier_dropout=0.3)


@pytest.mark.parametrize("arguments", [{}, {"aggregator": "pcgrad", "packing": True}, {"mixing": "once"}], ids=str)
def test_what_is_read_once_trains_the_same_heads(make_trainer, tiny_model, monkeypatch, arguments):
    found = []
    for once in (True, False):
        model = without_encoder_dropout(tiny_model, POOLED)
        passes = []
        model.bert.register_forward_hook(
            lambda module, args, given, out, passes=passes: passes.append(given["input_ids"].numel()), with_kwargs=True
        )
        if not once:
            monkeypatch.setattr(MultiTaskTrainer, "_rows_of_steps", lambda self, rows: rows)
        given = {"learning_rate": 5e-3, "max_steps": 6, "per_device_eval_batch_size": 100}
        trainer = make_trainer(model, freeze="encoder", **given, **arguments)
        trainer.train()
        passes = [size for size in passes if size > 4]  # without those of two rows of one token, which ask the model
        found.append((model, len(passes), [e["loss"] for e in trainer.state.log_history if "loss" in e]))
    (ours, few, losses), (theirs, many, expected) = found
    assert few == len(POOLED) < many  # a batch holds all rows of a task
    assert losses == pytest.approx(expected, abs=1e-5)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("tasks", "arguments", "read_once"),
    [
        ({"sst": None, "sts": {"pooling": "attention"}}, {}, ["sst"]),
        ({"sst": {"pooling": "mean", "layers": "mix"}, "sts": {"pooling": "bigru"}}, {}, []),
        ({"sst": None, "sts": None}, {"freeze": "embeddings"}, []),
        ({"sst": None, "sts": None}, {"unfreeze": {"1": "none"}}, []),
        ({"sst": None, "sts": None}, {"regularizer": "smart"}, []),
        ({"sst": None, "sts": None}, {"proximal": "momentum"}, []),
        ({"sst": None, "sts": None}, {"neftune_noise_alpha": 5.0}, []),
    ],
)
def test_what_a_step_may_change_is_read_at_each_step(make_trainer, tiny_model, tasks, arguments, read_once):
    trainer = make_trainer(
        without_encoder_dropout(tiny_model, tasks), train=dict.fromkeys(tasks, 8), **{"freeze": "encoder", **arguments}
    )
    batches = next(iter(trainer.get_train_dataloader()))
    assert [name for name, batch in batches.items() if "pooled" in batch] == read_once
    trainer.train()


def test_an_encoder_with_dropout_reads_each_row_anew(make_trainer, tiny_model):
    for changes in ({"hidden_dropout_prob": 0.1}, {"attention_probs_dropout_prob": 0.1}):
        model = tiny_model(
            get_tasks(["sst"]), **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changes}
        )
        trainer = make_trainer(model, train={"sst": 8}, freeze="encoder")
        assert "input_ids" in next(iter(trainer.get_train_dataloader()))["sst"]
