"""Recipes in stages: what each leaves, where the next begins, and that a stopped run ends as if it had not been."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import DivergedError, MinBertError, MinBertModel, MultiTaskTrainer, Predictor
from hf_minbert.run import train as run
from hf_minbert.settings.recipe import read_recipe

RECIPE = """
model_name_or_path: {bert}
data_dir: {data}
output_dir: {root}
tasks: [sst, sts]
per_device_train_batch_size: 4
learning_rate: 1e-3
hidden_dropout_prob: 0.1
eval_strategy: "no"
save_steps: 2
logging_steps: 1
disable_tqdm: true
stages:
  - {{name: heads, freeze: encoder, max_steps: 3, weight_decay: 0.1}}
  - {{name: all, max_steps: 5, learning_rate: 5e-4, aggregator: pcgrad}}
  - {{max_steps: 2, train_tasks: [sts]}}
"""
FOLDERS = ["1-heads", "2-all", "3-3"]


@pytest.fixture
def recipe(tiny_bert, course_dir, tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(bert=tiny_bert, data=course_dir, root=tmp_path / "run"), encoding="utf-8")
    return path


@pytest.fixture
def train(recipe):
    return lambda *words: run.train(read_recipe(recipe, words))


@pytest.fixture(scope="module")
def whole(tiny_bert, course_dir, tmp_path_factory) -> Path:
    """A run that nothing stopped. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(bert=tiny_bert, data=course_dir, root=folder / "run"), encoding="utf-8")
    run.train(read_recipe(path))
    return folder / "run"


@pytest.fixture
def stop_at(monkeypatch):
    """`stop_at(n)`: the n-th training step from now on fails."""

    def arrange(number):
        left, step = iter(range(number)), MultiTaskTrainer.training_step

        def training_step(self, *args, **kwargs):
            if next(left, None) is None:
                raise RuntimeError("stopped")
            return step(self, *args, **kwargs)

        patch = pytest.MonkeyPatch()
        patch.setattr(MultiTaskTrainer, "training_step", training_step)
        return patch

    return arrange


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    return {name for name in after if not torch.equal(before[name], after[name])}


def assert_same_end(one, other):
    for folder in (*(f"stages/{name}" for name in FOLDERS), "."):
        assert changed(weights(one / folder), weights(other / folder)) == set(), folder
        ours, theirs = (json.loads((root / folder / "metrics.json").read_text()) for root in (one, other))
        assert ours["eval_overall"] == theirs["eval_overall"]


def test_each_stage_changes_what_it_should_and_hands_it_on(train, tiny_bert, tmp_path):
    metrics = train()
    root = tmp_path / "run"
    heads, everything, last = (weights(root / "stages" / name) for name in FOLDERS)
    start = {f"bert.{name}": value for name, value in load_file(tiny_bert / "model.safetensors").items()}
    assert not changed({**heads, **start}, heads)  # the encoder is the checkpoint's, to the last bit
    assert changed(heads, everything) == set(heads)
    idle = {name for name in last if name.startswith("heads.sst.")}
    assert changed(everything, last) == set(last) - idle
    assert changed(last, weights(root)) == set()
    assert list(metrics["stages"]) == ["heads", "all", "3"]
    assert metrics == json.loads((root / "metrics.json").read_text()) and metrics["global_step"] == 2
    for name, stage in zip(FOLDERS, metrics["stages"].values(), strict=True):
        assert stage == json.loads((root / "stages" / name / "metrics.json").read_text())
    assert Predictor.from_pretrained(root)("sts", ["a good film"], ["a bad film"])
    assert {path.name for path in root.iterdir()} >= {
        "stages",
        "predictions",
        "log.jsonl",
        "recipe.yaml",
        "tokenizer.json",
    }
    assert not list(root.glob("checkpoint-*"))


def test_a_stage_is_the_run_that_one_would_start_by_hand(train, recipe, tmp_path):
    train()
    alone = tmp_path / "alone.yaml"
    text = recipe.read_text().split("stages:")[0] + "max_steps: 5\naggregator: pcgrad\n"
    alone.write_text(text.replace("learning_rate: 1e-3", "learning_rate: 5e-4"))
    first, by_hand = tmp_path / "run" / "stages" / "1-heads", tmp_path / "alone"
    run.train(read_recipe(alone, [f"model_name_or_path={first}", f"output_dir={by_hand}"]))
    assert changed(weights(tmp_path / "run" / "stages" / "2-all"), weights(by_hand)) == set()


