"""Several saved models made one: averages of their weights, and ensembles that keep each task's own encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import MinBertError
from ..model.inference import length_of
from ..model.library import meaning_of
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..settings.tasks import head_difference

#: What two encoders must agree in to have weights of the same meaning.
ENCODER_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id", "position_offset",
    "embedding_size",
)  # fmt: skip


def average(models: Sequence[MinBertForMultiTask], weights: Sequence[float] | None = None) -> MinBertForMultiTask:
    """The weighted mean of models that were trained from one start, a "model soup" (arXiv:2203.05482).

    The result has every task of any model, in the order in which they come. A task's head is the mean over the models
    that have it. Nothing can tell whether the models had one start; without it their mean is noise. Where the models
    differ in settings of training, such as dropout, the result has those of the first; but the longest
    `max_input_length`, so that no text is cut that a model was trained to read.

    Args:
        models: of one encoder size, without private layers or encoders.
        weights: one per model, not negative; only their proportions count. Equal unless given.

    Raises:
        MinBertError: the models do not go together, or the weights are wrong.
    """
    tasks = averaged_tasks([model.config for model in models], weights)
    shares = _checked_weights(weights, len(models))
    longest = max(length_of(model.config) for model in models)
    merged = _new_model(models[0], tasks, max_input_length=longest)
    states = [model.state_dict() for model in models]
    merged.load_state_dict({key: _mean(key, states, shares) for key in merged.state_dict()})
    return merged


def greedy_soup(
    models: Sequence[MinBertForMultiTask], score: Callable[[MinBertForMultiTask], float]
) -> tuple[MinBertForMultiTask, list[int]]:
    """The average of those models that do not make it worse (arXiv:2203.05482, recipe 1).

    The best model begins; the others follow by their score, each kept if the average with it scores no less.

    Args:
        models: as for `average`, all with the same tasks: scores of different tasks cannot be compared.
        score: of a model on held-out rows; more is better.

    Returns:
        the average, and the places of the models in it, in the order in which they came.

    Raises:
        MinBertError: the models do not go together.
    """
    check_same_tasks([model.config for model in models])
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

    For the same batches a task's outputs are those of its model, bit for bit on one machine (README, "Exactness"),
    where the models are in float32 and have one attention function, as this package loads them. Each task has an
    encoder: two tasks of one model get two copies. It keeps the length of its model.

    Args:
        models: of one encoder size, without private layers.
        take: task to the place in `models` of the one to take it from, for tasks that several have.

    Raises:
        MinBertError: the models do not go together, or several have a task and `take` does not choose.
    """
    owners = task_owners([model.config for model in models], take)
    tasks = [models[place].config.get_task(name) for name, place in owners.items()]
    lengths = {name: length_of(models[place].config, name) for name, place in owners.items()}
    merged = _new_model(models[0], tasks, private_encoders=True, max_input_length=lengths)
    for name, place in owners.items():
        merged.encoder_of(name).load_state_dict(models[place].encoder_of(name).state_dict())
        merged.heads.get(name).load_state_dict(models[place].heads.get(name).state_dict())
    return merged


# ---- What goes together: known from the configs, before any weights are loaded


