"""What an installed package holds, recipes by name, and that recipes/README.md is up to date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import transformers

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert import recipe as recipe_module
from hf_minbert.recipe import RunSettings, find_recipe, packaged_recipes, recipes_folder
from hf_minbert.tasks import TASKS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def keys():
    """scripts/recipe_keys.py as a module."""
    spec = importlib.util.spec_from_file_location("recipe_keys", ROOT / "scripts" / "recipe_keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder that becomes a wheel."""
    pytest.importorskip("setuptools", reason="building needs setuptools")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder / "hf_minbert"


# ---- Installed


def test_an_installed_package_holds_every_module_the_sample_and_the_recipes(built):
    def files(folder: Path) -> set[Path]:
        return {
            path.relative_to(folder)
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    ours = files(ROOT / "hf_minbert") | {Path("recipes") / path for path in files(ROOT / "recipes")}
    assert files(built) == ours
    assert {Path("py.typed"), Path("recipes/cs224n/baseline.yaml"), Path("data/samples/README.md")} <= ours
    shipped = {
        Path("data/samples") / TASKS[task].files[split]
        for task in ("sst", "para", "sts")
        for split in ("train", "dev")
    }
    assert shipped <= ours


def test_an_installed_package_finds_the_recipes_inside_it(built, monkeypatch):
    monkeypatch.setattr(recipe_module, "__file__", str(built / "recipe.py"))
    assert recipes_folder() == built / "recipes"
    assert find_recipe("cs224n/baseline") == built / "recipes" / "cs224n" / "baseline.yaml"


# ---- By name


def test_a_clone_finds_its_recipes_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "cs224n/baseline"):
        assert find_recipe(name) == ROOT / "recipes" / f"{name}.yaml"
    assert find_recipe(Path("cs224n") / "baseline") == ROOT / "recipes" / "cs224n" / "baseline.yaml"


def test_a_file_comes_before_a_recipe_of_its_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert find_recipe("quickstart") == packaged_recipes()["quickstart"]
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("seed: 1\n")
    assert find_recipe("quickstart") == Path("quickstart")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("cs224n/baselin", "cs224n/baseline"), ("quickstart.yaml", "quickstart"), ("zzz", "quickstart")],
)
def test_a_recipe_that_is_not_there_is_refused_with_one_that_is(tmp_path, monkeypatch, wrong, near):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MinBertError, match=f"{wrong}: there is no such file.*such as {near}\\."):
        find_recipe(wrong)


# ---- recipes/README.md


def ours_only(text: str) -> str:
    return text[: text.index("## The trainer's keys")]


def test_the_list_of_keys_is_up_to_date(keys):
    there, now = keys.README.read_text(encoding="utf-8"), keys.render()
    if f"transformers {'.'.join(transformers.__version__.split('.')[:2])}," not in there:
        there, now = ours_only(there), ours_only(now)  # another version of transformers has other keys
    assert there == now, "Run: python scripts/recipe_keys.py"


def test_the_list_of_keys_has_each_key_once(keys):
    lines = keys.README.read_text(encoding="utf-8").split("## A task of your own")
    rest = lines[1][lines[1].index("## The trainer's keys") :]
    listed = [line.split("`")[1] for line in (lines[0] + rest).splitlines() if line.startswith("| `")]
    assert len(listed) == len(set(listed))
    taken = {f.name for f in fields(MultiTaskTrainingArguments) if f.init} | {f.name for f in fields(RunSettings)}
    assert taken <= set(listed) or transformers.__version__.split(".")[:2] != ["5", "24"]


def test_every_key_of_ours_has_help(keys):
    stock = {f.name for f in fields(transformers.TrainingArguments)}
    own = {f.name for f in fields(MultiTaskTrainingArguments)} - stock
    assert set(keys.docs_of(MultiTaskTrainingArguments)) == own | {"optim"}  # a stock one, which takes more here
    assert set(keys.docs_of(RunSettings)) == {f.name for f in fields(RunSettings)}