@pytest.mark.parametrize("step", [1, 3, 4, 6, 8, 9], ids=lambda step: f"in_step_{step + 1}_of_10")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(train, whole, stop_at, tmp_path, step):
    """In the first stage before its checkpoint, on the borders, after a checkpoint, in the last stage."""
    stopped = stop_at(step)
    with pytest.raises(RuntimeError, match="stopped"):
        train()
    stopped.undo()
    finished = sorted((tmp_path / "run").glob("stages/*/metrics.json"))
    before = {path: path.stat().st_mtime_ns for path in finished}
    assert len(finished) == (step >= 3) + (step >= 8)
    train("resume_from_checkpoint=true")
    assert_same_end(tmp_path / "run", whole)
    assert before == {path: path.stat().st_mtime_ns for path in finished}  # what had finished was not run again


def test_a_finished_run_that_is_resumed_trains_nothing_and_says_the_same(train, stop_at):
    metrics = train()
    stopped = stop_at(0)
    again = train("resume_from_checkpoint=true")
    stopped.undo()
    assert again == metrics


def test_the_last_stage_can_be_made_longer_as_a_plain_run_can(train, stop_at, tmp_path):
    train()
    stopped = stop_at(2)  # more steps than these would fail
    metrics = train("resume_from_checkpoint=true", "stages.3.max_steps=4")
    stopped.undo()
    assert metrics["global_step"] == metrics["stages"]["3"]["global_step"] == 4
    assert read_recipe(tmp_path / "run" / "recipe.yaml")["stages"].value[2]["max_steps"] == 4
    assert changed(weights(tmp_path / "run" / "stages" / "3-3"), weights(tmp_path / "run")) == set()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("packing=true", "'heads' has finished. The run .* with packing = False and .* give stages.<name>.<key>"),
        ("stages.heads.packing=true", "'heads' has finished. The run .* was started with packing = False"),
        ("stages.heads.max_steps=4", "'heads' has finished. The run .* was started with max_steps = 3"),
        ("stages.3.packing=true", "'3' has finished. The run .* has ended with step 2, so packing = True would have"),
        (
            "stages.3.max_steps=1",
            "'3' has finished. The run .* is at step 2 .*, which is after its end with max_steps = 1",
        ),
        ("model_name_or_path={other}", "'heads' has finished. .*num_hidden_layers = 1, and .* has 2"),
        ("stages.all.model_name_or_path={bert}", "'all' has finished. The run .* with model_name_or_path = "),
    ],
)
def test_what_has_finished_takes_no_other_values(train, whole, tiny_bert, tiny_config, tmp_path, word, said):
    MinBertModel(tiny_config(num_hidden_layers=1)).save_pretrained(tmp_path / "other")
    shutil.copytree(whole, tmp_path / "run")
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    with pytest.raises(MinBertError, match=said):
        train("resume_from_checkpoint=true", word.format(other=tmp_path / "other", bert=tiny_bert))
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before


def test_a_stage_in_its_middle_goes_on_with_its_model(train, stop_at, tiny_bert, tmp_path):
    stopped = stop_at(6)
    with pytest.raises(RuntimeError, match="stopped"):
        train()
    stopped.undo()
    with pytest.raises(
        MinBertError, match="was started with model_name_or_path = .*1-heads and cannot be resumed with"
    ):
        train("resume_from_checkpoint=true", f"stages.all.model_name_or_path={tiny_bert}")


def test_behind_a_stage_that_has_not_finished_none_has(train, whole, tmp_path):
    """A new run over an old one may be killed while it clears the folder."""
    train("seed=7")
    shutil.rmtree(tmp_path / "run" / "stages" / "1-heads")
    train("resume_from_checkpoint=true")
    assert_same_end(tmp_path / "run", whole)
    (tmp_path / "run" / "stages" / "1-heads" / "environment.json").unlink()
    with pytest.raises(MinBertError, match=r"Stage 'heads' has finished. .* lacks recipe.yaml or environment.json"):
        train("resume_from_checkpoint=true")


def test_words_after_the_recipe_hold_for_all_stages(train, tmp_path):
    metrics = train("max_steps=1")
    assert [stage["global_step"] for stage in metrics["stages"].values()] == [1, 1, 1]
    saved = read_recipe(tmp_path / "run" / "recipe.yaml")
    assert saved["max_steps"].value == 1
    assert saved["stages"].value[1] == {"name": "all", "learning_rate": 5e-4, "aggregator": "pcgrad"}


