"""Terms that are added to each task's loss in training.

To add one: a class here and a line in `REGULARIZERS`. The recipe's `regularizer: none` means no term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch


class Regularizer(ABC):
    """A term of one task's loss, computed from the model, the batch and the clean output."""

    @abstractmethod
    def __call__(
        self, model: torch.nn.Module, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The term, a scalar with a gradient.

        Args:
            model: called as `model(**batch)`; may be wrapped for mixed precision, never in DDP.
            batch: one task's mini-batch, with its name under `task`.
            outputs: what the model gave for the batch: `loss`, `logits`.
        """


REGULARIZERS: dict[str, type[Regularizer]] = {}
