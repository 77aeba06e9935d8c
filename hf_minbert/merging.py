"""Several saved models made one: averages of their weights, and ensembles that keep each task's own encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import MinBertError
from .modeling_minbert import MinBertConfig, MinBertForMultiTask

#: What two encoders must agree in to have weights of the same meaning.
ENCODER_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip
#: What two tasks of one name must agree in to have outputs of the same meaning.
HEAD_KEYS = (
    "kind", "labels", "range", "pair_encoding", "pooling", "pooling_options", "layers", "join", "head", "head_options",
)  # fmt: skip


def average(models: Sequence[MinBertForMultiTask], weights: Sequence[float] | None = None) -> MinBertForMultiTask:
    """The weighted mean of models that were trained from one start, a "model soup" (arXiv:2203.05482).

    The result has every task of any model, in the order in which they come. A task's head is the mean over the models
    that have it. Nothing can tell whether the models had one start; without it their mean is noise.

    Args:
        models: of one encoder size, without private layers or encoders.
        weights: one per model, not negative; only their proportions count. Equal unless given.

    Raises:
        MinBertError: the models do not go together, or the weights are wrong.
    """
    _check_encoders(models)
    weights = _checked_weights(weights, len(models))
    for model in models:
        if model.config.private_layers or model.config.private_encoders:
            raise MinBertError("A model with private layers or encoders cannot be averaged: leave it out.")
    tasks = _all_tasks(models)
    merged = _new_model(models[0], tasks)
    states = [model.state_dict() for model in models]
    merged.load_state_dict({key: _mean(key, states, weights) for key in merged.state_dict()})
    return merged


def greedy_soup(
    models: Sequence[MinBertForMultiTask], score: Callable[[MinBertForMultiTask], float]
) -> tuple[MinBertForMultiTask, list[int]]:
    """The average of those models that do not make it worse (arXiv:2203.05482, recipe 1).

    The best model begins; the others follow by their score, each kept if the average with it scores no less.

    Args:
        score: of a model on held-out rows; more is better.

    Returns:
        the average, and the places of the models in it.
    """
    scores = [score(model) for model in models]
    order = sorted(range(len(models)), key=lambda place: -scores[place])
    kept, best = [order[0]], scores[order[0]]
    for place in order[1:]:
        tried = score(average([models[i] for i in (*kept, place)]))
        if tried >= best:
            kept, best = [*kept, place], tried
    return average([models[i] for i in kept]), kept


def ensemble(models: Sequence[MinBertForMultiTask], take: Mapping[str, int] | None = None) -> MinBertForMultiTask:
    """One model in which each task has the whole encoder of the model that it comes from (report 001, figure 1).

    Its outputs are those of the models, bit for bit. Each task has an encoder: two tasks of one model get two copies.

    Args:
        models: of one encoder size, without private layers.
        take: task to the place in `models` of the one to take it from, for tasks that several have.

    Raises:
        MinBertError: the models do not go together, or several have a task and `take` does not choose.
    """
    _check_encoders(models)
    for model in models:
        if model.config.private_layers:
            raise MinBertError("A model with private layers cannot join an ensemble: leave it out.")
    owners = _owners(models, take or {})
    tasks = [models[place].config.get_task(name) for name, place in owners.items()]
    merged = _new_model(models[0], tasks, private_encoders=True)
    for name, place in owners.items():
        merged.encoder_of(name).load_state_dict(models[place].encoder_of(name).state_dict())
        merged.heads.get(name).load_state_dict(models[place].heads.get(name).state_dict())
    return merged


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    weights = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(weights) != count:
        raise MinBertError(f"`weights` must be {count} numbers, one per model. Found {len(weights)}.")
    if any(not 0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise MinBertError(f"`weights` must be numbers from 0, and not all 0. Found {weights}.")
    return weights


def _check_encoders(models: Sequence[MinBertForMultiTask]) -> None:
    if not models:
        raise MinBertError("There is no model to merge. Give at least one.")
    for number, model in enumerate(models[1:], 2):
        for key in ENCODER_KEYS:
            ours, theirs = (getattr(config, key) for config in (models[0].config, model.config))
            if ours != theirs:
                raise MinBertError(
                    f"The models do not go together: `{key}` is {ours!r} in the first and {theirs!r} in number "
                    f"{number}. Give models that were trained from one checkpoint."
                )


def _all_tasks(models: Sequence[MinBertForMultiTask]) -> list[dict[str, Any]]:
    tasks: dict[str, dict[str, Any]] = {}
    for number, model in enumerate(models, 1):
        for task in model.config.tasks:
            first = tasks.setdefault(task["name"], task)
            for key in HEAD_KEYS:
                if first[key] != task[key]:
                    raise MinBertError(
                        f"Task {task['name']!r}: `{key}` is {first[key]!r} in one model and {task[key]!r} in number "
                        f"{number}, so their heads have no mean. Leave one of them out."
                    )
    return list(tasks.values())


def _owners(models: Sequence[MinBertForMultiTask], take: Mapping[str, int]) -> dict[str, int]:
    """Task to the place of the model that it comes from."""
    having: dict[str, list[int]] = {}
    for place, model in enumerate(models):
        for name in model.config.task_names:
            having.setdefault(name, []).append(place)
    for name, place in take.items():
        if place not in having.get(name, []):
            raise MinBertError(f"There is no task {name!r} to take from model {place + 1}.")
    for name, places in having.items():
        if len(places) > 1 and name not in take:
            numbers = " and ".join(str(place + 1) for place in places)
            raise MinBertError(f"Models {numbers} both have the task {name!r}. Say which one to take it from.")
    return {name: take.get(name, places[0]) for name, places in having.items()}


def _new_model(like: MinBertForMultiTask, tasks: list[dict[str, Any]], **changes: Any) -> MinBertForMultiTask:
    config = like.config.to_dict() | {"tasks": tasks, "active_task": None, **changes}
    return MinBertForMultiTask._from_config(MinBertConfig.from_dict(config)).eval()


def _mean(key: str, states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> Tensor:
    """The weighted mean of a weight over the states that have it, in float32."""
    having = [(state[key].float(), weight) for state, weight in zip(states, weights, strict=True) if key in state]
    total, (first, _) = sum(weight for _, weight in having), having[0]
    if not total:
        raise MinBertError(f"All models that have {key} have the weight 0. Give one of them more, or leave them out.")
    # Differences, so that the mean of equal numbers is that number to the last bit.
    return first + sum((value - first) * (weight / total) for value, weight in having[1:])
