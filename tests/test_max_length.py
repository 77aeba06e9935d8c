"""The length that a model was trained for: it is saved with the model, and all that reads text cuts there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_minbert import (
    MinBertConfig,
    MinBertError,
    MinBertModel,
    MultiTaskTrainer,
    MultiTaskTrainingArguments,
    Predictor,
    get_tasks,
)
from hf_minbert.evaluation.decoding import decode
from hf_minbert.model.inference import length_of
from hf_minbert.pretrained.adapters import load_adapters
from hf_minbert.pretrained.loading import load_config
from hf_minbert.pretrained.merging import average, ensemble
from hf_minbert.pretrained.teachers import teacher_logits
from hf_minbert.publishing.demo import answer
from hf_minbert.publishing.export import export
from hf_minbert.publishing.files import collect
from hf_minbert.publishing.space import export_space
from hf_minbert.run import train as run
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.settings.tasks import Task

LENGTH, POSITIONS = 16, 64
TASKS = {"sst": None, "para": None, "sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}}
FIRST = ["good film " * 30, "the man is not very good " * 10, "bad", "why is it " + "bad " * 50]
SECOND = ["bad film " * 30, "dog", "a man plays " * 20, "good " * 40]
COLUMNS = {"sst": [FIRST], "para": [FIRST, SECOND], "sts": [FIRST, SECOND]}
LABELS = {"sst": [0, 4, 2, 3], "para": [0, 1, 1, 0], "sts": [0.0, 5.0, 2.5, 1.0]}


def rows_of(task: str) -> list[dict]:
    names = get_tasks([task])[0].text_columns
    cells = zip(*COLUMNS[task], LABELS[task], strict=True)
    return [dict(zip((*names, "label"), row, strict=True)) for row in cells]


def trainer_of(folder, model, tokenizer, **given) -> MultiTaskTrainer:
    args = MultiTaskTrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, max_steps=1, save_strategy="no", per_device_train_batch_size=4
    )
    rows = {task: rows_of(task) for task in model.config.task_names}
    return MultiTaskTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, **given)


@pytest.fixture(scope="module")
def trained(tiny_model, tiny_tokenizer, tmp_path_factory):
    """The folder of a model that was trained at 16 of its 64 positions, and its trainer's answers [rows, ...] by task.

    Not to be changed.
    """
    folder = tmp_path_factory.mktemp("trained")
    trainer = trainer_of(folder / "run", tiny_model(get_tasks(TASKS)), tiny_tokenizer, max_length=LENGTH)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    logits = {task: trainer.predict(rows_of(task), task=task).predictions for task in TASKS}
    return folder / "model", logits


def said(task: Task, logits: np.ndarray) -> np.ndarray:
    """Probabilities [rows, labels], or scores [rows, 1]."""
    decoded = decode(task, logits)
    return decoded.values[:, None] if decoded.probabilities is None else decoded.probabilities


# ---- All that reads text: from a folder to what `said` gives, by task; without the tasks that it cannot answer


def by_predictor(folder, tmp_path):
    predictor = Predictor.from_pretrained(folder)
    return {task: said(predictor.tasks[task], predictor.logits(task, rows_of(task))) for task in predictor.tasks}


def by_own_pipeline(folder, tmp_path):
    ask = pipeline("minbert-multitask", model=str(folder), device="cpu")
    found = {}
    for task, columns in COLUMNS.items():
        answers = [one[task] for one in ask([*zip(*columns, strict=True)], tasks=task)]
        found[task] = np.array([[*one["scores"].values()] if "scores" in one else [one["score"]] for one in answers])
    return found


def by_stock_pipeline(folder, tmp_path):
    ask = pipeline("text-classification", model=str(folder), device="cpu", model_kwargs={"active_task": "sst"})
    labels = get_tasks(["sst"])[0].labels
    answers = [{one["label"]: one["score"] for one in ask(text, truncation=True, top_k=None)} for text in FIRST]
    return {"sst": np.array([[given[label] for label in labels] for given in answers])}


def by_demo(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = {}
    for task, columns in COLUMNS.items():
        answers = [answer(model, tokenizer, task, texts) for texts in zip(*columns, strict=True)]
        found[task] = np.array([one.probabilities or [one.score] for one in answers])
    return found


def by_space(folder, tmp_path):
    pytest.importorskip("gradio")
    export_space(str(folder), tmp_path / "space")
    return by_demo(tmp_path / "space" / "model", tmp_path)


def by_teacher(folder, tmp_path):
    tasks = get_tasks(TASKS)
    logits = teacher_logits([str(folder)], tasks, {task.name: rows_of(task.name) for task in tasks})
    return {task.name: said(task, logits[task.name]) for task in tasks}


def by_average(folder, tmp_path):
    models = [Predictor.from_pretrained(folder, device="cpu").model for _ in range(2)]
    return by_merged(average(models), folder, tmp_path)


def by_ensemble(folder, tmp_path):
    model = Predictor.from_pretrained(folder, device="cpu").model
    return by_merged(ensemble([model]), folder, tmp_path)


def by_merged(merged, folder, tmp_path):
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "merged")
    return by_predictor(tmp_path / "merged", tmp_path)


def by_onnx(folder, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    export(str(folder), "onnx", tmp_path / "onnx")
    described = json.loads((tmp_path / "onnx" / "tasks.json").read_text())["tasks"]
    tokenizer, found = AutoTokenizer.from_pretrained(tmp_path / "onnx"), {}
    for task in ("sst", "para"):
        graph = runtime.InferenceSession(tmp_path / "onnx" / described[task]["file"])
        inputs = tokenizer(*COLUMNS[task], padding=True, truncation=True, return_tensors="np")
        found[task] = said(get_tasks([task])[0], graph.run([task], dict(inputs))[0].astype(np.float64))
        assert inputs["input_ids"].shape[1] == described[task]["max_length"] == LENGTH
    return found


@pytest.mark.parametrize(
    "read",
    [
        by_predictor, by_own_pipeline, by_stock_pipeline, by_demo, by_space, by_teacher, by_average, by_ensemble,
        pytest.param(by_onnx, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_whatever_reads_text_reads_what_training_read(trained, tmp_path, read):
    folder, logits = trained
    found = read(folder, tmp_path)
    assert found
    for task, answers in found.items():
        expected = said(get_tasks({task: TASKS[task]})[0], logits[task])
        np.testing.assert_allclose(answers, expected, atol=1e-4)


def test_at_another_length_the_answers_are_others(trained):
    """Or the test above could not fail."""
    folder, logits = trained
    whole = Predictor.from_pretrained(folder, max_length=POSITIONS)
    for task in TASKS:
        assert np.abs(whole.logits(task, rows_of(task)) - logits[task]).max() > 1e-2
        again = Predictor(whole.model, whole.tokenizer, max_length=LENGTH).logits(task, rows_of(task))
        np.testing.assert_allclose(again, logits[task], atol=1e-5)
    for length in (POSITIONS + 1, 7):
        with pytest.raises(MinBertError, match=f"`max_length` must be from 8 to 64.*Found {length}"):
            Predictor.from_pretrained(folder, max_length=length)


@pytest.mark.parametrize("form", ["run", "bert", "sentence-transformers"])
def test_a_folders_tokenizer_cuts_there(trained, tmp_path, form):
    folder = trained[0]
    if form != "run":
        export(str(folder), form, tmp_path / form, task="sts")
        folder = tmp_path / form
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == len(tokenizer(FIRST[0], truncation=True)["input_ids"]) == LENGTH


def test_the_tokenizer_that_was_given_keeps_its_own(trained, tiny_tokenizer):
    assert tiny_tokenizer.model_max_length == POSITIONS


# ---- A run


@pytest.fixture
def recipe(tiny_bert, write_course_files, tmp_path):
    """A recipe on rows longer than 64 tokens; the tokenizer of its checkpoint says no length."""
    data = write_course_files(tmp_path / "data")
    for file in data.glob("*.csv"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(" .", " is not a very bad film" * 8 + " ."), encoding="utf-8")
    lines = {
        "model_name_or_path": tiny_bert, "data_dir": data, "output_dir": tmp_path / "run", "max_steps": 4,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "eval_steps": 1, "eval_strategy": "steps",
        "save_steps": 1, "save_strategy": "steps", "disable_tqdm": "true", "use_cpu": "true",
        "metric_for_best_model": "eval_sts_pearson", "load_best_model_at_end": "true",
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return path


def train(recipe, *words):
    return run.train(read_recipe(recipe, words))


@pytest.mark.parametrize("peft", [None, "{r: 2}"])
def test_every_score_of_a_run_is_that_of_its_best_checkpoint(recipe, tmp_path, minbert, peft):
    metrics = train(recipe, f"max_length={LENGTH}", *([f"peft={peft}"] if peft else []))
    folder, best = tmp_path / "run", metrics["best_metric"]
    evaluate = ("evaluate", folder, "--data-dir", tmp_path / "data", "--output", tmp_path / "scores.json")
    assert minbert(*evaluate).status == 0
    found = json.loads((tmp_path / "scores.json").read_text())["eval_sts_pearson"]
    assert metrics["eval_sts_pearson"] == pytest.approx(best, abs=1e-5)
    assert found == pytest.approx(best, abs=1e-5)
    assert MinBertConfig.from_pretrained(folder).max_input_length == LENGTH
    if peft:
        assert minbert("merge", folder, "--output-dir", tmp_path / "merged").status == 0
        assert Predictor.from_pretrained(tmp_path / "merged").lengths == {"sst": 16, "para": 16, "sts": 16}
        assert AutoTokenizer.from_pretrained(tmp_path / "merged").model_max_length == LENGTH
        adapted = Predictor(load_adapters({"one": folder}), AutoTokenizer.from_pretrained(folder))
        assert adapted.lengths == {"sst": 16, "para": 16, "sts": 16}
        return
    assert minbert(*evaluate, "--max-length", POSITIONS).status == 0
    assert json.loads((tmp_path / "scores.json").read_text())["eval_sts_pearson"] != pytest.approx(best, abs=1e-5)
    for command in (evaluate, ("predict", folder, "--task", "sst", "--text", "good")):
        refused = minbert(*command, "--max-length", POSITIONS + 1)
        assert refused.status == 2 and "`max_length` must be from 8 to 64" in refused.err
        assert refused.err.count("\n") == 1


def test_a_model_is_trained_further_at_its_own_length(recipe, tmp_path, caplog):
    train(recipe, f"max_length={LENGTH}", "max_steps=1")
    further = (f"model_name_or_path={tmp_path / 'run'}", "max_steps=1", "overwrite=true")
    caplog.set_level("INFO", "hf_minbert")
    for words, length in (((), LENGTH), (("max_length=32",), 32)):
        caplog.clear()
        train(recipe, *further, *words, f"output_dir={tmp_path / 'further'}")
        assert ("Inputs are cut to 16 tokens, as in the training of" in caplog.text) == (length == LENGTH)
        assert MinBertConfig.from_pretrained(tmp_path / "further").max_input_length == length
        assert AutoTokenizer.from_pretrained(tmp_path / "further").model_max_length == length


def test_its_own_length_may_be_written_out_on_resume(recipe, tmp_path):
    train(recipe, "max_steps=1")
    train(recipe, "max_steps=2", "resume_from_checkpoint=true", f"max_length={POSITIONS}")
    with pytest.raises(MinBertError, match="started with max_length = 64 and cannot be resumed with 16"):
        train(recipe, "max_steps=2", "resume_from_checkpoint=true", "max_length=16")


@pytest.mark.parametrize("last", [None, 32])
def test_the_last_stages_length_counts_and_none_is_handed_on(recipe, tmp_path, last):
    further = "" if last is None else f", max_length: {last}"
    train(recipe, f"stages=[{{name: a, max_steps: 1, max_length: {LENGTH}}}, {{name: b, max_steps: 1{further}}}]")
    assert MinBertConfig.from_pretrained(tmp_path / "run" / "stages" / "1-a").max_input_length == LENGTH
    for folder in (tmp_path / "run", tmp_path / "run" / "stages" / "2-b"):
        assert MinBertConfig.from_pretrained(folder).max_input_length == (last or POSITIONS)
        assert AutoTokenizer.from_pretrained(folder).model_max_length == (last or POSITIONS)


def test_an_encoder_that_predicts_words_has_no_length(recipe, tiny_bert, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    MinBertModel.from_pretrained(tiny_bert).save_pretrained(tmp_path / "start")
    tokenizer.model_max_length = 10**30
    tokenizer.save_pretrained(tmp_path / "start")
    words = ("objective=mlm", f"max_length={LENGTH}", "max_steps=1", "metric_for_best_model=loss")
    train(recipe, f"model_name_or_path={tmp_path / 'start'}", *words)
    assert MinBertConfig.from_pretrained(tmp_path / "run").max_input_length is None
    assert AutoTokenizer.from_pretrained(tmp_path / "run").model_max_length == POSITIONS


# ---- Folders of before, and lengths that differ


@pytest.fixture
def save(tiny_model, tiny_tokenizer, tmp_path):
    def save(name, tasks, **changes):
        model = tiny_model(tasks, **changes)
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def aged(folder):
    """The folder, as it was saved before a model carried its length."""
    for file in [*folder.rglob("config.json"), *folder.rglob("tokenizer_config.json")]:
        lines = json.loads(file.read_text())
        lines.pop("max_input_length", None)
        lines |= {"model_max_length": 512} if "model_max_length" in lines else {}
        file.write_text(json.dumps(lines))
    return folder


def lengths_in(folder) -> tuple:
    return MinBertConfig.from_pretrained(folder).max_input_length, AutoTokenizer.from_pretrained(
        folder
    ).model_max_length


@pytest.fixture
def old(recipe, tmp_path):
    """The folder of a run of before, with a checkpoint, that was trained at 16; and its pipeline's answers."""
    train(recipe, f"max_length={LENGTH}", "max_steps=1", f"output_dir={tmp_path / 'old'}")
    answers = by_own_pipeline(tmp_path / "old", tmp_path)
    return aged(tmp_path / "old"), answers


