"""Merges several saved models: averages of weights, sums of task vectors, and ensembles.

In an ensemble each task keeps its own encoder. The other methods produce one encoder for all tasks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MinBertError, unknown_name
from ..model.configuration_minbert import TASK_DEFAULTS
from ..model.inference import length_of
from ..model.library import meaning_of
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..settings.tasks import head_difference
from .loading import check_encoder, load_config, load_weights

logger = logging.getLogger(__name__)

#: What two encoders must agree in to have weights of the same meaning.
ENCODER_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id", "position_offset",
    "embedding_size",
)  # fmt: skip

#: A method that adds task vectors: its scale and density unless given. Those of task arithmetic and TIES are what
#: arXiv:2306.01708 takes where no dev rows can tell. DARE's paper has none for that: as task arithmetic, on a half.
VECTOR_METHODS: dict[str, dict[str, float]] = {
    "task_arithmetic": {"scale": 0.4},
    "ties": {"scale": 1.0, "density": 0.2},
    "dare": {"scale": 0.4, "density": 0.5},
}


def average(models: Sequence[MinBertForMultiTask], weights: Sequence[float] | None = None) -> MinBertForMultiTask:
    """Averages models that were fine-tuned from one checkpoint, a "model soup" (arXiv:2203.05482).

    The result has all tasks of all models, in the order of the models. A task's head is the mean over the models that
    have it. The function cannot check that the models come from one checkpoint; otherwise their mean is noise. If
    training settings such as dropout differ, the result has those of the first model. It has the longest
    `max_input_length`, so that no text is truncated that a model was trained to read.

    Args:
        models: models of one encoder size, without private layers or encoders.
        weights: one for each model, not negative. Only their proportions matter. By default they are equal.

    Raises:
        MinBertError: the models do not go together, or the weights are wrong.
    """
    tasks = averaged_tasks([model.config for model in models], weights)
    shares = _checked_weights(weights, len(models))
    states = [model.state_dict() for model in models]
    return _one_encoder(models, tasks, lambda key: _mean(key, states, shares))


def greedy_soup(
    models: Sequence[MinBertForMultiTask], score: Callable[[MinBertForMultiTask], float]
) -> tuple[MinBertForMultiTask, list[int]]:
    """Averages the models that do not lower the score (arXiv:2203.05482, recipe 1).

    It starts with the best model and tries the others in the order of their scores. A model is kept if the average
    with it scores at least as high.

    Args:
        models: as for `average`, all with the same tasks, because scores of different tasks cannot be compared.
        score: returns the score of a model on held-out rows. Higher is better.

    Returns:
        the average, and the positions of its models in `models`, in the order in which they were added.

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


def add_task_vectors(
    models: Sequence[MinBertForMultiTask],
    base: Mapping[str, Tensor],
    method: str,
    scale: float | None = None,
    density: float | None = None,
    seed: int | None = None,
) -> MinBertForMultiTask:
    """Adds to a checkpoint what each model fine-tuned from it learned on its own tasks.

    A task vector is a model's encoder minus the base's. The result's encoder is `base + scale * merged`. By `method`,
    `merged` is

    - `task_arithmetic`: the sum of the vectors (arXiv:2212.04089, section 2);
    - `ties`: their mean over agreeing signs (arXiv:2306.01708, section 4). Each vector keeps the share `density` of
      its numbers with the largest magnitudes, over the whole encoder. Each position gets the sign with the larger sum
      of magnitudes, and plus if the sums are equal. The mean is over the kept numbers with that sign;
    - `dare`: the sum of the vectors after random dropping (arXiv:2311.03099). Each number is kept with the probability
      `density` and divided by it; otherwise it is set to 0.

    Heads are averaged as in `average`. So are weights that the base lacks, often a pooler: they started from random
    numbers and have no task vector. Sums are computed in float32 on the CPU. The order of the models changes the
    rounding; with `dare` it also changes which numbers are dropped. Tasks, settings and length of the result are as in
    `average`.

    Args:
        models: as for `average`.
        base: the encoder's weights before fine-tuning, by our names; see `load_base`.
        method: one of `VECTOR_METHODS`, which defines the defaults of `scale` and `density`.
        density: above 0 and at most 1. Not for `task_arithmetic`.
        seed: the seed for `dare`; 0 by default. The same numbers are dropped on every machine.

    Raises:
        MinBertError: the models do not go together or with the base, or a number is wrong.
    """
    given = vector_settings(method, scale, density, seed)
    tasks = averaged_tasks([model.config for model in models])
    states = [model.state_dict() for model in models]
    shared = [key for key in states[0] if key.startswith("bert.") and key in base]
    _check_shapes(shared, states[0], base)
    merge = _vector_merge(given, shared, states, base)

    def weight(key: str) -> Tensor:
        if key not in shared:
            return _mean(key, states, [1.0] * len(states))
        vectors = [_vector(key, state, base) for state in states]
        return base[key].cpu().float() + given["scale"] * merge(vectors)

    return _one_encoder(models, tasks, weight)


