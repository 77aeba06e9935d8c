"""The terms that training arguments ask for, and the names that recipes have for regularizers.

To add a regularizer: a class, a line in `REGULARIZERS`, and for each of its options a training argument
`<name>_<option>`. Those of a plugin's have `regularizer_options`. The recipe's `regularizer: none` adds nothing.
"""

from __future__ import annotations

from ...errors import MinBertError, explain, unknown_name
from ...model.losses import options_of
from ...model.registry import Registry
from ..base_args import BaseArguments
from .base import Term
from .distillation import Distillation
from .fgm import FGM
from .proximal import ProximalPoint
from .r_drop import RDrop
from .smart import Smart

REGULARIZERS: Registry[type[Term]] = Registry("regularizer", type[Term], {"smart": Smart, "r_drop": RDrop, "fgm": FGM})


def regularizer_of(args: BaseArguments) -> Term | None:
    """The regularizer that the training arguments name, with its options. Raises `MinBertError` if one is wrong."""
    if args.regularizer == "none":
        return None
    if not isinstance(args.regularizer, str) or args.regularizer not in REGULARIZERS:
        raise unknown_name("regularizer", args.regularizer, REGULARIZERS, ["none"])
    build, given = REGULARIZERS[args.regularizer], args.regularizer_options or {}
    known = options_of(build)
    if args.regularizer in REGULARIZERS.own:
        if given:
            keys = ", ".join(f"`{args.regularizer}_{option}`" for option in known)
            raise MinBertError(f"`regularizer_options` is for regularizers of plugins. Give instead: {keys}.")
        return build(**{option: getattr(args, f"{args.regularizer}_{option}") for option in known})
    for option in given:
        if option not in known:
            raise unknown_name(f"option of regularizer {args.regularizer!r}:", option, known)
    with explain(f"Making regularizer {args.regularizer!r}", "Check its options, `regularizer_options`."):
        return build(**given)


def terms_of(args: BaseArguments) -> list[Term]:
    """All terms, in the order in which they are nested. Raises `MinBertError` if an option of one is wrong."""
    made = (regularizer_of(args), Distillation.of(args), ProximalPoint.of(args))
    return [term for term in made if term is not None]
