"""Measures which tasks train well together, as a study: every task alone, every pair, and all tasks.

runs/<task>/seed-<n>/            a task alone
runs/<task>+<task>/seed-<n>/     a pair, and all
conflicts.json                   how far the tasks' gradients conflict, unless the runs log it themselves
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

from ..data.rounds import MIXING
from ..errors import MinBertError
from ..io import write_json
from ..settings.dotted import as_value
from ..settings.recipe import find_recipe, read_recipe, split_recipe
from ..settings.study import Row, Study, read_words
from ..settings.tasks import chosen, get_tasks
from ..training.args import MultiTaskTrainingArguments
from .conflicts import measure_conflicts
from .runs import Run
from .workers import FINISHED

logger = logging.getLogger(__name__)

CONFLICTS = "conflicts.json"
MEASURED = 100  # steps, as `minbert conflicts` takes
#: Keys that the verb itself gives to each run, and what stands for them.
OWN_KEYS = {"max_steps": "--steps", "eval_tasks": "train_tasks, whose tasks are scored too"}


def study_of(recipe: Path, words: Iterable[str], *, steps: int, seeds: int) -> Study:
    """Makes the study of a recipe's tasks, or of those in `train_tasks` if the recipe has this key.

    Every run has `steps` rounds. A round has a batch of every task in the run. A task has the same batches in the same
    order alone and with others, so that only the other tasks differ.

    Raises:
        MinBertError: there are fewer than two tasks, or the recipe's runs cannot be compared in this way.
    """
    read = read_words(words)
    for key in OWN_KEYS.keys() & read.keys():
        raise MinBertError(f"`{key}` is given to each run by `minbert affinity`. Leave it out; see {OWN_KEYS[key]}.")
    values = {"output_dir": as_value("affinity"), **read_recipe(recipe, words)}  # each run has a folder of its own
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    tasks = {task.name: task for task in get_tasks(settings.tasks)}
    trained = chosen("train_tasks", given.get("train_tasks"), tasks)
    _check(values, given, trained)
    groups = [of for size in dict.fromkeys((1, 2, len(trained))) for of in combinations(trained, size)]
    place = str(find_recipe(recipe))
    rows = [
        Row("+".join(group), str(recipe), {"train_tasks": [*group], "eval_tasks": [*group]}, place=place)
        for group in groups
    ]
    return Study(
        tuple(rows), rows[0].name, tuple(range(1, seeds + 1)), {"max_steps": steps},
        title=f"Which tasks train well together: {', '.join(trained)}",
        metrics=tuple(f"{name}_{tasks[name].metric}" for name in trained),
        words={key: value for key, value in read.items() if key != "train_tasks"},
    )  # fmt: skip


def _check(values: Mapping[str, Any], given: Mapping[str, Any], trained: list[str]) -> None:
    if len(trained) < 2:
        raise MinBertError(f"`minbert affinity` needs two tasks or more. Found {', '.join(trained)}.")
    if "stages" in values:
        raise MinBertError(
            "`minbert affinity` takes no recipe with `stages`. Give it the recipe of the stage that trains the tasks "
            "together, with the model of the stage before as `model_name_or_path`."
        )
    mixing = given.get("mixing", MultiTaskTrainingArguments.mixing)
    if mixing in MIXING and not MIXING[mixing].whole:
        whole = " or ".join(f"`mixing={name}`" for name, rounds in MIXING.items() if rounds.whole)
        raise MinBertError(
            "`minbert affinity` gives a task the same number of batches alone and together, so each round must have "
            f"every task. Found `mixing: {mixing}`. Add {whole} to the command."
        )
    if given.get("task_batch_sizes") == "proportional":
        raise MinBertError(
            "`task_batch_sizes: proportional` gives a task other batch sizes alone than together. Give numbers, as "
            "task_batch_sizes={sts: 16}, or task_batch_sizes=null for `per_device_train_batch_size`."
        )


def conflicts_of(runs: Sequence[Run], root: Path) -> dict[str, float]:
    """Measures once how much the tasks' gradients conflict in the first steps of training all tasks.

    Args:
        runs: the finished runs of the study, from `begin`.

    Returns:
        the result of `measure_conflicts`. Empty if the runs log conflicts themselves, or if no two tasks share a
        trained weight.
    """
    run = next(run for run in runs if run.row == runs[-1].row)  # of all tasks, with the first seed
    path = root / CONFLICTS
    if "train_surgery_turn" in (run.folder / FINISHED).read_text(encoding="utf-8"):
        return {}
    recipe = sha256(repr(sorted(run.values.items())).encode()).hexdigest()
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if kept.get("recipe") == recipe:
        return kept["measured"]
    try:
        found = measure_conflicts(run.values, min(MEASURED, run.values["max_steps"].value))
    except MinBertError as error:  # what else is wrong with the recipe, its runs have said
        logger.info("Conflicts are not measured: %s", error)
        found = {}
    write_json(path, {"recipe": recipe, "measured": found})
    return found