def test_a_folder_of_before_answers_at_its_length(old, tmp_path, monkeypatch):
    folder, answers = old
    for place in (folder, folder / "checkpoint-1"):
        assert set(Predictor.from_pretrained(place).lengths.values()) == {LENGTH}
        for task, found in by_own_pipeline(place, tmp_path).items():
            np.testing.assert_allclose(found, answers[task], atol=1e-6)
    monkeypatch.chdir(folder / "checkpoint-1")
    assert set(Predictor.from_pretrained(".").lengths.values()) == {LENGTH}


def test_a_folder_of_before_is_trained_further_at_its_length(old, recipe, tmp_path):
    words = (f"model_name_or_path={old[0]}",)
    train(recipe, *words, "max_steps=1")
    assert lengths_in(tmp_path / "run") == lengths_in(tmp_path / "run" / "checkpoint-1") == (LENGTH, LENGTH)
    train(recipe, *words, "max_steps=2", "resume_from_checkpoint=true", f"max_length={LENGTH}")
    with pytest.raises(MinBertError, match="started with max_length = 16 and cannot be resumed with 64"):
        train(recipe, *words, "max_steps=3", "resume_from_checkpoint=true", f"max_length={POSITIONS}")
    stages = "stages=[{name: a, max_steps: 1, max_length: 32}, {name: b, max_steps: 1}]"
    train(recipe, *words, stages, f"output_dir={tmp_path / 'stages'}")
    assert lengths_in(tmp_path / "stages" / "stages" / "1-a") == (32, 32)
    assert lengths_in(tmp_path / "stages") == (LENGTH, LENGTH)


