"""The trainer: the stock one, for rounds of several tasks in the place of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import TrainOutput

from ..data.collators import PaddedCollator, RoundCollator
from ..data.encoding import check_max_length, encode
from ..data.rows import EncodedRows, PooledRows
from ..errors import MinBertError, unknown_name
from ..publishing.trainer import PushesToHub
from ..settings.tasks import Task
from .aggregation.conflicts import EpochTotals, is_whole
from .args import MultiTaskTrainingArguments
from .checkpoints import SavesAfterEpoch, WholeCheckpoints, early_stopping, save_gradients, to_resume
from .class_weights import check_counted, prepare_losses
from .data import data_loader, rounds_of
from .distributed import without_ddp
from .evaluator import TaskEvaluation, TrainingScores
from .feature_cache import is_constant, read_once
from .freezing import Freezing, check_trainable, count_parameters, encoder_parameters
from .hyperparameters import HyperparameterSearch
from .optimizers import OPTIMIZERS
from .parameter_groups import check_optimizer, has_groups, rates_by_group, split_groups
from .protocol import check_model, require
from .step import RoundStep
from .terms.distillation import distillation_of, taught
from .terms.proximal import PretrainedDecay, proximal_of
from .terms.regularizers import regularizer_of

logger = logging.getLogger(__name__)


class MultiTaskTrainer(RoundStep, TaskEvaluation, HyperparameterSearch, WholeCheckpoints, PushesToHub, Trainer):
    """A `Trainer` for one model with several tasks.

    Args:
        model: a `training.protocol.TaskModel`, such as `MinBertForMultiTask`, plain or wrapped by
            `peft.get_peft_model`. Where a task's loss options say `auto`, its config gets the numbers that are counted
            from the training rows; where `args.freeze` says so, its parameters lose `requires_grad`; those that
            `args.unfreeze` frees later do so while it trains.
        args: its `train_tasks`, `eval_tasks` and what it gives by task name the model's tasks.
        train_dataset: `{task: rows}`. Rows are a `datasets.Dataset`, a map-style torch dataset or a list of dicts,
            with the task's text columns and its label, or encoded already (`input_ids`, `labels`). Rows alone are
            accepted where the model has one task or an active one.
        eval_dataset: likewise.
        processing_class: the tokenizer; saved with every checkpoint.
        max_length: longest input in tokens. Unless given, what the model was trained for before, else all its
            positions. Model and saved tokenizer carry it (`config.max_input_length`, `model_max_length`).
        cache_dir: where encoded rows are kept for the next run; nowhere unless given.
        teacher_logits: `{task: [rows, outputs]}`, what `args.teachers` answer to the training rows, as
            `distillation.teacher_logits` gives it.
        callbacks: added to the stock ones.
        model_init: makes a model, with no argument or with a search's trial; instead of `model`, for
            `hyperparameter_search`.
        optimizers: optimizer and schedule to use instead of those that `args` name.

    Raises:
        MinBertError: the model has no tasks; a task, a metric or a length does not fit it; a task has no rows, or
            fewer than an epoch is to have; `args` are stock ones, or a subclass has a `compute_loss`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        args: MultiTaskTrainingArguments,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        cache_dir: str | None = None,
        teacher_logits: Mapping[str, np.ndarray] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    ):
        given = {
            "train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class,
            "max_length": max_length, "cache_dir": cache_dir, "teacher_logits": teacher_logits, "callbacks": callbacks,
        }  # fmt: skip
        model = self.prepare_search(model, model_init, given)
        self._check_given(model, args)
        # The stock constructor sets these three too; what is checked and prepared before it needs them.
        self.model, self.args, self.processing_class = model, args, processing_class
        self.tasks = {saved["name"]: Task.from_config(saved) for saved in model.config.tasks}
        self.max_length = model.config.max_input_length = check_max_length(max_length, model.config)
        if processing_class is not None:
            self.processing_class = processing_class = copy(processing_class)  # the caller's keeps its length
            processing_class.model_max_length = self.max_length
        self.cache_dir = cache_dir
        self._choose_tasks(train_dataset, eval_dataset)
        self.collators = self._make_collators()
        train_dataset, eval_dataset = self._prepare_rows(train_dataset, eval_dataset, teacher_logits)
        self.freezing = Freezing(model, args.freeze, args.unfreeze, self.forget_recordings)
        check_optimizer(optimizers[0], args)
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), *early_stopping(args), SavesAfterEpoch()],
            optimizers=optimizers,
        )
        # Read from the signature of the model's class, both would be wrong for a compiled or wrapped model.
        self.label_names, self.model_accepts_loss_kwargs = ["labels"], False
        if args.compile_layers:
            compile_layers(model)
        self.regularizer, self.proximal = regularizer_of(args), proximal_of(args)
        for capability in () if self.regularizer is None else self.regularizer.needs:
            require(model, capability, f"regularizer: {args.regularizer}")
        self.distillation = distillation_of(args)
        self._training_scores = None if args.train_metrics == "none" else TrainingScores(self)
        self._rates: dict[str, float] = {}
        self.begin_measuring()
        if train_dataset is not None:
            self._warn()
        for callback in self._own_callbacks():
            self.add_callback(callback)

    # ---- What the constructor does ---------------------------------------------------------------------------

    def _check_given(self, model: nn.Module, args: MultiTaskTrainingArguments) -> None:
        if not isinstance(args, MultiTaskTrainingArguments):
            raise MinBertError(
                f"`args` must be MultiTaskTrainingArguments, which have all fields of TrainingArguments. Found "
                f"{type(args).__name__}."
            )
        check_model(model)
        if args.packing:
            require(model, "packing", "packing: true")
        if type(self).compute_loss is not Trainer.compute_loss:
            raise MinBertError(
                f"{type(self).__name__} has a `compute_loss`, which no step of several tasks calls. Override "
                "`task_loss(model, batch, place)` instead; see `RoundStep`."
            )

    def _choose_tasks(self, train_dataset: Any, eval_dataset: Any) -> None:
        for option, rows in (("train_tasks", train_dataset), ("eval_tasks", eval_dataset)):
            if rows is not None and not isinstance(rows, Mapping) and getattr(self.args, option) is None:
                setattr(self.args, option, [self._one_task(None)])  # rows alone: the other tasks are idle
        self.args.check_tasks(self.tasks)
        self.train_tasks = self.args.chosen_tasks("train_tasks", self.tasks)
        self.eval_tasks = self.args.chosen_tasks("eval_tasks", self.tasks)

    def _make_collators(self) -> dict[str, PaddedCollator]:
        tokenizer, config = self.processing_class, self.model.config
        pad = config.pad_token_id if tokenizer is None else tokenizer.pad_token_id
        fill_to = self.max_length if self.args.uses_graphs else None
        return {
            name: PaddedCollator(task, pad, packing=self.args.packing, fill_to=fill_to)
            for name, task in self.tasks.items()
        }

    def _prepare_rows(
        self, train: Any, dev: Any, teacher_logits: Mapping[str, np.ndarray] | None
    ) -> tuple[Mapping[str, EncodedRows] | None, Mapping[str, EncodedRows] | None]:
        """The encoded rows of either; what losses count of the rows to train on is in the model's config then."""
        if train is not None:
            train = self._encode(train, self.train_tasks, "train_dataset")
            prepare_losses(self.args, self.model.config, self.tasks, train)
            train = taught(self.args, self.tasks, train, teacher_logits)
        if dev is not None:
            dev = self._encode(dev, self.eval_tasks, "eval_dataset")
        check_counted(self.tasks[name] for name in [*(train or ()), *(dev or ())])
        if self.args.eval_strategy != "no" and not dev:
            raise MinBertError("`eval_strategy` asks for evaluations. Pass `eval_dataset={task: rows}`.")
        return train, dev

    def _encode(self, datasets: Any, wanted: list[str] | None, argument: str) -> dict[str, Any]:
        """`{task: encoded rows}` of the wanted tasks, or of all that were given."""
        if not isinstance(datasets, Mapping):
            datasets = {self._one_task(None): datasets}
        for name in datasets:
            if name not in self.tasks:
                raise MinBertError(f"`{argument}`: {unknown_name('task', name, self.tasks)}")
        missing = [name for name in wanted or [] if name not in datasets]
        if missing:
            option = argument.replace("dataset", "tasks")
            raise MinBertError(
                f"`{argument}` has no rows of {', '.join(missing)}. Add them, or set `{option}` to the tasks it has: "
                f"{', '.join(datasets) or '(none)'}."
            )
        names = wanted if wanted is not None else list(datasets)
        encoded = {
            name: encode(datasets[name], self.tasks[name], self.processing_class, self.max_length, self.cache_dir)
            for name in names
        }
        for name, rows in encoded.items():
            if "labels" not in rows[0]:
                raise MinBertError(f"`{argument}`: the rows of {name!r} have no labels. Add a column `label`.")
        return encoded

    def _warn(self) -> None:
        """Says what has no effect on a training, and what precision goes ill with."""
        for warning in self.args.without_effect(self.tasks[name] for name in self.train_tasks):
            logger.warning(warning)
        if self.regularizer is not None:
            half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
            dtype = half or next(self.model.parameters()).dtype
            with self.compute_loss_context_manager():
                found = [w for task in self.train_tasks for w in self.regularizer.warnings(self.model, task, dtype)]
            for warning in dict.fromkeys(found):
                logger.warning(warning)

    def _own_callbacks(self) -> Iterator[TrainerCallback]:
        """What works between steps, in the order in which it does."""
        if self.train_dataset is not None:
            if self.proximal is not None:
                yield self.proximal
            if self.args.pretrained_decay:
                yield PretrainedDecay(self.args.pretrained_decay, encoder_parameters(self.model))
        if self._training_scores is not None:
            yield self._training_scores
        if self.freezing.changes:
            yield self.freezing
        yield EpochTotals(self)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        without_ddp(self.accelerator)

    # ---- Data ------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Rounds in the order of `args.mixing`, dealt whole to the processes."""
        rounds = rounds_of(self.args, self.tasks, self._rows_of_steps())
        collate = RoundCollator({name: self.collators[name] for name in rounds.datasets})
        return self.accelerator.prepare(data_loader(self.args, rounds, batch_size=1, collate=collate))

    def _rows_of_steps(self) -> Mapping[str, EncodedRows | PooledRows] | None:
        """The training rows; with what a frozen encoder says of them, where that is the same at every step."""
        model = self.accelerator.unwrap_model(self.model)
        autocast = self.accelerator.autocast
        with autocast():
            if self.train_dataset is None or not is_constant(self.args, model, self.train_dataset):
                return self.train_dataset
        return read_once(model, self.train_dataset, self.collators, self.args.eval_batch_size, autocast)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Rows an epoch of this loader shows; the stock count would be of rounds."""
        if isinstance(dataloader.collate_fn, RoundCollator):
            return dataloader.dataset.num_rows
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: MultiTaskTrainingArguments) -> int:
        """Rows of all tasks that an optimizer step sees, over all processes; a mean, where tasks leave the rounds."""
        rounds = rounds_of(self.args, self.tasks, self.train_dataset)
        return round(rounds.num_rows / len(rounds) * args.gradient_accumulation_steps * args.world_size)

    def floating_point_ops(self, inputs: dict[str, dict[str, Any]]) -> int:
        """By the stock estimate: six per token and parameter outside the embeddings."""
        tokens = sum(batch["input_ids"].numel() for batch in inputs.values() if "input_ids" in batch)
        return 6 * self._num_parameters * tokens

    @cached_property
    def _num_parameters(self) -> int:  # to count them takes as long as a step of a small model
        embeddings = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}
        return sum(parameter.numel() for parameter in {*self.model.parameters()} - embeddings)

    # ---- Training --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **kwargs: Any) -> TrainOutput:
        """Trains. `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end.

        With a `trial` of `hyperparameter_search`, it is that which is trained, by another trainer.
        """
        if trial is not None:
            return self.train_trial(trial)
        checkpoint = to_resume(resume_from_checkpoint, self.args)
        self._check_trainable()
        self.begin_steps(checkpoint)
        if self.proximal is not None:
            self.proximal.resume_from = checkpoint
        on_gpu = self.args.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.args.device)
        self.model.train()  # an adapter's own flag is that of a new module, and what is inside was loaded
        output = super().train(resume_from_checkpoint=checkpoint, **kwargs)
        self._means.read()  # what came after the last log
        found = {name: mean for name, mean in self._means.totals().items() if not name.startswith("loss_")}
        if on_gpu:
            found["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.args.device) / 1e9
        output.metrics.update({f"train_{name}": value for name, value in {**found, **self.conflicts.means()}.items()})
        return output

    def _check_trainable(self) -> None:
        """Raises `MinBertError` if nothing is trained for one of the tasks; else says how much is, at first."""
        if self.freezing.changes:
            self.freezing.freeze(0)
        with self.compute_loss_context_manager():
            check_trainable(self.model, self.train_tasks)
        logger.info("%s of %s parameters are trainable.", *(f"{n:,}" for n in count_parameters(self.model)))
        if self.freezing.changes:
            self.freezing.release()  # the gradients and the optimizer take in all that is ever trained

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: MultiTaskTrainingArguments, model: nn.Module | None = None) -> tuple:
        """The optimizer's class and arguments; ours take those of the stock AdamW."""
        if args.optim.value not in OPTIMIZERS:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = (args.adam_beta1, args.adam_beta2)
        return OPTIMIZERS[args.optim.value], {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The stock one, its groups split where `args` give parts of the model rates or decays of their own."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made and has_groups(self.args):
            split_groups(optimizer, self.model, self.args, {*self.get_decay_parameter_names(self.model)})
        return optimizer

    def _get_learning_rate(self) -> float:
        """What the log says of a step; read before the schedule moves on, and so are the groups' rates."""
        self._rates = rates_by_group(self.optimizer)
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds means since the last log: each task's loss before its weight, `loss_<task>`, and the terms in it.

        A term is logged before its weight, as `<regularizer>_<task>` or `proximal_<task>`; `<regularizer>_skipped` is
        how many batches had none, as its gradient was not finite. An aggregator that sees each task's gradient adds
        what `ConflictMeter` measures, and at the last step of an epoch its totals. Groups of parameters with rates of
        their own add those, as `learning_rate_<group>`.
        """
        if "learning_rate" in logs:
            logs.update({f"learning_rate_{group}": rate for group, rate in self._rates.items()})
        if "loss" in logs and (means := self._means.read()):
            logs.update({**means, **self.conflicts.read()})
            if is_whole(self.state.epoch):
                logs.update(self.conflicts.end_epoch())
        super().log(logs, start_time)

    # ---- Checkpoints -----------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the stock one, and what else a resumed run needs."""
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return
        if self.proximal is not None:
            self.proximal.save(output_dir)
        if self._gradients is not None:
            save_gradients(self._gradients, self.args, Path(output_dir))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.proximal is not None and not self.args.save_only_model:
            self.proximal.load(self.state.best_model_checkpoint)  # else it stays that of the last step


def compile_layers(model: nn.Module) -> None:
    """Compiles a transformer's layers in place, for inputs of any size.

    All share one program: it is the class's code that is compiled, and weights are its inputs.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise MinBertError(
            f"`compile_layers: true` needs a model with layers of transformers' `GradientCheckpointingLayer`. Found a "
            f"{type(model).__name__}. Leave it out, or take `torch_compile: true`."
        )
    for layer in layers:
        layer.compile(dynamic=True)
