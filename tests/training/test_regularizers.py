"""Regularizers in training: R-Drop and FGM by hand, SMART with all that a step may be made of, what is refused."""

import logging
import math

import pytest
import torch

from hf_minbert import MinBertError, MultiTaskTrainingArguments, get_tasks
from hf_minbert.model.losses import symmetric_kl
from hf_minbert.training.terms.base import NoiseKey, RandomState, embedded
from hf_minbert.training.terms.fgm import FGM
from hf_minbert.training.terms.r_drop import RDrop
from hf_minbert.training.terms.smart import AlgorithmOne, Smart
from tests.training.test_models import with_lora

KEY = NoiseKey(seed=0, step=0, first_row=0)
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
#: Large enough a ball that the term counts beside the loss of a tiny model.
SMART = {"regularizer": "smart", "smart_epsilon": 0.05}


@pytest.fixture
def batch(make_trainer):
    """`batch(trainer or None, task)`: the first batch of a task."""

    def first(task, trainer=None):
        trainer = trainer or make_trainer()
        return next(iter(trainer.get_train_dataloader()))[task]

    return first


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(trainer):
    trainer.train()
    return weights_of(trainer)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_equal(found, expected, atol=0.0):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


# ---- R-Drop and FGM


def test_r_drop_is_the_mean_of_two_passes_and_half_their_divergence(tiny_model, batch):
    model, rows = tiny_model(**DROPOUT).train(), batch("sst")
    torch.manual_seed(4)
    tokens = {name: torch.cat([rows[name]] * 2) for name in ("input_ids", "attention_mask", "token_type_ids")}
    halves = model.pooled_of(["sst"], **tokens)["sst"].chunk(2)
    first, second = (model(task="sst", pooled=half, labels=rows["labels"]) for half in halves)
    torch.manual_seed(4)
    result = RDrop(weight=3.0)(model, rows, KEY)
    divergence = symmetric_kl(first["logits"], second["logits"]).mean().item()
    assert result.logged["r_drop"].item() == pytest.approx(divergence / 2) and divergence > 0
    own = (first["loss"].item() + second["loss"].item()) / 2
    assert result.loss.item() == pytest.approx(own + 3 * divergence / 2)
    assert torch.equal(result.outputs["logits"], first["logits"])
    # Both halves of one batch: the same up to rounding, which depends on where a row stands in it.
    assert RDrop()(model.eval(), rows, KEY).logged["r_drop"].abs() < 1e-10


@pytest.mark.parametrize("task", ["sst", "sts"])
def test_fgm_adds_the_loss_one_step_along_each_sentences_gradient(tiny_model, batch, task):
    model, rows = tiny_model(**DROPOUT).train(), batch(task)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    torch.manual_seed(4)
    words = model.bert.embeddings.word_embeddings(rows["input_ids"]).detach().requires_grad_()
    loss = model(**{**rows, "input_ids": None, "inputs_embeds": words})["loss"]
    (g,) = torch.autograd.grad(loss, words)
    after = RandomState.now(torch.device("cpu"))
    delta = torch.stack([0.3 * of_row / of_row.square().sum().sqrt() for of_row in g])
    torch.manual_seed(4)
    worst = model(**embedded(model, rows, delta))["loss"].item()
    torch.manual_seed(4)
    result = FGM(weight=2.0, epsilon=0.3)(model, rows, KEY)
    assert result.logged["fgm"].item() == pytest.approx(worst, rel=1e-4) and worst > loss.item()
    assert result.loss.item() == pytest.approx(loss.item() + 2 * worst, rel=1e-4)
    assert torch.equal(torch.get_rng_state(), after.cpu)
    assert all((parameter.grad == 0.5).all() for parameter in model.parameters()) and not result.logged["fgm_skipped"]
    assert FGM(epsilon=0.0)(model.eval(), rows, KEY).loss == 2 * model(**rows)["loss"]


def test_fgm_leaves_out_a_gradient_that_is_not_finite(tiny_model, batch, monkeypatch):
    model, rows = tiny_model(), batch("sst")
    monkeypatch.setattr(FGM, "SCALE", math.inf)
    result = FGM()(model, rows, KEY)
    assert result.logged["fgm_skipped"] == 1 and result.logged["fgm"] == 0 and result.loss == model(**rows)["loss"]


