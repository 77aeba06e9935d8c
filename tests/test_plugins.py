"""Plugins: what they register is used by recipes, travels with a model, and is fixed on resume; what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_minbert import MinBertError, MinBertForMultiTask, Predictor, Task
from hf_minbert.cli import main
from hf_minbert.data.mappings import MAPPINGS
from hf_minbert.data.rounds import MIXING
from hf_minbert.data.tables import READERS
from hf_minbert.model import saving
from hf_minbert.model.heads import HEADS, Head, LinearHead, MLPHead
from hf_minbert.model.losses import LOSSES
from hf_minbert.model.pooling import JOINS, POOLINGS
from hf_minbert.model.registry import Registry, fits
from hf_minbert.settings import plugins
from hf_minbert.settings.metrics import KIND_METRICS
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.terms.registry import REGULARIZERS

REGISTRIES = [
    HEADS, POOLINGS, JOINS, AGGREGATORS, REGULARIZERS, MIXING, MAPPINGS, READERS, *LOSSES.values(),
    *KIND_METRICS.values(),
]  # fmt: skip

#: What a model needs: it must work by itself and beside the model's files.
OF_MODELS = """
import torch
from torch import nn

try:
    from .heads import HEADS, Head, OutputLayer
    from .losses import LOSSES
    from .pooling import JOINS, POOLINGS, Join, Pooling
except ImportError:
    from hf_minbert.model.heads import HEADS, Head, OutputLayer
    from hf_minbert.model.losses import LOSSES
    from hf_minbert.model.pooling import JOINS, POOLINGS, Join, Pooling


class Gated(Head):
    def __init__(self, config, task, *, size: int = 8):
        super().__init__(config, task)
        self.gate, self.value = nn.Linear(self.input_size, size), nn.Linear(self.input_size, size)
        self.out = OutputLayer(size, task)

    def forward(self, vectors):
        joined = self.joined(vectors)
        return self.out(self.gate(joined).sigmoid() * self.value(joined))


class FirstAndPooled(Pooling):
    def forward(self, states, mask, pooled):
        return states[:, 0] + pooled


def absolute(outcome, *, factor: float = 1.0):
    return factor * (outcome.logits[:, 0] - outcome.labels.float()).abs().mean()


HEADS.register("gated", Gated)
POOLINGS.register("first_and_pooled", FirstAndPooled)
JOINS.register("sum", Join(torch.add, lambda size: size))
LOSSES["score"].register("absolute", absolute)
"""
#: What training, data and scores need.
OF_RUNS = """
import numpy as np

from hf_minbert.data.mappings import MAPPINGS, Same
from hf_minbert.data.rounds import MIXING, Once
from hf_minbert.data.tables import READERS, Table
from hf_minbert.settings.metrics import KIND_METRICS
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.aggregation.sum import Sum
from hf_minbert.training.terms.base import TaskLoss, Term, own_loss
from hf_minbert.training.terms.registry import REGULARIZERS


class Flipped(Same):
    def labels(self, table, origin, target, draws):
        return [None if label is None else 1 - label for label in super().labels(table, origin, target, draws)]


class Small(Term):
    name = "small"

    def __init__(self, *, weight: float = 1.0):
        self.weight = weight

    def __call__(self, model, batch, key, inner=own_loss):
        found = inner(model, batch)
        term = found.outputs["logits"].square().mean()
        return TaskLoss(found.loss + self.weight * term, found.outputs, {**found.logged, self.name: term})


class Total(Sum):
    pass


class Through(Once):
    pass


def read_bars(path):
    header, *rows = [line.split("|") for line in path.read_text(encoding="utf-8").splitlines()]
    return Table(str(path), header, len(rows), lambda at: [row[at] for row in rows])


def closeness(task, values, labels):
    return float(1 / (1 + np.abs(values - labels).mean()))


AGGREGATORS.register("total", Total)
REGULARIZERS.register("small", Small)
MIXING.register("through", Through)
MAPPINGS.register("flipped", Flipped())
READERS.register(".bars", read_bars)
KIND_METRICS["score"].register("closeness", closeness)
"""
CHILD = """
import json, sys
sys.modules["hf_minbert"] = None  # importing it is an error from here on
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder, trust = sys.argv[1], {"trust_remote_code": True}
pair = {"text": "a good film", "text_pair": "the man plays"}

