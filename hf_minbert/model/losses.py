"""The losses of the heads, and the divergences of two of their outputs.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries. Letters in
shapes: B examples, C outputs of the task, S sentences of an example (1 or 2), D size of a sentence's vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .inference import class_logits
from .pooling import cosine
from .registry import Registry

IGNORED = -100  # the label of a word, or of a token, that is not to be predicted
AUTO = "auto"
#: Options that may be `auto`: what they come to is counted from the training rows.
COUNTED = ("class_weights", "pos_weight")


class Scorer(Protocol):
    """The methods of a `Head` that a loss may use."""

    compares: bool

    def embed(self, vectors: Tensor) -> Tensor: ...

    def __call__(self, vectors: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Outcome:
    """The argument of a loss: the outputs of a head for one batch, and the labels.

    Args:
        head: the head. A loss may call it for further outputs.
        vectors: [B, S, D], one for each sentence.
        logits: [B, C], float32.
        labels: [B], class ids or scores; for `kind: labels` [B, C], 0 or 1. For tags, B counts all tokens of the
            batch. Tokens that are not the first of a word have the label `IGNORED`.
        range: the lowest and the highest score; `None` unless the task is a score.
    """

    head: Scorer
    vectors: Tensor
    logits: Tensor
    labels: Tensor
    range: Sequence[float] | None

    def cosines(self) -> Tensor:
        """Returns the cosine of each pair's two vectors, [B]."""
        return cosine(*self.head.embed(self.vectors).unbind(dim=1))[:, 0]

    def to_unit(self, scores: Tensor) -> Tensor:
        """Scales scores from `range` to [0, 1]."""
        assert self.range is not None
        low, high = self.range
        return (scores.float() - low) / (high - low)


# ---- Classes ------------------------------------------------------------------------------------------------------


def cross_entropy(
    outcome: Outcome,
    *,
    class_weights: Sequence[float] | str | None = None,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
) -> Tensor:
    """Cross-entropy.

    Args:
        class_weights: a weight for each label, in their order, for a weighted mean as in torch. `auto` takes its
            inverse frequency in the training rows, with mean 1.
        label_smoothing: share of the probability that is spread over all labels.
        focal_gamma: exponent of the focal loss (Lin et al. 2017, arXiv:1708.02002, equation 5): a factor
            (1 - p)^gamma, where p is the probability of the label. Not with `label_smoothing`.
    """
    weights = _class_weights(outcome, class_weights, label_smoothing, focal_gamma)
    if not focal_gamma:
        return F.cross_entropy(outcome.logits, outcome.labels, weight=weights, label_smoothing=label_smoothing)
    losses = F.cross_entropy(outcome.logits, outcome.labels, weight=weights, reduction="none")
    losses = _doubt(outcome.logits, outcome.labels, focal_gamma) * losses
    return losses.mean() if weights is None else losses.sum() / weights[outcome.labels].sum()


