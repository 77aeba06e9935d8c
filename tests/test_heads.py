"""Heads: each kind's loss against its formula, shapes that must not broadcast, names that are refused."""

import math
import warnings

import pytest
import torch

from hf_minbert import TASKS, Task, get_tasks
from hf_minbert.model.heads import HEADS, Encoded, TaskHeads, build_head, check_heads

SIAMESE = {"pair_encoding": "bi", "head": "cosine"}
MNR = {"pair_encoding": "bi", "loss": "mnr"}


def head(config, name, **fields):
    return build_head(config, get_tasks({name: fields})[0].to_config())


def loss(part, name, logits, labels):
    return part.loss(torch.zeros(len(logits), 1, 32), logits, labels, TASKS[name].to_config())


@pytest.mark.parametrize(("name", "outputs"), [("sst", 5), ("para", 1), ("sts", 1), ("cfimdb", 2)])
def test_a_head_gives_one_logit_per_class_and_else_one(tiny_config, name, outputs):
    assert head(tiny_config(), name)(torch.zeros(3, 1, 32)).shape == (3, outputs)


def test_classes_loss_is_cross_entropy(tiny_config):
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0], [math.log(6), 0.0, 0.0, 0.0, 0.0]])
    found = loss(head(tiny_config(), "sst"), "sst", logits, torch.tensor([3, 0]))
    assert found.item() == pytest.approx((math.log(5) + math.log(10 / 6)) / 2)


