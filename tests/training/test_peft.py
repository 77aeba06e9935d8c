"""Adapters: what a recipe's `peft` trains, saves and loads again."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_minbert import MinBertConfig, MinBertError, MinBertForMultiTask, MultiTaskTrainer, Predictor, get_tasks
from hf_minbert.pretrained.adapted import merged
from hf_minbert.pretrained.adapters import METHODS, add_adapter, check, load_adapters
from hf_minbert.pretrained.merging import average, ensemble
from hf_minbert.run import train as run
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.training.step import RoundStep

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")

LORA = {"r": 2, "target_modules": ["query", "value"]}
DEV = {"sst": 11, "para": 7, "sts": 9}
SENTENCES = ["good film", "the man plays", "why is it not very bad ?", "a dog"]
ROWS = [{"sentence": text, "sentence1": text, "sentence2": text[::-1]} for text in SENTENCES]


@pytest.fixture(scope="module")
def narrow_model(tiny_model):
    """The tiny model with weights that make of 32 dimensions what BERT's own make of 768: 0.02 * sqrt(768 / 32).

    Then the last bits of a number are as small as BERT's, and the model still tells sentences apart.
    """
    return partial(tiny_model, initializer_range=0.1)


@pytest.fixture(scope="module")
def narrow_bert(narrow_model, tiny_tokenizer, tmp_path_factory):
    """A folder with a plain BERT of the library of such weights, and its tokenizer."""
    folder, config = tmp_path_factory.mktemp("bert"), narrow_model().config.to_dict()
    sizes = {key: value for key, value in config.items() if key in BertConfig().to_dict()}
    torch.manual_seed(0)
    BertModel(BertConfig(**{**sizes, "model_type": "bert"})).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def train(narrow_bert, course_dir, tmp_path_factory):
    """`train("name", peft=..., ...)`: the folder of a finished run of three steps."""
    root = tmp_path_factory.mktemp("runs")

    def make(name, **changes):
        words = {
            "model_name_or_path": str(narrow_bert), "data_dir": str(course_dir), "output_dir": str(root / name),
            "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "disable_tqdm": True, "hidden_dropout_prob": 0.1, "peft": LORA, **changes,
        }  # fmt: skip
        recipe = root / f"{name}.yaml"
        recipe.write_text(json.dumps(words), encoding="utf-8")
        run.train(read_recipe(recipe))
        return root / name

    return make


@pytest.fixture(scope="module")
def lora(train):
    """A run with LoRA over a plain BERT. Not to be changed."""
    return train("lora", task_weights={"sts": 2.0})


@pytest.fixture(scope="module")
def published(train):
    """A finished run without an adapter, of three tasks. Not to be changed."""
    return train("published", peft=None)


@pytest.fixture
def adapted(narrow_model):
    """`adapted(peft options, heads=...)`: a new adapter on the tiny model."""

    def make(options=LORA, tasks=("sst", "para", "sts"), **given):
        return add_adapter(narrow_model(tasks), options, "base", heads=tasks, **given)

    return make


def moved(model, amount=0.3):
    """The model, with what it trains at other values."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += amount * torch.randn_like(parameter)
    return model.eval()


def answers(predictor, tasks=None):
    return predictor.logits_of(tasks or list(predictor.tasks), ROWS)


def assert_same(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=atol)


def largest_difference(found, expected):
    return max(np.abs(found[name] - expected[name]).max() for name in expected)


# ---- what a run leaves, and who loads it


def test_a_run_saves_adapter_and_heads_alone(lora, narrow_bert):
    names = {path.name for path in lora.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "README.md"} & names
    weights = load_file(lora / "adapter_model.safetensors")
    assert all("lora_" in name or ".heads." in name for name in weights)
    assert json.loads((lora / "adapter_config.json").read_text())["base_model_name_or_path"] == str(narrow_bert)


