"""How metrics look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

import typer


def print_metrics(metrics: Mapping[str, float]) -> None:
    """One metric a line, numbers in a column."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {value:.4f}")
