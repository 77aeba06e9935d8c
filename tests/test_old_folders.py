"""Folders that version 0.1.0 wrote: they load, predict what it predicted, score, report, and their runs go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_minbert
from hf_minbert import MinBertForMultiTask, MultiTaskTrainingArguments, Predictor

OLD = Path(__file__).parent / "fixtures" / "v0_1"
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
MODELS = ["run", "whole", "adapter", "space/model"]
POSITIONS = 32
PACKAGE = str(Path(hf_minbert.__file__).parents[1])


def copy_of_old(folder: Path) -> Path:
    """The old folders, each complete: the code that they share lies in one place."""
    shutil.copytree(OLD, folder)
    for config in folder.rglob("config.json"):
        if "auto_map" in json.loads(config.read_text(encoding="utf-8")):
            shutil.copytree(folder / "code", config.parent, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def shared_old(tmp_path_factory) -> Path:
    return copy_of_old(tmp_path_factory.mktemp("shared") / "v0_1")


@pytest.fixture
def old(shared_old, monkeypatch) -> None:
    """The working folder is that of the old folders, whose paths are relative. Not to be changed."""
    monkeypatch.chdir(shared_old)


@pytest.fixture
def own_old(tmp_path, monkeypatch) -> None:
    """Like `old`, a copy for one test."""
    monkeypatch.chdir(copy_of_old(tmp_path / "v0_1"))


def assert_answers(folder: str, expected: str, within: float = 1e-5) -> None:
    """That a folder's model has the logits that version 0.1.0 had, and cuts a long text where it did."""
    predictor = Predictor.from_pretrained(folder, device="cpu", max_length=POSITIONS)
    assert list(predictor.tasks) == list(EXPECTED[expected])
    inputs = predictor.tokenizer(EXPECTED["first"], EXPECTED["second"], padding=True, return_tensors="pt")
    for task, then in EXPECTED[expected].items():
        with torch.no_grad():
            logits = predictor.model(task=task, **inputs).logits
        torch.testing.assert_close(logits, torch.tensor(then["logits"]), atol=within, rtol=0)
        columns = [[EXPECTED["long"]]] * (1 + predictor.task(task).is_pair)
        for now, before in zip(predictor(task, *columns), then["long"], strict=True):
            assert now.keys() == before.keys() and now.get("label") == before.get("label")
            assert now["prediction"] == pytest.approx(before["prediction"], abs=within)
            assert now.get("probabilities") == pytest.approx(before.get("probabilities"), abs=within)


def run_alone(code: str, *words: str, path: str = "") -> str:
    """The output of code in a process of its own, in the working folder, with `path` to import from."""
    home = str(Path.cwd().parent / "home")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": home, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- The fixtures are what they are to stand for


