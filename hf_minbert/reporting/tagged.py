"""The report's sections on a task with tags: entities by type, tags by word, the sentences with the most errors."""

from __future__ import annotations

import numpy as np

from ..evaluation import analysis
from ..model.spans import Span, as_read, mark_entities, spans, split
from ..settings.metrics import by_words, tag_names
from ..settings.wording import counted
from . import plots
from .builder import Builder
from .document import Example, Examples, Table, Text
from .runs import Answers
from .words import listed, number

WORDS = ("never predicted", "never occurs", "neither occurs nor is predicted")


def opening(answers: Answers) -> list:
    task = answers.task
    values, labels = by_words(answers.values, answers.labels)
    right, missing = int((values == labels).sum()), int((values < 0).sum())
    names = listed(task.labels) if len(task.labels) <= plots.MOST_NAMED else f"{len(task.labels)} tags"
    unread = f" {counted(missing, 'word', 'was', 'were')} not read, which counts as wrong." if missing else ""
    return [
        Text(
            f"One of {names} for each word, on {counted(len(labels), 'word')} of "
            f"{counted(len(answers.ids), 'dev sentence')}: {right:,} right, {len(labels) - right:,} wrong.{unread}"
        )
    ]


def entities(answers: Answers) -> list:
    """Returns precision, recall and F1 of each type."""
    rows = [
        [of.name, *(word if x is None else number(x) for x, word in zip((of.precision, of.recall, of.f1), WORDS,
                                                                       strict=True)),
         f"{of.support:,}", f"{of.predicted:,}"]
        for of in analysis.by_type(answers.task, answers.values, answers.labels)
    ]  # fmt: skip
    return [
        Text("An entity is right where its words and its type are. An I- behind O or another type begins one."),
        Table(["type", "precision", "recall", "F1", "entities", "predicted"], rows),
    ]


def errors(build: Builder, answers: Answers) -> list:
    """Returns the sentences with the most wrong words."""
    wrong = np.array([(ours != theirs).sum() for ours, theirs in zip(answers.values, answers.labels, strict=True)])
    worst = [int(row) for row in np.argsort(-wrong, kind="stable")[: 2 * build.examples] if wrong[row]]
    if not worst:
        return [Text("Every tag is right.")]
    return [
        Examples(
            f"The most wrong words, of {counted(int((wrong > 0).sum()), 'sentence')} with some",
            [Example(_shown(answers, row), remark(answers, row)) for row in worst],
        )
    ]


def changes(build: Builder, answers: Answers, theirs: Answers, name: str) -> list:
    """Returns how many sentences another run tags better or worse, and those that change most."""
    ours, others = (analysis.right_words(of.values, answers.labels) for of in (answers, theirs))
    gain, task = others - ours, answers.task.name
    blocks: list = [
        Text(
            f"{task}: {counted(int((gain > 0).sum()), 'sentence', 'has', 'have')} more right tags, "
            f"{int((gain < 0).sum()):,} fewer; {int(gain.sum()):+,} in all."
        )
    ]
    for title, order in (("better", np.argsort(-gain, kind="stable")), ("worse", np.argsort(gain, kind="stable"))):
        rows = [
            int(row) for row in order[: 2 * build.examples] if (gain[row] > 0) == (title == "better") and gain[row]
        ]
        if rows:
            shown = [Example(_shown(answers, row), remark(answers, row, theirs)) for row in rows]
            blocks.append(Examples(f"{task}: {title} in {name}", shown))
    return blocks


def _shown(answers: Answers, row: int) -> tuple[str, ...]:
    return tuple(map(as_read, answers.texts[row]))


def remark(answers: Answers, row: int, other: Answers | None = None) -> str:
    """Returns the tags and the predictions of a sentence; the predictions of two models if `other` is given."""
    ids = {"label": answers.labels[row], "predicted" if other is None else "before": answers.values[row]}
    if other is not None:
        ids["now"] = other.values[row]
    tags = {who: tag_names(answers.task, of) for who, of in ids.items()}
    # Where all have the same entities, or there are none, the tags themselves tell them apart.
    by_word = not mark_entities(answers.task.labels) or len({tuple(spans(of)) for of in tags.values()}) == 1
    words = split(answers.texts[row][0])
    said = [f"{who}: {(_tagged if by_word else _marked)(words, of)}" for who, of in tags.items()]
    return "; ".join([*said, f"id {answers.ids[row]}"])


def _tagged(words: list[str], tags: list[str]) -> str:
    return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def _marked(words: list[str], tags: list[str]) -> str:
    return ", ".join(_named(words, span) for span in spans(tags)) or "no entity"


def _named(words: list[str], span: Span) -> str:
    return f"{span.type} “{' '.join(words[span.start : span.end])}”"
