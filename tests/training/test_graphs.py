"""CUDA graphs: the same training as without them, step for step. They need a GPU."""

import logging
import re
from contextlib import nullcontext

import pytest
import torch

from hf_minbert import get_tasks
from hf_minbert.model.losses import LOSSES
from hf_minbert.training.aggregation.pcgrad import PCGrad
from hf_minbert.training.fused_adamw import FusedAdamW
from hf_minbert.training.gradients import GradientRows, StaticSum, SummedGradients
from hf_minbert.training.terms.streams import Beside

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: A rate that moves weights visibly, of which a rounding of a gradient that is nearly zero is no step.
ADAM = {"max_steps": 30, "learning_rate": 0.01, "adam_epsilon": 1e-3}


def GPU(test):
    return pytest.mark.gpu(NEEDS_GPU(test))


def parameters(count=3):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(count)]


def test_a_static_sum_is_a_sum_and_stays_where_it_is():
    ours, plain = parameters(), parameters()
    static, summed = StaticSum(ours), SummedGradients(plain)
    places = set()
    for step in range(3):
        for task, used in (("a", (0, 1)), ("b", (0,)), ("a", (0, 1))):
            for weights, gradients in ((ours, static), (plain, summed)):
                gradients.add(task, sum((step + 1) * weights[i].square().sum() for i in used))
        for gradients in (static, summed):
            gradients.combine(torch.Generator())
        for left, right in zip(ours[:2], plain[:2], strict=True):
            torch.testing.assert_close(left.grad, right.grad)
        assert ours[2].grad is None
        places.add(ours[0].grad.data_ptr())
        for parameter in (*ours, *plain):
            parameter.grad = None
    assert len(places) == 1


def test_a_static_sum_leaves_alone_what_this_steps_tasks_do_not_reach():
    weights = parameters()
    static = StaticSum(weights)
    for tasks in (("a", "b"), ("b",)):
        for task in tasks:
            static.add(task, weights[0].sum() + (weights[1].sum() if task == "a" else 0))
        static.combine(torch.Generator())
        assert (weights[1].grad is None) == (tasks == ("b",))
        for parameter in weights:
            parameter.grad = None


@pytest.mark.parametrize("make", [StaticSum, lambda weights: GradientRows(weights, PCGrad())])
def test_what_is_accumulated_is_what_a_backward_pass_adds(make):
    """Once a task's parameters are known, as they are when its step is recorded."""
    found = []
    for name in ("add", "accumulate"):
        weights = parameters()
        gradients = make(weights)
        for step in range(2):
            for task, used in (("a", (0, 1)), ("b", (0,)), ("a", (0, 1))):
                gradients.begin(task)
                loss = sum((step + 1) * weights[i].square().sum() for i in used)
                getattr(gradients, name if step else "add")(task, loss)
            assert all(weight.grad is None for weight in weights)
            gradients.combine(torch.Generator())
            ours = [weight.grad.clone() for weight in weights[:2]]
            assert weights[2].grad is None
            for weight in weights:
                weight.grad = None
        found.append(ours)
    for added, accumulated in zip(*found, strict=True):
        assert torch.equal(added, accumulated) and added.any()


