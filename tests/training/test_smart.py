"""SMART: the noise, the ball, Algorithm 1 against a plain reading of it, and what may not depend on what."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_minbert import MinBertForMultiTask, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.model.losses import DIVERGENCES
from hf_minbert.model.packing import Packing
from hf_minbert.training.noise import _hash, _signed, noise_of_words, normal_noise
from hf_minbert.training.terms.base import NoiseKey, RandomState, RecordedNoiseKey, embedded, is_token
from hf_minbert.training.terms.smart import (
    FORMS,
    AlgorithmOne,
    MtDnn,
    Smart,
    SmartPytorch,
    normalised,
    projected,
)

TASKS = {
    "sst": {}, "para": {}, "sts": {},
    "para_bi": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"},
    "sts_bi": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"},
}  # fmt: skip
KEY = NoiseKey(seed=5, step=7, first_row=0)


@pytest.fixture(scope="module")
def tasks():
    return [replace(get_tasks({name.split("_")[0]: TASKS[name]})[0], name=name) for name in TASKS]


@pytest.fixture(scope="module")
def batches(tasks, toy_rows, tiny_tokenizer):
    """`{task: batch}`, four rows of each, of different lengths."""
    made = {}
    for task in tasks:
        rows = toy_rows(**{task.name.split("_")[0]: 4})[task.name.split("_")[0]]
        for row, more in zip(rows, ("", " very good film", "", " is it not a dog"), strict=True):
            for column in task.text_columns:
                row[column] += more
        made[task.name] = PaddedCollator(task, 0)(encode(rows, task, tiny_tokenizer, 64))
    return made


@pytest.fixture
def model(tasks, tiny_model):
    return tiny_model(tasks).train()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- noise


def test_the_generator_is_splitmix64():
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821
    ]  # of the seed 1234567, as published with the algorithm  # fmt: skip
    counted = torch.arange(1, 6) * _signed(0x9E3779B97F4A7C15) + 1234567
    assert _hash(counted).tolist() == [_signed(number) for number in expected]


def test_noise_is_normal_and_its_numbers_are_independent():
    rows, positions = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    noise, another = (normal_noise(key, rows, positions, 101).view(100, 100, 101) for key in (11, 12))
    flat = noise.flatten().double()
    assert flat.mean().abs() < 0.005 and (flat.std() - 1).abs() < 0.005
    assert flat.pow(3).mean().abs() < 0.02 and (flat.pow(4).mean() - 3).abs() < 0.05
    assert 4.5 < flat.abs().max() < 5.8
    inside = [(flat.abs() < bound).double().mean().item() for bound in (0.5, 1.0, 2.0)]
    assert inside == pytest.approx([math.erf(bound / math.sqrt(2)) for bound in (0.5, 1.0, 2.0)], abs=0.003)
    pairs = [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[..., :50], noise[..., 51:])]
    pairs += [(noise[..., 1:], noise[..., :-1]), (noise, another)]
    for one, other in pairs:
        assert abs((one * other).mean().item()) < 0.005
        assert abs((one.square() * other.square()).mean().item() - 1) < 0.01


def test_noise_depends_on_seed_step_task_and_row_and_on_nothing_else(batches):
    batch = batches["para_bi"]
    noise = noise_of_words(batch, 8, KEY)
    assert noise.shape == (4, 2, batch["input_ids"].shape[-1], 8)
    # Where a number stands in a tensor may decide which code computes its logarithm and cosine: to the last bits.
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    padded = {**batch, "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 3))}
    close(noise_of_words(padded, 8, KEY)[..., :-3, :], noise)
    tokens = batch["attention_mask"].bool()
    packing = Packing.describe(tokens.flatten(0, 1).numpy(), fill=True)
    places = packing["tokens"][: tokens.sum()]  # behind them are fillers
    close(noise_of_words({**batch, "packing": packing}, 8, KEY)[0, : len(places)], noise.flatten(0, 2)[places])
    recorded = RecordedNoiseKey(KEY.numbers(batch["task"], "cpu"))
    assert torch.equal(noise_of_words(batch, 8, recorded), noise)
    second_half = {**batch, "input_ids": batch["input_ids"][2:]}
    close(noise_of_words(second_half, 8, replace(KEY, first_row=2)), noise[2:])
    others = [noise_of_words(batch, 8, replace(KEY, **{name: 8})) for name in ("seed", "step", "first_row")]
    others += [noise_of_words({**batch, "task": "sts"}, 8, KEY), noise.flip(1), noise.flip(0), noise.roll(1, 2)]
    for other in others:
        assert not (other == noise).any()


# ---- the ball


def test_norms_and_projections_by_hand():
    vectors = torch.tensor([[[3.0, -4.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])  # [sentences, tokens, size]
    expected = {
        ("inf", "token"): [[0.75, -1.0], [0.0, 1.0]], ("inf", "sentence"): [[0.75, -1.0], [0.0, 0.25]],
        ("l2", "token"): [[0.6, -0.8], [0.0, 1.0]],
        ("l2", "sentence"): [[3 / 26**0.5, -4 / 26**0.5], [0.0, 1 / 26**0.5]],
    }  # fmt: skip
    for (norm, level), rows in expected.items():
        torch.testing.assert_close(normalised(vectors, norm, level), torch.tensor([rows, [[0.0, 0.0]] * 2]))
    assert projected(vectors, 2.0, "inf", "token")[0].tolist() == [[2.0, -2.0], [0.0, 1.0]]
    assert projected(vectors, 2.5, "l2", "token")[0].tolist() == [[1.5, -2.0], [0.0, 1.0]]
    shrunk = projected(vectors, 1.0, "l2", "sentence")
    torch.testing.assert_close(shrunk[0], vectors[0] / 26**0.5)
    assert not shrunk[1].any()
    assert not projected(vectors, 0.0, "l2", "token").any()


@pytest.mark.parametrize("level", ["token", "sentence"])
@pytest.mark.parametrize("norm", ["inf", "l2"])
@pytest.mark.parametrize("task", ["sst", "para_bi"])
def test_every_step_ends_in_the_ball_and_spares_padding(model, batches, monkeypatch, norm, level, task):
    ends, step = [], AlgorithmOne.step
    monkeypatch.setattr(AlgorithmOne, "step", lambda self, *given: ends.append(step(self, *given)) or ends[-1])
    deltas, outputs = [], AlgorithmOne.outputs
    monkeypatch.setattr(AlgorithmOne, "outputs", lambda self, *given: deltas.append(given[2]) or outputs(self, *given))
    Smart(epsilon=0.01, noise_std=1.0, steps=3, norm=norm, level=level)(model, batches[task], KEY)
    assert len(ends) == 3 and len(deltas) == 4
    dims = (-2, -1) if level == "sentence" else (-1,)
    for end in ends:
        sizes = end.abs().amax(dims) if norm == "inf" else end.norm(dim=dims)
        assert 0.0099 < sizes.max() <= 0.01 * (1 + 1e-6)
    mask = is_token(batches[task]).bool().expand_as(deltas[0])
    for delta in deltas:
        assert not delta[~mask].any() and (delta[mask] != 0).float().mean() > 0.99
    assert (~mask).any()


def test_only_word_embeddings_move_before_positions_segments_and_norm(model, batches):
    sums = []
    model.bert.embeddings.LayerNorm.register_forward_pre_hook(lambda module, args: sums.append(args[0].detach()))
    Smart(epsilon=0.01)(model, batches["para"], KEY)
    clean, _, last = sums
    mask = batches["para"]["attention_mask"].bool()
    assert torch.equal(last[~mask], clean[~mask])
    assert 0.0099 < (last - clean).abs().max() < 0.0101
    assert ((last - clean)[mask].abs().amax(dim=-1) > 0.0099).all()  # [CLS] and [SEP] too


# ---- Algorithm 1


def by_hand(model, batch, epsilon, step_size, noise_std, steps, inner, last):
    """The term as the paper's Algorithm 1 reads, with one gradient for the whole batch's mean divergence."""
    mask = is_token(batch)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    delta = noise_std * noise_of_words(batch, 32, KEY) * mask
    clean = model(**batch)["logits"]
    for _ in range(steps):
        delta = delta.detach().requires_grad_()
        inner(clean.detach(), model(**embedded(model, inputs, delta))["logits"]).mean().backward()
        g = delta.grad / delta.grad.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        delta = (delta.detach() + step_size * g).clamp(-epsilon, epsilon)
    model.zero_grad()
    return last(clean, model(**embedded(model, inputs, delta))["logits"]).mean()


@pytest.mark.parametrize("variant", ["smart_0", "smart_1", "smart_2"])
@pytest.mark.parametrize("task", TASKS)
def test_the_term_and_its_gradient_are_those_of_algorithm_one(model, batches, task, variant):
    kind = task.split("_")[0]
    one, both = {"sst": ("kl", "symmetric_kl"), "para": ("kl", "symmetric_kl"), "sts": ("squared_error",) * 2}[kind]
    of_kind = DIVERGENCES[{"sst": "classes", "para": "binary", "sts": "score"}[kind]]
    inner = of_kind[both if variant == "smart_0" else one]
    last = of_kind[one if variant == "smart_1" else both]
    expected = by_hand(model, batches[task], 0.01, 0.05, 0.002, 2, inner, last)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    smart = Smart(epsilon=0.01, step_size=0.05, noise_std=0.002, steps=2, variant=variant, weight=3.0)
    result = smart(model, batches[task], KEY)
    assert result.logged["smart"].item() == pytest.approx(expected.item(), rel=1e-3) and expected > 0
    own = model(**batches[task])["loss"]
    assert result.loss.item() == pytest.approx(own.item() + 3 * expected.item(), rel=1e-5)
    assert result.outputs["loss"].item() == own.item()
    (result.loss - result.outputs["loss"]).backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    distance = sum((found[name] / 3 - gradient).square().sum() for name, gradient in wanted.items())
    assert distance < 1e-6 * sum(gradient.square().sum() for gradient in wanted.values())


def test_the_gradient_goes_through_both_outputs(model, batches, monkeypatch):
    def gradient():
        result = Smart(epsilon=0.05)(model, batches["sst"], KEY)
        model.zero_grad()
        (result.loss - result.outputs["loss"]).backward()
        return gradients(model)["heads.sst.linear.weight"]

    whole = gradient()
    term = AlgorithmOne.term
    halves = []
    for fixed in (0, 1):

        def half(self, head, name, *pair, fixed=fixed):
            return term(self, head, name, *(x.detach() if i == fixed else x for i, x in enumerate(pair)))

        monkeypatch.setattr(AlgorithmOne, "term", half)
        halves.append(gradient())
    torch.testing.assert_close(whole, sum(halves), rtol=1e-4, atol=1e-7)
    assert all(half.norm() > 0.1 * whole.norm() for half in halves)


@pytest.mark.parametrize("form", [AlgorithmOne, MtDnn])
def test_no_graph_of_the_search_reaches_the_last_pass(model, batches, monkeypatch, form):
    deltas, outputs = [], form.outputs
    monkeypatch.setattr(form, "outputs", lambda self, *given: deltas.append(given[2]) or outputs(self, *given))
    name = "paper" if form is AlgorithmOne else "mt-dnn"
    result = Smart(epsilon=0.01, steps=2, form=name)(model, batches["sst"], KEY)
    *searched, last = deltas
    assert len(searched) == 2 and all(delta.is_leaf and delta.requires_grad for delta in searched)
    assert last.grad_fn is None and not last.requires_grad
    result.loss.backward()
    assert all(delta.grad is None for delta in deltas)


def test_both_sentences_of_a_pair_that_is_read_apart_move(model, batches):
    batch = batches["sts_bi"]
    words = []
    model.bert.embeddings.register_forward_pre_hook(
        lambda module, args: words.append(args[3].detach()) if args[3] is not None else None
    )
    Smart(epsilon=0.01)(model, batch, KEY)
    moved = (words[-1] - model.bert.embeddings.word_embeddings(batch["input_ids"].flatten(0, 1))).abs().amax((-2, -1))
    assert moved.shape == (8,) and (moved > 0.0099).all()


def test_the_worst_step_is_far_worse_than_random_ones(model, batches):
    for task, batch in batches.items():
        term = Smart(epsilon=1e-3)(model, batch, KEY).logged["smart"]
        assert term > 3 * of_random_corners(model, batch, 1e-3), task  # of a tiny model, whose every direction matters


def of_random_corners(model, batch, epsilon, draws=5):
    """Mean divergence over corners of the inf-ball that are drawn at random."""
    generator = torch.Generator().manual_seed(0)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    shape = (*batch["input_ids"].shape, model.config.hidden_size)
    with torch.no_grad():
        clean = model(**inputs)["logits"]
        found = []
        for _ in range(draws):
            corner = epsilon * (2 * torch.randint(2, shape, generator=generator) - 1) * is_token(batch)
            moved = model(**embedded(model, inputs, corner))["logits"]
            found.append(model.heads.get(batch["task"]).divergence(clean, moved).mean())
    return torch.stack(found).mean()


# ---- what stays as it was


@pytest.mark.parametrize("form", FORMS)
def test_grads_mode_and_random_state_stay(tasks, tiny_model, batches, form):
    model = tiny_model(tasks, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = None if number % 2 else torch.full_like(parameter, 0.5)
    torch.manual_seed(3)
    plain = model(**batches["para"])
    after = RandomState.now(torch.device("cpu"))
    torch.manual_seed(3)
    result = Smart(steps=2, form=form)(model, batches["para"], KEY)
    assert torch.equal(torch.get_rng_state(), after.cpu)
    assert torch.equal(result.outputs["logits"], plain["logits"])
    assert model.training and all(module.training for module in model.modules())
    assert not model.bert.embeddings._forward_hooks
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is None if number % 2 else (parameter.grad == 0.5).all()


@pytest.mark.parametrize("task", TASKS)
def test_without_a_ball_there_is_no_term_though_there_is_dropout(tasks, tiny_model, batches, task):
    model = tiny_model(tasks, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    assert Smart(epsilon=0.0)(model, batches[task], KEY).logged["smart"] == 0
    terms = [
        Smart(epsilon=epsilon)(model, batches[task], KEY).logged["smart"].item() for epsilon in (1e-2, 1e-3, 1e-4)
    ]
    # It shrinks as the square of the ball. With another mask in the second pass it would not shrink at all.
    assert terms[0] > 10 * terms[1] > 100 * terms[2] > 0


def test_padding_and_a_split_of_the_batch_change_no_term(model, batches):
    smart = Smart(epsilon=1e-2)
    for batch in batches.values():
        whole = smart(model, batch, KEY)
        tensors = {key: value for key, value in batch.items() if key != "task"}
        cut = [{"task": batch["task"], **{k: v[a:b] for k, v in tensors.items()}} for a, b in ((0, 1), (1, 4))]
        parts = [
            smart(model, part, replace(KEY, first_row=start)).logged["smart"]
            for part, start in zip(cut, (0, 1), strict=True)
        ]
        assert (parts[0] + 3 * parts[1]).item() / 4 == pytest.approx(whole.logged["smart"].item(), rel=1e-3)
        wider = {k: v if v.dim() == 1 else torch.nn.functional.pad(v, (0, 5)) for k, v in tensors.items()}
        padded = smart(model, {"task": batch["task"], **wider}, KEY)
        assert padded.logged["smart"].item() == pytest.approx(whole.logged["smart"].item(), rel=1e-3)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(
    "given",
    [{}, {"level": "sentence"}, {"norm": "l2"}, {"norm": "l2", "level": "sentence"}, {"form": "mt-dnn"}],
    ids=str,
)
def test_a_packed_batch_has_the_term_of_a_padded_one(model, batches, given, fill):
    smart = Smart(**({} if "form" in given else {"epsilon": 1e-2}), steps=2, **given)
    for task, batch in batches.items():
        tokens = batch["attention_mask"].flatten(0, -2).bool()
        packed = {**batch, "packing": Packing.describe(tokens.numpy(), fill)}
        assert fill == (len(packed["packing"]["tokens"]) > tokens.sum())
        terms = [smart(model, of, KEY).logged["smart"].item() for of in (batch, packed)]
        assert terms[1] == pytest.approx(terms[0], rel=1e-3) and terms[0] > 0, task


def test_the_search_costs_a_forward_and_a_backward_without_weights(model, batches):
    def cost(smart):
        with FlopCounterMode(display=False) as counter:
            if smart is None:
                model(**batches["sst"])["loss"].backward()
            else:
                smart(model, batches["sst"], KEY).loss.backward()
        return counter.get_total_flops()

    # Of 3 units: forward 1, backward 2 of which 1 for weights. Smart adds 1 + 1 for the search, 3 for the last pass.
    assert cost(Smart()) / cost(None) == pytest.approx(8 / 3, rel=0.01)
    assert cost(Smart(steps=2)) / cost(None) == pytest.approx(10 / 3, rel=0.01)


def test_the_search_asks_for_no_gradient_of_parameters(model, batches, monkeypatch):
    """A compiled layer would compute them for all that ask, whatever is differentiated by."""
    head = model.heads.get("sst").linear
    frozen = list(model.bert.encoder.layer[0].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    asking = []
    head.register_forward_hook(lambda *args: asking.append(sum(p.requires_grad for p in model.parameters())))
    trained = sum(p.requires_grad for p in model.parameters())
    Smart(steps=2)(model, batches["sst"], KEY)
    assert asking == [trained, 0, 0, trained]
    monkeypatch.setattr(AlgorithmOne, "gradient", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Smart()(model, batches["sst"], KEY)
    assert [p.requires_grad for p in frozen] == [False] * len(frozen)
    assert sum(p.requires_grad for p in model.parameters()) == trained


# ---- divergences


def test_the_variant_may_differ_by_task_and_a_score_has_its_own_choice():
    smart = Smart(variant={"sst": "smart_1", "sts": "smart_2"})
    assert smart.divergences_of("sst", "classes") == ("kl", "kl")
    assert smart.divergences_of("para", "binary") == ("symmetric_kl", "symmetric_kl")
    assert smart.divergences_of("sts", "score") == ("squared_error", "squared_error")
    coin = Smart(variant="smart_2", score_divergence="bernoulli")
    assert coin.divergences_of("sts", "score") == ("kl", "symmetric_kl")


@pytest.mark.parametrize("variant", ["smart_0", "smart_1", "smart_2"])
def test_a_score_as_a_coin_has_a_term(model, batches, variant):
    term = Smart(variant=variant, score_divergence="bernoulli")(model, batches["sts"], KEY).logged["smart"]
    error = Smart(variant=variant)(model, batches["sts"], KEY).logged["smart"]
    assert 0 < term < error  # near the middle of 0 to 5, half a unit of score is a tenth of chance


# ---- precision


@pytest.mark.parametrize(("dtype", "lost", "carried"), [(torch.bfloat16, 1e-4, 5e-4), (torch.float16, 1e-5, 1e-4)])
def test_a_ball_too_small_for_the_dtype_is_said(tiny_model, dtype, lost, carried):
    model = tiny_model(initializer_range=0.05)  # as wide as BERT's word embeddings
    (said,) = Smart(epsilon=lost).warnings(model, "sst", dtype)
    assert f"`smart_epsilon: {lost:g}` is lost in {str(dtype)[6:]}" in said
    assert not Smart(epsilon=carried).warnings(model, "sst", dtype)
    assert not Smart(epsilon=lost).warnings(model, "sst", torch.float32)
    assert not Smart(epsilon=0.0).warnings(model, "sst", dtype)
    assert not Smart(epsilon=lost, form="mt-dnn").warnings(model, "sst", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_term(tasks, tiny_model, batches, dtype):
    model = tiny_model(tasks, initializer_range=0.05).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embeddings" not in name and parameter.dim() == 2:
                parameter *= 4
    for task, batch in batches.items():
        whole = Smart()(model, batch, KEY).logged["smart"].item()
        with torch.autocast("cpu", dtype=dtype):
            result = Smart()(model, batch, KEY)
        assert result.logged["smart"].item() == pytest.approx(whole, rel=0.5), task
        assert not result.logged["smart_skipped"]


def test_the_sum_is_computed_in_float32_and_a_half_model_takes_it(model, batches):
    delta = torch.full((*batches["sst"]["input_ids"].shape, 32), 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = embedded(model, batches["sst"], delta)["inputs_embeds"]
        words = model.bert.embeddings.word_embeddings(batches["sst"]["input_ids"])
    assert moved.dtype == torch.float32
    assert ((moved - words - 1e-5).abs() < 1e-7).all()
    result = Smart(epsilon=0.05, noise_std=0.05)(model.bfloat16(), batches["sst"], KEY)
    assert result.logged["smart"] > 0 and result.loss.isfinite()


@pytest.mark.parametrize(("form", "steps"), [(AlgorithmOne, 1), (AlgorithmOne, 2), (MtDnn, 1)])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_the_term_out(model, batches, form, steps, number, monkeypatch):
    def broken(*given, whole=form.gradient):
        gradient = whole(*given)
        gradient[0, 1, 2] = number
        return gradient

    monkeypatch.setattr(form, "gradient", broken)
    model(**batches["sst"])["loss"].backward()
    expected = gradients(model)
    model.zero_grad()
    name = "paper" if form is AlgorithmOne else "mt-dnn"
    result = Smart(epsilon=0.1, steps=steps, form=name)(model, batches["sst"], KEY)
    assert (result.logged["smart"], result.logged["smart_skipped"]) == (0, 1)
    result.loss.backward()
    assert result.loss == result.outputs["loss"]
    for parameter, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter])
    monkeypatch.undo()
    assert not Smart(epsilon=0.1, form=name)(model, batches["sst"], KEY).logged["smart_skipped"]


# ---- the popular form


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, (5e-4, 5e-3, 5e-4)),
        ({"epsilon": 1e-3}, (1e-3, 1e-2, 1e-3)),
        ({"epsilon": 0.0}, (0.0, 0.0, 0.0)),
        ({"form": "mt-dnn"}, (1e-6, 1e-3, 1e-5)),
        ({"form": "smart-pytorch"}, (1e-6, 1e-3, 1e-5)),
        ({"form": "mt-dnn", "epsilon": 1e-5}, (1e-5, 1e-3, 1e-5)),
        ({"form": "mt-dnn", "noise_std": 1e-4, "step_size": 0.0}, (1e-6, 0.0, 1e-4)),
    ],
)
def test_each_form_has_its_own_numbers_where_none_are_given(given, numbers):
    smart = Smart(**given)
    assert (smart.epsilon, smart.form.step_size, smart.noise_std) == pytest.approx(numbers)
    assert smart.form.epsilon == smart.epsilon


def test_mt_dnn_divides_by_the_largest_number_and_has_no_ball():
    form = MtDnn(epsilon=1.0, step_size=2.0, norm="inf", level="token")
    moved = form.step(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[1.0, -0.5], [0.0, 0.0]]]))
    assert moved.tolist() == [[[0.75, -0.25], [0.0, 0.0]]]


def test_mt_dnn_moves_what_the_embeddings_give(model, batches):
    given = []
    model.bert.encoder.register_forward_pre_hook(lambda module, args: given.append(args[0].detach()))
    Smart(epsilon=1e-6, noise_std=1e-5, form="mt-dnn")(model, batches["sts_bi"], KEY)
    clean, first, last = given
    moved = (last - clean).abs().amax(dim=-1)
    mask = batches["sts_bi"]["attention_mask"].flatten(0, 1).bool()
    assert ((moved[mask] > 0.8) & (moved[mask] <= 1)).all() and not moved[~mask].any()
    noise = 1e-5 * noise_of_words(batches["sts_bi"], 32, KEY).flatten(0, 1)
    torch.testing.assert_close((first - clean)[mask], noise[mask], rtol=0, atol=1e-6)


def test_halves_of_the_mt_dnn_term_hold_one_output_fixed(model, batches):
    head = model.heads.get("sst")
    logits = [torch.randn(3, 5, requires_grad=True) for _ in range(2)]
    whole = AlgorithmOne.term(None, head.divergence, "symmetric_kl", *logits)
    halves = MtDnn.term(MtDnn(0, 0, "inf", "token"), head.divergence, "symmetric_kl", *logits)
    assert halves.item() == pytest.approx(whole.item())
    p, q = (x.detach().softmax(dim=-1) for x in logits)
    found = torch.autograd.grad(halves, logits)
    torch.testing.assert_close(found[0], (p - q) / 3)  # of cross-entropy with the other as the fixed target
    torch.testing.assert_close(found[1], (q - p) / 3)


@pytest.mark.parametrize("rows", [1, 5, 8, 32])
@pytest.mark.parametrize(
    ("kind", "logits"), [("classes", ([0.0, 0.0], [0.0, math.log(3)])), ("binary", ([0.0], [math.log(3)]))]
)
def test_each_form_takes_a_batch_as_its_code_does(tiny_model, rows, kind, logits):
    """P = (1/2, 1/2) and Q = (1/4, 3/4) in every row: KL(P||Q) = ln(4/3) / 2, and both ways together ln(3) / 4."""
    task = replace(get_tasks(["para"])[0], kind=kind, loss="", loss_options={})
    head = tiny_model([task]).heads.get("para")
    clean, perturbed = (torch.tensor([row] * rows) for row in logits)
    found = {
        (form, name): FORMS[form](0, 0, "inf", "token").term(head.divergence, name, clean, perturbed).item()
        for form in FORMS
        for name in ("symmetric_kl", "kl")
    }
    both, one = math.log(3) / 4, math.log(4 / 3) / 2
    assert found == pytest.approx({
        ("paper", "symmetric_kl"): both, ("mt-dnn", "symmetric_kl"): both,
        ("smart-pytorch", "symmetric_kl"): rows * both,
        ("paper", "kl"): one, ("mt-dnn", "kl"): one, ("smart-pytorch", "kl"): one,
    }, rel=1e-5)  # fmt: skip


def test_squared_error_of_scores_is_each_rows_own_and_a_mean_in_each_form(model):
    head = model.heads.get("sts")
    clean, perturbed = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [3.0], [6.0]])
    for form in FORMS.values():  # (0 + 1 + 4) / 3; broadcast over all pairs of rows it would be 61 / 9
        assert form(0, 0, "inf", "token").term(
            head.divergence, "squared_error", clean, perturbed
        ).item() == pytest.approx(5 / 3)


def test_the_search_of_smart_pytorch_ascends_the_half_that_is_not_held_fixed(model):
    head = model.heads.get("sst")
    clean, perturbed = torch.randn(3, 5), torch.randn(3, 5)
    p, q = clean.softmax(dim=-1), perturbed.softmax(dim=-1)
    there, back = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    for form, expected in ((MtDnn, there + back), (SmartPytorch, there)):
        ascended = form(0, 0, "inf", "token").ascended(head.divergence, "symmetric_kl")
        torch.testing.assert_close(ascended(clean, perturbed), expected)


def test_smart_pytorch_is_mt_dnn_by_the_number_of_rows(model, batches):
    step = {"step_size": 0.0}  # which leaves both searches with the first noise
    for task, batch in batches.items():
        mt_dnn, other = (
            Smart(form=form, **step)(model, batch, KEY).logged["smart"] for form in ("mt-dnn", "smart-pytorch")
        )
        rows = 1 if model.heads.get(task).kind == "score" else len(batch["labels"])
        torch.testing.assert_close(other, rows * mt_dnn)


# ---- the real checkpoint


def sample_batches(tasks, tokenizer, size=8):
    """`{task: batches}` of the packaged sample's first training rows."""
    batches = {}
    for task in tasks:
        rows = encode(load_split(task, "sample", "train"), task, tokenizer, 128)
        collate = PaddedCollator(task, tokenizer.pad_token_id)
        batches[task.name] = [collate([rows[i] for i in range(start, start + size)]) for start in range(0, 64, size)]
    return batches


