"""Imports of torch and transformers, which take longer than all that a command does before them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None]:
    """Imports inside make no garbage worth looking for, and their objects stay until the process ends.

    The collector would search the libraries' million objects again and again while they are made, later whenever the
    trainer collects, and twice when Python ends: a third of the time of the imports.
    """
    if "torch" in sys.modules:  # by a program that calls the command: its objects may become garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
