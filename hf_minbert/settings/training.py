"""Our own training arguments."""

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
    """Our own training arguments, and stock arguments with other defaults."""

    train_tasks: list[str] | None = key(
        None,
        "Tasks to train; all tasks by default. The heads of the other tasks do not change.",
        by_task=True,
    )
    eval_tasks: list[str] | None = key(None, "Tasks to score; all tasks by default.", resume="after", by_task=True)
    task_batch_sizes: dict[str, int] | BatchSizes | None = key(
        None,
        "Batch sizes per device that differ from `per_device_train_batch_size`, by task. With `proportional`, all "
        "tasks end an epoch together.",
        objectives="tasks",
        per_process=True,
        by_task=True,
    )
    task_weights: dict[str, float] | TaskWeights | None = key(
        None,
        "Factors on the losses of tasks; 1 by default. `inverse_batch_size` lowers the weight of large batches; "
        "`uncertainty`, `imtl_l` and `dwa` choose weights during training.",
        objectives="tasks",
        by_task=True,
    )
    task_weights_options: dict | None = key(
        None,
        "`{learning_rate: 0.001}` for `uncertainty` and `imtl_l`; `{temperature: 2.0}` for `dwa`, where a higher "
        "value brings the weights nearer to 1.",
        objectives="tasks",
    )
    mixing: str = key(
        "cycle",
        "How the rows of the tasks are distributed over an epoch. With `proportional`, `temperature` and "
        "`annealed`, each step has one task, drawn at random.",
        objectives="tasks",
    )
    mixing_temperature: float = key(2.0, "The T of `mixing: temperature`; at least 1.", objectives="tasks")
    task_sampling: dict[str, Sampling] | None = key(
        None,
        "How the rows of a task are drawn: `shuffle` (default), or `balanced`: with replacement, and each label, or "
        "bin of a score, equally often.",
        objectives="tasks",
        by_task=True,
    )
    score_bins: int = key(
        5,
        "Number of bins of equal width into which `balanced` divides the range of a score.",
        objectives="tasks",
    )
    rows_per_epoch: dict[str, int | float] | None = key(
        None,
        "How many rows of a task an epoch takes. A whole number counts rows (`1`: one row), and a "
        "number with a point is a share (`1.0`: all rows).",
        objectives="tasks",
        by_task=True,
    )
    redraw_rows: bool = key(
        True,
        "Draws the rows of `rows_per_epoch` anew in each epoch. With `false`, all epochs keep the first draw.",
        objectives="tasks",
    )
    share_rows: bool = key(
        False,
        "Tasks with the same training files and text columns take the same rows in a round, and share one forward "
        "pass.",
        objectives="tasks",
    )
    aggregator: str = key(
        "sum",
        "How the gradients of the tasks become one: `sum`, gradient surgery by `pcgrad` or `gradvac`, projection "
        "without a condition (`unconditional`), or a class of torchjd.",
        objectives="tasks",
    )
    aggregator_options: dict | None = key(
        None,
        "Keyword arguments of the aggregator: `{reduction: mean}` of `pcgrad`, which otherwise sums; `{beta: 0.01}` "
        "of `gradvac`; those of a torchjd class.",
        objectives="tasks",
    )
    gradient_smoothing: float | None = key(
        None,
        "Averages each task's gradient over steps before aggregation. The gradient of `n` steps ago has the weight "
        "`gradient_smoothing ** n`.",
        objectives="tasks",
    )
    gradient_reduction: GradientReduction = key(
        "all_reduce",
        "How processes combine the gradients of the tasks: `all_reduce`, or `sharded`, with less traffic and the "
        "same result up to rounding. Not with `gradient_smoothing`.",
        resume="free",
        objectives="tasks",
    )
    conflict_detail: ConflictDetail = key(
        "none",
        "Also logs conflicts by `layers`, or by layers and `tensors`. Needs an aggregator of separate gradients, "
        "and costs a second pass over them.",
        resume="free",
        objectives="tasks",
    )
    freeze: Freeze | int = key(
        "none",
        "What is not trained: `encoder`, `embeddings`, or a number n for the embeddings and the first n layers. "
        "Dropout of frozen layers stays on.",
        objectives="tasks",
    )
    unfreeze: dict[str, Freeze | int] | Unfreeze | None = key(
        None,
        "When frozen layers are released: a mapping from steps to values of `freeze`, such as `{100: 4, 200: "
        "none}`, or `gradual`, one more layer in each epoch.",
        objectives="tasks",
    )
    learning_rates: dict[str, float] | None = key(
        None,
        "Learning rates that differ from `learning_rate`, by group: `encoder`, `heads`, or a task's name for its "
        "head and private layers, which takes precedence.",
        objectives="tasks",
    )
    weight_decays: dict[str, float] | None = key(
        None,
        "Weight decays that differ from `weight_decay`, by the groups of `learning_rates`. Biases and LayerNorm "
        "have no decay.",
        objectives="tasks",
    )
    layer_decay: float = key(
        1.0,
        "Factor on the learning rate from each encoder layer to the one below. The top layer has the encoder's "
        "rate, and the embeddings the lowest.",
        objectives="tasks",
    )
    regularizer: str = key(
        "none",
        "A term that is added to the loss of each task, and logged as `<name>_<task>`: `smart`, `r_drop` or `fgm`.",
        objectives="tasks",
    )
    regularizer_options: dict | None = key(
        None,
        "Keyword arguments of a regularizer from a plugin. The package's own have keys of their own.",
        objectives="tasks",
    )
    smart_weight: float = key(1.0, "Factor on the term of SMART.", objectives="tasks")
    smart_epsilon: float | None = key(
        None,
        "Radius of the ball in which SMART changes word embeddings: by default 5e-4. With another `smart_form` than "
        "`paper`, 1e-6, which only avoids a division by 0.",
        objectives="tasks",
    )
    smart_step_size: float | None = key(
        None,
        "Length of a step in the search for the worst change: by default ten times `smart_epsilon`, and 1e-3 with "
        "another `smart_form` than `paper`.",
        objectives="tasks",
    )
    smart_noise_std: float | None = key(
        None,
        "Standard deviation of the noise that the search starts from: by default `smart_epsilon`, and 1e-5 with "
        "another `smart_form` than `paper`.",
        objectives="tasks",
    )
    smart_steps: int = key(
        1,
        "Number of steps of the search. Each costs a forward pass and half a backward pass.",
        objectives="tasks",
    )
    smart_variant: Variant | dict[str, Variant] = key(
        "smart_0",
        "Divergence of two outputs, for all tasks or by task: `smart_0`, symmetric KL; `smart_1`, one-way KL; "
        "`smart_2`, one-way KL in the search and symmetric KL in the term.",
        objectives="tasks",
        by_task=True,
    )
    smart_score_divergence: ScoreDivergence | None = key(
        None,
        "The divergence of two scores, instead of KL: `squared_error` (default of `smart_0`), or `bernoulli`, the "
        "KL of the scores' shares of the range.",
        objectives="tasks",
    )
    smart_norm: Norm = key("inf", "The norm of the ball and of a step.", objectives="tasks")
    smart_level: Level = key(
        "token",
        "Whether each token has a ball of its own, or all tokens of a sentence have one together.",
        objectives="tasks",
    )
    smart_form: Form = key(
        "paper",
        "`paper`: the algorithm of the paper. `mt-dnn` and `smart-pytorch`: what two popular implementations "
        "compute instead, for comparison.",
        objectives="tasks",
    )
    r_drop_weight: float = key(1.0, "Factor on the term of R-Drop.", objectives="tasks")
    fgm_weight: float = key(1.0, "Factor on the loss at the perturbed embeddings of FGM.", objectives="tasks")
    fgm_epsilon: float = key(
        0.1,
        "L2 norm of FGM's perturbation of a sentence's word embeddings.",
        objectives="tasks",
    )
    teachers: list[str | dict] | None = key(
        None,
        "Models whose answers to the training rows are learned beside the labels: saved models, or recipes that are "
        "trained first, such as `{recipe: cs224n/baseline, seeds: 2}`.",
        objectives="tasks",
    )
    distill_weight: float = key(0.5, "The teachers' share of the loss, from 0 to 1.", objectives="tasks")
    distill_temperature: float = key(
        1.0,
        "Divides the logits of student and teachers, for classes and binary tasks.",
        objectives="tasks",
    )
    proximal: Proximal = key(
        "none",
        "A term that keeps outputs near those of earlier weights: `previous`, the weights of up to `proximal_steps` "
        "steps ago, or `momentum`, a moving average.",
        objectives="tasks",
    )
    proximal_weight: float = key(
        1.0,
        "Factor on that term. With 0 it is not computed: `momentum` is then an average of the weights alone (EMA), "
        "for `proximal_evaluate`.",
        objectives="tasks",
    )
    proximal_steps: int = key(1, "Optimizer steps between two updates of the earlier weights.", objectives="tasks")
    proximal_momentum: list[float] = key(
        [0.99, 0.999],
        "Share that the moving average keeps at an update: in the first tenth of the steps, and after it.",
        objectives="tasks",
    )
    proximal_evaluate: bool | ProximalEvaluate = key(
        False,
        "`true` also scores the earlier weights, and saves them in the folder `averaged`. `instead` scores only "
        "them, and saves them as the model.",
        resume="after",
        objectives="tasks",
        off=False,
    )
    pretrained_decay: float = key(
        0.0,
        "Weight decay of the encoder towards its initial weights. A step moves them by the share `learning_rate * "
        "pretrained_decay` of the difference.",
        objectives="tasks",
    )
    packing: bool = key(
        False,
        "Computes on real tokens only, without padding, with the same results up to rounding. For the hand-written "
        "encoder.",
        resume="free",
        handed_on=True,
    )
    cuda_graphs: CudaGraphs = key(
        "auto",
        "`auto` records the training step as a CUDA graph for each size of a batch, if `packing` is used on a GPU. "
        "`off` does not.",
        resume="free",
        handed_on=True,
        objectives="tasks",
    )
    compile_layers: bool = key(
        False,
        "Compiles the encoder's layer once, for all layers, tasks and sizes of a batch. The first steps take up to "
        "a minute longer.",
        resume="free",
        handed_on=True,
    )
    train_metrics: TrainMetrics = key(
        "none",
        "Scores on the training rows after each epoch: `running`, from the epoch's own outputs, or `full`, by "
        "another pass over the rows.",
        resume="free",
        objectives="tasks",
        off="none",
    )
    early_stopping_patience: int | None = key(
        None,
        "Stops after this many evaluations without a better `metric_for_best_model`.",
        resume="free",
        off=None,
    )
    early_stopping_threshold: float = key(0.0, "How much better the metric must be to count as better.", resume="free")
    restore_callback_states_from_checkpoint: bool = key(
        True,
        "As in transformers, but `true` by default: callbacks continue from their saved state.",
        resume="free",
    )
    remove_unused_columns: bool = key(
        False, "As in transformers, but `false` by default: columns are chosen by task.", resume="free"
    )
    logging_nan_inf_filter: bool = key(
        False,
        "As in transformers, but `false` by default: losses that are not finite are logged as they are, and the GPU "
        "does not wait for each loss.",
        resume="free",
    )
    resume_from_checkpoint: bool | str | None = key(
        None,
        "Continues the run in `output_dir`: `true` from its newest complete checkpoint, or the path of one.",
        scope="start",
        off=None,
    )
    report_to: None | str | list[str] = key(
        "none",
        "Where to log besides `log.jsonl`, such as `tensorboard` (extra `tensorboard`) or `wandb`.",
        resume="free",
        scope="machine",
        off="none",
    )
