"""scripts/benchmark.py: every command on a tiny model, and the floor beside torch's own counter."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from hf_minbert.model.packing import Packing

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = ["--random-size", "tiny"]


@pytest.fixture(scope="module")
def benchmarks():
    """`benchmarks(name)`: a module of scripts/benchmarks; without a name, scripts/benchmark.py."""
    sys.path.insert(0, str(SCRIPTS))
    yield lambda name="": importlib.import_module(f"benchmarks.{name}" if name else "benchmark")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def bench(benchmarks, tmp_path_factory):
    """`bench(*words)`: what the command prints, and what it writes."""
    app, file = benchmarks().app, tmp_path_factory.mktemp("numbers") / "numbers.json"
    verbosity, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()

    def run(*words: object) -> tuple[str, dict]:
        file.unlink(missing_ok=True)
        result = CliRunner().invoke(app, [*map(str, words), "--json-file", str(file)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout, json.loads(file.read_text(encoding="utf-8"))

    yield run
    transformers.logging.set_verbosity(verbosity)
    if bar:
        transformers.logging.enable_progress_bar()


# ---- Every command


@pytest.mark.parametrize(
    ("command", "first", "ways"),
    [
        ("step", "stock", {"minbert", "stock"}),
        ("smart", "plain", {"plain", "smart"}),
        ("surgery", "sum", {"sum", "pcgrad", "gradvac", "naive"}),
        ("sharing", "sum", {"sum", "sum, shared", "pcgrad", "pcgrad, shared"}),
    ],
)
def test_a_step(bench, command, first, ways):
    printed, found = bench(command, "--size", "tiny", "--batch-size", 2, "--steps", 1, "--device", "cpu")
    assert set(found["table"]) == ways and found["table"][first][f"time_over_{first}"] == 1
    for name, row in found["table"].items():
        assert len(row["seconds"]) == 1 and row["fastest_ms"] <= row["ms"] <= row["slowest_ms"]
        assert any(line.startswith(f"| {name} ") for line in printed.splitlines())
    assert found["torch"] == torch.__version__ and torch.__version__ in printed


def test_fillers(bench, benchmarks, tiny_bert):
    _, found = bench("fillers", "--model", tiny_bert, "--tasks", "sst,sts", "--batch-sizes", "2,16", "--steps", 20)
    few, many = (found["table"][f"16 rows, {sizes} sizes"] for sizes in (4, 32))
    assert few["fillers_percent"] >= many["fillers_percent"] > 0 and few["shapes"] <= many["shapes"]
    assert few["replayed_percent"] == pytest.approx(100 * (1 - 2 * few["shapes"] / 40), abs=2.5 * few["shapes"])
    for tokens in (3, 64, 65, 700, 1025, 5000):  # as training rounds them up
        described = Packing.describe(np.ones((1, tokens), dtype=bool), fill=True)
        assert benchmarks("fillers").rounded(np.array([tokens]), 8) == len(described["tokens"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the GPU where there is one")
def test_training_of_one_task_and_of_two(bench, tiny_bert):
    words = ["--model", tiny_bert, *TINY, "--tasks", "sst,para", "--batch-size", 2, "--steps", 2]
    _, found = bench("train", *words, "--loops", "stock,packed,naive-pcgrad")
    stock, packed, naive = (found["table"][name] for name in ("stock", "packed", "naive-pcgrad"))
    for row, rows in ((stock, 2), (packed, 4), (naive, 4)):
        assert row["examples_per_s"] == pytest.approx(rows * 2 / row["seconds"][0])
        assert row["ms_a_step"] == pytest.approx(1e3 * row["seconds"][0] / 2)
        assert row["times_stock"] == pytest.approx(row["examples_per_s"] / stock["examples_per_s"])
        assert row["share_of_product"] == pytest.approx(1e12 * row["tflop_per_s"] / found["hardware"]["flops"])
    assert stock["tokens_per_s"] / stock["examples_per_s"] == pytest.approx(found["costs"]["para"]["tokens"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the GPU where there is one")
def test_regularizers_beside_a_plain_step(bench, tiny_bert):
    words = ["--model", tiny_bert, *TINY, "--batch-size", 2, "--steps", 1]
    _, found = bench("train", *words, "--loops", "graphs,graphs-r-drop,graphs-smart")
    plain, *others = found["table"].values()
    for row, passes in zip(others, (6, 8), strict=True):  # a plain step's are 3: forward 1, backward 2
        assert row["tflop_per_s"] / row["examples_per_s"] == pytest.approx(
            passes / 3 * plain["tflop_per_s"] / plain["examples_per_s"]
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the GPU where there is one")
def test_everything_is_one_table(bench, tiny_bert):
    words = ["--model", tiny_bert, *TINY, "--batch-sizes", "1,2", "--steps", 1, "--pairs", 8]
    _, found = bench("all", *words, "--one-task", "stock,packed", "--three-tasks", "packed")
    parts = ("train para, {}: stock", "train para, {}: packed", "train sst,sts,para, {}: packed")
    ways = [f"predict para, {{}}: {way}" for way in ("stock", "stock-sorted", "minbert")]
    assert list(found["table"]) == [name.format(size) for size in (1, 2) for name in (*parts, *ways)]


def test_prediction_answers_as_stock_does(bench, tiny_bert):
    words = ["--model", tiny_bert, *TINY, "--data-dir", "sample", "--pairs", 12, "--batch-size", 2]
    printed, found = bench("predict", *words, "--rounds", 2, "--device", "cpu")
    assert set(found["table"]) == {"stock", "stock-sorted", "minbert"}
    for row in found["table"].values():
        assert row["logits_differ_by"] < 1e-5 and row["other_classes"] == 0 and row["examples_per_s"] > 0
    assert "GFLOP a token" in printed


def test_growth_of_every_stage(bench, tiny_bert):
    words = ["--model", tiny_bert, *TINY, "--data-dir", "sample", "--rows", 2, "--batch-size", 8, "--rounds", 1]
    _, found = bench("growth", *words)
    assert list(found["table"]) == ["load", "tokenize", "tokenize, kept", "train", "predict"]
    for row in found["table"].values():
        most, least = row["us_a_row_at_16x"], row["us_a_row_at_1x"]
        assert row["16x_over_1x"] == pytest.approx(most / least) and least > 0


def test_a_whole_job_part_by_part(bench, benchmarks, tiny_bert, tmp_path, monkeypatch):
    """The import, which it is measured beside, is of nothing here: that of the Trainer takes its time twice."""
    monkeypatch.setattr(benchmarks("job"), "IMPORT", ["-c", "pass"])
    words = [f"model_name_or_path={tiny_bert}", "data_dir=sample", "tasks=[sst]", "max_steps=2", "max_length=64"]
    never = ["eval_strategy=no", "save_strategy=no", "load_best_model_at_end=false"]
    printed, found = bench("job", "cs224n/baseline", *words, *never, "--rounds", 1)
    rows = {name: row["s"] for name, row in found["table"].items()}
    beside, job, until, after, *parts = rows
    assert (beside, job, until) == ("import of Trainer", "job", "until first step")
    assert rows[after] == pytest.approx(rows[until] - rows[beside])
    assert {"imports", "tokens", "first step", "steps", "scores", "end of process"} <= {*parts}
    assert sum(rows[name] for name in parts) == pytest.approx(
        rows[job], abs=0.05
    )  # rounded, and hundredths at the start
    assert any(line.startswith("| tokens ") for line in printed.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the GPU where there is one")
def test_other_encoders_beside_what_they_are_compared_with(bench):
    words = ["--families", "roberta,distilbert", "--library", "mpnet", "--length", 8, "--batch-size", 2]
    _, found = bench("encoders", *words, "--steps", 1, "--rounds", 1)
    table = found["table"]
    assert list(table) == ["bert", "roberta", "distilbert", "mpnet, stock", "mpnet"]
    for name, ratio, first in (
        ("roberta", "bert", "bert"), ("distilbert", "bert", "bert"), ("mpnet", "stock", "mpnet, stock"),
    ):  # fmt: skip
        expected = table[name]["seconds"][0] / table[first]["seconds"][0]
        assert table[name][f"time_over_{ratio}"] == pytest.approx(expected)
        assert abs(table[name]["parameters"] - table[first]["parameters"]) < 20_000  # of 600,000: the same size


def test_other_encoders_need_no_datasets(tmp_path):
    child = f"""
