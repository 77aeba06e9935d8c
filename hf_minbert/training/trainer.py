"""The stock `Trainer`, for rounds of several tasks instead of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from ..data.collators import PaddedCollator, RoundCollator
from ..data.encoding import (
    MANY_UNKNOWN,
    check_max_length,
    encode,
    lacks_labels,
    unknown_in_words,
    unknown_share,
    with_labels,
)
from ..data.rounds import Rounds
from ..data.rows import EncodedRows, PooledRows, apart_by_label, having_labels
from ..data.sharing import encode_together
from ..errors import MinBertError, unknown_name
from ..evaluation.metrics import task_metrics
from ..settings.tasks import Task
from ..settings.wording import counted
from .aggregation.conflicts import ConflictMeter, EpochTotals, is_whole
from .aggregation.registry import make_aggregator
from .aggregation.smoothing import Smoothing
from .args import MultiTaskTrainingArguments
from .balancing import Learned, balancing_of
from .checkpoints import (
    WholeCheckpoints,
    flow_callbacks,
    load_balancing,
    load_gradients,
    save_balancing,
    save_gradients,
    to_resume,
)
from .class_weights import check_counted, prepare_losses
from .data import data_loader, loss_weights_of, rounds_of, shared_groups, warn_of_left_out
from .distributed import without_ddp
from .evaluator import TaskEvaluator, TrainingScores, first_rows, new_rows
from .feature_cache import cache_features, is_constant
from .freezing import Freezing, check_trainable, count_parameters, encoder_parameters, layer_names
from .fused_adamw import FusedAdamW, is_fused_adamw
from .gradients import Gradients, collector
from .hyperparameters import HyperparameterSearch
from .metric_tracker import MetricTracker
from .neftune import WordNoise
from .optimizers import OPTIMIZERS, PretrainedDecay
from .parameter_groups import check_optimizer, has_groups, rates_by_group, split_groups
from .protocol import TaskModel, check_model, check_stock, require, takes
from .pushing import PushesToHub
from .step import RoundStep
from .terms.base import AnyNoiseKey, Batch, nested, words_of
from .terms.distillation import with_teacher_logits
from .terms.proximal import ProximalPoint
from .terms.registry import terms_of
from .timeline import part

logger = logging.getLogger(__name__)


class MultiTaskTrainer(HyperparameterSearch, WholeCheckpoints, PushesToHub):
    """A `Trainer` for one model with several tasks.

    Args:
        model: a `training.protocol.TaskModel`, such as `MinBertForMultiTask`, plain or wrapped by
            `peft.get_peft_model`. Where a task's loss options say `auto`, its config gets the numbers that are counted
            from the training rows; where `args.freeze` says so, its parameters lose `requires_grad`; those that
            `args.unfreeze` frees later do so while it trains.
        args: every task that they name must be one of the model's.
        train_dataset: `{task: rows}`. Rows are a `datasets.Dataset`, a map-style torch dataset or a list of dicts,
            with the task's text columns and its label, or encoded already (`input_ids`, `labels`). Rows alone are
            accepted where the model has one task or an active one. With `args.share_rows`, tasks with the same texts
            may be given the same rows, with a column for each label, in which some may be `None`. With
            `args.teachers`, rows whose label is `None` are learnt by the teachers' answers alone.
        eval_dataset: likewise.
        processing_class: the tokenizer; saved with every checkpoint.
        max_length: longest input in tokens. Unless given, what the model was trained for before, else all its
            positions. Model and saved tokenizer carry it (`config.max_input_length`, `model_max_length`). The model
            gets the tokenizer's separator too (`config.sep_token_id`).
        cache_dir: where encoded rows are kept for the next run; nowhere unless given.
        teacher_logits: `{task: [rows, outputs]}`, the outputs of `args.teachers` on the training rows, from
            `pretrained.teachers.teacher_logits`.
        callbacks: added to the stock ones.
        model_init: makes a model, with no argument or with a search's trial; instead of `model`, for
            `hyperparameter_search`.
        optimizers: optimizer and schedule to use instead of those that `args` name.

    Raises:
        MinBertError: the model has no tasks; a task, a metric or a length does not fit it; a task has no rows, or
            fewer than an epoch is to have; `args` are stock ones, or a subclass has a `compute_loss`.
    """

    # The stock class leaves these wider: any module, one dataset, images and sounds too, no optimizer before training.
    model: TaskModel
    args: MultiTaskTrainingArguments
    train_dataset: Mapping[str, EncodedRows] | None
    eval_dataset: Mapping[str, EncodedRows] | None
    processing_class: PreTrainedTokenizerBase | None
    optimizer: torch.optim.Optimizer

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
        options = {
            "train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class,
            "max_length": max_length, "cache_dir": cache_dir, "teacher_logits": teacher_logits, "callbacks": callbacks,
        }  # fmt: skip
        model = self.prepare_search(model, model_init, options)
        # The stock constructor sets these three too, but checks and preparations before it need them.
        self.model, self.args, self.processing_class = self._checked(model, args), args, processing_class
        config = self.model.config
        self.tasks = {saved["name"]: Task.from_config(saved) for saved in config.tasks}
        self.max_length = config.max_input_length = check_max_length(max_length, config, tokenizer=processing_class)
        if processing_class is not None:
            config.sep_token_id = processing_class.sep_token_id
            self.processing_class = processing_class = copy(processing_class)  # the caller's keeps its length
            processing_class.model_max_length = self.max_length
        self.cache_dir = cache_dir
        self._choose_tasks(train_dataset, eval_dataset)
        self.collators = self._make_collators()
        self.unlabelled: dict[str, EncodedRows] = {}  # training rows of a task without labels
        self.sharing: list[list[str]] = []  # tasks with the same rows and layers, where they share them
        self.unknown_tokens: dict[str, float] = {}  # the share of them among those of each task's training rows
        rows, eval_rows = self._prepare_rows(train_dataset, eval_dataset, teacher_logits)
        self.freezing = Freezing(self.model, args.freeze, args.unfreeze, self._forget_recordings)
        self.balancing = balancing_of(args, [self.tasks[name] for name in self.train_tasks], args.device)
        check_optimizer(optimizers[0], args, learned=isinstance(self.balancing, Learned))
        super().__init__(
            model,
            args,
            train_dataset=cast(Any, rows),  # annotated as one dataset, and kept as it is
            eval_dataset=cast(Any, eval_rows),
            processing_class=processing_class,
            callbacks=[*(callbacks or []), *flow_callbacks(args)],
            optimizers=optimizers,
        )
        # The stock constructor reads both from a signature, which is another one if the model is compiled or wrapped.
        self.label_names, self.model_accepts_loss_kwargs = ["labels"], False
        self.neftune_noise_alpha = None  # the step adds the noise, and not the stock hook; see `WordNoise`
        if args.compile_layers:
            compile_layers(model)
        self.terms = terms_of(args)
        self.proximal = next((term for term in self.terms if isinstance(term, ProximalPoint)), None)
        for term in self.terms:
            for capability in term.needs:
                require(self.model, capability, f"regularizer: {term.name}")
        self.evaluator = TaskEvaluator(self.tasks, self._task_dataloader, self._evaluation_loop)
        self._training_scores = None
        if args.train_metrics != "none":
            running = args.train_metrics == "running"
            labelled = {name: having_labels(of) for name, of in (self.train_dataset or {}).items()}
            self._training_scores = TrainingScores(
                running, self.evaluator, labelled, self.accelerator.gather, self.log
            )
        self._rates: dict[str, float] = {}
        self.step: RoundStep | None = None  # until the first one
        self._begin_measuring()
        if rows is not None:
            self._warn()
        for callback in self._own_callbacks():
            self.add_callback(callback)

    # ---- What the constructor does ---------------------------------------------------------------------------

    def _checked(self, model: nn.Module, args: MultiTaskTrainingArguments) -> TaskModel:
        if not isinstance(args, MultiTaskTrainingArguments):
            raise MinBertError(
                f"`args` must be MultiTaskTrainingArguments, which have all fields of TrainingArguments. Found "
                f"{type(args).__name__}."
            )
        checked = check_model(model)
        check_stock(model, args)
        if args.packing:
            require(checked, "packing", "packing: true")
        if type(self).compute_loss is not Trainer.compute_loss:
            raise MinBertError(
                f"{type(self).__name__} has a `compute_loss`, which no step of several tasks calls. Override "
                "`task_loss(model, batch, key)` instead."
            )
        return checked

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
            name: PaddedCollator(task, pad or 0, packing=self.args.packing, fill_to=fill_to)
            for name, task in self.tasks.items()
        }

    def _prepare_rows(
        self, train: Any, dev: Any, teacher_logits: Mapping[str, np.ndarray] | None
    ) -> tuple[Mapping[str, EncodedRows] | None, Mapping[str, EncodedRows] | None]:
        """The encoded rows of both. Writes what losses count of the training rows to the model's config."""
        if train is not None:
            train = self._encode(train, self.train_tasks, "train_dataset")
            train = with_teacher_logits(self.args, self.tasks, train, teacher_logits)
            if self.args.share_rows:
                train, self.sharing = shared_groups(self.args, self.model, train)
            else:
                train = self._apart_by_label(train)
            self._count_unknown(train)
            prepare_losses(self.args, self.model.config, self.tasks, train, self.sharing)
        if dev is not None:
            dev = self._encode(dev, self.eval_tasks, "eval_dataset")
        check_counted(self.tasks[name] for name in [*(train or ()), *(dev or ())])
        if self.args.eval_strategy != "no" and not dev:
            raise MinBertError("`eval_strategy` asks for evaluations. Pass `eval_dataset={task: rows}`.")
        return train, dev

    def _apart_by_label(self, train: Mapping[str, EncodedRows]) -> dict[str, EncodedRows]:
        """The training rows that have a label, after those that have none were set apart."""
        apart = {name: apart_by_label(rows) for name, rows in train.items()}
        self.unlabelled = {name: without for name, (_, without) in apart.items() if without is not None}
        for name, rows in self.unlabelled.items():
            require(self.model, "pooled", "unlabelled")
            if self.args.torch_compile:
                raise MinBertError(
                    f"`torch_compile` compiles the pass of labelled rows, and {name!r} has others. Leave one out, or "
                    "take `compile_layers: true`."
                )
            said = counted(len(rows), "row", "has", "have")
            logger.info("%s: %s no label: the teachers' answers alone are learnt there.", name, said)
        return {name: rows for name, (rows, _) in apart.items()}

    @part("tokens")
    def _encode(self, datasets: Any, wanted: list[str] | None, argument: str) -> dict[str, EncodedRows]:
        """`{task: encoded rows}` of the wanted tasks, or of all in `datasets`."""
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
        chosen = {name: datasets[name] for name in (wanted if wanted is not None else datasets)}

        def encoded_rows(dataset: Any, task: Task, labels: bool = True) -> EncodedRows:
            length, config = self.max_length, self.model.config
            return encode(dataset, task, self.processing_class, length, self.cache_dir, config, labels)

        if self.args.share_rows:
            rows = encode_together(chosen, self.tasks, partial(encoded_rows, labels=False))
            training = argument == "train_dataset"
            return {name: of if training else having_labels(of) for name, of in rows.items()}
        encoded = {}
        for name, dataset in chosen.items():
            task = self.tasks[name]
            taught = self.args.teachers is not None and argument == "train_dataset" and lacks_labels(dataset, task)
            rows = encoded_rows(dataset, task, labels=not taught)
            encoded[name] = with_labels(rows, dataset, task) if taught else rows
        for name, rows in encoded.items():
            if rows.labels is None:
                raise MinBertError(f"`{argument}`: the rows of {name!r} have no labels. Add a column `label`.")
        return encoded

    def _count_unknown(self, train: Mapping[str, EncodedRows]) -> None:
        """Says how many tokens of each task's training rows the vocabulary does not know."""
        tokenizer = self.processing_class
        if tokenizer is None:
            return
        for name, rows in train.items():
            self.unknown_tokens[name] = share = unknown_share(rows, tokenizer)
            if share:
                level = logging.WARNING if share >= MANY_UNKNOWN else logging.INFO
                logger.log(level, unknown_in_words(name, share, "the training rows"))

    def _warn(self) -> None:
        """Logs which arguments have no effect, and the warnings of the terms."""
        for warning in self.args.without_effect(self.tasks[name] for name in self.train_tasks):
            logger.warning(warning)
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        dtype = half or next(self.model.parameters()).dtype
        with self.compute_loss_context_manager():
            warnings = [
                w for term in self.terms for task in self.train_tasks for w in term.warnings(self.model, task, dtype)
            ]
        for warning in dict.fromkeys(warnings):
            logger.warning(warning)

    def _own_callbacks(self) -> Iterator[TrainerCallback]:
        """The callbacks that act between steps, in their order."""
        if self.train_dataset is not None:
            if self.proximal is not None:
                yield self.proximal
            if self.args.pretrained_decay:
                yield PretrainedDecay(self.args.pretrained_decay, encoder_parameters(self.model))
            if self.balancing is not None:
                yield self.balancing
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
        rounds = rounds_of(
            self.args, self.tasks, self._rows_of_steps(self.train_dataset), self.sharing,
            self._rows_of_steps(self.unlabelled),
        )  # fmt: skip
        collate = RoundCollator({name: self.collators[name] for name in rounds.datasets})
        return self.accelerator.prepare(data_loader(self.args, rounds, batch_size=1, collate=collate))

    def _rows_of_steps(self, rows: Mapping[str, EncodedRows] | None) -> Mapping[str, EncodedRows | PooledRows] | None:
        """Training rows; cached outputs of a frozen encoder, where these are the same at every step."""
        model = self.accelerator.unwrap_model(self.model)
        autocast = self.accelerator.autocast
        with autocast():
            if not rows or not is_constant(self.args, model, rows):
                return rows
        return cache_features(model, rows, self.collators, self.args.eval_batch_size, autocast)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Rows an epoch of this loader shows; the stock count would be of rounds."""
        if isinstance(dataloader.dataset, Rounds):
            return dataloader.dataset.num_rows
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of all tasks that an optimizer step sees, over all processes; a mean, where tasks leave the rounds."""
        rounds = rounds_of(self.args, self.tasks, self.train_dataset, self.sharing, self.unlabelled)
        return round(rounds.num_rows / len(rounds) * args.gradient_accumulation_steps * args.world_size)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """By the stock estimate: six per token and parameter outside the embeddings."""
        return 6 * self._num_parameters * sum(tokens_through(batch) for batch in inputs.values())

    @cached_property
    def _num_parameters(self) -> int:  # to count them takes as long as a step of a small model
        embeddings = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}
        return sum(parameter.numel() for parameter in {*self.model.parameters()} - embeddings)

    # ---- Training --------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains. `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end.

        A `trial` of `hyperparameter_search` is trained by a trainer of its own.
        """
        if trial is not None:
            return self.train_trial(trial)
        checkpoint = to_resume(resume_from_checkpoint, self.args)
        self._check_trainable()
        self.step = self._make_step(checkpoint)
        if self.proximal is not None:
            self.proximal.resume_from = checkpoint
        on_gpu = self.args.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.args.device)
        self.model.train()  # a new adapter is in the mode of training, and the loaded model inside may not be
        with self.step.in_loop(cast(nn.Module, self.model)):
            output = super().train(resume_from_checkpoint=checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
        if self.proximal is not None and self.args.proximal_evaluate == "instead":
            self.proximal.become()
        self._tracker.read()  # what came after the last log
        metrics = {name: mean for name, mean in self._tracker.totals().items() if not name.startswith("loss_")}
        if on_gpu:
            metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.args.device) / 1e9
        metrics |= self.conflicts.means()
        if self.balancing is not None:  # the last ones, not the means
            metrics |= {f"weight_{task}": weight.item() for task, weight in self.balancing.by_task().items()}
        output.metrics.update({f"train_{name}": value for name, value in metrics.items()})
        return output

    def _make_step(self, checkpoint: str | None) -> RoundStep:
        """The object that takes the steps of one training.

        Args:
            checkpoint: to resume from.

        Raises:
            MinBertError: there are no rows to train on, or the checkpoint was written with another aggregator, or with
                weights of another kind.
        """
        self._begin_measuring()
        rounds = rounds_of(self.args, self.tasks, self.train_dataset, self.sharing, self.unlabelled)
        weights = loss_weights_of(self.args, rounds)
        warn_of_left_out(self.args, rounds)
        recorded = self.args.uses_graphs and all(term.recordable for term in self.terms)
        gradients = self.make_gradients(static=recorded)
        if checkpoint is not None:
            load_gradients(gradients, self.args, Path(checkpoint))
            load_balancing(self.balancing, self.args, Path(checkpoint))
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps  # until the loop sets it
        noise = None
        if self.args.neftune_noise_alpha:
            words = [words_of(self.model, task) for task in self.train_tasks]
            noise = WordNoise(self.args.neftune_noise_alpha, words)
        return RoundStep(
            model=lambda: self.accelerator.unwrap_model(self.model_wrapped),
            task_loss=self.task_loss,
            terms=self.terms,
            weights=weights,
            balancing=self.balancing,
            gradients=gradients,
            accelerator=self.accelerator,
            autocast=self.compute_loss_context_manager,
            tracker=self._tracker,
            scores=self._training_scores,
            seed=self.args.seed,
            word_noise=noise,
            recorded=recorded,
        )

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """The precision of a step. The library has it around the model's `forward` alone, and not its `pooled_of`."""
        return self.accelerator.autocast()

    def _begin_measuring(self) -> None:
        """Starts the metrics of one training from zero."""
        names = layer_names(self.model)
        layers = [names[parameter] for parameter in self.model.parameters() if parameter.requires_grad]
        self.conflicts = ConflictMeter(self.train_tasks, self.args.conflict_detail, layers)
        self._tracker = MetricTracker(self.accelerator)

    def _forget_recordings(self) -> None:
        if self.step is not None:
            self.step.forget_recordings()

    def make_gradients(self, static: bool) -> Gradients:
        """Collects and combines the gradients of a step; `static` as for `gradients.collector`."""
        args = self.args
        smoothing = None if args.gradient_smoothing is None else Smoothing(args.gradient_smoothing)
        aggregator = make_aggregator(args.aggregator, **(args.aggregator_options or {}))
        sharded = args.gradient_reduction == "sharded"
        return collector(self.model.parameters(), aggregator, smoothing, self.conflicts, static, sharded)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one round; before the optimizer steps, the tasks' gradients are combined.

        A loop of one's own may call it without `train`: an optimizer then steps by what it leaves in `.grad`. What
        callbacks of `train` change between steps (schedules, `unfreeze`, the teacher of `proximal`) stays as at the
        start.

        Args:
            model: that of the trainer.
            inputs: one batch per task.
            num_items_in_batch: not used, a task's loss is a mean over its batch.

        Returns:
            the weighted sum of the tasks' losses, as the stock step does divided by the accumulation steps.
        """
        if self.step is None:
            self.step = self._make_step(None)
            if self.freezing.changes:
                self.freezing.freeze(self.state.global_step)
        if not self.model.training:  # not of `model`: an evaluation changes the mode inside a compiled one
            model.train()  # only if needed: it visits every module
        if callable(train := getattr(self.optimizer, "train", None)):  # schedule-free optimizers have two modes
            train()
        batches: dict[str, Any] = self._prepare_inputs(inputs)
        return self.step(batches, self.state.global_step, self.current_gradient_accumulation_steps)

    def task_loss(self, model: TaskModel, batch: Batch, key: AnyNoiseKey | None) -> dict[str, torch.Tensor]:
        """The `loss` of one task's batch, with the terms that are added to it, the `own_loss` without, and `logits`.

        It takes the place of the stock `compute_loss`. Beside them are the terms before their weights, by their
        names, and `<regularizer>_skipped`, 1 where the regularizer had none: the log has all of them.
        """
        result = nested(self.terms, key)(model, batch)
        own = {"own_loss": result.outputs["loss"], "logits": result.outputs["logits"]}
        return {"loss": result.loss, **own, **result.logged}

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As the stock one: scales all gradients to `max_grad_norm` if they are longer. Returns their norm before."""
        if self.step is None:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return self.step.clip(self.args.max_grad_norm, self.optimizer, self.callback_handler.callbacks)

    def _check_trainable(self) -> None:
        """Raises `MinBertError` if nothing is trained for a task; else logs how many parameters are, at first."""
        if self.freezing.changes:
            self.freezing.freeze(0)
        with self.compute_loss_context_manager():
            check_trainable(self.model, self.train_tasks)
        logger.info("%s of %s parameters are trainable.", *(f"{n:,}" for n in count_parameters(self.model)))
        if self.freezing.changes:
            self.freezing.release()  # gradients and optimizer are made for all that is ever trained

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, Any]:
        """The optimizer's class and arguments; ours take those of the stock AdamW."""
        if args.optim not in OPTIMIZERS:
            stock, given = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return (FusedAdamW, given) if is_fused_adamw(args) else (stock, given)
        betas = (args.adam_beta1, args.adam_beta2)
        return OPTIMIZERS[args.optim], {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The stock one, with split groups where `args` give parts of the model other rates or decays."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made and has_groups(self.args):
            decayed = self.get_decay_parameter_names(cast(nn.Module, self.model))  # it is one, besides a `TaskModel`
            split_groups(optimizer, self.model, self.args, {*decayed})
        if made and isinstance(self.balancing, Learned):
            self.balancing.add_to(optimizer)
        return optimizer

    def _get_learning_rate(self) -> float:
        """As the stock one, which the log calls before the schedule moves on; keeps the groups' rates of then."""
        self._rates = rates_by_group(self.optimizer)
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds means since the last log: each task's loss before its weight, `loss_<task>`, and the terms in it.

        A term is logged before its weight, as `<regularizer>_<task>` or `proximal_<task>`; `<regularizer>_skipped` is
        how many batches had none, as its gradient was not finite. An aggregator that sees each task's gradient adds
        what `ConflictMeter` measures, and at the last step of an epoch its totals. Weights that follow the losses are
        `weight_<task>`. Groups of parameters with rates of their own add those, as `learning_rate_<group>`.
        """
        if "learning_rate" in logs:
            logs.update({f"learning_rate_{group}": rate for group, rate in self._rates.items()})
        if "loss" in logs and (means := self._tracker.read()):
            logs.update({**means, **self.conflicts.read()})
            if is_whole(self.state.epoch):
                logs.update(self.conflicts.end_epoch())
        super().log(logs, start_time)

    # ---- Evaluation ------------------------------------------------------------------------------------------

    @part("evaluation")
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Scores the tasks one after the other, then over all of them.

        Args:
            eval_dataset: `{task: rows}` to score instead of the trainer's own.
            ignore_keys: outputs of the model that are not gathered.
            metric_key_prefix: first word of every metric's name.

        Returns:
            `<prefix>_<task>_<metric>` and `<prefix>_<task>_loss` of each task, `<prefix>_overall` (the mean of the
            tasks' main metrics) and, with sst, para and sts, `<prefix>_leaderboard`. With `args.proximal_evaluate`,
            once there is a teacher, the same of its weights too, as `<prefix>_averaged_...`; where that is `instead`,
            of its weights alone, under the usual names.
        """
        rows = self.eval_dataset if eval_dataset is None else self._encode(eval_dataset, None, "eval_dataset")
        if not rows:
            raise MinBertError("There is nothing to evaluate: pass `eval_dataset={task: rows}`.")
        teacher = self.proximal if self.proximal is not None and self.proximal.teacher else None
        instead = teacher is not None and self.args.proximal_evaluate == "instead"
        with teacher.in_place() if instead else nullcontext():
            metrics = self.evaluator.score(rows, metric_key_prefix, ignore_keys)
        if teacher is not None and self.args.proximal_evaluate is True:
            with teacher.in_place():
                metrics |= self.evaluator.score(rows, f"{metric_key_prefix}_averaged", ignore_keys)
        self.log(metrics)
        # One event for all tasks: early stopping counts an evaluation once, and sees every metric.
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        task: str | None = None,
    ) -> PredictionOutput:
        """The head's outputs for the rows of one task, labelled or not.

        Args:
            test_dataset: the rows.
            ignore_keys: outputs of the model that are not gathered.
            metric_key_prefix: first word of every metric's name.
            task: whose head answers. May be left out where the model has one task or an active one.

        Returns:
            `predictions` `[rows, classes]`, or `[rows, 1]` for a binary task or a score; `label_ids` or `None`;
            and the task's metrics where there are labels.

        Raises:
            MinBertError: no task is named where there are several, or there is no such task.
        """
        if isinstance(test_dataset, Mapping):
            raise MinBertError("`predict` answers one task: give its rows alone, and its name as `task=`.")
        task = self._one_task(task)
        length, config = self.max_length, self.model.config
        rows = encode(test_dataset, self.tasks[task], self.processing_class, length, config=config)
        logits, labels, metrics = self.evaluator.outputs(task, rows, f"{metric_key_prefix}_{task}", ignore_keys)
        if labels is not None:
            scores = task_metrics(self.tasks[task], logits, labels)
            metrics |= {f"{metric_key_prefix}_{task}_{name}": value for name, value in scores.items()}
        return PredictionOutput(logits, labels, metrics)

    def _known_metrics(self) -> dict[str, Any]:
        splits = {"train": self.train_dataset, "dev": self.eval_dataset}
        rows = {split: {name: len(of) for name, of in (own or {}).items()} for split, own in splits.items()}
        return {**super()._known_metrics(), "rows": rows}

    def _one_task(self, task: str | None) -> str:
        task = task if task is not None else self.model.config.active_task
        if task is None:
            raise MinBertError(
                f"The model has several tasks: {', '.join(self.tasks)}. Say which one the rows belong to, "
                f"with {{task: rows}} or `task=`."
            )
        if task not in self.tasks:
            raise unknown_name("task", task, self.tasks)
        return task

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The loader of one task's evaluation rows; `eval_dataset` is the task's name."""
        task = self._one_task(eval_dataset)
        rows = (self.eval_dataset or {}).get(task)
        if rows is None:
            raise MinBertError(f"There are no evaluation rows of {task!r}. Pass `eval_dataset={{{task!r}: rows}}`.")
        return self._task_dataloader(task, rows)

    def _task_dataloader(self, task: str, rows: EncodedRows) -> DataLoader:
        # Packed even where training is not: without dropout nothing tells the two apart.
        packing = takes(self.accelerator.unwrap_model(self.model), "packing")
        collate = PaddedCollator(self.tasks[task], self.collators[task].pad_token_id, packing=packing)
        return self.accelerator.prepare(data_loader(self.args, rows, self.args.eval_batch_size, collate))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As the stock step, but rows that only fill up a process's last batch do not count in the loss.

        Outputs and labels of such rows are dropped when they are gathered; in a loss, one number for the whole
        batch, they would stay.
        """
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        size = len(inputs["input_ids"])
        new = new_rows(self.accelerator.gradient_state, self.accelerator.process_index, size)
        if loss is not None and 0 < new < size:
            loss = super().prediction_step(model, first_rows(inputs, new), True, ignore_keys)[0]
        return loss, logits, labels

    def _evaluation_loop(
        self, loader: DataLoader, task: str, prefix: str, ignore_keys: list[str] | None
    ) -> EvalLoopOutput:
        output = self.evaluation_loop(
            loader,
            description=f"Evaluation of {task}",
            prediction_loss_only=False,
            ignore_keys=ignore_keys,
            metric_key_prefix=prefix,
        )
        # Closes the progress bar: the next task's has another length.
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        return output

    # ---- Checkpoints -----------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the stock one; also saves what terms and gradients need to resume."""
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return
        for term in self.terms:
            term.save(Path(output_dir))
        if self.step is not None:
            save_gradients(self.step.gradients, self.args, Path(output_dir))
        save_balancing(self.balancing, self.args, Path(output_dir))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.args.save_only_model:  # else the teacher stays that of the last step
            for term in self.terms:
                term.load(Path(str(self.state.best_model_checkpoint)))


def tokens_through(batch: Mapping[str, Any]) -> int:
    """Tokens of a batch that go through the encoder: padding too, unless it is packed; none of cached features."""
    if "packing" in batch:
        return batch["packing"]["tokens"].numel()
    return batch["input_ids"].numel() if "input_ids" in batch else 0


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
