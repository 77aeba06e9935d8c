"""SMART's smoothness term (Jiang et al. 2020, arXiv:1911.03437): small changes of embeddings should not move outputs.

In shapes: B examples, T tokens of a sentence, S tokens of all sentences of a packed batch, H hidden size, C outputs.
The noise is [B, T, H], or [B, 2, T, H] of pairs that are encoded apart; of a packed batch [1, S, H].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from ...errors import MinBertError, unknown_name
from ...model.kinds import KINDS
from ...model.packing import Packing
from ...settings.tasks import Task
from ...settings.training import Form, Level, Norm, ScoreDivergence, Variant
from ..noise import noise_of_words
from ..protocol import TaskModel, layers_of
from .base import (
    AnyNoiseKey,
    Batch,
    LossFunction,
    TaskLoss,
    Term,
    check_count,
    check_number,
    divergence,
    embedded,
    is_token,
    of_sentences,
    own_loss,
    packing_of,
    parameters_fixed,
    random_state,
    word_size,
    words_of,
)
from .streams import Beside

#: Report 002's names: the divergence that the steps ascend, and the one that is the term.
VARIANTS: dict[str, tuple[str, str]] = {
    "smart_0": ("symmetric_kl", "symmetric_kl"),
    "smart_1": ("kl", "kl"),
    "smart_2": ("kl", "symmetric_kl"),
}
Divergence = Callable[[Tensor, Tensor], Tensor]  # clean and perturbed outputs, [B, C] or [B, T, C] each -> [B]
#: As `base.divergence` for a batch: two outputs and the name of a divergence -> [B].
NamedDivergence = Callable[[Tensor, Tensor, str], Tensor]


# ---- The forms -----------------------------------------------------------------------------------------------------


def size_of(vectors: Tensor, norm: Norm, level: Level, packing: Packing | None = None) -> Tensor:
    """The norm of each token's vector, or of all vectors of a sentence together, in a shape that broadcasts to them.

    Args:
        vectors: [..., T, H], or [1, S, H] with their `packing`.
    """
    over = partial(torch.linalg.vector_norm, ord=math.inf if norm == "inf" else 2, keepdim=True)
    sizes = over(vectors, dim=-1)
    return sizes if level == "token" else of_sentences(partial(over, dim=-2), sizes, packing)  # a norm of norms


def normalised(vectors: Tensor, norm: Norm, level: Level, packing: Packing | None = None) -> Tensor:
    """Vectors of norm 1; zeros stay zero."""
    size = size_of(vectors, norm, level, packing)
    return vectors / size.where(size != 0, 1.0)


def projected(delta: Tensor, epsilon: float, norm: Norm, level: Level, packing: Packing | None = None) -> Tensor:
    """The nearest point of the ball of radius `epsilon`."""
    if norm == "inf":
        return delta.clamp(-epsilon, epsilon)
    size = size_of(delta, norm, level, packing)
    return delta * torch.where(size > epsilon, epsilon / size, 1.0)


class AlgorithmOne:
    """The paper's: the noise is on the word embeddings, each step goes along the normalised gradient, and ends in the
    ball of radius `epsilon`.
    """

    def __init__(self, epsilon: float, step_size: float, norm: Norm, level: Level):
        self.epsilon, self.step_size, self.norm, self.level = epsilon, step_size, norm, level

    @staticmethod
    def defaults(epsilon: float | None) -> tuple[float, float, float]:
        """Of `epsilon`, `step_size` and `noise_std`."""
        epsilon = 5e-4 if epsilon is None else epsilon
        # With much less noise, outputs may be equal, as those of equal sentences are, and the gradient is zero there.
        return epsilon, 10 * epsilon, epsilon

    def outputs(self, model: TaskModel, batch: Batch, delta: Tensor) -> Tensor:
        """[B, C] or [B, T, C], with noise."""
        return model(**embedded(model, batch, delta))["logits"]

    def ascended(self, apart: NamedDivergence, name: str) -> Divergence:
        """What the search ascends, for a divergence of this name."""
        return lambda clean, perturbed: apart(clean, perturbed, name)

    def gradient(self, divergence: Divergence, clean: Tensor, perturbed: Tensor, delta: Tensor) -> Tensor:
        """The gradient of each row's divergence, up to a positive factor per row, which normalising removes."""
        outputs = perturbed.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad(divergence(clean, outputs).sum(), outputs)  # [B, C] or [B, T, C]
        # Where outputs hardly differ, the gradient is 1e-8 and less, below the range of float16.
        slope = normalised(slope.flatten(1), "inf", "token").view_as(slope)
        return torch.autograd.grad(perturbed, delta, slope.to(perturbed.dtype))[0]

    def step(self, delta: Tensor, gradient: Tensor, packing: Packing | None = None) -> Tensor:
        moved = delta + self.step_size * normalised(gradient, self.norm, self.level, packing)
        return projected(moved, self.epsilon, self.norm, self.level, packing)

    def term(self, apart: NamedDivergence, name: str, clean: Tensor, perturbed: Tensor) -> Tensor:
        return apart(clean, perturbed, name).mean()


