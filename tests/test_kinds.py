"""Tasks of the further kinds, from a recipe to what is done with a trained model, beside tasks of the usual kinds."""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file
from sklearn.metrics import (
    accuracy_score,
    cohen_kappa_score,
    f1_score,
    label_ranking_average_precision_score,
    mean_absolute_error,
)
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_minbert import (
    MinBertError,
    MinBertForMultiTask,
    MultiTaskTrainer,
    MultiTaskTrainingArguments,
    Predictor,
    Task,
    get_tasks,
)
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.data.labels import label_value
from hf_minbert.data.mappings import borrowed_rows
from hf_minbert.evaluation.attribution import quantity
from hf_minbert.evaluation.effects import influence
from hf_minbert.evaluation.metrics import task_metrics
from hf_minbert.evaluation.significance import statistics_of
from hf_minbert.model.heads import build_head, check_heads
from hf_minbert.model.inference import class_logits, read_logits
from hf_minbert.model.kinds import KINDS, KindName
from hf_minbert.model.losses import DIVERGENCES
from hf_minbert.pretrained.teachers import mean_answer
from hf_minbert.publishing.demo import replies
from hf_minbert.publishing.publish import prepare
from hf_minbert.reporting.runs import read_predictions
from hf_minbert.run.train import train
from hf_minbert.settings.metrics import KIND_METRICS
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.training.class_weights import counted

RECIPES = Path(__file__).parents[1] / "recipes" / "examples"
WORDS = ["good", "bad", "not good", "very bad", "a film", "the man plays", "why is it"]
#: What a recipe says of each further kind; `files` are those of the folder that `data` fills.
FURTHER = {
    "stars": {"kind": "ordinal", "text_columns": "text", "label_column": "stars", "labels": [1, 2, 3, 4]},
    "topics": {
        "kind": "labels", "text_columns": "text", "label_column": "topics", "labels": ["sport", "money", "art"],
        "thresholds": [0.5, 0.4, 0.6],
    },
}  # fmt: skip
SIZES = {"train": 22, "dev": 9}


def cell(name: str, row: int) -> str:
    """The label of a row, as it stands in a file."""
    names = FURTHER["topics"]["labels"]
    topics = "|".join(name for place, name in enumerate(names) if row % (place + 2) == 0)
    return {"stars": str(1 + row * 3 % 4), "topics": topics}[name]


@pytest.fixture(scope="module")
def data(write_course_files, tmp_path_factory) -> Path:
    """The course's files, and a file for each split of the further tasks."""
    folder = write_course_files(tmp_path_factory.mktemp("data"))
    for name, entry in FURTHER.items():
        for split, size in SIZES.items():
            with (folder / f"{name}-{split}.csv").open("w", newline="") as file:
                lines = csv.writer(file)
                lines.writerow(["id", "text", entry["label_column"]])
                lines.writerows([f"{name}-{row}", f"{WORDS[row % 7]} {row}", cell(name, row)] for row in range(size))
    return folder


def entries() -> dict[str, dict | None]:
    files = {name: {split: f"{name}-{split}.csv" for split in SIZES} for name in FURTHER}
    return {"sst": None, "para": None, "sts": None, **{n: {**of, "files": files[n]} for n, of in FURTHER.items()}}


@pytest.fixture(scope="module")
def start(tiny_bert, data, tmp_path_factory) -> Callable[..., Path]:
    """`start("key=value", ...)`: the folder of a run of six steps on all tasks."""

    def start(*words: str, folder: Path | None = None) -> Path:
        folder = folder or tmp_path_factory.mktemp("runs") / "run"
        lines = {
            "model_name_or_path": str(tiny_bert), "data_dir": str(data), "output_dir": str(folder), "max_steps": 6,
            "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 1,
            "disable_tqdm": True, "tasks": entries(),
        }  # fmt: skip
        recipe = folder.parent / "recipe.yaml"
        recipe.write_text(json.dumps(lines), encoding="utf-8")
        train(read_recipe(recipe, words))
        return folder

    return start


@pytest.fixture(scope="module")
def run(start) -> Path:
    """A finished run, not to be changed."""
    return start()


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def test_every_kind_has_a_name_a_loss_a_metric_and_a_divergence():
    from hf_minbert.model.losses import LOSSES

    assert list(KINDS) == list(get_args(KindName))
    for table in (LOSSES, DIVERGENCES, KIND_METRICS):
        assert set(table) == set(KINDS)


# ---- A run


def test_the_run_has_all_metrics_of_all_tasks(run):
    metrics = metrics_of(run)
    for name, task in ((task.name, task) for task in get_tasks(entries())):
        for metric in KIND_METRICS[task.kind]:
            assert np.isfinite(metrics[f"eval_{name}_{metric}"])
    own = [metrics[f"eval_{task.name}_{task.metric}"] for task in get_tasks(entries())]
    assert metrics["eval_overall"] == pytest.approx(np.mean(own))


@pytest.mark.parametrize(
    "words",
    [
        ["regularizer=smart", "smart_score_divergence=bernoulli"],
        ["regularizer=r_drop"],
        ["packing=true", "use_cpu=true", "bf16=true", "aggregator=pcgrad"],
        ["task_weights=uncertainty", "train_metrics=running"],
        [
            "freeze=encoder",
            "tasks.stars.loss_options={class_weights: auto}",
            "tasks.topics.loss_options={pos_weight: auto}",
        ],
    ],
    ids=lambda words: words[0],
)
def test_what_is_trained_otherwise_trains_too(start, words):
    metrics = metrics_of(start(*words, "max_steps=2"))
    assert all(np.isfinite(value) for key, value in metrics.items() if key.startswith("eval_"))


