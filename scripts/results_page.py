"""Writes recipes/results/README.md from the tables of the studies, and the counts of claims in the README.

    cp runs/studies/reports/004/table/study.json recipes/results/studies/reports-004-table.json
    python scripts/results_page.py

A study without a file is listed as not run.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_minbert.evaluation.effects import HOLDS, OPEN, OPPOSITE, SMALLER, Effect
from hf_minbert.reporting.differences import NOT_RUN, SAME, Cell, judgement
from hf_minbert.reporting.document import escaped
from hf_minbert.reporting.study import MARKS, claimed
from hf_minbert.reporting.words import number, p_value, percent, signed
from hf_minbert.run.study import runs_of, same_trainings
from hf_minbert.settings.recipe import recipes_folder
from hf_minbert.settings.study import Claim, Study, packaged_studies, read_study

FOLDER = recipes_folder() / "results"
README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- claims, written by scripts/results_page.py -->", "<!-- end -->"
COUNTS = """
  Of {claims} claims about multitask BERT, {holds} are confirmed so far with a small checkpoint, and {opposite}
  contradicted. For {smaller}, the effect is smaller than claimed. The others are undecided or not measured yet.
  """
REPORTS, OTHERS = "reports/", "Further comparisons"
OVERRIDES = "reports/small"  # with which the reports' studies ran
NOT_YET = "not measured yet"
NOT_COMPARED = "measured, and the difference of the two rows is not stored yet"
VERDICTS = (HOLDS, OPPOSITE, SMALLER, OPEN)
MEANS = (
    "Mean ± standard deviation over seeds; + higher than the row that it is compared with, - lower, ? neither "
    "(p from .05, Holm)."
)
CONFLICTS = " Conflicts: the share of steps in which two tasks' gradients point against each other, mean over pairs."
INTRODUCTION = """# What is claimed, and what is found here

Five student reports fine-tuned BERT on sentiment (`sst`), paraphrases (`para`) and similarity (`sts`). They state the
scores of one run for each row of a table. Here their rows were trained again, with several seeds each. Their claims
are judged by the differences that are found. Further comparisons judge what papers claim of the methods.

## In short

- **Pairs.** Reading both sentences of a pair in one input gives a large gain: `para` +.09 to +.10 and `sts`
  +.51 over vectors that are concatenated (reports 002 and 003). A trained cosine reaches .83 on `sts` (report 004),
  and one input .85 to .86 (report 003). These are rows of two tables, which are not tested against each other.
- **Frozen encoders.** With a linear head, a frozen encoder scores far lower than a fine-tuned one (reports 001 and
  003). With Siamese layers and a cosine its `sts` is higher: .79 and .82 beside .73 and .77 (report 001). This is
  not tested yet.
- **Gradient surgery** brings no gain of 0.01 in the mean of the tasks beside a plain sum. This was tested at three
  learning rates, though tasks' gradients conflict in 45 % of steps.
- **Weights of tasks.** Three of four kinds bring no gain of 0.01 either. Of `uncertainty` it cannot be told.
- **SMART, R-Drop and FGM** (short step) end .006 to .010 above none. None of it is significant by Holm's method
  (p .055, .111 and .077). Uncorrected, the intervals of SMART and FGM exclude 0. The step of FGM was chosen on these
  dev rows.
- **Separate models.** With R-Drop, one model with three private layers a task and three separate models have means of
  .725 and .723. With FGM they have .747 and .740, which cannot be told from chance. FGM is .011 above R-Drop (.004 to
  .018), and FGM with six teachers .013 (.004 to .021). Both are significant by Holm's method.
  [The log](board/log.md) lists what else was tried.
