"""The command line as a person meets it: help, train, evaluate, predict."""

from __future__ import annotations

import csv
import json
import os
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from transformers import TrainingArguments

import hf_minbert
from hf_minbert import Predictor
from hf_minbert.cli import train as train_verb
from hf_minbert.cli.predict import Dtype
from hf_minbert.model.losses import LOSSES
from hf_minbert.model.modeling_minbert import MinBertModel
from hf_minbert.pretrained.prediction import DTYPES
from hf_minbert.settings.recipe import read_recipe, settings_types, type_in_words
from hf_minbert.settings.stock import stock_hints
from hf_minbert.settings.training import TrainingKeys
from hf_minbert.settings.wording import counted
from hf_minbert.settings.words import FURTHER_REGISTRIES, REGISTRIES, REGISTRIES_OF_TASKS, _declared, check_words

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def python(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


# ---- Help and start


def test_alone_it_shows_its_verbs(minbert):
    alone, helped = minbert(), minbert("--help")
    assert alone == helped
    assert alone.status == 0
    assert all(verb in alone.out for verb in ("train", "evaluate", "predict"))


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("train", ["recipe", "KEY=VALUE"]),
        ("evaluate", ["--data-dir", "--task", "--split", "--output", "--batch-size"]),
        ("conflicts", ["recipe", "KEY=VALUE", "--steps", "--output"]),
        ("predict", ["--task", "--input", "--output", "--text", "--text-pair", "--format", "--clip", "--dtype"]),
    ],
)
def test_each_verb_explains_itself(minbert, verb, words):
    ended = minbert(verb, "--help")
    assert (ended.status, ended.err) == (0, "")
    assert all(word in ended.out for word in words)


def test_the_help_of_train_names_every_key_of_ours():
    ours = {f.name for f in fields(TrainingKeys)} - {f.name for f in fields(TrainingArguments)}
    assert {"train_tasks", "task_batch_sizes", "early_stopping_patience"} <= ours
    assert {name for name in ours | set(settings_types()) if name not in train_verb.EPILOG} == set()


HEAVY = {"torch", "transformers", "numpy", "datasets", "peft", "evaluate", "scipy", "sklearn"}


MISTAKES = [
    "learning_rat=1e-4", "max_steps=ten", "tasks.sst.kinds=classes", "aggregator=pcgard", "aggregator=mgda",
    "regularizer=smrt", "mixing=cylce", "optim=adamww", "lr_scheduler_type=liner", "save_strategy=never",
    "train_tasks=ssst", "task_weights.sts2=3", "metric_for_best_model=eval_ssst", "label_smoothing_factor=0.1",
    "fsdp=full_shard", "tasks.sst.head=mlpp", "tasks.sst.pooling=men", "tasks.sts.loss=msee", "peft.peft_type=LORAA",
    "tasks.sts.sources={task: para, mapping: sameish}",
]  # fmt: skip