def load_base(name: str, configs: Sequence[MinBertConfig], revision: str | None = None) -> dict[str, Tensor]:
    """Loads the encoder's weights from a checkpoint, by our names.

    Weights that it lacks, such as a pooler, are left out.

    Args:
        name: a folder or a Hub id.
        configs: the configs of the models that were fine-tuned from it.

    Raises:
        MinBertError: it cannot be loaded, has private layers or encoders, or the models have another size.
    """
    try:
        config = load_config(name, revision)
    except MinBertError as error:
        raise MinBertError(f"The base of the models: {error} If it has moved, give its place with --base.") from error
    if config.private_layers or config.private_encoders:
        raise MinBertError(
            f"The base {name} has private layers or encoders, from which no task vector is taken. Average the models."
        )
    for key in ENCODER_KEYS:
        ours, theirs = getattr(config, key), getattr(configs[0], key)
        if ours != theirs:
            raise MinBertError(
                f"The base {name} and the models do not go together: `{key}` is {ours!r} in it and {theirs!r} in "
                f"them. Name the checkpoint that they were trained from with --base, or average them."
            )
    if not config.tasks:  # a model has a head, here one that is not used
        config.rearrange(tasks=configs[0].tasks)
    model, missing = load_weights(name, config, revision)
    check_encoder(name, missing)
    return {key: value for key, value in model.state_dict().items() if key.startswith("bert.") and key not in missing}


def ensemble(models: Sequence[MinBertForMultiTask], take: Mapping[str, int] | None = None) -> MinBertForMultiTask:
    """Makes one model in which each task has the complete encoder of its original model (report 001, figure 1).

    For the same batches, a task's outputs equal those of its original model, bit for bit on one machine
    (docs/exactness.md). This requires float32 and one attention function, as this package loads models. Each task has
    its own encoder, so two tasks of one model get two copies. Each task keeps the input length of its model.

    Args:
        models: models of one encoder size, without private layers.
        take: for tasks that several models have, the position in `models` of the one to use.

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
    """Returns the tasks of the average of models with these configs. Raises the errors of `average`."""
    _check_encoders(configs)
    shares = _checked_weights(weights, len(configs))
    tasks: dict[str, dict[str, Any]] = {}
    for number, config in enumerate(configs, 1):
        if config.private_layers or config.private_encoders:
            raise MinBertError(
                f"Model {number} has private layers or encoders, which cannot be averaged. Leave it out."
            )
        for task in config.tasks or ():
            _check_heads(tasks.setdefault(task["name"], task), task, number)
    for name in tasks:
        if not any(share for config, share in zip(configs, shares, strict=True) if name in config.task_names):
            raise MinBertError(
                f"All models that have the task {name!r} have the weight 0. Give one of them more, or leave them out."
            )
    return [_with_answers(task, configs) for task in tasks.values()]


def _with_answers(task: dict[str, Any], configs: Sequence[MinBertConfig]) -> dict[str, Any]:
    """Returns the task with temperature and thresholds if all models have the same, otherwise without them."""
    name, changed = task["name"], {}
    for key in ("temperature", "thresholds"):
        if any(config.get_task(name)[key] != task[key] for config in configs if name in config.task_names):
            changed[key] = TASK_DEFAULTS[key]
            logger.info(
                "%s: `%s` differs between the models, so the average has none. Fit it with minbert calibrate.",
                name,
                key,
            )
    return {**task, **changed}


def check_same_tasks(configs: Sequence[MinBertConfig]) -> None:
    """Raises the errors of `greedy_soup` for models with these configs."""
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
    """Returns, for each task, the position of the model that an ensemble takes it from.

    Raises the errors of `ensemble`.

    Args:
        names: the names of the models in errors; by default their numbers, from 1.
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
                f"Models {them} each have the task {name!r}. Choose one with `take` (--take {name}=MODEL on the "
                f"command line)."
            )
    return {name: take.get(name, places[0]) for name, places in having.items()}