- **LoRA** ends .007 below full fine-tuning (-.014 to -.001, not significant by Holm's method). Neither a loss nor
  equality within 0.01 is shown.

## How it was measured

Each table is a study, and each of its rows a recipe. On one GPU:

    minbert study reports/NAME --overrides reports/small data_dir=$CS224N_DATA model_name_or_path=$MINILM
    minbert study comparisons/NAME data_dir=$CS224N_DATA model_name_or_path=$MINILM

| | here | in the reports |
| --- | --- | --- |
| checkpoint | all-MiniLM-L6-v2: 6 layers, 384 dimensions | BERT-base: 12 layers, 768 dimensions |
| training rows of `para` | 14,150 | 141,506 |

The 14,150 pairs come from the course's dev file, as its train file was not available. The authors of the small
checkpoint trained it on Quora's duplicates and on pairs of inference, so its `para` and `sts` start higher.
[small.overrides.yaml](../reports/small.overrides.yaml) has all other changes. A claim that does not hold here may hold
for BERT-base, and the other way round.

**Difference.** A row is compared with one other row of its table. It is the row that the report compares it with. The
difference is the mean of the row minus the mean of the other, over `n` seeds each. Seeds are not paired. The dev rows
are 1,101 of `sst`, 2,020 of `para` and 863 of `sts`.

**Interval.** The 95 % interval counts both sources of chance, seeds and dev rows, as crossed random effects
([effects.py](../../hf_minbert/evaluation/effects.py)).

**p** is corrected by Holm's method over the rows of a table, for each metric by itself. Intervals are not corrected.
An interval may therefore exclude 0 while p is above .05.

**Verdict.** A claim

- **holds** if p is below .05 and the direction is the claimed one, whichever size is found;
- is **opposite** to what is found if p is below .05 and the direction is the other one;
- is **not as large** if p is .05 or more and the whole interval is below the claimed size. The true effect may even
  have the other sign. The size of a claim without a number is 0.01, a margin that we chose;
- **cannot be told** in all other cases. More seeds or more dev rows would be needed.

"None, within 0.01" is the claim that there is no difference. It holds if the whole interval is within the margin. It
is opposite if the whole interval is outside. These are two one-sided tests (Schuirmann 1987) of level .025 each,
without Holm's correction.

## What to keep in mind

- A reported difference is one of two single runs, and varies too.
- Dev rows also choose the checkpoint of most runs, so scores are a little too high. Two rows are affected alike only
  if their checkpoints were chosen by the same metric.
- `overall` is the mean of the three tasks' metrics.
- Some rows that others are compared with have learned nothing or little:
  - heads at their random start (the baselines of reports 003 and 004);
  - a loss without a threshold (MNR);
  - frozen encoders that answer with the majority class (`para` .631 in reports 001 and 003);
  - "Balanced Round-Robin" of report 004 here: its `sts` is .12, and .67 in the report.
- Rows of report 002 with surgery have other batches than rows without.
- `full`, `sum 1e-4` and `none` of the further comparisons are the same runs, with the same seeds and scores. If their
  spread is small by luck, all three tables have it.
- The step of FGM is the best of the three in its table.

## Names

| name | meaning |
| --- | --- |
| FT, noFT | the encoder is fine-tuned, or frozen |
| FPT | pre-trained further |
| FF | feed-forward layers |
| CE | cross-entropy |
| MNR | multiple negatives ranking |
| WRS | weighted random sampling |
| ConcatA | each sentence is encoded by itself |
| ConcatB | both sentences are in one input |
| AL | one more layer in each head |
| GS | gradient surgery |
| bd, w | with GS: batches of unequal size, or small tasks that start again (data wrapping) |
| PCGrad, GradVac, UPGrad | three kinds of gradient surgery |
| Round-robin | a batch of each task in turn |
| FL | heads alone, on the frozen encoder |
| SMART 0 | the divergence of the search and the divergence that is added are symmetric KL |
| SMART 1 | both are KL |
| SMART 2 | that of the search is KL, the one that is added is symmetric KL |
| Uncertainty, IMTL-L, DWA | weights of tasks that follow the losses |

The further comparisons have the recipe `cs224n/baseline`: both sentences in one input, a linear layer on the pooler,
three epochs.
"""


@dataclass(frozen=True)
class Judged:
    """A claim in one metric.

    Args:
        record: the stored difference; empty unless it is one of the two rows.
        said: one of `VERDICTS`, or why there is none.
    """

    study: str
    claim: Claim
    against: str
    metric: str
    record: Mapping[str, Any]
    said: str


def readme(page: str) -> str:
    """The README of the repository, with the counts of claims that are in the summary of `page`."""
    total = re.search(r"^\| all \|(.*)\|$", page, re.MULTILINE)
    assert total is not None
    claims, holds, opposite, smaller, *_ = (f"**{count.strip()}**" for count in total[1].split("|"))
    said = COUNTS.format(claims=claims, holds=holds, opposite=opposite, smaller=smaller)
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{said}{END}{rest.split(END)[1]}"


def page() -> str:
    studies = {name: read_study(name) for name in packaged_studies()}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name in studies if (path := _file(name)).is_file()}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in studies:
        groups[f"Report {name.split('/')[1]}" if name.startswith(REPORTS) else OTHERS].append(name)
    groups[OTHERS] = groups.pop(OTHERS)  # behind the reports
    judged = {
        group: [line for name in names for line in _judge(name, studies[name], found.get(name, {}), _one(name))]
        for group, names in groups.items()
    }
    parts = [INTRODUCTION, "## Summary\n", *_counts(judged)]
    for group, lines in judged.items():
        parts += [f"### {group}\n", *_claims(lines)]
    for group, names in groups.items():
        parts += [f"## {group}, {'its' if group != OTHERS else 'their'} tables\n"]
        parts += [line for name in names for line in _table(name, studies[name], found.get(name))]
    return "\n".join(parts) + "\n"


def _file(name: str) -> Path:
    return FOLDER / "studies" / f"{name.replace('/', '-')}.json"


# ---- Claims ------------------------------------------------------------------------------------------------------


def _one(name: str) -> dict[str, str]:
    """The rows of a study that come to the training of one before them, and that one."""
    return same_trainings(runs_of(read_study(name, OVERRIDES if name.startswith(REPORTS) else None), Path()))


def _judge(name: str, study: Study, made: Mapping[str, Any], one: Mapping[str, str]) -> Iterator[Judged]:
    """The claims of a study as it is now, by the differences that were stored when it ran; `one` is as `_one`'s."""
    stored = {(line["row"], line["metric"]): line for line in made.get("differences", ())}
    for claim in study.claims:
        row, against = study.row(claim.row), study.against[claim.row]
        for metric in claim.metrics:
            line = stored.get((claim.row, metric), {})
            if line.get("against", made.get("reference")) != against:
                line = {}
            said = f"not run: {row.not_run.rstrip('.')}" if row.not_run else _said(claim, line)
            ours, theirs = (_scores(made, name) for name in (claim.row, against))
            if said == NOT_YET and ours and theirs:
                said = NOT_COMPARED
            if not row.not_run and (
                one.get(claim.row, claim.row) == one.get(against, against) or ours == theirs != ""
            ):
                said = SAME  # also of tables that were stored before a study told so
            yield Judged(name, claim, against, metric, line, said)


def _scores(made: Mapping[str, Any], row: str) -> str:
    """All scores of a row, as a text; empty where there are none."""
    found = [of.get(row) for of in made.get("scores", {}).values()]
    return json.dumps(found) if any(found) else ""


def _said(claim: Claim, line: Mapping[str, Any]) -> str:
    if not line or line["difference"] is None:
        return SAME if line.get("verdict") == SAME else NOT_YET
    effect = Effect(line["difference"], line["low"], line["high"], line["p"], None, None, line["n"])
    verdict = "" if line["p_holm"] is None else line["verdict"]
    said = judgement(claim, Cell((), effect=effect, verdict=verdict, claimed=line["reported_difference"]))
    return NOT_YET if said in ("", NOT_RUN) else said


def _counts(judged: Mapping[str, Iterable[Judged]]) -> Iterator[str]:
    yield "Each claim counts once for each metric and each two rows that it is about. There is no verdict where rows"
    yield "were not run, are not compared yet, or are one model.\n"
    yield f"| report | claims | {' | '.join(VERDICTS)} | no verdict |"
    yield f"| --- |{' ---: |' * (len(VERDICTS) + 2)}"
    whole: Counter[str] = Counter()
    for report, lines in judged.items():
        count = Counter(line.said if line.said in VERDICTS else NOT_YET for line in lines)
        yield _count(report, count)
        whole += count
    yield _count("all", whole) + "\n"


def _count(name: str, count: Counter[str]) -> str:
    return f"| {name} | {count.total()} | {' | '.join(str(count[said]) for said in (*VERDICTS, NOT_YET))} |"


def _claims(lines: Iterable[Judged]) -> Iterator[str]:
    """A line for each claim and metric that was measured, and sentences on the others."""
    told = [line for line in lines if line.said in VERDICTS]
    if told:
        yield "| claim | A | B | metric | A less B, claimed | A less B, found | 95 % interval | p | n | verdict |"
        yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
    before = ""
    for line in told:
        record = line.record
        cells = [
            "" if line.claim.says == before else escaped(line.claim.says), line.claim.row, line.against, line.metric,
            claimed({**record, "finds": line.claim.finds, "within": line.claim.within}),
            *_difference(record, line.claim.within is not None), f"**{line.said}**",
        ]  # fmt: skip
        before = line.claim.says
        yield f"| {' | '.join(cells)} |"
    others: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.said not in VERDICTS:
            others[line.said][line.claim.says].append(f"{line.claim.row} against {line.against}: {line.metric}")
    for said, claims in others.items():
        yield f"\n{said[0].upper()}{said[1:]}{': with these overrides the two rows are one model' * (said == SAME)}:\n"
        yield from (f"- {escaped(says)} ({'; '.join(pairs)})" for says, pairs in claims.items())
    yield ""


def _difference(record: Mapping[str, Any], equivalence: bool) -> list[str]:
    """Difference, interval, p and n of a stored record; p is of another test than that of equivalence."""
    if record["difference"] is None:
        return ["", "", "", str(record["n"])]
    p = "" if record["p_holm"] is None or equivalence else p_value(record["p_holm"])
    interval = f"{signed(record['low'])} to {signed(record['high'])}"
    return [signed(record["difference"]), interval, p, str(record["n"])]


# ---- Tables ------------------------------------------------------------------------------------------------------


def _head(name: str, study: Study, made: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"### {study.title}\n"
    link = f"[`{name}`](../{name}.study.yaml)"
    if made is None:
        reasons = sorted({row.not_run.rstrip(".") for row in study.rows})
        yield f"{link}: not run{': ' + ' / '.join(reasons) if all(reasons) else ' yet'}.\n"
        return
    devices, numbers = ", ".join(made["devices"]), f"[All numbers](studies/{_file(name).name})"
    yield f"{link}, {len(made['seeds'])} seeds a row, on {devices}. {numbers}.\n"
    yield from (f"{said}\n" for said in _selection(made))


def _selection(made: Mapping[str, Any]) -> list[str]:
    """What was chosen on what; the rows that are most of all are called the others, and come last."""
    names, found = [row["row"] for row in made["rows"] if row["seeds"]], []
    for said in made["selection"]:
        listed, colon, rest = said.partition(": ")
        most = bool(colon) and 2 * sum(name in names for name in listed.split(", ")) > len(names)
        found.append((most, f"All other rows: {rest}" if most and len(made["selection"]) > 1 else said))
    return [said for _, said in sorted(found, key=lambda of: of[0])]


def _table(name: str, study: Study, made: Mapping[str, Any] | None) -> Iterator[str]:
    """Means and standard deviations of the rows, with what was reported and how often tasks' gradients conflicted."""
    yield from _head(name, study, made)
    if made is None:
        return
    metrics, rows = list(made["scores"]), [row for row in made["rows"] if row["seeds"]]
    by_row = {(line["row"], line["metric"]): line for line in made["differences"]}
    conflicts = any(row["conflicts"] for row in rows)
    yield (
        MEANS
        + (f" In brackets: {made['source']}." if made["source"] else "")
        + (CONFLICTS if conflicts else "")
        + "\n"
    )
    yield f"| row | against | n | {' | '.join(metrics)} | training |{' conflicts |' * conflicts}"
    yield f"| --- | --- | ---: |{' ---: |' * (len(metrics) + 1 + conflicts)}"
    for row in rows:
        lines = [by_row[row["row"], metric] for metric in metrics]
        against = lines[0].get("against", made["reference"] if row["row"] != made["reference"] else None)
        cells = [row["row"], against or "", str(len(row["seeds"])), *map(_score, lines)]
        cells.append("" if row["seconds"] is None else f"{row['seconds']:.0f} s")
        if conflicts:
            cells.append(percent(fmean(row["conflicts"].values())) if row["conflicts"] else "")
        yield f"| {' | '.join(cells)} |"
    yield from _notes(made)


def _score(line: Mapping[str, Any]) -> str:
    reported = "" if line["reported"] is None else f" ({number(line['reported'])})"
    spread = "" if line["sd"] is None else f" ± {number(line['sd'])}"
    if line["mean"] is None:
        return reported.strip()
    return f"{number(line['mean'])}{spread}{reported} {MARKS.get(line['verdict'], '').strip()}".rstrip()


def _notes(made: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of rows, once for all of which it is the same."""
    rows: dict[str, list[str]] = defaultdict(list)
    first: dict[str, str] = {}
    for row in made["rows"]:
        scores = _scores(made, row["row"])
        twin = first.setdefault(scores, row["row"]) if row["seeds"] else row["row"]
        same = f"each seed has the scores of {twin}: what differs between the two had no effect when they ran"
        for said in (row["note"] if row["seeds"] else "", *row["missing"], same if twin != row["row"] else ""):
            if said:
                rows[said.rstrip(".")].append(row["row"])
    notes = [f"- {', '.join(names)}: {escaped(said)}." for said, names in rows.items()]
    yield "\n".join(["", *notes, *([""] if notes else [])])


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(written := page(), encoding="utf-8")
    README.write_text(readme(written), encoding="utf-8")