def test_what_the_words_show_is_answered_before_anything_heavy_is_imported():
    recipe = ["train", "cs224n/baseline", "output_dir=x", "model_name_or_path=x"]
    given = [["--help"], ["train", "--help"], *([*recipe, word] for word in MISTAKES)]
    given += [["train", "reports/000/base", "stages.heads.seeds=1"], ["train", "no/such/recipe"]]
    given += [
        ["conflicts", "cs224n/baseline", "max_step=1"],
        ["report", "no-such-run"],
        ["publish", "no-such", "me/x"],
    ]
    search = ["search", "cs224n/baseline", "--output-dir", "x", "--space"]
    given += [[*search, "{}", "max_step=1"], [*search, "{learning_rat: [1, 2]}"], [*search, "{tasks.sst.haed: [mlp]}"]]
    code = f"""
import sys
from hf_minbert.cli import main
for words in {given!r}:
    try:
        main(words)
    except SystemExit as exit:
        print("END", exit.code, sorted({HEAVY} & set(sys.modules)), words, file=sys.stderr)
"""
    done = python("-c", code)
    ended = [line.split(" ", 2)[1:] for line in done.stderr.splitlines() if line.startswith("END")]
    assert [status for status, _ in ended] == ["0", "0"] + ["2"] * (len(given) - 2)
    assert [rest for _, rest in ended if not rest.startswith("[] ")] == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("minbert tr", ["train"]),
        ("minbert train cs224n/base", ["cs224n/baseline"]),
        ("minbert train quickstart learning_", ["learning_rates=", "learning_rate="]),
    ],
)
def test_the_shell_completes_verbs_recipes_and_keys(line, offered):
    words = {"_MINBERT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    code = f"import os; os.environ.update({words!r}); from hf_minbert.cli import main; main([])"
    done = python("-c", code)
    assert sorted(done.stdout.split()) == sorted(offered), done.stderr


def test_names_in_words_are_those_of_the_registries():
    for registry in (*REGISTRIES.values(), *REGISTRIES_OF_TASKS.values(), *FURTHER_REGISTRIES):
        module, _, attribute = registry.rpartition(".")
        assert _declared(registry) == tuple(getattr(import_module(f"hf_minbert.{module}"), attribute)), registry
    for kind, losses in LOSSES.items():
        assert _declared("model.losses.LOSSES", kind) == tuple(losses)


def test_a_missing_registry_is_a_fault_of_ours():
    with pytest.raises(LookupError, match=r"model\.heads\.HEADZ"):
        _declared("model.heads.HEADZ")


@pytest.mark.parametrize(
    "word", ["optim=course_adamw", "aggregator=torchjd.UPGrad", "regularizer=none", "tasks.sst.join=null", "fsdp=null",
             "metric_for_best_model=sst_accuracy", "peft={peft_type: LORA}", "train_tasks=[sts]"],
)  # fmt: skip
def test_right_words_pass(word):
    check_words(read_recipe("cs224n/baseline", ["output_dir=x", "model_name_or_path=x", word]))


def test_the_types_of_stock_arguments_are_read_from_their_source():
    hints = get_type_hints(TrainingArguments)
    names = {f.name for f in fields(TrainingArguments)}
    assert stock_hints().keys() == names
    for name in names:
        assert type_in_words(stock_hints()[name]) in (type_in_words(hints[name]), "anything"), name
    assert stock_hints()["learning_rate"] is float and stock_hints()["parallelism_config"] is Any


@pytest.mark.parametrize("first", ["transformers", "hf_minbert"])
def test_auto_config_knows_minbert_whichever_is_imported_first(first):
    second = {"transformers": "hf_minbert", "hf_minbert": "transformers"}[first]
    code = f"""
import {first}, {second}
from transformers import AutoConfig, AutoModel
config = AutoConfig.for_model("minbert", hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
print(type(AutoModel.from_config(config)).__name__)
"""
    done = python("-c", code)
    assert done.stdout.strip() == "MinBertModel", done.stderr


def test_python_m_hf_minbert_is_minbert():
    done = python("-m", "hf_minbert", "--help")
    assert done.returncode == 0
    assert "Usage: minbert" in done.stdout
    assert done.stderr == ""


def test_the_script_for_accelerate_trains(write_recipe_file, tmp_path, monkeypatch):
    """In this process; as processes of their own it trains in tests/distributed/test_launch.py."""
    script = str(ROOT / "scripts" / "train.py")
    monkeypatch.setattr(sys, "argv", [script, str(write_recipe_file()), "max_steps=2", "tasks=[sst]"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(script, run_name="__main__")
    assert exit.value.code == 0
    assert (tmp_path / "run" / "metrics.json").is_file()


# ---- train and evaluate


def test_train_prints_metrics_and_where_the_model_is(minbert, write_recipe_file, tmp_path):
    ended = minbert("train", write_recipe_file(), "max_steps=2", f"output_dir={tmp_path / '2024'}")
    assert ended.status == 0
    written = json.loads((tmp_path / "2024" / "metrics.json").read_text())
    metrics = {key: value for key, value in written.items() if key.startswith("eval_")}
    last = ended.out.splitlines()[-len(metrics) - 1 :]
    assert last[-1] == f"Model, predictions and metrics are in {tmp_path / '2024'}."
    shown = {f"eval_{line.split()[0]}": float(line.split()[1]) for line in last[:-1]}
    assert shown == pytest.approx(metrics, abs=5e-5)
    score, base = metrics["eval_sst_accuracy"], written["baselines"]["sst"]["scores"]["accuracy"]
    end = "" if score > base else " (not better)"
    assert f"{score:.4f}  baseline {base:.4f}{end}" in next(line for line in last if "sst_accuracy" in line)


def test_a_wrong_value_in_the_recipe_is_corrected_after_it(minbert, write_recipe_file):
    recipe = write_recipe_file("learning_rate: fast", "mixing: cycel")
    assert minbert("train", recipe).status == 2
    assert minbert("train", recipe, "learning_rate=1e-4", "mixing=cycle").status == 0


def test_evaluate_prints_what_it_writes(minbert, finished_run, course_dir, tmp_path):
    output = tmp_path / "new" / "metrics.json"
    ended = minbert("evaluate", finished_run, "--data-dir", course_dir, "--output", output)
    assert ended.status == 0
    metrics = json.loads(output.read_text())
    shown = {f"eval_{name}": float(value) for name, value in map(str.split, ended.out.splitlines())}
    assert shown == pytest.approx(metrics, abs=5e-5)
    assert list(shown)[-2:] == ["eval_overall", "eval_leaderboard"]


def test_evaluate_some_tasks_on_another_split(minbert, finished_run, course_dir, tmp_path):
    output = tmp_path / "metrics.json"
    words = ["--task", "sts", "--task", "para", "--split", "train", "--output", output]
    assert minbert("evaluate", finished_run, "--data-dir", course_dir, *words).status == 0
    metrics = json.loads(output.read_text())
    assert {key.split("_")[1] for key in metrics} == {"sts", "para", "overall"}
    assert metrics["eval_overall"] == pytest.approx((metrics["eval_sts_pearson"] + metrics["eval_para_accuracy"]) / 2)


# ---- predict

HEADERS = {
    "sst": "id,prediction,label,probability_very negative,probability_negative,probability_neutral,"
    "probability_positive,probability_very positive",
    "para": "id,prediction,label,probability_not duplicate,probability_duplicate",
    "sts": "id,prediction",
}


@pytest.fixture
def predict(minbert, finished_run, tmp_path):
    """`predict(task, path or text of a file, *words)`: the lines that `minbert predict` writes."""

    def predict(task: str, source: Path | str, *words: object) -> list[str]:
        path = source
        if isinstance(source, str):
            path = tmp_path / "input.csv"
            path.write_bytes(source.encode())
        output = tmp_path / "output.csv"
        ended = minbert("predict", finished_run, "--task", task, "--input", path, "--output", output, *words)
        assert ended.status == 0, ended.err
        lines = output.read_text(encoding="utf-8").split("\n")
        assert lines.pop() == ""
        assert ended.out == f"{counted(len(lines) - 1, 'prediction', 'is', 'are')} in {output}.\n"
        return lines

    return predict


def ids(lines: list[str]) -> list[str]:
    return [row[0] for row in csv.reader(lines[1:])]


@pytest.mark.parametrize("task", HEADERS)
def test_predict_writes_what_the_run_wrote_for_dev(predict, finished_run, course_dir, task):
    file = {"sst": "ids-sst-dev.csv", "para": "quora-dev.csv", "sts": "sts-dev.csv"}[task]
    lines = predict(task, course_dir / file, "--batch-size", 8)
    assert lines[0] == HEADERS[task]
    assert "\n".join(lines) + "\n" == (finished_run / "predictions" / f"{task}-dev.csv").read_text()


def test_ids_are_kept_to_the_character_and_in_order(predict):
    kept = ["007", " 7 ", "7.0", "a,b", 'say "hi"', "NULL", "", "ü/😀", "007", "-1e5"]
    rows = "".join(f'"{name.replace(chr(34), chr(34) * 2)}",good {place}\n' for place, name in enumerate(kept))
    lines = predict("sst", "id,sentence\n" + rows)
    assert ids(lines) == kept
    assert lines[5].startswith('"say ""hi""",')


def test_without_an_id_column_rows_are_numbered_from_0(predict):
    assert ids(predict("sst", "sentence\ngood\nbad\ngood\n")) == ["0", "1", "2"]


def test_the_courses_unlabelled_file_with_two_nameless_columns(predict, course_dir):
    lines = predict("sst", course_dir / "ids-sst-test-student.csv")
    assert ids(lines) == ["sst-test-0", "sst-test-1", "sst-test-2"]


def test_a_blank_text_and_a_blank_label_get_a_row(predict):
    rows = ["a\tgood\tbad\t1.0", "b\tgood\tbad\t", "c\tgood\t\t", "d\t\t\tyes", ""]
    lines = predict("para", "\n".join(["id\tsentence1\tsentence2\tis_duplicate", *rows]))
    assert ids(lines) == ["a", "b", "c", "d"]
    assert lines[1].split(",")[1:] == lines[2].split(",")[1:]


def test_words_that_look_like_nothing_are_words(predict):
    rows = ["null", "NA", "None", "nan", ""]
    lines = predict("sst", "id,sentence\n" + "".join(f"{name},{name}\n" for name in rows))
    assert ids(lines) == rows
    assert len({line.split(",", 1)[1] for line in lines[1:]}) == 5


@pytest.mark.parametrize("encode", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n")], ids=["mark", "crlf"])
def test_files_from_spreadsheets_are_read_alike(predict, encode):
    text = "id,sentence\na,good\nb,bad\nc,not good\n"
    assert predict("sst", encode(text)) == predict("sst", text)


def test_other_columns_and_their_order_do_not_matter(predict):
    plain = predict("sts", "id,sentence1,sentence2\na,good,bad\n")
    assert predict("sts", "sentence2\tsimilarity\tsentence1\tid\nbad\t99\tgood\ta\n") == plain


@pytest.mark.parametrize("task", HEADERS)
def test_the_batch_size_changes_nothing(predict, course_dir, task):
    file = {"sst": "ids-sst-train.csv", "para": "quora-train.csv", "sts": "sts-train.csv"}[task]
    tables = [list(csv.reader(predict(task, course_dir / file, "--batch-size", size)[1:])) for size in (1, 5, 64)]
    assert len(tables[0]) == {"sst": 12, "para": 10, "sts": 8}[task]
    for table in tables[1:]:
        assert [row[0] for row in table] == [row[0] for row in tables[0]]
        first = 1 if task == "sts" else 3  # behind the class and its name
        numbers = [np.array([row[first:] for row in each], dtype=float) for each in (tables[0], table)]
        np.testing.assert_allclose(*numbers, atol=1e-5)


@pytest.fixture
def far_scores(minbert, tiny_model, tiny_tokenizer, tmp_path):
    """A model whose scores lie far outside of 0 to 5, and what it predicts for three pairs."""
    folder = tmp_path / "far"
    model = tiny_model(["sts"])
    firsts, seconds = ["good", "the man", "why is it", "bad"], ["bad", "very good film", "a", "it plays"]
    head = model.heads.get_submodule("sts").linear
    head.weight.data.mul_(40)
    answers = Predictor(model, tiny_tokenizer)("sts", firsts, seconds)
    head.bias.data.sub_(sum(answer["prediction"] for answer in answers) / 4)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    values = [answer["prediction"] for answer in Predictor.from_pretrained(folder)("sts", firsts, seconds)]
    assert min(values) < 0 and max(values) > 5
    (tmp_path / "pairs.csv").write_text(
        "sentence1,sentence2\n" + "".join(f"{a},{b}\n" for a, b in zip(firsts, seconds, strict=True))
    )
    return folder, tmp_path / "pairs.csv", values


@pytest.mark.parametrize("words", [[], ["--clip"]])
def test_scores_stay_as_predicted_unless_clip(minbert, far_scores, tmp_path, words):
    folder, pairs, values = far_scores
    # the model's only task needs no name
    assert minbert("predict", folder, "--input", pairs, "--output", tmp_path / "o.csv", *words).status == 0
    with (tmp_path / "o.csv").open() as file:
        written = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert written == pytest.approx([min(max(value, 0), 5) for value in values] if words else values, abs=1e-3)


COURSE = {
    "sst": ("ids-sst-test-student.csv", "id \t Predicted_Sentiment ", int),
    "para": ("quora-test-student.csv", "id \t Predicted_Is_Paraphrase ", float),
    "sts": ("sts-test-student.csv", "id \t Predicted_Similiary ", float),
}


@pytest.mark.parametrize("task", COURSE)
def test_the_courses_own_format_to_the_byte(predict, course_dir, task):
    file, header, number = COURSE[task]
    own = list(csv.DictReader(predict(task, course_dir / file)))
    expected = [header, *(f"{row['id']} , {number(row['prediction'])} " for row in own)]
    assert predict(task, course_dir / file, "--format", "course") == expected
    assert [row["id"] for row in own] == [f"{task}-test-{number}" for number in range(3)]


def test_a_sentence_is_answered_on_the_terminal(minbert, finished_run):
    ended = minbert("predict", finished_run, "--task", "sst", "--text", "not good")
    answer = Predictor.from_pretrained(finished_run)("sst", ["not good"])[0]
    assert ended.status == 0
    assert ended.out.splitlines()[0] == f"{answer['label']} ({answer['prediction']})"
    assert ended.out.splitlines()[1:] == [f"  {p:.3f}  {label}" for label, p in answer["probabilities"].items()]


def test_a_pair_is_answered_on_the_terminal(minbert, finished_run):
    ended = minbert("predict", finished_run, "--task", "sts", "--text", "good", "--text-pair", "bad film")
    answer = Predictor.from_pretrained(finished_run)("sts", ["good"], ["bad film"])[0]
    assert (ended.status, ended.out) == (0, f"{answer['prediction']:.3f}\n")


def test_several_tasks_answer_one_file_in_one_pass(minbert, predict, finished_run, course_dir, tmp_path, monkeypatch):
    file, folder, runs = course_dir / "sts-dev.csv", tmp_path / "answers", []
    alone = {task: predict(task, file) for task in ("para", "sts")}
    encode = MinBertModel.forward
    monkeypatch.setattr(MinBertModel, "forward", lambda *given, **named: runs.append(1) or encode(*given, **named))
    words = ["predict", finished_run, "--task", "para", "--task", "sts", "--input", file, "--output", folder]
    ended = minbert(*words)
    assert ended.status == 0, ended.err
    assert len(runs) == 1
    assert ended.out == "".join(f"5 predictions are in {folder / task}.csv.\n" for task in alone)
    for task, lines in alone.items():
        assert (folder / f"{task}.csv").read_text().splitlines() == lines
    minbert(*words, "--format", "course")
    assert len(runs) == 2
    assert (folder / "para.csv").read_text().splitlines()[0] == COURSE["para"][1]


def test_the_task_need_not_be_named_where_one_alone_fits(minbert, finished_run):
    named = minbert("predict", finished_run, "--task", "sst", "--text", "good")
    assert named.status == 0 and minbert("predict", finished_run, "--text", "good").out == named.out


def test_several_tasks_answer_one_pair_on_the_terminal(minbert, finished_run):
    pair = ["--text", "good", "--text-pair", "bad film"]
    alone = {task: minbert("predict", finished_run, "--task", task, *pair).out for task in ("sts", "para")}
    ended = minbert("predict", finished_run, "--task", "sts", "--task", "para", *pair)
    assert ended.out == "".join(f"{task}:\n{answer}" for task, answer in alone.items())


def test_half_precision_on_the_command_line(predict, course_dir):
    tables = [list(csv.DictReader(predict("sts", course_dir / "sts-dev.csv", "--dtype", dtype))) for dtype in DTYPES]
    assert [dtype.value for dtype in Dtype] == list(DTYPES)
    scores = [np.array([float(row["prediction"]) for row in table]) for table in tables]
    for half in scores[1:]:
        assert 0 < np.abs(half - scores[0]).max() < 0.05


def test_an_older_output_is_replaced(predict, tmp_path):
    (tmp_path / "output.csv").write_text("old\n" * 100)
    assert len(predict("sst", "sentence\ngood\n")) == 2


def test_the_version(minbert):
    ended = minbert("--version")
    assert ended.status == 0 and ended.out.strip() == f"hf_minbert {hf_minbert.__version__}"


def test_what_is_said_of_a_file_is_said_once_by_a_command(minbert, tiny_bert, tmp_path):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("text,label\na,0\nb,1\nc,\nd,1\n", encoding="utf-8")
    entry = "{kind: binary, text_columns: [text], labels: [no, yes], files: {train: train.csv, dev: dev.csv}}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"tasks:\n  one: {entry}\n  two: {entry}\nmodel_name_or_path: {tiny_bert}\nmax_steps: 1\nuse_cpu: true\n"
    )
    for run in ("first", "second"):  # each command says it anew
        ended = minbert("train", recipe, f"data_dir={tmp_path}", f"output_dir={tmp_path / run}")
        assert ended.status == 0, ended.err
        left_out = [line for line in ended.err.splitlines() if "1 of 4 rows are left out" in line]
        assert len(left_out) == 2 and "train.csv" in left_out[0] and "dev.csv" in left_out[1]
        assert ended.err.count("of one dev, two dev in one, two.") == 1
