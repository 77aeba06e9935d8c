"""`minbert export --to classifier`: one task in the library's own class, in a process that has no hf_minbert."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, RobertaConfig, RobertaModel

from hf_minbert import MinBertError, MinBertForMultiTask, Predictor, get_tasks
from hf_minbert.publishing.export import export
from hf_minbert.publishing.export_classifier import ToClassifier
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

FIRST = ["a good film", "the man plays the very very bad dog .", "it", "how is it , you"]
SECOND = ["not bad", "why", "the dog is not good !", "how is it , you"]
ROWS = [{"sentence": a, "sentence1": a, "sentence2": b} for a, b in zip(FIRST, SECOND, strict=True)]
TASKS = ["sst", "para", "sts"]
LOGITS = {"sst": [None], "para": [None, 1], "sts": [None]}
CHOSEN = [(task, logits) for task, choices in LOGITS.items() for logits in choices]

#: What stock libraries answer, for each folder; `folders` and `pairs` are put before it.
ASKED = """
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

try:
    import hf_minbert
    raise AssertionError("hf_minbert is there")
except ModuleNotFoundError:
    pass
result = {}
for name, folder in folders.items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    columns = [[first for first, _ in pairs]] if name.startswith("sst") else list(zip(*pairs))
    with torch.inference_mode():
        logits = model(**tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")).logits
    asked = [dict(zip(("text", "text_pair"), cells)) for cells in zip(*columns)]
    answers = pipeline("text-classification", model=folder)(asked, top_k=None, truncation=True)
    result[name] = {
        "class": type(model).__name__,
        "logits": logits.tolist(),
        "length": tokenizer.model_max_length,
        "answers": [{answer["label"]: answer["score"] for answer in of} for of in answers],
    }
    if cross_encoder and not name.startswith("sst"):
        from sentence_transformers import CrossEncoder

        encoder = CrossEncoder(folder, device="cpu")
        result[name]["scores"] = np.asarray(encoder.predict([tuple(pair) for pair in pairs])).tolist()
        result[name]["cut"] = encoder.tokenizer.model_max_length
"""


@pytest.fixture(scope="module")
def bert(tiny_model, tiny_tokenizer, tmp_path_factory):
    """A BERT with private layers, and a run's length that its long rows go beyond."""
    folder = tmp_path_factory.mktemp("bert")
    tasks = get_tasks({"sst": {"head_options": {"scale": 2.0}}, "para": {}, "sts": {"head_options": {"scale": 5.0}}})
    shaken(tiny_model(tasks, private_layers=1)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("max_length: 12\n")
    return folder


@pytest.fixture(scope="module")
def roberta(tiny_config, tiny_tokenizer, tmp_path_factory):
    """A RoBERTa, whose own classifier has no pooler, with an encoder for each task."""
    folder = tmp_path_factory.mktemp("roberta")
    sizes = {key: value for key, value in tiny_config().to_dict().items() if key in RobertaConfig().to_dict()}
    torch.manual_seed(0)
    RobertaModel(RobertaConfig(**{**sizes, "model_type": "roberta", "type_vocab_size": 1})).save_pretrained(folder)
    model = MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(TASKS), private_encoders=True)
    shaken(model).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(tiny_bert, course_dir, tmp_path_factory):
    """A finished run with LoRA and private layers."""
    folder = tmp_path_factory.mktemp("lora")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\noutput_dir: {folder / 'run'}\n"
        "private_layers: 1\npeft: {peft_type: LORA, r: 4, target_modules: [query, value]}\n"
    )
    train(read_recipe(recipe, ["max_steps=2", "learning_rate=1e-2", "use_cpu=true", "disable_tqdm=true"]))
    return folder / "run"


def shaken(model):
    """As if trained: no bias is 0, and no two private layers are equal."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def name_of(task, logits):
    return task if logits is None else f"{task} {logits}"


@pytest.fixture(scope="module", params=["bert", "roberta", pytest.param("lora", marks=pytest.mark.slow)])
def exported(request, stranger, tmp_path_factory):
    """A model's logits by task, what its exports say, and what a stranger gets of these; each by name."""
    if request.param == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
    source, root = request.getfixturevalue(request.param), tmp_path_factory.mktemp("exports")
    predictor = Predictor.from_pretrained(source, device="cpu")
    records, folders = {}, {}
    for task, logits in CHOSEN:
        name = name_of(task, logits)
        options = {} if logits is None else {"logits": logits}
        records[name] = export(str(source), "classifier", root / name, task=task, **options)
        folders[name] = str(root / name)
    given = {
        "folders": folders,
        "pairs": list(zip(FIRST, SECOND, strict=True)),
        "cross_encoder": find_spec("sentence_transformers") is not None,
    }
    found = stranger.run("".join(f"{key} = {value!r}\n" for key, value in given.items()) + ASKED)
    return predictor, {task: predictor.logits(task, ROWS) for task in TASKS}, records, found, root


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def test_stock_transformers_answers_as_the_model_does(exported):
    predictor, logits, records, found, _ = exported
    for task, outputs in CHOSEN:
        name = name_of(task, outputs)
        ours, theirs = logits[task], np.array(found[name]["logits"])
        assert ours.std(axis=0).max() > 0.01  # the rows differ
        if name == "para":
            assert theirs.shape == (4, 2) and not theirs[:, 0].any()
            theirs = theirs[:, 1:]
        np.testing.assert_allclose(theirs, ours, atol=1e-5, rtol=0)
        assert records[name]["largest_difference"] <= 1e-5 and records[name]["class"] == found[name]["class"]
        assert found[name]["length"] == predictor.lengths[task]


