"""Builds sections and pictures. An error in one does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import MinBertError
from ..evaluation.analysis import is_ordered
from ..settings.tasks import Task
from .document import Block, Picture, Section, Trouble

logger = logging.getLogger(__name__)


class Builder:
    """Collects the sections of a report.

    Args:
        ordered: further tasks whose labels are steps of a scale.
        examples: the number of rows shown in full text for each class and kind of error.
        seed: the seed of the bootstrap.
    """

    def __init__(self, ordered: Sequence[str] = (), examples: int = 3, seed: int = 0):
        self.ordered, self.examples, self.seed = ordered, examples, seed
        self.sections: list[Section] = []
        self.failures: list[str] = []

    def is_ordered(self, task: Task) -> bool:
        return is_ordered(task) or task.name in self.ordered

    def section(self, key: str, title: str, make: Callable[[], Sequence[Block]], level: int = 2) -> None:
        """Adds a section with the blocks that `make` returns, or with the reason why it failed."""
        blocks: list[Block]
        try:
            blocks = list(make())
        except MinBertError as error:  # such as data that is not there
            blocks = [Trouble(f"This part is missing: {error}")]
        except Exception as error:  # a mistake of ours, or a library's: the rest of the report is worth having
            blocks = [Trouble(self._failed(f"The section {title!r} ({key})", error))]
        while any(section.key == key for section in self.sections):  # a task may be called `scores`
            key += "-2"
        self.sections.append(Section(key, title, blocks, level))

    def picture(self, name: str, alt: str, draw: Callable[..., bytes], *arguments: Any, **options: Any) -> Block:
        """Returns the picture, or the reason why it failed."""
        try:
            return Picture(name, alt, draw(*arguments, **options))
        except Exception as error:  # see `section`
            return Trouble(self._failed(f"The picture {name!r}", error))

    def _failed(self, what: str, error: Exception) -> str:
        said = f"{what} could not be made: {type(error).__name__}: {' '.join(str(error).split())}"
        logger.debug("%s", said, exc_info=error)
        self.failures.append(said)
        return said
