"""Runs' folders made up without training: predictions, a log and the data that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hf_minbert.evaluation.decoding import Decoded
from hf_minbert.evaluation.metrics import overall, value_metrics
from hf_minbert.evaluation.submission import write_predictions
from hf_minbert.io import json_line, write_json
from hf_minbert.settings.tasks import Task, get_tasks

WORDS = [
    "the",
    "a",
    "film",
    "man",
    "dog",
    "plays",
    "sleeps",
    "good",
    "bad",
    "very",
    "not",
    "why",
    "how",
    "slow",
    "bright",
    "river",
]
TASKS = get_tasks(["sst", "para", "sts"])


def _rows(task, size: int, random: np.random.Generator) -> tuple[list[str], list[list[str]], np.ndarray]:
    ids = [f"{task.name}-{row}" for row in range(size)]
    words = random.choice(WORDS, (size, len(task.text_columns), 13)).tolist()
    lengths = random.integers(2, 14, (size, len(task.text_columns))).tolist()
    texts = [[" ".join(words[:n]) for words, n in zip(*of, strict=True)] for of in zip(words, lengths, strict=True)]
    if task.kind == "score":
        return ids, texts, random.integers(0, 26, size) / 5
    return ids, texts, random.integers(0, len(task.labels), size)


def _decoded(task, labels: np.ndarray, random: np.random.Generator) -> Decoded:
    """Answers that are right more often than not."""
    if task.kind == "score":
        return Decoded(labels + random.normal(size=len(labels)), None)
    logits = random.normal(size=(len(labels), len(task.labels))) + 1.5 * np.eye(len(task.labels))[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Decoded(probabilities.argmax(axis=1), probabilities)


@pytest.fixture(scope="session")
def answer() -> Callable[..., Callable[[np.ndarray], Decoded]]:
    """Answers of a task that are the better the greater `strength`; half of what is wrong is so for every seed."""

    def make(task: str, strength: float, seed: Sequence[int]) -> Callable[[np.ndarray], Decoded]:
        def of(labels: np.ndarray) -> Decoded:
            streams = (np.random.default_rng([*key, ord(task[-1])]) for key in ([9], seed))
            shared, own = (stream.normal(size=len(labels)) for stream in streams)
            if task == "sts":
                return Decoded(labels + (shared + own) / strength, None)
            classes = 5 if task == "sst" else 2
            values = np.where(shared + own < strength, labels, (labels + 1) % classes)
            return Decoded(values, np.eye(classes)[values])

        return of

    return make


@pytest.fixture(scope="session")
def make_data() -> Callable[..., Path]:
    """`make_data(folder, size, tasks=TASKS)`: train and dev files, the labels the same for the same size."""

    def make(folder: Path, size: int, tasks: Sequence[Task] = TASKS) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            for split, seed in (("train", 1), ("dev", 2)):
                ids, texts, labels = _rows(task, size, np.random.default_rng(seed))
                header = ["", "id", *task.text_columns, task.label_column]
                rows = enumerate(zip(ids, texts, labels, strict=True))
                lines = [header, *([str(n), i, *t, str(y)] for n, (i, t, y) in rows)]
                text = "".join("\t".join(line) + "\n" for line in lines)
                (folder / task.files[split]).write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """`make_run(folder, data, size, seed=1, tasks=TASKS, **changed)`: a finished run on that data.

    `changed` replaces a task's predictions, `sst=lambda labels: Decoded(...)`.
    """

    def make(
        folder: Path, data: Path, size: int, seed: int = 1, tasks: Sequence[Task] = TASKS, **changed: Callable
    ) -> Path:
        random, metrics = np.random.default_rng(seed), {}
        for task in tasks:
            ids, _, labels = _rows(task, size, np.random.default_rng(2))
            decoded = _decoded(task, labels, random)
            decoded = changed.get(task.name, lambda labels, own=decoded: own)(labels)
            write_predictions(folder / "predictions" / f"{task.name}-dev.csv", task, ids, decoded)
            metrics[task.name] = value_metrics(task, np.nan_to_num(decoded.values), labels)
        flat = {f"eval_{task}_{name}": value for task, of in metrics.items() for name, value in of.items()}
        flat |= {f"eval_{name}": value for name, value in overall(tasks, metrics).items()}
        names = ", ".join(task.name for task in tasks)
        recipe = f"model_name_or_path: bert\noutput_dir: {folder}\ndata_dir: {data}\ntasks: [{names}]\n"
        (folder / "recipe.yaml").write_text(f"{recipe}seed: {seed}\n", encoding="utf-8")
        (folder / "log.jsonl").write_text("".join(map(json_line, _log(flat, random))), encoding="utf-8")
        write_json(folder / "environment.json", {"seed": seed, "device": "cpu", "processes": 1, "versions": {}})
        timeline = {"total": 90.0, "first_step_at": 12.0, "parts": {"imports": 8.0, "first_step": 4.0, "steps": 78.0}}
        write_json(folder / "metrics.json", {**flat, "seed": seed, "global_step": 30, "timeline": timeline})
        return folder

    return make


def _log(metrics: dict[str, float], random: np.random.Generator) -> list[dict]:
    """Three evaluations, losses and what surgery logs."""
    entries = []
    for step in range(5, 31, 5):
        entry = {f"loss_{task.name}": 2 / step + random.random() / 9 for task in TASKS}
        for pair in ("sst_para", "sst_sts", "para_sts"):
            entry |= {f"cosine_{pair}": random.normal() / 9, f"conflict_{pair}": random.random()}
        entries.append({**entry, "loss": 1.0, "surgery_turn": 0.1, "step": step})
        if step % 10 == 0:
            scores = {name: value * step / 30 for name, value in metrics.items()}
            entries.append({**scores, "eval_runtime": 1.5, "step": step})
    return [*entries, {"train_runtime": 75.0, "train_steps_per_second": 0.4, "step": 30}]


@pytest.fixture(scope="session")
def data(make_data, tmp_path_factory) -> Path:
    """Dev files of 60 rows a task."""
    return make_data(tmp_path_factory.mktemp("report") / "data", 60)


@pytest.fixture(scope="session")
def run(make_run, data) -> Path:
    """A finished run on them. Not to be changed."""
    return make_run(data.parent / "run", data, 60)


@pytest.fixture
def table() -> Callable[[dict, str, int], dict[str, list[str]]]:
    """`table(sections, "sst-classes", 0)`: the cells of a section's table by its first column."""

    def find(sections: dict, key: str, place: int = 0) -> dict[str, list[str]]:
        tables = [block for block in sections[key].blocks if block.kind == "table"]
        return {row[0]: list(row[1:]) for row in tables[place].rows}

    return find


@pytest.fixture
def forget_metrics() -> Callable[[Path], None]:
    """Takes from a run's folder what it has only once it has finished."""

    def forget(folder: Path) -> None:
        (folder / "metrics.json").unlink()
        for file in (folder / "predictions").iterdir():
            file.unlink()
        (folder / "predictions").rmdir()

    return forget
