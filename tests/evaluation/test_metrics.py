"""Logits to predictions, metrics and files."""

import csv
import json
import math
import os
import stat
import warnings

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.metrics import f1_score, matthews_corrcoef

from hf_minbert.errors import DivergedError, MinBertError
from hf_minbert.evaluation.decoding import Decoded, clip, decode
from hf_minbert.evaluation.metrics import has_diverged, overall, task_metrics
from hf_minbert.evaluation.submission import write_course, write_predictions
from hf_minbert.io import write_atomically, write_json
from hf_minbert.settings.tasks import KIND_METRICS, TASKS, Task, get_tasks, metric_names

SST, PARA, STS = get_tasks(["sst", "para", "sts"])


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def column(*numbers):
    return np.array(numbers, dtype=np.float32)[:, None]


# ---- decoding


def test_classes_are_the_largest_logit_and_probabilities_sum_to_one():
    decoded = decode(SST, np.array([[0, 1, 2, 3, 4], [1000, -1000, 0, 0, 0], [-1e4, -1e4, -9e3, -1e4, -1e4]]))
    assert decoded.values.tolist() == [4, 0, 2]
    np.testing.assert_allclose(decoded.probabilities.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(decoded.probabilities[0, 1:] / decoded.probabilities[0, :-1], math.e, rtol=1e-12)


def test_a_binary_logit_gives_the_sigmoid_and_its_complement():
    decoded = decode(PARA, column(-1000, -2, 0, 2, 1000))
    assert decoded.values.tolist() == [0, 0, 0, 1, 1]
    assert decoded.values.dtype == np.int64
    sigmoid = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(decoded.probabilities[:, 1], [0, 1 - sigmoid, 0.5, sigmoid, 1], rtol=1e-12)
    np.testing.assert_allclose(decoded.probabilities.sum(axis=1), 1, rtol=1e-12)


def test_scores_stay_as_predicted_until_clipped():
    decoded = decode(STS, column(-0.5, 2.25, 5.5))
    assert decoded.values.tolist() == [-0.5, 2.25, 5.5] and decoded.probabilities is None
    assert clip(STS, decoded.values).tolist() == [0.0, 2.25, 5.0]
    assert clip(SST, np.array([0, 4])).tolist() == [0, 4]


@pytest.mark.parametrize(("task", "shape"), [(SST, (3, 1)), (PARA, (3, 2)), (STS, (3,)), (STS, (3, 3))])
def test_logits_of_another_shape_are_refused(task, shape):
    with pytest.raises(MinBertError, match=rf"{task.name}.*\[N, {task.num_outputs}\]. Found \[3"):
        decode(task, np.zeros(shape))


# ---- metrics


def test_class_metrics_equal_scikit_learns_over_all_classes():
    labels, predicted = np.array([0, 1, 1, 4]), [0, 1, 1, 1]
    metrics = task_metrics(SST, np.eye(5)[predicted], labels)
    assert metrics == {
        "accuracy": 0.75,
        # F1 of the classes 0 to 4: 1, 4/5, 0, 0, 0; the mean over the seen ones would be 0.6
        "macro_f1": pytest.approx((1 + 0.8) / 5),
        "matthews": pytest.approx(matthews_corrcoef(labels, predicted)),
    }


def test_binary_metrics_equal_scikit_learns():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(50, 1)), random.integers(0, 2, 50)
    assert task_metrics(PARA, logits, labels) == {
        "accuracy": pytest.approx(((logits[:, 0] > 0) == labels).mean()),
        "f1": pytest.approx(f1_score(labels, logits[:, 0] > 0)),
        "matthews": pytest.approx(matthews_corrcoef(labels, logits[:, 0] > 0)),
    }
    assert task_metrics(PARA, column(-1, -1), np.array([0, 0])) == {"accuracy": 1.0, "f1": 0.0, "matthews": 0.0}


def test_the_correlation_of_classes_is_one_of_all_right_and_none_of_one_answer():
    labels = np.array([0, 1, 1, 4, 2])
    for values, expected in ((labels, 1.0), (np.full(5, 1), 0.0), (np.array([1, 0, 4, 1, 3]), None)):
        found = task_metrics(SST, np.eye(5)[values], labels)["matthews"]
        assert found == pytest.approx(matthews_corrcoef(labels, values) if expected is None else expected)


