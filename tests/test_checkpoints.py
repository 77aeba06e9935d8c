"""Files: every kind of BERT checkpoint in, our own classes out and in again, and a folder that needs no package."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_minbert
from hf_minbert import MinBertForMaskedLM, MinBertForMultiTask, MinBertModel, Predictor, get_tasks

IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 3, 0, 0]])
MASK = (IDS > 0).long()
TASKS = ["sst", "para", "sts"]
NEW_HEADS = {f"heads.{task}.linear.{part}" for task in TASKS for part in ("weight", "bias")}


@pytest.fixture(scope="module")
def stock_config(tiny_config):
    ours = tiny_config().to_dict()
    return BertConfig(**{key: value for key, value in ours.items() if key in BertConfig.__annotations__})


@pytest.fixture(scope="module")
def pretraining(stock_config):
    """A stock BERT with both heads of its pre-training; the biases and norms are not at their start values."""
    torch.manual_seed(3)
    model = BertForPreTraining(stock_config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rewrite(folder: Path, change, binary=False):
    """Give the weights in `folder` other names, and optionally the older file format."""
    file = folder / "model.safetensors"
    weights = {change(key): value for key, value in load_file(file).items()}
    if binary:
        file.unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, file, metadata={"format": "pt"})


def old_names(key: str) -> str:
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def load_multitask(folder, **kwargs):
    model, report = MinBertForMultiTask.from_pretrained(
        folder, tasks=get_tasks(TASKS), output_loading_info=True, **kwargs
    )
    assert set(report["missing_keys"]) == NEW_HEADS
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    return model


def assert_same_encoder(model, reference):
    """Its weights bit by bit; what it computes closely, as the library leaves its own weights in the file."""
    theirs, ours = reference.state_dict(), model.state_dict()
    assert set(theirs) == set(ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    with torch.no_grad():
        a, b = (each(IDS, attention_mask=MASK) for each in (model, reference))
    torch.testing.assert_close(a.last_hidden_state, b.last_hidden_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.pooler_output, b.pooler_output, rtol=0, atol=1e-5)


# -- BERT checkpoints in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("names", [lambda key: key, old_names], ids=["new names", "gamma and beta"])
@pytest.mark.parametrize("kind", ["bare", "prefixed, with heads"])
def test_any_bert_checkpoint_loads(tmp_path, pretraining, kind, names, binary):
    (pretraining.bert if kind == "bare" else pretraining).save_pretrained(tmp_path)
    rewrite(tmp_path, names, binary)
    assert_same_encoder(load_multitask(tmp_path).bert, pretraining.bert)
    model, report = MinBertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_encoder(model, pretraining.bert)


def test_positions_stored_by_old_releases_are_no_surprise(tmp_path, pretraining):
    pretraining.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_encoder(load_multitask(tmp_path).bert, pretraining.bert)


def test_a_config_that_does_not_name_its_type_is_a_bert(tmp_path, pretraining):
    pretraining.bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_encoder(load_multitask(tmp_path).bert, pretraining.bert)


def test_old_names_are_not_written_back(tmp_path, pretraining):
    pretraining.save_pretrained(tmp_path)
    rewrite(tmp_path, old_names)
    load_multitask(tmp_path).save_pretrained(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert not [key for key in written if "gamma" in key or "beta" in key]
    _, report = MinBertForMultiTask.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_a_foreign_head_is_reported(tmp_path, stock_config):
    BertForSequenceClassification(stock_config).save_pretrained(tmp_path)
    _, report = MinBertForMultiTask.from_pretrained(tmp_path, tasks=get_tasks(TASKS), output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"classifier.weight", "classifier.bias"}


def test_the_word_head_of_a_pretraining_checkpoint_is_used(tmp_path, pretraining):
    pretraining.save_pretrained(tmp_path)
    model, report = MinBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        ours, theirs = (each(IDS, attention_mask=MASK) for each in (model, pretraining))
    torch.testing.assert_close(ours.logits, theirs.prediction_logits, rtol=0, atol=5e-5)


def test_a_word_head_that_is_missing_starts_at_zero_bias(tmp_path, pretraining):
    pretraining.bert.save_pretrained(tmp_path)
    bias = MinBertForMaskedLM.from_pretrained(tmp_path).cls.predictions.bias
    assert torch.equal(bias, torch.zeros_like(bias))


def test_a_real_checkpoint_loads(minilm):
    assert_same_encoder(load_multitask(minilm).bert, BertModel.from_pretrained(minilm))


# -- our own files -----------------------------------------------------------------------------------------------


def make(kind, tiny_config, tiny_model):
    if kind is MinBertForMultiTask:
        return tiny_model().eval(), {"task": "sst"}
    return kind(tiny_config()).eval(), {}


@pytest.mark.parametrize("kind", [MinBertModel, MinBertForMaskedLM, MinBertForMultiTask])
def test_round_trip(tmp_path, tiny_config, tiny_model, kind):
    model, task = make(kind, tiny_config, tiny_model)
    model.save_pretrained(tmp_path)
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True, device_map="cpu")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        before, after = (each(IDS, attention_mask=MASK, **task)[0] for each in (model, loaded))
    assert torch.equal(before, after)
    half = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_the_encoder_of_a_multitask_model_loads_alone(tmp_path, tiny_model):
    model = tiny_model().eval()
    model.save_pretrained(tmp_path)
    encoder, report = MinBertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and set(report["unexpected_keys"]) == NEW_HEADS
    assert_same_encoder(encoder, model.bert)


def test_a_task_can_be_added_to_a_saved_model(tmp_path, tiny_model):
    model = tiny_model(tasks=["sst"])
    model.save_pretrained(tmp_path)
    more, report = MinBertForMultiTask.from_pretrained(
        tmp_path, tasks=get_tasks(["sts", "sst"]), output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"heads.sts.linear.weight", "heads.sts.linear.bias"}
    assert torch.equal(more.heads.sst.linear.weight, model.heads.sst.linear.weight)


def assert_tied(model):
    decoder, words = model.get_output_embeddings(), model.get_input_embeddings()
    assert decoder.weight.data_ptr() == words.weight.data_ptr()
    assert decoder.bias.data_ptr() == model.cls.predictions.bias.data_ptr()


@pytest.mark.parametrize("through_trainer", [False, True])
def test_the_tied_decoder_is_stored_once_and_tied_again(tmp_path, tiny_config, through_trainer):
    model = MinBertForMaskedLM(tiny_config())
    assert_tied(model)
    if through_trainer:
        Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none")).save_model()
    else:
        model.save_pretrained(tmp_path)
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert {key for key in stored if "decoder" in key} == set()
    assert {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"} <= stored
    assert_tied(MinBertForMaskedLM.from_pretrained(tmp_path))


def test_a_larger_vocabulary_reaches_decoder_and_bias(tmp_path, tiny_config):
    model = MinBertForMaskedLM(tiny_config()).eval()
    old = model.config.vocab_size
    before = model(IDS).logits
    model.resize_token_embeddings(old + 3)
    assert model.cls.predictions.bias.shape == (old + 3,)
    ids = torch.tensor([[2, old, old + 2, 3]])
    assert model(ids).logits.shape == (1, 4, old + 3)
    torch.testing.assert_close(model(IDS).logits[..., :old], before)
    assert_tied(model)
    model.save_pretrained(tmp_path)
    loaded = MinBertForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == old + 3
    assert_tied(loaded)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_decoder_set_by_hand_brings_its_bias(tiny_config):
    model = MinBertForMaskedLM(tiny_config())
    model.set_output_embeddings(torch.nn.Linear(32, 7))
    assert model.cls.predictions.bias is model.get_output_embeddings().bias


def test_a_layer_stays_on_one_device(tiny_model):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model()
    layer = sum(p.numel() * 4 for p in model.bert.encoder.layer[0].parameters())
    fixed = sum(p.numel() * 4 for p in model.bert.embeddings.parameters())
    room = {"cpu": fixed + int(1.5 * layer)}  # the second layer fits in part only
    placed = accelerate.infer_auto_device_map(model, room, no_split_module_classes=model._no_split_modules)
    assert not [name for name in placed if "layer" in name and not name[-1].isdigit()]


def test_a_larger_vocabulary_in_a_multitask_model(tiny_model):
    model = tiny_model()
    model.resize_token_embeddings(model.config.vocab_size + 3)
    assert model(torch.tensor([[2, model.config.vocab_size - 1, 3]]), task="sst").logits.shape == (1, 5)


def test_a_larger_vocabulary_reaches_private_encoders(tmp_path, tiny_model):
    model = tiny_model(private_encoders=True)
    last = model.config.vocab_size + 2
    model.resize_token_embeddings(last + 1)
    model.save_pretrained(tmp_path)
    loaded = MinBertForMultiTask.from_pretrained(tmp_path)
    ids = torch.tensor([[2, last, 3]])
    for task in model.config.task_names:
        assert torch.equal(loaded(ids, task=task).logits, model.eval()(ids, task=task).logits)


def test_a_model_can_be_pickled(tiny_model):
    model = tiny_model().eval()
    copied = pickle.loads(pickle.dumps(model))
    ids = torch.tensor([[2, 5, 3]])
    assert torch.equal(copied(ids, task="sts").logits, model(ids, task="sts").logits)


# -- Auto classes, pipelines, remote code ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MinBertModel, MinBertForMaskedLM, MinBertForMultiTask])
def test_every_folder_names_every_class_and_carries_the_code(tmp_path, tiny_config, tiny_model, kind):
    make(kind, tiny_config, tiny_model)[0].save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    heads = {f"AutoModelFor{what}" for what in ("MaskedLM", "SequenceClassification", "TokenClassification")}
    assert set(auto_map) == {"AutoConfig", "AutoModel", *heads}
    for reference in auto_map.values():
        file, name = reference.split(".")
        assert f"class {name}(" in (tmp_path / f"{file}.py").read_text()
    assert (tmp_path / "heads.py").is_file()


def test_auto_classes_know_ours(tmp_path, tiny_model):
    tiny_model().save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is MinBertModel
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is MinBertForMaskedLM
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, active_task="sts")
    assert type(model) is MinBertForMultiTask
    assert (model.config.active_task, model.config.problem_type) == ("sts", "regression")


@pytest.mark.parametrize("load", [AutoModelForSequenceClassification, MinBertForMultiTask], ids=lambda c: c.__name__)
def test_a_new_head_for_other_labels(tmp_path, tiny_model, load):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`num_labels=3` contradicts the active task 'para', which has 2"):
        load.from_pretrained(tmp_path, active_task="para", num_labels=3)
    for labels, head in ((3, 3), (2, 1)):
        given = {"id2label": dict(enumerate("abc"[:labels])), "ignore_mismatched_sizes": True}
        other = load.from_pretrained(tmp_path, active_task="para", num_labels=labels, **given)
        assert other.heads.para.linear.weight.shape == (head, 32)
        old, new = model.state_dict(), other.state_dict()
        renewed = {f"heads.para.linear.{part}" for part in ("weight", "bias") if head != 1}
        assert all(torch.equal(old[key], new[key]) for key in old if key not in renewed)
        output = other(IDS, MASK, labels=torch.tensor([labels - 1, 0]))
        assert output.logits.shape == (2, labels) and output.loss.isfinite()
        other.save_pretrained(tmp_path / "other")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "other")
        assert [*again.config.id2label.values()] == [*"abc"[:labels]]
        assert torch.equal(again(IDS, MASK).logits, other.eval()(IDS, MASK).logits)


@pytest.mark.parametrize("load", [AutoModelForSequenceClassification, MinBertForMultiTask], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "edited",
    [{"num_labels": 9}, {"id2label": dict(enumerate("abc"))}, {"label2id": {"a": 0, "b": 1}}, {"id2label": {0: "a"}}],
)
def test_labels_of_a_config_are_no_more_overruled_than_those_of_keywords(tmp_path, tiny_model, load, edited):
    tiny_model().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, active_task="sst")
    for name, value in edited.items():
        setattr(config, name, value)
    said = config.to_dict()
    for refuse in (load.from_pretrained, lambda _, config: MinBertForMultiTask(config)):
        with pytest.raises(ValueError, match="contradicts the active task 'sst', which has"):
            refuse(tmp_path, config=config)
    if edited == {"id2label": {0: "a"}}:  # no task has one label
        with pytest.raises(ValueError, match="`num_labels=1` contradicts the active task 'sst', which has 5"):
            load.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
        return
    model = load.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    for name, value in edited.items():
        assert getattr(model.config, name) == value
    assert model.heads.sst.linear.weight.shape[0] == model.config.num_labels == len(model.config.label2id)
    assert config.to_dict() == said  # the caller's own


def test_a_problem_that_is_none_of_the_tasks_is_refused(tmp_path, tiny_model):
    tiny_model().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, active_task="sst")
    config.problem_type = "regression"
    for new_head in (False, True):
        with pytest.raises(ValueError, match="`problem_type='regression'` contradicts the active task 'sst'"):
            MinBertForMultiTask.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=new_head)


def test_a_stock_script_trains_the_active_task(tmp_path, tiny_model):
    """As run_glue.py has it: a config for a number of labels, then the model by that config."""
    tiny_model(["para"]).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=3, finetuning_task="mnli")
    assert config.num_labels == 3
    with pytest.raises(ValueError, match="`num_labels=3` contradicts.*add `ignore_mismatched_sizes=True`"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=False)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    assert model(IDS, MASK, labels=torch.tensor([2, 0])).logits.shape == (2, 3)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=2, finetuning_task="mrpc")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, from_tf=False, config=config, ignore_mismatched_sizes=False
    )
    model.config.label2id = {"not duplicate": 0, "duplicate": 1}
    model.config.id2label = {id: label for label, id in config.label2id.items()}
    rows = [{"input_ids": ids, "attention_mask": mask, "labels": 1} for ids, mask in zip(IDS, MASK, strict=True)]
    given = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(tmp_path / "run", **given), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.predict(rows).predictions.shape == (2, 2)


@pytest.mark.parametrize("encoding", ["cross", "bi"])
def test_the_stock_pipeline_answers_for_the_active_task(tmp_path, tiny_model, tiny_tokenizer, encoding):
    fields = {"pair_encoding": encoding}
    tiny_model(get_tasks({"sst": None, "para": fields, "sts": fields})).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    predictor = Predictor.from_pretrained(tmp_path, device="cpu")
    firsts, seconds = ["the film", "why is it not good ?", "a"], ["a dog", "how", "the man plays , very bad ."]
    pairs = [{"text": one, "text_pair": other} for one, other in zip(firsts, seconds, strict=True)]
    for task in TASKS:
        own = predictor(task, firsts, *([] if task == "sst" else [seconds]))
        stock = pipeline("text-classification", model=str(tmp_path), model_kwargs={"active_task": task}, top_k=None)
        for batch_size in (1, 2):
            answers = stock(firsts if task == "sst" else pairs, batch_size=batch_size)
            for answer, expected in zip(answers, own, strict=True):
                found = {each["label"]: each["score"] for each in answer}
                wanted = expected.get("probabilities", {"sts": expected["prediction"]})  # a score as it is
                assert found == pytest.approx(wanted, abs=1e-5)


def fresh(script: str, folder: Path, **environment) -> str:
    """The output of a new process that runs `script` in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_ALONE = """
import sys
import hf_minbert
heavy = {"datasets", "evaluate", "peft", "sklearn", "scipy", "transformers.trainer", "transformers.training_args",
         "transformers.modeling_utils", "hf_minbert.model.modeling_minbert"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import transformers
for auto in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
    print(type(getattr(transformers, auto).from_pretrained("saved")).__module__)
"""


def test_importing_the_package_is_enough_and_cheap(tmp_path, tiny_model):
    tiny_model().save_pretrained(tmp_path / "saved")
    root = str(Path(hf_minbert.__file__).parents[1])
    printed = fresh(IMPORT_ALONE, tmp_path, PYTHONPATH=root).split()
    assert printed == ["hf_minbert.model.configuration_minbert"] + ["hf_minbert.model.modeling_minbert"] * 3


def test_public_names():
    assert set(hf_minbert.__all__) <= set(dir(hf_minbert))
    for name in hf_minbert.__all__:
        assert getattr(hf_minbert, name)
    with pytest.raises(AttributeError, match="no attribute 'MinBert'"):
        _ = hf_minbert.MinBert
