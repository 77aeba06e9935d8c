"""A model over sentences: the same answers as the model's own logits, whatever the order, length and batch."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import softmax
from transformers import pipeline

from hf_minbert import DivergedError, MinBertError, MinBertModel, Predictor, get_tasks
from hf_minbert.evaluation.metrics import task_metrics
from hf_minbert.model.inference import room_of
from hf_minbert.pretrained.prediction import score

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


def test_sentences_may_come_from_an_iterator(predictor):
    assert predictor("sst", iter(SENTENCES)) == predictor("sst", SENTENCES)
    pairs = (text for text in SENTENCES), dict.fromkeys(OTHERS, 0).keys()
    assert len(pairs[1]) == len(OTHERS)
    assert predictor("sts", pairs[0], list(pairs[1])) == predictor("sts", SENTENCES, OTHERS)
    assert predictor("sst", iter([])) == []


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
    Predictor(tiny_model(), tiny_tokenizer, batch_size=1).logits("sst", rows, lambda *seen: told.append(seen))
    assert len(told) > 1
    assert told == [(done, 6) for done, _ in told] and sorted(set(told)) == told and told[-1] == (6, 6)


def test_a_batch_holds_what_rows_of_full_length_would_take(tiny_model, tiny_tokenizer):
    """A batch of two rows of 64 tokens: one of 64 leaves room for one more, and rows of 3 tokens come by 42."""
    predictor, sizes = Predictor(tiny_model(), tiny_tokenizer, batch_size=2), []
    predictor.model.bert.register_forward_pre_hook(
        lambda module, inputs, given: sizes.append(given["input_ids"].shape), with_kwargs=True
    )
    predictor.logits("sst", [{"sentence": text} for text in [*["good"] * 50, "bad " * 100, "good " * 30]])
    assert sizes == [(2, 64), (42, 3), (8, 3)]


def test_a_batch_on_a_cpu_is_at_most_32_mb_wide(tiny_config):
    """By hand: 8,388,608 numbers of 4 bytes; a layer of 1,536 has room for 5,461 tokens, and never less than a row."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    config = tiny_config(intermediate_size=1536, max_position_embeddings=512)
    assert [room_of(config, size, cpu) for size in (1, 10, 32)] == [512, 5120, 5461]
    assert room_of(config, 32, gpu) == 32 * 512
    wide = tiny_config(intermediate_size=2**20, max_position_embeddings=512)
    assert room_of(wide, 32, cpu) == 512


def test_the_random_numbers_of_a_training_stay(predictor):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    predictor("sst", SENTENCES)
    assert torch.equal(torch.get_rng_state(), before)


def test_half_precision_answers_alike_and_leaves_the_weights(tiny_model, tiny_tokenizer, predictor):
    rows = [{"sentence1": one, "sentence2": other} for one, other in zip(SENTENCES, OTHERS, strict=True)]
    half = Predictor(tiny_model(), tiny_tokenizer, dtype="bfloat16")
    found, expected = half.logits("sts", rows), predictor.logits("sts", rows)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() < 0.1 < np.ptp(expected)
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


# ---- Several tasks over the same rows

PAIRS = [{"sentence1": one, "sentence2": other} for one, other in zip(SENTENCES, OTHERS, strict=True)]


def passes(predictor: Predictor, tasks: list[str]) -> int:
    """How often an encoder runs for the pairs; checks that each task answers as it does alone."""
    runs = []
    encoders = {predictor.model.encoder_of(task) for task in tasks}
    hooks = [encoder.register_forward_pre_hook(lambda *_: runs.append(1)) for encoder in encoders]
    found = predictor.logits_of(tasks, PAIRS)
    for hook in hooks:
        hook.remove()
    assert list(found) == tasks
    for task in tasks:
        expected = torch.stack([own_logits(predictor, task, *row.values()) for row in PAIRS])
        np.testing.assert_allclose(found[task], expected, atol=1e-5)
    return len(runs)


@pytest.mark.parametrize(
    ("second", "changes", "expected"),
    [
        ({}, {}, 1),
        ({"layers": "mix", "pooling": "mean"}, {}, 1),
        ({}, {"private_layers": 1}, 2),
        ({}, {"private_encoders": True}, 2),
    ],
    ids=["shared", "another head", "private layers", "private encoders"],
)
def test_tasks_share_a_pass_where_they_share_the_layers(tiny_model, tiny_tokenizer, second, changes, expected):
    tasks = get_tasks({"para": None, "sts": second})
    predictor = Predictor(tiny_model(tasks, **changes), tiny_tokenizer)
    assert passes(predictor, ["para"]) == passes(predictor, ["sts"]) == 1
    assert passes(predictor, ["para", "sts"]) == passes(predictor, ["sts", "para"]) == expected


