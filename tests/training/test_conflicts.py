"""Conflicts by layer, by parameter tensor and by epoch."""

import shutil
from itertools import combinations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert.training.aggregation.conflicts import ConflictMeter
from hf_minbert.training.aggregation.gram import gram_matrix
from hf_minbert.training.aggregation.pcgrad import PCGrad
from hf_minbert.training.aggregation.unconditional import Unconditional
from hf_minbert.training.freezing import layer_names
from hf_minbert.training.gradients import GradientRows

PAIRS = ["sst_para", "sst_sts", "para_sts"]
#: The gradient of each parameter by task; `None` where the task does not reach it.
GRADIENTS = {
    "bert.embeddings.word_embeddings.weight": {"a": [1.0, 0.0], "b": [-1.0, 1.0], "c": [0.0, 2.0]},
    "bert.encoder.layer.0.output.dense.weight": {"a": [1.0], "b": [-1.0], "c": [3.0]},
    "bert.encoder.layer.0.output.dense.bias": {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0]},
    "heads.a.linear.weight": {"a": [5.0], "b": None, "c": None},
    "bert.pooler.dense.weight": {"a": [2.0], "b": None, "c": [-1.0]},
    "shift": {"a": [-1.0], "b": [1.0], "c": [0.0]},
}


def meter_of(detail):
    layers = ["embeddings", "layer.0", "layer.0", "rest", "pooler", "rest"]
    return ConflictMeter(["a", "b", "c"], detail, layers)


def collect(meter, *steps, infinite=False):
    """Steps of tasks with the gradients above, each through one collector."""
    size = {name: len(rows["a"]) for name, rows in GRADIENTS.items()}
    parameters = {name: torch.nn.Parameter(torch.zeros(size[name])) for name in GRADIENTS}
    gradients = GradientRows([*parameters.values()], PCGrad(), meter=meter)
    for tasks in steps:
        for task in tasks:
            rows = {name: of[task] for name, of in GRADIENTS.items() if of[task] is not None}
            loss = sum((parameters[name] * torch.tensor(row)).sum() for name, row in rows.items())
            gradients.add(task, loss * (torch.inf if infinite else 1.0))
        gradients.combine(torch.Generator().manual_seed(0))
    return meter


@pytest.mark.parametrize("private", [{}, {"private_layers": 1}, {"private_encoders": True}], ids=str)
@pytest.mark.parametrize("adapted", [False, True])
def test_every_parameter_has_the_layer_that_its_name_says(tiny_model, private, adapted):
    model = tiny_model(**private)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["heads"]))
    layers = layer_names(model)
    for name, parameter in model.named_parameters():
        parts = {
            ".embeddings.": "embeddings", ".layer.0.": "layer.0", ".layer.1.": "layer.1", ".para.1.": "layer.1",
            ".sts.1.": "layer.1", ".pooler.": "pooler", "heads.": "rest",
        }  # fmt: skip
        assert layers[parameter] == next(layer for part, layer in parts.items() if part in name), name


@pytest.mark.parametrize("detail", ["layers", "tensors"])
def test_layers_are_told_apart(detail):
    """Of a and b: embeddings -1, layer 0 -1 + 2, no pooler of b, rest -1, in all -1; a head takes no part."""
    found = collect(meter_of(detail), "abc").read()
    assert found["conflict_a_b"] == 1 and found["cosine_a_b"] == pytest.approx(-1 / (9 * 6) ** 0.5)
    layers = {name.removeprefix("cosine_a_b/"): value for name, value in found.items() if "cosine_a_b/" in name}
    assert layers == pytest.approx({"embeddings": -(0.5**0.5), "layer.0": 1 / 3, "rest": -1.0})
    assert {layer: found[f"conflict_a_b/{layer}"] for layer in layers} == {"embeddings": 1, "layer.0": 0, "rest": 1}
    assert found["cosine_a_c/pooler"] == pytest.approx(-1) and found["cosine_a_c/embeddings"] == 0
    assert "conflict_b_c/pooler" not in found and "conflict_a_c/rest" not in found  # c's gradient is zero there
    assert ("tensor_conflicts" in found) == (detail == "tensors")


def test_tensors_are_counted_by_pair_and_by_ordered_pair():
    """a and b conflict in the embeddings, one tensor of layer 0 and the shift; a and c in the pooler; b and c in the
    tensor of layer 0, and their embeddings do not.
    """
    found = collect(meter_of("tensors"), "abc").read()
    counts = {name: value for name, value in found.items() if "tensor" in name}
    by_pair = {"tensor_conflicts_a_b": 3, "tensor_conflicts_a_c": 1, "tensor_conflicts_b_c": 1}
    assert counts == {**by_pair, "tensor_conflicts": 2 * (3 + 1 + 1), "shared_tensors": 5}


