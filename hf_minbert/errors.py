"""The package's errors for mistakes in the input. A message says what is wrong, where, and how to fix it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from .model.registry import Registry, did_you_mean, unknown_in_words

__all__ = ["DivergedError", "MinBertError", "did_you_mean", "explain", "unknown_name"]


class MinBertError(ValueError):
    """A mistake in the input: a recipe, a file, a path or an argument.

    The command line prints it as one line and ends with exit status `status`. It is a `ValueError`, so code that uses
    the package as a library can catch it as usual.
    """

    status = 2


class DivergedError(MinBertError):
    """The model's outputs are not finite."""

    status = 3


def unknown_name(what: str, found: object, choices: Iterable[str], others: Iterable[str] = ()) -> MinBertError:
    """Returns the error for an unknown name. It lists the valid names and suggests the nearest one."""
    if isinstance(choices, Registry):
        said = choices.unknown(found, others, what)
    else:
        said = unknown_in_words(what, found, [*choices, *others])
    return MinBertError(said[0].upper() + said[1:])


@contextmanager
def explain(doing: str, remedy: str) -> Generator[None]:
    """Turns a library's error inside the block into a `MinBertError` that adds the place and the remedy.

    Errors of this package pass unchanged. Use it only for code that invalid input can break, such as loading a
    checkpoint or building settings. Never use it around a training step.
    """
    try:
        yield
    except MinBertError:
        raise
    except Exception as error:  # a library may raise anything here; the cause stays attached
        said = " ".join(str(error).split())
        if not said or isinstance(error, KeyError):  # whose text is the bare key
            said = f"{type(error).__name__} {said}".strip()
        raise MinBertError(f"{doing} failed: {said.rstrip('.')}. {remedy}") from error
