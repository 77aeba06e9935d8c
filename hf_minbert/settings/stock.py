"""The training arguments of transformers in a recipe: the traits of each, or the reason why it is refused."""

from __future__ import annotations

import ast
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .keys import Traits

FREE = Traits(resume="free")
AFTER = Traits(resume="after")
RECORDS = Traits(resume="free", records=True)
MACHINE = Traits(resume="free", scope="machine")
#: Those that a step of several tasks can honour. A test fails where transformers has one that is missing here.
STOCK: dict[str, Traits] = {
    "output_dir": Traits(scope="start"),
    "num_train_epochs": Traits(resume="length"), "max_steps": Traits(resume="length"),
    "per_device_train_batch_size": Traits(per_process=True),
    "seed": Traits(scope="seed"), "data_seed": Traits(scope="seed"),
    "hub_token": Traits(resume="free", scope="secret"),
    "eval_strategy": Traits(resume="free", off="no"), "do_eval": Traits(off=False),
    "eval_on_start": Traits(resume="free", off=False), "save_strategy": Traits(resume="free", off="no"),
    "logging_strategy": Traits(resume="free", records=True, off="no"),
    "load_best_model_at_end": Traits(resume="after", off=False),
    "metric_for_best_model": Traits(off=None),
    **dict.fromkeys((
        "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
        "optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "max_grad_norm", "neftune_noise_alpha", "accelerator_config", "ignore_data_skip",
        "greater_is_better", "logging_first_step",
    ), Traits()),
    "bf16": Traits(handed_on=True), "fp16": Traits(handed_on=True),
    "tf32": Traits(resume="free", handed_on=True),
    "per_device_eval_batch_size": AFTER,
    **dict.fromkeys((
        "push_to_hub", "hub_private_repo", "hub_model_id", "hub_revision",
    ), Traits(resume="after", records=True)),
    **dict.fromkeys((
        "logging_steps", "logging_nan_inf_filter", "save_only_model", "save_total_limit", "hub_strategy",
        "hub_always_push",
    ), RECORDS),
    **dict.fromkeys((
        "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "use_cpu", "ddp_backend", "ddp_timeout", "log_level", "log_level_replica",
        "log_on_each_node", "save_on_each_node", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "debug", "skip_memory_metrics",
    ), MACHINE),
    **dict.fromkeys((
        "bf16_full_eval", "fp16_full_eval", "activation_checkpointing", "activation_checkpointing_kwargs",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "eval_steps", "eval_delay", "eval_use_gather_object", "eval_accumulation_steps",
        "save_steps", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "full_determinism",
        "resume_from_checkpoint",
    ), FREE),
}  # fmt: skip

#: The only value allowed, and why.
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


def refusal(name: str, value: Any) -> str | None:
    """Returns a sentence with the reason why an argument may not have this value; `None` if it may."""
    if name not in REFUSED:
        return None
    allowed, reason = REFUSED[name]
    asks_for_nothing = not value and allowed not in (True, -1)
    return (
        None
        if value == allowed or asks_for_nothing
        else f"`{name}: {value}` is not supported: {reason}. Leave it out."
    )


@cache
def stock_hints() -> dict[str, Any]:
    """Returns the types of transformers' training arguments, read from its source, because importing it takes seconds.

    Its enumerations are rebuilt. A type that names another class of transformers is `Any` here; the class itself
    checks the value.
    """
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    classes: dict[str, ast.ClassDef] = {}
    for file in ("trainer_utils.py", "training_args.py"):
        tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    enums = [node for node in classes.values() if any("Enum" in ast.unparse(base) for base in node.bases)]
    known = {"Any": Any, **{node.name: _enum(node) for node in enums}}
    return {
        node.target.id: _plain_type(node.annotation, known)
        for node in classes["TrainingArguments"].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _enum(node: ast.ClassDef) -> type[Enum]:
    members = [statement for statement in node.body if isinstance(statement, ast.Assign)]
    return Enum(node.name, {ast.unparse(each.targets[0]): ast.literal_eval(each.value) for each in members})


def _plain_type(annotation: ast.expr, known: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.Expression(annotation), "", "eval"), known)  # of the library's own source
    except (NameError, TypeError):
        return Any
