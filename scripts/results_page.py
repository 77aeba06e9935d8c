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

from hf_minbert.reporting.words import number, signed
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

A difference is that of two means over seeds. Its 95 % interval counts both sources of chance, seeds and dev rows. A
claim *holds* where the difference has the reported direction at the 5 % level (Holm's method over the rows of the
table), *does not hold* where the interval reaches to 0 or beyond and not to the reported size, and else *cannot be
told*. Scores are of dev rows, which also choose the checkpoint: all rows of a table are a little too high alike.
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
    return "; ".join(sorted(reasons)) if all(reasons) else f"{study.title}; not yet."


def _claims(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each difference that a report states and that was measured."""
    yield "| study | row, against the reference | metric | reported | found | 95 % interval | n | claim |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
    for name, made in found.items():
        for line in made["differences"]:
            if line["claim"] in ("", "not run", None) or line["difference"] is None:
                continue
            cells = [
                f"`{name}`", f"{line['row']}, against {made['reference']}", line["metric"],
                signed(line["reported_difference"]), signed(line["difference"]),
                f"{signed(line['low'])} to {signed(line['high'])}", str(line["n"]), f"**{line['claim']}**",
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"
    yield ""


def _table(name: str, made: dict[str, Any]) -> Iterator[str]:
    """Means and standard deviations of the rows, with what was reported."""
    metrics = list(made["scores"])
    by_row = {(line["row"], line["metric"]): line for line in made["differences"]}
    yield f"## {made['title']}\n"
    devices = ", ".join(made["devices"])
    yield f"`{name}`, {len(made['seeds'])} seeds a row, on {devices}. In brackets: {made['source']}.\n"
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
