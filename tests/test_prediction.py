"""A model over sentences: the same answers as the model's own logits, whatever the order, length and batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import softmax

from hf_minbert import MinBertError, Predictor
from hf_minbert.evaluation.metrics import task_metrics
from hf_minbert.prediction import score

SENTENCES = [
    "good",
    "the man is not very good at all .",
    "bad film",
    "a",
    "why is it not good , and how ?",
    "very bad",
]
OTHERS = ["bad", "dog", "the film is bad , is it not ?", "a man plays", "it", "good good good good"]


@pytest.fixture(scope="module")
def predictor(tiny_model, tiny_tokenizer) -> Predictor:
    return Predictor(tiny_model(), tiny_tokenizer)


def own_logits(predictor: Predictor, task: str, *texts: str) -> torch.Tensor:
    """What the model itself says about one sentence or pair, without any padding."""
    with torch.no_grad():
        return predictor.model(task=task, **predictor.tokenizer(*texts, return_tensors="pt")).logits[0]


# ---- Answers


def test_classes(predictor):
    for text, answer in zip(SENTENCES, predictor("sst", SENTENCES), strict=True):
        expected = softmax(own_logits(predictor, "sst", text), dim=-1)
        labels = predictor.tasks["sst"].labels
        assert answer["prediction"] == int(expected.argmax())
        assert answer["label"] == labels[answer["prediction"]]
        assert list(answer["probabilities"]) == list(labels)
        assert list(answer["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-5)


def test_binary(predictor):
    for pair, answer in zip(zip(SENTENCES, OTHERS, strict=True), predictor("para", SENTENCES, OTHERS), strict=True):
        expected = torch.sigmoid(own_logits(predictor, "para", *pair)).item()
        assert answer["probabilities"] == pytest.approx(
            {"not duplicate": 1 - expected, "duplicate": expected}, abs=1e-5
        )
        assert answer["prediction"] == int(expected > 0.5)
        assert answer["label"] == ("not duplicate", "duplicate")[answer["prediction"]]


def test_scores_stay_as_predicted_unless_they_are_to_be_clipped(tiny_model, tiny_tokenizer):
    predictor = Predictor(tiny_model(["sts"]), tiny_tokenizer)
    pairs = list(zip(SENTENCES, OTHERS, strict=True))
    head = predictor.model.heads.get_submodule("sts").linear
    with torch.no_grad():  # scores far outside of 0 to 5, on both sides
        head.weight.mul_(40)
        head.bias.sub_(torch.stack([own_logits(predictor, "sts", *pair) for pair in pairs]).mean())
    expected = [own_logits(predictor, "sts", *pair).item() for pair in pairs]
    assert min(expected) < 0 and max(expected) > 5
    answers = predictor("sts", SENTENCES, OTHERS)
    assert [answer["prediction"] for answer in answers] == pytest.approx(expected, abs=1e-3)
    assert all(answer.keys() == {"prediction"} for answer in answers)
    clipped = [answer["prediction"] for answer in predictor("sts", SENTENCES, OTHERS, clip_scores=True)]
    assert clipped == pytest.approx([min(max(value, 0), 5) for value in expected], abs=1e-3)


def test_the_sides_of_a_pair_are_not_the_same(predictor):
    assert predictor("sts", ["good film"], ["bad"]) != predictor("sts", ["bad"], ["good film"])


def test_clipping_leaves_classes_alone(predictor):
    assert predictor("sst", SENTENCES, clip_scores=True) == predictor("sst", SENTENCES)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_batch_size_and_order_change_nothing(tiny_model, tiny_tokenizer, predictor, batch_size):
    rows = [{"sentence": text} for text in SENTENCES]
    expected = predictor.logits("sst", rows)
    batched = Predictor(tiny_model(), tiny_tokenizer, batch_size=batch_size)
    np.testing.assert_allclose(batched.logits("sst", rows), expected, atol=1e-5)
    np.testing.assert_allclose(batched.logits("sst", rows[::-1]), expected[::-1], atol=1e-5)


def test_rows_may_come_with_labels_and_other_columns(predictor):
    bare = [{"sentence": text} for text in SENTENCES]
    rows = [{"id": "x", "label": 4, "other": None, **row} for row in bare]
    assert np.array_equal(predictor.logits("sst", rows), predictor.logits("sst", bare))


def test_dropout_is_off(tiny_model, tiny_tokenizer):
    model = tiny_model(hidden_dropout_prob=0.5).train()
    predictor = Predictor(model, tiny_tokenizer)
    assert predictor("sst", SENTENCES) == predictor("sst", SENTENCES)


def test_no_sentence_gives_no_answer(predictor):
    assert predictor("sst", []) == []
    assert predictor("sts", [], []) == []


def test_a_blank_sentence_gets_an_answer(predictor):
    assert len(predictor("sst", [""])) == 1


@pytest.mark.parametrize(("task", "sides"), [("sst", 1), ("sts", 2)])
def test_a_sentence_longer_than_the_model_is_cut(predictor, task, sides):
    long = "good " * 1000
    assert len(predictor(task, *[[long]] * sides)) == 1
    assert predictor("sst", [long]) == predictor("sst", [long + "bad " * 10])


def test_progress_is_told_up_to_the_end(tiny_model, tiny_tokenizer):
    told = []
    rows = [{"sentence": text} for text in SENTENCES]
    Predictor(tiny_model(), tiny_tokenizer, batch_size=4).logits("sst", rows, lambda *seen: told.append(seen))
    assert told == [(4, 6), (6, 6)]


# ---- Scoring


def test_scores_are_the_metrics_of_each_task_and_the_mean(predictor):
    rows = {
        "sst": [{"sentence": text, "label": place % 5} for place, text in enumerate(SENTENCES)],
        "sts": [
            {"sentence1": one, "sentence2": other, "label": place / 2}
            for place, (one, other) in enumerate(zip(SENTENCES, OTHERS, strict=True))
        ],
    }
    datasets = {name: Rows(lines) for name, lines in rows.items()}
    metrics, decoded = score(predictor, datasets)
    expected = {}
    for name, lines in rows.items():
        labels = np.array([row["label"] for row in lines])
        scores = task_metrics(predictor.tasks[name], predictor.logits(name, lines), labels)
        expected.update({f"{name}_{metric}": value for metric, value in scores.items()})
    expected["overall"] = (expected["sst_accuracy"] + expected["sts_pearson"]) / 2
    assert metrics == pytest.approx(expected)
    assert decoded["sst"].values.tolist() == [answer["prediction"] for answer in predictor("sst", SENTENCES)]


class Rows(list):
    """Rows that give a column by its name too, as a `datasets.Dataset` does."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


