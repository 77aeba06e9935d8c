"""Aggregators by their names in recipes.

To add one, add a file with a class here and a line in `AGGREGATORS`.
"""

from __future__ import annotations

from typing import Any

from ...errors import explain, unknown_name
from ...model.registry import Registry
from .base import Aggregator, check_options
from .gradvac import GradVac
from .pcgrad import PCGrad
from .sum import Sum
from .torchjd import TorchJD, usable_classes
from .unconditional import Unconditional


def make_aggregator(name: str, **options: Any) -> Aggregator:
    """Returns the aggregator with this name: one of `AGGREGATORS`, or `torchjd.` and a class of `torchjd.aggregation`.

    Raises:
        MinBertError: there is none, it does not have these options, or a library is missing.
    """
    with explain(f"Making aggregator {name!r}", "Check its options, `aggregator_options`."):
        if name.startswith("torchjd."):
            return TorchJD(name.removeprefix("torchjd."), **options)
        if name not in AGGREGATORS:
            raise unknown_name("aggregator", name, AGGREGATORS, _of_torchjd())
        check_options(name, AGGREGATORS[name], options)
        return AGGREGATORS[name](**options)


def _of_torchjd() -> list[str]:
    """Returns the names of torchjd's aggregators. If it is not installed, returns some of them as examples."""
    try:
        return [f"torchjd.{name}" for name in usable_classes()]
    except ModuleNotFoundError:
        return ["torchjd.MGDA", "torchjd.UPGrad"]


AGGREGATORS: Registry[type[Aggregator]] = Registry(
    "aggregator",
    type[Aggregator],
    {"sum": Sum, "pcgrad": PCGrad, "gradvac": GradVac, "unconditional": Unconditional},
)