def test_a_run_answers_as_peft_itself_loads_it(lora, narrow_bert):
    config = MinBertConfig.from_pretrained(lora)
    base = MinBertForMultiTask.from_pretrained(narrow_bert, config=config)
    predictor = Predictor.from_pretrained(lora)
    by_peft = Predictor(peft.PeftModel.from_pretrained(base, lora), predictor.tokenizer)
    assert_same(answers(predictor), answers(by_peft))
    before = MinBertForMultiTask.from_pretrained(narrow_bert, config=config)
    before.heads.load_state_dict(predictor.model.heads.state_dict())
    without = answers(Predictor(before, predictor.tokenizer))
    assert largest_difference(answers(predictor), without) > 0.01  # so the adapter does something


def test_commands_take_a_run_as_any_other(lora, minbert, course_dir, tmp_path):
    ended = minbert("evaluate", lora, "--data-dir", course_dir, "--output", tmp_path / "scores.json")
    assert ended.status == 0, ended.err
    metrics = json.loads((lora / "metrics.json").read_text())
    for name, value in json.loads((tmp_path / "scores.json").read_text()).items():
        assert value == pytest.approx(metrics[name], abs=1e-5)
    ended = minbert("predict", lora, "--task", "sts", "--text", "a man", "--text-pair", "a dog")
    answer = Predictor.from_pretrained(lora)("sts", ["a man"], ["a dog"])[0]["prediction"]
    assert float(ended.out) == pytest.approx(answer, abs=1e-3)


def test_merge_makes_an_ordinary_model(lora, published, minbert, tmp_path):
    ended = minbert("merge", lora, "--output-dir", tmp_path / "model")
    assert ended.status == 0, ended.err
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "model" / "adapter_config.json").exists()
    predictor = Predictor.from_pretrained(tmp_path / "model")
    assert_same(answers(predictor), answers(Predictor.from_pretrained(lora)))
    plain = MinBertForMultiTask.from_pretrained(tmp_path / "model")
    assert_same(answers(Predictor(plain, predictor.tokenizer)), answers(predictor), atol=0)
    ended = minbert("merge", published, "--output-dir", tmp_path / "other")
    assert ended.status == 2 and "is not an adapter" in ended.err


def test_a_base_that_is_gone_is_named(lora, tmp_path):
    shutil.copytree(lora, tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone" / "away")
    (tmp_path / "moved" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MinBertError, match=r"The base model '.*away' of the adapter '.*moved': There is no model"):
        Predictor.from_pretrained(tmp_path / "moved")


def test_an_overwritten_run_leaves_no_adapter_under_the_next(train):
    folder = train("twice", max_steps=1)
    train("twice", peft=None, overwrite=True, max_steps=1)
    assert (folder / "model.safetensors").is_file()
    assert not [*folder.glob("adapter_*")]


# ---- round trips


@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "lora_alpha": 4},
        {"r": 2, "use_dora": True},
        {"r": 2, "use_rslora": True, "target_modules": "all-linear"},
        {"r": 2, "init_lora_weights": "gaussian", "layers_to_transform": [1], "target_modules": ["output.dense"]},
        {"peft_type": "IA3"},
        {"peft_type": "IA3", "target_modules": ["key"]},
        {"peft_type": "LOHA", "r": 2},
        {"peft_type": "LOKR", "r": 2},
        {"peft_type": "OFT", "oft_block_size": 8},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_every_method_starts_as_the_base_and_comes_back(options, adapted, narrow_model, tiny_tokenizer, tmp_path):
    base = answers(Predictor(narrow_model(), tiny_tokenizer))
    model = adapted(options)
    assert_same(answers(Predictor(model, tiny_tokenizer)), base)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not [
        name for name in trained if ".heads." in name and ".modules_to_save." not in name
    ]  # no adapter in them
    expected = answers(Predictor(moved(model, 0.1), tiny_tokenizer))
    assert largest_difference(expected, base) > 1e-2
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(narrow_model(), tmp_path)
    assert_same(answers(Predictor(again, tiny_tokenizer)), expected, atol=0)
    plain = merged(model)
    assert plain.state_dict().keys() == narrow_model().state_dict().keys()
    assert_same(answers(Predictor(plain, tiny_tokenizer)), expected)