def test_a_killed_run_goes_on_to_the_same_bits(run, start, monkeypatch, tmp_path):
    original, calls = MultiTaskTrainer.training_step, []

    def training_step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MultiTaskTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            start(folder=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()
    start("resume_from_checkpoint=true", folder=tmp_path / "run")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "run"))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    for file in sorted((run / "predictions").iterdir()):
        assert file.read_bytes() == (tmp_path / "run" / "predictions" / file.name).read_bytes()


def test_a_run_teaches_another(run, start):
    metrics = metrics_of(start(f"teachers={run}", "distill_temperature=2", "max_steps=2"))
    assert np.isfinite(metrics["eval_overall"])


@pytest.mark.slow
def test_two_processes_are_one(tiny_model, tiny_tokenizer, together, tmp_path):
    model = tiny_model(get_tasks(entries()), initializer_range=0.1)

    def rows(task: Task, count: int) -> list[dict]:
        def label(row: int):
            return cell(task.name, row) if task.name in FURTHER else row % 2

        return [
            {**dict.fromkeys(task.text_columns, f"{WORDS[row % 7]} {row}"), "label": label(row)}
            for row in range(count)
        ]

    def job(rank: int, processes: int) -> None:
        made = copy.deepcopy(model)
        args = MultiTaskTrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=6, optim="sgd", learning_rate=0.01, max_grad_norm=0.0,
            per_device_train_batch_size=8 // processes, save_strategy="no", use_cpu=True, disable_tqdm=True,
            report_to="none",
        )  # fmt: skip
        tasks = get_tasks(entries())
        trainer = MultiTaskTrainer(
            made, args, train_dataset={task.name: rows(task, 24) for task in tasks},
            eval_dataset={task.name: rows(task, 13) for task in tasks}, processing_class=tiny_tokenizer,
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate()
        kept = {name: value for name, value in metrics.items() if "runtime" not in name and "second" not in name}
        torch.save([kept, made.state_dict()], tmp_path / f"{rank}-of-{processes}.pt")

    for processes in (1, 2):
        ended = together(lambda rank, n=processes: job(rank, n), processes=processes)
        assert ended.status == [0] * processes, ended.said
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("0-of-1", "0-of-2", "1-of-2"))
    for name, weight in alone[1].items():
        assert torch.equal(first[1][name], second[1][name])
        torch.testing.assert_close(first[1][name], weight, rtol=0, atol=1e-6)
    assert first[0] == pytest.approx(alone[0], abs=1e-5)


# ---- What is done with it

CHILD = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "scipy", "sklearn"):
    sys.modules[name] = None
import json, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder, text = sys.argv[1:]
TRUST = {"trust_remote_code": True}
ask = pipeline("minbert-multitask", model=folder, **TRUST)
found = {"asked": ask(text), "stock": {}}
for task in ask.model.config.task_names[3:]:
    stock = pipeline("text-classification", model=folder, model_kwargs={"active_task": task}, **TRUST)
    found["stock"][task] = stock(text, top_k=None)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_it_answers_without_the_package_as_with_it(run, tmp_path):
    text = "a film the man plays"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), text], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ask = pipeline("minbert-multitask", model=str(run), device="cpu")
    assert found["asked"] == ask(text)
    assert found["stock"].keys() == FURTHER.keys()
    for name, answers in found["stock"].items():
        scores = {answer["label"]: answer["score"] for answer in answers}
        assert scores == pytest.approx(found["asked"][name]["scores"], abs=1e-6)


def test_predictor_and_pipeline_say_the_same(run):
    predictor, ask = Predictor.from_pretrained(run, device="cpu"), pipeline("minbert-multitask", model=str(run))
    texts = ["a film", "very bad", "why is it good"]
    stars, asked = predictor("stars", texts), ask(texts, tasks=["stars"])
    for ours, theirs in zip(stars, asked, strict=True):
        assert list(ours["probabilities"]) == ["1", "2", "3", "4"]
        assert theirs["stars"]["scores"] == pytest.approx(ours["probabilities"], abs=1e-6)
        assert (theirs["stars"]["label"], ours["label"]) == (ours["label"], str(1 + ours["prediction"]))
        mean = sum(place * p for place, p in enumerate(ours["probabilities"].values()))
        assert ours["expected"] == pytest.approx(mean) == theirs["stars"]["expected"]


