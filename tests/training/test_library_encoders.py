"""What trains, freezes and adapts parts of an encoder finds them in those that the library computes."""

from __future__ import annotations

import pytest
import torch
from small_encoders import TAKEN, saved

from hf_minbert import MinBertError, MinBertForMultiTask, get_tasks
from hf_minbert.evaluation.attribution import integrated_gradients, read
from hf_minbert.pretrained.adapters import add_adapter
from hf_minbert.training.freezing import layer_names

EACH = pytest.mark.parametrize("name", TAKEN)
#: One of each shape of layers, of what lies before them, and of what they take.
SOME = pytest.mark.parametrize("name", ["albert", "deberta-v2", "eurobert", "modernbert", "mpnet", "xlm", "xlnet"])


@pytest.fixture
def make_model(tmp_path):
    """`make_model(name, **fields)`: with the tasks of the trainer's toy rows, and no dropout."""

    def make(name: str, tasks=None, **fields) -> MinBertForMultiTask:
        folder = saved(name, tmp_path / name)
        off = {"attention_probs_dropout_prob": 0.0}
        off |= {} if name == "eurobert" else {"hidden_dropout_prob": 0.0}
        return MinBertForMultiTask.from_pretrained(
            folder, tasks=get_tasks(tasks or ["sst", "para", "sts"]), **off, **fields
        )

    return make


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(model, before) -> set[str]:
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def names_under(model, *modules) -> set[str]:
    owned = {id(p) for module in modules for p in module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in owned}


@EACH
def test_every_layer_learns_with_smart(make_trainer, make_model, name):
    model = make_model(name)
    before = snapshot(model)
    if name == "ibert":  # whose words' embeddings come with a scale
        with pytest.raises(
            MinBertError, match="`regularizer: smart` needs a model whose `forward` takes `inputs_embeds`"
        ):
            make_trainer(model, regularizer="smart")
        return
    trainer = make_trainer(model, regularizer="smart", smart_epsilon=1e-2, learning_rate=0.01)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "smart_sst" in entry]
    assert log and all(entry["smart_sst"] > 0 and not entry["smart_skipped"] for entry in log)
    changed = moved(model, before)
    _, *layers = model.encoder_path("sst")
    assert all(names_under(model, layer) & changed for layer in layers)
    assert names_under(model, model.bert.embeddings) & changed


@SOME
def test_pairs_that_tasks_share_go_through_it_once(make_trainer, make_model, toy_rows, name):
    pairs = toy_rows(para=8)["para"]
    train = {"para": pairs, "sts": [{**row, "label": place / 2} for place, row in enumerate(pairs)]}
    given = {"train_tasks": [*train], "share_rows": True, "per_device_train_batch_size": 8}
    trainer = make_trainer(make_model(name), train=train, **given)
    (batch,) = next(iter(trainer.get_train_dataloader())).values()
    inputs = {key: value for key, value in batch.items() if key not in ("task", "answers")}
    parameters = dict(trainer.model.named_parameters())
    losses = [trainer.model(**inputs, task=t, labels=a["labels"]).loss for t, a in batch["answers"].items()]
    expected = torch.autograd.grad(sum(losses), [*parameters.values()], allow_unused=True)
    passes = []
    trainer.model.bert.register_forward_hook(lambda *_: passes.append(1))
    trainer.training_step(trainer.model, {"para": batch})
    assert len(passes) == 1
    for (key, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None), key
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


@SOME
def test_the_lowest_layers_freeze(make_trainer, make_model, name):
    model = make_model(name)
    before, depth = snapshot(model), len(model.encoder_path("sst")) - 1
    make_trainer(model, freeze=max(depth - 1, 1), learning_rate=0.1).train()
    changed = moved(model, before)
    encoder, *layers = model.encoder_path("sst")
    assert not names_under(model, encoder.embeddings, *layers[: max(depth - 1, 1)]) & changed
    assert all(names_under(model, layer) & changed for layer in layers[max(depth - 1, 1) :])
    assert {key.split(".")[1] for key in changed if key.startswith("heads.")} == {"sst", "para", "sts"}


@SOME
def test_rates_fall_from_layer_to_layer(make_trainer, make_model, name):
    model = make_model(name)
    trainer = make_trainer(model, layer_decay=0.5, learning_rate=1.0)
    groups = trainer.create_optimizer().param_groups
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    encoder, *layers = model.encoder_path("sst")
    for distance, part in enumerate(reversed([encoder.embeddings, *layers])):
        assert {rate[id(p)] for p in part.parameters()} == {0.5**distance}
    called = layer_names(model)
    assert {called[p] for p in encoder.embeddings.parameters()} == {"embeddings"}
    assert {called[p] for p in layers[-1].parameters()} == {f"layer.{len(layers) - 1}"}


