"""The trainer: a step is one round, one mini-batch of every task in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import TrainOutput

from ..data.collators import PaddedCollator, RoundCollator
from ..data.encoding import check_max_length, encode
from ..data.rows import EncodedRows, PooledRows
from ..errors import MinBertError, unknown_name
from ..publishing.trainer import PushesToHub
from ..tasks import Task
from .aggregators import make_aggregator
from .args import MultiTaskTrainingArguments
from .checkpoints import AGGREGATOR, WholeCheckpoints, to_resume
from .class_weights import check_counted, prepare_losses
from .conflicts import ConflictMeter, EpochTotals, is_whole
from .data import data_loader, loss_weights_of, rounds_of
from .distillation import distillation_of, taught
from .evaluation import TaskEvaluation, TrainingScores
from .freezing import Freezing, check_trainable, count_parameters, encoder_parameters
from .frozen import is_constant, read_once
from .gradients import Gradients, collector
from .graphs import GraphedSteps
from .hyperparameters import HyperparameterSearch
from .optimizers import OPTIMIZERS
from .parameter_groups import has_groups, rates_by_group, split_groups
from .passes import Place, RecordedPlace
from .processes import without_ddp
from .proximal import PretrainedDecay, proximal_of
from .regularizers import regularizer_of
from .smoothing import Smoothing

logger = logging.getLogger(__name__)


class MultiTaskTrainer(TaskEvaluation, HyperparameterSearch, WholeCheckpoints, PushesToHub, Trainer):
    """A `Trainer` for one model with several tasks.

    Args:
        model: a model with `config.tasks` and `forward(task=..., labels=..., ...)`, such as
            `MinBertForMultiTask`, plain or wrapped by `peft.get_peft_model`. Where a task's loss options say `auto`,
            its config gets the numbers that are counted from the training rows; where `args.freeze` says so, its
            parameters lose `requires_grad`; those that `args.unfreeze` frees later do so while it trains.
        args: its `train_tasks`, `eval_tasks` and what it gives by task name the model's tasks.
        train_dataset: `{task: rows}`. Rows are a `datasets.Dataset`, a map-style torch dataset or a list of dicts,
            with the task's text columns and its label, or encoded already (`input_ids`, `labels`). Rows alone are
            accepted where the model has one task or an active one.
        eval_dataset: likewise.
        processing_class: the tokenizer; saved with every checkpoint.
        max_length: longest input in tokens; the model's own limit unless given.
        cache_dir: where encoded rows are kept for the next run; nowhere unless given.
        teacher_logits: `{task: [rows, outputs]}`, what `args.teachers` answer to the training rows, as
            `distillation.teacher_logits` gives it.
        callbacks: added to the stock ones.
        model_init: makes a model, with no argument or with a search's trial; instead of `model`, for
            `hyperparameter_search`.
        optimizers: optimizer and schedule to use instead of those that `args` name.

    Raises:
        MinBertError: a task, a metric or a length does not fit the model, or a task has no rows, or fewer than an
            epoch is to have.
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
        self.tasks = {saved["name"]: Task.from_config(saved) for saved in model.config.tasks}
        self.model = model  # the checks below need it before the stock constructor sets it
        self.processing_class = processing_class
        self.max_length = check_max_length(max_length, model.config.max_position_embeddings)
        self.cache_dir = cache_dir
        for option, rows in (("train_tasks", train_dataset), ("eval_tasks", eval_dataset)):
            if rows is not None and not isinstance(rows, Mapping) and getattr(args, option) is None:
                setattr(args, option, [self._one_task(None)])  # rows alone are of the active task, the others idle
        args.check_tasks(self.tasks)
        self.train_tasks = args.chosen_tasks("train_tasks", self.tasks)
        self.eval_tasks = args.chosen_tasks("eval_tasks", self.tasks)
        pad = processing_class.pad_token_id if processing_class is not None else model.config.pad_token_id
        self.collators = {
            name: PaddedCollator(
                task, pad, packing=args.packing, fill_to=self.max_length if args.uses_graphs else None
            )
            for name, task in self.tasks.items()
        }
        if train_dataset is not None:
            train_dataset = self._encode(train_dataset, self.train_tasks, "train_dataset")
            prepare_losses(args, model.config, self.tasks, train_dataset)
            train_dataset = taught(args, self.tasks, train_dataset, teacher_logits)
        if eval_dataset is not None:
            eval_dataset = self._encode(eval_dataset, self.eval_tasks, "eval_dataset")
        check_counted(self.tasks[name] for name in [*(train_dataset or ()), *(eval_dataset or ())])
        if args.eval_strategy != "no" and not eval_dataset:
            raise MinBertError("`eval_strategy` asks for evaluations. Pass `eval_dataset={task: rows}`.")
        self.freezing = Freezing(model, args.freeze, args.unfreeze, self._forget_recordings)
        if optimizers[0] is not None and has_groups(args):
            raise MinBertError(
                "`learning_rates`, `weight_decays` and `layer_decay` are for an optimizer that `args.optim` names. "
                "Leave them out, or `optimizers`."
            )
        if args.early_stopping_patience is not None:
            stopping = EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_threshold)
            callbacks = [*(callbacks or []), stopping]
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # Read from the signature of the model's class, both would be wrong for a compiled or wrapped model.
        self.label_names, self.model_accepts_loss_kwargs = ["labels"], False
        if args.compile_layers:
            compile_layers(model)
        self.regularizer, self.proximal = regularizer_of(args), proximal_of(args)
        self.distillation = distillation_of(args)
        if train_dataset is not None:
            self._prepare_regularizers(args)
        self._training_scores = None
        if args.train_metrics != "none":
            self._training_scores = TrainingScores(self)
            self.add_callback(self._training_scores)
        if self.freezing.changes:
            self.add_callback(self.freezing)
        self._gradients, self._graphs, self._num_parameters = None, None, None
        self._weights: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self.conflicts = self._conflict_meter()
        self.add_callback(EpochTotals(self))
        self._means: dict[str, list[torch.Tensor]] = {}  # name in the log to sum and count since the last one
        self._totals: dict[str, list[float]] = {}  # the same since training began
        self._skipped: torch.Tensor | None = None
        self._rounds_of_step = 0

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
        if self.train_dataset is None or not is_constant(self.args, model):
            return self.train_dataset
        autocast = self.accelerator.autocast
        return read_once(model, self.train_dataset, self.collators, self.args.eval_batch_size, autocast)

    def _prepare_regularizers(self, args: MultiTaskTrainingArguments) -> None:
        """Says what has no effect and what precision goes ill with, and adds what works between steps."""
        for warning in args.without_effect(self.tasks[name] for name in self.train_tasks):
            logger.warning(warning)
        if self.regularizer is not None:
            half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
            dtype = half or next(self.model.parameters()).dtype
            found = (w for task in self.train_tasks for w in self.regularizer.warnings(self.model, task, dtype))
            for warning in dict.fromkeys(found):
                logger.warning(warning)
        if self.proximal is not None:
            self.add_callback(self.proximal)
        if args.pretrained_decay:
            self.add_callback(PretrainedDecay(args.pretrained_decay, encoder_parameters(self.model)))

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
        if self._num_parameters is None:  # to count them takes as long as a step of a small model
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        return (
            6
            * self._num_parameters
            * sum(batch["input_ids"].numel() for batch in inputs.values() if "input_ids" in batch)
        )

    # The stock ways to clip and to clear gradients walk through all modules of the model to find its parameters, and
    # through all parameters to find their norm: longer than a GPU takes for a small batch.

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As the stock one: scales all gradients to `max_grad_norm` if they are longer. Their norm before that."""
        self.accelerator.unscale_gradients()
        gradients = self._gradients.combined()
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _clear_gradients(self, set_to_none: bool = True) -> None:
        for parameter in self._gradients.parameters:
            parameter.grad = None

    # ---- The step --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **kwargs: Any) -> TrainOutput:
        """Trains. `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end.

        With a `trial` of `hyperparameter_search`, it is that which is trained, by another trainer.
        """
        if trial is not None:
            return self.train_trial(trial)
        resume_from_checkpoint = to_resume(resume_from_checkpoint, self.args)
        if self.freezing.changes:
            self.freezing.freeze(0)
        check_trainable(self.model, self.train_tasks)
        logger.info("%s of %s parameters are trainable.", *(f"{n:,}" for n in count_parameters(self.model)))
        if self.freezing.changes:
            self.freezing.release()  # the gradients and the optimizer take in all that is ever trained
        graphed = self.args.uses_graphs and self.proximal is None
        self._weights = loss_weights_of(self.args, rounds_of(self.args, self.tasks, self.train_dataset))
        self.conflicts = self._conflict_meter()
        self._gradients = self.make_gradients(static=graphed)
        if resume_from_checkpoint:
            self._load_gradients(Path(resume_from_checkpoint) / AGGREGATOR)
        repeats = 0 if self.regularizer is None else self.regularizer.repeats
        self._graphs = GraphedSteps(self._forward, self._gradients, repeats) if graphed else None
        self._means.clear()
        self._totals.clear()
        self._skipped, self._rounds_of_step = None, 0
        if self.proximal is not None:
            self.proximal.resume_from = resume_from_checkpoint
        on_gpu = self.args.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.args.device)
        model = self.model.train()  # an adapter's own flag is that of a new module, and what is inside was loaded
        model.zero_grad = self._clear_gradients
        try:
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            del model.zero_grad
        self._read_means()  # what came after the last log
        terms = {name: total / count for name, (total, count) in self._totals.items() if not name.startswith("loss_")}
        if on_gpu:
            terms["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.args.device) / 1e9
        output.metrics.update({f"train_{name}": value for name, value in {**terms, **self.conflicts.means()}.items()})
        return output

    def make_gradients(self, static: bool) -> Gradients:
        """What collects the gradients of a step and makes one of them."""
        args = self.args
        smoothing = None if args.gradient_smoothing is None else Smoothing(args.gradient_smoothing)
        aggregator = make_aggregator(args.aggregator, **(args.aggregator_options or {}))
        aggregator.compiled = args.compile_layers
        sharded = args.gradient_reduction == "sharded"
        return collector(self.model.parameters(), aggregator, smoothing, self.conflicts, static, sharded)

    def _forget_recordings(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def _conflict_meter(self) -> ConflictMeter:
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return ConflictMeter(self.train_tasks, self.args.conflict_detail, trained)

    def _load_gradients(self, path: Path) -> None:
        if not self._gradients.state_dict():
            return
        if not path.is_file():
            raise MinBertError(
                f"{path.parent} has no {AGGREGATOR}: it was written with an aggregator that keeps no gradient of a "
                "task by itself. Resume as it was trained, or anew."
            )
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        for name, then in state.pop("settings").items():
            if (now := getattr(self.args, name)) != then:
                before, found = (f"no `{name}`" if it is None else f"`{name}: {it}`" for it in (then, now))
                raise MinBertError(
                    f"{path.parent} was written with {before}. Found {found}. Resume as it was trained, or anew."
                )
        self._gradients.load_state_dict(state)

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

    def training_step(
        self, model: nn.Module, inputs: dict[str, dict[str, Any]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one round; before the optimizer steps, the tasks' gradients become one.

        Args:
            model: that of the trainer.
            inputs: one batch per task.
            num_items_in_batch: not used, a task's loss is a mean over its batch.

        Returns:
            the weighted sum of the tasks' losses, as the stock step does divided by the accumulation steps.
        """
        if not self.model.training:  # a compiled model's own flag stays when an evaluation changes what is inside
            model.train()  # the call alone visits every module
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have two modes
            self.optimizer.train()
        total = torch.zeros((), device=self.args.device)
        for task, batch in self._prepare_inputs(inputs).items():
            factor = self._weights[task] / self.current_gradient_accumulation_steps
            found = self._backward(task, batch, factor)
            if self.accelerator.sync_gradients:
                self._gradients.complete(task)
            for name, value in found.items():
                if name not in ("logits", "skipped"):
                    self._record(f"{name}_{task}", value)
            if "skipped" in found:
                self._skipped = found["skipped"] if self._skipped is None else self._skipped + found["skipped"]
            if self._training_scores is not None:
                self._training_scores.add(task, found["logits"], batch["labels"])
            total += factor * found["loss"]
        self._rounds_of_step += 1
        if self.accelerator.sync_gradients:
            self._rounds_of_step = 0
            # The same generator on every process, whatever was drawn elsewhere.
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
            self._gradients.combine(generator, self._scaled(total.new_ones(())))
        return total

    def _backward(self, task: str, batch: Mapping[str, Any], factor: float) -> dict[str, torch.Tensor]:
        """Adds the gradient of `factor` times the task's loss. What `task_loss` gives, without a graph."""
        place = self._place(batch)
        if self._graphs is None:
            found, differentiated = self._forward({"batch": batch, "place": place}, factor)
            self._gradients.add(task, differentiated)
            return found
        inputs = {"batch": batch}
        if self.regularizer is not None:
            # On the GPU: a number of the CPU would be recorded as it is, and every replay would have one noise.
            inputs["place"] = place.numbers(task, self.args.device)
        found = self._graphs(task, inputs, factor)
        return {name: value.clone() for name, value in found.items()}  # the next replay writes to the same place

    def _forward(self, inputs: Mapping[str, Any], factor: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What `task_loss` gives, without a graph, and what is to be differentiated.

        Args:
            inputs: the `batch`, and its `place`, as numbers if they are inputs of a CUDA graph.
            factor: on the loss.
        """
        place = inputs.get("place")
        with self.compute_loss_context_manager():
            found = self.task_loss(
                self.accelerator.unwrap_model(self.model_wrapped),
                inputs["batch"],
                RecordedPlace(place) if isinstance(place, torch.Tensor) else place,
            )
        differentiated = self._scaled(found["loss"] * factor)
        return {name: value.detach() for name, value in found.items()}, differentiated

    def task_loss(
        self, model: nn.Module, batch: Mapping[str, Any], place: Place | RecordedPlace | None
    ) -> dict[str, torch.Tensor]:
        """The `loss` of one task's batch, with the terms that are added to it, and the `logits`.

        Beside them the terms before their weights, as `<regularizer>` and `proximal`, and `skipped`, 1 where the
        regularizer had none.
        """
        found: dict[str, torch.Tensor] = {}
        batch, teacher = {key: value for key, value in batch.items() if key != "teacher"}, batch.get("teacher")
        if self.regularizer is None:
            outputs = model(**batch)
            loss = outputs["loss"]
        else:
            loss, outputs, found[self.args.regularizer], skipped = self.regularizer(model, batch, place)
            if skipped is not None:
                found["skipped"] = skipped
        if teacher is not None:
            head = model.heads.get(batch["task"])
            found["distill"] = self.distillation(head, outputs["logits"], teacher)
            loss = self.distillation.mixed(loss, outputs["loss"], found["distill"])
        if self.proximal is not None:
            found["proximal"] = self.proximal(model, batch, outputs["logits"])
            loss = loss + self.proximal.weight * found["proximal"]
        return {"loss": loss, "logits": outputs["logits"], **found}

    def _place(self, batch: Mapping[str, Any]) -> Place:
        """Where the batch stands: this process's share of the current round of the current step."""
        batches_before = self._rounds_of_step * self.args.world_size + self.args.process_index
        return Place(self.args.seed, self.state.global_step, batches_before * len(batch["labels"]))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the fp16 scale: all gradients of a step share one scale, undone before clipping."""
        return loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the stock one, and what else a resumed run needs."""
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return
        if self.proximal is not None:
            self.proximal.save(Path(output_dir))
        if state := self._gradients.state_dict():
            settings = {name: getattr(self.args, name) for name in ("aggregator", "gradient_smoothing")}
            torch.save({**state, "settings": settings}, Path(output_dir) / AGGREGATOR)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.proximal is not None and not self.args.save_only_model:
            self.proximal.load(self.state.best_model_checkpoint)  # else it stays that of the last step

    # ---- The log ---------------------------------------------------------------------------------------------

    def _record(self, name: str, value: torch.Tensor) -> None:
        """Adds to a running mean on the device: reading it now would make the GPU wait."""
        sums = self._means.setdefault(name, [torch.zeros_like(value), torch.zeros_like(value)])
        sums[0] += value
        sums[1] += 1

    def _read_means(self) -> dict[str, float]:
        """The means since the last call, over all processes."""
        if not self._means:
            return {}
        sums = torch.stack([torch.stack(pair) for pair in self._means.values()])  # [names, 2]
        sums = dict(zip(self._means, self.accelerator.reduce(sums, "sum").tolist(), strict=True))
        self._means.clear()
        for name, (total, count) in sums.items():
            before = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = [before[0] + total, before[1] + count]
        return {name: total / count for name, (total, count) in sums.items()}

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
        if "loss" in logs and self._means:
            logs.update(self._read_means())
            if self._skipped is not None:
                skipped = self.accelerator.reduce(self._skipped, "sum")
                logs[f"{self.args.regularizer}_skipped"] = round(skipped.item())
                self._skipped = None
            logs.update(self.conflicts.read())
            if is_whole(self.state.epoch):
                logs.update(self.conflicts.end_epoch())
        super().log(logs, start_time)


def compile_layers(model: nn.Module) -> None:
    """Compiles a transformer's layers in place, for inputs of any size.

    All share one program: it is the class's code that is compiled, and weights are its inputs.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)
