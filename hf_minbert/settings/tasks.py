"""The definition of a task: its columns, labels, head and metric. To add one, add a `Task(...)` to `TASKS`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import inf
from pathlib import PurePath
from typing import Any, Literal

from ..errors import MinBertError, did_you_mean, unknown_name
from ..model.kinds import CALIBRATED, KINDS, THRESHOLDED, Kind, KindName
from .metrics import KIND_METRICS, higher_is_better, metrics_of
from .wording import in_words

PairEncoding = Literal["single", "cross", "bi"]

SPLITS = ("train", "dev", "test")
#: How a recipe names a file: its path, or a mapping of the fields of `DataFile`.
FileEntry = str | dict[str, Any]
#: Where a task's data lies. None of it stays with a saved model: a model knows no paths.
DATA_FIELDS = (
    "files", "dataset", "dataset_config", "dataset_revision", "splits", "columns", "sources", "unlabelled",
    "unlabelled_pairs",
)  # fmt: skip
#: Those of them that say where its own rows lie, and not what is trained on beside them.
OWN_DATA = DATA_FIELDS[:6]
#: What a task says that may have any of its labels, and no other.
OF_SETS = ("label_delimiter",)
#: What two tasks must agree in for the weights of their heads to mean the same.
HEAD_FIELDS = (
    "kind", "labels", "range", "pair_encoding", "pooling", "pooling_options", "layers", "join", "head", "head_options",
)  # fmt: skip
#: Where the logit of a new cosine head begins: its factor, and the cosine at which it is 0. A model's config records
#: both options. What `CosineHead` begins with where a config says nothing is that of models made before.
COSINE_START, COSINE_THRESHOLD = ("initial_scale", "initial_offset"), 0.75
COSINE_SCALE = 20.0
#: Options of a head that only training looks at: tasks that differ in them alone have heads of the same meaning.
OF_TRAINING = ("dropout", "dropouts", *COSINE_START)


@dataclass(frozen=True)
class DataFile:
    """A file of rows and how it is read: in a recipe its path, or a mapping of these keys.

    Args:
        path: relative to the run's `data_dir` if that is a folder, otherwise to the working directory.
        quotes: whether a cell of a .csv, .tsv or .txt file may be in double quotes. With `false`, a quote is an
            ordinary character, as in GLUE's MRPC and STS-B.
        line_breaks: accepts every cell in double quotes. Otherwise a cell of several lines is refused if its lines
            could be rows themselves.
    """

    path: str
    quotes: bool = True
    line_breaks: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """The options that differ from their defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "path" and getattr(self, f.name) != f.default
        }

    @property
    def entry(self) -> str | dict[str, Any]:
        """The file as a recipe names it."""
        return {"path": self.path, **self.options} if self.options else self.path


