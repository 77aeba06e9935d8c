"""Finds mistakes in the values of a recipe before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MinBertError, unknown_name
from ..model.registry import unknown_in_words
from . import plugins
from .dotted import Value, as_value, stage_recipes
from .recipe import split_recipe
from .run import RunSettings
from .services import check_services
from .stock import refusal, stock_hints
from .table import names
from .tasks import Task, check_metric, chosen, get_tasks
from .teachers import teachers_to_train
from .training import TrainingKeys

#: Where the names are declared that a key's value may be.
REGISTRIES = {
    "aggregator": "training.aggregation.registry.AGGREGATORS",
    "regularizer": "training.terms.registry.REGULARIZERS",
    "mixing": "data.rounds.MIXING",
}
#: The same for fields of a task.
REGISTRIES_OF_TASKS = {
    "head": "model.heads.HEADS", "pooling": "model.pooling.POOLINGS", "join": "model.pooling.JOINS",
}  # fmt: skip
MAPPINGS, OPTIMIZERS = "data.mappings.MAPPINGS", "training.optimizers.OPTIMIZERS"
ADAPTERS, REFUSED_ADAPTERS = "pretrained.adapters.METHODS", "pretrained.adapters.REFUSED"
FURTHER_REGISTRIES = (MAPPINGS, OPTIMIZERS, ADAPTERS, REFUSED_ADAPTERS)
#: Names beside those of a registry.
OTHERS = {"regularizer": ("none",), "join": ("",), "loss": ("",), "pooling": ("",)}


def check_words(values: Mapping[str, Value]) -> None:
    """Raises `MinBertError` for a mistake in the values of a recipe.

    If a recipe has plugins, they and torch are imported. Plugins may register any name, so names are then checked
    where they are used.
    """
    hints = {**stock_hints(), **typing.get_type_hints(TrainingKeys)}
    common = {key: value for key, value in values.items() if key != "stages"}
    plugins.load_named(values)
    _check(common, hints)
    for name, (_, recipe) in teachers_to_train(values).items():
        try:
            check_words({"output_dir": as_value(name), **recipe})  # a recipe that only teaches may have none
        except MinBertError as error:
            raise MinBertError(f"Teacher {name!r}: {error}") from error
    stages = values["stages"].value if "stages" in values else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return  # what is wrong then is said where stages are planned
    for number, (name, recipe) in enumerate(stage_recipes(values), 1):
        try:
            _check(recipe, hints)
        except MinBertError as error:
            raise MinBertError(f"Stage {number} ({name}): {error}") from error


def _check(values: Mapping[str, Value], hints: Mapping[str, Any]) -> None:
    optimizers = Enum("Optimizers", {name: name for name in _declared(OPTIMIZERS)})
    settings, training = split_recipe(values, {**hints, "optim": hints["optim"] | optimizers})
    for key, value in training.items():
        if reason := refusal(key, value):
            raise MinBertError(reason)
    check_services(training.get("report_to"))
    tasks = {task.name: task for task in get_tasks(settings.tasks)}
    if not settings.plugins:
        _check_names(training, tasks.values())
    if settings.peft is not None and "peft_type" in settings.peft:
        found = settings.peft["peft_type"]
        if found not in (*_declared(ADAPTERS), *_declared(REFUSED_ADAPTERS)):  # the reason for these is given there
            raise unknown_name("`peft.peft_type`", found, _declared(ADAPTERS))
    if settings.objective == "tasks":
        _check_tasks(training, tasks, settings)


def _check_names(training: Mapping[str, Any], tasks: Iterable[Task]) -> None:
    for key, registry in REGISTRIES.items():
        if key in training and not str(training[key]).startswith("torchjd."):
            _check_name(key, training[key], _declared(registry))
    for task in tasks:
        for field, registry in REGISTRIES_OF_TASKS.items():
            _check_name(field, getattr(task, field), _declared(registry), f"Task {task.name!r}: ")
        losses = _declared("model.losses.LOSSES", task.kind)
        _check_name("loss", task.loss, losses, f"Task {task.name!r}: ", f"for kind {task.kind!r}")
        for source in task.sources:
            _check_name("mapping", source.mapping, _declared(MAPPINGS), f"Task {task.name!r}: ")


def _check_name(what: str, name: object, known: Iterable[str], where: str = "", among: str = "") -> None:
    known = [*known, *OTHERS.get(what, ())]
    if name in known or plugins.are_installed():
        return
    others = _of_torchjd() if what == "aggregator" else ()
    said = unknown_in_words(what, name, [choice for choice in (*known, *others) if choice], among)
    raise MinBertError(f"{where or 'U'}{said[0 if where else 1 :]} A plugin can add one (docs/extending.md).")


def _check_tasks(training: Mapping[str, Any], tasks: Mapping[str, Task], settings: RunSettings) -> None:
    for key in names(by_task=True):
        if isinstance(training.get(key), list | dict):
            chosen(key, training[key], tasks)
    if (metric := training.get("metric_for_best_model")) is not None:
        evaluated = chosen("eval_tasks", training.get("eval_tasks"), tasks)
        check_metric(metric, [tasks[name] for name in evaluated], training.get("proximal_evaluate", False) is True)


@cache
def _declared(registry: str, part: str = "") -> tuple[str, ...]:
    """Returns the names in a registry of the package, such as `model.heads.HEADS`, read from its source.

    Args:
        registry: an attribute of a module. Its value has a literal dict whose keys are the names.
        part: the key of the inner dict, if it is a dict of dicts.
    """
    module, _, attribute = registry.rpartition(".")
    path = (Path(__file__).parents[1] / module.replace(".", "/")).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == attribute:
            content = next(inner for inner in ast.walk(node) if isinstance(inner, ast.Dict))
            names = _keys(content)
            inner = content.values[names.index(part)] if part else content
            return _keys(inner) if isinstance(inner, ast.Dict) else ()
    raise LookupError(registry)


def _keys(literal: ast.Dict) -> tuple[str, ...]:
    return tuple(key.value for key in literal.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _of_torchjd() -> list[str]:
    """Returns the aggregators of the library torchjd, from its source. Some of them if it is not installed."""
    spec = find_spec("torchjd")
    if spec is None or spec.origin is None:
        return ["torchjd.MGDA", "torchjd.UPGrad"]
    source = (Path(spec.origin).parent / "aggregation" / "__init__.py").read_text(encoding="utf-8")
    imported = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    classes = [alias.name for node in imported for alias in node.names if alias.name[0].isupper()]
    return [f"torchjd.{name}" for name in classes if not name.endswith(("Weighting", "Aggregator"))]
