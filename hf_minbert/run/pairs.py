"""`unlabelled_pairs` of a task: makes new pairs of its sentences. The run's checkpoint finds similar sentences.

The pairs depend on the checkpoint and the texts, not on the run's seed. Students of one recipe therefore have the same
pairs and share their teachers' outputs. The pairs are stored in a file, because the nearest sentences may differ on
another processor.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from ..data.cache import model_content
from ..data.encoding import check_max_length, encode_and_count
from ..data.files import ID_COLUMN, to_dataset
from ..data.leaks import HeldOut, key_of
from ..data.pairs import NEIGHBOURS, Pair, new_pairs
from ..errors import explain
from ..io import write_json
from ..model.inference import answer
from ..pretrained.loading import check_encoder, load_tokenizer, load_weights
from ..settings.run import RunSettings
from ..settings.tasks import Task
from ..settings.wording import counted
from .inputs import arrange, checkpoints_config

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

FORMAT = 1  # to be raised when the same sentences give other pairs
PROBE = Task(name="probe", kind="score", text_columns=("text",), range=(0.0, 1.0), pooling="mean")
BATCH = 32


def with_new_pairs(
    train: Mapping[str, datasets.Dataset], tasks: Sequence[Task], settings: RunSettings, keep_in: Path
) -> dict[str, datasets.Dataset]:
    """Adds the new pairs of `unlabelled_pairs` to the training rows. They have the label `None` and come last.

    Args:
        train: rows by task, from `hf_minbert.data.leaks.load_training`.
        tasks: the tasks of the recipe, with the place of their data.
        keep_in: the folder where the pairs are stored.

    Raises:
        MinBertError: the checkpoint cannot be loaded, or the stored pairs cannot be read.
    """
    asked = [task for task in tasks if task.unlabelled_pairs and task.name in train]
    if not asked:
        return dict(train)
    held_out = HeldOut.of_run(tasks, settings.held_out, settings.data_dir)
    encoder, found = _Encoder(settings), dict(train)
    for task in asked:
        pairs = _pairs(task, train[task.name], held_out, encoder, keep_in, settings.drop_shared_sentences)
        logger.info("%s: %s are made of its sentences.", task.name, counted(len(pairs), "new pair"))
        found[task.name] = _joined(train[task.name], pairs, task)
    return found


def _pairs(
    task: Task, rows: datasets.Dataset, held_out: HeldOut, encoder: _Encoder, keep_in: Path, drop_sentences: bool
) -> list[Pair]:
    columns = rows[:]
    texts: list[Pair] = list(zip(*(columns[name] for name in task.text_columns), strict=True))
    own = [pair for pair, label in zip(texts, columns["label"], strict=True) if label is not None]
    count, known = round(task.unlabelled_pairs * len(own)), [*map(key_of, texts)]
    if drop_sentences:
        scored = set().union(*held_out.sentences.values())
        own = [pair for pair in own if not scored & {*(key_of(pair) or ())}]
    if not own:
        return []
    known += [key for of in held_out.rows.values() for key in of]
    forbidden = sorted({key for key in known if key is not None})
    parts = [FORMAT, NEIGHBOURS, encoder.content, own, count, forbidden]
    path = keep_in / f"pairs-{task.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"
    if not path.is_file():
        made = new_pairs(own, count, {*forbidden}, encoder.vectors, crc32(task.name.encode()))
        write_json(path, made)
    with explain(f"Reading the pairs in {path}", "Delete this file; it is made again."):
        return [(first, second) for first, second in json.loads(path.read_text(encoding="utf-8"))]


def _joined(rows: datasets.Dataset, pairs: list[Pair], task: Task) -> datasets.Dataset:
    from datasets import concatenate_datasets

    new: list[dict[str, Any]] = [
        {ID_COLUMN: f"new:{number}", **dict(zip(task.text_columns, pair, strict=True)), "label": None}
        for number, pair in enumerate(pairs)
    ]
    return concatenate_datasets([rows, to_dataset(new, task)]) if new else rows


class _Encoder:
    """The encoder of a run's checkpoint. Its mean-pooled states are the vectors of sentences."""

    def __init__(self, settings: RunSettings):
        name, revision = settings.model_name_or_path, settings.model_revision
        own = replace(settings, peft=None, private_layers=0)
        self.config = arrange(checkpoints_config(own), own, [PROBE])
        self.length = check_max_length(settings.max_length, self.config)
        self.tokenizer = load_tokenizer(name, self.config, revision)
        with torch.random.fork_rng(devices=[]):  # what a checkpoint lacks is drawn, which the student must not notice
            torch.manual_seed(0)
            model, missing = load_weights(name, self.config, revision, settings.attn_implementation)
        check_encoder(name, missing)
        self.content = model_content(model, self.tokenizer)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encoder_path(self, task: str) -> list[torch.nn.Module]:
        return self.model.encoder_path(task)

    def vectors(self, texts: list[str]) -> np.ndarray:
        """float32 [texts, D]"""
        rows = [{"text": text} for text in texts]
        encoded, _ = encode_and_count(rows, PROBE, self.tokenizer, self.length, config=self.config)
        return answer(self, [PROBE.name], encoded, self.tokenizer.pad_token_id, BATCH)[PROBE.name]

    def logits_of(self, tasks: Sequence[str], **inputs: Any) -> dict[str, torch.Tensor]:
        """The pooled vectors, where `answer` asks a model for its heads' outputs; [B, D]."""
        return {name: vectors[:, 0] for name, vectors in self.model.pooled_of(tasks, **inputs).items()}
