"""`minbert export`: what is written answers as the model does, in the libraries that it was written for."""

import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModel, AutoTokenizer, BertModel

from hf_minbert import MinBertError, MinBertForMultiTask, Predictor, Task, get_tasks
from hf_minbert.io import whole_folder
from hf_minbert.publishing import export_onnx
from hf_minbert.publishing.export import export
from hf_minbert.publishing.export_encoder import check_difference, largest, sample

FIRST = ["a good film", "the man plays the very very bad dog .", "it", "how is it , you"]
SECOND = ["not bad", "why", "the dog is not good !", "how is it , you"]
PAIR = {"text_columns": ("sentence1", "sentence2"), "pair_encoding": "bi"}
SCORE = {"kind": "score", "range": (0, 5), **PAIR}
CLASSES = {"kind": "classes", "text_columns": ("sentence",), "labels": ("no", "perhaps", "yes")}


@pytest.fixture(scope="module")
def save(tiny_model, tiny_tokenizer):
    """`save(folder, tasks, **changes)`: a tiny model of these tasks and its tokenizer; a folder."""

    def write(folder, tasks, **changes):
        tiny_model(get_tasks(tasks), **changes).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return write


def encoder_output(folder, task, texts=FIRST):
    """Token states of our encoder, [CLS]'s pooled vectors and the mask; of one batch of texts."""
    predictor = Predictor.from_pretrained(folder, device="cpu")
    inputs = predictor.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        outputs = predictor.model.encoder_of(task)(**inputs, task=task)
    return outputs.last_hidden_state, outputs.pooler_output, inputs["attention_mask"].bool()


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- A plain BertModel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [{"private_layers": 1}, {"private_encoders": True}])
def test_the_encoder_of_each_task_is_a_bert_model(save, tmp_path, sharing, tiny_tokenizer):
    folder = save(tmp_path / "model", ["sst", "sts"], **sharing)
    model = MinBertForMultiTask.from_pretrained(folder)
    for parameter in model.encoder_path("sts")[-1].parameters():  # as if trained: another layer than the owner's
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    states = {}
    for task in ("sst", "sts"):
        found = export(str(folder), "encoder", tmp_path / task, task=task)
        bert = AutoModel.from_pretrained(tmp_path / task)
        assert type(bert) is BertModel and found["task"] == task
        inputs = AutoTokenizer.from_pretrained(tmp_path / task)(FIRST, padding=True, return_tensors="pt")
        with torch.inference_mode():
            outputs = bert.eval()(**inputs)
        hidden, pooled, seen = encoder_output(folder, task)
        torch.testing.assert_close(outputs.last_hidden_state[seen], hidden[seen], atol=1e-5, rtol=0)
        torch.testing.assert_close(outputs.pooler_output, pooled, atol=1e-5, rtol=0)
        states[task] = outputs.last_hidden_state[seen]
    assert (states["sst"] - states["sts"]).abs().max() > 0.01
    with pytest.raises(MinBertError, match="have an encoder of their own. Name one with --task: sst, sts"):
        export(str(folder), "encoder", tmp_path / "neither")