def of_random_points_of_mt_dnn(model, batch, draws):
    """Mean divergence where what the embeddings give moves at random, by as much as `form: mt-dnn` moves it."""
    generator = torch.Generator().manual_seed(0)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    shape, found = (*batch["input_ids"].shape, model.config.hidden_size), []
    with torch.no_grad():
        clean = model(**inputs)["logits"]
        for _ in range(draws):
            noise = torch.randn(shape, generator=generator)
            delta = noise / noise.abs().amax(dim=-1, keepdim=True) * is_token(batch)
            hook = model.bert.embeddings.register_forward_hook(
                lambda module, args, output, delta=delta: output + delta
            )
            found.append(model.heads.get(batch["task"]).divergence(clean, model(**inputs)["logits"]).mean())
            hook.remove()
    return torch.stack(found).mean()


@pytest.mark.slow
def test_on_a_real_checkpoint_the_paper_attacks_and_mt_dnn_does_not(minilm):
    from transformers import AutoTokenizer

    tasks, tokenizer = get_tasks(["sst", "para", "sts"]), AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    model = MinBertForMultiTask.from_pretrained(minilm, tasks=tasks)
    batches = sample_batches(tasks, tokenizer)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    for round in range(6):
        for of_task in batches.values():
            model(**of_task[round % len(of_task)])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for batch in (of_task[0] for of_task in batches.values()):
        for epsilon in (1e-4, 1e-3):
            term = Smart(epsilon=epsilon)(model, batch, KEY).logged["smart"]
            assert term > 100 * of_random_corners(model, batch, epsilon, draws=3), (batch["task"], epsilon)
        found, no_step = (
            torch.stack(
                [
                    Smart(form="mt-dnn", **step)(model, batch, replace(KEY, seed=seed)).logged["smart"]
                    for seed in range(4)
                ]
            )
            for step in ({}, {"step_size": 0.0})
        )
        torch.testing.assert_close(found, no_step, rtol=0.05, atol=0)  # the gradient changed nothing
        ratio = found.mean() / of_random_points_of_mt_dnn(model, batch, draws=4)
        assert 0.7 < ratio.item() < 1.4, batch["task"]
