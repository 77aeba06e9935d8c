"""Losses and divergences: each against numbers worked out by hand."""

import math
from functools import partial

import pytest
import torch

from hf_minbert import MinBertForMultiTask, Predictor, get_tasks
from hf_minbert.data.files import load_split
from hf_minbert.model.heads import build_head
from hf_minbert.model.losses import (
    bernoulli_kl,
    kl,
    order_loss,
    ranking_loss,
    squared_difference,
    symmetric_bernoulli_kl,
    symmetric_kl,
)
from hf_minbert.pretrained.loading import load_config, load_tokenizer, load_weights
from hf_minbert.pretrained.prediction import score


class Sizes:
    hidden_size, num_hidden_layers = 2, 2
    hidden_dropout_prob, classifier_dropout, layer_norm_eps = 0.0, None, 1e-12


@pytest.fixture
def compute():
    """`compute("para", logits, labels, vectors=..., loss_options={...})`: the loss of a head with these fields."""

    def loss(name, logits, labels, vectors=None, **fields):
        task = get_tasks({name: fields})[0].to_config()
        head = build_head(Sizes, task)
        vectors = torch.zeros(len(labels), head.sentences, 2) if vectors is None else torch.tensor(vectors)
        logits = head(vectors) if logits is None else torch.tensor(logits)
        return head.loss(vectors, logits, torch.tensor(labels), task).item()

    return loss


# ---- Classes

#: Probabilities 1/2, 1/8, 1/8, 1/8, 1/8.
ROW = [math.log(4), 0.0, 0.0, 0.0, 0.0]


def test_class_weights_weigh_rows_and_the_mean_is_over_weights(compute):
    weights = [3.0, 1.0, 1.0, 1.0, 1.0]
    found = compute("sst", [ROW, ROW], [0, 1], loss_options={"class_weights": weights})
    assert found == pytest.approx((3 * math.log(2) + 1 * math.log(8)) / 4)


def test_label_smoothing_gives_a_share_to_all_labels(compute):
    found = compute("sst", [ROW], [0], loss_options={"label_smoothing": 0.5})
    assert found == pytest.approx(0.5 * math.log(2) + 0.5 * (math.log(2) + 4 * math.log(8)) / 5)


# ---- Binary


def test_pos_weight_weighs_the_second_label(compute):
    # sigmoid(log 3) = 3/4. Negatives are 63 to 37 positives in Quora, hence 1.70.
    found = compute("para", [[math.log(3)]] * 3, [1, 0, 0], loss_options={"pos_weight": 63 / 37})
    assert found == pytest.approx((63 / 37 * math.log(4 / 3) + 2 * math.log(4)) / 3)


# ---- Focal loss, of both

CASES = {
    "classes": ("sst", [ROW, [0.3, -1.0, 2.0, 0.1, 0.0]], [0, 1], {"class_weights": [3.0, 1.0, 1.0, 1.0, 1.0]}),
    "binary": ("para", [[math.log(3)], [-0.4]], [1, 0], {"pos_weight": 3.0}),
}


@pytest.fixture
def loss_of():
    """`loss_of(name, logits, labels, options)`: as a tensor, with the logits' gradient."""

    def make(name, logits, labels, options):
        task = get_tasks({name: {"loss_options": options}})[0].to_config()
        head = build_head(Sizes, task)
        return head.loss(torch.zeros(len(labels), head.sentences, 2), logits, torch.tensor(labels), task)

    return make


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gamma", [0.5, 1, 2.0, 5.0])
@pytest.mark.parametrize("case", CASES)
def test_focal_loss_is_the_formula(loss_of, case, gamma, weighted):
    """-a (1 - p)^gamma log p, its mean, and the gradient of that by autograd in float64."""
    name, rows, labels, weights = CASES[case]
    logits = torch.tensor(rows, requires_grad=True)
    exact = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    both = exact if case == "classes" else torch.cat([torch.zeros_like(exact), exact], dim=1)
    p = both.softmax(dim=1)[torch.arange(2), labels]
    alpha = torch.tensor([3.0, 1.0]) if weighted else torch.ones(2)  # both cases weigh the first row three times
    expected = (-alpha * (1 - p) ** gamma * p.log()).sum() / (alpha.sum() if case == "classes" else 2)
    found = loss_of(name, logits, labels, {"focal_gamma": gamma, **(weights if weighted else {})})
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, exact.grad.float())


@pytest.mark.parametrize("case", CASES)
def test_with_gamma_0_focal_loss_is_the_plain_one(loss_of, case):
    name, rows, labels, weights = CASES[case]
    gradients = []
    for options in (weights, {**weights, "focal_gamma": 0}):
        logits = torch.tensor(rows, requires_grad=True)
        loss = loss_of(name, logits, labels, options)
        loss.backward()
        gradients.append((loss, logits.grad))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("case", CASES)