def test_kinds_with_probabilities_of_their_own_are_calibrated_and_others_are_left_alone(run, minbert, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    refused = minbert("calibrate", folder, "--task", "stars")
    assert refused.status == 2 and "Found stars (ordinal). Give --task with another: " in refused.err
    ended = minbert("calibrate", folder, "--thresholds", "f1")
    assert ended.status == 0, ended.err
    (said,) = [line for line in ended.out.splitlines() if line.startswith("No temperature, which is for tasks of ")]
    assert "stars (ordinal)" in said and "sts (score)" in said and "sst" not in said
    found = json.loads((folder / "calibration.json").read_text())
    tasks = {task["name"]: task for task in json.loads((folder / "config.json").read_text())["tasks"]}
    assert {tasks[name]["kind"] for name in found} == {"classes", "binary", "labels"}
    for name, task in tasks.items():
        assert task["temperature"] == found.get(name, {"temperature": 1})["temperature"]
    for name in found:
        if tasks[name]["kind"] == "labels":
            assert (
                dict(zip(tasks[name]["labels"], tasks[name]["thresholds"], strict=True)) == found[name]["thresholds"]
            )
    assert minbert("evaluate", folder, "--output", tmp_path / "found.json").status == 0
    for key, value in json.loads((tmp_path / "found.json").read_text()).items():
        assert metrics_of(folder)[key] == pytest.approx(value, abs=1e-6), key


def test_labels_are_answered_above_their_thresholds(run):
    predictor, ask = Predictor.from_pretrained(run, device="cpu"), pipeline("minbert-multitask", model=str(run))
    texts = [f"{word} {row}" for row, word in enumerate(WORDS)]
    for ours, theirs in zip(predictor("topics", texts), ask(texts, tasks=["topics"]), strict=True):
        shares = ours["probabilities"]
        assert list(shares) == ["sport", "money", "art"]
        assert ours["labels"] == [
            name for name, over in zip(shares, (0.5, 0.4, 0.6), strict=True) if shares[name] > over
        ]
        assert theirs["topics"]["labels"] == ours["labels"]
        assert theirs["topics"]["scores"] == pytest.approx(shares, abs=1e-6)


def test_labels_are_predicted_into_a_file(run, minbert, data, tmp_path):
    output = tmp_path / "topics.csv"
    ended = minbert("predict", run, "--task", "topics", "--input", data / "topics-dev.csv", "--output", output)
    assert ended.status == 0, ended.err
    assert output.read_bytes() == (run / "predictions" / "topics-dev.csv").read_bytes()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == SIZES["dev"]
    for row in rows:
        shares = {name: float(row[f"probability_{name}"]) for name in FURTHER["topics"]["labels"]}
        names = [name for name, over in zip(shares, (0.5, 0.4, 0.6), strict=True) if shares[name] > over]
        assert row["labels"] == "|".join(names)
    ended = minbert("predict", run, "--task", "topics", "--text", "a film")
    assert ended.status == 0 and ended.out.splitlines()[1].endswith("  sport")


def test_the_mean_of_ordered_classes_is_predicted_into_a_file(run, minbert, data, tmp_path):
    output = tmp_path / "stars.csv"
    ended = minbert("predict", run, "--task", "stars", "--input", data / "stars-dev.csv", "--output", output)
    assert ended.status == 0, ended.err
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]][-2:] == ["probability_4", "expected"]
    for row in rows:
        shares = [float(row[f"probability_{name}"]) for name in range(1, 5)]
        assert float(row["expected"]) == pytest.approx(sum(place * share for place, share in enumerate(shares)))
    texts = [row["text"] for row in csv.DictReader((data / "stars-dev.csv").open())]
    answers = Predictor.from_pretrained(run)("stars", texts)
    assert [float(row["expected"]) for row in rows] == pytest.approx([each["expected"] for each in answers], abs=1e-6)
    task = get_tasks(FURTHER)[[*FURTHER].index("stars")]
    found = read_predictions(output, task)
    lines = [line.rsplit(",", 1)[0] for line in output.read_text().splitlines()]  # as it was written before
    output.write_text("\n".join(lines) + "\n")
    np.testing.assert_array_equal(read_predictions(output, task).probabilities, found.probabilities)
    assert found.probabilities.shape == (len(rows), 4)


def test_it_would_be_published_with_a_card(run):
    card = prepare(run, "me/model").card
    assert "| `topics` | a sentence | any of 3 labels | 0 sport, 1 money, 2 art |" in card
    assert "| `stars` | a sentence | one of 4 classes in order | 0 1, 1 2, 2 3, 3 4 |" in card
    assert "mean_absolute_error" in card


def test_it_is_reported(run, minbert, tmp_path):
    ended = minbert("report", run, "--output-dir", tmp_path / "report")
    assert ended.status == 0, ended.err
    said = (tmp_path / "report" / "report.html").read_text()
    assert "could not be made" not in said and "This part is missing" not in said
    assert "stars, quadratic_kappa" in said and "errors are between neighbours" in said
    assert "topics, lrap" in said and "Label by label" in said and "Rows with an error" in said


def test_two_runs_are_compared(run, start, minbert, tmp_path):
    other = start("seed=7", "max_steps=2")
    ended = minbert("report", run, "--compare", other, "--output-dir", tmp_path / "report")
    assert ended.status == 0, ended.err
    said = (tmp_path / "report" / "report.html").read_text()
    assert "could not be made" not in said and "stars, mean_absolute_error" in said
    assert "topics, micro_f1" in said and "fewer wrong labels" in said


def test_classes_in_order_are_no_stock_classifier(run, minbert, tmp_path):
    ended = minbert("export", run, "--to", "classifier", "--task", "stars", "--output-dir", tmp_path / "out")
    assert ended.status == 2
    assert re.search(
        r"Task 'stars' has `kind: ordinal`, which a .* cannot compute. Train it with `kind: cl", ended.err
    )


