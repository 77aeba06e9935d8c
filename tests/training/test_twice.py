"""A batch that is passed through the model two times at once: what each half is, and what is computed of it alone."""

import numpy as np
import pytest
import torch

from hf_minbert import get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.model.packing import Packing
from hf_minbert.training.terms.base import NoiseKey, doubled, own_loss, twice
from hf_minbert.training.terms.r_drop import RDrop
from tests.training.test_models import with_lora

KEY = NoiseKey(seed=0, step=0, first_row=0)
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=bool)  # sentences of 3, 4 and 1 tokens
FORMS = {"padded": {}, "packed": {"packing": True}, "filled": {"packing": True, "fill_to": 40}}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
#: One sentence, a joined pair, a pair that is read apart with a loss that compares rows, and another such loss.
TASKS = get_tasks({
    "sst": {"pooling": "mean"}, "para": {"pair_encoding": "bi", "head": "cosine", "pooling": "mean", "loss": "mnr"},
    "sts": {"loss": "cosent"},
})  # fmt: skip


@pytest.fixture
def model(tiny_model):
    """`model(**changes)`: in the mode of training."""
    return lambda **changes: tiny_model(TASKS, **changes).train()


@pytest.fixture
def batch(toy_rows, tiny_tokenizer):
    """`batch(task, form)`: the first four rows of a task."""

    def make(name, form):
        (task,) = (task for task in TASKS if task.name == name)
        rows = encode(toy_rows(**{name: 4})[name], task, tiny_tokenizer, 40)
        return PaddedCollator(task, 0, **FORMS[form])(rows)

    return make


def inputs_of(mask, fill):
    return {"attention_mask": torch.tensor(mask).long(), "packing": Packing.describe(mask, fill)}


def test_the_packing_of_a_batch_two_times_is_that_of_a_batch_of_twice_the_rows():
    both = doubled(inputs_of(MASK, fill=False))
    expected = Packing.describe(np.concatenate([MASK, MASK]))
    assert both["attention_mask"].tolist() == [*MASK.tolist(), *MASK.tolist()]
    assert both["packing"]["longest"] == expected["longest"]
    # The same sentences, which stand by length in each half alone.
    for name, of in (("tokens", lambda tokens: tokens), ("starts", torch.diff)):
        found = both["packing"][name]
        assert torch.equal(of(found).sort().values, of(expected[name]).sort().values)
        assert found.dtype == expected[name].dtype


def test_fillers_stay_behind_all_places():
    inputs = inputs_of(MASK, fill=True)
    both = doubled(inputs)
    alone = Packing.read(inputs["packing"], inputs["attention_mask"])
    found = Packing.read(both["packing"], both["attention_mask"])
    values = torch.arange(1, 13).view(3, 4)
    real = values * torch.tensor(MASK)
    assert torch.equal(found.unpack(found.pack(torch.cat([values, values]))), torch.cat([real, real]))
    assert len(found.tokens) == 2 * len(alone.tokens) == 2 * 64
    assert int((found.tokens == MASK.size * 2).sum()) == 2 * (64 - 8)
    lengths, of_both = alone.starts.diff(), found.starts.diff()
    assert torch.equal(of_both, torch.cat([lengths, lengths])) and found.starts[-1] == 128


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_without_dropout_each_half_has_the_outputs_and_the_loss_of_the_batch(model, batch, task, form):
    model, rows = model(), batch(task, form)
    plain = own_loss(model, rows)
    for half in twice(model, rows):
        found = own_loss(model, half)
        torch.testing.assert_close(found.outputs["logits"], plain.outputs["logits"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.loss, plain.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_a_step_of_r_drop_without_dropout_is_a_plain_step(model, batch, task, form):
    """Of a loss that compares rows too: over both halves together it would be another."""
    model, rows = model(), batch(task, form)
    gradients = []
    for loss in (own_loss(model, rows).loss, RDrop()(model, rows, KEY).loss):
        model.zero_grad(set_to_none=True)
        loss.backward()
        # Of 0 where there is none: the term reaches the logit of `mnr`, which is not trained.
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    plain, found = gradients
    assert any(gradient.any() for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rate", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_the_halves_have_different_dropout_masks(model, batch, form, rate):
    """In each row, and anew in each step."""
    model, rows = model(**{rate: 0.5}), batch("sst", form)
    passes = [half["pooled"].flatten(1) for _ in range(2) for half in twice(model, rows)]
    for number, one in enumerate(passes):
        for other in passes[number + 1 :]:
            assert ((one - other).abs().amax(dim=1) > 1e-3).all()


@pytest.mark.parametrize("form", FORMS)
def test_both_halves_go_through_the_encoder_in_one_pass(model, batch, form):
    model, calls = model(**DROPOUT), []
    model.bert.register_forward_hook(lambda *given: calls.append(1))
    result = RDrop()(model, batch("sst", form), KEY)
    assert len(calls) == 1 and result.logged["r_drop"] > 0


def test_adapters_are_in_the_one_pass(tiny_model, batch):
    plain, adapted = tiny_model(TASKS).train(), with_lora(tiny_model(TASKS)).train()
    rows = batch("sst", "packed")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    expected = adapted(**rows)["logits"]
    for half in twice(adapted, rows):
        assert "pooled" in half
        torch.testing.assert_close(adapted(**half)["logits"], expected, rtol=1e-4, atol=1e-5)
    assert (plain(**rows)["logits"] - expected).abs().max() > 1e-2


def test_outputs_that_were_pooled_before_are_not_computed_again(model, batch):
    model, rows = model(classifier_dropout=0.5), batch("sst", "padded")
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    pooled = model.pooled_of(["sst"], **inputs)["sst"].detach()
    cached = {"task": "sst", "pooled": pooled, "labels": rows["labels"]}
    assert all(half is cached for half in twice(model, cached))
    assert RDrop()(model, cached, KEY).logged["r_drop"] > 0  # by the head's own dropout


def test_a_model_that_is_compiled_as_a_whole_has_two_passes_of_its_compiled_forward(model, batch, fresh_compiler):
    model, rows = model(**DROPOUT), batch("sst", "padded")
    compiled = torch.compile(model, backend="eager")
    assert all(half is rows for half in twice(compiled, rows))
    assert RDrop()(compiled, rows, KEY).logged["r_drop"] > 0
    assert fresh_compiler["stats"]["unique_graphs"] > 0
