"""The training arguments as the modules of training use them. `args` adds the checks, which need all modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..data.rounds import MIXING, Drawn
from ..settings.keys import key
from ..settings.tasks import Task, chosen, metric_names
from ..settings.training import TrainingKeys
from .optimizers import OwnOptimizer


@dataclass
# The stock annotation of `resume_from_checkpoint` knows no `true`.
class BaseArguments(TrainingKeys, TrainingArguments):  # ty: ignore[incompatible-attribute-override]
    """The stock arguments and ours, with values derived from them."""

    optim: OptimizerNames | OwnOptimizer | str = key(
        TrainingArguments.optim,
        "The optimizer: `course_adamw`, the AdamW of the CS224N handout, or one of transformers.",
    )

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are recorded as CUDA graphs."""
        return self.cuda_graphs == "auto" and self.packing and self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device = super().device
        # One of several CPU processes has the device "cpu:1", to which transformers 5.17 cannot load an optimizer.
        return torch.device("cpu") if device.type == "cpu" else device

    def why_none_conflict(self, trained: Sequence[str]) -> str | None:
        """Returns the reason why no two trained tasks can conflict (they share no trained weight), or `None`."""
        if len(trained) < 2:
            return "one task is trained"
        if self.freeze == "encoder" and self.unfreeze is None:
            return "with `freeze: encoder` nothing is trained that tasks share"
        if issubclass(MIXING[self.mixing], Drawn) and self.gradient_accumulation_steps == 1:
            return f"with `mixing: {self.mixing}` and without `gradient_accumulation_steps` each step has one task"
        return None

    def by_task(self, option: str) -> Mapping[str, Any]:
        """Returns the value of `option` for each task. Empty if it is not set, or is one word for all tasks."""
        value = getattr(self, option)
        return value if isinstance(value, Mapping) else {}

    def chosen_tasks(self, option: str, tasks: Mapping[str, Task]) -> list[str]:
        """Returns the tasks that `option` names, each once; all tasks if it is not set.

        Raises:
            MinBertError: it names a task that is not in `tasks`, or is empty.
        """
        return chosen(option, getattr(self, option), tasks)

    def metrics_of(self, tasks: Iterable[Task]) -> list[str]:
        """Returns the names of the metrics that an evaluation during training reports for these tasks."""
        names = metric_names(tasks)
        averaged = [f"eval_averaged_{name}" for name in names] if self.proximal_evaluate is True else []
        return [f"eval_{name}" for name in names] + averaged
