"""README and the pages of docs: their code runs, their facts are those of the results, and the site builds."""

from __future__ import annotations

import re
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from documentation import CHECKPOINT, MARKS, NOTEBOOKS, PAGES, ROOT, InProcess, Reader, blocks_of, cells_of

import hf_minbert
from hf_minbert.model.heads import HEADS
from hf_minbert.model.kinds import KINDS
from hf_minbert.model.losses import LOSSES
from hf_minbert.run import workers
from hf_minbert.settings import plugins
from hf_minbert.settings.metrics import KIND_METRICS
from hf_minbert.settings.recipe import find_recipe, read_recipe, split_recipe
from hf_minbert.settings.tasks import get_tasks
from hf_minbert.settings.words import check_words
from hf_minbert.training.args import MultiTaskTrainingArguments

RUNNABLE = ("bash", "python", "yaml", "csv", "text")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def reader(minbert, tiny_bert, course_dir, finished_run, tmp_path, monkeypatch) -> Iterator[Reader]:
    """In a folder with a finished `runs/quickstart`."""
    shutil.copytree(finished_run, tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "Worker", InProcess)
    variables = {"MINILM": str(tiny_bert), "CS224N_DATA": str(course_dir)}
    # A folder with the same tasks takes a tenth of the time of the package's sample, and two seeds less than three.
    places = {f"{key}sample": f"{key}{course_dir}" for key in ("data_dir=", "{data_dir: ", "--data-dir ")}
    places |= {"seeds: 3": "seeds: 2"}
    yield Reader(minbert, {CHECKPOINT: str(tiny_bert), **places}, variables)
    # The plugins of docs/extending.md are no part of the package.
    for registry in (HEADS, *LOSSES.values(), *KIND_METRICS.values()):
        for name in registry.keys() - registry.own:
            del registry[name], sys.modules[registry.modules.pop(name)]
    plugins._digests.clear()


# ---- Code


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=name_of)
def test_the_code_of_a_page_runs(page, reader):
    blocks = [*(cells_of(page) if page in NOTEBOOKS else blocks_of(read(page)))]
    if page in NOTEBOOKS:
        reader.places = {CHECKPOINT: reader.places[CHECKPOINT]}  # their data are the package's sample
    for block in blocks:
        if block.runs:
            reader.do(block)
    for block in blocks:
        if block.file.endswith(".yaml") and block.file not in reader.used:
            check_recipe(block.file)


