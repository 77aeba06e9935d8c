"""Reading options belong to a file: the same mapping wherever a recipe names one, `--read` on the command line.

The file is like GLUE's of MRPC: a byte-order mark, tabs, and quotes that are characters like any other.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hf_minbert.data.files import load_split, located, read_rows
from hf_minbert.data.leaks import HeldOut, scored_rows
from hf_minbert.errors import MinBertError
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.settings.tasks import DataFile, data_files, get_tasks

PAIRS = [
    ('"The man plays', "the dog is good", 1),  # one quote, never closed
    ("a film", 'not "good', 0),
    ('"bad" is why', "how", 1),
    ("very good", 'the film "', 0),
    ('"', 'it is "it"', 1),
]
HEADER = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
COLUMNS = '{first: "#1 String", second: "#2 String", label: Quality}'


def write_mrpc(path: Path, pairs=PAIRS) -> Path:
    lines = [HEADER, *((str(label), str(n), str(n + 50), a, b) for n, (a, b, label) in enumerate(pairs))]
    path.write_text("\ufeff" + "".join("\t".join(cells) + "\n" for cells in lines), encoding="utf-8")
    return path


def task(files, **fields):
    entry = {"kind": "binary", "text_columns": ["first", "second"], "labels": ["different", "same"]}
    columns = {"first": "#1 String", "second": "#2 String", "label": "Quality"}
    return get_tasks({"mrpc": {**entry, "columns": columns, "files": files, **fields}})[0]


def plain(path) -> dict:
    return {"path": str(path), "quotes": False}


# ---- A task's own data


def test_rows_are_as_the_file_has_them(tmp_path):
    rows = load_split(task({"train": plain("a.tsv")}), write_mrpc(tmp_path / "a.tsv").parent, "train")
    assert list(zip(rows["first"], rows["second"], rows["label"], strict=True)) == PAIRS


def test_each_file_of_a_list_has_its_own_way(tmp_path):
    write_mrpc(tmp_path / "a.tsv")
    quoted = "#1 String,#2 String,Quality\n" + '"a ""good"" film, it is",x,1\n'
    (tmp_path / "b.csv").write_text(quoted)
    rows = load_split(task({"dev": [plain("a.tsv"), "b.csv", {"path": "b.csv"}]}), tmp_path, "dev")
    assert len(rows) == len(PAIRS) + 2
    assert rows["first"][0] == PAIRS[0][0] and rows["first"][-1] == 'a "good" film, it is'


def test_the_options_go_with_the_file(tmp_path):
    own = task({"dev": [plain("a.tsv"), "a.tsv"]})
    write_mrpc(tmp_path / "a.tsv")
    there = str(tmp_path / "a.tsv")
    assert located(own, tmp_path).files == {"dev": [plain(there), there]}  # as another stage's `held_out` names it
    texts = HeldOut.of([task({"dev": plain("a.tsv")})], tmp_path).rows["mrpc dev"]
    assert texts.total() == len(PAIRS)
    assert scored_rows(task({"dev": "a.tsv"})) == scored_rows(task({"dev": [{"path": "a.tsv", "quotes": True}]}))
    assert scored_rows(task({"dev": "a.tsv"})) != scored_rows(task({"dev": plain("a.tsv")}))


def test_a_source_says_it_once_or_by_file():
    def of(**source):
        (found,) = task({}, sources=[source]).sources
        return found.data_files()

    assert of(files="a.tsv", quotes=False) == of(files=plain("a.tsv")) == [DataFile("a.tsv", quotes=False)]
    mixed = of(files=["a.tsv", {"path": "b.tsv", "quotes": True}], quotes=False)
    assert mixed == [DataFile("a.tsv", quotes=False), DataFile("b.tsv")]


@pytest.mark.parametrize("entry", ["a.tsv", plain("a.tsv")])
def test_an_entry_is_what_a_recipe_would_say(entry):
    (file,) = data_files(entry)
    assert file.entry == entry


def test_a_quote_that_is_none_names_the_remedy(tmp_path):
    remedy = r"\{path: FILE, quotes: false\} in a recipe, --read '\{quotes: false\}' on the command line"
    for name, pairs in {
        "never closed": PAIRS[:1],
        "closed elsewhere": [('"bad" is why', "how", 1)],
        "swallows a tab": [("good", "bad", 1), ('"the film', 'it is"', 1)],
    }.items():
        with pytest.raises(MinBertError, match=remedy):
            read_rows(write_mrpc(tmp_path / f"{name}.tsv", pairs), task({}), labelled=True)
    (tmp_path / "short.tsv").write_text("\t".join(HEADER) + "\n1\t2\t3\n")
    with pytest.raises(MinBertError, match="expected 5 tab separated cells") as raised:
        read_rows(tmp_path / "short.tsv", task({}), labelled=True)
    assert "--read" not in str(raised.value)  # no quote, no word of it


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"path": "a.tsv", "qoutes": False}, "`files` of 'dev': Unknown key 'qoutes'. Did you mean 'quotes'?"),
        ({"path": "a.tsv", "quotes": "no"}, "`files` of 'dev': `quotes` must be true or false. Found 'no'"),
        ({"quotes": False}, "`files` of 'dev': `path` must be the path of a file. Found None"),
        ([{"path": ""}], "`path` must be the path of a file. Found ''"),
        ([["a.tsv"]], "must be a path or a list of them.*a mapping like {path: a.tsv, quotes: false}"),
        ({}, "`path` must be"),
    ],
)
def test_what_a_file_cannot_be(files, said):
    with pytest.raises(MinBertError, match=said):
        task({"dev": files})


def test_formats_that_have_no_cells(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(MinBertError, match=r"a\.jsonl: `quotes` is for \.csv, \.tsv and \.txt files"):
        load_split(task({"dev": plain("a.jsonl")}), tmp_path, "dev")


# ---- From the file to the scores


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mrpc")
    write_mrpc(folder / "train.tsv")
    write_mrpc(folder / "dev.tsv", [(b, a, label) for a, b, label in PAIRS])
    recipe = folder / "my.yaml"
    recipe.write_text(f"""