def test_a_step_that_lacks_a_task_counts_for_those_that_it_has():
    """In the second step c is missing, and the pooler is a's alone."""
    found = collect(meter_of("tensors"), "abc", "ba").read()
    assert (found["tensor_conflicts_a_b"], found["tensor_conflicts_a_c"]) == (3, 1)
    assert (found["tensor_conflicts"], found["shared_tensors"]) == ((10 + 6) / 2, (5 + 4) / 2)
    assert found["conflict_a_b/embeddings"] == 1 and found["conflict_a_c/pooler"] == 1
    one = collect(meter_of("layers"), "abc").read()
    assert found["cosine_a_b/layer.0"] == pytest.approx(one["cosine_a_b/layer.0"])


def test_a_step_that_is_not_finite_does_not_count():
    meter = collect(meter_of("tensors"), "abc", infinite=True)
    assert meter.read() == {} and meter.end_epoch() == {}


def test_layers_add_up_to_the_whole_and_tensors_to_layers():
    """On random gradients: dot products of layers, from cosines and lengths, sum to that of whole vectors."""
    torch.manual_seed(4)
    layers = [*["layer.0"] * 3, *["layer.1"] * 3, "layer.0"]
    sizes = [3, 5000, 20, 4096, 1, 9000, 7]
    rows = torch.randn(2, sum(sizes), dtype=torch.float64)
    pieces = [piece.double() for piece in rows.float().split(sizes, dim=1)]
    meters = {detail: ConflictMeter("ab", detail, layers) for detail in ("layers", "tensors")}
    for meter in meters.values():
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        gradients = GradientRows(parameters, PCGrad(), meter=meter)
        for task, row in zip("ab", rows.float(), strict=True):
            parts = zip(parameters, row.split(sizes), strict=True)
            gradients.add(task, sum((parameter * part).sum() for parameter, part in parts))
        gradients.combine(torch.Generator())
    found = {detail: meter.read() for detail, meter in meters.items()}
    for layer, of in {"layer.0": (0, 1, 2, 6), "layer.1": (3, 4, 5)}.items():
        whole = torch.cat([pieces[i] for i in of], dim=1)
        expected = torch.cosine_similarity(*whole, dim=0).item()
        for each in found.values():
            assert each[f"cosine_a_b/{layer}"] == pytest.approx(expected, abs=1e-6)
    assert found["tensors"]["tensor_conflicts_a_b"] == sum((a * b).sum().item() < 0 for a, b in pieces)


def test_nothing_is_read_from_the_device_in_a_step():
    """A fake tensor has no values: to ask for one is an error."""
    meter = meter_of("tensors")
    with FakeTensorMode(allow_non_fake_inputs=True):
        grams = torch.stack([gram_matrix(torch.ones(3, size)) for size in (5, 257)])
        for _ in range(2):
            meter.add("abc", grams.sum(dim=0), torch.eye(3).double(), ["embeddings", "rest"], grams)
        with pytest.raises(DataDependentOutputException):
            meter.read()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("detail", ["none", "layers", "tensors"])
def test_no_step_waits_for_the_gpu(detail):
    parameters = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in (2, 257, 7)]
    meter = ConflictMeter("ab", detail, ["embeddings", "embeddings", "rest"])
    gradients = GradientRows(parameters, Unconditional(), meter=meter)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one makes room for the rows
        try:
            for task, factor in (("a", 1.0), ("b", -1.0)):
                gradients.add(task, factor * sum(parameter.sum() for parameter in parameters))
            gradients.combine(torch.Generator())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = meter.read()
    assert found["conflict_a_b"] == 1 and found.get("tensor_conflicts_a_b", 3) == 3


# ---- totals per epoch


def test_an_epoch_has_the_sum_over_its_steps_and_the_next_begins_at_zero():
    meter = collect(meter_of("tensors"), "abc")
    assert meter.end_epoch() == {"conflicts_epoch": 4, "tensor_conflicts_epoch": 10}  # a with b, b with c
    collect(meter, "abc", "ab")
    meter.read()
    collect(meter, "ab")
    assert meter.end_epoch() == {"conflicts_epoch": 4 + 2 + 2, "tensor_conflicts_epoch": 10 + 6 + 6}
    assert meter.end_epoch() == {}
    collect(meter, "ac")
    assert meter.end_epoch() == {"conflicts_epoch": 0, "tensor_conflicts_epoch": 2}  # 3 - 2 in all, -2 in the pooler
    assert collect(meter_of("none"), "abc").end_epoch() == {"conflicts_epoch": 4}


def test_totals_go_on_where_a_state_was_saved():
    whole = collect(meter_of("tensors"), "abc")
    whole.end_epoch()
    collect(whole, "ab")
    resumed = meter_of("tensors")
    resumed.load_state_dict(whole.state_dict())
    for meter in (whole, resumed):
        collect(meter, "abc")
    assert resumed.end_epoch() == whole.end_epoch() == {"conflicts_epoch": 6, "tensor_conflicts_epoch": 16}
    assert resumed.means() == whole.means()


