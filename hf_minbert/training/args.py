"""The training arguments: the stock ones, and arguments for several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import cast

import torch
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from ..errors import MinBertError, unknown_name
from ..settings.idle import idle_keys
from ..settings.keys import default_of, documented
from ..settings.metrics import higher_is_better
from ..settings.tasks import Task
from .base_args import BaseArguments
from .checks import check_ranges, check_tasks, check_values
from .distributed import check_launch, launched_precision, warn_about_idle_gpus, warn_about_mps
from .optimizers import OPTIMIZERS, OwnOptimizer
from .unsupported_arguments import refuse_bf16_without_gpu, refuse_settings, refuse_unsupported


@documented
@dataclass
class MultiTaskTrainingArguments(BaseArguments):
    """`TrainingArguments` for several tasks: a step has one mini-batch of each trained task.

    Some defaults differ from the stock ones. `metric_for_best_model` is `eval_overall` if a best model is requested.
    Callback states are restored on resume. Columns are not removed. Losses that are not finite are logged unchanged,
    because the stock filter reads each loss and makes the GPU wait.

    Raises:
        MinBertError: a value is out of range, or a stock argument is set that does not work with several tasks.
    """

    def __post_init__(self):
        if self.report_to is None:  # the stock class would make of it a list that holds None
            self.report_to = "none"
        wants_best = (
            self.load_best_model_at_end
            or self.early_stopping_patience is not None
            or self.save_strategy == "best"
            or self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        )
        if wants_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_overall"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = higher_is_better(self.metric_for_best_model)
        refuse_unsupported(self)  # before the stock class acts on them, as it does for DeepSpeed
        check_ranges(self)  # nor are the stock words for what is out of range always to the point
        if torch.backends.mps.is_available() and not self.use_cpu:
            warn_about_mps()
            self.use_cpu = True  # the stock class would take the GPU of a Mac
        check_launch(self.use_cpu)
        if (launched := launched_precision()) and not (self.bf16 or self.fp16):
            setattr(self, launched, True)  # else some of the code would follow the launcher, and some the recipe
        refuse_bf16_without_gpu(self)
        own = self._own_optimizer()
        super().__post_init__()
        self.optim = own or self.optim
        # Else every batch waits, before it is copied, for all that the GPU has still to do. The stock constructor has
        # made an object of whatever was given.
        cast(AcceleratorConfig, self.accelerator_config).non_blocking |= self.dataloader_pin_memory
        refuse_settings(self)
        check_values(self)
        if self.n_gpu > 1:
            warn_about_idle_gpus(self.n_gpu)
            self._n_gpu = 1  # with more, the stock Trainer wraps the model in DataParallel, which no step would use

    def _own_optimizer(self) -> OwnOptimizer | None:
        """Returns the optimizer if it is one of ours.

        A stock optimizer replaces it during the checks of the stock class.
        """
        if self.optim in OPTIMIZERS:
            if self.optim_args:
                raise MinBertError(
                    f"`optim_args` is not supported by `optim: {OwnOptimizer(self.optim).value}`, whose settings are "
                    f"`adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`. Leave it out."
                )
            own, self.optim = OwnOptimizer(self.optim), OptimizerNames.ADAMW_TORCH
            return own
        stock = [name.value for name in OptimizerNames]
        if self.optim not in stock:
            raise unknown_name("optim", self.optim, [*OPTIMIZERS, *stock])
        return None

    # ---- What depends on the model's tasks -------------------------------------------------------------------

    def without_effect(self, tasks: Iterable[Task]) -> list[str]:
        """Returns sentences about arguments of a term, or a part of one, that a run on these tasks does not have.

        They are not errors, because adding `regularizer=none` is the usual way to compare with and without a term.
        """
        tasks = [*tasks]
        given = [f.name for f in fields(self) if getattr(self, f.name) != default_of(f)]
        said = []
        if self.aggregator != "sum" and (reason := self.why_none_conflict([task.name for task in tasks])):
            said.append(f"`aggregator: {self.aggregator}` has no effect: {reason}.")
        if self.task_weights == "dwa" and self.max_steps < 0 and self.num_train_epochs <= 2:
            said.append("`task_weights: dwa` has no effect: its weights are 1 in the first two epochs.")
        for start, without, purpose in idle_keys(vars(self), tasks):
            if names := [f"`{name}`" for name in given if name.startswith(start)]:
                has, it = ("has", "It is") if len(names) == 1 else ("have", "They are")
                said.append(f"{', '.join(names)} {has} no effect with {without}. {it} for {purpose}.")
        return said

    def check_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Checks all names of tasks and metrics. It needs no model, so it can be called before one is loaded.

        Raises:
            MinBertError: as `checks.check_tasks`.
        """
        check_tasks(self, tasks)
