"""The report's sections on one task: its classes or scores, its texts, its errors."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..data.rounds import rows_of_epoch
from ..evaluation import analysis
from ..evaluation.calibration import MEASURES
from ..model.spans import mark_entities
from ..settings.metrics import exact_by_row
from ..settings.tasks import Task
from ..settings.wording import counted
from . import label_sets, plots, tagged
from .builder import Builder
from .document import Example, Examples, Table, Text
from .runs import Answers, Run
from .words import listed, number, percent, quoted, signed


def task_sections(build: Builder, run: Run, answers: Answers) -> None:
    """Returns all sections of a task whose labels are known and whose predictions are finite."""
    name, of_tags = answers.task.name, answers.task.traits.is_tags
    build.section(name, title_of(answers), lambda: (tagged.opening if of_tags else opening)(answers))
    if of_tags:
        if mark_entities(answers.task.labels):
            build.section(f"{name}-entities", "Entities by type", lambda: tagged.entities(answers), 3)
        words = answers.by_word()
        build.section(f"{name}-classes", "Confusion of tags, by word", lambda: classes(build, words), 3)
        build.section(f"{name}-distribution", "Labels against predictions", lambda: distribution(build, words), 3)
    elif answers.is_score:
        build.section(f"{name}-scatter", "Each row", lambda: scatter(build, answers), 3)
        build.section(f"{name}-distribution", "Labels against predictions", lambda: distribution(build, answers), 3)
        build.section(f"{name}-calibration", "Calibration and residuals", lambda: residuals(build, answers), 3)
    elif answers.task.traits.is_set:
        build.section(f"{name}-labels", "Label by label", lambda: label_sets.labels(answers), 3)
        build.section(
            f"{name}-distribution", "Labels against answers", lambda: label_sets.distribution(build, answers), 3
        )
        build.section(f"{name}-calibration", "Calibration", lambda: label_sets.calibration(build, answers), 3)
    else:
        build.section(f"{name}-classes", "Confusion of classes", lambda: classes(build, answers), 3)
        if build.is_ordered(answers.task):
            build.section(f"{name}-neighbours", "Neighbours on the scale", lambda: neighbours(answers), 3)
        build.section(f"{name}-distribution", "Labels against predictions", lambda: distribution(build, answers), 3)
        build.section(f"{name}-calibration", "Calibration", lambda: calibration(build, answers), 3)
    if name in run.calibration:
        build.section(f"{name}-fitted", "Fitted on dev", lambda: fitted(build, run, answers), 3)
    build.section(f"{name}-length", "By length", lambda: by_length(build, answers), 3)
    build.section(f"{name}-words", "By how common the words are", lambda: by_words(build, run, answers), 3)
    worst = tagged.errors if of_tags else errors
    build.section(f"{name}-errors", "Worst errors", lambda: worst(build, answers), 3)


def title_of(answers: Answers) -> str:
    return f"Task {answers.task.name}"


def opening(answers: Answers) -> list:
    task, rows = answers.task, len(answers.ids)
    if answers.is_score:
        return [Text(f"A score from {task.bounds[0]:g} to {task.bounds[1]:g}, on {counted(rows, 'dev row')}.")]
    if task.traits.is_set:
        return label_sets.opening(answers)
    right = int((answers.values == answers.labels).sum())
    names = listed(task.labels) if len(task.labels) <= plots.MOST_NAMED else f"{len(task.labels)} labels"
    return [Text(f"One of {names}, on {counted(rows, 'dev row')}: {right:,} right, {rows - right:,} wrong.")]


# ---- Classes -----------------------------------------------------------------------------------------------------


def classes(build: Builder, answers: Answers) -> list:
    task = answers.task
    matrix = analysis.confusion(task, answers.values, answers.labels)
    scores = analysis.by_class(task, answers.values, answers.labels)
    words = ("never predicted", "never occurs", "neither occurs nor is predicted")
    rows = [
        [of.name, *(word if x is None else number(x) for x, word in zip((of.precision, of.recall, of.f1), words,
                                                                       strict=True)),
         f"{of.support:,}", f"{of.predicted:,}"]
        for of in scores
    ]  # fmt: skip
    alt = f"{task.name}: counts of {answers.unit}s by label (rows) and predicted class (columns)."
    return [
        build.picture(f"{task.name}-confusion", alt, plots.confusion, matrix, task.labels),
        Table(["class", "precision", "recall", "F1", "support", "predicted"], rows),
    ]


def neighbours(answers: Answers) -> list:
    task = answers.task
    matrix = analysis.confusion(task, answers.values, answers.labels)
    pairs = analysis.neighbours(task, matrix)
    wrong = int(matrix.sum() - np.trace(matrix))
    near = sum(pair.rows for pair in pairs)
    said = f"{near:,} of {wrong:,} errors are between neighbours." if wrong else "There is no error."
    blocks = [
        Text(f"{said} {percent(analysis.within(matrix, 1))} of all rows are at most one step off."),
        Table(
            ["confused classes", "rows", "of all rows", "accuracy if they were one class"],
            [[listed(p.names), f"{p.rows:,}", percent(p.share), number(p.accuracy)] for p in pairs],
        ),
        Text(
            f"If the {len(task.labels)} classes are merged into two, the task is easier."
            + " The last line leaves out the rows of the middle class. Its answer is the side with more probability."
            * (len(task.labels) % 2)
        ),
    ]
    merged = analysis.merged(task, answers.values, answers.labels, answers.probabilities)
    rows = [
        [" | ".join(", ".join(map(quoted, side)) for side in (m.low, m.high)), f"{m.rows:,}",
         *("no row" if x is None else number(x) for x in (m.accuracy, m.constant))]
        for m in merged
    ]  # fmt: skip
    return [*blocks, Table(["two classes", "rows", "accuracy", "same answer for every row"], rows)]


def fitted(build: Builder, run: Run, answers: Answers) -> list:
    """Compares probabilities, and answers with a threshold, before and after a fit on the dev rows."""
    name, found = answers.task.name, run.calibration[answers.task.name]
    both = found["before"], found["after"]
    names = MEASURES | ({found["metric"]: found["metric"]} if found["metric"] else {})
    rows = [[said, *(number(of[measure]) for of in both)] for measure, said in names.items()]
    text = f"Outputs are divided by {found['temperature']:.3f} before they become probabilities. "
    for label, threshold in found["thresholds"].items():
        text += f"{quoted(label)} is an answer above a probability of {threshold:.3f}. "
    text += "".join(f"{note} " for note in found["notes"])
    text += (
        f"This was fitted on the {counted(found['rows'], 'dev row')} that are also scored. “After” is measured on "
        "other rows than the fit: each half with the values from the other half. The rest of this page shows the "
        "fitted model."
    )
    alt = f"{name}: accuracy by the probability of the more probable label, "
    pictures = [
        build.picture(
            f"{name}-calibration-{when}", alt + said, plots.bins, [analysis.Bin(**each) for each in of["bins"]],
            f"probability, {said}", "share right", diagonal=(0, 1),
        )
        for when, said, of in zip(("before", "after"), ("before", "after, cross-fitted"), both, strict=True)
    ]  # fmt: skip
    return [Text(text), Table(["", "before", "after"], rows), *pictures]


def calibration(build: Builder, answers: Answers) -> list:
    bins, error = analysis.calibration(answers.probabilities, answers.values, answers.labels)
    sure = sum(b.x * b.rows for b in bins) / len(answers.ids)
    right = float((answers.values == answers.labels).mean())
    alt = f"{answers.task.name}: accuracy by the probability of the answer."
    return [
        Text(
            f"The mean probability of its answers is {number(sure)}, and {percent(right)} are right. "
            f"Expected calibration error: {number(error)}."
        ),
        build.picture(
            f"{answers.task.name}-calibration", alt, plots.bins, bins, "probability of the answer", "share right",
            diagonal=(0, 1),
        ),
    ]  # fmt: skip


# ---- Scores ------------------------------------------------------------------------------------------------------


def scatter(build: Builder, answers: Answers) -> list:
    task, values, labels = answers.task, answers.values, answers.labels
    outside = int(((values < task.bounds[0]) | (values > task.bounds[1])).sum())
    bias = float((values - labels).mean())
    far = analysis.distances(values, labels)
    alt = f"{task.name}: the predicted score over the labelled one, a point per dev row."
    return [
        Text(
            f"Mean absolute error {number(far['mae'])}; mean of prediction − label {signed(bias)}. "
            f"Predictions outside the range: {outside:,} of {len(values):,}."
        ),
        build.picture(f"{task.name}-scatter", alt, plots.scatter, labels, values, task.bounds),
    ]


def residuals(build: Builder, answers: Answers) -> list:
    task, values, labels = answers.task, answers.values, answers.labels
    edges = analysis.equal_edges(*task.bounds, bins=10)
    by_value, by_label = analysis.binned(values, labels, edges), analysis.binned(labels, values - labels, edges)
    rows = [
        [f"{b.low:g} to {b.high:g}", f"{b.rows:,}", signed(b.y),
         "one row" if b.interval is None else f"{signed(b.interval[0])} to {signed(b.interval[1])}"]
        for b in by_label
    ]  # fmt: skip
    alts = (f"{task.name}: mean label by predicted score.", f"{task.name}: mean residual by label.")
    exact = ("no residual", 0.0)
    return [
        build.picture(
            f"{task.name}-calibration",
            alts[0],
            plots.bins,
            by_value,
            "predicted score",
            "mean label",
            diagonal=task.bounds,
        ),
        build.picture(
            f"{task.name}-residuals", alts[1], plots.bins, by_label, "label", "mean of prediction − label", level=exact
        ),
        Table(["label", "rows", "prediction − label", "95 % interval"], rows),
    ]


# ---- Both --------------------------------------------------------------------------------------------------------


def distribution(build: Builder, answers: Answers) -> list:
    task, values, labels = answers.task, answers.values, answers.labels
    alt = f"{task.name}: how often each label occurs in the {answers.unit}s, and how often it is predicted."
    if answers.is_score:
        spread = f"Labels have a mean of {number(labels.mean())} and a standard deviation of {number(labels.std())}; "
        spread += f"predictions of {number(values.mean())} and {number(values.std())}."
        picture = build.picture(f"{task.name}-distribution", alt, plots.score_counts, labels, values, task.bounds)
    else:
        counts = [np.bincount(x[x >= 0], minlength=len(task.labels)) for x in (labels, values)]
        never = [name for name, count in zip(task.labels, counts[1], strict=True) if not count]
        moved = int(np.abs(counts[0] - counts[1]).sum()) // 2
        all_ = int(counts[1].sum())
        spread = f"To be distributed as the labels are, {moved:,} of {all_:,} predictions would have to change."
        spread += f" Never predicted: {listed(never)}." if never else ""
        picture = build.picture(f"{task.name}-distribution", alt, plots.class_counts, task.labels, *counts)
    return [Text(spread), picture]


def by_length(build: Builder, answers: Answers) -> list:
    name = answers.task.name
    x = analysis.lengths(answers.texts)
    words = "words in the two texts" if answers.task.is_pair else "words in the text"
    return [
        Text(
            "Each point is the mean of a group of dev rows, and the bar is its 95 % interval. "
            "All groups have about the same size."
        ),
        build.picture(f"{name}-length", f"{name}: {_measure(answers)} by length.", *_in_bins(answers, x, words)),
    ]


def by_words(build: Builder, run: Run, answers: Answers) -> list:
    name = answers.task.name
    training = run.training_texts(answers.task)
    if training is None:
        return [Text(f"There are no training rows of {name} of its own to count words in.")]
    counts = analysis.word_counts(training)
    x = analysis.commonness(answers.texts, counts)
    new = sum(word not in counts for row in answers.texts for text in row for word in analysis.words(text))
    every = max(1, int(analysis.lengths(answers.texts).sum()))
    label = "mean log10(1 + times a word is in the training texts)"
    return [
        Text(
            f"{percent(new / every)} of the words in dev rows do not occur in the task's "
            f"{counted(len(training), 'training row')}{_drawn(run, answers.task, len(training))}."
        ),
        build.picture(f"{name}-words", f"{name}: {_measure(answers)} by the words.", *_in_bins(answers, x, label)),
    ]


def _drawn(run: Run, task: Task, rows: int) -> str:
    """How many of its own rows an epoch took, if not all."""
    asked = run.recipe["rows_per_epoch"].value if "rows_per_epoch" in run.recipe else None
    asked = asked.get(task.name) if isinstance(asked, dict) else None
    return "" if asked is None or task.sources else f", of which an epoch took {rows_of_epoch(asked, rows):,}"


def _measure(answers: Answers) -> str:
    names = {
        "score": "mean distance to the label", "set": "share of rows with exactly their labels",
        "tags": "share of right words",
    }  # fmt: skip
    return names.get(answers.task.traits.answer, "accuracy")


def _in_bins(answers: Answers, x: np.ndarray, label: str) -> tuple:
    if answers.task.traits.is_tags:
        y = analysis.right_words(answers.values, answers.labels) / [len(row) for row in answers.labels]
    elif answers.task.traits.is_set:
        y = exact_by_row(answers.task, answers.values, answers.labels)
    else:
        y = np.abs(answers.values - answers.labels) if answers.is_score else answers.values == answers.labels
    found = analysis.binned(x, y, analysis.quantile_edges(x))
    return plots.bins, found, label, _measure(answers)


def errors(build: Builder, answers: Answers) -> list:
    if answers.task.traits.is_set:
        return label_sets.errors(build, answers)
    if answers.is_score:
        high, low = analysis.worst_scores(answers.values, answers.labels, 2 * build.examples)
        titles = ("Scored too high", "Scored too low")
        found = [_examples(answers, title, rows) for title, rows in zip(titles, (high, low), strict=True) if rows]
        return found or [Text("Every prediction is exact.")]
    task, values, labels = answers.task, answers.values, answers.labels
    worst = analysis.worst_of_classes(values, labels, answers.probabilities, len(task.labels), build.examples)
    blocks = []
    for label, rows in worst.items():
        wrong = values[(labels == label) & (values != label)]
        ((most, times),) = Counter(wrong.tolist()).most_common(1)
        title = f"{task.labels[label]}: {len(wrong):,} of {int((labels == label).sum()):,} wrong, "
        blocks.append(_examples(answers, f"{title}most often {task.labels[most]} ({times:,})", rows))
    return blocks or [Text("There is no error.")]


def _examples(answers: Answers, title: str, rows: list[int]) -> Examples:
    return Examples(title, [Example(answers.texts[row], remark(answers, row)) for row in rows])


def shown_value(answers: Answers, row: int) -> str:
    """Returns the prediction of a row as `remark` shows it."""
    return _shown(answers, answers.values[row])


def _shown(answers: Answers, value: float) -> str:
    return f"{value:.2f}" if answers.is_score else answers.task.labels[int(value)]


def remark(answers: Answers, row: int, other: Answers | None = None) -> str:
    """Returns the label and the prediction of a row; the predictions of two models if `other` is given."""
    said = [f"label: {_shown(answers, answers.labels[row])}"]
    for who, of in (("predicted", answers),) if other is None else (("before", answers), ("now", other)):
        sure = "" if of.is_score else f" ({of.probabilities[row].max():.2f})"
        said.append(f"{who}: {shown_value(of, row)}{sure}")
    return "; ".join([*said, f"id {answers.ids[row]}"])
