"""Carries out runs in parallel, in processes that stay alive.

A run is a folder with `run.yaml`, its recipe. Its process writes `run.log`. `metrics.json` means that it has finished,
and `failed.json`, with the reason, that it failed. A run with neither was interrupted and continues from its
checkpoint.

A process imports the libraries once, which takes longer than training a short run. On one GPU, several processes share
it through NVIDIA's MPS if that is installed. The CPU's threads are divided among the processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from ..errors import MinBertError
from ..evaluation.metrics import has_diverged
from ..io import write_json
from ..training.checkpoints import newest_complete_checkpoint
from .stages import FOLDER

logger = logging.getLogger(__name__)

RECIPE, LOG, FAILED, FINISHED = "run.yaml", "run.log", "failed.json", "metrics.json"
POLL = 0.1  # seconds between two looks at the workers


@dataclass(frozen=True)
class Progress:
    """The progress of a run: its last step, the number of steps, and the seconds per step."""

    step: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        error: the reason if it failed; otherwise empty.
        first_step: the time of its first step, on the monotonic clock; `None` if it had none.
        lost: its process ended during the run, for example by a signal. The run has not failed, and may be continued.
    """

    error: str
    first_step: float | None = None
    lost: bool = False


class Worker:
    """A process that carries out the runs that it is given, and ends when it is released."""

    def __init__(self, environment: dict[str, str]):
        code = "from hf_minbert.run.worker import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._said = b""
        self.runs = 0
        self.progress: Progress | None = None

    def start(self, folder: Path, resume: bool) -> None:
        assert self._process.stdin is not None
        self.runs, self.progress = self.runs + 1, None
        order = {"recipe": str(folder / RECIPE), "log": str(folder / LOG), "resume": resume}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def poll(self) -> Outcome | None:
        """Returns how the last started run ended; `None` while it is active."""
        status = self._process.poll()  # first: what an ended process said is all there then
        for reply in self._replies():
            if "error" in reply:
                return Outcome(**reply)
            self.progress = Progress(**reply)
        if status is None:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return Outcome(f"Its process {how}.", lost=True)

    def _replies(self) -> list[dict]:
        assert self._process.stdout is not None
        while True:
            try:
                said = os.read(self._process.stdout.fileno(), 65536)
            except BlockingIOError:
                break
            if not said:
                break
            self._said += said
        *lines, self._said = self._said.split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, even during a run."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def carry_out(
    next_run: Callable[[Collection[Path]], Path | None],
    ended: Callable[[Path, Outcome], None],
    parallel: int,
    watch: Callable[[dict[Path, Progress]], None] = lambda progress: None,
) -> None:
    """Carries out runs, `parallel` at a time, until there are no more.

    Args:
        next_run: returns the folder of the next run, or `None` if there is none now, from the folders of active or
            lost runs.
        ended: called as soon as a run has finished, failed or lost its process.
        watch: called repeatedly with the progress of the runs. An error that it raises ends everything.
    """
    workers: dict[int, Worker] = {}
    running: dict[int, Path] = {}
    lost: list[Path] = []  # not begun again by this command: what ended them might again
    with ExitStack() as stack:
        environments = stack.enter_context(environments_of(parallel))
        # After that, so that it comes before: MPS does not quit while a process uses it.
        stack.callback(lambda: [worker.close() for worker in workers.values()])
        while True:
            for slot, folder in [*running.items()]:
                outcome = workers[slot].poll()
                if outcome is not None:
                    del running[slot]
                    if not workers[slot].is_alive:
                        workers.pop(slot).close()
                    if outcome.lost:
                        lost.append(folder)
                    elif outcome.error or not (folder / FINISHED).is_file():
                        write_json(folder / FAILED, {"error": outcome.error or "It wrote no metrics.json."})
                    ended(folder, outcome)
            while len(running) < parallel and (folder := next_run([*running.values(), *lost])) is not None:
                slot = min({*range(parallel)} - running.keys())
                if slot not in workers:
                    workers[slot] = Worker(environments[slot])
                running[slot] = folder
                workers[slot].start(folder, resume=can_go_on(folder))
            if not running:
                return
            watch({folder: p for slot, folder in running.items() if (p := workers[slot].progress) is not None})
            time.sleep(POLL)


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Raises `MinBertError` if another process uses the folder, because two would train in the same folders."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")  # of the system, which lets go of it when the process ends, however it ends
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise MinBertError(f"Another process works in {folder}. Wait until it has ended, or end it.") from None
    try:
        yield
    finally:
        lock.release()


def can_go_on(folder: Path) -> bool:
    """Whether an interrupted run has saved a checkpoint to continue from."""
    return newest_complete_checkpoint(folder) is not None or (folder / FOLDER).is_dir()


def failure(folder: Path) -> str | None:
    """Returns the reason why the run in a folder failed; `None` if it did not. A diverged model counts as failed."""
    failed, finished = ((folder / name).is_file() for name in (FAILED, FINISHED))
    if failed:
        return json.loads((folder / FAILED).read_text(encoding="utf-8"))["error"]
    if finished and has_diverged(json.loads((folder / FINISHED).read_text(encoding="utf-8"))):
        return "Training diverged."  # of a study that was killed before it could note that
    return None


# ---- What a worker's process is given ----------------------------------------------------------------------------


@contextmanager
def environments_of(parallel: int) -> Generator[list[dict[str, str]]]:
    """Returns the environment variables of each worker: its GPU, its share of the CPU's threads, and MPS."""
    gpus = _gpus()
    threads = str(max(1, torch.get_num_threads() // parallel))  # of those that one process would take
    shared = {} if parallel == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
    with _mps() if gpus and parallel > len(gpus) else nullcontext({}) as of_mps:
        if of_mps:  # a daemon numbers the GPUs that it sees anew, from 0, and its clients go by those numbers
            gpus = [str(number) for number in range(len(gpus))]
        own = [{"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {} for slot in range(parallel)]
        yield [{**shared, **of_mps, **each} for each in own]


def _gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES calls them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given is not None else [str(gpu) for gpu in range(torch.cuda.device_count())]
    return [gpu for gpu in gpus if gpu.strip()]


@contextmanager
def _mps() -> Generator[dict[str, str]]:
    """Starts NVIDIA's Multi-Process Service, with which kernels of several processes run on one GPU at once.

    A running service is used. If it is not installed or does not start, processes take turns.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ or os.path.exists("/tmp/nvidia-mps/control"):
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        started = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True, check=False)
        if started.returncode != 0:
            logger.info("NVIDIA's MPS did not start, so runs on one GPU take turns: %s", started.stderr.strip())
            yield {}
            return
        try:
            yield variables
        finally:
            subprocess.run([control], input="quit\n", env=environment, capture_output=True, text=True, check=False)
