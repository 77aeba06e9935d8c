"""Which runs are seeds of one recipe: those whose recipes mean the same, and whose training rows are the same."""

import json

import pytest
from small_encoders import small

from hf_minbert.io import write_json
from hf_minbert.reporting.comparison import seeds
from hf_minbert.reporting.runs import read_run
from hf_minbert.settings.dotted import as_value
from hf_minbert.settings.tasks import TASKS


def _altered(make_run, data, folder, lines="", **files):
    """A run whose recipe has further lines, and whose folder further JSON files' entries."""
    made = make_run(folder, data, 60, seed=2)
    with (made / "recipe.yaml").open("a") as file:
        file.write(lines)
    for name, entries in files.items():
        path = made / f"{name}.json"
        write_json(path, {**(json.loads(path.read_text()) if path.is_file() else {}), **entries})
    return read_run(made)


SAME = [
    ("", "aggregator_options: {}\nlearning_rates: {}\nlr_scheduler_kwargs: {}\nunfreeze: {}\nstages: []"),
    ("", "train_tasks: [sst, para, sts]\neval_tasks: [sst, para, sts]"),
    ("", "task_weights: {sst: 1.0}\nrows_per_epoch: {sst: 1.0}\ntask_sampling: {sst: shuffle}"),
    ("per_device_train_batch_size: 4", "per_device_train_batch_size: 4\ntask_batch_sizes: {sst: 4}"),
    ("weight_decay: 0.1", "weight_decay: 0.1\nweight_decays: {heads: 0.1}"),
    ("", "gradient_checkpointing: false\nprivate_layers: 0"),
    ("activation_checkpointing: true", "gradient_checkpointing: true"),
    ("", "metric_for_best_model: eval_overall\ngreater_is_better: true"),
    ("regularizer: smart", "regularizer: smart\nsmart_variant: {sst: smart_0}"),
    ("regularizer: smart\nsmart_variant: smart_1", "regularizer: smart\nsmart_variant: {sst: smart_1, para: smart_1, "
     "sts: smart_1}"),
    ("", "smart_weight: 3.0\nr_drop_weight: 2.0\ndistill_weight: 0.1\nproximal_steps: 4\nscore_bins: 9"),
    ("regularizer: smart\nsmart_form: mt-dnn", "regularizer: smart\nsmart_form: mt-dnn\nsmart_norm: l2"),
    ("", "mlm_probability: 0.3\nmlm_whole_words: true"),
    ("objective: mlm", "objective: mlm\naggregator: pcgrad\ntask_weights: {sst: 2.0}"),
    ("peft: {}", "peft: {peft_type: LORA, r: 8, target_modules: [value, query]}"),
    ("stages: [{name: a}, {name: b}]", "stages: [{seed: 5}, {regularizer: none, seed: 7, tasks: [sst, para, sts]}]"),
    ("learning_rate: 0.1\nstages: [{learning_rate: 0.3}]", "learning_rate: 0.2\nstages: [{learning_rate: 0.3}]"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "also_said"), SAME)
def test_recipes_that_mean_the_same_are_the_same(make_run, data, tmp_path, said, also_said):
    one, other = (_altered(make_run, data, tmp_path / name, lines) for name, lines in (("a", said), ("b", also_said)))
    assert one.differences(other) == other.differences(one) == []


@pytest.mark.parametrize(
    ("said", "otherwise", "keys"),
    [
        ("", "rows_per_epoch: {sst: 1}", ["rows_per_epoch"]),  # one row
        ("", "train_tasks: sst", ["train_tasks"]),
        ("", "learning_rates: {heads: 1}", ["learning_rates"]),
        ("learning_rates: {heads: 1}", "learning_rates: {heads: 1, sst: 5e-5}", ["learning_rates.sst"]),
        ("", "gradient_checkpointing: true", ["gradient_checkpointing"]),
        ("regularizer: smart", "regularizer: smart\nsmart_weight: 2", ["smart_weight"]),
        ("", "regularizer: smart\nsmart_weight: 2", ["regularizer"]),
        ("", "objective: mlm", ["objective"]),
        ("objective: mlm", "objective: mlm\nmlm_probability: 0.3", ["mlm_probability"]),
        ("peft: {r: 8}", "peft: {r: 4}", ["peft.r"]),
        ("", "stages: [{name: a}]", ["stages"]),
        ("stages: [{name: a}, {name: b}]", "stages: [{}, {learning_rate: 1}]", ["stages.b.learning_rate"]),
        ("stages: [{}, {}]", "stages: [{}, {}]\nlearning_rate: 1", ["learning_rate"]),
    ],
)
def test_recipes_that_mean_something_else_differ_in_these_keys(make_run, data, tmp_path, said, otherwise, keys):
    one, other = (_altered(make_run, data, tmp_path / name, lines) for name, lines in (("a", said), ("b", otherwise)))
    assert one.differences(other) == keys
    if not keys[0].startswith("stages."):  # the stages have the names of the first run
        assert other.differences(one) == keys


