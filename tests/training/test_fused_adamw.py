"""AdamW with less Python: equal to the stock one, alone and in training, and what clipping in its step changes."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from hf_minbert.training.fused_adamw import FusedAdamW, scaling_optimizer
from hf_minbert.training.optimizers import CourseAdamW

GIVEN = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


def parameters(device="cpu"):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size).to(device)) for size in ((3, 2), (4,), (2, 2))]


def groups(weights):
    return [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]


def run(weights, optimizer, steps, start=0):
    """Steps of a falling rate. Every third one reaches the first two parameters alone."""
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step + start))
    for number in range(start, start + steps):
        for i, weight in enumerate(weights):
            weight.grad = None if i == 2 and number % 3 == 0 else torch.sin(torch.full_like(weight, number) + weight)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_stock_one_to_the_bit(device):
    """Both call one kernel with the same numbers."""
    ours, stock = parameters(device), parameters(device)
    run(ours, FusedAdamW(groups(ours), **GIVEN, fused=True), 20)
    run(stock, torch.optim.AdamW(groups(stock), **GIVEN, fused=True), 20)
    for own, other, start in zip(ours, stock, parameters(device), strict=True):
        assert torch.equal(own, other) and not torch.equal(own, start)


@pytest.mark.parametrize("writer", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_it_goes_on_from_the_stock_ones_checkpoint_and_back(writer):
    whole, cut = parameters(), parameters()
    run(whole, torch.optim.AdamW(groups(whole), **GIVEN), 12)
    first = torch.optim.AdamW(groups(cut), **GIVEN, **writer)
    run(cut, first, 5)
    second = FusedAdamW(groups(cut), **GIVEN, fused=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(cut, second, 4, start=5)
    third = torch.optim.AdamW(groups(cut), **GIVEN, **writer)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    run(cut, third, 3, start=9)
    for own, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_closure_is_called():
    (weight,) = parameters()[:1]
    optimizer = FusedAdamW([weight], **GIVEN, fused=True)

    def closure():
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    expected = weight.sum().item()
    assert optimizer.step(closure).item() == pytest.approx(expected)
    assert weight.sum().item() < expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [FusedAdamW, CourseAdamW])
def test_gradients_are_divided_once(make, device):
    given = {**GIVEN, **({"fused": True} if make is FusedAdamW else {})}
    ours, divided = parameters(device), parameters(device)
    optimizers = make(groups(ours), **given), make(groups(divided), **given)
    for factor in (4.0, 1.0, 1.0):
        for weights in (ours, divided):
            for weight in weights:
                weight.grad = torch.full_like(weight, 2.0)
        optimizers[0].divisor = None if factor == 1 else torch.tensor(factor, device=device)
        torch._foreach_div_([weight.grad for weight in divided], factor)
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.divisor is None
        for own, other in zip(ours, divided, strict=True):
            torch.testing.assert_close(own, other)
            torch.testing.assert_close(own.grad, other.grad)


# ---- In training ---------------------------------------------------------------------------------------------------


class Looks(TrainerCallback):
    """Keeps the norms of the gradients that it finds before each step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


@pytest.fixture
def trained(make_trainer, tiny_model, recorded_on_cpu):
    """`trained(cuda_graphs, resume=None, **arguments)`: a trainer after six steps of a falling rate."""

    def make(cuda_graphs, resume=None, **arguments):
        given = {"max_steps": 6, "learning_rate": 0.01, "lr_scheduler_type": "linear", "adam_epsilon": 1e-4}
        trainer = make_trainer(tiny_model(), packing=True, cuda_graphs=cuda_graphs, **{**given, **arguments})
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return make


def assert_same(found, expected, start):
    """Weights are equal up to roundings, which are small beside what the weights have moved."""
    for (name, left), right, before in zip(
        found.model.named_parameters(), expected.model.parameters(), start.parameters(), strict=True
    ):
        moved = (right - before).abs().max().item()
        torch.testing.assert_close(left, right, rtol=0, atol=0.01 * moved + 1e-5, msg=lambda m, n=name: f"{n}: {m}")


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_grad_norm": 1.0},  # shorter than each step's gradient
        {"max_grad_norm": 1e3},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 1.0, "optim": "course_adamw", "weight_decay": 0.1},
        {"max_grad_norm": 1.0, "aggregator": "pcgrad", "gradient_accumulation_steps": 2, "pretrained_decay": 0.1},
        {"max_grad_norm": 1.0, "task_weights": "imtl_l", "task_weights_options": {"learning_rate": 0.1}},
    ],
    ids=str,
)
def test_training_is_that_with_the_stock_optimizer(trained, arguments, tiny_model):
    given = {"optim": "adamw_torch_fused", **arguments}
    ours, stock = trained("auto", **given), trained("off", **given)
    assert norms(ours) == pytest.approx(norms(stock), rel=1e-3) and min(norms(stock)) > 1
    if given["optim"] == "adamw_torch_fused":
        assert [type(trainer.optimizer.optimizer) for trainer in (ours, stock)] == [FusedAdamW, torch.optim.AdamW]
    assert_same(ours, stock, tiny_model())
    if "task_weights" in arguments:
        left, right = (trainer.balancing.scales.detach() for trainer in (ours, stock))
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-6)


def test_the_optimizer_scales_unless_a_callback_may_look(trained):
    trainer = trained("auto", optim="adamw_torch_fused", max_grad_norm=0.5)
    callbacks = trainer.callback_handler.callbacks
    assert scaling_optimizer(trainer.optimizer, callbacks) is trainer.optimizer.optimizer
    assert scaling_optimizer(trainer.optimizer, [*callbacks, Looks()]) is None
    looks = Looks()
    trained("auto", optim="adamw_torch_fused", max_grad_norm=0.5, callbacks=[looks])
    assert looks.norms == pytest.approx([0.5] * 6, rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("auto", "off"), ("off", "auto")])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(trained, tmp_path, first, second, tiny_model):
    given = {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 3}
    whole = trained(first, **given)
    resumed = trained(second, resume=tmp_path / "run" / "checkpoint-3", **given)
    assert_same(resumed, whole, tiny_model())


def test_gradients_are_cleared_in_training_and_the_models_method_is_back_after_it(trained):
    trainer = trained("auto", optim="adamw_torch_fused")
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert "zero_grad" not in vars(trainer.model)
