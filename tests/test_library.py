"""Encoders that the library computes, in a model with tasks: against the library, and which it takes at all."""

from __future__ import annotations

import json

import pytest
import torch
from small_encoders import ENDLESS, READ_PADDING, SIZES, TAKEN, batch, saved, small
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMaskedLM

from hf_minbert import MinBertConfig, MinBertForMaskedLM, MinBertForMultiTask, MinBertModel, get_tasks
from hf_minbert.model.library import parts_of

EACH = pytest.mark.parametrize("name", TAKEN)


def tasked(folder, names=("sst", "sts"), **options) -> MinBertForMultiTask:
    return MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(list(names)), **options)


@EACH
@torch.no_grad()
def test_the_encoder_is_the_library_s(tmp_path, name):
    folder = saved(name, tmp_path)
    model, report = tasked(folder, output_loading_info=True, attn_implementation="eager")
    parts = parts_of(model.config.encoder_config)
    missing = {key.split(".")[0] + "." + key.split(".")[1] for key in report["missing_keys"]}
    assert missing == {"heads.sst", "heads.sts", *([] if parts.pools else ["bert.pooler"])}
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    stock = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    weights = model.bert.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in stock.state_dict().items())
    stock.load_state_dict(weights, assign=True)  # on the same memory: elsewhere, MKL takes other kernels
    inputs = batch(name)
    segments = {}
    if model.bert.has_segments:
        segments = {"token_type_ids": (torch.arange(12) >= 2).long() * inputs["attention_mask"]}
    states: list[torch.Tensor] = []
    ours = model.eval().bert(**inputs, **segments, states=states)
    theirs = stock(**inputs, **segments, output_hidden_states=True)
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state, rtol=0, atol=0)
    assert len(states) == len(theirs.hidden_states) == model.config.num_hidden_layers + 1
    for own, other in zip(states[:-1], theirs.hidden_states, strict=False):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    assert torch.equal(states[-1], ours.last_hidden_state)
    if parts.pools:
        torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=0, atol=0)


@EACH
@torch.no_grad()
def test_it_survives_a_folder_of_ours(tmp_path, name):
    model = tasked(saved(name, tmp_path / "theirs")).eval()
    model.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["encoder_config"]["model_type"] == name and not {key for key in written if key.startswith("_")}
    again, report = MinBertForMultiTask.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = batch(name)
    for task in ("sst", "sts"):
        assert torch.equal(again.eval()(**inputs, task=task).logits, model(**inputs, task=task).logits)


@EACH
@torch.no_grad()
def test_an_input_has_as_many_tokens_as_the_config_says(tmp_path, name):
    model = tasked(saved(name, tmp_path)).eval()
    positions, pad = model.config.max_position_embeddings, TAKEN[name]["pad_token_id"]
    counted = {"ibert", "longformer", "luke", "mpnet", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"}
    assert positions == (512 if name in ENDLESS else 64 - (1 + pad if name in counted else 0))
    ids = torch.full((1, positions), 7)
    assert model.bert(ids, torch.ones_like(ids)).last_hidden_state.shape == (1, positions, 32)
    if name in counted:
        with pytest.raises((IndexError, RuntimeError)):
            model.bert(torch.full((1, positions + 1), 7), torch.ones(1, positions + 1, dtype=torch.long))


@EACH
@torch.no_grad()
def test_padding_changes_nothing_but_where_it_is_known_to(tmp_path, name):
    model = tasked(saved(name, tmp_path)).eval()
    assert parts_of(model.config.encoder_config).reads_padding == (name in READ_PADDING)
    inputs = batch(name, lengths=(12, 7))
    alone = {key: value[1:, :7] for key, value in inputs.items()}
    found, wanted = (model(**given, task="sst").logits[-1] for given in (inputs, alone))
    if name != "mobilebert":  # which reads the embedding of a padding beside a word, at first zeros
        assert torch.allclose(found, wanted, atol=1e-4) == (name not in READ_PADDING)


@pytest.mark.parametrize("name", ["deberta-v2", "megatron-bert", "modernbert", "mpnet", "xlm"])
def test_a_checkpoint_with_a_word_head_has_the_same_encoder(tmp_path, name):
    folder = saved(name, tmp_path, AutoModelForMaskedLM)
    model, report = tasked(folder, output_loading_info=True)
    stock = AutoModel.from_pretrained(folder)
    weights = model.bert.model.state_dict()
    lacking = {key.removeprefix("bert.model.") for key in report["missing_keys"]}  # a pooler
    assert all(torch.equal(value, weights[key]) for key, value in stock.state_dict().items() if key not in lacking)
    assert all(key.startswith("pooler.") or key.split(".")[0] in ("bert", "heads") for key in lacking)


@EACH
@torch.no_grad()
def test_given_embeddings_mean_the_same_as_their_ids(tmp_path, name):
    model = tasked(saved(name, tmp_path)).eval()
    inputs = batch(name)
    ids, mask = inputs.values()
    embeds, positions = model.get_input_embeddings()(ids), model.positions_of("sst", ids)
    assert (positions is None) == (model.bert.parts.offset == 0)
    if name == "ibert":  # a table of numbers and their scale
        assert "inputs_embeds" not in model.bert.parts.accepts
        return
    found = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, task="sst").logits
    torch.testing.assert_close(found, model(**inputs, task="sst").logits)