def test_a_word_for_one_stage_is_for_that_stage_by_its_name_or_number(train, tmp_path):
    metrics = train("stages.heads.max_steps=2", "max_steps=1", "stages.3.max_steps=3")
    assert [stage["global_step"] for stage in metrics["stages"].values()] == [2, 1, 3]
    assert read_recipe(tmp_path / "run" / "recipe.yaml")["stages"].value[0]["max_steps"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stages.head.max_steps=2"], "'stages.head.max_steps': Unknown stage 'head'. Did you mean 'heads'?"),
        (["stages.heads=2"], "'stages.heads' names no key of a stage. Write for example stages.heads.max_steps=2"),
        (["stages.heads.max_step=2"], "Stage 1 (heads): Unknown key 'max_step'. Did you mean 'max_steps'?"),
        (["stages.heads.max_steps=two"], "Stage 1 (heads): `max_steps` must be a whole number. Found two"),
        (["stages=null", "stages.heads.max_steps=2"], "'stages.heads.max_steps': the recipe has no list of `stages`"),
        (["stages.heads.output_dir=x"], "Stage 1 (heads): `output_dir` is for the whole recipe"),
    ],
)
def test_a_wrong_word_for_one_stage_is_answered(train, words, said):
    with pytest.raises(MinBertError, match=re.escape(said)):
        train(*words)


def test_a_stage_without_dropout_hands_none_on(train, tiny_bert, tmp_path):
    """What a saved model's config says is what the next one would begin with."""
    words = "stages=[{name: a, attention_probs_dropout_prob: 0.3, max_steps: 1}, {name: b, max_steps: 1}]"
    train(words, "hidden_dropout_prob=0.2")
    saved = [json.loads((tmp_path / f"run/stages/{name}/config.json").read_text()) for name in ("1-a", "2-b")]
    own = json.loads((tiny_bert / "config.json").read_text())["attention_probs_dropout_prob"]
    assert own != 0.3
    assert [config["attention_probs_dropout_prob"] for config in saved] == [0.3, own]
    assert [config["hidden_dropout_prob"] for config in saved] == [0.2, 0.2]


def test_dev_rows_of_a_later_stages_own_task_are_not_pretrained_on(train, tmp_path):
    rows = {"train": ["xylo one,a", "xylo two,b"], "dev": ["Pi in the sky,a", "quite another,b"]}
    folder = tmp_path / "with space"
    folder.mkdir()
    for split, lines in rows.items():
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    (folder / "words.txt").write_text("pi in the SKY.\na dog plays\n", encoding="utf-8")
    files = f"{{train: {folder}/train.csv, dev: {folder}/dev.csv}}"
    own = f"{{kind: binary, text_columns: text, labels: [a, b], files: {files}}}"
    words = f"{{name: words, objective: mlm, mlm_texts: ['{folder}/words.txt'], max_steps: 1}}"
    for other in ("", f"data_dir: {folder}, "):
        tasks = own.replace(f"{folder}/", "") if other else own
        stages = f"stages=[{words}, {{name: own, {other}tasks: {{own: {tasks}}}, max_steps: 1}}]"
        leaks = train(stages, "overwrite=true")["stages"]["words"]["leaks"]
        counts = leaks[f"{folder}/words.txt"]
        assert (counts["rows"], counts["dropped"]) == (2, 1)
        assert counts["matches"] == {"own dev": {"rows": 1, "sentences": 1}}
    saved = read_recipe(tmp_path / "run" / "stages" / "1-words" / "recipe.yaml")["held_out"].value
    assert list(saved) == ["sst", "para", "sts", "own"]  # beside those that are held out anyway


def test_an_older_run_is_kept_or_replaced_whole(train, tmp_path):
    root = tmp_path / "run"
    train()
    with pytest.raises(MinBertError, match="holds a run already.*resume_from_checkpoint=true.*overwrite=true"):
        train()
    old = (root / "stages" / "3-3" / "metrics.json").stat().st_mtime_ns
    with pytest.raises(MinBertError, match="no_such_data"):
        train("overwrite=true", "data_dir=no_such_data")  # before the first step: nothing is deleted
    assert (root / "metrics.json").is_file() and (root / "stages" / "3-3" / "metrics.json").stat().st_mtime_ns == old
    train("overwrite=true", "stages=[{name: only, max_steps: 1}]")
    assert [path.name for path in (root / "stages").iterdir()] == ["1-only"]


