"""The process of a worker. It carries out one run after another, as stdin names them. See `hf_minbert.run.workers`."""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import DivergedError, MinBertError
from ..settings.dotted import as_value
from ..settings.recipe import read_recipe
from ..settings.words import check_words
from .stages import forget_accelerator
from .train import train

Report = Callable[[dict[str, Any]], None]
EVERY = 1.0  # seconds between two reports of progress


def serve() -> None:
    """Carries out the runs that stdin names, one line of JSON each, and ends this process when stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then lets go of this process
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=[orders], daemon=True).start()
    log = logging.getLogger("hf_minbert")
    log.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("minbert: %(message)s"))
    log.addHandler(handler)
    gc.collect()
    gc.freeze()  # the libraries' objects, which each training would search for garbage
    while True:
        order = orders.get()
        environment = dict(os.environ)
        outcome = _carry_out(order, lambda reply: print(json.dumps(reply), file=replies))
        os.environ.clear()  # what a run sets there, as the precision, is no other's
        os.environ.update(environment)
        print(json.dumps(outcome), file=replies)


def _read(orders: queue.Queue[dict[str, Any]]) -> None:
    """Takes the orders. Ends this process in the middle of a run too: the next study would start a second one."""
    said = b""
    while read := os.read(0, 65536):  # not sys.stdin, whose lock a thread may not hold while Python ends
        *lines, said = (said + read).split(b"\n")
        for line in lines:
            orders.put(json.loads(line))
    os._exit(1)


def _carry_out(order: dict[str, Any], report: Report) -> dict[str, Any]:
    """Carries out one run, with its messages in its log. Returns the fields of `hf_minbert.run.workers.Outcome`."""
    progress = _Progress(report)
    with open(order["log"], "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    error = ""
    try:
        values = read_recipe(order["recipe"])
        check_words(values)
        forget_accelerator()
        train({**values, "resume_from_checkpoint" if order["resume"] else "overwrite": as_value(True)}, [progress])
    except DivergedError as found:  # metrics.json says whether its model is worth something
        print(f"minbert: error: {found}", file=sys.stderr)
    except MinBertError as found:
        error = " ".join(str(found).split())
        print(f"minbert: error: {error}", file=sys.stderr)
    except BaseException as found:  # one run that breaks is to end no other
        traceback.print_exc()
        error = f"{type(found).__name__}: {' '.join(str(found).split())}"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"error": error, "first_step": progress.first_step}


class _Progress(TrainerCallback):
    """Reports how far a run is."""

    def __init__(self, report: Report):
        self.report, self.first_step, self.last = report, None, (0, 0.0)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.first_step is None:
            self.first_step = time.monotonic()  # one clock for all processes
            self.last = (state.global_step, self.first_step)

    def on_step_end(self, args, state, control, **kwargs):
        step, then = self.last
        now = time.monotonic()
        if now - then >= EVERY and state.global_step > step:
            seconds = (now - then) / (state.global_step - step)
            self.report({"step": state.global_step, "steps": state.max_steps, "seconds": seconds})
            self.last = (state.global_step, now)
