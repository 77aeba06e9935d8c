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
from hf_minbert.run import pretraining
from hf_minbert.run.stages import plan
from hf_minbert.run.train import train
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.recipe import packaged_recipes, read_recipe, split_recipe
from hf_minbert.settings.run import RunSettings

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


def read(values: dict[str, Value]) -> Read:
    settings, training = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    return settings, training, get_tasks(settings.tasks)


def runs_of(values: dict[str, Value]) -> dict[str, Read]:
    """The runs that a recipe is made of, by name: its stages or, under no name, itself."""
    runs = {stage.name: (stage.settings, stage.given, get_tasks(stage.settings.tasks)) for stage in plan(values)}
    return runs or {"": read(values)}


STAGED = {name: runs for name in REPORTS if "" not in (runs := runs_of(read_recipe(name)))}


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
        assert f"study reports/{number}/table" in " ".join(said.split("\n# "))  # which has what is published


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete_and_has_a_folder_of_its_own(name):
    folder = "runs/" + "-".join(Path(name).parts).replace("reports-", "reports/")
    values = read_recipe(name)
    assert read(values)[0].output_dir == folder
    for settings, training, tasks in runs_of(values).values():
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


@pytest.mark.parametrize("name", STAGED)
def test_the_dropout_of_bert_is_off_only_where_it_is_frozen(name):
    """A stage takes over the config of the one before, so it has to say that the dropout is on again."""
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # those of the checkpoint
    for settings, training, _ in STAGED[name].values():
        rates |= {key: getattr(settings, key) for key in rates if getattr(settings, key) is not None}
        assert {*rates.values()} == {0.0 if training.get("freeze") == "encoder" else 0.1}


# ---- That it runs


@pytest.fixture(scope="module")
def tiny_data(write_course_files, tmp_path_factory) -> Path:
    """The small files in the course's format, with such of cfimdb."""
    folder = write_course_files(tmp_path_factory.mktemp("course"))
    for split in ("train", "dev"):
        rows = [f"{row}\tcfimdb-{split}-{row}\t{('good', 'bad')[row % 2]} film {row}\t{row % 2}" for row in range(6)]
        (folder / f"ids-cfimdb-{split}.csv").write_text("\n".join(["\tid\tsentence\tsentiment", *rows]) + "\n")
    return folder


def frozen(freeze: str | int, key: str) -> bool:
    """Whether a weight of the encoder is: `freeze` is `none`, `encoder`, or how many layers."""
    if not isinstance(freeze, int):
        return freeze == "encoder"
    return key.startswith(("embeddings.", *(f"encoder.layer.{layer}." for layer in range(freeze))))


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_train_what_is_not_frozen(name, tiny_bert, tiny_data, tmp_path):
    words = {
        "model_name_or_path": tiny_bert, "data_dir": tiny_data, "output_dir": tmp_path / "run", "max_length": 64,
        "max_steps": 2, "per_device_train_batch_size": 4, "disable_tqdm": "true", "use_cpu": "true",
    }  # fmt: skip
    training = read(read_recipe(name))[1]
    if "rows_per_epoch" in training:
        words["rows_per_epoch"] = "{para: 0.5}"
    if name == "reports/000/growing_freeze":  # for two layers
        words |= {"stages.third.freeze": 1, "stages.two_thirds.freeze": 2}
    values = read_recipe(name, [f"{key}={value}" for key, value in words.items()])
    train(values)

    folders = {"": tmp_path / "run"} | {stage.name: stage.folder for stage in plan(values)}
    before = load_file(tiny_bert / "model.safetensors")
    for stage, (settings, training, tasks) in runs_of(values).items():
        metrics = json.loads((folders[stage] / "metrics.json").read_text())
        assert metrics["global_step"] == 2
        after = load_file(folders[stage] / "model.safetensors")
        changed = {key for key in before if not torch.equal(before[key], after[f"bert.{key}"])}
        before = {key: after[f"bert.{key}"] for key in before}
        by_words = settings.objective == "mlm"
        trained = [task for task in tasks if task.name in training.get("train_tasks", [task.name for task in tasks])]
        poolings = {task.pooling for task in trained} if not by_words else set()
        idle = {key for key in before if "pooler" in key and "pooler" not in poolings}
        assert changed == {key for key in before if not frozen(training.get("freeze", "none"), key)} - idle
        scored = training.get("eval_tasks", [task.name for task in tasks])
        scores = {f"eval_{task.name}_{task.metric}" for task in tasks if task.name in scored and not by_words}
        assert scores | ({"eval_perplexity"} if by_words else set()) <= set(metrics)
    model = MinBertForMultiTask.from_pretrained(tmp_path / "run")
    assert model.config.task_names == [task.name for task in tasks]
