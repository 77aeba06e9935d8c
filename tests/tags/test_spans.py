"""Entities from tags, and their scores: as conlleval counts them, beside numbers of seqeval 1.2.2."""

import random

import numpy as np
import pytest

from hf_minbert import MinBertError, Task
from hf_minbert.evaluation.analysis import by_type
from hf_minbert.evaluation.effects import influence
from hf_minbert.evaluation.metrics import task_metrics, value_metrics
from hf_minbert.evaluation.significance import bootstrap, statistics_of
from hf_minbert.model.inference import ragged
from hf_minbert.model.spans import as_read, joined, mark_entities, spans, split, words_of
from hf_minbert.settings.metrics import metrics_of

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def task_of(labels=BIO, **fields):
    return Task(name="ner", kind="tags", text_columns="tokens", label_column="tags", labels=labels, **fields)


def ids_of(labels, rows):
    return ragged([np.array([labels.index(tag) for tag in row.split()]) for row in rows])


def drawn(labels, sentences=200):
    """Made sentences of 1 to 12 words with labels, and predictions of which 7 of 10 are sure to be right."""
    draw = random.Random(0)
    gold = [[draw.choice(labels) for _ in range(draw.randint(1, 12))] for _ in range(sentences)]
    said = [[tag if draw.random() < 0.7 else draw.choice(labels) for tag in row] for row in gold]
    return tuple(ragged([np.array([*map(labels.index, row)]) for row in rows]) for rows in (said, gold))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O B-LOC", [("PER", 1, 3), ("LOC", 4, 5)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("O I-PER I-PER", [("PER", 1, 3)]),  # behind O
        ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),  # behind another type
        ("I-LOC O I-LOC", [("LOC", 0, 1), ("LOC", 2, 3)]),
        ("S-PER E-PER B-LOC I-LOC E-LOC I-LOC", [("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 5), ("LOC", 5, 6)]),
        ("U-PER B-LOC L-LOC L-LOC", [("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)]),
        ("B-A-B I-A-B I-A", [("A-B", 0, 2), ("A", 2, 3)]),  # a type may hold the sign
        ("O O", []),
    ],
)
def test_entities_begin_and_end_as_in_conlleval(tags, found):
    assert spans(tags.split()) == found


def test_labels_mark_entities_or_each_word():
    assert mark_entities(BIO) and mark_entities(("S-X", "E-X", "O"))
    assert not mark_entities(("NN", "VB", "O")) and not mark_entities(("O",)) and not mark_entities(("B-", "O"))


@pytest.mark.parametrize(
    ("said", "gold", "scores"),
    [
        (["B-PER I-PER O B-LOC"], ["B-PER I-PER O B-LOC"], (1, 1, 1)),
        (["B-PER I-PER O B-LOC"], ["B-PER O O B-LOC"], (0.5, 0.5, 0.5)),
        (["O I-PER I-PER O"], ["O B-PER I-PER O"], (1, 1, 1)),
        (["B-PER B-PER O"], ["B-PER I-PER O"], (0, 0, 0)),
        (["I-PER B-PER I-PER", "O O"], ["B-PER B-PER I-PER", "I-LOC O"], (1, 2 / 3, 0.8)),
        (["O O"], ["O O"], (0, 0, 0)),  # nothing to find
    ],
)
def test_scores_are_seqevals(said, gold, scores):
    found = value_metrics(task_of(), ids_of(BIO, said), ids_of(BIO, gold))
    names = ("entity_precision", "entity_recall", "entity_f1")
    assert tuple(found[name] for name in names) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("labels", "scores"),
    [
        (BIO, (0.711864406779661, 0.7102593010146562, 0.7110609480812641)),
        (
            ("O", "B-P", "I-P", "E-P", "S-P", "B-L", "I-L", "E-L", "S-L"),
            (0.7531831537708129, 0.7546614327772326, 0.753921568627451),
        ),
    ],
)
def test_scores_of_made_sentences_are_seqevals(labels, scores):
    said, gold = drawn(list(labels))
    found = value_metrics(task_of(labels), said, gold)
    assert [found[f"entity_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(scores, abs=1e-12)
    types = by_type(task_of(labels), said, gold)
    hits = sum(of.recall * of.support for of in types)
    assert hits / sum(of.support for of in types) == pytest.approx(found["entity_recall"])
    assert sum(of.predicted for of in types) == sum(len(spans([labels[i] for i in row])) for row in said)


def test_a_task_has_the_metrics_that_go_with_its_labels():
    assert task_of().metric == "entity_f1"
    assert [*metrics_of(task_of())] == ["entity_f1", "entity_precision", "entity_recall", "accuracy"]
    plain = task_of(("DET", "NOUN", "VERB"))
    assert plain.metric == "accuracy" and [*metrics_of(plain)] == ["accuracy", "macro_f1"]
    with pytest.raises(MinBertError, match=r"Unknown metric 'macro_f1'\. .*accuracy, entity_f1"):
        task_of(metric="macro_f1")


def test_words_that_were_not_read_are_wrong_and_no_entity():
    task = task_of()
    sure = np.eye(5, dtype=np.float32)[[1, 2, 0]] * 9  # B-PER I-PER O
    unread = np.full((2, 5), -np.inf, dtype=np.float32)
    logits, labels = ragged([np.concatenate([sure, unread]), sure]), ids_of(BIO, ["B-PER I-PER O O B-LOC"] + ["O O O"])
    found = task_metrics(task, logits, labels)
    assert found["accuracy"] == 4 / 8 and found["unread_words"] == 2  # an O that was not read is no hit
    assert found["entity_precision"] == 1 / 2 and found["entity_recall"] == 1 / 2
    with pytest.raises(MinBertError, match="'ner', row 1: each word needs a prediction and a label. Found 3 and 2"):
        task_metrics(task, logits, ids_of(BIO, ["O O O O O", "O O"]))


def test_a_diverged_model_scores_0_and_is_told_from_words_that_were_not_read():
    logits = ragged([np.full((2, 5), np.nan, dtype=np.float32)])
    found = task_metrics(task_of(), logits, ids_of(BIO, ["O O"]))
    assert found["nonfinite_predictions"] == 1 and found["accuracy"] == 0


@pytest.mark.parametrize("labels", [BIO, ("DET", "NOUN", "VERB")])
def test_fast_statistics_are_the_metrics_of_the_drawn_sentences(labels):
    task, (said, gold) = task_of(labels), drawn(list(labels), 30)
    said[3] = np.where(np.arange(len(said[3])) > 1, -1, said[3])
    rows = np.random.default_rng(0).integers(0, 30, 30)
    found = {name: statistic(rows) for name, statistic in statistics_of(task, said, gold).items()}
    assert found == pytest.approx(value_metrics(task, said[rows], gold[rows]))


def test_the_bootstrap_draws_sentences():
    said, gold = drawn(list(BIO), 40)
    draws = bootstrap(statistics_of(task_of(), said, gold)["entity_f1"], 40)
    score = value_metrics(task_of(), said, gold)["entity_f1"]
    assert draws.min() < score < draws.max() and abs(draws.mean() - score) < 0.02


@pytest.mark.parametrize("metric", ["entity_f1", "accuracy"])
def test_what_a_sentence_adds_is_what_is_lost_without_it(metric):
    task, (said, gold) = task_of(), drawn(list(BIO), 25)
    added = influence(task, metric, said, gold)
    assert added.shape == (25,) and abs(added.sum()) < 1e-9
    without = [value_metrics(task, np.delete(said, row), np.delete(gold, row))[metric] for row in range(25)]
    assert np.argmax(added) == np.argmin(without)


def test_words_joined_are_split_again():
    spaces = [chr(code) for code in range(0x3001) if chr(code).isspace()]
    words = ["10 000", "don't", *(f"New{space}York" for space in spaces), *(f"{space}x{space}" for space in spaces)]
    assert split(joined(words)) == words and split(joined([])) == []
    assert as_read(joined(words)) == " ".join(words)
    text = "Ada's (first) program, v2."
    assert [text[a:b] for a, b in words_of(text)] == ["Ada", "'", "s", "(", "first", ")", "program", ",", "v2", "."]
