"""How metrics look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import typer


def print_metrics(metrics: Mapping[str, float], baselines: Mapping[str, float] = MappingProxyType({})) -> None:
    """One metric a line, numbers in a column; beside it what answers without a model score, where that is known."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        beside = ""
        if name in baselines:
            beside = f"  without a model {baselines[name]:.4f}{'' if value > baselines[name] else ', no better'}"
        typer.echo(f"{name:<{width}}  {value:.4f}{beside}")
