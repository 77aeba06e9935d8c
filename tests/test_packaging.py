"""What an installed package holds, recipes by name, and that recipes/README.md is up to date.

Also that setup.py, the two sets of exact versions, the scripts and the workflow say the same about versions.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert.settings import recipe as recipe_module
from hf_minbert.settings.recipe import find_recipe, packaged_recipes, recipes_folder
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.tasks import TASKS
from hf_minbert.settings.training import TrainingKeys

ROOT = Path(__file__).parents[1]
SETS = {"newest": "scripts/constraints.txt", "lowest": "scripts/constraints-lowest.txt"}


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


@pytest.fixture(scope="module")
def described() -> dict:
    """What setup.py tells setuptools."""
    setuptools = pytest.importorskip("setuptools", reason="setup.py imports setuptools")
    given: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return given


@pytest.fixture(scope="module")
def requirements(described) -> list[Requirement]:
    """Everything that setup.py names, of all extras."""
    return [Requirement(line) for line in {*described["install_requires"], *described["extras_require"]["all"]}]


@pytest.fixture(scope="module")
def promised(described) -> list[str]:
    """The versions of Python in setup.py's classifiers, such as "3.11"."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in described["classifiers"]]
    return [match[1] for match in found if match]


def pins(versions: str) -> dict[str, Version]:
    """The exact versions of a set by package."""
    lines = [line for line in (ROOT / SETS[versions]).read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match[1]): Version(match[2]) for match in found}


def bash(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *words], cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


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
    monkeypatch.setattr(recipe_module, "__file__", str(built / "settings" / "recipe.py"))
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


# ---- Versions


def test_the_lowest_set_has_the_floors_of_setup(requirements):
    lowest = pins("lowest")
    floors = {
        canonicalize_name(requirement.name): Version(bound.version)
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    assert len(floors) == len({canonicalize_name(requirement.name) for requirement in requirements})
    assert {name: lowest[name] for name in floors} == floors


@pytest.mark.parametrize("versions", SETS)
def test_a_set_has_a_version_that_setup_allows_of_each_requirement(requirements, versions):
    pinned = pins(versions)
    refused = [str(one) for one in requirements if pinned[canonicalize_name(one.name)] not in one.specifier]
    assert not refused
    assert "setuptools" in pinned  # scripts/environment.sh installs it before the package


def test_the_sets_have_one_linter_and_one_type_checker_and_the_lowest_is_not_above_the_newest(requirements):
    lowest, newest = pins("lowest"), pins("newest")
    assert [lowest[tool] for tool in ("ruff", "ty")] == [newest[tool] for tool in ("ruff", "ty")]
    direct = {canonicalize_name(requirement.name) for requirement in requirements}
    assert not [name for name in direct if lowest[name] > newest[name]]


def test_the_lowest_python_is_the_same_wherever_it_is_said(described, promised):
    lowest = promised[0]
    assert promised == sorted(promised, key=Version)
    assert described["python_requires"] == f">={lowest}"
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert tools["ty"]["environment"]["python-version"] == lowest
    assert f"\nYou need Python {lowest} or newer." in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"sys.version_info < ({lowest.replace('.', ', ')})" in (ROOT / "scripts" / "environment.sh").read_text()


def test_the_table_of_versions_is_that_of_setup_and_of_both_sets(described, promised):
    lowest, newest = pins("lowest"), pins("newest")
    names = [canonicalize_name(Requirement(line).name) for line in described["install_requires"]]
    rows = [("Python", promised[0], promised[-1]), *((name, lowest[name], newest[name]) for name in names)]
    lines = ["| package | lowest tested | newest tested |", "|---|---|---|"]
    table = "\n".join([*lines, *(f"| {name} | {first} | {last} |" for name, first, last in rows)])
    page = ROOT / "docs" / "installation.md"
    assert table in page.read_text(encoding="utf-8"), f"{page} must have this table:\n{table}"


def test_an_unknown_set_of_versions_is_refused_in_a_line():
    done = bash("scripts/test.sh", MINBERT_VERSIONS="oldest")
    assert done.returncode == 1
    assert done.stderr == "test.sh: MINBERT_VERSIONS must be newest or lowest. Found 'oldest'.\n"


@pytest.mark.parametrize("versions", SETS)
def test_messages_name_the_set_of_versions(versions):
    done = bash("scripts/test.sh", MINBERT_VERSIONS=versions, PYTHON="/no/such/python")
    assert f"which the versions in {SETS[versions]} ask for" in done.stderr


def test_an_environment_of_one_set_does_not_pass_for_the_other():
    fingerprint = "source scripts/environment.sh; python=$PYTHON; fingerprint"
    found = [bash("-c", fingerprint, MINBERT_VERSIONS=versions, PYTHON=sys.executable) for versions in ("", *SETS)]
    default, newest, lowest = (re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)[0] for done in found)
    assert default == newest != lowest


# ---- The workflow


def jobs_of(workflow: dict) -> Iterator[tuple[dict[str, str], list[dict]]]:
    """Each job's values of the matrix and its steps, with those values in them."""
    (job,) = workflow["jobs"].values()
    axes = dict(job["strategy"]["matrix"])
    further = axes.pop("include")
    alone = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    assert all(one.keys() == axes.keys() and one not in alone for one in further)  # or GitHub would merge them
    for one in (*alone, *further):
        filled = yaml.safe_dump(job["steps"], width=10_000)
        for name, value in one.items():
            filled = filled.replace("${{ matrix." + name + " }}", value)
        yield one, yaml.safe_load(filled)


@pytest.fixture(scope="module")
def jobs() -> list[tuple[dict[str, str], list[dict]]]:
    return list(jobs_of(yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())))


def test_the_workflow_takes_each_python_that_setup_promises_and_each_set_on_each_system(jobs, promised):
    taken = {(one["os"], one["python"]) for one, _ in jobs if one["versions"] == "newest"}
    systems = {one["os"] for one, _ in jobs}
    assert taken == set(itertools.product(systems, promised))
    assert {one["python"] for one, _ in jobs} == set(promised)
    assert {(one["os"], one["versions"]) for one, _ in jobs} == set(itertools.product(systems, SETS))
    assert len(jobs) == len({tuple(one.values()) for one, _ in jobs})


def test_the_workflow_gives_the_script_only_options_that_it_has(jobs):
    said = (ROOT / "scripts" / "test.sh").read_text() + (ROOT / "scripts" / "environment.sh").read_text()
    calls = set()
    for _, steps in jobs:
        (step,) = [step for step in steps if "scripts/test.sh" in step.get("run", "")]
        ours = {name: value for name, value in step["env"].items() if name.startswith("MINBERT_")}
        calls.add((step["run"], *ours.items()))
    assert len(calls) > 1
    for command, *ours in calls:
        assert "${{" not in command
        options = [word for word in command.split() if word.startswith("-")]
        assert set(re.findall(r"[\w-]+", said)) >= {*options, *dict(ours)}
        # It reads its options first, and then finds no Python.
        done = bash("-c", command, **dict(ours), PYTHON="/no/such/python")
        assert done.stderr.startswith("test.sh: needs Python"), done.stderr


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
    other_default = {f.name for f in fields(TrainingKeys)} & stock
    assert set(keys.docs_of(MultiTaskTrainingArguments)) == own | other_default | {"optim"}  # takes more here
    assert set(keys.docs_of(RunSettings)) == {f.name for f in fields(RunSettings)}