import sys
for name in ("datasets", "evaluate", "pandas", "sklearn"):
    sys.modules[name] = None  # importing it is an error from here on
sys.path.insert(0, {str(SCRIPTS)!r})
from benchmark import app
app(["encoders", "--families", "roberta", "--library", "", "--length", "8", "--batch-size", "2", "--steps", "1",
     "--rounds", "1"])
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and "| roberta |" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_attention_by_each_kernel(bench):
    _, found = bench("attention", "--rows", "2,3", "--heads", 1, "--head-size", 16, "--rounds", 1)
    ways = ["flash", "short", "short, dropout", "padded, dropout"]
    assert [name.split(": ")[1] for name in found["table"]] == 2 * ways
    assert all(row["us_both"] > 0 for row in found["table"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_layer_fused_and_plain(bench):
    _, found = bench("layer", "--rows", "2,3", "--hidden", 32, "--heads", 2, "--rounds", 1)
    assert [name.split(": ")[1] for name in found["table"]] == 2 * ["plain", "fused", "fused, kept weights"]
    assert all(row["us_both"] > 0 for row in found["table"].values())


def test_a_loop_that_is_not_there_is_said_at_once(benchmarks, tiny_bert):
    result = CliRunner().invoke(benchmarks().app, ["train", "--model", str(tiny_bert), "--loops", "stock,faster"])
    assert result.exit_code == 2 and "faster" in result.stderr and "packed" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "--device", "tpu9"], "no device 'tpu9'"),
        (["smart", "--model", "no/such/model"], "no model no/such/model"),
        (["surgery", "--length", 4000], "512"),
        (["predict", "--json-file", "."], "it is not a file"),
        (["train", "--tasks", "stst"], "Unknown task 'stst'"),
        (["growth", "--data-dir", "nowhere"], "nowhere"),
        (["all", "--batch-sizes", "8,0"], "whole numbers from 1"),
        (["encoders", "--families", "bert"], "'bert' is none of roberta"),
        (["encoders", "--library", "roberta"], "computed by hand"),
        (["encoders", "--library", "bart"], "an encoder-decoder"),
        (["layer", "--rows", "2,x"], "--rows must be whole numbers from 1"),
        (["attention", "--rows", "8,0"], "--rows must be whole numbers from 1"),
    ],
)
def test_a_wrong_word_is_said_before_anything_is_measured(benchmarks, tiny_bert, monkeypatch, words, said):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(benchmarks("floor").Hardware, "measure", lambda setting: None)
    model = (
        []
        if words[0] in ("step", "surgery", "encoders", "attention", "layer") or "--model" in words
        else ["--model", tiny_bert]
    )
    result = CliRunner().invoke(benchmarks().app, [*map(str, [*words, *model])])
    assert result.exit_code == 2 and said in result.stderr and not result.stdout