def test_a_run_goes_on_at_the_length_that_it_began_with(old, recipe, tmp_path):
    """Of a model whose length was not known then."""
    lines = (old[0] / "recipe.yaml").read_text()
    (old[0] / "recipe.yaml").unlink()
    words = (f"model_name_or_path={old[0]}",)
    train(recipe, *words, "max_steps=1")
    (old[0] / "recipe.yaml").write_text(lines)
    for again in (lambda: None, lambda: aged(tmp_path / "run")):
        again()
        with pytest.raises(MinBertError, match="started with max_length = 64 and cannot be resumed with 16"):
            train(recipe, *words, "max_steps=2", "resume_from_checkpoint=true")
    train(recipe, *words, "max_steps=2", "resume_from_checkpoint=true", f"max_length={POSITIONS}")
    assert lengths_in(tmp_path / "run") == (POSITIONS, POSITIONS)


@pytest.mark.parametrize("with_recipe", [True, False])
def test_what_is_published_of_a_folder_of_before_states_its_length(old, tmp_path, with_recipe, minbert):
    folder = old[0]
    if not with_recipe:
        (folder / "recipe.yaml").unlink()
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for upload in collect(folder):
        (pushed / upload.path).write_bytes(upload.read())
    (pushed / "recipe.yaml").unlink(missing_ok=True)
    assert lengths_in(pushed) == ((LENGTH, LENGTH) if with_recipe else (None, POSITIONS))
    before = {file: file.read_bytes() for file in folder.glob("*.json")}
    assert minbert("publish", folder, "me/x", "--dry-run").status == 0
    assert before == {file: file.read_bytes() for file in folder.glob("*.json")}


