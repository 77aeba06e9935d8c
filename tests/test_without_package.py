"""What a saved folder can do where this package is not: one process without it loads a folder of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, pipeline

from hf_minbert import MinBertForMaskedLM, MinBertForMultiTask, get_tasks
from hf_minbert.model import modeling_minbert
from hf_minbert.model.pooling import JOINS, POOLINGS

pytestmark = pytest.mark.slow

PAIRS = [["the film is good", "a dog"], ["why is it", "how is it not very bad ?"]]
TRAVELLING = {path.name for path in Path(modeling_minbert.__file__).parent.glob("*.py")} - {"__init__.py"}

CHILD = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "evaluate", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None  # importing it is an error from here on
import json, torch
from pathlib import Path
from transformers import (
    AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
)

folders, pairs = json.loads(sys.stdin.read())
TRUST = {"trust_remote_code": True}

def logits(model, tokenizer):
    inputs = tokenizer(*zip(*pairs), padding=True, return_tensors="pt")
    with torch.no_grad():
        return {task: model(task=task, **inputs).logits.tolist() for task in model.config.task_names}

def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)

def look(name, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    model = AutoModelForSequenceClassification.from_pretrained(folder, **TRUST)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    found = {"logits": [logits(model, tokenizer)], "shown": {}, "stock": {}}
    assert same(AutoModel.from_pretrained(folder, **TRUST), model.bert)
    model.set_active_task(model.config.task_names[-1])
    for again in (Path("again", name), Path("third", name)):  # from what was loaded, and from that once more
        model.save_pretrained(again)
        tokenizer.save_pretrained(again)
        model = AutoModelForSequenceClassification.from_pretrained(again, **TRUST)
        assert model.config.active_task == model.config.task_names[-1]
        found["logits"].append(logits(model, tokenizer))
    first, *others = model.config.task_names[-3:]
    stock = pipeline("text-classification", model=folder, model_kwargs={"active_task": first}, **TRUST)
    for task in (first, *others):
        if task != first:  # a pipeline that is there may be given another task
            stock.model.set_active_task(task)
        config = stock.model.config
        found["shown"][task] = [config.id2label[0], config.num_labels, config.problem_type]
        found["stock"][task] = stock(dict(zip(("text", "text_pair"), pairs[0])), top_k=None)
    for place in (folder, str(Path("third", name))):
        ask = pipeline("minbert-multitask", model=place, **TRUST)
        found.setdefault("asked", []).append([ask(pairs[0][0]), ask(pairs)])
    ask.save_pretrained(Path("saved by the pipeline", name))
    return found

found = {name: look(name, folder) for name, folder in folders.items() if name != "words"}
words = AutoModelForMaskedLM.from_pretrained(folders["words"], **TRUST)
found["words"] = words(torch.tensor([[2, 7, 4, 9, 3]])).logits.tolist()
assert sys.modules["hf_minbert"] is None
print(json.dumps(found))
"""


def all_kinds(tiny_model) -> dict[str, MinBertForMultiTask]:
    """Models that between them have every pooling, join, head and kind of sharing."""
    pair = {"text_columns": ["sentence1", "sentence2"], "pair_encoding": "bi"}
    poolings = {"sst": None}
    for pooling in POOLINGS:
        of = {"pooling": pooling, "layers": "last" if pooling == "pooler" else "mix"}
        poolings[f"one_{pooling}"] = {"kind": "classes", "text_columns": "text", "labels": ["a", "b", "c"], **of}
        poolings[f"two_{pooling}"] = {**pair, "kind": "score", "range": [1, 3], "head": "cosine", **of}
    joins = {
        f"{head}_{join}": {**pair, "kind": "binary", "labels": ["no", "yes"], "head": head, "join": join}
        for join, head in zip(JOINS, ("linear", "mlp", "blocks", "linear"), strict=True)
    }
    of_each = {"sst": None, "para": None, "sts": {"pair_encoding": "bi", "pooling": "mean"}}
    return {
        "poolings": tiny_model(get_tasks(poolings)),
        "joins": tiny_model(get_tasks({"sst": None, **joins})),
        "private layers": tiny_model(get_tasks(of_each), private_layers=1),
        "private encoders": tiny_model(get_tasks(of_each), private_encoders=True),
    }


