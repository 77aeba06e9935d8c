"""What a task is: its columns, its labels, its head, its metric. Adding one is one `Task(...)` in `TASKS`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from .errors import MinBertError, unknown_name

Kind = Literal["classes", "binary", "score"]
PairEncoding = Literal["single", "cross"]

#: The kinds of label that exist, and the metrics each is scored with. The first one is the task's
#: score in `eval_overall` unless the task names another.
KIND_METRICS: dict[str, tuple[str, ...]] = {
    "classes": ("accuracy", "macro_f1"),
    "binary": ("accuracy", "f1"),
    "score": ("pearson", "spearman"),
}


@dataclass(frozen=True)
class Task:
    """One sentence task.

    Args:
        name: a lower-case word; it names the head in the model and the metrics (`eval_<name>_accuracy`).
        kind: `classes` (one of `labels`, one logit each), `binary` (one of two `labels`, a single logit
            of the second) or `score` (a number inside `range`, a single output).
        text_columns: the one or two columns that hold the text.
        label_column: the column that holds the label in the task's files. Once loaded it is called `label`.
        labels: label names in the order of their ids. Empty for a score.
        range: lowest and highest score, both included. `None` unless `kind` is `score`.
        head: a name from `hf_minbert.heads.HEADS`.
        pair_encoding: `single` for one text; `cross` for two texts joined in one input with segment ids.
        metric: the task's score in `eval_overall`; the first of `KIND_METRICS[kind]` unless given.
        files: split to file name in `data_dir`. Stays out of a saved model: a model knows no paths.
    """

    name: str
    kind: Kind
    text_columns: tuple[str, ...]
    label_column: str
    labels: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    head: str = "linear"
    pair_encoding: PairEncoding = "single"
    metric: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        where = f"Task {self.name!r}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise MinBertError(f"{where}: `name` must be lower-case letters, digits and '_', starting with a letter.")
        if self.kind not in KIND_METRICS:
            raise MinBertError(f"{where}: {unknown_name('kind', self.kind, KIND_METRICS)}")
        for name in ("text_columns", "labels", "range"):  # JSON and YAML have lists only
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if len(self.text_columns) not in (1, 2):
            raise MinBertError(f"{where}: `text_columns` must name one or two columns. Found {self.text_columns!r}.")
        wanted = "single" if len(self.text_columns) == 1 else "cross"
        if self.pair_encoding != wanted:
            raise MinBertError(
                f"{where}: `pair_encoding` must be {wanted!r} with {len(self.text_columns)} text column(s). "
                f"Found {self.pair_encoding!r}."
            )
        if not self.metric:
            object.__setattr__(self, "metric", KIND_METRICS[self.kind][0])
        if self.metric not in KIND_METRICS[self.kind]:
            raise MinBertError(f"{where}: {unknown_name('metric', self.metric, KIND_METRICS[self.kind])}")
        self._check_labels(where)

    def _check_labels(self, where: str) -> None:
        if self.kind == "score":
            if self.labels or self.range is None or len(self.range) != 2 or not self.range[0] < self.range[1]:
                raise MinBertError(
                    f"{where}: a score needs `range` as (lowest, highest) and no `labels`. "
                    f"Found range={self.range!r}, labels={self.labels!r}."
                )
            return
        enough = len(self.labels) == 2 if self.kind == "binary" else len(self.labels) >= 2
        if not enough or len(set(self.labels)) != len(self.labels) or self.range is not None:
            count = "exactly two" if self.kind == "binary" else "two or more"
            raise MinBertError(
                f"{where}: kind {self.kind!r} needs {count} different `labels` and no `range`. "
                f"Found labels={self.labels!r}, range={self.range!r}."
            )

    @property
    def is_pair(self) -> bool:
        return len(self.text_columns) == 2

    @property
    def num_outputs(self) -> int:
        """How many numbers the head gives per example."""
        return len(self.labels) if self.kind == "classes" else 1

    def to_config(self) -> dict[str, Any]:
        """The task as it stands in a model's `config.json`: everything but where its data lay."""
        saved = asdict(self)
        del saved["files"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in saved.items()}

    @classmethod
    def from_config(cls, saved: dict[str, Any]) -> Task:
        """The inverse of `to_config`. Raises `MinBertError` on a key that no task has."""
        known = {f.name for f in fields(cls)}
        for key in saved:
            if key not in known:
                raise MinBertError(f"Task {saved.get('name')!r}: {unknown_name('key', key, known)}")
        return cls(**saved)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="sst",
            kind="classes",
            text_columns=("sentence",),
            label_column="sentiment",
            labels=("very negative", "negative", "neutral", "positive", "very positive"),
            files={"train": "ids-sst-train.csv", "dev": "ids-sst-dev.csv", "test": "ids-sst-test-student.csv"},
        ),
        Task(
            name="para",
            kind="binary",
            text_columns=("sentence1", "sentence2"),
            label_column="is_duplicate",
            labels=("not duplicate", "duplicate"),
            pair_encoding="cross",
            files={"train": "quora-train.csv", "dev": "quora-dev.csv", "test": "quora-test-student.csv"},
        ),
        Task(
            name="sts",
            kind="score",
            text_columns=("sentence1", "sentence2"),
            label_column="similarity",
            range=(0.0, 5.0),
            pair_encoding="cross",
            files={"train": "sts-train.csv", "dev": "sts-dev.csv", "test": "sts-test-student.csv"},
        ),
        Task(
            name="cfimdb",
            kind="classes",
            text_columns=("sentence",),
            label_column="sentiment",
            labels=("negative", "positive"),
            files={
                "train": "ids-cfimdb-train.csv",
                "dev": "ids-cfimdb-dev.csv",
                "test": "ids-cfimdb-test-student.csv",
            },
        ),
    )
}


def get_tasks(names: Iterable[str]) -> list[Task]:
    """The tasks of these names, in this order.

    Raises:
        MinBertError: a name is unknown or stands twice, or there is none.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise MinBertError(f"`tasks` is empty. Name at least one of: {', '.join(TASKS)}.")
    for name in names:
        if name not in TASKS:
            raise unknown_name("task", name, TASKS)
        if names.count(name) > 1:
            raise MinBertError(f"`tasks` names {name!r} twice. Name each task once.")
    return [TASKS[name] for name in names]