@pytest.mark.parametrize("name", ["r_drop", "fgm"])
def test_the_others_train_and_are_logged(make_trainer, tiny_model, aggregator, name):
    trainer = make_trainer(tiny_model(**DROPOUT), regularizer=name, aggregator=aggregator)
    before = weights_of(trainer)
    after = trained(trainer)
    assert all(not torch.equal(after[n], before[n]) for n in before)
    for task in ("sst", "para", "sts"):
        assert all(0 < term < math.inf for term in logged(trainer, f"{name}_{task}"))


# ---- SMART in a step


def test_with_weight_0_every_bit_is_that_of_no_regularizer(make_trainer, tiny_model, aggregator):
    given = {"gradient_accumulation_steps": 2, "max_steps": 3, "aggregator": aggregator}
    plain = trained(make_trainer(tiny_model(**DROPOUT), **given))
    executed = make_trainer(tiny_model(**DROPOUT), **SMART, smart_weight=0.0, smart_steps=2, **given)
    assert_equal(trained(executed), plain)
    assert min(logged(executed, "smart_sst")) > 0


def test_with_epsilon_0_the_term_is_0(make_trainer, tiny_model):
    trainer = make_trainer(tiny_model(**DROPOUT), regularizer="smart", smart_epsilon=0.0)
    trainer.train()
    assert all(logged(trainer, f"smart_{task}") == [0, 0] for task in ("sst", "para", "sts"))


def test_the_log_has_each_tasks_term_before_its_weight(make_trainer, tiny_model):
    plain, trainer = make_trainer(max_steps=1), make_trainer(max_steps=1, **SMART, smart_weight=2.0)
    for each in (plain, trainer):
        each.train()
    log = trainer.state.log_history[0]
    for task in ("sst", "para", "sts"):
        assert log[f"smart_{task}"] > 0
        own = plain.state.log_history[0][f"loss_{task}"]
        assert log[f"loss_{task}"] == pytest.approx(own + 2 * log[f"smart_{task}"])
    assert log["smart_skipped"] == 0


@pytest.mark.parametrize("logging_steps", [1, 2, 10])
def test_the_outcome_has_each_terms_mean_over_training(make_trainer, logging_steps):
    given = {"max_steps": 5, **SMART, "proximal": "momentum"}
    each = make_trainer(**given)
    each.train()
    metrics = make_trainer(**given, logging_steps=logging_steps).train().metrics
    for name in [f"{term}_{task}" for term in ("smart", "proximal") for task in ("sst", "para", "sts")]:
        assert metrics[f"train_{name}"] == pytest.approx(sum(logged(each, name)) / 5) and len(logged(each, name)) == 5
    assert not any("loss_" in name for name in metrics)


def test_a_skipped_term_is_counted_and_the_step_goes_on(make_trainer, monkeypatch):
    plain = trained(make_trainer())
    whole = AlgorithmOne.gradient
    monkeypatch.setattr(AlgorithmOne, "gradient", lambda *given: whole(*given) * math.nan)
    trainer = make_trainer(**SMART, logging_steps=2)
    assert_equal(trained(trainer), plain, atol=1e-6)
    assert logged(trainer, "smart_skipped") == [2 * 3]  # steps, tasks
    assert logged(trainer, "smart_sts") == [0]


def test_each_batch_has_its_own_key(make_trainer, monkeypatch):
    keys = []

    def call(self, model, batch, key, inner, whole=Smart.__call__):
        keys.append((batch["task"], key))
        return whole(self, model, batch, key, inner)

    monkeypatch.setattr(Smart, "__call__", call)
    make_trainer(**SMART, gradient_accumulation_steps=2, task_batch_sizes={"sts": 2}, seed=9).train()
    assert [key.first_row for task, key in keys if task == "sst"] == [0, 4, 0, 4]
    assert [key.first_row for task, key in keys if task == "sts"] == [0, 2, 0, 2]
    assert [key.step for task, key in keys if task == "sst"] == [0, 0, 1, 1]
    assert {key.seed for _, key in keys} == {9}


