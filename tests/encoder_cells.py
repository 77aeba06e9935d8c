"""The table of encoders in docs/encoders.md: each cell trains two steps, saves, and is asked without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_minbert import MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, Task, get_tasks
from hf_minbert.pretrained.adapted import merged
from hf_minbert.pretrained.adapters import add_adapter
from hf_minbert.training.freezing import levels_of

#: Beside sst and sts, the other kinds of tasks, for the first cell.
OTHERS = [
    Task("ner", "tags", ("tokens",), "tags", labels=("O", "B-MAN", "I-MAN")),
    Task("topics", "labels", ("text",), labels=("sport", "money", "science")),
    Task("stars", "ordinal", ("text",), labels=("0", "1", "2")),
]
#: Training arguments of each cell; `mix`, `private layers` and `LoRA` are of the model.
CELLS = {
    "heads": {},
    "packing": {},
    "mix": {},
    "private layers": {},
    "private encoders": {},
    "freezing": {"freeze": 2},
    "unfreezing": {"freeze": "encoder", "unfreeze": {1: 1}},
    "layer decay": {"layer_decay": 0.5},
    "LoRA": {},
    "SMART": {"regularizer": "smart"},
    "FGM": {"regularizer": "fgm"},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "pcgrad": {"aggregator": "pcgrad"},
}
#: Cells whose batches are packed where the encoder is the hand-written one.
PACKED = ("packing", "SMART")
CHILD = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "evaluate", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None  # importing it is an error from here on
import json, torch
from transformers import AutoModelForSequenceClassification
found, kind = {}, None
for folder in json.loads(sys.stdin.read()):
    if kind is None:  # the code is the same in all, and its import takes longer than a test
        kind = type(AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True))
        assert kind.__module__.startswith("transformers_modules.")
    model = kind.from_pretrained(folder)
    given = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        found[folder] = {task: model(task=task, **inputs).logits.tolist() for task, inputs in given.items()}
print(json.dumps(found))
"""


class Cell(NamedTuple):
    """A model after two steps.

    Args:
        folder: where it is saved.
        answers: its logits by task, of `inputs_of`.
        before, after: its weights.
        levels: of each weight, as `levels_of`.
    """

    folder: Path
    answers: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    levels: dict[str, int]

    @property
    def moved(self) -> set[str]:
        return {name for name, value in self.before.items() if not torch.equal(value, self.after[name])}

    def check(self, cell: str, without: dict[str, list], adapted: Collection[str]) -> None:
        """The heads and the layers of a cell are trained, and no others; and the answers are those `without`.

        Args:
            adapted: last names of the layers that an adapter lies on.
        """
        for task, answer in self.answers.items():
            assert torch.isfinite(answer).all()
            torch.testing.assert_close(torch.tensor(without[task]), answer, rtol=0, atol=1e-5)
            assert any(name.startswith(f"heads.{task}.") for name in self.moved)
            assert (f"heads.{task}.layer_mix.scores" in self.moved) == (cell == "mix")
        there = {level for level in self.levels.values() if 0 < level <= 3}
        trained = {self.levels[name] for name in self.moved if self.levels.get(name) in there}
        assert trained == {"freezing": {3}, "unfreezing": {2, 3}}.get(cell, {1, 2, 3}) & there
        if cell == "LoRA":
            assert {name.split(".")[-2] for name in self.moved if name.startswith("bert.")} == {*adapted}


def rows(tasks):
    """Six rows a task, encoded, of three lengths."""
    draw = torch.Generator().manual_seed(0)

    def text(length):
        return torch.randint(5, 60, (length,), generator=draw).tolist()

    lengths, scores, classes = (3, 9, 5, 4, 7, 6), (0.0, 5.0, 2.5, 1.0, 4.0, 3.0), (0, 1, 0, 1, 1, 0)
    made = {}
    for task in tasks:
        ids = [[text(n), text(n + 1)] if task.pair_encoding == "bi" else text(n) for n in lengths]
        labels = {
            "score": scores, "labels": [["sport"], [], ["sport", "money"], ["science"], [], ["money"]],
            "tags": [[-100, *(n % 3 for n in range(length - 1))] for length in lengths],
        }.get(task.kind, classes)  # fmt: skip
        made[task.name] = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    return made


def make_cell(encoder: Path, folder: Path, cell: str, lora: dict[str, Any] | None = None) -> Cell:
    """Trains the model of an encoder's folder, and saves it in another one.

    Args:
        lora: options of the adapter beside those of any.
    """
    torch.manual_seed(0)
    layers = "mix" if cell == "mix" else "last"
    sts = replace(get_tasks(["sts"])[0], pair_encoding="bi", join="concat", pooling="mean", layers=layers)
    tasks = [replace(get_tasks(["sst"])[0], layers=layers, pooling="mean"), sts, *(OTHERS if cell == "heads" else ())]
    sharing = {"private_layers": 1} if cell == "private layers" else {"private_encoders": cell == "private encoders"}
    model = MinBertForMultiTask.from_pretrained(encoder, tasks=tasks, **sharing)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    levels_by = levels_of(model)
    levels = {name: levels_by[p] for name, p in model.named_parameters()}
    packing = cell in PACKED and model.config.encoder_config is None
    if cell == "LoRA":
        options = {"r": 2, "init_lora_weights": False, **(lora or {})}
        model = add_adapter(model, options, str(encoder), heads=[task.name for task in tasks])
    args = MultiTaskTrainingArguments(
        str(folder / "run"), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-2, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, packing=packing, **CELLS[cell],
    )  # fmt: skip
    MultiTaskTrainer(model, args, train_dataset=rows(tasks)).train()
    model = merged(model).eval() if cell == "LoRA" else model.eval()
    inputs = inputs_of(model)
    with torch.no_grad():
        answers = {task: model(task=task, **given).logits for task, given in inputs.items()}
    model.save_pretrained(folder)
    torch.save(inputs, folder / "inputs.pt")
    return Cell(folder, answers, before, model.state_dict(), levels)


def inputs_of(model):
    """A padded batch for each task."""
    draw, pad = torch.Generator().manual_seed(1), model.config.pad_token_id
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    made = {}
    for name in model.config.task_names:
        bi = model.config.get_task(name)["pair_encoding"] == "bi"
        here = torch.stack([mask, mask.flip(0)], 1) if bi else mask
        ids = torch.randint(5, 60, here.shape, generator=draw)
        made[name] = {"input_ids": ids * here + pad * (1 - here), "attention_mask": here}
    return made


def without_package(folders: list[Path], home: Path) -> dict[str, dict[str, list]]:
    """What a process without the package answers, by folder and task."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([*map(str, folders)]), cwd=home,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONPATH": ""}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