def test_correlations_of_a_column_and_a_row():
    assert task_metrics(STS, column(1, 2, 3), np.array([1, 2, 3], dtype=np.float32)) == {
        "pearson": pytest.approx(1),
        "spearman": pytest.approx(1),
    }
    predicted, labels = np.array([0.1, 4, 2, 9]), np.array([0, 3, 4, 5.0])
    metrics = task_metrics(STS, predicted[:, None], labels)
    assert metrics["pearson"] == pytest.approx(pearsonr(predicted, labels).statistic)
    assert metrics["spearman"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("predicted", "labels", "flags"),
    [
        ([2.5] * 6, [0, 1, 2, 3, 4, 5], {"constant_predictions"}),
        ([0.1] * 7, [0, 1, 2, 3, 4, 5, 5], {"constant_predictions"}),
        ([0, 1, 2], [3, 3, 3], {"constant_labels"}),
        ([0, 0, 0], [3, 3, 3], {"constant_predictions", "constant_labels"}),
        ([2.5], [3], {"constant_predictions", "constant_labels"}),
    ],
)
def test_an_undefined_correlation_is_zero_and_says_so(caplog, predicted, labels, flags):
    metrics = task_metrics(STS, column(*predicted), np.array(labels, dtype=np.float32))
    assert metrics == {"pearson": 0.0, "spearman": 0.0} | dict.fromkeys(flags, 1.0)
    (message,) = caplog.messages
    assert "sts" in message and "reported as 0" in message


def test_predictions_that_differ_only_by_rounding_are_constant(caplog):
    logits = np.array([[2.5], [np.nextafter(2.5, 3)], [2.5]])
    assert task_metrics(STS, logits, np.array([1.0, 2.0, 3.0]))["constant_predictions"] == 1.0