model_name_or_path: {tiny_bert}
data_dir: {folder}
output_dir: {folder / "run"}
max_steps: 2
disable_tqdm: true
tasks:
  mrpc:
    kind: binary
    text_columns: [first, second]
    labels: [different, same]
    files: {{train: {{path: train.tsv, quotes: false}}, dev: [{{path: dev.tsv, quotes: false}}]}}
    columns: {COLUMNS}
""")
    train(read_recipe(recipe))
    return folder / "run"


def test_such_a_task_trains_and_scores(run, tmp_path, minbert):
    metrics = json.loads((run / "metrics.json").read_text())
    with (run / "predictions" / "mrpc-dev.csv").open(newline="") as file:
        right = [
            int(row["prediction"]) == label for row, (_, _, label) in zip(csv.DictReader(file), PAIRS, strict=True)
        ]
    assert metrics["eval_mrpc_accuracy"] == sum(right) / len(PAIRS)
    own = minbert("evaluate", run, "--output", tmp_path / "own.json")
    words = ["--input", run.parent / "dev.tsv", "--columns", COLUMNS, "--read", "{quotes: false}"]
    of_file = minbert("evaluate", run, "--output", tmp_path / "file.json", *words)
    assert own.status == of_file.status == 0, own.err + of_file.err
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("own", "file")]
    assert found[0] == found[1] == pytest.approx({key: metrics[key] for key in found[0]}, abs=1e-6)


def test_and_predicts_such_a_file(run, tmp_path, minbert):
    words = ["--input", run.parent / "dev.tsv", "--output", tmp_path / "out.csv", "--columns", COLUMNS]
    ended = minbert("predict", run, *words, "--read", "{quotes: false}")
    assert ended.status == 0, ended.err
    assert (tmp_path / "out.csv").read_text() == (run / "predictions" / "mrpc-dev.csv").read_text()
    without = minbert("predict", run, *words)
    assert without.status == 2 and "--read '{quotes: false}' on the command line" in without.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "RUN", "--read", "{quotes: false}"], "--read goes with --input."),
        (["predict", "RUN", "--text", "a", "--text-pair", "b", "--read", "{quotes: false}"], "--read goes with"),
        (["evaluate", "RUN", "--input", "FILE", "--read", "quotes"], "`--read` must be a mapping"),
        (["evaluate", "RUN", "--input", "FILE", "--read", "{path: x}"], "--read: Unknown key 'path'"),
        (["evaluate", "RUN", "--input", "FILE", "--read", "{quote: no}"], "Did you mean 'quotes'?"),
        (["evaluate", "RUN", "--input", "FILE", "--read", "{quotes: no}"], "--read: `quotes` must be true or false"),
    ],
)
def test_a_wrong_option_is_answered_in_one_line(run, minbert, words, said):
    names = {"RUN": run, "FILE": run.parent / "dev.tsv"}
    ended = minbert(*(names.get(word, word) for word in words))
    assert ended.status == 2 and ended.out == "" and said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_the_real_file(cs224n):
    file = cs224n.parent / "extra" / "mrpc-train.tsv"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    rows = read_rows(DataFile(str(file), quotes=False), task({}), labelled=True)
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    assert len(rows) == len(lines) - 1
    assert sum(row["label"] for row in rows) == sum(line.startswith("1") for line in lines[1:])
