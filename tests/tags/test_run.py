"""The example recipe of entities and intents on made rows: trained, scored, answered, reported, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, pipeline

from hf_minbert import MultiTaskTrainer, Predictor
from hf_minbert.evaluation.metrics import value_metrics
from hf_minbert.publishing.demo import replies
from hf_minbert.publishing.export import export
from hf_minbert.publishing.export_classifier import ToClassifier
from hf_minbert.reporting.runs import read_predictions, read_run
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "examples" / "ner_and_intent.yaml"
TEXT = "the man plays, and a good film is bad"
#: What a process answers that has transformers and the folder.
STRANGER = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "evaluate", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None
import json
from transformers import pipeline
folder, text = json.loads(sys.stdin.read())
trust = {"trust_remote_code": True}
tag = pipeline("token-classification", model=folder, aggregation_strategy="simple",
               model_kwargs={"active_task": "ner"}, **trust)
ask = pipeline("minbert-multitask", model=folder, **trust)
print(json.dumps([tag(text), ask(text)], default=float))
"""


@pytest.fixture(scope="module")
def predictor(tagged_run) -> Predictor:
    return Predictor.from_pretrained(tagged_run)


@pytest.fixture(scope="module")
def answer(predictor) -> dict:
    return predictor("ner", [TEXT])[0]


def entities(found: list[dict]) -> list[tuple[str, str]]:
    """Type and text, as a stock pipeline groups them."""
    return [(one["entity_group"], TEXT[one["start"] : one["end"]]) for one in found]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.open(encoding="utf-8", newline="\n")]


def test_a_run_learns_both_tasks_and_keeps_its_predictions(tagged_run, assistant, predictor):
    metrics = json.loads((tagged_run / "metrics.json").read_text())
    assert metrics["eval_ner_entity_f1"] > 0.9 and metrics["eval_intent_accuracy"] > 0.9
    assert metrics["eval_overall"] == pytest.approx(
        (metrics["eval_ner_entity_f1"] + metrics["eval_intent_accuracy"]) / 2
    )
    kept = lines_of(tagged_run / "predictions" / "ner-dev.jsonl")
    tokens = [row["tokens"] for row in kept]
    assert [row["tags"] for row in kept] == [found["tags"] for found in predictor("ner", tokens)]
    words = (assistant / "assistant" / "ner-dev.conll").read_text().split("\n\n")[1:]
    assert tokens == [[line.split("\t")[0] for line in sentence.splitlines()] for sentence in words if sentence]


def test_an_answer_has_a_tag_for_each_word_and_the_entities(answer):
    assert answer["tokens"] == ["the", "man", "plays", ",", "and", "a", "good", "film", "is", "bad"]
    assert len(answer["tags"]) == len(answer["probabilities"]) == 10 and all(
        0 < p <= 1 for p in answer["probabilities"]
    )
    places = {"type": "PLACE", "text": "good film", "start": 6, "end": 8}
    assert places in answer["entities"]


def test_commands_evaluate_and_predict(tagged_run, assistant, tmp_path, minbert, answer):
    file = assistant / "assistant" / "ner-dev.conll"
    ended = minbert("evaluate", tagged_run, "--task", "ner", "--input", file)
    assert ended.status == 0 and "ner_entity_f1" in ended.out
    output = tmp_path / "out.jsonl"
    assert minbert("predict", tagged_run, "--task", "ner", "--input", file, "--output", output).status == 0
    assert lines_of(output) == lines_of(tagged_run / "predictions" / "ner-dev.jsonl")
    # What it wrote is a file of rows again, such as to train on.
    ended = minbert("evaluate", tagged_run, "--task", "ner", "--input", output)
    assert ended.status == 0 and "ner_accuracy          1.0000" in ended.out
    ended = minbert("predict", tagged_run, "--task", "ner", "--text", TEXT)
    assert ended.status == 0 and "PLACE: good film" in ended.out
    assert [line.split()[1:] for line in ended.out.splitlines()[:2]] == [
        [tag, word] for tag, word in zip(answer["tags"][:2], answer["tokens"][:2], strict=True)
    ]
    ended = minbert("predict", tagged_run, "--task", "ner", "--input", file, "--output", tmp_path / "out.csv")
    assert ended.status == 2 and "tags are written as JSON lines or in columns, not .csv" in ended.err
    assert "Name it out.jsonl or out.conll" in ended.err
    ended = minbert("predict", tagged_run, "--task", "intent", "--input", file, "--output", tmp_path / "out.conll")
    assert ended.status == 2 and "predictions are CSV, not .conll. Name it out.csv" in ended.err


