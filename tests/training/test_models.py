"""Models in other dress: half precision, activation checkpointing, compiled, with adapters, saved and loaded."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_minbert import MinBertError, MultiTaskTrainingArguments, get_tasks

DEV = {"sst": 11, "para": 7, "sts": 9}
ADAM = {"optim": "adamw_torch", "max_grad_norm": 1.0}


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected, atol):
    torch.testing.assert_close(parameters(found), parameters(expected), rtol=0, atol=atol)


def with_lora(model, **changes):
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    return peft.get_peft_model(model, peft.LoraConfig(**settings, **changes))


# ---- precision and memory


def test_bf16_trains_in_half_precision_and_keeps_whole_weights(make_trainer, aggregator):
    half = make_trainer(bf16=True, dev=DEV, aggregator=aggregator)
    dtypes = set()
    query = half.model.bert.encoder.layer[0].attention.self.query
    query.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    half.train()
    whole = make_trainer(dev=DEV)
    whole.train()
    assert dtypes == {torch.bfloat16}
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (half, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    assert {value.dtype for value in half.model.parameters()} == {torch.float32}
    assert_close(half.model, whole.model, atol=5e-3)
    assert half.evaluate()["eval_sts_loss"] == pytest.approx(whole.evaluate()["eval_sts_loss"], rel=0.05)
    assert half.predict([{"sentence": "good"}], task="sst").predictions.dtype == np.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_fp16_trains_with_one_loss_scale_for_all_tasks(make_trainer, aggregator):
    given = {"use_cpu": False, "max_steps": 6, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    half = make_trainer(fp16=True, aggregator=aggregator, **given)
    scaler = half.accelerator.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})  # of 65,536, steps are skipped until it is lower
    half.train()
    whole = make_trainer(**given)
    whole.train()
    assert scaler.get_scale() == 256
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (half, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    norms = [[entry["grad_norm"] for entry in each.state.log_history if "loss" in entry] for each in (half, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # of gradients without the scale
    assert_close(half.model, whole.model, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(make_trainer, aggregator, reentrant):
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    saving = make_trainer(gradient_checkpointing=True, aggregator=aggregator, **kwargs)
    plain = make_trainer()
    calls = []
    saving.model.bert.encoder.layer[0].attention.register_forward_hook(lambda *args: calls.append(None))
    for trainer in (saving, plain):
        trainer.train()
    assert len(calls) == 2 * 3 * 2  # steps, tasks, and once more in the backward pass
    assert_close(saving.model, plain.model, atol=1e-6)


def test_embedding_noise_is_honoured(make_trainer, scores):
    noisy, plain = make_trainer(neftune_noise_alpha=5.0, dev=DEV), make_trainer(dev=DEV)
    for trainer in (noisy, plain):
        trainer.train()
    first = [trainer.state.log_history[0]["loss"] for trainer in (noisy, plain)]
    assert first[0] != first[1]
    assert scores(noisy.evaluate()) == scores(noisy.evaluate())


# ---- compiled, wrapped


def test_a_wrapped_model_has_the_metrics_of_the_plain_one(make_trainer, tiny_model, scores):
    expected = scores(make_trainer(dev=DEV).evaluate())
    assert len(expected) > 10
    wrapped = scores(make_trainer(with_lora(tiny_model()), dev=DEV).evaluate())
    assert list(wrapped) == list(expected)
    assert wrapped == pytest.approx(expected, abs=1e-6)


def test_a_model_compiled_by_hand_has_the_metrics_of_the_plain_one(make_trainer, tiny_model, fresh_compiler, scores):
    model = tiny_model(["sts"], num_hidden_layers=1)
    expected = scores(make_trainer(model, train={"sts": 4}, dev={"sts": 9}).evaluate())
    compiled = make_trainer(torch.compile(model, backend="eager"), train={"sts": 4}, dev={"sts": 9})
    assert scores(compiled.evaluate()) == pytest.approx(expected, abs=1e-6)
    assert fresh_compiler["stats"]["unique_graphs"] > 0


def test_compiling_changes_no_metric_no_step_and_no_saved_name(
    make_trainer, tiny_model, fresh_compiler, tmp_path, scores
):
    tasks = ["sst", "sts"]
    given = {"train": {"sst": 8, "sts": 4}, "dev": {"sst": 8, "sts": 8}, "per_device_eval_batch_size": 4}
    compiled = make_trainer(tiny_model(tasks, num_hidden_layers=1), torch_compile_backend="eager", **given)
    compiled.train()  # before the next trainer is made: accelerate keeps one set of compiler settings per process
    found = scores(compiled.evaluate())
    assert fresh_compiler["stats"]["unique_graphs"] >= 2  # a graph per task
    compiled.save_model(tmp_path / "saved")
    plain = make_trainer(tiny_model(tasks, num_hidden_layers=1), **given)
    plain.train()
    assert found == pytest.approx(scores(plain.evaluate()), abs=1e-5)
    assert_close(compiled.model, plain.model, atol=1e-6)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert_close(saved, plain.model, atol=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_compiled_layers_share_one_program_and_change_no_step(
    make_trainer, tiny_model, fresh_compiler, monkeypatch, tmp_path, packing
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled, plain = (
        # Not Adam: to a gradient that is rounding alone, as a key's bias has, it gives a full step.
        make_trainer(tiny_model(num_hidden_layers=3), packing=packing, compile_layers=wanted, optim="sgd")
        for wanted in (True, False)
    )
    start = parameters(tiny_model(num_hidden_layers=3))
    for trainer in (compiled, plain):
        trainer.train()
    assert fresh_compiler["stats"]["unique_graphs"] == 1  # for three layers, all tasks and all sizes
    assert_close(compiled.model, plain.model, atol=1e-5)
    name = "bert.encoder.layer.1.output.dense.weight"
    assert (parameters(plain.model)[name] - start[name]).abs().max() > 1e-4
    compiled.save_model(tmp_path / "saved")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert_close(saved, compiled.model, atol=0)


def test_two_ways_of_compiling_are_one_too_many(tmp_path):
    with pytest.raises(MinBertError, match="`compile_layers` and `torch_compile` compile the same layers"):
        MultiTaskTrainingArguments(output_dir=str(tmp_path), compile_layers=True, torch_compile_backend="eager")


def test_adapters_and_trained_heads_move_and_nothing_else(make_trainer, tiny_model, aggregator):
    trainer = make_trainer(with_lora(tiny_model()), train_tasks=["sst", "sts"], aggregator=aggregator, **ADAM)
    before = parameters(trainer.model)
    trainer.train()
    moved = {name for name, value in parameters(trainer.model).items() if not torch.equal(value, before[name])}
    assert moved == {
        name
        for name in before
        if "lora_" in name
        or "heads.modules_to_save.default.sst" in name
        or "heads.modules_to_save.default.sts" in name
    }


def test_an_adapter_is_saved_and_loaded_whole(make_trainer, tiny_model, toy_rows, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(with_lora(tiny_model()), learning_rate=1e-2, **ADAM)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    loaded = make_trainer(peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter"))
    for name, rows in toy_rows(**DEV).items():
        expected = trainer.predict(rows, task=name).predictions
        np.testing.assert_array_equal(loaded.predict(rows, task=name).predictions, expected)
        assert not np.allclose(make_trainer().predict(rows, task=name).predictions, expected, atol=1e-3)


# ---- saved and loaded


def test_a_saved_model_predicts_as_the_trained_one(make_trainer, toy_rows, tmp_path):
    trainer = make_trainer(learning_rate=1e-2, **ADAM)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert list(model.config.task_names) == ["sst", "para", "sts"]
    loaded = make_trainer(model, tokenizer=tokenizer)
    for name, rows in toy_rows(**DEV).items():
        expected = trainer.predict(rows, task=name).predictions
        np.testing.assert_array_equal(loaded.predict(rows, task=name).predictions, expected)


def test_the_schedule_warms_up(make_trainer):
    trainer = make_trainer(warmup_steps=2, max_steps=4, lr_scheduler_type="linear")
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


def test_bars_and_reports_take_the_logs(make_trainer, capfd):
    trainer = make_trainer(disable_tqdm=False, dev=DEV, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert "2/2" in capfd.readouterr().err


def test_packing_trains_and_scores_as_padding_does(make_trainer, tiny_model, toy_rows, aggregator):
    tasks = get_tasks({"sst": {"pooling": "mean"}, "para": None, "sts": {"pair_encoding": "bi", "head": "cosine"}})
    trained = []
    for packing in (False, True):
        given = {"aggregator": aggregator, "packing": packing, "learning_rate": 0.1}
        trainer = make_trainer(tiny_model(tasks), dev=toy_rows(), **given)
        assert ("packing" in next(iter(trainer.get_train_dataloader()))["sst"]) == packing
        trainer.train()
        trained.append((parameters(trainer.model), trainer.evaluate()))
    (plain, scores), (packed, packed_scores) = trained
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-4)
    assert packed_scores["eval_overall"] == pytest.approx(scores["eval_overall"], abs=1e-4)
    moved = (plain[name] - start for name, start in parameters(tiny_model(tasks)).items())
    assert max(difference.abs().max() for difference in moved) > 0.01
