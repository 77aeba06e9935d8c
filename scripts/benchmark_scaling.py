"""Compares the speed and the results of several GPUs with those of one. Run it under a launcher:

torchrun --nproc_per_node 2 scripts/benchmark_scaling.py --model $MINILM --json scaling.json

First all processes train together. Then the first process trains alone: with the same batch per card to compare the
speed, and with the batches of all cards to compare the results. It also runs on CPUs (gloo), without information
about GPUs.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: for the comparison in fp32

import datasets
import torch
import torch.distributed as dist
import transformers
import typer
from accelerate import PartialState
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from hf_minbert import MinBertConfig, MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split

TASKS = ("sst", "para", "sts")
WAYS: dict[str, dict[str, Any]] = {
    "sum": {},
    "pcgrad": {"aggregator": "pcgrad"},
    "pcgrad, sharded": {"aggregator": "pcgrad", "gradient_reduction": "sharded"},
}
#: How many all-reduces of all parameters move as much as a step does.
REDUCTIONS = {"sum": 1, "pcgrad": len(TASKS), "pcgrad, sharded": (len(TASKS) + 1) / 2}
COMPARED = {
    "sum": WAYS["sum"],
    "pcgrad": WAYS["pcgrad"],
    "pcgrad, sharded": WAYS["pcgrad, sharded"],
    "pcgrad + smart": {"aggregator": "pcgrad", "regularizer": "smart"},
}
#: How often a process sends a number of the longest tensor, in a ring of many; of W, (W - 1) / W times as often.
COLLECTIVES = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MAX_LENGTH = 128
PROFILED = 3
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Bench:
    """Makes trainers on the same rows, all from the same weights."""

    model: str
    data_dir: str
    size: Literal["checkpoint", "base"]
    packing: bool
    use_cpu: bool
    folder: str
    warm_up: int
    learning_rate: float
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.max_length = min(MAX_LENGTH, self.tokenizer.model_max_length)
        for split in ("train", "dev"):
            self.rows[split] = {
                task.name: encode(load_split(task, self.data_dir, split), task, self.tokenizer, self.max_length)
                for task in get_tasks([*TASKS])
            }
        self.weights = self.make_model()

    def make_model(self) -> MinBertForMultiTask:
        """Without dropout: with it, processes draw other masks than one does."""
        torch.manual_seed(0)
        off, tasks = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, get_tasks([*TASKS])
        if self.size == "base":
            return MinBertForMultiTask(MinBertConfig(tasks=tasks, vocab_size=len(self.tokenizer), **off))
        config = MinBertConfig.from_pretrained(self.model, tasks=[task.to_config() for task in tasks], **off)
        return MinBertForMultiTask.from_pretrained(self.model, config=config, dtype=torch.float32)

    def trainer(self, batch_size: int, steps: int, *callbacks: TrainerCallback, **options: Any) -> MultiTaskTrainer:
        args = MultiTaskTrainingArguments(
            self.folder, max_steps=steps, per_device_train_batch_size=batch_size, use_cpu=self.use_cpu,
            packing=self.packing, save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
            lr_scheduler_type="constant", log_level="error", log_level_replica="error", **options,
        )  # fmt: skip
        trainer = MultiTaskTrainer(
            copy.deepcopy(self.weights), args, train_dataset=self.rows["train"], eval_dataset=self.rows["dev"],
            processing_class=self.tokenizer, max_length=self.max_length, callbacks=[*callbacks],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return trainer


class Clock(TrainerCallback):
    """The seconds of the steps after the warm-up, the wait for what the GPU has still to do included."""

    def __init__(self, warm_up: int, steps: int):
        self.first, self.last = warm_up, warm_up + steps
        self.start = self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step not in (self.first, self.last):
            return
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        now = perf_counter()
        self.start, self.seconds = (now, 0.0) if state.global_step == self.first else (self.start, now - self.start)


class Profile(TrainerCallback):
    """Of the last steps: time in communication, the wait for others included, and bytes that a process sends."""

    def __init__(self, on_gpu: bool):
        activity = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
        self.kind, self.name = (torch.autograd.DeviceType.CUDA, "nccl") if on_gpu else (None, "gloo:")
        self.bytes = 0.0
        self.milliseconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps - PROFILED:
            self.profiler.start()
            self._counted = _counting(self)
            self._counted.__enter__()

    def on_train_end(self, args, state, control, **kwargs):
        self._counted.__exit__(None, None, None)
        if self.kind is not None:
            torch.cuda.synchronize()
        self.profiler.stop()
        for event in self.profiler.events():
            if event.name.startswith(self.name) and self.kind in (None, event.device_type):
                microseconds = event.cpu_time_total if self.kind is None else event.device_time_total
                self.milliseconds += microseconds / 1e3 / PROFILED
        self.bytes /= PROFILED


@contextmanager
def _counting(profile: Profile) -> Iterator[None]:
    """Inside, adds up what collectives send."""
    usual = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor, **options: Any) -> Any:
            longest = max(tensor.nbytes for tensor in tensors)
            profile.bytes += COLLECTIVES[name] * (PROCESSES - 1) / PROCESSES * longest
            return usual[name](*tensors, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(dist, name, function)


# ---- Speed -------------------------------------------------------------------------------------------------------


def speeds(bench: Bench, ways: list[str], batch_sizes: list[int], steps: int, bf16: bool) -> list[dict[str, Any]]:
    """Examples per second of all processes that train together now, by way and batch size of a process."""
    found = []
    for batch_size in batch_sizes:
        for way in ways:
            options = WAYS[way]
            clock, profile = Clock(bench.warm_up, steps), Profile(not bench.use_cpu)
            trainer = bench.trainer(batch_size, bench.warm_up + steps + PROFILED, clock, profile, bf16=bf16, **options)
            trainer.train()
            together = trainer.args.world_size
            rows = together * batch_size * len(TASKS) * steps
            entry = {"way": way, "batch_size": batch_size, "examples_per_second": rows / clock.seconds}
            entry["milliseconds"] = 1e3 * clock.seconds / steps
            if together > 1:
                entry |= {"communication_milliseconds": profile.milliseconds, "bytes": profile.bytes}
            found.append(entry)
            typer.echo(f"{way}, {batch_size} rows, {together} processes: {entry['milliseconds']:.1f} ms", err=True)
            del trainer
            gc.collect()
    return found


def all_reduce_milliseconds(parameters: int, device: torch.device, rounds: int = 10) -> float:
    """Of as many float32 numbers, the median: what a summed gradient needs at least."""
    numbers, seconds = torch.zeros(parameters, device=device), []
    for _ in range(2 + rounds):
        PartialState().wait_for_everyone()
        start = perf_counter()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return 1e3 * median(seconds[2:])


# ---- Equality ----------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    parameters: torch.Tensor
    begun: torch.Tensor
    predicted: dict[str, torch.Tensor]
    same_bits: bool = True


def trained(bench: Bench, batch_size: int, steps: int, bf16: bool, options: dict[str, Any]) -> Trained:
    """The parameters before and after `steps` of SGD, and what the model then says of the dev rows."""
    trainer = bench.trainer(
        batch_size, steps, bf16=bf16, optim="sgd", learning_rate=bench.learning_rate, per_device_eval_batch_size=16,
        **options,
    )  # fmt: skip
    begun = _flat(trainer.model)
    trainer.train()
    parameters = _flat(trainer.model)
    outputs = {task: trainer.predict(rows, task=task).predictions for task, rows in bench.rows["dev"].items()}
    predicted = {task: torch.from_numpy(logits) for task, logits in outputs.items()}
    same = True
    if trainer.args.world_size > 1:
        digests: list[Any] = [None] * trainer.args.world_size
        dist.all_gather_object(digests, hashlib.sha256(parameters.numpy().tobytes()).hexdigest())
        same = len(set(digests)) == 1
    return Trained(parameters, begun, predicted, same)


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])


def comparison(together: Trained, alone: Trained, spread: float | None) -> dict[str, Any]:
    """How far the two are apart, relative to how far training moved the parameters.

    Args:
        together: by several processes.
        alone: by one, on the union of their batches.
        spread: how far fp32 is from what is compared, by the same measure.
    """
    moved = (alone.parameters - alone.begun).norm()
    return {
        "same_bits_on_all_processes": together.same_bits,
        "largest_difference": float((together.parameters - alone.parameters).abs().max()),
        "relative_difference": float((together.parameters - alone.parameters).norm() / moved),
        "spread_of_bf16": spread,
        "predicted_rows": {task: len(logits) for task, logits in together.predicted.items()},
        "largest_difference_of_logits": max(
            float((together.predicted[task] - alone.predicted[task]).abs().max()) for task in alone.predicted
        ),
    }


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, a computation on one GPU repeats to the bit: no kernel adds in the order in which threads come.

    Of the kernels of attention only the plain one keeps that; cuDNN's also compiles anew for every length.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def compare(
    bench: Bench, together: dict[tuple[str, bool], Trained], ways: list[str], batch_size: int, steps: int
) -> dict[str, Any]:
    """By way and precision."""
    found = {}
    for way in ways:
        options = COMPARED[way]
        alone = {bf16: trained(bench, batch_size, steps, bf16, options) for bf16 in (False, True)}
        moved = (alone[False].parameters - alone[False].begun).norm()
        spread = float((alone[True].parameters - alone[False].parameters).norm() / moved)
        for bf16 in (False, True):
            name = f"{way}, {'bf16' if bf16 else 'fp32'}"
            found[name] = comparison(together[way, bf16], alone[bf16], spread if bf16 else None)
    return found


def leave_the_others() -> None:
    """Ends all processes but the first, which is alone from then on."""
    PartialState().wait_for_everyone()
    dist.destroy_process_group()
    if RANK > 0:
        sys.exit()
    for name in ENVIRONMENT:
        os.environ.pop(name, None)


# ---- The command -------------------------------------------------------------------------------------------------


def main(
    model: Annotated[str, typer.Option(help="A BERT checkpoint with its tokenizer.")],
    size: Annotated[
        Literal["checkpoint", "base"], typer.Option(help="The checkpoint's weights, or random ones of BERT-base.")
    ] = "checkpoint",
    data_dir: Annotated[str, typer.Option(help="The course's files; or `sample`, for the package's.")] = "sample",
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows of each task in a process; several times.")
    ] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(COMPARED)}; several times.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Measured, after the warm-up; 0 measures no speed.")] = 30,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Steps before; with --packing, all sizes of a batch must have come twice.")
    ] = 5,
    equality_steps: Annotated[int, typer.Option(min=0, help="0 compares nothing.")] = 200,
    equality_batch_size: Annotated[int, typer.Option(min=1)] = 8,
    equality_learning_rate: Annotated[float, typer.Option(min=0, help="BERT-base diverges with 0.01.")] = 3e-4,
    fp32: Annotated[bool, typer.Option("--fp32", help="Measure in fp32 in place of bf16.")] = False,
    packing: Annotated[bool, typer.Option("--packing", help="Train with `packing: true`.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the numbers too.")] = None,
) -> None:
    """Speed, communication and equality of the processes that a launcher started, beside one process."""
    if PROCESSES == 1:
        raise typer.BadParameter("Start several processes: torchrun --nproc_per_node 2 scripts/benchmark_scaling.py")
    ways = way or [*COMPARED]
    if unknown := sorted({*ways} - {*COMPARED}):
        raise typer.BadParameter(f"--way must be one of {', '.join(COMPARED)}. Found {', '.join(unknown)}.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `minbert train` does: it compiles anew for every length
    with tempfile.TemporaryDirectory() as folder:
        use_cpu = not torch.cuda.is_available()
        bench = Bench(model, data_dir, size, packing, use_cpu, folder, warm_up, equality_learning_rate)
        numbers = measure(bench, ways, batch_size or [32, 256], steps, not fp32, equality_batch_size, equality_steps)
    _print(numbers)
    if json_file is not None:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


def measure(
    bench: Bench,
    ways: list[str],
    batch_sizes: list[int],
    steps: int,
    bf16: bool,
    equality_batch_size: int,
    equality_steps: int,
) -> dict[str, Any]:
    """All numbers, on the first process; the others end here."""
    device = bench.trainer(1, 1).args.device  # which starts the process group
    parameters = sum(p.numel() for p in bench.weights.parameters())
    reduction = all_reduce_milliseconds(parameters, device)
    timed, compared = [way for way in ways if way in WAYS and steps], ways if equality_steps else []
    speed = speeds(bench, timed, batch_sizes, steps, bf16)
    with repeatable():
        together = {
            (way, half): trained(bench, equality_batch_size, equality_steps, half, COMPARED[way])
            for way in compared
            for half in (False, True)
        }
    leave_the_others()
    with repeatable():
        equality = compare(bench, together, compared, PROCESSES * equality_batch_size, equality_steps)
    for entry, alone in zip(speed, speeds(bench, timed, batch_sizes, steps, bf16), strict=True):
        entry |= {"alone": alone, "times": entry["examples_per_second"] / alone["examples_per_second"]}
    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "processes": PROCESSES,
        "precision": "bf16" if bf16 else "fp32", "torch": torch.__version__, "transformers": transformers.__version__,
        "weights": bench.model if bench.size == "checkpoint" else bench.size, "data": bench.data_dir,
        "packing": bench.packing,
        "parameters": parameters, "all_reduce_milliseconds": reduction, "speed": speed,
        "equality_steps": equality_steps, "equality": equality,
    }  # fmt: skip


def _print(numbers: dict[str, Any]) -> None:
    reduction, parameters = numbers["all_reduce_milliseconds"], numbers["parameters"]
    typer.echo(
        f"{numbers['processes']} x {numbers['machine']}, {numbers['precision']}, {numbers['weights']}, torch "
        f"{numbers['torch']}; one all-reduce of {parameters / 1e6:.1f}M parameters, the floor of `sum`: "
        f"{reduction:.2f} ms, {4 * parameters / reduction / 1e6:.1f} GB/s\n"
    )
    if numbers["speed"]:
        typer.echo("| | rows a card | examples/s | of one | times | ms a step | in communication | floor | MB sent |")
        typer.echo("|---|---|---|---|---|---|---|---|---|")
    for entry in numbers["speed"]:
        typer.echo(
            f"| {entry['way']} | {entry['batch_size']} | {entry['examples_per_second']:.0f} | "
            f"{entry['alone']['examples_per_second']:.0f} | {entry['times']:.2f} | {entry['milliseconds']:.1f} | "
            f"{entry['communication_milliseconds']:.2f} | {reduction * REDUCTIONS[entry['way']]:.2f} | "
            f"{entry['bytes'] / 1e6:.1f} |"
        )
    if numbers["equality"]:
        typer.echo(
            f"\n| after {numbers['equality_steps']} steps | same bits | parameters | relative | of bf16 | logits |"
        )
        typer.echo("|---|---|---|---|---|---|")
    for name, entry in numbers["equality"].items():
        spread = "" if entry["spread_of_bf16"] is None else f"{entry['spread_of_bf16']:.1e}"
        typer.echo(
            f"| {name} | {entry['same_bits_on_all_processes']} | {entry['largest_difference']:.1e} | "
            f"{entry['relative_difference']:.1e} | {spread} | {entry['largest_difference_of_logits']:.1e} |"
        )


if __name__ == "__main__":
    typer.run(main)