def test_columns_are_written_that_are_read_as_the_same_words(tagged_run, tmp_path, minbert, predictor):
    sentences = [["the", "man", "New\u00a0York", "Los Angeles"], [], ["good\u2028film", "plays"]]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"tokens": words}) + "\n" for words in sentences))
    for name in ("out.jsonl", "out.conll"):
        ended = minbert("predict", tagged_run, "--task", "ner", "--input", file, "--output", tmp_path / name)
        assert ended.status == 0 and "3 predictions are in" in ended.out, ended.err
    found = lines_of(tmp_path / "out.jsonl")
    assert [row["tokens"] for row in found] == sentences and found[1]["tags"] == []
    assert [len(row) for row in read_predictions(tmp_path / "out.jsonl", predictor.task("ner")).values] == [4, 0, 2]
    expected = predictor("ner", sentences)
    assert [row["tokens"] for row in expected] == sentences
    assert [row["tags"] for row in found] == [row["tags"] for row in expected]
    text = "".join(
        "".join(f"{word}\t{tag}\n" for word, tag in zip(row["tokens"], row["tags"], strict=True)) + "\n"
        for row in found
    )
    assert (tmp_path / "out.conll").read_bytes() == text.encode()
    ended = minbert("evaluate", tagged_run, "--task", "ner", "--input", tmp_path / "out.conll")
    assert ended.status == 0 and "ner_accuracy          1.0000" in ended.out


def test_words_that_are_not_read_are_counted_in_a_file_too(tagged_run, tmp_path, minbert):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"tokens": ["the"] * count}) + "\n" for count in (3, 60)))
    ended = minbert("predict", tagged_run, "--task", "ner", "--input", file, "--output", output)
    assert ended.status == 0 and "ner: 14 of 63 words are not read" in ended.err  # 48 tokens, two of them special


def test_a_text_without_a_word_is_answered_or_refused_clearly(tagged_run, minbert, predictor):
    for text in ("", " ", "\u00a0"):
        ended = minbert("predict", tagged_run, "--task", "ner", "--text", text)
        assert ended.status == 0 and ended.out.strip() == "The text has no word."
    assert predictor("ner", ["", []]) == [{"tokens": [], "tags": [], "probabilities": [], "entities": []}] * 2
    ask = pipeline("minbert-multitask", model=str(tagged_run))
    assert [len(found["ner"]["tags"]) for found in ask(["a dog", "", " "], tasks="ner")] == [2, 0, 0]
    with pytest.raises(ValueError, match="Input 1: the sentence is empty"):
        ask(["a dog", ""])
    stock = pipeline("token-classification", model=str(tagged_run), model_kwargs={"active_task": "ner"})
    assert stock("") == []


def test_a_wrong_tag_ends_a_run_in_one_line_with_its_place(example, assistant, tmp_path, minbert):
    (tmp_path / "assistant").mkdir()
    for file in (assistant / "assistant").iterdir():
        text = file.read_text().replace("B-PLACE", "B-PLCE", 1) if file.name == "ner-train.conll" else file.read_text()
        (tmp_path / "assistant" / file.name).write_text(text)
    line = 1 + (tmp_path / "assistant" / "ner-train.conll").read_text().split("B-PLCE")[0].count("\n")
    ended = minbert("train", RECIPE, *example(tmp_path / "run", data_dir=tmp_path))
    assert ended.status == 2 and f"ner-train.conll, line {line}: a label of task 'ner' must be" in ended.err
    assert len([said for said in ended.err.splitlines() if "error" in said]) == 1


