"""The command line, `minbert`. Each verb has a module, which imports torch and transformers only when it runs.

Exit status: 0 on success, 1 for an unexpected error with a traceback, 2 for a mistake in the input, 3 for a diverged
model, and 130 after an interrupt. 2 and 3 print one line to stderr.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Annotated, NoReturn, cast

import typer

from .. import __version__
from ..errors import DivergedError, MinBertError, did_you_mean
from . import (
    affinity,
    calibrate,
    conflicts,
    demo,
    evaluate,
    export,
    merge,
    predict,
    publish,
    quickstart,
    report,
    search,
    study,
    train,
)

app = typer.Typer(
    name="minbert",
    pretty_exceptions_enable=False,
)
app.command("train", epilog=train.EPILOG)(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("calibrate")(calibrate.calibrate)
app.command("average")(merge.average)
app.command("ensemble")(merge.ensemble)
app.command("merge")(merge.merge)
app.command("demo")(demo.demo)
app.command("export")(export.export)
app.command("conflicts")(conflicts.conflicts)
app.command("search")(search.search)
app.command("study")(study.study)
app.command("affinity")(affinity.affinity)
app.command("report")(report.report)
app.command("publish")(publish.publish)
app.command("quickstart")(quickstart.quickstart)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_minbert {__version__}")
        raise typer.Exit


#: Verbs that say themselves what several processes are to them.
KNOW_PROCESSES = ("train", "search", "study", "affinity")


@app.callback()
def minbert(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """One BERT for several sentence tasks: train it from a recipe, evaluate it, predict with it."""
    processes, verb = int(os.environ.get("WORLD_SIZE", "1")), context.invoked_subcommand
    if processes > 1 and verb not in KNOW_PROCESSES:  # each would write the same files, and send them
        raise MinBertError(
            f"`minbert {verb}` is for one process, and the launcher started {processes}. Run it without a launcher."
        )


#: What typer raises for a wrong command line. Taken from a class that typer exports: newer versions carry a copy of
#: click of their own, whose exceptions are not those of the package click.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_INTERRUPTED = 130
WAIT_FOR_FIRST = 30  # seconds; processes on a busy machine are that far apart


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits. `MINBERT_TRACEBACK=1` shows the traceback of a one-line error."""
    _set_up_log()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(args=arguments or ["--help"], prog_name="minbert", standalone_mode=False)
    except _UsageError as error:
        said = _in_words(error)
        command = error.ctx.command_path if error.ctx else "minbert"
        _fail(f"{said}{'' if said.endswith(('.', '?', ')')) else '.'} See {command} --help.")
    except DivergedError as error:  # of a run all processes know it, at its end: none waits for another to speak
        if _is_first_process():
            print(f"minbert: error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except MinBertError as error:
        if os.environ.get("MINBERT_TRACEBACK") == "1":
            raise
        _fail(str(error))
    if status == _INTERRUPTED and _is_first_process():  # typer catches KeyboardInterrupt and returns this
        print("minbert: Interrupted.", file=sys.stderr)
    sys.exit(status or 0)


def _in_words(error: typer.BadParameter) -> str:
    """Returns typer's message, with the nearest choice for a misspelt one."""
    said = error.format_message().replace("Value error, ", "")
    choice = re.search(r"'([^']*)' is not one of (.*?)\.?$", said)
    if choice is None:
        return said
    near = did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2]))
    return f"{said.removesuffix('.')}.{near}"


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


#: What the command that is carried out has said of data.
_SAID: set[str] = set()


def _is_new(record: logging.LogRecord) -> bool:
    """Whether a message is printed.

    Messages about data are printed once, because tasks and runs may read the same file.
    """
    said = record.getMessage()
    is_repeated = record.name.startswith("hf_minbert.data.") and said in _SAID
    _SAID.add(said)
    return not is_repeated


def _set_up_log() -> None:
    """Prints our messages to stderr, from the first process only."""
    log = logging.getLogger("hf_minbert")
    log.setLevel(logging.INFO if _is_first_process() else logging.CRITICAL)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("minbert: %(message)s"))
        handler.addFilter(_is_new)
        log.addHandler(handler)
    _SAID.clear()


def _fail(message: str) -> NoReturn:
    said = f"minbert: error: {' '.join(message.split())}"
    if not _is_first_process():
        # A launcher stops all processes as soon as one ends, and the first is to be left the time to say what is
        # wrong. A process that is still there after the wait has an error of its own.
        time.sleep(WAIT_FOR_FIRST)
        said += f" (process {os.environ['RANK']})"
    print(said, file=sys.stderr)
    sys.exit(MinBertError.status)
