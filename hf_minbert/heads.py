"""Every head: the layers from a pooled sentence to a task's outputs, and the loss that belongs to them.

This file travels to the Hub with a model: it may import published libraries only. Letters in shapes:
B examples, H hidden size, C outputs of the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init


def num_outputs(task: dict[str, Any]) -> int:
    """C: how many numbers a head gives per example."""
    return len(task["labels"]) if task["kind"] == "classes" else 1


class OutputLayer(nn.Linear):
    """The last layer of a head. A fresh one for scores predicts the middle of their range.

    From zero, the squared error on scores up to 5 drowns the other tasks' losses for hundreds of steps.
    """

    def __init__(self, in_features: int, task: dict[str, Any]):
        super().__init__(in_features, num_outputs(task))
        self.start = sum(task["range"]) / 2 if task["kind"] == "score" else 0.0

    def init_weights(self) -> None:
        """What the library's own initialization does not do; the model calls it after that."""
        init.constant_(self.bias, self.start)


class Head(nn.Module, ABC):
    """Base of all heads. A subclass adds layers and `forward`; the loss follows from the task's kind."""

    def __init__(self, config, task: dict[str, Any]):
        super().__init__()
        self.kind = task["kind"]

    @abstractmethod
    def forward(self, pooled: Tensor) -> Tensor:
        """[B, H] -> logits [B, C]"""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch, in float32: cross-entropy, binary cross-entropy on one logit, or squared error.

        Args:
            logits: [B, C], as `forward` gave them.
            labels: [B] or [B, 1]; class ids for classes and binary, scores for a score.

        Raises:
            ValueError: not one label per example.
        """
        labels = labels.reshape(-1)
        if len(labels) != len(logits):
            raise ValueError(f"Expected one label per example. Found {len(labels)} labels for {len(logits)} examples.")
        logits = logits.float()
        if self.kind == "classes":
            return F.cross_entropy(logits, labels)
        # Both sides flat: [B, 1] against [B] would broadcast to [B, B] without a word.
        criterion = F.binary_cross_entropy_with_logits if self.kind == "binary" else F.mse_loss
        return criterion(logits.reshape(-1), labels.float())


class LinearHead(Head):
    """Dropout and one linear layer, as in the BERT paper (arXiv:1810.04805, section 4.1)."""

    def __init__(self, config, task: dict[str, Any]):
        super().__init__(config, task)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.linear = OutputLayer(config.hidden_size, task)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(self.dropout(pooled))


class TaskHeads(nn.Module):
    """The heads of all tasks, each a submodule under its task's name.

    Not an `nn.ModuleDict`: PEFT refuses one in `modules_to_save`.

    Raises:
        ValueError: a task's head is unknown, or its name is one that a torch module uses itself.
    """

    def __init__(self, config):
        super().__init__()
        for task in config.tasks:
            name = task["name"]
            if task["head"] not in HEADS:
                raise ValueError(
                    f"Task {name!r}: unknown head {task['head']!r}. Choose from: {', '.join(sorted(HEADS))}."
                )
            if hasattr(self, name):
                raise ValueError(f"A task cannot be called {name!r}: a torch module uses that name. Choose another.")
            self.add_module(name, HEADS[task["head"]](config, task))

    def forward(self, pooled: Tensor, task: str) -> Tensor:
        """[B, H] -> logits [B, C] of this task"""
        return getattr(self, task)(pooled)

    def loss(self, logits: Tensor, labels: Tensor, task: str) -> Tensor:
        """The mean loss of this task's batch; see `Head.loss`."""
        return getattr(self, task).loss(logits, labels)


HEADS = {"linear": LinearHead}
