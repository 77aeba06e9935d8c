"""Temperatures and thresholds: that each is the best, that answers stay, and that what is measured is right."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax
from sklearn.metrics import brier_score_loss, log_loss

from hf_minbert import MinBertError, Task, get_tasks
from hf_minbert.evaluation import calibration
from hf_minbert.evaluation.calibration import (
    HIGHEST,
    LOWEST,
    THRESHOLD_METRICS,
    best_temperature,
    best_threshold,
    crossfitted,
    fit,
    fit_and_measure,
    halves,
    measures,
    skipped,
    to_fit,
    with_temperature,
)
from hf_minbert.evaluation.decoding import decode
from hf_minbert.settings.metrics import KIND_METRICS
from hf_minbert.settings.run import ThresholdMetric

SST, PARA, STS = get_tasks(["sst", "para", "sts"])


def drawn(task, size, temperature, seed=0):
    """Outputs, and labels that have the probabilities of these outputs over a temperature."""
    random = np.random.default_rng(seed)
    logits = 3 * random.normal(size=(size, task.num_outputs))
    full = np.concatenate([np.zeros_like(logits), logits], axis=1) if task.kind == "binary" else logits
    shares = softmax(full / temperature, axis=1).cumsum(axis=1)
    return logits, (random.random((size, 1)) > shares).sum(axis=1)


def nll(task, logits, labels, temperature):
    full = np.concatenate([np.zeros_like(logits), logits], axis=1) if task.kind == "binary" else logits
    return -log_softmax(full / temperature, axis=1)[np.arange(len(labels)), labels].mean()


# ---- Temperature


@pytest.mark.parametrize("task", [SST, PARA], ids=lambda task: task.kind)
@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_the_temperature_is_that_of_the_least_loss_and_near_the_true_one(task, true):
    logits, labels = drawn(task, 20_000, true)
    found = best_temperature(task, logits, labels)
    assert found == pytest.approx(true, rel=0.05)
    least = nll(task, logits, labels, found)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert nll(task, logits, labels, found * factor) > least


def test_where_all_or_nothing_is_right_the_temperature_is_at_its_end():
    logits = np.array([[3.0], [-2.0], [1.0]])
    assert best_temperature(PARA, logits, np.array([1, 0, 1])) == LOWEST
    assert best_temperature(PARA, logits, np.array([0, 1, 0])) == HIGHEST
    assert best_temperature(PARA, 1e4 * logits, np.array([0, 1, 1])) == HIGHEST  # without overflow


@pytest.mark.parametrize("task", [SST, PARA], ids=lambda task: task.kind)
def test_no_temperature_changes_an_answer_not_even_of_outputs_that_differ_in_the_last_digit(task):
    random = np.random.default_rng(1)
    logits = random.normal(size=(3000, task.num_outputs)).astype(np.float32)
    logits[:1000] *= 1e-30
    logits[1000:2000] = 1 + random.integers(0, 3, (1000, task.num_outputs)) * np.float32(2**-23)
    before = decode(task, logits).values
    for temperature in (LOWEST, 0.3, 1.7, 3.0, HIGHEST):
        assert (decode(with_temperature(task, temperature), logits).values == before).all()


def test_a_threshold_moves_along_so_that_answers_stay():
    logits, _ = drawn(PARA, 2000, 1.0)
    task = replace(PARA, thresholds=0.3)
    moved = with_temperature(task, 2.5)
    assert moved.thresholds == pytest.approx(expit(np.log(0.3 / 0.7) / 2.5))
    assert (decode(moved, logits).values == decode(task, logits).values).all()
    assert with_temperature(moved, 1.0).thresholds == pytest.approx(0.3)


def test_probabilities_are_those_of_the_divided_outputs():
    logits, _ = drawn(SST, 50, 1.0)
    found = decode(replace(SST, temperature=2.0), logits).probabilities
    np.testing.assert_allclose(found, softmax(logits / 2, axis=1), rtol=1e-12)
    binary, _ = drawn(PARA, 50, 1.0)
    found = decode(replace(PARA, temperature=0.5), binary).probabilities
    np.testing.assert_allclose(found, np.stack([expit(-2 * binary[:, 0]), expit(2 * binary[:, 0])], axis=1), rtol=1e-9)


# ---- Thresholds


@pytest.mark.parametrize("metric", THRESHOLD_METRICS)
@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_scores_better(metric, seed):
    random = np.random.default_rng(seed)
    yes = random.random(60).round(1 if seed % 2 else 6)  # with ties too
    labels = random.random(60) < yes * 0.4
    score = KIND_METRICS["binary"][metric]
    best = score(PARA, (yes > best_threshold(yes, labels, metric)).astype(int), labels.astype(int))
    every = [score(PARA, (yes > cut).astype(int), labels.astype(int)) for cut in np.linspace(0, 1, 2001)]
    assert best >= max(every) - 1e-12


def test_of_thresholds_that_score_alike_the_nearest_to_one_half_is_taken():
    yes = np.array([0.05, 0.1, 0.2, 0.8, 0.9])
    assert best_threshold(yes, np.array([False, False, False, True, True]), "f1") == pytest.approx(0.5)
    assert best_threshold(yes, np.zeros(5, dtype=bool), "f1") == pytest.approx(0.5)  # all score 0
    assert best_threshold(yes, np.ones(5, dtype=bool), "accuracy") == pytest.approx(0.025)


def test_the_metrics_of_thresholds_are_those_of_a_recipe():
    assert (*THRESHOLD_METRICS,) == get_args(ThresholdMetric) and {*THRESHOLD_METRICS} <= {*KIND_METRICS["binary"]}


# ---- What is measured


def test_brier_score_and_likelihood_are_those_of_scikit_learn():
    logits, labels = drawn(PARA, 200, 2.0)
    decoded = decode(PARA, logits)
    found = measures(PARA, decoded, labels)
    assert found["brier"] == pytest.approx(brier_score_loss(labels, decoded.probabilities[:, 1]))
    assert found["nll"] == pytest.approx(log_loss(labels, decoded.probabilities))
    logits, labels = drawn(SST, 200, 2.0)
    decoded = decode(SST, logits)
    found = measures(SST, decoded, labels)
    ours = [brier_score_loss(labels == number, decoded.probabilities[:, number]) for number in range(5)]
    assert found["brier"] == pytest.approx(sum(ours))
    assert found["nll"] == pytest.approx(log_loss(labels, decoded.probabilities, labels=range(5)))
    assert found["accuracy"] == pytest.approx((decoded.values == labels).mean())


def test_the_calibration_error_is_that_by_hand():
    yes = np.array([0.95, 0.91, 0.85, 0.65, 0.17])  # of the more probable label: .95 .91 .85 .65 .83
    labels = np.array([1, 0, 1, 0, 0])  # right: yes no yes no yes
    task = replace(PARA, thresholds=0.9)  # which has no part in it
    found = measures(task, decode(task, np.log(yes / (1 - yes))[:, None]), labels)
    assert found["ece"] == pytest.approx(2 / 5 * abs(0.93 - 0.5) + 2 / 5 * abs(0.84 - 1) + 1 / 5 * abs(0.65 - 0))
    assert [each["rows"] for each in found["bins"]] == [1, 2, 2]


# ---- Without using rows twice


def test_halves_are_disjoint_whole_and_alike_in_labels():
    labels = np.repeat([0, 1, 2], [40, 7, 100])
    (one, other), back = halves(labels)
    assert back[0] is other and back[1] is one
    assert sorted([*one, *other]) == [*range(147)]
    counts = [np.bincount(labels[of]) for of in (one, other)]
    assert np.abs(counts[0] - counts[1]).max() <= 1


def test_each_half_is_answered_by_what_was_fitted_on_the_other():
    logits, labels = drawn(PARA, 400, 2.0)
    found = crossfitted(PARA, logits, labels, True, "f1")
    for fitted_on, rest in halves(labels):
        task = fit(PARA, logits[fitted_on], labels[fitted_on], True, "f1")
        np.testing.assert_array_equal(found.probabilities[rest], decode(task, logits[rest]).probabilities)
        np.testing.assert_array_equal(found.values[rest], decode(task, logits[rest]).values)


def test_calibration_helps_where_the_model_is_too_sure_and_says_so_of_rows_not_fitted():
    logits, labels = drawn(SST, 4000, 3.0)
    task, found = fit_and_measure(SST, logits, labels, True, None)
    assert found["temperature"] == task.temperature == pytest.approx(3.0, rel=0.1)
    assert found["after"]["ece"] < 0.03 < 0.1 < found["before"]["ece"]
    assert found["after"]["nll"] < found["before"]["nll"] and found["after"]["accuracy"] == found["before"]["accuracy"]
    assert found["thresholds"] == {} and found["metric"] is None and found["rows"] == 4000


def test_labels_of_chance_gain_nothing_by_a_threshold_on_rows_not_fitted():
    random = np.random.default_rng(3)
    logits, labels = random.normal(size=(200, 1)), random.integers(0, 2, 200)
    task, found = fit_and_measure(PARA, logits, labels, False, "accuracy")
    fitted = measures(task, decode(task, logits), labels)["accuracy"]
    assert fitted > 0.52 and found["after"]["accuracy"] < fitted


def test_fitting_again_changes_nothing():
    logits, labels = drawn(PARA, 500, 2.0)
    once, first = fit_and_measure(PARA, logits, labels, True, "f1")
    again, second = fit_and_measure(once, logits, labels, True, "f1")
    assert again == once and second == first
    kept, _ = fit_and_measure(once, logits, labels, True, None)  # the threshold stays where it is
    assert kept.thresholds == pytest.approx(once.thresholds)


def test_a_temperature_that_does_not_help_rows_that_were_not_fitted_is_not_kept():
    random = np.random.default_rng(0)
    logits = 3 * random.normal(size=(6, 1))  # too few rows: each half's temperature is wrong for the other
    labels = (logits[:, 0] > 0).astype(int)
    (one, _), _ = halves(labels)
    labels[one[0]] = 1 - labels[one[0]]
    assert best_temperature(PARA, logits, labels) != pytest.approx(1, rel=0.01)
    cross = measures(PARA, crossfitted(PARA, logits, labels, True, None), labels)["nll"]
    task, found = fit_and_measure(PARA, logits, labels, True, None)
    assert cross > found["before"]["nll"] and task == PARA and found["temperature"] == 1
    assert found["after"] == found["before"]
    (note,) = found["notes"]
    assert f"(nll {found['before']['nll']:.4f} before, {cross:.4f} after)" in note and "stays at 1" in note


@pytest.mark.parametrize("task", [SST, PARA], ids=lambda task: task.kind)
def test_a_temperature_at_its_bound_is_said_and_no_likelihood_is_below_nought(task):
    logits, _ = drawn(task, 40, 1.0)
    labels = decode(task, logits).values  # all right: the surer the better
    fitted, found = fit_and_measure(task, logits, labels, True, None)
    assert fitted.temperature == LOWEST
    assert found["notes"] == ["The temperature, 0.010, is at its bound: dev rows do not limit it."]
    assert found["after"]["nll"] >= 0 and not np.signbit(found["after"]["nll"])
    sure = measures(task, decode(task, 1e6 * logits), labels)["nll"]
    assert sure == 0 and not np.signbit(sure)  # of probabilities that are 1


def test_a_fit_that_helps_has_no_notes():
    assert fit_and_measure(SST, *drawn(SST, 4000, 3.0), True, None)[1]["notes"] == []


def test_a_threshold_that_scores_lower_on_rows_not_fitted_is_said():
    random = np.random.default_rng(3)
    logits, labels = random.normal(size=(200, 1)), random.integers(0, 2, 200)
    _, found = fit_and_measure(PARA, logits, labels, False, "accuracy")
    said = ["The threshold lowers accuracy on rows that were not fitted."]
    assert found["notes"] == (said if found["after"]["accuracy"] < found["before"]["accuracy"] else [])


def test_what_has_nothing_to_fit_is_refused_and_where_something_has_the_rest_is_said():
    asked = [SST, PARA, STS], True, "f1"
    assert to_fit(*asked, "") == ["sst", "para"] and to_fit([SST, PARA], False, "f1", "") == ["para"]
    assert skipped(*asked) == [
        "No temperature, which is for tasks of kind classes, binary or labels: sts (score).",
        "No threshold, which is for tasks of kind binary or labels: sst (classes), sts (score).",
    ]
    assert skipped([SST], True, None) == []
    with pytest.raises(MinBertError, match=r"of kind classes, binary or labels. Found sts \(score\). Do it."):
        to_fit([STS], True, None, "Do it.")
    with pytest.raises(MinBertError, match="A threshold is for tasks of kind binary or labels. Found sst"):
        to_fit([SST], False, "f1", "")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": 0}, "`temperature` must be a number above 0. Found 0"),
        ({"temperature": True}, "`temperature` must be a number above 0. Found True"),
        ({"thresholds": [0.4]}, "`thresholds` must be a number between 0 and 1. Found"),
        ({"thresholds": 1.5}, "`thresholds` must be a number between 0 and 1. Found 1.5"),
    ],
)
def test_a_task_says_what_is_wrong_with_either(changed, said):
    with pytest.raises(MinBertError, match=said):
        replace(PARA, **changed)


def test_only_a_task_with_probabilities_has_either():
    with pytest.raises(MinBertError, match="`temperature` is for kinds classes, binary, labels, and"):
        replace(STS, temperature=2.0)
    with pytest.raises(MinBertError, match="`thresholds` is for kinds binary, labels"):
        replace(SST, thresholds=0.4)


def test_the_module_names_what_it_measures():
    logits, labels = drawn(PARA, 20, 1.0)
    assert {*calibration.MEASURES} <= {*measures(PARA, decode(PARA, logits), labels)}


# ---- Any number of labels

TOPICS = Task("topics", "labels", ("text",), labels=("a", "b", "c"))


def sets(size, temperature, seed=0):
    random = np.random.default_rng(seed)
    logits = 3 * random.normal(size=(size, 3)) + [0, -2, 2]
    return logits, (random.random((size, 3)) < expit(logits / temperature)).astype(np.float32)


def test_sets_of_labels_have_one_temperature_and_a_threshold_each():
    logits, labels = sets(4000, 3.0)
    task, found = fit_and_measure(TOPICS, logits, labels, True, "f1")
    assert task.temperature == pytest.approx(3.0, rel=0.1)
    assert found["after"]["ece"] < 0.03 < 0.1 < found["before"]["ece"]
    probabilities = expit(logits / task.temperature)
    assert found["thresholds"] == dict(zip("abc", task.thresholds, strict=True))
    for number, threshold in enumerate(task.thresholds):
        best = best_threshold(probabilities[:, number], labels[:, number] > 0, "f1")
        assert threshold == pytest.approx(best, abs=1e-9)
    assert found["metric"] == TOPICS.metric and found["after"][TOPICS.metric] > found["before"][TOPICS.metric]
    assert found["before"]["brier"] == pytest.approx(((expit(logits) - labels) ** 2).mean())
    assert "lrap" not in found["before"]


def test_a_list_of_thresholds_moves_along():
    logits, _ = sets(500, 1.0)
    task = replace(TOPICS, thresholds=[0.2, 0.5, 0.7])
    moved = with_temperature(task, 2.0)
    before, after = (decode(of, logits).values > np.array(of.thresholds) for of in (task, moved))
    assert (before == after).all() and moved.thresholds[1] == pytest.approx(0.5)