def data_files(value: Any, where: str = "`files`", **defaults: Any) -> list[DataFile]:
    """Returns the files in a recipe's `files`: one or a list of them, each a path or a mapping.

    Args:
        where: the beginning of an error.
        defaults: fields of `DataFile` for files that do not set them.

    Raises:
        MinBertError: there are no files, a key is unknown, or a value has a wrong type.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    entries = [{"path": item} if isinstance(item, str) else item for item in items]
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise MinBertError(
            f"{where} must be a path or a list of them. Found {value!r}. With options a path is a mapping like "
            f"{{path: a.tsv, quotes: false}}."
        )
    known = [f.name for f in fields(DataFile)]
    for entry in entries:
        for key in entry:
            if key not in known:
                raise MinBertError(f"{where}: {unknown_name('key', key, known)}")
        if not isinstance(entry.get("path"), str) or not entry["path"]:
            raise MinBertError(f"{where}: `path` must be the path of a file. Found {entry.get('path')!r}.")
        for key in entry:
            if key != "path" and not isinstance(entry[key], bool):
                raise MinBertError(f"{where}: `{key}` must be true or false. Found {entry[key]!r}.")
    return [DataFile(**{**defaults, **entry}) for entry in entries]


@dataclass(frozen=True)
class Source:
    """Training rows that a task borrows from data made for something else.

    Args:
        task: a task whose training rows are borrowed, as the recipe or the package defines it.
        files: instead of `task`: a file or a list of files, as in `files` of a task.
        dataset: instead of `task`: a folder saved by `DatasetDict.save_to_disk`, or an id on the Hub.
        dataset_config: the configuration of the dataset on the Hub.
        dataset_revision: its branch, tag or commit; the newest commit by default.
        split: the split of `dataset` that is borrowed; `train` by default.
        columns: a mapping from a text column of the borrowing task, `label` or `id` to its name in these data.
        mapping: how the labels become labels of the task; a name from `hf_minbert.data.mappings.MAPPINGS`.
        rows: the number of rows, drawn without replacement by the run's seed; all rows if there are fewer.
        fraction: instead of `rows`: the share of the rows.
        quotes: the default of `quotes` for all `files`.
    """

    task: str | None = None
    files: FileEntry | list[FileEntry] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    mapping: str = "same"
    rows: int | None = None
    fraction: float | None = None
    quotes: bool = True

    @property
    def name(self) -> str:
        """The name of the source in logs and counts."""
        return self.task or self.dataset or ", ".join(PurePath(file.path).name for file in self.data_files())

    def data_files(self) -> list[DataFile]:
        return [] if self.files is None else data_files(self.files, quotes=self.quotes)

    def check(self, where: str) -> None:
        """Raises `MinBertError`, which begins with `where`, unless the fields have their types and go together."""
        for name in ("task", "dataset", "dataset_config", "dataset_revision", "split", "mapping"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value or (value is None and name != "mapping")):
                raise MinBertError(f"{where}: `{name}` must be text. Found {value!r}.")
        if self.files is not None:
            data_files(self.files, f"{where}: `files`")
        given = [name for name in ("task", "files", "dataset") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"`{name}`" for name in given) or "none of them"
            raise MinBertError(f"{where}: give one of `task`, `files` and `dataset`. Found {found}.")
        if not isinstance(self.quotes, bool):
            raise MinBertError(f"{where}: `quotes` must be true or false. Found {self.quotes!r}.")
        owners = {
            "dataset_config": ("dataset",), "dataset_revision": ("dataset", "task"), "split": ("dataset",),
            "columns": ("dataset", "files"), "quotes": ("files",),
        }  # fmt: skip
        for name, of in owners.items():
            if getattr(self, name) not in (None, True, {}) and given[0] not in of:
                raise MinBertError(
                    f"{where}: `{name}` goes with {' or '.join(f'`{owner}`' for owner in of)}, and the source has "
                    f"`{given[0]}`."
                )
        self._check_share(where)

    def _check_share(self, where: str) -> None:
        if self.rows is not None and self.fraction is not None:
            raise MinBertError(f"{where}: give either `rows` or `fraction`, not both.")
        if self.rows is not None and (type(self.rows) is not int or self.rows < 1):
            raise MinBertError(f"{where}: `rows` must be a whole number of at least 1. Found {self.rows!r}.")
        number = type(self.fraction) in (int, float)
        if self.fraction is not None and not (number and 0 < self.fraction <= 1):
            raise MinBertError(f"{where}: `fraction` must be a number above 0 and up to 1. Found {self.fraction!r}.")


def _check_names(where: str, name: str, value: Any, keys: tuple[str, ...]) -> None:
    """Checks a mapping from `keys` to names, or for `files` to paths."""
    if not isinstance(value, Mapping):
        raise MinBertError(f"{where}: `{name}` must be a mapping like {{{keys[0]}: ...}}. Found {value!r}.")
    for key, target in value.items():
        if key not in keys:
            raise MinBertError(f"{where}, `{name}`: {unknown_name('key', key, keys)}")
        if name == "files":
            data_files(target, f"{where}: `files` of {key!r}")
        elif (name, key) == ("columns", "label") and isinstance(target, list):
            if not all(isinstance(column, str) and column for column in target):
                raise MinBertError(f"{where}: `columns` of 'label' must be names. Found {target!r}.")
        elif not isinstance(target, str) or not target:
            raise MinBertError(f"{where}: `{name}` of {key!r} must be a name. Found {target!r}.")


@dataclass(frozen=True)
class Task:
    """One sentence task.

    Args:
        name: a lower-case word; it names the head in the model and the metrics (`eval_<name>_accuracy`).
        kind: what the answer of the task is: `classes`, `binary`, `ordinal`, `labels`, `score` or `tags`.
        text_columns: the one or two columns that hold the text.
        label_column: the column that holds the label in the task's files. Once loaded it is called `label`.
        labels: the names of the labels in the order of their ids, from 0. Empty for a score.
        label_delimiter: the separator between the labels of a text cell, for `kind: labels`.
        thresholds: the probability above which a label is answered; for `kind: labels` also one for each label. For a
            binary task it is that of the second label. `tune_thresholds` fits it.
        range: the lowest and the highest score, both included, for `kind: score`.
        pair_encoding: `single` for one text. For two texts, `cross` (default) joins both in one input, and `bi`
            encodes each by itself.
        pooling: how the token vectors of a sentence become one vector; `pooler` by default. Tags have no pooling.
        pooling_options: options of the pooling.
        layers: the layers that are pooled: `last`, or `mix`, a learned mean of all layers.
        sentence_dropout: dropout on the vector of each sentence, before two vectors are joined or compared.
        join: with `bi`, how two vectors become one; `concat` by default.
        head: the kind of head.
        head_options: options of the head, such as sizes and dropouts.
        loss: the loss; by default the first one for the kind of the task.
        loss_options: options of the loss.
        metric: the metric that counts in `eval_overall`; by default the first one for the kind of the task.
        temperature: divides the logits before they become probabilities; `calibrate` fits it.
        files: a mapping from `train`, `dev` and `test` to a file or a list of files, each a path or a mapping of the
            keys of `DataFile`.
        dataset: instead of `files`: a folder saved by `DatasetDict.save_to_disk`, or an id on the Hub.
        dataset_config: the configuration of the dataset on the Hub.
        dataset_revision: its branch, tag or commit; the newest commit by default.
        splits: a mapping from a split to its name in `dataset`; by default the same name, or `validation` for `dev`.
        columns: a mapping from a text column, `label` or `id` to its name in the data. For `kind: labels`, `label` may
            be a list of columns of 0 and 1.
        sources: further training rows, borrowed from other data; mappings of the keys of `Source`. Without other
            training data, the task is trained on these alone.
        unlabelled: with `teachers`, a file or a list of files with further training rows, as in `files`. Labels in
            them are not read.
        unlabelled_pairs: with `teachers`, the number of new pairs for each training row, such as 1.0. They combine
            sentences of these rows, and have no labels.
    """

    name: str
    kind: KindName
    text_columns: tuple[str, ...]
    label_column: str = "label"
    labels: tuple[str, ...] = ()
    label_delimiter: str = "|"
    thresholds: float | list[float] = 0.5
    range: tuple[float, float] | None = None
    pair_encoding: PairEncoding | Literal[""] = ""
    pooling: str = ""
    pooling_options: dict[str, Any] = field(default_factory=dict)
    layers: Literal["last", "mix"] = "last"
    sentence_dropout: float = 0.0
    join: str = ""
    head: str = "linear"
    head_options: dict[str, Any] = field(default_factory=dict)
    loss: str = ""
    loss_options: dict[str, Any] = field(default_factory=dict)
    metric: str = ""
    temperature: float = 1.0
    files: dict[str, FileEntry | list[FileEntry]] = field(default_factory=dict)
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    splits: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    unlabelled: FileEntry | list[FileEntry] | None = None
    unlabelled_pairs: float = 0.0

    @property
    def traits(self) -> Kind:
        """The properties of the task's `kind`."""
        return KINDS[self.kind]

    @property
    def bounds(self) -> tuple[float, float]:
        """The `range` of a task whose kind is `score`."""
        assert self.range is not None
        return self.range

    def __post_init__(self):
        where = f"Task {self.name!r}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise MinBertError(f"{where}: `name` must be lower-case letters, digits and '_', starting with a letter.")
        if self.kind not in KINDS:
            raise MinBertError(f"{where}: {unknown_name('kind', self.kind, KINDS)}")
        if isinstance(self.text_columns, str):
            object.__setattr__(self, "text_columns", (self.text_columns,))
        for name in ("text_columns", "labels", "range"):  # JSON and YAML have lists only
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        self._check_types(where)
        if len(set(self.text_columns)) != len(self.text_columns) or len(self.text_columns) not in (1, 2):
            raise MinBertError(f"{where}: `text_columns` must name one or two columns. Found {self.text_columns!r}.")
        encodings = ("cross", "bi") if self.is_pair else ("single",)
        if not self.pair_encoding:
            object.__setattr__(self, "pair_encoding", encodings[0])
        if self.pair_encoding not in encodings:
            raise MinBertError(
                f"{where}: `pair_encoding` must be {' or '.join(encodings)} with {len(self.text_columns)} text "
                f"column(s). Found {self.pair_encoding!r}."
            )
        self._settle_pooling(where)
        if not self.metric:
            object.__setattr__(self, "metric", next(iter(metrics_of(self))))
        for known in (KIND_METRICS[self.kind], metrics_of(self)):
            if self.metric not in known:
                raise MinBertError(f"{where}: {unknown_name('metric', self.metric, known)}")
        if not higher_is_better(self.metric):
            raise MinBertError(
                f"{where}: `metric` must be one where higher is better, because `eval_overall` averages it. Found "
                f"{self.metric!r}, which is reported in any case."
            )
        self._check_labels(where)
        self._check_answers(where)
        self._check_set(where)
        self._check_data(where)

    def _check_types(self, where: str) -> None:
        """Checks the types of all fields, because a recipe may have any values.

        Errors here name the field and an example.
        """
        if isinstance(self.labels, tuple):  # label names such as 1 to 5 are numbers for YAML
            plain = (str(name) if type(name) is int else name for name in self.labels)
            object.__setattr__(self, "labels", tuple(plain))
        for name in ("text_columns", "labels"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) and item.strip() for item in value):
                found = list(value) if isinstance(value, tuple) else value
                raise MinBertError(f"{where}: `{name}` must be a list of text like [a, b]. Found {found!r}.")
        for name in (
            "label_column", "label_delimiter", "pair_encoding", "pooling", "layers", "join", "head", "loss", "metric",
        ):  # fmt: skip
            if not isinstance(value := getattr(self, name), str):
                raise MinBertError(f"{where}: `{name}` must be text. Found {value!r}.")
        for name in ("pooling_options", "head_options", "loss_options"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise MinBertError(f"{where}: `{name}` must be a mapping like {{dropout: 0.1}}. Found {value!r}.")
        if isinstance(self.sentence_dropout, bool) or not isinstance(self.sentence_dropout, int | float):
            raise MinBertError(f"{where}: `sentence_dropout` must be a number. Found {self.sentence_dropout!r}.")
        numbers = self.range is None or isinstance(self.range, tuple)
        if not numbers or not all(type(bound) in (int, float) for bound in self.range or ()):
            raise MinBertError(f"{where}: `range` must be two numbers like [0, 5]. Found {self.range!r}.")

    def _settle_pooling(self, where: str) -> None:
        if not self.traits.is_tags:
            object.__setattr__(self, "pooling", self.pooling or "pooler")
            return
        if self.pooling:
            raise MinBertError(
                f"{where}: `pooling: {self.pooling}` makes a sentence one vector, and kind 'tags' reads the state of "
                f"each word. Leave it out."
            )
        if self.is_pair:
            raise MinBertError(
                f"{where}: kind 'tags' takes one text, and `text_columns` names two: {', '.join(self.text_columns)}. "
                f"Name one."
            )

    def _check_data(self, where: str) -> None:
        for name in ("dataset", "dataset_config", "dataset_revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise MinBertError(f"{where}: `{name}` must be text. Found {value!r}.")
        known = {"files": SPLITS, "splits": SPLITS, "columns": (*self.text_columns, "label", "id")}
        for name, keys in known.items():
            _check_names(where, name, getattr(self, name), keys)
        if self.unlabelled is not None:
            data_files(self.unlabelled, f"{where}: `unlabelled`")
        if type(self.unlabelled_pairs) not in (int, float) or not 0 <= self.unlabelled_pairs < inf:
            raise MinBertError(
                f"{where}: `unlabelled_pairs` must be a number from 0. Found {self.unlabelled_pairs!r}."
            )
        if self.unlabelled_pairs and not self.is_pair:
            raise MinBertError(
                f"{where}: `unlabelled_pairs` makes new pairs of the sentences of pairs, and the task has one text. "
                "Leave it out."
            )
        if self.files and self.dataset:
            raise MinBertError(f"{where}: give either `files` or `dataset`, not both.")
        for name in ("dataset_config", "splits"):
            if self.files and getattr(self, name):
                raise MinBertError(f"{where}: `{name}` goes with `dataset`, and the task has `files`.")
        self._check_sources(where)

    def _check_sources(self, where: str) -> None:
        if not isinstance(self.sources, list | tuple):
            raise MinBertError(f"{where}: `sources` must be a list like [{{task: para}}]. Found {self.sources!r}.")
        sources = []
        for number, source in enumerate(self.sources, 1):
            here = f"{where}, source {number}"
            if isinstance(source, Mapping):
                known = [f.name for f in fields(Source)]
                for key in source:
                    if key not in known:
                        raise MinBertError(f"{here}: {unknown_name('key', key, known)}")
                source = Source(**source)
            elif not isinstance(source, Source):
                raise MinBertError(f"{here}: expected keys like {{task: para}}. Found {source!r}.")
            source.check(here)
            _check_names(here, "columns", source.columns, (*self.text_columns, "label", "id"))
            sources.append(source)
        object.__setattr__(self, "sources", tuple(sources))

    def _check_labels(self, where: str) -> None:
        if self.traits.is_score:
            ordered = self.range is not None and len(self.range) == 2 and -inf < self.range[0] < self.range[1] < inf
            if self.labels or not ordered:
                raise MinBertError(
                    f"{where}: a score needs `range` as (lowest, highest) and no `labels`. "
                    f"Found range={self.range!r}, labels={self.labels!r}."
                )
            return
        if (
            not self.traits.allows(len(self.labels))
            or len(set(self.labels)) != len(self.labels)
            or self.range is not None
        ):
            fewest, most = self.traits.labels
            count = f"exactly {in_words(fewest)}" if fewest == most else f"{in_words(fewest)} or more"
            raise MinBertError(
                f"{where}: kind {self.kind!r} needs {count} different `labels` and no `range`. "
                f"Found labels={self.labels!r}, range={self.range!r}."
            )

    def _check_answers(self, where: str) -> None:
        """Checks the fields that determine how outputs become answers."""
        if type(self.temperature) not in (int, float) or not 0 < self.temperature < inf:
            raise MinBertError(f"{where}: `temperature` must be a number above 0. Found {self.temperature!r}.")
        for name, usual, kinds in (("temperature", 1, CALIBRATED), ("thresholds", 0.5, THRESHOLDED)):
            if getattr(self, name) != usual and self.kind not in kinds:
                raise MinBertError(
                    f"{where}: `{name}` is for kinds {', '.join(kinds)}, and `kind` is {self.kind!r}. Leave it out."
                )
        given, count = self.thresholds, len(self.labels) if self.traits.is_set else 1
        numbers: list[Any] = given if isinstance(given, list) and self.traits.is_set else [given] * count
        if len(numbers) != count or not all(type(n) in (int, float) and 0 < n < 1 for n in numbers):
            each = ", or a list of one for each label" if self.traits.is_set else ""
            raise MinBertError(f"{where}: `thresholds` must be a number between 0 and 1{each}. Found {given!r}.")

    def _check_set(self, where: str) -> None:
        """Checks the fields that are only for `kind: labels`."""
        several = self.columns.get("label") if isinstance(self.columns, Mapping) else None
        if not self.traits.is_set:
            given = {
                "label_delimiter": self.label_delimiter != "|", "columns: {label: [...]}": isinstance(several, list),
            }  # fmt: skip
            for name in (name for name, is_given in given.items() if is_given):
                raise MinBertError(
                    f"{where}: `{name}` is for kind 'labels', and `kind` is {self.kind!r}. Leave it out."
                )
            return
        if not self.label_delimiter or any(self.label_delimiter in label for label in self.labels):
            raise MinBertError(
                f"{where}: `label_delimiter` must be text that occurs in none of the labels. Found "
                f"{self.label_delimiter!r}."
            )
        if isinstance(several, list) and len(several) != len(self.labels):
            raise MinBertError(
                f"{where}: `columns` of 'label' must name {len(self.labels)} columns, one for each label, or one that "
                f"holds all. Found {several!r}."
            )

    @property
    def own_thresholds(self) -> dict[str, float]:
        """The thresholds by label that differ from one half."""
        if self.thresholds == 0.5:
            return {}
        labels = self.labels if self.traits.is_set else self.labels[1:]
        given = self.thresholds if isinstance(self.thresholds, list) else [self.thresholds] * len(labels)
        return dict(zip(labels, given, strict=True))

    @property
    def is_pair(self) -> bool:
        return len(self.text_columns) == 2

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the head for each example."""
        return self.traits.outputs(len(self.labels))

    def to_config(self) -> dict[str, Any]:
        """Returns the task as in a model's `config.json`: all fields but the place of its data, and `COSINE_START`."""
        saved = asdict(self)
        for name in (*DATA_FIELDS, *(() if self.traits.is_set else OF_SETS)):
            del saved[name]
        if self.kind == "binary" and self.head == "cosine":
            given = {name: value for name, value in saved["head_options"].items() if value is not None}
            scale = given.get("initial_scale", COSINE_SCALE)
            # of a wrong scale, which is refused where the head is built, nothing
            offset = -COSINE_THRESHOLD * scale if isinstance(scale, int | float) else None
            saved["head_options"] = {"initial_scale": scale, "initial_offset": offset, **given}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in saved.items()}

    @classmethod
    def from_config(cls, saved: dict[str, Any]) -> Task:
        """The inverse of `to_config`. Raises `MinBertError` for an unknown key."""
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
            files={"train": "quora-train.csv", "dev": "quora-dev.csv", "test": "quora-test-student.csv"},
        ),
        Task(
            name="sts",
            kind="score",
            text_columns=("sentence1", "sentence2"),
            label_column="similarity",
            range=(0.0, 5.0),
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
        # The data of these two are on the Hub only; see hf_minbert.data.hub.
        Task(
            name="nli",
            kind="classes",
            text_columns=("premise", "hypothesis"),
            labels=("entailment", "neutral", "contradiction"),
        ),
        Task(
            name="reviews",
            kind="classes",
            text_columns=("text",),
            labels=("very negative", "negative", "neutral", "positive", "very positive"),
        ),
    )
}