@pytest.mark.slow
def test_the_graph_answers_by_the_lines_of_its_readme(
    tiny_model, tiny_tokenizer, minbert, tmp_path, monkeypatch, capfd
):
    pytest.importorskip("onnxruntime")
    for name, entry in FURTHER.items():
        tiny_model(get_tasks({name: entry}), num_hidden_layers=1).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        folder = tmp_path / f"{name}-graph"
        ended = minbert("export", tmp_path / name, "--to", "onnx", "--output-dir", folder)
        assert ended.status == 0, ended.err
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        monkeypatch.chdir(folder)
        capfd.readouterr()
        exec(code, said := {})
        ours = Predictor.from_pretrained(tmp_path / name, device="cpu")(name, said["texts"][0])
        expected = [answer["labels" if name == "topics" else "label"] for answer in ours]
        assert capfd.readouterr().out.splitlines() == [repr(expected)]


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("wrong", ["7", "3.5", "soso", "1;2", "nan", "1|7"])
def test_a_bad_label_is_refused_in_one_line(data, tiny_bert, minbert, tmp_path, name, wrong):
    lines = (data / f"{name}-train.csv").read_text().splitlines()
    lines[3] = f"x,a film,{wrong}"
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    entry = {**entries()[name], "files": {"train": str(tmp_path / "train.csv"), "dev": str(data / f"{name}-dev.csv")}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"model_name_or_path": str(tiny_bert), "output_dir": str(tmp_path / "out"), "tasks": {name: entry}})
    )
    ended = minbert("train", recipe)
    (line,) = [line for line in ended.err.splitlines() if line.startswith("minbert: error")]
    assert ended.status == 2 and f"train.csv, line 4: a label of task {name!r} must be" in line
    assert f"Found {wrong!r}" in line or (name == "topics" and f"Found {wrong[2:]!r}" in line)


def test_labels_are_a_stock_classifier(run, minbert, tmp_path):
    ended = minbert("export", run, "--to", "classifier", "--task", "topics", "--output-dir", tmp_path / "out")
    assert ended.status == 0, ended.err
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(stock).__name__ == "BertForSequenceClassification"
    assert stock.config.problem_type == "multi_label_classification"
    classify = pipeline("text-classification", model=stock, tokenizer=str(tmp_path / "out"), top_k=None)
    ours = Predictor.from_pretrained(run, device="cpu")("topics", ["a film"])[0]["probabilities"]
    assert {of["label"]: of["score"] for of in classify(["a film"])[0]} == pytest.approx(ours, abs=1e-6)


@pytest.mark.slow
def test_the_page_to_try_it_shows_both(run):
    model, tokenizer = MinBertForMultiTask.from_pretrained(run).eval(), AutoTokenizer.from_pretrained(run)
    page = [*replies(model, tokenizer, "a film", "")][-1]
    topics = model.config.get_task("topics")
    for name in ("stars", "topics"):
        assert f'data-task="{name}"' in page
    shares = Predictor(model, tokenizer)("topics", ["a film"])[0]["probabilities"].values()
    said = [name for name, p, t in zip(topics["labels"], shares, topics["thresholds"], strict=True) if p > t]
    assert [name for name in topics["labels"] if f"<b>{name}</b>" in page] == said


def test_models_of_such_tasks_are_averaged_and_put_together(run, start, minbert, tmp_path):
    other = start("seed=7", "max_steps=2")
    taken = {"sst": run, "para": run, "sts": run, "stars": run, "topics": other}
    takes = [word for name, folder in taken.items() for word in ("--take", f"{name}={folder}")]
    for verb, words in (("average", ["--method", "uniform"]), ("ensemble", takes)):
        folder = tmp_path / verb
        ended = minbert(verb, run, other, *words, "--output-dir", folder)
        assert ended.status == 0, ended.err
        found = Predictor.from_pretrained(folder, device="cpu")
        assert (
            found("stars", ["a film"])[0]["expected"] > 0 and len(found("topics", ["a film"])[0]["probabilities"]) == 3
        )


def test_a_file_with_a_column_for_each_label_is_evaluated(run, minbert, tmp_path):
    (tmp_path / "a.csv").write_text("headline,is_sport,is_money,is_art\na film,1,0,1\nwhy is it,0,0,0\n")
    columns = "{text: headline, label: [is_sport, is_money, is_art]}"
    words = ["--task", "topics", "--input", tmp_path / "a.csv", "--columns", columns, "--output", tmp_path / "m.json"]
    ended = minbert("evaluate", run, *words)
    assert ended.status == 0, ended.err
    assert 0 <= json.loads((tmp_path / "m.json").read_text())["eval_topics_lrap"] <= 1


# ---- Classes in order

LOGITS = st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), min_size=1, max_size=5)


def ordinal(**fields) -> Task:
    return Task(**{"name": "stars", "kind": "ordinal", "text_columns": ("text",), "labels": tuple("01234"), **fields})


@given(LOGITS)
def test_probabilities_of_steps_never_rise_and_those_of_classes_sum_to_one(rows):
    logits = torch.tensor(rows)
    by_class = class_logits(logits).exp()
    torch.testing.assert_close(by_class.sum(dim=1), torch.ones(len(rows)))
    assert (by_class >= 0).all()
    above = by_class.double().flip(1).cumsum(dim=1).flip(1)  # P(y >= k)
    torch.testing.assert_close(above[:, 1:], logits.double().sigmoid().cumprod(dim=1), atol=1e-5, rtol=0)
    assert (above.diff(dim=1) <= 0).all()
    found = read_logits("ordinal", np.array(rows, dtype=np.float64))
    assert (found.probabilities >= 0).all()
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
    assert ((found.expected >= 0) & (found.expected <= 4 + 1e-12)).all()