def vector_settings(
    method: str, scale: float | None = None, density: float | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Returns the method and numbers of `add_task_vectors` with their defaults. Raises its errors."""
    if method not in VECTOR_METHODS:
        raise unknown_name("method", method, VECTOR_METHODS)
    usual = VECTOR_METHODS[method]
    if density is not None and "density" not in usual:
        raise MinBertError(f"`density` is for ties and dare: {method} keeps all numbers. Leave it out.")
    if seed is not None and method != "dare":
        raise MinBertError(f"`seed` is for dare: {method} draws no numbers. Leave it out.")
    if scale is not None and not math.isfinite(scale):
        raise MinBertError(f"`scale` must be a finite number, such as {usual['scale']}. Found {scale}.")
    if density is not None and not 0 < density <= 1:
        raise MinBertError(f"`density` must be above 0 and at most 1, the share that is kept. Found {density}.")
    if seed is not None and not 0 <= seed < 2**63:
        raise MinBertError(f"`seed` must be a whole number from 0 and below 2**63. Found {seed}.")
    numbers = {"scale": scale, "density": density}
    given = {name: usual[name] if numbers[name] is None else numbers[name] for name in usual}
    return {"method": method, **given, **({"seed": seed or 0} if method == "dare" else {})}


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
            f"Task {task['name']!r}: `{key}` is {first[key]!r} in one model and {task[key]!r} in number "
            f"{number}, so their heads cannot be averaged. Leave one of them out."
        )


# ---- Weights


def _one_encoder(
    models: Sequence[MinBertForMultiTask], tasks: list[dict[str, Any]], weight: Callable[[str], Tensor]
) -> MinBertForMultiTask:
    """A model with the settings of the first and the longest length of all; `weight` makes each weight by its name."""
    longest = max(length_of(model.config) for model in models)
    merged = _new_model(models[0], tasks, max_input_length=longest)
    merged.load_state_dict({key: weight(key) for key in merged.state_dict()})
    return merged


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


def _check_shapes(keys: Sequence[str], ours: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    for key in keys:
        if ours[key].shape != base[key].shape:
            raise MinBertError(
                f"The weight {key} has the shape {list(base[key].shape)} in the base and {list(ours[key].shape)} in "
                f"the models. Give the base that they were trained from."
            )


def _vector(key: str, state: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Tensor:
    return state[key].cpu().float() - base[key].cpu().float()


def _vector_merge(
    given: Mapping[str, Any], keys: Sequence[str], states: Sequence[Mapping[str, Tensor]], base: Mapping[str, Tensor]
) -> Callable[[list[Tensor]], Tensor]:
    """Returns a function that merges the models' vectors of one weight."""
    density = given.get("density", 1)
    if given["method"] == "ties":
        floors = [_trim_floor([_vector(key, state, base) for key in keys], density) for state in states]
        return lambda vectors: _elected_mean(list(map(_trimmed, vectors, floors)))
    if given["method"] == "dare":
        generator = torch.Generator().manual_seed(given["seed"])  # the CPU's, which draws the same on every machine
        return lambda vectors: torch.stack([_dropped(vector, density, generator) for vector in vectors]).sum(dim=0)
    return lambda vectors: torch.stack(vectors).sum(dim=0)


def _trim_floor(vectors: Sequence[Tensor], density: float) -> float:
    """The least magnitude that TIES keeps: numbers that equal it are all kept."""
    magnitudes = torch.cat([vector.abs().flatten() for vector in vectors]).numpy()
    place = len(magnitudes) - max(1, round(density * len(magnitudes)))
    # In place: torch's `topk` and `kthvalue` need several times the memory of the encoder.
    magnitudes.partition(place)
    return float(magnitudes[place])


def _trimmed(vector: Tensor, floor: float) -> Tensor:
    return vector * (vector.abs() >= floor)


def _elected_mean(vectors: Sequence[Tensor]) -> Tensor:
    from peft.utils.merge_utils import calculate_majority_sign_mask, disjoint_merge  # here, as peft loads slowly

    stacked = torch.stack([*vectors])
    return disjoint_merge(stacked, calculate_majority_sign_mask(stacked))


def _dropped(vector: Tensor, density: float, generator: torch.Generator) -> Tensor:
    return vector * (torch.rand(vector.shape, generator=generator) < density) / density
