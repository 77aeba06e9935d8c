"""What a report says of several runs: the seeds of one recipe, and the differences between two models on one set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..evaluation import analysis
from ..evaluation.metrics import value_metrics
from ..evaluation.significance import bootstrap, bootstrap_p, interval, mcnemar, statistics_of
from ..settings.wording import counted
from .builder import Builder
from .by_task import remark, shown_value
from .document import Block, Example, Examples, Table, Text
from .runs import Answers, Run
from .words import number, p_value, signed


def seeds(runs: Sequence[Run]) -> list[Block]:
    """Mean and spread of the runs that have the first one's recipe."""
    others = {run.name: runs[0].differences(run) for run in runs[1:]}
    same = [runs[0], *(run for run in runs[1:] if others[run.name] == [])]
    differing = [
        Text(f"{name} is left out: it differs in {', '.join(keys)}.") for name, keys in others.items() if keys
    ]
    if len(same) < 2:
        alone = "One run. Further runs of this recipe with other seeds, given by --compare, are summed up here."
        return [Text(alone), *differing]
    names = [f"{name}_{task.metric}" for name, task in runs[0].tasks.items()] + ["overall"]
    names = [name for name in names if all(run.metrics.get(f"eval_{name}") is not None for run in same)]
    values = np.array([[run.metrics[f"eval_{name}"] for name in names] for run in same])
    if not names:
        return [Text("These runs of one recipe have not finished.")]
    rows = [[f"{run.name}, seed {run.seed}", *map(number, line)] for run, line in zip(same, values, strict=True)]
    rows.append(["mean", *map(number, values.mean(axis=0))])
    rows.append(["standard deviation", *map(number, values.std(axis=0, ddof=1))])
    rows.append(["highest − lowest", *map(number, np.ptp(values, axis=0))])
    return [Text(f"{len(same)} runs that differ in nothing but their seed."), Table(["run", *names], rows), *differing]


def comparison(build: Builder, run: Run, other: Run) -> list[Block]:
    """The second run's scores less the first's, task by task, and the rows where they differ."""
    rows, blocks = [], []
    for name, answers in run.answers.items():
        theirs = other.answers.get(name)
        if theirs is None or (why := _why_not(answers, theirs)):
            said = f"{other.name} has no predictions of it" if theirs is None else why
            blocks.append(Text(f"{name} is not compared: {said}."))
            continue
        rows += _differences(build, answers, theirs)
        blocks += _changes(build, answers, theirs, other.name)
    for name in other.answers.keys() - run.answers.keys():
        blocks.append(Text(f"{name} is not compared: {run.name} has no predictions of it."))
    if not rows:
        return blocks or [Text("The two have no predictions to compare.")]
    header = ["task, metric", run.name, other.name, "difference", "95 % interval", "p"]
    said = Text(
        f"{other.name} less {run.name}. Interval and p are of a paired bootstrap over the dev rows (seed "
        f"{build.seed}); of an accuracy, p is McNemar's exact test. They say nothing of other seeds."
    )
    return [said, Table(header, rows), *blocks]


def _why_not(answers: Answers, theirs: Answers) -> str:
    if answers.ids != theirs.ids:
        return "the two have predicted other rows"
    if answers.task.kind != theirs.task.kind or answers.task.labels != theirs.task.labels:
        return "its labels differ"
    if not answers.usable:
        return "its labels are not there, or not all predictions are finite"
    return "" if not theirs.broken else "not all predictions are finite"


def _differences(build: Builder, answers: Answers, theirs: Answers) -> list[list[str]]:
    task, labels = answers.task, answers.labels
    scores = [value_metrics(task, of.values, labels) for of in (answers, theirs)]
    rows = []
    ours, others = (statistics_of(task, of.values, labels) for of in (answers, theirs))
    for metric, statistic in ours.items():
        first, second = scores[0][metric], scores[1][metric]
        cells = [f"{task.name}, {metric}", number(first), number(second), signed(second - first)]
        if len(labels) < 2:
            rows.append([*cells, "one row", "one row"])
            continue
        drawn = bootstrap(lambda i, a=statistic, b=others[metric]: b(i) - a(i), len(labels), build.seed)
        p = bootstrap_p(drawn)
        if metric == "accuracy":
            p = mcnemar(answers.values == labels, theirs.values == labels)[2]
        low, high = interval(drawn)
        rows.append([*cells, f"{signed(low)} to {signed(high)}", p_value(p)])
    return rows


def _changes(build: Builder, answers: Answers, theirs: Answers, name: str) -> list[Block]:
    """How many rows changed, and those of them that changed most."""
    task, labels = answers.task, answers.labels
    if answers.is_score:
        nearer = int((np.abs(theirs.values - labels) < np.abs(answers.values - labels)).sum())
        farther = int((np.abs(theirs.values - labels) > np.abs(answers.values - labels)).sum())
        said = f"{task.name}: {counted(nearer, 'row', 'is', 'are')} nearer to the label, {farther:,} farther from it."
    else:
        lost, won, _ = mcnemar(answers.values == labels, theirs.values == labels)
        other = int(((answers.values != labels) & (theirs.values != labels) & (answers.values != theirs.values)).sum())
        turned = counted(won, "row", "turns", "turn")
        said = f"{task.name}: {turned} right and {lost:,} wrong; from one error to another: {other:,}."
    better, worse = analysis.changed(answers.values, theirs.values, labels, answers.is_score, 2 * build.examples)
    blocks: list[Block] = [Text(said)]
    for title, found in (("better", better), ("worse", worse)):
        if rows := [row for row in found if shown_value(answers, row) != shown_value(theirs, row)]:
            shown = [Example(answers.texts[row], remark(answers, row, theirs)) for row in rows]
            blocks.append(Examples(f"{task.name}: {title} in {name}", shown))
    return blocks
