"""The recipes of the published reports and of the course's first half: what each line rests on, and that they run."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import MinBertForMultiTask, MultiTaskTrainingArguments, Task, get_tasks
from hf_minbert.run import pretraining
from hf_minbert.run.stages import plan
from hf_minbert.run.train import train
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.recipe import packaged_recipes, read_recipe, split_recipe
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.tasks import Source

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


Read = tuple[RunSettings, dict[str, typing.Any], list[Task]]


def read(name: str) -> Read:
    settings, training = split_recipe(read_recipe(name), typing.get_type_hints(MultiTaskTrainingArguments))
    return settings, training, get_tasks(settings.tasks)


def read_runs(name: str) -> dict[str, Read]:
    """The runs that a recipe is made of, by name: its stages or, under no name, itself."""
    stages = {stage.name: (stage.settings, stage.given) for stage in plan(read_recipe(name))}
    runs = {stage: (settings, given, get_tasks(settings.tasks)) for stage, (settings, given) in stages.items()}
    return runs or {"": read(name)}


STAGED = {name: read_runs(name) for name in REPORTS if read(name)[0].stages}
PLAIN = [name for name in REPORTS if name not in STAGED]


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
    folder = "runs/" + "-".join(Path(name).parts).replace("reports-", "reports/")
    assert read(name)[0].output_dir == folder
    for settings, training, tasks in read_runs(name).values():
        assert settings.data_dir == "data"
        given = {*training, *(key for key, value in vars(settings).items() if value is not None)}
        assert not NEEDED - given - ({"num_train_epochs"} if "max_steps" in given else set())
        sizes = {task.name: training.get("per_device_train_batch_size") for task in tasks}
        assert None not in {**sizes, **training.get("task_batch_sizes", {})}.values()
        args, by_name = MultiTaskTrainingArguments(**training), {task.name: task for task in tasks}
        if settings.objective == "mlm":
            pretraining.check(args, by_name)
            assert not pretraining.without_effect(args)
        else:
            args.check_tasks(by_name)
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
    borrowing = [name for name in rows if any(task.sources for task in read(name)[2])]
    assert borrowing == ["reports/001/sts_siamese_quora"]  # which is in no table
    tables = [sum(task in name for name in {*rows} - {*borrowing}) for task in ("/sst_", "/para_", "/sts_")]
    assert tables == [5, 6, 6]
    rates = {"sst": (2e-5, 0.01), "para": (1e-5, 0.01), "sts": (1e-5, 0.1)}  # section 4.3
    for name in rows:
        _, training, (task,) = read(name)
        assert task.name == Path(name).name.split("_")[0]
        assert (training["learning_rate"], training["weight_decay"]) == rates[task.name]
        dropouts = [task.head_options.get("dropout"), *task.head_options.get("dropouts", []), task.sentence_dropout]
        assert {rate for rate in dropouts if rate} == {0.5}


def test_report_001_borrows_quora_for_sts_and_changes_nothing_else():
    borrowing, plain = "reports/001/sts_siamese_quora", "reports/001/sts_siamese"
    assert differences(borrowing, plain) == {"tasks": True}
    (task,), (without,) = read(borrowing)[2], read(plain)[2]
    assert replace(task, sources=()) == without
    assert task.sources == (Source(task="para", mapping="paraphrase_to_score"),)  # section 3.3; tests/data has values


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_frozen") and "cs224n" not in name])
def test_a_row_without_fine_tuning_is_the_row_with_it_but_for_the_freezing(name):
    frozen, tuned = read(name), read(name.removesuffix("_frozen"))
    assert frozen[2] == tuned[2]
    differ = {key for key in {*frozen[1], *tuned[1]} if frozen[1].get(key) != tuned[1].get(key)}
    assert differ == {"freeze", "output_dir"}


def test_the_batches_of_report_003_come_with_the_factors_of_its_equation_7():
    names = [name for name in PLAIN if name.startswith("reports/003/") and "_batch_sizes" in name]
    assert len(names) == 6  # three models, with surgery and without
    for name in names:
        _, training, _ = read(name)
        assert training["task_batch_sizes"] == {"sst": 1, "para": 24, "sts": 1}  # section 5.3
        assert training["task_weights"] == "inverse_batch_size"  # whose values tests/data/test_rounds.py has


def differences(one: str | Read, other: str | Read) -> dict[str, typing.Any]:
    """What `one` trains with and `other` does not, or otherwise; `None` where only `other` has the key."""
    (_, mine, tasks), (_, theirs, other_tasks) = (read(run) if isinstance(run, str) else run for run in (one, other))
    changed = {key: mine.get(key) for key in {*mine, *theirs} - {"output_dir"} if mine.get(key) != theirs.get(key)}
    return changed | ({"tasks": True} if tasks != other_tasks else {})


def test_each_row_of_report_002_adds_to_another_what_its_name_says():
    sampled = {"rows_per_epoch": {"para": 0.1}, "redraw_rows": False}  # section 3.2
    surgery = {"aggregator": "pcgrad", "aggregator_options": {"reduction": "mean"}, "per_device_train_batch_size": 5}
    smart = {
        "regularizer": "smart", "smart_form": "smart-pytorch", "smart_variant": "smart_0", "smart_weight": 1.0,
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
    twins = {name: name.removesuffix("_surgery") for name in PLAIN if name.endswith("_surgery")}
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


# ---- What a recipe in stages is made of


def test_report_000_has_the_stages_of_its_table_2():
    pipeline = STAGED["reports/000/fpt_ft_multi"]
    assert [[*STAGED[f"reports/000/{name}"]] for name in ("fpt", "fpt_ft", "fpt_ft_multi")] == [
        ["pretrain", "score"], ["pretrain", "heads"], ["pretrain", "heads", "all"],
    ]  # fmt: skip
    settings, training, tasks = pipeline["pretrain"]
    assert (settings.objective, settings.mlm_order, settings.mlm_probability) == ("mlm", "sequence", 0.15)
    assert [task.name for task in tasks] == ["sst", "para", "sts"]
    assert training["num_train_epochs"] == pipeline["heads"][1]["num_train_epochs"] == 5
    for row in ("fpt", "fpt_ft"):
        assert same_run(STAGED[f"reports/000/{row}"]["pretrain"], pipeline["pretrain"])
    assert same_run(STAGED["reports/000/fpt_ft"]["heads"], pipeline["heads"])
    # The rows that say what each stage brings end with the same networks on other weights.
    assert differences(STAGED["reports/000/fpt"]["score"], "reports/000/base") == {"num_train_epochs": 5}
    assert differences(pipeline["all"], "reports/000/task_networks") == {}
    assert differences(pipeline["heads"], pipeline["all"]) == {
        "freeze": "encoder",
        "mixing": "once",
        "task_weights": None,
    }
    untrained = {"freeze": "encoder", "learning_rate": 0.0, "max_steps": 1}
    plain = dict.fromkeys(("num_train_epochs", "mixing", "task_weights"))
    assert differences("reports/000/base", "reports/000/task_networks") == untrained | plain


def test_report_003_has_the_ten_rows_of_concat_b_with_the_added_layer():
    prefix = "reports/003/concat_b_added_layer_"
    rows = [("batch_sizes_surgery",), ("surgery",), ("heads",), ("nli", "batch_sizes_surgery"), ("nli", "surgery")]
    rows += [("nli", "heads"), *((*row, "heads") for row in rows if "surgery" in row[-1])]
    assert len({*rows}) == 10
    alone = {method: read(prefix + method) for method in ("batch_sizes_surgery", "surgery", "heads")}
    alone["nli"] = STAGED[f"{prefix}nli_heads"]["nli"]
    for row in rows[3:]:
        stages = STAGED[prefix + "_".join(row)].values()
        assert [same_run(stage, alone[method]) for stage, method in zip(stages, row, strict=True)] == [True] * len(row)
    settings, training, (nli,) = alone["nli"]
    assert (nli.name, nli.dataset, nli.pair_encoding) == ("nli", "nyu-mll/glue", "cross")  # sections 4.2 and 5.1
    assert (training["per_device_train_batch_size"], training.get("freeze")) == (16, None)
    surgery = {"aggregator": None, "freeze": "encoder", "mixing": "once", "per_device_train_batch_size": 8}
    assert differences(alone["heads"], alone["surgery"]) == surgery


def same_run(one: Read, other: Read) -> bool:
    """Whether two runs differ in nothing but where they begin and what they are called."""
    place = {"model_name_or_path": "", "output_dir": "", "stages": None}
    return not differences(one, other) and replace(one[0], **place) == replace(other[0], **place)


@pytest.mark.parametrize("name", STAGED)
def test_the_dropout_of_bert_is_off_only_where_it_is_frozen(name):
    """A stage takes over the config of the one before, so it has to say that the dropout is on again."""
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # those of the checkpoint
    for settings, training, _ in STAGED[name].values():
        rates |= {key: getattr(settings, key) for key in rates if getattr(settings, key) is not None}
        reads_once = training.get("freeze") == "encoder" and training["learning_rate"] > 0
        assert {*rates.values()} == {0.0 if reads_once else 0.1}


# ---- That it runs


@pytest.fixture(scope="module")
def tiny_data(write_course_files, tmp_path_factory) -> Path:
    """The small files in the course's format, with such of cfimdb."""
    folder = write_course_files(tmp_path_factory.mktemp("course"))
    for split in ("train", "dev"):
        rows = [f"{row}\tcfimdb-{split}-{row}\t{('good', 'bad')[row % 2]} film {row}\t{row % 2}" for row in range(6)]
        (folder / f"ids-cfimdb-{split}.csv").write_text("\n".join(["\tid\tsentence\tsentiment", *rows]) + "\n")
    return folder