class MtDnn(AlgorithmOne):
    """The term of mt-dnn, to compare with; no paper describes it.

    The noise is on the embeddings' outputs, after LayerNorm and dropout. A step adds the gradient as it is,
    millions of times smaller than the noise, and divides each token's noise by its largest number: there is no ball,
    the radius is near 1, and the direction stays that of the first noise. `epsilon` only keeps that division from 0.
    Both halves of a symmetric KL hold their first output fixed, so its gradient is half of the whole one; the term is
    the mean over rows. The defaults are mt-dnn's, whose training script has a `step_size` of 1e-5 instead of 1e-3.

    Not mt-dnn's: its search ascends a "stable KL" of log-odds and this one the KL, which the tiny gradient leaves
    without effect; its noise is on padding too; and its squared error of scores takes each row's difference to every
    other row, an error of broadcasting, where this one takes the row's own.
    """

    @staticmethod
    def defaults(epsilon: float | None) -> tuple[float, float, float]:
        return 1e-6, 1e-3, 1e-5

    def outputs(self, model: TaskModel, batch: Batch, delta: Tensor) -> Tensor:
        delta = delta.flatten(0, -3)
        embeddings = layers_of(model, batch["task"])[0]
        hook = embeddings.register_forward_hook(lambda module, args, output: (output.float() + delta).to(output.dtype))
        try:
            return model(**batch)["logits"]
        finally:
            hook.remove()

    def gradient(self, divergence: Divergence, clean: Tensor, perturbed: Tensor, delta: Tensor) -> Tensor:
        return torch.autograd.grad(divergence(clean, perturbed).sum(), delta)[0]

    def step(self, delta: Tensor, gradient: Tensor, packing: Packing | None = None) -> Tensor:
        moved = delta + self.step_size * gradient
        return moved / (size_of(moved, "inf", "token") + self.epsilon)

    def term(self, apart: NamedDivergence, name: str, clean: Tensor, perturbed: Tensor) -> Tensor:
        if name != "symmetric_kl":
            return super().term(apart, name, clean, perturbed)
        there, back = (apart(a.detach(), b, "kl") for a, b in ((clean, perturbed), (perturbed, clean)))
        return (there + back).mean()


class SmartPytorch(MtDnn):
    """The term of the library smart-pytorch, whose code is mt-dnn's but for these.

    A symmetric KL is the sum over the batch's rows and not their mean, so that the same `smart_weight` weighs more in
    larger batches: its README has 0.02. A KL one way stays a mean. The search ascends the half of a symmetric KL in
    which the perturbed output is not held fixed, KL(clean || perturbed).

    Not smart-pytorch's: it leaves to its caller what the noise is on (here the embeddings' outputs), and so the
    divergence of scores (here the mean squared error); on the one logit of a binary task its KL would be 0. Where it
    searches by a KL one way, its gradient is that of the mean over rows and this one's of the sum: as tiny.
    """

    def ascended(self, apart: NamedDivergence, name: str) -> Divergence:
        return super().ascended(apart, "kl" if name == "symmetric_kl" else name)

    def term(self, apart: NamedDivergence, name: str, clean: Tensor, perturbed: Tensor) -> Tensor:
        mean = super().term(apart, name, clean, perturbed)
        return mean * len(clean) if name == "symmetric_kl" else mean


