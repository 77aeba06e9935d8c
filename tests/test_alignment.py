"""Weights in memory of their own: a loaded model computes what the saved one did, wherever its file had them."""

import pytest
import torch
from misaligned import WANTED, misalign
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, BertModel

from hf_minbert import MinBertForMaskedLM, MinBertForMultiTask, MinBertModel

IDS = torch.randint(5, 60, (7, 23), generator=torch.Generator().manual_seed(0))


def offsets(model, multiple):
    return {parameter.data_ptr() % multiple for parameter in model.parameters()}


def test_a_misaligned_file_holds_the_same(tmp_path, tiny_model):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(file).items()}
    misalign(file)
    after = load_file(file)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {tensor.data_ptr() % 8 for tensor in after.values() if tensor.numel() % 2 == 0} == {4}
    BertModel.from_pretrained(tmp_path)  # the format's metadata are there


@pytest.mark.skipif(not WANTED, reason="weights are misaligned with --arithmetic avx2 only")
def test_the_librarys_classes_find_their_weights_misaligned(tiny_bert, tmp_path):
    """All of BERT's have an even number of numbers."""
    stock = BertModel.from_pretrained(tiny_bert)
    assert offsets(stock, 8) == {4}
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(stock, peft.LoraConfig(r=2, target_modules=["query"]))
    adapted.save_pretrained(tmp_path)
    assert {tensor.data_ptr() % 8 for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {4}


@pytest.mark.parametrize("kind", [MinBertForMultiTask, MinBertForMaskedLM, MinBertModel])
@pytest.mark.parametrize("given", [{}, {"device_map": "cpu"}, {"output_loading_info": True}], ids=str)
def test_a_model_from_a_misaligned_file_computes_what_the_saved_one_did(
    tiny_config, tiny_model, tmp_path, kind, given
):
    model, task = (tiny_model(), {"task": "sts"}) if kind is MinBertForMultiTask else (kind(tiny_config()), {})
    model.eval().save_pretrained(tmp_path)
    misalign(tmp_path / "model.safetensors")
    loaded = kind.from_pretrained(tmp_path, **given)
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    with torch.no_grad():
        assert torch.equal(loaded(IDS, **task)[0], model(IDS, **task)[0])
    assert offsets(loaded, 64) == offsets(model, 64) == {0}


def test_auto_classes_copy_too(tiny_model, tmp_path):
    tiny_model(private_layers=1).save_pretrained(tmp_path)
    misalign(tmp_path / "model.safetensors")
    for auto in (AutoModel, AutoModelForSequenceClassification):
        assert offsets(auto.from_pretrained(tmp_path), 64) == {0}


def test_tied_weights_stay_tied(tiny_config, tmp_path):
    MinBertForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    loaded = MinBertForMaskedLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
