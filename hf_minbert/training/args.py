"""The training arguments: the stock ones, plus how tasks share a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..data.rounds import MIXING, Drawn
from ..errors import MinBertError, unknown_name
from ..evaluation.metrics import metric_names
from ..tasks import Task
from .checks import check_ranges, check_tasks, check_values
from .conflicts import ConflictDetail
from .data import BatchSizes, Sampling, TaskWeights
from .evaluation import TrainMetrics
from .freezing import Freeze, Unfreeze
from .gradients import GradientReduction
from .graphs import CudaGraphs
from .optimizers import OPTIMIZERS, OwnOptimizer
from .processes import check_launch, launched_precision, tell_of_idle_gpus, tell_of_the_cpu
from .proximal import Proximal
from .refused import refuse_settings, refuse_unsupported
from .regularizers import REGULARIZERS
from .smart import Form, Level, Norm, ScoreDivergence, Variant


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
            class of the library torchjd that works from the gradients' dot products, as `torchjd.UPGrad`; it computes
            on the CPU, so that each step waits for the GPU. With accumulation, a task's gradient is the mean over the
            window, zero where the task is missing. Where one is not finite, only fp16 skips the step; in fp32 and bf16
            weights become NaN, as in the stock `Trainer`.
        aggregator_options: keyword arguments of the aggregator: `{reduction: mean}` of `pcgrad`, which else adds;
            `{beta: 0.01}` of `gradvac`, how fast its targets follow; those of a torchjd class.
        gradient_smoothing: averages each task's gradient over steps before the aggregator sees it: that of `n` steps
            ago weighs `gradient_smoothing ** n`. Costs one number more per task and shared parameter.
        gradient_reduction: how several processes bring tasks' gradients together for an aggregator with rows.
            `all_reduce`: every process gets all means; `sharded`: each gets and combines a share of the numbers, with
            less traffic, to the same result up to rounding. Not with `gradient_smoothing`.
        conflict_detail: what an aggregator that sees each task's gradient logs of conflicts, beside those of whole
            gradients. `layers`: rate and cosine of every two tasks layer by layer; `tensors`: also in how many
            parameter tensors they conflict, per step and in each epoch; `none`. Costs a second pass over gradients.
            Logged of whole gradients: `conflict_sst_para`, `cosine_sst_para`, `norm_sst`, `removed_sst`,
            `surgery_turn`, and `conflicts_epoch` at an epoch's end; of layers: `cosine_sst_para/layer.0`; of tensors:
            `tensor_conflicts_sst_para`, `tensor_conflicts` of `shared_tensors`, and `tensor_conflicts_epoch`. Means
            over training are in `metrics.json`.
        optim: the optimizer: `course_adamw`, the AdamW of the course's handout, or one of the stock ones.
        freeze: what is not trained. `encoder`: everything but the heads; `embeddings`; or a number n, the embeddings
            and the first n layers, private ones by their place in the stack. Weight decay does not move it, and its
            dropout stays on, as in the course and in all training, so a head sees other features in each epoch. With
            `hidden_dropout_prob: 0` and `attention_probs_dropout_prob: 0` a frozen encoder reads each row once, and
            epochs take seconds.
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
            `minbert train` leaves them as a model in the folder `averaged` of the run's. In Python:
            `with trainer.proximal.in_place(): trainer.save_model("averaged")`.
        pretrained_decay: weight decay of the encoder towards the weights it began with, beside `weight_decay` towards
            zero. A step takes `learning_rate * pretrained_decay` of the way.
        packing: compute on real tokens alone, not on the padding that is half of a usual batch. Answers and gradients
            are the same up to rounding; it is faster everywhere but for batches without padding. On a GPU in half
            precision it needs `attention_probs_dropout_prob: 0` to be at its fastest: the fast kernel has no dropout.
        cuda_graphs: `auto` records the step of a GPU with `packing` once per size of a batch, and replays it: small
            batches then cost what they cost the GPU, not what they cost Python. `off` does not.
        compile_layers: compile the encoder's layer, once for all layers, tasks and sizes of a batch. It pays on a GPU
            in long runs: the first steps take up to a minute longer. `torch_compile`, the stock argument, compiles the
            model whole, and anew for each task.
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
        refuse_unsupported(self)  # before the stock class acts on them, as it does for DeepSpeed
        check_ranges(self)  # nor are the stock words for what is out of range always to the point
        if torch.backends.mps.is_available() and not self.use_cpu:
            tell_of_the_cpu()
            self.use_cpu = True  # the stock class would take the GPU of a Mac
        check_launch(self.use_cpu)
        if (launched := launched_precision()) and not (self.bf16 or self.fp16):
            setattr(self, launched, True)  # else some of the code would follow the launcher, and some the recipe
        own = self._own_optimizer()
        super().__post_init__()
        self.optim = own or self.optim
        # Else every batch waits, before it is copied, for all that the GPU has still to do.
        self.accelerator_config.non_blocking |= self.dataloader_pin_memory
        refuse_settings(self)
        check_values(self)
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

    def check_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Checks every name of a task or a metric. Needs no model, so it can be asked before one is loaded.

        Raises:
            MinBertError: as `checks.check_tasks`.
        """
        check_tasks(self, tasks)

    def metrics_of(self, tasks: Iterable[Task]) -> list[str]:
        """Names of what an evaluation during training reports on these tasks."""
        names = metric_names(tasks)
        averaged = [f"eval_averaged_{name}" for name in names] if self.proximal_evaluate else []
        return [f"eval_{name}" for name in names] + averaged


def _default_of(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