def test_on_a_real_checkpoint_a_merged_adapter_answers_as_before(minilm, tmp_path):
    config = MinBertConfig.from_pretrained(minilm, tasks=get_tasks(["sst", "para", "sts"]))
    base = MinBertForMultiTask.from_pretrained(minilm, config=config)
    model = moved(add_adapter(base, {"r": 8}, str(minilm), heads=config.task_names), 0.05)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path)
    expected = answers(Predictor(model, tokenizer))
    assert_same(answers(Predictor.from_pretrained(tmp_path, device="cpu")), expected)


def test_a_pooler_that_the_base_lacks_is_saved_too(adapted, narrow_model, tmp_path):
    lacking = [name for name in narrow_model().state_dict() if name.startswith("bert.pooler.")]
    moved(adapted(missing=lacking)).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {"base_model.model.bert.pooler.dense.weight", "base_model.model.bert.pooler.dense.bias"} <= saved.keys()


def test_private_layers_are_adapted_each_for_itself(train):
    folder = train("private", private_layers=1, aggregator="pcgrad")
    adapters = {name for name in load_file(folder / "adapter_model.safetensors") if "lora_B" in name}
    assert len([name for name in adapters if ".private." in name]) == 2 * 2  # of two tasks, query and value
    assert len(answers(Predictor.from_pretrained(folder))) == 3


def test_averages_and_ensembles_take_adapters_merged(train, lora):
    other = train("other", seed=1)
    ours, theirs = (Predictor.from_pretrained(folder) for folder in (lora, other))
    soup = average([ours.model, theirs.model]).state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    mean = (ours.model.state_dict()[name] + theirs.model.state_dict()[name]) / 2
    torch.testing.assert_close(soup[name], mean, rtol=0, atol=1e-7)
    assert_same(answers(Predictor(average([ours.model]), ours.tokenizer)), answers(ours))
    both = ensemble([ours.model, theirs.model], {"sst": 0, "para": 1, "sts": 1})
    expected = {**answers(theirs), "sst": answers(ours)["sst"]}
    assert_same(answers(Predictor(both, ours.tokenizer)), expected)


# ---- in training