# ---- Ratios and the floor


def test_ratios_are_of_the_same_round(benchmarks):
    """The machine gets slower from round to round. The ratio of the medians would be 3/2."""
    shared: ModuleType = benchmarks("shared")
    seconds = {"first": [1.0, 3.0, 9.0], "second": [0.5, 4.5, 4.5]}
    assert shared.over(seconds, "second", "first") == 0.5
    table = shared.speeds(seconds, {"first": 10, "second": 20})
    assert table["second"]["times_first"] == 4 and table["first"]["examples_per_s"] == pytest.approx(10 / 3)


@pytest.mark.parametrize("task", ["sst", "para"])
def test_the_floor_counts_what_torch_counts(benchmarks, tiny_model, task):
    """Sentences one by one: no padding takes part. Eager attention, whose products the counter sees."""
    floor = benchmarks("floor")
    model, lengths = tiny_model([task], attn_implementation="eager"), [3, 11, 20]
    outputs = model.heads.get(task).linear.out_features
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        for length in lengths:
            model(input_ids=torch.full((1, length), 7), task=task)
    assert len(lengths) * floor.forward_flops(model.config, lengths, outputs) == forward.get_total_flops()
    with FlopCounterMode(display=False) as both:
        for length in lengths:
            model(input_ids=torch.full((1, length), 7), labels=torch.tensor([1]), task=task).loss.backward()
    assert both.get_total_flops() == floor.PASSES["train"] * forward.get_total_flops()


def test_what_the_machine_allows(benchmarks):
    """By hand: 4 examples of 2 operations at 4 a second and 8 bytes at 2 a second take 2 + 4 seconds."""
    floor = benchmarks("floor")
    hardware, cost = floor.Hardware(1, flops=4.0, bytes=2.0), floor.Cost(tokens=5.0, flops=2.0, optimizer_bytes=8)
    row = hardware.beside(0.5, cost, batch_size=4)
    assert row["floor_examples_per_s"] == pytest.approx(4 / 6)
    assert row["tokens_per_s"] == 2.5 and row["share_of_product"] == 0.25


def test_the_bytes_of_the_optimizer(benchmarks):
    """Weight, gradient and what AdamW remembers are read; all but the gradient are written."""
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[weight].values() if value.shape == weight.shape)
    read, written = weight.nbytes + weight.grad.nbytes + kept, weight.nbytes + kept
    assert read + written == 100 * benchmarks("floor").ADAMW_BYTES


@pytest.mark.skipif(find_spec("sentence_transformers") is not None, reason="sentence-transformers is installed")
def test_cross_encoder_says_what_it_needs(benchmarks, tiny_bert):
    result = CliRunner().invoke(benchmarks().app, ["train", "--model", str(tiny_bert), "--loops", "cross-encoder"])
    assert result.exit_code == 2 and "sentence-transformers" in result.stderr