def look(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    ask = pipeline("minbert-multitask", model=folder, **trust)
    logits = model(task="sts", **tokenizer(**pair, return_tensors="pt")).logits.tolist()
    return model, tokenizer, [logits, ask(pair)["sts"]["score"]]

model, tokenizer, first = look(folder)
assert type(model.heads.sts).__module__ == type(model).__module__.rpartition(".")[0] + ".of_models"
model.save_pretrained("again")
tokenizer.save_pretrained("again")
print(json.dumps([first, look("again")[-1]]))
"""


CLEAN = [(registry, dict(registry)) for registry in REGISTRIES]


@pytest.fixture(autouse=True)
def forget(tmp_path_factory):
    """`forget()` makes this process one that has seen no plugin, as it is before and after each test."""
    base = str(tmp_path_factory.getbasetemp())

    def reset():
        for registry, content in CLEAN:
            registry.clear()
            registry.update(content)
            registry.modules.clear()
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(base):
                del sys.modules[name]
        sys.path[:] = [folder for folder in sys.path if folder and not folder.startswith(base)]
        for memory in (plugins._digests, plugins._installed, plugins._missing, plugins._tried):
            memory.clear()

    reset()
    yield reset
    reset()


@pytest.fixture
def write(tmp_path):
    """`write("a.py", text)` writes a file of the test's folder."""

    def make(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return make


@pytest.fixture(scope="module")
def run(tiny_bert, course_dir, tmp_path_factory) -> Path:
    """The folder of a run with a plugin of every kind. Beside it lie its recipe and the plugins."""
    root = tmp_path_factory.mktemp("plugins")
    (root / "of_models.py").write_text(OF_MODELS)
    (root / "of_runs.py").write_text(OF_RUNS)
    (root / "more.bars").write_text("sentence1|sentence2|is_duplicate\na dog|a man|0\nwhy|why not|1\n")
    # fmt: off
    recipe = {
        "model_name_or_path": str(tiny_bert), "data_dir": str(course_dir), "output_dir": str(root / "run"),
        "plugins": ["of_models", "of_runs"], "max_steps": 4, "save_steps": 2, "save_strategy": "steps",
        "logging_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True, "use_cpu": True,
        "aggregator": "total", "mixing": "through",
        "regularizer": "small", "regularizer_options": {"weight": 0.5},
        "tasks": {
            "sst": {"head": "gated", "head_options": {"size": 4}, "pooling": "first_and_pooled"},
            "para": {"sources": [{"files": str(root / "more.bars"), "mapping": "flipped"}]},
            "sts": {
                "head": "gated", "pair_encoding": "bi", "join": "sum", "loss": "absolute",
                "loss_options": {"factor": 2.0}, "metric": "closeness",
            },
        },
    }
    # fmt: on
    (root / "recipe.yaml").write_text(json.dumps(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(SystemExit) as end:
            main(["train", str(root / "recipe.yaml")])
    assert end.value.code == 0
    return root / "run"


# ---- Registries --------------------------------------------------------------------------------------------------


def test_a_registry_takes_words_that_stand_for_what_it_holds():
    assert HEADS.register("mine", LinearHead) is LinearHead is HEADS["mine"]
    HEADS.register("mine", LinearHead)  # again
    assert HEADS.modules["mine"] == __name__ and "linear" not in HEADS.modules
    for name, value, said in (
        ("linear", MLPHead, "'linear' is taken by .*LinearHead"),
        ("mine", MLPHead, f"'mine' is taken by .*LinearHead.* of the plugin {__name__}"),
        ("two words", LinearHead, "'two words'"),
        (None, LinearHead, "None"),
        ("object", torch.nn.Linear, "'object' must stand for a subclass of hf_minbert.model.heads.Head"),
        ("instance", object(), "'instance' must stand for a subclass of"),
    ):
        with pytest.raises(ValueError, match=f"`register` of a head.*{said}"):
            HEADS.register(name, value)
    with pytest.raises(ValueError, match="must stand for an instance of hf_minbert.model.pooling.Join"):
        JOINS.register("sum", torch.add)
    with pytest.raises(ValueError, match="must stand for a function"):
        LOSSES["score"].register("none", 3)
    for wrong in (
        lambda logits, labels: logits,
        lambda outcome, delta=1.0: outcome,
        lambda outcome, *, delta: outcome,
        lambda: None,
    ):
        with pytest.raises(ValueError, match=r"must take the arguments \(outcome\), with options .* Found \(.*\)\."):
            LOSSES["score"].register("wrong", wrong)
    with pytest.raises(ValueError, match=r"`register` of a metric: 'wrong' .* arguments \(task, values, labels\)"):
        KIND_METRICS["score"].register("wrong", lambda values, labels: 0.0)
    with pytest.raises(ValueError, match="`register` of a reader of files: a name must match"):
        READERS.register("xls", print)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: f"{registry.what} {registry.among}")
def test_functions_of_the_package_have_the_form_that_plugins_must_have(registry):
    assert not registry.takes or all(fits(function, registry.takes) for function in registry.values())


def test_a_registry_is_a_dict_of_its_type():
    registry: Registry[type[Head]] = Registry("head", type[Head], {"linear": LinearHead})
    assert list(registry) == ["linear"] and registry.get("none") is None and "none" not in registry
    registry["mlp"] = MLPHead
    assert registry.modules == {"mlp": __name__}


# ---- A run with plugins ------------------------------------------------------------------------------------------


def test_every_kind_is_used_by_a_recipe(run):
    metrics = json.loads((run / "metrics.json").read_text())
    values = [metrics[f"eval_{name}"] for name in ("sst_accuracy", "para_accuracy", "sts_closeness")]
    assert metrics["eval_overall"] == pytest.approx(sum(values) / 3)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert log[0]["small_sst"] > 0
    environment = json.loads((run / "environment.json").read_text())
    assert [*environment["plugins"]] == ["of_models", "of_runs"]
    assert json.loads((run / "config.json").read_text())["plugins"] == ["of_models"]
    for folder in (run, run / "checkpoint-2"):
        assert (folder / "of_models.py").read_text() == OF_MODELS and not (folder / "of_runs.py").exists()
        assert "from .of_models import" in (folder / "plugins.py").read_text()


@pytest.mark.slow
def test_a_model_loads_without_the_package(run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run)], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, again = json.loads(done.stdout.splitlines()[-1])
    sys.path.append(str(run.parent))
    model, tokenizer = MinBertForMultiTask.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    logits = model(task="sts", **tokenizer("a good film", "the man plays", return_tensors="pt")).logits
    torch.testing.assert_close(torch.tensor(first[0]), logits, atol=1e-5, rtol=0)
    assert first[1] == pytest.approx(logits.item(), abs=1e-5) and again == first


def test_with_the_package_a_plugin_is_imported_where_python_finds_it(run, forget):
    with pytest.raises(ValueError, match="unknown head 'gated'.*names the plugin 'of_models'.*not run unasked"):
        AutoModelForSequenceClassification.from_pretrained(run)
    assert "of_models" not in sys.modules
    sys.path.append(str(run.parent))
    model = AutoModelForSequenceClassification.from_pretrained(run)
    assert type(model.heads.get("sst")).__module__ == "of_models"
    ask = pipeline("minbert-multitask", model=str(run), device="cpu")
    assert 0 < ask("a good film", tasks=["sst"])["sst"]["score"] < 1


def test_a_copy_in_the_models_folder_is_never_run(run, tmp_path, forget, monkeypatch, write):
    saved = tmp_path / "saved"
    shutil.copytree(run, saved, ignore=shutil.ignore_patterns("checkpoint-*", "recipe.yaml"))
    (saved / "of_models.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{OF_MODELS}")
    (saved / "merge.json").write_text("{}")
    monkeypatch.chdir(saved)
    sys.path.insert(0, "")
    KIND_METRICS["score"].register("closeness", lambda task, values, labels: 0.0)
    for name in (".", str(saved)):
        with pytest.raises(MinBertError, match="names the plugin 'of_models'"):
            Predictor.from_pretrained(name)
    write("of_models.py", "open('ran', 'w')")  # a module of that name that registers nothing
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MinBertError, match="'of_models' .*registers nothing"):
        Predictor.from_pretrained(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--task", "sts", "--text", "a dog", "--text-pair", "a man"),
        ("evaluate", "--output", "scores.json"),
        ("publish", "me/model", "--dry-run"),
        ("export", "--to", "bert", "--output-dir", "bert", "--task", "sst"),
        ("report",),
        ("demo", "--export-space", "space"),
    ],
    ids=lambda words: words[0],
)
def test_a_verb_finds_the_plugins_of_a_run(run, minbert, forget, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = minbert(words[0], run, *words[1:])
    assert done.status == 0, done.err
    if words[0] == "evaluate":
        metrics = json.loads((run / "metrics.json").read_text())
        assert json.loads((tmp_path / "scores.json").read_text())["eval_sts_closeness"] == pytest.approx(
            metrics["eval_sts_closeness"], abs=1e-6
        )
    if words[0] == "publish":
        assert (
            all(f"  {name}\n" in done.out for name in ("of_models.py", "plugins.py")) and "of_runs.py" not in done.out
        )
    if words[0] == "demo":
        assert (tmp_path / "space" / "model" / "of_models.py").is_file()


def test_models_with_plugins_are_merged(run, minbert, forget, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = minbert("average", run, run / "checkpoint-2", "--output-dir", "merged")
    assert done.status == 0, done.err
    assert (tmp_path / "merged" / "of_models.py").is_file()
    forget()
    done = minbert("predict", "merged", "--task", "sts", "--text", "a dog", "--text-pair", "a man")
    assert done.status == 0, done.err


def test_a_recipes_verbs_run_its_plugins(run, minbert, forget, tmp_path):
    recipe = run.parent / "recipe.yaml"
    done = minbert("conflicts", recipe, "--steps", "1", f"output_dir={tmp_path / 'none'}")
    assert done.status == 0, done.err
    forget()
    done = minbert(
        "search", recipe, "--space", "{learning_rate: [1e-3]}", "--output-dir", tmp_path / "search", "max_steps=1",
        "save_strategy=no",
    )  # fmt: skip
    assert done.status == 0, done.err


# ---- Resuming ----------------------------------------------------------------------------------------------------


def test_plugins_are_fixed_on_resume(run, minbert, forget, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(run.parent, root)
    words = ("train", root / "recipe.yaml", f"output_dir={root / 'run'}", "resume_from_checkpoint=true")
    with (root / "of_runs.py").open("a") as file:
        file.write("# another\n")
    done = minbert(*words)
    assert done.status == 2 and "the plugin 'of_runs' has changed: the run was started with digest" in done.err
    assert done.err.splitlines()[-1].startswith("minbert: error: ")
    forget()
    (root / "of_runs.py").write_text(OF_RUNS)
    done = minbert(*words, "plugins=[of_models, of_runs, extra]")
    assert done.status == 2 and "no module 'extra'" in done.err
    (root / "extra.py").write_text("")
    done = minbert(*words, "plugins=[of_models, of_runs, extra]")
    assert done.status == 2 and "plugin 'extra' has changed: the run was started without it" in done.err
    done = minbert(*words, "max_steps=5")
    assert done.status == 0, done.err


@pytest.mark.slow
def test_processes_need_the_same_plugins(run, together, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_minbert.cli.WAIT_FOR_FIRST", 0)
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "per_process.py").write_text(f"RANK = {rank}\n")

    def job(rank):
        sys.path.append(str(tmp_path / str(rank)))
        main(["train", str(run.parent / "recipe.yaml"), f"output_dir={tmp_path / 'run'}",
              "plugins=[of_models, of_runs, per_process]"])  # fmt: skip

    ended = together(job)
    assert ended.status == [2, 2]
    assert "Process 0 has the plugin 'per_process' with digest" in ended.said[0]


# ---- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "There is no module 'mine'. Put mine.py beside the recipe"),
        ("1 / 0", "Importing the plugin 'mine' .* failed: ZeroDivisionError: division by zero"),
        ("def", "Importing the plugin 'mine' .* failed: SyntaxError"),
        (
            "from hf_minbert.model.losses import LOSSES\nLOSSES['score'].register('mine', lambda x, y: x)",
            r"Importing the plugin 'mine' .* 'mine' must take the arguments \(outcome\).*Found \(x, y\)\. docs/",
        ),
        (
            "from hf_minbert.model.heads import HEADS, MLPHead\nHEADS.register('linear', MLPHead)",
            "failed: ValueError: `register` of a head: 'linear' is taken",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_refused(write, minbert, tmp_path, text, said):
    if text is not None:
        write("mine.py", text)
    recipe = write("recipe.yaml", f"{{model_name_or_path: none, output_dir: {tmp_path / 'run'}, plugins: mine}}")
    done = minbert("train", recipe)
    assert done.status == 2 and done.err.count("\n") == 1
    assert re.search(said, done.err), done.err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x.logits[:, 0] - x.labels", "'mine' must return one number, the mean over the rows of a batch. Found .*[2]"),
        ("x.scores.mean()", "no attribute 'scores'"),
    ],
)
def test_a_loss_that_does_not_work_is_said_to_be_the_plugins(
    write, minbert, tiny_bert, course_dir, tmp_path, body, said
):
    write("mine.py", f"from hf_minbert.model.losses import LOSSES\nLOSSES['score'].register('mine', lambda x: {body})")
    places = f"model_name_or_path: {tiny_bert}, data_dir: {course_dir}, output_dir: {tmp_path / 'run'}"
    recipe = write("recipe.yaml", f"{{{places}, plugins: mine, tasks: {{sts: {{loss: mine}}}}}}")
    done = minbert("train", recipe)
    assert done.status == 2 and re.search(said, done.err), done.err
    assert "Correct the recipe or its plugin mine." in done.err


def test_a_plugin_takes_no_librarys_name(write, minbert, tmp_path):
    write("json.py", "raise AssertionError")
    recipe = write("recipe.yaml", f"{{model_name_or_path: none, output_dir: {tmp_path / 'run'}, plugins: [json]}}")
    done = minbert("train", recipe)
    assert done.status == 2 and "its name is already used by" in done.err and "Rename it" in done.err
    done = minbert("train", recipe, "plugins=[mine.py]")
    assert done.status == 2 and "must name modules" in done.err


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("bad.py", "from hf_minbert.model.heads import HEADS, LinearHead", "it imports hf_minbert where that must"),
        ("bad.py", "import beside\nfrom hf_minbert.model.heads import HEADS, LinearHead", "it imports beside"),
        ("bad/__init__.py", "from hf_minbert.model.heads import HEADS, LinearHead", "it is a package"),
        (
            "inputs.py",
            "try:\n    from .heads import HEADS, LinearHead\nexcept ImportError:\n"
            "    from hf_minbert.model.heads import HEADS, LinearHead",
            "a file inputs.py of its own",
        ),
        (
            "bad.py",
            "try:\n    from .nowhere import HEADS, LinearHead\nexcept ImportError:\n"
            "    from hf_minbert.model.heads import HEADS, LinearHead",
            "it imports .nowhere",
        ),
        (
            "bad.py",
            "try:\n    from hf_minbert.model.heads import HEADS, LinearHead\nexcept ImportError:\n"
            "    from .heads import HEADS, LinearHead",
            "it imports hf_minbert where that must",
        ),
    ],
    ids=[
        "the package",
        "a file beside",
        "a package",
        "a name of the model's",
        "a neighbour that is not there",
        "the package first",
    ],
)
def test_what_cannot_travel_is_said_when_saved_and_refused_when_published(
    write, tiny_model, tiny_tokenizer, minbert, tmp_path, file, text, why, caplog
):
    saving._warn.cache_clear()
    write("beside.py", "")
    write(file, f"{text}\nclass Odd(LinearHead):\n    pass\n\nHEADS.register('odd', Odd)\n")
    name = file.split(".")[0].split("/")[0]
    plugins.load(plugins.located([name], tmp_path))
    assert why in saving.why_it_stays(name, [name])
    model = tiny_model([Task("odd", "classes", "text", labels=("a", "b"), head="odd")])
    with caplog.at_level("WARNING"):
        model.save_pretrained(tmp_path / "saved")
        model.save_pretrained(tmp_path / "saved")
    assert [why in record.message for record in caplog.records].count(True) == 1
    tiny_tokenizer.save_pretrained(tmp_path / "saved")
    assert MinBertForMultiTask.from_pretrained(tmp_path / "saved").config.plugins == [name]
    done = minbert("publish", tmp_path / "saved", "me/odd", "--dry-run")
    assert done.status == 2 and f"needs the plugin '{name}'" in done.err and why in done.err
    assert done.err.splitlines()[-1].startswith("minbert: error: ")
    done = minbert("demo", tmp_path / "saved", "--export-space", tmp_path / "space")
    assert done.status == 2 and f"lack the plugin '{name}'" in done.err and not (tmp_path / "space").exists()


