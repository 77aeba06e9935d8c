"""Dropout on a CPU: its rate, its mean, its seed and its gradient."""

import pytest
import torch
from torch import nn

from hf_minbert.model.dropout import drop


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [100_000, 99_999])  # two elements share a draw
def test_each_element_is_kept_with_its_probability(rate, size):
    torch.manual_seed(0)
    dropped = drop(nn.Dropout(rate), torch.ones(size))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], torch.full((int(kept.sum()),), 1 / (1 - rate)))
    deviation = (rate * (1 - rate) / size) ** 0.5
    assert abs(kept.double().mean() - (1 - rate)) < 5 * deviation
    # Neighbours, which share 64 bits, are independent of each other.
    pairs = kept[: size // 2 * 2].double().view(-1, 2)
    assert abs(torch.corrcoef(pairs.T)[0, 1]) < 5 / (size // 2) ** 0.5


def test_it_follows_the_seed_and_its_gradient_passes_where_a_value_did():
    module, values = nn.Dropout(0.3), torch.randn(5, 7, requires_grad=True)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(drop(module, values))
    assert torch.equal(*found)
    assert not torch.equal(found[0], drop(module, values))
    (gradient,) = torch.autograd.grad(found[0].sum(), values)
    torch.testing.assert_close(gradient * values, found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_stays(dtype):
    assert drop(nn.Dropout(0.1), torch.ones(2, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e-300, 1 - 2**-53])
def test_rates_at_the_ends(rate):
    values = torch.arange(1.0, 101.0)
    expected = torch.zeros(100) if rate > 0.5 else values  # a chance of 2 ** -32 for each element at most
    torch.testing.assert_close(drop(nn.Dropout(rate), values), expected)


def test_in_evaluation_nothing_is_dropped():
    values = torch.ones(10)
    assert drop(nn.Dropout(0.5).eval(), values) is values


def test_a_padded_batch_keeps_the_draws_of_the_reference():
    module, values, found = nn.Dropout(0.5), torch.ones(100), []
    for of in (module, lambda values: drop(module, values, packed=False)):
        torch.manual_seed(2)
        found.append(of(values))
    assert torch.equal(*found)