FORMS: dict[Form, type[AlgorithmOne]] = {"paper": AlgorithmOne, "mt-dnn": MtDnn, "smart-pytorch": SmartPytorch}


# ---- The regularizer -----------------------------------------------------------------------------------------------


class Smart(Term):
    """The smoothness-inducing adversarial term: how far the output moves at the worst `delta` of a small ball.

    Algorithm 1 of the paper: `delta` starts as normal noise on real tokens; each step ascends the divergence of the
    clean and the perturbed output, and goes back into the ball; then that divergence is the term, with its gradient
    through both. All passes have one dropout mask. The search leaves parameters, their `.grad`, the model's mode and
    the random state as it found them. Where its gradient is not finite, the batch has no term.

    Args:
        weight: of the term, the paper's lambda.
        epsilon: radius of the ball; 5e-4 unless given. BERT's word embeddings have a root mean square near 0.05.
        step_size: eta; ten times `epsilon` unless given.
        noise_std: sigma, of the first noise; `epsilon` unless given, as in the paper.
        steps: how many steps the search takes.
        variant: which divergences; a name of `VARIANTS` for all tasks, or by task, of which those not named have
            `smart_0`.
        score_divergence: what stands for KL in the divergence of a score, which has no distribution: `squared_error`,
            or `bernoulli`, the KL of a coin whose chance is the score's share of its range. `smart_0` has squared
            error unless told otherwise; the others must be told.
        norm: that the gradient is divided by, and that the ball has.
        level: whether each token has a ball of its own, or the tokens of a sentence have one together.
        form: `paper`; or, to compare with, the term of the popular code, `mt-dnn` or `smart-pytorch`, which have other
            numbers where none are given; see `MtDnn` and `SmartPytorch`.
    """

    name = "smart"
    searches = True
    needs = ("inputs_embeds",)

    def __init__(
        self,
        *,
        weight: float = 1.0,
        epsilon: float | None = None,
        step_size: float | None = None,
        noise_std: float | None = None,
        steps: int = 1,
        variant: Variant | Mapping[str, Variant] = "smart_0",
        score_divergence: ScoreDivergence | None = None,
        norm: Norm = "inf",
        level: Level = "token",
        form: Form = "paper",
    ):
        check_number("smart_weight", weight)
        for name, value in (("epsilon", epsilon), ("step_size", step_size), ("noise_std", noise_std)):
            if value is not None:
                check_number(f"smart_{name}", value, above=name == "epsilon" and form != "paper")
        check_count("smart_steps", steps)
        variants = variant.values() if isinstance(variant, Mapping) else [variant]
        for name, values, known in (
            ("variant", variants, VARIANTS), ("norm", [norm], get_args(Norm)), ("level", [level], get_args(Level)),
            ("form", [form], FORMS), ("score_divergence", [score_divergence], (None, *get_args(ScoreDivergence))),
        ):  # fmt: skip
            for value in values:
                if not isinstance(value, str | None) or value not in known:
                    raise unknown_name(f"smart_{name}", value, [choice for choice in known if choice])
        self.weight, self.steps = weight, steps
        values = (epsilon, step_size, noise_std)
        pairs = zip(values, FORMS[form].defaults(epsilon), strict=True)
        self.epsilon, step_size, self.noise_std = (default if value is None else value for value, default in pairs)
        if self.noise_std == 0 < self.epsilon:
            raise MinBertError(
                "`smart_noise_std: 0` starts the search where the outputs are equal: the gradient is zero there, and "
                "so is the term. Leave it out, or give a number above 0."
            )
        self.variant, self.score_divergence = variant, score_divergence
        self.form = FORMS[form](self.epsilon, step_size, norm, level)

    def refusal(self, tasks: Iterable[Task]) -> str | None:
        for task in tasks:
            variant = self.variant_of(task.name)
            if task.traits.is_score and variant != "smart_0" and self.score_divergence is None:
                return (
                    f"`smart_variant: {variant}` of {task.name!r} is a KL, and a score has none. Say what stands for "
                    f"it by `smart_score_divergence`: {' or '.join(get_args(ScoreDivergence))}."
                )
        return None

    def warnings(self, model: TaskModel, task: str, dtype: torch.dtype) -> list[str]:
        if isinstance(self.form, MtDnn):
            return []
        words = words_of(model, task).weight
        carried = torch.finfo(dtype).eps * words.detach().float().square().mean().sqrt().item()
        if not 0 < self.epsilon < carried:
            return []
        name = str(dtype).removeprefix("torch.")
        return [
            f"`smart_epsilon: {self.epsilon:g}` is lost in {name}, whose numbers near those of the word embeddings "
            f"are {carried:.1g} apart. Raise it, or train in float32."
        ]

    @property
    def repeats(self) -> int:
        return self.steps + 1  # each step of the search, and the term

    def __call__(self, model: TaskModel, batch: Batch, key: AnyNoiseKey, inner: LossFunction = own_loss) -> TaskLoss:
        before, beside = random_state(batch["input_ids"].device), Beside(batch["input_ids"].device)
        plain = inner(model, batch)
        clean, inputs = plain.outputs["logits"], {name: value for name, value in batch.items() if name != "labels"}

        def perturbed(delta: Tensor) -> Tensor:
            with before.again():
                return self.form.outputs(model, inputs, delta)

        head = model.heads.get(batch["task"])
        apart = partial(divergence, head, batch["labels"])
        ascended, taken = self.divergences_of(batch["task"], head.kind)
        search = self.form.ascended(apart, ascended)
        with parameters_fixed(model), beside.inside():  # its first pass does not need the clean outputs
            noise = self.noise_std * noise_of_words(batch, word_size(model, batch["task"]), key)
            delta, ok = self._worst(perturbed, clean.detach(), search, noise, batch, beside)
        term = torch.where(ok, self.form.term(apart, taken, clean, perturbed(delta)), 0.0)
        logged = {self.name: term.detach(), f"{self.name}_skipped": 1.0 - ok.float()}
        return TaskLoss(plain.loss + self.weight * term, plain.outputs, {**plain.logged, **logged})

    def _worst(
        self,
        perturbed: Callable[[Tensor], Tensor],
        clean: Tensor,
        divergence: Divergence,
        noise: Tensor,
        batch: Batch,
        beside: Beside,
    ) -> tuple[Tensor, Tensor]:
        """The end of the search, without a graph, and whether all its gradients were finite; if not, it is zero."""
        packing = packing_of(batch)

        def of_tokens(moved: Tensor) -> Tensor:
            return moved * is_token(batch) if packing is None else moved  # a packed batch has no padding

        delta, ok = of_tokens(noise), torch.ones((), dtype=torch.bool, device=noise.device)
        for _ in range(self.steps):
            delta.requires_grad_()
            outputs = perturbed(delta)
            beside.meet()
            gradient = self.form.gradient(divergence, clean, outputs, delta)
            ok = ok & gradient.isfinite().all()
            delta = of_tokens(self.form.step(delta.detach(), gradient, packing))
        return torch.where(ok, delta, 0.0), ok

    def divergences_of(self, task: str, kind: str) -> tuple[str, str]:
        """Names of what the search ascends and of what the term is, as `Head.divergence` has them."""
        if KINDS[kind].is_score and self.score_divergence != "bernoulli":
            return ("squared_error", "squared_error")
        return VARIANTS[self.variant_of(task)]

    def variant_of(self, task: str) -> Variant:
        return self.variant.get(task, "smart_0") if isinstance(self.variant, Mapping) else self.variant
