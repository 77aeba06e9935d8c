"""Aggregators against the papers' algorithms written as loops, numbers worked out by hand, and the library torchjd."""

import json
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import hf_minbert
from hf_minbert import MinBertError, PCGrad
from hf_minbert.training.aggregation import gradvac, pcgrad
from hf_minbert.training.aggregation.base import Aggregator, random_orders
from hf_minbert.training.aggregation.conflicts import ConflictMeter, conflicts
from hf_minbert.training.aggregation.gradvac import GradVac
from hf_minbert.training.aggregation.gram import gram_matrix, weighted_sum
from hf_minbert.training.aggregation.registry import AGGREGATORS, make_aggregator
from hf_minbert.training.aggregation.smoothing import Smoothing
from hf_minbert.training.aggregation.sum import Sum
from hf_minbert.training.aggregation.unconditional import Unconditional
from hf_minbert.training.gradients import GradientRows

WITH_ROWS = [name for name in AGGREGATORS if name != "sum"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SLICE, CHUNK = 1 << 18, 1 << 8  # where the Gram matrix of a CPU is cut
THREE = torch.tensor([[1.0, 0, 0], [-1, 1, 0], [-1, 0, 1]])  # pin P2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fix_orders(patch, orders):
    """Has PCGrad and GradVac visit tasks in these orders."""
    for module in (pcgrad, gradvac):
        patch.setattr(module, "random_orders", lambda *_: orders)


def random_rows(seed, tasks, parameters=5):
    return torch.randn(tasks, parameters, generator=seeded(seed), dtype=torch.float64)


def literal_pcgrad(gradients, orders):
    """Algorithm 1 of the paper, vector by vector: each task's gradient after its visits."""
    altered = []
    for i, order in enumerate(orders):
        p = gradients[i].clone()
        for j in order:
            dot = torch.dot(p, gradients[j])
            if dot < 0:
                p = p - dot / torch.dot(gradients[j], gradients[j]) * gradients[j]
        altered.append(p)
    return torch.stack(altered)


def literal_gradvac(gradients, orders, targets, beta):
    """Likewise for GradVac; moves `targets`, `[tasks, tasks]`, in place."""
    altered = []
    for i, order in enumerate(orders):
        p = gradients[i].clone()
        for j in order:
            g, goal = gradients[j], targets[i, j].clone()
            cosine = torch.dot(p, g) / (p.norm() * g.norm())
            if cosine < goal:
                up, down = goal * (1 - cosine**2).sqrt() - cosine * (1 - goal**2).sqrt(), (1 - goal**2).sqrt()
                p = p + p.norm() * up / (g.norm() * down) * g
            targets[i, j] = (1 - beta) * goal + beta * cosine
        altered.append(p)
    return torch.stack(altered)


def altered(aggregator, gradients, generator=None):
    """Each task's gradient after the surgery."""
    return aggregator.coefficients(gram_matrix(gradients), generator).to(gradients.dtype) @ gradients


@pytest.fixture
def visit(monkeypatch):
    """`visit([[1, 2], [0, 2], [0, 1]])`: the orders to use instead of random ones."""
    return lambda orders: fix_orders(monkeypatch, torch.as_tensor(orders))


rows = st.builds(
    lambda seed, tasks, spread: random_rows(seed, tasks, tasks + spread),
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(-1, 4).filter(bool),
).filter(lambda gradients: gradients.shape[1] > 0)
seeds = st.integers(0, 2**31)
quick = settings(deadline=None, max_examples=60, derandomize=True)


# ---- PCGrad by hand


def test_two_tasks_in_conflict_lose_what_conflicts():
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    assert altered(PCGrad(), gradients).tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert PCGrad()(gradients).tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("order", "first"), [([1, 2], [0.25, 0.5, 0.25]), ([2, 1], [0.25, 0.25, 0.5])], ids=["2 then 3", "3 then 2"]
)
def test_the_order_of_the_visits_matters(visit, order, first):
    visit([order, [0, 2], [0, 1]])
    assert altered(PCGrad(), THREE)[0].tolist() == first


def test_the_others_are_projected_on_as_they_came(visit):
    """Case 28. Altered in place, g2 would be (-0.4, 0.2) when g1 or g3 visits it."""
    gradients = torch.tensor([[1.0, 0.0], [-0.5, 1.0], [-0.5, -1.0]])
    visit([[1, 2], [0, 2], [0, 1]])
    torch.testing.assert_close(altered(PCGrad(), gradients)[0], torch.tensor([0.48, -0.24]))
    visit([[2, 1], [2, 0], [1, 0]])
    torch.testing.assert_close(altered(PCGrad(), gradients)[0], torch.tensor([0.48, 0.24]))


