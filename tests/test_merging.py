"""Averages, task vectors and ensembles: by hand on numbers, against peft, and the members' own outputs."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from peft.utils import merge_utils
from transformers import AutoModelForSequenceClassification, pipeline

from hf_minbert import MinBertError, MinBertForMultiTask, get_tasks
from hf_minbert.pretrained.merging import VECTOR_METHODS, add_task_vectors, average, ensemble, greedy_soup, load_base

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
        ([{}, {"private_layers": 1}], None, "Model 2 has private layers or encoders, which cannot be averaged"),
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
    with pytest.raises(MinBertError, match="Models 1 and 2 each have the task 'sst'. Choose one with `take` "):
        ensemble(models)
    with pytest.raises(MinBertError, match="no task 'sts' to take from model 1"):
        ensemble(models, take={"sts": 0})
    with pytest.raises(MinBertError, match="no task 'sst' to take from model 3"):
        ensemble(models, take={"sst": 2})
    with pytest.raises(MinBertError, match="Model 1 has private layers and cannot join"):
        ensemble([tiny_model(private_layers=1), tiny_model(["cfimdb"])])


# ---- Task vectors

WEIGHT = "bert.pooler.dense.bias"  # with this one alone in the base, it is the whole encoder of the vectors


def with_vectors(tiny_model, *vectors, base=0.0):
    """Models whose weight is the base plus a vector, and the base."""
    start = torch.full((len(vectors[0]),), base)
    models = []
    for vector in vectors:
        models.append(tiny_model(["sst"], hidden_size=len(vector)))
        models[-1].state_dict()[WEIGHT].copy_(start + torch.tensor(vector))
    return models, {WEIGHT: start}


def encoder_of(model):
    return {name: value.clone() for name, value in model.state_dict().items() if name.startswith("bert.")}


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


def merged_weight(models, base, *args, **numbers):
    return add_task_vectors(models, base, *args, **numbers).state_dict()[WEIGHT].tolist()


def test_task_arithmetic_by_hand(tiny_model):
    models, base = with_vectors(tiny_model, [4.0, -3.0], [-5.0, 1.0], base=10.0)
    assert merged_weight(models, base, "task_arithmetic", scale=0.5) == [9.5, 9.0]
    assert merged_weight(models, base, "task_arithmetic", scale=-1) == [11.0, 12.0]  # forgets


def test_ties_by_hand(tiny_model):
    """Half of six is three. The second has two numbers of third-largest magnitude and keeps both."""
    vectors = [4.0, -3.0, 1.0, 0.5, 2.0, -0.25], [-5.0, -1.0, 2.0, 0.25, -2.0, 3.0]
    models, base = with_vectors(tiny_model, *vectors, base=1.0)
    # kept:   4  -3  0  0   2  0
    #        -5   0  2  0  -2  3
    # sign:   -   -  +      +  +
    # mean:  -5  -3  2  0   2  3
    assert merged_weight(models, base, "ties", scale=1, density=0.5) == [-4.0, -2.0, 3.0, 1.0, 3.0, 4.0]
    assert merged_weight(models, base, "ties", scale=0.5, density=0.5) == [-1.5, -0.5, 2.0, 1.0, 2.0, 2.5]


def test_ties_trims_over_the_whole_encoder(tiny_model):
    """A weight that changed little loses all of its changes, where trimming it by itself would keep half."""
    models, base = with_vectors(tiny_model, [8.0, 7.0], [8.0, 7.0])
    other = "bert.embeddings.LayerNorm.bias"
    for model in models:
        model.state_dict()[other].copy_(torch.tensor([1.0, 2.0]))
    merged = add_task_vectors(models, {**base, other: torch.zeros(2)}, "ties", density=0.5).state_dict()
    assert merged[WEIGHT].tolist() == [8.0, 7.0] and merged[other].tolist() == [0.0, 0.0]


def test_dare_by_hand(tiny_model):
    """With the seed 0 a generator draws .496, .768, .089, .132, .307, .634, on every machine."""
    models, base = with_vectors(tiny_model, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert merged_weight(models, base, "dare", scale=1, density=0.5) == [2.0, 0.0, 6.0, 8.0, 10.0, 0.0]
    assert merged_weight(models, base, "dare", scale=0.5, density=0.5, seed=0) == [1.0, 0.0, 3.0, 4.0, 5.0, 0.0]


def test_dare_keeps_the_expected_change(tiny_model):
    models = [filled(tiny_model(["sst"]), 1.0), filled(tiny_model(["sts"]), 1.0)]
    base = {name: torch.zeros_like(value) for name, value in encoder_of(models[0]).items()}
    merged = [flat(encoder_of(add_task_vectors(models, base, "dare", 0.5, 0.25, seed))) for seed in (7, 7, 8)]
    assert torch.equal(merged[0], merged[1]) and not torch.equal(merged[0], merged[2])
    for numbers in merged[::2]:
        assert numbers.unique().tolist() == [0.0, 2.0, 4.0]  # of neither, one or both: each model has draws of its own
        # A number is 1 on average, with the variance 2 * 0.5**2 * 3; five deviations of the mean over all.
        assert numbers.mean().item() == pytest.approx(1, abs=5 * (1.5 / len(numbers)) ** 0.5)


def test_dare_draws_from_a_generator_of_its_own(tiny_model):
    models, base = with_vectors(tiny_model, [1.0] * 32)
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(merged_weight(models, base, "dare", seed=5))
    assert drawn[0] == drawn[1] and 0.0 in drawn[0]


@pytest.mark.parametrize("density", [0.25, 0.5])
def test_vectors_are_merged_as_by_peft(tiny_model, density):
    models = [tiny_model(["sst"], seed=seed) for seed in range(3)]
    base = encoder_of(tiny_model(["sst"], seed=9))
    vectors, ones = [flat(encoder_of(model)) - flat(base) for model in models], torch.ones(3)
    for method, numbers, merged in (
        ("task_arithmetic", {}, merge_utils.task_arithmetic(vectors, ones)),
        ("ties", {"density": density}, merge_utils.ties(vectors, ones, density)),
    ):
        ours = flat(encoder_of(add_task_vectors(models, base, method, 0.3, **numbers)))
        torch.testing.assert_close(ours, flat(base) + 0.3 * merged)


@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_models_that_learned_nothing_are_the_base_to_the_last_bit(tiny_model, method):
    models = [tiny_model(["sst"], seed=3), tiny_model(["sst"], seed=3)]
    assert_same_weights(add_task_vectors(models, encoder_of(models[0]), method), models[0])


@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_all_that_one_model_learned_is_that_model(tiny_model, method):
    numbers = dict.fromkeys(VECTOR_METHODS[method], 1)
    model, base = tiny_model(["sst"], seed=1), encoder_of(tiny_model(["sst"], seed=2))
    merged = add_task_vectors([model], base, method, **numbers).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(merged[name], value)


def test_vectors_of_half_precision_are_added_in_float32(tiny_model):
    """256 + (2 + 4) / 2 is 259, and no odd number above 256 is one of bfloat16."""
    models = [filled(tiny_model(["sst"]).bfloat16(), number) for number in (258.0, 260.0)]
    base = {name: torch.full_like(value, 256.0) for name, value in encoder_of(models[0]).items()}
    assert values(add_task_vectors(models, base, "task_arithmetic", 0.5).bert) == {259.0}


def test_the_sum_by_the_number_of_models_is_the_average(tiny_model):
    models = [tiny_model(["sst"], seed=seed) for seed in range(4)]
    merged = add_task_vectors(models, encoder_of(tiny_model(["sst"], seed=9)), "task_arithmetic", scale=1 / 4)
    torch.testing.assert_close(flat(merged.state_dict()), flat(average(models).state_dict()))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_order_of_models_changes_no_more_than_rounding(tiny_model, method):
    models, base = [tiny_model(["sst"], seed=seed) for seed in range(3)], encoder_of(tiny_model(["sst"], seed=9))
    one, other = (add_task_vectors(order, base, method) for order in (models, models[::-1]))
    torch.testing.assert_close(flat(one.state_dict()), flat(other.state_dict()))


@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_heads_and_what_the_base_lacks_are_means(tiny_model, method):
    models = [filled(tiny_model(["sst", "sts"]), 1.0), filled(tiny_model(["sts", "para"]), 3.0)]
    base = {name: value for name, value in encoder_of(models[0]).items() if "pooler" not in name}
    merged = add_task_vectors(models, base, method, scale=0)
    assert merged.config.task_names == ["sst", "sts", "para"]
    assert [values(merged.heads.get(task)) for task in merged.config.task_names] == [{1.0}, {2.0}, {3.0}]
    assert values(merged.bert.pooler) == {2.0} and values(merged.bert.encoder) == {1.0}


@pytest.mark.parametrize(
    ("method", "numbers", "said"),
    [
        ("tie", {}, "unknown method 'tie'"),
        ("task_arithmetic", {"density": 0.5}, "`density` is for ties and dare: task_arithmetic keeps all numbers"),
        ("ties", {"seed": 1}, "`seed` is for dare: ties draws no numbers"),
        ("ties", {"density": 0}, "`density` must be above 0 and at most 1, the share that is kept. Found 0"),
        ("dare", {"density": 1.5}, "`density` must be above 0 and at most 1, the share that is kept. Found 1.5"),
        ("dare", {"density": float("nan")}, "`density` must be above 0"),
        ("ties", {"scale": float("inf")}, "`scale` must be a finite number, such as 1.0. Found inf"),
        ("dare", {"seed": -1}, "`seed` must be a whole number from 0 and below 2\\*\\*63. Found -1"),
    ],
    ids=str,
)
def test_numbers_that_no_method_takes_are_refused(tiny_model, method, numbers, said):
    models, base = with_vectors(tiny_model, [1.0, 2.0])
    with pytest.raises(MinBertError, match=f"(?i){said}"):
        add_task_vectors(models, base, method, **numbers)


def test_a_base_that_does_not_fit_is_refused(tiny_model, tmp_path):
    models, base = with_vectors(tiny_model, [1.0, 2.0])
    with pytest.raises(
        MinBertError, match=r"pooler.dense.bias has the shape \[3\] in the base and \[2\] in the models"
    ):
        add_task_vectors(models, {WEIGHT: torch.zeros(3)}, "ties")
    resized = tiny_model(["sst"])
    resized.resize_token_embeddings(100)
    with pytest.raises(MinBertError, match="`vocab_size` is 86 in the first and 100 in number 2"):
        add_task_vectors([tiny_model(["sst"]), resized], base, "ties")
    tiny_model(["sst"]).save_pretrained(tmp_path / "base")
    with pytest.raises(MinBertError, match="base and the models do not go together: `vocab_size` is 86 in it and 100"):
        load_base(str(tmp_path / "base"), [resized.config])
    private = tiny_model(["sst"], private_layers=1)
    private.save_pretrained(tmp_path / "private")
    with pytest.raises(MinBertError, match="private has private layers or encoders, from which no task vector"):
        load_base(str(tmp_path / "private"), [tiny_model(["sst"]).config])
    with pytest.raises(MinBertError, match="Model 1 has private layers or encoders"):
        add_task_vectors([private], base, "ties")


def test_the_mean_answer_of_a_model_and_itself_scores_as_the_model(
    finished_run, course_dir, monkeypatch, capsys, tmp_path
):
    words = ["mean_answers.py", str(course_dir), str(finished_run), str(finished_run)]
    script = str(Path(__file__).parents[1] / "scripts" / "mean_answers.py")
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(script, run_name="__main__")
    found = dict(line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines())
    saved = json.loads((finished_run / "metrics.json").read_text())
    assert float(found["sst accuracy"]) == pytest.approx(saved["eval_sst_accuracy"], abs=5e-5)
    assert float(found["overall"]) == pytest.approx(saved["eval_overall"], abs=1e-3)
    monkeypatch.setattr("sys.argv", [*words, "--write", str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == {"sst-test.csv", "para-test.csv", "sts-test.csv"}