def test_a_head_of_a_script_or_of_a_plain_assignment_cannot_travel(tiny_model, tiny_tokenizer, tmp_path, minbert):
    HEADS["assigned"] = type("Assigned", (LinearHead,), {})
    HEADS.modules["assigned"] = "__main__"
    model = tiny_model([Task("odd", "classes", "text", labels=("a", "b"), head="assigned")])
    with pytest.raises(ValueError, match="`push_to_hub` would leave the plugins behind"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    model.save_pretrained(tmp_path / "saved")
    tiny_tokenizer.save_pretrained(tmp_path / "saved")
    done = minbert("publish", tmp_path / "saved", "me/odd", "--dry-run")
    assert done.status == 2 and "'__main__'" in done.err and "it is the script that was run" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tasks={sst: {head: gated}}", "unknown head 'gated'. Choose from: blocks, cosine, linear, mlp. A plugin can"),
        ("tasks={sst: {pooling: gated}}", "unknown pooling 'gated'"),
        ("tasks={sst: {metric: mcc}}", "Unknown metric 'mcc' for kind 'classes'"),
        ("mixing=some", "Unknown mixing 'some'"),
        ("regularizer=some", "Unknown regularizer 'some'"),
        ("tasks={sst: {sources: [{task: para, mapping: some}]}}", "unknown mapping 'some'"),
        ("tasks={sst: {files: {train: a.bars, dev: a.bars}}}", "files that end in '.bars' cannot be read"),
        ("aggregator=mgda", "Unknown aggregator 'mgda'. Did you mean 'torchjd.MGDA'?"),
        ("aggregator=up_grad", "Did you mean 'torchjd.UPGrad'?"),
    ],
)
def test_an_unknown_name_says_that_a_plugin_can_add_one(tiny_bert, course_dir, tmp_path, minbert, write, words, said):
    write("a.bars", "sentence|sentiment\n")
    recipe = write("recipe.yaml", f"model_name_or_path: {tiny_bert}\ndata_dir: {tmp_path}\noutput_dir: run\n")
    done = minbert("train", recipe, words, f"output_dir={tmp_path / 'run'}")
    assert done.status == 2 and said in done.err and "docs/extending.md" in done.err, done.err


