"""The training arguments: the stock ones, plus how tasks share a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import combinations
from numbers import Real
from typing import Any, Literal, get_args

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..data.rounds import MIXING, Drawn
from ..errors import MinBertError, explain, unknown_name
from ..evaluation.metrics import metric_names
from ..tasks import Task
from .aggregators import make_aggregator
from .conflicts import ConflictDetail
from .distillation import distillation_of
from .freezing import Freeze, Unfreeze, schedule_of
from .optimizers import OPTIMIZERS, OwnOptimizer
from .parameter_groups import check_groups
from .passes import check_number
from .processes import check_launch, launched_precision, tell_of_idle_gpus
from .proximal import proximal_of
from .regularizers import REGULARIZERS, regularizer_of
from .smart import Form, Level, Norm, ScoreDivergence, Variant

#: Stock arguments that a step of several tasks cannot honour: the only value allowed, and why.
#: They are refused, never ignored.
REFUSED: dict[str, tuple[Any, str]] = {
    "label_smoothing_factor": (0.0, "a head owns its loss"),
    "train_sampling_strategy": ("random", "`mixing` decides which rows make a step"),
    "dataloader_drop_last": (False, "every batch is full: a task that runs out starts again"),
    "dataloader_persistent_workers": (False, "workers that outlive an epoch would repeat its order"),
    "dataloader_in_order": (True, "at each step all processes must take rounds that follow each other"),
    "include_num_input_tokens_seen": ("no", "tokens are not counted over several tasks"),
    "auto_find_batch_size": (False, "it restarts training with sizes that the rounds do not follow"),
    "batch_eval_metrics": (False, "a correlation needs all rows at once"),
    "eval_do_concat_batches": (True, "a metric needs all rows in one array"),
    "include_for_metrics": ([], "a task's metric sees outputs and labels only"),
    "prediction_loss_only": (False, "`eval_overall` needs predictions"),
    "remove_unused_columns": (False, "columns are chosen by task"),
    "label_names": (None, "labels are named by the task"),
    "length_column_name": ("length", "rows are not grouped by length"),
    "use_cache": (False, "an encoder generates no text, and keeps nothing for it"),
    "use_liger_kernel": (False, "its kernels are for models of the library"),
    "liger_kernel_config": (None, "it is for Liger's kernels, which are for models of the library"),
    "torch_empty_cache_steps": (None, "the step of several tasks does not empty the cache"),
    "ddp_find_unused_parameters": (None, "the step averages gradients itself, without DDP's hooks"),
    "ddp_bucket_cap_mb": (None, "the step averages gradients itself, in buckets of its own"),
    "ddp_broadcast_buffers": (None, "the step does not go through DDP's forward"),
    "ddp_static_graph": (None, "the step averages gradients itself, without DDP's hooks"),
    "average_tokens_across_devices": (True, "a task's loss is a mean over rows, which processes have equally many of"),
    "fsdp": (None, "the step runs on the unwrapped model, whose parameters FSDP would have sharded"),
    "fsdp_config": (None, "it is for FSDP, which the step does not go with"),
    "deepspeed": (None, "the step averages gradients itself, and DeepSpeed takes them away"),
    "parallelism_config": (None, "the step averages over whole copies of the model"),
    "local_rank": (-1, "the launcher tells each process its number"),
    "do_train": (False, "`minbert train` trains"),
    "do_predict": (False, "predict with `minbert predict` or `trainer.predict`"),
}

TrainMetrics = Literal["running", "full", "none"]
CudaGraphs = Literal["auto", "off"]
GradientReduction = Literal["all_reduce", "sharded"]
BatchSizes = Literal["proportional"]
TaskWeights = Literal["inverse_batch_size"]
Sampling = Literal["shuffle", "balanced"]
Proximal = Literal["none", "previous", "momentum"]


@dataclass
class MultiTaskTrainingArguments(TrainingArguments):
    """`TrainingArguments` for rounds: a step is one mini-batch of every task in training.

    Defaults that differ from the stock ones: `metric_for_best_model` is `eval_overall` where a best model is
    asked for, callback states are restored on resume, columns are not removed, and losses that are not finite are
    logged as they are (the stock filter reads each loss, for which the GPU waits).

    Args:
        train_tasks: tasks that are trained. All of the model's unless given; the other heads stay as they are.
        eval_tasks: tasks that are scored. All of the model's unless given.
        task_batch_sizes: rows a round takes from a task, per device, where it differs from
            `per_device_train_batch_size`. `proportional`: sizes in proportion to the tasks' rows in an epoch, so that
            all end together, as nearly as whole numbers allow; `per_device_train_batch_size` is that of the largest.
        task_weights: factor on a task's loss, 1 unless given. `inverse_batch_size`: the smallest of the tasks' batch
            sizes over its own. A loss is a mean over its batch, so that weights tasks with large batches down.
        mixing: which examples make a round. `cycle`: an epoch ends with the task that takes the most rounds, and
            shorter ones start again; `once`: a task goes through its rows once an epoch, and then leaves the rounds;
            `shortest`: an epoch ends with the task that takes the fewest rounds, and rows of the others are not seen.
            With `proportional`, `temperature` and `annealed` a step has one task, drawn with a chance in proportion to
            its rows, to rows^(1/T), or to a power of its rows that falls from 1 to .2 over the epochs.
        mixing_temperature: the T of `temperature`, from 1.
        task_sampling: how a task's rows are drawn, `shuffle` unless given. `shuffle`: each row once, in a new order;
            `balanced`: with replacement, each label equally often (for a score, each bin of its range).
        score_bins: how many bins of equal width `balanced` puts the range of a score into.
        rows_per_epoch: how much of a task's rows an epoch takes, where that is not all of them: a number with a point
            is a share (`0.1` a tenth, `1.0` all), a whole number counts rows (`1` is one row).
        redraw_rows: whether each epoch draws its `rows_per_epoch` anew, or all epochs keep the first draw.
        aggregator: how the tasks' gradients become one. `sum`; `pcgrad` and `gradvac`, gradient surgery; or
            `unconditional`, which takes from each gradient what it has along the others, in conflict or not. Or a
            class of the library torchjd that works from the gradients' dot products, as `torchjd.UPGrad`. With
            accumulation, a task's gradient is the mean over the window, zero where the task is missing. Where one is
            not finite, only fp16 skips the step; in fp32 and bf16 weights become NaN, as in the stock `Trainer`.
        aggregator_options: keyword arguments of the aggregator: `{reduction: mean}` of `pcgrad`, which else adds;
            `{beta: 0.01}` of `gradvac`, how fast its targets follow; those of a torchjd class.
        gradient_smoothing: averages each task's gradient over steps before the aggregator sees it: that of `n` steps
            ago weighs `gradient_smoothing ** n`. Costs one number more per task and shared parameter.
        gradient_reduction: how several processes bring tasks' gradients together for an aggregator with rows.
            `all_reduce`: every process gets all means; `sharded`: each gets and combines a share of the numbers, with
            less traffic, to equal results. Not with `gradient_smoothing`.
        conflict_detail: what an aggregator that sees each task's gradient logs of conflicts, beside those of whole
            gradients. `layers`: rate and cosine of every two tasks layer by layer; `tensors`: also in how many
            parameter tensors they conflict, per step and in each epoch; `none`. Costs a second pass over gradients.
        optim: the optimizer: `course_adamw`, the AdamW of the course's handout, or one of the stock ones.
        freeze: what is not trained. `encoder`: everything but the heads; `embeddings`; or a number n, the embeddings
            and the first n layers, private ones by their place in the stack. Weight decay does not move it, and its
            dropout stays on, as in the course and in all training, so a head sees other features in each epoch.
        unfreeze: until when. `{100: 4, 200: none}`: `freeze` is 4 after 100 optimizer steps, and nothing is frozen
            after 200; each time it must be less. `gradual`: each epoch from the second on frees one layer more, the
            uppermost first (with the pooler), the embeddings last. What is freed begins with a new state of the
            optimizer. `gradient_smoothing` begins anew.
        learning_rates: rates that differ from `learning_rate`, by group: `encoder`, `heads`, and a task's name for its
            head and private layers, which comes before both. `{encoder: 1e-5, heads: 1e-3}` is what a separate
            optimizer for the encoder would be. `lr_scheduler_type` scales all alike.
        weight_decays: likewise, decays that differ from `weight_decay`. Biases and LayerNorm are spared in all.
        layer_decay: factor on the learning rate from each of the encoder's layers to the one below. The top layer has
            the encoder's rate, and the embeddings the lowest.
        regularizer: a term added to each task's loss, and logged as `<name>_<task>`. `smart`: the output may not
            change where words hardly move (SMART's smoothness term); `r_drop`: two passes with other dropout shall
            agree; `fgm`: the loss at the worst near words is added; `none`.
        smart_weight: factor on SMART's term.
        smart_epsilon: radius of the ball in which word embeddings move, whose root mean square in BERT is near 0.05;
            5e-4 unless given. With `smart_form: mt-dnn` 1e-6 unless given, which only keeps a division from 0.
        smart_step_size: length of a step of the search for the worst move; ten times `smart_epsilon` unless given, and
            1e-3 with `smart_form: mt-dnn`.
        smart_noise_std: standard deviation of the noise that the search starts from; `smart_epsilon` unless given, and
            1e-5 with `smart_form: mt-dnn`.
        smart_steps: how many steps the search takes; each costs a forward and half a backward pass.
        smart_variant: the divergence of two outputs: `smart_0` KL both ways; `smart_1` KL one way; `smart_2` the
            search by KL one way, the term by KL both ways. One for all, or by task, where the others have `smart_0`.
        smart_score_divergence: what stands for KL where the output is a score: `squared_error`, which `smart_0` takes
            unless told otherwise, or `bernoulli`, the KL of a coin whose chance is the score's share of its range.
            There a score outside the range counts as its end, a hundredth further in, and has no gradient.
        smart_norm: the norm of the ball and of a step.
        smart_level: whether each token has a ball of its own, or the tokens of a sentence have one together.
        smart_form: `paper`, or `mt-dnn`, what the popular code computes in its place: no ball, and moves of length 1
            that are nearly random. To compare with. Each has its own numbers where none are given.
        r_drop_weight: factor on R-Drop's term.
        fgm_weight: factor on the loss at the worst near words.
        fgm_epsilon: how far those are from a sentence's word embeddings, by the l2 norm.
        teachers: saved models whose answers to the training rows are learnt beside the labels: an ensemble, or models
            of one task each. A task takes the mean of those that have it. They answer once, before training.
        distill_weight: the teachers' share of the loss, from 0 to 1.
        distill_temperature: softens both answers, for classes and binary tasks: logits are divided by it.
        proximal: a term that keeps outputs near those of an earlier state of the weights, the teacher. `previous`:
            those of up to `proximal_steps` steps ago; `momentum`: their moving average; `none`.
        proximal_weight: factor on that term.
        proximal_steps: optimizer steps between two moves of the teacher.
        proximal_momentum: the share that the average keeps at a move, in the first tenth of the steps and after it.
        proximal_evaluate: whether evaluations score the teacher's weights too, as `eval_averaged_<task>_<metric>`, and
            `minbert train` leaves them as a model in the folder `averaged` of the run's.
        pretrained_decay: weight decay of the encoder towards the weights it began with, beside `weight_decay` towards
            zero. A step takes `learning_rate * pretrained_decay` of the way.
        packing: compute on real tokens alone, not on the padding that is half of a usual batch. Answers and gradients
            are the same; it is faster everywhere but for batches without padding. On a GPU in half precision it needs
            `attention_probs_dropout_prob: 0` to be at its fastest: the fast kernel has no dropout.
        cuda_graphs: `auto` records the step of a GPU with `packing` once per size of a batch, and replays it: small
            batches then cost what they cost the GPU, not what they cost Python. `off` does not.
        compile_layers: compile the encoder's layer, once for all layers, tasks and sizes of a batch, and an
            aggregator's passes over the gradients. It pays on a GPU in long runs: the first steps take up to a minute
            longer. `torch_compile`, the stock argument, compiles the model whole, and anew for each task.
        train_metrics: scores on the training rows at the end of each epoch: `running` from the epoch's own outputs,
            at no extra pass; `full` by scoring them again; `none`.
        early_stopping_patience: stop after this many evaluations without a better `metric_for_best_model`.
        early_stopping_threshold: how much better counts as better.

    Raises:
        MinBertError: a value is out of range, or a stock argument is set that several tasks cannot honour.
    """

    train_tasks: list[str] | None = None
    eval_tasks: list[str] | None = None
    task_batch_sizes: dict[str, int] | BatchSizes | None = None
    task_weights: dict[str, float] | TaskWeights | None = None
    mixing: str = "cycle"
    mixing_temperature: float = 2.0
    task_sampling: dict[str, Sampling] | None = None
    score_bins: int = 5
    rows_per_epoch: dict[str, int | float] | None = None
    redraw_rows: bool = True
    aggregator: str = "sum"
    aggregator_options: dict | None = None
    gradient_smoothing: float | None = None
    gradient_reduction: GradientReduction = "all_reduce"
    conflict_detail: ConflictDetail = "none"
    optim: OptimizerNames | OwnOptimizer | str = TrainingArguments.optim
    freeze: Freeze | int = "none"
    unfreeze: dict[str, Freeze | int] | Unfreeze | None = None
    learning_rates: dict[str, float] | None = None
    weight_decays: dict[str, float] | None = None
    layer_decay: float = 1.0
    regularizer: str = "none"
    smart_weight: float = 1.0
    smart_epsilon: float | None = None
    smart_step_size: float | None = None
    smart_noise_std: float | None = None
    smart_steps: int = 1
    smart_variant: Variant | dict[str, Variant] = "smart_0"
    smart_score_divergence: ScoreDivergence | None = None
    smart_norm: Norm = "inf"
    smart_level: Level = "token"
    smart_form: Form = "paper"
    r_drop_weight: float = 1.0
    fgm_weight: float = 1.0
    fgm_epsilon: float = 1.0
    teachers: list[str] | None = None
    distill_weight: float = 0.5
    distill_temperature: float = 1.0
    proximal: Proximal = "none"
    proximal_weight: float = 1.0
    proximal_steps: int = 1
    proximal_momentum: list[float] = field(default_factory=lambda: [0.99, 0.999])
    proximal_evaluate: bool = False
    pretrained_decay: float = 0.0
    packing: bool = False
    cuda_graphs: CudaGraphs = "auto"
    compile_layers: bool = False
    train_metrics: TrainMetrics = "none"
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    restore_callback_states_from_checkpoint: bool = True
    remove_unused_columns: bool = False
    logging_nan_inf_filter: bool = False
    resume_from_checkpoint: bool | str | None = None
    report_to: None | str | list[str] = "none"

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
        self._refuse_unsupported()  # before the stock class acts on them, as it does for DeepSpeed
        self._check_ranges()  # nor are the stock words for what is out of range always to the point
        check_launch(self.use_cpu)
        if (launched := launched_precision()) and not (self.bf16 or self.fp16):
            setattr(self, launched, True)  # else some of the code would follow the launcher, and some the recipe
        own = self._own_optimizer()
        super().__post_init__()
        self.optim = own or self.optim
        # Else every batch waits, before it is copied, for all that the GPU has still to do.
        self.accelerator_config.non_blocking |= self.dataloader_pin_memory
        self._refuse_settings()
        self._check_values()
        if self.compile_layers and self.torch_compile:
            raise MinBertError("`compile_layers` and `torch_compile` compile the same layers. Leave one out.")
        if self.n_gpu > 1:
            tell_of_idle_gpus(self.n_gpu)
            self._n_gpu = 1  # with more, the stock Trainer wraps the model in DataParallel, which no step would use

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

    def _own_optimizer(self) -> OwnOptimizer | None:
        """The optimizer, if it is one of ours; then a stock one stands in for it while the stock class looks."""
        if self.optim in [*OwnOptimizer]:
            if self.optim_args:
                raise MinBertError(
                    f"`optim_args` has no meaning for `optim: {OwnOptimizer(self.optim).value}`, whose settings are "
                    f"`adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`. Leave it out."
                )
            own, self.optim = OwnOptimizer(self.optim), OptimizerNames.ADAMW_TORCH
            return own
        stock = [name.value for name in OptimizerNames]
        if self.optim not in stock:
            raise unknown_name("optim", self.optim, [*OPTIMIZERS, *stock])
        return None

    def _refuse_unsupported(self) -> None:
        known = {f.name for f in fields(self)}
        for name, (allowed, reason) in REFUSED.items():
            if name not in known:  # a field that only newer versions of transformers have
                continue
            value = getattr(self, name)
            asks_for_nothing = not value and allowed not in (True, -1)
            if value != allowed and not asks_for_nothing:
                raise MinBertError(f"`{name}: {value}` is not supported: {reason}. Leave it out.")

    def _refuse_settings(self) -> None:
        accelerator = self.accelerator_config
        for name, allowed in (
            ("dispatch_batches", (None, False)),
            ("split_batches", (False,)),
            ("even_batches", (True,)),
        ):
            if getattr(accelerator, name) not in allowed:
                raise MinBertError(
                    f"`accelerator_config.{name}: {getattr(accelerator, name)}` is not supported: rounds are dealt "
                    f"to processes whole. Leave it out."
                )
        if "lomo" in str(self.optim.value):
            reason = "it steps within the backward pass of one task"
            raise MinBertError(f"`optim: {self.optim.value}` is not supported: {reason}. Use adamw_torch.")
        if self.fp16 and self.device.type != "cuda":
            raise MinBertError(
                "`fp16: true` needs a GPU: on a CPU it would silently train in fp32. Use bf16, or neither."
            )

    def _check_ranges(self) -> None:
        for name, lowest in (
            ("per_device_train_batch_size", 1), ("per_device_eval_batch_size", 1), ("gradient_accumulation_steps", 1),
            ("early_stopping_patience", 1), ("early_stopping_threshold", 0), ("learning_rate", 0), ("warmup_steps", 0),
            ("weight_decay", 0), ("max_grad_norm", 0), ("dataloader_num_workers", 0), ("seed", 0), ("data_seed", 0),
            ("eval_accumulation_steps", 1), ("save_total_limit", 1), ("logging_steps", 0), ("save_steps", 0),
            ("eval_steps", 0), ("eval_delay", 0), ("score_bins", 2), ("mixing_temperature", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise MinBertError(f"`{name}` must be at least {lowest}. Found {value}.")
            if value == math.inf:
                raise MinBertError(f"`{name}` must be finite. Found {value}.")
        if self.max_steps == 0:  # the stock loop would take one step
            raise MinBertError("`max_steps` must be at least 1. Found 0. Leave it out to train by `num_train_epochs`.")
        if self.max_steps < 0 and not self.num_train_epochs > 0:
            raise MinBertError(f"`num_train_epochs` must be more than 0. Found {self.num_train_epochs}.")
        if self.max_steps < 0 and self.num_train_epochs == math.inf:
            raise MinBertError("`num_train_epochs` must be finite. Found inf. Set `max_steps` instead.")

    def _check_values(self) -> None:
        for name in ("mixing", "aggregator"):
            if not isinstance(getattr(self, name), str):
                raise MinBertError(f"`{name}` must be a name. Found {getattr(self, name)!r}.")
        choices = {"mixing": MIXING, "proximal": get_args(Proximal)}
        choices |= {"train_metrics": get_args(TrainMetrics), "conflict_detail": get_args(ConflictDetail)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        self._check_freezing()
        check_groups(self)
        self._check_per_task()
        self._check_aggregator()
        self._check_regularizer()
        if self.do_eval and self.eval_strategy == "no":
            raise MinBertError("`do_eval: true` does nothing by itself. Set `eval_strategy` to epoch or steps.")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise MinBertError("`early_stopping_patience` needs evaluations. Set `eval_strategy` to epoch or steps.")

    def _check_freezing(self) -> None:
        frozen = {*schedule_of(self.freeze, self.unfreeze).values()}
        in_part = self.unfreeze == "gradual" or not frozen <= {"none", "encoder"}
        if in_part and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise MinBertError(
                "`freeze` in part does not go with checkpoints that re-enter the backward pass: above frozen layers "
                "nothing would have a gradient. Leave `gradient_checkpointing_kwargs` out."
            )

    def _check_aggregator(self) -> None:
        if not isinstance(self.aggregator_options, Mapping | None):
            raise MinBertError(
                f"`aggregator_options` must be a mapping like {{reduction: mean}}. Found {self.aggregator_options!r}."
            )
        aggregator = make_aggregator(self.aggregator, **(self.aggregator_options or {}))
        if self.gradient_reduction not in get_args(GradientReduction):
            raise unknown_name("gradient_reduction", self.gradient_reduction, get_args(GradientReduction))
        if self.gradient_reduction == "sharded" and (self.gradient_smoothing is not None or not aggregator.needs_rows):
            raise MinBertError(
                "`gradient_reduction: sharded` is for an aggregator with rows, such as pcgrad, and without "
                "`gradient_smoothing`. Leave it out."
            )
        if self.conflict_detail != "none" and not aggregator.needs_rows:
            raise MinBertError(
                f"`conflict_detail: {self.conflict_detail}` needs an aggregator that sees each task's gradient. Found "
                f"{self.aggregator!r}. Take another, such as pcgrad, or measure with `minbert conflicts --detail`."
            )
        if self.gradient_smoothing is None:
            return
        if not _is_number(self.gradient_smoothing) or not 0 <= self.gradient_smoothing < 1:
            raise MinBertError(
                f"`gradient_smoothing` must be 0 or more and below 1. Found {self.gradient_smoothing!r}. Leave it out "
                "to smooth nothing."
            )
        if not aggregator.needs_rows:
            raise MinBertError(
                f"`gradient_smoothing` needs an aggregator that sees each task's gradient. Found {self.aggregator!r}. "
                "Take another, such as pcgrad, or leave it out."
            )

    def _check_regularizer(self) -> None:
        searches = self.regularizer != "none" and regularizer_of(self).searches
        if searches and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise MinBertError(
                f"`regularizer: {self.regularizer}` differentiates by the input, which torch does not do where "
                "checkpoints re-enter the backward pass. Leave `gradient_checkpointing_kwargs` out."
            )
        if self.regularizer == "smart" and self.smart_form == "mt-dnn" and self.torch_compile:
            raise MinBertError("`smart_form: mt-dnn` works by a hook, which compiled models pass by. Leave one out.")
        proximal_of(self)
        if self.teachers is not None:
            if not self.teachers:
                raise MinBertError("`teachers` is empty. Name a saved model, or leave it out.")
            distillation_of(self)
        if self.proximal_evaluate and self.proximal == "none":
            raise MinBertError("`proximal_evaluate: true` needs a teacher. Set `proximal`.")
        if self.proximal_evaluate and self.eval_strategy == "no":
            raise MinBertError("`proximal_evaluate: true` needs evaluations. Set `eval_strategy` to epoch or steps.")
        check_number("pretrained_decay", self.pretrained_decay)
        own = self.learning_rates or {}  # a task's may be that of its private layers
        rate = max(own.get("encoder", self.learning_rate), *(own[name] for name in own if name != "heads"), 0)
        if rate * self.pretrained_decay > 1:
            raise MinBertError(
                f"`pretrained_decay: {self.pretrained_decay:g}` with `learning_rate: {rate:g}` takes a step of "
                f"{rate * self.pretrained_decay:g} times the way back, and more than 1 overshoots. Give at most "
                f"{1 / rate:g}."
            )

    def _check_per_task(self) -> None:
        for name, words in (("task_batch_sizes", get_args(BatchSizes)), ("task_weights", get_args(TaskWeights))):
            value = getattr(self, name)
            if isinstance(value, str) and value not in words:
                raise unknown_name(name, value, words)
            if not isinstance(value, str | Mapping | None):
                said = f"`{name}` must be a mapping from tasks to numbers, or {words[0]!r}."
                raise MinBertError(f"{said} Found {value!r}.")
        for name in ("task_sampling", "rows_per_epoch"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise MinBertError(f"`{name}` must be a mapping from tasks. Found {getattr(self, name)!r}.")
        for task, size in self.by_task("task_batch_sizes").items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MinBertError(f"`task_batch_sizes` of {task!r} must be a whole number from 1. Found {size!r}.")
        for task, weight in self.by_task("task_weights").items():
            if not _is_number(weight) or not 0 <= weight < math.inf:
                raise MinBertError(f"`task_weights` of {task!r} must be a number from 0. Found {weight!r}.")
        for task, sampling in (self.task_sampling or {}).items():
            if sampling not in get_args(Sampling):
                raise unknown_name(f"`task_sampling` of {task!r}:", sampling, get_args(Sampling))
        for task, rows in (self.rows_per_epoch or {}).items():
            counts = type(rows) is int and rows >= 1
            if not counts and not (type(rows) is float and 0 < rows <= 1):
                raise MinBertError(
                    f"`rows_per_epoch` of {task!r} must be a whole number of rows from 1, or a share of them above 0 "
                    f"and up to 1.0. Found {rows!r}."
                )

    # ---- What depends on the model's tasks -------------------------------------------------------------------

    def without_effect(self, tasks: Iterable[Task]) -> list[str]:
        """Sentences about keys that are given for a term, or a part of one, that a run on these tasks does not have.

        They are no errors: a recipe with `regularizer=none` after it is how a term is left out to compare.
        """
        tasks = [*tasks]
        chosen = f"`regularizer: {self.regularizer}`"
        idle = [(f"{name}_", chosen, f"`regularizer: {name}`") for name in REGULARIZERS if name != self.regularizer]
        if self.teachers is None:
            idle.append(("distill_", "`teachers` left out", "distillation"))
        if self.proximal != "momentum":
            key = "proximal_" if self.proximal == "none" else "proximal_momentum"
            idle.append((key, f"`proximal: {self.proximal}`", "`proximal: momentum`"))
        if self.regularizer == "smart":
            if self.smart_form == "mt-dnn":
                idle += [(key, "`smart_form: mt-dnn`", "`smart_form: paper`") for key in ("smart_norm", "smart_level")]
            if not any(task.kind == "score" for task in tasks):
                idle.append(("smart_score_divergence", "these tasks", "scores, and none of them is one"))
        given = [f.name for f in fields(self) if getattr(self, f.name) != _default_of(f)]
        said = []
        if self.aggregator != "sum" and (reason := self.why_none_conflict([task.name for task in tasks])):
            said.append(f"`aggregator: {self.aggregator}` has no effect: {reason}.")
        for start, without, purpose in idle:
            if names := [f"`{name}`" for name in given if name.startswith(start)]:
                has, it = ("has", "It is") if len(names) == 1 else ("have", "They are")
                said.append(f"{', '.join(names)} {has} no effect with {without}. {it} for {purpose}.")
        return said

    def why_none_conflict(self, trained: Sequence[str]) -> str | None:
        """Why no step has a weight that two of the trained tasks reach, so that none can conflict; else `None`."""
        if len(trained) < 2:
            return "one task is trained"
        if self.freeze == "encoder" and self.unfreeze is None:
            return "with `freeze: encoder` nothing is trained that tasks share"
        if issubclass(MIXING[self.mixing], Drawn) and self.gradient_accumulation_steps == 1:
            return f"with `mixing: {self.mixing}` and without `gradient_accumulation_steps` each step has one task"
        return None

    def by_task(self, option: str) -> Mapping[str, Any]:
        """What `option` gives task by task; nothing where it is left out, or is one word for all."""
        value = getattr(self, option)
        return value if isinstance(value, Mapping) else {}

    def chosen_tasks(self, option: str, tasks: Mapping[str, Task]) -> list[str]:
        """The tasks that `option` names, each once; all of them where it says nothing.

        Raises:
            MinBertError: it names a task that is not among `tasks`, or none at all.
        """
        names = getattr(self, option)
        names = list(tasks) if names in (None, {}) else [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in tasks:
                raise MinBertError(f"`{option}`: {unknown_name('task', name, tasks)}")
        if not names:
            raise MinBertError(f"`{option}` is empty. Name at least one of: {', '.join(tasks)}.")
        return list(dict.fromkeys(names))

    def metrics_of(self, tasks: Iterable[Task]) -> list[str]:
        """Names of what an evaluation during training reports on these tasks."""
        names = metric_names(tasks)
        averaged = [f"eval_averaged_{name}" for name in names] if self.proximal_evaluate else []
        return [f"eval_{name}" for name in names] + averaged

    def check_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Checks every name of a task or a metric. Needs no model, so it can be asked before one is loaded.

        Raises:
            MinBertError: a task or a metric is unknown, the regularizer is not for such a task, all tasks in training
                have the weight 0, or the aggregator cannot serve so many tasks, or tasks of such names.
        """
        check_groups(self, tasks)
        for option in ("train_tasks", "eval_tasks", "task_sampling", "rows_per_epoch"):
            self.chosen_tasks(option, tasks)
        for option in ("task_batch_sizes", "task_weights", "smart_variant"):
            if self.by_task(option):  # else it may be one word for all
                self.chosen_tasks(option, tasks)
        regularizer = regularizer_of(self)
        trained = [tasks[name] for name in self.chosen_tasks("train_tasks", tasks)]
        if not any(self.by_task("task_weights").get(task.name, 1.0) for task in trained):
            raise MinBertError(
                f"`task_weights` are 0 for all tasks in training: {', '.join(task.name for task in trained)}. Nothing "
                "would be trained. Give one of them more."
            )
        self._check_aggregator_of([task.name for task in trained])
        if regularizer is not None and (reason := regularizer.refusal(trained)) is not None:
            raise MinBertError(reason)
        if (metric := self.metric_for_best_model) is not None:
            known = self.metrics_of(tasks[name] for name in self.chosen_tasks("eval_tasks", tasks))
            if metric.removeprefix("eval_").startswith("averaged_") and not self.proximal_evaluate:
                raise MinBertError(
                    f"`metric_for_best_model: {metric}` is of the teacher's weights. Set `proximal_evaluate: true`, "
                    "or leave `averaged_` out."
                )
            if metric not in known and f"eval_{metric}" not in known:
                raise MinBertError(f"`metric_for_best_model`: {unknown_name('metric', metric, known)}")

    def _check_aggregator_of(self, trained: Sequence[str]) -> None:
        """Raises `MinBertError` where it would in a step, and where the log would have one name for two pairs."""
        aggregator = make_aggregator(self.aggregator, **(self.aggregator_options or {}))
        if not aggregator.needs_rows:
            return
        pairs: dict[str, tuple[str, str]] = {}
        for a, b in combinations(trained, 2):
            if (other := pairs.setdefault(f"{a}_{b}", (a, b))) != (a, b):
                raise MinBertError(
                    f"Aggregator {self.aggregator!r} would log `conflict_{a}_{b}` of the tasks {other[0]!r} and "
                    f"{other[1]!r} and of {a!r} and {b!r}. Give one of them another name."
                )
        all_in_each = self.mixing in ("cycle", "shortest")
        for count in range(len(trained) if all_in_each else min(2, len(trained)), len(trained) + 1):
            remedy = f"`aggregator_options` must serve steps of {count} tasks."
            with explain(f"Combining the gradients of {count} tasks with {self.aggregator!r}", remedy):
                aggregator.weights(torch.eye(count, dtype=torch.float64), torch.Generator())


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _default_of(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
