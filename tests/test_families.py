"""The published encoders that the hand-written one computes, against the library's classes of them."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ElectraForPreTraining,
)

from hf_minbert import MinBertConfig, MinBertForMaskedLM, MinBertForMultiTask, MinBertModel, get_tasks
from hf_minbert.model.families import DECODER, FAMILIES, published_config
from hf_minbert.model.packing import Packing
from hf_minbert.pretrained.loading import load_config, load_weights
from hf_minbert.pretrained.merging import add_task_vectors, load_base
from hf_minbert.publishing.export import export
from hf_minbert.training.terms.base import embedded

EACH = pytest.mark.parametrize("family", FAMILIES)
BOTH = pytest.mark.parametrize("attention", ["eager", "sdpa"])
#: In their own words, which for most are BERT's.
SIZES = {"vocab_size": 90, "max_position_embeddings": 40, "initializer_range": 0.2}
BERTS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}
OWN = {
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 56},
    "electra": {**BERTS, "embedding_size": 24, "layer_norm_eps": 1e-7},
    "xlm-roberta": {**BERTS, "type_vocab_size": 1, "hidden_act": "relu", "layer_norm_eps": 1e-5},
    "roberta": {**BERTS, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
}


def saved(family, folder, kind=AutoModel, seed=0):
    """A folder with the library's model of a family, random and small, as it saves it."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SIZES, **OWN.get(family, BERTS))
    kind.from_config(config).save_pretrained(folder)
    return folder


def shared(reference, ours):
    """The library's model on the memory of ours: elsewhere, MKL takes other kernels."""
    weights = {theirs: ours.state_dict()[name] for name, theirs in names_of(ours).items() if theirs is not None}
    missing, unexpected = reference.load_state_dict(weights, strict=False, assign=True)
    assert not unexpected and not [name for name in missing if not name.endswith(("position_ids", "token_type_ids"))]
    return reference.eval()


def names_of(ours):
    """Their name of each of our weights; `None` of what their class has not."""
    family = FAMILIES[ours.config.family]
    found = {}
    for name in ours.state_dict():
        plain = name.removeprefix("bert.")
        if "pooler" in plain and not family.pooler:
            found[name] = None
        elif name.startswith("bert."):
            found[name] = f"{family.prefix}.{family.published(plain)}"
        else:
            theirs = family.published(name)
            tied = name == f"{DECODER}.bias" and f"{DECODER}.weight" in family.names  # their head has one bias
            found[name] = None if tied else theirs
    return found


def batch(family, side="right", lengths=(12, 7, 3)):
    """Random words without padding among them, padded on a side; segments where the family has some."""
    pad = 1 if FAMILIES[family].counted else 0
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (len(lengths), max(lengths)), generator=draw)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask = mask if side == "right" else mask.flip(1)
    segments = (torch.arange(max(lengths)) >= 2).long() * mask
    two = {"token_type_ids": segments} if family in ("bert", "ernie", "electra") else {}
    return {"input_ids": ids * mask + pad * (1 - mask), "attention_mask": mask, **two}


def alike(ours, theirs, attention, where=slice(None)):
    # Eager does the reference's operations in its order, on the same memory; a fused kernel owes the mathematics only.
    torch.testing.assert_close(ours[where], theirs[where], rtol=0, atol=0 if attention == "eager" else 1e-5)


@EACH
@BOTH
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_the_encoder_equals_the_library_s(tmp_path, family, attention, side):
    folder = saved(family, tmp_path)
    ours = MinBertModel.from_pretrained(folder, attn_implementation=attention).eval()
    reference = AutoModel.from_pretrained(folder, attn_implementation=attention)
    loaded = {name: value.clone() for name, value in reference.state_dict().items()}
    theirs = {their: ours.state_dict()[name] for name, their in names_of(ours).items() if their is not None}
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.items())
    shared(reference, ours)
    inputs = batch(family, side)
    a, b = (model(**inputs, output_hidden_states=True) for model in (ours, reference))
    assert len(a.hidden_states) == len(b.hidden_states) == 4
    for own, other in zip(a.hidden_states, b.hidden_states, strict=True):
        alike(own, other, attention)
    if FAMILIES[family].pooler:
        alike(a.pooler_output, b.pooler_output, attention)


