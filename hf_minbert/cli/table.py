"""Prints metrics on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import typer


def print_metrics(metrics: Mapping[str, float], baselines: Mapping[str, float] = MappingProxyType({})) -> None:
    """Prints one metric per line with the numbers aligned. A known baseline is printed beside its score."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        beside = ""
        if name in baselines:
            beside = f"  baseline {baselines[name]:.4f}{'' if value > baselines[name] else ' (not better)'}"
        typer.echo(f"{name:<{width}}  {value:.4f}{beside}")
