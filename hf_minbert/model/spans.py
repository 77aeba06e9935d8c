"""Words and their tags: where entities begin and end, and where the words of a text stand.

This file travels to the Hub with a model: it may import published libraries only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

OUTSIDE = "O"
BEGINS, ENDS = "BSU", "ESLU"  # prefixes of a word that begins an entity whatever stands before it, or ends one
#: What a text is made of where nobody has split it into words: letters and digits, or one other sign.
WORD = re.compile(r"\w+|[^\w\s]")
#: What separates words in a text that is split into words.
SEPARATORS = " \t\n\r"
#: A separator that is a part of a word is one of Unicode's noncharacters in a `joined` text; other spaces stay.
WITHIN = {ord(space): 0xFDD0 + place for place, space in enumerate(SEPARATORS)}
BACK = {mark: space for space, mark in WITHIN.items()}


class Span(NamedTuple):
    """An entity: its type, its first word, and the word behind its last one."""

    type: str
    start: int
    end: int


def mark_entities(labels: Sequence[str]) -> bool:
    """Whether tags of these names mark entities (B-PER, I-PER, O; or with E-, S-, L-, U-), or each word by itself."""
    marked = [name for name in labels if name != OUTSIDE]
    return bool(marked) and all(re.fullmatch(f"[I{BEGINS}{ENDS}]-.+", name) for name in marked)


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence, from the tags of its words.

    A tag that may not stand where it does is read as conlleval reads it (Tjong Kim Sang and Buchholz 2000): an I- that
    stands behind O, or behind another type, begins an entity.
    """
    found: list[Span] = []
    begun: Span | None = None
    before: str | None = None  # the type that the word before leaves open
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, type_ = tag.partition("-")
        goes_on = tag != OUTSIDE and before == type_ and prefix not in BEGINS
        if begun is not None and not goes_on:
            found.append(begun._replace(end=place))
            begun = None
        if tag != OUTSIDE and begun is None:
            begun = Span(type_, place, place)
        before = type_ if tag != OUTSIDE and prefix not in ENDS else None
    return found


def outside(labels: Sequence[str]) -> int:
    """The tag of a word that the model does not see: O, or the first one where there is no O."""
    return list(labels).index(OUTSIDE) if OUTSIDE in labels else 0


def with_entities(labels: Sequence[str], sentence: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A sentence of `tokens` and `tags` with its `entities`, where tags of these labels mark some.

    Each has its `type`, its `text`, and by `start` and `end` the places of its first word and of the word behind it.
    """
    if not mark_entities(labels):
        return sentence
    found = [
        {
            "type": one.type,
            "text": " ".join(sentence["tokens"][one.start : one.end]),
            "start": one.start,
            "end": one.end,
        }
        for one in spans(sentence["tags"])
    ]
    return {**sentence, "entities": found}


def words_of(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end that nobody has split."""
    return [found.span() for found in WORD.finditer(text)]


def joined(words: Sequence[str]) -> str:
    """Words as one text with a space between two of them, from which `split` makes the same words again."""
    return " ".join(word.translate(WITHIN) for word in words)


def split(text: str) -> list[str]:
    """The words of a `joined` text, of which an empty one has none."""
    return [word.translate(BACK) for word in text.split(" ")] if text else []


def as_read(text: str) -> str:
    """A `joined` text as it is tokenized and shown: of the same length, with the spaces that stand within words."""
    return text.translate(BACK)