def test_the_stock_pipeline_gives_labels_and_probabilities(exported):
    predictor, logits, _, found, _ = exported
    for task in ("sst", "para"):
        texts = (FIRST,) if task == "sst" else (FIRST, SECOND)
        for said, answer in zip(found[task]["answers"], predictor(task, *texts), strict=True):
            assert said == pytest.approx(answer["probabilities"], abs=1e-5)
    for said, z in zip(found["para 1"]["answers"], logits["para"][:, 0], strict=True):
        assert said == pytest.approx({"duplicate": sigmoid(z)}, abs=1e-5)
    for said, score in zip(found["sts"]["answers"], logits["sts"][:, 0], strict=True):
        assert said == pytest.approx({"sts": score}, abs=1e-5)


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
def test_a_cross_encoder_gives_scores_themselves_and_probabilities_of_one_logit(exported):
    predictor, logits, _, found, _ = exported
    np.testing.assert_allclose(found["sts"]["scores"], logits["sts"][:, 0], atol=1e-5)
    np.testing.assert_allclose(found["para 1"]["scores"], sigmoid(logits["para"][:, 0]), atol=1e-5)
    np.testing.assert_allclose(np.array(found["para"]["scores"])[:, 1], logits["para"][:, 0], atol=1e-5)
    assert found["sts"]["cut"] == predictor.lengths["sts"]


def test_rows_beyond_the_length_are_cut_alike(exported):
    """By the tokenizer and, in servers, by the file that they read. Of the BERT, the second pair is too long."""
    predictor, _, _, _, root = exported
    tokenizer = AutoTokenizer.from_pretrained(root / "sst")
    assert len(tokenizer(" ".join(FIRST * 9), truncation=True)["input_ids"]) == predictor.lengths["sst"]
    said = json.loads((root / "sst" / "sentence_bert_config.json").read_text())
    assert said["max_seq_length"] == predictor.lengths["sst"]


