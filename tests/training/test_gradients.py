"""Gradients as rows: who is shared, who keeps its own, and that the sum is the sum."""

import pytest
import torch

from hf_minbert.training.aggregation.base import Aggregator
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.aggregation.sum import Sum
from hf_minbert.training.gradients import GradientRows, StaticSum, SummedGradients, collector


class Recorder(Aggregator):
    """Returns the last row, so that the aggregator's work shows, and keeps what it was given."""

    def __init__(self):
        self.calls = []

    def step(self, gradients, generator=None, tasks=None):
        self.calls.append((gradients.clone(), None if generator is None else generator.initial_seed()))
        return super().step(gradients, generator, tasks)

    def altered(self, gram, generator, tasks):
        return torch.diag(torch.arange(1, len(gram) + 1, device=gram.device) // len(gram)).to(gram.dtype)


def parameters():
    """Two shared, one of task a, one of task b, one of nobody."""
    shapes = {"matrix": (2, 3), "vector": (4,), "a": (2,), "b": (2,), "idle": (5,)}
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def loss(p, task, factor=1.0):
    shared = p["matrix"].square().sum() + p["vector"].sum()
    return factor * (shared + 3 * p[task].sum())


def collected(aggregator, steps):
    p = parameters()
    gradients = GradientRows(list(p.values()), aggregator)
    for task, factor in steps:
        gradients.add(task, loss(p, task, factor))
    gradients.combine(torch.Generator().manual_seed(7))
    return p, gradients


def test_the_aggregator_sees_one_row_per_task_of_the_shared_parameters_only():
    recorder = Recorder()
    p, _ = collected(recorder, [("a", 1.0), ("b", -2.0)])
    ((rows, seed),) = recorder.calls
    shared = torch.cat([2 * p["matrix"].detach().flatten(), torch.ones(4)])
    torch.testing.assert_close(rows, torch.stack([shared, -2 * shared]))
    assert seed == 7
    torch.testing.assert_close(p["matrix"].grad, -4 * p["matrix"].detach())  # the last row, in its shape
    torch.testing.assert_close(p["vector"].grad, torch.full((4,), -2.0))


def test_a_head_keeps_its_own_gradient_and_an_unused_parameter_keeps_none():
    p, _ = collected(Recorder(), [("a", 1.0), ("b", -2.0)])
    assert p["a"].grad.tolist() == [3.0, 3.0]
    assert p["b"].grad.tolist() == [-6.0, -6.0]
    assert p["idle"].grad is None


def test_rows_accumulate_per_task_before_they_are_combined():
    recorder = Recorder()
    p, gradients = collected(recorder, [("a", 1.0), ("b", 1.0), ("a", 0.5), ("b", 2.0)])
    ((rows, _),) = recorder.calls
    shared = torch.cat([2 * p["matrix"].detach().flatten(), torch.ones(4)])
    torch.testing.assert_close(rows, torch.stack([1.5 * shared, 3 * shared]))
    assert p["a"].grad.tolist() == [4.5, 4.5]
    for task in ("a", "b"):  # the next step does not start with this one's
        gradients.add(task, loss(p, task))
    gradients.combine(torch.Generator())
    torch.testing.assert_close(recorder.calls[1][0], torch.stack([shared, shared]))


def test_one_task_alone_shares_nothing():
    recorder = Recorder()
    p, _ = collected(recorder, [("a", 2.0)])
    assert recorder.calls == []
    torch.testing.assert_close(p["matrix"].grad, 4 * p["matrix"].detach())
    assert p["b"].grad is None


def test_a_task_without_gradient_for_a_shared_parameter_gives_zeros_there():
    p = parameters()
    recorder = Recorder()
    gradients = GradientRows(list(p.values()), recorder)
    gradients.add("a", p["vector"].sum() + p["a"].sum())
    gradients.add("b", p["vector"].sum() + p["matrix"].sum())
    gradients.add("c", p["matrix"].sum() * 2)
    gradients.combine(torch.Generator())
    ((rows, _),) = recorder.calls
    assert rows.tolist() == [[0.0] * 6 + [1.0] * 4, [1.0] * 10, [2.0] * 6 + [0.0] * 4]


def test_adding_writes_no_gradient_before_the_step():
    p = parameters()
    gradients = GradientRows(list(p.values()), Recorder())
    gradients.add("a", loss(p, "a"))
    assert all(parameter.grad is None for parameter in p.values())


def test_sum_as_rows_equals_sum_in_place():
    summed, rows = parameters(), parameters()
    in_place, by_rows = SummedGradients(list(summed.values())), GradientRows(list(rows.values()), Sum())
    for task, factor in (("a", 1.0), ("b", -2.0), ("a", 0.3)):
        in_place.add(task, loss(summed, task, factor))
        by_rows.add(task, loss(rows, task, factor))
    for gradients in (in_place, by_rows):
        gradients.combine(torch.Generator())
    for name in summed:
        if name == "idle":
            assert summed[name].grad is rows[name].grad is None
        else:
            torch.testing.assert_close(rows[name].grad, summed[name].grad)


@pytest.mark.parametrize("make", [SummedGradients, StaticSum, lambda p: GradientRows(p, Sum())])
def test_losses_with_a_common_graph_are_added_as_if_each_had_its_own(make):
    """Twice, so that gradients with memory of their own know all parameters, and beside a task that is alone."""
    apart, together = parameters(), parameters()
    for p in (apart, together):
        gradients = make(list(p.values()))
        for step in (1.0, 2.0):
            for parameter in p.values():
                parameter.grad = None
            if p is apart:
                for task, factor in (("a", step), ("b", -3.0)):
                    gradients.add(task, loss(p, task, factor))
            else:
                shared = p["matrix"].square().sum() + p["vector"].sum()
                gradients.add_together({
                    "a": step * (shared + 3 * p["a"].sum()), "b": -3.0 * (shared + 3 * p["b"].sum()),
                })  # fmt: skip
            gradients.add("c", p["vector"].square().sum())
            gradients.combine(torch.Generator())
    for name, parameter in apart.items():
        found = together[name].grad
        assert (parameter.grad is None) == (found is None), name
        if found is not None:
            torch.testing.assert_close(found, parameter.grad)


def test_each_combined_gradient_can_be_scaled_in_place():
    """As clipping does. autograd gives one number for all of `a`, and the same tensor for `b` and `idle`."""
    p = parameters()
    gradients = GradientRows(list(p.values()), Sum())
    gradients.add("a", loss(p, "a"))
    weights = torch.randn(2)
    gradients.add("b", p["matrix"].sum() + ((p["b"] + p["idle"][:2]) * weights).sum())
    gradients.add("c", (p["vector"] * 2).sum())
    gradients.combine(torch.Generator())
    before = {name: parameter.grad.clone() for name, parameter in p.items()}
    for name, grad in before.items():
        p[name].grad.mul_(2)
        torch.testing.assert_close(p[name].grad, 2 * grad)


def test_parameters_that_are_added_do_not_share_their_gradient():
    left, right = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    gradients = GradientRows([left, right], Sum())
    gradients.add("a", ((left + right) * torch.arange(3)).sum())
    gradients.combine(torch.Generator())
    left.grad.mul_(2)
    assert right.grad.tolist() == [0.0, 1.0, 2.0]


def test_sum_does_not_pay_for_rows_and_frozen_parameters_are_left_out():
    p = parameters()
    p["matrix"].requires_grad_(False)
    cheap = collector(p.values(), Sum())
    assert isinstance(cheap, SummedGradients)
    rows = collector(p.values(), Recorder())
    assert isinstance(rows, GradientRows)
    for gradients in (cheap, rows):
        assert [id(parameter) for parameter in gradients.parameters] == [
            id(p[name]) for name in ("vector", "a", "b", "idle")
        ]


# ---- through the trainer


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(AGGREGATORS, "recorder", lambda: recorder)
    return recorder


def test_a_step_gives_the_aggregator_weighted_mean_rows_and_a_generator_of_its_own(make_trainer, tiny_model, recorder):
    trainer = make_trainer(
        aggregator="recorder", task_weights={"sts": 0.25}, gradient_accumulation_steps=2, learning_rate=0.0
    )
    rounds = list(trainer.get_train_dataloader())
    trainer.train()
    model = tiny_model()
    expected = []
    for task, weight in (("sst", 1.0), ("para", 1.0), ("sts", 0.25)):
        model.zero_grad()
        sum(weight * model(**one[task]).loss / 2 for one in rounds[:2]).backward()
        shared = [parameter.grad for name, parameter in model.named_parameters() if not name.startswith("heads.")]
        expected.append(torch.cat([grad.flatten() for grad in shared]))
    assert len(recorder.calls) == 2  # once per optimizer step
    torch.testing.assert_close(recorder.calls[0][0], torch.stack(expected), rtol=1e-4, atol=1e-6)
    seeds = [seed for _, seed in recorder.calls]
    assert seeds[0] != seeds[1]
    again = make_trainer(aggregator="recorder", gradient_accumulation_steps=2)
    again.train()
    assert [seed for _, seed in recorder.calls[2:]] == seeds
    other = make_trainer(aggregator="recorder", gradient_accumulation_steps=2, seed=1)
    other.train()
    assert not set(seeds) & {seed for _, seed in recorder.calls[4:]}


def test_the_aggregators_gradient_moves_the_encoder_and_not_the_heads(make_trainer, tiny_model, recorder):
    """The recorder's aggregate is the last task's gradient, so the encoder moves as if that task were alone."""
    trainer, alone = make_trainer(aggregator="recorder", max_steps=1), make_trainer(train_tasks=["sts"], max_steps=1)
    summed = make_trainer(max_steps=1)
    for each in (trainer, alone, summed):
        each.train()
    found, only, both = (dict(each.model.named_parameters()) for each in (trainer, alone, summed))
    for name, value in tiny_model().named_parameters():
        expected = both if name.startswith("heads.") else only
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)  # a weight of 1 has steps of 1e-7
        assert name.endswith("key.bias") or not torch.equal(found[name], value), name
