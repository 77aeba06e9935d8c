"""How a key of a recipe is declared: once, as a dataclass field with its default, a sentence, and its traits."""

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
    """What is true of a key, beside its type and default.

    Attributes:
        resume: what a run that resumes may do. `fixed`: it keeps the value. `free`: another value takes effect in the
            steps to come; `after`: also where none are to come. `length`: the run may become longer. `contents`: what
            the key names is compared, not its name.
        scope: `run`: part of what the run is; `seed`: runs of one recipe differ in it; `start`: of one start of the
            command; `machine`: of who runs it, and where; `secret`: nobody else's, and never written.
        objectives: which `objective` it has an effect on.
        per_process: whether it counts rows of one process.
        travels: whether the saved model's config keeps it.
        by_task: whether it names tasks: a list of them, or a mapping from them.
        records: whether it changes only what is logged, kept or uploaded, neither the model nor its scores.
        handed_on: whether a teacher that the recipe trains has its value too, as it has of all `contents` and of the
            `machine`.
        off: its value in a run that only measures: nothing is scored, written or stopped early.
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
        """Whether teachers that a recipe trains have the value that it says."""
        return self.handed_on or self.resume == "contents" or self.scope == "machine"


def key(default: Any, sentence: str, **traits: Any) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: as it is; `MISSING` for a key that a recipe must have.
        sentence: what it does, for the table of keys, the command line and the class's documentation.
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
    """The default of a field; `MISSING` where it has none."""
    return declared.default if declared.default_factory is MISSING else declared.default_factory()