def head_difference(task: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Returns the first field in which the heads of two tasks in configs differ in meaning, or `None`."""
    return next((name for name in HEAD_FIELDS if _meaning(task[name]) != _meaning(other[name])), None)


def _meaning(value: Any) -> Any:
    """A field's value without `OF_TRAINING`, and with lists for tuples at any depth: config.json knows lists only."""
    if isinstance(value, Mapping):
        return {key: _meaning(option) for key, option in value.items() if key not in OF_TRAINING}
    return [*map(_meaning, value)] if isinstance(value, list | tuple) else value


def get_tasks(chosen: Iterable[str] | Mapping[str, Mapping[str, Any] | Task | None]) -> list[Task]:
    """Returns the tasks in a recipe's `tasks`, in its order.

    Args:
        chosen: names of the package's tasks; or a mapping from names to entries. The entry `None` means the package's
            task. A mapping replaces fields of the package's task with that name. If there is none, it is a new task.

    Raises:
        MinBertError: a name or a field is unknown, a name is repeated, an entry is not a task, or there is none.
    """
    if isinstance(chosen, Mapping):
        tasks = [_from_entry(name, entry) for name, entry in chosen.items()]
    else:
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if names.count(name) > 1:
                raise MinBertError(f"`tasks` names {name!r} twice. Name each task once.")
        tasks = [_from_entry(name, None) for name in names]
    if not tasks:
        raise MinBertError(f"`tasks` is empty. Name at least one of: {', '.join(TASKS)}.")
    return tasks


def _from_entry(name: str, entry: Mapping[str, Any] | Task | None) -> Task:
    if isinstance(entry, Task):
        return replace(entry, name=name)
    if entry is None:
        if name not in TASKS:
            raise unknown_name("task", name, TASKS)
        return TASKS[name]
    where = f"Task {name!r}"
    if not isinstance(entry, Mapping):
        raise MinBertError(f"{where}: expected fields like {{files: ...}}, or nothing. Found {entry!r}.")
    known = [f.name for f in fields(Task) if f.name != "name"]
    for key in entry:
        if key not in known:
            raise MinBertError(f"{where}: {unknown_name('field', key, known)}")
    if name in TASKS:
        return replace(TASKS[name], **_replaced(TASKS[name], entry))
    needed = [f.name for f in fields(Task) if f.default is MISSING and f.default_factory is MISSING]
    kind = KINDS.get(entry.get("kind", ""))
    needed.append("range" if kind is not None and kind.is_score else "labels")
    missing = [f"`{key}`" for key in needed if key != "name" and entry.get(key) is None]
    if missing:
        raise MinBertError(
            f"{where} is not one of the package's ({', '.join(TASKS)}), and a new task needs {' and '.join(missing)}. "
            f"Add them to its entry.{did_you_mean(name, TASKS)}"
        )
    return Task(name=name, **entry)


def _replaced(task: Task, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with what must change along: fields that stood for the old columns, kind or data."""
    changed = dict(entry)
    if "text_columns" in entry:
        changed.setdefault("pair_encoding", "")
    if (kind := entry.get("kind", task.kind)) != task.kind:
        other = KINDS.get(kind, task.traits)
        of_labels = () if other.is_class and other.allows(len(task.labels)) else (("labels", ()), ("range", None))
        for name, empty in (*of_labels, ("metric", ""), ("loss", ""), ("loss_options", {}), ("pooling", "")):
            changed.setdefault(name, empty)
    if entry.get("dataset") is not None:
        changed.setdefault("files", {})
    return changed


def revisions(tasks: Iterable[Task]) -> dict[str, str]:
    """Returns the Hub commits in tasks and their sources, in the form for `with_revisions`."""
    found: dict[str, str | None] = {}
    for task in tasks:
        found[task.name] = task.dataset_revision
        found |= {f"{task.name}/{number}": source.dataset_revision for number, source in enumerate(task.sources, 1)}
    return {name: commit for name, commit in found.items() if commit}


def with_revisions(
    chosen: Iterable[str] | Mapping[str, Mapping[str, Any] | None], commits: Mapping[str, str]
) -> list[str] | dict[str, Mapping[str, Any] | None]:
    """Returns a recipe's `tasks` with the Hub commits that were read, so that it loads the same data again.

    A commit in an entry is kept. A branch or a tag, which may change, is replaced.

    Args:
        commits: the commit of each task or source. A source is named as `sts/1` for the first source of sts.
    """
    entries = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen)
    for name, commit in commits.items():
        task, _, number = name.partition("/")
        if task not in entries:
            continue
        entry = entries[task] or {}
        if number:
            sources = list(entry["sources"])
            sources[int(number) - 1] = _at_commit(sources[int(number) - 1], commit)
            entries[task] = {**entry, "sources": sources}
        else:
            entries[task] = _at_commit(entry, commit)
    return entries if isinstance(chosen, Mapping) or any(entries.values()) else list(entries)


def _at_commit(entry: Mapping[str, Any], commit: str) -> Mapping[str, Any]:
    fixed = re.fullmatch(r"[0-9a-f]{40}", entry.get("dataset_revision") or "")
    return entry if fixed else {**entry, "dataset_revision": commit}


def chosen(option: str, named: Iterable[str] | str | None, tasks: Mapping[str, Any]) -> list[str]:
    """Returns the tasks that `option` names, each once; all tasks if it is not set.

    Raises:
        MinBertError: it names a task that is not in `tasks`, or is empty.
    """
    names = list(tasks) if named in (None, {}) else [named] if isinstance(named, str) else list(named)
    for name in names:
        if name not in tasks:
            raise MinBertError(f"`{option}`: {unknown_name('task', name, tasks)}")
    if not names:
        raise MinBertError(f"`{option}` is empty. Name at least one of: {', '.join(tasks)}.")
    return list(dict.fromkeys(names))


# ---- Names of metrics --------------------------------------------------------------------------------------------

#: The course's 2024 leaderboard: the mean of these, with the correlation r entered as (r + 1) / 2.
LEADERBOARD = {"sst": "accuracy", "para": "accuracy", "sts": "pearson"}


def metric_names(tasks: Iterable[Task]) -> list[str]:
    """Returns every key that an evaluation of these tasks can report, without the prefix `eval_`."""
    tasks = list(tasks)
    names = [f"{task.name}_{metric}" for task in tasks for metric in (*metrics_of(task), "loss")]
    return [*names, "overall", *(["leaderboard"] if has_leaderboard(tasks) else [])]


def has_leaderboard(tasks: list[Task]) -> bool:
    metrics = {task.name: metrics_of(task) for task in tasks}
    return all(metric in metrics.get(name, ()) for name, metric in LEADERBOARD.items())


def check_metric(metric: str, evaluated: Iterable[Task], averaged: bool) -> None:
    """Raises `MinBertError` if no evaluation of these tasks reports the metric in `metric_for_best_model`.

    Args:
        averaged: whether the averaged weights are evaluated too (`proximal_evaluate`).
    """
    name = metric.removeprefix("eval_")
    if name.startswith("averaged_") and not averaged:
        raise MinBertError(
            f"`metric_for_best_model: {metric}` is for averaged weights. Set `proximal_evaluate: true`, or leave "
            "`averaged_` out."
        )
    known = metric_names(evaluated)
    if name.removeprefix("averaged_") not in known:
        raise MinBertError(f"`metric_for_best_model`: {unknown_name('metric', metric, [f'eval_{n}' for n in known])}")
