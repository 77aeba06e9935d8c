"""Measures, at every step, how much the tasks' gradients conflict and how surgery changes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import TrainerCallback

from ...settings.training import ConflictDetail
from .base import ratio


class ConflictMeter:
    """Means over steps of measures of the Gram matrix of the tasks' gradients.

    `conflict_<a>_<b>` is the share of steps in which the gradients of tasks `a` and `b` conflict, that is, their dot
    product is negative. `cosine_<a>_<b>` is their cosine. `norm_<a>` is the length of `a`'s gradient over the mean
    length in the step. `removed_<a>` is the length of the aggregator's change of `a`'s gradient over the length of
    that gradient. `surgery_turn` is the sine of the angle between the combined gradient and the sum; it is 0 if
    surgery changed nothing. A common factor on all gradients, such as that of a mean, does not affect the last two.
    torchjd's aggregators weight gradients without changing them, so only `surgery_turn` shows their effect.

    Gradients are whole vectors over the shared parameters, as the aggregator gets them. Steps with gradients that are
    not finite are ignored. For a pair, so are steps in which one of the two tasks is missing.

    With the detail `layers`, `conflict_<a>_<b>/<layer>` and `cosine_<a>_<b>/<layer>` are the same for the parameters
    of one layer, in steps in which both gradients reach it. With the detail `tensors`, `tensor_conflicts_<a>_<b>` is
    the number of parameter tensors in a step in which the two conflict, out of `shared_tensors`. `tensor_conflicts` is
    their number over all ordered pairs, so (a, b) and (b, a) both count. The tensors include the biases of attention
    keys. Their gradients are rounding errors with random signs.

    Args:
        tasks: the names of the tasks. The names of a pair have this order.
        detail: `none`; `layers`; or `tensors`, which includes the layers.
        layers: the name of the layer of each trained parameter, in the order of `GradientRows`.
    """

    def __init__(self, tasks: Sequence[str], detail: ConflictDetail = "none", layers: Sequence[str] = ()):
        self.tasks, self.detail = list(tasks), detail
        self._layers = [*layers]
        #: By the step's tasks and layers, on the device, since the last reading.
        self._sums: dict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = {}
        self._totals: dict[str, list[float]] = {}  # name to sum and count over all of training
        self._past: dict[str, int] = {}  # steps and conflicts in the epochs that are over

    def pieces(self, shared: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Returns where to cut the gradients: consecutive `(layer, parameters)`. Empty without detail.

        Args:
            shared: indices of the parameters that the gradients cover.
        """
        if self.detail == "none":
            return []
        if self.detail == "tensors":
            return [(self._layers[i], [i]) for i in shared]
        return [(layer, [*indices]) for layer, indices in groupby(shared, key=self._layers.__getitem__)]

    def add(
        self,
        tasks: Sequence[str],
        gram: Tensor,
        coefficients: Tensor,
        layers: Sequence[str] = (),
        grams: Tensor | None = None,
    ) -> None:
        """Adds a step: the result of `Aggregator.step` for these tasks. Nothing is read from the device.

        Args:
            layers: the layer of each of the `pieces`.
            grams: the Gram matrix of each piece, `[pieces, tasks, tasks]`.
        """
        cosines, conflicting = conflicts(gram)
        norms = gram.diagonal().sqrt()
        figures = [
            conflicting, cosines, torch.where(norms == 0, 0.0, norms / norms.mean()), _removed(gram, coefficients),
            _turn(gram, coefficients),
        ]  # fmt: skip
        if grams is not None:
            figures.append(_by_layer(layers, grams))
            if self.detail == "tensors":
                figures += [(grams < 0).sum(dim=0), gram.new_full((1,), len(grams))]
        values = torch.cat([figure.to(gram.dtype).flatten() for figure in [*figures, gram.new_ones(1)]])
        values = torch.where(gram.isfinite().all(), values, 0.0)
        key = (tuple(tasks), tuple(dict.fromkeys(layers)))
        self._sums[key] = self._sums[key] + values if key in self._sums else values

    def read(self) -> dict[str, float]:
        """Returns the means since the last reading."""
        recent = self._recent()
        self._totals = _added(self._totals, recent)
        self._sums.clear()
        return _means(recent)

    def means(self) -> dict[str, float]:
        """Returns the means over the whole training."""
        return _means(self._all())

    def end_epoch(self) -> dict[str, float]:
        """Returns the number of conflicts since the last call, by ordered pair. Empty if there was no step.

        `conflicts_epoch` counts whole vectors, `tensor_conflicts_epoch` parameter tensors, with that detail.
        """
        sums = self._all()
        pairs = [sums.get(f"conflict_{a}_{b}", (0.0, 0.0)) for a, b in combinations(self.tasks, 2)]
        counts = {"steps": round(sums.get("surgery_turn", (0.0, 0.0))[1])}
        counts["conflicts_epoch"] = round(2 * sum(conflicting for conflicting, _ in pairs))
        if self.detail == "tensors":
            counts["tensor_conflicts_epoch"] = round(sums.get("tensor_conflicts", (0.0, 0.0))[0])
        new: dict[str, float] = {name: count - self._past.get(name, 0) for name, count in counts.items()}
        self._past = counts
        return new if new.pop("steps") else {}

    def _all(self) -> dict[str, list[float]]:
        return _added(self._totals, self._recent())

    def _recent(self) -> dict[str, list[float]]:
        """Sum and count of each name since the last reading."""
        recent: dict[str, list[float]] = {}
        for (tasks, layers), sums in self._sums.items():
            recent = _added(recent, self._named(tasks, layers, sums.cpu()))
        return recent

    def _named(self, tasks: Sequence[str], layers: Sequence[str], sums: Tensor) -> dict[str, list[float]]:
        size = len(tasks)
        index = {task: tasks.index(task) for task in self.tasks if task in tasks}
        pairs = {f"{a}_{b}": (index[a], index[b]) for a, b in combinations(index, 2)}
        lengths = [2 * size * size, 2 * size, 1, 3 * len(layers) * size * size]
        of_pairs, of_tasks, turn, of_layers, of_tensors = sums[:-1].split([*lengths, len(sums) - 1 - sum(lengths)])
        conflicting, cosines = of_pairs.view(2, size, size).tolist()
        norms, removed = of_tasks.view(2, size).tolist()
        named = {f"conflict_{pair}": conflicting[i][j] for pair, (i, j) in pairs.items()}
        named |= {f"cosine_{pair}": cosines[i][j] for pair, (i, j) in pairs.items()}
        named |= {f"norm_{task}": norms[i] for task, i in index.items()}
        named |= {f"removed_{task}": removed[i] for task, i in index.items()}
        named["surgery_turn"] = turn.item()
        if len(of_tensors):
            matrix = of_tensors[:-1].view(size, size).tolist()
            named |= {f"tensor_conflicts_{pair}": matrix[i][j] for pair, (i, j) in pairs.items()}
            named |= {"tensor_conflicts": sum(map(sum, matrix)), "shared_tensors": of_tensors[-1].item()}
        totals = {name: [value, sums[-1].item()] for name, value in named.items()}
        for name, values in zip(layers, of_layers.view(len(layers), 3, size, size).tolist(), strict=True):
            counts, *figures = values
            for figure, matrix in zip(("conflict", "cosine"), figures, strict=True):
                totals |= {f"{figure}_{pair}/{name}": [matrix[i][j], counts[i][j]] for pair, (i, j) in pairs.items()}
        return totals

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self._all(), "past": dict(self._past)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = {name: list(pair) for name, pair in state["totals"].items()}
        self._past = dict(state["past"])


