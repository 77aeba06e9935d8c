"""The stock `hyperparameter_search`, with a separate trainer for each trial.

The stock method trains all trials with one trainer and changes its arguments. That would be too late for this trainer,
which reads them before the first step (regularizer, freezing, batch sizes, counted loss weights).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import BestRun, HPSearchBackend, TrainOutput

from ..errors import MinBertError, unknown_name
from ..evaluation.metrics import has_diverged


class HyperparameterSearch(Trainer):
    """A trainer with a hyperparameter search. The search needs `model_init` instead of `model`."""

    def prepare_search(
        self, model: nn.Module | None, model_init: Callable[..., nn.Module] | None, options: Mapping[str, Any]
    ) -> nn.Module:
        """Returns the initial model.

        Args:
            model, model_init: one of them.
            options: the trainer's further arguments, which the trainer of each trial gets too.
        """
        self._make_model = model_init
        self._options = {} if model_init is None else options  # whose rows would else stay in memory
        if model is None and model_init is not None:
            return model_init()
        if model is not None and model_init is None:
            return model
        raise MinBertError("Give the trainer either `model` or, to search, `model_init`, which makes one.")

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] | None = None,
        backend: str | HPSearchBackend | None = "optuna",
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Does the same as the stock method, with the library optuna.

        Args:
            hp_space: a function from a trial of optuna to values of any training arguments.
            compute_objective: a function from the result of `evaluate` to a number. The default is `eval_overall`.
            n_trials: the number of trials.
            direction: `maximize` or `minimize`. The default is `maximize` for `eval_overall` and `minimize` for
                another objective.
            backend: `optuna`.
            hp_name, kwargs: as for the stock method.

        Returns:
            the best trial. A trial whose model diverged counts as failed. The trainer keeps the model that it had
            before.

        Raises:
            MinBertError: the trainer has no `model_init`, or another backend is named.
        """
        if self._make_model is None:
            raise MinBertError(
                "A search needs a new model for each trial. Give the trainer `model_init`, not `model`."
            )
        if backend not in (None, "optuna"):
            raise MinBertError(f"`backend` must be 'optuna'. Found {backend!r}.")
        direction = direction or ("maximize" if compute_objective is None else "minimize")
        objective = compute_objective or (lambda metrics: metrics["eval_overall"])

        def finite_objective(metrics: dict[str, float]) -> Any:
            found = objective(metrics)  # a list, where there are several
            if not has_diverged(metrics):
                return found
            return [math.nan] * len(found) if isinstance(found, list | tuple) else math.nan

        kept = self.model, self.model_wrapped
        self.model_init = self._make_model  # the stock search asks for it; else the stock `train` would call it
        try:
            return super().hyperparameter_search(
                hp_space, finite_objective, n_trials, direction, "optuna", hp_name, **kwargs
            )
        finally:
            self.model_init, (self.model, self.model_wrapped) = None, kept

    def train_trial(self, trial: Any) -> TrainOutput:
        """Trains and evaluates a new model with the trial's arguments, in `output_dir/run-<number>`."""
        args = replace(self.args, **self._arguments(trial), output_dir=self._get_output_dir(trial))
        set_seed(args.seed)
        trainer = type(self)(self.call_model_init(trial), args, **self._options)
        report = _Report(self, trial)
        trainer.add_callback(report)
        output = trainer.train()
        trainer.remove_callback(report)
        self.objective = self.compute_objective(trainer.evaluate())
        return output

    def _arguments(self, trial: Any) -> dict[str, Any]:
        values, known = dict(self.hp_space(trial)), [field.name for field in fields(self.args) if field.init]
        for name in values:
            if name not in known:
                raise unknown_name("training argument", name, known)
        return values


class _Report(TrainerCallback):
    """Reports each evaluation of a trial to the search, which may end the trial early."""

    def __init__(self, search: HyperparameterSearch, trial: Any):
        self.search, self.trial = search, trial

    def on_evaluate(self, args, state, control, **kwargs):
        self.search._report_to_hp_search(self.trial, state.global_step, kwargs["metrics"])
