"""Evaluates models of the recipes in recipes/glue on GLUE's dev splits, and writes the leaderboard's files.

    python scripts/glue.py runs/glue/all --output-dir runs/glue/submission
    python scripts/glue.py runs/glue/cola runs/glue/sst2 runs/glue/mrpc ... --output-dir runs/glue/submission

The runs' recipes name the rows. Without --output-dir it writes no files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from hf_minbert import MinBertError, Predictor, Task
from hf_minbert.data.files import load_split
from hf_minbert.evaluation.decoding import clip, decode
from hf_minbert.evaluation.metrics import task_metrics
from hf_minbert.io import write_atomically, write_json
from hf_minbert.pretrained.data import RunData


@dataclass(frozen=True)
class Part:
    """A file of the leaderboard.

    Args:
        task: the name in the recipes.
        metrics: whose mean is its score.
        dev, test: its splits, where a task has several.
        named: whether the leaderboard takes labels by name.
    """

    task: str
    metrics: tuple[str, ...] = ("accuracy",)
    dev: str = "validation"
    test: str = "test"
    named: bool = False


#: By the name of its file.
PARTS = {
    "CoLA": Part("cola", ("matthews",)),
    "SST-2": Part("sst2"),
    "MRPC": Part("mrpc", ("f1", "accuracy")),
    "STS-B": Part("stsb", ("pearson", "spearman")),
    "QQP": Part("qqp", ("f1", "accuracy")),
    "MNLI-m": Part("mnli", dev="validation_matched", test="test_matched", named=True),
    "MNLI-mm": Part("mnli", dev="validation_mismatched", test="test_mismatched", named=True),
    "QNLI": Part("qnli", named=True),
    "RTE": Part("rte", named=True),
}


def scores(predictor: Predictor, data: RunData, part: Part) -> dict[str, float]:
    """The metrics of a part on its dev rows, and their mean as `score`."""
    task = predictor.task(part.task)
    rows = load_split(_with_splits(data, part), data.folder_of(part.task), "dev")
    found = task_metrics(task, predictor.logits(part.task, rows), np.asarray(rows["label"][:]))
    return {name: found[name] for name in part.metrics} | {"score": fmean(found[name] for name in part.metrics)}


def submission(predictor: Predictor, data: RunData, part: Part) -> str:
    """A file of the leaderboard: the place of each test row, from 0, and its prediction."""
    task = predictor.task(part.task)
    rows = load_split(_with_splits(data, part), data.folder_of(part.task), "test", labelled=False)
    values = clip(task, decode(task, predictor.logits(part.task, rows)).values)
    said = [_said(task, part, value) for value in values]
    return "index\tprediction\n" + "".join(f"{place}\t{answer}\n" for place, answer in enumerate(said))


def _with_splits(data: RunData, part: Part) -> Task:
    return replace(data.tasks[part.task], splits={"dev": part.dev, "test": part.test})


def _said(task: Task, part: Part, value: float) -> str:
    if task.traits.is_score:
        return f"{value:.3f}"
    return task.labels[int(value)] if part.named else str(int(value))


def parts_of(predictor: Predictor, data: RunData) -> Iterator[tuple[str, Part]]:
    """The files that a model has answers for, of tasks whose data its folder knows."""
    yield from (
        (name, part) for name, part in PARTS.items() if part.task in predictor.tasks.keys() & data.tasks.keys()
    )


def average(found: dict[str, dict[str, float]]) -> float | None:
    """The mean over the eight tasks, MNLI's two parts being one; `None` unless all are there."""
    if found.keys() != PARTS.keys():
        return None
    tasks = {part.task: [found[name]["score"] for name, of in PARTS.items() if of.task == part.task]
             for part in PARTS.values()}  # fmt: skip
    return fmean(fmean(scores) for scores in tasks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; of a task in several the first has it")
    parser.add_argument("--output-dir", type=Path, help="where the leaderboard's files go, and scores.json")
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for run in given.runs:
        predictor, data = Predictor.from_pretrained(run, batch_size=given.batch_size), RunData.of(run)
        for name, part in parts_of(predictor, data):
            if name in found:
                continue
            found[name] = scores(predictor, data, part)
            numbers = ", ".join(f"{metric} {value:.4f}" for metric, value in found[name].items())
            print(f"{name:<8} {numbers}  ({run}, {part.dev})", flush=True)
            if given.output_dir is not None:
                write_atomically(given.output_dir / f"{name}.tsv", submission(predictor, data, part))
    if not found:
        raise MinBertError(
            f"None of these runs has a task of GLUE ({', '.join(PARTS)}). Train recipes of recipes/glue."
        )
    missing = [name for name in PARTS if name not in found]
    whole = average(found)
    print(f"Not there: {', '.join(missing)}." if whole is None else f"average  {whole:.4f}")
    if given.output_dir is not None:
        write_json(given.output_dir / "scores.json", {"parts": found, "average": whole})


if __name__ == "__main__":
    main()
