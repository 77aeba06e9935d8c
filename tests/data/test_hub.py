"""Datasets of the Hub, in small copies behind a server on the loopback.

`huggingface_hub` reads its environment once, so all loading happens in a process of its own: `CHILD`, run with a
network and then without one, on the same cache.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from hub_server import serve

from hf_minbert.data.hub import HUB

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STARS = ["1 star", "2 star", "3 stars", "4 stars", "5 stars"]
INFERENCE = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])


def parquet(columns: dict, **types) -> bytes:
    """A table whose text is `<column> <row>`; `columns` gives the labels and their type."""
    labels, label_type = columns.pop("label")
    rows = range(len(labels))
    cells = {name: [f"{name} {row}" for row in rows] for name in columns["texts"]} | {"label": labels}
    features = {**dict.fromkeys(columns["texts"], datasets.Value("string")), "label": label_type}
    if columns.get("idx"):
        cells["idx"], features["idx"] = [100 + row for row in rows], datasets.Value("int32")
    file = io.BytesIO()
    datasets.Dataset.from_dict(cells, features=datasets.Features(features)).to_parquet(file)
    return file.getvalue()


def repository(configs: dict[str, dict[str, bytes]]) -> dict[str, bytes]:
    """Config to split to Parquet file, laid out and described as on the Hub."""
    card = ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    files = {f"{config}/{split}-00000-of-00001.parquet": file for config, splits in configs.items()
             for split, file in splits.items()}  # fmt: skip
    return {"README.md": "\n".join([*card, "---", ""]).encode(), **files}


def splits(texts, label_type, labels: dict[str, list], idx: bool = True) -> dict[str, bytes]:
    return {
        split: parquet({"texts": texts, "label": (values, label_type), "idx": idx}) for split, values in labels.items()
    }


def copies() -> dict[str, dict[str, bytes]]:
    """The datasets of `HUB`, with the columns, types and splits that their cards name."""
    sentences, questions = ["sentence1", "sentence2"], ["question1", "question2"]
    texts = ["premise", "hypothesis"]
    duplicate = datasets.ClassLabel(names=["not_duplicate", "duplicate"])
    sst = [{"text": f"text {row}", "label": row % 5, "label_text": "..."} for row in range(6)]
    hidden = {"test_matched": [-1, -1], "test_mismatched": [-1]}
    return {
        "SetFit/sst5": {
            f"{split}.jsonl": "".join(json.dumps(row) + "\n" for row in sst[:size]).encode()
            for split, size in {"train": 6, "dev": 2, "test": 3}.items()
        },
        "nyu-mll/glue": repository(
            {
                "qqp": splits(questions, duplicate, {"train": [0, 1, 1], "validation": [1], "test": [-1, -1]}),
                "stsb": splits(
                    sentences, datasets.Value("float32"),
                    {"train": [5.0, 3.8, 0.0], "validation": [2.5], "test": [-1.0, -1.0]},
                ),
                "mnli": splits(
                    texts, INFERENCE,
                    {"train": [0, 1, 2], "validation_matched": [2, 0], "validation_mismatched": [1], **hidden},
                ),
            }
        ),
        "stanfordnlp/snli": repository(
            {
                "plain_text": splits(
                    texts, INFERENCE, {"test": [1], "validation": [2, -1], "train": [0, -1, 2, 1]}, idx=False
                )
            }
        ),
        "Yelp/yelp_review_full": repository(
            {
                "yelp_review_full": splits(
                    ["text"], datasets.ClassLabel(names=STARS), {"train": [4, 0, 2], "test": [1]}, idx=False
                )
            }
        ),
    }  # fmt: skip


CHILD = """
import json, logging, sys
from hf_minbert.data.files import load_split, load_task, pinned
from hf_minbert.data.hub import HUB
from hf_minbert.errors import MinBertError
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.run.train import train
from hf_minbert.settings.tasks import get_tasks

said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("hf_minbert").addHandler(Keep())

