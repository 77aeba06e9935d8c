"""What a frozen encoder says of the training rows, computed once: a step is then a matter of the heads alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn

from ..data.collators import PaddedCollator
from ..data.rows import EncodedRows, PooledRows
from ..modeling_minbert import MinBertForMultiTask

if TYPE_CHECKING:
    from .args import MultiTaskTrainingArguments

logger = logging.getLogger(__name__)


def is_constant(args: MultiTaskTrainingArguments, model: nn.Module) -> bool:
    """Whether the encoder says the same of a row at every step: it is frozen, has no dropout, and nothing moves words.

    A regularizer moves them or asks twice, and a proximal term asks other weights.
    """
    frozen = args.freeze == "encoder" and not args.unfreeze
    if not frozen or args.regularizer != "none" or args.proximal != "none" or args.neftune_noise_alpha:
        return False
    if not isinstance(model, MinBertForMultiTask) or model.config.attention_probs_dropout_prob:
        return False
    parts = (model.bert, model.private)
    return not any(m.p for part in parts for m in part.modules() if isinstance(m, nn.Dropout))


def read_once(
    model: MinBertForMultiTask,
    datasets: Mapping[str, EncodedRows],
    collators: Mapping[str, PaddedCollator],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, EncodedRows | PooledRows]:
    """The rows with what each task's head pools of them; as they are where the head trains what it pools by.

    Args:
        model: whose encoder is frozen and `is_constant`.
        datasets: by task.
        collators: by task; packed whatever they say.
        batch_size: rows that go through the encoder at a time.
        autocast: the precision that the training steps have.
    """
    names = [name for name in datasets if not model.heads.get(name).trains_pooling]
    if names:
        logger.info("The frozen encoder has no dropout: it reads the rows of %s once.", ", ".join(names))
    return {
        name: _pooled(model, rows, collators[name], batch_size, autocast) if name in names else rows
        for name, rows in datasets.items()
    }


@torch.inference_mode()
def _pooled(
    model: MinBertForMultiTask,
    rows: EncodedRows,
    collator: PaddedCollator,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> PooledRows:
    collate = PaddedCollator(collator.task, collator.pad_token_id, packing=True)
    order, found, mode = np.argsort(-rows.row_lengths, kind="stable"), [], model.training
    model.eval()
    for start in range(0, len(order), batch_size):
        batch = collate(rows.take(order[start : start + batch_size]))
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "teacher")}
        with autocast():
            found.append(model.pool(**send_to_device(inputs, model.device)).float())
    model.train(mode)
    return PooledRows(torch.cat(found).cpu().numpy()[np.argsort(order)], rows.labels, rows.teacher)
