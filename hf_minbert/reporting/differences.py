"""Compares rows of runs: their scores over seeds, and their differences from a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..evaluation import effects
from ..evaluation.effects import (
    HIGHER,
    LEVEL,
    LOWER,
    MARGIN,
    OPEN,
    Effect,
    Sample,
    difference,
    holm,
    influence,
    seeds_to_tell,
)
from ..evaluation.metrics import overall
from ..settings.metrics import metrics_of
from ..settings.study import Claim
from ..settings.tasks import Task
from .document import Table
from .runs import Run
from .words import number, p_value, signed

MOST_SEEDS = 1000  # that a table names
FEWEST_SEEDS = 3  # of each row: the variance of two is noise, and so is what would follow from it
NOT_RUN = "not run"  # what is said of a claim where one of the two rows has no run
SAME = "the same training"  # and where both rows are one, so that there is no difference


@dataclass(frozen=True)
class Cell:
    """A row of runs in one metric.

    Args:
        scores: the seed and the score of each run that has one.
        against: the row that it is compared with; empty for a reference.
        is_same: whether both rows are the same training, so that there is no difference.
        reported: the score that others report.
        effect: the difference of the means; `None` if it cannot be estimated.
        p: the p-value after Holm's correction over all rows with a verdict in this metric.
        verdict: see `evaluation.effects.verdict`.
        seeds_to_tell: the number of seeds of each row that would decide an open verdict. It is infinity if no number
            is enough, and NaN below `FEWEST_SEEDS` seeds, where the variance is too uncertain.
        claimed: the difference between the reported scores; `claim` is its judgement.
        without_rows: the reason why the interval is for the seeds only.
    """

    scores: Sequence[tuple[Any, float]]
    against: str = ""
    is_same: bool = False
    reported: float | None = None
    effect: Effect | None = None
    p: float | None = None
    verdict: str = ""
    seeds_to_tell: float | None = None
    claimed: float | None = None
    claim: str = ""
    without_rows: str = ""

    @property
    def values(self) -> np.ndarray:
        return np.array([score for _, score in self.scores])

    @property
    def mean(self) -> float | None:
        return float(self.values.mean()) if self.scores else None

    @property
    def sd(self) -> float | None:
        return float(self.values.std(ddof=1)) if len(self.scores) > 1 else None

    @property
    def said(self) -> str:
        """The verdict, or the reason why there is none."""
        if self.is_same:
            return SAME
        if self.effect is None or self.verdict:
            return self.verdict
        if self.effect.over_seeds is None:
            return "one seed: says nothing of others"
        return "not said: without dev rows"

    @property
    def seeds_said(self) -> str:
        if self.seeds_to_tell is None:
            return ""
        if math.isnan(self.seeds_to_tell):
            return f"{FEWEST_SEEDS} or more are needed to say"
        if math.isinf(self.seeds_to_tell):
            return "no number: dev is too small"
        return f"{self.seeds_to_tell:,.0f}" if self.seeds_to_tell <= MOST_SEEDS else f"over {MOST_SEEDS:,}"


#: By name of the row.
Cells = dict[str, Cell]


def compare(
    groups: Mapping[str, Sequence[Run]], against: Mapping[str, str], metric: str, reduction: str = "best",
    reported: Mapping[str, Mapping[str, float]] | None = None, same: Mapping[str, str] | None = None,
) -> Cells:  # fmt: skip
    """Returns the scores of each row in a metric and its difference from another row.

    Args:
        groups: the runs of each row, with different seeds.
        against: the row that each row is compared with. A reference has none.
        metric: such as `sst_accuracy`, `overall` or `train_sst_accuracy`.
        reduction: how a run's score is computed, one of `settings.study.REDUCTIONS`.
        reported: reported scores by row and metric.
        same: for each row that is the same training as an earlier row, that row.
    """
    theirs = {name: of[metric] for name, of in (reported or {}).items() if metric in of}
    first = {name: (same or {}).get(name, name) for name in groups}
    found: Cells = {}
    scored = {
        name: [run for run in runs if score(run, metric, reduction) is not None] for name, runs in groups.items()
    }
    for name, runs in scored.items():
        scores = [(run.seed, value) for run in runs if (value := score(run, metric, reduction)) is not None]
        other = against.get(name, "")
        found[name] = Cell(scores, other, bool(other) and first[name] == first[other], theirs.get(name))
        if other and runs and scored[other] and not found[name].is_same:
            *samples, why = _samples(runs, scored[other], metric, reduction)
            found[name] = replace(found[name], effect=difference(*samples), without_rows=why)
        if other and {name, other} <= theirs.keys():
            found[name] = replace(found[name], claimed=theirs[name] - theirs[other])
    return judged(found)


def judged(cells: Cells) -> Cells:
    """Adds verdicts by Holm's method over all cells for which both sources of chance are known."""
    found = {name: cell.effect for name, cell in cells.items() if cell.effect is not None}
    told = {name: effect for name, effect in found.items() if effect.over_seeds and effect.over_rows}
    for (name, effect), p in zip(told.items(), holm([effect.p for effect in told.values()]), strict=True):
        cells[name] = cell = replace(cells[name], p=p, verdict=effects.verdict(effect, p))
        if cell.verdict == OPEN:  # at the level of Holm's first step, which tells whatever the other rows come to
            more = max(seeds_to_tell(effect, LEVEL / len(told)), len(cell.scores) + 1)
            more = math.nan if effect.fewest_seeds < FEWEST_SEEDS else more
            cells[name] = replace(cell, seeds_to_tell=more)
    return {name: replace(cell, claim=_of_reported(cell)) for name, cell in cells.items()}