def test_surgery_sees_adapters_alone(make_trainer, adapted):
    trainer = make_trainer(adapted(), aggregator="pcgrad")
    trainer.train()
    in_encoder = [p.numel() for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert sum(in_encoder) == 2 * 2 * 2 * (2 * 32)  # layers, query and value, A and B, rank times width
    assert trainer.step.gradients._matrix.shape == (3, sum(in_encoder))


@pytest.mark.parametrize(
    "given",
    [
        {"regularizer": "smart", "smart_epsilon": 1e-3},
        {"packing": True, "gradient_accumulation_steps": 2},
        {"proximal": "momentum", "aggregator": "pcgrad"},
        {"gradient_checkpointing": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_is_under_the_adapter_never_moves(make_trainer, adapted, given):
    trainer = make_trainer(adapted({"r": 2, "lora_dropout": 0.1}), learning_rate=0.1, **given)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name or "modules_to_save" in name for name in changed)
    assert [name for name in changed if "lora_B" in name]


def test_dropout_is_on_from_the_first_step(make_trainer, adapted, monkeypatch):
    model = adapted({"r": 2, "lora_dropout": 0.1})
    model.get_base_model().eval()  # as a model comes from its folder
    trainer, step, off = make_trainer(model, dev=DEV), RoundStep._backward, []

    def spy(self, *args):
        off.extend(name for name, module in trainer.model.named_modules() if not module.training)
        return step(self, *args)

    monkeypatch.setattr(RoundStep, "_backward", spy)
    trainer.train()
    assert off == []
    trainer.evaluate()
    trainer.train()
    assert off == []


def test_packed_steps_are_padded_steps(make_trainer, adapted):
    trained = []
    for packing in (False, True):
        trainer = make_trainer(adapted(), packing=packing, aggregator="pcgrad", learning_rate=0.1)
        trainer.train()
        trained.append(dict(trainer.model.named_parameters()))
    torch.testing.assert_close(*trained, atol=1e-5, rtol=1e-4)


def test_freezing_and_rates_know_the_parts_of_an_adapter(make_trainer, adapted):
    trainer = make_trainer(adapted(), freeze=1, unfreeze={1: "none"}, learning_rates={"encoder": 1e-4, "sts": 1e-2})
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    groups = {group["group"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert groups == {"": 1e-3, "encoder": 1e-4, "sts": 1e-2}
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert any("layer.0" in name for name in moved) and any("layer.1" in name for name in moved)
    heads_alone = make_trainer(adapted(), freeze="encoder")
    assert not [name for name, p in heads_alone.model.named_parameters() if p.requires_grad and "lora_" in name]
    lower = make_trainer(adapted(), freeze=1)
    assert {name for name, p in lower.model.named_parameters() if p.requires_grad and "lora_" in name} == {
        name for name, _ in lower.model.named_parameters() if "lora_" in name and "layer.1" in name
    }


def test_a_run_that_stopped_goes_on_to_the_same_bits(train, monkeypatch):
    given = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "aggregator": "pcgrad", "gradient_accumulation_steps": 2,
        "peft": {**LORA, "lora_dropout": 0.1}, "freeze": 1, "unfreeze": {"3": "none"},
    }  # fmt: skip
    whole, step, calls = train("whole", **given), MultiTaskTrainer.training_step, iter(range(100))

    def stopping(*args, **kwargs):
        if next(calls) == 7:  # in the fifth step
            raise RuntimeError("stopped")
        return step(*args, **kwargs)

    monkeypatch.setattr(MultiTaskTrainer, "training_step", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        train("stopped", **given)
    monkeypatch.setattr(MultiTaskTrainer, "training_step", step)
    stopped = train("stopped", **given, resume_from_checkpoint=True)
    for part in ("", "checkpoint-6"):  # the best model, and the last one
        ours, theirs = (load_file(folder / part / "adapter_model.safetensors") for folder in (stopped, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    theirs = load_file(whole / "adapter_model.safetensors")
    best = json.loads((whole / "metrics.json").read_text())["best_step"]
    best = load_file(whole / f"checkpoint-{best}" / "adapter_model.safetensors")
    assert all(torch.equal(best[name], theirs[name]) for name in theirs)


def test_a_run_with_another_adapter_does_not_resume(train):
    train("first", save_strategy="steps", save_steps=1, max_steps=1)
    with pytest.raises(MinBertError, match=r"was started with peft.r = 2 and cannot be resumed with 4"):
        train("first", save_strategy="steps", save_steps=1, max_steps=2, peft={"r": 4}, resume_from_checkpoint=True)


def test_a_new_adapter_has_the_metrics_of_its_base(make_trainer, adapted, narrow_model, scores):
    expected = scores(make_trainer(narrow_model(), dev=DEV).evaluate())
    found = scores(make_trainer(adapted(), dev=DEV).evaluate())
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-5)


# ---- one run after another


def test_an_adapter_becomes_part_of_the_next_run_or_is_trained_on(train, lora):
    plain = train("onto", model_name_or_path=str(lora), peft=None, learning_rate=0.0)
    assert (plain / "model.safetensors").is_file()
    assert_same(answers(Predictor.from_pretrained(plain)), answers(Predictor.from_pretrained(lora)))
    on = train("on", model_name_or_path=str(lora), learning_rate=0.0)
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (on, lora))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(MinBertError, match=r"is an adapter with `r: 2`, and `peft` says 4.*minbert merge"):
        train("another", model_name_or_path=str(lora), peft={**LORA, "r": 4})


def test_stages_pass_adapters_on(train):
    stages = [
        {"name": "heads", "freeze": "encoder"},  # an adapter that is not trained yet
        {"name": "adapter"},
        {"name": "all", "peft": None, "learning_rate": 0.0},
        {"name": "again", "max_steps": 1},
    ]
    root = train("stages", stages=stages)
    heads, adapter, merged, again = (root / "stages" / name for name in ("1-heads", "2-adapter", "3-all", "4-again"))
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (heads, adapter))
    assert not any(values.any() for name, values in before.items() if "lora_B" in name)
    assert all(values.any() for name, values in after.items() if "lora_B" in name)
    assert_same(answers(Predictor.from_pretrained(merged)), answers(Predictor.from_pretrained(adapter)))
    assert json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"] == str(merged)
    assert_same(answers(Predictor.from_pretrained(root)), answers(Predictor.from_pretrained(again)), atol=0)
    with pytest.raises(MinBertError, match=r"Stage 2 \(b\): `peft` is .*and .* in the stage before"):
        train("changing", stages=[{"name": "a"}, {"name": "b", "peft": {"r": 3}}])


def test_masked_words_are_not_trained_on_an_adapter(train, lora):
    words = {"objective": "mlm", "peft": None, "task_weights": None}
    with pytest.raises(MinBertError, match="is an adapter, and `objective: mlm` trains a whole model.*minbert merge"):
        train("words", model_name_or_path=str(lora), **words)
    with pytest.raises(MinBertError, match=r"Stage 2 \(b\): `objective: mlm` .* the stage before ends with an"):
        train("words", stages=[{"name": "a"}, {"name": "b", **words}])
    assert not (lora.parent / "words" / "stages").exists()


# ---- a new task on a model that is not to change


@pytest.fixture(scope="module")
def new_task(train, published, tmp_path_factory):
    """`new_task("name", labels=...)`: a run of an adapter for a task that the published model does not have."""
    table = tmp_path_factory.mktemp("questions") / "train.csv"
    table.write_text("question,type\n" + "".join(f"why is it {i} ?,{'ab'[i % 2]}\n" for i in range(12)))

    def make(name, task, **changes):
        own = {
            "kind": "classes", "labels": ["a", "b"], "text_columns": "question", "label_column": "type",
            "files": {"train": str(table), "dev": str(table)},
        }  # fmt: skip
        return train(name, model_name_or_path=str(published), tasks={task: own}, **changes)

    return make


@pytest.fixture(scope="module")
def question(new_task):
    return new_task("question", "question", learning_rate=0.05)


def test_a_new_task_leaves_the_published_model_as_it_is(question, published):
    saved = load_file(question / "adapter_model.safetensors")
    assert all("lora_" in name or ".heads.question." in name for name in saved)
    assert set(Predictor.from_pretrained(question).tasks) == {"question"}
    old, new = MinBertConfig.from_pretrained(published), MinBertConfig.from_pretrained(question)
    old.rearrange(tasks=[*old.tasks, *new.tasks])
    model = peft.PeftModel.from_pretrained(MinBertForMultiTask.from_pretrained(published, config=old), question)
    predictor = Predictor(model, Predictor.from_pretrained(published).tokenizer)
    rows = [{"question": text} for text in SENTENCES]
    theirs = Predictor.from_pretrained(question).logits("question", rows)
    np.testing.assert_allclose(predictor.logits("question", rows), theirs, rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert_same(answers(predictor, ["sst", "para", "sts"]), answers(Predictor.from_pretrained(published)), atol=0)


def test_several_adapters_share_one_encoder(train, new_task, question, published, lora):
    sst = train("on-published", model_name_or_path=str(published), tasks=["sst"], learning_rate=0.05)
    model = load_adapters({"question": question, "sst": sst})
    predictor = Predictor(model, Predictor.from_pretrained(published).tokenizer)
    rows = [{"question": text, "sentence": text} for text in SENTENCES]
    for task, folder in (("sst", sst), ("question", question), ("sst", sst)):
        model.set_adapter(task)
        alone = Predictor.from_pretrained(folder).logits(task, rows)
        np.testing.assert_allclose(predictor.logits(task, rows), alone, rtol=0, atol=1e-5)
    model.set_adapter("question")
    assert not np.allclose(predictor.logits("sst", rows), Predictor.from_pretrained(sst).logits("sst", rows))
    with pytest.raises(MinBertError, match="has the base model .*Give adapters of one base model"):
        load_adapters({"question": question, "lora": lora})
    with pytest.raises(MinBertError, match="Loading the adapters 'a.b' failed: .*plain names"):
        load_adapters({"a.b": question})


def test_an_old_head_that_is_not_trained_stays_with_its_model(train, published):
    folder = train("one-of-three", model_name_or_path=str(published), train_tasks=["sst"])
    saved = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".heads.")[1].split(".")[0] for name in saved if ".heads." in name} == {"sst"}
    ours, theirs = (Predictor.from_pretrained(place).model.heads.state_dict() for place in (folder, published))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("sst."))


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 4}, r"`peft`: Unknown option of LORA 'rank'\. .*Choose from: .*lora_alpha"),
        ({"lora_alph": 4}, "Did you mean 'lora_alpha'"),
        ({"bias": "all"}, "Unknown option of LORA 'bias'"),
        (
            {"target_modules": ["querry"]},
            r"`peft.target_modules`: Unknown layer of the encoder 'querry'.*mean 'query'",
        ),
        ({"target_modules": ["query", "linear"]}, r"'linear'.*output\.dense"),  # of a head
        ({"target_modules": ["LayerNorm"]}, "Unknown layer of the encoder 'LayerNorm'"),
        ({"layers_to_transform": [2]}, "counts from 0, and the encoder has 2 layers. Found 2"),
        ({"r": "many"}, "`peft.r` must be a whole number. Found 'many'"),
        ({"r": 0}, "Adding the adapter LORA failed: .*positive.*Correct `peft`"),
        ({"use_dora": "no"}, "`peft.use_dora` must be true or false"),
        ({"init_lora_weights": "pissa"}, "`peft.init_lora_weights` must be true or false or one of gaussian"),
        ({"peft_type": "LORRA"}, "Unknown `peft.peft_type` 'LORRA'. Did you mean 'LORA'"),
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING` is not supported: it adds virtual tokens before the input"),
        ({"peft_type": "ADALORA"}, "ADALORA` is not supported: it chooses its ranks by scores that no checkpoint"),
    ],
)
def test_a_wrong_option_is_said_before_weights_are_read(options, said, tiny_config):
    with pytest.raises(MinBertError, match=said):
        check(options, tiny_config(tasks=get_tasks(["sst"])))