@pytest.mark.parametrize("task", [SST, PARA, STS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_diverged_model_has_finite_metrics_and_a_flag(caplog, task, value):
    logits = np.random.default_rng(0).normal(size=(4, task.num_outputs))
    logits[2, 0] = value
    metrics = task_metrics(task, logits, np.array([0, 1, 0, 1]))
    assert metrics == dict.fromkeys(KIND_METRICS[task.kind], 0.0) | {"nonfinite_predictions": 1.0}
    assert caplog.messages[0].startswith(f"{task.name}: 1 of 4 predictions are not finite")


@pytest.mark.parametrize("labels", [[], [1, 2], [[1], [2], [3]]])
def test_labels_must_fit_the_predictions(labels):
    with pytest.raises(MinBertError, match="3 predictions need as many labels"):
        task_metrics(STS, column(1, 2, 3), np.array(labels))
    with pytest.raises(MinBertError, match="at least one"):
        task_metrics(STS, np.zeros((0, 1)), np.zeros(0))


SCORES = {
    "sst": {"accuracy": 0.5, "macro_f1": 0.4, "matthews": 0.3},
    "para": {"accuracy": 0.8, "f1": 0.7, "matthews": 0.6},
    "sts": {"pearson": -0.2, "spearman": 0.1},
    "cfimdb": {"accuracy": 0.9, "macro_f1": 0.9, "matthews": 0.8},
}


def test_overall_is_the_plain_mean_and_the_leaderboard_maps_the_correlation():
    found = overall([SST, PARA, STS], SCORES)
    assert found == {
        "overall": pytest.approx((0.5 + 0.8 - 0.2) / 3),
        "leaderboard": pytest.approx((0.5 + 0.8 + 0.4) / 3),
    }
    assert overall([SST, STS], SCORES) == {"overall": pytest.approx(0.15)}
    four = overall(get_tasks(["cfimdb", "sst", "para", "sts"]), SCORES)
    assert four["overall"] == pytest.approx((0.5 + 0.8 - 0.2 + 0.9) / 4)
    assert four["leaderboard"] == found["leaderboard"]


def test_overall_takes_the_metric_that_the_task_names():
    by_f1 = Task(**{**SST.to_config(), "metric": "macro_f1"})
    found = overall([by_f1, PARA, STS], SCORES)
    assert found["overall"] == pytest.approx((0.4 + 0.8 - 0.2) / 3)
    assert found["leaderboard"] == pytest.approx((0.5 + 0.8 + 0.4) / 3), "the leaderboard's rule is fixed"


def test_metric_names_are_those_that_get_reported():
    assert metric_names([SST, STS]) == [
        "sst_accuracy", "sst_macro_f1", "sst_matthews", "sst_loss", "sts_pearson", "sts_spearman", "sts_loss",
        "overall",
    ]  # fmt: skip
    tasks = [TASKS[name] for name in SCORES]
    names = metric_names(tasks)
    assert "leaderboard" in names and len(set(names)) == len(names)
    scored = {f"{task}_{metric}" for task, scores in SCORES.items() for metric in scores}
    reported = scored | set(overall(tasks, SCORES)) | {f"{task}_loss" for task in SCORES}
    assert set(names) == reported


# ---- files


def test_predictions_can_be_read_back_to_the_character(tmp_path):
    ids = ["a", " b ", 'c,"d"', "", "1e5"]
    logits = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    write_predictions(tmp_path / "new" / "sst.csv", SST, ids, decoded := decode(SST, logits))
    with (tmp_path / "new" / "sst.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, strict=True)
    assert header == ["id", "prediction", "label", *(f"probability_{name}" for name in SST.labels)]
    assert [row[0] for row in rows] == ids
    assert [int(row[1]) for row in rows] == decoded.values.tolist()
    assert [row[2] for row in rows] == [SST.labels[value] for value in decoded.values]
    assert [[float(cell) for cell in row[3:]] for row in rows] == decoded.probabilities.tolist()


def test_scores_have_no_probabilities_and_lose_no_digit(tmp_path):
    write_predictions(tmp_path / "sts.csv", STS, ["a", "b"], decode(STS, np.array([[1 / 3], [-0.5]])))
    assert (tmp_path / "sts.csv").read_bytes() == b"id,prediction\na,0.3333333333333333\nb,-0.5\n"


@pytest.mark.parametrize(
    ("name", "logits", "expected"),
    [
        ("sst", np.eye(5)[[3, 0]], "id \t Predicted_Sentiment \na , 3 \nb , 0 \n"),
        ("para", column(2, -2), "id \t Predicted_Is_Paraphrase \na , 1.0 \nb , 0.0 \n"),
        ("sts", column(2.5, 4), "id \t Predicted_Similiary \na , 2.5 \nb , 4.0 \n"),
        ("cfimdb", np.eye(2)[[1, 0]], "id \t Predicted_Sentiment \na , 1 \nb , 0 \n"),
    ],
)
def test_the_courses_own_format(tmp_path, name, logits, expected):
    task = TASKS[name]
    write_course(tmp_path / "out.csv", task, ["a", "b"], decode(task, logits))
    assert (tmp_path / "out.csv").read_bytes().decode() == expected


def test_what_cannot_be_written_is_refused(tmp_path):
    decoded = Decoded(np.array([1, 0]), None)
    other = Task("other", "classes", ("text",), "label", labels=("no", "yes"))
    with pytest.raises(MinBertError, match="'other'.*cfimdb, para, sst, sts"):
        write_course(tmp_path / "x", other, ["a", "b"], decoded)
    for write in (write_course, write_predictions):
        with pytest.raises(MinBertError, match="3 ids for 2 predictions"):
            write(tmp_path / "x", SST, ["a", "b", "c"], decoded)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_outputs_that_are_not_finite_are_no_answers(task, value):
    logits = np.zeros((3, task.num_outputs))
    logits[1, -1] = value
    with pytest.raises(DivergedError, match=f"{task.name}: 1 of 3 outputs of the model are not finite") as error:
        decode(task, logits)
    assert error.value.status == 3 and isinstance(error.value, MinBertError)


def test_a_flag_of_any_task_and_prefix_says_that_a_model_has_diverged():
    assert has_diverged({"eval_sts_pearson": 0.0, "eval_averaged_sts_nonfinite_predictions": 1.0})
    assert has_diverged({"eval_overall": 0.5, "diverged": True})
    assert not has_diverged({"eval_sts_pearson": 0.0, "eval_sts_constant_predictions": 1.0, "diverged": False})


def test_of_equally_probable_classes_the_first_is_the_answer():
    """At a probability of exactly 1/2 too, as torch.round, np.round and the softmax of stock tools have it."""
    para = decode(TASKS["para"], column(0.0, -0.0, 1e-30, -1e-30))
    assert para.values.tolist() == [0, 0, 1, 0]
    assert para.probabilities[0].tolist() == [0.5, 0.5]
    assert round(0.5) == np.round(0.5) == 0
    assert decode(SST, np.array([[0, 2, 1, 2, 2.0]])).values.tolist() == [1]
    assert task_metrics(TASKS["para"], column(0.0, 0.0), np.array([0, 1]))["accuracy"] == 0.5


def test_json_is_strict(tmp_path):
    write_json(
        tmp_path / "m.json",
        {"nan": math.nan, "list": (math.inf, 1), "numpy": np.float32(0.5), "array": np.array([1, np.nan])},
    )

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "m.json").read_text(), parse_constant=refuse)
    assert found == {"nan": None, "list": [None, 1], "numpy": 0.5, "array": [1, None]}


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MinBertError, match=r"Cannot write .*file\.txt: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_written_file_obeys_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == 0o640


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(MinBertError, match="it is not a file"):
        write_atomically(tmp_path, "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MinBertError, match="Cannot write"):
        write_atomically(tmp_path / "file" / "below", "x")