def _class_weights(
    outcome: Outcome, class_weights: Sequence[float] | str | None, label_smoothing: float, focal_gamma: float
) -> Tensor | None:
    """Checks the options of a cross-entropy. Returns the weight of each class, [C], if there are weights."""
    weights = None
    if class_weights is not None:
        _refuse_auto("class_weights", class_weights)
        weights = _weights("class_weights", class_weights, outcome.logits)
    if type(label_smoothing) not in (int, float) or not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` must be a number from 0 to 1. Found {label_smoothing!r}.")
    if _from_zero("focal_gamma", focal_gamma) and label_smoothing:
        raise ValueError("`focal_gamma` is for one label per row, and `label_smoothing` for all. Leave one out.")
    return weights


def _doubt(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma, p the probability of the label; [B, C] and [B] -> [B]."""
    # 1 - p by its logarithm: where p rounds to 1, a power of the difference would have no gradient, or none that is
    # finite.
    others = logits.scatter(1, labels[:, None], -math.inf).logsumexp(dim=1)
    return (gamma * (others - logits.logsumexp(dim=1))).exp()


# ---- Tags ---------------------------------------------------------------------------------------------------------


def word_cross_entropy(
    outcome: Outcome,
    *,
    class_weights: Sequence[float] | str | None = None,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
) -> Tensor:
    """Cross-entropy, averaged over all labelled words of a batch.

    A step of several processes, or of several accumulated batches, uses the mean of its batches' means.

    Args:
        class_weights: a weight for each label, as for `cross_entropy`. `auto` counts the words of the training rows.
        label_smoothing: as for `cross_entropy`.
        focal_gamma: as for `cross_entropy`.
    """
    labelled = outcome.labels != IGNORED
    labels = torch.where(labelled, outcome.labels, 0)
    weights = _class_weights(outcome, class_weights, label_smoothing, focal_gamma)
    losses = F.cross_entropy(outcome.logits, labels, weight=weights, label_smoothing=label_smoothing, reduction="none")
    if focal_gamma:
        losses = _doubt(outcome.logits, labels, focal_gamma) * losses
    counts = labelled.float() if weights is None else labelled * weights[labels]
    # Of no labelled word the loss is 0, where a mean would be NaN.
    return torch.where(labelled, losses, 0.0).sum() / counts.sum().clamp(min=torch.finfo(losses.dtype).tiny)


# ---- Classes in order ---------------------------------------------------------------------------------------------


def conditional_cross_entropy(
    outcome: Outcome, *, class_weights: Sequence[float] | str | None = None, focal_gamma: float = 0.0
) -> Tensor:
    """CORN: the binary cross-entropy of y > k given y > k - 1, summed over k up to the label of the row.

    The sum is the cross-entropy of the row's class. The mean is over rows; in the paper it is over all terms. There is
    no label smoothing, because it would make the farthest class as likely as a neighbour.

    Args:
        class_weights: as for `cross_entropy`.
        focal_gamma: as for `cross_entropy`; p is the probability of the row's class.
    """
    by_class = replace(outcome, logits=class_logits(outcome.logits))
    return cross_entropy(by_class, class_weights=class_weights, focal_gamma=focal_gamma)


# ---- Binary -------------------------------------------------------------------------------------------------------


def binary_cross_entropy(
    outcome: Outcome, *, pos_weight: float | str | None = None, focal_gamma: float = 0.0
) -> Tensor:
    """Binary cross-entropy on one logit.

    Args:
        pos_weight: factor on the loss of the second label's rows. `auto` takes negatives / positives of the training
            rows (report 000, equation 2).
        focal_gamma: exponent of the focal loss, as for `cross_entropy`.
    """
    weight = None
    if pos_weight is not None:
        _refuse_auto("pos_weight", pos_weight)
        weight = outcome.logits.new_full((1,), _positive("pos_weight", pos_weight))
    logits, labels = outcome.logits[:, 0], outcome.labels.float()
    if not _from_zero("focal_gamma", focal_gamma):
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)
    losses = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="none")
    return ((focal_gamma * F.logsigmoid((1 - 2 * labels) * logits)).exp() * losses).mean()


def multiple_negatives(
    outcome: Outcome, *, scores: str = "cosine", scale: float = 20.0, bce_weight: float = 0.0
) -> Tensor:
    """Multiple negatives ranking (Henderson et al. 2017, arXiv:1705.00652) over the positive pairs of a batch.

    Each first sentence must find its own second sentence. The loss ranks the candidates and sets no threshold. Without
    `bce_weight`, the accuracy is therefore arbitrary. The loss grows with the batch size: compare only values of one
    batch size.

    Args:
        scores: `cosine`: scale * cosine, with the pair itself among the candidates. `head`: the head's logits for all
            B * B pairs, without the pair itself (report 001, equation 4).
        scale: factor on the cosines.
        bce_weight: factor on the binary cross-entropy over all rows, which is added to set the threshold.
    """
    if scores not in ("cosine", "head"):
        raise ValueError(f"`scores` must be 'cosine' or 'head'. Found {scores!r}.")
    scale = _positive("scale", scale)
    weight = bce_weight if bce_weight == 0 else _positive("bce_weight", bce_weight)
    # Over the whole batch with the positives marked: to pick them, a GPU would have to tell how many there are.
    positive = outcome.labels == 1
    if scores == "cosine":
        u, v = F.normalize(outcome.head.embed(outcome.vectors).float(), dim=-1).unbind(dim=1)
        ranking = ranking_loss(scale * u @ v.T, positive)
    else:
        u, v = outcome.vectors.unbind(dim=1)
        pairs = torch.stack(torch.broadcast_tensors(u[:, None], v[None, :]), dim=2)  # [B, B, 2, D]
        logits = outcome.head(pairs.flatten(0, 1)).float()
        ranking = ranking_loss(logits.reshape(len(u), len(u)), positive, with_own=False)
    return ranking + weight * binary_cross_entropy(outcome) if weight else ranking


def ranking_loss(scores: Tensor, positive: Tensor, with_own: bool = True) -> Tensor:
    """Computes the mean over positives i of log sum_j exp(s_ij) - s_ii, where j is any positive, or any other than i.

    Args:
        scores: [B, B]; row i has the scores of all candidates for i.
        positive: [B], which rows are positives. These are the candidates.

    Returns:
        a scalar; 0 for fewer than two positives, because there is nothing to rank.
    """
    counted = positive & (positive.sum() >= 2)
    candidates = positive if with_own else positive & ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    # Rows that do not count are made harmless before the logarithm: its gradient over nothing would not be a number.
    among = torch.where(counted[:, None], scores.masked_fill(~candidates, -math.inf), 0.0)
    losses = torch.where(counted, among.logsumexp(dim=1) - scores.diagonal(), 0.0)
    return losses.sum() / counted.sum().clamp(min=1)


# ---- Any of several labels ----------------------------------------------------------------------------------------


def label_cross_entropy(outcome: Outcome, *, pos_weight: Sequence[float] | str | None = None) -> Tensor:
    """Binary cross-entropy of each label, averaged over labels and rows.

    Args:
        pos_weight: for each label, a factor on the loss of rows that have it. `auto` uses negatives / positives in the
            training rows.
    """
    weights = None
    if pos_weight is not None:
        _refuse_auto("pos_weight", pos_weight)
        weights = _weights("pos_weight", pos_weight, outcome.logits)
    return F.binary_cross_entropy_with_logits(outcome.logits, outcome.labels.float(), pos_weight=weights)


# ---- Scores -------------------------------------------------------------------------------------------------------


def squared_error(outcome: Outcome) -> Tensor:
    """Mean squared error of the score."""
    # Both sides flat: [B, 1] against [B] would broadcast to [B, B] without a word.
    return F.mse_loss(outcome.logits[:, 0], outcome.labels.float())


def cosine_squared_error(outcome: Outcome) -> Tensor:
    """Mean squared error of the pair's cosine against the score scaled to [0, 1] (Sentence-BERT's regression)."""
    return F.mse_loss(outcome.cosines(), outcome.to_unit(outcome.labels))


def cosent(outcome: Outcome, *, scale: float = 20.0) -> Tensor:
    """CoSENT: log(1 + sum exp(scale * (s_j - s_i))) over all i, j where i has the higher label.

    s is the pair's cosine if the head compares two vectors, otherwise the predicted score scaled to [0, 1]. The loss
    depends only on the order, as Spearman's correlation does (Su 2022, https://kexue.fm/archives/8847). It grows with
    the batch size: compare only values of one batch size.

    Args:
        scale: factor on the similarities.
    """
    scale = _positive("scale", scale)
    similarities = outcome.cosines() if outcome.head.compares else outcome.to_unit(outcome.logits[:, 0])
    return order_loss(scale * similarities, outcome.labels)


def order_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Computes log(1 + sum exp(s_j - s_i)) over all i, j with labels_i > labels_j; both [B].

    It is 0 if all labels are equal.
    """
    differences = scores[None, :] - scores[:, None]  # [i, j]: s_j - s_i
    differences = differences.masked_fill(labels[:, None] <= labels[None, :], -math.inf)
    return F.pad(differences.flatten(), (1, 0)).logsumexp(dim=0)  # the pad is the 1


# ---- Stock tools --------------------------------------------------------------------------------------------------


def stock_logits(kind: str, logits: Tensor) -> Tensor:
    """Converts a head's outputs for tools that apply a softmax: [B, outputs] -> [B, C], for a score [B, 1].

    The one logit z of a binary head becomes the two logits (0, z), whose softmax is the sigmoid of z. For ordered
    classes the result has the log probabilities.
    """
    if kind == "binary":
        return F.pad(logits, (1, 0))
    return class_logits(logits) if kind == "ordinal" else logits


# ---- Divergences --------------------------------------------------------------------------------------------------

#: How far two outputs are apart, [B, outputs] and [B, outputs] -> [B].
Divergence = Callable[[Tensor, Tensor], Tensor]


def kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) of two softmax distributions, where P is the first; [B, C] and [B, C] -> [B]."""
    p, q = logits.float().log_softmax(dim=-1), other.float().log_softmax(dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def symmetric_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) + KL(Q||P) of two softmax distributions, [B, C] and [B, C] -> [B]."""
    p, q = logits.float().log_softmax(dim=-1), other.float().log_softmax(dim=-1)
    return ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)  # a difference of small numbers, never of large ones


def of_classes(divergence: Divergence) -> Divergence:
    """The divergence of class probabilities, from the outputs of an ordinal head, [B, C - 1] and [B, C - 1] -> [B]."""
    return lambda logits, other: divergence(class_logits(logits.float()), class_logits(other.float()))


def bernoulli_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) of two Bernoulli distributions with the logits [B, 1] and [B, 1] -> [B]."""
    return kl(F.pad(logits, (1, 0)), F.pad(other, (1, 0)))  # a coin's logit z is the two logits (0, z)


def symmetric_bernoulli_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) + KL(Q||P) of two Bernoulli distributions with the logits [B, 1] and [B, 1] -> [B]."""
    a, b = logits.float()[:, 0], other.float()[:, 0]
    return (a.sigmoid() - b.sigmoid()) * (a - b)


def kl_by_label(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) of two Bernoulli distributions, averaged over labels as the loss is; [B, C] and [B, C] -> [B]."""
    nought = torch.zeros_like(logits)
    return kl(torch.stack([nought, logits], dim=-1), torch.stack([nought, other], dim=-1)).mean(dim=-1)


def symmetric_kl_by_label(logits: Tensor, other: Tensor) -> Tensor:
    """KL(P||Q) + KL(Q||P) of two Bernoulli distributions, averaged over labels; [B, C] and [B, C] -> [B]."""
    a, b = logits.float(), other.float()
    return ((a.sigmoid() - b.sigmoid()) * (a - b)).mean(dim=-1)


def squared_difference(logits: Tensor, other: Tensor) -> Tensor:
    """[B, 1] and [B, 1] -> [B]"""
    return (logits.float()[:, 0] - other.float()[:, 0]).square()


# ---- Options ------------------------------------------------------------------------------------------------------


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the options of a loss or a class with their defaults: its keyword-only parameters."""
    parameters = signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a number above 0. Found {value!r}.")
    return float(value)


def _weights(name: str, value: object, logits: Tensor) -> Tensor:
    """A weight per label, from a list of [C], on the device of the logits [B, C]."""
    labels = logits.shape[1]
    if not isinstance(value, list | tuple) or len(value) != labels:
        raise ValueError(f"`{name}` must be {labels} numbers, one per label. Found {value!r}.")
    # Filled on the device, as nothing can be sent there while a CUDA graph is recorded.
    return torch.cat([logits.new_full((1,), _positive(name, weight)) for weight in value])


def _from_zero(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a number from 0. Found {value!r}.")
    return float(value)


def _refuse_auto(name: str, value: object) -> None:
    if value == AUTO:
        raise ValueError(
            f"`{name}: auto` is counted from the training rows by MultiTaskTrainer. Elsewhere, give numbers."
        )


Loss = Callable[..., Tensor]
#: Kind of task to its losses. The first is what a task has that names none.
LOSSES: dict[str, Registry[Loss]] = {
    kind: Registry("loss", Callable, losses, among=f"for kind {kind!r}", takes=["outcome"])
    for kind, losses in {
        "classes": {"cross_entropy": cross_entropy},
        "ordinal": {"corn": conditional_cross_entropy},
        "labels": {"label_bce": label_cross_entropy},
        "binary": {"bce": binary_cross_entropy, "mnr": multiple_negatives},
        "score": {"mse": squared_error, "cosine_mse": cosine_squared_error, "cosent": cosent},
        "tags": {"cross_entropy": word_cross_entropy},
    }.items()
}
#: Losses that compare the rows of a batch with each other: a batch of one teaches them nothing.
COMPARING = ("mnr", "cosent")
#: Kind of task to how far two of its outputs are apart. The first is what is meant where none is named.
DIVERGENCES: dict[str, dict[str, Divergence]] = {
    "classes": {"symmetric_kl": symmetric_kl, "kl": kl},
    "ordinal": {"symmetric_kl": of_classes(symmetric_kl), "kl": of_classes(kl)},
    "binary": {"symmetric_kl": symmetric_bernoulli_kl, "kl": bernoulli_kl},
    "labels": {"symmetric_kl": symmetric_kl_by_label, "kl": kl_by_label},
    "score": {"squared_error": squared_difference},
    "tags": {"symmetric_kl": symmetric_kl, "kl": kl},
}


def loss_of(task: Mapping[str, Any]) -> Loss:
    """Returns the task's loss: the one that it names, or the first of its kind."""
    losses = LOSSES[task["kind"]]
    return losses[task["loss"] or next(iter(losses))]