def _of_reported(cell: Cell) -> str:
    """Judges the reported difference; `""` if there is none."""
    return _judge(cell, HIGHER if cell.claimed > 0 else LOWER, abs(cell.claimed)) if cell.claimed else ""


def _judge(cell: Cell, direction: str, size: float = MARGIN, within: float | None = None) -> str:
    if cell.is_same:
        return SAME
    if cell.effect is None:
        return NOT_RUN
    if within is not None:
        return effects.equivalence(cell.effect, cell.verdict, within)
    return effects.claim(cell.effect, cell.verdict, direction, size)


def judgement(claim: Claim, cell: Cell) -> str:
    """Judges a claim in words: by its direction or margin if it has one, otherwise by the reported difference."""
    if claim.finds or claim.within is not None:
        return _judge(cell, claim.finds, within=claim.within)
    return _of_reported(cell)


def score(run: Run, metric: str, reduction: str = "best") -> float | None:
    """Returns a run's score; `None` if it has none, or one that is not finite."""
    key = metric if metric.startswith("train_") else f"eval_{metric}"
    if reduction == "best":
        values = [run.metrics.get(key)]
    else:  # not the evaluation before the first step
        log = run.stages[-1].log if run.stages else ()
        values = [entry[key] for entry in log if key in entry and entry.get("step")]
    if reduction == "last":
        values = values[-1:]
    numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def weights(metric: str, tasks: Mapping[str, Task]) -> dict[tuple[str, str], float]:
    """Returns the tasks, metrics and weights of the sum that this metric is. Empty if it is no such sum."""
    single = {f"{name}_{own}": (name, own) for name, task in tasks.items() for own in metrics_of(task)}
    if metric in single:
        return {single[metric]: 1.0}
    nought = {name: dict.fromkeys(metrics_of(task), 0.0) for name, task in tasks.items()}
    base = overall(tasks.values(), nought) if tasks else {}
    found = {}
    for name, own in single.values() if metric in base else ():
        raised = overall(tasks.values(), nought | {name: nought[name] | {own: 1.0}})
        found[name, own] = raised[metric] - base[metric]
    return {part: weight for part, weight in found.items() if weight}


def _samples(runs: Sequence[Run], others: Sequence[Run], metric: str, reduction: str) -> tuple[Sample, Sample, str]:
    """Both rows' runs, and why they are without dev rows."""
    why = next(filter(None, (why_not(run, others[0], metric) for run in (*runs, *others))), "")
    found = []
    for of in (runs, others):
        scores = np.array([score(run, metric, reduction) for run in of])
        found.append(Sample(scores, () if why else influence_of(of, _parts(others[0], metric))))
    return found[0], found[1], why


def _parts(run: Run, metric: str) -> dict[tuple[str, str], float]:
    return weights(metric, {name: run.tasks[name] for name in run.data.scored(run.tasks)})


