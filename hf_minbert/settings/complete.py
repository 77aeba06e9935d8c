"""Compares the meaning of two recipes, independent of how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .metrics import higher_is_better
from .tasks import get_tasks


def same_value(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two recipes have the same meaning for a key. Both must have all keys, including defaults."""
    equal = old.get(key) == new.get(key) and key not in ("tasks", "rows_per_epoch")
    return equal or _meaning(key, old) == _meaning(key, new)


def differing_parts(key: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Returns where two values of a key differ: the key with dots, and the two values.

    If two mappings differ only in their order, it returns the names in both orders. Entries of lists of equal length
    are compared by their index from 0.
    """
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if lists and any(isinstance(entry, Mapping) for entry in (*old, *new)):
        old, new = (dict(enumerate(entries)) for entries in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [(key, old, new)]
    both = [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    differing = [part for part in both if part[1] != part[2]] or [
        part for part in both if repr(part[1]) != repr(part[2])
    ]
    found = [part for name, *values in differing for part in differing_parts(f"{key}.{name}", *values)]
    return found or [(key, [*old], [*new])]


def _meaning(key: str, values: Mapping[str, Any]) -> Any:
    """Returns the value of a recipe's key in normal form."""
    value = values.get(key)
    if key == "tasks":
        return get_tasks(values["tasks"])  # a list: of two mappings the order would not count
    if key == "rows_per_epoch":
        return repr(value)  # 1 is one row, and 1.0 are all
    if key in ("train_tasks", "eval_tasks"):
        return value or [task.name for task in get_tasks(values["tasks"])]
    if key == "num_train_epochs" and values["max_steps"] > 0:
        return None  # steps go before epochs
    if key == "metric_for_best_model":
        return value or "eval_overall"
    if key == "greater_is_better" and value is None:
        return higher_is_better(_meaning("metric_for_best_model", values))
    return None if value == {} else value
