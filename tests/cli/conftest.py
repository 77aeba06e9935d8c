"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_recipe_file(tmp_path, tiny_bert, course_dir) -> Callable[..., Path]:
    """`write_recipe_file(*lines)`: a recipe of one step on the tiny model and data, output in `tmp_path / "run"`."""

    def write(*lines: str) -> Path:
        base = {
            "model_name_or_path": tiny_bert,
            "data_dir": course_dir,
            "output_dir": tmp_path / "run",
            "max_steps": 1,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text("\n".join([*(f"{key}: {value}" for key, value in base.items()), *lines, ""]), encoding="utf-8")
        return path

    return write
