"""Loading a checkpoint to train it on: which heads are taken over and which start anew."""

import shutil

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hf_minbert import get_tasks
from hf_minbert.errors import MinBertError
from hf_minbert.pretrained.loading import load_config, load_tokenizer, load_weights
from hf_minbert.run.inputs import model_config
from hf_minbert.settings.run import RunSettings


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A saved model of sst and sts, its folder, and `load(tasks)` as a run loads it."""
    model = tiny_model(["sst", "sts"], seed=3)
    model.save_pretrained(tmp_path)

    def load(tasks):
        return load_weights(str(tmp_path), model_config(RunSettings(str(tmp_path), "out"), get_tasks(tasks)))

    return model, load


def equal_heads(model, loaded, task):
    return all(map(torch.equal, model.heads.get(task).parameters(), loaded.heads.get(task).parameters()))


def test_heads_of_the_same_tasks_are_taken_over(saved, caplog):
    model, load = saved
    loaded, missing = load({"sts": {"head_options": {"dropout": 0.3}}, "sst": None, "para": None})
    assert equal_heads(model, loaded, "sst") and equal_heads(model, loaded, "sts")
    assert missing == ["heads.para.linear.bias", "heads.para.linear.weight"]
    assert not caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": ["one", "two", "three", "four", "five"]},  # as many as before
        {"labels": ["down", "up"]},
        {"head": "mlp"},
        {"pooling": "mean"},
    ],
    ids=str,
)
def test_a_head_for_other_labels_or_of_another_kind_starts_anew(saved, caplog, fields):
    model, load = saved
    loaded, missing = load({"sst": fields, "sts": None})
    assert {key.split(".")[1] for key in missing} == {"sst"}
    assert set(missing) == {f"heads.sst.{name}" for name, _ in loaded.heads.sst.named_parameters()}
    assert equal_heads(model, loaded, "sts") and not equal_heads(model, loaded, "sst")
    assert "the saved head of 'sst' has another architecture or other labels, so a new head" in caplog.text
    labels = torch.tensor([1])
    assert loaded(task="sst", input_ids=torch.tensor([[2, 9, 3]]), labels=labels).loss.isfinite()


SIAMESE = {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"head_options": {"scale": 3}}),
        ({}, {"range": [0, 10]}),
        ({"pooling": "mean"}, {"pooling": "mean", "layers": "mix"}),
        ({"head": "mlp"}, {"head": "mlp", "head_options": {"activation": "tanh"}}),
        ({**SIAMESE, "head_options": {"projection_size": 4}}, SIAMESE),
        (
            {**SIAMESE, "head_options": {"projection_size": 4}},
            {**SIAMESE, "head_options": {"projection_size": 4, "mapping": "relu"}},
        ),
    ],
    ids=str,
)
def test_a_head_whose_weights_would_mean_something_else_starts_anew(tiny_model, tmp_path, caplog, before, after):
    """All of its weights have the shapes that are asked for, and would load without a word."""
    model = tiny_model(get_tasks({"sts": before}), seed=3)
    model.save_pretrained(tmp_path)
    loaded, missing = load_weights(str(tmp_path), load_config(str(tmp_path), tasks=get_tasks({"sts": after})))
    assert set(missing) == {f"heads.sts.{name}" for name, _ in loaded.heads.sts.named_parameters()}
    saved = dict(model.heads.sts.named_parameters())
    for name, parameter in loaded.heads.sts.named_parameters():  # a bias begins where it began before
        assert not name.endswith("weight") or not torch.equal(parameter, saved.get(name, torch.empty(0))), name
    assert "the saved head of 'sts' has another architecture or other labels, so a new head" in caplog.text


def test_options_that_only_training_looks_at_are_no_other_head(tiny_model, tmp_path, caplog):
    fields = {"head": "mlp", "head_options": {"hidden_sizes": (8,), "dropouts": (0.1, 0.2)}}
    model = tiny_model(get_tasks({"sts": fields}), seed=3)
    model.save_pretrained(tmp_path)
    changed = {"hidden_sizes": (8,), "dropouts": (0.3, 0.4)}  # a tuple, which config.json gives back as a list
    tasks = get_tasks({"sts": {**fields, "head_options": changed, "sentence_dropout": 0.1, "loss": "cosent"}})
    loaded, missing = load_weights(str(tmp_path), load_config(str(tmp_path), tasks=tasks))
    assert equal_heads(model, loaded, "sts") and not missing and not caplog.text


def test_a_head_of_other_sizes_starts_anew(tiny_model, tmp_path, caplog):
    sizes = [{"head": "blocks", "head_options": {"hidden_sizes": [size]}} for size in (8, 4)]
    tiny_model(get_tasks({"sst": sizes[0]})).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), tasks=get_tasks({"sst": sizes[1]}))
    loaded, missing = load_weights(str(tmp_path), config)
    assert set(missing) == {f"heads.sst.{name}" for name, _ in loaded.heads.sst.named_parameters()}
    assert "so a new head is trained" in caplog.text


def test_a_model_saved_without_its_tokenizer_is_told_so(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(
        MinBertError,
        match=r"has no tokenizer: there is no tokenizer.json, nor what .* \(vocab.txt, ",
    ):
        load_tokenizer(str(tmp_path), load_config(str(tmp_path)))


def test_a_tokenizer_without_cls_and_sep_is_refused(tiny_bert, tiny_tokenizer, tmp_path):
    """Of an empty text it would give nothing to encode."""
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    assert load_tokenizer(str(folder), load_config(str(folder)))("")["input_ids"]
    backend = type(tiny_tokenizer.backend_tokenizer).from_str(tiny_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    bare.save_pretrained(folder)
    with pytest.raises(MinBertError, match="adds no special tokens to a text"):
        load_tokenizer(str(folder), load_config(str(folder)))
