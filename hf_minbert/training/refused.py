"""Stock training arguments that a step of several tasks cannot honour: they are refused, never ignored."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError

if TYPE_CHECKING:
    from .args import MultiTaskTrainingArguments

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


def refuse_unsupported(args: MultiTaskTrainingArguments) -> None:
    """Raises `MinBertError` if an argument of `REFUSED` asks for something."""
    known = {f.name for f in fields(args)}
    for name, (allowed, reason) in REFUSED.items():
        if name not in known:  # a field that only newer versions of transformers have
            continue
        value = getattr(args, name)
        asks_for_nothing = not value and allowed not in (True, -1)
        if value != allowed and not asks_for_nothing:
            raise MinBertError(f"`{name}: {value}` is not supported: {reason}. Leave it out.")


def refuse_settings(args: MultiTaskTrainingArguments) -> None:
    """Raises `MinBertError` if a setting is one that rounds cannot honour."""
    accelerator = args.accelerator_config
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
    if "lomo" in str(args.optim.value):
        reason = "it steps within the backward pass of one task"
        raise MinBertError(f"`optim: {args.optim.value}` is not supported: {reason}. Use adamw_torch.")
    if args.fp16 and args.device.type != "cuda":
        raise MinBertError("`fp16: true` needs a GPU: on a CPU it would silently train in fp32. Use bf16, or neither.")