class Measured(Protocol):
    """The attributes of the trainer that `EpochTotals` needs."""

    conflicts: ConflictMeter

    def log(self, logs: dict[str, float]) -> None: ...


class EpochTotals(TrainerCallback):
    """Logs the number of conflicts of an epoch at its last step, unless the log of that step includes it.

    The end of the epoch would be too late. A checkpoint of the last step is written before, and a resumed run would
    count its conflicts in the next epoch. An unfinished epoch has no entry.
    """

    def __init__(self, trainer: Measured):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if is_whole(state.epoch) and not control.should_log and (totals := self.trainer.conflicts.end_epoch()):
            self.trainer.log(totals)


def conflicts(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosine of every two tasks' gradients, 0 if one is zero, and whether they conflict (it is negative).

    Both have the shape of `gram`, `[..., tasks, tasks]`, and are on its device.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return ratio(gram, norms[..., :, None] * norms[..., None, :]), gram < 0


def is_whole(epoch: float) -> bool:
    """Whether the last step was the last one of its epoch."""
    return epoch == round(epoch)


def _by_layer(layers: Sequence[str], grams: Tensor) -> Tensor:
    """Returns, for each layer, whether both gradients reach it, whether they conflict, and their cosine.

    The shape is `[layers, 3, tasks, tasks]`, from `[pieces, tasks, tasks]`.
    """
    names = [*dict.fromkeys(layers)]
    belongs = torch.tensor([[float(layer == name) for layer in layers] for name in names], dtype=grams.dtype)
    sums = (belongs.to(grams.device, non_blocking=True) @ grams.flatten(1)).view(-1, *grams.shape[1:])
    cosines, conflicting = conflicts(sums)
    reached = sums.diagonal(dim1=-2, dim2=-1) > 0
    both = reached[:, :, None] & reached[:, None, :]
    return torch.stack([both.to(sums.dtype), conflicting.to(sums.dtype), cosines], dim=1)


def _removed(gram: Tensor, coefficients: Tensor) -> Tensor:
    """By task, the length of what was removed over that of the gradient; a factor on all of a row does not count."""
    diagonal = coefficients.diagonal()[:, None]
    lost = torch.where(diagonal == 0, 0.0, coefficients / diagonal)
    lost = lost - torch.diag(lost.diagonal())
    lengths, norms = ((lost @ gram) * lost).sum(dim=1).clamp(min=0).sqrt(), gram.diagonal().sqrt()
    return torch.where(norms == 0, 0.0, lengths / norms)


def _turn(gram: Tensor, coefficients: Tensor) -> Tensor:
    """The sine of the angle between the combined gradient and the sum, `[1]`."""
    weights, ones = coefficients.sum(dim=0), gram.new_ones(len(gram))
    along = ones @ gram @ ones
    # What of the combined gradient is not along the sum: its length, not a difference of squares, which would cancel.
    rest = weights - torch.where(along == 0, 0.0, (weights @ gram @ ones) / along) * ones
    squares = torch.stack([rest @ gram @ rest, weights @ gram @ weights]).clamp(min=0)
    return torch.where(squares[1] == 0, 0.0, squares[0] / squares[1]).clamp(max=1).sqrt()[None]


def _added(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, list[float]]:
    none = [0.0, 0.0]
    return {
        name: [x + y for x, y in zip(one.get(name, none), other.get(name, none), strict=True)]
        for name in {**one, **other}
    }


def _means(sums: dict[str, list[float]]) -> dict[str, float]:
    return {name: value / count for name, (value, count) in sums.items() if count}
