"""Shared parts of all commands: options, alternating measurements, the table and the JSON file."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Hashable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal, TypeVar

import torch
import transformers
import typer

from hf_minbert.io import check_writable, write_atomically
from hf_minbert.pretrained.loading import load_config

WARM_UP = 3  # the first steps allocate AdamW's state and choose kernels
MAX_LENGTH = 128  # of a row that is trained on, in tokens, unless asked for
SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Whatever is wrong with an option is said before anything is measured.
def _device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"There is no device {name!r} here: {str(error).splitlines()[0]}") from error
    return name


def _json_file(path: Path | None) -> Path | None:
    if path is not None:
        check_writable(path)
    return path


def whole_numbers(option: str, text: str) -> list[int]:
    """Those of an option, which stand there with commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{option} must be whole numbers from 1, with commas. Found {text!r}.")
    return list(map(int, parts))


def bert_checkpoint(name: str | None) -> str | None:
    if name is not None:
        load_config(name)
    return name


Device = Annotated[str, typer.Option(help="A torch device.", callback=_device)]
Bf16 = Annotated[bool, typer.Option("--bf16", help="All under bf16 autocast.")]
JsonFile = Annotated[Path | None, typer.Option(help="Where to write the numbers too.", callback=_json_file)]
RandomSize = Annotated[
    Literal["base", "large", "tiny"] | None,
    typer.Option(help="Random weights of this shape instead of the checkpoint's."),
]
DataDir = Annotated[
    str, typer.Option(envvar="CS224N_DATA", help="The course's files; or `sample`, for the package's.")
]

Name = TypeVar("Name", bound=Hashable)
Seconds = Mapping[Name, list[float]]  # of every call, by name
Table = dict[str, dict[str, Any]]  # by row and column; lists are for the JSON file alone


@dataclass(frozen=True)
class Setting:
    """Where and how precisely everything of a command is computed."""

    device: str
    bf16: bool

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=self.bf16)

    def seconds_of(self, run: Callable[[], Any], clock: Callable[[], float] = perf_counter) -> float:
        """How long a call takes; on a GPU, whose calls return early, until its work is done."""
        start = clock()
        run()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return clock() - start

    def describe(self) -> dict[str, str]:
        cpu = f"CPU, {torch.get_num_threads()} threads"
        return {
            "machine": torch.cuda.get_device_name(self.device) if self.on_gpu else cpu,
            "precision": "bf16 autocast" if self.bf16 else "fp32",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


def in_turns(runs: Mapping[Name, Callable[[], float]], rounds: int, warm_up: int = 0) -> dict[Name, list[float]]:
    """What every call says that it took, in seconds. Who goes first changes from round to round."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for index in range(warm_up + rounds):
        for name in order:
            with redirect_stdout(sys.stderr):  # trainers print their logs; stdout is for the table
                took = runs[name]()
            if index >= warm_up:
                seconds[name].append(took)
        order.reverse()
    return seconds


def step_times(seconds: Seconds, first: str) -> Table:
    """Milliseconds of a call, and its time as a multiple of the one called `first`: above 1 is slower."""
    return {
        name: {
            "seconds": took, "ms": 1e3 * median(took), "fastest_ms": 1e3 * min(took), "slowest_ms": 1e3 * max(took),
            f"time_over_{first}": over(seconds, name, first),
        }
        for name, took in seconds.items()
    }  # fmt: skip


def speeds(seconds: Seconds, examples: Mapping[str, int]) -> Table:
    """Examples per second, and as a multiple of those of the first one: above 1 is faster."""
    first = next(iter(seconds))
    return {
        name: {
            "seconds": took,
            "examples_per_s": examples[name] / median(took),
            f"times_{first}": examples[name] / examples[first] / over(seconds, name, first),
        }
        for name, took in seconds.items()
    }


def over(seconds: Seconds, name: Name, first: Name) -> float:
    """The median ratio of two calls' times in the same round, which a load that comes and goes changes little."""
    return median(mine / other for mine, other in zip(seconds[name], seconds[first], strict=True))


def report(setting: Setting, heading: str, table: Table, json_file: Path | None, **facts: Any) -> None:
    """Prints the machine, the heading and the table, and writes them with `facts`."""
    machine, precision, *versions = setting.describe().values()
    typer.echo("{}; {}, sdpa; Python {}, torch {}, transformers {}".format(machine, precision, *versions))
    typer.echo(f"{heading}\n")
    cells = [(name, value) for row in table.values() for name, value in row.items()]
    columns = dict.fromkeys(name for name, value in cells if value is not None and not isinstance(value, list))
    lines = [["", *(name.replace("_", " ") for name in columns)]]
    lines += [[name, *(_cell(row.get(column)) for column in columns)] for name, row in table.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for place, (name, *cells) in enumerate(lines):
        numbers = " | ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        typer.echo(f"| {name.ljust(widths[0])} | {numbers} |")
        if place == 0:
            typer.echo("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    if json_file is not None:
        numbers = {**setting.describe(), "heading": heading, **facts, "table": table}
        write_atomically(json_file, json.dumps(numbers, indent=1, default=asdict) + "\n")


def _cell(value: Any) -> str:
    """Three digits of a number, all of a whole one; nothing for what a row does not have."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
