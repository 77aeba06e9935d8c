"""A recipe on an encoder of the library's, from its checkpoint to what is saved, exported and loaded elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from small_encoders import TAKEN, saved, small
from transformers import AutoModel

from hf_minbert import MinBertError, MinBertForMultiTask, Predictor, get_tasks
from hf_minbert.model.library import parts_of
from hf_minbert.pretrained.loading import load_config, load_weights
from hf_minbert.pretrained.merging import average, ensemble
from hf_minbert.publishing.export import export
from hf_minbert.publishing.export_onnx import write_graph
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

#: A model with a pooler, one without and without fused attention, and one with neither and relative positions.
NAMES = ["mpnet", "modernbert", "deberta-v2"]


@pytest.fixture(scope="module")
def plain(tiny_tokenizer, tmp_path_factory):
    """`plain(name)`: a folder with a small encoder and a tokenizer."""

    def make(name):
        folder = saved(name, tmp_path_factory.mktemp("plain") / name)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def run(plain, course_dir, tmp_path):
    """`run(name, folder, **words)`: the folder of a finished run of one epoch."""

    def make(name, folder="run", **words):
        given = {
            "model_name_or_path": plain(name) if isinstance(name, str) else name, "data_dir": course_dir,
            "output_dir": tmp_path / folder, "num_train_epochs": 1, "per_device_train_batch_size": 4,
            "learning_rate": 1e-3, "disable_tqdm": "true", "eval_strategy": "epoch", **words,
        }  # fmt: skip
        recipe = tmp_path / f"{folder}.yaml"
        recipe.write_text("".join(f"{key}: {value}\n" for key, value in given.items()), encoding="utf-8")
        train(read_recipe(recipe))
        return tmp_path / folder

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_and_the_run_is_trained_on(run, name):
    first = run(name, regularizer="smart", layer_decay=0.9)
    metrics = json.loads((first / "metrics.json").read_text())
    assert {"eval_sst_accuracy", "eval_overall"} <= metrics.keys() and "diverged" not in metrics
    model = MinBertForMultiTask.from_pretrained(first)
    assert model.config.encoder_config.model_type == name
    assert Predictor.from_pretrained(first)("sst", ["a good film", "not good"])
    again = run(first, "second", attention_probs_dropout_prob=0.2)
    config = load_config(str(again))
    assert config.attention_probs_dropout_prob == 0.2 and config.family == name


def test_an_adapter_is_trained_saved_and_merged(run):
    folder = run("modernbert", peft="{r: 2}")
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    config = load_config(str(folder))
    model, missing = load_weights(str(folder), config)
    assert isinstance(model, MinBertForMultiTask) and not [key for key in missing if "pooler" not in key]
    assert Predictor.from_pretrained(folder)("sst", ["a good film"])
    assert not [key for key in run(folder, "second", peft="{r: 2}").iterdir() if key.name == "model.safetensors"]


def test_a_stage_may_name_the_layers_that_the_one_before_has_by_default(run):
    stages = "[{name: a}, {name: b, peft: {r: 2, target_modules: [Wqkv]}}]"
    assert (run("modernbert", peft="{r: 2}", stages=stages) / "adapter_model.safetensors").is_file()
    other = "[{name: a}, {name: b, peft: {r: 2, target_modules: [query, value]}}]"
    with pytest.raises(MinBertError, match=r"Stage 2 \(b\): `peft.target_modules`: Unknown layer .* 'query'"):
        run("modernbert", "other", peft="{r: 2}", stages=other)


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("mpnet", {"packing": "true"}, "`packing: true` is for the hand-written encoder"),
        ("mpnet", {"private_layers": 1}, "`private_layers` must be 0 with an encoder of the library's"),
        ("mpnet", {"objective": "mlm"}, "`objective: mlm` trains the hand-written encoder"),
        ("mpnet", {"freeze": 4}, "`freeze` is 4 layers, and the model has 3"),
        ("mpnet", {"attn_implementation": "flash_attention_9"}, "flash_attention_9"),
        ("albert", {"freeze": 2}, "`freeze` is 2 layers, and the model has 1"),
        (
            "albert",
            {"regularizer": "smart", "smart_form": "mt-dnn"},
            "`smart_form: mt-dnn` moves the input of the first layer",
        ),
        ("ibert", {"regularizer": "fgm"}, "`regularizer: fgm` needs `inputs_embeds`"),
        ("eurobert", {"hidden_dropout_prob": 0.2}, "`hidden_dropout_prob` cannot be 0.2: a 'eurobert' has none"),
    ],
)
def test_what_it_has_not_is_refused(run, name, words, says):
    with pytest.raises(MinBertError, match=says):
        run(name, **words)


def test_a_refusal_comes_before_data_and_weights(run, plain, tmp_path):
    folder = plain("modernbert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MinBertError, match="`packing: true` is for the hand-written encoder"):
        run(folder, packing="true", data_dir=tmp_path / "nowhere")


def test_an_answer_that_changes_with_the_padding_is_said_once(plain, caplog):
    folder = str(plain("convbert"))
    for _ in range(2):
        load_config(folder, attention_probs_dropout_prob=0.3)
    said = [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]
    assert len(said) <= 1 and parts_of(load_config(folder).encoder_config).reads_padding


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_fused_where_there_is_such(plain, name):
    folder = str(plain(name))
    config = load_config(folder, tasks=get_tasks(["sst"]))
    model, _ = load_weights(folder, config, attn_implementation="sdpa")
    assert model.bert.model.config._attn_implementation == ("sdpa" if name == "modernbert" else "eager")


# ---- Elsewhere ---------------------------------------------------------------------------------------------------

CHILD = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "evaluate", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None
import json, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

found = {}
for name, folder in json.loads(sys.stdin.read()).items():
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(["the film is good", "why"], ["a dog", "is it not ?"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = {task: model(task=task, **inputs).logits.tolist() for task in model.config.task_names}
    model.save_pretrained(f"again-{name}")
    again = AutoModelForSequenceClassification.from_pretrained(f"again-{name}", trust_remote_code=True).eval()
    with torch.no_grad():
        same = all(again(task=task, **inputs).logits.tolist() == found for task, found in logits.items())
    ask = pipeline("minbert-multitask", model=folder, trust_remote_code=True)
    found[name] = [logits, same, ask("the film is good")]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_folder_answers_where_this_package_is_not(plain, tiny_tokenizer, tmp_path):
    tasks = {"sst": {"pooling": "mean", "layers": "mix"}, "para": None, "sts": {"pair_encoding": "bi"}}
    folders, expected = {}, {}
    inputs = tiny_tokenizer(
        ["the film is good", "why"], ["a dog", "is it not ?"], padding=True, return_tensors="pt"
    )  # fmt: skip
    for name in NAMES:
        model = MinBertForMultiTask.from_pretrained(
            plain(name), tasks=get_tasks(tasks), private_encoders=name == "mpnet"
        )
        model.eval().save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name)
        with torch.no_grad():
            expected[name] = {task: model(task=task, **inputs).logits for task in tasks}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(folders), cwd=tmp_path, capture_output=True, text=True,
        timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, (logits, same, asked) in json.loads(done.stdout.splitlines()[-1]).items():
        assert same and asked
        for task, found in logits.items():
            torch.testing.assert_close(torch.tensor(found), expected[name][task], atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def tasked(plain, tiny_tokenizer, tmp_path_factory):
    """`tasked(name)`: a saved model with tasks that pool in three ways."""

    def make(name):
        folder = tmp_path_factory.mktemp("tasked") / name
        tasks = get_tasks({"sst": None, "para": {"pooling": "mean"}, "sts": {"pair_encoding": "bi", "pooling": "cls"}})
        MinBertForMultiTask.from_pretrained(plain(name), tasks=tasks).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.parametrize("name", TAKEN)
def test_the_encoder_goes_back_into_its_own_class(tasked, tmp_path, name):
    folder = tasked(name)
    export(folder, "encoder", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == name and "tasks" not in config
    stock, model = AutoModel.from_pretrained(tmp_path / "out"), MinBertForMultiTask.from_pretrained(folder)
    weights = model.bert.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in stock.state_dict().items())


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("task", ["sst", "para"])
def test_sentence_transformers_embeds_as_the_task_pools(tasked, tmp_path, name, task):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    folder = tasked(name)
    if task == "sst" and parts_of(small(name)).pools:
        with pytest.raises(MinBertError, match=f"pools by the pooler of a {name}, which sentence-transformers does n"):
            export(folder, "sentence-transformers", tmp_path / "st", task=task)
        return
    export(folder, "sentence-transformers", tmp_path / "st", task=task)
    predictor = Predictor.from_pretrained(folder, device="cpu")
    texts = ["a good film", "the man plays the bad dog ."]
    inputs = dict(predictor.tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        ours = predictor.model.pooled_of([task], **inputs)[task][:, 0]
    theirs = torch.from_numpy(library.SentenceTransformer(str(tmp_path / "st"), device="cpu").encode(texts))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_answers_as_the_model(tasked, tmp_path, name):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    said = export(tasked(name), "onnx", tmp_path / "onnx")
    assert said["largest_difference"] < 1e-4


def test_what_torch_cannot_export_is_said_in_a_line(plain, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = MinBertForMultiTask.from_pretrained(plain("longformer"), tasks=get_tasks(["sst"]))
    with pytest.raises(
        MinBertError, match=r"^torch .* cannot export a longformer to ONNX: .* to `encoder` or"
    ) as said:
        write_graph(model, ["sst"], tmp_path / "model.onnx")
    assert "\n" not in str(said.value) and len(str(said.value)) < 400


def test_models_of_one_checkpoint_are_averaged_and_joined(plain):
    folder = plain("deberta-v2")
    one, other = (MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks([task])) for task in ("sst", "sts"))
    for parameter in other.bert.parameters():
        parameter.data += 0.1
    inputs = {"input_ids": torch.tensor([[2, 7, 9, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    joined = ensemble([one.eval(), other.eval()])
    with torch.no_grad():
        for task, model in (("sst", one), ("sts", other)):
            assert torch.equal(joined(**inputs, task=task).logits, model(**inputs, task=task).logits)
    mean = average([one, other]).bert.get_input_embeddings().weight
    torch.testing.assert_close(mean, one.bert.get_input_embeddings().weight + 0.05)
    with pytest.raises(MinBertError, match="`encoder_config` is another in the first than in number 2"):
        average([one, MinBertForMultiTask.from_pretrained(plain("deberta"), tasks=get_tasks(["sst"]))])