def test_what_a_task_and_a_source_say_by_default_may_be_said(make_run, data, tmp_path):
    long = {
        "sst": {"loss": "cross_entropy", "head": "linear", "metric": "accuracy", "sentence_dropout": 0},
        "para": {"files": {split: [{"path": path}] for split, path in TASKS["para"].files.items()}},
        "sts": {"sources": [{"files": [{"path": "a.tsv", "quotes": False}]}, {"dataset": "x", "split": "train"}]},
    }
    short = {"sst": None, "para": None, "sts": {"sources": [{"files": "a.tsv", "quotes": False}, {"dataset": "x"}]}}
    one, two, three = (_altered(make_run, data, tmp_path / name) for name in ("one", "two", "three"))
    for run, tasks in ((one, long), (two, short), (three, {**short, "sst": {"head": "mlp"}})):
        run.recipe["tasks"] = as_value(tasks)
    assert one.differences(two) == [] and one.differences(three)[0] == "tasks.sst.head"  # and its options


def test_the_default_of_a_heads_option_may_be_said(make_run, data, tmp_path):
    config = {"hidden_dropout_prob": 0.1}
    said = (
        {"sst": None},
        {"sst": {"head_options": {"dropout": 0.1, "scale": 1.0}}},
        {"sst": {"head_options": {"scale": 2.0}}},
    )
    runs = [_altered(make_run, data, tmp_path / str(number), config=config) for number in range(3)]
    for run, tasks in zip(runs, said, strict=True):
        run.recipe["tasks"] = as_value(tasks)
    assert runs[0].differences(runs[1]) == []
    assert runs[0].differences(runs[2]) == ["tasks.sst.head_options.scale"]


def test_a_model_is_its_folder_however_that_is_named(make_run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    runs = [_altered(make_run, data, tmp_path / str(number)) for number in range(4)]
    for run, name in zip(runs, ("tiny", "tiny/", f"{tmp_path}/tiny", "google-bert/tiny"), strict=True):
        run.recipe["model_name_or_path"] = as_value(name)
    assert [runs[0].differences(run) for run in runs[1:]] == [[], [], ["model_name_or_path"]]


def test_what_the_checkpoint_says_may_be_said(make_run, data, tmp_path):
    config = {"max_input_length": 64, "hidden_dropout_prob": 0.1}
    plain = _altered(make_run, data, tmp_path / "plain", config=config)
    said = _altered(make_run, data, tmp_path / "said", "max_length: 64\nhidden_dropout_prob: 0.1", config=config)
    other = _altered(make_run, data, tmp_path / "other", "max_length: 32", config={**config, "max_input_length": 32})
    before = _altered(make_run, data, tmp_path / "before", config={"hidden_dropout_prob": 0.1})  # of an older version
    assert plain.differences(said) == plain.differences(before) == []
    assert plain.differences(other) == ["max_length"]


@pytest.mark.parametrize("where", ["peft: {}", "stages: [{{name: a, peft: {}}}, {{name: b}}]"])
def test_the_default_layers_of_an_adapter_are_those_of_the_model(make_run, data, tmp_path, where):
    config = {"encoder_config": small("modernbert").to_dict()}
    runs = [
        _altered(make_run, data, tmp_path / str(number), where.format(said), config=config)
        for number, said in enumerate(("{}", "{target_modules: [Wqkv]}", "{target_modules: [Wo]}"))
    ]
    assert runs[0].differences(runs[1]) == []
    assert runs[0].differences(runs[2]) == [("stages.a." if "stages" in where else "") + "peft.target_modules"]


def test_runs_on_other_training_rows_are_no_seeds_of_each_other(make_run, data, tmp_path):
    rows = {"training_rows": {"sst": "1", "sts": "2"}}
    runs = [
        _altered(make_run, data, tmp_path / f"{number}", environment={"training_rows": digests})
        for number, digests in enumerate(
            [{"sst": "1", "sts": "2"}, {"sst": "1", "sts": "2"}, {"sst": "1", "sts": "3"}]
        )
    ]
    assert runs[0].differences(runs[1]) == [] and runs[0].differences(runs[2]) == ["training rows"]
    assert [block.text for block in seeds([runs[0], runs[2]])][1:] == ["2 is left out: it differs in training rows."]
    drawn = as_value({"sst": None, "sts": {"sources": [{"task": "para", "rows": 3}]}})  # by the seed
    for run in runs:
        run.recipe["tasks"] = drawn
    assert runs[0].differences(runs[2]) == []
    stages = "stages: [{name: a, tasks: [sst]}, {name: b, tasks: [sts]}]"
    staged = [_altered(make_run, data, tmp_path / f"stages-{n}", stages, environment=rows) for n in range(3)]
    for run, digest in zip(staged, "xyx", strict=True):
        write_json(run.path / "stages" / "1-a" / "environment.json", {"training_rows": {"sst": digest}})
    assert staged[0].differences(staged[1]) == ["training rows"] and staged[0].differences(staged[2]) == []
