"""Several models as one, by the mean of their answers: dev scores, or predictions for test files.

    python scripts/mean_answers.py DATA MODEL MODEL ...                   scores on all dev rows
    python scripts/mean_answers.py DATA MODEL MODEL ... --select-on 0.5   on the half that chose no epoch
    python scripts/mean_answers.py DATA MODEL MODEL ... --write FOLDER    predictions for the test files, into FOLDER

DATA is the folder of the tasks' files, MODEL that of a run. Answers are averaged as those of teachers are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from hf_minbert.data.files import load_split
from hf_minbert.data.selection import chosen_and_rest
from hf_minbert.evaluation.decoding import decode
from hf_minbert.evaluation.metrics import overall, task_metrics
from hf_minbert.evaluation.submission import ending, write_predictions
from hf_minbert.pretrained.data import RunData
from hf_minbert.pretrained.teachers import teacher_logits


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
    logits = teacher_logits(given.models, tasks.values(), rows)
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


if __name__ == "__main__":
    main()
