"""Imports of torch and transformers, which take longer than the rest of a command's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None]:
    """Turns garbage collection off during the imports inside the block, and freezes the imported objects afterwards.

    The imports create no garbage. Without this, the collector searches the libraries' million objects repeatedly:
    during the imports, whenever the trainer collects, and twice when Python exits. That is a third of the time of the
    imports.
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
