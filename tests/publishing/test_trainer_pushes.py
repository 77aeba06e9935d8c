"""`push_to_hub` of the trainers and of a recipe: files and card are those of `minbert publish`; no token goes up."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hub_server import TOKEN
from huggingface_hub import ModelCard

#: Trains by a recipe with words after it; `result` is what `metrics.json` holds.
TRAIN = """
import os
os.environ["HF_TOKEN"] = ""  # the recipe's is used
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.run.train import train
result = train(read_recipe({recipe!r}, {words!r}))
"""
#: A trainer without a recipe.
TRAINER = """
import os
os.environ["HF_TOKEN"] = {token!r}
from datasets import Dataset
from transformers import AutoTokenizer
from hf_minbert import MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
model = MinBertForMultiTask.from_pretrained({name!r}, tasks=get_tasks(["sst"]))
rows = {{"sst": Dataset.from_dict({{"sentence": ["a good film", "a bad film"] * 4, "label": [4, 0] * 4}})}}
args = MultiTaskTrainingArguments({folder!r}, hub_model_id={repo!r}, use_cpu=True, report_to=[], disable_tqdm=True,
                                  max_steps=2, per_device_train_batch_size=4, save_strategy="no")
trainer = MultiTaskTrainer(model, args, train_dataset=rows, eval_dataset=rows,
                           processing_class=AutoTokenizer.from_pretrained({name!r}))
trainer.train()
result = trainer.evaluate()
trainer.push_to_hub(license="apache-2.0")
"""


@pytest.fixture(scope="module")
def recipe(tiny_bert, course_dir, tmp_path_factory):
    """A recipe that pushes at each checkpoint and at the end, with the token in it."""
    folder = tmp_path_factory.mktemp("pushed")
    lines = {
        "model_name_or_path": str(tiny_bert), "data_dir": str(course_dir), "output_dir": str(folder / "run"),
        "push_to_hub": True, "hub_model_id": "me/recipe", "hub_token": TOKEN, "max_steps": 2, "use_cpu": True,
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1,
        "hub_always_push": True, "disable_tqdm": True,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(lines))
    return path


def test_a_recipe_pushes_at_its_end_and_keeps_its_token(hub, publisher, recipe):
    hub.requests.clear()
    metrics = publisher.run(TRAIN.format(recipe=str(recipe), words=[]))
    files, run = hub.repos["models"]["me/recipe"], recipe.parent / "run"
    assert sum("/commit/main" in line for line in hub.requests) == 3  # two checkpoints and the whole
    for path, content in files.items():
        assert TOKEN.encode() not in content and str(recipe.parent).encode() not in content, path
    for path in run.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert not [path for path in files if re.search(r"\.(bin|pt|pth)$|checkpoint|predictions|trainer_state", path)]
    assert files["model.safetensors"] == (run / "model.safetensors").read_bytes()
    assert json.loads(files["metrics.json"])["global_step"] == 2
    found = {r.task_name: r.metric_value for r in ModelCard(files["README.md"].decode()).data.eval_results}
    assert found["sts"] == pytest.approx(metrics["eval_sts_spearman"])
    status, out, err = publisher.minbert("publish", run, "me/recipe", "--dry-run")
    assert status == 0 and files["README.md"].decode() in out, err


def test_a_trainer_without_a_recipe_pushes_the_same_card(hub, publisher, stranger, tiny_bert, tmp_path):
    given = {"name": str(tiny_bert), "folder": str(tmp_path / "run"), "repo": "me/trainer"}
    scores = publisher.run(TRAINER.format(token=TOKEN, **given))
    files = hub.repos["models"]["me/trainer"]
    card = ModelCard(files["README.md"].decode())
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["accuracy"] == scores["eval_sst_accuracy"]
    assert card.data.license == "apache-2.0" and "is not recorded" in card.text and "| hardware |" in card.text
    load = "from transformers import AutoModelForSequenceClassification as A\n"
    stranger.run(f'{load}result = A.from_pretrained("me/trainer", trust_remote_code=True).config.task_names')
    _, error = publisher.attempt(TRAINER.format(token="", **given))
    assert error.startswith("MinBertError: There is no token")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hub_token=hf_refused"], "refuses the token"),
        (["hub_model_id=you/x"], "may not write to you/x"),
        (["hub_strategy=all_checkpoints"], "optimizer's state"),
        (["stages=[{name: a}, {name: b}]"], "`push_to_hub` would upload each stage by itself"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_training(publisher, recipe, tmp_path, words, said):
    words = [f"output_dir={tmp_path / 'run'}", *words]
    _, error = publisher.attempt(TRAIN.format(recipe=str(recipe), words=words))
    assert error.startswith("MinBertError") and re.search(said, error), error
    assert not list(tmp_path.rglob("model.safetensors"))


def test_a_push_that_fails_at_the_end_leaves_a_whole_run(hub, publisher, recipe, tmp_path):
    publisher.run("import time; time.sleep = lambda seconds: None")
    hub.blobs.clear()
    hub.cut, run = 1000, tmp_path / "run"
    words = [f"output_dir={run}", "hub_model_id=me/late", "hub_strategy=end", "save_strategy=no"]
    _, error = publisher.attempt(TRAIN.format(recipe=str(recipe), words=words))
    hub.cut = 0
    assert f"Send it by: minbert publish {run} me/late" in error
    assert json.loads((run / "metrics.json").read_text())["global_step"] == 2
    assert hub.repos["models"]["me/late"] == {}