asked, recipe, run = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
found = {"loaded": {}, "errors": []}
for known in HUB:
    (task,) = get_tasks({known.task: {"dataset": known.dataset, "dataset_config": known.config}})
    loaded = load_task(task, None)
    commit = pinned(task, None).dataset_revision
    rows = {split: dataset.to_dict() for split, dataset in loaded.items()}
    found["loaded"][f"{known.task} {known.dataset}"] = [commit, rows]
(sst,) = get_tasks(["sst"])
found["by word"] = load_split(sst, "hub", "dev").to_dict()
(nli,) = get_tasks(["nli"])
found["without a word"] = len(load_split(nli, "sample", "train"))
for entry in asked:
    try:
        (task,) = get_tasks(entry)
        load_split(task, "hub", "train")
        found["errors"].append(None)
    except MinBertError as error:
        found["errors"].append(str(error))
words = [f"output_dir={run}", "save_strategy=steps", "save_steps=1"]
train(read_recipe(recipe, [*words, "max_steps=1"]))
# The recipe that is given names no commits, and that of the run does.
found["steps"] = train(read_recipe(recipe, [*words, "max_steps=2", "resume_from_checkpoint=true"]))["global_step"]
found["said"] = said
print(json.dumps(found))
"""
OTHER = "a" * 40
WRONG = [
    ({"sst": {"dataset": "SetFit/sst6"}}, "SetFit/sst6.*Check the names"),
    ({"sst": {"dataset": "SetFit/sst5", "dataset_revision": "nope"}}, "nope.*Check the names"),
    ({"para": {"dataset": "nyu-mll/glue", "dataset_config": "qpq"}}, "qpq.*qqp"),
    ({"nli": {"splits": {"train": "tarin"}}}, "Unknown split 'tarin'. Did you mean 'train'"),
    ({"reviews": {"columns": {"text": "txt"}}}, "no column 'txt'.*text"),
    ({"para": {"labels": ["duplicate", "different"]}}, "not_duplicate, duplicate.*duplicate, different"),
    ({"cfimdb": {"files": {}}}, "'cfimdb' has no dataset on the Hub.*dataset: owner/name"),
    ({"sst": {"dataset_revision": OTHER}}, f"{OTHER}.*Check the names"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, tiny_bert):
    """What `CHILD` found with and without a network, the requests of both, the server and the two runs' folders."""
    folder = tmp_path_factory.mktemp("hub")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\ntasks: {{sst: null, nli: {{dataset: stanfordnlp/snli}}}}\n"
        "data_dir: hub\ndisable_tqdm: true\n"
    )
    with serve({"datasets": copies()}) as hub:
        found, requests, runs = [], [], []
        for number, offline in enumerate(("0", "1")):
            run = folder / f"run{number}"
            environment = {
                **os.environ, **hub.environment(folder / "home"), "HF_HUB_OFFLINE": offline, "PYTHONPATH": str(ROOT)
            }  # fmt: skip
            # The second run repeats the first by the recipe that this left.
            given = [json.dumps([entry for entry, _ in WRONG]), str(runs[0] / "recipe.yaml" if runs else recipe)]
            command = [sys.executable, "-c", CHILD, *given, str(run)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=600)
            assert ended.returncode == 0, ended.stderr
            found.append(json.loads(ended.stdout.splitlines()[-1]))
            requests.append(list(hub.requests))
            hub.requests.clear()
            runs.append(run)
        return found, requests, hub, runs


