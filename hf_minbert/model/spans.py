"""Words and their tags: the boundaries of entities, and of the words in a text.

This file is uploaded to the Hub with a model. It may import only published libraries.
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
    """An entity: its type, its first word, and the word after its last one."""

    type: str
    start: int
    end: int


def mark_entities(labels: Sequence[str]) -> bool:
    """Whether tags with these names mark entities (B-PER, I-PER, O; or with E-, S-, L-, U-).

    Otherwise each word is separate.
    """
    marked = [name for name in labels if name != OUTSIDE]
    return bool(marked) and all(re.fullmatch(f"[I{BEGINS}{ENDS}]-.+", name) for name in marked)


def spans(tags: Sequence[str]) -> list[Span]:
    """Returns the entities of a sentence, from the tags of its words.

    An invalid tag is read as conlleval reads it (Tjong Kim Sang and Buchholz 2000): an I- after O, or after another
    type, begins an entity.
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
    """Returns the tag of a word that the model does not see: O, or the first label if there is no O."""
    return list(labels).index(OUTSIDE) if OUTSIDE in labels else 0


def with_entities(labels: Sequence[str], sentence: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Adds `entities` to the `tokens` and `tags` of a sentence, if the labels mark entities.

    Each entity has a `type` and a `text`. `start` is the position of its first word, and `end` that of the word after
    it.
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
    """Returns the start and end of each word in a text that is not split into words."""
    return [found.span() for found in WORD.finditer(text)]


def joined(words: Sequence[str]) -> str:
    """Joins words to one text with a space between them. `split` restores the words."""
    return " ".join(word.translate(WITHIN) for word in words)


def split(text: str) -> list[str]:
    """Returns the words of a `joined` text. An empty text has none."""
    return [word.translate(BACK) for word in text.split(" ")] if text else []


def as_read(text: str) -> str:
    """Returns a `joined` text as it is tokenized and shown.

    It has the same length, and the spaces within words are restored.
    """
    return text.translate(BACK)