def test_what_does_not_go_with_an_adapter(train):
    with pytest.raises(MinBertError, match="`peft` is for tasks: `objective: mlm` trains the encoder itself"):
        train("mlm", objective="mlm")
    with pytest.raises(MinBertError, match="`peft` does not work with reentrant gradient checkpointing"):
        train("reentrant", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def test_the_options_are_those_of_peft():
    from dataclasses import fields

    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    for method, options in METHODS.items():
        assert options.keys() <= {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[method])}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_alpha": 0}, r"`peft.lora_alpha` must be a finite number above 0.* Found 0\.0"),
        ({"lora_alpha": -8}, r"`peft.lora_alpha` must be"),
        ({"lora_alpha": float("nan")}, r"`peft.lora_alpha` must be"),
        ({"lora_alpha": float("inf")}, r"`peft.lora_alpha` must be"),
        ({"lora_dropout": 1}, r"`peft.lora_dropout` must be from 0 to less than 1"),
        ({"lora_dropout": -0.1}, r"`peft.lora_dropout` must be"),
        ({"r": 0}, r"`r` should be a positive integer"),
        ({"target_modules": []}, r"Adding the adapter LORA failed: No modules were targeted"),
        *(
            ({"peft_type": method, **option}, f"`peft.{next(iter(option))}` must be")
            for method in ("LOHA", "LOKR")
            for option in ({"alpha": 0}, {"rank_dropout": 1}, {"module_dropout": 1}, {"module_dropout": float("nan")})
        ),
        ({"peft_type": "LOHA", "r": 0}, r"`r` should be a positive integer"),
        ({"peft_type": "OFT", "module_dropout": 1}, r"`peft.module_dropout` must be"),
        ({"peft_type": "OFT", "oft_block_size": 1}, r"nothing to train.*oft_block_size` of 2 or more"),
        ({"peft_type": "OFT", "r": 32, "oft_block_size": 0}, r"nothing to train"),
        ({"peft_type": "OFT", "oft_block_size": 0}, r"must be non-zero"),
    ],
    ids=str,
)
def test_an_adapter_that_would_train_nothing_is_refused_in_one_line(tiny_config, options, said):
    with pytest.raises(MinBertError, match=said) as error:
        check(options, tiny_config(tasks=get_tasks(["sst"])))
    assert "\n" not in str(error.value)