def why_not(run: Run, first: Run, metric: str) -> str:
    """Returns the reason why the dev rows of two runs cannot be compared; `""` if they can."""
    parts = _parts(run, metric)
    if not parts or parts != _parts(first, metric):
        return f"{metric} is of no predictions that are kept, or of other tasks in either row"
    for task, _ in parts:
        ours, theirs = run.answers.get(task), first.answers.get(task)
        if ours is None or theirs is None:
            return f"there are no predictions of {task} in {run.path.parent.name}/{run.path.name}"
        if not len(ours.labels):
            return ours.missing
        if len(ours.ids) < 2 or ours.ids != theirs.ids:
            return f"the runs have predicted other dev rows of {task}, or a single one"
    return ""


def influence_of(runs: Sequence[Run], parts: Mapping[tuple[str, str], float]) -> list[np.ndarray]:
    """Returns the influence of the dev rows on each part of a sum of metrics, [S, N]. See `weights`."""
    found = []
    for (task, own), weight in parts.items():
        answers = [run.answers[task] for run in runs]
        # a model that has diverged scores 0, whatever the rows
        rows = [
            np.zeros(len(of.ids)) if of.broken else influence(of.task, own, of.values, of.labels) for of in answers
        ]
        found.append(weight * np.array(rows))
    return found


# ---- As text -----------------------------------------------------------------------------------------------------

HOW = (
    "The 95 % interval of a difference counts both sources of chance, seeds and dev rows, as crossed random effects: "
    "the variance over the seeds of both rows, plus that of the difference over the dev rows, less what both of these "
    "count; Student's, with Satterthwaite's degrees of freedom. It is not corrected for several rows. p and verdict "
    "are, by Holm's method over all rows in the metric: “higher” or “lower” where p is below .05. “Seeds that would "
    "tell” is how many of each row, if difference and variances stay as they are."
)
CLAIMS = (
    "A reported difference holds where the verdict has its direction, whatever its size; “opposite” is the other "
    "direction. It is not as large where nothing can be told of its direction and the interval ends short of the "
    "reported size. Else it cannot be told."
)
IN_WORDS = (
    "A claim is judged in each of its metrics by the row's difference. With reported scores it is as below; without a "
    f"number it is taken for a difference of {MARGIN:g}. That there is no difference holds where the interval lies "
    "within the margin, and the opposite does where it lies outside of it: two one-sided tests, of level .025 each."
)


def only_against(cells: Cells) -> str:
    """Returns the row that all others are compared with; `""` if there are several."""
    found = {cell.against for cell in cells.values() if cell.against}
    return found.pop() if len(found) == 1 else ""


def table(metric: str, cells: Cells) -> Table:
    """Returns the rows in one metric, without empty columns."""
    only = only_against(cells)
    columns = {
        metric: lambda name, cell: name,
        "n": lambda name, cell: str(len(cell.scores)),
        "mean": lambda name, cell: _text(number, cell.mean),
        "sd": lambda name, cell: _text(number, cell.sd),
        "lowest": lambda name, cell: _text(number, min(cell.values, default=None)),
        "highest": lambda name, cell: _text(number, max(cell.values, default=None)),
        "against": lambda name, cell: "" if only else cell.against,
        f"less {only}" if only else "difference": lambda name, cell: (
            _effect(cell, "difference") if cell.against else "reference"
        ),
        "95 % interval": lambda name, cell: interval_text(cell.effect),
        "p (Holm)": lambda name, cell: _text(p_value, cell.p),
        "verdict": lambda name, cell: cell.said,
        "seeds that would tell": lambda name, cell: cell.seeds_said,
        "reported": lambda name, cell: _text(number, cell.reported),
        "difference reported": lambda name, cell: _text(signed, cell.claimed),
        "claim": lambda name, cell: cell.claim,
    }
    made = {head: [of(name, cell) for name, cell in cells.items()] for head, of in columns.items()}
    made = {head: texts for head, texts in made.items() if any(texts)}
    return Table([*made], [*zip(*made.values(), strict=True)])


def interval_text(effect: Effect | None) -> str:
    return "" if effect is None else f"{signed(effect.low)} to {signed(effect.high)}"


def _effect(cell: Cell, key: str) -> str:
    return "" if cell.effect is None else signed(getattr(cell.effect, key))


def _text(form, value) -> str:
    return "" if value is None else form(value)
