"""`minbert average` and `minbert ensemble`, from the command line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_minbert import MinBertForMultiTask, Predictor, Task, get_tasks
from hf_minbert.cli.merge import Members, Method
from hf_minbert.pretrained.loading import load_config
from hf_minbert.pretrained.merging import VECTOR_METHODS, add_task_vectors, load_base


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path):
    """`saved("a", ["sst"], seed=1)`: the folder of a saved tiny model."""

    def save(name, tasks, seed=0, tokenizer=tiny_tokenizer, **changes):
        folder = tmp_path / name
        tiny_model(tasks, seed=seed, **changes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def score_of(minbert, folder, task, data):
    output = folder + "-score.json"
    assert minbert("evaluate", folder, "--task", task, "--data-dir", data, "--output", output).status == 0
    with open(output) as file:
        return json.load(file)[f"eval_{task}_accuracy"]


def test_average_reports_what_merging_cost(minbert, saved, course_dir, tmp_path):
    a, b = saved("a", ["sst", "sts"], seed=1), saved("b", ["sst", "para"], seed=2)
    ended = minbert("average", a, b, "--output-dir", tmp_path / "soup", "--data-dir", course_dir)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / "soup" / "metrics.json").read_text())
    assert list(report["tasks"]) == ["sst", "sts", "para"]
    sst = report["tasks"]["sst"]
    assert list(sst["members"]) == [str(a), str(b)]
    for folder, score in sst["members"].items():
        assert score == score_of(minbert, folder, "sst", course_dir)
        assert f"{folder}  {score:7.4f}  the result: {sst['result'] - score:+.4f}" in ended.out
    assert sst["difference"] == pytest.approx(sst["result"] - max(sst["members"].values()))
    assert list(report["tasks"]["para"]["members"]) == [str(b)]
    record = json.loads((tmp_path / "soup" / "merge.json").read_text())
    assert record == {"method": "uniform", "models": [str(a), str(b)], "weights": None, "data": {}}
    evaluated = minbert("evaluate", tmp_path / "soup", "--data-dir", course_dir)
    assert f"sst_accuracy   {sst['result']:.4f}" in evaluated.out
    assert report["eval_sst_accuracy"] == sst["result"] and "eval_overall" in report


def test_weighted_and_greedy(minbert, saved, course_dir, tmp_path):
    a, b = saved("a", ["sst"], seed=1), saved("b", ["sst"], seed=2)
    words = ["--output-dir", tmp_path / "w", "--method", "weighted", "--weights", "1,0"]
    ended = minbert("average", a, b, *words)
    assert ended.status == 0 and "Give --data-dir to see" in ended.out
    first, merged = (Predictor.from_pretrained(folder).model.state_dict() for folder in (a, tmp_path / "w"))
    assert all(torch.equal(first[name], merged[name]) for name in first)
    ended = minbert("average", a, b, "--output-dir", tmp_path / "g", "--method", "greedy", "--data-dir", course_dir)
    assert ended.status == 0 and "Kept " in ended.out
    assert json.loads((tmp_path / "g" / "merge.json").read_text())["kept"]


def test_runs_are_merged_by_what_they_changed(minbert, write_recipe_file, tiny_bert, course_dir, tmp_path):
    folders = [tmp_path / "runs" / task for task in ("sst", "sts")]
    for task, folder in zip(("sst", "sts"), folders, strict=True):
        words = [f"output_dir={folder}", f"tasks=[{task}]", "learning_rate=1e-3"]
        assert minbert("train", write_recipe_file(), *words).status == 0
    output = tmp_path / "ties"
    words = ["--output-dir", output, "--method", "ties", "--density", "0.3", "--data-dir", course_dir]
    ended = minbert("average", *folders, *words)
    assert ended.status == 0, ended.err
    record = json.loads((output / "merge.json").read_text())
    del record["data"]
    assert record == {
        "method": "ties", "models": [str(folder) for folder in folders], "base": str(Path(tiny_bert).resolve()),
        "base_revision": None, "scale": 1.0, "density": 0.3,
    }  # fmt: skip
    configs = [load_config(str(folder)) for folder in folders]
    merged = add_task_vectors(
        [Predictor.from_pretrained(folder, device="cpu").model for folder in folders],
        load_base(str(tiny_bert), configs), "ties", density=0.3,
    ).state_dict()  # fmt: skip
    ours = Predictor.from_pretrained(output, device="cpu").model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in merged.items())
    report = json.loads((output / "metrics.json").read_text())
    evaluated = minbert("evaluate", output)  # where the runs' recipes say that the rows are
    assert f"sts_pearson   {report['tasks']['sts']['result']:.4f}" in evaluated.out


def test_runs_say_what_they_began_from(minbert, saved, tmp_path, monkeypatch):
    """Relative to the folder where each ran; of a run in stages the checkpoint before them."""
    monkeypatch.chdir(tmp_path)
    base = saved("bases/one", ["sst"], seed=5)
    a, b, c = saved("a", ["sst"], seed=1), saved("b", ["sts"], seed=2), saved("c", ["para"], seed=3)
    (a / "recipe.yaml").write_text(f"model_name_or_path: {base}\n")
    stages = "stages:\n- {name: words, objective: mlm}\n- {name: tasks, tasks: [sts]}\n"
    (b / "recipe.yaml").write_text(f"model_name_or_path: one\n{stages}")
    (b / "environment.json").write_text(json.dumps({"read_from": str(tmp_path / "bases")}))
    words = ["--output-dir", "new", "--method", "dare", "--overwrite"]
    assert minbert("average", a, b, *words).status == 0
    record = json.loads(Path("new", "merge.json").read_text())
    assert (record["base"], record["scale"], record["density"], record["seed"]) == (str(base), 0.4, 0.5, 0)
    for recipe, other in (
        ("model_name_or_path: me/bert\n", "me/bert"),
        (f"model_name_or_path: {base}\nmodel_revision: v2\n", f"{base} (v2)"),
        (f"model_name_or_path: {base}\nstages: [{{name: x}}, {{model_name_or_path: me/bert}}]\n", "me/bert"),
    ):
        (c / "recipe.yaml").write_text(recipe)
        ended = minbert("average", a, c, *words)
        assert ended.status == 2
        assert f"{a} was trained from {base} and {c} from {other}, so their task vectors cannot be added" in ended.err
    assert minbert("average", a, c, *words, "--base", b).status == 0
    assert json.loads(Path("new", "merge.json").read_text())["base"] == str(b)


def test_ensemble_scores_as_its_members(minbert, saved, course_dir, tmp_path):
    folders = [saved(task, [task], seed=seed) for seed, task in enumerate(("sst", "para", "sts"))]
    ended = minbert("ensemble", *folders, "--output-dir", tmp_path / "three", "--data-dir", course_dir)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / "three" / "metrics.json").read_text())
    assert [of["difference"] for of in report["tasks"].values()] == [0, 0, 0]
    record = json.loads((tmp_path / "three" / "merge.json").read_text())
    assert record["tasks"] == {task: str(tmp_path / task) for task in ("sst", "para", "sts")}
    ended = minbert("predict", tmp_path / "three", "--task", "sst", "--text", "a good film")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("average", ["a"], "Give two models or more"),
        (
            "average",
            ["a", "b", "./a"],
            "a is named twice. Name each model once; --method weighted gives one more weight",
        ),
        ("ensemble", ["a", "a"], "a is named twice"),
        ("average", ["a", "b", "--weights", "1,1"], "--method weighted and --weights 2,1,1 go together"),
        ("average", ["a", "b", "--method", "weighted"], "go together"),
        ("average", ["a", "b", "--method", "weighted", "--weights", "1;1"], "numbers with commas"),
        ("average", ["a", "b", "--method", "weighted", "--weights", "1"], "`weights` must be 2 numbers"),
        ("average", ["a", "b", "--method", "greedy"], "give --data-dir too"),
        ("average", ["a", "b", "--scale", "1"], "--scale is for --method task_arithmetic, ties or dare. Give one of"),
        ("average", ["a", "b", "--method", "greedy", "--data-dir", "sample", "--base", "a"], "--base is for --method"),
        ("average", ["a", "b", "--method", "task_arithmetic", "--density", "1"], "`density` is for ties and dare"),
        ("average", ["a", "b", "--method", "ties", "--seed", "1"], "`seed` is for dare"),
        ("average", ["a", "b", "--method", "ties", "--density", "0"], "`density` must be above 0 and at most 1"),
        ("average", ["a", "b", "--method", "ties"], "a has no recipe.yaml here that says what the model was trained"),
        (
            "average",
            ["a", "b", "--method", "dare", "--base", "nowhere/at/all"],
            "The base of the models: There is no model nowhere/at/all: no such folder.",
        ),
        (
            "average",
            ["a", "b", "--method", "dare", "--base", "deeper"],
            "The base deeper and the models do not go together: `num_hidden_layers` is 3 in it and 2 in them",
        ),
        ("average", ["a", "nowhere/at/all"], "no such folder"),
        ("average", ["a", "../nowhere"], "There is no model ../nowhere: no such folder"),
        (
            "average",
            ["a", "b", "--output-dir", "c"],
            "c is not empty. Choose another --output-dir, or add --overwrite",
        ),
        ("average", ["a", "b", "--output-dir", "c", "--overwrite"], "c has no merge.json"),
        ("average", ["a", "b", "--output-dir", "b"], "b is one of the models"),
        ("average", ["a", "b", "--output-dir", "b", "--overwrite"], "b is one of the models"),
        (
            "average",
            ["a", "b", "--output-dir", ".", "--overwrite"],
            ". has no merge.json. Choose another --output-dir",
        ),
        ("average", ["a", "b", "--output-dir", "file"], "file is not a folder"),
        ("average", ["a", "reversed"], "tokenizers differ, first in word 0, '[PAD]' and \"'\""),
        ("average", ["a", "shorter"], "tokenizers have 86 and 85 words"),
        ("average", ["a", "b", "--data-dir", "nowhere"], "nowhere"),
        ("average", ["a", "own", "--data-dir", "sample"], "evaluate --task own --input FILE"),
        (
            "average",
            ["a", "own", "--method", "greedy", "--data-dir", "sample"],
            "The first has sst and number 2 has own",
        ),
        (
            "ensemble",
            ["./a", "b"],
            "Models ./a and b each have the task 'sst'. Choose one with `take` (--take sst=MODEL on the command line)",
        ),
        ("ensemble", ["a", "b", "--take", "sst=a", "--take", "sst=b"], "--take names two models for 'sst'"),
        ("ensemble", ["a", "b", "--take", "sts=a"], "no task 'sts' to take from model a"),
        ("ensemble", ["a", "b", "--take", "sst=c"], "--take must be TASK=MODEL"),
        ("ensemble", ["a", "b", "--take", "sst"], "--take must be TASK=MODEL"),
    ],
)
def test_mistakes_are_one_line_before_weights_load(
    minbert, saved, tiny_tokenizer, tmp_path, monkeypatch, verb, words, said
):
    monkeypatch.chdir(tmp_path)
    vocabulary = sorted(tiny_tokenizer.get_vocab(), key=tiny_tokenizer.get_vocab().get)
    own = Task(name="own", kind="score", text_columns=("text",), range=(0, 1))
    for name, task, known in (
        ("a", "sst", vocabulary), ("b", "sst", vocabulary), ("c", "sst", vocabulary), ("own", own, vocabulary),
        ("reversed", "sts", vocabulary[::-1]), ("shorter", "sts", vocabulary[:-1]),
    ):  # fmt: skip
        saved(name, [task], tokenizer=type(tiny_tokenizer)(vocab={word: id for id, word in enumerate(known)}))
    saved("deeper", ["sst"], num_hidden_layers=3)
    Path("file").write_text("")
    before = contents(tmp_path)

    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(MinBertForMultiTask, "from_pretrained", load)
    ended = minbert(verb, *words, *([] if "--output-dir" in words else ["--output-dir", "new"]))
    assert (ended.status, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("minbert: error: ") and said in line
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_overwrite_replaces_a_result_and_keeps_what_lies_beside_it(minbert, saved, course_dir, tmp_path):
    a, b = saved("runs/a", ["sst"], seed=1), saved("runs/b", ["sst"], seed=2)
    output = tmp_path / "runs" / "soup"
    assert minbert("average", a, b, "--output-dir", output, "--data-dir", course_dir).status == 0
    (output / "notes.txt").write_text("mine")
    members = contents(a) | contents(b)
    ended = minbert("ensemble", a, saved("c", ["sts"]), "--output-dir", output)
    assert ended.status == 2 and "add --overwrite" in ended.err
    ended = minbert("ensemble", a, tmp_path / "c", "--output-dir", output, "--overwrite")
    assert ended.status == 0, ended.err
    assert list(Predictor.from_pretrained(output).tasks) == ["sst", "sts"]
    assert json.loads((output / "merge.json").read_text())["method"] == "ensemble"
    assert not (output / "metrics.json").exists()  # the average's
    assert (output / "notes.txt").read_text() == "mine"
    assert contents(a) | contents(b) == members


def test_members_that_number_labels_differently_are_each_scored_by_their_own(minbert, saved, course_dir, tmp_path):
    """The labels of b are those of a the other way round, and so are its answers."""
    labels = get_tasks(["sst"])[0].labels
    a = saved("a", ["sst"], seed=1)
    b = saved("b", [replace(get_tasks(["sst"])[0], labels=labels[::-1])], seed=1)
    model = Predictor.from_pretrained(b).model
    for parameter in model.heads.sst.linear.parameters():
        parameter.data = parameter.data.flip(0)
    model.save_pretrained(b)
    files = tmp_path / "named"
    files.mkdir()
    header, *lines = (course_dir / "ids-sst-dev.csv").read_text().splitlines()
    place = header.split("\t").index("sentiment")
    rows = [line.split("\t") for line in lines]
    named = [[*row[:place], labels[int(row[place])], *row[place + 1 :]] for row in rows]
    (files / "ids-sst-dev.csv").write_text("\n".join([header, *map("\t".join, named)]) + "\n")
    words = ["--take", f"sst={b}", "--output-dir", tmp_path / "new", "--data-dir", files]
    ended = minbert("ensemble", a, b, *words)
    assert ended.status == 0, ended.err
    scores = json.loads((tmp_path / "new" / "metrics.json").read_text())["tasks"]["sst"]
    assert scores["members"][str(a)] == scores["members"][str(b)] == scores["result"]


def test_a_diverged_model_is_below_all_others_for_a_greedy_soup():
    metrics = {"overall": 0.0, "sts_pearson": 0.0}
    ranks = [
        Members.rank(SimpleNamespace(scores=lambda model, found=found: found), None)
        for found in (metrics, {**metrics, "overall": -0.9}, {**metrics, "sts_nonfinite_predictions": 1.0})
    ]
    assert ranks == [0.0, -0.9, -math.inf]


def test_every_method_that_adds_task_vectors_has_its_word():
    assert {*VECTOR_METHODS} < {*Method}
