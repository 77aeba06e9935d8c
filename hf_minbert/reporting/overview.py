"""The report's sections on the whole run: scores with baselines, curves, gradients, time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.encoding import MANY_UNKNOWN, unknown_in_words
from ..evaluation import analysis
from ..evaluation.metrics import overall, value_metrics
from ..evaluation.significance import RESAMPLES, bootstrap, interval, statistics_of
from ..model.losses import COMPARING
from ..settings.metrics import by_words
from . import plots
from .builder import Builder
from .document import Block, Table, Text, Trouble
from .runs import Answers, Run
from .words import between, duration, listed, number, percent

#: How far a score from the predictions may be from the one in metrics.json, which other digits were rounded for.
SAME = 1e-4
IN_ALL = "in all"  # of a time line
LOGGED_POINTS = 40  # of a curve that is drawn as means of neighbours


# ---- Scores ------------------------------------------------------------------------------------------------------


def scores(build: Builder, run: Run) -> list[Block]:
    if not run.answers:
        return [*_recorded(run), *_unknown(run)]
    blocks, rows, drawn = [], [], {}
    for name, answers in run.answers.items():
        if answers.usable:
            metrics, drawn[name] = _with_intervals(build, answers)
            rows += metrics
            blocks += _odd(run, answers)
        else:
            rows += _recorded_rows(run, name)
            blocks += _why_not(answers)
    rows += _overall(run, drawn)
    header = ["task, metric", "dev rows", "score", "95 % interval", "same answer for every row"]
    said = Text(
        f"Intervals are percentiles of a bootstrap over the dev rows ({RESAMPLES:,} resamples, seed {build.seed}): "
        "they show how the scores vary over dev rows, and not how they vary over training seeds. "
        "The last column has the best score that the same answer for every row can have. Correlations with a constant "
        "answer are not defined; here and in metrics.json they are 0."
    )
    return [Table(header, rows), *([said] if drawn else []), *blocks, *_unknown(run), *_baselines(run)]


def _unknown(run: Run) -> list[Block]:
    """How much of each task's training text the vocabulary does not know, if the run counted it."""
    found = run.metrics.get("unknown_tokens") or {}
    said = {name: unknown_in_words(name, share, "the training rows") for name, share in found.items() if share}
    return [(Trouble if found[name] >= MANY_UNKNOWN else Text)(words) for name, words in said.items()]


def _with_intervals(build: Builder, answers: Answers) -> tuple[list[list[str]], np.ndarray | None]:
    """The rows of the table, and the bootstrap of the task's own metric."""
    task, values, labels = answers.task, answers.values, answers.labels
    found, constant = value_metrics(task, values, labels), analysis.constant_answer(task, labels)[1]
    rows, main = [], None
    for metric, statistic in statistics_of(task, values, labels).items():
        drawn = bootstrap(statistic, len(labels), build.seed) if len(labels) > 1 else None
        main = drawn if metric == task.metric else main
        bounds = between(interval(drawn)) if drawn is not None else "one row"
        score = number(found[metric])
        for what in ("predictions", "labels"):
            score += f" (not defined: constant {what})" if f"constant_{what}" in found else ""
        rows.append([f"{task.name}, {metric}", f"{len(labels):,}", score, bounds, number(constant[metric])])
    return rows, main


def _overall(run: Run, drawn: Mapping[str, np.ndarray | None]) -> list[list[str]]:
    """Returns the score over all tasks, from the predictions if all exist, otherwise as recorded.

    Empty for a single task.
    """
    tasks = [answers.task for answers in run.answers.values()]
    if set(drawn) != set(run.tasks):
        return _recorded_rows(run, "overall", "as recorded")
    if len(tasks) < 2:
        return []
    found = {a.task.name: value_metrics(a.task, a.values, a.labels) for a in run.answers.values()}
    summary = overall(tasks, found)
    bounds = "one row"
    draws = [of for of in drawn.values() if of is not None]
    if len(draws) == len(drawn):  # tasks have rows of their own, so their draws are independent
        bounds = between(interval(np.mean(draws, axis=0)))
    rows = [["overall (mean of the tasks)", "", number(summary["overall"]), bounds, ""]]
    return rows + [["leaderboard", "", number(value), "", ""] for value in [summary.get("leaderboard")] if value]


def _odd(run: Run, answers: Answers) -> list[Block]:
    """A sentence if metrics.json has another score."""
    task = answers.task
    found = value_metrics(task, answers.values, answers.labels)[task.metric]
    recorded = run.metrics.get(f"eval_{task.name}_{task.metric}")
    if recorded is None or abs(found - recorded) <= SAME:
        return []
    return [
        Trouble(
            f"metrics.json has {_shown(recorded)} for the {task.metric} of {task.name}, and these predictions come to "
            f"{number(found)}: labels or predictions are not those of the run."
        )
    ]