@SOME
def test_the_learned_mix_of_layers_learns(make_trainer, make_model, name):
    tasks = {"sst": {"pooling": "mean", "layers": "mix"}, "para": None, "sts": None}
    model = make_model(name, tasks)
    scores = model.heads.get("sst").layer_mix.scores
    assert len(scores) == 4
    make_trainer(model, learning_rate=0.1).train()
    assert scores.abs().min() > 0


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("deberta", {"in_proj"}), ("deberta-v2", {"query_proj", "value_proj"}), ("eurobert", {"q_proj", "v_proj"}),
        ("modernbert", {"Wqkv"}), ("mpnet", {"q", "v"}), ("xlm", {"q_lin", "v_lin"}), ("albert", {"query", "value"}),
    ],
)  # fmt: skip
def test_an_adapter_lies_on_queries_and_values_unless_told(make_trainer, make_model, name, targets):
    model = make_model(name)
    adapted = add_adapter(model, {"r": 2}, "base", heads=["sst", "para", "sts"], missing=["bert.pooler.dense.weight"])
    trained = {key for key, p in adapted.named_parameters() if p.requires_grad}
    assert {key.split(".lora_")[0].rpartition(".")[2] for key in trained if ".lora_" in key} == targets
    before = snapshot(adapted)
    make_trainer(adapted, learning_rate=0.1).train()
    assert moved(adapted, before) <= trained
    assert any(".lora_B" in key for key in moved(adapted, before))


def test_an_adapter_asks_for_names_where_there_are_none_to_guess(make_model):
    with pytest.raises(MinBertError, match="`peft` needs `target_modules`.*a xlnet"):
        add_adapter(make_model("xlnet"), {}, "base")
    with pytest.raises(MinBertError, match="the default targets of IA3 are layers of BERT"):
        add_adapter(make_model("mpnet"), {"peft_type": "IA3"}, "base")


@pytest.mark.parametrize("name", ["modernbert", "deberta-v2", "xlm"])
def test_the_popular_forms_of_smart_move_what_goes_into_the_layers(make_trainer, make_model, name):
    trainer = make_trainer(make_model(name), regularizer="smart", smart_form="mt-dnn", smart_noise_std=0.1)
    trainer.train()
    assert all(entry["smart_sst"] > 0 for entry in trainer.state.log_history if "smart_sst" in entry)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("modernbert", {"packing": True}, "`packing: true` needs a model whose `forward` takes `packing`"),
        ("modernbert", {"freeze": 4}, "`freeze` is 4 layers, and the model has 3"),
        ("albert", {"freeze": 2}, "`freeze` is 2 layers, and the model has 1"),
        ("mpnet", {"gradient_checkpointing": True}, "`gradient_checkpointing: true` needs"),
    ],
)
def test_what_an_encoder_has_not_is_refused(make_trainer, make_model, name, arguments, says):
    with pytest.raises(MinBertError, match=says):
        make_trainer(make_model(name), **arguments)


@pytest.mark.parametrize("name", ["ibert", "xlnet"])  # a tuple, and tokens before sentences
def test_noise_on_words_needs_a_table_of_them(make_trainer, make_model, name):
    with pytest.raises(MinBertError, match="needs a model that embeds all words of a batch at once"):
        make_trainer(make_model(name), neftune_noise_alpha=5.0).train()


def test_nothing_is_moved_where_no_module_gives_what_goes_into_the_layers(make_trainer, make_model):
    trainer = make_trainer(make_model("albert"), regularizer="smart", smart_form="mt-dnn")
    with pytest.raises(ValueError, match="a hook cannot be registered"):
        trainer.train()


@pytest.mark.parametrize("name", ["modernbert", "deberta-v2", "eurobert"])
def test_activation_checkpointing_changes_no_gradient(make_trainer, make_model, name):
    found = []
    for checkpointing in (False, True):
        model = make_model(name)
        make_trainer(model, gradient_checkpointing=checkpointing, learning_rate=0.1).train()
        found.append(snapshot(model))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-6)


def test_fgm_neftune_and_gradual_unfreezing_run(make_trainer, make_model):
    model = make_model("deberta-v2")
    before = snapshot(model)
    trainer = make_trainer(
        model, regularizer="fgm", neftune_noise_alpha=5.0, freeze="encoder", unfreeze="gradual", max_steps=-1,
        num_train_epochs=5, learning_rate=0.01, max_grad_norm=1.0,
    )  # fmt: skip
    trainer.train()
    assert all(entry["fgm_sst"] > 0 for entry in trainer.state.log_history if "fgm_sst" in entry)
    assert names_under(model, model.bert.embeddings) & moved(model, before)


@SOME
def test_words_move_an_answer(make_model, tiny_tokenizer, name):
    model = make_model(name).eval()
    reading = read(tiny_tokenizer, model.config, "sst", ["the film is not good"], 32)
    found = integrated_gradients(model, tiny_tokenizer, "sst", reading, 2, steps=64)
    assert len(found.values[0]) == 5
    assert abs(found.error) < 0.05 * (1 + abs(found.end - found.start))
