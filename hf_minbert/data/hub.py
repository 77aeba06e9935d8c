"""The tasks' datasets on the Hub, and how they are read.

The course splits STS-B and Quora differently. A model trained on the Hub's splits has seen rows of the course's dev
and test files, so its scores on those files are meaningless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from ..errors import MinBertError, explain, unknown_name
from ..settings.tasks import Task
from .tables import Table, dataset_table

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class HubData:
    """A dataset with a task's rows. The fields are those of `Task` without the prefix `dataset_`.

    `licence` is the licence on the dataset's card, for the cards of models trained on it. All texts are English.
    """

    task: str
    dataset: str
    config: str | None = None
    splits: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    licence: str = "unknown: the dataset's card states none"


GLUE_LICENCE = "`other`: each part of GLUE is under its own terms"
#: The first of a task is the one that `data_dir: hub` takes. The columns are those that the datasets' cards name.
HUB = (
    HubData("sst", "SetFit/sst5", columns={"sentence": "text", "label": "label"}),
    HubData(
        "para", "nyu-mll/glue", "qqp",
        columns={"sentence1": "question1", "sentence2": "question2", "label": "label", "id": "idx"},
        licence=GLUE_LICENCE,
    ),
    HubData("sts", "nyu-mll/glue", "stsb", columns={"label": "label", "id": "idx"}, licence=GLUE_LICENCE),
    HubData(
        "nli", "nyu-mll/glue", "mnli", columns={"id": "idx"},
        splits={"dev": "validation_matched", "test": "test_matched"}, licence=GLUE_LICENCE,
    ),
    HubData("nli", "stanfordnlp/snli", licence="cc-by-sa-4.0"),
    HubData(  # it has these two: dev and test are one
        "reviews", "Yelp/yelp_review_full", splits={"dev": "test"}, licence="`other`: Yelp's terms for its dataset",
    ),
)  # fmt: skip


def licence_of(dataset: str) -> str:
    """Returns the licence of a dataset on the Hub, if the package knows it."""
    return next((known.licence for known in HUB if known.dataset == dataset), "unknown")


def is_known(dataset: str) -> bool:
    """Whether a dataset on the Hub is in `HUB`."""
    return any(known.dataset == dataset for known in HUB)


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def on_hub(task: Task) -> Task:
    """Returns the task with its dataset on the Hub. Fields that the task sets take precedence over those in `HUB`.

    Raises:
        MinBertError: the task names no dataset, and the package knows none for it.
    """
    for known in HUB:
        same = task.dataset in (None, known.dataset) and task.dataset_config in (None, known.config)
        if known.task == task.name and same:
            return replace(
                task,
                files={},
                dataset=known.dataset,
                dataset_config=known.config,
                splits={**known.splits, **task.splits},
                columns={**known.columns, **task.columns},
            )
    if task.dataset is None:
        has = ", ".join(dict.fromkeys(known.task for known in HUB))
        raise MinBertError(
            f"Task {task.name!r} has no dataset on the Hub that the package knows (it knows those of {has}). Add "
            f"`dataset: owner/name` to its entry under `tasks`."
        )
    return task


def pinned(task: Task) -> Task:
    """Does the same as `on_hub`, and sets `dataset_revision` to the current commit.

    All splits then have one commit, now and later.
    """
    task = on_hub(task)
    return replace(task, dataset_revision=_prepared(task).hash)


def read(task: Task, split: str) -> Table:
    """Reads a split of the task's dataset on the Hub. It is downloaded with a progress bar unless it is cached.

    Raises:
        MinBertError: there is no such dataset, configuration, revision or split, or the Hub cannot be reached.
    """
    task = on_hub(task)
    builder = _prepared(task)
    there = split_there(task, split, list(builder.info.splits or ()), str(task.dataset))
    config = f" ({task.dataset_config})" if task.dataset_config else ""
    rows = cast("datasets.Dataset", builder.as_dataset(split=there))  # several only where no split is named
    return dataset_table(rows, f"{task.dataset}{config}, split {there!r}")


def has_split(task: Task, split: str) -> bool:
    """Whether the task's dataset on the Hub has this split. Uses the network as `read` does."""
    return split_among(task, split, list(_prepared(task).info.splits or ())) is not None


def split_there(task: Task, split: str, names: list[str], where: str) -> str:
    """Returns the dataset's name for one of our splits, from its `names`. Raises `MinBertError` if there is none."""
    found = split_among(task, split, names)
    if found is None:
        wanted = _names_of(task, split)[-1]
        raise MinBertError(
            f"Task {task.name!r}: {where} has no split for {split!r}. {unknown_name('split', wanted, names)} Name it "
            f"in the task's entry: `splits: {{{split}: ...}}`."
        )
    return found


def split_among(task: Task, split: str, names: list[str]) -> str | None:
    """Returns the name in `names` that corresponds to one of our splits, or `None`."""
    return next((name for name in _names_of(task, split) if name in names), None)


def _names_of(task: Task, split: str) -> list[str]:
    if split in task.splits:
        return [task.splits[split]]
    return ["dev", "validation"] if split == "dev" else [split]


def _prepared(task: Task) -> datasets.DatasetBuilder:
    return _download(task.dataset, task.dataset_config, task.dataset_revision)


@lru_cache(maxsize=16)
def _download(dataset: str, config: str | None, revision: str | None) -> datasets.DatasetBuilder:
    import datasets

    remedy = (
        "Check the names in the task's entry and the network. With HF_HUB_OFFLINE=1 only what was downloaded before "
        "is there."
    )
    with explain(f"Loading the dataset {dataset!r} from the Hub", remedy):
        builder = datasets.load_dataset_builder(dataset, config, revision=revision)
        builder.download_and_prepare()
    # Without a network the library takes the newest commit in its cache, whatever revision was asked for.
    if re.fullmatch(r"[0-9a-f]{40}", revision or "") and builder.hash != revision:
        raise MinBertError(
            f"The dataset {dataset!r} is in the cache at commit {builder.hash}, and {revision} is requested. "
            f"Allow the network, or set `dataset_revision` to the commit in the cache."
        )
    return builder