def _why_not(answers: Answers) -> list[Block]:
    if not answers.broken:
        return []
    return [
        Trouble(
            f"{answers.task.name}: {answers.broken:,} of {len(answers.ids):,} predictions are not finite. The model "
            f"has diverged, and its scores count as 0: lower the learning rate."
        )
    ]


def _recorded_rows(run: Run, name: str, why: str = "no labels here") -> list[list[str]]:
    """Returns the scores of a task, or `overall`, in metrics.json, and the reason why there is no interval."""
    prefix = f"eval_{name}"
    others = tuple(f"eval_{other}_" for other in run.tasks if other.startswith(f"{name}_"))  # sst_films, beside sst
    found = {
        key: value
        for key, value in run.metrics.items()
        if key == prefix or (key.startswith(f"{prefix}_") and not key.startswith(others))
    }
    return [[key.removeprefix("eval_"), "", _shown(value), why, ""] for key, value in found.items()]


def _recorded(run: Run) -> list[Block]:
    """Returns all scores of metrics.json. If there is none, returns those of the last evaluation in the log."""
    metrics = run.metrics
    if not metrics and run.stages:
        logged = [
            entry for stage in run.stages for entry in stage.log if any(key.startswith("eval_") for key in entry)
        ]
        metrics = logged[-1] if logged else {}
    rows = [[key.removeprefix("eval_"), _shown(value)] for key, value in metrics.items() if _is_score(key, value)]
    where = "metrics.json" if run.metrics else "the last evaluation in the log"
    return [Text(f"From {where}."), Table(["metric", "value"], rows)] if rows else [Text("There is no score yet.")]


def _is_score(key: str, value: Any) -> bool:
    timed = key.endswith(("_runtime", "_per_second", "_preparation_time"))
    return key.startswith("eval_") and not timed and (value is None or isinstance(value, int | float))


def _shown(value: float | None) -> str:
    return "not finite" if value is None or not np.isfinite(value) else number(value)


def _baselines(run: Run) -> list[Block]:
    """What is had without a model, a line each."""
    rows = []
    for answers in run.answers.values():
        if not answers.usable:
            continue
        task, labels = answers.task, answers.labels
        answer, constant = analysis.constant_answer(task, labels)
        if task.traits.is_set:
            model = value_metrics(task, answers.values, labels)
            always = f"{task.name}: each label with its frequency, for every row"
            rows += [[always, metric, number(constant[metric]), number(model[metric])] for metric in constant]
            continue
        if task.traits.is_score:
            far, base = analysis.distances(answers.values, labels), {k: constant[k] for k in ("mae", "rmse")}
            for metric, words in (("mae", "mean distance to the label"), ("rmse", "root mean squared distance")):
                rows.append([f"{task.name}: always the mean, {answer:.2f}", words, number(base[metric]),
                             number(far[metric])])  # fmt: skip
            if task.is_pair:
                shares = analysis.overlap(answers.texts, labels)
                model = value_metrics(task, answers.values, labels)
                for metric, value in shares.items():
                    rows.append([f"{task.name}: share of words in common", metric, number(value),
                                 number(model[metric])])  # fmt: skip
        else:
            if task.traits.is_tags:
                (labels,) = by_words(labels)
            right = number(value_metrics(task, answers.values, answers.labels)["accuracy"])
            most = f"{task.name}: always {task.labels[int(answer)]}, the most frequent"
            rows.append([most, "accuracy", number(constant["accuracy"]), right])
            drawn = f"{task.name}: drawn with the labels' frequencies"
            rows.append([drawn, "accuracy", number(analysis.chance(task, labels)), right])
    header = ["without a model", "metric", "baseline", "this model"]
    said = Text("Baselines. Their constants are computed from the dev labels themselves:")
    return [said, Table(header, rows)] if rows else []


# ---- Curves ------------------------------------------------------------------------------------------------------