@pytest.fixture
def on_gpu(make_trainer, tiny_model):
    """`on_gpu(cuda_graphs, **arguments)`: a trainer after twelve steps on a GPU, without dropout unless asked for."""

    def make(cuda_graphs, dropout=0.0, fields=None, **arguments):
        torch.manual_seed(0)
        tasks = get_tasks({"sst": None, "para": None, "sts": None} | (fields or {}))
        model = tiny_model(tasks, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        given = {"packing": True, "cuda_graphs": cuda_graphs, "use_cpu": False, "max_steps": 12, "learning_rate": 0.01}
        trainer = make_trainer(model, **{**given, **arguments})
        trainer.train()
        return trainer

    return make


@GPU
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"aggregator": "row_sum"},
        {"aggregator": "row_sum", "gradient_accumulation_steps": 2},
        {"bf16": True},
        {"fp16": True},
        {"mixing": "once", "num_train_epochs": 3, "max_steps": -1},
        {"task_weights": {"sts": 0.3}, "max_grad_norm": 0.1},
        {"task_weights": "imtl_l", "task_weights_options": {"learning_rate": 0.1}, "regularizer": "smart"},
        {"task_weights": "dwa", "aggregator": "row_sum"},
        {"task_weights": "uncertainty", "fp16": True},
        {"train_metrics": "running"},
        {"compile_layers": True},
        {"regularizer": "smart"},
        {"regularizer": "smart", "smart_steps": 2, "smart_level": "sentence", "aggregator": "row_sum"},
        # Its moves have the length 1, so roundings grow, and Adam would make a step of any of them.
        {"regularizer": "smart", "smart_form": "mt-dnn", "optim": "sgd"},
        {"regularizer": "smart", "gradient_accumulation_steps": 2, "bf16": True},
        {"regularizer": "fgm"},
        {"regularizer": "r_drop"},
        {"proximal": "previous", "proximal_steps": 3, "regularizer": "smart"},
        {"proximal": "momentum", "proximal_momentum": [0.5, 0.5], "bf16": True},
        {"neftune_noise_alpha": 5.0},
        {"neftune_noise_alpha": 5.0, "regularizer": "smart"},
        {"neftune_noise_alpha": 5.0, "regularizer": "r_drop"},
        {"compile_layers": True, "bf16": True, "regularizer": "r_drop"},
        {"compile_layers": True, "bf16": True, "aggregator": "row_sum"},
        {"compile_layers": True, "aggregator": "pcgrad"},
        {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "max_grad_norm": 1.0, **ADAM},
        {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "fp16": True, **ADAM},
        {
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "cosine",
            "warmup_steps": 5,
            "aggregator": "pcgrad",
            **ADAM,
        },
        {"optim": "course_adamw", "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "weight_decay": 0.1, **ADAM},
        {"bf16": True, "aggregator": "pcgrad"},
        {"bf16": True, "regularizer": "fgm", "aggregator": "row_sum"},
        {"freeze": "encoder", "unfreeze": {3: 1, 6: "none"}},
        {"freeze": "embeddings", "unfreeze": {6: "none"}, "aggregator": "row_sum"},
        {"proximal": "momentum", "proximal_weight": 0, "proximal_evaluate": "instead"},
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregator", ["row_sum"], indirect=True)  # registers the one that needs rows
def test_graphs_train_as_single_launches_do(on_gpu, aggregator, arguments, tiny_model):
    plain, graphed = on_gpu("off", **arguments), on_gpu("auto", **arguments)
    assert plain.step.graphs is None and graphed.step.graphs._recordings
    atol = 1e-5 if not {"bf16", "fp16"} & set(arguments) else 2e-3
    for (name, left), right in zip(plain.model.named_parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=atol, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    start = tiny_model().bert.embeddings.LayerNorm.weight
    moved = (plain.model.bert.embeddings.LayerNorm.weight.cpu() - start).abs().max()
    assert moved > 10 * atol or moved > 1e-3  # else equality would say nothing
    losses = [[entry for entry in t.state.log_history if "loss_sst" in entry] for t in (plain, graphed)]
    for left, right in zip(*losses, strict=True):
        assert left["loss_sst"] == pytest.approx(right["loss_sst"], abs=max(5 * atol, 1e-4))


@GPU
@pytest.mark.parametrize("aggregator", ["sum", "pcgrad"])
def test_fused_layers_read_copies_of_weights(on_gpu, aggregator):
    trainer = on_gpu("auto", bf16=True, aggregator=aggregator)
    copies = trainer.step.graphs._copies
    linear = re.compile(r"layer\.\d+\..*(dense|query|key|value)")
    asked = {parameter for name, parameter in trainer.model.named_parameters() if linear.search(name)}
    assert {parameter for parameter in asked if parameter.dim() == 2} <= {*copies} <= asked
    places = [copy.data_ptr() for copy in copies.values()]
    copies.renew()
    assert places == [copy.data_ptr() for copy in copies.values()]
    for parameter, copy in copies.items():
        assert torch.equal(copy, parameter.bfloat16())  # one rounding of the same number


@GPU
def test_the_optimizer_that_scales_gradients_takes_the_steps_of_the_stock_one(on_gpu, monkeypatch):
    """Of two recorded runs with a rate that changes in every step, one has torch's class, and is clipped before it."""
    given = {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "max_grad_norm": 1.0, **ADAM}
    ours = on_gpu("auto", **given)
    monkeypatch.setattr("hf_minbert.training.trainer.is_fused_adamw", lambda args: False)
    stock = on_gpu("auto", **given)
    assert [type(trainer.optimizer.optimizer) for trainer in (ours, stock)] == [FusedAdamW, torch.optim.AdamW]
    for (name, left), right in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    logs = [[entry for entry in trainer.state.log_history if "loss_sst" in entry] for trainer in (ours, stock)]
    rates, norms = ([[entry[key] for entry in log] for log in logs] for key in ("learning_rate", "grad_norm"))
    assert rates[0] == rates[1] and len({*rates[0]}) == 30
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and max(norms[1]) > 1


@GPU
def test_dropout_differs_from_replay_to_replay(on_gpu):
    trainer = on_gpu("auto", dropout=0.5, learning_rate=0.0, max_steps=4)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))["sst"]
    losses = {trainer.step.graphs("sst", {"batch": batch}, 1.0)["loss"].item() for _ in range(6)}
    assert len(losses) == 6