def test_free_cut_points_would_cross():
    """What the products are for: logits of P(y > k) themselves, from the same outputs, are out of order."""
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    assert (logits.sigmoid().diff() > 0).any()
    assert (logits.sigmoid().cumprod(dim=1).diff() <= 0).all()


def head_of(tiny_config, task: Task):
    config = tiny_config(tasks=[task])
    return build_head(config, config.tasks[0]), config.tasks[0]


def loss_of(tiny_config, logits, labels, **fields) -> torch.Tensor:
    head, spec = head_of(tiny_config, ordinal(**fields))
    return head.loss(torch.zeros(len(labels), 1, 8), logits, labels, spec)


def test_the_loss_is_the_sum_of_conditional_cross_entropies(tiny_config):
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 4, 4, 1])
    rows = []
    for row, label in zip(logits, labels, strict=True):  # CORN: chance k is learned from rows with y > k - 1
        chances = range(min(int(label) + 1, 4))
        rows.append(sum(F.binary_cross_entropy_with_logits(row[k], (label > k).float()) for k in chances))
    assert loss_of(tiny_config, logits, labels).item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-6)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    picked = torch.tensor(weights)[labels]
    expected = (picked * torch.stack(rows)).sum() / picked.sum()
    found = loss_of(tiny_config, logits, labels, loss_options={"class_weights": weights})
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    focal = ((1 - (-torch.stack(rows)).exp()) ** 2 * torch.stack(rows)).mean()
    found = loss_of(tiny_config, logits, labels, loss_options={"focal_gamma": 2})
    assert found.item() == pytest.approx(focal.item(), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"head_options": {"scale": 5.0}}, {"head": "mlp"}, {"head": "blocks"}])
def test_a_new_head_holds_all_classes_for_equally_likely(tiny_model, options):
    head = tiny_model([ordinal(**options)]).eval().heads.get("stars")
    output = head(torch.zeros(1, 1, head.input_size))
    torch.testing.assert_close(class_logits(output).exp(), torch.full((1, 5), 0.2))


@pytest.mark.parametrize("name", ["symmetric_kl", "kl"])
def test_divergences_are_those_of_the_class_probabilities(name):
    torch.manual_seed(1)
    one, other = torch.randn(2, 6, 4)
    p, q = (class_logits(x).exp() for x in (one, other))
    found = DIVERGENCES["ordinal"][name](one, other)
    expected = (p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1) * (name == "symmetric_kl")
    torch.testing.assert_close(found, expected)
    assert DIVERGENCES["ordinal"][name](one, one).abs().max() == 0


def test_teachers_agree_on_the_mean_of_their_probabilities():
    torch.manual_seed(2)
    answers = [torch.randn(6, 4).numpy() for _ in range(3)]
    mean = torch.stack([class_logits(torch.from_numpy(answer)).exp() for answer in answers]).mean(0)
    found = class_logits(torch.from_numpy(mean_answer("ordinal", answers))).exp()
    torch.testing.assert_close(found, mean, atol=1e-6, rtol=1e-4)
    extreme = np.full((1, 4), 400.0)
    assert np.isfinite(mean_answer("ordinal", [extreme, -extreme])).all()


def test_the_stock_form_has_the_probabilities_as_its_softmax(tiny_model):
    model = tiny_model([ordinal()])
    ids = torch.tensor([[2, 7, 4, 9, 3]])
    with torch.no_grad():
        named, stock = model(ids, task="stars").logits, model(ids, labels=torch.tensor([3]))
    assert (named.shape, stock.logits.shape, model.config.num_labels) == ((1, 4), (1, 5), 5)
    torch.testing.assert_close(stock.logits.softmax(-1), class_logits(named).exp())
    torch.testing.assert_close(stock.loss, F.cross_entropy(stock.logits, torch.tensor([3])))


def test_attributions_are_of_the_log_odds_of_the_class():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    p = class_logits(logits).exp()
    for place in range(5):
        torch.testing.assert_close(quantity(logits, "ordinal", place), (p[:, place] / (1 - p[:, place])).log())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_metrics_are_those_of_scikit_learn(pairs):
    values, labels = np.array(pairs).T
    found = {name: metric(ordinal(), values, labels) for name, metric in KIND_METRICS["ordinal"].items()}
    assert found["mean_absolute_error"] == pytest.approx(mean_absolute_error(labels, values))
    assert found["accuracy"] == pytest.approx((values == labels).mean())
    if len({*values, *labels}) == 1:
        assert found["quadratic_kappa"] == 0  # where scikit-learn has no number
    else:
        expected = cohen_kappa_score(labels, values, weights="quadratic", labels=range(5))
        assert found["quadratic_kappa"] == pytest.approx(expected, abs=1e-12)


def test_intervals_and_influences_are_of_the_same_numbers():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 5, 40)
    values = np.clip(labels + draw.integers(-1, 2, 40), 0, 4)
    metrics = {name: metric(ordinal(), values, labels) for name, metric in KIND_METRICS["ordinal"].items()}
    for name, statistic in statistics_of(ordinal(), values, labels).items():
        assert statistic(np.arange(40)) == pytest.approx(metrics[name])
        assert influence(ordinal(), name, values, labels).mean() == pytest.approx(0, abs=1e-12)


