"""Weights of the tasks' losses that follow the losses: the methods that `task_weights` can name.

`torchjd.scalarization` has these methods too, as one scalar of a vector of all losses. A step here never has that
vector with its graph, because it differentiates the loss of one task before it computes the next. The methods need the
values of the losses, and the gradients of their own parameters, which are written out below. FAMO (Liu et al. 2023,
arXiv:2306.03792) is not included, because its weights are known only after the losses of all tasks, rounds and
processes.

To add a method, add a class here, a line in `BALANCING`, and its name in `settings.training.FollowingWeights`. Letter
in shapes: K tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import MinBertError, unknown_name
from ..model.losses import options_of
from ..settings.tasks import Task
from .aggregation.conflicts import is_whole
from .averaging import average_over_processes
from .base_args import BaseArguments
from .terms.base import check_number


class Balancing(TrainerCallback, ABC):
    """Weights that are constant within an optimizer step, and then follow the tasks' losses in that step.

    The losses are the tasks' own losses without added terms. They are means over accumulated rounds and over
    processes, so every process has the same weights. Options are keyword-only.

    Args:
        tasks: the trained tasks, at least two. Every round must have all of them.
        device: the device of the losses.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device):
        self.tasks = [task.name for task in tasks]
        self._losses = torch.zeros(len(tasks), device=device)  # sums over the step's rounds
        self._rounds = 0

    @abstractmethod
    def weights(self) -> Tensor:
        """Returns the current weights, `[K]`, without a graph."""

    def by_task(self) -> dict[str, Tensor]:
        """Returns the current weight of each task, a scalar on the device."""
        return dict(zip(self.tasks, self.weights().unbind(), strict=True))

    def see(self, losses: Mapping[str, Tensor]) -> None:
        """Adds the losses of a round, one for each task."""
        self._losses += torch.stack([losses[task].float() for task in self.tasks])
        self._rounds += 1

    def end_step(self, scale: Tensor | float = 1.0) -> None:
        """Called after the last round of an optimizer step, before the optimizer's step. Every process must call it.

        Args:
            scale: the factor on all gradients, the loss scale of fp16.
        """
        average_over_processes([self._losses])
        self._follow(self._losses, self._rounds, scale)
        self._losses, self._rounds = torch.zeros_like(self._losses), 0

    @abstractmethod
    def _follow(self, losses: Tensor, rounds: int, scale: Tensor | float) -> None:
        """Takes in the losses of a step, `[K]`, summed over its rounds."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run, besides the optimizer's, in tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()`."""


class Learned(Balancing):
    """Weights with a parameter for each task, which the optimizer updates.

    Its gradient is that of the weighted sum, for every aggregator. It is not clipped with the model's gradients.

    Args:
        tasks, device: as for `Balancing`.
        learning_rate: the learning rate of the parameters, which follows the schedule. They have no weight decay. Adam
            changes a number by about its learning rate per step. At the rate of a fine-tuned encoder, the parameters
            would stay near their initial value 0.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device, *, learning_rate: float = 1e-3):
        super().__init__(tasks, device)
        check_number("task_weights_options.learning_rate", learning_rate, above=True)
        self.learning_rate = learning_rate
        self.scales = nn.Parameter(torch.zeros(len(tasks), device=device))

    def add_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the parameters to the optimizer as a separate group."""
        group = {"lr": self.learning_rate, "weight_decay": 0.0, "group": "task_weights"}
        optimizer.add_param_group({"params": [self.scales], **group})

    def _follow(self, losses: Tensor, rounds: int, scale: Tensor | float) -> None:
        self.scales.grad = self.gradient(losses / rounds) * scale

    @abstractmethod
    def gradient(self, losses: Tensor) -> Tensor:
        """Returns the gradient of the method's objective by the parameters, for the mean losses; both `[K]`."""

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.scales.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scales.detach().copy_(state["scales"])