def test_what_states_its_length_is_published_as_it_is(trained):
    sent = {upload.path: upload.content for upload in collect(trained[0])}
    for name in ("config.json", "tokenizer_config.json"):
        assert sent[name] == trained[0] / name


@pytest.mark.parametrize(
    ("recipe", "length"),
    [
        (None, POSITIONS), ("max_length: null", POSITIONS), ("max_length: 12", 12),
        ("max_length: 12\nstages: [{name: a, max_length: 20}, {name: b}]", 12),
        ("max_length: 12\nstages: [{name: a}, {name: b, max_length: 20}]", 20),
    ],
)  # fmt: skip
def test_a_folder_of_before_has_the_length_of_its_recipe(save, tmp_path, recipe, length):
    folder = save("old", ["sst"])
    config = json.loads((folder / "config.json").read_text())
    del config["max_input_length"]
    (folder / "config.json").write_text(json.dumps(config))
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe + "\n")
    predictor = Predictor.from_pretrained(folder)
    assert predictor.lengths == {"sst": length}
    assert predictor.tokenizer.model_max_length == length
    for wrong, says in (
        ("max_length: 65", "`max_length` of `.*recipe.yaml` must be a whole number of tokens from 1 to 64.*Found 65"),
        ("max_length: '16'", "Found '16'"), ("- 1", "expected lines of"), ("a: [", "not readable"),
        ("stages: 3", "no recipe"),
    ):  # fmt: skip
        (folder / "recipe.yaml").write_text(f"{wrong}\n")
        with pytest.raises(MinBertError, match=says):
            load_config(str(folder))


