"""The meaning of a recipe: a normal form that is equal for recipes that train in the same way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .idle import idle_keys
from .metrics import higher_is_better
from .table import names
from .tasks import Source, Task, data_files, get_tasks


def meaning(values: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keys that have an effect, in normal form.

    Args:
        values: every key of a recipe with its typed value, including defaults; `peft` comes from
            `hf_minbert.pretrained.adapters.full_options`. `stages` are left out.
        config: the config of the model that the run saved. It provides values that the recipe takes from its
            checkpoint.

    Raises:
        MinBertError: `tasks` or `held_out` is invalid.
    """
    tasks, config = get_tasks(values["tasks"]), config or {}
    by_name = [task.name for task in tasks]
    idle = tuple(keys.start for keys in idle_keys(values, tasks))
    kept = names(among=values, objectives=("any", values["objective"]))
    found: dict[str, Any] = {
        key: None if values[key] == {} else values[key] for key in kept if key != "stages" and not key.startswith(idle)
    }
    found["tasks"] = {task.name: _task(task, config) for task in tasks}
    if found["held_out"] is not None:
        found["held_out"] = {task.name: _task(task, config) for task in get_tasks(found["held_out"])}
    for key in ("train_tasks", "eval_tasks"):
        found[key] = by_name if found[key] is None else [*dict.fromkeys(found[key])]
    for key, usual in {
        "task_weights": 1.0, "rows_per_epoch": 1.0, "task_sampling": "shuffle", "smart_variant": "smart_0",
        "task_batch_sizes": values["per_device_train_batch_size"],
        "learning_rates": values["learning_rate"], "weight_decays": values["weight_decay"],
    }.items():  # fmt: skip
        if key in found:
            found[key] = _without(found[key], usual, by_name, key)
    for key in (*names(travels=True), "private_layers"):
        if found[key] is None:
            found[key] = config.get("max_input_length" if key == "max_length" else key)
    found["private_layers"] = found["private_layers"] or 0
    found["model_name_or_path"] = _place(found["model_name_or_path"])
    if found.get("teachers"):
        found["teachers"] = [each if isinstance(each, dict) else _place(each) for each in found["teachers"]]
    best = (found["metric_for_best_model"] or "eval_overall").removeprefix("eval_")
    found["metric_for_best_model"] = best
    if found["greater_is_better"] is None:
        found["greater_is_better"] = higher_is_better(best)
    for key in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # the older names
        newer = found.pop(key.replace("gradient", "activation"), None)
        found[key] = (found[key] if newer is None else newer) or None
    return found


def _without(value: Any, usual: Any, tasks: list[str], key: str) -> Any:
    """Returns a mapping by task without entries that equal the default; `None` if no entry is left."""
    if key == "smart_variant" and isinstance(value, str):
        value = dict.fromkeys(tasks, value)
    if not isinstance(value, Mapping):
        return value
    # `rows_per_epoch: 1` is one row, and 1.0 are all; a task's own rate goes before that of the heads
    droppable = ("encoder", "heads") if key in ("learning_rates", "weight_decays") else value
    says_nothing = {name for name in droppable if name in value and repr(value[name]) == repr(usual)}
    return {name: value[name] for name in value if name not in says_nothing} or None


def _task(task: Task, config: Mapping[str, Any]) -> dict[str, Any]:
    from ..model.heads import registries_of  # which imports torch
    from ..model.losses import LOSSES, options_of

    chosen = {"loss": task.loss or next(iter(LOSSES[task.kind])), "join": task.join or "concat"}
    options = {}
    for key, registry in registries_of(vars(task)).items():
        if (name := chosen.get(key, getattr(task, key))) in registry and (field := f"{key}_options") in vars(task):
            options[field] = {**options_of(registry[name]), **getattr(task, field)}
    if options.get("head_options", {}).get("dropout", 0.0) is None:  # as `default_dropout` has it
        own = config.get("classifier_dropout")
        options["head_options"]["dropout"] = config.get("hidden_dropout_prob") if own is None else own
    return {
        **vars(task),
        **chosen,
        **options,
        "files": {split: data_files(files) for split, files in task.files.items()},
        "sources": [*map(_source, task.sources)],
    }


def _source(source: Source) -> dict[str, Any]:
    split = source.split or (None if source.dataset is None else "train")
    return {**vars(source), "files": source.data_files(), "quotes": True, "split": split}


def _place(name: str) -> str:
    """Returns a model's folder as a full path. A name on the Hub is not changed."""
    return os.path.realpath(name) if os.path.isdir(name) else os.path.normpath(name)
