"""Heads: each kind's loss against its formula, shapes that must not broadcast, names that are refused."""

import math
import warnings

import pytest
import torch

from hf_minbert import TASKS, Task
from hf_minbert.heads import HEADS, LinearHead, TaskHeads


def head(config, name):
    return LinearHead(config, TASKS[name].to_config())


@pytest.mark.parametrize(("name", "outputs"), [("sst", 5), ("para", 1), ("sts", 1), ("cfimdb", 2)])
def test_a_head_gives_one_logit_per_class_and_else_one(tiny_config, name, outputs):
    assert head(tiny_config(), name)(torch.zeros(3, 32)).shape == (3, outputs)


def test_classes_loss_is_cross_entropy(tiny_config):
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0], [math.log(6), 0.0, 0.0, 0.0, 0.0]])
    loss = head(tiny_config(), "sst").loss(logits, torch.tensor([3, 0]))
    assert loss.item() == pytest.approx((math.log(5) + math.log(10 / 6)) / 2)


def test_binary_loss_is_that_of_the_second_label(tiny_config):
    # sigmoid(log 3) = 3/4, so the loss is -log(3/4) for label 1 and -log(1/4) for label 0.
    logits = torch.full((2, 1), math.log(3))
    loss = head(tiny_config(), "para").loss(logits, torch.tensor([1, 0]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_score_loss_does_not_broadcast(tiny_config, shape):
    values = torch.tensor([1.0, 2.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = head(tiny_config(), "sts").loss(values[:, None], values.reshape(shape))
    assert loss.item() == 0  # a table of 3 x 3 differences would give 4/3


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_fewer_labels_than_examples_are_refused(tiny_config, name):
    part = head(tiny_config(), name)
    with pytest.raises(ValueError, match="1 labels for 3 examples"):
        part.loss(part(torch.zeros(3, 32)), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_loss_is_computed_in_float32(tiny_config, name):
    part = head(tiny_config(), name).bfloat16()
    loss = part.loss(part(torch.ones(2, 32, dtype=torch.bfloat16)), torch.tensor([1, 0]))
    assert loss.dtype == torch.float32
    loss.backward()
    assert part.linear.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("own", "dropout"), [(None, 0.3), (0.0, 0.0), (0.6, 0.6)])
def test_head_dropout_is_the_hidden_one_unless_it_has_its_own(tiny_config, own, dropout):
    config = tiny_config(hidden_dropout_prob=0.3, classifier_dropout=own)
    assert head(config, "sst").dropout.p == dropout


@pytest.mark.parametrize("name", ["train", "loss", "half"])
def test_a_task_cannot_take_a_name_of_torch_modules(tiny_config, name):
    task = Task(name=name, kind="score", text_columns=("text",), label_column="label", range=(0, 1))
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        TaskHeads(tiny_config(tasks=[task]))


def test_an_unknown_head_is_refused_with_the_choices(tiny_config):
    task = {**TASKS["sst"].to_config(), "head": "linaer"}
    with pytest.raises(ValueError, match=f"'sst'.*'linaer'.*{sorted(HEADS)[0]}"):
        TaskHeads(tiny_config(tasks=[task]))


def test_a_fresh_score_starts_in_the_middle_of_its_range_and_a_saved_one_where_it_was(tiny_model, tmp_path):
    model = tiny_model(tasks=("sst", "sts"))
    assert model.heads.sts.linear.bias.item() == 2.5
    model.bert.save_pretrained(tmp_path / "encoder")
    loaded = type(model).from_pretrained(tmp_path / "encoder", tasks=model.config.tasks)
    assert loaded.heads.sts.linear.bias.item() == 2.5
    assert not loaded.heads.sst.linear.bias.any()
    model.heads.sts.linear.bias.data.fill_(1.0)
    model.save_pretrained(tmp_path / "model")
    assert type(model).from_pretrained(tmp_path / "model").heads.sts.linear.bias.item() == 1.0
