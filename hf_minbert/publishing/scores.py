"""The model card's sections on quality: scores with intervals, baselines, calibration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..evaluation.calibration import MEASURES
from ..evaluation.significance import correlation_interval, share_interval
from ..settings.metrics import metrics_of
from ..settings.tasks import Task
from .export_classifier import THRESHOLD
from .saved import SavedModel


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [[*header]]
    lines += [["---"] * len(lines[0]), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(saved: SavedModel) -> list[tuple[str, Task, str, float]]:
    """Returns task, metric and value of each score that was measured."""
    return [
        (name, task, metric, saved.metrics[f"eval_{name}_{metric}"])
        for name, task in saved.tasks.items()
        for metric in metrics_of(task)
        if saved.metrics.get(f"eval_{name}_{metric}") is not None
    ]


def row_counts(saved: SavedModel, split: str) -> dict[str, Any]:
    """Returns the number of rows of a split for each task, if the run recorded it; `unlabelled` rows by origin."""
    return (saved.metrics.get("rows") or {}).get(split) or {}


def scores(saved: SavedModel) -> str:
    found, perplexity = measured(saved), saved.metrics.get("eval_perplexity")
    if not found and perplexity is None:
        return "## Scores\n\nNot measured: the folder of the model has no scores."
    dev, baselines = row_counts(saved, "dev"), saved.metrics.get("baselines") or {}
    rows = []
    for name, task, metric, value in found:
        count, base = dev.get(name), (baselines.get(name) or {}).get("scores", {}).get(metric)
        rows.append((
            f"`{name}`", metric, f"{value:.3f}", _interval(task, metric, value, count),
            "" if base is None else f"{base:z.3f}", "" if count is None else f"{count:,}",
        ))  # fmt: skip
    rows += [("masked words", "perplexity", f"{perplexity:.2f}", "", "", "")] if perplexity is not None else []
    for key, said in (("eval_overall", "mean of the tasks' main metrics"), ("eval_leaderboard", "the course's mean")):
        if saved.metrics.get(key) is not None:
            rows.append(("all", said, f"{saved.metrics[key]:.3f}", "", "", ""))
    header = ("task", "metric", "score", "95 % interval", "baseline", "dev rows")
    parts = [_where(saved), table(header, rows), _about_intervals(rows), _about_baselines(baselines)]
    return "## Scores\n\n" + "\n\n".join(part for part in parts if part)


def _where(saved: SavedModel) -> str:
    """On which rows the scores were measured."""
    metrics, share = saved.metrics, saved.runs[-1].get("select_on") if saved.runs else None
    chosen = metrics.get("best_metric") is not None
    said = "Scores of the saved model on the dev rows"
    if chosen and share is not None:
        said = (
            f"Scores of the saved model on {1 - share:.0%} of the dev rows. The checkpoint was chosen by "
            f"`{metrics['metric_for_best_model']}` on the others (`select_on: {share}`)"
        )
    elif chosen:
        said += (
            f". The checkpoint was chosen by `{metrics['metric_for_best_model']}` on the same rows, so the scores are "
            "slightly too high"
        )
    return f"{said}. One run with one seed."


def _interval(task: Task, metric: str, value: float, rows: int | None) -> str:
    """That of a share or a correlation, from the score and the number of rows; empty for other metrics."""
    bounds = None
    # The words of a sentence are not independent, so neither interval is one of tags.
    if rows and metric in ("accuracy", "exact_match") and not task.traits.is_tags:
        bounds = share_interval(round(value * rows), rows)
    elif rows and metric == "pearson":
        bounds = correlation_interval(value, rows)
    return "" if bounds is None else f"{bounds[0]:z.3f} to {bounds[1]:z.3f}"


def _about_intervals(rows: Iterable[tuple[str, ...]]) -> str:
    if not any(row[3] for row in rows):
        return ""
    return (
        "Intervals show how a score varies over dev rows, and not how it varies over training seeds. They "
        "are Wilson's for accuracies and Fisher's for Pearson correlations. `minbert report` computes bootstrap "
        "intervals for all metrics."
    )


def _about_baselines(baselines: dict[str, dict[str, Any]]) -> str:
    said = [f"- `{name}`: {' '.join(of['answer'].split())}." for name, of in baselines.items() if of]
    return "\n".join(["Baselines use no model. They are computed from the dev rows:", "", *said]) if said else ""


def calibration(saved: SavedModel) -> str:
    """Returns a section on what was fitted to the dev rows after training."""
    if not saved.calibration:
        return ""
    rows, said = [], []
    for name, found in saved.calibration.items():
        shown = ["ece", "brier"] if found["temperature"] != 1 else []
        shown += [found["metric"]] if found["metric"] else []
        both = found["before"], found["after"]
        rows += [(f"`{name}`", MEASURES.get(key, key), *(f"{of[key]:z.3f}" for of in both)) for key in shown]
        if found["temperature"] != 1:
            said.append(f"- `{name}`: outputs are divided by {found['temperature']:.3f}, its temperature.")
        said += [f"- `{name}`: {THRESHOLD.format(*each)}" for each in found["thresholds"].items()]
        said += [f"- `{name}`: {note}" for note in found["notes"]]
    how = (
        "Temperatures and thresholds were fitted on the dev rows after training. Scores above that use a threshold "
        "are measured on the same rows, so they are slightly too high. The column “after” is not: each half of the "
        "rows is measured with what was fitted on the other half."
    )
    parts = [how, table(("task", "measure", "before", "after"), rows)] if rows else []  # or notes alone
    return "\n\n".join(["## Calibration", *parts, "\n".join(said)])