def test_a_bert_model_says_what_it_does_not_hold(save, minbert, tmp_path):
    tasks = {"sst": {"layers": "mix", "pooling": "mean"}, "own": {**CLASSES, "pooling": "attention"}}
    save(tmp_path / "model", tasks)
    ended = minbert("export", tmp_path / "model", "--to", "encoder", "--output-dir", tmp_path / "bert")
    assert ended.status == 0, ended.err
    assert "The heads are not exported (sst, own)" in ended.out
    assert "sst reads the token states by a learned mix of all layers" in ended.out
    assert "own reads the token states by attention pooling" in ended.out
    record = json.loads((tmp_path / "bert" / "export.json").read_text())
    assert record["model"] == "model" and str(tmp_path) not in json.dumps(record)
    assert set(record["files"]) | {"export.json"} == {str(path) for path in contents(tmp_path / "bert")}
    readme = (tmp_path / "bert" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(code.replace("path/to/this/folder", str(tmp_path / "bert")), said := {})
    assert type(said["model"]) is BertModel and "sst reads the token states by a learned mix" in readme


# ---- sentence-transformers ---------------------------------------------------------------------------------------


def our_vectors(folder, task, texts):
    """What the task's head compares, or would read, of each text."""
    predictor = Predictor.from_pretrained(folder, device="cpu")
    inputs = dict(predictor.tokenizer(texts, padding=True, return_tensors="pt"))
    apart = predictor.tasks[task].pair_encoding == "bi"
    if apart:
        inputs = {name: ids[:, None].expand(-1, 2, -1) for name, ids in inputs.items()}
    with torch.inference_mode():
        head = predictor.model.heads.get(task)
        return head.embed(predictor.model.pooled_of([task], **inputs)[task])[:, 0]


ST_TASKS = {
    "sst": {},  # BERT's pooler
    "para": {**PAIR, "pooling": "mean", "head": "cosine"},
    "sts": {**PAIR, "pooling": "pooler", "head": "cosine", "head_options": {"projection_size": 8}},
    "near": {**SCORE, "pooling": "max", "head": "cosine", "head_options": {"mapping": "relu"}},
    "raw": {**SCORE, "pooling": "cls", "head": "cosine", "head_options": {"mapping": "raw"}},
    "joined": {**SCORE, "pooling": "cls", "join": "concat_diff_product"},
    "mixed": {**CLASSES, "pooling": "mean", "layers": "mix"},
    "attended": {**CLASSES, "pooling": "attention"},
    "read": {**CLASSES, "pooling": "bigru"},
}


@pytest.fixture(scope="module")
def many_poolings(save, tmp_path_factory):
    return save(tmp_path_factory.mktemp("poolings") / "model", ST_TASKS)


@pytest.mark.parametrize("task", ["sst", "para", "sts", "near", "raw", "joined"])
def test_sentence_transformers_embeds_as_the_task_pools(many_poolings, tmp_path, task):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    folder = tmp_path / "st"
    export(str(many_poolings), "sentence-transformers", folder, task=task)
    model = library.SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == 64
    ours = our_vectors(many_poolings, task, FIRST + SECOND)
    theirs = torch.from_numpy(model.encode(FIRST + SECOND))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    cosines = torch.nn.functional.cosine_similarity(ours[:, None], ours[None], dim=-1)
    torch.testing.assert_close(model.similarity(theirs, theirs), cosines, atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["para", "sts", "near", "raw"])
def test_the_folder_says_how_a_cosine_becomes_the_answer(many_poolings, tmp_path, task):
    """Its formula, taken out of the text and computed, gives what the model answers."""
    export(str(many_poolings), "sentence-transformers", tmp_path / "st", task=task)
    text = (tmp_path / "st" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: sentence-transformers\n")
    (said,) = re.findall(rf"^- {task}: the (?:score|probability of 'duplicate') is (.*)\.$", text, re.MULTILINE)
    cosine = torch.nn.functional.cosine_similarity(
        *(our_vectors(many_poolings, task, texts) for texts in (FIRST, SECOND))
    )
    answers = Predictor.from_pretrained(many_poolings, device="cpu")(task, FIRST, SECOND)
    for value, answer in zip(cosine.tolist(), answers, strict=True):
        found = eval(said.replace("the cosine itself", "cosine"), {"exp": np.exp, "max": max, "cosine": value})
        assert found == pytest.approx(
            answer.get("probabilities", answer).get("duplicate", answer["prediction"]), abs=1e-4
        )


@pytest.mark.parametrize(
    ("task", "reads"), [("mixed", "a learned mix of layers"), ("attended", "attention"), ("read", "bigru")]
)
def test_poolings_that_sentence_transformers_lacks_are_refused(many_poolings, tmp_path, task, reads):
    with pytest.raises(MinBertError, match=f"{task}.*{reads}.*sentence-transformers does not have.*export to onnx"):
        export(str(many_poolings), "sentence-transformers", tmp_path / "st", task=task)


def test_tasks_that_read_alike_need_no_name_and_the_run_says_the_length(save, tmp_path):
    folder = save(tmp_path / "model", ["sst", "sts"])
    (folder / "recipe.yaml").write_text("max_length: 12\n")
    export(str(folder), "sentence-transformers", tmp_path / "st")
    settings = json.loads((tmp_path / "st" / "sentence_bert_config.json").read_text())
    assert settings["max_seq_length"] == 12
    assert AutoTokenizer.from_pretrained(tmp_path / "st").model_max_length == 12
    text = (tmp_path / "st" / "README.md").read_text()
    assert "- sst, sts: trained with another head than a cosine" in text


# ---- ONNX --------------------------------------------------------------------------------------------------------

#: Whether torch exports a recurrent layer as a loop of any length. 2.11 does not, 2.13 does.
LOOPS_HAVE_ANY_LENGTH = Version(torch.__version__) >= Version("2.13")
#: Every head, join and pooling, and names that the exporter gives to values of its own.
ONNX_TASKS = {
    "sst": {"pooling": "attention", "head": "blocks", "head_options": {"hidden_sizes": [8]}},
    "cat": {**CLASSES, "pooling": "max"},
    "linear": {**CLASSES, "pooling": "max", "layers": "mix", "head": "mlp"},
    "read": {**CLASSES, "pooling": "bigru" if LOOPS_HAVE_ANY_LENGTH else "max"},
    "para": {},
    "sts": {**PAIR, "pooling": "mean", "head": "cosine", "head_options": {"projection_size": 8}},
    "near": {**PAIR, "kind": "binary", "labels": ("far", "near"), "pooling": "cls", "head": "cosine"},
    "val_1": {**SCORE, "pooling": "cls", "join": "concat_diff_product"},
    "joined": {**SCORE, "pooling": "max", "join": "concat_cosine", "head": "mlp"},
    "compared": {**SCORE, "pooling": "mean", "join": "cosine"},
}


@pytest.fixture(scope="module")
def onnx_export(save, course_dir, tmp_path_factory):
    """A model, and the folder of its export with a quantized variant: the slow part, done once."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    folder = tmp_path_factory.mktemp("onnx")
    save(folder / "model", ONNX_TASKS, num_hidden_layers=1)
    export(str(folder / "model"), "onnx", folder / "graphs", quantize=True, data_dir=str(course_dir))
    return folder / "model", folder / "graphs"


@pytest.mark.slow
@pytest.mark.skipif(LOOPS_HAVE_ANY_LENGTH, reason="this torch exports a recurrent layer as a loop of any length")
def test_a_graph_for_one_length_alone_is_refused(save, minbert, tmp_path):
    save(tmp_path / "model", {"read": {**CLASSES, "pooling": "bigru"}})
    ended = minbert("export", tmp_path / "model", "--to", "onnx", "--output-dir", tmp_path / "new")
    assert ended.status == 2 and "inputs of one length only, for the tasks read. Torch 2.11" in ended.err
    assert not (tmp_path / "new").exists()


def rows_of(task: Task, count: int):
    texts = (FIRST + SECOND, SECOND + FIRST)
    rows = [dict(zip(task.text_columns, cells, strict=False)) for cells in zip(*texts, strict=True)]
    return rows[:count]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 8])
def test_graphs_answer_as_the_model_does(onnx_export, count):
    model, folder = onnx_export
    ours = Predictor.from_pretrained(model, device="cpu")
    theirs = Predictor(export_onnx.OnnxModel(ours.model.config, folder), ours.tokenizer)
    for name, task in ours.tasks.items():
        rows = rows_of(task, count)
        np.testing.assert_allclose(theirs.logits(name, rows), ours.logits(name, rows), atol=1e-4, rtol=0)


def test_what_torch_prints_of_its_own_work_is_not_shown(capsys):
    with export_onnx._quiet():
        print("def forward(self, arg0_1)", file=sys.stderr)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_lines_of_its_readme_run_in_the_folder(onnx_export, monkeypatch, capsys):
    model, folder = onnx_export
    codes = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    ours = Predictor.from_pretrained(model, device="cpu")
    assert len(codes) == 2 and all(len(code.strip().splitlines()) <= 12 for code in codes)
    for code in codes:
        exec(code, said := {})
        name = said["task"]["output"]
        texts = said["texts"][0]
        columns = [texts] if name == "sst" else [texts[: len(texts) // 2], texts[len(texts) // 2 :]]
        rows = [dict(zip(ours.task(name).text_columns, cells, strict=True)) for cells in zip(*columns, strict=True)]
        np.testing.assert_allclose(said["output"], ours.logits(name, rows), atol=1e-4)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == repr(
        [answer["label"] for answer in ours("sst", eval(codes[0].split("texts = ")[1].split("\n")[0])[0])]
    )


@pytest.mark.slow
def test_the_quantized_variant_stands_beside_the_full_one(onnx_export, minbert, course_dir, tmp_path):
    model, folder = onnx_export
    record = json.loads((folder / "export.json").read_text())
    assert list(record["scores"]) == ["sst", "para", "sts"]  # of the others a model knows no data
    assert "not measured for cat, linear, read, near, val_1, joined, compared: there are no" in str(record["notes"])
    evaluated = minbert(
        "evaluate", model, "--data-dir", course_dir, "--output", tmp_path / "m.json",
        "--task", "sst", "--task", "para", "--task", "sts",
    )  # fmt: skip
    assert evaluated.status == 0, evaluated.err
    ours = json.loads((tmp_path / "m.json").read_text())
    table = (folder / "README.md").read_text()
    for name, of in record["scores"].items():
        assert of["full"] == pytest.approx(ours[f"eval_{name}_{of['metric']}"], abs=1e-4)
        assert of["difference"] == of["quantized"] - of["full"]
        assert f"| {name} | {of['metric']} | {of['full']:.4f} | {of['quantized']:.4f} |" in table
    for graph in ("model", "model_bi"):  # the loop and the names of so small a graph stay as they are
        assert record["bytes"][f"{graph}_quantized.onnx"] < 0.75 * record["bytes"][f"{graph}.onnx"]
    assert record["largest_difference"] <= 1e-4


@pytest.mark.slow
def test_tasks_json_says_what_an_output_means_and_no_file_names_this_machine(onnx_export):
    model, folder = onnx_export
    described = json.loads((folder / "tasks.json").read_text())
    assert described["max_length"] == 64
    assert described["tasks"]["sts"]["range"] == [0.0, 5.0] and described["tasks"]["sts"]["file"] == "model_bi.onnx"
    assert described["tasks"]["cat"]["labels"] == ["no", "perhaps", "yes"]
    for path, data in contents(folder).items():
        assert str(Path(export_onnx.__file__).parents[1]).encode() not in data, path
        assert str(model.parent).encode() not in data, path


@pytest.mark.slow
def test_a_graph_that_answers_otherwise_leaves_nothing(onnx_export, save, minbert, tmp_path, monkeypatch):
    _, folder = onnx_export

    def write_wrong(model, tasks, path):
        path.write_bytes((folder / path.name).read_bytes())

    monkeypatch.setattr(export_onnx, "write_graph", write_wrong)
    save(tmp_path / "model", ONNX_TASKS, num_hidden_layers=1, seed=1)  # other weights than the graph's
    before = contents(tmp_path)
    ended = minbert("export", tmp_path / "model", "--to", "onnx", "--output-dir", tmp_path / "new")
    assert ended.status == 2 and "output sst of model.onnx that was written differs from the model by" in ended.err
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()


def test_tasks_with_layers_of_their_own_each_have_a_pass(tiny_model):
    model = tiny_model(["sst", "para", "sts"], private_layers=1).eval()
    inputs = sample(model.config, 3, 9)
    answers = export_onnx.Answers(model, ["sst", "para", "sts"])
    assert len(answers.passes) == 3
    with torch.inference_mode():
        for name, found in zip(answers.tasks, answers(**inputs), strict=True):
            torch.testing.assert_close(found, model(**inputs, task=name).logits)


def test_differences_are_relative_above_one_and_nan_is_one():
    assert largest(torch.tensor([100.0]), torch.tensor([100.5])) == pytest.approx(0.005)
    assert largest(torch.tensor([0.1]), torch.tensor([0.2])) == pytest.approx(0.1)
    for difference in (2e-4, float("nan")):
        with pytest.raises(MinBertError, match="output sst that was written differs"):
            check_difference("output sst", difference, 1e-4)
    check_difference("output sst", 1e-4, 1e-4)


# ---- The folder, and mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "onyx"], "'onyx' is not one of"),
        (["--to", "encoder", "--task", "stss"], "Unknown task 'stss'. Did you mean 'sts'?"),
        (["--to", "encoder", "--quantize"], "`quantize` is for onnx, not for encoder"),
        (
            ["--to", "onnx", "--task", "sst"],
            "`task` is for encoder or sentence-transformers or classifier, not for onnx",
        ),
        (["--to", "onnx", "--data-dir", "sample"], "add --quantize"),
        (["--to", "onnx", "--quantize", "--data-dir", "nowhere"], "nowhere"),
        (
            ["--to", "sentence-transformers"],
            "do not make a sentence's vector in one way. Name one with --task: sst, sts",
        ),
        (["--to", "encoder", "--output-dir", "model"], "model is not empty. Choose another --output-dir"),
        (["--to", "encoder", "--output-dir", "model", "--overwrite"], "has no export.json"),
        (["--to", "encoder", "--output-dir", "file"], "file is not a folder"),
        (["--to", "encoder", "--output-dir", "file/below"], "file is not a folder"),
        (["--to", "encoder", "--output-dir", "old"], "old is not empty"),
        (["--to", "encoder", "--output-dir", "old", "--overwrite"], "holds notes.txt too. Move it away"),
        (["--to", "encoder", "--output-dir", "."], "is the working directory"),
    ],
)
def test_mistakes_are_one_line_before_weights_load(save, minbert, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    save(Path("model"), {"sst": {}, "sts": {"pooling": "mean"}})
    Path("file").write_text("")
    Path("old").mkdir()
    Path("old/export.json").write_text('{"files": ["config.json"]}')
    Path("old/notes.txt").write_text("mine")
    before = contents(tmp_path)

    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Predictor, "from_pretrained", load)
    monkeypatch.setattr(export_onnx, "find_spec", lambda name: name)  # as if the libraries were there
    ended = minbert("export", "model", *words, *([] if "--output-dir" in words else ["--output-dir", "new"]))
    assert (ended.status, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("minbert: error: ") and said in line
    assert contents(tmp_path) == before


def test_a_library_that_is_missing_is_named_with_what_installs_it(save, tmp_path, monkeypatch):
    save(tmp_path / "model", ["sst"])
    monkeypatch.setattr(export_onnx, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(MinBertError, match=r"needs the library onnxscript. Run: pip install 'hf_minbert\[export\]'"):
        export(str(tmp_path / "model"), "onnx", tmp_path / "new")


def test_overwrite_replaces_an_earlier_export_whole(save, minbert, tmp_path):
    save(tmp_path / "model", ["sst"])
    words = ["export", tmp_path / "model", "--output-dir", tmp_path / "out"]
    (tmp_path / ".out.part").mkdir()  # of an export that was killed
    assert minbert(*words, "--to", "sentence-transformers").status == 0
    assert minbert(*words, "--to", "encoder").status == 2
    ended = minbert(*words, "--to", "encoder", "--overwrite")
    assert ended.status == 0, ended.err
    assert not (tmp_path / "out" / "modules.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_a_folder_is_whole_or_not_there(tmp_path):
    with whole_folder(tmp_path / "deep" / "new") as part:
        (part / "a").write_text("1")
        assert not (tmp_path / "deep" / "new").exists()
    assert contents(tmp_path) == {Path("deep/new/a"): b"1"}
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "deep" / "new") as part:
        (part / "b").write_text("2")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {Path("deep/new/a"): b"1"}
    with pytest.raises(MinBertError, match="No space left"), whole_folder(tmp_path / "other"):
        raise OSError(28, "No space left on device")
    with pytest.raises(MinBertError, match="Cannot write"), whole_folder(tmp_path / "deep" / "new") as part:
        part.rmdir()  # then it cannot take the name
    assert contents(tmp_path) == {Path("deep/new/a"): b"1"}
    with whole_folder(tmp_path / "deep" / "new") as part:
        (part / "c").write_text("3")
    assert contents(tmp_path) == {Path("deep/new/c"): b"3"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]


def killed(name: str) -> Callable[..., None]:
    """A function of `os` or `shutil` that ends the process, at its first call of a folder of this name."""
    return lambda source, *rest, **how: os.kill(os.getpid(), signal.SIGKILL) if Path(source).name == name else None


@pytest.mark.parametrize(
    ("killer", "left", "said"),
    [
        (None, {"out", ".out.part"}, "Removed .*/.out.part, which a killed process had left."),
        (("os.replace", ".out.part"), {".out.part", ".out.old"}, "out is there again: a killed process had begun to"),
        (("shutil.rmtree", ".out.old"), {"out", ".out.old"}, "Removed .*/.out.old, which a killed"),
    ],
    ids=["while it was filled", "between the moves", "before the old one was removed"],
)
def test_what_a_killed_process_left_is_removed_and_said(together, tmp_path, caplog, killer, left, said):
    with whole_folder(tmp_path / "out") as part:
        (part / "a").write_text("1")

    def job(rank):
        if killer is not None:
            module, name = killer[0].split(".")
            called = getattr(importlib.import_module(module), name)
            dying = killed(killer[1])
            setattr(
                importlib.import_module(module), name,
                lambda source, *rest, **how: dying(source) or called(source, *rest, **how),
            )  # fmt: skip
        with whole_folder(tmp_path / "out") as part:
            (part / "b").write_text("2")
            if killer is None:
                os.kill(os.getpid(), signal.SIGKILL)

    assert together(job, processes=1).status == [-signal.SIGKILL]
    assert {path.name for path in tmp_path.iterdir()} == left
    with caplog.at_level("INFO"), pytest.raises(MinBertError), whole_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert re.search(said, caplog.text)
    assert len(contents(tmp_path)) == 1, "the folder of before is there, old or new"
    with whole_folder(tmp_path / "out") as part:
        (part / "c").write_text("3")
    assert contents(tmp_path) == {Path("out/c"): b"3"}