@EACH
@BOTH
@torch.no_grad()
def test_given_embeddings_equal_the_library_s(tmp_path, family, attention):
    folder = saved(family, tmp_path)
    ours = MinBertModel.from_pretrained(folder, attn_implementation=attention).eval()
    reference = shared(AutoModel.from_pretrained(folder, attn_implementation=attention), ours)
    inputs = batch(family, lengths=(12, 12))
    inputs["inputs_embeds"] = ours.get_input_embeddings()(inputs.pop("input_ids")) + 0.1
    alike(ours(**inputs).last_hidden_state, reference(**inputs).last_hidden_state, attention)


@EACH
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("fill", [False, True])
@torch.no_grad()
def test_packed_equals_padded(tmp_path, family, side, embeds, fill):
    model = MinBertModel.from_pretrained(saved(family, tmp_path), attn_implementation="sdpa").eval()
    inputs = batch(family, side)
    mask = inputs["attention_mask"]
    if embeds:
        inputs["position_ids"] = model.embeddings.positions(inputs["input_ids"], 12, mask.device).expand(3, 12)
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    packing = Packing.read(Packing.describe(mask.bool().numpy(), fill), mask)
    packed = model(**inputs, packing=packing).last_hidden_state
    torch.testing.assert_close(packed[mask == 1], model(**inputs).last_hidden_state[mask == 1], rtol=0, atol=1e-5)


@EACH
@BOTH
@torch.no_grad()
def test_words_equal_the_library_s(tmp_path, family, attention):
    folder = saved(family, tmp_path, AutoModelForMaskedLM)
    ours, report = MinBertForMaskedLM.from_pretrained(folder, attn_implementation=attention, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    reference = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=attention)
    shared(reference, ours.eval())
    inputs = batch(family)
    labels = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    a, b = (model(**inputs, labels=labels) for model in (ours, reference))
    alike(a.logits, b.logits, attention)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=1e-6)


def test_the_discriminator_has_a_new_word_head(tmp_path):
    torch.manual_seed(0)
    ElectraForPreTraining(CONFIG_MAPPING["electra"](**SIZES, **OWN["electra"])).save_pretrained(tmp_path)
    _, report = MinBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"cls"}


