"""The arguments of verbs that read a recipe, and their shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..settings.recipe import packaged_recipes
from ..settings.stock import STOCK
from ..settings.table import OURS


def _recipes(incomplete: str) -> list[str]:
    return [name for name in packaged_recipes() if name.startswith(incomplete)]


def _keys(incomplete: str) -> list[str]:
    return [f"{key}=" for key in (*OURS, *STOCK) if key.startswith(incomplete)]


Recipe = Annotated[
    Path,
    typer.Argument(
        help="A .yaml file of `key: value` lines, or the name of one in the package, such as quickstart.",
        show_default=False, autocompletion=_recipes,
    ),
]  # fmt: skip
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Lines that replace the recipe's, such as learning_rate=1e-4.",
        autocompletion=_keys,
    ),
]  # fmt: skip