def test_tasks_that_encode_pairs_apart_share_a_pass_of_their_own(tiny_model, tiny_tokenizer):
    apart = {"pair_encoding": "bi"}
    copies = {name: {"kind": "score", "range": [0, 1], "text_columns": ["sentence1", "sentence2"]} for name in "ab"}
    tasks = get_tasks({"para": apart, "sts": None, "a": copies["a"], "b": {**copies["b"], **apart}})
    predictor, told, runs = Predictor(tiny_model(tasks), tiny_tokenizer), [], []
    predictor.model.bert.register_forward_pre_hook(lambda *_: runs.append(1))
    alone = {name: predictor.logits(name, PAIRS) for name in ("para", "sts", "a", "b")}
    runs.clear()
    found = predictor.logits_of(list(alone), PAIRS, lambda *seen: told.append(seen))
    assert len(runs) == 2
    assert told == [(6, 12), (12, 12)]
    for name, expected in alone.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-5)


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


def test_a_model_without_tasks_is_refused(tiny_config, tiny_tokenizer):
    with pytest.raises(MinBertError, match="The model 'MinBertModel' has no tasks"):
        Predictor(MinBertModel(tiny_config()), tiny_tokenizer)


def test_loading_prints_no_report_of_the_library(saved, capfd):
    Predictor.from_pretrained(saved)
    assert "LOAD REPORT" not in capfd.readouterr().err


# ---- Refused


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: p("quora", ["a"]), "Unknown task 'quora'. Choose from: para, sst, sts."),
        (lambda p: p("sst", "a"), "`texts` must be a list of sentences. Write one sentence as [sentence]."),
        (lambda p: p("sts", ["a"], "b"), "`text_pairs` must be a list of sentences. Write one"),
        (lambda p: p("sst", {"a": 1}), "`texts` must be a list of sentences. Found a dict."),
        (lambda p: p("sts", {"a", "b"}, ["a", "b"]), "`texts` must be a list of sentences. Found a set."),
        (lambda p: p("sst", 7), "`texts` must be a list of sentences. Found a int."),
        (lambda p: p("sst", pandas.DataFrame({"sentence": ["a", "b"]})), "a list of sentences. Found a DataFrame."),
        (lambda p: p("sst", np.array("a")), "`texts` must be a list of sentences. Found a ndarray."),
        (lambda p: p("sts", ["a"]), "Task 'sts' needs `text_pairs`."),
        (lambda p: p("sst", ["a"], ["b"]), "Task 'sst' takes no `text_pairs`."),
        (lambda p: p("sts", ["a", "b"], ["c"]), "must be equally long. Found 2 and 1."),
        (
            lambda p: p("sts", ["a"], ["a \ud83d"]),
            "row 0: 'sentence2' holds half a character (a lone surrogate). Found",
        ),
        (lambda p: p("sst", [None]), "Task 'sst', row 0: 'sentence' must be text. Found None."),
        (lambda p: p.logits("sst", [{"text": "a"}]), "no column 'sentence'. Columns found: text."),
        (lambda p: p.logits("sst", []), "the dataset is empty"),
        (
            lambda p: p.logits("sst", [{"input_ids": [2, 9, 3]}, {"input_ids": [2, 86, 3]}]),
            "Task 'sst', row 1: `input_ids` must be from 0 to 85, as the model's `vocab_size` is 86. Found 2 to 86.",
        ),
        (lambda p: Predictor(p.model, p.tokenizer, batch_size=0), "`batch_size` must be at least 1. Found 0."),
        (lambda p: Predictor(p.model, p.tokenizer, dtype="bf16"), "Unknown `dtype` 'bf16'."),
        (lambda p: Predictor.from_pretrained("/no/such/folder"), "There is no model /no/such/folder"),
    ],
)
def test_a_mistake_is_said_in_words(predictor, call, said):
    with pytest.raises(MinBertError) as refusal:
        call(predictor)
    assert said in str(refusal.value)


@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_a_diverged_model_gives_no_answers(tiny_model, tiny_tokenizer, task):
    model = tiny_model()
    with torch.no_grad():
        getattr(model.heads, task).linear.bias.fill_(float("nan"))
    predictor = Predictor(model, tiny_tokenizer)
    pair = None if task == "sst" else ["a dog"]
    with pytest.raises(DivergedError, match=f"{task}: 1 of 1 outputs of the model are not finite: it has diverged"):
        predictor(task, ["a film"], pair)
    rows = [{"sentence": "a film", "sentence1": "a film", "sentence2": "a dog", "id": "1", "label": 1}] * 2
    others = [name for name in ("sst", "para", "sts") if name != task]
    data = Dataset.from_list(rows)
    metrics, decoded = score(predictor, dict.fromkeys(("sst", "para", "sts"), data))
    assert [*decoded] == others and metrics[f"{task}_nonfinite_predictions"] == 1.0
    asked = pipeline("minbert-multitask", model=model, tokenizer=tiny_tokenizer, device="cpu", tasks=[task])
    with pytest.raises(ValueError, match="1 of 1 outputs of the model are not finite"):
        asked("a film" if pair is None else ("a film", "a dog"))
