"""What the passes of a recorded step share, by layers that use it as the fused ones do, on any processor."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback

from hf_minbert.model.step_weights import as_one, destination_of, half_of
from hf_minbert.training import step
from hf_minbert.training.aggregation.registry import make_aggregator
from hf_minbert.training.gradients import StaticGradients, collector
from hf_minbert.training.graphs import GraphedSteps
from hf_minbert.training.step_memory import HalfCopies, one_array


def test_one_array_has_query_key_and_value_behind_one_another(tiny_model):
    attention = tiny_model().bert.encoder.layer[0].attention.self
    array, views = one_array([*attention.parameters()], torch.bfloat16)
    assert len(array) == sum(view.numel() for view in views)
    assert [view.shape for view in views] == [p.shape for p in attention.parameters()]
    for together in (views[::2], views[1::2]):  # weights, biases
        joined = as_one(together)
        assert joined is not None and len(joined) == 96 and joined.data_ptr() == together[0].data_ptr()


def test_a_copy_is_made_when_a_pass_under_autocast_asks_and_keeps_its_place():
    first, second = (nn.Parameter(torch.full((2, 2), value)) for value in (1.0, 2.0))
    copies = HalfCopies()
    assert copies.get(first) is None
    copies.extend()
    assert not copies  # it was no pass under autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert copies.get(first) is None
        copies.extend()
        copy = copies.get(first)
        assert copy.dtype == torch.bfloat16 and copy.eq(1).all()
        copies.get(second)
    copies.extend()
    assert copies.get(first) is copy and copies[second].eq(2).all()


def test_copies_are_renewed_whatever_has_changed_the_weights():
    weight = nn.Parameter(torch.ones(2, 2))
    copies = HalfCopies()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        copies.get(weight)
    copies.extend()
    weight.data.copy_(torch.full((2, 2), 3.0))  # which no version counter sees
    copies.renew()
    assert copies[weight].eq(3).all()
    weight.data = torch.full((2, 2), 4.0)
    copies.renew()
    assert copies[weight].eq(4).all()


@pytest.mark.parametrize("aggregator", ["sum", "pcgrad"])
def test_gradients_of_query_key_and_value_lie_behind_one_another(tiny_model, aggregator):
    attention = tiny_model().bert.encoder.layer[0].attention.self
    gradients = collector(attention.parameters(), make_aggregator(aggregator), static=True)
    assert isinstance(gradients, StaticGradients)
    for task in ("sst", "para"):
        gradients.add(task, sum(parameter.square().sum() for parameter in attention.parameters()))
    for task in ("sst", "para"):
        memory = gradients.destinations(task)
        for kind in ("weight", "bias"):
            joined = as_one(
                [memory[getattr(part, kind)] for part in (attention.query, attention.key, attention.value)]
            )
            assert joined is not None and len(joined) == 96
    gradients.combine(torch.Generator())
    for parameter in attention.parameters():  # of one task twice: nothing is in conflict
        torch.testing.assert_close(parameter.grad, 4 * parameter.detach())


# ---- A layer that uses them --------------------------------------------------------------------------------------


class Asks(torch.autograd.Function):
    """A node on the way to a parameter: a backward pass goes through it if it asks for the parameter's gradient."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, slope):
        return slope


class StandIn(torch.autograd.Function):
    """A linear layer in bfloat16 that reads the copies of its weights and adds its gradients to the memory given."""

    @staticmethod
    def forward(ctx, states, weight, bias, asks):
        states, halves = states.bfloat16(), [half_of(p, torch.bfloat16) for p in (weight, bias)]
        ctx.save_for_backward(states, halves[0])
        ctx.memory = [destination_of(p) for p in (weight, bias)]
        ctx.asks = asks.grad_fn
        return F.linear(states, *halves)

    @staticmethod
    def backward(ctx, slope):
        states, weight = ctx.saved_tensors
        rows, slopes = states.flatten(0, -2), slope.flatten(0, -2)
        gradients = [None, None]
        if ctx.asks is not None and torch._C._will_engine_execute_node(ctx.asks):
            gradients = [slopes.T @ rows, slopes.sum(dim=0)]
            for i, memory in enumerate(ctx.memory):
                if memory is not None:
                    memory.add_(gradients[i])
                    gradients[i] = None
        return slope @ weight, *gradients, None


