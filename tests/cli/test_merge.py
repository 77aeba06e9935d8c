"""`minbert average` and `minbert ensemble`, from the command line."""

import json

import pytest
import torch

from hf_minbert import Predictor


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path):
    """`saved("a", ["sst"], seed=1)`: the folder of a saved tiny model."""

    def save(name, tasks, seed=0, tokenizer=tiny_tokenizer):
        folder = tmp_path / name
        tiny_model(tasks, seed=seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def test_average_reports_what_merging_cost(minbert, saved, course_dir, tmp_path):
    a, b = saved("a", ["sst", "sts"], seed=1), saved("b", ["sst", "para"], seed=2)
    ended = minbert("average", a, b, "--output-dir", tmp_path / "soup", "--data-dir", course_dir)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / "soup" / "metrics.json").read_text())
    assert set(report["tasks"]) == {"sst", "sts", "para"}
    sst = report["tasks"]["sst"]
    assert set(sst["members"]) == {str(a), str(b)}
    assert sst["difference"] == pytest.approx(sst["result"] - max(sst["members"].values()))
    assert "best member" in ended.out and "sts" in ended.out
    record = json.loads((tmp_path / "soup" / "merge.json").read_text())
    assert record == {"method": "uniform", "models": [str(a), str(b)], "weights": None}
    evaluated = minbert("evaluate", tmp_path / "soup", "--data-dir", course_dir)
    assert f"sst_accuracy   {sst['result']:.4f}" in evaluated.out


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


def test_ensemble_scores_as_its_members(minbert, saved, course_dir, tmp_path):
    folders = [saved(task, [task], seed=seed) for seed, task in enumerate(("sst", "para", "sts"))]
    ended = minbert("ensemble", *folders, "--output-dir", tmp_path / "three", "--data-dir", course_dir)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / "three" / "metrics.json").read_text())
    assert [of["difference"] for of in report["tasks"].values()] == [0, 0, 0]
    ended = minbert("predict", tmp_path / "three", "--task", "sst", "--text", "a good film")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("average", ["a"], "Give two models or more"),
        ("average", ["a", "b", "--weights", "1,1"], "--method weighted and --weights 2,1,1 go together"),
        ("average", ["a", "b", "--method", "weighted"], "go together"),
        ("average", ["a", "b", "--method", "weighted", "--weights", "1;1"], "numbers with commas"),
        ("average", ["a", "b", "--method", "weighted", "--weights", "1"], "`weights` must be 2 numbers"),
        ("average", ["a", "b", "--method", "greedy"], "give --data-dir too"),
        ("average", ["a", "nowhere/at/all"], "no such folder"),
        (
            "average",
            ["a", "b", "--output-dir", "b"],
            "b is not empty. Choose another --output-dir, or add --overwrite",
        ),
        ("average", ["a", "b", "--output-dir", "b", "--overwrite"], "b is one of the models"),
        ("average", ["a", "words"], "tokenizers with different words"),
        ("ensemble", ["a", "b"], "both have the task 'sst'"),
        ("ensemble", ["a", "b", "--take", "sst=c"], "--take must be TASK=MODEL"),
        ("ensemble", ["a", "b", "--take", "sst"], "--take must be TASK=MODEL"),
    ],
)
def test_mistakes_are_one_line(minbert, saved, tiny_tokenizer, tmp_path, monkeypatch, verb, words, said):
    monkeypatch.chdir(tmp_path)
    other = type(tiny_tokenizer)(
        vocab={word: place for place, word in enumerate(reversed(tiny_tokenizer.get_vocab()))}
    )
    saved("a", ["sst"]), saved("b", ["sst"]), saved("words", ["sts"], tokenizer=other)
    output = [] if "--output-dir" in words else ["--output-dir", "new"]
    ended = minbert(verb, *words, *output)
    assert ended.status == 2
    assert ended.err.count("\n") == 1 or ended.err.strip().splitlines()[-1].startswith("minbert: error")
    assert said in ended.err
    assert not (tmp_path / "new").exists()