def test_the_folders_are_of_version_0_1():
    for run in ("run", "whole", "adapter"):
        environment = json.loads((OLD / run / "environment.json").read_text(encoding="utf-8"))
        assert environment["versions"]["hf_minbert"] == "0.1.0"
        assert "max_input_length" not in (OLD / run / "config.json").read_text(encoding="utf-8")
    adapter = json.loads((OLD / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["auto_mapping"]["parent_library"] == "hf_minbert.modeling_minbert"
    assert b"hf_minbert.training.args" in (OLD / "run" / "training_args.bin").read_bytes()


def test_no_folder_names_a_place_on_the_machine_where_it_was_made():
    for file in OLD.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            for place in (b"/work", b"/home/", b"/root", b"/tmp", b"/Users/"):
                assert place not in file.read_bytes(), file


# ---- Load and predict


@pytest.mark.parametrize("model", MODELS)
def test_the_package_predicts_what_version_0_1_did(old, model):
    assert_answers(model, model)


@pytest.mark.parametrize(("model", "length"), [("run", 16), ("whole", 32), ("adapter", 32), ("space/model", 32)])
def test_texts_are_cut_where_the_recipe_says_else_at_the_positions(old, model, length):
    own, wanted = (Predictor.from_pretrained(model, device="cpu", max_length=at) for at in (None, length))
    assert {*own.lengths.values()} == {*wanted.lengths.values()} == {length}
    assert own("sst", [EXPECTED["long"]]) == wanted("sst", [EXPECTED["long"]])


WITHOUT_PACKAGE = """
import json, sys
sys.modules["hf_minbert"] = None  # importing it is an error from here on
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

def load(name):
    if name != "adapter":
        return AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True)
    config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    made = get_class_from_dynamic_module("modeling_minbert.MinBertForMultiTask", name)
    return PeftModel.from_pretrained(made.from_pretrained("base", config=config), name).eval()

found = {}
for name, (first, second) in json.loads(sys.argv[1]).items():
    tokenizer, model = AutoTokenizer.from_pretrained(name, trust_remote_code=True), load(name)
    inputs = tokenizer(first, second, padding=True, return_tensors="pt")
    with torch.no_grad():
        found[name] = {task: model(task=task, **inputs).logits.tolist() for task in model.config.task_names}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_auto_classes_and_peft_predict_the_same_without_the_package(old):
    asked = {name: [EXPECTED["first"], EXPECTED["second"]] for name in MODELS}
    found = json.loads(run_alone(WITHOUT_PACKAGE, json.dumps(asked)).splitlines()[-1])
    for name in MODELS:
        assert list(found[name]) == list(EXPECTED[name])
        for task, logits in found[name].items():
            expected = torch.tensor(EXPECTED[name][task]["logits"])
            torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=0)


def test_peft_puts_an_old_adapter_on_the_model_of_the_package(old):
    from peft import PeftModel

    config = hf_minbert.MinBertConfig.from_pretrained("adapter")
    model = PeftModel.from_pretrained(MinBertForMultiTask.from_pretrained("base", config=config), "adapter").eval()
    inputs = Predictor.from_pretrained("adapter", device="cpu").tokenizer(
        EXPECTED["first"], EXPECTED["second"], padding=True, return_tensors="pt"
    )
    for task, then in EXPECTED["adapter"].items():
        with torch.no_grad():
            logits = model(task=task, **inputs).logits
        torch.testing.assert_close(logits, torch.tensor(then["logits"]), atol=1e-5, rtol=0)


def test_an_old_adapter_becomes_a_model(minbert, old, tmp_path):
    ended = minbert("merge", "adapter", "--output-dir", tmp_path / "merged")
    assert ended.status == 0, ended.err
    assert_answers(str(tmp_path / "merged"), "adapter")


# ---- Paths of modules


@pytest.mark.parametrize("folder", ["run", "run/checkpoint-4", "adapter", "whole"])
def test_old_training_arguments_load(folder):
    args = torch.load(OLD / folder / "training_args.bin", weights_only=False)
    assert type(args) is MultiTaskTrainingArguments
    assert (args.num_train_epochs, args.learning_rate, args.output_dir) == (2, 0.01, folder.split("/")[0])
    assert args.aggregator == ("pcgrad" if folder.startswith("run") else "sum")


#: The modules of version 0.1.0 that files or code of others name, and where they are now.
MOVED = {
    "configuration_minbert": "model", "heads": "model", "inference": "model", "inputs": "model", "losses": "model",
    "modeling_minbert": "model", "packing": "model", "pipeline_minbert": "model", "pooling": "model",
    "adapters": "pretrained", "loading": "pretrained", "merging": "pretrained", "prediction": "pretrained",
    "weights": "pretrained", "recipe": "settings", "tasks": "settings",
}  # fmt: skip

# The finder of an editable installation may know old files of another folder.
OLD_PATHS = """
import importlib, json, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]
sys.path.insert(0, sys.argv[1])
for name, folder in json.loads(sys.argv[2]).items():
    before = importlib.import_module(f"hf_minbert.{name}")
    assert before is importlib.import_module(f"hf_minbert.{folder}.{name}"), before
    exec(f"from hf_minbert.{name} import __doc__ as text")
    assert text == before.__doc__
from hf_minbert.modeling_minbert import MinBertForMultiTask as named
from hf_minbert import MinBertForMultiTask
assert named is MinBertForMultiTask
try:
    import hf_minbert.no_such_module
except ModuleNotFoundError as error:
    assert error.name == "hf_minbert.no_such_module"
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_old_paths_of_modules_name_the_same_modules():
    run_alone(OLD_PATHS, PACKAGE, json.dumps(MOVED))


# ---- Score, report, go on


@pytest.mark.parametrize("run", ["run", "whole", "adapter"])
def test_an_old_run_is_scored_on_its_own_rows_as_it_was(minbert, old, tmp_path, run):
    ended = minbert("evaluate", run, "--output", tmp_path / "found.json")
    assert ended.status == 0, ended.err
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    then = json.loads(Path(run, "metrics.json").read_text(encoding="utf-8"))
    expected = {key: value for key, value in then.items() if key.startswith("eval_")}
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-4)  # there are more metrics now


