"""The timeline of a job: each second counts for exactly one part."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback

_active: ContextVar[Timeline | None] = ContextVar("timeline", default=None)


class Timeline(TrainerCallback):
    """The seconds spent in each part of a job. `begin` starts the next part, and `part` interrupts the current one.

    As a trainer's callback it separates the first step from the others. Work on a GPU is asynchronous: a part ends
    when its last kernel is launched, and the part that waits for this kernel gets the time.

    Args:
        before: seconds that have passed already. They count as `imports`.
    """

    def __init__(self, before: float = 0.0):
        self.seconds = {"imports": before} if before else {}
        self.first_step_at: float | None = None
        self._since = time.perf_counter()
        self._start = self._since - before
        self._open = ["setup"]

    @classmethod
    def of_process(cls) -> Self:
        """Makes a timeline that starts with this process."""
        return cls(process_age())

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    def begin(self, name: str) -> None:
        """Ends the current part and begins another."""
        self._count()
        self._open[-1] = name

    @contextmanager
    def interrupted(self, name: str) -> Generator[None]:
        """Counts the time in this context for the part `name`. Afterwards the earlier part continues."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    @contextmanager
    def active(self) -> Generator[None]:
        """Within this context, `part` counts for this timeline."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def record(self) -> dict[str, Any]:
        """Returns the entry for `metrics.json`: seconds in total, until the first step (or `None`), and by part."""
        self._count()
        first = self.first_step_at
        return {
            "total": round(self.total, 3),
            "first_step_at": None if first is None else round(first, 3),
            "parts": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
        }

    def _count(self) -> None:
        now, name = time.perf_counter(), self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    # ---- As a callback ---------------------------------------------------------------------------------------

    def on_step_begin(self, args, state, control, **kwargs):
        if self.first_step_at is None:
            self.begin("first_step")
            self.first_step_at = self.total

    def on_step_end(self, args, state, control, **kwargs):
        if self._open[-1] == "first_step":
            self.begin("steps")


@contextmanager
def part(name: str) -> Generator[None]:
    """Counts the time in this context for this part of the job, if there is a timeline. It is also a decorator."""
    timeline = _active.get()
    if timeline is None:
        yield
        return
    with timeline.interrupted(name):
        yield


def process_age() -> float:
    """Returns the seconds since the system started this process."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux, where psutil's answer may be off by a second
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    import psutil

    return max(time.time() - psutil.Process().create_time(), 0.0)
