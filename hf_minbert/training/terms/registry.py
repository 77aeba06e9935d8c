"""The terms that training arguments ask for, and the regularizers by their names in recipes.

To add a regularizer: a class, a line in `REGULARIZERS`, and for each of its options a training argument
`<name>_<option>`. The recipe's `regularizer: none` adds nothing.
"""

from __future__ import annotations

from ...errors import unknown_name
from ...model.losses import options_of
from ..base_args import BaseArguments
from .base import Term
from .distillation import Distillation
from .fgm import FGM
from .proximal import ProximalPoint
from .r_drop import RDrop
from .smart import Smart

REGULARIZERS: dict[str, type[Term]] = {term.name: term for term in (Smart, RDrop, FGM)}


def regularizer_of(args: BaseArguments) -> Term | None:
    """The regularizer that the training arguments name, with its options. Raises `MinBertError` if one is wrong."""
    if args.regularizer == "none":
        return None
    if not isinstance(args.regularizer, str) or args.regularizer not in REGULARIZERS:
        raise unknown_name("regularizer", args.regularizer, ("none", *REGULARIZERS))
    build = REGULARIZERS[args.regularizer]
    return build(**{option: getattr(args, f"{args.regularizer}_{option}") for option in options_of(build)})


def terms_of(args: BaseArguments) -> list[Term]:
    """All terms, in the order in which they are nested. Raises `MinBertError` if an option of one is wrong."""
    made = (regularizer_of(args), Distillation.of(args), ProximalPoint.of(args))
    return [term for term in made if term is not None]