def test_focal_loss_of_a_sure_answer_has_a_finite_gradient(loss_of, case, gamma):
    """With a logit of 200 the label's probability is 1 in float32, or 0 for another label."""
    name, rows, _, _ = CASES[case]
    for label, expected in ((0, 0.0), (1, 200.0)):
        sure = [200.0, *[0.0] * (len(rows[0]) - 1)] if case == "classes" else [-200.0]
        logits = torch.tensor([sure], requires_grad=True)
        loss = loss_of(name, logits, [label], {"focal_gamma": gamma})
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        assert logits.grad.isfinite().all()


def test_ranking_loss_by_hand():
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    with_own = (math.log(math.e**2 + math.e) - 2 + math.log(1 + math.e**3) - 3) / 2
    both = torch.tensor([True, True])
    assert ranking_loss(scores, both).item() == pytest.approx(with_own)
    # The report's form leaves the pair itself out: log e^1 - 2 and log e^0 - 3.
    assert ranking_loss(scores, both, with_own=False).item() == pytest.approx(((1 - 2) + (0 - 3)) / 2)
    # A row that is no positive is no candidate either.
    wider = torch.tensor([[2.0, 9.0, 1.0], [9.0, 9.0, 9.0], [0.0, 9.0, 3.0]])
    for own in (True, False):
        expected = ranking_loss(scores, both, own)
        assert torch.equal(ranking_loss(wider, torch.tensor([True, False, True]), own), expected)


@pytest.mark.parametrize("positive", [[], [False], [True], [False, False, False], [False, True, False]], ids=str)
@pytest.mark.parametrize("with_own", [True, False])
def test_ranking_needs_two_and_is_else_zero_with_a_gradient(positive, with_own):
    scores = torch.ones(len(positive), len(positive), requires_grad=True)
    loss = ranking_loss(scores, torch.tensor(positive, dtype=torch.bool), with_own)
    loss.backward()
    assert loss.item() == 0 and not scores.grad.any()


def test_the_gradient_of_ranking_is_finite_and_of_positives_only():
    scores = torch.randn(4, 4, requires_grad=True)
    positive = torch.tensor([True, False, True, True])
    ranking_loss(scores, positive).backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad != 0).equal(positive[:, None] & positive[None, :])


PAIRS = [[[1.0, 0.0], [1.0, 0.0]], [[3.0, 3.0], [-5.0, 5.0]], [[0.0, 2.0], [0.0, 7.0]]]


def test_multiple_negatives_takes_positive_pairs_only(compute):
    # Rows 0 and 2 are positive: cosines [[1, .8], [.8, 1]], twenty times.
    near = [*PAIRS[:2], [[4.0, 3.0], [8.0, 6.0]]]
    found = compute("para", None, [1, 0, 1], near, pair_encoding="bi", loss="mnr")
    assert found == pytest.approx(math.log(1 + math.exp(20 * (0.8 - 1))), rel=1e-4)
    options = {"scale": 1.0}
    found = compute("para", None, [1, 1, 1], PAIRS, pair_encoding="bi", loss="mnr", loss_options=options)
    half = math.sqrt(0.5)
    cosines = torch.tensor([[1.0, -half, 0.0], [half, 0.0, half], [0.0, half, 1.0]])
    assert found == pytest.approx((cosines.logsumexp(1) - cosines.diagonal()).mean().item())


def test_multiple_negatives_can_score_with_the_head(compute):
    task = get_tasks({"para": {"pair_encoding": "bi", "loss": "mnr", "loss_options": {"scores": "head"}}})[0]
    task = task.to_config()
    head = build_head(Sizes, task)
    head.linear.weight.data, head.linear.bias.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0.5])
    vectors = torch.tensor(PAIRS)
    found = head.loss(vectors, head(vectors), torch.tensor([1, 0, 1]), task).item()
    # s(i, j) = u_i . (1, 2) + v_j . (3, 4) + 1/2
    s00, s02, s20, s22 = 1 + 3 + 0.5, 1 + 28 + 0.5, 4 + 3 + 0.5, 4 + 28 + 0.5
    assert found == pytest.approx(((s02 - s00) + (s20 - s22)) / 2)


def test_a_share_of_binary_cross_entropy_can_set_the_threshold(compute):
    given = {"pair_encoding": "bi", "loss": "mnr"}
    logits, labels = [[math.log(3)]] * 3, [1, 0, 1]
    alone = compute("para", logits, labels, PAIRS, **given)
    both = compute("para", logits, labels, PAIRS, **given, loss_options={"bce_weight": 0.5})
    assert both - alone == pytest.approx(0.5 * (2 * math.log(4 / 3) + math.log(4)) / 3)


# ---- Scores


