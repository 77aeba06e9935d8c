"""The course's AdamW: against its reference file, against its equations, and through the trainer."""

import copy
import math

import numpy as np
import pytest
import torch

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert.training.optimizers import CourseAdamW


def course_procedure(optimizer_class) -> np.ndarray:
    """The weights that the course's file holds, if the optimizer is the course's."""
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = optimizer_class(layer.parameters(), lr=1e-3, weight_decay=1e-4, eps=1e-6, betas=(0.9, 0.999))
    for _ in range(1000):
        optimizer.zero_grad()
        x = torch.from_numpy(draw.uniform(size=3).astype(np.float32))
        target = torch.stack([x[0] + x[1], -x[2]])
        (layer(x) - target).square().sum().backward()
        optimizer.step()
    return layer.weight.detach().numpy()


def test_it_equals_the_courses_reference_and_the_stock_one_does_not(cs224n):
    reference = np.load(cs224n / "optimizer_test.npy")
    np.testing.assert_allclose(course_procedure(CourseAdamW), reference, rtol=0, atol=1e-6)
    assert np.abs(course_procedure(torch.optim.AdamW) - reference).max() > 1e-5


def test_the_first_step_by_hand():
    """m = 0.1 g and v = 0.001 g^2; their corrections make sqrt(0.001) / 0.1 of the step's size, and eps has none."""
    weight, gradient = 2.0, 1e-4
    parameter = torch.nn.Parameter(torch.tensor([weight], dtype=torch.float64))
    optimizer = CourseAdamW([parameter], lr=1e-3, eps=1e-6, weight_decay=0.1)
    parameter.grad = torch.tensor([gradient], dtype=torch.float64)
    optimizer.step()
    root = math.sqrt(0.001) * gradient
    step = 1e-3 * math.sqrt(0.001) / 0.1 * (0.1 * gradient) / (root + 1e-6)
    assert step == pytest.approx(7.6e-4, rel=1e-2)
    assert parameter.item() == pytest.approx((weight - step) * (1 - 1e-3 * 0.1), rel=1e-12)


def pair_of_layers():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    return layer, copy.deepcopy(layer)


def run(layer, optimizer, steps, start=0):
    for number in range(start, start + steps):
        optimizer.zero_grad()
        x = torch.sin(torch.arange(12.0).reshape(4, 3) + number)
        (layer(x).square().sum() - layer(x).sum()).backward()
        optimizer.step()


def test_with_eps_and_decay_of_next_to_nothing_it_is_adam():
    """The two differ in where eps and the decay stand, and in nothing else."""
    own, stock = pair_of_layers()
    run(own, CourseAdamW(own.parameters(), lr=1e-2, eps=1e-30), 50)
    run(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2, eps=1e-30, weight_decay=0.0), 50)
    torch.testing.assert_close(own.weight, stock.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(own.bias, stock.bias, rtol=0, atol=1e-6)


def test_a_large_eps_parts_it_from_the_stock_one():
    own, stock = pair_of_layers()
    given = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    run(own, CourseAdamW(own.parameters(), **given), 50)
    run(stock, torch.optim.AdamW(stock.parameters(), **given), 50)
    assert (own.weight - stock.weight).abs().max() > 1e-5


def test_its_state_is_saved_and_loaded():
    whole, cut = pair_of_layers()
    run(whole, CourseAdamW(whole.parameters(), lr=1e-2, weight_decay=0.1), 20)
    first = CourseAdamW(cut.parameters(), lr=1e-2, weight_decay=0.1)
    run(cut, first, 7)
    second = CourseAdamW(cut.parameters(), lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(cut, second, 13, start=7)
    assert torch.equal(cut.weight, whole.weight) and torch.equal(cut.bias, whole.bias)


def test_a_parameter_without_a_gradient_waits_and_counts_its_own_steps():
    always, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = CourseAdamW([always, late], lr=0.1, weight_decay=0.5)
    always.grad = torch.ones(2)
    optimizer.step()
    assert late.tolist() == [1.0, 1.0]  # nor is it decayed
    moved = always.tolist()
    always.grad, late.grad = None, torch.ones(2)
    optimizer.step()
    assert late.tolist() == moved  # its first step is like the other's
    assert [optimizer.state[parameter]["step"] for parameter in (always, late)] == [1, 1]


def test_groups_have_a_decay_of_their_own_and_a_closure_is_called():
    decayed, spared = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": [spared], "weight_decay": 0.0}]
    optimizer = CourseAdamW(groups, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (decayed + spared).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert decayed.item() == pytest.approx(spared.item() * (1 - 0.1 * 0.5))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": -1.0}, "`lr` of CourseAdamW must be a number from 0. Found -1.0."),
        ({"eps": float("nan")}, "`eps` of CourseAdamW must be a number above 0. Found nan."),
        ({"eps": 0.0}, "`eps` of CourseAdamW must be a number above 0. Found 0.0."),
        ({"weight_decay": -0.1}, "`weight_decay` of CourseAdamW must be a number from 0. Found -0.1."),
        ({"betas": (0.9, 1.0)}, "`betas` of CourseAdamW must be at least 0 and less than 1. Found (0.9, 1.0)."),
    ],
)
def test_a_value_out_of_range_is_refused(given, said):
    with pytest.raises(MinBertError) as refusal:
        CourseAdamW([torch.nn.Parameter(torch.ones(1))], **given)
    assert str(refusal.value) == said


def test_a_sparse_gradient_is_refused():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(MinBertError, match="takes no sparse gradients"):
        CourseAdamW(table.parameters()).step()


def test_arguments_that_it_would_not_read_are_refused(tmp_path):
    with pytest.raises(MinBertError, match="`optim_args` is not supported by `optim: course_adamw`"):
        MultiTaskTrainingArguments(output_dir=str(tmp_path), optim="course_adamw", optim_args="eps=1e-6")