def test_with_three_tasks_the_result_may_still_conflict(visit):
    gradients = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-2.0, 1.0]])
    for seed in range(20):  # in every order
        assert (gradients @ PCGrad()(gradients, seeded(seed))).min() < -0.1
    visit([[1, 2], [0, 2], [0, 1]])  # (0.6, 1.2) + (-0.2, -0.4) + (0, 0)
    torch.testing.assert_close(PCGrad()(gradients), torch.tensor([0.4, 0.8]))


def test_no_task_visits_itself():
    """Visiting itself too, as some implementations do, changes many results in few dimensions."""
    changed = 0
    for seed in range(100):
        gradients, orders = random_rows(seed, 3, 2), random_orders(3, seeded(seed))
        wrong = [[int(j) for j in order] + [i] for i, order in enumerate(orders)]
        literal = literal_pcgrad(gradients, orders).sum(dim=0)
        torch.testing.assert_close(PCGrad()(gradients, seeded(seed)), literal)
        changed += not torch.allclose(literal_pcgrad(gradients, wrong).sum(dim=0), literal)
    assert changed


def test_one_task_alone_keeps_its_gradient():
    gradient = torch.randn(1, 9)
    assert torch.equal(PCGrad()(gradient), gradient[0])


@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_task_with_gradient_zero_changes_nothing(name):
    gradients = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert make_aggregator(name)(gradients).tolist() == [1.0, 0.0]
    assert make_aggregator(name)(torch.zeros(3, 2)).tolist() == [0.0, 0.0]


def test_reduction_mean_divides_by_the_number_of_tasks():
    expected = PCGrad()(THREE, seeded()) / 3
    torch.testing.assert_close(PCGrad(reduction="mean")(THREE, seeded()), expected)
    with pytest.raises(MinBertError, match="Unknown reduction 'avg'.*mean, sum"):
        PCGrad("avg")


def test_a_head_takes_no_part_and_keeps_its_gradient():
    shared, a, b = (torch.nn.Parameter(torch.ones(size)) for size in (2, 1, 1))
    gradients = GradientRows([shared, a, b], PCGrad())
    gradients.add("a", (shared * torch.tensor([1.0, 0.0])).sum() + a.sum())
    gradients.add("b", (shared * torch.tensor([-1.0, 1.0])).sum() + 3 * b.sum())
    gradients.combine(seeded())
    assert [p.grad.tolist() for p in (shared, a, b)] == [[0.5, 1.5], [1.0], [3.0]]


# ---- Properties of PCGrad


