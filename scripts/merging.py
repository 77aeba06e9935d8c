"""Compares ways to make one model for several tasks, by dev scores of models that `minbert affinity` trained.

    minbert affinity cs224n/baseline data_dir=FOLDER --steps 300 --seeds 3
    python scripts/merging.py runs/affinity/cs224n/baseline

Nothing is trained here. For each seed, the single-task models form an ensemble with the same answers. They
are also merged into one encoder by each method of `minbert average`, with its default scale and density. The table
also has the model that was trained on all tasks, and the average of such models over all seeds, a soup. The defaults
were not chosen on these rows. A merged model may score higher with a scale that is.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from hf_minbert import MinBertError, Predictor
from hf_minbert.io import write_json
from hf_minbert.model.modeling_minbert import MinBertForMultiTask
from hf_minbert.pretrained.data import RunData, common_base
from hf_minbert.pretrained.loading import load_config, load_tokenizer, load_weights
from hf_minbert.pretrained.merging import VECTOR_METHODS, add_task_vectors, average, ensemble, load_base
from hf_minbert.pretrained.prediction import score
from hf_minbert.settings.study import run_folder

Scores = dict[str, float]


def alone(folder: Path, task: str) -> MinBertForMultiTask:
    """The model of a run that trained one task, without the heads of the others, which nobody trained."""
    config = load_config(str(folder))
    config.rearrange(tasks=[config.get_task(task)])
    return load_weights(str(folder), config)[0]


def ways(root: Path, tasks: Sequence[str], seed: str) -> dict[str, Callable[[], MinBertForMultiTask]]:
    """By name, how a model for all tasks is made of the runs with one seed."""
    folders = [run_folder(root, task, int(seed)) for task in tasks]
    models = [alone(folder, task) for folder, task in zip(folders, tasks, strict=True)]
    base = load_base(*_base(folders, models))

    def added(method: str) -> Callable[[], MinBertForMultiTask]:
        return lambda: add_task_vectors(models, base, method)

    return {"ensemble": lambda: ensemble(models)} | {method: added(method) for method in VECTOR_METHODS}


def _base(folders: Sequence[Path], models: Sequence[MinBertForMultiTask]):
    name, revision = common_base([str(folder) for folder in folders])
    return name, [model.config for model in models], revision


def compared(root: Path) -> dict[str, list[Scores]]:
    """The dev scores of each way, one for each seed; of the soup a single one."""
    tasks, seeds = finished(root)
    whole = "+".join(tasks)
    first = run_folder(root, whole, int(seeds[0]))
    data, tokenizer = RunData.of(first), load_tokenizer(str(first), load_config(str(first)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    joint = [load_weights(str(folder), load_config(str(folder)))[0]
             for folder in (run_folder(root, whole, int(seed)) for seed in seeds)]  # fmt: skip
    rows = {name: data.rows(data.tasks[name], "dev") for name in tasks}

    def scored(model: MinBertForMultiTask) -> Scores:
        found, _ = score(Predictor(model.to(device), tokenizer), rows)
        model.to("cpu")
        main = {name: found[f"{name}_{data.tasks[name].metric}"] for name in tasks}
        return main | {"overall": found["overall"]}

    found: dict[str, list[Scores]] = defaultdict(list)
    for seed, model in zip(seeds, joint, strict=True):
        found["trained together"].append(scored(model))
        for name, make in ways(root, tasks, seed).items():
            found[name].append(scored(make()))
    if len(joint) > 1:
        found[f"soup of {len(joint)} trained together"].append(scored(average(joint)))
    return dict(found)


def finished(root: Path) -> tuple[list[str], list[str]]:
    """The tasks, in the order of training, and the seeds of which all needed runs have finished."""
    rows = sorted((path.name for path in (root / "runs").glob("*")), key=lambda name: name.count("+"))
    if not rows or "+" not in rows[-1]:
        raise MinBertError(f"{root} holds no runs of `minbert affinity`. Give the folder that it wrote.")
    tasks = rows[-1].split("+")
    done = [
        {path.parent.name.removeprefix("seed-") for path in (root / "runs" / row).glob("seed-*/metrics.json")}
        for row in (*tasks, rows[-1])
    ]
    seeds = sorted(set.intersection(*done), key=int)
    if not seeds:
        raise MinBertError(f"{root}: no seed has finished for {', '.join((*tasks, rows[-1]))}. Let the study end.")
    return tasks, seeds


def table(found: Mapping[str, Sequence[Scores]]) -> str:
    """Mean and standard deviation over seeds, in Markdown."""
    columns = [*next(iter(found.values()))[0]]
    lines = [f"| | n | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name, of in found.items():
        cells = [_cell([scores[column] for scores in of]) for column in columns]
        lines.append(f"| {name} | {len(of)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a finished `minbert affinity`")
    root = parser.parse_args().folder
    found = compared(root)
    write_json(root / "merging.json", found)
    (root / "merging.md").write_text(table(found) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