@EACH
def test_gradients_equal_the_library_s(tmp_path, family):
    folder = saved(family, tmp_path)
    ours = MinBertModel.from_pretrained(folder, attn_implementation="eager", hidden_dropout_prob=0.0,
                                        attention_probs_dropout_prob=0.0).train()  # fmt: skip
    reference = AutoModel.from_config(published_config(ours.config), attn_implementation="eager").train()
    shared(reference, ours).train()
    inputs = batch(family)
    for model in (ours, reference):
        model(**inputs).last_hidden_state[inputs["attention_mask"] == 1].pow(2).mean().backward()
    theirs = dict(reference.named_parameters())
    for name, their in names_of(ours).items():
        if their is None or "pooler" in name:
            continue
        found, wanted = ours.get_parameter(name).grad, theirs[their].grad
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@EACH
def test_settings_come_back(tmp_path, family):
    """Every setting of their config that bears on the encoder survives ours; what they leave out has their default."""
    given = CONFIG_MAPPING[family](**SIZES, **OWN.get(family, BERTS))
    given.save_pretrained(tmp_path)
    back = published_config(MinBertConfig.from_pretrained(tmp_path)).to_dict()
    unknown = {"qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "task_type_vocab_size", "use_cache"}
    for name, value in given.to_dict().items():
        if name in back and name not in unknown and not name.startswith("summary_"):
            assert back[name] == value, name
    default = CONFIG_MAPPING[family]()
    default.save_pretrained(tmp_path)
    ours = MinBertConfig.from_pretrained(tmp_path)
    assert (ours.pad_token_id, ours.vocab_size, ours.hidden_size) == (
        default.pad_token_id, default.vocab_size, default.hidden_size,
    )  # fmt: skip


@EACH
def test_dropout_is_where_the_library_has_it(tmp_path, family):
    """With dropout of nearly everything, each place where there is one changes the output's expectation to zeros."""
    folder = saved(family, tmp_path)
    ours = MinBertModel.from_pretrained(folder, attn_implementation="eager").train()
    reference = shared(AutoModel.from_pretrained(folder, attn_implementation="eager"), ours).train()
    inputs = batch(family)
    outputs = []
    for model in (ours, reference):
        torch.manual_seed(3)
        outputs.append(model(**inputs).last_hidden_state)
    # The same generator drawn from at the same places: any other place of dropout gives other numbers.
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_a_table_of_514_positions_takes_512_tokens(tmp_path, family):
    config = CONFIG_MAPPING[family](**{**SIZES, **BERTS, "max_position_embeddings": 514})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    model = MinBertModel.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 512
    assert model.embeddings.position_embeddings.num_embeddings == 514
    assert model(torch.full((1, 512), 7)).last_hidden_state.shape == (1, 512, 32)
    with pytest.raises(ValueError, match="513 tokens long, but this model has positions for 512"):
        model(torch.full((1, 513), 7))


@EACH
def test_a_model_with_tasks_keeps_the_family(tmp_path, family):
    folder = saved(family, tmp_path / "theirs")
    model = MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(["sst", "para"])).eval()
    model.save_pretrained(tmp_path / "ours")
    again = MinBertForMultiTask.from_pretrained(tmp_path / "ours").eval()
    assert again.config.family == family
    inputs = batch(family)
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs, task="sst").logits, model(**inputs, task="sst").logits)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"model_type": "roberta", "is_decoder": True}, "`is_decoder` True; expected an encoder"),
        ({"model_type": "ernie", "use_task_id": True}, "`use_task_id` True"),
        ({"model_type": "electra", "position_embedding_type": "relative_key"}, "`position_embedding_type`"),
    ],
)
def test_relatives_of_another_form_are_refused(tmp_path, given, said):
    import json

    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=said):
        MinBertConfig.from_pretrained(tmp_path)


def in_the_library_s_class(folder, family):
    """The encoder of an export, and whether it is of the family's own class."""
    model = AutoModel.from_pretrained(folder).eval()
    assert model.config.model_type == family
    return model


def tokenizer_of(family, tokenizer, folder):
    """One that pads with the id of `batch`."""
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    if FAMILIES[family].counted:
        words[:2] = words[1::-1]
    file = folder / "vocab.txt"
    file.write_text("\n".join(words) + "\n", encoding="utf-8")
    return type(tokenizer)(vocab=str(file), model_max_length=tokenizer.model_max_length)


@EACH
@pytest.mark.parametrize("sharing", [{}, {"private_layers": 1}])
def test_the_encoder_goes_back_into_the_library_s_class(tmp_path, tiny_tokenizer, family, sharing):
    folder = saved(family, tmp_path / "theirs")
    model = MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(["sst", "sts"]), **sharing).eval()
    if sharing:
        with torch.no_grad():
            model.encoder_path("sts")[-1].output.dense.bias.add_(0.5)
    model.save_pretrained(tmp_path / "ours")
    tokenizer_of(family, tiny_tokenizer, tmp_path).save_pretrained(tmp_path / "ours")
    for task in ("sst", "sts"):
        export(str(tmp_path / "ours"), "encoder", tmp_path / task, task=task)
        theirs = in_the_library_s_class(tmp_path / task, family)
        inputs = batch(family)
        with torch.no_grad():
            ours = model.encoder_of(task)(**inputs, task=task).last_hidden_state
            torch.testing.assert_close(theirs(**inputs).last_hidden_state, ours, rtol=0, atol=1e-5)
    if sharing:
        one, other = (load_file(tmp_path / task / "model.safetensors") for task in ("sst", "sts"))
        changed = [name for name in one if not torch.equal(one[name], other[name])]
        assert len(changed) == 1 and f".{2}." in changed[0]