def epochs(trainer):
    """By epoch, the totals in the log."""
    log = [entry for entry in trainer.state.log_history if "conflicts_epoch" in entry]
    return {entry["epoch"]: (entry["conflicts_epoch"], entry.get("tensor_conflicts_epoch")) for entry in log}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_log_has_totals_of_every_epoch_and_loses_no_other_entry(make_trainer, accumulation):
    given = {"aggregator": "pcgrad", "max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.05}
    given |= {"conflict_detail": "tensors", "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(**given)
    metrics = trainer.train().metrics
    steps = [entry for entry in trainer.state.log_history if "loss_sst" in entry]
    per_epoch = len(steps) // 2
    assert len(steps) == trainer.state.global_step == {1: 10, 2: 6}[accumulation]
    expected = {}
    for epoch, of in {1.0: steps[:per_epoch], 2.0: steps[per_epoch:]}.items():
        whole = 2 * sum(entry[f"conflict_{pair}"] for entry in of for pair in PAIRS)
        expected[epoch] = (whole, sum(entry["tensor_conflicts"] for entry in of))
    assert epochs(trainer) == expected and expected[1.0][1] > 0
    for rarely in ({"logging_steps": 4}, {"logging_strategy": "epoch"}, {"logging_strategy": "no"}):
        other = make_trainer(**given, **rarely)
        other.train()
        assert epochs(other) == expected
        logged = [entry["step"] for entry in other.state.log_history if "loss_sst" in entry]
        rate = {4: range(4, len(steps) + 1, 4), 1: [per_epoch, 2 * per_epoch]}
        assert logged == ([] if rarely == {"logging_strategy": "no"} else [*rate[rarely.get("logging_steps", 1)]])
    tensors = sum(of[1] for of in expected.values())
    assert metrics["train_tensor_conflicts"] == pytest.approx(tensors / len(steps))
    by_pair = [metrics[f"train_tensor_conflicts_{pair}"] for pair in PAIRS]
    assert metrics["train_tensor_conflicts"] == pytest.approx(2 * sum(by_pair))
    shared = [name for name, _ in trainer.model.named_parameters() if not name.startswith("heads.")]
    assert metrics["train_shared_tensors"] == len(shared)
    for pair in PAIRS:
        assert 0 < abs(metrics[f"train_cosine_{pair}/layer.0"]) <= 1 and f"conflict_{pair}/embeddings" in steps[0]


def test_the_cosine_of_a_layer_is_that_of_the_losses_gradients(make_trainer, tiny_model):
    trainer = make_trainer(aggregator="pcgrad", max_steps=1, conflict_detail="layers")
    (batch, *_) = trainer.get_train_dataloader()
    trainer.train()
    model, rows = tiny_model(), []
    for task in ("sst", "para"):
        model.zero_grad()
        model(**batch[task]).loss.backward()
        rows.append({name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None})
    for layer, part in {"embeddings": "bert.embeddings.", "layer.1": ".layer.1.", "pooler": "bert.pooler."}.items():
        vectors = [torch.cat([row[name] for name in rows[0] if part in name]) for row in rows]
        expected = torch.cosine_similarity(*vectors, dim=0).item()
        assert trainer.state.log_history[0][f"cosine_sst_para/{layer}"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kept", [3, 5])
def test_totals_are_those_of_an_uninterrupted_run(make_trainer, tiny_model, tmp_path, kept):
    """Resumed within the first epoch of five steps, and at its end."""
    given = {
        "aggregator": "pcgrad", "max_steps": 10, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": kept,
        "conflict_detail": "tensors",
    }  # fmt: skip
    whole = make_trainer(**given)
    expected = whole.train().metrics
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        if folder.name != f"checkpoint-{kept}":
            shutil.rmtree(folder)
    resumed = make_trainer(tiny_model(seed=3), **given)
    found = resumed.train(resume_from_checkpoint=True).metrics
    assert epochs(resumed) == epochs(whole) and [*epochs(whole)] == [1.0, 2.0]
    measured = [name for name in expected if "conflict" in name or "cosine" in name]
    assert len(measured) > 30
    assert {name: found[name] for name in measured} == {name: expected[name] for name in measured}


def test_an_unfinished_epoch_and_a_sum_have_no_totals(make_trainer):
    for given in ({"aggregator": "pcgrad", "max_steps": 4}, {"max_steps": 5}):
        trainer = make_trainer(**given)
        trainer.train()
        assert epochs(trainer) == {}


# ---- the key


def test_detail_changes_no_bit_of_training(make_trainer):
    trained = []
    for detail in ("none", "layers", "tensors"):
        trainer = make_trainer(aggregator="pcgrad", conflict_detail=detail, learning_rate=0.05)
        trainer.train()
        trained.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        inside = {name.split("/")[1] for entry in trainer.state.log_history for name in entry if "/" in name}
        assert bool(inside) == (detail != "none")
    assert all(torch.equal(one, other) for one, other in combinations(trained, 2))


def test_detail_needs_rows_and_a_known_name(tmp_path):
    with pytest.raises(MinBertError, match="`conflict_detail: layers` needs an aggregator that sees each task's grad"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, conflict_detail="layers")
    with pytest.raises(MinBertError, match="Unknown conflict_detail 'layer'. Did you mean 'layers'?"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, aggregator="pcgrad", conflict_detail="layer")
