"""Tasks that a recipe adds or changes: entries, where their data lies, and a run from the file to the prediction."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from hf_minbert.cli import main
from hf_minbert.data.files import SAMPLE_DIR, load_split, read_rows
from hf_minbert.data.labels import label_value
from hf_minbert.errors import MinBertError
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe, split_recipe
from hf_minbert.settings.tasks import DATA_FIELDS, TASKS, Task, get_tasks, with_revisions

TOPIC = {"kind": "classes", "text_columns": "text", "labels": ["sport", "politics", "science"]}
SAME = {"kind": "binary", "text_columns": ["first", "second"], "labels": ["different", "same"]}


# ---- Entries


def test_an_entry_replaces_fields_and_a_blank_one_none():
    sst, cfimdb, topic = get_tasks(
        {"sst": None, "cfimdb": {"metric": "macro_f1", "columns": {"sentence": "text"}}, "topic": TOPIC}
    )
    assert sst is TASKS["sst"]
    assert (cfimdb.metric, cfimdb.columns, cfimdb.labels) == (
        "macro_f1",
        {"sentence": "text"},
        ("negative", "positive"),
    )
    assert topic == Task("topic", "classes", ("text",), labels=("sport", "politics", "science"))
    assert (topic.label_column, topic.pair_encoding, topic.metric) == ("label", "single", "accuracy")


def test_the_order_is_that_of_the_mapping():
    names = ["sts", "topic", "sst", "para"]
    assert [task.name for task in get_tasks({name: TOPIC if name == "topic" else None for name in names})] == names


def test_what_stood_for_the_old_columns_kind_and_data_gives_way():
    pairs, score, saved = get_tasks(
        {
            "sst": {"text_columns": ["a", "b"]},
            "para": {"kind": "score", "range": [0, 1]},
            "sts": {"dataset": "folder"},
        }
    )
    assert pairs.pair_encoding == "cross"
    assert (score.labels, score.range, score.metric) == ((), (0, 1), "pearson")
    assert saved.files == {} and saved.range == (0.0, 5.0)


def test_numbers_may_be_label_names():
    (stars,) = get_tasks({"stars": {**TOPIC, "labels": [1, 2, 3]}})
    assert stars.labels == ("1", "2", "3")


def test_a_model_knows_no_paths():
    entry = {**TOPIC, "files": {"train": "a.csv"}, "columns": {"text": "headline"}}
    (topic,) = get_tasks({"topic": entry})
    saved = topic.to_config()
    assert not set(DATA_FIELDS) & set(saved)
    assert Task.from_config(saved) == get_tasks({"topic": TOPIC})[0]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"stt": None}, "Unknown task 'stt'. Did you mean 'sts'"),
        ({"sstt": {"metric": "accuracy"}}, "'sstt' is not one of .*needs `kind` and .*Did you mean 'sst'"),
        ({"topic": {"kind": "classes", "text_columns": "text"}}, "a new task needs `labels`. Add them"),
        ({"topic": {"kind": "score", "text_columns": "text"}}, "a new task needs `range`"),
        ({"topic": {**TOPIC, "kind": "class"}}, "'topic': Unknown kind 'class'. Did you mean 'classes'"),
        ({"topic": {**TOPIC, "lables": ["a", "b"]}}, "'topic': Unknown field 'lables'. Did you mean 'labels'"),
        ({"topic": {**TOPIC, "labels": "sport"}}, r"`labels` must be a list of text like \[a, b\]. Found 'sport'"),
        ({"topic": {**TOPIC, "labels": [True, False]}}, r"`labels` must be a list of text.*Found \[True, False\]"),
        ({"topic": {**TOPIC, "labels": ["a"]}}, "needs two or more different `labels`"),
        ({"topic": {**TOPIC, "text_columns": ["a", "a"]}}, "`text_columns` must name one or two columns"),
        ({"topic": {**TOPIC, "text_columns": [1]}}, "`text_columns` must be a list of text"),
        ({"topic": {**TOPIC, "label_column": 3}}, "`label_column` must be text. Found 3"),
        ({"topic": {"kind": "score", "text_columns": "t", "range": 5}}, r"`range` must be two numbers like \[0, 5\]"),
        ({"topic": {"kind": "score", "text_columns": "t", "range": ["a", 5]}}, "`range` must be two numbers"),
        ({"topic": {**TOPIC, "files": "a.csv"}}, "`files` must be a mapping like {train: ...}. Found 'a.csv'"),
        ({"topic": {**TOPIC, "files": {"trian": "a.csv"}}}, "`files`: Unknown key 'trian'. Did you mean 'train'"),
        ({"topic": {**TOPIC, "files": {"train": []}}}, "`files` of 'train' must be a path or a list of them"),
        ({"topic": {**TOPIC, "splits": {"validation": "x"}}}, "`splits`: Unknown key 'validation'.*dev, test, train"),
        ({"topic": {**TOPIC, "columns": {"txt": "x"}}}, "`columns`: Unknown key 'txt'. Did you mean 'text'"),
        ({"topic": {**TOPIC, "columns": {"text": 1}}}, "`columns` of 'text' must be a name. Found 1"),
        ({"topic": {**TOPIC, "dataset": 3}}, "`dataset` must be text. Found 3"),
        ({"topic": {**TOPIC, "dataset": "a/b", "files": {"train": "x"}}}, "either `files` or `dataset`, not both"),
        ({"sst": {"splits": {"dev": "validation"}}}, "`splits` goes with `dataset`, and the task has `files`"),
        ({"topic": ["a"]}, r"'topic': expected fields like {files: ...}, or nothing. Found \['a'\]"),
        ({"To pic": TOPIC}, "`name` must be lower-case letters"),
        ({}, "`tasks` is empty"),
    ],
)
def test_a_wrong_entry_is_answered(chosen, said):
    with pytest.raises(MinBertError, match=said):
        get_tasks(chosen)


def test_a_recipe_and_a_word_of_the_command_line_hold_entries(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: m\noutput_dir: o\ntasks:\n  sst:\n  topic: {labels: [no, yes]}\n")
    settings, _ = split_recipe(read_recipe(recipe), {})
    assert settings.tasks == {"sst": None, "topic": {"labels": ["no", "yes"]}} and settings.data_dir is None
    settings, _ = split_recipe(read_recipe(recipe, ["tasks={sts: null, topic: {files: {train: a.csv}}}"]), {})
    assert settings.tasks == {"sts": None, "topic": {"files": {"train": "a.csv"}}}


def test_commits_are_added_to_tasks_of_any_form():
    commit, other = "a" * 40, "b" * 40
    assert with_revisions(["sst", "sts"], {}) == ["sst", "sts"]
    assert with_revisions(["sst", "sts"], {"sts": commit}) == {"sst": None, "sts": {"dataset_revision": commit}}
    for written, kept in ((None, commit), ("main", commit), (other, other)):
        entry = {"metric": "macro_f1", **({"dataset_revision": written} if written else {})}
        assert with_revisions({"sst": entry}, {"sst": commit})["sst"] == {**entry, "dataset_revision": kept}


# ---- Labels by name


def test_a_label_is_its_name_or_its_id():
    (topic,) = get_tasks({"topic": TOPIC})
    assert [label_value(topic, value, "here") for value in ("politics", " politics ", "1", "1.0", 1)] == [1] * 5
    for value in ("Politics", "sports", "3", "-1"):
        with pytest.raises(MinBertError, match=r"from 0 to 2, or its name \(0 = sport, 1 = politics, 2 = science\)"):
            label_value(topic, value, "here")


def test_names_that_are_numbers_are_never_taken_for_ids():
    (stars,) = get_tasks({"stars": {**TOPIC, "labels": ["1", "2", "3"]}})
    assert [label_value(stars, value, "here") for value in ("1", "3.0", 2)] == [0, 2, 2]  # 2, a number, is an id
    for value in ("0", "1.5"):
        with pytest.raises(MinBertError, match="one of the names 1, 2, 3 .class ids are not accepted, because"):
            label_value(stars, value, "here")
    (same,) = get_tasks({"same": {**SAME, "labels": ["0", "1"]}})
    assert label_value(same, "1.0", "here") == 1


# ---- Where the data lies


@pytest.fixture
def topics(tmp_path, monkeypatch):
    """The working directory, with three files of topic rows; the id is missing in one of them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("headline,label\ngoal,sport\nvote,politics\n")
    lines = ['{"headline": "atom", "label": 2}', '{"headline": "cup", "label": "sport"}', ""]
    (tmp_path / "data" / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "data" / "c.tsv").write_text("id\theadline\tlabel\nx\tteam\t0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def topic_task(**fields):
    return get_tasks({"topic": {**TOPIC, "columns": {"text": "headline"}, **fields}})[0]


def test_several_files_are_one_split(topics):
    task = topic_task(files={"train": ["data/a.csv", "data/c.tsv", "data/b.jsonl"]})
    assert load_split(task, None, "train").to_dict() == {
        "id": ["0", "1", "x", "3", "4"], "text": ["goal", "vote", "team", "atom", "cup"], "label": [0, 1, 0, 2, 0]
    }  # fmt: skip


def test_paths_are_relative_to_the_data_dir(topics):
    task = topic_task(files={"train": "a.csv", "dev": str(topics / "data" / "c.tsv")})
    assert len(load_split(task, "data", "train")) == 2
    assert len(load_split(task, "data", "dev")) == 1
    with pytest.raises(MinBertError, match=r"a\.csv does not exist in the working directory, and no `data_dir`"):
        load_split(task, None, "train")
    with pytest.raises(MinBertError, match=r"`data_dir` does not exist: dta.*data of 'topic'\."):
        load_split(task, "dta", "train")


def test_one_file_without_labels_is_named(topics):
    (topics / "data" / "d.csv").write_text("headline\nsun\n")
    task = topic_task(files={"train": ["data/a.csv", "data/d.csv"], "test": ["data/a.csv", "data/d.csv"]})
    with pytest.raises(MinBertError, match=r"no labels in split 'train': data/d\.csv has no column 'label'"):
        load_split(task, None, "train")
    assert load_split(task, None, "test").column_names == ["id", "text"]


def test_a_label_and_an_id_may_stand_in_other_columns(topics):
    path = topics / "x.csv"
    path.write_text("key,headline,subject\nk1,goal,sport\n")
    task = topic_task(columns={"text": "headline", "label": "subject", "id": "key"})
    assert read_rows(path, task, labelled=True) == [{"id": "k1", "text": "goal", "label": 0}]
    again = read_rows(path, topic_task(), labelled=True, columns={"label": "subject"})
    assert again == [{"id": "0", "text": "goal", "label": 0}]


def test_a_task_without_data_says_where_it_could_come_from(topics):
    with pytest.raises(MinBertError, match="'topic' has no dataset on the Hub.*Add `dataset: owner/name`"):
        load_split(topic_task(), None, "train")
    with pytest.raises(MinBertError, match="ids-sst-train.csv does not exist.*folder that holds it, `sample` .*`hub`"):
        load_split(TASKS["sst"], None, "train")


def test_the_word_sample_is_for_tasks_without_data_of_their_own(topics, course_dir, write_course_files):
    own = topic_task(files={"train": "data/a.csv"})
    assert len(load_split(own, "sample", "train")) == 2
    assert load_split(TASKS["sst"], "sample", "dev")["sentence"][0] == read_rows(
        SAMPLE_DIR / TASKS["sst"].files["dev"], TASKS["sst"], labelled=True
    )[0]["sentence"]  # fmt: skip
    write_course_files(topics / "sample")  # a folder of the person's goes before the word
    assert load_split(TASKS["sst"], "sample", "dev")["id"][0] == "sst-dev-0"


# ---- From the file to the prediction


QUESTIONS = "type,question\n" + "".join(
    f"{kind},why is the {word} {number} ?\n"
    for number, (kind, word) in enumerate([("human", "man"), ("entity", "film"), ("number", "dog"), ("1", "bad")] * 3)
)


@pytest.fixture(scope="module")
def own_run(tiny_bert, course_dir, tmp_path_factory):
    """A run of two steps on sst and two tasks that only its recipe knows."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "questions.csv").write_text(QUESTIONS)
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"first": f"good {n}", "second": "bad", "label": n % 2}) + "\n" for n in range(6))
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"""
model_name_or_path: {tiny_bert}
data_dir: {course_dir}
output_dir: {folder / "run"}
cache_dir: {folder / "cache"}
max_steps: 2
disable_tqdm: true
tasks:
  question:
    kind: classes
    text_columns: question
    label_column: type
    labels: [description, entity, human, number]
    files: {{train: {folder}/questions.csv, dev: {folder}/questions.csv}}
  sst:
  same:
    kind: binary
    text_columns: [first, second]
    labels: [different, same]
    files: {{train: [{folder}/pairs.jsonl], dev: {folder}/pairs.jsonl}}
""")
    train(read_recipe(recipe))
    return folder / "run"


@pytest.fixture
def minbert(capfd):
    def run(*words):
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        return (exit.value.code, *capfd.readouterr())

    return run


def test_a_recipe_adds_tasks_without_code(own_run):
    metrics = json.loads((own_run / "metrics.json").read_text())
    assert {"eval_question_accuracy", "eval_sst_accuracy", "eval_same_f1", "eval_overall"} <= set(metrics)
    saved = json.loads((own_run / "config.json").read_text())["tasks"]
    assert [task["name"] for task in saved] == ["question", "sst", "same"]
    assert str(own_run.parent) not in json.dumps(saved)
    with (own_run / "predictions" / "question-dev.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 12
    assert {folder.name.split("-")[0] for folder in (own_run.parent / "cache").iterdir()} == {
        "question",
        "sst",
        "same",
    }


def test_the_runs_recipe_trains_the_same_again(own_run, tmp_path):
    again = train(read_recipe(own_run / "recipe.yaml", [f"output_dir={tmp_path / 'again'}"]))
    first = json.loads((own_run / "metrics.json").read_text())
    assert {key: again[key] for key in again if key.startswith("eval")} == {
        key: first[key] for key in first if key.startswith("eval")
    }


def test_a_run_resumes_where_the_tasks_are_the_same_however_written(tiny_bert, course_dir, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\noutput_dir: {tmp_path / 'run'}\ndata_dir: {course_dir}\n"
        "save_strategy: steps\nsave_steps: 1\ndisable_tqdm: true\n"
    )
    train(read_recipe(recipe, ["tasks=[sst]", "max_steps=1"]))
    words = ["max_steps=2", "resume_from_checkpoint=true"]
    with pytest.raises(MinBertError, match="was started with tasks = .*cannot be resumed"):
        train(read_recipe(recipe, [*words, "tasks={sst: {files: {train: ids-sst-dev.csv, dev: ids-sst-dev.csv}}}"]))
    assert train(read_recipe(recipe, [*words, "tasks={sst: null}"]))["global_step"] == 2


def test_evaluate_a_file_with_other_column_names(own_run, tmp_path, minbert):
    path = tmp_path / "other.tsv"
    path.write_text(QUESTIONS.replace(",", "\t").replace("type\tquestion", "kind\ttext"))
    words = ["evaluate", own_run, "--task", "question", "--output", tmp_path / "m.json", "--input", path]
    status, _, error = minbert(*words, "--columns", "{question: text, label: kind}")
    assert status == 0, error
    metrics = json.loads((tmp_path / "m.json").read_text())
    of_run = json.loads((own_run / "metrics.json").read_text())
    assert metrics["eval_question_accuracy"] == of_run["eval_question_accuracy"]


def test_predict_a_file_with_other_column_names(own_run, tmp_path, minbert):
    path = tmp_path / "other.csv"
    path.write_text("key,a,b\nx,good,bad\ny,bad,bad\n")
    status, _, error = minbert(
        "predict", own_run, "--task", "same", "--input", path, "--output", tmp_path / "out.csv",
        "--columns", "{first: a, second: b, id: key}",
    )  # fmt: skip
    assert status == 0, error
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["x", "y"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "RUN", "--data-dir", "x", "--input", "y"], "Give either --data-dir"),
        (["evaluate", "RUN", "--input", "FILE"], "rows of one task. Name it with --task: question, sst, same"),
        (["evaluate", "RUN", "--data-dir", "x"], "`data_dir` does not exist: x.*of 'question'.*recipe.yaml"),
        (["evaluate", "RUN", "--data-dir", "x", "--task", "sst", "--columns", "{a: b}"], "--columns goes with"),
        (["evaluate", "RUN", "--input", "FILE", "--task", "question", "--columns", "text"],
         "`--columns` must be a mapping to text"),
        (["evaluate", "RUN", "--input", "FILE", "--task", "question", "--columns", "{"], "not readable as YAML"),
        (["evaluate", "RUN", "--input", "FILE", "--task", "question", "--columns", "{qestion: a}"],
         "task 'question': Unknown column 'qestion'. Did you mean 'question'"),
        (["evaluate", "RUN", "--input", "FILE", "--task", "question", "--columns", "{question: qeustion}"],
         "no column 'qeustion'. Columns found: type, question. Did you mean 'question'"),
        (["predict", "RUN", "--task", "question", "--text", "why", "--columns", "{a: b}"], "--columns goes with"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_answered_in_one_line(own_run, minbert, words, said):
    names = {"RUN": own_run, "FILE": own_run.parent / "questions.csv"}
    status, out, error = minbert(*(names.get(word, word) for word in words))
    assert status == 2 and out == ""
    lines = [line for line in error.splitlines() if line.startswith("minbert: error: ")]
    assert len(lines) == 1
    assert re.search(said, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tasks: {question: {kind: classes, text_column: q, labels: [a, b]}}", "Did you mean 'text_columns'"),
        ("tasks: {ssst: }", "Unknown task 'ssst'. Did you mean 'sst'"),
        ("tasks: {sst: {files: {train: sst-trian.csv}}}", "sst-trian.csv does not exist. Its folder holds"),
        ("tasks: [sst, {question: {}}]", "`tasks` must be a mapping like .* or a list of text"),
        ("task: {sst: }", "Unknown key 'task'. Did you mean 'tasks'"),
    ],
)
def test_a_recipe_with_a_typo_is_answered_in_one_line(tiny_bert, course_dir, tmp_path, minbert, line, said):
    recipe = tmp_path / "r.yaml"
    others = f"model_name_or_path: {tiny_bert}\noutput_dir: {tmp_path / 'run'}\ndata_dir: {course_dir}\n"
    recipe.write_text(f"{others}{line}\n")
    status, _, error = minbert("train", recipe)
    assert status == 2 and re.search(said, error), error
    assert not (tmp_path / "run").exists()


def test_the_example_of_the_recipes(minilm, tmp_path, monkeypatch):
    recipe = Path(__file__).parents[2] / "recipes" / "examples" / "own_task.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "questions" / f"{name}.csv").write_text(QUESTIONS)
    words = [f"model_name_or_path={minilm}", "max_steps=1", "eval_strategy=no", "save_strategy=no", "max_length=16",
             "load_best_model_at_end=false", "eval_tasks=[question]"]  # fmt: skip
    metrics = train(read_recipe(recipe, words))
    assert metrics["eval_question_accuracy"] >= 0
