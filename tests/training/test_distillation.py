"""Distillation: what teachers answer, the loss by hand, and a student that follows them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_minbert import MinBertError, Predictor, get_tasks
from hf_minbert.model.heads import build_head
from hf_minbert.pretrained.teachers import mean_answer, teacher_logits
from hf_minbert.run import train as run
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.training.terms.base import TaskLoss
from hf_minbert.training.terms.distillation import Distillation


def head(config, name):
    return build_head(config, get_tasks([name])[0].to_config())


def test_the_term_of_classes_by_hand(tiny_config):
    """Softened by T = 2, log 16 against four zeros is 4 : 1 : 1 : 1 : 1; the student says all alike."""
    teacher, student = torch.tensor([[math.log(16), 0.0, 0.0, 0.0, 0.0]]), torch.zeros(1, 5)
    found = Distillation(temperature=2.0).divergence(head(tiny_config(), "sst"), student, teacher)
    assert found.item() == pytest.approx(4 * (0.5 * math.log(0.5 * 5) + 4 * 0.125 * math.log(0.125 * 5)), rel=1e-5)


def test_the_term_of_a_binary_task_by_hand(tiny_config):
    teacher, student = torch.tensor([[math.log(3)]]), torch.zeros(1, 1)
    found = Distillation().divergence(head(tiny_config(), "para"), student, teacher)
    assert found.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)


def test_the_term_of_a_score_is_a_squared_error_whatever_the_temperature(tiny_config):
    teacher, student = torch.tensor([[1.0], [4.0]]), torch.tensor([[2.0], [1.0]])
    assert Distillation(temperature=3.0).divergence(head(tiny_config(), "sts"), student, teacher).item() == 5.0


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_it_is_zero_where_both_agree_and_only_the_student_has_a_gradient(tiny_config, name):
    teacher = torch.randn(3, 5 if name == "sst" else 1, requires_grad=True)
    student = teacher.detach().clone().requires_grad_()
    found = Distillation(temperature=2.0).divergence(head(tiny_config(), name), student, teacher.detach())
    assert found.item() == pytest.approx(0, abs=1e-6)
    (gradient,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 4.0, 16.0])
def test_a_temperature_keeps_the_size_of_a_small_gradient(tiny_config, temperature):
    """For logits that are all small, T^2 KL(./T) is half the variance of their difference, whatever T."""
    teacher = 1e-2 * torch.tensor([[2.0, -1.0, 0.0, 1.0, -2.0]])
    found = Distillation(temperature=temperature).divergence(head(tiny_config(), "sst"), -teacher, teacher)
    assert found.item() == pytest.approx(0.5 * 0.02**2 * 10 / 5, rel=0.01)


def test_the_whole_loss_is_shared_between_labels_and_teacher():
    loss, own, term = torch.tensor(7.0), torch.tensor(2.0), torch.tensor(4.0)  # 5 of another term
    assert Distillation(weight=0.25).mixed(loss, own, term).item() == 5 + 0.75 * 2 + 0.25 * 4


def test_the_model_is_not_given_the_teachers_outputs(tiny_config):
    def loss_of(model, batch):
        assert batch.keys() == {"task", "input_ids"}
        return TaskLoss(torch.tensor(2.0), {"logits": torch.zeros(1, 1), "loss": torch.tensor(2.0)}, {})

    model = SimpleNamespace(heads={"sts": head(tiny_config(), "sts")})
    batch = {"task": "sts", "input_ids": torch.ones(1, 3), "teacher": torch.ones(1, 1)}
    assert Distillation(weight=0.5)(model, batch, None, loss_of).loss.item() == 0.5 * 2 + 0.5 * 1


def test_several_teachers_are_averaged_as_probabilities():
    one, two = (np.log(np.array([row], dtype=np.float32)) for row in ([0.2, 0.8], [0.6, 0.4]))
    probabilities = np.exp(mean_answer("classes", [one, two + 5]))  # a softmax does not see a common factor
    np.testing.assert_allclose(probabilities, [[0.4, 0.6]], rtol=1e-6)
    yes = [np.array([[math.log(3)]], dtype=np.float32), np.array([[0.0]], dtype=np.float32)]  # .75 and .5
    assert mean_answer("binary", yes).item() == pytest.approx(math.log(0.625 / 0.375))
    far = [np.array([[200.0]], dtype=np.float32)] * 2
    assert mean_answer("binary", far).item() == pytest.approx(200.0)
    assert mean_answer("score", [np.array([[1.0]]), np.array([[4.0]])]).item() == 2.5


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path):
    """`saved(name, tasks)`: a model of these tasks with large answers, in a folder."""

    def save(name, tasks, **fields):
        torch.manual_seed(len(name))
        model = tiny_model(get_tasks(tasks))
        for parameter in model.heads.parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


ROWS = {
    "sst": [{"sentence": "a good film"}, {"sentence": "very bad"}],
    "sts": [{"sentence1": "a good film", "sentence2": "bad"}, {"sentence1": "why", "sentence2": "why is it"}],
}


def test_each_task_takes_the_mean_of_those_who_have_it(saved):
    one, both = saved("one", ["sst"]), saved("both", ["sts", "sst"])
    found = teacher_logits([one, both], get_tasks(["sst", "sts"]), ROWS)
    theirs = [Predictor.from_pretrained(folder).logits("sst", ROWS["sst"]) for folder in (one, both)]
    np.testing.assert_array_equal(found["sst"], mean_answer("classes", theirs))
    np.testing.assert_array_equal(found["sts"], Predictor.from_pretrained(both).logits("sts", ROWS["sts"]))


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (["para"], "has none of the tasks in training: it has para"),
        (["sst"], "No model of `teachers` has the task 'sts'"),
        ({"sst": {"labels": ["a", "b", "c", "d", "e"]}}, "cannot teach 'sst': `labels` is"),
        ({"sst": None, "sts": {"range": [0, 1]}}, "cannot teach 'sts': `range` is"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(saved, teacher, said):
    with pytest.raises(MinBertError, match=said):
        teacher_logits([saved("teacher", teacher)], get_tasks(["sst", "sts"]), ROWS)


@pytest.mark.parametrize("arguments", [{}, {"packing": True, "regularizer": "smart", "aggregator": "pcgrad"}], ids=str)
def test_a_student_learns_what_its_teacher_says_and_not_the_labels(make_trainer, toy_rows, arguments):
    rows = toy_rows(sst=8, sts=8)
    answers = {"sst": np.eye(5, dtype=np.float32)[[3] * 8] * 9, "sts": np.full((8, 1), 1.0, dtype=np.float32)}
    given = {
        "teachers": ["said"],
        "distill_weight": 1.0,
        "max_steps": 40,
        "learning_rate": 3e-3,
        "optim": "adamw_torch",
    }
    trainer = make_trainer(train=rows, train_tasks=["sst", "sts"], teacher_logits=answers, **{**given, **arguments})
    trainer.train()
    for task, expected in (("sst", 3), ("sts", 1.0)):
        logits = trainer.predict(rows[task], task=task).predictions
        found = logits.argmax(axis=1) if task == "sst" else logits[:, 0]
        np.testing.assert_allclose(found, expected, atol=0.4)
    logged = [entry for entry in trainer.state.log_history if "distill_sst" in entry]
    assert logged[-1]["distill_sst"] < 0.2 * logged[0]["distill_sst"]


def test_a_weight_of_zero_changes_no_weight(make_trainer, toy_rows):
    rows = toy_rows(sst=8)
    plain = make_trainer(train=rows, train_tasks=["sst"])
    taught = make_trainer(
        train=rows,
        train_tasks=["sst"],
        teachers=["said"],
        distill_weight=0.0,
        teacher_logits={"sst": np.zeros((8, 5), dtype=np.float32)},
    )
    for trainer in (plain, taught):
        trainer.train()
    for one, other in zip(plain.model.parameters(), taught.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "logits", "said"),
    [
        ({"teachers": ["t"]}, None, "`teachers` and `teacher_logits` go together"),
        ({}, {"sst": np.zeros((8, 5))}, "`teachers` and `teacher_logits` go together"),
        ({"teachers": ["t"]}, {}, r"`teacher_logits` of 'sst' must be \[8, 5\]. Found nothing"),
        ({"teachers": ["t"]}, {"sst": np.zeros((8, 1))}, r"must be \[8, 5\]. Found \[8, 1\]"),
        ({"teachers": []}, None, "`teachers` is empty"),
        ({"teachers": ["t"], "distill_weight": 1.5}, None, "`distill_weight` must be a number from 0 to 1. Found 1.5"),
        ({"teachers": ["t"], "distill_temperature": 0}, None, "`distill_temperature` must be a number above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(make_trainer, toy_rows, arguments, logits, said):
    with pytest.raises(MinBertError, match=said):
        make_trainer(train=toy_rows(sst=8), train_tasks=["sst"], teacher_logits=logits, **arguments)


def test_three_models_of_one_task_teach_one_of_three(saved, tiny_bert, course_dir, tmp_path):
    teachers = [saved(name, [name]) for name in ("sst", "para", "sts")]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\noutput_dir: {tmp_path / 'student'}\n"
        f"teachers: [{', '.join(teachers)}]\nmax_steps: 2\nper_device_train_batch_size: 4\nlogging_steps: 1\n"
        "disable_tqdm: true\n"
    )
    metrics = run.train(read_recipe(recipe))
    log = [json.loads(line) for line in (tmp_path / "student" / "log.jsonl").read_text().splitlines()]
    assert all(log[0][f"distill_{task}"] > 0 for task in ("sst", "para", "sts"))
    assert metrics["global_step"] == 2