def test_a_diverged_model_is_at_the_farthest_from_the_labels(caplog):
    metrics = task_metrics(ordinal(), np.full((3, 4), np.nan), np.array([0, 1, 2]))
    assert metrics == {
        "accuracy": 0.0, "quadratic_kappa": 0.0, "mean_absolute_error": 4.0, "nonfinite_predictions": 1.0
    }  # fmt: skip


def test_an_error_is_no_part_of_the_overall_score_and_the_lowest_is_the_best(tmp_path):
    with pytest.raises(MinBertError, match=r"`metric` must be one where higher is better.*'mean_absolute_error'"):
        ordinal(metric="mean_absolute_error")
    for metric, higher in (("eval_stars_mean_absolute_error", False), ("eval_stars_quadratic_kappa", True)):
        args = MultiTaskTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=metric, use_cpu=True)
        assert args.greater_is_better is higher


def test_the_best_checkpoint_is_that_of_the_lowest_error(start):
    folder = start(
        "eval_strategy=steps", "eval_steps=2", "save_steps=2", "load_best_model_at_end=true",
        "metric_for_best_model=eval_stars_mean_absolute_error", "learning_rate=3e-2",
    )  # fmt: skip
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    errors = [entry["eval_stars_mean_absolute_error"] for entry in log if "eval_stars_mean_absolute_error" in entry]
    assert len(set(errors)) > 1 and metrics_of(folder)["best_metric"] == pytest.approx(min(errors))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"labels": ("low", "high")}, "kind 'ordinal' needs three or more different `labels`"),
        ({"range": (0, 5)}, "needs three or more different `labels` and no `range`"),
        ({"loss": "cross_entropy"}, "unknown loss 'cross_entropy' for kind 'ordinal'"),
        ({"loss_options": {"label_smoothing": 0.1}}, "unknown option 'label_smoothing'"),
        (
            {"pair_encoding": "bi", "text_columns": ("a", "b"), "head": "cosine"},
            "`head: cosine` gives one number, and kind 'ordinal' needs 4",
        ),
        ({"head": "cosine"}, "needs 4. Heads for it: linear, mlp, blocks"),
        ({"kind": "labels", "head": "cosine"}, "and kind 'labels' needs 5. Heads for it: linear, mlp, blocks"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_config, fields, says):
    with pytest.raises((MinBertError, ValueError), match=says):
        head_of(
            tiny_config,
            Task(
                **{"name": "stars", "kind": "ordinal", "text_columns": ("text",), "labels": tuple("12345"), **fields}
            ),
        )


def test_a_task_of_the_package_keeps_its_labels_in_order():
    (sst,) = get_tasks({"sst": {"kind": "ordinal"}})
    assert sst.labels == get_tasks(["sst"])[0].labels and sst.metric == "accuracy" and sst.num_outputs == 4


def test_rows_of_classes_can_be_borrowed(data, tmp_path):
    (tmp_path / "stars.csv").write_text("text,stars\n" + "".join(f"film {n},{n}\n" for n in range(1, 6)))
    files = {"files": str(tmp_path / "stars.csv"), "mapping": "stars_to_classes"}
    sst = get_tasks(["sst"])[0]
    mood = ordinal(text_columns=("sentence",), labels=sst.labels, sources=[{"task": "sst"}, files])
    assert [row["label"] for row in borrowed_rows(mood, 1, {}, data, 0)] == [row % 5 for row in range(12)]
    assert [row["label"] for row in borrowed_rows(mood, 2, {}, data, 0)] == [0, 1, 2, 3, 4]


# ---- Any of several labels


def topics(**fields) -> Task:
    labels = ("sport", "money", "art")
    return Task(**{"name": "topics", "kind": "labels", "text_columns": ("text",), "labels": labels, **fields})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("sport|art", [1, 0, 1]), (" art | sport ", [1, 0, 1]), ("", [0, 0, 0]), ("2", [0, 0, 1]), ("0|1", [1, 1, 0]),
        (["money"], [0, 1, 0]), ([], [0, 0, 0]), ([2, 0], [1, 0, 1]), (np.array([1]), [0, 1, 0]),
        ([1.0, 0.0, 1.0], [1, 0, 1]), ([True, False, False], [1, 0, 0]), (torch.tensor([0.0, 1, 1]), [0, 1, 1]),
    ],
)  # fmt: skip
def test_a_label_may_be_written_in_several_ways(value, expected):
    assert label_value(topics(), value, "here") == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("sport|opera", "here: a label of task 'topics' must be .* Found 'opera'"), ("sport||art", "Found ''"),
        ("sport|sport", "here: the label 'sport' is given twice"), (["opera"], "Found 'opera'"), (None, "Found None"),
        ([1, 0, 1], "here: .* is ambiguous: two labels, or a 0 or 1 for each"), ([0.5, 0.0, 1.0], "Found 0.5"),
        ([3], "Found 3"), ([True, True], "Found True"),
    ],
)  # fmt: skip
def test_what_is_no_set_of_labels_is_refused(value, says):
    with pytest.raises(MinBertError, match=says):
        label_value(topics(), value, "here")


