"""Proximal point optimization: keeps a model's outputs near its earlier ones."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ...errors import MinBertError
from ...model.step_weights import StepWeights, in_use
from ..base_args import BaseArguments
from ..checkpoints import TEACHER
from ..protocol import TaskModel, in_mode
from .base import AnyNoiseKey, Batch, LossFunction, TaskLoss, Term, check_count, check_number, divergence, own_loss


class ProximalPoint(Term, TrainerCallback):
    """Bregman proximal point optimization (SMART, arXiv:1911.03437, section 3.2): outputs may move but slowly.

    The term of a batch is the head's divergence between the model's outputs and those of a teacher, an earlier state
    of its weights, without dropout. As a callback it starts the teacher as a copy of the weights before the first
    step, and after every `steps` optimizer steps moves it: to the weights themselves (the previous iterate), or by the
    average `beta * teacher + (1 - beta) * weights`. Weights that are not trained are shared with the model; the
    teacher's own are in float32.

    With a weight of 0 there is no term, and no pass for it: the teacher is an average of the weights, to be scored.

    Args:
        weight: of the term, the paper's mu.
        steps: S, optimizer steps between two moves of the teacher.
        momentum: beta in the first tenth of the steps, and after it; `None` for the previous iterate.

    Raises:
        MinBertError: a value is out of range; or the previous iterate with S of 1: each step would start where the
            teacher is, and the term and its gradient would be zero.
    """

    name = "proximal"

    def __init__(self, *, weight: float = 1.0, steps: int = 1, momentum: Sequence[float] | None = (0.99, 0.999)):
        check_number("proximal_weight", weight)
        check_count("proximal_steps", steps)
        if momentum is None and steps < 2:
            raise MinBertError(
                "`proximal: previous` needs `proximal_steps` of at least 2: with 1, each step starts at the previous "
                "iterate itself, where the term is zero and has no gradient. Raise it, or take `proximal: momentum`."
            )
        self.weight, self.steps, self.momentum = weight, steps, momentum
        self.of_outputs = weight == 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.teacher: dict[str, Tensor] = {}
        self.resume_from: str | Path | None = None

    @classmethod
    def of(cls, args: BaseArguments) -> ProximalPoint | None:
        """The term that the training arguments ask for. Raises `MinBertError` if one of its options is wrong."""
        if args.proximal == "none":
            return None
        momentum = _checked_momentum(args.proximal_momentum) if args.proximal == "momentum" else None
        return cls(weight=args.proximal_weight, steps=args.proximal_steps, momentum=momentum)

    def start(self, model: nn.Module) -> None:
        """Makes the model as it is the teacher.

        From then on the teacher stays where it is in memory, as recordings of a step read it there.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # In bfloat16, whose numbers are 0.4 % apart, an average that moves by a thousandth would stand still.
        self.teacher = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self.parameters.items()
        }

    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        plain = inner(model, batch)
        if not self.weight:
            return plain
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "teacher")}
        with in_mode(model, training=False), self.in_place(), torch.no_grad():
            fixed = model(**inputs)["logits"]
        term = divergence(model.heads.get(batch["task"]), batch["labels"], plain.outputs["logits"], fixed).mean()
        return TaskLoss(plain.loss + self.weight * term, plain.outputs, {**plain.logged, self.name: term})

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the model has the teacher's weights, in the dtype of its own."""
        weights = {name: parameter.data for name, parameter in self.parameters.items()}
        self._put({name: tensor.to(weights[name].dtype) for name, tensor in self.teacher.items()})
        try:
            with in_use(StepWeights()):  # copies that a step keeps are of the model's own
                yield
        finally:
            self._put(weights)

    def become(self) -> None:
        """Makes the teacher's weights the model's, in the dtype of its own."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.teacher[name])
        torch.clear_autocast_cache()

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = weights[name]
        torch.clear_autocast_cache()  # it has copies of parameters, and does not see that their data changed

    # ---- As a callback -----------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        self.start(kwargs["model"])
        if self.resume_from is not None:
            self.load(self.resume_from)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            self.move(state.global_step, state.max_steps)

    def move(self, step: int, total: int) -> None:
        """Moves the teacher after a step, of `total` steps of the training."""
        beta = 0.0 if self.momentum is None else self.momentum[10 * step > total]
        weights = [parameter.detach().to(self.teacher[name].dtype) for name, parameter in self.parameters.items()]
        torch._foreach_lerp_([*self.teacher.values()], weights, 1 - beta)

    def save(self, folder: str | Path) -> None:
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.teacher.items()}, Path(folder) / TEACHER)

    def load(self, folder: str | Path) -> None:
        """Restores the teacher of a checkpoint. Raises `MinBertError` if it has none, or another model's."""
        from safetensors.torch import load_file

        path = Path(folder) / TEACHER
        if not path.is_file():
            raise MinBertError(
                f"{folder} has no {TEACHER}: it was written without `proximal`. Resume as it was trained, or anew."
            )
        saved = load_file(path)
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in self.teacher.items()}:
            raise MinBertError(f"{path} is of a model with other trained parameters. Resume as it was trained.")
        for name, tensor in self.teacher.items():
            tensor.copy_(saved[name])


def _checked_momentum(betas: object) -> Sequence[float]:
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not is_pair or not all(type(beta) in (int, float) and 0 <= beta <= 1 for beta in betas):
        raise MinBertError(f"`proximal_momentum` must be two numbers from 0 to 1. Found {betas!r}.")
    return betas
