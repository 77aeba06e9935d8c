"""Runs a job in several processes that talk by gloo, forked from this one: libraries load once."""

import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Together:
    """How processes ended, by rank: status (negative for a signal) and what they printed."""

    status: list[int]
    said: list[str]


def run_together(
    job: Callable[[int], object], folder: Path, processes: int = 2, stop: Mapping[int, float] | None = None
) -> Together:
    """Calls `job(rank)` in each process, as a launcher would start them.

    Args:
        job: what they do.
        folder: an empty one, for what they print.
        processes: how many.
        stop: `{rank: seconds}` sends a process SIGTERM so long after the first one ended, as a launcher does to those
            that are left.
    """
    files = [folder / str(rank) for rank in range(processes)]
    port = _free_port()
    pids = [_fork(job, rank, processes, port, file) for rank, file in enumerate(files)]
    status = _wait(pids, stop or {})
    return Together(status, [file.read_text() for file in files])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _fork(job: Callable[[int], object], rank: int, processes: int, port: int, said: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        launched = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if processes > 1:
            os.environ.update({name: str(value) for name, value in {**launched, **where}.items()})
        logging.getLogger("hf_minbert").handlers.clear()  # they write to a file of the test before
        torch.set_num_threads(1)  # a child has none of OpenMP's threads, and would wait for them
        gc.freeze()  # each training collects garbage, which takes longer than it while all libraries are searched
        job(rank)
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: list[int], stop: Mapping[int, float]) -> list[int]:
    """The status of each, after at most ten minutes; what is still there then is killed."""
    ended: dict[int, int] = {}
    deadline, first_end = time.monotonic() + 600, None
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = os.waitstatus_to_exitcode(found[1])
                first_end = first_end or time.monotonic()
        for rank, seconds in stop.items():
            if rank not in ended and first_end is not None and time.monotonic() > first_end + seconds:
                os.kill(pids[rank], signal.SIGTERM)
        time.sleep(0.05)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ended[rank] = -signal.SIGKILL
    return [ended[rank] for rank in range(len(pids))]
