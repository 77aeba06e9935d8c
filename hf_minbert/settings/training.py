"""Our own training arguments: how tasks share a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import documented, key

BatchSizes = Literal["proportional"]
FollowingWeights = Literal["uncertainty", "dwa", "imtl_l"]
TaskWeights = Literal["inverse_batch_size", FollowingWeights]
Sampling = Literal["shuffle", "balanced"]
GradientReduction = Literal["all_reduce", "sharded"]
ConflictDetail = Literal["none", "layers", "tensors"]
Freeze = Literal["none", "encoder", "embeddings"]
Unfreeze = Literal["gradual"]
Variant = Literal["smart_0", "smart_1", "smart_2"]
ScoreDivergence = Literal["squared_error", "bernoulli"]
Norm = Literal["inf", "l2"]
Level = Literal["token", "sentence"]
Form = Literal["paper", "mt-dnn", "smart-pytorch"]
Proximal = Literal["none", "previous", "momentum"]
ProximalEvaluate = Literal["instead"]
CudaGraphs = Literal["auto", "off"]
TrainMetrics = Literal["running", "full", "none"]


@documented
@dataclass
class TrainingKeys:
    """Training arguments of ours, and stock ones that have another default."""

    train_tasks: list[str] | None = key(
        None,
        "Tasks that are trained. All of the model's unless given; the other heads stay as they are.",
        by_task=True,
    )
    eval_tasks: list[str] | None = key(
        None, "Tasks that are scored. All of the model's unless given.", resume="after", by_task=True
    )
    task_batch_sizes: dict[str, int] | BatchSizes | None = key(
        None,
        "Rows a round takes from a task, per device, where it differs from `per_device_train_batch_size`. "
        "`proportional`: sizes in proportion to the tasks' rows in an epoch, so that all end together, as nearly as "
        "whole numbers allow; `per_device_train_batch_size` is that of the largest.",
        objectives="tasks",
        per_process=True,
        by_task=True,
    )
    task_weights: dict[str, float] | TaskWeights | None = key(
        None,
        "Factor on a task's loss, 1 unless given. `inverse_batch_size`: the smallest of the tasks' batch sizes over "
        "its own. A loss is a mean over its batch, so that weights tasks with large batches down. Three words are for "
        "weights that follow the tasks' own losses, without the regularizer's part: `uncertainty` learns a noise for "
        "each task, `imtl_l` a scale, and `dwa` weighs those up whose loss falls slowly from epoch to epoch, from the "
        "third one on. They need the losses' values alone, so that a step computes nothing twice, and `mixing` cycle "
        "or shortest. With an aggregator of rows, such as pcgrad, a weight is the factor on a task's row.",
        objectives="tasks",
        by_task=True,
    )
    task_weights_options: dict | None = key(
        None,
        "Options of `task_weights` that follow the losses: `{learning_rate: 0.001}` of what `uncertainty` and "
        "`imtl_l` learn, without weight decay, by the run's schedule (Adam moves a logarithm of a weight by about as "
        "much a step, so that few steps want more); `{temperature: 2.0}` of `dwa`: the higher, the nearer to 1 are "
        "its weights.",
        objectives="tasks",
    )
    mixing: str = key(
        "cycle",
        "Which examples make a round. `cycle`: an epoch ends with the task that takes the most rounds, and shorter "
        "ones start again; `once`: a task goes through its rows once an epoch, and then leaves the rounds; "
        "`shortest`: an epoch ends with the task that takes the fewest rounds, and rows of the others are not seen. "
        "With `proportional`, `temperature` and `annealed` a step has one task, drawn with a chance in proportion to "
        "its rows, to rows^(1/T), or to a power of its rows that falls from 1 to .2 over the epochs.",
        objectives="tasks",
    )
    mixing_temperature: float = key(2.0, "The T of `temperature`, from 1.", objectives="tasks")
    task_sampling: dict[str, Sampling] | None = key(
        None,
        "How a task's rows are drawn, `shuffle` unless given. `shuffle`: each row once, in a new order; `balanced`: "
        "with replacement, each label equally often (for a score, each bin of its range).",
        objectives="tasks",
        by_task=True,
    )
    score_bins: int = key(
        5,
        "How many bins of equal width `balanced` puts the range of a score into.",
        objectives="tasks",
    )
    rows_per_epoch: dict[str, int | float] | None = key(
        None,
        "How much of a task's rows an epoch takes, where that is not all of them: a number with a point is a share "
        "(`0.1` a tenth, `1.0` all), a whole number counts rows (`1` is one row).",
        objectives="tasks",
        by_task=True,
    )
    redraw_rows: bool = key(
        True,
        "Whether each epoch draws its `rows_per_epoch` anew, or all epochs keep the first draw.",
        objectives="tasks",
    )
    share_rows: bool = key(
        False,
        "Whether tasks with the same training files and text columns, such as two labels of one file, take the same "
        "rows in a round, and share one forward pass with one dropout mask. A row may lack the labels of some of "
        "them. Unless so, each task draws rows of its own.",
        objectives="tasks",
    )
    aggregator: str = key(
        "sum",
        "How the tasks' gradients become one. `sum`; `pcgrad` and `gradvac`, gradient surgery; or `unconditional`, "
        "which takes from each gradient what it has along the others, in conflict or not. Or a class of the library "
        "torchjd that works from the gradients' dot products, as `torchjd.UPGrad`; it computes on the CPU, so that "
        "each step waits for the GPU. With accumulation, a task's gradient is the mean over the window, zero where "
        "the task is missing. Where one is not finite, only fp16 skips the step; in fp32 and bf16 weights become NaN,"
        " as in the stock `Trainer`.",
        objectives="tasks",
    )
    aggregator_options: dict | None = key(
        None,
        "Keyword arguments of the aggregator: `{reduction: mean}` of `pcgrad`, which else adds; `{beta: 0.01}` of "
        "`gradvac`, how fast its targets follow; those of a torchjd class.",
        objectives="tasks",
    )
    gradient_smoothing: float | None = key(
        None,
        "Averages each task's gradient over steps before the aggregator sees it: that of `n` steps ago weighs "
        "`gradient_smoothing ** n`. Costs one number more per task and shared parameter.",
        objectives="tasks",
    )
    gradient_reduction: GradientReduction = key(
        "all_reduce",
        "How several processes bring tasks' gradients together for an aggregator with rows. `all_reduce`: every "
        "process gets all means; `sharded`: each gets and combines a share of the numbers, with less traffic, to the "
        "same result up to rounding. Not with `gradient_smoothing`.",
        resume="free",
        objectives="tasks",
    )
    conflict_detail: ConflictDetail = key(
        "none",
        "What an aggregator that sees each task's gradient logs of conflicts, beside those of whole gradients. "
        "`layers`: rate and cosine of every two tasks layer by layer; `tensors`: also in how many parameter tensors "
        "they conflict, per step and in each epoch; `none`. Costs a second pass over gradients. Logged of whole "
        "gradients: `conflict_sst_para`, `cosine_sst_para`, `norm_sst`, `removed_sst`, `surgery_turn`, and "
        "`conflicts_epoch` at an epoch's end; of layers: `cosine_sst_para/layer.0`; of tensors: "
        "`tensor_conflicts_sst_para`, `tensor_conflicts` of `shared_tensors`, and `tensor_conflicts_epoch`. Means "
        "over training are in `metrics.json`.",
        resume="free",
        objectives="tasks",
    )
    freeze: Freeze | int = key(
        "none",
        "What is not trained. `encoder`: everything but the heads; `embeddings`; or a number n, the embeddings and "
        "the first n layers, private ones by their place in the stack. Weight decay does not move it, and its dropout"
        " stays on, as in the course and in all training, so a head sees other features in each epoch. With "
        "`hidden_dropout_prob: 0` and `attention_probs_dropout_prob: 0` a frozen encoder reads each row once, and "
        "epochs take seconds.",
        objectives="tasks",
    )
    unfreeze: dict[str, Freeze | int] | Unfreeze | None = key(
        None,
        "Until when. `{100: 4, 200: none}`: `freeze` is 4 after 100 optimizer steps, and nothing is frozen after 200;"
        " each time it must be less. `gradual`: each epoch from the second on frees one layer more, the uppermost "
        "first (with the pooler), the embeddings last. What is freed begins with a new state of the optimizer. "
        "`gradient_smoothing` begins anew.",
        objectives="tasks",
    )
    learning_rates: dict[str, float] | None = key(
        None,
        "Rates that differ from `learning_rate`, by group: `encoder`, `heads`, and a task's name for its head and "
        "private layers, which comes before both. `{encoder: 1e-5, heads: 1e-3}` is what a separate optimizer for the"
        " encoder would be. `lr_scheduler_type` scales all alike.",
        objectives="tasks",
    )
    weight_decays: dict[str, float] | None = key(
        None,
        "Likewise, decays that differ from `weight_decay`. Biases and LayerNorm are spared in all.",
        objectives="tasks",
    )
    layer_decay: float = key(
        1.0,
        "Factor on the learning rate from each of the encoder's layers to the one below. The top layer has the "
        "encoder's rate, and the embeddings the lowest.",
        objectives="tasks",
    )
    regularizer: str = key(
        "none",
        "A term added to each task's loss, and logged as `<name>_<task>`. `smart`: the output may not change where "
        "words hardly move (SMART's smoothness term); `r_drop`: two passes with other dropout shall agree; `fgm`: the"
        " loss at the worst near words is added; `none`.",
        objectives="tasks",
    )
    regularizer_options: dict | None = key(
        None,
        "Keyword arguments of a regularizer that a plugin registered; those of the package have keys of their own.",
        objectives="tasks",
    )
    smart_weight: float = key(1.0, "Factor on SMART's term.", objectives="tasks")
    smart_epsilon: float | None = key(
        None,
        "Radius of the ball in which word embeddings move, whose root mean square in BERT is near 0.05; 5e-4 unless "
        "given. With another `smart_form` than `paper` 1e-6 unless given, which only keeps a division from 0.",
        objectives="tasks",
    )
    smart_step_size: float | None = key(
        None,
        "Length of a step of the search for the worst move; ten times `smart_epsilon` unless given, and 1e-3 with "
        "another `smart_form` than `paper`.",
        objectives="tasks",
    )
    smart_noise_std: float | None = key(
        None,
        "Standard deviation of the noise that the search starts from; `smart_epsilon` unless given, and 1e-5 with "
        "another `smart_form` than `paper`.",
        objectives="tasks",
    )
    smart_steps: int = key(
        1,
        "How many steps the search takes; each costs a forward and half a backward pass.",
        objectives="tasks",
    )
    smart_variant: Variant | dict[str, Variant] = key(
        "smart_0",
        "The divergence of two outputs: `smart_0` KL both ways; `smart_1` KL one way; `smart_2` the search by KL one "
        "way, the term by KL both ways. One for all, or by task, where the others have `smart_0`.",
        objectives="tasks",
        by_task=True,
    )
    smart_score_divergence: ScoreDivergence | None = key(
        None,
        "What stands for KL where the output is a score: `squared_error`, which `smart_0` takes unless told "
        "otherwise, or `bernoulli`, the KL of a coin whose chance is the score's share of its range. There a score "
        "outside the range counts as its end, a hundredth further in, and has no gradient.",
        objectives="tasks",
    )
    smart_norm: Norm = key("inf", "The norm of the ball and of a step.", objectives="tasks")
    smart_level: Level = key(
        "token",
        "Whether each token has a ball of its own, or the tokens of a sentence have one together.",
        objectives="tasks",
    )
    smart_form: Form = key(
        "paper",
        "`paper`; or, to compare with, what popular code computes in its place: no ball, and moves of length 1 that "
        "are nearly random, in `mt-dnn`, and in `smart-pytorch`, where a symmetric KL is the sum over a batch's rows "
        "and not their mean. These have other numbers where none are given.",
        objectives="tasks",
    )
    r_drop_weight: float = key(1.0, "Factor on R-Drop's term.", objectives="tasks")
    fgm_weight: float = key(1.0, "Factor on the loss at the worst near words.", objectives="tasks")
    fgm_epsilon: float = key(
        0.1,
        "How far those are from a sentence's word embeddings, by the l2 norm.",
        objectives="tasks",
    )
    teachers: list[str | dict] | None = key(
        None,
        "Models whose answers to the training rows are learnt beside the labels: an ensemble, or models of one task "
        "each. A task takes the mean of those that have it. Each is a saved model, by folder or Hub id; or a recipe "
        "that is trained first, as `{recipe: cs224n/baseline, seeds: 2}`, see below. They answer once, before "
        "training; the answers are kept in `cache_dir`, or in the run's folder, for the next student of the same "
        "teachers.",
        objectives="tasks",
    )
    distill_weight: float = key(0.5, "The teachers' share of the loss, from 0 to 1.", objectives="tasks")
    distill_temperature: float = key(
        1.0,
        "Softens both answers, for classes and binary tasks: logits are divided by it.",
        objectives="tasks",
    )
    proximal: Proximal = key(
        "none",
        "A term that keeps outputs near those of an earlier state of the weights, the teacher. `previous`: those of "
        "up to `proximal_steps` steps ago; `momentum`: their moving average; `none`.",
        objectives="tasks",
    )
    proximal_weight: float = key(
        1.0,
        "Factor on that term. With 0 the term is not computed, which costs no pass: `momentum` is then an average of "
        "the weights alone (EMA), for `proximal_evaluate`.",
        objectives="tasks",
    )
    proximal_steps: int = key(1, "Optimizer steps between two moves of the teacher.", objectives="tasks")
    proximal_momentum: list[float] = key(
        [0.99, 0.999],
        "The share that the average keeps at a move, in the first tenth of the steps and after it.",
        objectives="tasks",
    )
    proximal_evaluate: bool | ProximalEvaluate = key(
        False,
        "Whether evaluations score the teacher's weights too, as `eval_averaged_<task>_<metric>`, and `minbert train`"
        " leaves them as a model in the folder `averaged` of the run's. In Python: `with trainer.proximal.in_place():"
        ' trainer.save_model("averaged")`. `instead`: evaluations score the teacher\'s weights in the place of the '
        "model's, choose the best model by them, and at the end they are the model.",
        resume="after",
        objectives="tasks",
        off=False,
    )
    pretrained_decay: float = key(
        0.0,
        "Weight decay of the encoder towards the weights it began with, beside `weight_decay` towards zero. A step "
        "takes `learning_rate * pretrained_decay` of the way.",
        objectives="tasks",
    )
    packing: bool = key(
        False,
        "Compute on real tokens alone, not on the padding that is half of a usual batch. Answers and gradients are "
        "the same up to rounding; it is faster everywhere but for batches without padding. On a GPU in half precision"
        " with `max_length` above 128, it needs `attention_probs_dropout_prob: 0` to be at its fastest: the kernel for"
        " long sentences has no dropout. Layers, and hooks on them, then see the tokens of a batch in one row, "
        "`[1, tokens, hidden]`. For the hand-written encoder.",
        resume="free",
        handed_on=True,
    )
    cuda_graphs: CudaGraphs = key(
        "auto",
        "`auto` records the step of a GPU with `packing` once per size of a batch, and replays it: small batches then"
        " cost what they cost the GPU, not what they cost Python. `off` does not.",
        resume="free",
        handed_on=True,
        objectives="tasks",
    )
    compile_layers: bool = key(
        False,
        "Compile the encoder's layer, once for all layers, tasks and sizes of a batch. It pays on a GPU in long runs:"
        " the first steps take up to a minute longer. `torch_compile`, the stock argument, compiles the model whole, "
        "and anew for each task.",
        resume="free",
        handed_on=True,
    )
    train_metrics: TrainMetrics = key(
        "none",
        "Scores on the training rows at the end of each epoch: `running` from the epoch's own outputs, at no extra "
        "pass; `full` by scoring them again; `none`. Those of the epoch whose model is kept are in `metrics.json`, as "
        "`train_sst_accuracy`.",
        resume="free",
        objectives="tasks",
        off="none",
    )
    early_stopping_patience: int | None = key(
        None,
        "Stop after this many evaluations without a better `metric_for_best_model`.",
        resume="free",
        off=None,
    )
    early_stopping_threshold: float = key(0.0, "How much better counts as better.", resume="free")
    restore_callback_states_from_checkpoint: bool = key(
        True,
        "Stock, true here: callbacks go on where they were.",
        resume="free",
    )
    remove_unused_columns: bool = key(False, "Stock, false here: columns are chosen by task.", resume="free")
    logging_nan_inf_filter: bool = key(
        False,
        "Stock, false here: losses that are not finite are logged as they are, and the GPU does not wait for each "
        "loss.",
        resume="free",
    )
    resume_from_checkpoint: bool | str | None = key(
        None,
        "Continue the run in `output_dir`: `true` from its newest complete checkpoint, or the path of one.",
        scope="start",
        off=None,
    )
    report_to: None | str | list[str] = key(
        "none",
        "Where to log beside `log.jsonl`, such as `tensorboard` (extra `tensorboard`) or `wandb`; nowhere unless "
        "given.",
        resume="free",
        scope="machine",
        off="none",
    )