def test_cosine_squared_error_is_against_the_score_between_0_and_1(compute):
    found = compute("sts", None, [5.0, 2.5, 0.0], PAIRS, pair_encoding="bi", head="cosine", loss="cosine_mse")
    assert found == pytest.approx(((1 - 1) ** 2 + (0 - 0.5) ** 2 + (1 - 0) ** 2) / 3)


def test_order_loss_by_hand():
    scores, labels = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2.0, 1.0, 2.0])
    # 0 and 2 are above 1 in label: s1 - s0 = 2 and s1 - s2 = 1. 0 and 2 are equal, and say nothing.
    assert order_loss(scores, labels).item() == pytest.approx(math.log(1 + math.e**2 + math.e))
    assert order_loss(scores, torch.zeros(3)).item() == 0


def test_cosent_looks_at_the_cosine_of_a_cosine_head_and_else_at_the_score_between_0_and_1(compute):
    given = {"loss": "cosent", "loss_options": {"scale": 2.0}}
    found = compute("sts", None, [1.0, 4.0, 1.0], PAIRS, pair_encoding="bi", head="cosine", **given)
    assert found == pytest.approx(math.log(1 + 2 * math.exp(2 * (1 - 0))))  # cosines 1, 0, 1
    found = compute("sts", [[5.0], [0.0]], [1.0, 4.0], **given)
    assert found == pytest.approx(math.log(1 + math.exp(2 * (1 - 0))))
    found = compute("sts", [[2.5], [2.25]], [1.0, 4.0], loss="cosent")  # 20 unless said otherwise
    assert found == pytest.approx(math.log(1 + math.exp(20 * (0.5 - 0.45))), rel=1e-4)


# ---- Cosine heads