def files_of(folder: Path) -> dict[str, str]:
    """The same three rows in every form: money; none; sport and art. Then one whose label is missing, where it can."""
    forms = {
        "cells.csv": "text,topics\na,money\nb,\nc,art|sport\n",
        "columns.csv": "text,s,m,x\na,0,1,0\nb,0,0,0\nc,1,0.0,true\nd,1,,0\n",
        "lists.jsonl": '{"text": "a", "topics": ["money"]}\n{"text": "b", "topics": []}\n'
                       '{"text": "c", "topics": ["art", 0]}\n{"text": "d"}\n',
    }  # fmt: skip
    for name, text in forms.items():
        (folder / name).write_text(text)
    rows = {"text": ["a", "b", "c", "d"], "topics": [["money"], [], ["sport", "art"], None]}
    datasets.Dataset.from_dict(rows).to_parquet(folder / "lists.parquet")
    ids = datasets.Features(
        {
            "text": datasets.Value("string"),
            "topics": datasets.List(datasets.ClassLabel(names=["Art", "Money", "Sport"])),
        }
    )  # noqa: E501
    rows["topics"] = [[1], [], [2, 0], None]
    datasets.Dataset.from_dict(rows, features=ids).to_parquet(folder / "ids.parquet")
    datasets.Dataset.from_dict(rows, features=ids).save_to_disk(folder / "saved")
    return [*forms, "lists.parquet", "ids.parquet", "saved"]


def test_every_form_of_file_gives_the_same_labels(tmp_path):
    for name in files_of(tmp_path):
        columns = {"label": ["s", "m", "x"] if name == "columns.csv" else "topics"}
        task = topics(files={"dev": str(tmp_path / name)}, columns=columns)
        rows = load_split(task, None, "dev")
        assert rows["text"][:] == ["a", "b", "c"], name
        assert np.asarray(rows["label"][:]).tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 1]], name
        assert rows.features["label"].feature == datasets.Value("float32")


def test_a_wrong_cell_is_named_with_its_place(tmp_path):
    (tmp_path / "a.csv").write_text("text,s,m,x\na,0,1,0\nb,0,2,0\n")
    task = topics(files={"dev": str(tmp_path / "a.csv")}, columns={"label": ["s", "m", "x"]})
    with pytest.raises(
        MinBertError, match=r"a.csv, line 3, column 'm': a label of task 'topics' must be 0 or 1. Found '2'"
    ):
        load_split(task, None, "dev")
    with pytest.raises(MinBertError, match="has no column 'y'"):
        load_split(topics(files={"dev": str(tmp_path / "a.csv")}, columns={"label": ["s", "m", "y"]}), None, "dev")
    (tmp_path / "b.jsonl").write_text('{"text": "a", "topics": ["money"]}\n{"text": "b", "topics": ["opera"]}\n')
    with pytest.raises(MinBertError, match=r"b.jsonl, line 2: a label of task 'topics' must be .* Found 'opera'"):
        load_split(topics(files={"dev": str(tmp_path / "b.jsonl")}, label_column="topics"), None, "dev")


SETS = arrays(np.int64, st.tuples(st.integers(1, 12), st.just(3)), elements=st.integers(0, 1))


@given(st.data())
def test_scores_of_labels_are_those_of_scikit_learn(data):
    labels = data.draw(SETS)
    values = data.draw(arrays(np.float64, labels.shape, elements=st.sampled_from([0.1, 0.3, 0.45, 0.5, 0.55, 0.9])))
    task = topics(thresholds=[0.5, 0.4, 0.6])
    said = values > np.array(task.thresholds)
    found = {name: metric(task, values, labels.astype(np.float32)) for name, metric in KIND_METRICS["labels"].items()}
    assert found == pytest.approx({
        "micro_f1": f1_score(labels, said, average="micro", zero_division=0),
        "macro_f1": f1_score(labels, said, average="macro", zero_division=0),
        "sample_f1": f1_score(labels, said, average="samples", zero_division=1),
        "lrap": label_ranking_average_precision_score(labels, values),
        "exact_match": accuracy_score(labels, said),
    })  # fmt: skip
    for name, statistic in statistics_of(task, values, labels).items():
        assert statistic(np.arange(len(labels))) == pytest.approx(found[name])


def test_the_loss_is_the_mean_over_labels(tiny_config):
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 3), torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1.0]])
    head, spec = head_of(tiny_config, topics())
    each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    assert head.loss(torch.zeros(5, 1, 8), logits, labels, spec).item() == pytest.approx(each.mean().item())
    head, spec = head_of(tiny_config, topics(loss_options={"pos_weight": [1.0, 2.0, 3.0]}))
    weighed = (each * torch.where(labels > 0, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))).mean()
    assert head.loss(torch.zeros(5, 1, 8), logits, labels, spec).item() == pytest.approx(weighed.item())
    for wrong, says in ((labels[:4], "one label per example"), (labels * 2, "numbers from 0 to 1.*Found 2")):
        with pytest.raises(ValueError, match=says):
            head.loss(torch.zeros(5, 1, 8), logits, wrong, spec)


@pytest.mark.parametrize("name", ["symmetric_kl", "kl"])
def test_divergences_are_means_over_labels(name):
    torch.manual_seed(1)
    one, other = torch.randn(2, 6, 3)
    by_label = [DIVERGENCES["binary"][name](one[:, k : k + 1], other[:, k : k + 1]) for k in range(3)]
    torch.testing.assert_close(DIVERGENCES["labels"][name](one, other), torch.stack(by_label).mean(dim=0))


def test_teachers_agree_label_by_label():
    draw = np.random.default_rng(0)
    answers = [draw.normal(size=(4, 3)).astype(np.float32) for _ in range(3)]
    mean = np.mean([1 / (1 + np.exp(-answer)) for answer in answers], axis=0)
    np.testing.assert_allclose(1 / (1 + np.exp(-mean_answer("labels", answers))), mean, atol=1e-6)