@pytest.mark.slow
def test_an_old_run_is_reported(minbert, own_old):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    ended = minbert("report", "run", "--compare", "whole", "--output-dir", "compared")
    assert ended.status == 0, ended.err
    page = Path("compared", "report.md").read_text(encoding="utf-8")
    scores = json.loads(Path("run", "metrics.json").read_text(encoding="utf-8"))
    for task, metric in (("sst", "accuracy"), ("same", "f1"), ("alike", "pearson")):
        assert f"| {task}, {metric} | 12 | {scores[f'eval_{task}_{metric}']:.3f} |" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "expected"),
    [("run", "run"), ("adapter", "adapter")],
)
def test_an_old_run_goes_on_to_the_weights_of_version_0_1(minbert, own_old, run, expected):
    ended = minbert("train", f"{run}/recipe.yaml", "resume_from_checkpoint=true")
    assert ended.status == 0, ended.err
    assert f"Resuming from {run}/checkpoint-4" in ended.err
    assert_answers(run, expected, within=1e-3)


@pytest.mark.slow
def test_an_old_run_becomes_longer_by_the_new_schedule(minbert, own_old):
    ended = minbert("train", "run/recipe.yaml", "resume_from_checkpoint=true", "num_train_epochs=3")
    assert ended.status == 0, ended.err
    entries = [json.loads(line) for line in Path("run", "log.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = {entry["step"]: entry["learning_rate"] for entry in entries if "learning_rate" in entry}
    assert {step: rates[step] for step in range(5, 13)} == pytest.approx(
        {n: 0.01 * (13 - n) / 12 for n in range(5, 13)}
    )


@pytest.mark.slow
def test_an_old_run_is_what_another_begins_with(minbert, own_old):
    words = ["model_name_or_path=run", "output_dir=further", "learning_rate=0", "num_train_epochs=1"]
    ended = minbert("train", "run/recipe.yaml", *words)
    assert ended.status == 0, ended.err
    weights, before = (load_file(f"{folder}/model.safetensors") for folder in ("further", "run"))
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)


# ---- The Space

SPACE = """
import json, sys
sys.modules["hf_minbert"] = None
from importlib.util import find_spec
from minbert_page.demo import answer
if find_spec("gradio"):
    from app import model, tokenizer
else:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    model = AutoModelForSequenceClassification.from_pretrained("model", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=True)
first, second = sys.argv[1:]
said = {}
for name, texts in {"sst": [first], "same": [first, second], "alike": [first, second]}.items():
    found = answer(model, tokenizer, name, texts)
    said[name] = found.probabilities or found.score
print(json.dumps(said))
"""


@pytest.mark.slow
def test_an_old_space_runs_and_answers_as_the_model(old, monkeypatch):
    first, second = EXPECTED["first"][0], EXPECTED["second"][0]
    predictor = Predictor.from_pretrained("whole", device="cpu")
    monkeypatch.chdir("space")
    found = json.loads(run_alone(SPACE, first, second, path=".").splitlines()[-1])
    for task, said in found.items():
        (expected,) = predictor(task, *([text] for text in ([first] if task == "sst" else [first, second])))
        expected = [*expected["probabilities"].values()] if "probabilities" in expected else expected["prediction"]
        assert said == pytest.approx(expected, abs=1e-5)
