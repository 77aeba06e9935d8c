"""Adapters: what a recipe's `peft` trains, saves and loads again."""

import json

import numpy as np
import pytest

from hf_minbert import MinBertConfig, MinBertForMultiTask
from hf_minbert.prediction import Predictor
from hf_minbert.recipe import read_recipe
from hf_minbert.run import train

peft = pytest.importorskip("peft")

LORA = {"r": 2, "target_modules": ["query", "value"]}
SENTENCES = ["good film", "the man plays", "why is it not very bad ?", "a dog"]


@pytest.fixture
def run(tiny_bert, course_dir, tmp_path):
    """`run("name", peft=..., ...)`: the folder of a finished run."""

    def make(name, **changes):
        words = {
            "model_name_or_path": str(tiny_bert), "data_dir": str(course_dir), "output_dir": str(tmp_path / name),
            "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "disable_tqdm": True, "hidden_dropout_prob": 0.1, "peft": LORA, **changes,
        }  # fmt: skip
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(json.dumps(words), encoding="utf-8")
        train(read_recipe(recipe))
        return tmp_path / name

    return make


def logits(predictor, tasks=None):
    rows = [{"sentence": s, "sentence1": s, "sentence2": s[::-1]} for s in SENTENCES]
    return predictor.logits_of(tasks or list(predictor.tasks), rows)


def assert_same(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=atol)


def test_a_run_saves_adapter_and_heads_alone_and_answers(run, tiny_bert):
    folder = run("lora")
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "README.md"} & names
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_bert)
    answered = logits(Predictor.from_pretrained(folder))
    assert list(answered) == ["sst", "para", "sts"]


def test_an_adapter_answers_as_peft_itself_loads_it(run, tiny_bert):
    folder = run("lora")
    config = MinBertConfig.from_pretrained(folder)
    by_peft = peft.PeftModel.from_pretrained(MinBertForMultiTask.from_pretrained(tiny_bert, config=config), folder)
    ours = Predictor.from_pretrained(folder)
    assert_same(logits(ours), logits(Predictor(by_peft, ours.tokenizer)), atol=1e-6)
    start = Predictor(by_peft.unload(), ours.tokenizer)
    assert not np.allclose(logits(start)["sst"], logits(ours)["sst"], atol=1e-2)
