"""Rows of runs beside each other: what each scored over its seeds, and how far it lies from another."""

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
        scores: seed and score of each run that has one.
        against: the row that it is compared with; empty of a reference.
        is_same: whether both are the same training, and so have no difference.
        reported: what others report.
        effect: how far the mean lies from that of the other row; `None` where nothing can be said.
        p: by Holm's correction over all rows that have a verdict in this metric.
        verdict: see `evaluation.effects.verdict`.
        seeds_to_tell: of each row, where the verdict is open; infinity where no number would tell, not a number where
            there are fewer than `FEWEST_SEEDS`, whose variance is too uncertain to say.
        claimed: the difference between the reported scores, and `claim` what becomes of it.
        without_rows: why the interval is of the seeds alone.
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
        """The verdict, or why there is none."""
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
    """Each row's scores in a metric and its difference from another.

    Args:
        groups: the runs of each row, of different seeds.
        against: the row that each is compared with; of a reference none.
        metric: as `sst_accuracy`, `overall` or `train_sst_accuracy`.
        reduction: what a run's score is, one of `settings.study.REDUCTIONS`.
        reported: by row and metric.
        same: of rows that are the same training as one before them, that one.
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
    """With verdicts, by Holm's method over all cells: of the rows of which both sources of chance are known."""
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
    """What becomes of the difference that is reported; `""` where none is."""
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
    """What becomes of a claim in words: as of the reported difference, unless it has a direction or margin alone."""
    if claim.finds or claim.within is not None:
        return _judge(cell, claim.finds, within=claim.within)
    return _of_reported(cell)


def score(run: Run, metric: str, reduction: str = "best") -> float | None:
    """A run's score; `None` where it has none, or one that is not finite."""
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
    """The tasks and their metrics that a metric is a sum of, with their weights; empty where it is no such sum."""
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
    """Why a run's dev rows cannot be set beside those of another; `""` where they can."""
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
    """What the dev rows add to a sum of metrics, for each of its parts [S, N]. See `weights`."""
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
    """The row that all others are compared with; `""` where these are several."""
    found = {cell.against for cell in cells.values() if cell.against}
    return found.pop() if len(found) == 1 else ""


def table(metric: str, cells: Cells) -> Table:
    """The rows in one metric, with the columns for which there is something to say."""
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
