"""Runs the code blocks of a page in order, in a folder of their own, on tiny models and data."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from hf_minbert.run.stages import forget_accelerator
from hf_minbert.run.train import train
from hf_minbert.run.workers import RECIPE, Outcome
from hf_minbert.settings.dotted import as_value
from hf_minbert.settings.recipe import packaged_recipes, read_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: First lines of blocks that the tests do not run; CONTRIBUTING.md has the same list.
MARKS = tuple(
    f"# {mark}."
    for mark in (
        "Installs packages", "Needs the Hub", "Needs a GPU", "Needs several GPUs", "Needs a browser", "Needs Docker",
        "Needs Sphinx",
    )
)  # fmt: skip
#: The checkpoint of the pages, for which the tests' tiny one stands.
CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"
#: Arguments that make a training of the pages a short one on a CPU.
SMALL = ["use_cpu=true", "max_length=32", "per_device_train_batch_size=2", "disable_tqdm=true"]
SHORT = [*SMALL, "max_steps=2", "eval_strategy=steps", "eval_steps=2", "save_strategy=steps", "save_steps=2"]
#: Of runs that a command carries out: a teacher's recipe does not get the command's keys.
BRIEF = {"max_length": as_value(32), "max_steps": as_value(2)}
#: Commands that take a recipe's keys: keys before those of the page, and options behind them.
SHORTER = {
    "train": (SHORT, []), "search": (SHORT, []), "study": (SHORT, []), "conflicts": (SHORT, ["--steps", "2"]),
    "affinity": ([*SMALL, "train_tasks=[sst,sts]"], ["--steps", "2", "--seeds", "1"]),
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        file: the name before it, as in "`pairs.csv`:"; empty if there is none.
        line: where it begins, from 1.
    """

    language: str
    text: str
    file: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether the tests run it."""
        return self.text.partition("\n")[0] not in MARKS


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page with code or with a file. Directives such as `{toctree}` are none."""
    lines, start, fence, before = text.splitlines(), 0, "", ""
    for number, line in enumerate(lines, 1):
        if fence and line.strip() == "```":
            if not fence.startswith("{"):
                name = re.search(r"`([\w./-]+)`:$", before)
                body = "".join(f"{one}\n" for one in lines[start : number - 1])
                yield Block(fence, body, name[1] if name else "", start)
            fence = before = ""
        elif not fence and line.startswith("```"):
            fence, start = line.removeprefix("```"), number
        elif not fence and line.strip():
            before = line.strip()


def cells_of(notebook: Path) -> Iterator[Block]:
    """The code cells of a notebook. A line `!command` is a command of the shell, as in Jupyter."""
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"], 1):
        text = "".join(cell["source"]) + "\n"
        if cell["cell_type"] == "code":
            shell = all(line.startswith("!") for line in text.splitlines() if line and not line.startswith("#"))
            file = re.match(r"%%writefile (\S+)\n", text)
            if file:
                yield Block("file", text.removeprefix(file[0]), file[1], number)
            else:
                yield Block("bash" if shell else "python", re.sub(r"^!", "", text, flags=re.MULTILINE), "", number)


def commands_of(text: str, variables: Mapping[str, str]) -> Iterator[list[str]]:
    """The words of each command of a bash block, with `variables` in their places."""
    filled = Template(text.replace("\\\n", " ")).safe_substitute(variables)
    for line in filled.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


class InProcess:
    """Stands for `hf_minbert.run.workers.Worker`: carries out a run at once, in this process."""

    is_alive, progress = True, None

    def __init__(self, environment: Mapping[str, str]):
        pass

    def start(self, folder: Path, resume: bool) -> None:
        forget_accelerator()
        train({**read_recipe(folder / RECIPE), **BRIEF, "overwrite": as_value(True)})

    def poll(self) -> Outcome:
        return Outcome("")

    def close(self) -> None:
        pass


class Reader:
    """Does what a page says, in the working directory.

    Args:
        minbert: runs the command of these words and gives how it ended.
        places: names on the page to what stands for them here.
        variables: of the shell.
    """

    def __init__(self, minbert: Callable[..., Any], places: Mapping[str, str], variables: Mapping[str, str]):
        self.minbert, self.places, self.variables = minbert, places, dict(variables)
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.used: set[str] = set()  # files that a command has named

    def do(self, block: Block) -> None:
        text = block.text
        for name, here in self.places.items():
            text = text.replace(name, here)
        if block.file:
            path = Path(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(text, f"line {block.line}", "exec"), self.names)
        elif block.language == "bash":
            for words in commands_of(text, self.variables):
                self._command(words)

    def _command(self, words: list[str]) -> None:
        program, *rest = words
        if program == "export":
            name, _, value = rest[0].partition("=")
            self.variables.setdefault(name, value)
            return
        assert program == "minbert", f"{shlex.join(words)}: say in the block's first line why it does not run."
        keys, options = SHORTER.get(rest[0], ([], []))
        if keys and rest[1] in packaged_recipes() and not any(word.startswith("model_name") for word in rest):
            keys = [f"model_name_or_path={self.variables['MINILM']}", *keys]
        ours = {word.partition("=")[0] for word in keys}  # before what the page says for these keys
        rest = [*rest[:2], *keys, *(word for word in rest[2:] if word.partition("=")[0] not in ours), *options]
        self.used |= {*rest}
        ended = self.minbert(*rest)
        assert ended.status == 0, f"{shlex.join(words)}\n{ended.err}"