def curves(build: Builder, runs: Sequence[Run]) -> list[Block]:
    """Shows training loss and dev score of each task over steps, for all runs in one picture."""
    tasks = {name: task for run in runs for name, task in run.tasks.items()}
    found: list[Block] = []
    for name, task in tasks.items():
        score = f"{name}_{task.metric}"
        depends = ", by batch size" if task.loss in COMPARING else ""
        found += _curve(build, runs, f"{name}-loss", f"loss_{name}", f"{name}: training loss{depends}", None, None)
        found += _curve(build, runs, f"{name}-weight", f"weight_{name}", f"{name}: weight of the loss", None, None)
        dev = f"{name}: dev {task.metric}"
        found += _curve(build, runs, f"{name}-score", f"eval_{score}", dev, f"train_{score}", _constant(runs, name))
    if len(tasks) > 1:
        found += _curve(build, runs, "overall", "eval_overall", "dev score, mean of tasks", "train_overall", None)
    found += _curve(build, runs, "perplexity", "eval_perplexity", "perplexity on dev texts", None, None)
    if not found:
        found = _curve(build, runs, "loss", "loss", "training loss", None, None)
    if not found:
        return _broken(runs) or [Text("Nothing was logged yet.")]
    bounds = [stage.name for stage in runs[0].stages[1:]]
    said = f" The lines from top to bottom are where a stage begins: {', '.join(bounds)}." if bounds else ""
    return [Text(f"Over the optimizer's steps.{said}"), *_broken(runs), *found]


def _broken(runs: Sequence[Run]) -> list[Block]:
    """What was logged that is not finite, and hence in no picture."""
    blocks: list[Block] = []
    for run in runs:
        if found := run.broken():
            names = [*list(found)[:6], *([f"{len(found) - 6} more"] if len(found) > 6 else [])]
            who = f"{run.name}: values" if len(runs) > 1 else "Values"
            said = f"that are not finite were logged from step {min(found.values()):,} on, and are left out:"
            blocks.append(Trouble(f"{who} {said} {listed(names)}."))
    return blocks


def _constant(runs: Sequence[Run], name: str) -> tuple[str, float] | None:
    """The level of the same answer for every row."""
    answers = runs[0].answers.get(name)
    if answers is None or not len(answers.labels) or answers.is_score:
        return None
    return "same answer", analysis.constant_answer(answers.task, answers.labels)[1][answers.task.metric]


def _curve(
    build: Builder, runs: Sequence[Run], name: str, key: str, label: str, training: str | None,
    level: tuple[str, float] | None,
) -> list[Block]:  # fmt: skip
    lines = {run.name: run.series(key) for run in runs}
    lines = {name: points for name, points in lines.items() if points[0]}
    if not lines:
        return []
    dashed = {f"{run.name}, training rows": run.series(training) for run in runs if run.name in lines and training}
    if not any(points[0] for points in dashed.values()):
        dashed = {}
    if len(runs) == 1:  # what it is stands on the axis
        lines = {"dev rows": lines[runs[0].name]}
        dashed = {"training rows": next(iter(dashed.values()))} if dashed else {}
    bounds = [stage.start for stage in runs[0].stages[1:]]
    return [
        build.picture(
            f"curve-{name}", f"{label} over steps.", plots.curves, lines, "optimizer step", label, dashed=dashed,
            level=level, boundaries=bounds,
        )
    ]  # fmt: skip


# ---- Gradients ---------------------------------------------------------------------------------------------------


def conflicts(build: Builder, run: Run) -> list[Block]:
    """Shows cosines and conflict rates over time, if the run logged them."""
    named = [key.removeprefix("cosine_") for key in run.logged() if key.startswith("cosine_") and "/" not in key]
    pairs = [pair for pair in named if run.series(f"cosine_{pair}")[1] and run.series(f"conflict_{pair}")[1]]
    if named and not pairs:
        return [Trouble("Nothing finite was logged of the tasks' gradients: the model has diverged.")]
    if not pairs:
        return [
            Text(
                "Not logged: only a run with gradient surgery (such as aggregator: pcgrad) sees the tasks' gradients."
            )
        ]
    means = {
        key: float(np.mean(run.series(key)[1])) for pair in pairs for key in (f"conflict_{pair}", f"cosine_{pair}")
    }
    rows = [[_pair(run, p), percent(means[f"conflict_{p}"]), f"{means[f'cosine_{p}']:+.4f}"] for p in pairs]
    blocks: list[Block] = [
        Text("Two gradients conflict where their cosine is below 0. Means of what was logged:"),
        Table(["gradients of", "steps in conflict", "mean cosine"], rows),
    ]
    for figure, label in (("cosine", "cosine of two tasks' gradients"), ("conflict", "share of steps in conflict")):
        lines = {_pair(run, pair): _thinned(*run.series(f"{figure}_{pair}")) for pair in pairs}
        level = ("no conflict above", 0.0) if figure == "cosine" else None
        blocks.append(
            build.picture(
                f"gradients-{figure}", f"{label} over steps, by pair of tasks.", plots.curves, lines, "optimizer step",
                label, level=level, boundaries=[stage.start for stage in run.stages[1:]],
            )
        )  # fmt: skip
    turn = run.series("surgery_turn")[1]
    said = ""
    if turn:
        said = (
            "The sine of the angle between the gradient that was used and the sum of the tasks' is "
            f"{number(float(np.mean(turn)))} on average. It is 0 if there was nothing to change."
        )
    return [*blocks, *([Text(said)] if said else []), *_layers(run, pairs)]


