"""The pipeline that asks all tasks: the answers of `Predictor`, whatever the inputs come as."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import Dataset
from transformers import pipeline

import hf_minbert.model.pipeline_minbert as module
from hf_minbert import MultiTaskPipeline, Predictor, get_tasks

BI = {"pair_encoding": "bi", "pooling": "mean"}
#: Each kind of task, each way to read a pair.
TASKS = {
    "sst": {"pooling": "mean", "layers": "mix"},
    "cfimdb": None,
    "para": None,
    "sts": {**BI, "head": "cosine"},
    "nli": {**BI, "join": "concat_diff_product"},
}
SENTENCES = ["good", "the man is not very good at all .", "bad film", "good " * 100, "why is it not good , and how ?"]
OTHERS = ["bad", "dog", "the film is bad , is it not ?", "bad", "a man plays"]
PAIRS = list(zip(SENTENCES, OTHERS, strict=True))


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(get_tasks(TASKS), private_layers=1).eval()


@pytest.fixture(scope="module")
def predictor(model, tiny_tokenizer):
    return Predictor(model, tiny_tokenizer)


@pytest.fixture(scope="module")
def ask(model, tiny_tokenizer):
    return pipeline("minbert-multitask", model=model, tokenizer=tiny_tokenizer, device="cpu")


def assert_as_predicted(answers, predictor, task, firsts, seconds=None):
    spec = predictor.tasks[task]
    for answer, expected in zip(answers, predictor(task, firsts, seconds), strict=True):
        if spec.kind == "score":
            wanted = {"score": pytest.approx(expected["prediction"], abs=1e-5), "range": list(spec.range)}
        else:
            scores = expected["probabilities"]
            wanted = {"label": expected["label"], "scores": pytest.approx(scores, abs=1e-5)}
            wanted["score"] = pytest.approx(scores[expected["label"]], abs=1e-5)
        assert answer[task] == wanted


# ---- Answers


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_all_tasks_answer_as_the_predictor_does(ask, predictor, batch_size):
    singles, pairs = ask(SENTENCES, batch_size=batch_size), ask(PAIRS, batch_size=batch_size)
    assert [list(answer) for answer in singles] == [["sst", "cfimdb"]] * len(SENTENCES)
    assert [list(answer) for answer in pairs] == [["para", "sts", "nli"]] * len(PAIRS)
    for task in ("sst", "cfimdb"):
        assert_as_predicted(singles, predictor, task, SENTENCES)
    for task in ("para", "sts", "nli"):
        assert_as_predicted(pairs, predictor, task, SENTENCES, OTHERS)


def test_sentences_and_pairs_may_come_mixed(ask):
    mixed = ask([SENTENCES[0], PAIRS[1], SENTENCES[2], PAIRS[3]])
    expected = [ask(SENTENCES[0]), ask(PAIRS[1]), ask(SENTENCES[2]), ask(PAIRS[3])]
    for answer, alone in zip(mixed, expected, strict=True):
        assert list(answer) == list(alone)
        for task in answer:
            assert answer[task]["score"] == pytest.approx(alone[task]["score"], abs=1e-5)


class Rows(Dataset):
    """A map-style dataset of torch, which does not say by an `IndexError` where it ends."""

    def __len__(self):
        return len(PAIRS)

    def __getitem__(self, index):
        return dict(zip(("text", "text_pair"), PAIRS[index % len(PAIRS)], strict=True))


def test_whatever_the_inputs_come_as_the_answers_are_the_same(ask):
    expected = ask(PAIRS)
    rows = [dict(zip(("text", "text_pair"), pair, strict=True)) for pair in PAIRS]
    assert ask(rows) == ask([list(pair) for pair in PAIRS]) == expected
    for lazy in ((pair for pair in PAIRS), Rows(), iter(rows)):
        answers = ask(lazy)
        assert not isinstance(answers, list)
        assert list(answers) == expected
    assert ask({"text": "good", "text_pair": None}) == ask({"text": "good"}) == ask(("good",)) == ask("good")
    assert ask([]) == []


def test_what_is_streamed_is_read_chunk_by_chunk(ask, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    read = []
    answers = ask(read.append(text) or text for text in SENTENCES)
    assert not read
    first = next(answers)
    assert len(read) == 2
    rest = list(answers)
    monkeypatch.undo()
    for answer, whole in zip([first, *rest], ask(SENTENCES), strict=True):
        assert answer["sst"]["scores"] == pytest.approx(whole["sst"]["scores"], abs=1e-5)


def test_tasks_that_read_alike_share_a_pass_and_no_padding_goes_through(tiny_model, tiny_tokenizer):
    model = tiny_model(["sst", "cfimdb", "para", "sts"])
    ask, seen = pipeline("minbert-multitask", model=model, tokenizer=tiny_tokenizer, device="cpu"), []
    model.bert.encoder.layer[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    ask([*SENTENCES, *PAIRS])
    given = [*((text,) for text in SENTENCES), *PAIRS]
    lengths = [len(tiny_tokenizer(*texts, truncation=True)["input_ids"]) for texts in given]
    assert seen == [(1, sum(lengths[:5])), (1, sum(lengths[5:]))]
    seen.clear()
    ask(PAIRS, tasks=["sts", "para"])
    assert len(seen) == 1


def test_asked_tasks_alone_answer_in_the_order_they_are_asked(ask, model, tiny_tokenizer):
    assert list(ask(PAIRS[0], tasks=["sts", "para"])) == ["sts", "para"]
    assert ask(PAIRS[0], tasks="sts") == ask(PAIRS[0], tasks=["sts"]) == {"sts": ask(PAIRS[0])["sts"]}
    always = pipeline("minbert-multitask", model=model, tokenizer=tiny_tokenizer, device="cpu", tasks=["nli"])
    assert list(always(PAIRS[0])) == ["nli"]
    assert list(always(PAIRS[0], tasks=["para"])) == ["para"]


def test_scores_are_clipped_when_asked(tiny_model, tiny_tokenizer):
    model = tiny_model(["sts"])
    with torch.no_grad():
        model.heads.sts.linear.bias.fill_(9)
    ask = pipeline("minbert-multitask", model=model, tokenizer=tiny_tokenizer, device="cpu")
    assert ask(PAIRS[0])["sts"]["score"] > 5
    assert ask(PAIRS[0], clip_scores=True) == {"sts": {"score": 5.0, "range": [0, 5]}}


def test_answers_are_plain_json(ask):
    answers = ask([SENTENCES[0], PAIRS[0]])
    assert json.loads(json.dumps(answers)) == answers


# ---- Refused


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ask: ask("good", tasks=["sst", "stss"]), "Unknown task 'stss'. This model has: sst, cfimdb, para"),
        (lambda ask: ask("good", tasks=[]), "`tasks` is empty"),
        (lambda ask: ask("good", tasks=["sts"]), "Input 0 is one sentence, which sts cannot read: expected a pair"),
        (lambda ask: ask(PAIRS[:1], tasks=["para", "sst"]), "Input 0 is a pair of sentences, which sst cannot read"),
        (lambda ask: ask(["good", ""]), "Input 1: the sentence is empty. Found ''"),
        (lambda ask: ask(("good", "  ")), "Input 0: the sentence is empty"),
        (lambda ask: ask({"text": "good", "text_pairs": "bad"}), "must hold `text` and perhaps `text_pair`. Found"),
        (lambda ask: ask(["good", "a \ud83d"]), "Input 1: a text holds half a character (a lone surrogate). Found"),
        (lambda ask: ask({1: "good"}), "must hold `text` and perhaps `text_pair`. Found {1: 'good'}"),
        (lambda ask: ask([None]), "Input 0: expected a sentence, or a pair as (text, text_pair). Found None"),
        (lambda ask: ask(("a", "b", "c")), "Input 0: expected a sentence, or a pair"),
        (lambda ask: ask(3), "Expected a sentence, a pair, or several in a list or dataset. Found a int"),
        (lambda ask: ask("good", batch_size=-1), "`batch_size` must be at least 1. Found -1"),
        (lambda ask: ask("good", batch_size=0), "`batch_size` must be at least 1. Found 0"),
    ],
)
def test_a_mistake_is_said_in_words(ask, call, said):
    with pytest.raises(ValueError) as refusal:
        call(ask)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_input_that_no_task_can_read_is_refused(tiny_model, tiny_tokenizer):
    ask = pipeline("minbert-multitask", model=tiny_model(["para", "sts"]), tokenizer=tiny_tokenizer, device="cpu")
    with pytest.raises(ValueError, match="Input 0 is one sentence, which para and sts cannot read: expected a pair"):
        ask("good")


def test_a_mistake_far_down_is_found_under_its_number(ask, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    answers = ask(iter(["good", "bad", "film", ""]))
    assert len([next(answers), next(answers)]) == 2
    with pytest.raises(ValueError, match="Input 3: the sentence is empty"):
        next(answers)


def test_another_model_is_refused(tiny_bert):
    with pytest.raises(ValueError, match="needs a MinBERT with tasks. Found a BertForSequenceClassification"):
        pipeline("minbert-multitask", model=str(tiny_bert), device="cpu")


# ---- From a folder


def test_a_saved_folder_needs_no_remote_code_where_the_package_is(model, ask, tiny_tokenizer, tmp_path):
    ask.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["custom_pipelines"] == module.CUSTOM_PIPELINES
    for trust in (None, False, True):
        loaded = pipeline("minbert-multitask", model=str(tmp_path), device="cpu", trust_remote_code=trust)
        assert type(loaded) is MultiTaskPipeline
        assert loaded(PAIRS) == ask(PAIRS)


def test_a_pipeline_of_somebody_else_stays_with_the_folder(model, tmp_path):
    theirs = {"other": {"impl": "other.Other", "pt": ["AutoModel"]}}
    model.config.custom_pipelines = theirs
    model.save_pretrained(tmp_path)
    del model.config.custom_pipelines
    assert json.loads((tmp_path / "config.json").read_text())["custom_pipelines"] == {
        **theirs,
        **module.CUSTOM_PIPELINES,
    }
    assert type(model.config).from_pretrained(tmp_path).custom_pipelines == theirs