def test_embeddings_that_a_model_takes_and_does_not_compute_with_are_not_given(tmp_path):
    """LayoutLMv3 takes `inputs_embeds`, and with positions beside them asks for ids."""
    config = CONFIG_MAPPING["layoutlmv3"](**SIZES, coordinate_size=6, shape_size=4, visual_embed=False)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    assert "inputs_embeds" not in parts_of(config).accepts
    with pytest.raises(ValueError, match="`inputs_embeds` cannot be given to a LayoutLMv3Model"):
        tasked(tmp_path)(inputs_embeds=torch.rand(1, 3, 32), task="sst")


def test_embeddings_that_a_model_scales_by_its_ids_alone_are_not_given(tmp_path):
    """ESM's `token_dropout` does so."""
    assert "inputs_embeds" in parts_of(small("esm")).accepts
    assert "inputs_embeds" not in parts_of(small("esm", token_dropout=True)).accepts


def test_no_keys_and_values_are_kept(tmp_path):
    """By a causal architecture whose attention looks both ways."""
    given = {"use_bidirectional_attention": True, "num_key_value_heads": 2, "head_dim": 8}
    CONFIG_MAPPING["gemma3_text"](**SIZES, **given, bos_token_id=2, eos_token_id=3).save_pretrained(tmp_path)
    config = MinBertConfig.from_pretrained(tmp_path, tasks=get_tasks(["sst"]))
    model = MinBertForMultiTask._from_config(config).eval()
    found = []
    model.bert.model.register_forward_hook(lambda module, inputs, outputs: found.append(outputs.past_key_values))
    model(**batch("mpnet"), task="sst")
    assert found == [None]


@EACH
def test_the_layers_and_what_lies_before_them(tmp_path, name):
    model = tasked(saved(name, tmp_path))
    encoder, *layers = model.encoder_path("sst")
    assert encoder is model.bert and len(layers) == (1 if name == "albert" else 3)
    owned = [{id(p) for p in part.parameters()} for part in (encoder.embeddings, *layers)]
    assert all(owned) and sum(map(len, owned)) == len(set.union(*owned))
    words = {id(p) for p in encoder.get_input_embeddings().parameters()}
    assert words <= owned[0]
    above = {key.lower() for key, p in encoder.named_parameters() if id(p) not in set.union(*owned)}
    assert not {key for key in above if not any(word in key for word in ("norm", "pooler", ".ln.", "mask_emb"))}