def averaged_tasks(configs: Sequence[MinBertConfig], weights: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """The tasks of the average of models with these configs. Raises what `average` would."""
    _check_encoders(configs)
    shares = _checked_weights(weights, len(configs))
    tasks: dict[str, dict[str, Any]] = {}
    for number, config in enumerate(configs, 1):
        if config.private_layers or config.private_encoders:
            raise MinBertError(f"Model {number} has private layers or encoders, which have no mean: leave it out.")
        for task in config.tasks or ():
            _check_heads(tasks.setdefault(task["name"], task), task, number)
    for name in tasks:
        if not any(share for config, share in zip(configs, shares, strict=True) if name in config.task_names):
            raise MinBertError(
                f"All models that have the task {name!r} have the weight 0. Give one of them more, or leave them out."
            )
    return list(tasks.values())


def check_same_tasks(configs: Sequence[MinBertConfig]) -> None:
    """Raises what `greedy_soup` would on models with these configs."""
    averaged_tasks(configs)
    first = configs[0].task_names
    for number, config in enumerate(configs[1:], 2):
        if set(config.task_names) != set(first):
            raise MinBertError(
                f"A greedy soup compares models by the same tasks. The first has {', '.join(first)} and number "
                f"{number} has {', '.join(config.task_names)}. Average them uniformly or by weights."
            )


def task_owners(
    configs: Sequence[MinBertConfig], take: Mapping[str, int] | None = None, names: Sequence[str] | None = None
) -> dict[str, int]:
    """Task to the place of the model that an ensemble takes it from. Raises what `ensemble` would.

    Args:
        names: what errors call the models; their numbers, from 1, unless given.
    """
    _check_encoders(configs)
    called = dict(enumerate(names or map(str, range(1, len(configs) + 1))))
    having: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        if config.private_layers:
            raise MinBertError(f"Model {called[place]} has private layers and cannot join an ensemble: leave it out.")
        for name in config.task_names:
            having.setdefault(name, []).append(place)
    take = take or {}
    for name, place in take.items():
        if place not in having.get(name, []):
            raise MinBertError(f"There is no task {name!r} to take from model {called.get(place, place + 1)}.")
    for name, places in having.items():
        if len(places) > 1 and name not in take:
            them = " and ".join(called[place] for place in places)
            raise MinBertError(
                f"Models {them} each have the task {name!r}. Say by `take` (--take {name}=MODEL on the command "
                f"line) which one to take it from."
            )
    return {name: take.get(name, places[0]) for name, places in having.items()}


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    weights = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(weights) != count:
        raise MinBertError(f"`weights` must be {count} numbers, one per model. Found {len(weights)}.")
    if any(not 0 <= weight < math.inf for weight in weights) or not any(weights):
        raise MinBertError(f"`weights` must be numbers from 0, and not all 0. Found {weights}.")
    return weights


def _check_encoders(configs: Sequence[MinBertConfig]) -> None:
    if not configs:
        raise MinBertError("There is no model to merge. Give at least one.")
    for number, config in enumerate(configs[1:], 2):
        if meaning_of(config.encoder_config) != meaning_of(configs[0].encoder_config):
            raise MinBertError(
                f"The models do not go together: `encoder_config` is another in the first than in number {number}. "
                "Give models that were trained from one checkpoint."
            )
        for key in ENCODER_KEYS:
            ours, theirs = getattr(configs[0], key), getattr(config, key)
            if ours != theirs:
                raise MinBertError(
                    f"The models do not go together: `{key}` is {ours!r} in the first and {theirs!r} in number "
                    f"{number}. Give models that were trained from one checkpoint."
                )


def _check_heads(first: Mapping[str, Any], task: Mapping[str, Any], number: int) -> None:
    key = head_difference(first, task)
    if key is not None:
        raise MinBertError(
            f"Task {task['name']!r}: `{key}` is {first[key]!r} in one model and {task[key]!r} in number {number}, so "
            f"their heads have no mean. Leave one of them out."
        )


# ---- Weights


def _new_model(like: MinBertForMultiTask, tasks: list[dict[str, Any]], **changes: Any) -> MinBertForMultiTask:
    fresh = {"tasks": tasks, "active_task": None, "private_encoders": False, "private_owner": None, **changes}
    config = MinBertConfig.from_dict(like.config.to_dict() | fresh)
    # The kernels too: another attention function rounds otherwise than the models' own.
    attention = (like.config.encoder_config or like.config)._attn_implementation
    return MinBertForMultiTask._from_config(config, attn_implementation=attention).eval()


def _mean(key: str, states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> Tensor:
    """The weighted mean of a weight over the states that have it, in float32."""
    having = [(state, weight) for state, weight in zip(states, weights, strict=True) if weight and key in state]
    total, first = sum(weight for _, weight in having), having[0][0][key].float()
    # Differences, so that the mean of equal numbers is that number, on any processor: x + 0 * w is x.
    return first + sum((state[key].float() - first) * (weight / total) for state, weight in having[1:])
