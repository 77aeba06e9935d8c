"""How the gradients of a round's tasks become the one gradient that the optimizer sees.

Those that look at each task's gradient see the Gram matrix only, the dot products of every two of them: what they make
of the gradients are combinations of the gradients, so `tasks * tasks` numbers say all. A step costs one pass over the
gradients for the Gram matrix and one for the weighted sum, and nothing is read back from a GPU in between.

To add one: a class here and a line in `AGGREGATORS`.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor

from ...errors import MinBertError, explain, unknown_name

#: The names of the rows, one per task.
Tasks = Sequence[Hashable]


def gram_matrix(gradients: Tensor) -> Tensor:
    """The dot products of every two rows of `gradients`, `[tasks, parameters]`: `[tasks, tasks]` in float64.

    Products and sums are in float64, where a product of two float32 numbers is exact: 24 + 24 bits of 53. So only the
    n - 1 additions round. In any order, on any processor, an entry is off by at most (n - 1) 2**-53 / (1 - (n - 1)
    2**-53) times the sum of |a_k b_k| (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2), and
    that sum is at most the product of the two rows' norms: below 1.3e-8 of it over the 110 million numbers of a
    BERT-base. Of float64 rows the products round too, n in the place of n - 1, and may underflow.
    """
    if gradients.is_cuda and has_kernels():
        from .kernels import gram_matrix as on_gpu

        return on_gpu(gradients)
    tasks = len(gradients)
    gram = gradients.new_zeros(tasks, tasks, dtype=torch.float64)
    # A slice is float64 at a time, and small products make it up: one of whole rows is slow. On a CPU a slice stays in
    # the cache; on a GPU calls cost more.
    width, size = (1 << 18, 1 << 8) if gradients.device.type == "cpu" else (1 << 24, 1 << 12)
    for part in gradients.split(width, dim=1):
        part = part.double()
        chunks = part.shape[1] // size
        pieces = part[:, : chunks * size].reshape(tasks, chunks, size).transpose(0, 1)  # [chunks, tasks, size]
        rest = part[:, chunks * size :]
        gram += torch.bmm(pieces, pieces.mT).sum(dim=0) + rest @ rest.T
    return gram


@functools.cache
def has_kernels() -> bool:
    """Whether torch has brought Triton, in which `kernels` is written: on Linux, with a build for GPUs."""
    return find_spec("triton") is not None


def weighted_sum(gradients: Tensor, weights: Tensor) -> Tensor:
    """`weights @ gradients` for `[tasks]` and `[tasks, parameters]`, in the dtype of `gradients`.

    Row is added to row, in float32 where rows have less: weights of exactly one give bit for bit what `Sum` gives. A
    matrix product does not promise it: it adds in an order of its own, and in TF32 where that is allowed.
    """
    if gradients.is_cuda and has_kernels():
        from .kernels import weighted_sum as on_gpu

        return on_gpu(gradients, weights)
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    weights = weights.to(dtype)
    total = gradients[0].to(dtype) * weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addcmul_(gradient.to(dtype), weight)
    return total.to(gradients.dtype)


def conflicts(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine of every two tasks' gradients, 0 where one is zero, and whether the two conflict: it is negative.

    Both of the shape of `gram`, `[..., tasks, tasks]`, and on its device.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return _ratio(gram, norms[..., :, None] * norms[..., None, :]), gram < 0


def random_orders(tasks: int, generator: Generator | None = None) -> Tensor:
    """For each task the others in random order, `[tasks, tasks - 1]` on the CPU."""
    orders = [torch.randperm(tasks, generator=generator) for _ in range(tasks)]
    return torch.stack([order[order != i] for i, order in enumerate(orders)])


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0: what a task without gradient asks for."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


class Aggregator(ABC):
    """Combines one gradient per task into one.

    Attributes:
        needs_rows: whether it must see each task's gradient by itself. Without rows, the tasks' losses
            accumulate in `.grad`, as cheap as a single loss; with rows the step keeps one gradient per task,
            `tasks * parameters * 4` bytes.
    """

    needs_rows: bool = True

    def __call__(self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """Combines `gradients`, `[tasks, parameters]`, into `[parameters]`.

        All numbers are NaN if one number of one task is not finite, so that who takes the step can see it and skip it.
        In the trainer fp16's loss scaler does; in fp32 and bf16 nothing does, and weights become NaN as in the stock
        `Trainer`.

        Args:
            gradients: one row per task. Every process must have equal rows: average them first.
            generator: of the CPU, draws what is random; torch's global one unless given. Processes agree where each
                has a generator in the same state.
            tasks: the rows' names, for an aggregator that remembers something of each task; by number unless given.
        """
        return self.step(gradients, generator, tasks)[0]

    def step(
        self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A call's result, and what it was made of: the Gram matrix and the `coefficients`."""
        gram = gram_matrix(gradients)
        coefficients = self.coefficients(gram, generator, tasks)
        return weighted_sum(gradients, coefficients.sum(dim=0)), gram, coefficients

    def weights(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """The `[tasks]` weights whose `weighted_sum` with the gradients is the combined one; the rest as for
        `coefficients`, of which they are the sums over the rows."""
        return self.coefficients(gram, generator, tasks).sum(dim=0)

    def coefficients(self, gram: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        """What becomes of each gradient, `[tasks, tasks]`: row `i` says it of task `i`, as a combination of all.

        For a log; their sum over the rows is `weights`. All are NaN if `gram` is not finite.

        Args:
            gram: `gram_matrix(gradients)`; over shards of the gradients, the sum of theirs.
            generator: as for a call.
            tasks: as for a call.
        """
        altered = self.altered(gram, generator, range(len(gram)) if tasks is None else tasks)
        return torch.where(gram.isfinite().all(), altered, torch.nan)

    @abstractmethod
    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        """The `coefficients` of a finite `gram`; of another anything, and it must leave no trace in the state."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Continues from `state_dict()`."""


class Sum(Aggregator):
    """The gradient of the summed losses."""

    needs_rows = False

    def __call__(self, gradients: Tensor, generator: Generator | None = None, tasks: Tasks | None = None) -> Tensor:
        return weighted_sum(gradients, gradients.new_ones(len(gradients)))

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


class PCGrad(Aggregator):
    """Projects away what conflicts (Yu et al. 2020, arXiv:2001.06782, algorithm 1).

    Each task's gradient visits the others in random order; where its dot product with another's original gradient is
    negative, it loses its component along that. The results are added. Without conflict that is bit for bit what `Sum`
    gives. With three tasks and more the sum may still conflict with some: that is the algorithm.

    Args:
        reduction: `sum`, as in the paper, or `mean`: the sum divided by the number of tasks, for a learning rate that
            was chosen so. It matters to SGD and to clipping, hardly to Adam.

    Raises:
        MinBertError: another `reduction`.
    """

    def __init__(self, reduction: str = "sum"):
        if reduction not in ("sum", "mean"):
            raise unknown_name("reduction", reduction, ("sum", "mean"))
        self.reduction = reduction

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        orders = random_orders(len(gram), generator).to(gram.device, non_blocking=True)
        result = units
        for others in orders.T:  # all tasks at once: the first that each visits, the second, ...
            dots = (result * gram[others]).sum(dim=1)
            result = result - _ratio(dots.clamp(max=0), gram.diagonal()[others])[:, None] * units[others]
        return result / len(gram) if self.reduction == "mean" else result


class GradVac(Aggregator):
    """Turns each gradient towards the others up to their usual cosine (Wang et al. 2021, arXiv:2010.05874).

    The paper's form for whole vectors. As in `PCGrad`, each gradient visits the others' original ones in random order;
    where its cosine with one is below the pair's target, as much of that one is added as makes it equal to the target.
    After each visit, with or without change, the target moves towards the cosine that was found. Targets start at 0,
    and as long as they are 0 this is PCGrad.

    Args:
        beta: how far a target moves per step, above 0 and at most 1; 0.01 in the paper.

    Raises:
        MinBertError: `beta` out of range.
    """

    def __init__(self, beta: float = 0.01):
        if not isinstance(beta, int | float) or not 0 < beta <= 1:
            raise MinBertError(f"`beta` must be above 0 and at most 1. Found {beta!r}. The paper has 0.01.")
        self.beta = beta
        #: The target of (task, other task), on the device; by name, since a step may lack some task.
        self.targets: dict[tuple[Hashable, Hashable], Tensor] = {}

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        pairs = [(task, other) for task in tasks for other in tasks]
        zero = gram.new_zeros(())
        targets = torch.stack([self.targets.get(pair, zero).to(gram.device, non_blocking=True) for pair in pairs])
        targets = targets.view_as(gram)
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        orders = random_orders(len(gram), generator).to(gram.device, non_blocking=True)
        norms, result, found = gram.diagonal().sqrt(), units, torch.zeros_like(gram)
        for others in orders.T:
            along, target = result @ gram, (targets * units[others]).sum(dim=1)
            own = (along * result).sum(dim=1).clamp(min=0).sqrt()
            cosine = _ratio((along * units[others]).sum(dim=1), own * norms[others]).clamp(-1, 1)
            sine, target_sine = (1 - cosine.square()).sqrt(), (1 - target.square()).sqrt()
            missing = _ratio(own * (target * sine - cosine * target_sine), norms[others] * target_sine)
            result = result + torch.where(cosine < target, missing, 0.0)[:, None] * units[others]
            found = found + cosine[:, None] * units[others]
        moved = torch.where(gram.isfinite().all(), targets.lerp(found, self.beta), targets)
        self.targets.update(zip(pairs, moved.flatten().unbind(), strict=True))
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"targets": [[*pair, target.item()] for pair, target in self.targets.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        targets = state["targets"]
        self.targets = {(task, other): torch.tensor(value, dtype=torch.float64) for task, other, value in targets}


class Unconditional(Aggregator):
    """Takes from each gradient its component along every other, in conflict or not (report 003, equations 2 to 4).

    Not PCGrad: there is no test for conflict, so tasks that agree lose what they agree on, and all dot products are
    those of the original gradients, so the order does not matter.
    """

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        units = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return units - _ratio(gram, gram.diagonal()) * (1 - units)


def check_options(name: str, made_by: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises `MinBertError` where an option is none of those of `made_by`, the class of the aggregator `name`."""
    known = inspect.signature(made_by).parameters
    for option in options:
        if option not in known:
            raise unknown_name(f"option of aggregator {name!r}:", option, known)


def make_aggregator(name: str, **options: Any) -> Aggregator:
    """The aggregator of this name: one of `AGGREGATORS`, or `torchjd.` and a class of `torchjd.aggregation`.

    Raises:
        MinBertError: there is none, it does not take these options, or a library is missing.
    """
    with explain(f"Making aggregator {name!r}", "Check its options, `aggregator_options`."):
        if name.startswith("torchjd."):
            from .torchjd import TorchJD  # which imports this module

            return TorchJD(name.removeprefix("torchjd."), **options)
        if name not in AGGREGATORS:
            raise unknown_name("aggregator", name, [*AGGREGATORS, "torchjd.<name>"])
        check_options(name, AGGREGATORS[name], options)
        return AGGREGATORS[name](**options)


AGGREGATORS: dict[str, type[Aggregator]] = {
    "sum": Sum,
    "pcgrad": PCGrad,
    "gradvac": GradVac,
    "unconditional": Unconditional,
}
