"""Made sentences with entities, a task for them, and a run of the example recipe on such rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_minbert import Task
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

LABELS = ("O", "B-PLACE", "I-PLACE", "B-PERSON", "I-PERSON", "B-TIME", "I-TIME")
ENTITIES = {"PERSON": [["man"], ["the", "man"]], "PLACE": [["dog"], ["good", "film"]]}
OTHERS = ["a", "is", "not", "bad", "plays", "how", "why", "you"]
RECIPE = Path(__file__).parents[2] / "recipes" / "examples" / "ner_and_intent.yaml"


@pytest.fixture(scope="session")
def ner() -> Task:
    return Task(name="ner", kind="tags", text_columns=("tokens",), label_column="tags", labels=LABELS)


@pytest.fixture(scope="session")
def sentences() -> Callable[..., list[dict]]:
    """`sentences(count, seed=0)`: rows of `tokens` and `tags` by name, of 3 words and more."""

    def make(count: int, seed: int = 0) -> list[dict]:
        draw, rows = random.Random(seed), []
        for _ in range(count):
            words, tags = [], []
            while len(words) < 3 or draw.random() < 0.6:
                if draw.random() < 0.5:
                    type_ = draw.choice([*ENTITIES])
                    entity = draw.choice(ENTITIES[type_])
                    words += entity
                    tags += [f"B-{type_}", f"I-{type_}"][: len(entity)]
                words.append(draw.choice(OTHERS))
                tags.append("O")
            rows.append({"tokens": words, "tags": tags})
        return rows

    return make


def as_conll(rows: list[dict]) -> str:
    """Rows as a column file of tabs, with a document's first line and a column that no task reads."""
    lines = ["-DOCSTART-\t-X-\tO", ""]
    for row in rows:
        lines += [f"{word}\tx\t{tag}" for word, tag in zip(row["tokens"], row["tags"], strict=True)] + [""]
    return "\n".join(lines)


@pytest.fixture(scope="session")
def assistant(sentences, tmp_path_factory) -> Path:
    """A folder with the files of the example recipe. Not to be changed."""
    folder = tmp_path_factory.mktemp("assistant")
    (folder / "assistant").mkdir()
    intents = {"reserve": "why is it", "weather": "how is it", "play": "the dog plays"}
    for split, count in (("train", 96), ("dev", 20)):
        rows = sentences(count, seed=len(split))
        (folder / "assistant" / f"ner-{split}.conll").write_text(as_conll(rows), encoding="utf-8")
        named = [*intents.items()] * (count // 4)
        lines = ["intent,sentence", *(f"{intent},{text} {n}" for n, (intent, text) in enumerate(named))]
        (folder / "assistant" / f"intent-{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def example(tiny_bert, assistant) -> Callable[..., list[str]]:
    """`example(folder, **changes)`: the words of a command that trains the example recipe on made rows."""

    def words(folder: Path, **changes) -> list[str]:
        usual = {
            "model_name_or_path": tiny_bert, "data_dir": assistant, "output_dir": folder, "learning_rate": 3e-3,
            "per_device_train_batch_size": 8, "hidden_dropout_prob": 0.0, "logging_steps": 10, "disable_tqdm": "true",
            "max_length": 48, "num_train_epochs": 6,
        }  # fmt: skip
        return [f"{key}={value}" for key, value in {**usual, **changes}.items()]

    return words


@pytest.fixture(scope="session")
def tagged_run(example, tmp_path_factory) -> Path:
    """The folder of a finished run of the example recipe. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "tagged"
    train(read_recipe(RECIPE, example(folder)))
    return folder
