"""Which tasks train well together: the matrix of gains, and the conclusions from it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.effects import HIGHER, LOWER, OPEN, Sample, difference
from ..io import write_atomically, write_json
from ..settings.study import Study
from .differences import (
    FEWEST_SEEDS,
    HOW,
    Cell,
    Cells,
    compare,
    influence_of,
    interval_text,
    judged,
    score,
    weights,
    why_not,
)
from .document import Block, Document, Section, Table, Text
from .runs import Run
from .study import MARKS, devices, finished_runs, selection
from .words import listed, number, p_value, percent, signed

WHAT = (
    "Every task was trained alone, every pair of tasks together, and all tasks together: the same recipe, the same "
    "number of rounds, and in each round the same batches of a task whatever its company. What a task gains from "
    "company is its dev score in it less its score alone. Standley et al. (2020, arXiv:1905.07553) train tasks in "
    "groups too, and choose the set of models that serves all tasks best; Fifty et al. (2021, arXiv:2109.04617) "
    "estimate the same from one training of all tasks, by how a step for one task moves the loss of another. Here "
    "each pair is trained for real, with several seeds, nothing is estimated from another training, and each "
    "difference has an interval. It holds for this recipe and as many rounds: a longer training may say otherwise."
)
JUDGED = (
    "A group is judged by the mean of its tasks' main metrics, together less alone; p is by Holm's method over all "
    "groups. A single task's gain is corrected over all groups that the task is in. {how}"
)
CONFLICTS = (
    "“In conflict” is the share of steps in which two tasks' gradients over the shared weights have a negative dot "
    "product, {where}. It says how training goes, not what comes of it: the gains do."
)


@dataclass(frozen=True)
class Group:
    """Tasks that were trained together.

    Args:
        together: their mean score, and its difference from the mean of the tasks trained alone.
        gains: the score of each task, and its difference from the task trained alone.
        conflict, cosine: the values of a pair's gradients; `None` if they were not measured.
    """

    tasks: tuple[str, ...]
    together: Cell
    gains: Cells
    conflict: float | None = None
    cosine: float | None = None

    @property
    def name(self) -> str:
        return listed(self.tasks)


@dataclass(frozen=True)
class Affinity:
    """The result of comparing tasks alone and together.

    Args:
        metrics: the main metric of each task.
        alone: the score of each task trained alone.
        groups: the pairs and, for more than two tasks, all tasks together at the end.
        measured: where conflicts were measured; empty if they were not.
        missing: sentences that say what is missing and why.
    """

    study: Study
    metrics: Mapping[str, str]
    alone: Cells
    groups: Sequence[Group]
    measured: str
    missing: Sequence[str]
    selection: Sequence[str]
    devices: Sequence[str]

    @property
    def pairs(self) -> list[Group]:
        return [group for group in self.groups if len(group.tasks) == 2]


def summarize(
    study: Study, root: Path, failed: Mapping[tuple[str, int], str], conflicts: Mapping[str, float] | None = None
) -> Affinity:
    """Summarizes the finished runs.

    Args:
        study: the result of `run.affinity.study_of`.
        failed: the reason of each failed run, by row and seed.
        conflicts: the result of `measure_conflicts`, for the case that the runs with all tasks log none.
    """
    runs, missing = finished_runs(study, root, failed)
    rows = {row.name: tuple(row.keys["train_tasks"]) for row in study.rows}
    tasks = rows[study.rows[-1].name]
    metrics = dict(zip(tasks, study.metrics, strict=True))
    gains = {task: _gains(task, metrics[task], rows, runs) for task in tasks}
    together = judged({row: _together(runs[row], {t: runs[t] for t in of}) for row, of in rows.items() if len(of) > 1})
    logged = _logged(runs[study.rows[-1].name])
    found = logged or conflicts or {}
    where = f"on average over the first {found['steps']:g} steps of a run with all tasks" if "steps" in found else ""
    groups = [
        Group(
            rows[row], cell, {task: gains[task][row] for task in rows[row]},
            *(found.get(f"{what}_{'_'.join(rows[row])}") for what in ("conflict", "cosine")),
        )
        for row, cell in together.items()
    ]  # fmt: skip
    return Affinity(
        study, metrics, {task: gains[task][task] for task in tasks}, groups,
        "as the runs with all tasks logged it" if logged else where,
        [f"{row}: {said}" for row, of in missing.items() for said in of],
        selection(runs, study.reduction), devices([run for of in runs.values() for run in of]),
    )  # fmt: skip


def _gains(task: str, metric: str, rows: Mapping[str, tuple[str, ...]], runs: Mapping[str, Sequence[Run]]) -> Cells:
    """A task's score in each row that trains it; the row of the task alone is the reference."""
    groups = {row: runs[row] for row, of in rows.items() if task in of}
    return compare(groups, dict.fromkeys(groups.keys() - {task}, task), metric)


