"""Where the real data and weights are that some tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def folder_of(variable: str, default: Path) -> Path:
    """The folder that an environment variable names, or `default`. Skips the test if there is none."""
    given = os.environ.get(variable)
    path = Path(given or default)
    if path.is_dir():
        return path
    pytest.skip(f"${variable} must be the path of a folder. Found {given!r}." if given else f"${variable} is not set.")
