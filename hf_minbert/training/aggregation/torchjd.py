"""Aggregators of the optional library torchjd (https://torchjd.org), with our interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ...errors import MinBertError, unknown_name
from .base import Aggregator, Tasks, check_options


def usable_classes() -> dict[str, Any]:
    """Returns the classes of `torchjd.aggregation` that `TorchJD` supports, by name.

    Raises:
        ModuleNotFoundError: torchjd is not installed.
    """
    from torchjd import Stateful, aggregation

    base = aggregation.GramianWeightedAggregator
    classes = {name: getattr(aggregation, name) for name in aggregation.__all__}
    return {
        name: found
        for name, found in classes.items()
        if issubclass(found, base) and found is not base and not issubclass(found, Stateful)
    }


class TorchJD(Aggregator):
    """An aggregator of the library torchjd that uses the Gram matrix: `torchjd.UPGrad`, `torchjd.MGDA`, ...

    The library computes on the CPU, so each step waits for the GPU once. It draws random numbers from torch's global
    generator, which gets the state of `generator` for this time.

    Args:
        name: the class in `torchjd.aggregation`.
        options: the options of the class. A list becomes a tensor (`pref_vector: [1, 1, 1]`). By default, UPGrad and
            DualProj weight each task with one over the number of tasks. This is a mean; PCGrad and the sum add.

    Raises:
        MinBertError: torchjd or another required library is not installed; there is no such class; the class needs
            more than the Gram matrix; or it has state, which torchjd cannot save.
    """

    def __init__(self, name: str, **options: Any):
        try:
            usable = usable_classes()
        except ModuleNotFoundError as error:
            raise MinBertError(
                f"Aggregator 'torchjd.{name}' needs the library torchjd. Run: pip install 'hf_minbert[torchjd]'"
            ) from error
        if name not in usable:
            raise unknown_name("aggregator", f"torchjd.{name}", [f"torchjd.{each}" for each in usable])
        check_options(f"torchjd.{name}", usable[name], options)
        tensors = {k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in options.items()}
        self.weighting = usable[name](**tensors).gramian_weighting

    def altered(self, gram: Tensor, generator: Generator | None, tasks: Tasks) -> Tensor:
        here = gram.cpu()
        if not here.isfinite().all():  # of which some take no step and others raise
            return torch.full_like(gram, torch.nan)
        if generator is None:
            return torch.diag(self.weighting(here)).to(gram.device)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator.get_state())  # and not torch.manual_seed, which reseeds the GPU as well
            weights = self.weighting(here)
            generator.set_state(torch.get_rng_state())
        return torch.diag(weights).to(gram.device)