def test_weights_are_counted_label_by_label():
    labels = np.array([[1, 0, 1], [0, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=np.float32)
    task = topics(loss_options={"pos_weight": "auto"})
    assert counted(task, labels) == {"pos_weight": [3.0, 3.0, 1.0]}
    for rows, says in ((labels[:2], "none of these have the label 'money'"), (labels[:1], "all of .* label 'sport'")):
        with pytest.raises(MinBertError, match=says):
            counted(task, rows)


def test_rows_are_kept_and_put_into_batches_as_they_are(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [[1.0, 0, 0], [0, 0, 0], [1, 0, 1]]})
    expected = [[1, 0, 0], [0, 0, 0], [1, 0, 1]]
    for _ in range(2):  # the second time from the cache
        encoded = encode(rows, topics(), tiny_tokenizer, 8, cache_dir=tmp_path)
        assert encoded.labels.dtype == np.float32 and encoded.labels.tolist() == expected
    assert encode([*rows], topics(), tiny_tokenizer, 8).labels.tolist() == expected
    ids = datasets.List(datasets.ClassLabel(names=["art", "money", "sport"]))  # of another order than the task's
    features = datasets.Features({"text": datasets.Value("string"), "label": ids})
    named = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [[2], [], [0, 2]]}, features=features)
    assert encode(named, topics(), tiny_tokenizer, 8).labels.tolist() == expected
    pair = topics(labels=("no", "yes"))  # both of two labels, which as bare ids could be a 0 or 1 for each
    features["label"] = datasets.List(datasets.ClassLabel(names=["no", "yes"]))
    both = datasets.Dataset.from_dict({"text": ["a"], "label": [[0, 1]]}, features=features)
    assert encode(both, pair, tiny_tokenizer, 8).labels.tolist() == [[1, 1]]
    both.to_parquet(tmp_path / "both.parquet")
    read = load_split(topics(labels=("no", "yes"), files={"dev": str(tmp_path / "both.parquet")}), None, "dev")
    assert read["label"][:] == [[1, 1]]
    assert label_value(topics(labels=("0", "1")), ["0", "1"], "here") == [1, 1]
    collator = PaddedCollator(topics(), 0)
    for batch in (collator(encoded), collator([encoded[n] for n in range(3)])):
        assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"labels": ("one",)}, "kind 'labels' needs two or more different `labels`"),
        ({"thresholds": 1.0}, "`thresholds` must be a number between 0 and 1"),
        ({"thresholds": [0.5, 0.5]}, "or a list of one for each label"),
        ({"label_delimiter": "o"}, "`label_delimiter` must be text that occurs in none of the labels"),
        ({"columns": {"label": ["a", "b"]}}, "must name 3 columns, one for each label"),
        ({"kind": "classes", "thresholds": 0.4}, "`thresholds` is for kinds binary, labels"),
        ({"kind": "classes", "columns": {"label": ["a"]}}, "is for kind 'labels'"),
        ({"loss_options": {"pos_weight": [1.0]}}, "`pos_weight` must be 3 numbers"),
        ({"metric": "accuracy"}, "Unknown metric 'accuracy'"),
    ],
)
def test_what_labels_do_not_go_with_is_refused(tiny_config, fields, says):
    with pytest.raises((MinBertError, ValueError), match=says):
        check_heads(tiny_config(tasks=[topics(**fields)]))


def test_rows_of_labels_cannot_be_balanced(tmp_path):
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, task_sampling={"topics": "balanced"})
    with pytest.raises(MinBertError, match="`task_sampling: balanced` of 'topics' needs rows with one label each"):
        args.check_tasks({"topics": topics()})


# ---- The recipes


def test_the_example_of_classes_in_order_trains(tiny_bert, data, tmp_path):
    words = [
        f"model_name_or_path={tiny_bert}",
        f"data_dir={data}",
        f"output_dir={tmp_path / 'run'}",
        "num_train_epochs=1",
        "max_length=64",
    ]
    metrics = train(read_recipe(RECIPES / "ordinal.yaml", words))
    assert {"eval_sst_quadratic_kappa", "eval_sst_mean_absolute_error", "eval_overall"} <= set(metrics)


def test_the_example_of_topics_trains(tiny_bert, course_dir, tmp_path):
    names = ["sport", "politics", "money", "science"]
    (tmp_path / "topics").mkdir()
    for split, size in SIZES.items():
        rows = [f"{WORDS[n % 7]} {n},{'|'.join(names[k] for k in range(4) if n >> k & 1)}\n" for n in range(size)]
        (tmp_path / "topics" / f"{split}.csv").write_text("".join(["headline,topics\n", *rows]))
    files = {split: str(tmp_path / "topics" / f"{split}.csv") for split in SIZES}
    words = [
        f"model_name_or_path={tiny_bert}", f"data_dir={course_dir}", f"output_dir={tmp_path / 'run'}",
        "num_train_epochs=1", "max_length=64", f"tasks.topics.files={json.dumps(files)}",
    ]  # fmt: skip
    metrics = train(read_recipe(RECIPES / "topics.yaml", words))
    assert {f"eval_topics_{name}" for name in KIND_METRICS["labels"]} <= set(metrics)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["tasks"][1]["loss_options"]["pos_weight"] == pytest.approx([1, 12 / 10, 12 / 10, 14 / 8])
    assert config["tasks"][1]["thresholds"] == 0.5
