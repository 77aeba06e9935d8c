"""Poolings: by hand on small numbers, and blind to whatever stands at padding."""

import itertools

import pytest
import torch
from torch import nn

from hf_minbert.model.pooling import JOINS, POOLINGS, LayerMix, cosine

STATES = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [100.0, 100.0]], [[5.0, 6.0], [7.0, 8.0], [0.0, 1.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()


class Sizes:
    hidden_size = 2


def build(name, **options):
    torch.manual_seed(0)
    return POOLINGS[name](Sizes, **options)


def pool(name, states=STATES, mask=MASK, **options):
    return build(name, **options)(states, mask, torch.full((len(states), 2), 9.0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pooler", [[9.0, 9.0], [9.0, 9.0]]),
        ("cls", [[1.0, -4.0], [5.0, 6.0]]),
        ("mean", [[2.0, -3.0], [4.0, 5.0]]),
        ("max", [[3.0, -2.0], [7.0, 8.0]]),
    ],
)
def test_by_hand(name, expected):
    assert pool(name).tolist() == expected


def test_attention_weighs_tokens_by_the_softmax_of_their_scores():
    pooling = POOLINGS["attention"](Sizes)
    pooling.score.weight.data = torch.tensor([[1.0, 0.0]])  # the score is the first number
    found = pooling(STATES[:1], MASK[:1], torch.zeros(1, 2))
    torch.testing.assert_close(found[0], torch.tensor([1.0, 3.0]).softmax(0) @ STATES[0, :2])


def test_bigru_is_torchs_bidirectional_gru_over_the_real_tokens():
    torch.manual_seed(0)
    ours = POOLINGS["bigru"](Sizes, hidden_size=3)
    theirs = nn.GRU(2, 3, batch_first=True, bidirectional=True)
    for gru, suffix in ((ours.forwards, ""), (ours.backwards, "_reverse")):
        for name, parameter in gru.named_parameters():
            getattr(theirs, name + suffix).data.copy_(parameter)
    packed = nn.utils.rnn.pack_padded_sequence(STATES, MASK.sum(1), batch_first=True, enforce_sorted=False)
    last = theirs(packed)[1]  # [2, N, 3], each direction where it ended
    torch.testing.assert_close(ours(STATES, MASK, torch.zeros(2, 2)), torch.cat([*last], dim=-1))


@pytest.mark.parametrize("padding", [0.0, 1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_what_stands_at_padding_changes_nothing(name, padding):
    padded = STATES.clone()
    padded[0, 2] = padding
    torch.testing.assert_close(pool(name, padded)[0], pool(name, STATES[:1, :2], MASK[:1, :2])[0])


@pytest.mark.parametrize("name", sorted(set(POOLINGS) - {"cls"}))
def test_padding_may_stand_anywhere_but_for_cls(name):
    """Tokens to the left of their padding, to its right, around it."""
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(pool(name, STATES[:, order], MASK[:, order])[0], pool(name)[0])


def test_gradients_through_padding_are_finite_and_nothing():
    for name, padding in itertools.product(sorted(set(POOLINGS) - {"pooler"}), (0.0, float("inf"), float("nan"))):
        states = STATES.clone()
        states[0, 2] = padding
        states.requires_grad_()
        pooling = build(name)
        pooling(states, MASK, torch.zeros(2, 2)).square().sum().backward()
        assert states.grad.isfinite().all() and not states.grad[0, 2].any() and states.grad[0].any(), name
        found = [parameter.grad.clone() for parameter in pooling.parameters()]
        pooling.zero_grad()  # each sentence by itself, the first without its padding
        real = STATES.clone().requires_grad_()  # not all poolings have weights
        alone = [pooling(real[:1, :2], MASK[:1, :2], None), pooling(real[1:], MASK[1:], None)]
        torch.cat(alone).square().sum().backward()
        for gradient, parameter in zip(found, pooling.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, msg=name)


def test_a_layer_mix_starts_as_the_mean_and_follows_its_weights():
    layers = (torch.ones(1, 2, 2), torch.full((1, 2, 2), 4.0), torch.full((1, 2, 2), 7.0))
    mix = LayerMix(2)
    assert mix(layers).unique().tolist() == [4.0]
    mix.scores.data = torch.tensor([2.0, 1.0, 1.0]).log()  # a half, a quarter, a quarter
    torch.testing.assert_close(mix(layers), torch.full((1, 2, 2), 0.5 + 1.0 + 1.75))


U, V = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, -3.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("concat", [3.0, 4.0, 4.0, -3.0]),
        ("concat_diff_product", [3.0, 4.0, 4.0, -3.0, 1.0, 7.0, 12.0, -12.0]),
        ("concat_cosine", [3.0, 4.0, 4.0, -3.0, 0.0]),
        ("cosine", [0.0]),
    ],
)
def test_joins_by_hand(name, expected):
    function, size = JOINS[name]
    assert function(U, V).tolist() == [expected]
    assert size(2) == len(expected)


def test_cosine_by_hand():
    assert cosine(U, U).item() == pytest.approx(1.0)
    assert cosine(U, -U).item() == pytest.approx(-1.0)
    assert cosine(U, torch.tensor([[0.0, 10.0]])).item() == pytest.approx(0.8)
    assert cosine(U, torch.zeros(1, 2)).item() == 0.0  # no direction
