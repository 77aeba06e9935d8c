"""Stock training arguments that do not work with several tasks in a step. They are refused and never ignored."""

from __future__ import annotations

from dataclasses import fields

from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from ..errors import MinBertError
from ..settings.stock import REFUSED, refusal
from .base_args import BaseArguments


def refuse_unsupported(args: BaseArguments) -> None:
    """Raises `MinBertError` if an argument in `REFUSED` is set."""
    known = {f.name for f in fields(args)}
    for name in REFUSED.keys() & known:  # some are fields that only newer versions of transformers have
        if reason := refusal(name, getattr(args, name)):
            raise MinBertError(reason)


def refuse_bf16_without_gpu(args: BaseArguments) -> None:
    """Raises `MinBertError` for what the stock class refuses too, in words that say what to do."""
    wanted = [name for name in ("bf16", "bf16_full_eval") if getattr(args, name)]
    if wanted and not args.use_cpu and not (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        raise MinBertError(
            f"`{wanted[0]}: true`: this machine has no GPU that supports bf16. Leave out {wanted[0]}=true. To compute "
            "in bf16 on the CPU, add use_cpu=true."
        )


def refuse_settings(args: BaseArguments) -> None:
    """Raises `MinBertError` if a setting does not work with rounds."""
    accelerator = args.accelerator_config
    for name, allowed in (
        ("dispatch_batches", (None, False)),
        ("split_batches", (False,)),
        ("even_batches", (True,)),
    ):
        if getattr(accelerator, name) not in allowed:
            raise MinBertError(
                f"`accelerator_config.{name}: {getattr(accelerator, name)}` is not supported: each process gets "
                f"complete rounds. Leave it out."
            )
    if "lomo" in args.optim:
        reason = "it steps within the backward pass of one task"
        raise MinBertError(f"`optim: {OptimizerNames(args.optim).value}` is not supported: {reason}. Use adamw_torch.")
    if args.fp16 and args.device.type != "cuda":
        raise MinBertError("`fp16: true` needs a GPU, and this run uses the CPU. Leave out fp16=true.")