def check_recipe(path: str) -> None:
    """That lines of a recipe are accepted, on top of the course's baseline."""
    given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    whole = {**yaml.safe_load(find_recipe("cs224n/baseline").read_text(encoding="utf-8")), **given}
    Path(path).write_text(yaml.safe_dump(whole), encoding="utf-8")
    values = read_recipe(path)
    check_words(values)
    if not values.get("stages"):
        settings, _ = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
        get_tasks(settings.tasks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_runs_or_says_why_not(page):
    for block in blocks_of(read(page)):
        where = f"{name_of(page)}, line {block.line}"
        assert block.language in RUNNABLE, where
        assert block.runs or block.language in ("bash", "python"), where
        assert not block.runs or not re.match(r"# (Needs|Installs) ", block.text), where
        if block.language in ("yaml", "csv"):
            assert block.file, f"{where}: name the file in the line before the block, as in `pairs.csv`:"


def test_contributing_lists_why_a_block_may_not_run():
    said = re.findall(r"`(# .*?)`", read(ROOT / "CONTRIBUTING.md"))
    assert said == [*MARKS]


def test_blocks_are_found_with_their_files_and_marks():
    text = "`a/b.csv`:\n\n```csv\nx\n```\n\nText.\n\n```bash\n# Needs a GPU.\nls\n```\n```{toctree}\npage\n```\n"
    table, command = blocks_of(text)
    assert (table.language, table.file, table.text, table.runs) == ("csv", "a/b.csv", "x\n", True)
    assert (command.language, command.file, command.runs) == ("bash", "", False)


# ---- Facts


def test_readme_fits_a_first_visit():
    text = read(ROOT / "README.md")
    assert len(text.splitlines()) <= 220 and len(text.split()) <= 1800


def test_the_numbers_of_readme_are_those_of_the_results():
    section = re.search(r"^## Why hf_minbert\n(.*?)^## ", read(ROOT / "README.md"), re.DOTALL | re.MULTILINE)[1]
    facts = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert len(facts) == 3
    for fact in facts:
        results = read(ROOT / re.search(r"\]\((recipes/results/[\w./]+)#", fact)[1])
        numbers = re.findall(r"\*\*([\d.,]+)\*\*", fact)
        assert numbers and re.search(r"`(python scripts/|minbert )", fact)
        assert {*numbers} <= {*re.findall(r"[\d.,]*\d", results)}


def test_each_kind_of_task_is_on_its_page():
    table = read(ROOT / "docs" / "data.md").split("## Kinds of tasks\n\n| `kind`")[1].split("###")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(KINDS)


def test_the_losses_of_each_kind_are_on_their_page_the_default_first():
    table = read(ROOT / "docs" / "heads.md").split("| kind | `loss` |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines()]
    assert {kind: losses for kind, *losses in rows} == {
        kind: [name for name in losses if name in losses.own] for kind, losses in LOSSES.items()
    }


def test_the_glossary_has_each_term_once_and_in_order():
    terms = re.findall(r"^\| (\w.*?) \|", read(ROOT / "docs" / "glossary.md"), re.MULTILINE)[1:]
    assert len(terms) > 30
    assert terms == sorted(set(terms), key=str.casefold)


def test_changelog_and_citation_have_the_version():
    version = hf_minbert.__version__
    newest = re.search(r"^## (.*)$", read(ROOT / "CHANGELOG.md"), re.MULTILINE)[1]
    assert newest.removesuffix(" (unreleased)") == version
    assert yaml.safe_load(read(ROOT / "CITATION.cff"))["version"] == version


def test_the_hooks_before_a_commit_have_the_linter_of_the_tests():
    pinned = re.search(r"^ruff==.*$", read(ROOT / "scripts" / "constraints.txt"), re.MULTILINE)[0]
    (repository,) = yaml.safe_load(read(ROOT / ".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    assert {need for hook in repository["hooks"] for need in hook["additional_dependencies"]} == {pinned}


# ---- The site


def test_every_page_is_on_the_site_and_the_command_is_the_same_everywhere():
    index = read(ROOT / "docs" / "index.md")
    for page in PAGES:
        relative = Path(page.name) if page.parent == ROOT / "docs" else Path("..", page.name)
        name = re.escape(relative.with_suffix("").as_posix())
        assert page.name == "index.md" or re.search(rf"^(.* <)?{name}>?$", index, re.MULTILINE), page
    for place in ("README.md", "CONTRIBUTING.md", ".github/workflows/docs.yml", "docs/conf.py"):
        assert "python -m sphinx -W -c docs . build/site" in read(ROOT / place), place


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path, capfd):
    for library in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(library, reason=f"{library} is not installed (pip install '.[docs]')")
    from sphinx.cmd.build import main  # in this process, which has imported what autodoc imports

    status = main(["-W", "-q", "-c", str(ROOT / "docs"), str(ROOT), str(tmp_path)])
    assert status == 0, capfd.readouterr().err
    page = read(tmp_path / "docs" / "api.html")
    documented = {name for name in hf_minbert.__all__ if f'id="hf_minbert.{name}"' in page}
    # autodoc leaves out what can have no docstring; the page names these itself.
    assert {
        name for name in {*hf_minbert.__all__} - documented if f"`{name}`" not in read(ROOT / "docs/api.md")
    } == set()
    assert len(documented) > 10