@pytest.fixture(scope="module")
def folders(tiny_model, tiny_config, tiny_tokenizer, finished_run, tmp_path_factory):
    """A folder of each kind, by name."""
    root = tmp_path_factory.mktemp("folders")
    models = all_kinds(tiny_model)
    torch.manual_seed(2)
    models["words"] = MinBertForMaskedLM(tiny_config())
    for name, model in models.items():
        for parameter in model.parameters():  # no two private weights are equal
            parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    found = {name: root / name for name in models}
    return {**found, "run": finished_run, "checkpoint": max(finished_run.glob("checkpoint-*"))}


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """What a process without the package found, and the folder that it worked in."""
    root = tmp_path_factory.mktemp("without")
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([{name: str(path) for name, path in folders.items()}, PAIRS]),
        cwd=root,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), root


@pytest.fixture(scope="module")
def loaded(folders):
    """`loaded(name)`: the folder's model and tokenizer, as this package loads them."""

    @cache
    def load(name: str):
        return MinBertForMultiTask.from_pretrained(folders[name]), AutoTokenizer.from_pretrained(folders[name])

    return load


MODELS = ["poolings", "joins", "private layers", "private encoders", "run", "checkpoint"]


@pytest.mark.parametrize("name", MODELS)
def test_every_task_answers_the_same_also_when_saved_again(loaded, found, name):
    model, tokenizer = loaded(name)
    inputs = tokenizer(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
    first, *again = found[0][name]["logits"]
    assert list(first) == model.config.task_names
    for task, answer in first.items():
        with torch.no_grad():
            expected = model(task=task, **inputs).logits
        torch.testing.assert_close(torch.tensor(answer), expected, atol=1e-5, rtol=0)
    assert len(again) == 2 and all(answers == first for answers in again)


@pytest.mark.parametrize("name", MODELS)
def test_the_active_task_is_what_stock_tools_see(loaded, found, name):
    model, tokenizer = loaded(name)
    for task in model.config.task_names[-3:]:
        model.set_active_task(task)
        config = model.config
        assert found[0][name]["shown"][task] == [config.id2label[0], config.num_labels, config.problem_type]
        stock = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
        expected = stock(dict(zip(("text", "text_pair"), PAIRS[0], strict=True)))
        answers = found[0][name]["stock"][task]
        assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
        assert [answer["score"] for answer in answers] == pytest.approx([a["score"] for a in expected], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_pipeline_travels_with_the_folder(folders, found, name):
    ask = pipeline("minbert-multitask", model=str(folders[name]), device="cpu")
    expected = [ask(PAIRS[0][0]), ask(PAIRS)]
    assert expected[0] and all(expected[1])
    assert found[0][name]["asked"] == [expected] * 2


def test_the_word_head_answers_the_same(folders, found):
    model = MinBertForMaskedLM.from_pretrained(folders["words"])
    with torch.no_grad():
        expected = model(torch.tensor([[2, 7, 4, 9, 3]])).logits
    torch.testing.assert_close(torch.tensor(found[0]["words"]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_all_of_the_code_is_in_every_folder(folders, found, name):
    config = json.loads((folders[name] / "config.json").read_text())
    again = [found[1] / made / name for made in ("again", "third", "saved by the pipeline")]
    for folder in (folders[name], *again):
        assert {path.name for path in folder.glob("*.py")} == TRAVELLING
        for file in TRAVELLING:
            assert (folder / file).read_bytes() == (Path(folders["words"]).parent / "joins" / file).read_bytes()
        assert (folder / "tokenizer.json").is_file()
        saved = json.loads((folder / "config.json").read_text())
        for key in ("auto_map", "custom_pipelines", "tasks"):
            assert saved[key] == config[key]
