"""`minbert search`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..settings.dotted import as_value
from ..settings.recipe import read_recipe
from ..settings.words import check_words
from .recipe import Overrides, Recipe

if TYPE_CHECKING:
    from ..run.search_methods import Space, Trial


class Method(StrEnum):
    grid = "grid"
    random = "random"
    coordinate = "coordinate"
    optuna = "optuna"


def search(
    recipe: Recipe,
    space: Annotated[
        str,
        typer.Option(
            # no word in brackets: typer takes it for markup, and leaves it out
            help="What to try, as a file or YAML: '{learning_rate: [1e-5, 1e-4], hidden_dropout_prob: [0.1, 0.3]}'. "
            "A key of the recipe, also inside a task, to a list of values or to {low: 1e-6, high: 1e-4, log: true}.",
            show_default=False,
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="The folder of the search.", show_default=False)],
    overrides: Overrides = None,
    method: Annotated[
        Method,
        typer.Option(help="coordinate: one key after the other, each with the best values of the keys before it."),
    ] = Method.grid,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of trials. Default: all for grid and coordinate, 20 for the others."),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What to maximize: a key of metrics.json, such as eval_sst_accuracy.")
    ] = "eval_overall",
    parallel: Annotated[int, typer.Option(min=1, help="How many trials run at a time.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of random and optuna; training uses the recipe's seed.")] = 42,
) -> None:
    """Hyperparameter search: train a recipe with different values of some keys, and find the best.

    The same command continues an interrupted search. To run a failed trial again, delete its folder.
    """
    from ..run.search_methods import read_space, with_values

    values = {"output_dir": as_value(str(output_dir)), **read_recipe(recipe, overrides or ())}
    read = read_space(space)
    check_words(values)
    for entry, choices in read.items():
        for choice in choices if isinstance(choices, list) else (choices.low, choices.high):
            check_words(with_values(values, {entry: choice}))
    from ..run.search import search as carry_out

    found = carry_out(
        values, read, method=method.value, output_dir=output_dir, trials=trials, metric=metric, parallel=parallel,
        seed=seed,
    )  # fmt: skip
    _print_table(found, read, metric)
    typer.echo(f"\nThe best recipe: minbert train {output_dir / 'best.yaml'}")


def _print_table(trials: list[Trial], space: Space, metric: str) -> None:
    from ..run.search import cell

    rows = [["trial", metric, *space]]
    for trial in trials:
        score = "failed" if trial.score is None else f"{trial.score:.4f}"
        rows.append([str(trial.number), score, *(cell(trial.values.get(key, "")) for key in space)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