def test_what_an_older_run_left_is_not_taken_for_finished(train, whole, stop_at, tmp_path):
    train("seed=7")
    stopped = stop_at(1)
    with pytest.raises(RuntimeError, match="stopped"):
        train("overwrite=true")
    stopped.undo()
    assert not list((tmp_path / "run").rglob("metrics.json"))
    train("resume_from_checkpoint=true")
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "weight_decay: 0.1",
            "weight_decay: 0.2",
            "Stage 'heads' has finished. The run .* with weight_decay = 0.1 and cannot be resumed with 0.2",
        ),
        ("freeze: encoder, ", "", "was started with freeze = encoder and cannot be resumed with none"),
        ("name: heads", "name: warm", "has a stage 1-heads, and the recipe has none of that number and name"),
    ],
)
def test_another_recipe_does_not_go_on_with_it(train, stop_at, recipe, old, new, said):
    stopped = stop_at(4)
    with pytest.raises(RuntimeError, match="stopped"):
        train()
    stopped.undo()
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(MinBertError, match=said):
        train("resume_from_checkpoint=true")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[]", "`stages` must be a list of mappings"),
        ("{a: {max_steps: 1}}", "`stages` must be a list of mappings"),
        ("[heads]", "`stages` must be a list of mappings"),
        ("[{max_step: 1}]", "Stage 1 (1): Unknown key 'max_step'. Did you mean 'max_steps'?"),
        (
            "[{max_steps: 1}, {name: b, max_steps: many}]",
            "Stage 2 (b): `max_steps` must be a whole number. Found many",
        ),
        ("[{output_dir: here}]", "Stage 1 (1): `output_dir` is for the whole recipe. Write it outside `stages`"),
        ("[{name: a/b, max_steps: 1}]", "Stage 1 (a/b): `name` is also the name of a folder"),
        ("[{name: a, max_steps: 1}, {name: a}]", "Stage 2 (a): another stage has that name already"),
        ("[{name: a}, {name: b, train_tasks: [nli]}]", "Stage 2 (b): `train_tasks`"),
        ("[{name: a}, {name: b, tasks: {sts: {head: cosine}}}]", "Stage 2 (b): Building the tasks' layers and heads"),
        ("[{name: a}, {name: b, learning_rate: -1}]", "Stage 2 (b)"),
        ("[{name: a}, {name: b, max_steps: 0}]", "Stage 2 (b): `max_steps` must be at least 1. Found 0"),
        ("[{name: a}, {name: b, freeze: 3}]", "Stage 2 (b): `freeze` is 3 layers, and the model has 2"),
        (
            "[{name: a}, {name: b, freeze: encoder, unfreeze: {5: 9}}]",
            "Stage 2 (b): `unfreeze.5` is 9 layers, and the model has 2",
        ),
        (
            "[{name: a, private_layers: 1}, {name: b, objective: mlm}]",
            "Stage 2 (b): `objective: mlm` trains one encoder",
        ),
        (
            "[{name: a, private_layers: 1}, {name: b, tasks: [para]}]",
            "Stage 2 (b): Building the tasks' layers and heads failed",
        ),
        ("[{name: a}, {name: b, data_dir: no_such}]", "Stage 2 (b): `data_dir` does not exist: no_such"),
        ("[{name: a}, {name: b, tasks: {sst: {files: {train: no.csv, dev: no.csv}}}}]", "no.csv"),
        ("[{name: a}, {name: b, objective: mlm, mlm_texts: [no.txt]}]", "Stage 2 (b): "),
        ("[{name: a b, max_steps: 1}]", "Stage 1 (a b): `name` is also the name of a folder"),
        ("[{name: a.b, max_steps: 1}]", "Stage 1 (a.b): `name` is also the name of a folder"),
    ],
)
def test_a_wrong_stage_is_refused_before_the_first_one_begins(train, tmp_path, stages, said):
    with pytest.raises(MinBertError, match=re.escape(said)):
        train(f"stages={stages}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [("resume_from_checkpoint=true",), ("resume_from_checkpoint=checkpoint-2",)])
def test_there_must_be_something_to_resume(train, words):
    with pytest.raises(MinBertError, match="no stage in .* to resume|`resume_from_checkpoint` must be true"):
        train(*words)


def test_each_stage_has_its_own_precision(train, tmp_path):
    train("use_cpu=true", "stages=[{name: half, bf16: true, max_steps: 1}, {name: whole, max_steps: 1}]")
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_nothing_goes_on_from_a_stage_that_diverged(train, tmp_path):
    wrong = "stages=[{name: first, learning_rate: 1e30, optim: sgd, max_grad_norm: 0}, {name: second}]"
    with pytest.raises(DivergedError, match="Training diverged.*1-first"):
        train(wrong)
    assert not (tmp_path / "run" / "stages" / "2-second").exists()
    with pytest.raises(DivergedError, match="Stage 'first' has ended, and its model in .* has diverged"):
        train(wrong, "resume_from_checkpoint=true")
    assert not (tmp_path / "run" / "stages" / "2-second").exists()
