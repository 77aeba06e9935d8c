"""Packing: only real tokens through the encoder, and the same answers and gradients."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_minbert import get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.model.heads import HEADS
from hf_minbert.model.packing import Packing, packed_attention
from hf_minbert.model.pooling import POOLINGS

LENGTHS = (3, 9, 1, 6)


def rows(task):
    """Random encoded rows of these lengths; the two sides of a pair apart have different ones."""
    draw = np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        ids = [draw.integers(5, 60, size).tolist() for size in (length, LENGTHS[-1 - number])]
        segments = [[place % 2 for place in range(len(side))] for side in ids]
        labels = {"sst": number, "para": number % 2, "sts": number + 0.5}[task.name]
        if task.pair_encoding != "bi":
            ids, segments = ids[0], segments[0]
        made.append({"input_ids": ids, "token_type_ids": segments, "labels": labels})
    return made


def both(task, **changes):
    """The padded batch, and the same with its packing."""
    plain, packed = (PaddedCollator(task, 0, packing=packing, **changes)(rows(task)) for packing in (False, True))
    assert "packing" not in plain and set(packed) - set(plain) == {"packing"}
    return plain, packed


def test_pack_and_unpack_by_hand():
    is_token = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    packing = Packing(shape=(3, 3), **Packing.describe(is_token))
    assert packing.tokens.tolist() == [6, 7, 8, 0, 1, 3]  # the longest sentence first
    assert packing.starts.tolist() == [0, 3, 5, 6] and packing.longest == 3
    values = torch.arange(9).reshape(3, 3)
    assert packing.pack(values).tolist() == [[6, 7, 8, 0, 1, 3]]
    assert packing.unpack(packing.pack(values)).tolist() == [[0, 1, 0], [3, 0, 0], [6, 7, 8]]


def test_fillers_by_hand():
    is_token = np.ones((2, 40), dtype=bool)
    is_token[1, 10:] = False  # 50 tokens, 14 fillers
    described = Packing.describe(is_token, fill=True)
    assert described["longest"] == 40
    assert described["tokens"].tolist() == [*range(50), *[80] * 14]
    assert described["starts"].tolist() == [0, 40, 50, 64, 64]  # 63 fillers would need two sentences of 40
    packing = Packing(shape=(2, 40), **described)
    values = torch.arange(80).reshape(2, 40)
    assert torch.equal(packing.unpack(packing.pack(values)), values * torch.from_numpy(is_token))


def test_sentences_of_equal_length_stand_side_by_side():
    lengths = np.array([2, 5, 2, 0, 5, 1])
    described = Packing.describe(np.arange(5) < lengths[:, None])
    assert described["starts"].diff().tolist() == [5, 5, 2, 2, 1, 0]
    assert described["tokens"].tolist() == [*range(5, 10), *range(20, 25), 0, 1, 10, 11, 25]
    assert Packing(shape=(6, 5), **described).by_length() == [(2, 5), (2, 2), (1, 1)]


MIXED = Packing(shape=(6, 9), **Packing.describe(np.arange(9) < np.array([3, 9, 1, 6, 9, 3])[:, None], fill=True))


def test_with_dropout_a_token_sees_its_own_sentence_alone():
    lengths, size = MIXED.starts.diff(), len(MIXED.tokens)
    sentence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    value = F.one_hot(sentence, len(lengths)).float().expand(1, 2, size, len(lengths))
    same = torch.zeros(1, 2, size, 8)  # each token sees all others with the same weight
    mixed = packed_attention(same, same, value, MIXED, dropout=0.5, scaling=1.0)
    assert mixed.shape == (1, size, 2, len(lengths))
    others = 1 - F.one_hot(sentence, len(lengths)).float()[None, :, None]
    assert torch.equal(mixed * others, torch.zeros_like(mixed))
    # Of the longest sentence, whose weights are 1 / 9 each, some were dropped and the others doubled.
    kept = mixed[0, :9, :, 0] * 9 / 2
    torch.testing.assert_close(kept, kept.round())
    assert len(kept.unique()) > 1


def test_attention_on_a_cpu_is_that_of_padded_sentences(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, len(MIXED.tokens), 8, generator=draw, dtype=torch.float64, requires_grad=True)
    real, found = MIXED.tokens < 6 * 9, []  # what comes out at a filler is nobody's
    for compiling in (False, True):  # a compiled layer pads
        monkeypatch.setattr("torch.compiler.is_compiling", lambda value=compiling: value)
        mixed = packed_attention(*states, MIXED, dropout=0.0, scaling=0.3)[:, real]
        found.append((mixed, *torch.autograd.grad((mixed**3).sum(), states)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000, 1023, 1025, 8000])
def test_there_are_few_filled_sizes(tokens):
    is_token = np.arange(8192).reshape(64, 128) < tokens
    is_token[0, 0] = True
    described = Packing.describe(is_token, fill=True)
    size, starts = len(described["tokens"]), described["starts"]
    step = max(64, 2 ** ((tokens - 1).bit_length() - 4))
    assert tokens <= size < tokens + step
    assert size % step == 0
    assert starts[-1] == size and starts.diff().max() <= 128
    shorter = Packing.describe(np.arange(8192).reshape(64, 128) < size, fill=True)
    assert [shorter[name].shape for name in ("tokens", "starts")] == [
        described[name].shape for name in ("tokens", "starts")
    ]


FIELDS = [
    *(("sst", {"pooling": pooling}) for pooling in POOLINGS),
    *(("sts", {"pooling": pooling, "pair_encoding": "bi", "head": "cosine"}) for pooling in POOLINGS),
    *(("para", {"head": head}) for head in HEADS if not HEADS[head].compares),
    ("sst", {"pooling": "mean", "layers": "mix"}),
    ("para", {"pair_encoding": "bi", "loss": "mnr", "head": "cosine"}),
]


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize(("name", "fields"), FIELDS, ids=str)
def test_answers_and_gradients_are_those_of_the_padded_batch(tiny_model, name, fields, multiple):
    (task,) = get_tasks({name: fields})
    model = tiny_model([task])
    found = []
    plain, packed = both(task, pad_to_multiple_of=multiple)
    mask = plain["attention_mask"].flatten(0, -2).bool().numpy()
    filled = {**packed, "packing": Packing.describe(mask, fill=True)}
    for batch in (plain, packed, filled):
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        found.append((output, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}))
    expected, gradients = found[0]
    for output, packed_gradients in found[1:]:
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed_gradients, gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("multiple", [None, 8])
def test_a_batch_of_one(tiny_model, multiple):
    (task,) = get_tasks({"sst": {"pooling": "mean", "layers": "mix"}})
    model = tiny_model([task])
    logits = [
        model(**PaddedCollator(task, 0, pad_to_multiple_of=multiple, packing=packing)(rows(task)[:1])).logits
        for packing in (False, True)
    ]
    torch.testing.assert_close(*logits)


def test_padding_may_stand_anywhere(tiny_model):
    (task,) = get_tasks({"sst": {"pooling": "mean"}})
    model, (plain, _) = tiny_model([task]), both(task)
    plain["attention_mask"] = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [1] + [0] * 7 + [1], [0, 1, 1] * 3])
    mask = plain["attention_mask"].bool().numpy()
    for fill in (False, True):
        packed = {**plain, "packing": Packing.describe(mask, fill)}
        torch.testing.assert_close(model(**packed).logits, model(**plain).logits, atol=1e-5, rtol=1e-5)


def test_only_real_tokens_go_through_the_layers(tiny_model):
    (task,) = get_tasks(["sst"])
    model, seen = tiny_model([task]), []
    model.bert.encoder.layer[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    for batch in both(task):
        model(**batch)
    assert seen == [(4, 9, 32), (1, sum(LENGTHS), 32)]


def test_embeddings_in_place_of_ids_are_packed_too(tiny_model):
    (task,) = get_tasks(["sst"])
    model = tiny_model([task])
    plain, packed = both(task)
    given = {key: value for key, value in packed.items() if key != "input_ids"}
    embeds = model.get_input_embeddings()(packed["input_ids"])
    torch.testing.assert_close(model(**given, inputs_embeds=embeds).logits, model(**plain).logits)


def test_private_layers_and_encoders_are_packed_too(tiny_model):
    for changes in ({"private_layers": 1}, {"private_encoders": True}):
        model = tiny_model(**changes)
        (task,) = get_tasks(["sts"])
        plain, packed = both(task)
        torch.testing.assert_close(model(**packed).logits, model(**plain).logits)


def test_dropout_on_attention_is_drawn_in_training_and_only_then(tiny_model):
    (task,) = get_tasks(["sst"])
    model = tiny_model([task], attention_probs_dropout_prob=0.5)
    _, packed = both(task)
    assert not torch.equal(model(**packed).logits, model(**packed).logits)
    model.eval()
    assert torch.equal(model(**packed).logits, model(**packed).logits)


def test_hidden_states_come_padded(tiny_model):
    (task,) = get_tasks(["sst"])
    model = tiny_model([task])
    plain, packed = (model(**batch, output_hidden_states=True).hidden_states for batch in both(task))
    mask = both(task)[0]["attention_mask"].bool()
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=1e-5)
        assert not ours[~mask].any()


@pytest.mark.parametrize("wanted", [None, False, True, 0, 1, [], [0], [0, 2], (1,), {2}, [-1], [7]], ids=str)
@pytest.mark.parametrize("layers", ["last", "mix"])
@pytest.mark.parametrize("apart", [False, True])
def test_hidden_states_are_those_that_the_encoder_gives_and_change_no_answer(tiny_model, wanted, layers, apart):
    """Whatever the library takes for `output_hidden_states`, packed and padded, as an argument and in the config."""
    (task,) = get_tasks({"sts": {"pooling": "mean", "layers": layers, "pair_encoding": "bi" if apart else "cross"}})
    model = tiny_model([task]).eval()
    for batch in both(task):
        inputs = {name: batch[name].flatten(0, -2) for name in ("input_ids", "attention_mask", "token_type_ids")}
        expected = model.bert(**inputs, output_hidden_states=wanted).hidden_states
        outputs = [model(**batch, output_hidden_states=wanted)]
        if isinstance(wanted, bool | None):  # a config takes no other
            model.config.output_hidden_states = wanted
            outputs.append(model(**batch))
            model.config.output_hidden_states = False
        is_token = inputs["attention_mask"].bool()
        for output in outputs:
            torch.testing.assert_close(output.logits, model(**batch).logits, rtol=0, atol=1e-6)
            if expected is None:
                assert output.hidden_states is None
                continue
            assert [state is None for state in output.hidden_states] == [state is None for state in expected]
            for found, state in zip(output.hidden_states, expected, strict=True):
                if state is not None:
                    torch.testing.assert_close(found[is_token], state[is_token], rtol=0, atol=1e-5)


def test_activation_checkpointing_goes_with_packing(tiny_model):
    (task,) = get_tasks(["sst"])
    model = tiny_model([task])
    _, packed = both(task)
    model(**packed).loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(**packed).loss.backward()
    torch.testing.assert_close({key: p.grad for key, p in model.named_parameters()}, expected)
