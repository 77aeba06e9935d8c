"""The models and batches of single steps, and the steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from hf_minbert import MinBertConfig, MinBertForMultiTask, Task, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.training.aggregation.conflicts import ConflictMeter
from hf_minbert.training.aggregation.registry import make_aggregator
from hf_minbert.training.gradients import Gradients, collector

from .shared import MAX_LENGTH, SIZES, Setting

Batch = dict[str, Any]


def make_minbert(
    path: str | None, size: str, names: Sequence[str] | Mapping[str, Task] = ("sst",)
) -> MinBertForMultiTask:
    tasks = get_tasks(names)
    if path is not None:
        return MinBertForMultiTask.from_pretrained(path, tasks=tasks, attn_implementation="sdpa")
    config = MinBertConfig(tasks=tasks, **SIZES[size])
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def make_stock(path: str | None, size: str) -> BertForSequenceClassification:
    num_labels = get_tasks(["sst"])[0].num_outputs
    if path is not None:
        return BertForSequenceClassification.from_pretrained(path, num_labels=num_labels, attn_implementation="sdpa")
    config = BertConfig(num_labels=num_labels, **SIZES[size])
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def random_batch(batch_size: int, length: int, vocab_size: int, device: str, task: str = "sst") -> Batch:
    """Random tokens of a task of classes; every second row is shorter."""
    # With padding, because without any the library drops the mask and the step is not the usual one.
    lengths = torch.full((batch_size, 1), length)
    lengths[1::2] = torch.randint(length // 2, length, (batch_size // 2, 1))
    attention_mask = (torch.arange(length) < lengths).long()  # [B, T]
    batch = {
        "input_ids": torch.randint(5, vocab_size, (batch_size, length)) * attention_mask,
        "attention_mask": attention_mask,
        "token_type_ids": torch.zeros_like(attention_mask),
        "labels": torch.arange(batch_size) % (2 if task == "para" else 5),
    }
    return {name: value.to(device) for name, value in batch.items()}


def sample_batch(model: str, batch_size: int, device: str, task: str = "sst") -> Batch:
    """The first rows of the package's sample of a task, as the checkpoint's tokenizer encodes them."""
    (spec,), tokenizer = get_tasks([task]), AutoTokenizer.from_pretrained(model)
    encoded = encode(load_split(spec, "sample", "train"), spec, tokenizer, MAX_LENGTH)
    batch = PaddedCollator(spec, tokenizer.pad_token_id)([encoded[i] for i in range(batch_size)])
    return {name: value.to(device) for name, value in batch.items() if name != "task"}


def plain_step(
    model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], setting: Setting
) -> Callable[[], None]:
    """Forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        with setting.autocast():
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def surgery_step(
    model: MinBertForMultiTask, calls: Sequence[Batch], aggregator: str, setting: Setting
) -> Callable[[], None]:
    """A step as the trainer takes it, its measurements of conflicts included."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.Generator().manual_seed(0)
    gradients: Gradients = collector(
        model.parameters(), make_aggregator(aggregator), meter=ConflictMeter([call["task"] for call in calls])
    )

    def run() -> None:
        for call in calls:
            with setting.autocast():
                loss = model(**call).loss
            gradients.add(call["task"], loss)
        gradients.combine(generator)
        optimizer.step()
        optimizer.zero_grad()

    return run


def sharing_step(
    model: MinBertForMultiTask, tasks: Sequence[str], batch: Batch, aggregator: str, setting: Setting
) -> Callable[[], None]:
    """As `surgery_step`, of tasks with a label for each row of one batch, through one pass of the encoder."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.Generator().manual_seed(0)
    gradients = collector(model.parameters(), make_aggregator(aggregator), meter=ConflictMeter([*tasks]))
    inputs = {name: value for name, value in batch.items() if name != "labels"}

    def run() -> None:
        with setting.autocast():
            pooled = model.pooled_of(tasks, **inputs)
            losses = {t: model(task=t, pooled=pooled[t], labels=batch["labels"]).loss for t in tasks}
        gradients.add_together(losses)
        gradients.combine(generator)
        optimizer.step()
        optimizer.zero_grad()

    return run


def naive_step(model: MinBertForMultiTask, calls: Sequence[Batch], setting: Setting) -> Callable[[], None]:
    """PCGrad as its popular code for torch has it: all graphs kept, whole gradients flattened, copied and compared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def flat_gradient(loss: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.clone()).flatten() for p in parameters])

    def run() -> None:
        with setting.autocast():
            losses = [model(**call).loss for call in calls]
        gradients = [flat_gradient(loss) for loss in losses]
        projected = copy.deepcopy(gradients)
        for mine in projected:
            random.shuffle(gradients)
            for other in gradients:
                dot = torch.dot(mine, other)
                if dot < 0:  # waits for the GPU, each time
                    mine -= dot * other / other.norm() ** 2
        total = torch.stack(projected).sum(dim=0)
        for parameter, piece in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()

    return run
