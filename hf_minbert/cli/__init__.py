"""The command line, `minbert`. One module per verb; each imports what is heavy when it runs.

Exit status: 0 done, 2 a mistake in what was given (one line on stderr says which), 130 interrupted, 1 anything
else, with a traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer
from click.exceptions import Abort, ClickException, NoArgsIsHelpError

from ..errors import MinBertError
from . import evaluate, predict, train

app = typer.Typer(
    name="minbert",
    help="One BERT, several sentence tasks: train it from a recipe, score it, predict with it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("train", epilog=train.EPILOG)(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits. `MINBERT_TRACEBACK=1` shows where a one-line error came from."""
    _set_up_log()
    try:
        app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except ClickException as error:
        _fail(error.format_message(), 2)
    except MinBertError as error:
        if os.environ.get("MINBERT_TRACEBACK") == "1":
            raise
        _fail(str(error), 2)
    except (KeyboardInterrupt, Abort) as error:
        _fail(f"Interrupted. {error}".strip(), 130)
    sys.exit(0)


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _set_up_log() -> None:
    """Our messages go to stderr, from the first process only."""
    log = logging.getLogger("hf_minbert")
    log.setLevel(logging.INFO if _is_first_process() else logging.CRITICAL)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("minbert: %(message)s"))
        log.addHandler(handler)


def _fail(message: str, status: int) -> NoReturn:
    if _is_first_process():
        print(f"minbert: error: {' '.join(message.split())}" if status == 2 else f"\nminbert: {message}", file=sys.stderr)
    sys.exit(status)