class Uncertainty(Learned):
    """Weights from likelihoods with learned noise (Kendall et al. 2018, arXiv:1705.07115, equation 10).

    A task adds `L / (2 sigma^2) + log sigma` for scores, and `L / sigma^2 + log sigma` otherwise. The parameter is `s
    = log sigma^2`. A weight starts at 1/2 or 1. Where the gradient is 0, the weighted loss is 1/2.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device, *, learning_rate: float = 1e-3):
        super().__init__(tasks, device, learning_rate=learning_rate)
        self.at_start = torch.tensor([0.5 if task.traits.is_score else 1.0 for task in tasks], device=device)

    def weights(self) -> Tensor:
        return self.at_start * (-self.scales.detach()).exp()

    def gradient(self, losses: Tensor) -> Tensor:
        return 0.5 - self.weights() * losses


class ImtlL(Learned):
    """IMTL-L, which scales all losses to the same size.

    It is equation 8 of Liu et al. 2021, "Towards Impartial Multi-task Learning". A task adds `exp(s) L - s`. A weight
    starts at 1. Where the gradient is 0, the weighted loss is 1.
    """

    def weights(self) -> Tensor:
        return self.scales.detach().exp()

    def gradient(self, losses: Tensor) -> Tensor:
        return self.weights() * losses - 1


class DWA(Balancing):
    """Dynamic weight average (Liu et al. 2019, arXiv:1803.10704, equation 7).

    A task's weight is K softmax(r / T) over tasks, where r is its mean loss in the last epoch over that in the epoch
    before. A task whose loss decreases slowly gets a larger weight. The weights sum to K. In the first two epochs each
    weight is 1.

    Args:
        tasks, device: as for `Balancing`.
        temperature: T. With a higher value, weights are closer to 1.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device, *, temperature: float = 2.0):
        super().__init__(tasks, device)
        check_number("task_weights_options.temperature", temperature, above=True)
        self.temperature = temperature
        self._sums, self._seen = torch.zeros_like(self._losses), 0  # over the epoch, and how many rounds
        self._means: list[Tensor] = []  # of the last two epochs

    def weights(self) -> Tensor:
        if len(self._means) < 2:
            return torch.ones_like(self._losses)
        before, last = self._means
        # A loss that was 0 for an epoch, as one of ranking may be, must not make all weights NaN.
        rates = last / before.clamp(min=torch.finfo(before.dtype).tiny)
        return len(rates) * (rates / self.temperature).softmax(dim=0)

    def _follow(self, losses: Tensor, rounds: int, scale: Tensor | float) -> None:
        self._sums += losses
        self._seen += rounds

    def on_epoch_end(self, args, state, control, **kwargs):
        if self._seen and is_whole(state.epoch):  # not where training ends within an epoch, and may go on there
            self._means = [*self._means, self._sums / self._seen][-2:]
            self._sums, self._seen = torch.zeros_like(self._sums), 0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "seen": self._seen, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._seen, self._means = state["sums"], state["seen"], state["means"]


BALANCING: dict[str, type[Balancing]] = {"uncertainty": Uncertainty, "dwa": DWA, "imtl_l": ImtlL}


def balancing_of(args: BaseArguments, tasks: Sequence[Task], device: torch.device) -> Balancing | None:
    """Returns the weights for `task_weights`, if it names a method.

    Raises:
        MinBertError: there are too few tasks, or the method does not have the `task_weights_options`.
    """
    if not isinstance(args.task_weights, str) or args.task_weights not in BALANCING:
        return None
    if len(tasks) < 2:
        raise MinBertError(
            f"`task_weights: {args.task_weights}` balances tasks, and needs at least two in training. Found "
            f"{tasks[0].name!r} alone. Leave it out."
        )
    build, options = BALANCING[args.task_weights], args.task_weights_options or {}
    for option in options:
        if option not in options_of(build):
            raise unknown_name(f"option of task_weights {args.task_weights!r}:", option, options_of(build))
    return build(tasks, device, **options)