def _together(runs: Sequence[Run], alone: Mapping[str, Sequence[Run]]) -> Cell:
    """Compares the mean score of tasks trained together with that of one model for each task.

    The mean over the models of one seed is treated as a score of that seed on the dev rows of all tasks. The estimate
    of `evaluation.effects` for two rows therefore applies.
    """
    scored = [run for run in runs if score(run, "overall") is not None]
    scores = [(run.seed, float(value)) for run in scored if (value := score(run, "overall")) is not None]
    cell = Cell(scores, "each alone")
    seeds = [seed for seed in _seeds(alone) if all(_of(of, seed) is not None for of in alone.values())]
    if not scores or not seeds:
        return cell
    parts = weights("overall", {name: scored[0].tasks[name] for name in alone})
    models = {task: [run for seed in seeds if (run := _of(of, seed)) is not None] for task, of in alone.items()}
    separate = np.sum(
        [
            [weight * (score(run, f"{task}_{own}") or 0.0) for run in models[task]]
            for (task, own), weight in parts.items()
        ],
        axis=0,
    )
    reasons = (
        why_not(run, models[task][0], f"{task}_{own}") for task, own in parts for run in (*scored, *models[task])
    )
    why = next(filter(None, reasons), "")
    theirs = [influence_of(models[task], {(task, own): weight})[0] for (task, own), weight in parts.items() if not why]
    ours = () if why else influence_of(scored, parts)
    effect = difference(Sample(np.array([value for _, value in scores]), ours), Sample(separate, theirs))
    return replace(cell, effect=effect, without_rows=why)


def _seeds(alone: Mapping[str, Sequence[Run]]) -> list[Any]:
    return [*dict.fromkeys(run.seed for of in alone.values() for run in of)]


def _of(runs: Sequence[Run], seed: Any) -> Run | None:
    return next((run for run in runs if run.seed == seed), None)


def _logged(runs: Sequence[Run]) -> dict[str, float]:
    """What runs with surgery log of conflicts, in the mean over them."""
    every = [{k.removeprefix("train_"): v for k, v in run.metrics.items() if "/" not in k} for run in runs]
    names = [key for key in (every[0] if every else ()) if key.startswith(("conflict_", "cosine_"))]
    return {name: float(np.mean([of[name] for of in every if name in of])) for name in names}


# ---- In words ----------------------------------------------------------------------------------------------------

ADVICE = {HIGHER: "train them together", LOWER: "train them apart", OPEN: "cannot be told"}


def verdict(group: Group) -> str:
    """Returns one sentence on whether tasks should train together."""
    cell, name = group.together, group.name
    if cell.effect is None:
        return f"{name}: no result, because its runs have not finished."
    if not cell.verdict:
        return f"{name}: {cell.said}."
    found = f"{signed(cell.effect.difference)} in the mean of the tasks, {interval_text(cell.effect)}"
    return f"{name}: {ADVICE[cell.verdict]} ({found}){_would_tell(cell)}{_by_task(group)}."


def _would_tell(cell: Cell) -> str:
    if cell.seeds_to_tell is None:
        return ""
    if math.isnan(cell.seeds_to_tell):
        return f"; {FEWEST_SEEDS} seeds or more are needed to say how many would tell"
    if math.isinf(cell.seeds_to_tell):
        return "; no number of seeds would tell, as dev is too small"
    return f"; {cell.seeds_said} seeds of each would tell"


def _by_task(group: Group) -> str:
    """Returns the tasks with a verdict of their own, if these verdicts say more than that of the mean."""
    of = {said: [task for task, cell in group.gains.items() if cell.verdict == said] for said in (HIGHER, LOWER)}
    parts = [
        f"{listed(tasks)} {'gain' if said == HIGHER else 'lose'}{'s' * (len(tasks) == 1)} by "
        + listed([signed(abs(effect.difference))[1:] for t in tasks if (effect := group.gains[t].effect) is not None])
        for said, tasks in of.items() if tasks
    ]  # fmt: skip
    return f"; {', '.join(parts)}" if parts else ""


def whole_verdict(made: Affinity) -> str:
    """Returns one sentence on all tasks or, for two tasks, on the pair."""
    said = verdict(made.groups[-1])
    told = [group.name for group in made.pairs if group.together.verdict == HIGHER]
    apart = [group.name for group in made.pairs if group.together.verdict == LOWER]
    if len(made.pairs) == 1:
        return said
    pairs = [f"together {', '.join(told)}"] * bool(told) + [f"apart {', '.join(apart)}"] * bool(apart)
    return f"All: {said} Of the pairs: {'; '.join(pairs) or 'nothing can be told'}."


# ---- As files ----------------------------------------------------------------------------------------------------