def of_the_library_s_classifier(family):
    """Three tasks of the shapes that the family's sequence classifier computes."""
    act = FAMILIES[family].classifier_act
    usual = {"pooling": "pooler" if act == "tanh" else "cls"}
    narrow = {"pooling": "cls", "head": "mlp", "head_options": {"hidden_sizes": [7], "activation": act}}
    return get_tasks({"sst": usual, "para": {**usual, "head_options": {"scale": 3.0}}, "sts": narrow})


@EACH
@torch.no_grad()
def test_a_task_goes_into_the_library_s_classifier(tmp_path, tiny_tokenizer, family):
    tasks = of_the_library_s_classifier(family)
    model = MinBertForMultiTask.from_pretrained(saved(family, tmp_path / "theirs"), tasks=tasks, private_layers=1)
    for parameter in model.eval().parameters():  # as if trained: no bias is 0, no two private layers are equal
        parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "ours")
    tokenizer_of(family, tiny_tokenizer, tmp_path).save_pretrained(tmp_path / "ours")
    inputs = batch(family)
    for task, outputs in (("sst", 5), ("para", 2), ("sts", 1)):
        export(str(tmp_path / "ours"), "classifier", tmp_path / task, task=task)
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / task).eval()
        assert theirs.config.model_type == family and type(theirs).__module__.startswith("transformers.models.")
        ours, found = model(**inputs, task=task).logits, theirs(**inputs).logits
        assert found.shape == (3, outputs) and ours.std(dim=0).max() > 0.01
        if task == "para":
            assert torch.equal(found[:, 0], torch.zeros(3))
        torch.testing.assert_close(found[:, -ours.shape[1] :], ours, rtol=0, atol=1e-5)
    gives = "token_type_ids" in AutoTokenizer.from_pretrained(tmp_path / "sst")("a film", "a dog")
    assert gives == (model.config.type_vocab_size > 1)


@EACH
def test_onnx_answers_alike(tmp_path, tiny_tokenizer, family):
    pytest.importorskip("onnxscript")
    folder = saved(family, tmp_path / "theirs")
    model = MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(["sst", "sts"])).eval()
    model.save_pretrained(tmp_path / "ours")
    tokenizer_of(family, tiny_tokenizer, tmp_path).save_pretrained(tmp_path / "ours")
    assert export(str(tmp_path / "ours"), "onnx", tmp_path / "onnx")["largest_difference"] < 1e-4


@EACH
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_embeddings_in_the_place_of_ids_change_no_answer(tmp_path, family, side):
    """What SMART and FGM move; also where a text has a padding token in its middle, as one who writes <pad> has."""
    tasks = [*get_tasks(["sst"]), replace(get_tasks(["sts"])[0], pair_encoding="bi", join="concat")]
    model = MinBertForMultiTask.from_pretrained(saved(family, tmp_path), tasks=tasks).eval()
    inputs = batch(family, side)
    inputs["input_ids"][0, 5] = model.config.pad_token_id
    pairs = {name: torch.stack([value, value.flip(0)], dim=1) for name, value in inputs.items()}
    for task, given in (("sst", inputs), ("sts", pairs)):
        asked = {"task": task, **given}
        ids = asked["input_ids"]
        moved = embedded(model, asked, torch.zeros(*ids.shape, model.config.word_size))
        assert "input_ids" not in moved and moved["inputs_embeds"].shape == (*ids.shape, model.config.word_size)
        torch.testing.assert_close(model(**moved).logits, model(**asked).logits, rtol=0, atol=1e-6)


@EACH
def test_a_base_of_any_family_is_read_by_our_names(family, tmp_path):
    """A model that was not trained is the base, and one that was is the base plus its vector; but for a new pooler."""
    name = str(saved(family, tmp_path))
    config = load_config(name)
    config.rearrange(tasks=[task.to_config() for task in get_tasks(["sst"])])
    model, _ = load_weights(name, config)
    base = load_base(name, [config])
    encoder = {key for key in model.state_dict() if key.startswith("bert.")}
    assert encoder - {*base} == ({key for key in encoder if "pooler" in key} if not FAMILIES[family].pooler else set())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in base.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    merged = add_task_vectors([model], base, "task_arithmetic", scale=1).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(merged[key], value)