# ---- What is no encoder of one text ------------------------------------------------------------------------------

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
SMALL = {"vocab_size": 110, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LLAMA = {**SMALL, "intermediate_size": 56, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 110, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = "a token does not see the next one"
#: `model_type` and settings, and what the refusal says.
REFUSED = [
    ("bart", {}, "an encoder-decoder"),
    ("t5", {}, "an encoder-decoder"),
    ("gpt2", GPT, CAUSAL),
    ("llama", LLAMA, CAUSAL),
    ("bloom", {"vocab_size": 110, "hidden_size": 32, "n_layer": 2, "n_head": 4}, CAUSAL),
    ("rembert", {**TAKEN["rembert"], "is_decoder": True}, "a decoder"),
    ("mra", {**SMALL, "intermediate_size": 56}, "no token sees another on a CPU"),
    ("clip_text_model", {**SMALL, "intermediate_size": 56}, CAUSAL),
    ("fnet", {**SMALL, "intermediate_size": 56}, "takes no `attention_mask`"),
    ("funnel", {"vocab_size": 110, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 56, "block_sizes": [1, 1],
      "block_repeats": [1, 1], "num_decoder_layers": 1, "architectures": ["FunnelModel"]},
     "not all of whose layers give a state per token"),
    ("reformer", {}, "not all of whose layers give a state per token"),
    ("canine", {}, "has no vocabulary"),
    ("perceiver", {"d_model": 32, "d_latents": 32}, "takes no `input_ids`"),
    ("xmod", {**TAKEN["xmod"], "default_language": None}, "Input language unknown"),
    ("bamba", {**LLAMA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}, CAUSAL),
    ("bros", {**SMALL, "intermediate_size": 56}, "bbox"),
    ("clip", {}, "reads more than text"),
    ("vit", VISION, "has no vocabulary"),
    ("wav2vec2", {}, "takes no `input_ids`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "says"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_no_encoder_of_one_text_is_refused(tmp_path, name, settings, says):
    CONFIG_MAPPING[name](**settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"MinBERT cannot load .*: its config has `model_type` '{name}', .*{says}"):
        MinBertConfig.from_pretrained(tmp_path)


def test_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(ValueError, match="`model_type` 'nobody', which this version of transformers does not know"):
        MinBertConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [MinBertModel, MinBertForMaskedLM])
def test_the_hand_written_classes_say_what_to_load(tmp_path, kind):
    with pytest.raises(ValueError, match=r"is the library's \(mpnet\).*Load a MinBertForMultiTask"):
        kind.from_pretrained(saved("mpnet", tmp_path))


# ---- The config --------------------------------------------------------------------------------------------------


def test_the_encoder_s_own_config_says_what_stands_beside_it():
    config = MinBertConfig(encoder_config=small("modernbert", norm_eps=1e-3, classifier_dropout=0.25))
    assert (config.family, config.hidden_size, config.layer_norm_eps) == ("modernbert", 32, 1e-3)
    assert (config.classifier_dropout, config.type_vocab_size, config.vocab_size) == (0.25, 0, 110)
    again = MinBertConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_dropout_reaches_the_encoder_under_its_own_name(tmp_path):
    folder = saved("modernbert", tmp_path)
    config = MinBertConfig.from_pretrained(folder, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    encoder = config.encoder_config
    assert (encoder.mlp_dropout, encoder.embedding_dropout, encoder.attention_dropout) == (0.3, 0.3, 0.2)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.3, 0.2)
    model = tasked(folder, hidden_dropout_prob=0.3)
    assert {module.p for module in model.bert.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}


def test_a_dropout_that_the_encoder_has_not_is_refused(tmp_path):
    folder = saved("eurobert", tmp_path)
    said = r"`hidden_dropout_prob` cannot be 0.3: a 'eurobert' has none. Leave it out"
    with pytest.raises(ValueError, match=said):
        MinBertConfig.from_pretrained(folder, hidden_dropout_prob=0.3)
    config = MinBertConfig.from_pretrained(folder)
    assert config.hidden_dropout_prob == 0.0
    config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="`num_hidden_layers` cannot be 2: a 'eurobert' is its own"):
        config.check_tasks()


def test_private_layers_are_refused_and_private_encoders_are_not(tmp_path):
    folder = saved("mpnet", tmp_path)
    with pytest.raises(ValueError, match="`private_layers` must be 0 with an encoder of the library's"):
        tasked(folder, private_layers=1)
    model = tasked(folder, private_encoders=True)
    first, second = model.encoder_of("sst"), model.encoder_of("sts")
    assert first is not second
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        second.get_input_embeddings().weight += 1  # trained apart, they stay apart
    model.save_pretrained(tmp_path / "ours")
    again = MinBertForMultiTask.from_pretrained(tmp_path / "ours")
    for task in ("sst", "sts"):
        assert torch.equal(*(of.encoder_of(task).get_input_embeddings().weight for of in (again, model)))


def test_a_vocabulary_can_grow(tmp_path):
    model = tasked(saved("deberta-v2", tmp_path / "theirs"))
    model.resize_token_embeddings(120)
    assert (model.config.vocab_size, model.config.encoder_config.vocab_size) == (120, 120)
    model.save_pretrained(tmp_path / "ours")
    again = MinBertForMultiTask.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert again.get_input_embeddings().weight.shape == (120, 32)