def test_pipelines_answer_with_and_without_the_package(tagged_run, answer):
    expected = [(one["type"], one["text"]) for one in answer["entities"]]
    options = {"model_kwargs": {"active_task": "ner"}, "aggregation_strategy": "simple"}
    assert entities(pipeline("token-classification", model=str(tagged_run), **options)(TEXT)) == expected
    ask = pipeline("minbert-multitask", model=str(tagged_run))
    both = ask([TEXT, "a dog"])
    assert both[0]["ner"]["tags"] == answer["tags"] and both[0].keys() == both[1].keys() == {"ner", "intent"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    given = json.dumps([str(tagged_run), TEXT])
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER], input=given, env=environment, capture_output=True, text=True, check=False
    )
    assert stranger.returncode == 0, stranger.stderr
    stock, own = json.loads(stranger.stdout.splitlines()[-1])
    assert entities(stock) == expected and own["ner"]["entities"] == answer["entities"]


def test_the_report_has_entities_tags_and_sentences(tagged_run, minbert, tmp_path):
    run = read_run(tagged_run)
    answers = run.answers["ner"]
    metrics = json.loads((tagged_run / "metrics.json").read_text())
    assert value_metrics(answers.task, answers.values, answers.labels)["entity_f1"] == metrics["eval_ner_entity_f1"]
    wrong = tmp_path / "other"
    wrong.mkdir()
    for path in tagged_run.iterdir():
        (wrong / path.name).symlink_to(path)
    (wrong / "predictions").unlink()
    (wrong / "predictions").mkdir()
    rows = lines_of(tagged_run / "predictions" / "ner-dev.jsonl")
    rows[0]["tags"] = ["B-PLACE" if tag == "O" else "O" for tag in rows[0]["tags"]]
    rows[1]["probabilities"][-1] = None  # not read
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (wrong / "predictions" / "ner-dev.jsonl").write_text(text)
    assert minbert("report", wrong, "--compare", tagged_run, "--output-dir", tmp_path / "report").status == 0
    said = (tmp_path / "report" / "report.md").read_text()
    for part in (
        "### Entities by type", "| PLACE |", "### Confusion of tags, by word", "1 word was not read",
        "predicted: PLACE", "The most wrong words, of", "ner, entity\\_f1 | 20 |", "more right tags",
    ):  # fmt: skip
        assert part in said, part
    assert "could not be made" not in said and "This part is missing" not in said


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra", "roberta"])
def test_an_export_is_the_librarys_token_classifier(tiny_model, tiny_tokenizer, ner, tmp_path, family):
    from hf_minbert.model.families import FAMILIES

    of = {
        "roberta": {"position_offset": 1, "type_vocab_size": 1}, "distilbert": {"type_vocab_size": 0},
        "electra": {"embedding_size": 32},
    }  # fmt: skip
    model = tiny_model([ner, "sst"], family=family, **of.get(family, {})).eval()
    assert family in FAMILIES
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    record = export(str(tmp_path / "model"), "classifier", tmp_path / "export", task="ner")
    assert record["class"].endswith("ForTokenClassification") and record["outputs"] == 7
    written = AutoModelForTokenClassification.from_pretrained(tmp_path / "export").eval()
    inputs = tiny_tokenizer(TEXT, return_tensors="pt")
    if family in ("roberta", "distilbert"):
        del inputs["token_type_ids"]
    with torch.inference_mode():
        torch.testing.assert_close(written(**inputs).logits, model(**inputs, task="ner").logits, rtol=1e-4, atol=1e-5)
    assert "token-classification" in (tmp_path / "export" / "README.md").read_text()


def test_the_exported_run_answers_in_the_stock_pipeline(tagged_run, answer, tmp_path):
    export(str(tagged_run), "classifier", tmp_path / "export", task="ner")
    tag = pipeline("token-classification", model=str(tmp_path / "export"), aggregation_strategy="simple")
    assert entities(tag(TEXT)) == [(one["type"], one["text"]) for one in answer["entities"]]


