"""Declares a key of a recipe as a dataclass field, with its default, a sentence and its traits."""

from __future__ import annotations

from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
#: Stands for no value of its own in a run that only measures.
KEPT = object()


@dataclass(frozen=True)
class Traits:
    """The properties of a key, besides its type and default.

    Attributes:
        resume: what a resumed run may change. `fixed`: nothing. `free`: a new value affects the remaining steps.
            `after`: as `free`, and it is accepted even if no steps remain. `length`: the run may become longer.
            `contents`: the contents of the named file or folder are compared, not its name.
        scope: `run`: part of the run's definition; `seed`: differs between runs of one recipe; `start`: belongs to one
            call of the command; `machine`: depends on the machine or the user; `secret`: private, and never written.
        objectives: the values of `objective` for which it has an effect.
        per_process: whether it counts rows of one process.
        travels: whether the saved model's config has it.
        by_task: whether it names tasks: a list of them, or a mapping from them.
        records: whether it changes only what is logged, kept or uploaded, and neither the model nor its scores.
        handed_on: whether a teacher that the recipe trains gets its value. Keys with `resume: contents` or `scope:
            machine` are always handed on.
        off: its value in a run that only measures: nothing is evaluated, written or stopped early.
    """

    resume: Literal["fixed", "free", "after", "length", "contents"] = "fixed"
    scope: Literal["run", "seed", "start", "machine", "secret"] = "run"
    objectives: Literal["any", "tasks", "mlm"] = "any"
    per_process: bool = False
    travels: bool = False
    by_task: bool = False
    records: bool = False
    handed_on: bool = False
    off: Any = KEPT

    @property
    def of_teachers(self) -> bool:
        """Whether teachers that a recipe trains get the recipe's value."""
        return self.handed_on or self.resume == "contents" or self.scope == "machine"


def key(default: Any, sentence: str, **traits: Any) -> Any:
    """Returns a dataclass field for a key.

    Args:
        default: the default; `MISSING` for a required key.
        sentence: a description, for the table of keys, the command line and the class's documentation.
        traits: as in `Traits`.
    """
    made = {"default_factory": lambda: copy(default)} if isinstance(default, list | dict) else {"default": default}
    return field(**made, metadata={"help": sentence, "traits": Traits(**traits)})


def documented(cls: type[Settings]) -> type[Settings]:
    """Adds the fields and their sentences to the docstring of a dataclass."""
    lines = [f"    {f.name}: {f.metadata['help']}" for f in fields(cls) if "traits" in f.metadata]
    cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or ""), "", "Args:", *lines])
    return cls


def default_of(declared: Field) -> Any:
    """Returns the default of a field; `MISSING` if it has none."""
    return declared.default if declared.default_factory is MISSING else declared.default_factory()
