"""The table of a study: from its runs' folders to Markdown, CSV, JSON, a page and a picture."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MinBertError
from ..evaluation.effects import HIGHER, LOWER, OPEN
from ..io import write_atomically, write_json
from ..settings.study import Row, Study, run_folder
from ..settings.table import names
from .differences import CLAIMS, HOW, IN_WORDS, Cells, compare, interval_text, judgement, only_against, table
from .document import Block, Document, Picture, Section, Table, Text
from .plots import check_matplotlib, study_scores
from .runs import Run, read_run
from .together import as_one
from .words import duration, listed, number, p_value, percent, quoted, signed

logger = logging.getLogger(__name__)

SPREAD = "Mean ± standard deviation over seeds."


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Args:
        seeds: the seeds of its finished runs.
        missing: sentences that say what is missing and why.
        seconds, memory_gb: the mean time of training, and the largest memory of a run; `None` if they were not logged.
        conflicts: the mean share of steps in which two tasks' gradients conflict, by pair.
        same: an earlier row that is the same training.
    """

    row: Row
    seeds: Sequence[int]
    missing: Sequence[str] = ()
    seconds: float | None = None
    memory_gb: float | None = None
    conflicts: Mapping[str, float] = field(default_factory=dict)
    same: str = ""

    @property
    def note(self) -> str:
        said = f"With these keys the same training as {quoted(self.same)}, so it was run once." if self.same else ""
        return " ".join(filter(None, (self.row.note, said)))


@dataclass(frozen=True)
class StudyTable:
    """The results of a study.

    Args:
        rows: the rows in the order of the study.
        metrics: the metrics of all rows.
        selection: sentences that say how the best models were selected.
        devices: the devices of the runs.
    """

    study: Study
    rows: Sequence[TableRow]
    metrics: Mapping[str, Cells]
    selection: Sequence[str]
    devices: Sequence[str]


def summarize(
    study: Study, root: Path, failed: Mapping[tuple[str, int], str], same: Mapping[str, str] | None = None
) -> StudyTable:
    """Makes the table of the finished runs.

    Args:
        root: the study's folder.
        failed: the reason of each failed run, by row and seed.
        same: for each row that is the same training as an earlier row, that row.
    """
    runs, missing = finished_runs(study, root, failed)
    made = [_table_row(row, runs[row.name], missing[row.name]) for row in study.rows]
    rows = [replace(row, same=(same or {}).get(row.row.name, "")) for row in made]
    reported = {row.name: row.reported for row in study.rows}
    every = [run for of in runs.values() for run in of]
    names = [*(study.metrics or _main_metrics(every)), *(name for claim in study.claims for name in claim.metrics)]
    metrics = {
        name: compare(runs, study.against, name, study.reduction, reported, same) for name in dict.fromkeys(names)
    }
    return StudyTable(study, rows, metrics, selection(runs, study.reduction), devices(every))


def finished_runs(
    study: Study, root: Path, failed: Mapping[tuple[str, int], str]
) -> tuple[dict[str, list[Run]], dict[str, list[str]]]:
    """Returns the finished runs of each row, and sentences about what is missing. See `summarize`."""
    runs: dict[str, list[Run]] = {row.name: [] for row in study.rows}
    missing: dict[str, list[str]] = {}
    for row in study.rows:
        reasons: dict[str, list[str]] = defaultdict(list)
        for seed in study.seeds if row.is_trained else ():
            found = failed.get((row.name, seed)) or _read(run_folder(root, row.name, seed))
            if isinstance(found, Run):
                runs[row.name].append(found)
            else:
                reasons[found].append(str(seed))
        said = [f"seed{'s' * (len(of) > 1)} {listed(of)}: {why}" for why, of in reasons.items()]
        missing[row.name] = [f"not run: {row.not_run}"] if row.not_run else said
    for row in study.rows:
        if row.together:
            runs[row.name] = [as_one(of) for of in _by_seed([runs[name] for name in row.together])]
            missing[row.name] = [f"{name}: {why}" for name in row.together for why in missing[name]]
    return runs, missing


def _by_seed(rows: Sequence[Sequence[Run]]) -> list[list[Run]]:
    """One run of each row, for each seed that all rows have."""
    found = [{run.seed: run for run in of} for of in rows]
    return [[of[seed] for of in found] for seed in found[0] if all(seed in of for of in found)]