@GPU
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=str)  # attention has a kernel of its own in half precision
@pytest.mark.parametrize("regularizer", [{"regularizer": "smart", "smart_steps": 2}, {"regularizer": "fgm"}], ids=str)
def test_the_passes_of_a_replay_have_one_dropout_mask(on_gpu, regularizer, half):
    """In a ball of no size the outputs of two passes differ by their masks alone; so does a loss at the same words."""
    nothing = {"smart_epsilon": 0.0} if regularizer["regularizer"] == "smart" else {"fgm_epsilon": 0.0}
    trainer = on_gpu("auto", dropout=0.5, max_steps=8, logging_steps=1, **regularizer, **nothing, **half)
    assert trainer.step.graphs._recordings
    name = regularizer["regularizer"]
    logs = [entry for entry in trainer.state.log_history if f"{name}_sst" in entry]
    for task in ("sst", "para", "sts"):
        for entry in logs:
            # FGM's loss is that at the words themselves, and the task's own.
            expected = 0.0 if name == "smart" else entry[f"loss_{task}"] - entry[f"fgm_{task}"]
            assert entry[f"{name}_{task}"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len({entry["loss_sst"] for entry in logs}) == len(logs)


@GPU
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=str)
def test_the_halves_of_r_drop_have_different_masks_in_a_replay(on_gpu, half):
    trainer = on_gpu("auto", dropout=0.5, regularizer="r_drop", **half)
    assert trainer.step.graphs._recordings
    logs = [entry for entry in trainer.state.log_history if "r_drop_sst" in entry]
    for task in ("sst", "para", "sts"):
        terms = [entry[f"r_drop_{task}"] for entry in logs]
        assert min(terms) > 1e-4 and len({*terms}) == len(terms)


@GPU
@pytest.mark.parametrize("arguments", [{}, {"bf16": True, "smart_steps": 2}, {"compile_layers": True}], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["off", "auto"])
def test_the_search_of_smart_goes_on_beside_the_clean_pass(on_gpu, monkeypatch, cuda_graphs, arguments):
    """In a stream of its own, and to the same end as in turn."""
    given = {"regularizer": "smart", "optim": "sgd", **arguments}
    streams, inside = [], Beside.inside

    def watched(self):
        streams.append((self._outside.cuda_stream, self._stream.cuda_stream))
        return inside(self)

    monkeypatch.setattr(Beside, "inside", watched)
    beside = on_gpu(cuda_graphs, **given)
    assert streams and all(one != other for one, other in streams)
    monkeypatch.setattr(Beside, "inside", lambda self: nullcontext())
    monkeypatch.setattr(Beside, "meet", lambda self: None)
    in_turn = on_gpu(cuda_graphs, **given)
    atol = 2e-3 if "bf16" in arguments else 1e-5
    for left, right in zip(beside.model.parameters(), in_turn.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=atol, rtol=1e-3)


@GPU
def test_what_cannot_be_recorded_trains_without_and_says_so(on_gpu, caplog, monkeypatch):
    mse = LOSSES["score"]["mse"]
    monkeypatch.setitem(LOSSES["score"], "mse", lambda outcome: mse(outcome) * float(outcome.labels.max() > -1))
    plain = on_gpu("off", dropout=0.0)
    with caplog.at_level(logging.WARNING):
        graphed = on_gpu("auto", dropout=0.0)
    assert caplog.text.count("cuda_graphs: the step of sts cannot be recorded, so steps run without") == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    for left, right in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    assert on_gpu("auto", dropout=0.5).state.global_step == 12  # the generator still works


@GPU
@pytest.mark.parametrize(
    "fields",
    [
        {"para": {"pair_encoding": "bi", "loss": "mnr", "head": "cosine"}},
        {"para": {"loss_options": {"pos_weight": 1.7}}},
        {"sst": {"loss_options": {"class_weights": [1, 2, 3, 4, 5]}}},
        {"sst": {"loss_options": {"focal_gamma": 2.0}}, "para": {"loss_options": {"focal_gamma": 2.0}}},
        {"sts": {"pooling": "bigru", "loss": "cosent"}},
        {"sst": {"pooling": "attention", "layers": "mix"}},
    ],
    ids=str,
)
def test_losses_and_poolings_can_be_recorded(on_gpu, fields):
    plain, graphed = on_gpu("off", fields=fields), on_gpu("auto", fields=fields)
    assert {key[0] for key in graphed.step.graphs._recordings} == {"sst", "para", "sts"}
    for left, right in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