def _forward(self, states):
    return StandIn.apply(states, self.weight, self.bias, Asks.apply(self.weight))


def with_stand_ins(model):
    """The model, whose layers are linear by `StandIn`."""
    for module in model.bert.encoder.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_forward, module)
    return model


class Launched(GraphedSteps):
    """Never records, and keeps nothing from pass to pass."""

    def __call__(self, task, inputs, factor):
        outputs, loss = self.forward(inputs, factor)
        self.gradients.add(task, loss)
        return outputs


@pytest.fixture
def trained(make_trainer, tiny_model, monkeypatch, recorded_on_cpu):
    """`trained(steps, **arguments)`: a trainer after six steps in bfloat16, whose passes are those of `steps`."""

    def make(steps, callbacks=None, **arguments):
        monkeypatch.setattr(step, "GraphedSteps", steps)
        given = {"packing": True, "bf16": True, "max_steps": 6, "learning_rate": 0.05, **arguments}
        trainer = make_trainer(with_stand_ins(tiny_model()), callbacks=callbacks, **given)
        trainer.train()
        return trainer

    return make


def assert_same(found, expected, start):
    """Weights are equal up to roundings, which are small beside what the weights have moved."""
    for (name, left), right, before in zip(
        found.model.named_parameters(), expected.model.parameters(), start.parameters(), strict=True
    ):
        moved = (right - before).abs().max().item()
        torch.testing.assert_close(
            left, right, atol=max(0.02 * moved, 1e-7), rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2, "pretrained_decay": 0.5},
        {"aggregator": "pcgrad", "gradient_accumulation_steps": 2},
        {"regularizer": "smart", "aggregator": "row_sum"},
        {"regularizer": "fgm", "aggregator": "row_sum"},
        {"regularizer": "r_drop"},
        {"proximal": "momentum", "proximal_momentum": [0.5, 0.5], "regularizer": "smart"},
        {
            "proximal": "momentum",
            "proximal_momentum": [0.5, 0.5],
            "proximal_weight": 0,
            "proximal_evaluate": "instead",
        },
        {"freeze": "encoder", "unfreeze": {2: 1, 4: "none"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregator", ["row_sum"], indirect=True)  # registers the one that needs rows
def test_steps_are_those_without_copies_and_memory(trained, aggregator, arguments, tiny_model):
    start, found, expected = tiny_model(), trained(GraphedSteps, **arguments), trained(Launched, **arguments)
    linear = [p for m in found.model.bert.encoder.modules() if isinstance(m, nn.Linear) for p in m.parameters()]
    assert {*found.step.graphs._copies} == {*linear} and found.step.graphs._recordings
    assert not expected.step.graphs._copies
    assert_same(found, expected, start)
    moved = found.model.bert.encoder.layer[1].output.dense.weight - start.bert.encoder.layer[1].output.dense.weight
    assert moved.abs().max() > 1e-3  # else equality would say little


class Jolt(TrainerCallback):
    """Changes weights between steps, as a callback may."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 4:
            model.bert.encoder.layer[0].output.dense.weight.data.mul_(3.0)


def test_weights_that_a_callback_changes_are_read_in_the_next_step(trained, tiny_model):
    found, expected = (trained(steps, callbacks=[Jolt()]) for steps in (GraphedSteps, Launched))
    assert_same(found, expected, tiny_model())


def test_an_evaluation_between_steps_reads_the_weights_themselves(trained):
    scores = [
        trained(steps, eval_strategy="steps", eval_steps=3, eval_tasks=["sst"], dev={"sst": 8}).state.log_history
        for steps in (GraphedSteps, Launched)
    ]
    losses = [[entry["eval_sst_loss"] for entry in log if "eval_sst_loss" in entry] for log in scores]
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
