"""Keys that have no effect because of other keys.

They are logged before training, and ignored when runs are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from .tasks import Task
from .training import FollowingWeights


class Idle(NamedTuple):
    """Keys without effect.

    Args:
        start: the beginning of their names.
        chosen: the value of another key that disables them, in words.
        purpose: their purpose.
    """

    start: str
    chosen: str
    purpose: str


def idle_keys(values: Mapping[str, Any], tasks: Sequence[Task]) -> list[Idle]:
    """Returns the keys that have no effect in a run on these tasks.

    Args:
        values: every training argument of ours with its typed value.
    """
    regularizer, proximal = values["regularizer"], values["proximal"]
    chosen = f"`regularizer: {regularizer}`"
    found = [Idle(f"{n}_", chosen, f"`regularizer: {n}`") for n in ("smart", "r_drop", "fgm") if n != regularizer]
    if values["teachers"] is None:
        found.append(Idle("distill_", "`teachers` left out", "distillation"))
    if proximal != "momentum":
        start = "proximal_" if proximal == "none" else "proximal_momentum"
        found.append(Idle(start, f"`proximal: {proximal}`", "`proximal: momentum`"))
    if regularizer == "smart":
        if (form := values["smart_form"]) != "paper":
            keys = ("smart_norm", "smart_level")
            found += [Idle(key, f"`smart_form: {form}`", "`smart_form: paper`") for key in keys]
        if not any(task.traits.is_score for task in tasks):
            found.append(Idle("smart_score_divergence", "these tasks", "scores, and none of them is one"))
    if (weights := values["task_weights"]) not in get_args(FollowingWeights):
        said = f"`task_weights: {weights}`" if isinstance(weights, str) else "`task_weights` as they are"
        found.append(Idle("task_weights_options", said, "weights that follow the losses"))
    if values["mixing"] != "temperature":
        found.append(Idle("mixing_temperature", f"`mixing: {values['mixing']}`", "`mixing: temperature`"))
    if "balanced" not in (values["task_sampling"] or {}).values():
        found.append(Idle("score_bins", "`task_sampling` as it is", "`balanced`"))
    if not values["rows_per_epoch"]:
        found.append(Idle("redraw_rows", "`rows_per_epoch` left out", "an epoch that takes some of the rows"))
    return found
