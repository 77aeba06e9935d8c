"""`minbert train`"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ..recipe import RunSettings, read_recipe, recipes_folder

EPILOG = (
    f"Keys of a recipe: {', '.join(f.name for f in fields(RunSettings))}; "
    "train_tasks, eval_tasks, task_batch_sizes, task_weights, mixing, mixing_temperature, task_sampling, "
    "score_bins, rows_per_epoch, redraw_rows, aggregator, aggregator_options, gradient_smoothing, "
    "gradient_reduction, conflict_detail, optim, freeze, unfreeze, learning_rates, weight_decays, "
    "layer_decay, regularizer, smart_weight, smart_epsilon, smart_step_size, "
    "smart_noise_std, smart_steps, smart_variant, smart_score_divergence, smart_norm, smart_level, smart_form, "
    "r_drop_weight, fgm_weight, fgm_epsilon, teachers, distill_weight, distill_temperature, "
    "proximal, proximal_weight, proximal_steps, proximal_momentum, "
    "proximal_evaluate, pretrained_decay, packing, cuda_graphs, compile_layers, train_metrics, "
    "early_stopping_patience, early_stopping_threshold; "
    "and the fields of transformers' TrainingArguments under their own names. Each is explained in "
    f"{recipes_folder() / 'README.md'}, and the recipes of the package are listed there."
)


def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A .yaml file of `key: value` lines, or the name of one in the package, such as quickstart.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Lines that replace the recipe's, such as learning_rate=1e-4."),
    ] = None,
) -> None:
    """Train and score a model as a recipe says. Several GPUs: accelerate launch scripts/train.py RECIPE ..."""
    values = read_recipe(recipe, overrides or ())
    from ..run import train as carry_out
    from .table import print_metrics

    metrics = carry_out(values)
    if metrics:
        print_metrics({key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_")})
        typer.echo(f"Model, predictions and metrics are in {values['output_dir'].text}.")