# ---- Loading


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_answers_as_before(saved, predictor):
    loaded = Predictor.from_pretrained(saved, batch_size=2)
    assert loaded.batch_size == 2
    assert list(loaded.tasks) == ["sst", "para", "sts"]
    rows = [{"sentence": text} for text in SENTENCES]
    np.testing.assert_allclose(loaded.logits("sst", rows), predictor.logits("sst", rows), atol=1e-5)


def test_a_model_saved_in_half_precision_computes_in_single(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = Predictor.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_a_plain_encoder_is_refused(tiny_bert):
    with pytest.raises(MinBertError, match="has no tasks: it is a plain encoder. Train it"):
        Predictor.from_pretrained(tiny_bert)


def test_loading_prints_no_report_of_the_library(saved, capfd):
    Predictor.from_pretrained(saved)
    assert "LOAD REPORT" not in capfd.readouterr().err


# ---- Refused


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: p("quora", ["a"]), "Unknown task 'quora'. Choose from: para, sst, sts."),
        (lambda p: p("sst", "a"), "must be lists of sentences. Write one sentence as [sentence]."),
        (lambda p: p("sts", ["a"], "b"), "must be lists of sentences"),
        (lambda p: p("sts", ["a"]), "Task 'sts' needs `text_pairs`."),
        (lambda p: p("sst", ["a"], ["b"]), "Task 'sst' takes no `text_pairs`."),
        (lambda p: p("sts", ["a", "b"], ["c"]), "must be equally long. Found 2 and 1."),
        (lambda p: p("sst", [None]), "Task 'sst', row 0: 'sentence' must be text. Found None."),
        (lambda p: p.logits("sst", [{"text": "a"}]), "no column 'sentence'. Columns found: text."),
        (lambda p: p.logits("sst", []), "the dataset is empty"),
        (lambda p: Predictor(p.model, p.tokenizer, batch_size=0), "`batch_size` must be at least 1. Found 0."),
        (lambda p: Predictor.from_pretrained("/no/such/folder"), "There is no model /no/such/folder"),
    ],
)
def test_a_mistake_is_said_in_words(predictor, call, said):
    with pytest.raises(MinBertError) as refusal:
        call(predictor)
    assert said in str(refusal.value)
