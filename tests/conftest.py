"""Fixtures for all tests: the real data and checkpoint where they are, and a tiny random BERT with its tokenizer."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer

from hf_minbert import MinBertConfig, MinBertForMultiTask, Task, get_tasks

SHARED = Path(__file__).parents[2] / "shared"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "is", "not", "good", "bad", "film", "man", "dog", "plays", "how", "why", "you", "it", "very"]
PIECES = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase), *string.digits, *".,?!'"]
VOCABULARY = SPECIAL + WORDS + [piece for piece in PIECES if piece not in WORDS]


def _real(variable: str, default: Path) -> Path:
    path = Path(os.environ.get(variable) or default)
    if not path.is_dir():
        pytest.skip(f"${variable} is not set and {default} is not there")
    return path


@pytest.fixture(scope="session")
def cs224n() -> Path:
    """The folder with the course's files."""
    return _real("CS224N_DATA", SHARED / "data" / "cs224n")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real BERT checkpoint, six layers of 384."""
    return _real("MINILM", SHARED / "models" / "all-MiniLM-L6-v2")


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
