"""The report's sections on a `kind: labels` task: scores by label, and the rows with the largest errors."""

from __future__ import annotations

import numpy as np

from ..evaluation import analysis
from ..evaluation.decoding import names_of
from ..settings.metrics import answered, exact_by_row
from ..settings.tasks import Task
from ..settings.wording import counted
from . import plots
from .builder import Builder
from .document import Block, Example, Examples, Table, Text
from .runs import Answers
from .words import number


def opening(answers: Answers) -> list[Block]:
    task, rows = answers.task, len(answers.ids)
    exact = int(exact_by_row(task, answers.values, answers.labels).sum())
    given, right = (float(of.sum() / rows) for of in answered(task, answers.values, answers.labels))
    return [
        Text(
            f"Any of {len(task.labels)} labels, on {counted(rows, 'dev row')}: exactly the right ones on {exact:,}. "
            f"The mean number of labels of a row is {number(right)}, and of its prediction {number(given)}."
        )
    ]


def labels(answers: Answers) -> list[Block]:
    """Returns the scores of each label."""
    task, words = answers.task, ("never answered", "never occurs", "neither occurs nor is answered")
    thresholds = np.broadcast_to(np.asarray(task.thresholds), len(task.labels))
    rows = []
    for of, threshold in zip(analysis.by_label(task, answers.values, answers.labels), thresholds, strict=True):
        scores = zip((of.precision, of.recall, of.f1), words, strict=True)
        shown = [word if score is None else number(score) for score, word in scores]
        rows.append([of.name, *shown, f"{of.support:,}", f"{of.predicted:,}", f"{threshold:g}"])
    return [Table(["label", "precision", "recall", "F1", "support", "answered", "threshold"], rows)]


def distribution(build: Builder, answers: Answers) -> list[Block]:
    task = answers.task
    said, right = (of.sum(axis=0) for of in answered(task, answers.values, answers.labels))
    alt = f"{task.name}: how often each label stands in the dev rows, and how often it is answered."
    return [build.picture(f"{task.name}-distribution", alt, plots.class_counts, task.labels, right, said)]


def calibration(build: Builder, answers: Answers) -> list[Block]:
    """Compares probabilities with frequencies, over all rows and labels."""
    name, shares = answers.task.name, answers.values.ravel()
    bins = analysis.binned(shares, answers.labels.ravel() > 0, analysis.equal_edges(0, 1, 10))
    error = sum(of.rows * abs(of.y - of.x) for of in bins) / len(shares)
    alt = f"{name}: how often a label holds by its probability."
    axes = ("probability of a label", "share that hold")
    return [
        Text(f"Expected calibration error over all rows and labels: {number(error)}."),
        build.picture(f"{name}-calibration", alt, plots.bins, bins, *axes, diagonal=(0, 1)),
    ]


def errors(build: Builder, answers: Answers) -> list[Block]:
    """Returns the rows whose labels the model considered least likely."""
    worst = analysis.worst_of_sets(answers.task, answers.values, answers.labels, 4 * build.examples)
    if not worst:
        return [Text("There is no error.")]
    shown = [Example(answers.texts[row], remark(answers, row)) for row in worst]
    return [Examples("Rows with an error, those of the highest loss", shown)]


def changes(build: Builder, answers: Answers, theirs: Answers, name: str) -> list[Block]:
    """Returns how many rows another model predicts better or worse, and those that changed most."""
    task = answers.task
    both = [answered(task, of.values, answers.labels) for of in (answers, theirs)]
    before, now = ((said != right).sum(axis=1) for said, right in both)
    fewer, more = int((now < before).sum()), int((now > before).sum())
    blocks: list[Block] = [
        Text(
            f"{task.name}: {counted(fewer, 'row', 'has', 'have')} fewer wrong labels, and {more:,} more; "
            f"{int(now.sum()):,} in all, after {int(before.sum()):,}."
        )
    ]
    for title, gain in (("better", before - now), ("worse", now - before)):
        order = np.argsort(-gain, kind="stable")[: 2 * build.examples]
        if rows := [int(row) for row in order if gain[row] > 0]:
            shown = [Example(answers.texts[row], remark(answers, row, theirs)) for row in rows]
            blocks.append(Examples(f"{task.name}: {title} in {name}", shown))
    return blocks


def remark(answers: Answers, row: int, other: Answers | None = None) -> str:
    """Returns the labels and the predictions of a row; the predictions of two models if `other` is given."""
    said = [f"labels: {_named(answers.task, answers.labels[row])}"]
    for who, of in (("predicted", answers),) if other is None else (("before", answers), ("now", other)):
        said.append(f"{who}: {_named(of.task, of.values[row])}")
    return "; ".join([*said, f"id {answers.ids[row]}"])


def _named(task: Task, row: np.ndarray) -> str:
    """Returns the labels of a row; predicted labels have their probabilities."""
    found = names_of(task, row[None])[0]
    places = [task.labels.index(name) for name in found]
    sure = ["" if row[place] == 1 else f" ({row[place]:.2f})" for place in places]
    return ", ".join(f"{name}{of}" for name, of in zip(found, sure, strict=True)) or "none"
