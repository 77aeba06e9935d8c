"""Whether two recipes say the same, whichever of the ways to write it they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tasks import get_tasks


def same_value(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two recipes mean the same by a key. Both have all keys, also those that they leave to the default."""
    return old.get(key) == new.get(key) or _meaning(key, old) == _meaning(key, new)


def _meaning(key: str, values: Mapping[str, Any]) -> Any:
    """What a key of a recipe comes to."""
    value = values.get(key)
    if key == "tasks":
        return get_tasks(values["tasks"])
    if key in ("train_tasks", "eval_tasks"):
        return value or [task.name for task in get_tasks(values["tasks"])]
    if key == "num_train_epochs" and values["max_steps"] > 0:
        return None  # steps go before epochs
    if key == "metric_for_best_model":
        return value or "eval_overall"
    if key == "greater_is_better" and value is None:
        return not _meaning("metric_for_best_model", values).endswith("loss")
    return None if value == {} else value
