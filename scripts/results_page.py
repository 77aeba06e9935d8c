"""Writes recipes/results/README.md from the tables of the reports' studies.

    cp runs/studies/reports/004/table/study.json recipes/results/studies/reports-004-table.json
    python scripts/results_page.py

A study that was not run has no file, and is listed as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_minbert.reporting.words import number, p_value, signed
from hf_minbert.settings.recipe import recipes_folder
from hf_minbert.settings.study import packaged_studies, read_study

FOLDER = recipes_folder() / "results"
INTRODUCTION = """# What the reports claim, and what is found here

Written by `python scripts/results_page.py` from the tables of the studies. Each study is run by

    minbert study NAME --overrides reports/small data_dir=$CS224N_DATA model_name_or_path=$MINILM

on all-MiniLM-L6-v2, a checkpoint of 6 layers and 384 dimensions. It was trained by its authors on Quora's duplicates
and on NLI pairs, so its scores on para and sts are not comparable with BERT-base's; nor is para itself, of which
there are 14,150 training rows here and 141,506 in the reports. What changes for it is in
[small.overrides.yaml](../reports/small.overrides.yaml). So a claim that does not hold here may hold for BERT-base.

The reports state scores, one run a row. A row's claim is taken to be its difference from the table's reference row,
also where the report compares it with another. What is found is the difference of two means over `n` seeds each. Its
95 % interval counts both sources of chance, seeds and dev rows, and is not corrected for the number of rows in a
table; `p` is, by Holm's method. So an interval may lie beside 0 and p above .05: then the difference *cannot be
told*. That a reported difference is of two single runs, and varies too, is not counted.

- **holds**: p is below .05, and the difference has the reported direction, whatever its size;
- **does not hold**: the interval reaches to 0 or beyond, and not to the reported size: nothing was found, or the
  opposite;
- **cannot be told**: neither. "Seeds" says how many of each row would tell, if difference and variances stay as they
  are.

Scores are of dev rows, which also choose the checkpoint: all rows of a table are a little too high alike. `overall`
is the mean of the tasks' metrics.
"""


def page() -> str:
    names = [name for name in packaged_studies() if name.startswith("reports/")]
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name in names if (path := _file(name)).is_file()}
    parts = [INTRODUCTION, "## The claims\n", *_claims(found)]
    parts += [line for name, made in found.items() for line in _table(name, made)]
    parts += ["## Not run\n", *(f"- `{name}`: {_why(name)}" for name in names if name not in found)]
    return "\n".join(parts) + "\n"


def _file(name: str) -> Path:
    return FOLDER / "studies" / f"{name.replace('/', '-')}.json"


def _why(name: str) -> str:
    study = read_study(name)
    reasons = {row.not_run for row in study.rows}
    if all(reasons):
        return " / ".join(sorted(reason.rstrip(".") for reason in reasons)) + "."
    return f"{study.title}: not run yet."


def _claims(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each difference that a report states and that was measured."""
    yield "| study | row | metric | reported | found | 95 % interval | p | n | seeds | claim |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for name, made in found.items():
        for line in made["differences"]:
            if line["claim"] in ("", "not run", None) or line["p_holm"] is None:
                continue
            cells = [
                f"`{name}`", line["row"], line["metric"], signed(line["reported_difference"]),
                signed(line["difference"]), f"{signed(line['low'])} to {signed(line['high'])}",
                p_value(line["p_holm"]), str(line["n"]),
                str(line["seeds_that_would_tell"] or ""), f"**{line['claim']}**",
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"
    yield ""


def _table(name: str, made: dict[str, Any]) -> Iterator[str]:
    """Means and standard deviations of the rows, with what was reported."""
    metrics = list(made["scores"])
    by_row = {(line["row"], line["metric"]): line for line in made["differences"]}
    yield f"## {made['title']}\n"
    devices = ", ".join(made["devices"])
    yield f"`{name}`, {len(made['seeds'])} seeds a row, on {devices}. Reference: {made['reference']}. In brackets:"
    yield f"{made['source']}.\n"
    yield from (f"{said}\n" for said in made["selection"])
    yield f"| row | n | {' | '.join(metrics)} | training |"
    yield f"| --- | ---: |{' ---: |' * (len(metrics) + 1)}"
    for row in made["rows"]:
        cells = [_score(by_row[row["row"], metric]) for metric in metrics]
        time = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
        yield f"| {' | '.join([row['row'], str(len(row['seeds'])), *cells, time])} |"
    notes = [f"- {row['row']}: {said}" for row in made["rows"] for said in (row["note"], *row["missing"]) if said]
    yield "\n".join(["", *notes, ""])


def _score(line: dict[str, Any]) -> str:
    reported = "" if line["reported"] is None else f" ({number(line['reported'])})"
    spread = "" if line["sd"] is None else f" ± {number(line['sd'])}"
    return reported.strip() if line["mean"] is None else f"{number(line['mean'])}{spread}{reported}"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
