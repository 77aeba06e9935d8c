"""Averages and ensembles: by hand on numbers, and the members' own outputs."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from hf_minbert import MinBertError, MinBertForMultiTask, get_tasks
from hf_minbert.pretrained.merging import average, ensemble, greedy_soup

IDS = torch.tensor([[2, 9, 8, 7, 3], [2, 11, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def filled(model, value):
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def logits(model, task):
    with torch.inference_mode():
        return model.eval()(input_ids=IDS, attention_mask=MASK, task=task).logits


def assert_same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def values(model):
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


@pytest.mark.parametrize(
    ("numbers", "weights", "mean"),
    [
        ([1.0, 3.0], None, 2.0),
        ([1.0, 3.0], [1, 3], 2.5),
        ([1.0, 2.0, 6.0], None, 3.0),
        ([1.0, 2.0, 6.0], [2, 0, 2], 3.5),
    ],
)
def test_means_by_hand(tiny_model, numbers, weights, mean):
    models = [filled(tiny_model(), number) for number in numbers]
    assert values(average(models, weights)) == {mean}
    assert [values(model) for model in models] == [{number} for number in numbers]  # as they were


@pytest.mark.parametrize("weights", [[0, 1, 0], [0, 2.5, 0]])
def test_a_model_with_all_the_weight_is_the_mean_to_the_last_bit(tiny_model, weights):
    models = [tiny_model(seed=seed) for seed in range(3)]
    assert_same_weights(average(models, weights), models[1])


def test_a_mean_of_half_precision_is_computed_in_float32(tiny_model):
    """64.5 is a number of bfloat16, but 64 + 0.25 is not, and is 64 there."""
    models = [filled(tiny_model(["sst"]).bfloat16(), number) for number in (0, 256, 1, 1)]
    assert values(average(models)) == {64.5}


def test_the_mean_of_equal_models_is_the_model_to_the_last_bit(tiny_model):
    models = [tiny_model(seed=3) for _ in range(3)]
    assert_same_weights(average(models, [1, 1, 5]), models[0])


def test_a_head_is_the_mean_over_those_that_have_it(tiny_model):
    models = [filled(tiny_model(["sst", "sts"]), 1.0), filled(tiny_model(["sts", "para"]), 3.0)]
    merged = average(models, [1, 3])
    assert merged.config.task_names == ["sst", "sts", "para"]
    assert values(merged.bert) == {2.5} and values(merged.heads.sts) == {2.5}
    assert values(merged.heads.sst) == {1.0} and values(merged.heads.para) == {3.0}


def test_heads_that_differ_in_dropout_alone_have_a_mean(tiny_model):
    rates = [{"sst": {"head_options": {"dropout": rate}, "sentence_dropout": rate}} for rate in (0.1, 0.3)]
    models = [filled(tiny_model(get_tasks(tasks)), number) for tasks, number in zip(rates, (1.0, 3.0), strict=True)]
    merged = average(models)
    assert values(merged) == {2.0}
    assert merged.config.get_task("sst")["head_options"] == {"dropout": 0.1}


def test_an_average_saves_and_loads(tiny_model, tmp_path):
    merged = average([tiny_model(["sst"], seed=0), tiny_model(["sts"], seed=1)])
    merged.save_pretrained(tmp_path)
    loaded = MinBertForMultiTask.from_pretrained(tmp_path)
    for task in ("sst", "sts"):
        assert torch.equal(logits(loaded, task), logits(merged, task))


def test_a_greedy_soup_leaves_out_what_harms(tiny_model):
    """Scored by how near its weights are to 2: 1 and 3 make 2 together, and 9 would spoil it."""

    def score(model):
        (value,) = values(model)
        return -abs(value - 2.0)

    models = [filled(tiny_model(["sst"]), number) for number in (9.0, 1.0, 3.0)]
    merged, kept = greedy_soup(models, score)
    assert kept == [1, 2] and values(merged) == {2.0}
    _, kept = greedy_soup([filled(tiny_model(["sst"]), number) for number in (2.0, 1.0)], score)
    assert kept == [0]


def test_a_greedy_soup_keeps_what_scores_the_same(tiny_model):
    _, kept = greedy_soup([tiny_model(["sst"]) for _ in range(3)], lambda model: 0.0)
    assert kept == [0, 1, 2]


def test_a_greedy_soup_wants_equal_tasks(tiny_model):
    """The mean over sst and para says nothing about a model of sst alone."""

    def score(model):
        raise AssertionError("scored before the check")

    with pytest.raises(MinBertError, match="by the same tasks. The first has sst and number 2 has para, sst"):
        greedy_soup([tiny_model(["sst"]), tiny_model(["para", "sst"])], score)
    with pytest.raises(MinBertError, match="no model to merge"):
        greedy_soup([], score)


def members(tiny_model):
    bi = get_tasks({"sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}})
    return [tiny_model(["sst"], seed=1), tiny_model(["para"], seed=2), tiny_model(bi, seed=3)]


def test_an_ensemble_answers_as_its_members(tiny_model, tmp_path):
    models = members(tiny_model)
    merged = ensemble(models)
    assert merged.config.task_names == ["sst", "para", "sts"]
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for model, task in zip(models[:2], ("sst", "para"), strict=True):
        assert torch.equal(logits(merged, task), logits(model, task))
        assert torch.equal(logits(loaded, task), logits(model, task))
    pair = {"input_ids": IDS[None].repeat(2, 1, 1), "task": "sts"}
    assert torch.equal(loaded.eval()(**pair).logits, models[2].eval()(**pair).logits)


def test_an_ensembles_active_task_answers_a_stock_pipeline_as_its_member(tiny_model, tiny_tokenizer, tmp_path):
    models = members(tiny_model)
    ensemble(models).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    texts = ["a good film .", {"text": "how is it ?", "text_pair": "why not ?"}]
    for model, task, text in zip(models[:2], ("sst", "para"), texts, strict=True):
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, active_task=task)
        answers = [
            pipeline("text-classification", model=one.eval(), tokenizer=tiny_tokenizer, device="cpu", top_k=None)(
                [text]
            )
            for one in (loaded, model)
        ]
        assert answers[0] == answers[1]
        assert {answer["label"] for answer in answers[0][0]} == set(model.config.label2id)


def test_an_ensemble_of_models_with_several_tasks(tiny_model):
    models = [tiny_model(["sst", "para"], seed=1), tiny_model(["sts", "sst"], seed=2)]
    merged = ensemble(models, take={"sst": 1})
    for task, place in (("sst", 1), ("para", 0), ("sts", 1)):
        assert torch.equal(logits(merged, task), logits(models[place], task))
    again = ensemble([merged, tiny_model(["cfimdb"], seed=4)])
    assert torch.equal(logits(again, "sts"), logits(models[1], "sts"))


@pytest.mark.parametrize(
    ("given", "weights", "said"),
    [
        ([], None, "There is no model to merge"),
        ([{}, {}], [1], "`weights` must be 2 numbers, one per model. Found 1"),
        ([{}, {}], [1, -1], "`weights` must be numbers from 0"),
        ([{}, {}], [0, 0], "and not all 0"),
        ([{}, {}], [1, float("nan")], "`weights` must be numbers from 0"),
        ([{}, {"num_hidden_layers": 3}], None, "`num_hidden_layers` is 2 in the first and 3 in number 2"),
        ([{}, {"private_layers": 1}], None, "Model 2 has private layers or encoders, which have no mean"),
        (
            [{"tasks": {"sst": None}}, {"tasks": {"sst": {"head": "mlp"}}}],
            None,
            "Task 'sst': `head` is 'linear' in one",
        ),
        (
            [{"tasks": {"sst": None}}, {"tasks": {"sts": None}}],
            [0, 1],
            "All models that have the task 'sst' have the weight 0",
        ),
    ],
    ids=str,
)
def test_what_has_no_mean_is_refused(tiny_model, given, weights, said):
    models = [tiny_model(get_tasks(one.pop("tasks", ["sst", "sts"])), **one) for one in map(dict, given)]
    with pytest.raises(MinBertError, match=said):
        average(models, weights)


def test_an_ensemble_asks_whose_task_it_is(tiny_model):
    models = [tiny_model(["sst"]), tiny_model(["sst"])]
    with pytest.raises(MinBertError, match="Models 1 and 2 each have the task 'sst'. Say by `take` "):
        ensemble(models)
    with pytest.raises(MinBertError, match="no task 'sts' to take from model 1"):
        ensemble(models, take={"sts": 0})
    with pytest.raises(MinBertError, match="no task 'sst' to take from model 3"):
        ensemble(models, take={"sst": 2})
    with pytest.raises(MinBertError, match="Model 1 has private layers and cannot join"):
        ensemble([tiny_model(private_layers=1), tiny_model(["cfimdb"])])
