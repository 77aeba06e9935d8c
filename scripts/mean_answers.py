"""Several models as one, by the mean of their answers: dev scores, or predictions for test files.

    python scripts/mean_answers.py DATA MODEL MODEL ...                   scores on all dev rows
    python scripts/mean_answers.py DATA MODEL MODEL ... --select-on 0.5   on the half that chose no epoch
    python scripts/mean_answers.py DATA MODEL MODEL ... --write FOLDER    predictions for the test files, into FOLDER

DATA is the folder of the tasks' files, MODEL that of a run. Answers are averaged as those of teachers are. The
training rows give the scale of scores that were trained for their order alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_minbert.data.files import load_split
from hf_minbert.data.selection import chosen_and_rest
from hf_minbert.evaluation.decoding import decode
from hf_minbert.evaluation.metrics import overall, task_metrics
from hf_minbert.evaluation.submission import ending, write_predictions
from hf_minbert.pretrained.data import RunData
from hf_minbert.pretrained.teachers import teacher_logits
from hf_minbert.settings.tasks import Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder of the tasks' files, or sample")
    parser.add_argument("models", nargs="+", help="folders of runs; tasks are those of the first")
    parser.add_argument("--select-on", type=float, help="the share of dev rows that is not scored")
    parser.add_argument("--write", type=Path, help="a folder for predictions, in place of scores")
    given = parser.parse_args()
    tasks = RunData.of(given.models[0], given.data).tasks
    split = "test" if given.write else "dev"
    rows = {name: load_split(task, given.data, split, labelled=not given.write) for name, task in tasks.items()}
    if not given.write:
        rows = {name: chosen_and_rest(of, given.select_on, name)[1] for name, of in rows.items()}
    logits = answers(given.models, tasks, rows, given.data)
    if given.write:
        for name, task in tasks.items():
            columns, file = rows[name][:], given.write / f"{name}-test{ending(task)}"
            write_predictions(file, task, columns["id"], decode(task, logits[name]), columns[task.text_columns[0]])
        return
    scores = {
        name: task_metrics(task, logits[name], np.asarray(rows[name]["label"][:])) for name, task in tasks.items()
    }
    for name, task in tasks.items():
        print(f"{name} {task.metric} {scores[name][task.metric]:.4f}")
    print(f"overall {overall(tasks.values(), scores)['overall']:.4f}")


def answers(models: Sequence[str], tasks: Mapping[str, Task], rows: Mapping[str, Any], data: str) -> dict[str, Any]:
    """The mean of the models' answers, by task [rows, outputs]."""
    train = {name: load_split(task, data, "train") if task.kind == "score" else [] for name, task in tasks.items()}
    unknown = {name: [{**row, "label": None} for row in of] for name, of in rows.items()}
    found = teacher_logits(models, tasks.values(), {name: [*train[name], *unknown[name]] for name in tasks})
    return {name: logits[len(train[name]) :] for name, logits in found.items()}


if __name__ == "__main__":
    main()
