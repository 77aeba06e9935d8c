"""The one error that a person is meant to read: it says what, where and what to do."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches


class MinBertError(ValueError):
    """A mistake in what the person gave us: a recipe, a file, a path, an argument.

    The command line prints it as one line and ends with exit status 2. It is a `ValueError`, so that
    code which uses the package as a library needs no special case.
    """


def unknown_name(what: str, found: object, choices: Iterable[str]) -> MinBertError:
    """The error for a name that is not in a registry, with the nearest right name where there is one."""
    choices = sorted(choices)
    listed = ", ".join(choices) or "(none)"
    return MinBertError(f"Unknown {what} {found!r}.{did_you_mean(found, choices)} Choose from: {listed}.")


def did_you_mean(found: object, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with the nearest choice, or nothing where none is near."""
    near = get_close_matches(str(found), list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


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
