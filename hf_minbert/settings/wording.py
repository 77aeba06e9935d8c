"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, one: str = "", more: str = "") -> str:
    """`1 row`, `1,234 rows`; with the singular and plural of a verb, `1 row is`."""
    said, verb = (noun, one) if count == 1 else (f"{noun}s", more)
    return f"{count:,} {said} {verb}".rstrip()


def in_words(count: int) -> str:
    """A small number as a word, `one`; a larger one in digits."""
    return ("no", "one", "two", "three")[count] if count < 4 else f"{count:,}"