def test_accumulated_batches_are_one_batch(make_trainer):
    sizes = {"sst": 16, "para": 16, "sts": 16}
    whole = make_trainer(train=sizes, per_device_train_batch_size=8, **SMART)
    parts = make_trainer(train=sizes, per_device_train_batch_size=4, gradient_accumulation_steps=2, **SMART)
    assert_equal(trained(parts), trained(whole), atol=1e-6)


@pytest.mark.parametrize("form", ["paper", "mt-dnn"])
@pytest.mark.parametrize("other", [{"gradient_checkpointing": True}, {"packing": True}])
def test_checkpoints_and_packing_change_no_step(make_trainer, tiny_model, aggregator, other, form):
    # The step is large, and a corner of the ball may hang by a rounding: then the distance is that of a whole row.
    given = {**SMART, "smart_form": form, "smart_step_size": 0.05, "aggregator": aggregator}
    bi = {"para": {"pair_encoding": "bi"}, "sts": {"pair_encoding": "bi", "head": "cosine", "pooling": "mean"}}
    models = [tiny_model(get_tasks({"sst": None, **bi})) for _ in range(2)]
    plain = trained(make_trainer(models[0], **given))
    assert_equal(trained(make_trainer(models[1], **given, **other)), plain, atol=1e-5)


def test_with_dropout_checkpoints_change_no_step(make_trainer, tiny_model):
    given = {**SMART, "smart_step_size": 0.05}
    plain = trained(make_trainer(tiny_model(**DROPOUT), **given))
    saving = make_trainer(tiny_model(**DROPOUT), gradient_checkpointing=True, **given)
    assert_equal(trained(saving), plain, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"private_layers": 1}, {"private_encoders": True}])