def with_rows_of_ours(tasks: typing.Any, folder: Path) -> typing.Any:
    """A recipe's `tasks` with files in `folder` in place of datasets on the Hub."""
    extra = {"reviews": ("text", "label"), "nli": ("premise,hypothesis", "label")}
    entries = dict(tasks) if isinstance(tasks, dict) else {}
    for task in {*entries} & {*extra}:
        texts, label = extra[task]
        lines = [f"{','.join(['good film ' + str(row)] * len(texts.split(',')))},{row % 3}" for row in range(8)]
        (folder / f"{task}.csv").write_text("\n".join([f"{texts},{label}", *lines]) + "\n")
        entries[task] = {key: value for key, value in entries[task].items() if key not in ("dataset", "splits")}
        entries[task]["files"] = dict.fromkeys(("train", "dev"), str(folder / f"{task}.csv"))
    return entries or tasks


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_train_what_is_not_frozen(name, tiny_bert, tiny_data, tmp_path):
    words = {
        "model_name_or_path": tiny_bert, "data_dir": tiny_data, "output_dir": tmp_path / "run", "max_length": 64,
        "max_steps": 2, "per_device_train_batch_size": 4, "disable_tqdm": "true", "use_cpu": "true",
    }  # fmt: skip
    settings, training, _ = read(name)
    if "rows_per_epoch" in training:
        words["rows_per_epoch"] = "{para: 0.5}"
    if "task_batch_sizes" in training:
        words["task_batch_sizes"] = "{sst: 1, para: 3, sts: 1}"
    values = read_recipe(name, [f"{key}={value}" for key, value in words.items()])
    for stage in settings.stages and values["stages"].value or ():
        if "tasks" in stage:
            stage["tasks"] = with_rows_of_ours(stage["tasks"], tmp_path)
        if "task_batch_sizes" in stage:  # a word would be for all stages, also those with other tasks
            stage["task_batch_sizes"] = {"sst": 1, "para": 3, "sts": 1}
    values["tasks"] = Value(with_rows_of_ours(values["tasks"].value, tmp_path), None)
    train(values)

    folders = {"": tmp_path / "run"} | {stage.name: stage.folder for stage in plan(values)}
    before = load_file(tiny_bert / "model.safetensors")
    for stage, (settings, training, tasks) in read_runs(name).items():
        metrics = json.loads((folders[stage] / "metrics.json").read_text())
        assert metrics["global_step"] == 2
        after = load_file(folders[stage] / "model.safetensors")
        changed = {key for key in before if not torch.equal(before[key], after[f"bert.{key}"])}
        before = {key: after[f"bert.{key}"] for key in before}
        by_words = settings.objective == "mlm"
        trained = [task for task in tasks if task.name in training.get("train_tasks", [task.name for task in tasks])]
        poolings = {task.pooling for task in trained} if not by_words else set()
        idle = {key for key in before if "pooler" in key and "pooler" not in poolings}
        assert changed == (set() if training.get("freeze") == "encoder" else {*before} - idle)
        scored = training.get("eval_tasks", [task.name for task in tasks])
        scores = {f"eval_{task.name}_{task.metric}" for task in tasks if task.name in scored and not by_words}
        assert scores | ({"eval_perplexity"} if by_words else set()) <= set(metrics)
    model = MinBertForMultiTask.from_pretrained(tmp_path / "run")
    assert model.config.task_names == [task.name for task in tasks]