def test_every_dataset_loads_with_the_columns_of_its_card(outcomes):
    loaded = outcomes[0][0]["loaded"]
    assert len(loaded) == len(HUB)
    rows = {name: data for name, (_, data) in loaded.items()}
    assert rows["sst SetFit/sst5"]["train"] == {
        "id": [str(row) for row in range(6)], "sentence": [f"text {row}" for row in range(6)],
        "label": [0, 1, 2, 3, 4, 0],
    }  # fmt: skip
    assert rows["para nyu-mll/glue"]["train"] == {
        "id": ["100", "101", "102"], "sentence1": [f"question1 {row}" for row in range(3)],
        "sentence2": [f"question2 {row}" for row in range(3)], "label": [0, 1, 1],
    }  # fmt: skip
    assert rows["sts nyu-mll/glue"]["train"]["label"] == pytest.approx([5.0, 3.8, 0.0])
    assert rows["nli nyu-mll/glue"]["dev"]["label"] == [2, 0]
    assert rows["nli nyu-mll/glue"]["train"]["hypothesis"] == ["hypothesis 0", "hypothesis 1", "hypothesis 2"]
    assert rows["reviews Yelp/yelp_review_full"]["train"]["label"] == [4, 0, 2]
    assert {name: [len(split["id"]) for split in data.values()] for name, data in rows.items()} == {
        "sst SetFit/sst5": [6, 2, 3], "para nyu-mll/glue": [3, 1, 2], "sts nyu-mll/glue": [3, 1, 2],
        "nli nyu-mll/glue": [3, 2, 2], "nli stanfordnlp/snli": [3, 1, 1],
        "reviews Yelp/yelp_review_full": [3, 1, 1],
    }  # fmt: skip


def test_hidden_labels_are_none(outcomes):
    for name, (_, data) in outcomes[0][0]["loaded"].items():
        assert ("label" in data["test"]) == (name.split()[1] != "nyu-mll/glue"), name


def test_rows_without_a_label_are_left_out_with_a_message(outcomes):
    found = outcomes[0][0]
    assert found["loaded"]["nli stanfordnlp/snli"][1]["train"]["id"] == ["0", "2", "3"]
    (message,) = {said for said in found["said"] if "split 'train'" in said}
    assert (
        message.startswith("stanfordnlp/snli, split 'train': 1 of 4 rows are left out") and "Their ids: 1." in message
    )
    assert not [said for said in found["said"] if "test" in said]


def test_the_word_hub_and_tasks_that_are_only_there(outcomes):
    found = outcomes[0][0]
    assert found["by word"]["sentence"] == ["text 0", "text 1"]
    assert found["without a word"] == 3


@pytest.mark.parametrize(("number", "said"), [*enumerate(said for _, said in WRONG)])
def test_wrong_names_are_answered(outcomes, number, said):
    error = outcomes[0][0]["errors"][number]
    assert error and re.search(said, " ".join(error.split())), error


def test_the_commit_is_that_of_the_hub(outcomes):
    found, _, hub, _ = outcomes
    for name, (commit, _) in found[0]["loaded"].items():
        assert commit == hub.commit("datasets", name.split()[1])


def test_a_file_is_downloaded_once_and_without_a_network_the_cache_serves(outcomes):
    found, requests, _, _ = outcomes
    downloads = [line for line in requests[0] if line.startswith("GET") and line.endswith((".parquet", ".jsonl"))]
    assert downloads and len(set(downloads)) == len(downloads)
    assert requests[1] == []
    for key in ("loaded", "by word", "without a word"):
        assert found[1][key] == found[0][key]


def test_a_run_writes_the_commits_and_repeats_and_resumes_with_them(outcomes):
    found, _, hub, runs = outcomes
    assert [outcome["steps"] for outcome in found] == [2, 2]
    commits = {"sst": hub.commit("datasets", "SetFit/sst5"), "nli": hub.commit("datasets", "stanfordnlp/snli")}
    for run in runs:
        environment = json.loads((run / "environment.json").read_text())
        assert environment["datasets"] == commits
    recipes = [(run / "recipe.yaml").read_text() for run in runs]
    assert recipes[0].replace("run0", "run1") == recipes[1]
    assert all(f"dataset_revision: {commit}" in recipes[0] for commit in commits.values())


def test_another_commit_than_the_one_asked_for_is_refused(outcomes):
    """The library would take what is in its cache, whatever was asked for."""
    found, _, hub, _ = outcomes
    error = found[1]["errors"][-1]
    assert hub.commit("datasets", "SetFit/sst5") in error and f"{OTHER} is requested" in error
