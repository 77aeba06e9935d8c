"""Runs of several processes: checks of the launch and the inputs, and messages after a lost process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from ..errors import MinBertError
from .checkpoints import newest_complete_checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

#: What `accelerate launch` tells its processes of a library that would share out the model's weights.
SHARDING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def check_launch(use_cpu: bool) -> None:
    """Refuses settings of a launcher that a run does not support, before a process uses its GPU.

    Raises:
        MinBertError: weights would be sharded, or there are more processes than visible GPUs.
    """
    for variable, library in SHARDING.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise MinBertError(
                f"The launcher asks for {library}, which shards weights and gradients, and a step of several tasks "
                "averages whole gradients itself. A BERT fits each GPU: launch with "
                "--config_file recipes/accelerate/multi_gpu.yaml."
            )
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 0 if use_cpu else torch.cuda.device_count()
    if 0 < gpus < processes:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
        raise MinBertError(
            f"The launcher started {processes} processes on this machine, and each sees {gpus} GPU{'s'[: gpus > 1]}"
            f"{hidden}. Launch with --num_processes {gpus}, or show them more."
        )


@cache  # stages and searches make many arguments
def warn_about_idle_gpus(gpus: int) -> None:
    """Logs that one process uses one of several visible GPUs, and how to use all."""
    logger.warning(
        "%d GPUs are visible and one process uses one. To use all: accelerate launch --multi_gpu --num_processes %d "
        "scripts/train.py RECIPE",
        gpus, gpus,
    )  # fmt: skip


@cache
def warn_about_mps() -> None:
    """Logs why the GPU of a Mac is not used."""
    logger.warning("The GPU of a Mac (MPS) has no float64, which gradient surgery needs: training runs on the CPU.")


def launched_precision() -> str | None:
    """Returns the half precision of a launcher's `mixed_precision`."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return launched if launched in ("bf16", "fp16") else None


def without_ddp(accelerator: Accelerator) -> None:
    """Prepares a model for several processes without DDP, and copies the first process's weights to all.

    DDP would average each task's gradient during its backward pass. It also keeps, for every parameter, the node that
    accumulates its gradient, on the stream on which the model was wrapped. No step could then be recorded as a CUDA
    graph.
    """
    stock = accelerator.prepare_model

    def prepare_model(
        model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        model = stock(model, device_placement, evaluation_mode=True)
        if not evaluation_mode and accelerator.num_processes > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        return model

    accelerator.prepare_model = prepare_model


def check_alike(recipe: Mapping[str, object], inputs: Mapping[str, str], error: MinBertError | None) -> None:
    """Ends all processes with one message if one has an error, or other inputs than the first process.

    Every process must call it, and all raise the same error. Otherwise some would wait for the others forever.

    Args:
        recipe: the recipe's keys and values, without those of a machine.
        inputs: what was read, by its name in messages; for data, digests.
        error: the error of this process.

    Raises:
        MinBertError: on all processes.
    """
    mine = {f"`{key}`": repr(value) for key, value in recipe.items()}, dict(inputs), error and str(error)
    everyone = gather_object([mine])
    _compare([recipe for recipe, _, _ in everyone])
    for process, (_, _, message) in enumerate(everyone):
        if message is not None:
            raise MinBertError(message if process == 0 else f"On process {process}: {message}") from error
    _compare([inputs for _, inputs, _ in everyone])


def _compare(everyone: list[dict[str, str]]) -> None:
    first = everyone[0]
    for process, other in enumerate(everyone):
        for what in {**first, **other}:
            if first.get(what) != other.get(what):
                raise MinBertError(
                    f"The processes of a run need the same recipe, model and data. Process 0 has {what} = "
                    f"{first.get(what, '(nothing)')}, and process {process} has {other.get(what, '(nothing)')}. Give "
                    "all machines the same."
                )


@contextmanager
def report_interruption(
    args: TrainingArguments, begun: Callable[[], bool], behind_stage: bool = False
) -> Generator[None]:
    """On Ctrl-C, and if another process of the run is lost, logs what was saved and how to continue.

    A process notices a lost process by a communication error (gloo). With NCCL this may come late (see `ddp_timeout`).
    It then notices the SIGTERM of the launcher that started both.

    Args:
        args: the arguments of the run.
        begun: whether the checkpoints in its folder belong to this run.
        behind_stage: whether an earlier stage has finished and need not be repeated.
    """
    once = threading.Lock()

    def report(reason: str) -> None:
        if once.acquire(blocking=False):
            has_own = begun() or args.resume_from_checkpoint
            checkpoint = newest_complete_checkpoint(str(args.output_dir), args.world_size) if has_own else None
            # At this level all processes log: the first one may be the one that is gone.
            level = logging.WARNING if args.world_size == 1 else logging.CRITICAL
            logger.log(level, "%s%s", reason, how_to_go_on(checkpoint, behind_stage))

    me = f"Process {args.process_index} of {args.world_size}"
    watched = args.world_size > 1 and threading.current_thread() is threading.main_thread()
    with _watched(lambda: report(f"{me} was stopped, as when another one has ended. ")) if watched else nullcontext():
        try:
            yield
        except KeyboardInterrupt:
            if args.process_index == 0:
                report("")
            raise
        except RuntimeError as error:
            if not is_lost(error):
                raise
            report(f"{me} ends: another one is gone, or the network is. ")
            raise SystemExit(1) from error


def how_to_go_on(checkpoint: Path | None, behind_stage: bool) -> str:
    if checkpoint is not None:
        saved = f"The newest complete checkpoint is {checkpoint}"
    elif behind_stage:
        saved = "This stage has saved no checkpoint, and those before it are complete"
    else:
        return "No checkpoint was saved."
    return f"{saved}. Continue with the same command and resume_from_checkpoint=true."


def is_lost(error: Exception) -> bool:
    """Whether the error means that another process cannot be reached. Errors of gloo have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


@contextmanager
def _watched(report: Callable[[], None]) -> Generator[None]:
    """Inside, a SIGTERM calls `report` and ends this process.

    A thread does it: Python runs signal handlers in the main one, which may wait in NCCL for the process that is gone.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)) != b"\0":
            if number[0] == signal.SIGTERM:
                report()
                sys.stderr.flush()
                os._exit(128 + signal.SIGTERM)

    handler = signal.signal(signal.SIGTERM, _handled_by_thread)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, handler)
        os.write(writer, b"\0")  # a closed pipe would not do: a child may hold its other end
        thread.join()
        os.close(writer)
        os.close(reader)


def _handled_by_thread(*signal_and_frame: object) -> None:
    """Does nothing. Without a handler in Python, the signal would not be written to the wakeup descriptor."""


def _unwatch_child() -> None:
    """In a forked child, such as a worker of a loader: a SIGTERM ends the child, and is not reported here."""
    if signal.getsignal(signal.SIGTERM) is _handled_by_thread:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_unwatch_child)
