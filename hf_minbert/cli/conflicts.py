"""`minbert conflicts`"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from ..settings.dotted import as_value
from ..settings.recipe import read_recipe
from ..settings.wording import counted
from ..settings.words import check_words
from .recipe import Overrides, Recipe


class Detail(StrEnum):
    none = "none"
    layers = "layers"
    tensors = "tensors"


#: `surgery_turn` below this is called small: the two gradients are 0.9 degrees apart.
HARDLY = 0.015


def conflicts(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="How many of the recipe's first steps to measure.")] = 100,
    detail: Annotated[
        Detail,
        typer.Option(
            help="layers: per layer too; tensors: also count the parameter tensors in which two tasks' gradients "
            "have a negative dot product."
        ),
    ] = Detail.none,
    output: Annotated[
        Path | None, typer.Option(help="Write the numbers to this JSON file.", show_default=False)
    ] = None,
) -> None:
    """Measure how often the gradients of a recipe's tasks conflict, and so whether gradient surgery can help.

    Trains as the recipe says, on the sum of the losses. The trained model is not saved.
    """
    values = {"output_dir": as_value("conflicts"), **read_recipe(recipe, overrides or ())}  # nothing is written there
    check_words(values)
    from ..io import check_writable, write_json
    from ..run.conflicts import measure_conflicts

    if output is not None:
        check_writable(output)
    found = measure_conflicts(values, steps, detail.value)
    if output is not None:
        write_json(output, found)
    _print_tables(found)
    _print_detail(found)
    typer.echo(verdict(found))


def _tasks(found: Mapping[str, float]) -> list[str]:
    return [name.removeprefix("removed_") for name in found if name.startswith("removed_")]


def _pairs(found: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in combinations(_tasks(found), 2) if f"conflict_{a}_{b}" in found]


def _print_tables(found: Mapping[str, float]) -> None:
    tasks = _tasks(found)
    pairs = _pairs(found)
    width = max(len("pair"), *(len(f"{a}, {b}") for a, b in pairs))
    typer.echo(f"{'pair':<{width}}  in conflict  mean cosine")
    for a, b in pairs:
        share, cosine = found[f"conflict_{a}_{b}"], found[f"cosine_{a}_{b}"]
        typer.echo(f"{f'{a}, {b}':<{width}}  {share:>11.1%}  {cosine:>11.4f}")
    typer.echo(f"\n{'task':<{width}}  length / mean  PCGrad would change")
    for task in tasks:
        typer.echo(f"{task:<{width}}  {found[f'norm_{task}']:>13.3f}  {found[f'removed_{task}']:>19.1%}")
    typer.echo()


def _print_detail(found: Mapping[str, float]) -> None:
    """Prints, for each pair, the share of steps in conflict and the mean cosine by layer, and how many tensors
    conflict.
    """
    pairs = _pairs(found)
    layers = list(dict.fromkeys(name.split("/")[1] for name in found if "/" in name))
    if layers:
        width, columns = max(map(len, ["layer", *layers])), {pair: max(15, len(", ".join(pair))) for pair in pairs}
        heads = (f"{', '.join(pair):>{columns[pair]}}" for pair in pairs)
        typer.echo("  ".join([f"{'layer':<{width}}", *heads]) + "  (in conflict, mean cosine)")
        for layer in layers:
            cells = (f"{_cell(found, f'{a}_{b}/{layer}'):>{columns[a, b]}}" for a, b in pairs)
            typer.echo("  ".join([f"{layer:<{width}}", *cells]))
        typer.echo()
    if "tensor_conflicts" in found:
        width = max(len("each way"), *(len(", ".join(pair)) for pair in pairs))
        typer.echo(f"{'each way':<{width}}  tensors in conflict a step, of {found['shared_tensors']:g}")
        for a, b in pairs:
            typer.echo(f"{f'{a}, {b}':<{width}}  {found[f'tensor_conflicts_{a}_{b}']:.1f}")
        most = 2 * len(pairs) * found["shared_tensors"]
        typer.echo(f"{'both ways, all pairs':<{width}}  {found['tensor_conflicts']:.1f} of {most:,.0f}\n")


def _cell(found: Mapping[str, float], name: str) -> str:
    """Empty if no step had both gradients."""
    if f"conflict_{name}" not in found:
        return ""
    return f"{found[f'conflict_{name}']:.1%} {found[f'cosine_{name}']:>7.4f}"


def verdict(found: Mapping[str, float]) -> str:
    """Returns one sentence that says whether surgery can help, from the result of `measure_conflicts`."""
    shares = [share for name, share in found.items() if name.startswith("conflict_") and "/" not in name]
    steps = counted(int(found["steps"]), "step")
    if not any(shares):
        return f"Surgery has nothing to remove: no two tasks were in conflict in {steps}."
    turn = found["surgery_turn"]
    something, off = ("hardly anything", f"only {turn:.2%}") if turn < HARDLY else ("something", f"{turn:.1%}")
    return (
        f"Surgery has {something} to remove: on average over {steps}, {sum(shares):.2f} of {len(shares)} pairs were "
        f"in conflict, and PCGrad's gradient would be {off} off the direction of the sum."
    )
