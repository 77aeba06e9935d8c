"""The report's sections on several runs: the seeds of one recipe, and the differences between two models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..evaluation import analysis
from ..evaluation.effects import Sample, difference, influence
from ..evaluation.metrics import value_metrics
from ..evaluation.significance import mcnemar
from ..settings.metrics import metrics_of
from ..settings.wording import counted
from . import label_sets, tagged
from .builder import Builder
from .by_task import remark, shown_value
from .differences import HOW, compare, interval_text, score, table
from .document import Block, Example, Examples, Table, Text
from .runs import Answers, Run
from .words import number, p_value, signed


def seeds(runs: Sequence[Run]) -> list[Block]:
    """Returns mean and spread of the runs with the first run's recipe, and how other recipes differ from it."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((group for group in groups if group[0].differences(run) == []), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    same, *others = groups
    differing = [(group[0].name, keys) for group in others if (keys := same[0].differences(group[0]))]
    if len(same) < 2:
        alone = "One run. Further runs of this recipe with other seeds, given by --compare, are summed up here."
        return [
            Text(alone),
            *(Text(f"{name} is left out: it differs in {', '.join(keys)}.") for name, keys in differing),
        ]
    names = [f"{name}_{task.metric}" for name, task in runs[0].tasks.items()] + ["overall"]
    found = {name: [score(run, name) for run in same] for name in names}
    found = {name: scores for name, scores in found.items() if None not in scores}
    if not found:
        return [Text("These runs of one recipe have not finished.")]
    values = np.array([*found.values()], float).T
    rows = [[f"{run.name}, seed {run.seed}", *map(number, line)] for run, line in zip(same, values, strict=True)]
    rows.append(["mean", *map(number, values.mean(axis=0))])
    rows.append(["standard deviation", *map(number, values.std(axis=0, ddof=1))])
    rows.append(["highest − lowest", *map(number, np.ptp(values, axis=0))])
    blocks = [Text(f"{len(same)} runs that differ in nothing but their seed."), Table(["run", *found], rows)]
    if not differing:
        return blocks
    by_name = {group[0].name: group for group in groups}
    against = dict.fromkeys([*by_name][1:], same[0].name)
    tables = [table(name, compare(by_name, against, name)) for name in found]
    blocks += [Text(f"{name} differs in {', '.join(keys)}.") for name, keys in differing]
    return [*blocks, Text(f"A row is a recipe, with the name of its first run. {HOW}"), *tables]


def comparison(build: Builder, run: Run, other: Run) -> list[Block]:
    """Returns the differences of the second run's scores from the first's by task, and the rows where they differ."""
    rows, blocks = [], []
    for name, answers in run.answers.items():
        theirs = other.answers.get(name)
        if theirs is None or (why := _why_not(answers, theirs)):
            said = f"{other.name} has no predictions of it" if theirs is None else why
            blocks.append(Text(f"{name} is not compared: {said}."))
            continue
        rows += _differences(answers, theirs)
        blocks += _changes(build, answers, theirs, other.name)
    for name in other.answers.keys() - run.answers.keys():
        blocks.append(Text(f"{name} is not compared: {run.name} has no predictions of it."))
    if not rows:
        return blocks or [Text("The two have no predictions to compare.")]
    header = ["task, metric", run.name, other.name, "difference", "95 % interval", "p"]
    said = Text(
        f"{other.name} less {run.name}. Interval and p are of the dev rows alone, by Student's paired test on what "
        f"each row adds to a score; of an accuracy by row, p is McNemar's exact test. They say nothing of other seeds."
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


def _differences(answers: Answers, theirs: Answers) -> list[list[str]]:
    task, labels, rows = answers.task, answers.labels, []
    scores = [value_metrics(task, of.values, labels) for of in (answers, theirs)]
    for metric in metrics_of(task):
        first, second = scores[0][metric], scores[1][metric]
        cells = [f"{task.name}, {metric}", number(first), number(second), signed(second - first)]
        if len(labels) < 2:
            rows.append([*cells, "one row", "one row"])
            continue
        ours, others = (influence(task, metric, of.values, labels)[None] for of in (answers, theirs))
        effect = difference(Sample(np.array([second]), [others]), Sample(np.array([first]), [ours]))
        assert effect is not None
        exact = metric == "accuracy" and task.traits.is_class  # words of one sentence are not independent
        p = mcnemar(answers.values == labels, theirs.values == labels)[2] if exact else effect.p
        rows.append([*cells, interval_text(effect), p_value(p)])
    return rows


def _changes(build: Builder, answers: Answers, theirs: Answers, name: str) -> list[Block]:
    """Returns the number of changed rows, and the rows that changed most."""
    task, labels = answers.task, answers.labels
    if task.traits.is_tags:
        return tagged.changes(build, answers, theirs, name)
    if task.traits.is_set:
        return label_sets.changes(build, answers, theirs, name)
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