def test_binary_loss_is_that_of_the_second_label(tiny_config):
    # sigmoid(log 3) = 3/4, so the loss is -log(3/4) for label 1 and -log(1/4) for label 0.
    logits = torch.full((2, 1), math.log(3))
    found = loss(head(tiny_config(), "para"), "para", logits, torch.tensor([1, 0]))
    assert found.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_score_loss_does_not_broadcast(tiny_config, shape):
    values = torch.tensor([1.0, 2.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss(head(tiny_config(), "sts"), "sts", values[:, None], values.reshape(shape))
    assert found.item() == 0  # a table of 3 x 3 differences would give 4/3


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_fewer_labels_than_examples_are_refused(tiny_config, name):
    part = head(tiny_config(), name)
    with pytest.raises(ValueError, match="1 labels for 3 examples"):
        loss(part, name, part(torch.zeros(3, 1, 32)), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(("name", "last"), [("sst", 4), ("para", 1)])
def test_a_label_that_is_no_class_id_is_refused(tiny_config, name, last):
    part, logits = head(tiny_config(), name), torch.zeros(2, 5 if name == "sst" else 1)
    for wrong in (last + 1, -1, -100):
        with pytest.raises(ValueError, match=f"'{name}': labels must be ids from 0 to {last}, of .*. Found {wrong}"):
            loss(part, name, logits, torch.tensor([0, wrong]))
    assert loss(part, name, logits, torch.tensor([0, last])).isfinite()
    assert loss(head(tiny_config(), "sts"), "sts", torch.zeros(2, 1), torch.tensor([0.0, 6.0])).item() == 18


@pytest.mark.parametrize("name", ["sst", "para", "sts"])
def test_loss_is_computed_in_float32(tiny_config, name):
    part = head(tiny_config(), name).bfloat16()
    found = loss(part, name, part(torch.ones(2, 1, 32, dtype=torch.bfloat16)), torch.tensor([1, 0]))
    assert found.dtype == torch.float32
    found.backward()
    assert part.linear.weight.grad.dtype == torch.bfloat16


def test_the_last_layer_is_as_exact_as_its_weights(tiny_config):
    part = head(tiny_config(), "sts")
    torch.nn.init.constant_(part.linear.weight, 1e-3)
    torch.nn.init.constant_(part.linear.bias, 2.5)
    vectors = torch.stack([torch.ones(1, 32), torch.ones(1, 32) + 2**-7])  # neighbours in bfloat16
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = part(vectors.bfloat16())[:, 0]
    assert scores.tolist() == pytest.approx([2.532, 2.532 + 0.032 * 2**-7], abs=1e-6)  # both are 2.53125 in bfloat16


@pytest.mark.parametrize(("name", "fields", "low", "high"), [
    ("sts", {}, 0.0, 5.0),
    ("sts", {"pair_encoding": "bi", "head": "cosine", "head_options": {"mapping": "raw"}}, -1.0, 1.0),
])  # fmt: skip
def test_divergence_of_scores_is_their_squared_difference_or_that_of_coins(tiny_config, name, fields, low, high):
    part = head(tiny_config(), name, **fields)
    scores, other = (torch.tensor([[low + share * (high - low)]]) for share in (0.75, 0.5))
    assert part.divergence(scores, other).item() == pytest.approx((0.25 * (high - low)) ** 2)
    there, back = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert part.divergence(scores, other, "kl").item() == pytest.approx(there, rel=1e-5)
    assert part.divergence(scores, other, "symmetric_kl").item() == pytest.approx(there + back, rel=1e-5)
    outside = torch.tensor([[high + 1.0]], requires_grad=True)
    assert part.divergence(outside, torch.tensor([[high + 2.0]]), "kl").item() == 0
    part.divergence(outside, other, "kl").backward()
    assert outside.grad.item() == 0


@pytest.mark.parametrize("name", ["kl", "symmetric_kl"])
def test_a_score_as_a_coin_has_a_bounded_gradient_up_to_the_ends_of_its_range(tiny_config, name):
    part = head(tiny_config(), "sts")
    ends = torch.tensor([1e-9, 1e-6, 1e-4, 0.00999, 0.01001, 0.5, 0.98999, 0.99001, 1 - 1e-6])  # shares of the range
    scores, other = (5 * x[:, None].requires_grad_() for x in torch.cartesian_prod(ends, ends).unbind(dim=1))
    slopes = torch.autograd.grad(part.divergence(scores, other, name).sum(), (scores, other))
    assert all(slope.isfinite().all() for slope in slopes)
    steepest = max(slope.abs().max().item() for slope in slopes)
    # 2 log 99 and 0.98 / (0.01 * 0.99), by the share; the steepest of a squared error is 10.
    assert 15 < steepest <= (2 * math.log(99) + 0.98 / 0.0099) / 5 * 1.01


@pytest.mark.parametrize(("own", "dropout"), [(None, 0.3), (0.0, 0.0), (0.6, 0.6)])
def test_head_dropout_is_the_hidden_one_unless_it_has_its_own(tiny_config, own, dropout):
    config = tiny_config(hidden_dropout_prob=0.3, classifier_dropout=own)
    assert head(config, "sst").dropout.p == dropout


@pytest.mark.parametrize("name", ["train", "get", "half"])
def test_a_task_cannot_take_a_name_of_torch_modules(tiny_config, name):
    task = Task(name=name, kind="score", text_columns=("text",), label_column="label", range=(0, 1))
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        TaskHeads(tiny_config(tasks=[task]))


def test_an_unknown_head_is_refused_with_the_choices(tiny_config):
    task = {**TASKS["sst"].to_config(), "head": "linaer"}
    with pytest.raises(ValueError, match=f"'sst'.*'linaer'.*{sorted(HEADS)[0]}"):
        TaskHeads(tiny_config(tasks=[task]))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (
            "sts",
            {"head": "cosine"},
            "'sts': `head: cosine` needs a pair that is encoded apart. Set `pair_encoding: bi`",
        ),
        (
            "sst",
            {"head": "cosine"},
            "'sst': `head: cosine` gives one number, and kind 'classes' needs 5. Heads for it: linear, mlp, blocks",
        ),
        ("sst", {"join": "concat"}, "`join: concat` has no meaning: there are no two vectors to join"),
        ("sts", {"pair_encoding": "bi", "head": "cosine", "join": "concat"}, "compares the two vectors itself"),
        ("sts", {"layers": "mix"}, "`layers: mix` does not go with `pooling: pooler`"),
        ("sts", {"layers": "first"}, "unknown layers 'first'. Choose from: last, mix"),
        ("sts", {"pooling": "min"}, "unknown pooling 'min'. Choose from: attention, bigru, cls, max, mean, pooler"),
        ("sts", {"pair_encoding": "bi", "join": "sum"}, "unknown join 'sum'. Choose from: concat,"),
        ("sts", {"loss": "bce"}, "unknown loss 'bce' for kind 'score'. Choose from: cosent, "),
        ("para", {"loss": "mnr"}, "`loss: mnr` needs a pair that is encoded apart"),
        ("sts", {"loss": "cosine_mse"}, "`loss: cosine_mse` trains a cosine. Set `head: cosine`"),
        ("sst", {"head_options": {"size": 3}}, "unknown option 'size'. The head linear has: dropout, scale"),
        ("sts", {"loss_options": {"scale": 3}}, "unknown option 'scale'. The loss of this kind has no options"),
        (
            "sst",
            {"pooling_options": {"size": 3}},
            "`pooling_options`: unknown option 'size'. The pooling pooler has no",
        ),
        ("sst", {"head_options": {"dropout": 1.0}}, "'sst': `dropout` must be a number from 0 to below 1. Found 1.0"),
        ("sst", {"head_options": {"dropout": "x"}}, "`dropout` must be a number from 0 to below 1. Found 'x'"),
        ("sst", {"head_options": {"scale": 0}}, "`scale` must be a number above 0. Found 0"),
        ("sst", {"sentence_dropout": -0.1}, "`sentence_dropout` must be a number from 0"),
        ("sst", {"head": "mlp", "head_options": {"dropouts": [0.1]}}, "`dropouts` must be 2 rates.*Found \\[0.1\\]"),
        ("sst", {"head": "mlp", "head_options": {"activation": "relo"}}, "`activation` must be one of:.*Found 'relo'"),
        (
            "sst",
            {"head": "mlp", "head_options": {"activation": "prelu"}},
            "`activation: prelu` has weights of its own",
        ),
        ("sst", {"head": "blocks", "head_options": {"activation": "xielu"}}, "`activation: xielu` has weights"),
        ("sst", {"head": "blocks", "head_options": {"hidden_sizes": []}}, "`hidden_sizes` must be a list of sizes"),
        ("sst", {"head": "blocks", "head_options": {"hidden_sizes": [0]}}, "`hidden_sizes` must be a whole number"),
        ("sst", {"pooling": "bigru", "pooling_options": {"hidden_size": 2.5}}, "`hidden_size` must be a whole number"),
        ("para", {"pair_encoding": "bi", "head": "cosine", "head_options": {"mapping": "relu"}}, "is for scores"),
        ("sst", {"loss_options": {"class_weights": [1, 2]}}, "`loss_options`: `class_weights` must be 5 numbers"),
        ("sst", {"loss_options": {"class_weights": [1, 1, 1, 1, 0]}}, "`class_weights` must be a number above 0"),
        ("sst", {"loss_options": {"label_smoothing": 2}}, "`label_smoothing` must be a number from 0 to 1. Found 2"),
        ("sst", {"loss_options": {"focal_gamma": -1}}, "`focal_gamma` must be a number from 0. Found -1"),
        (
            "sst",
            {"loss_options": {"focal_gamma": 2, "label_smoothing": 0.1}},
            "`focal_gamma` is for one label per row, and `label_smoothing` for all. Leave one out",
        ),
        ("para", {"loss_options": {"focal_gamma": True}}, "`focal_gamma` must be a number from 0. Found True"),
        ("para", {"loss_options": {"pos_weight": "x"}}, "`pos_weight` must be a number above 0. Found 'x'"),
        ("para", {"pair_encoding": "bi", "loss": "mnr", "loss_options": {"scores": "dot"}}, "Found 'dot'"),
        ("sst", {"loss_options": {"label_smoothing": "auto"}}, "`label_smoothing` must be a number .* Found 'auto'"),
        ("para", {**MNR, "loss_options": {"bce_weight": "auto"}}, "`bce_weight` must be a number .* Found 'auto'"),
        ("para", {**MNR, "loss_options": {"scale": "auto"}}, "`scale` must be a number above 0. Found 'auto'"),
        *(
            (
                "sts",
                {**SIAMESE, "loss": "cosine_mse", "head_options": {"mapping": mapping}},
                f"`mapping: {mapping}` does not go with `loss: cosine_mse`",
            )
            for mapping in ("raw", "shifted")
        ),
        ("sts", {"loss": "cosent", "loss_options": {"scale": -1}}, "`scale` must be a number above 0. Found -1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_sentence(tiny_config, name, fields, said):
    with pytest.raises(ValueError, match=said):
        check_heads(tiny_config(tasks=get_tasks({name: fields})))


@pytest.mark.parametrize(("loss_name", "expected"), [("mse", 3.75), ("cosine_mse", 2.5), ("cosent", 3.75)])
def test_a_cosine_is_answered_on_the_scale_that_its_loss_trains(tiny_config, loss_name, expected):
    """A cosine of 1/2 is three quarters of the way from -1 to 1, and half of that from 0, on scores from 0 to 5."""
    part = head(tiny_config(), "sts", **SIAMESE, loss=loss_name)
    vectors = torch.zeros(1, 2, 32)
    vectors[0, :, :2] = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]])
    assert part(vectors).item() == pytest.approx(expected)


def test_a_cosine_that_meets_its_loss_is_the_score(tiny_config):
    part, task = (
        head(tiny_config(), "sts", **SIAMESE, loss="cosine_mse"),
        get_tasks({"sts": {**SIAMESE, "loss": "cosine_mse"}}),
    )
    vectors = torch.zeros(1, 2, 32)
    vectors[0, :, :2] = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    answer = part(vectors)
    assert part.loss(vectors, answer, answer[:, 0], task[0].to_config()).item() == pytest.approx(0, abs=1e-12)


def test_checking_the_heads_draws_no_random_number(tiny_config):
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    check_heads(tiny_config(tasks=get_tasks({"sst": {"pooling": "bigru", "head": "blocks"}})))
    assert torch.equal(torch.rand(1), first)


def test_weights_that_are_still_to_be_counted_pass_the_check_and_no_batch(tiny_config):
    tasks = get_tasks({"para": {"loss_options": {"pos_weight": "auto"}}})
    check_heads(tiny_config(tasks=tasks))
    part = head(tiny_config(), "para")
    with pytest.raises(ValueError, match="`pos_weight: auto` is counted from the training rows"):
        part.loss(torch.zeros(2, 1, 32), torch.zeros(2, 1), torch.tensor([0, 1]), tasks[0].to_config())


def test_a_fresh_score_starts_in_the_middle_of_its_range_and_a_saved_one_where_it_was(tiny_model, tmp_path):
    model = tiny_model(tasks=("sst", "sts"))
    assert model.heads.sts.linear.bias.item() == 2.5
    model.bert.save_pretrained(tmp_path / "encoder")
    loaded = type(model).from_pretrained(tmp_path / "encoder", tasks=model.config.tasks)
    assert loaded.heads.sts.linear.bias.item() == 2.5
    assert not loaded.heads.sst.linear.bias.any()
    model.heads.sts.linear.bias.data.fill_(1.0)
    model.save_pretrained(tmp_path / "model")
    assert type(model).from_pretrained(tmp_path / "model").heads.sts.linear.bias.item() == 1.0


# ---- Dropout


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({}, [0.1]),
        ({"head_options": {"dropout": 0.0}}, [0.0]),  # given, and not the model's
        ({"head_options": {"dropout": 0.3}}, [0.3]),
        ({"head": "mlp"}, [0.1, 0.1]),
        ({"head": "mlp", "head_options": {"dropouts": [0.3, 0.45]}}, [0.3, 0.45]),
        ({"head": "mlp", "head_options": {"hidden_sizes": [8, 4], "dropouts": [0.2, 0.0, 0.6]}}, [0.2, 0.0, 0.6]),
        ({"head": "blocks"}, [0.1, 0.1]),
        ({"head": "blocks", "head_options": {"dropout": 0.0}}, [0.0, 0.0]),
        ({"head": "blocks", "head_options": {"hidden_sizes": [8, 4, 2], "dropout": 0.4}}, [0.4, 0.4, 0.4]),
        (SIAMESE, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_sentences", [0.0, 0.25])
def test_each_dropout_has_the_rate_that_is_given(tiny_config, fields, rates, of_sentences):
    part = head(tiny_config(hidden_dropout_prob=0.1), "sts", **fields, sentence_dropout=of_sentences)
    found = [module.p for module in part.modules() if isinstance(module, torch.nn.Dropout)]
    assert found == [of_sentences, *rates]


@pytest.mark.parametrize("fields", [{}, SIAMESE], ids=str)
def test_sentence_dropout_is_on_the_vectors_in_training_alone(tiny_config, fields):
    part = head(tiny_config(), "sts", **fields, sentence_dropout=0.5)
    pooled = torch.ones(2 * part.sentences, 32)
    encoded = Encoded((pooled[:, None],), torch.ones(len(pooled), 1, dtype=torch.bool), pooled)
    torch.manual_seed(0)
    in_training = part.train().vectors(encoded)
    assert set(in_training.unique().tolist()) == {0.0, 2.0}  # left out, or twice as large in their place
    assert not torch.equal(in_training, part.vectors(encoded))
    assert part.eval().vectors(encoded).unique().tolist() == [1.0]


@pytest.mark.parametrize("fields", [{}, {"head": "mlp"}, {"head": "blocks"}], ids=str)
def test_a_heads_dropout_is_applied_in_training_alone(tiny_config, fields):
    option = {"head_options": {"dropouts": [0.5, 0.0]} if fields.get("head") == "mlp" else {"dropout": 0.5}}
    part, vectors = head(tiny_config(), "sts", **fields, **option), torch.ones(2, 1, 32)
    torch.manual_seed(0)
    assert not torch.equal(part.train()(vectors), part(vectors))
    assert torch.equal(part.eval()(vectors), part(vectors))
