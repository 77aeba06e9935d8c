"""`report_to`: a service that is unknown, or whose library is missing, is refused by the words of the recipe."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
from transformers.integrations import integration_utils

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert.settings import services as module
from hf_minbert.settings.services import NEEDS, check_services, services


@pytest.fixture
def installed(monkeypatch):
    """`installed(*modules)`: from now on there are these modules alone, and the folders `folder.*` of no module."""

    def only(*modules: str) -> None:
        def find_spec(name: str) -> ModuleSpec | None:
            if f"folder.{name}" in modules:
                return ModuleSpec(name, None)
            if "." in name and name.split(".")[0] not in {found.split(".")[0] for found in modules}:
                raise ModuleNotFoundError(name)
            return ModuleSpec(name, None, origin=f"{name}.py") if name in modules else None

        services()  # which looks for transformers, once
        monkeypatch.setattr(module, "find_spec", find_spec)

    return only


def test_the_services_are_those_of_transformers():
    assert services() == tuple(integration_utils.INTEGRATION_TO_CALLBACK)
    assert set(services()) > set(NEEDS)


@pytest.mark.parametrize("name", [*integration_utils.INTEGRATION_TO_CALLBACK])
def test_each_service_is_refused_without_its_library_and_taken_with_it(installed, name):
    needed = NEEDS.get(name, {name: name})
    installed()
    for missing in needed:
        installed(*(needed.keys() - {missing}))
        with pytest.raises(MinBertError, match=f"`report_to: {name}` needs the library {needed[missing]}, which is"):
            check_services([name])
    installed(*needed)
    check_services(name)


@pytest.mark.parametrize("nothing", [None, "none", "all", []])
def test_nothing_named_needs_nothing(installed, nothing):
    installed()
    check_services(nothing)


def test_tensorboard_comes_with_an_extra_and_tensorboardx_does_as_well(installed):
    installed()
    with pytest.raises(MinBertError, match=r"Run `pip install 'hf_minbert\[tensorboard\]'`, or leave it out\.$"):
        check_services("tensorboard")
    installed("tensorboardX")
    check_services("tensorboard")


def test_a_folder_of_logs_is_no_library(installed):
    installed("folder.wandb")
    with pytest.raises(MinBertError, match="Run `pip install wandb`"):
        check_services(["wandb"])


def test_arguments_made_in_python_are_checked_too(installed, tmp_path):
    installed()
    with pytest.raises(MinBertError, match="`report_to: mlflow` needs the library mlflow"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, report_to=["mlflow"])


def test_words_are_checked_before_torch_and_transformers_are_imported():
    code = """
import sys
from hf_minbert.settings import services
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.settings.words import check_words
services.services()
services.find_spec = lambda name: None
try:
    check_words(read_recipe("quickstart", ["report_to=[tensorboard]"]))
except services.MinBertError as error:
    print(error)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said, imported = done.stdout.splitlines()
    assert said.startswith("`report_to: tensorboard` needs the library tensorboard"), done.stderr
    assert imported == "[]"


def test_a_run_logs_to_tensorboard(minbert, tmp_path, tiny_bert, course_dir):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    words = [f"model_name_or_path={tiny_bert}", f"data_dir={course_dir}", f"output_dir={run}", "max_steps=2"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("report_to: tensorboard\nlogging_steps: 1\nuse_cpu: true\n")
    assert minbert("train", recipe, *words).status == 0
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    written = EventAccumulator(str(events)).Reload()
    assert [scalar.step for scalar in written.Scalars("train/loss_sst")] == [1, 2]