# ---- Entry points ------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_imported_once_a_name_of_it_is_asked_for(
    write, tiny_bert, course_dir, tmp_path, minbert
):
    write("site/of_models.py", OF_MODELS)
    write("site/broken_plugin.py", "1 / 0")
    write("site/mine-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = "[hf_minbert.plugins]\nmodels = of_models\nbroken = broken_plugin\n"
    write("site/mine-1.0.dist-info/entry_points.txt", points)
    sys.path.insert(0, str(tmp_path / "site"))
    recipe = write("recipe.yaml", f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\ntasks: [sst]\n")
    words = ("max_steps=1", "use_cpu=true", "disable_tqdm=true", "save_strategy=no")
    assert minbert("train", recipe, *words, f"output_dir={tmp_path / 'plain'}").status == 0
    assert "of_models" not in sys.modules
    assert json.loads((tmp_path / "plain" / "environment.json").read_text())["plugins"] == {}
    done = minbert("train", recipe, *words, f"output_dir={tmp_path / 'run'}", "tasks.sst.head=gated")
    assert done.status == 0, done.err
    assert [*json.loads((tmp_path / "run" / "environment.json").read_text())["plugins"]] == ["of_models"]
    assert (tmp_path / "run" / "of_models.py").is_file()
    done = minbert("train", recipe, *words, f"output_dir={tmp_path / 'other'}", "tasks.sst.head=gatde")
    assert "Did you mean 'gated'?" in done.err and "'broken_plugin'" in done.err and "ZeroDivisionError" in done.err
