"""Where a model is weak: the numbers are those of scikit-learn and scipy on the same predictions."""

import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk
from sklearn.dummy import DummyClassifier

from hf_minbert.evaluation import analysis
from hf_minbert.evaluation.metrics import value_metrics
from hf_minbert.evaluation.significance import (
    RESAMPLES,
    bootstrap,
    correlation_interval,
    interval,
    mcnemar,
    mean_interval,
    share_interval,
    statistics_of,
)
from hf_minbert.settings.metrics import metrics_of
from hf_minbert.settings.tasks import Task, get_tasks

SST, PARA, STS = get_tasks(["sst", "para", "sts"])
#: Right is 9 of 12; class 3 is never predicted, class 2 never occurs, class 4 is neither.
LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 3, 1, 0])
VALUES = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 0, 1])


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def drawn():
    """Five classes, predictions that are right more often than not, probabilities that say so, and scores."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 5, 400)
    logits = random.normal(size=(400, 5)) + 1.5 * np.eye(5)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    scores = labels + random.normal(size=400)
    return labels, probabilities.argmax(axis=1), probabilities, scores


# ---- Classes


def test_confusion_and_class_scores_are_those_of_scikit_learn(drawn):
    labels, values, _, _ = drawn
    for x, y in ((values, labels), (VALUES, LABELS), (np.zeros(400, int), labels)):
        assert (analysis.confusion(SST, x, y) == sk.confusion_matrix(y, x, labels=range(5))).all()
        report = sk.classification_report(
            y, x, labels=range(5), target_names=SST.labels, output_dict=True, zero_division=0
        )
        for of in analysis.by_class(SST, x, y):
            theirs = report[of.name]
            ours = (of.precision or 0, of.recall or 0, of.f1 or 0, of.support)
            assert ours == pytest.approx(
                (theirs["precision"], theirs["recall"], theirs["f1-score"], theirs["support"])
            )


def test_a_score_that_is_not_defined_is_none_and_not_nought():
    found = {of.name: of for of in analysis.by_class(SST, VALUES, LABELS)}
    never_predicted, never_there, neither = (found[SST.labels[i]] for i in (3, 2, 4))
    assert (never_predicted.precision, never_predicted.recall, never_predicted.f1) == (None, 0.0, 0.0)
    assert (never_there.precision, never_there.recall, never_there.f1) == (0.0, None, 0.0)
    assert (neither.precision, neither.recall, neither.f1) == (None, None, None)


def test_neighbours_by_hand():
    matrix = analysis.confusion(SST, VALUES, LABELS)
    found = analysis.neighbours(SST, matrix)
    assert [pair.rows for pair in found] == [2, 0, 1, 0]
    assert [pair.names for pair in found] == list(zip(SST.labels, SST.labels[1:], strict=False))
    assert [pair.accuracy for pair in found] == pytest.approx([11 / 12, 9 / 12, 10 / 12, 9 / 12])
    assert analysis.within(matrix, 0) == 9 / 12 and analysis.within(matrix, 1) == 1.0


def test_neighbours_as_one_class_are_what_relabelling_gives(drawn):
    labels, values, _, _ = drawn
    for low, pair in enumerate(analysis.neighbours(SST, analysis.confusion(SST, values, labels))):
        one = [np.where(x == low + 1, low, x) for x in (labels, values)]
        assert pair.accuracy == pytest.approx(sk.accuracy_score(*one))


def test_two_classes_at_each_cut_and_without_the_middle(drawn):
    labels, values, probabilities, _ = drawn
    *cuts, last = analysis.merged(SST, values, labels, probabilities)
    assert len(cuts) == 4
    for cut, of in enumerate(cuts, 1):
        assert of.accuracy == pytest.approx(sk.accuracy_score(labels >= cut, values >= cut))
        dummy = DummyClassifier().fit(labels[:, None], labels >= cut)
        assert of.constant == pytest.approx(dummy.score(labels[:, None], labels >= cut))
        assert of.low == SST.labels[:cut] and of.high == SST.labels[cut:] and of.rows == 400
    kept = labels != 2
    high = probabilities[kept, 3] + probabilities[kept, 4] > probabilities[kept, 0] + probabilities[kept, 1]
    assert last.rows == kept.sum() and last.accuracy == pytest.approx(sk.accuracy_score(labels[kept] > 2, high))
    nothing = analysis.merged(SST, np.array([2, 1]), np.array([2, 2]), probabilities[:2])[-1]
    assert (nothing.rows, nothing.accuracy) == (0, None)


def test_ordered_are_sentiments_and_numbers_that_rise():
    def task(*labels):
        return Task("own", "classes", ("text",), labels=labels)

    assert analysis.is_ordered(SST) and analysis.is_ordered(task("1", "2", "3")) and analysis.is_ordered(task(*"024"))
    assert not any(map(analysis.is_ordered, [PARA, STS, task("a", "b", "c"), task("3", "2", "1"), task("1", "2")]))
    assert not analysis.is_ordered(get_tasks(["nli"])[0])


# ---- Baselines


@pytest.mark.parametrize("task", [SST, PARA], ids=["classes", "binary"])
def test_constant_answer_is_that_of_scikit_learn(task, drawn):
    labels = drawn[0] % len(task.labels)
    answer, found = analysis.constant_answer(task, labels)
    dummy = DummyClassifier(strategy="most_frequent").fit(labels[:, None], labels)
    assert answer == dummy.predict([[0]])[0]
    assert found["accuracy"] == pytest.approx(dummy.score(labels[:, None], labels))
    assert analysis.chance(task, labels) == pytest.approx(sum(np.mean(labels == c) ** 2 for c in range(5)))


def test_a_constant_answer_is_the_best_one_for_each_metric():
    labels = np.array([0, 0, 0, 1])
    most, found = analysis.constant_answer(PARA, labels)
    assert most == 0 and found["accuracy"] == 0.75
    assert found["f1"] == pytest.approx(sk.f1_score(labels, np.ones(4))) and found["f1"] > 0
    (stars,) = get_tasks({"stars": {"kind": "ordinal", "text_columns": ["text"], "labels": ["a", "b", "c", "d"]}})
    labels = np.array([0, 0, 0, 1, 2, 2, 3, 3])  # class 0 is the most frequent, and classes 1 and 2 are nearest to all
    most, found = analysis.constant_answer(stars, labels)
    assert most == 0 and found["accuracy"] == 0.375
    assert found["mean_absolute_error"] == pytest.approx(np.abs(labels - np.median(labels)).mean())


def test_the_correlation_with_a_constant_answer_is_0_as_in_the_scores_of_a_model():
    labels = np.array([5.0, 3.0, 1.0])
    constant, model = analysis.constant_answer(STS, labels)[1], value_metrics(STS, np.full(3, 2.0), labels)
    assert {name: constant[name] for name in metrics_of(STS)} == {"pearson": 0, "spearman": 0}
    assert {name: model[name] for name in metrics_of(STS)} == {"pearson": 0, "spearman": 0}


def test_constant_score_is_the_mean_and_distances_are_those_of_scikit_learn(drawn):
    labels, _, _, scores = drawn
    answer, found = analysis.constant_answer(STS, labels)
    assert answer == pytest.approx(labels.mean()) and found["rmse"] == pytest.approx(labels.std())
    far = analysis.distances(scores, labels)
    assert far["mae"] == pytest.approx(sk.mean_absolute_error(labels, scores))
    assert far["rmse"] == pytest.approx(sk.root_mean_squared_error(labels, scores))


def test_a_baseline_has_every_metric_of_its_task(drawn):
    labels = drawn[0]
    found = analysis.baseline(SST, labels)
    assert "the same label for every row" in found["answer"]
    assert found["scores"].keys() == metrics_of(SST).keys()
    assert found["scores"]["accuracy"] == pytest.approx(np.bincount(labels).max() / len(labels))
    texts = [("a b", "A, b!"), ("a b", "b c"), ("a", "b")]
    assert analysis.baseline(STS, np.array([5.0, 3.0, 1.0]), texts)["scores"].keys() == metrics_of(STS).keys()
    assert analysis.baseline(STS, np.array([5.0, 3.0, 1.0])) == {}  # of texts without a second one
    (topics,) = get_tasks({"topics": {"kind": "labels", "text_columns": ["text"], "labels": ["a", "b"]}})
    sets = analysis.baseline(topics, np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert sets["scores"].keys() == metrics_of(topics).keys()
    (tags,) = get_tasks({"tags": {"kind": "tags", "text_columns": ["tokens"], "labels": ["O", "B-X"]}})
    words = np.array([np.array([0, 0]), np.array([1, 0, 0])], dtype=object)
    assert analysis.baseline(tags, words)["scores"] == pytest.approx(
        {"entity_f1": 0, "entity_precision": 0, "entity_recall": 0, "accuracy": 0.8}
    )


def test_overlap_of_words_by_hand():
    texts = [("a b", "A, b!"), ("a b", "b c"), ("a", "b"), ("", "")]
    shares, labels = [1, 1 / 3, 0, 0], np.array([5.0, 3.0, 1.0, 1.0])
    assert analysis.overlap(texts, labels)["pearson"] == pytest.approx(stats.pearsonr(shares, labels).statistic)


# ---- Bins


def test_bins_are_those_of_scipy_and_lose_no_row(drawn):
    labels, _, _, scores = drawn
    edges = np.linspace(0, 4, 9)
    inside = np.clip(scores, 0, 4)
    found = analysis.binned(scores, scores - labels, edges)
    theirs = stats.binned_statistic(inside, scores - labels, bins=edges)
    counts = stats.binned_statistic(inside, inside, "count", bins=edges).statistic
    assert [of.y for of in found] == pytest.approx(theirs.statistic[counts > 0])
    assert [of.rows for of in found] == counts[counts > 0].tolist() and sum(of.rows for of in found) == 400


def test_equal_edges_are_decimals_so_that_a_label_on_an_edge_begins_a_bin():
    edges, labels = analysis.equal_edges(0.0, 1.0, 10), np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert edges.tolist() == [*labels, 1.0]
    assert [(found.low, found.rows) for found in analysis.binned(labels, labels, edges)] == [(x, 1) for x in labels]


def test_quantile_edges_hold_about_equally_many_rows_and_bear_ties():
    x = np.arange(1000.0)
    assert [of.rows for of in analysis.binned(x, x, analysis.quantile_edges(x))] == [125] * 8
    assert len(analysis.quantile_edges(x[:60])) == 3  # two bins of 30
    same = np.full(100, 7)
    (of,) = analysis.binned(same, same, analysis.quantile_edges(same))
    assert (of.rows, of.x) == (100, 7.0)
    assert len(analysis.binned(x[:1], x[:1] == 0, analysis.quantile_edges(x[:1]))) == 1


def test_calibration_error_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.35, 0.65]])
    bins, error = analysis.calibration(probabilities, np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]))
    assert [(of.rows, of.y) for of in bins] == [(2, 1.0), (2, 0.5)]
    assert error == pytest.approx((2 * 0.35 + 2 * 0.4) / 4)


# ---- Texts and rows


def test_lengths_and_commonness_by_hand():
    counts = analysis.word_counts([("The cat, the dog",), ("The end",)])
    assert counts == {"the": 3, "cat": 1, "dog": 1, "end": 1}
    found = analysis.commonness([("THE cat",), ("unknown",), ("?!",)], counts)
    assert found == pytest.approx([(np.log10(4) + np.log10(2)) / 2, 0, 0])
    assert analysis.lengths([("a b", "c"), ("", "?")]).tolist() == [3, 0]


def test_the_worst_are_wrong_and_the_surest_come_first():
    labels, values = np.array([0, 0, 0, 1]), np.array([1, 1, 0, 1])
    probabilities = np.array([[0.4, 0.6], [0.1, 0.9], [0.8, 0.2], [0.2, 0.8]])
    assert analysis.worst_of_classes(values, labels, probabilities, 2, 5) == {0: [1, 0]}
    assert analysis.worst_scores(np.array([1.0, 5, 2, 0]), np.array([1.0, 2, 4, 1]), 2) == ([1], [2, 3])


def test_changed_rows_of_classes_and_of_scores():
    labels = np.array([0, 1, 1, 0])
    assert analysis.changed(np.array([0, 0, 1, 1]), np.array([1, 1, 1, 1]), labels, False, 5) == ([1], [0])
    scores = analysis.changed(np.array([0.0, 3, 1, 0]), np.array([2.0, 1, 1, 1]), labels, True, 5)
    assert scores == ([1], [0, 3])


# ---- How far to trust a score


@pytest.mark.parametrize("task", [SST, PARA, STS], ids=["classes", "binary", "score"])
def test_fast_statistics_are_the_metrics(task, drawn):
    labels, values, _, scores = drawn
    if task.kind == "score":
        pairs = [(scores, labels), (np.full(400, 2.5), labels), (scores, np.zeros(400))]
    else:
        n = len(task.labels)
        pairs = [(values % n, labels % n), (np.zeros(400, int), labels % n), (values % n, np.zeros(400, int))]
    for x, y in pairs:
        for rows in (np.arange(400), np.random.default_rng(1).integers(0, 400, 100)):
            found = {name: statistic(rows) for name, statistic in statistics_of(task, x, y).items()}
            theirs = value_metrics(task, x[rows], y[rows])
            assert found == pytest.approx({name: theirs[name] for name in found})


def test_bootstrap_is_seeded_and_its_interval_holds_the_score(drawn):
    labels, values, _, _ = drawn
    right = values == labels
    found = [bootstrap(lambda i: right[i].mean(), 400, seed) for seed in (1, 1, 2)]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any() and len(found[0]) == RESAMPLES
    low, high = interval(found[0])
    normal = 1.96 * right.std() / 20  # of a mean, the interval is nearly that of the normal distribution
    assert (low, high) == pytest.approx((right.mean() - normal, right.mean() + normal), abs=0.01)


def test_bootstrap_of_a_correlation_bears_constant_scores(drawn):
    labels = drawn[0]
    found = bootstrap(statistics_of(STS, np.full(400, 1.0), labels)["pearson"], 400)
    assert interval(found) == (0.0, 0.0)


def test_mcnemar_is_the_exact_test_by_hand():
    right, other = np.array([1, 1, 1, 1, 0, 1], bool), np.array([0, 0, 0, 1, 0, 1], bool)
    assert mcnemar(right, other) == (3, 0, pytest.approx(2 * 0.5**3))
    assert mcnemar(right, right) == (0, 0, 1.0)


def test_intervals_of_shares_and_means():
    low, high = share_interval(0, 10)
    assert low == 0.0 and high == pytest.approx(0.2775, abs=1e-4)  # 3.8415 / 13.8415
    assert mean_interval(np.array([2.0])) is None and mean_interval(np.array([2.0, 2.0])) == (2.0, 2.0)
    theirs = stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    assert mean_interval(np.array([1.0, 2.0, 4.0])) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("rows", [4, 30])
def test_the_interval_of_a_correlation_is_that_of_scipy(rows):
    random = np.random.default_rng(1)
    x = random.normal(size=rows)
    found = stats.pearsonr(x, x + random.normal(size=rows))
    theirs = found.confidence_interval(0.95)
    assert correlation_interval(found.statistic, rows) == pytest.approx((theirs.low, theirs.high))


def test_no_interval_where_fishers_is_not_defined():
    assert correlation_interval(0.5, 3) is None and correlation_interval(1.0, 30) is None
