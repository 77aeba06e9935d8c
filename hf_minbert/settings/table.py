"""All keys of a recipe with their traits, collected from their declarations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .keys import Traits
from .run import RunSettings
from .stock import REFUSED, STOCK
from .training import TrainingKeys

OURS = {f.name: f for cls in (RunSettings, TrainingKeys) for f in fields(cls) if f.name not in REFUSED}
TRAITS: dict[str, Traits] = {
    **dict.fromkeys(REFUSED, Traits()),
    **STOCK,
    **{name: f.metadata["traits"] for name, f in OURS.items()},
}


def traits_of(name: str) -> Traits:
    """Returns the traits of a key. A key of a newer transformers is fixed on resume."""
    return TRAITS.get(name, Traits())


def names(*, among: Any = TRAITS, **traits: Any) -> tuple[str, ...]:
    """Returns the keys with these traits: `names(scope="machine", resume="free")`. A tuple means any of its values."""
    return tuple(
        name
        for name in among
        if all(
            getattr(traits_of(name), trait) in (value if isinstance(value, tuple) else (value,))
            for trait, value in traits.items()
        )
    )
