"""Every key of a recipe with its traits, from the places where they are declared."""

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
    """The traits of a key; fixed on resume is one that only a newer transformers has."""
    return TRAITS.get(name, Traits())


def names(*, among: Any = TRAITS, **traits: Any) -> tuple[str, ...]:
    """The keys of which these traits are true: `names(scope="machine", resume="free")`; a tuple means any of it."""
    return tuple(
        name
        for name in among
        if all(
            getattr(traits_of(name), trait) in (value if isinstance(value, tuple) else (value,))
            for trait, value in traits.items()
        )
    )