@pytest.mark.parametrize(
    ("mapping", "expected", "bounds"),
    [
        ("raw", [1.0, 0.0, -1.0], (-1.0, 1.0)),
        ("shifted", [5.0, 2.5, 0.0], (0.0, 5.0)),
        ("relu", [5.0, 0.0, 0.0], (0.0, 5.0)),
    ],
)
def test_a_cosine_head_maps_to_its_range(mapping, expected, bounds):
    fields = {"pair_encoding": "bi", "head": "cosine", "head_options": {"mapping": mapping}}
    head = build_head(Sizes, get_tasks({"sts": fields})[0].to_config())
    vectors = torch.tensor([[[2.0, 0.0], [9.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [-2.0, -2.0]]])
    assert head(vectors)[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert head.output_range == bounds


def test_relu_has_no_gradient_for_negative_cosines():
    fields = {"pair_encoding": "bi", "head": "cosine", "head_options": {"mapping": "relu"}}
    head = build_head(Sizes, get_tasks({"sts": fields})[0].to_config())
    vectors = torch.tensor([[[1.0, 0.2], [-2.0, 1.0]]], requires_grad=True)
    head(vectors).sum().backward()
    assert not vectors.grad.any()


def test_a_binary_cosine_is_scaled_and_shifted_to_a_logit():
    task = get_tasks({"para": {"pair_encoding": "bi", "head": "cosine"}})[0].to_config()
    head = build_head(Sizes, task)
    head.logit.weight.data, head.logit.bias.data = torch.tensor([4.0]), torch.tensor([-1.0])
    vectors = torch.tensor([[[2.0, 0.0], [9.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    assert head(vectors)[:, 0].tolist() == pytest.approx([3.0, -1.0])
    assert head.output_range is None


def cosine_para(**options):
    return get_tasks({"para": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine", "head_options": options}})[
        0
    ]


def test_a_new_cosine_head_begins_with_its_threshold_between_the_classes_and_the_config_says_so(tiny_model):
    model = tiny_model([cosine_para()])
    assert model.config.get_task("para")["head_options"] == {"initial_scale": 20.0, "initial_offset": -15.0}
    vectors = torch.tensor([[[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.8, 0.6]]])  # of the cosines 0.6 and 0.8
    assert model.heads.para(vectors)[:, 0].tolist() == pytest.approx([-3.0, 1.0], abs=1e-5)
    own = tiny_model([cosine_para(initial_offset=-18)])  # where a yes is rare
    assert own.heads.para(vectors)[:, 0].tolist() == pytest.approx([-6.0, -2.0], abs=1e-5)
    assert own.config.get_task("para")["head_options"] == {"initial_scale": 20.0, "initial_offset": -18}
    for scale, start in ((8, (8, -6.0)), (None, (20.0, -15.0))):  # the threshold stays
        options = tiny_model([cosine_para(initial_scale=scale)]).config.get_task("para")["head_options"]
        assert (options["initial_scale"], options["initial_offset"]) == start
    with pytest.raises(ValueError, match=r"no cosine reaches the threshold of 1.2. Found -6 and 5"):
        tiny_model([cosine_para(initial_scale=5, initial_offset=-6)])


def test_a_cosine_head_of_a_config_that_says_nothing_stays_as_it_was(tiny_model, tmp_path):
    vectors = torch.tensor([[[1.0, 0.0], [0.6, 0.8]]])
    model = tiny_model([cosine_para()])
    for task in model.config.tasks:
        task["head_options"] = {}
    older = MinBertForMultiTask(model.config)
    assert older.heads.para(vectors).item() == pytest.approx(3.0)  # 5 * 0.6 + 0
    older.heads.para.logit.weight.data, older.heads.para.logit.bias.data = torch.tensor([7.0]), torch.tensor([-0.5])
    older.save_pretrained(tmp_path)
    loaded = MinBertForMultiTask.from_pretrained(tmp_path)
    assert loaded.heads.para(vectors).item() == pytest.approx(3.7)
    assert loaded.config.get_task("para")["head_options"] == {}
    config = load_config(str(tmp_path), tasks=[cosine_para()])  # trained further by a recipe
    further, missing = load_weights(str(tmp_path), config)
    assert not missing
    assert further.heads.para(vectors).item() == pytest.approx(3.7)


def test_a_new_cosine_head_on_a_sentence_encoder_is_no_worse_than_a_threshold_before_it_is_trained(minilm):
    """Of 400 pairs of Quora's: what it had begun with says yes to nearly all."""
    task = cosine_para()
    rows = load_split(task, "sample", "dev")
    yes = sum(rows["label"]) / len(rows)
    found = {}
    for name, options in (("before", {"initial_scale": 5, "initial_offset": 0}), ("now", {})):
        config = load_config(str(minilm), tasks=[cosine_para(**options)])
        model, _ = load_weights(str(minilm), config)
        scored, decoded = score(Predictor(model, load_tokenizer(str(minilm), config), max_length=64), {"para": rows})
        found[name] = scored["para_accuracy"], decoded["para"].values.mean()
    assert found["before"][0] == pytest.approx(yes, abs=0.05) and found["before"][1] > 0.95
    assert found["now"][0] > 0.7


@pytest.mark.parametrize("options", [{"initial_scale": 0}, {"initial_scale": True}, {"initial_offset": math.nan}])
def test_a_start_that_is_no_number_is_refused(tiny_model, options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be a number"):
        tiny_model([cosine_para(**options)])


def test_a_score_has_no_start(tiny_model):
    task = get_tasks({"sts": {"pair_encoding": "bi", "head": "cosine", "head_options": {"initial_scale": 3}}})[0]
    assert "initial_offset" not in task.to_config()["head_options"]
    with pytest.raises(ValueError, match="`initial_scale` must be a number above 0, and is for binary tasks. Found 3"):
        tiny_model([task])


def test_a_linear_head_can_be_scaled_and_still_starts_in_the_middle(tiny_model):
    task = get_tasks({"sts": {"head_options": {"scale": 5}}})[0]
    head = tiny_model([task]).heads.sts
    assert head.linear.bias.item() == 0.5
    assert head(torch.zeros(1, 1, 32)).item() == 2.5


# ---- Divergences


def test_divergences_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    close = partial(pytest.approx, rel=1e-5)  # differences of logarithms near 1, in float32
    assert symmetric_kl(p.log(), q.log() + 3).item() == close(2 * 0.25 * math.log(2))
    a, b = torch.tensor([[math.log(3)]]), torch.tensor([[0.0]])  # coins of 3/4 and 1/2
    there, back = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert bernoulli_kl(a, b).item() == close(there)
    assert bernoulli_kl(b, a).item() == close(back)
    assert symmetric_bernoulli_kl(a, b).item() == close(there + back)
    assert kl(p.log(), q.log() + 3).item() == close(0.25 * math.log(2))
    assert squared_difference(torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [4.0]])).tolist() == [4.0, 0.0]


@pytest.mark.parametrize("divergence", [symmetric_kl, symmetric_bernoulli_kl, squared_difference, kl, bernoulli_kl])
def test_divergences_are_zero_at_equality_above_it_elsewhere_and_finite(divergence):
    torch.manual_seed(0)
    columns = 5 if divergence in (symmetric_kl, kl) else 1
    a, b = torch.randn(3, columns), torch.randn(3, columns, requires_grad=True)
    symmetric = torch.allclose(divergence(a, b), divergence(b, a))
    assert symmetric == (divergence not in (kl, bernoulli_kl))
    assert not divergence(a, a).any() and (divergence(a, b) > 0).all()
    assert divergence(a, b).shape == (3,)
    far = torch.full((1, columns), -1000.0)
    far[0, 0] = 1000.0
    loss = divergence(far, (-far).requires_grad_()).sum() + divergence(a, b).sum()
    loss.backward()
    assert loss.isfinite() and b.grad.isfinite().all()