def test_an_ensemble_keeps_each_models_length_and_an_average_the_longest(save, minbert, tmp_path):
    a, b = save("a", ["sst"], max_input_length=16), save("b", ["sts", "para"], max_input_length=32)
    ended = minbert("ensemble", a, b, "--output-dir", tmp_path / "both")
    assert (
        "different lengths. The result cuts inputs to these numbers of tokens: sst 16, sts 32, para 32." in ended.out
    )
    both = Predictor.from_pretrained(tmp_path / "both")
    assert both.lengths == {"sst": 16, "sts": 32, "para": 32}
    assert both.tokenizer.model_max_length == 32
    for folder, tasks in ((a, ["sst"]), (b, ["sts", "para"])):
        alone = Predictor.from_pretrained(folder)
        for task in tasks:
            np.testing.assert_array_equal(both.logits(task, rows_of(task)), alone.logits(task, rows_of(task)))
    ask = pipeline("minbert-multitask", model=str(tmp_path / "both"), device="cpu")
    assert ask(FIRST[0])["sst"]["scores"] == pytest.approx(both("sst", FIRST[:1])[0]["probabilities"], abs=1e-5)
    ended = minbert("average", a, b, "--output-dir", tmp_path / "mean")
    assert (
        "different lengths. The result cuts inputs to these numbers of tokens: sst 32, sts 32, para 32." in ended.out
    )
    assert Predictor.from_pretrained(tmp_path / "mean").lengths == {"sst": 32, "sts": 32, "para": 32}
    ended = minbert("average", a, save("c", ["sst"], seed=1, max_input_length=16), "--output-dir", tmp_path / "same")
    assert "lengths" not in ended.out
    assert AutoTokenizer.from_pretrained(tmp_path / "same").model_max_length == 16


