"""Registries: the names that a recipe or a config may use, and the objects behind them.

This file is uploaded to the Hub with a model. It may import only published libraries.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """A dict of names. A plugin adds its own names with `register`.

    Args:
        what: what a name stands for, such as "head". Messages use this word.
        of: the type of all values: `type[Head]` for subclasses of it, another class for instances.
        content: the initial entries.
        form: a regular expression for names.
        among: the qualifier of a registry that is one of several, such as "for kind 'score'".
        takes: for functions, the names of their arguments. Their options are keyword-only and have defaults. Empty if
            functions of any form are accepted.
    """

    #: Called before a name is refused, with the plugins that a saved model names and where it was loaded from. A
    #: package that can import plugins sets it. It returns a sentence on those that are missing.
    find_more: ClassVar[Callable[[Sequence[str], str], str]] = staticmethod(lambda plugins, model: "")

    def __init__(
        self, what: str, of: Any, content: Mapping[str, T], form: str = r"[a-z][a-z0-9_]*", among: str = "",
        takes: Sequence[str] = (),
    ):  # fmt: skip
        super().__init__(content)
        self.what, self.of, self.form, self.among, self.takes = what, of, form, among, tuple(takes)
        self.own = frozenset(content)
        self.modules: dict[str, str] = {}  # which module added a name

    def register(self, name: str, value: T) -> T:
        """Adds a name and returns the value. Registering the same value again changes nothing.

        Raises:
            ValueError: the name is used for another value or is not a word, the value has another type, or a function
                has other arguments.
        """
        where = f"`register` of a {self.what}"
        if not isinstance(name, str) or not re.fullmatch(self.form, name):
            raise ValueError(f"{where}: a name must match {self.form}. Found {name!r}.")
        is_class = get_origin(self.of) is type
        base = get_args(self.of)[0] if is_class else self.of
        if not (isinstance(value, type) and issubclass(value, base) if is_class else isinstance(value, base)):
            of = "a function" if base is Callable else f"{'a subclass' if is_class else 'an instance'} of "
            of += "" if base is Callable else f"{base.__module__}.{base.__qualname__}"
            raise ValueError(f"{where}: {name!r} must stand for {of}. Found {value!r:.100}.")
        if self.takes and not fits(value, self.takes):
            arguments = f"({', '.join(self.takes)})"
            raise ValueError(
                f"{where}: {name!r} must take the arguments {arguments}, with options as keywords after `*`. Found "
                f"{signature(value)}. docs/extending.md has an example."
            )
        if self.get(name, value) is not value:
            by = f" of the plugin {self.modules[name]}" if name in self.modules else ""
            raise ValueError(f"{where}: {name!r} is taken by {self[name]!r:.100}{by}. Choose another name.")
        if not super().__contains__(name):
            super().__setitem__(name, value)
            self.modules[name] = sys._getframe(1).f_globals["__name__"]
        return value

    def __setitem__(self, name: str, value: T) -> None:
        super().__setitem__(name, value)
        if name not in self.own:
            self.modules[name] = sys._getframe(1).f_globals["__name__"]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self.finds(name)

    def finds(self, name: object, plugins: Sequence[str] = (), model: str = "") -> bool:
        """Whether the name is known after further plugins have been imported; see `find_more`."""
        if not super().__contains__(name):
            self.find_more(plugins, model)
        return super().__contains__(name)

    def unknown(self, name: object, others: Iterable[str] = (), what: str = "") -> str:
        """Returns the message for an unknown name. `others` are valid names besides those in the registry."""
        return f"{unknown_in_words(what or self.what, name, [*self, *others], self.among)} {self.remedy()}"

    def remedy(self) -> str:
        """Returns a sentence that says how to make an unknown name available."""
        return self.find_more((), "") or "A plugin can add one (docs/extending.md)."


def fits(function: Callable[..., Any], takes: Sequence[str]) -> bool:
    """Whether a function takes these arguments, by position, and otherwise only keyword-only options with defaults."""
    try:
        bound = signature(function).bind(*takes)
    except TypeError:
        return False
    others = [p for name, p in signature(function).parameters.items() if name not in bound.arguments]
    return all(p.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in others)


def unknown_in_words(what: str, found: object, choices: Iterable[str], among: str = "") -> str:
    """Returns the message for a name that is not in `choices`, with the nearest valid name if there is one."""
    choices = sorted(choices)
    listed = ", ".join(choices) or "(none)"
    return f"unknown {what} {found!r}{among and ' '}{among}.{did_you_mean(found, choices)} Choose from: {listed}."


def did_you_mean(found: object, choices: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` with the nearest choice, or an empty string.

    The nearest choice is one that differs in case, in punctuation or in the part before its last dot: `mgda` and
    `torchjd.MGDA`. Otherwise it is the most similar one.
    """
    choices = [*choices]
    near = [name for name in choices if _bare(name) == _bare(str(found))]
    near = near or get_close_matches(str(found), choices, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _bare(name: str) -> str:
    return re.sub(r"[\W_]", "", name.rpartition(".")[2].casefold())
