"""The one error that a person is meant to read: it says what, where and what to do."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from .model.registry import Registry, did_you_mean, unknown_in_words

__all__ = ["DivergedError", "MinBertError", "did_you_mean", "explain", "unknown_name"]


class MinBertError(ValueError):
    """A mistake in what the person gave us: a recipe, a file, a path, an argument.

    The command line prints it as one line and ends with exit status `status`. It is a `ValueError`, so that
    code which uses the package as a library needs no special case.
    """

    status = 2


class DivergedError(MinBertError):
    """A model whose outputs are not finite, where answers were wanted."""

    status = 3


def unknown_name(what: str, found: object, choices: Iterable[str], others: Iterable[str] = ()) -> MinBertError:
    """The error for a name that is none of these or the others, with the nearest right name where there is one."""
    if isinstance(choices, Registry):
        said = choices.unknown(found, others, what)
    else:
        said = unknown_in_words(what, found, [*choices, *others])
    return MinBertError(said[0].upper() + said[1:])


@contextmanager
def explain(doing: str, remedy: str) -> Generator[None]:
    """Turns a library's error raised inside the block into a `MinBertError` that adds where and what to do.

    Our own errors pass unchanged: they already say it. Only for code that a person's input can break
    (loading a checkpoint, building settings), never around a training step.
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