def records(made: Affinity) -> Iterator[dict[str, Any]]:
    """Returns a flat record for each group and task, and for the mean of the group's tasks."""
    for group in made.groups:
        for task, cell in {**group.gains, "": group.together}.items():
            effect, told = cell.effect, cell.seeds_to_tell is not None and math.isfinite(cell.seeds_to_tell)
            yield {
                "tasks": "+".join(group.tasks), "task": task, "metric": made.metrics.get(task, "overall"),
                "n": len(cell.scores), "mean": cell.mean, "sd": cell.sd,
                "alone": cell.mean - effect.difference if effect and cell.mean is not None else None,
                "gain": effect and effect.difference, "low": effect and effect.low, "high": effect and effect.high,
                "p": effect and effect.p, "p_holm": cell.p, "verdict": cell.said,
                "seeds_that_would_tell": cell.seeds_to_tell if told else cell.seeds_said,
                "conflict": None if task else group.conflict, "cosine": None if task else group.cosine,
            }  # fmt: skip


def write(made: Affinity, root: Path) -> None:
    """Writes affinity.md, affinity.html, affinity.csv and affinity.json.

    Raises `MinBertError` if a file cannot be written.
    """
    flat, text = [*records(made)], io.StringIO()
    lines_of = csv.DictWriter(text, fieldnames=list(flat[0]), lineterminator="\n")
    lines_of.writeheader()
    lines_of.writerows(flat)
    write_atomically(root / "affinity.csv", text.getvalue())
    alone = {
        task: [{"seed": seed, "score": found} for seed, found in cell.scores] for task, cell in made.alone.items()
    }
    write_json(
        root / "affinity.json",
        {
            "title": made.study.title, "rounds": made.study.keys["max_steps"], "seeds": made.study.seeds,
            "metrics": made.metrics, "alone": alone, "gains": flat,
            "verdicts": {"+".join(group.tasks): verdict(group) for group in made.groups},
            "verdict": whole_verdict(made), "conflicts": made.measured, "missing": made.missing,
            "selection": made.selection, "devices": made.devices,
        },
    )  # fmt: skip
    _document(made).write(root)


def _document(made: Affinity) -> Document:
    study = made.study
    notes = [Text(said) for said in (*made.selection, *made.missing)]
    pairs: list[Block] = [_groups_table(made)]
    if made.measured:
        pairs.append(Text(CONFLICTS.format(where=made.measured)))
    return Document(
        study.title, f"{study.keys['max_steps']:,} rounds, {len(study.seeds)} seeds each.", [],
        [
            Section("verdict", "Should they train together?", [
                Text(whole_verdict(made)), *(Text(verdict(group)) for group in made.pairs if len(made.groups) > 1),
            ]),
            Section("gains", "What each task gains from company", [matrix(made), *notes]),
            Section("groups", "Together beside alone", pairs),
            Section("how", "How this was found", [Text(WHAT), Text(JUDGED.format(how=HOW))]),
        ],
        page="affinity.html",
    )  # fmt: skip


def matrix(made: Affinity) -> Table:
    """Returns a row for each task: its gain when trained with each other task, and with all tasks."""
    return _matrix(made, lambda cell: f"{_gain(cell)} ({interval_text(cell.effect)}), {cell.said}")


def _matrix(made: Affinity, gain: Callable[[Cell], str]) -> Table:
    tasks = [*made.metrics]
    by_tasks = {frozenset(group.tasks): group for group in made.groups}
    company = {f"with {task}": {task} for task in tasks} | ({"with all": {*tasks}} if len(tasks) > 2 else {})
    rows = []
    for task in tasks:
        mean, cells = made.alone[task].mean, []
        for others in company.values():
            cell = by_tasks[frozenset(others | {task})].gains[task] if others != {task} else None
            cells.append("" if cell is None or cell.effect is None else gain(cell))
        rows.append([task, made.metrics[task].removeprefix(f"{task}_"), "" if mean is None else number(mean), *cells])
    return Table(["task", "metric", "alone", *company], rows)


def _gain(cell: Cell) -> str:
    return "" if cell.effect is None else signed(cell.effect.difference)


def _groups_table(made: Affinity) -> Table:
    header = ["tasks", "n", "mean together", "less alone", "95 % interval", "p (Holm)", "verdict",
              "seeds that would tell", "in conflict", "mean cosine"]  # fmt: skip
    rows = []
    for group in made.groups:
        cell, effect = group.together, group.together.effect
        rows.append([
            group.name, str(len(cell.scores)), "" if cell.mean is None else number(cell.mean),
            _gain(cell), interval_text(effect),
            "" if cell.p is None else p_value(cell.p), cell.said, cell.seeds_said,
            "" if group.conflict is None else percent(group.conflict),
            "" if group.cosine is None else signed(group.cosine),
        ])  # fmt: skip
    return Table(header, rows)


def lines(made: Affinity) -> list[str]:
    """Returns the matrix and the verdicts for a terminal."""
    shown = _matrix(made, lambda cell: _gain(cell) + MARKS.get(cell.verdict, "  "))
    cells = [shown.header, *shown.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    legend = "Gains over training alone: + higher, - lower, ? cannot be told (95 %, Holm)."
    said = [verdict(group) for group in made.pairs] if len(made.groups) > 1 else []
    return [*text, legend, *made.selection, *made.missing, *said, whole_verdict(made)]