@quick
@given(rows, seeds)
def test_the_gram_form_is_the_literal_algorithm(gradients, seed):
    literal = literal_pcgrad(gradients, random_orders(len(gradients), seeded(seed)))
    torch.testing.assert_close(altered(PCGrad(), gradients, seeded(seed)), literal, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(PCGrad()(gradients, seeded(seed)), literal.sum(dim=0), rtol=1e-9, atol=1e-9)


@quick
@given(rows, seeds, st.floats(1e-8, 1e8))
def test_scaled_gradients_give_the_scaled_result(gradients, seed, scale):
    scaled = PCGrad()(gradients * scale, seeded(seed))
    torch.testing.assert_close(scaled, scale * PCGrad()(gradients, seeded(seed)), rtol=1e-9, atol=1e-9 * scale)


@quick
@given(rows, seeds)
def test_a_loss_scale_of_fp16_changes_no_weight(gradients, seed):
    gradients = gradients.float()
    weights, scaled = (PCGrad().weights(gram_matrix(g), seeded(seed)) for g in (gradients, gradients * 2**16))
    assert torch.equal(weights, scaled)


@quick
@given(rows, seeds, st.randoms())
def test_tasks_in_another_order_give_the_same_result(gradients, seed, random):
    tasks = len(gradients)
    places = random.sample(range(tasks), tasks)  # row k moves to places[k]
    orders, back = random_orders(tasks, seeded(seed)), torch.tensor(places)
    moved, moved_orders = torch.empty_like(gradients), torch.empty_like(orders)
    moved[back] = gradients
    moved_orders[back] = back[orders]
    with pytest.MonkeyPatch.context() as patch:
        fix_orders(patch, orders)
        expected = PCGrad()(gradients)
        fix_orders(patch, moved_orders)
        torch.testing.assert_close(PCGrad()(moved), expected, rtol=1e-9, atol=1e-9)


@quick
@given(st.integers(1, 7), seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_without_conflict_the_result_is_the_sum_to_the_last_bit(tasks, seed, dtype):
    noise = torch.randn(tasks, CHUNK + 100, generator=seeded(seed))
    gradients = (noise[0] + 0.3 * noise).to(dtype)
    assert not conflicts(gram_matrix(gradients))[1].any() and gradients.min() < 0
    one_by_one = gradients[0].to(torch.promote_types(dtype, torch.float32))
    for row in gradients[1:]:
        one_by_one = one_by_one + row
    combined = PCGrad()(gradients, seeded(seed))
    assert combined.dtype == dtype
    assert torch.equal(combined, one_by_one.to(dtype))
    assert torch.equal(combined, Sum()(gradients))


# ---- What is random


def test_the_generators_state_decides_the_orders_and_moves_on():
    generator = seeded(3)
    first, second = (random_orders(6, generator) for _ in range(2))
    assert torch.equal(first, random_orders(6, seeded(3))) and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, random_orders(6))  # without a generator, torch's global one


def test_every_order_comes_and_each_task_has_its_own():
    drawn = torch.stack([random_orders(3, seeded(seed)) for seed in range(200)])
    for task in range(3):
        others = [j for j in range(3) if j != task]
        assert all(sorted(order) == others for order in drawn[:, task].tolist())
        assert 70 < (drawn[:, task, 0] == others[0]).sum() < 130
    assert len({tuple(order.flatten().tolist()) for order in drawn}) == 8


# ---- Numbers: the Gram matrix, the sum, what is not finite


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
#: Where rounding errors add up or much cancels; of seed and size, rows in float64.
ROWS = {
    "random": lambda seed, size: torch.randn(3, size, generator=seeded(seed), dtype=torch.float64),
    "constant": lambda seed, size: torch.full((2, size), 0.1, dtype=torch.float64),
    "one large": lambda seed, size: torch.full((2, size), 1e-2, dtype=torch.float64).index_fill_(
        1, torch.tensor([seed % size]), 1e3
    ),
    "nearly opposite": lambda seed, size: random_rows(seed, 1, size) * torch.tensor([[1.0], [-1 - 2**-7]]),
}


def assert_within_the_bound(gradients, gram):
    """Against sums without any rounding: `math.fsum` of products that float64 holds exactly."""
    size, rows = gradients.shape[1], gradients.cpu().double()
    exact = torch.tensor([[math.fsum((a * b).tolist()) for b in rows] for a in rows], dtype=torch.float64)
    norms = exact.diagonal().sqrt()
    unit = (size - 1) * 2.0**-53
    assert gram.dtype == torch.float64
    assert ((gram.cpu() - exact).abs() <= unit / (1 - unit) * norms[:, None] * norms).all()


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.one_of(st.sampled_from([1, CHUNK - 1, CHUNK, CHUNK + 1, SLICE - 1, SLICE + CHUNK + 7]), st.integers(1, 2**20)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(sorted(ROWS)),
    seeds,
)
def test_the_gram_matrix_is_within_its_bound(device, size, dtype, kind, seed):
    gradients = ROWS[kind](seed, size).to(device, dtype)
    assert_within_the_bound(gradients, gram_matrix(gradients))
    assert_within_the_bound(gradients[:, size // 3 :], gram_matrix(gradients[:, size // 3 :]))  # not contiguous


@pytest.mark.parametrize("device", DEVICES)
def test_the_gram_matrix_holds_over_as_many_numbers_as_bert_base_has(device):
    """Equal numbers, whose rounding errors all go one way: a float32 product loses 4 per cent of them."""
    size, number = 110_000_000, Fraction(float(torch.tensor(0.1)))
    gradients = torch.full((1, size), 0.1, device=device) * torch.tensor([[1.0], [-0.5]], device=device)
    gram = gram_matrix(gradients).tolist()
    exact = size * number**2
    for found, share in ((gram[0][0], 1), (gram[0][1], Fraction(-1, 2)), (gram[1][1], Fraction(1, 4))):
        assert abs(Fraction(found) / (share * exact) - 1) < size * Fraction(1, 2**53)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gram_matrix_of_nothing_and_of_float64(device):
    assert torch.equal(gram_matrix(torch.empty(3, 0, device=device)).cpu(), torch.zeros(3, 3, dtype=torch.float64))
    gradients = random_rows(0, 4, 5000).to(device)
    torch.testing.assert_close(gram_matrix(gradients), gradients @ gradients.T, rtol=1e-13, atol=1e-10)


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 50, 2048, 2 * 2048 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpus_step_is_the_cpus(dtype, size):
    gradients = random_rows(size, 5, size).to(dtype)
    for rows in (gradients, gradients[:, : size // 2 + 1], torch.stack([*gradients.T], dim=1)):
        on_gpu, on_cpu = PCGrad().step(rows.cuda(), seeded()), PCGrad().step(rows, seeded())
        for found, expected in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(found.cpu(), expected)


@NEEDS_GPU
@pytest.mark.gpu
def test_weights_of_one_give_the_sum_on_a_gpu():
    gradients = torch.randn(3, 5000, generator=seeded()).cuda()
    one_by_one = gradients[0] + gradients[1] + gradients[2]
    assert torch.equal(weighted_sum(gradients, torch.ones(3, device="cuda")), one_by_one)


def test_autocast_takes_no_precision_away():
    gradients = torch.randn(3, 2 * CHUNK, generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gram_matrix(gradients), gram_matrix(gradients.clone()))
        inside = PCGrad()(gradients, seeded())
    assert torch.equal(inside, PCGrad()(gradients, seeded()))


def test_rows_in_half_precision_are_weighted_in_float32():
    gradients = torch.randn(3, 50, generator=seeded()).bfloat16()
    weights = torch.tensor([1.0, 1.01, 0.5], dtype=torch.float64)
    expected = (weights @ gradients.double()).bfloat16()
    torch.testing.assert_close(weighted_sum(gradients, weights), expected, rtol=2**-8, atol=0)
    assert (weighted_sum(gradients, weights) == expected).float().mean() > 0.95


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("name", [*WITH_ROWS, "torchjd.PCGrad", "torchjd.UPGrad", "torchjd.AlignedMTL"])
def test_one_number_that_is_not_finite_spoils_the_whole_result(name, tasks, bad):
    if name.startswith("torchjd"):
        pytest.importorskip("torchjd", reason="needs torchjd")
    gradients = torch.randn(tasks, 2 * CHUNK + 3)
    for place in (0, -1):
        spoilt = gradients.clone()
        spoilt[-1, place] = bad
        assert not make_aggregator(name)(spoilt).isfinite().any()


def test_conflicts_are_negative_cosines():
    cosines, conflicting = conflicts(gram_matrix(torch.tensor([[2.0, 0.0], [-3.0, 3.0], [0.0, 5.0], [0.0, 0.0]])))
    half = 0.5**0.5
    expected = [[1, -half, 0, 0], [-half, 1, half, 0], [0, half, 1, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(cosines, torch.tensor(expected, dtype=torch.float64))
    assert conflicting.nonzero().tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_nothing_is_read_back_from_the_device(visit, name):
    """Numbers of a fake tensor cannot be read."""
    visit([[1, 2], [0, 2], [0, 1]])
    aggregator, smoothing, meter = make_aggregator(name), Smoothing(0.9), ConflictMeter("abc")
    with FakeTensorMode(allow_non_fake_inputs=True):
        gradients = torch.randn(3, CHUNK + 1)
        with pytest.raises(DataDependentOutputException):
            gradients[0, 0].item()
        for _ in range(2):
            smoothing(gradients, range(3))
            combined, gram, coefficients = aggregator.step(gradients)
            assert combined.shape == (CHUNK + 1,)
            meter.add("abc", gram, coefficients)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", WITH_ROWS)
def test_no_step_waits_for_the_gpu(name):
    aggregator, smoothing, meter = make_aggregator(name), Smoothing(0.9), ConflictMeter("abc")
    gradients = torch.randn(3, CHUNK + 1, device="cuda")
    expected = make_aggregator(name)(gradients.cpu(), seeded())
    torch.testing.assert_close(aggregator(gradients, seeded()).cpu(), expected)
    smoothing(gradients, range(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        smoothing(gradients, range(3))
        meter.add("abc", *aggregator.step(gradients)[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- GradVac


def cosine(a, b):
    return torch.dot(a, b) / (a.norm() * b.norm())


def test_gradvac_lifts_a_cosine_to_its_target_and_no_further():
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    aggregator = GradVac()
    aggregator.load_state_dict({"targets": [[0, 1, 0.3], [1, 0, -0.9]]})
    first, second = altered(aggregator, gradients)
    torch.testing.assert_close(cosine(first, gradients[1]), torch.tensor(0.3, dtype=torch.float64))
    assert torch.equal(second, gradients[1])  # its cosine, -0.71, is above the target
    added = first - gradients[0]
    assert added[0] == -added[1] < 0  # along the other, and only that


def test_gradvac_targets_follow_the_cosines_also_without_change():
    aggregator = GradVac(beta=0.1)
    gradients = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    half = 0.5**0.5
    for expected in (0.1 * half, 0.19 * half):
        assert torch.equal(aggregator(gradients), gradients.sum(dim=0))  # 0.71 is above both targets
        assert aggregator.targets[0, 1].item() == pytest.approx(expected)
        assert aggregator.targets[1, 0].item() == pytest.approx(expected)


@quick
@given(st.integers(1, 5), seeds, st.floats(0.01, 1))
def test_gradvac_is_the_literal_algorithm_step_after_step(tasks, seed, beta):
    aggregator, targets = GradVac(beta), torch.zeros(tasks, tasks, dtype=torch.float64)
    for step in range(4):
        gradients = random_rows(seed + step, tasks) + 0.5  # cosines of both signs
        literal = literal_gradvac(gradients, random_orders(tasks, seeded(step)), targets, beta)
        torch.testing.assert_close(altered(aggregator, gradients, seeded(step)), literal, rtol=1e-8, atol=1e-8)
        kept = torch.stack(list(aggregator.targets.values())).view(tasks, tasks)
        torch.testing.assert_close(kept, targets, rtol=1e-8, atol=1e-8)


def test_gradvac_begins_as_pcgrad():
    for seed in range(10):
        gradients = random_rows(seed, 3)
        literal = literal_pcgrad(gradients, random_orders(3, seeded(seed)))
        torch.testing.assert_close(altered(GradVac(), gradients, seeded(seed)), literal)


def test_gradvac_continues_where_its_state_was_saved():
    whole, resumed = GradVac(0.2), GradVac(0.2)
    steps = [random_rows(seed, 3) for seed in range(6)]
    for step in steps[:3]:
        whole(step, seeded(), ["sst", "para", "sts"])
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for step in steps[3:]:
        expected = whole(step, seeded(), ["sst", "para", "sts"])
        assert torch.equal(resumed(step, seeded(), ["sst", "para", "sts"]), expected)
        assert not torch.equal(GradVac(0.2)(step, seeded()), expected)


def test_gradvac_keeps_targets_by_task_and_none_of_a_spoilt_step():
    aggregator = GradVac(0.2)
    aggregator(random_rows(0, 3), None, ["sst", "para", "sts"])
    before = aggregator.state_dict()["targets"]
    spoilt = random_rows(1, 3)
    spoilt[1, 0] = torch.nan
    aggregator(spoilt, None, ["sst", "para", "sts"])
    assert aggregator.state_dict()["targets"] == before
    aggregator(random_rows(1, 2), None, ["sts", "para"])
    after = aggregator.state_dict()["targets"]
    moved = {(a, b) for (a, b, old), (_, _, new) in zip(before, after, strict=True) if old != new}
    assert moved == {("para", "sts"), ("sts", "para")}


@pytest.mark.parametrize("beta", [0, -0.1, 1.1])
def test_gradvac_refuses_a_beta_that_averages_nothing(beta):
    with pytest.raises(MinBertError, match=f"`beta` must be above 0 and at most 1. Found {beta}"):
        GradVac(beta)


# ---- Unconditional


def test_unconditional_projects_on_all_others_at_once_and_without_a_test():
    assert altered(Unconditional(), THREE)[0].tolist() == [0.0, 0.5, 0.5]
    agreeing = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert Unconditional()(agreeing).tolist() == [0.5, 0.5]  # PCGrad: their sum, (2, 1)


@quick
@given(rows)
def test_unconditional_is_the_reports_equations(gradients):
    def along(i, j):
        return torch.dot(gradients[i], gradients[j]) / torch.dot(gradients[j], gradients[j]) * gradients[j]

    for i, found in enumerate(altered(Unconditional(), gradients)):
        expected = gradients[i] - sum(along(i, j) for j in range(len(gradients)) if j != i)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ---- Names, and a class of one's own


def test_aggregators_by_name_and_options():
    assert {name: type(make_aggregator(name)) for name in AGGREGATORS} == AGGREGATORS
    assert make_aggregator("pcgrad", reduction="mean").reduction == "mean"
    assert hf_minbert.PCGrad is AGGREGATORS["pcgrad"]
    with pytest.raises(MinBertError, match=r"Unknown aggregator 'pcgard'. Did you mean 'pcgrad'\?.*torchjd.UPGrad"):
        make_aggregator("pcgard")
    with pytest.raises(MinBertError, match="Unknown option of aggregator 'gradvac': 'reduction'. Choose from: beta"):
        make_aggregator("gradvac", reduction="mean")


def test_a_class_needs_nothing_but_what_becomes_of_each_gradient():
    class Halved(Aggregator):
        def altered(self, gram, generator, tasks):
            return torch.eye(len(gram), dtype=gram.dtype) / 2

    aggregator = Halved()
    assert aggregator(THREE).tolist() == [-0.5, 0.5, 0.5]
    assert aggregator.weights(gram_matrix(THREE)).tolist() == [0.5, 0.5, 0.5]
    aggregator.load_state_dict(aggregator.state_dict())


# ---- torchjd


@pytest.fixture
def torchjd():
    return pytest.importorskip("torchjd.aggregation", reason="needs torchjd: pip install 'hf_minbert[torchjd]'")


def test_pcgrad_equals_torchjds_with_the_same_draws(torchjd):
    for seed in range(60):
        gram = gram_matrix(random_rows(seed, 2 + seed % 5))
        torch.manual_seed(seed)
        theirs = torchjd.PCGradWeighting()(gram)
        torch.testing.assert_close(PCGrad().weights(gram, seeded(seed)), theirs, rtol=1e-12, atol=1e-12)
        adapted = make_aggregator("torchjd.PCGrad").weights(gram, seeded(seed))
        assert torch.equal(adapted, theirs)


def test_gradvac_equals_torchjds_for_two_tasks(torchjd):
    """Of two tasks each has one order to visit the other."""
    ours, theirs = GradVac(beta=0.3), torchjd.GradVacWeighting(beta=0.3, eps=0.0)
    for seed in range(30):
        gram = gram_matrix(random_rows(seed, 2, 3))
        torch.testing.assert_close(ours.weights(gram), theirs(gram), rtol=1e-9, atol=1e-9)


def test_upgrad_conflicts_with_no_task(torchjd):
    gradients = torch.tensor([[3.0, 1, -2], [-1, -3, 2], [-3, 3, 2]])
    assert (gradients @ PCGrad()(gradients, seeded())).min() < -1
    combined = make_aggregator("torchjd.UPGrad")(gradients)
    assert (gradients @ combined).min() > 0.2
    weighted = make_aggregator("torchjd.UPGrad", pref_vector=[1, 1, 1])(gradients)
    torch.testing.assert_close(weighted, 3 * combined)
    with pytest.raises(MinBertError, match="Unknown option of aggregator 'torchjd.UPGrad': 'reduction'"):
        make_aggregator("torchjd.UPGrad", reduction="mean")


@pytest.mark.parametrize("name", ["AlignedMTL", "DualProj", "IMTLG", "MGDA", "UPGrad"])
def test_weightings_of_torchjd_are_those_of_its_aggregators(torchjd, name):
    gradients = random_rows(0, 3)
    expected = getattr(torchjd, name)()(gradients)
    torch.testing.assert_close(make_aggregator(f"torchjd.{name}")(gradients, seeded()), expected)


def test_torchjd_draws_from_our_generator_and_leaves_the_global_one(torchjd):
    gram, aggregator, generator = gram_matrix(THREE), make_aggregator("torchjd.PCGrad"), seeded(1)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    drawn = [aggregator.weights(gram, generator) for _ in range(40)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(weights.tolist()) for weights in drawn}) > 1  # our generator moves on
    again = seeded(1)
    assert all(torch.equal(aggregator.weights(gram, again), weights) for weights in drawn)


@pytest.mark.parametrize(("name", "near"), [("UPGard", "UPGrad"), ("GradVac", ""), ("Mean", ""), ("GradDrop", "")])
def test_torchjd_classes_that_do_not_serve_are_refused(torchjd, name, near):
    with pytest.raises(MinBertError, match=rf"Unknown aggregator 'torchjd.{name}'\..*{near}.*torchjd.MGDA"):
        make_aggregator(f"torchjd.{name}")


def test_without_torchjd_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd", None)
    with pytest.raises(MinBertError, match=r"'torchjd.UPGrad' needs the library torchjd. .*'hf_minbert\[torchjd\]'"):
        make_aggregator("torchjd.UPGrad")


# ---- Smoothing


def test_smoothing_weighs_older_gradients_less_and_all_weights_sum_to_one():
    smoothing, steps = Smoothing(0.5), [random_rows(seed, 2) for seed in range(3)]
    found = []
    for step in steps:
        found.append(step.clone())
        smoothing(found[-1], ["a", "b"])
    assert torch.equal(found[0], steps[0])
    torch.testing.assert_close(found[1], (steps[0] + 2 * steps[1]) / 3)
    torch.testing.assert_close(found[2], (steps[0] + 2 * steps[1] + 4 * steps[2]) / 7)


def test_smoothing_keeps_an_average_for_each_task():
    smoothing = Smoothing(0.5)
    smoothing(torch.tensor([[1.0], [10.0]]), ["a", "b"])
    smoothing(torch.tensor([[4.0]]), ["a"])
    last = torch.tensor([[1.0], [7.0]])
    smoothing(last, ["b", "a"])
    torch.testing.assert_close(last, torch.tensor([[(10 + 2 * 1) / 3], [(1 + 2 * 4 + 4 * 7) / 7]]))


def test_smoothing_zero_changes_nothing():
    smoothing = Smoothing(0.0)
    for seed in range(2):
        gradients = random_rows(seed, 2)
        expected = gradients.clone()
        smoothing(gradients, range(2))
        assert torch.equal(gradients, expected)


def test_smoothing_sees_through_the_loss_scale():
    plain, scaled = Smoothing(0.9), Smoothing(0.9)
    for seed, scale in enumerate((2.0**16, 2.0**15, 2.0**17)):
        gradients = random_rows(seed, 2)
        large = gradients * scale
        plain(gradients, range(2))
        scaled(large, range(2), torch.tensor(scale))
        torch.testing.assert_close(large, gradients * scale)


def test_a_step_that_is_not_finite_leaves_the_averages_and_stays_visible():
    smoothing, spoilt = Smoothing(0.5), torch.tensor([[torch.inf, 1.0], [1.0, 2.0]])
    smoothing(torch.ones(2, 2), range(2))
    smoothing(spoilt, range(2))
    assert spoilt.tolist() == [[torch.inf, 1.0], [1.0, 2.0]]
    after = torch.full((2, 2), 4.0)
    smoothing(after, range(2))
    torch.testing.assert_close(after, torch.full((2, 2), 3.0))


def test_smoothing_averages_half_precision_in_float32():
    smoothing, small = Smoothing(0.999), torch.ones(1, 1).bfloat16()
    smoothing(small, ["a"])
    for _ in range(50):
        small = torch.full((1, 1), 2.0).bfloat16()
        smoothing(small, ["a"])
    assert smoothing.means["a"].item() == pytest.approx(2 - 0.999**50 * 0.001 / (1 - 0.999**51), rel=1e-4)


def test_smoothing_continues_where_its_state_was_saved(tmp_path):
    whole, resumed = Smoothing(0.7), Smoothing(0.7)
    for seed in range(3):
        whole(random_rows(seed, 2), ["a", "b"])
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(3, 5):
        expected, found = random_rows(seed, 2), random_rows(seed, 2)
        whole(expected, ["a", "b"])
        resumed(found, ["a", "b"])
        assert torch.equal(found, expected)


def test_smoothing_starts_anew_where_other_parameters_are_shared():
    smoothing = Smoothing(0.5)
    smoothing(torch.ones(1, 2), ["a"])
    longer = torch.full((1, 3), 5.0)
    smoothing(longer, ["a"])
    assert longer.tolist() == [[5.0, 5.0, 5.0]]


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_smoothing_refuses_a_decay_out_of_range(decay):
    with pytest.raises(MinBertError, match=f"`decay` must be 0 or more and below 1. Found {decay}"):
        Smoothing(decay)