def _layers(run: Run, pairs: Sequence[str]) -> list[Block]:
    layers = list(
        dict.fromkeys(key.split("/")[1] for key in run.logged() if key.startswith("conflict_") and "/" in key)
    )
    rows = []
    for layer in layers:
        found = [run.series(f"conflict_{pair}/{layer}")[1] for pair in pairs]
        rows.append([layer, *(percent(float(np.mean(values))) if values else "never both" for values in found)])
    heads = ["steps in conflict, by layer", *(_pair(run, pair) for pair in pairs)]
    return [Table(heads, rows)] if rows else []


def _pair(run: Run, pair: str) -> str:
    """`sst, para` of `sst_para`; a task's name may hold a `_` itself."""
    found = [(a, b) for a in run.tasks for b in run.tasks if f"{a}_{b}" == pair]
    return ", ".join(found[0]) if found else pair


def _thinned(steps: Sequence[float], values: Sequence[float]) -> plots.Points:
    """Averages neighbouring values if there are many."""
    pieces = min(len(steps), LOGGED_POINTS)

    def means(x: Sequence[float]) -> list[float]:
        return [float(piece.mean()) for piece in np.array_split(np.array(x, float), pieces)]

    return means(steps), means(values)


# ---- Time and memory ---------------------------------------------------------------------------------------------


def costs(runs: Sequence[Run]) -> list[Block]:
    """Returns time and memory of each run, one column each."""
    lines = {
        "device": lambda run: run.environment.get("device"),
        "processes": lambda run: run.environment.get("processes"),
        "seed": lambda run: run.seed,
        "optimizer steps": _steps,
        "training": lambda run: _sum(run, "train_runtime", duration),
        "steps a second": lambda run: _last(run, "train_steps_per_second"),
        "rows a second": lambda run: _last(run, "train_samples_per_second"),
        "evaluation on dev rows": lambda run: _sum(run, "eval_runtime", duration),
        "most GPU memory": _memory,
        "floating point operations": lambda run: _sum(run, "total_flos", lambda x: f"{x:.3g}"),
        **{name: lambda run, n=name: run.environment.get("versions", {}).get(n) for name in ("torch", "transformers")},
    }
    rows = [[name, *(_cell(of(run)) for run in runs)] for name, of in lines.items()]
    rows = [row for row in rows if any(cell != "not recorded" for cell in row[1:])]
    if not rows:
        return [Text("Nothing of it was recorded.")]
    return [Table(["", *(run.name for run in runs)], rows), *_timelines(runs)]


def _timelines(runs: Sequence[Run]) -> list[Block]:
    """Where the time of the whole jobs went, a column each; that of stages is added up."""
    columns = []
    for run in runs:
        columns.append(Counter())
        for stage in run.stages:
            if timeline := (stage.metrics or {}).get("timeline"):
                columns[-1].update({**timeline["parts"], IN_ALL: timeline["total"]})
    names = dict.fromkeys(name for column in columns for name in column if name != IN_ALL)
    if not names:
        return []
    rows = [
        [name.replace("_", " "), *(duration(of[name]) if name in of else "" for of in columns)]
        for name in (*names, IN_ALL)
    ]
    said = (
        "Time spent in each part of the run, from the start of the process that finished it. Each second counts once."
    )
    return [Text(said), Table(["part", *(run.name for run in runs)], rows)]


def _cell(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def _steps(run: Run) -> str | None:
    if not run.stages:
        return None
    last = run.stages[-1]
    return f"{last.start + max((entry.get('step', 0) for entry in last.log), default=0):,}"


def _sum(run: Run, key: str, shown: Any) -> str | None:
    found = run.series(key)[1]
    return shown(sum(found)) if found else None


def _last(run: Run, key: str) -> str | None:
    found = run.series(key)[1]
    return f"{found[-1]:,.1f}" if found else None


def _memory(run: Run) -> str | None:
    key = "train_peak_memory_gb"
    of_stages = [stage.metrics[key] for stage in run.stages if stage.metrics and key in stage.metrics]
    return f"{max(of_stages):.2f} GB" if of_stages else None