@pytest.mark.slow
def test_onnxruntime_answers_as_the_model_does(exported, tmp_path):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    import onnxruntime

    _, logits, _, _, root = exported
    for task in TASKS:
        model = AutoModelForSequenceClassification.from_pretrained(root / task).eval()
        texts = (FIRST,) if task == "sst" else (FIRST, SECOND)
        inputs = AutoTokenizer.from_pretrained(root / task)(*texts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            torch.onnx.export(model, (), tmp_path / f"{task}.onnx", kwargs=dict(inputs), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(tmp_path / f"{task}.onnx", providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        np.testing.assert_allclose(found[:, -logits[task].shape[1] :], logits[task], atol=1e-5)


def test_the_lines_of_its_readme_run(exported, monkeypatch, capsys):
    _, _, _, _, root = exported
    for task in TASKS:
        text = (root / task / "README.md").read_text()
        assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n---\n")
        codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert len(codes) == (1 if task == "sst" else 2)
        for code in codes:
            if "sentence_transformers" not in code or find_spec("sentence_transformers"):
                exec(code.replace("path/to/this/folder", str(root / task)), {})
                assert capsys.readouterr().out
        (request,) = re.findall(r"-d '(.*)'$", text, re.MULTILINE)
        assert json.loads(request).get("raw_scores", False) == (task == "sts")


# ---- What does not fit -------------------------------------------------------------------------------------------

BI = {"text_columns": ("sentence1", "sentence2"), "pair_encoding": "bi"}
CLASSES = {"kind": "classes", "text_columns": ("sentence",), "labels": ("no", "perhaps", "yes")}
MLP = {**CLASSES, "pooling": "cls", "head": "mlp"}
OTHERS = {
    "sst": {},
    "para": {},
    "bi": {**CLASSES, **BI},
    "mixed": {**CLASSES, "pooling": "mean", "layers": "mix"},
    "mean": {**CLASSES, "pooling": "mean"},
    "first": {**CLASSES, "pooling": "cls"},
    "stacked": {**CLASSES, "head": "mlp"},
    "blocks": {**CLASSES, "pooling": "cls", "head": "blocks"},
    "leaky": MLP,
    "deep": {
        **CLASSES,
        "pooling": "cls",
        "head": "mlp",
        "head_options": {"hidden_sizes": [8, 8], "activation": "tanh"},
    },
    "wide": {**CLASSES, "pooling": "cls", "head": "mlp", "head_options": {"hidden_sizes": [33], "activation": "tanh"}},
}
USUAL = (
    "Train it with `pooling: pooler` and `head: linear`, or with `pooling: cls`, `head: mlp` and `head_options: "
    "{activation: tanh}`, or export to onnx."
)


@pytest.fixture(scope="module")
def others(tiny_model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    tiny_model(get_tasks(OTHERS)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "have a head each. Name one with --task: sst, para, bi"),
        (["--task", "parra"], "Unknown task 'parra'. Did you mean 'para'?"),
        (["--task", "sst", "--logits", "1"], "--logits is for binary tasks, and 'sst' is of kind 'classes'."),
        (["--task", "para", "--logits", "3"], "--logits must be 1 or 2. Found 3."),
        (["--task", "para", "--quantize"], "`quantize` is for onnx, not for classifier"),
        (["--task", "bi"], "Train it with `pair_encoding: cross`, `pooling: pooler` and `head: linear`"),
        (["--task", "mixed"], "Task 'mixed' has `layers: mix`, which a BertForSequenceClassification cannot compute."),
        (["--task", "mixed"], "Train it with `layers: last`, `pooling: pooler` and `head: linear`, or with"),
        (["--task", "mean"], f"has `pooling: mean`, which a BertForSequenceClassification cannot compute. {USUAL}"),
        (["--task", "first"], "has `head: linear` on `pooling: cls`, which"),
        (["--task", "stacked"], "has `head: mlp` on `pooling: pooler`, which"),
        (["--task", "blocks"], "has `head: blocks` on `pooling: cls`, which"),
        (["--task", "leaky"], "has `head_options: {activation: leaky_relu}`, which"),
        (["--task", "deep"], "has `head_options: {hidden_sizes: [8, 8]}`, which"),
        (["--task", "wide"], "has `head_options: {hidden_sizes: [33]}`, which"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_before_weights_load(others, minbert, tmp_path, monkeypatch, words, said):
    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Predictor, "from_pretrained", load)
    ended = minbert("export", others, "--to", "classifier", *words, "--output-dir", tmp_path / "new")
    assert (ended.status, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("minbert: error: ") and said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "act"), [("distilbert", "relu"), ("electra", "gelu")])
def test_other_activations_than_tanh_fit_other_tasks(tiny_config, family, act):
    tasks = {
        "pooled": CLASSES,
        "first": {**CLASSES, "pooling": "cls"},
        "many": {**CLASSES, "pooling": "cls", "labels": tuple(map(str, range(17)))},
        "stacked": {**MLP, "head_options": {"activation": act}},
        "tanh": {**MLP, "head_options": {"activation": "tanh"}},
    }
    known = {task.name: task for task in get_tasks(tasks)}
    config = tiny_config(tasks=list(known.values()), family=family)
    for name in ("first", "stacked"):
        ToClassifier("model", config, known, task=name)
    instead = "Train it with `pooling: cls` and `head: linear`, or with"
    for name, said in {
        "pooled": f"has `pooling: pooler`, which a .*{instead} `pooling: cls`, `head: mlp` and",
        "many": "has 17 labels with `head: linear`, more than half of .*. Train it with `pooling: cls`, `head: mlp`",
        "tanh": f"{{activation: tanh}}`, which a .* `head_options: {{activation: {act}}}`",
    }.items():
        with pytest.raises(MinBertError, match=said):
            ToClassifier("model", config, known, task=name)


def test_a_classifier_that_answers_otherwise_leaves_nothing(bert, minbert, tmp_path, monkeypatch):
    folded = ToClassifier._folded

    def wrong(self, model):
        (first, bias), last = folded(self, model)
        return (first, bias + 0.01), last

    monkeypatch.setattr(ToClassifier, "_folded", wrong)
    ended = minbert("export", bert, "--to", "classifier", "--task", "sts", "--output-dir", tmp_path / "new")
    assert ended.status == 2 and "The BertForSequenceClassification that was written differs from" in ended.err
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_the_outputs_are(bert, minbert, tmp_path):
    words = ["export", bert, "--to", "classifier", "--task", "para", "--output-dir"]
    ended = minbert(*words, tmp_path / "two")
    assert ended.status == 0, ended.err
    assert "two outputs, 0 and z" in ended.out and "export with --logits 1" in ended.out
    assert "The other tasks are not exported (sst, sts): a BertForSequenceClassification has one head." in ended.out
    ended = minbert(*words, tmp_path / "one", "--logits", "1")
    assert ended.status == 0 and "one output z, whose sigmoid is the probability of 'duplicate'" in ended.out
    record = json.loads((tmp_path / "one" / "export.json").read_text())
    assert (record["to"], record["task"], record["outputs"]) == ("classifier", "para", 1)
