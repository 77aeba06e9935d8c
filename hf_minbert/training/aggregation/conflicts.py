"""How far the tasks' gradients conflict, and how surgery changes them: measured at every step, read for a log."""

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

    By name: `conflict_<a>_<b>`, the share of steps in which the gradients of tasks `a` and `b` conflict (their dot
    product is negative); `cosine_<a>_<b>` between them; `norm_<a>`, the length of `a`'s gradient over the mean length
    of the step's; `removed_<a>`, the length of what the aggregator changed in `a`'s gradient over the length of that
    gradient; and `surgery_turn`, the sine of the angle between the combined gradient and the sum: 0 where there was
    nothing to do. Neither of the last two sees a common factor on all gradients, such as that of a mean. torchjd's
    aggregators weigh gradients and change none, so they show in the turn alone.

    Gradients are those over the shared parameters, whole vectors, as the aggregator gets them. Steps whose gradients
    are not finite do not count, nor for a pair those in which one of the two is missing.

    With detail, `conflict_<a>_<b>/<layer>` and `cosine_<a>_<b>/<layer>` are the same over the parameters of one layer
    (`layers`), in steps in which both gradients reach it. With that of tensors, `tensor_conflicts_<a>_<b>` is in how
    many parameter tensors of a step the two conflict, of `shared_tensors`; `tensor_conflicts` is their number over all
    ordered pairs, in which (a, b) and (b, a) count once each. Among the tensors are the biases of attention's keys,
    whose gradients are rounding and nothing else: their signs are a coin's.

    Args:
        tasks: in the order in which the names of a pair stand.
        detail: `none`; `layers`; or `tensors`, which has the layers too.
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
        """Where to cut the gradients: `(layer, parameters)` one after the other; nowhere without detail.

        Args:
            shared: indices of the parameters that the gradients are over.
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
        """Adds a step: what `Aggregator.step` returns, for these tasks. Nothing is read from the device.

        Args:
            layers: of each of the `pieces`.
            grams: the Gram matrix of each, `[pieces, tasks, tasks]`.
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
        """The means since the last reading."""
        recent = self._recent()
        self._totals = _added(self._totals, recent)
        self._sums.clear()
        return _means(recent)

    def means(self) -> dict[str, float]:
        """The means over all of training."""
        return _means(self._all())

    def end_epoch(self) -> dict[str, float]:
        """How many conflicts the steps since the last call had, by ordered pair; nothing where there was no step.

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
    """The trainer, as far as `EpochTotals` needs it."""

    conflicts: ConflictMeter

    def log(self, logs: dict[str, float]) -> None: ...


class EpochTotals(TrainerCallback):
    """Logs how many conflicts an epoch had at its last step, unless the log of that step does.

    At the end of the epoch it would be too late: a checkpoint of the last step is written before, and a run that
    resumes from it would count its conflicts in the next epoch. An unfinished epoch has no entry.
    """

    def __init__(self, trainer: Measured):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if is_whole(state.epoch) and not control.should_log and (totals := self.trainer.conflicts.end_epoch()):
            self.trainer.log(totals)


def conflicts(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine of every two tasks' gradients, 0 where one is zero, and whether the two conflict: it is negative.

    Both of the shape of `gram`, `[..., tasks, tasks]`, and on its device.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return ratio(gram, norms[..., :, None] * norms[..., None, :]), gram < 0


def is_whole(epoch: float) -> bool:
    """Whether the step that has been taken is the last one of its epoch."""
    return epoch == round(epoch)


def _by_layer(layers: Sequence[str], grams: Tensor) -> Tensor:
    """Of each layer's Gram matrix: whether both gradients reach it, whether they conflict, and their cosine.

    `[layers, 3, tasks, tasks]`, from `[pieces, tasks, tasks]`.
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
