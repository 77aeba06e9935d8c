"""An adapter published without the model under it, and loaded as its card says."""

from __future__ import annotations

import re

import pytest
import torch
from huggingface_hub import ModelCard

from hf_minbert import Predictor
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

TEXTS = ["a good film", "the man is very bad"]


@pytest.fixture(scope="module")
def adapter_run(tiny_bert, course_dir, tmp_path_factory):
    """The folder of a finished run with LoRA."""
    folder = tmp_path_factory.mktemp("adapter")
    words = ["max_steps=2", "learning_rate=1e-2", "use_cpu=true", "disable_tqdm=true", "save_strategy=no"]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\noutput_dir: {folder / 'run'}\n"
        "peft: {peft_type: LORA, r: 4, target_modules: [query, value]}\n"
    )
    train(read_recipe(recipe, words))
    return folder / "run"


@pytest.fixture(scope="module")
def published(hub, publisher, adapter_run, tiny_bert) -> dict[str, bytes]:
    hub.repos["models"]["me/bert"] = {path.name: path.read_bytes() for path in tiny_bert.iterdir()}
    status, _, err = publisher.minbert("publish", adapter_run, "me/adapter", "--adapter-only")
    assert status == 2 and "--base-model" in err
    words = ["--adapter-only", "--base-model", "me/bert"]
    status, _, err = publisher.minbert("publish", adapter_run, "me/adapter", *words)
    assert status == 0, err
    return hub.repos["models"]["me/adapter"]


def expected(folder) -> dict[str, list]:
    rows = {"sentence": TEXTS[0], "sentence1": TEXTS[0], "sentence2": TEXTS[1]}
    predictor = Predictor.from_pretrained(folder, device="cpu")
    return {name: predictor.logits(name, [rows]).tolist() for name in predictor.tasks}


def test_the_adapter_goes_up_alone(published, tiny_bert, adapter_run):
    assert "adapter_model.safetensors" in published and "model.safetensors" not in published
    card = ModelCard(published["README.md"].decode())
    assert card.data.base_model == "me/bert" and card.data.base_model_relation == "adapter"
    for path, content in published.items():
        assert str(tiny_bert).encode() not in content and str(adapter_run.parent).encode() not in content, path


def test_the_code_of_its_card_answers_the_same_without_this_package(published, stranger, adapter_run):
    card = published["README.md"].decode()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "hf_minbert" not in block]
    texts = f"single, pair = [{TEXTS[0]!r}], {TEXTS!r}"
    asked = f"""
{code}
{texts}
result = {{}}
for task in config.tasks:
    texts = pair if len(task["text_columns"]) == 2 else single
    logits = model(**tokenizer(*texts, return_tensors="pt"), task=task["name"]).logits
    result[task["name"]] = logits.reshape(1, -1).tolist()
"""
    found, wanted = stranger.run(asked), expected(adapter_run)
    assert found.keys() == wanted.keys()
    for name, logits in found.items():
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(wanted[name]).reshape(1, -1), rtol=0, atol=1e-5)


def test_with_this_package_it_loads_by_its_name(published, publisher, adapter_run):
    program = f"""
from hf_minbert import Predictor
predictor = Predictor.from_pretrained("me/adapter", device="cpu")
rows = [{{"sentence": {TEXTS[0]!r}, "sentence1": {TEXTS[0]!r}, "sentence2": {TEXTS[1]!r}}}]
result = {{name: predictor.logits(name, rows).tolist() for name in predictor.tasks}}
"""
    found, wanted = publisher.run(program), expected(adapter_run)
    for name, logits in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(logits), rtol=0, atol=1e-5)
