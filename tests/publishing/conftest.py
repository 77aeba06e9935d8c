"""Fixtures for publishing: processes of their own that talk to a Hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Hub, serve

ROOT = Path(__file__).parents[2]
#: Runs each line of its input, JSON of a program's text, and answers with JSON of what the program calls `result`.
LOOP = """
import json, os, sys
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    names = {"__name__": "__main__"}
    try:
        exec(json.loads(line), names)
        said = [names.get("result"), None]
    except Exception as error:
        said = [None, f"{type(error).__name__}: {error}"]
    print(json.dumps(said), file=answers, flush=True)
os._exit(0)  # to clear up all that is imported takes longer than some of the tests
"""
#: Makes this package as good as not installed, also where an environment has it.
WITHOUT_PACKAGE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_minbert":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
#: Runs the command line; `result` is exit status, stdout and stderr.
COMMAND = """
import contextlib, io, logging, os, time
os.environ["HF_TOKEN"] = {token!r}
from hf_minbert.cli import main
time.sleep = lambda seconds: None  # between the library's attempts
out, err = io.StringIO(), io.StringIO()
logging.getLogger("hf_minbert").handlers.clear()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
        main({words!r})
    except SystemExit as exit:
        status = exit.code
result = [status, out.getvalue(), err.getvalue()]
"""


class Process:
    """A Python that runs one program after the other, and whose `huggingface_hub` knows the test's Hub only."""

    def __init__(self, hub: Hub, folder: Path, package: bool):
        self.folder = folder
        environment = {**os.environ, **hub.environment(folder / "home"), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        if package:
            environment["PYTHONPATH"] = str(ROOT)
        start = LOOP if package else WITHOUT_PACKAGE + LOOP
        self.log = (folder / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start], env=environment, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def run(self, program: str) -> Any:
        """What the program calls `result`. Raises `AssertionError` with the program's error."""
        result, error = self.attempt(program)
        assert error is None, error
        return result

    def attempt(self, program: str) -> tuple[Any, str | None]:
        """The result and the error, of which one is `None`."""
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "stderr.txt").read_text()
        return tuple(json.loads(answer))

    def minbert(self, *words: object, token: str = TOKEN) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command."""
        return tuple(self.run(COMMAND.format(words=[str(word) for word in words], token=token)))

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=300)
        self.process.stdout.close()
        self.log.close()


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    """A Hub without repositories and three tokens: of `me`, of `you`, and one of `me` that may only read."""
    users = {TOKEN: "me", "hf_you": "you", "hf_reader": "me"}
    with serve({"models": {}}, users=users, read_only={"hf_reader"}) as hub:
        yield hub


@pytest.fixture(scope="session")
def start(hub, tmp_path_factory) -> Iterator[Callable[[bool], Process]]:
    """`start(package)`: a process, with this package or without."""
    started = []

    def make(package: bool) -> Process:
        started.append(Process(hub, tmp_path_factory.mktemp("process"), package))
        return started[-1]

    yield make
    for process in started:
        process.end()


@pytest.fixture(scope="session")
def publisher(start) -> Process:
    """Who has this package and publishes."""
    return start(True)


@pytest.fixture(scope="session")
def stranger(start) -> Process:
    """Who has torch and transformers only."""
    return start(False)
