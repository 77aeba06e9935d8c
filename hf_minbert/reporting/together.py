"""Runs of different tasks as one: what models of one task each score together, beside one model of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import MinBertError
from ..evaluation.metrics import overall
from ..settings.metrics import metrics_of
from .runs import Run


def as_one(runs: Sequence[Run]) -> Run:
    """A run with the tasks, scores and predictions of all. Its time is the sum of theirs.

    Raises:
        MinBertError: two of them have scored the same task.
    """
    first, tasks, scores = runs[0], {}, {}
    for run in runs:
        for name in run.data.scored(run.tasks):
            if name in tasks:
                raise MinBertError(
                    f"`together` needs rows of different tasks. Found {name!r} in {run.path.parent.name!r} and in a "
                    "row before it. Leave one out."
                )
            tasks[name] = run.tasks[name]
            scores[name] = {metric: run.metrics[f"eval_{name}_{metric}"] for metric in metrics_of(tasks[name])}
    metrics = {f"eval_{name}_{metric}": value for name, of in scores.items() for metric, value in of.items()}
    metrics |= {f"eval_{name}": value for name, value in overall(tasks.values(), scores).items()}
    metrics |= {"seed": first.seed, "metric_for_best_model": "score of its task"}
    return replace(
        first, tasks=tasks, metrics=metrics, stages=[stage for run in runs for stage in run.stages],
        data=replace(first.data, lines={**first.data.lines, "eval_tasks": None}),
        answers={name: answers for run in runs for name, answers in run.answers.items()},
    )  # fmt: skip