def test_every_model_has_a_term_for_every_task(make_trainer, tiny_model, aggregator, changes):
    trainer = make_trainer(tiny_model(**changes), **SMART, aggregator=aggregator)
    embeddings = [module for name, module in trainer.model.named_modules() if name.endswith("word_embeddings")]
    calls = []
    for module in embeddings:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    trainer.train()
    for task in ("sst", "para", "sts"):
        assert all(0 < term < math.inf for term in logged(trainer, f"smart_{task}"))
    # In two steps of three tasks: each encoder's own embeddings, for the clean pass, the search and the last pass.
    assert [calls.count(module) for module in embeddings] == [18 // len(embeddings)] * len(embeddings)


def test_adapters_and_a_frozen_encoder_have_a_term_that_trains_what_is_trained(make_trainer, tiny_model, aggregator):
    adapted = [make_trainer(with_lora(tiny_model()), aggregator=aggregator, **given) for given in ({}, SMART)]
    frozen = [make_trainer(freeze="encoder", aggregator=aggregator, **given) for given in ({}, SMART)]
    for plain, smart in (adapted, frozen):
        before = weights_of(plain)
        expected, found = trained(plain), trained(smart)
        assert min(logged(smart, "smart_para")) > 0
        moved = {name for name in before if not torch.equal(found[name], before[name])}
        assert moved == {name for name, p in plain.model.named_parameters() if p.requires_grad}
        heads = [name for name in moved if "heads" in name and name.endswith("weight")]
        assert heads and all(not torch.equal(found[name], expected[name]) for name in heads)


def test_bf16_has_about_the_same_term(make_trainer, tiny_model):
    whole, half = make_trainer(max_steps=1, **SMART), make_trainer(max_steps=1, bf16=True, **SMART)
    for trainer in (whole, half):
        trainer.train()
    for task in ("sst", "para", "sts"):
        assert logged(half, f"smart_{task}") == pytest.approx(logged(whole, f"smart_{task}"), rel=0.5)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("half", [{"fp16": True}, {"bf16": True}, {"bf16": True, "packing": True}])
def test_half_precision_on_a_gpu_has_about_the_same_term(make_trainer, tiny_model, half):
    given = {"use_cpu": False, "max_steps": 4, **SMART}
    whole, found = make_trainer(tiny_model(), **given), make_trainer(tiny_model(), **given, **half)
    for trainer in (whole, found):
        trainer.train()
    for task in ("sst", "para", "sts"):
        assert logged(found, f"smart_{task}")[0] == pytest.approx(logged(whole, f"smart_{task}")[0], rel=0.5)
        assert all(0 < term < math.inf for term in logged(found, f"smart_{task}"))
    assert sum(logged(found, "smart_skipped")) == 0


def test_a_compiled_model_takes_the_same_steps(make_trainer, tiny_model):
    torch._dynamo.reset()
    model = {"tasks": ["sst", "sts"], "num_hidden_layers": 1}
    given = {"train": {"sst": 8, "sts": 8}, **SMART, "smart_step_size": 0.05}
    compiled = make_trainer(tiny_model(**model), torch_compile_backend="eager", **given)
    found = trained(compiled)
    assert_equal(found, trained(make_trainer(tiny_model(**model), **given)), atol=1e-5)
    torch._dynamo.reset()


def test_a_ball_that_precision_loses_is_warned_of(make_trainer, tiny_model, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        make_trainer(bf16=True, regularizer="smart", smart_epsilon=1e-4)
    (said,) = [record.getMessage() for record in caplog.records if "smart_epsilon" in record.getMessage()]
    assert "lost in bfloat16" in said


@pytest.mark.parametrize(
    ("changes", "tasks"),
    [
        ({}, ["sst", "para", "sts"]),
        ({"hidden_dropout_prob": 0.1}, []),
        ({"attention_probs_dropout_prob": 0.1}, []),
        (
            {"tasks": get_tasks({"sst": {"head_options": {"dropout": 0.1}}, "para": None, "sts": None})},
            ["para", "sts"],
        ),
    ],
)
def test_r_drop_without_dropout_is_warned_of(make_trainer, tiny_model, caplog, changes, tasks):
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        trainer = make_trainer(tiny_model(**changes), regularizer="r_drop", max_steps=1)
    said = [record.getMessage() for record in caplog.records if "r_drop" in record.getMessage()]
    assert [message.split("'")[1] for message in said] == tasks
    trainer.train()
    zero = [task for task in ("sst", "para", "sts") if abs(logged(trainer, f"r_drop_{task}")[0]) < 1e-10]
    assert zero == tasks


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"smart_weight": -1.0}, "`smart_weight` must be a number from 0. Found -1.0."),
        ({"smart_epsilon": math.nan}, "`smart_epsilon` must be a number from 0. Found nan."),
        ({"smart_epsilon": 0.0, "smart_form": "mt-dnn"}, "`smart_epsilon` must be a number above 0. Found 0.0."),
        ({"smart_step_size": math.inf}, "`smart_step_size` must be a number from 0. Found inf."),
        ({"smart_noise_std": -0.1}, "`smart_noise_std` must be a number from 0. Found -0.1."),
        ({"smart_steps": 0}, "`smart_steps` must be a whole number from 1. Found 0."),
        ({"smart_variant": "smart_3"}, "Unknown smart_variant 'smart_3'."),
        ({"smart_variant": {"sst": "smart-1"}}, "Unknown smart_variant 'smart-1'. Did you mean 'smart_1'?"),
        ({"smart_norm": "l1"}, "Unknown smart_norm 'l1'. Choose from: inf, l2."),
        ({"smart_level": "word"}, "Unknown smart_level 'word'."),
        ({"smart_form": "mtdnn"}, "Unknown smart_form 'mtdnn'. Did you mean 'mt-dnn'?"),
        (
            {"smart_score_divergence": "kl"},
            "Unknown smart_score_divergence 'kl'. Choose from: bernoulli, squared_error.",
        ),
        ({"regularizer": "fgm", "fgm_epsilon": -1.0}, "`fgm_epsilon` must be a number from 0. Found -1.0."),
        ({"regularizer": "r_drop", "r_drop_weight": math.inf}, "`r_drop_weight` must be a number from 0. Found inf."),
        ({"smart_form": "mt-dnn", "torch_compile": True}, "`smart_form: mt-dnn` uses a hook"),
        ({"smart_form": "smart-pytorch", "torch_compile": True}, "`smart_form: smart-pytorch` uses a hook"),
        ({"smart_noise_std": 0.0, "smart_form": "mt-dnn"}, "`smart_noise_std: 0` starts the search where the outputs"),
        ({"smart_noise_std": 0.0}, "`smart_noise_std: 0` starts the search where the outputs are equal"),
        ({"regularizer": ["smart"]}, "Unknown regularizer ['smart']."),
        ({"smart_variant": None}, "Unknown smart_variant None."),
        ({"smart_variant": ["smart_1"]}, "Unknown smart_variant ['smart_1']."),
        ({"smart_variant": {"sst": ["smart_1"]}}, "Unknown smart_variant ['smart_1']."),
        ({"smart_norm": ["l2"]}, "Unknown smart_norm ['l2']."),
        ({"smart_epsilon": "1e-4"}, "`smart_epsilon` must be a number from 0. Found '1e-4'."),
        ({"smart_weight": {"sst": 1.0}}, "`smart_weight` must be a number from 0. Found {'sst': 1.0}."),
        ({"smart_weight": True}, "`smart_weight` must be a number from 0. Found True."),
        ({"smart_steps": 2.0}, "`smart_steps` must be a whole number from 1. Found 2.0."),
        ({"regularizer": "r_drop", "r_drop_weight": None}, "`r_drop_weight` must be a number from 0. Found None."),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "`regularizer: smart` differentiates by the input",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(tmp_path, given, said):
    with pytest.raises(MinBertError) as refusal:
        MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{"regularizer": "smart", **given})
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"smart_weight": 2.0},
            ["`smart_weight` has no effect with `regularizer: none`. It is for `regularizer: smart`."],
        ),
        (
            {"regularizer": "smart", "fgm_weight": 2.0, "fgm_epsilon": 0.5, "r_drop_weight": 3.0},
            [
                "`r_drop_weight` has no effect with `regularizer: smart`. It is for `regularizer: r_drop`.",
                "`fgm_weight`, `fgm_epsilon` have no effect with `regularizer: smart`. "
                "They are for `regularizer: fgm`.",
            ],
        ),
        (
            {"proximal_steps": 2, "proximal_momentum": [0.9, 0.9]},
            [
                "`proximal_steps`, `proximal_momentum` have no effect with `proximal: none`. "
                "They are for `proximal: momentum`."
            ],
        ),
        (
            {"proximal": "previous", "proximal_steps": 2, "proximal_momentum": [0.9, 0.9]},
            ["`proximal_momentum` has no effect with `proximal: previous`. It is for `proximal: momentum`."],
        ),
        (
            {"regularizer": "smart", "smart_form": "mt-dnn", "smart_norm": "l2"},
            ["`smart_norm` has no effect with `smart_form: mt-dnn`. It is for `smart_form: paper`."],
        ),
        (
            {"regularizer": "smart", "smart_score_divergence": "bernoulli", "train_tasks": ["sst", "para"]},
            ["`smart_score_divergence` has no effect with these tasks. It is for scores, and none of them is one."],
        ),
        ({"regularizer": "smart", "smart_score_divergence": "bernoulli", "smart_weight": 2.0}, []),
        ({"regularizer": "smart", "aggregator": "pcgrad"}, []),  # all three tasks are counted
        ({"proximal": "momentum", "proximal_steps": 2, "proximal_momentum": [0.9, 0.9]}, []),
    ],
)
def test_keys_without_an_effect_are_warned_of(make_trainer, caplog, given, said):
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        make_trainer(**given)
    assert [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()] == said


@pytest.mark.parametrize("variant", ["smart_1", "smart_2", {"sts": "smart_2", "para": "smart_1"}])
def test_kl_of_a_score_must_be_named_and_is_never_zero_in_silence(make_trainer, variant):
    given = {"regularizer": "smart", "smart_variant": variant}
    with pytest.raises(MinBertError, match="of 'sts' is a KL, and a score has none.*squared_error or bernoulli"):
        make_trainer(**given)
    assert make_trainer(train={"sst": 8, "para": 8}, train_tasks=["sst", "para"], **given)
    for name in ("squared_error", "bernoulli"):
        trainer = make_trainer(**given, smart_score_divergence=name, smart_epsilon=0.05)
        trainer.train()
        assert min(logged(trainer, "smart_sts")) > 0


def test_a_variant_of_an_unknown_task_is_refused(make_trainer):
    with pytest.raises(MinBertError, match="`smart_variant`: Unknown task 'stt'"):
        make_trainer(regularizer="smart", smart_variant={"stt": "smart_1"})
