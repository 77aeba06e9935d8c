"""`minbert conflicts`: measures what the losses' gradients are, and leaves nothing behind."""

import json

import pytest

from hf_minbert.cli.conflicts import verdict
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

PAIRS = ("sst_para", "sst_sts", "para_sts")


def test_it_measures_what_a_run_with_rows_logs_and_writes_the_output_alone(minbert, write_recipe_file, tmp_path):
    """Step 1, before which the weights are those of any run; `row` shows where it stands in the table."""
    recipe = write_recipe_file("per_device_train_batch_size: 4", "cache_dir: " + str(tmp_path / "cache"))
    before = sorted(tmp_path.rglob("*"))
    ended = minbert("conflicts", recipe, "aggregator=gradvac", "--steps", 1, "--output", tmp_path / "found.json")
    assert ended.status == 0, ended.err
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "found.json"])
    found = json.loads((tmp_path / "found.json").read_text())
    metrics = train(read_recipe(recipe, ["aggregator=pcgrad", "logging_steps=1"]))
    expected = {name.removeprefix("train_"): value for name, value in metrics.items()}
    assert set(found) - {"steps"} <= set(expected) and len(found) == 3 + 3 + 3 + 3 + 1 + 1
    assert found["steps"] == 1
    assert found == pytest.approx(
        {**{name: expected[name] for name in found if name != "steps"}, "steps": 1}, abs=1e-6
    )
    lines = [line.split() for line in ended.out.splitlines()]
    for pair in PAIRS:
        a, b = pair.split("_")
        cells = [f"{a},", b, f"{found[f'conflict_{pair}']:.1%}", f"{found[f'cosine_{pair}']:.4f}"]
        assert cells in lines
    assert ended.out.splitlines()[-1] == verdict(found) and "train_loss" not in ended.out


def test_detail_is_that_of_a_run_and_stands_in_tables(minbert, write_recipe_file, tmp_path):
    """Of a recipe that trains with shards, which one process has none of."""
    recipe = write_recipe_file("per_device_train_batch_size: 4", "aggregator: pcgrad", "gradient_reduction: sharded")
    words = ["--steps", 1, "--detail", "tensors", "--output", tmp_path / "found.json"]
    ended = minbert("conflicts", recipe, "conflict_detail=layers", *words)
    assert ended.status == 0, ended.err
    found = json.loads((tmp_path / "found.json").read_text())
    metrics = train(read_recipe(recipe, ["conflict_detail=tensors"]))
    expected = {f"train_{name}": value for name, value in found.items() if name != "steps"}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    lines = [line.split() for line in ended.out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in ("embeddings", "layer.0", "layer.1", "pooler")}
    for layer, cells in rows.items():
        assert cells == [
            cell
            for pair in PAIRS
            for cell in (f"{found[f'conflict_{pair}/{layer}']:.1%}", f"{found[f'cosine_{pair}/{layer}']:.4f}")
        ]
    assert list(rows) == ["embeddings", "layer.0", "layer.1", "pooler"]
    for pair in PAIRS:
        assert [f"{pair.split('_')[0]},", pair.split("_")[1], f"{found[f'tensor_conflicts_{pair}']:.1f}"] in lines
    most = 6 * found["shared_tensors"]  # three pairs, each both ways
    assert ["both", "ways,", "all", "pairs", f"{found['tensor_conflicts']:.1f}", "of", f"{most:,.0f}"] in lines
    assert f"of {found['shared_tensors']:g}" in ended.out and ended.out.splitlines()[-1] == verdict(found)


def test_it_stops_in_time_on_the_schedule_of_the_recipe(minbert, write_recipe_file, tmp_path):
    recipe = write_recipe_file("per_device_train_batch_size: 4", "learning_rate: 1e-2")
    found = {}
    for name, words in {"short": ["max_steps=2"], "long": ["max_steps=50"]}.items():
        words = [*words, "lr_scheduler_type=linear", "--steps", 3, "--output", tmp_path / name]
        assert minbert("conflicts", recipe, *words).status == 0
        found[name] = json.loads((tmp_path / name).read_text())
    assert (found["short"]["steps"], found["long"]["steps"]) == (2, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train_tasks=[sst]"],
            "A conflict needs gradients of two tasks for the same weight, but one task is trained.",
        ),
        (["freeze=encoder"], "with `freeze: encoder` nothing is trained that tasks share."),
        (["mixing=proportional"], "with `mixing: proportional` and without `gradient_accumulation_steps` each step"),
        (
            ["--detail", "lyers"],
            "'--detail': 'lyers' is not one of 'none', 'layers', 'tensors'. Did you mean 'layers'?",
        ),
        (["agregator=sum"], "Unknown key 'agregator'"),
        (["--output", "."], "it is not a file"),
    ],
)
def test_mistakes_are_one_line(minbert, write_recipe_file, monkeypatch, words, said):
    monkeypatch.setattr("hf_minbert.run.conflicts.load_model", lambda *_: pytest.fail("weights are loaded"))
    ended = minbert("conflicts", write_recipe_file(), *words)
    assert ended.status == 2
    assert said in ended.err.splitlines()[-1]


def test_the_verdict_says_whether_surgery_has_anything_to_do():
    none = {"conflict_a_b": 0.0, "surgery_turn": 0.0, "steps": 1}
    assert verdict(none) == "Surgery has nothing to remove: no two tasks were in conflict in 1 step."
    some = {"conflict_a_b": 0.25, "conflict_a_b/pooler": 1.0, "conflict_a_c": 1.0, "surgery_turn": 0.125, "steps": 100}
    assert "on average over 100 steps, 1.25 of 2 pairs were in conflict" in verdict(some)
    assert "would be 12.5% off the direction of the sum" in verdict(some)
    hardly = verdict({**some, "surgery_turn": 0.0042})
    assert hardly.startswith("Surgery has hardly anything to remove: on average over 100 steps, 1.25 of 2 pairs")
    assert hardly.endswith("and PCGrad's gradient would be only 0.42% off the direction of the sum.")


def test_an_output_dir_that_is_not_used_is_not_asked_for(minbert, write_recipe_file):
    recipe = write_recipe_file()
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("output_dir")]
    recipe.write_text("\n".join(lines))
    ended = minbert("conflicts", recipe, "tasks=[sst]")
    assert ended.status == 2 and "A conflict needs gradients of two tasks" in ended.err
    ended = minbert("search", recipe, "--output-dir", recipe.parent / "search", "--space", "{seed: [1]}", "lr=1")
    assert ended.status == 2 and "Unknown key 'lr'" in ended.err
    ended = minbert(
        "search", recipe, "--output-dir", recipe.parent / "search", "--space", "{seed: [1]}", "--metric", "loss"
    )
    assert ended.status == 2 and "Unknown metric 'loss'" in ended.err