def devices(runs: Sequence[Run]) -> list[str]:
    """Returns the devices that the runs trained on."""
    return [*dict.fromkeys(str(run.environment["device"]) for run in runs if "device" in run.environment)]


def _read(folder: Path) -> Run | str:
    """Returns a finished run, or the reason why there is none."""
    if not (folder / "metrics.json").is_file():
        return "not finished"
    try:
        return read_run(folder)
    except MinBertError as error:
        return str(error)


def _main_metrics(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(f"{name}_{run.tasks[name].metric}" for run in runs for name in run.data.scored(run.tasks))
    return [*names, *(["overall"] if len(names) > 1 else [])]


def _table_row(row: Row, runs: Sequence[Run], missing: Sequence[str]) -> TableRow:
    seconds = [sum(run.series("train_runtime")[1]) for run in runs if run.series("train_runtime")[1]]
    of_stages = [stage.metrics or {} for run in runs for stage in run.stages]
    memory = [found["train_peak_memory_gb"] for found in of_stages if "train_peak_memory_gb" in found]
    shares = defaultdict(list)
    for run in runs:
        for key, value in run.metrics.items():
            if key.startswith("train_conflict_") and "/" not in key and isinstance(value, float):
                shares[key.removeprefix("train_conflict_")].append(value)
    return TableRow(
        row, [run.seed for run in runs], missing, float(np.mean(seconds)) if seconds else None,
        max(memory, default=None), {pair: float(np.mean(values)) for pair, values in shares.items()},
    )  # fmt: skip


def selection(runs: Mapping[str, Sequence[Run]], reduction: str) -> list[str]:
    """Says how the best models were selected. If the rows differ, the sentences name the rows of the minority."""
    rows: dict[str, dict[str, None]] = defaultdict(dict)
    for name, of in runs.items():
        for run in of:
            rows[_chosen(run, reduction)][name] = None
    few = sorted(rows, key=lambda said: len(rows[said]))
    rest = few.pop() if len(few) > 1 and 2 * len(rows[few[-1]]) > sum(map(len, rows.values())) else None
    found = [said if len(rows) == 1 else f"{', '.join(rows[said])}: {said}" for said in few]
    return [*found, *([f"All other rows: {rest}"] if rest else [])]


def _chosen(run: Run, reduction: str) -> str:
    share, metric = run.data.lines.get("select_on"), run.metrics.get("metric_for_best_model")
    kept, by = run.data.lines.get("load_best_model_at_end"), str(metric).removeprefix("eval_")
    if reduction != "best":
        what = {"last": "of a run's last evaluation", "mean": "means over a run's evaluations"}[reduction]
        said = f"Scores are {what}; none was chosen for its score."
        if kept:
            said += (
                " The checkpoint that was kept gave the predictions from which the variance over dev rows is taken."
            )
        return said + (" Evaluations are of the dev rows that choose a checkpoint." if share else "")
    if not kept:
        steered = f" Training followed {by} on the dev rows." if metric else " Nothing was chosen on the dev rows."
        return f"Scores are of the last weights.{steered}"
    where = f"Of each run the checkpoint with the best {by} on"
    if share:
        return (
            f"{where} {share:.0%} of the dev rows was kept. Scores are of the other dev rows, which were not "
            "used to choose it."
        )
    return f"{where} the dev rows was kept, and scores are of the same rows: they are somewhat too high."


# ---- As files ----------------------------------------------------------------------------------------------------


def records(made: StudyTable) -> Iterator[dict[str, Any]]:
    """Returns a flat record for each row and metric."""
    for row in made.rows:
        for metric, cells in made.metrics.items():
            cell, effect = cells[row.row.name], cells[row.row.name].effect
            told = cell.seeds_to_tell is not None and math.isfinite(cell.seeds_to_tell)
            yield {
                "row": row.row.name, "against": cell.against, "metric": metric, "n": len(cell.scores),
                "mean": cell.mean, "sd": cell.sd,
                "lowest": min(cell.values, default=None), "highest": max(cell.values, default=None),
                "difference": effect and effect.difference, "low": effect and effect.low,
                "high": effect and effect.high, "p": effect and effect.p, "p_holm": cell.p, "verdict": cell.said,
                "seeds_that_would_tell": cell.seeds_to_tell if told else cell.seeds_said, "reported": cell.reported,
                "reported_difference": cell.claimed, "claim": cell.claim, "seconds": row.seconds,
                "memory_gb": row.memory_gb, "missing": "; ".join(row.missing),
            }  # fmt: skip


def claim_records(made: StudyTable) -> Iterator[dict[str, Any]]:
    """Returns a flat record for each claim in words and metric, with its judgement."""
    flat = {(line["row"], line["metric"]): line for line in records(made)}
    kept = ("row", "against", "metric", "n", "reported_difference", "difference", "low", "high", "p_holm")
    for claim in made.study.claims:
        for metric in claim.metrics:
            found = {key: flat[claim.row, metric][key] for key in kept}
            said = judgement(claim, made.metrics[metric][claim.row])
            yield {"says": claim.says, **found, "finds": claim.finds, "within": claim.within, "claim": said}


def write(made: StudyTable, root: Path) -> None:
    """Writes study.md, study.csv, study.json and study.html, and study.png if matplotlib is installed.

    Raises:
        MinBertError: a file cannot be written.
    """
    flat, text = [*records(made)], io.StringIO()
    lines_of = csv.DictWriter(text, fieldnames=list(flat[0]) if flat else ["row", "metric"], lineterminator="\n")
    lines_of.writeheader()
    lines_of.writerows(flat)
    write_atomically(root / "study.csv", text.getvalue())
    study = made.study
    about = {key: getattr(study, key) for key in ("title", "source", "reference", "reduction", "seeds")}
    about |= {"devices": made.devices, "selection": made.selection}
    rows = [{**asdict(row), "row": row.row.name, "recipe": row.row.recipe, "note": row.note} for row in made.rows]
    scores = {
        metric: {name: [{"seed": seed, "score": score} for seed, score in cell.scores] for name, cell in cells.items()}
        for metric, cells in made.metrics.items()
    }
    write_json(
        root / "study.json",
        {**about, "rows": rows, "differences": flat, "claims": [*claim_records(made)], "scores": scores},
    )
    _document(made).write(root)


def _document(made: StudyTable) -> Document:
    study = made.study
    others = {*study.against.values()}
    count = f"{len(made.rows)} rows, {len(study.seeds)} seed{'s' * (len(study.seeds) > 1)} each"
    count += f"; against {study.reference}" if others <= {study.reference} else ""
    unfinished = [f"{row.row.name}: {said}" for row in made.rows for said in row.missing]
    sections = [
        Section("scores", "Scores", [*_chosen_blocks(made), Text(SPREAD), scores_table(made), *_picture(made)]),
        *([Section("claims", "Claims", [Text(IN_WORDS), _claims_table(made)])] if study.claims else []),
        Section("differences", "Differences", [Text(HOW), *([Text(CLAIMS)] if _claims(made) else [])]),
    ]
    for metric, cells in made.metrics.items():
        notes = dict.fromkeys(cell.without_rows for cell in cells.values() if cell.without_rows)
        blocks: list[Block] = [*_chosen_blocks(made), table(metric, cells)]
        blocks += [Text(f"An interval is of the seeds alone, without a verdict: {why.rstrip('.')}.") for why in notes]
        sections.append(Section(metric, metric, blocks, level=3))
    sections.append(Section("costs", "Time, memory, conflicts", _costs(made)))
    sections.append(Section("rows", "Rows", [_rows(made), *map(Text, unfinished)]))
    subtitle = f"{count}.{f' Reported scores: {study.source}.' if study.source else ''}"
    return Document(study.title or "Study", subtitle, [], sections, page="study.html")


def _rows(made: StudyTable) -> Table:
    """What each row is."""
    study, rows = made.study, []
    for row in made.rows:
        _, own, _, by_recipe, by_row = study.changes(row.row)
        rows.append([row.row.name, row.row.recipe, _keys({**own, **by_recipe, **by_row}), row.note])
    words = {key: value.value for key, value in study.words.items()}
    of_all = {**study.keys, **study.overrides.get("keys", {}), **words}
    return Table(
        ["row", "recipe", "changes", "note"], [*rows, *([["all rows", "", _keys(of_all), ""]] if of_all else [])]
    )


def _keys(keys: Mapping[str, Any]) -> str:
    """Returns keys in words, without those of a machine, and only the last part of paths, because the page may be
    published.
    """
    shown = {key: keys[key] for key in keys if key not in names(scope=("machine", "secret"))}
    shown = {key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
             for key, value in shown.items()}  # fmt: skip
    return ", ".join(f"{key}: {value}" for key, value in shown.items())


def _claims_table(made: StudyTable) -> Table:
    header = ["claim", "row", "against", "metric", "claimed", "found", "95 % interval", "p (Holm)", "n", "judgement"]
    rows = []
    for line in claim_records(made):
        effect = made.metrics[line["metric"]][line["row"]].effect
        rows.append([
            line["says"], line["row"], line["against"], line["metric"], claimed(line),
            "" if effect is None else signed(effect.difference), interval_text(effect),
            "" if line["p_holm"] is None else p_value(line["p_holm"]), str(line["n"]), line["claim"],
        ])  # fmt: skip
    return Table(header, rows)


def claimed(line: Mapping[str, Any]) -> str:
    """Describes the claimed difference in a record."""
    if line["within"] is not None:
        return f"none, within {line['within']:g}"
    return line["finds"] or signed(line["reported_difference"])


def _claims(made: StudyTable) -> bool:
    return any(cell.claimed is not None for cells in made.metrics.values() for cell in cells.values())


def _chosen_blocks(made: StudyTable) -> list[Block]:
    return [Text(said) for said in made.selection] or [Text("No run has finished.")]


def scores_table(made: StudyTable) -> Table:
    """Returns mean and standard deviation of every row in every metric."""
    header = ["row", "n", *made.metrics]
    return Table(header, [[row.row.name, str(len(row.seeds)), *_means(made, row)] for row in made.rows])


def _means(made: StudyTable, row: TableRow) -> list[str]:
    found = []
    for cells in made.metrics.values():
        cell = cells[row.row.name]
        spread = "" if cell.sd is None else f" ± {number(cell.sd)}"
        found.append("" if cell.mean is None else f"{number(cell.mean)}{spread}")
    return found


def _costs(made: StudyTable) -> list[Block]:
    pairs = dict.fromkeys(pair for row in made.rows for pair in row.conflicts)
    header = ["row", "training, mean of runs", "most GPU memory", *(f"steps in conflict, {pair}" for pair in pairs)]
    rows = [
        [
            row.row.name, "" if row.seconds is None else duration(row.seconds),
            "" if row.memory_gb is None else f"{row.memory_gb:.2f} GB",
            *(percent(row.conflicts[pair]) if pair in row.conflicts else "" for pair in pairs),
        ]
        for row in made.rows if row.seeds
    ]  # fmt: skip
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    header, *rows = zip(*columns, strict=True) if columns else [()]
    return [Table(header, rows)] if rows else [Text("Nothing of it was recorded.")]


def _picture(made: StudyTable) -> list[Block]:
    if not any(cell.scores for cells in made.metrics.values() for cell in cells.values()):
        return []
    try:
        check_matplotlib()
    except MinBertError as error:
        logger.info("No plot: %s", error)
        return []
    whose = "of the reference" if only_against(next(iter(made.metrics.values()))) else "that the row is compared with"
    said = (
        f"A point is a run, the thick mark the mean, the dotted line the mean {whose}. The bar is the 95 % interval "
        "of the difference from it: where the bar meets the line, the difference cannot be told."
    )
    png = study_scores(made.metrics)
    return [Picture("study", "Scores by row: a panel for each metric.", png, folder="."), Text(said)]


#: What stands beside a mean in a terminal.
MARKS = {HIGHER: " +", LOWER: " -", OPEN: " ?"}


def lines(made: StudyTable) -> list[str]:
    """Returns the table for a terminal: mean ± standard deviation, and the verdict for each row."""
    shown = scores_table(made)
    rows = next(iter(made.metrics.values()), {})
    only = only_against(rows) or made.study.reference
    if mixed := not {cell.against for cell in rows.values()} <= {only, ""}:
        only = "the row that it is compared with"
    cells = [[*shown.header, *(["against"] if mixed else [])]]
    for row in shown.rows:
        said = [MARKS.get(of[row[0]].verdict, "  ") for of in made.metrics.values()]
        scores = [text + mark for text, mark in zip(row[2:], said, strict=True)]
        cells.append([row[0], row[1], *scores, *([rows[row[0]].against] if mixed else [])])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    reference = f"{SPREAD} + higher than {only}, - lower, ? cannot be told (95 %, Holm)."
    missing = [f"{row.row.name}: {said}" for row in made.rows for said in row.missing]
    same = [f"{row.row.name}: the same training as {row.same}" for row in made.rows if row.same]
    return [*text, reference, *made.selection, *missing, *same]
