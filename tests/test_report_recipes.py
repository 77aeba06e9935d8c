"""The recipes of the published reports and of the course's first half: what each line rests on, and that they run."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import MinBertForMultiTask, MultiTaskTrainingArguments, Task, get_tasks
from hf_minbert.recipe import RunSettings, packaged_recipes, read_recipe, split_recipe
from hf_minbert.run import train

REPORTS = {name: path for name, path in packaged_recipes().items() if name.startswith("reports/")}
FIRST_HALF = [f"cs224n/{task}_{how}" for task in ("sst", "cfimdb") for how in ("frozen", "finetune")]
NAMES = [*REPORTS, *FIRST_HALF]

#: What a line of a report's recipe rests on.
SOURCE = re.compile(r"(sections? \d(\.\d)*|table \d|abstract|not stated)\b")
#: Settings that every training has, whether a report speaks of them or not.
NEEDED = {
    "model_name_or_path", "max_length", "num_train_epochs", "optim", "adam_epsilon", "learning_rate",
    "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed",
}  # fmt: skip


def read(name: str) -> tuple[RunSettings, dict[str, typing.Any], list[Task]]:
    settings, training = split_recipe(read_recipe(name), typing.get_type_hints(MultiTaskTrainingArguments))
    return settings, training, get_tasks(settings.tasks)


# ---- What a recipe says


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_its_own_command(name):
    comment = re.match(r"(?:#.*\n)+", packaged_recipes()[name].read_text(encoding="utf-8"))[0]
    said, commands = comment.split("\n#\n")
    assert 2 <= len(said.splitlines()) <= 5
    assert commands.splitlines()[0] == f"#   minbert train {name} data_dir=$CS224N_DATA"
    if name in REPORTS:
        number = Path(name).parts[1]
        assert said.startswith(f"# Report {number}, table ")
        assert re.search(r"Published.* -?\d\.\d{3} on dev", " ".join(said.split("\n# ")))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete_and_has_a_folder_of_its_own(name):
    settings, training, tasks = read(name)
    assert settings.data_dir == "data"
    assert settings.output_dir == "runs/" + "-".join(Path(name).parts).replace("reports-", "reports/")
    missing = NEEDED - {*training, *(key for key, value in vars(settings).items() if value is not None)}
    assert not missing
    sizes = {task.name: training.get("per_device_train_batch_size") for task in tasks}
    assert None not in {**sizes, **training.get("task_batch_sizes", {})}.values()
    args = MultiTaskTrainingArguments(**training)
    args.check_tasks({task.name: task for task in tasks})
    assert not args.without_effect(tasks)


@pytest.mark.parametrize("name", REPORTS)
def test_each_setting_of_a_report_names_its_section_or_is_not_stated(name):
    text = REPORTS[name].read_text(encoding="utf-8")
    model, rest = text.split("# -- Model\n")[1].split("# -- Data\n")
    lines = [*model.splitlines(), *rest.split("# -- Training\n")[1].split("# -- Evaluation\n")[0].splitlines()]
    settings = [line for line in lines if line and not line.endswith(":")]  # a line that ends so opens a mapping
    assert len(settings) > len(NEEDED)
    for line in settings:
        assert SOURCE.match(line.partition("# ")[2]), line


def test_report_001_has_a_recipe_for_each_row_of_its_three_tables():
    rows = [name for name in REPORTS if name.startswith("reports/001/")]
    assert [sum(task in name for name in rows) for task in ("/sst_", "/para_", "/sts_")] == [5, 6, 6]
    rates = {"sst": (2e-5, 0.01), "para": (1e-5, 0.01), "sts": (1e-5, 0.1)}  # section 4.3
    for name in rows:
        _, training, (task,) = read(name)
        assert task.name == Path(name).name.split("_")[0]
        assert (training["learning_rate"], training["weight_decay"]) == rates[task.name]
        dropouts = [task.head_options.get("dropout"), *task.head_options.get("dropouts", []), task.sentence_dropout]
        assert {rate for rate in dropouts if rate} == {0.5}


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_frozen") and "cs224n" not in name])
def test_a_row_without_fine_tuning_is_the_row_with_it_but_for_the_freezing(name):
    frozen, tuned = read(name), read(name.removesuffix("_frozen"))
    assert frozen[2] == tuned[2]
    differ = {key for key in {*frozen[1], *tuned[1]} if frozen[1].get(key) != tuned[1].get(key)}
    assert differ == {"freeze", "output_dir"}


def test_the_batches_of_report_003_come_with_the_factors_of_its_equation_7():
    names = [name for name in REPORTS if name.startswith("reports/003/") and "_batch_sizes" in name]
    assert len(names) == 6  # three models, with surgery and without
    for name in names:
        _, training, _ = read(name)
        assert training["task_batch_sizes"] == {"sst": 1, "para": 24, "sts": 1}  # section 5.3
        assert training["task_weights"] == "inverse_batch_size"  # whose values tests/data/test_rounds.py has


def differences(one: str, other: str) -> dict[str, typing.Any]:
    """What `one` trains with and `other` does not, or otherwise; `None` where only `other` has the key."""
    (_, mine, tasks), (_, theirs, other_tasks) = read(one), read(other)
    changed = {key: mine.get(key) for key in {*mine, *theirs} - {"output_dir"} if mine.get(key) != theirs.get(key)}
    return changed | ({"tasks": True} if tasks != other_tasks else {})


def test_each_row_of_report_002_adds_to_another_what_its_name_says():
    sampled = {"rows_per_epoch": {"para": 0.1}, "redraw_rows": False}  # section 3.2
    surgery = {"aggregator": "pcgrad", "aggregator_options": {"reduction": "mean"}, "per_device_train_batch_size": 5}
    smart = {
        "regularizer": "smart", "smart_form": "mt-dnn", "smart_variant": "smart_0", "smart_weight": 1.0,
        "smart_step_size": 1e-3, "smart_epsilon": 1e-6, "smart_noise_std": 1e-5, "smart_steps": 1, "proximal": "none",
    }  # fmt: skip
    more_rows = {"para": 0.1, "reviews": 14150, "nli": 14150}
    extra = {"rows_per_epoch": more_rows, "eval_tasks": ["sst", "para", "sts"], "task_weights": None}
    added = {
        ("sampling", "baseline"): sampled,
        ("smart", "sampling"): smart,
        ("pcgrad", "sampling"): surgery,
        ("pcgrad_smart", "pcgrad"): smart,
        ("pcgrad_smart_5_epochs", "pcgrad_smart"): {"num_train_epochs": 5},
        ("pcgrad_smart_more_data", "pcgrad_smart"): extra | {"per_device_train_batch_size": 3, "tasks": True},
        ("cross", "sampling"): {"tasks": True},
        ("cross_pcgrad_smart_0", "cross"): surgery | smart,
        ("cross_pcgrad_smart_0", "pcgrad_smart"): {"tasks": True},
        ("cross_pcgrad_smart_1", "cross_pcgrad_smart_0"): {
            "smart_variant": "smart_1", "smart_score_divergence": "bernoulli",
        },
        ("cross_pcgrad_smart_2", "cross_pcgrad_smart_1"): {"smart_variant": "smart_2"},
    }  # fmt: skip
    assert {f"reports/002/{name}" for pair in added for name in pair} == {n for n in REPORTS if "/002/" in n}
    for (name, other), keys in added.items():
        assert differences(f"reports/002/{name}", f"reports/002/{other}") == keys, name


def test_a_row_with_surgery_is_the_row_without_but_for_the_aggregator():
    twins = {name: name.removesuffix("_surgery") for name in REPORTS if name.endswith("_surgery")}
    del twins["reports/000/no_surgery"]
    twins["reports/000/surgery"] = "reports/000/no_surgery"
    twins["reports/004/gradient_surgery"] = "reports/004/unbalanced_round_robin"
    forms = {
        "000": {"aggregator": "pcgrad"},
        "003": {"aggregator": "unconditional"},  # section 4.3.2, equations 2 to 4: no test for conflict
        "004": {"aggregator": "pcgrad", "aggregator_options": {"reduction": "sum"}},  # section 4.6, algorithm 1
    }
    assert sorted(name.split("/")[1] for name in twins) == ["000"] + 6 * ["003"] + 3 * ["004"]
    for name, plain in twins.items():
        assert differences(name, plain) == forms[name.split("/")[1]], name


# ---- That it runs


@pytest.fixture(scope="module")
def tiny_data(write_course_files, tmp_path_factory) -> Path:
    """The small files in the course's format, with such of cfimdb."""
    folder = write_course_files(tmp_path_factory.mktemp("course"))
    for split in ("train", "dev"):
        rows = [f"{row}\tcfimdb-{split}-{row}\t{('good', 'bad')[row % 2]} film {row}\t{row % 2}" for row in range(6)]
        (folder / f"ids-cfimdb-{split}.csv").write_text("\n".join(["\tid\tsentence\tsentiment", *rows]) + "\n")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_train_what_is_not_frozen(name, tiny_bert, tiny_data, tmp_path):
    settings, training, tasks = read(name)
    words = {
        "model_name_or_path": tiny_bert, "data_dir": tiny_data, "output_dir": tmp_path / "run", "max_length": 64,
        "max_steps": 2, "per_device_train_batch_size": 4, "disable_tqdm": "true", "use_cpu": "true",
    }  # fmt: skip
    if "dataset" in str(settings.tasks):  # of the Hub: rows of ours in their place
        extra = {"reviews": ("text", "label"), "nli": ("premise,hypothesis", "label")}
        for task, (texts, label) in extra.items():
            lines = [f"{','.join(['good film ' + str(row)] * len(texts.split(',')))},{row % 3}" for row in range(8)]
            (tmp_path / f"{task}.csv").write_text("\n".join([f"{texts},{label}", *lines]) + "\n")
        own = {name: entry for name, entry in settings.tasks.items() if name not in extra}
        files = {task: {"files": dict.fromkeys(("train", "dev"), str(tmp_path / f"{task}.csv"))} for task in extra}
        words |= {"tasks": json.dumps(own | files), "rows_per_epoch": "{para: 0.5}"}
    if "task_batch_sizes" in training:
        words["task_batch_sizes"] = "{sst: 1, para: 3, sts: 1}"
    train(read_recipe(name, [f"{key}={value}" for key, value in words.items()]))

    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["global_step"] == 2
    scored = training.get("eval_tasks", [task.name for task in tasks])
    assert {f"eval_{task.name}_{task.metric}" for task in tasks if task.name in scored} <= set(metrics)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_bert, tmp_path / "run"))
    changed = {key for key in before if not torch.equal(before[key], after[f"bert.{key}"])}
    trained = [task for task in tasks if task.name in training.get("train_tasks", [task.name for task in tasks])]
    idle = {key for key in before if "pooler" in key and all(task.pooling != "pooler" for task in trained)}
    assert changed == (set() if training.get("freeze") == "encoder" else set(before) - idle)
    model = MinBertForMultiTask.from_pretrained(tmp_path / "run")
    assert model.config.task_names == [task.name for task in tasks]
