"""Cached outputs of a frozen encoder for the training rows: a step then computes the heads alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from ..data.collators import PaddedCollator
from ..data.rows import EncodedRows, PooledRows
from .base_args import BaseArguments
from .protocol import TaskModel, draws, in_mode, shortest_batch, takes

logger = logging.getLogger(__name__)


def is_constant(args: BaseArguments, model: TaskModel, tasks: Iterable[str]) -> bool:
    """Whether the encoder's outputs for a row are the same at every step.

    They are where it is frozen, has no dropout, and no term perturbs word embeddings (regularizers, NEFTune) or swaps
    the weights (`proximal`). The model must have `pool`.
    """
    frozen = args.freeze == "encoder" and not args.unfreeze
    if not frozen or args.regularizer != "none" or args.proximal != "none" or args.neftune_noise_alpha:
        return False
    if model.encoder_path.__self__ is not model or not takes(model, "pooled"):  # `pool` would bypass a wrapper
        return False
    return not any(draws(model, partial(_pool, model, name)) for name in tasks)


def _pool(model: TaskModel, task: str) -> torch.Tensor:
    return model.pool(**{key: value for key, value in shortest_batch(model, task).items() if key != "labels"})


def cache_features(
    model: TaskModel,
    datasets: Mapping[str, EncodedRows],
    collators: Mapping[str, PaddedCollator],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, EncodedRows | PooledRows]:
    """The rows with each task's pooled features; unchanged where the head trains its pooling.

    Rows of tags, whose heads read each token, stay as they are.

    Args:
        model: whose encoder is frozen and `is_constant`.
        datasets: by task.
        collators: by task. Their batches are packed, where the model takes that, whether or not theirs are.
        batch_size: rows that go through the encoder at a time.
        autocast: the precision of the training steps.
    """
    of_sentences = [name for name in datasets if datasets[name].words is None]
    names = [name for name in of_sentences if not model.heads.get(name).trains_pooling]
    if names:
        logger.info("The frozen encoder has no dropout: it reads the rows of %s once.", ", ".join(names))
    return {
        name: _pooled(model, rows, collators[name], batch_size, autocast) if name in names else rows
        for name, rows in datasets.items()
    }


@torch.inference_mode()
def _pooled(
    model: TaskModel,
    rows: EncodedRows,
    collator: PaddedCollator,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> PooledRows:
    collate = PaddedCollator(collator.task, collator.pad_token_id, packing=takes(model, "packing"))
    order, features = np.argsort(-rows.row_lengths, kind="stable"), []
    device = next(model.parameters()).device
    with in_mode(model, training=False):
        for start in range(0, len(order), batch_size):
            batch = collate(rows.take(order[start : start + batch_size]))
            inputs = {key: value for key, value in batch.items() if key not in ("labels", "teacher")}
            with autocast():
                features.append(model.pool(**send_to_device(inputs, device)).float())
    return PooledRows(torch.cat(features).cpu().numpy()[np.argsort(order)], rows.labels, rows.teacher)
