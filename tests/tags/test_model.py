"""A head per word: what it computes, its loss, and what other classes of the library make of the same weights."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, BertConfig, BertForTokenClassification

from hf_minbert import MinBertForMultiTask
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.model.heads import HEADS, build_head, check_heads
from hf_minbert.model.losses import IGNORED
from hf_minbert.training.terms.base import divergence

WORD_HEADS = [name for name, head in HEADS.items() if not head.compares]


@pytest.fixture(scope="module")
def rows(ner, sentences, tiny_tokenizer):
    return encode(sentences(6), ner, tiny_tokenizer, 24)


def batch_of(ner, rows, **options):
    return PaddedCollator(ner, 0, **options)(rows)


@pytest.mark.parametrize("head", WORD_HEADS)
@pytest.mark.parametrize("layers", ["last", "mix"])
def test_padded_and_packed_batches_have_the_same_outputs_loss_and_gradients(tiny_model, ner, rows, head, layers):
    model = tiny_model([type(ner)(**{**vars(ner), "head": head, "layers": layers}), "sst"])
    found = []
    for options in ({}, {"packing": True}, {"packing": True, "fill_to": 40}):
        batch = batch_of(ner, rows, **options)
        model.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((outputs.loss, outputs.logits[batch["labels"] != IGNORED], gradients))
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_stands_at_padding_changes_nothing(tiny_model, ner, rows):
    model, batch = tiny_model([ner]), batch_of(ner, rows)
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 7)}
    assert torch.equal(model(**batch).loss, model(**other).loss)


@pytest.mark.parametrize("options", [{}, {"class_weights": [1.0, 3, 1, 2, 1, 1, 5]}, {"label_smoothing": 0.2}])
def test_the_loss_is_the_mean_over_labelled_words(tiny_model, ner, rows, options):
    model, batch = tiny_model([type(ner)(**{**vars(ner), "loss_options": options})]), batch_of(ner, rows)
    outputs, labelled = model(**batch), batch["labels"] != IGNORED
    assert int(labelled.sum()) == sum(map(len, rows.labels))
    weight = torch.tensor(options["class_weights"]) if "class_weights" in options else None
    expected = F.cross_entropy(
        outputs.logits[labelled], batch["labels"][labelled], weight=weight,
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    torch.testing.assert_close(outputs.loss, expected)


def test_the_focal_loss_weighs_each_word(tiny_model, ner, rows):
    weights = [1.0, 3, 1, 2, 1, 1, 5]
    options = {"focal_gamma": 2.0, "class_weights": weights}
    model, batch = tiny_model([type(ner)(**{**vars(ner), "loss_options": options})]), batch_of(ner, rows)
    outputs, labelled = model(**batch), batch["labels"] != IGNORED
    logits, labels = outputs.logits[labelled], batch["labels"][labelled]
    p, w = logits.softmax(-1).gather(1, labels[:, None])[:, 0], torch.tensor(weights)[labels]
    torch.testing.assert_close(outputs.loss, ((1 - p) ** 2 * -p.log() * w).sum() / w.sum())


def test_a_batch_without_a_labelled_word_has_the_loss_0(tiny_model, ner, rows):
    model, batch = tiny_model([ner]), batch_of(ner, rows)
    outputs = model(**{**batch, "labels": torch.full_like(batch["labels"], IGNORED)})
    outputs.loss.backward()
    assert outputs.loss.item() == 0 and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_labels_of_another_shape_and_ids_that_are_no_tags_are_refused(tiny_model, ner, rows):
    model, batch = tiny_model([ner]), batch_of(ner, rows)
    with pytest.raises(ValueError, match=r"Expected a label per token, \[6, \d+\]. Found labels of the shape \[6\]"):
        model(**{**batch, "labels": batch["labels"][:, 0]})
    with pytest.raises(ValueError, match="'ner': labels must be ids from 0 to 6, of O, B-PLACE"):
        model(**{**batch, "labels": torch.full_like(batch["labels"], 7)})


def test_two_outputs_are_apart_by_the_mean_over_labelled_words(tiny_model, ner, rows):
    model, labels = tiny_model([ner]), batch_of(ner, rows)["labels"]
    torch.manual_seed(0)
    first, second = torch.randn(2, *labels.shape, 7)
    found = divergence(model.heads.get("ner"), labels, first, second, "kl")
    p, q = (x[labels != IGNORED].log_softmax(-1) for x in (first, second))
    assert found.shape == (6,)
    torch.testing.assert_close(found.mean(), (p.exp() * (p - q)).sum(-1).mean())


def test_the_librarys_class_computes_the_same_from_the_same_weights(tiny_model, ner, rows):
    model = tiny_model([ner]).eval()
    sizes = {key: value for key, value in model.config.to_dict().items() if key in BertConfig().to_dict()}
    stock = BertForTokenClassification(BertConfig(**{**sizes, "model_type": "bert", "num_labels": 7})).eval()
    weights = {f"bert.{name}": value for name, value in model.bert.state_dict().items() if "pooler" not in name}
    linear = model.heads.get("ner").linear
    stock.load_state_dict(weights | {"classifier.weight": linear.weight, "classifier.bias": linear.bias})
    batch = batch_of(ner, rows)
    theirs = stock(**{name: value for name, value in batch.items() if name != "task"})
    ours = model(**batch)
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(ours.logits[seen], theirs.logits[seen])
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_a_saved_model_is_a_token_classifier(tiny_model, ner, rows, tmp_path):
    model = tiny_model([ner, "sst"])
    model.save_pretrained(tmp_path)
    again = AutoModelForTokenClassification.from_pretrained(tmp_path, active_task="ner")
    assert isinstance(again, MinBertForMultiTask) and again.config.id2label[1] == "B-PLACE"
    batch = {name: value for name, value in batch_of(ner, rows).items() if name != "task"}
    assert torch.equal(again(**batch).logits, model(**batch, task="ner").logits)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"head": "cosine"},
            "`head: cosine` gives one number, and kind 'tags' needs 7. Heads for it: linear, mlp,",
        ),
        ({"loss": "bce"}, "unknown loss 'bce' for kind 'tags'"),
        ({"pooling": "mean"}, "kind 'tags' reads the state of each word of one text. Leave the pooling out"),
        ({"pooling_options": {"x": 1}}, "Leave the pooling out"),
        ({"loss_options": {"label_smoothing": 2}}, "`label_smoothing` must be a number from 0 to 1"),
        ({"loss_options": {"class_weights": [1, 2]}}, "`class_weights` must be 7 numbers"),
    ],
)
def test_what_no_head_of_words_does_is_refused(tiny_config, ner, fields, said):
    config = tiny_config(tasks=[{**ner.to_config(), **fields}])
    with pytest.raises(ValueError, match=said):
        build_head(config, config.tasks[0])
        check_heads(config)
