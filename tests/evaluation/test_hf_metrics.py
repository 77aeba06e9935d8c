"""The metrics behind `evaluate`'s interface: by hand, combined, and equal to what the trainer reports."""

import importlib
import socket
import sys

import evaluate
import numpy as np
import pytest

from hf_minbert import TASKS, MinBertError
from hf_minbert.evaluation.hf_metrics import Accuracy, Pearson, PrecisionRecallF1, Spearman
from hf_minbert.evaluation.metrics import task_metrics


def test_precision_recall_f1_by_hand():
    # class 0: 2 of 3 predictions right, 2 of 2 found; class 1: 1 of 1 and 1 of 2; class 2: never there
    scores = PrecisionRecallF1(labels=["a", "b", "c"]).compute(predictions=[0, 0, 0, 1], references=[0, 0, 1, 1])
    assert scores["precision_a"] == pytest.approx(2 / 3) and scores["recall_a"] == 1 and scores["f1_a"] == 0.8
    assert scores["precision_b"] == 1 and scores["recall_b"] == 0.5 and scores["f1_b"] == pytest.approx(2 / 3)
    assert scores["precision_c"] == scores["recall_c"] == scores["f1_c"] == 0
    assert scores["macro_recall"] == pytest.approx(0.5)
    assert scores["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 3)


def test_correlations_by_hand():
    predictions, references = [1.0, 2.0, 3.0, 10.0], [1.0, 2.0, 3.0, 4.0]
    assert Spearman().compute(predictions=predictions, references=references) == {"spearman": 1.0}
    expected = np.corrcoef(predictions, references)[0, 1]
    assert Pearson().compute(predictions=predictions, references=references)["pearson"] == pytest.approx(expected)
    assert Pearson().compute(predictions=[2.5, 2.5], references=[1.0, 2.0]) == {"pearson": 0.0}


def test_they_combine_and_take_batches():
    metric = evaluate.combine([Accuracy(), PrecisionRecallF1(labels=["no", "yes"])])
    for predictions, references in (([0, 1], [0, 1]), ([1], [0])):
        metric.add_batch(predictions=predictions, references=references)
    scores = metric.compute()
    assert scores["accuracy"] == pytest.approx(2 / 3) and scores["precision_yes"] == 0.5 and "macro_f1" in scores
    scores = evaluate.combine([Pearson(), Spearman()]).compute(predictions=[0.0, 1.0], references=[0.0, 5.0])
    assert scores == pytest.approx({"pearson": 1.0, "spearman": 1.0})


def test_they_agree_with_the_trainers_metrics():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(50, 5)), draw.integers(0, 4, 50)  # class 4 is never right
    ours = task_metrics(TASKS["sst"], logits, labels)
    theirs = PrecisionRecallF1(labels=TASKS["sst"].labels).compute(predictions=logits.argmax(1), references=labels)
    assert theirs["macro_f1"] == pytest.approx(ours["macro_f1"])


def test_labels_must_be_names():
    with pytest.raises(MinBertError, match="two or more classes"):
        PrecisionRecallF1(labels="ab")


@pytest.mark.parametrize(
    ("metric", "predictions", "message"),
    [
        ("scores of classes", [0, 2], "from 0 to 1"),
        ("scores of classes", [0, -1], "from 0 to 1"),
        ("accuracy", [0.7, 1.0], "whole numbers"),
        ("accuracy", [], "empty"),
        ("pearson", [], "empty"),
    ],
)
def test_what_cannot_be_scored_is_refused(metric, predictions, message):
    made = {"accuracy": Accuracy(), "pearson": Pearson(), "scores of classes": PrecisionRecallF1(labels=["a", "b"])}
    with pytest.raises(MinBertError, match=message):
        made[metric].compute(predictions=predictions, references=[0, 1][: len(predictions)])


def test_no_network_is_needed(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.delitem(sys.modules, "hf_minbert.evaluation.hf_metrics")  # loading it needs none either
    metrics = importlib.import_module("hf_minbert.evaluation.hf_metrics")
    assert metrics.Accuracy().compute(predictions=[1], references=[1])["accuracy"] == 1.0
