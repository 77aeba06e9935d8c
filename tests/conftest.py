"""Fixtures for all tests: the real data and checkpoint where they are, and a tiny random BERT with its tokenizer."""

from __future__ import annotations

import gc
import logging
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked import Together, run_together
from here import Here
from misaligned import WANTED, misaligned_files
from real import folder_of
from trained_tokenizers import KINDS, trained
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerBase, set_seed

from hf_minbert import MinBertConfig, MinBertForMultiTask, Task, get_tasks
from hf_minbert.cli import main
from hf_minbert.run import workers
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

SHARED = Path(__file__).parents[2] / "shared"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "is", "not", "good", "bad", "film", "man", "dog", "plays", "how", "why", "you", "it", "very"]
PIECES = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase), *string.digits, *".,?!'"]
VOCABULARY = SPECIAL + WORDS + [piece for piece in PIECES if piece not in WORDS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers none begins one when the others are at their end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> None:
    """The trainer collects garbage in every training: 0.4 s if all objects of the libraries are searched too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _files_are_misaligned_if_wanted() -> Iterator[None]:
    """`scripts/test.sh --arithmetic avx2` wants it. What another process writes is not misaligned, unless forked."""
    with misaligned_files() if WANTED else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers whichever tests ran before it in its worker."""
    set_seed(0)


@pytest.fixture(scope="session")
def cs224n() -> Path:
    """The folder with the course's files."""
    return folder_of("CS224N_DATA", SHARED / "data" / "cs224n")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real BERT checkpoint, six layers of 384."""
    return folder_of("MINILM", SHARED / "models" / "all-MiniLM-L6-v2")


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., MinBertConfig]:
    """`tiny_config(**changes)`: two layers of 32, 64 positions, no dropout, the tiny tokenizer's vocabulary."""

    def make(**changes) -> MinBertConfig:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        # Weights as wide as the narrow layers need: with BERT's 0.02 all inputs would look the same.
        fixed = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 64, "initializer_range": 0.2}
        return MinBertConfig(**{**sizes, **off, **fixed, **changes})

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_config) -> Callable[..., MinBertForMultiTask]:
    """`tiny_model(tasks=("sst", "para", "sts"), seed=0, **changes)`: random, the same for the same arguments."""

    def make(tasks: Sequence[str | Task] = ("sst", "para", "sts"), seed: int = 0, **changes) -> MinBertForMultiTask:
        tasks = [task if isinstance(task, Task) else get_tasks([task])[0] for task in tasks]
        torch.manual_seed(seed)
        return MinBertForMultiTask(tiny_config(tasks=tasks, **changes))

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> BertTokenizer:
    """A few whole words, every other word by its letters; at most 64 tokens."""
    file = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    file.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return BertTokenizer(vocab=str(file), model_max_length=64)


@pytest.fixture(scope="session", params=KINDS)
def any_tokenizer(request):
    """A tokenizer of each kind in turn."""
    return trained(request.param)


@pytest.fixture(scope="session")
def model_for(tiny_model) -> Callable[..., MinBertForMultiTask]:
    """`model_for(tokenizer, tasks)`: a tiny model with its words, and as many segments as it gives."""

    def make(tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str | Task], **changes) -> MinBertForMultiTask:
        segments = 1 + ("token_type_ids" in tokenizer.model_input_names)
        fixed = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "type_vocab_size": segments}
        return tiny_model(tasks, **{**fixed, **changes}).eval()

    return make


@pytest.fixture(scope="session")
def tiny_bert(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """A folder with a plain BERT of the library, random and tiny, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    sizes = {key: value for key, value in tiny_config().to_dict().items() if key in BertConfig().to_dict()}
    torch.manual_seed(0)
    BertModel(BertConfig(**{**sizes, "model_type": "bert"})).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_course_files() -> Callable[[Path], Path]:
    """`write_course_files(folder)` fills it with small files in the course's format; see `_course_files`."""

    def write(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in _course_files().items():
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def course_dir(write_course_files, tmp_path_factory) -> Path:
    """A folder that `write_course_files` filled. Not to be changed."""
    return write_course_files(tmp_path_factory.mktemp("course"))


def _course_files() -> dict[str, list[str]]:
    """File name to lines. The id says task, split and row; texts and labels repeat with different periods.

    As in the course's files, a nameless column holds the row's number in the original data, and the unlabelled test
    file of sst has two.
    """
    words = ["good", "bad", "not good", "very bad", "a film", "the man plays", "why is it"]
    sizes = {"sst": {"train": 12, "dev": 7}, "para": {"train": 10, "dev": 6}, "sts": {"train": 8, "dev": 5}}
    labels = {"sst": "{0}", "para": "{0}.0", "sts": "{0}.5"}
    files = {}
    for task, splits in sizes.items():
        spec = get_tasks([task])[0]
        pair = len(spec.text_columns) == 2
        for split, size in {**splits, "test": 3}.items():
            labelled = split != "test"
            header = ["", "id", *spec.text_columns, *([spec.label_column] if labelled else [])]
            lines = []
            for row in range(size):
                texts = [words[(row * step) % 7] + f" {row} ." for step in ((2, 3) if pair else (1,))]
                label = labels[task].format(row % {"sst": 5, "para": 2, "sts": 5}[task])
                lines.append([str(100 + row), f"{task}-{split}-{row}", *texts, *([label] if labelled else [])])
            if (task, split) == ("sst", "test"):
                header, lines = ["0", *header], [[str(row), *line] for row, line in enumerate(lines, 1)]
            files[spec.files[split]] = ["\t".join(cells) for cells in [header, *lines]]
    return files


@pytest.fixture(scope="session")
def finished_run(tiny_bert, course_dir, tmp_path_factory) -> Path:
    """The folder of a finished run of two epochs on the tiny model and data. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    words = {
        "model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": folder, "num_train_epochs": 2,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "hidden_dropout_prob": 0.1, "eval_strategy": "epoch",
        "save_strategy": "epoch", "logging_steps": 1, "disable_tqdm": "true",
    }  # fmt: skip
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in words.items()), encoding="utf-8")
    train(read_recipe(recipe))
    return folder


@pytest.fixture(scope="session")
def together(tmp_path_factory) -> Callable[..., Together]:
    """`together(job, processes=2, stop=None)` is `run_together`."""
    return lambda job, **options: run_together(job, tmp_path_factory.mktemp("said"), **options)


@pytest.fixture
def here(monkeypatch) -> Callable[..., Here]:
    """`here(...)`: runs that a command starts are trained in this process from now on."""

    def arrange(**given) -> Here:
        made = Here(**given)
        monkeypatch.setattr(workers, "Worker", made)
        monkeypatch.setattr(workers, "POLL", 0.0)
        return made

    return arrange


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def minbert(capfd, monkeypatch) -> Iterator[Callable[..., Ended]]:
    """`minbert("train", path, ...)` is the command of these words, run in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*words: object) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        return Ended(exit.value.code, *capfd.readouterr())

    yield run
    # The handler writes to the stderr of the test that made it, which is closed by now.
    logging.getLogger("hf_minbert").handlers.clear()
