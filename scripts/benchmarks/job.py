"""Shows where the time of a whole job is spent, beside the import that every training needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from .shared import DEVICE, JsonFile, Setting, Table, in_turns, report

IMPORT = ["-c", "from transformers import Trainer, TrainingArguments"]
JOB, BESIDE = "job", "import of Trainer"


def job(
    recipe: Annotated[str, typer.Argument(help="As `minbert train` takes it.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Lines that replace the recipe's.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run, in turns.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """The time line of `minbert train`, run as a process of its own, in turns with an import of the stock Trainer.

    Medians. `until first step` is from the start of the process, and `end of process` what comes after metrics.json.
    """
    setting, timelines = Setting(DEVICE, bf16=False), []
    words = [recipe, *(overrides or [])]
    calls: dict[str, Callable[[], float]] = {BESIDE: partial(_seconds, IMPORT), JOB: lambda: _run(words, timelines)}
    seconds = in_turns(calls, rounds)
    points = [line["first_step_at"] for line in timelines]
    table: Table = {
        BESIDE: _row(seconds[BESIDE]),
        JOB: _row(seconds[JOB]),
        "until first step": _row(points),
        "first step after the import": _row(
            [own - beside for own, beside in zip(points, seconds[BESIDE], strict=True)]
        ),
    }
    for part in timelines[0]["parts"]:
        table[part.replace("_", " ")] = _row([line["parts"][part] for line in timelines])
    ends = [whole - line["total"] for whole, line in zip(seconds[JOB], timelines, strict=True)]
    table["end of process"] = _row(ends)
    report(setting, f"minbert train {' '.join(words)}; {rounds} rounds", table, json_file, rounds=rounds)


def _row(seconds: list[float]) -> dict[str, Any]:
    return {"s": median(seconds), "least": min(seconds), "most": max(seconds), "seconds": seconds}


def _run(words: Sequence[str], timelines: list[dict[str, Any]]) -> float:
    """Trains into a folder that is deleted, and adds its time line."""
    with tempfile.TemporaryDirectory() as folder:
        took = _seconds(["-m", "hf_minbert", "train", *words, f"output_dir={folder}"])
        timelines.append(json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))["timeline"])
    return took


def _seconds(arguments: Sequence[str]) -> float:
    """How long a process of Python takes."""
    start = perf_counter()
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise typer.BadParameter(f"It failed: {done.stderr.strip().splitlines()[-1]}")
    return perf_counter() - start
