"""Cached outputs of a frozen encoder for the training rows. A step then computes the heads only."""

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

    This requires that it is frozen and has no dropout, and that no term perturbs word embeddings (regularizers,
    NEFTune) or swaps the weights (`proximal`). The model must have `pooled_of`.
    """
    frozen = args.freeze == "encoder" and not args.unfreeze
    if not frozen or args.regularizer != "none" or args.proximal != "none" or args.neftune_noise_alpha:
        return False
    if model.encoder_path.__self__ is not model or not takes(model, "pooled"):  # `pooled_of` would bypass a wrapper
        return False
    return not any(draws(model, partial(_pool, model, name)) for name in tasks)


def _pool(model: TaskModel, task: str) -> torch.Tensor:
    inputs = {key: value for key, value in shortest_batch(model, task).items() if key not in ("task", "labels")}
    return model.pooled_of([task], **inputs)[task]


def cache_features(
    model: TaskModel,
    datasets: Mapping[str, EncodedRows],
    collators: Mapping[str, PaddedCollator],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, EncodedRows | PooledRows]:
    """Adds pooled features to each task's rows. Rows are not changed if the head trains its pooling.

    Rows of tags are not changed either, because their heads read each token.

    Args:
        model: a model whose encoder is frozen and `is_constant`.
        datasets: the rows by task.
        collators: the collators by task. Batches here are packed if the model supports it, even if the collators do
            not pack.
        batch_size: the number of rows in a pass through the encoder.
        autocast: the precision of the training steps.
    """
    of_sentences = [name for name in datasets if datasets[name].words is None]
    names = [name for name in of_sentences if not model.heads.get(name).trains_pooling]
    if names:
        logger.info(
            "The frozen encoder has no dropout, so its outputs for %s are computed once and cached.", ", ".join(names)
        )
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
    task, pad = collator.task, collator.pad_token_id
    collate = PaddedCollator(task, pad, packing=takes(model, "packing"))
    order, features = np.argsort(-rows.row_lengths, kind="stable"), []
    device = next(model.parameters()).device
    with in_mode(model, training=False):
        for start in range(0, len(order), batch_size):
            batch = collate(rows.take(order[start : start + batch_size]))
            inputs = {key: value for key, value in batch.items() if key not in ("task", "labels", "teacher")}
            with autocast():
                features.append(model.pooled_of([task.name], **send_to_device(inputs, device))[task.name].float())
    pooled = torch.cat(features).cpu().numpy()[np.argsort(order)]
    return PooledRows(pooled, rows.labels, rows.teacher, rows.labelled)