def test_tasks_that_read_alike_to_other_lengths_share_no_pass(tiny_model, tiny_tokenizer):
    model = tiny_model(["para", "sts"], max_input_length={"para": 16, "sts": 32})
    found = Predictor(model, tiny_tokenizer).logits_of(["para", "sts"], rows_of("para"))
    for task, length in (("para", 16), ("sts", 32)):
        alone = Predictor(model, tiny_tokenizer, max_length=length).logits(task, rows_of("para"))
        np.testing.assert_allclose(found[task], alone, atol=1e-5)


def test_the_config_keeps_one_number_where_tasks_agree_and_checks_it(tiny_config):
    tasks = get_tasks(["sst", "sts"])
    assert tiny_config(tasks=tasks, max_input_length={"sst": 16, "sts": 16, "gone": 32}).max_input_length == 16
    config = tiny_config(tasks=tasks, max_input_length={"sst": 16, "sts": 32})
    assert [length_of(config), length_of(config, "sst"), length_of(config, "sts")] == [32, 16, 32]
    config.rearrange(tasks=get_tasks(["sst", "para"]))
    assert config.max_input_length == {"sst": 16, "para": 32}
    config.rearrange(tasks=None)
    assert config.max_input_length is None
    for wrong in (0, 65, {"sst": 65}):
        with pytest.raises(
            ValueError, match="`max_input_length` must be a whole number of tokens from 1 to 64.*Found"
        ):
            tiny_config(tasks=tasks, max_input_length=wrong)


@pytest.mark.parametrize("wrong", [0, -3, 65, 16.5, True, "16", [16], {"sst": 16.5}])
def test_a_length_that_none_can_be_is_refused_wherever_it_is_set(trained, tmp_path, wrong):
    says = "`max_input_length` must be a whole number of tokens from 1 to 64.*Found"
    for load in (AutoConfig, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=says):
            load.from_pretrained(trained[0], max_input_length=wrong)
    model = AutoModelForSequenceClassification.from_pretrained(trained[0])
    model.config.max_input_length = wrong
    with pytest.raises(ValueError, match=says):
        model.save_pretrained(tmp_path / "saved")


def test_a_call_of_the_pipeline_may_set_another_length(trained):
    ask = pipeline("minbert-multitask", model=str(trained[0]), device="cpu")
    whole = pipeline("minbert-multitask", model=str(trained[0]), device="cpu", max_length=POSITIONS)
    said = Predictor.from_pretrained(trained[0], max_length=POSITIONS)("sst", FIRST[:1])[0]["probabilities"]
    for found in (ask(FIRST[0], max_length=POSITIONS), whole(FIRST[0])):
        assert found["sst"]["scores"] == pytest.approx(said, abs=1e-5)
    assert whole(FIRST[0], max_length=LENGTH) == ask(FIRST[0]) != whole(FIRST[0])
    for wrong in (65, 7, 16.5, "16", True):
        with pytest.raises(ValueError, match="`max_length` must be from 8 to 64.*Found"):
            ask(FIRST[0], max_length=wrong)
        with pytest.raises(MinBertError, match="`max_length` must be from 8 to 64.*Found"):
            Predictor.from_pretrained(trained[0], max_length=wrong)


def test_a_longer_input_than_the_tokenizer_cuts_to_goes_through_the_model(trained):
    model = AutoModelForSequenceClassification.from_pretrained(trained[0])
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    with torch.inference_mode():
        assert model(task="sst", **tokenizer(FIRST[0], truncation=True, return_tensors="pt")).logits.isfinite().all()