@pytest.mark.parametrize(("fields", "said"), [({"head": "mlp"}, "`head: mlp`"), ({"layers": "mix"}, "`layers: mix`")])
def test_what_the_librarys_class_cannot_compute_is_refused(tiny_config, ner, fields, said):
    from hf_minbert import MinBertError, Task

    task = Task(**{**vars(ner), **fields})
    with pytest.raises(
        MinBertError, match=f"Task 'ner' has {said}, which a BertForTokenClassification cannot compute"
    ):
        ToClassifier("model", tiny_config(tasks=[task]), {"ner": task})


def test_an_onnx_graph_answers_for_each_token(tagged_run, predictor, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    export(str(tagged_run), "onnx", tmp_path / "onnx")
    inputs = predictor.tokenizer([TEXT, "a dog"], padding=True, return_tensors="np")
    names = ("input_ids", "attention_mask", "token_type_ids")
    (found,) = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx").run(
        ["ner"], {name: inputs[name] for name in names}
    )
    with torch.inference_mode():
        ours = predictor.model(**{name: torch.tensor(inputs[name]) for name in names}, task="ner").logits.numpy()
    seen = inputs["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[seen], ours[seen], atol=1e-4)


def test_what_would_be_published(tagged_run, minbert):
    ended = minbert("publish", tagged_run, "me/assistant", "--dry-run")
    assert ended.status == 0, ended.err
    for part in (
        "pipeline_tag: token-classification", "type: token-classification", "type: text-classification",
        "| `ner` | entity_f1 |", 'pipeline("token-classification", model="me/assistant"', "spans.py",
        "one of 7 tags for each word", 'predictor("ner", ["Ada Lovelace wrote to Charles Babbage from London."])',
    ):  # fmt: skip
        assert part in ended.out, part
    assert "predictions" in ended.out.split("Not uploaded:")[1]


def test_the_page_marks_the_entities(predictor):
    *_, last = replies(predictor.model, predictor.tokenizer, "the man <plays> good film", "")
    assert '>good film <small class="mb-quiet">PLACE</small></span>' in last and "&lt;" in last
    assert last.count("mb-card") == 2 + 1


def test_a_run_that_crashed_goes_on_to_the_same_bits(example, tmp_path, monkeypatch):
    words = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    train(read_recipe(RECIPE, example(tmp_path / "whole", **words)))
    calls, original = [], MultiTaskTrainer.training_step

    def crashing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("cable pulled")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MultiTaskTrainer, "training_step", crashing)
        with pytest.raises(RuntimeError, match="cable pulled"):
            train(read_recipe(RECIPE, example(tmp_path / "run", **words)))
    train(read_recipe(RECIPE, [*example(tmp_path / "run", **words), "resume_from_checkpoint=true"]))
    files = ("model.safetensors", "predictions/ner-dev.jsonl", "predictions/intent-dev.csv")
    for name in files:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_predictions_go_on_where_they_were_stopped(tagged_run, assistant, predictor, tmp_path, monkeypatch):
    from hf_minbert.data.stream import RowStream
    from hf_minbert.evaluation.submission import CSV
    from hf_minbert.pretrained.prediction_file import predict_file, survey
    from hf_minbert.settings.tasks import DataFile

    file = DataFile(str(assistant / "assistant" / "ner-dev.conll"))
    monkeypatch.setattr(RowStream, "chunk_limits", (8, 10**6))
    rows = RowStream(file, predictor.task("ner"))
    found, output = survey(rows), tmp_path / "out.jsonl"
    assert found.rows == 20
    calls, original = [], Predictor.logits_of

    def stopping(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "logits_of", stopping)
        with pytest.raises(KeyboardInterrupt):
            predict_file(predictor, rows, found, {"ner": output}, CSV)
    assert not output.exists()
    predict_file(predictor, rows, found, {"ner": output}, CSV)
    assert [row["tags"] for row in lines_of(output)] == [
        row["tags"] for row in lines_of(tagged_run / "predictions" / "ner-dev.jsonl")
    ]
