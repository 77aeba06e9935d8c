"""`minbert train`"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ..settings.recipe import read_recipe, recipes_folder
from ..settings.table import OURS
from ..settings.words import check_words
from .heavy import importing
from .recipe import Overrides, Recipe

logger = logging.getLogger(__name__)

EPILOG = (
    f"Keys of a recipe: {', '.join(OURS)}; and the fields of transformers' TrainingArguments under their own names. "
    f"Each is explained in {recipes_folder() / 'README.md'}, and the recipes of the package are listed there."
)


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="How many of the recipe's teachers are trained at a time. They share the GPUs."),
    ] = 1,
) -> None:
    """Train and evaluate a model from a recipe. On several GPUs, run: accelerate launch scripts/train.py RECIPE ..."""
    values = read_recipe(recipe, overrides or ())
    check_words(values)
    logger.info("Importing torch and transformers.")
    with importing():
        from ..run.train import train as carry_out
        from ..training.timeline import Timeline
        from .table import print_metrics

    metrics = carry_out(values, jobs=jobs, timeline=Timeline.of_process())
    if metrics:
        baselines = {
            f"{task}_{name}": score
            for task, of in metrics.get("baselines", {}).items()
            for name, score in of.get("scores", {}).items()
        }
        scores = {key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_")}
        print_metrics(scores, baselines)
        typer.echo(f"Model, predictions and metrics are in {values['output_dir'].text}.")
