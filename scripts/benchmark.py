"""What MinBERT costs, measured beside the stock classes of transformers.

python scripts/benchmark.py step --model google-bert/bert-base-uncased    one training step, in turns
python scripts/benchmark.py train --size base --bf16                      whole training loops, one after the other
python scripts/benchmark.py smart --model google-bert/bert-base-uncased   one step with SMART and one without, in turns
python scripts/benchmark.py surgery                                       a step of three tasks, summed and by surgery
python scripts/benchmark.py predict --model google-bert/bert-base-uncased answers to many pairs, in turns
"""

from __future__ import annotations

import copy
import gc
import json
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
from accelerate.utils import send_to_device
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_minbert import MinBertConfig, MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.prediction import Predictor
from hf_minbert.training.aggregators import make_aggregator
from hf_minbert.training.conflicts import ConflictMeter
from hf_minbert.training.gradients import Gradients, collector
from hf_minbert.training.passes import Place
from hf_minbert.training.smart import Smart

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WARM_UP = 3  # the first steps allocate AdamW's state and choose kernels
SIZES = {
    "base": {},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}


MAX_LENGTH = 128
#: What makes a BERT's weights fit another, and its answers the same.
SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip
#: What each loop of `train` changes.
LOOPS: dict[str, dict[str, Any]] = {
    "stock-fp32": {"kind": "stock", "attn": "eager", "dtype": False},
    "stock": {"kind": "stock"},
    "stock-bucketed": {"kind": "stock", "train_sampling_strategy": "group_by_length"},
    "stock-compiled": {"kind": "stock", "torch_compile": True},
    "stock-both": {"kind": "stock", "train_sampling_strategy": "group_by_length", "torch_compile": True},
    "stock-static": {
        "kind": "stock",
        "train_sampling_strategy": "group_by_length",
        "torch_compile": True,
        "pad_to_multiple_of": 32,
        "dataloader_drop_last": True,  # a last batch of its own size would be compiled too
    },
    "cross-encoder": {"kind": "cross_encoder"},
    "naive-pcgrad": {"kind": "naive"},
    "padded": {"packing": False},
    "packed": {"packing": True, "cuda_graphs": "off"},
    "packed-pcgrad": {"packing": True, "cuda_graphs": "off", "aggregator": "pcgrad"},
    "graphs": {"packing": True},
    "compiled": {"packing": True, "compile_layers": True},
    "pcgrad": {"packing": True, "compile_layers": True, "aggregator": "pcgrad"},
    "smart": {"packing": True, "compile_layers": True, "regularizer": "smart"},
}
#: Loops that train one task, the last one that is named.
OF_ONE_TASK = ("stock", "cross_encoder")


@app.callback()
def main() -> None:
    """What MinBERT costs, measured beside the stock classes of transformers."""
    transformers.logging.set_verbosity_error()  # both models report their new heads as missing
    transformers.logging.disable_progress_bar()
    # As `minbert train` does: batches have hundreds of shapes, and cuDNN's attention compiles each anew.
    torch.backends.cuda.enable_cudnn_sdp(False)


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A BERT checkpoint; its tokenizer is used in any case.")],
    random_size: Annotated[
        Literal["base", "tiny"] | None, typer.Option(help="Random weights of this shape instead of the checkpoint's.")
    ] = None,
    data_dir: Annotated[str, typer.Option(help="The course's files; or `sample`, for the package's.")] = "sample",
    tasks: Annotated[
        str, typer.Option(help="With commas. Loops of stock classes and of sentence-transformers train the last one.")
    ] = "para",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of each task in a step.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps, after a quarter as many that warm up.")] = 200,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train under bf16 autocast.")] = False,
    loops: Annotated[
        str, typer.Option(help=f"Which to run, with commas: {', '.join(LOOPS)}.")
    ] = "stock,padded,packed",
    json_file: Annotated[Path | None, typer.Option(help="Where to write the numbers too.")] = None,
) -> None:
    """Examples per second of whole training loops, evaluation off: loader, step, optimizer, log."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {task: load_split(get_tasks([task])[0], data_dir, "train") for task in tasks.split(",")}
    loop = Loop(model, random_size, tokenizer, rows, batch_size, steps, bf16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _print_setting(device, bf16)
    typer.echo(f"{random_size or model}; batch {batch_size} per task; {tasks}; {steps} steps; no dropout on attention")
    measured = {}
    for name in loops.split(","):
        measured[name] = loop.run(**LOOPS[name])
        speed, memory = measured[name]["examples_per_second"], measured[name]["peak_gb"]
        base = speed / next(iter(measured.values()))["examples_per_second"]
        typer.echo(f"{name:18} {speed:10.0f} examples/s  {base:6.2f} x the first  {memory:6.2f} GB at most")
    _write(json_file, device, bf16, model=random_size or model, batch_size=batch_size, loops=measured)


def _sizes(arguments: dict[str, Any]) -> dict[str, bool]:
    """How a compiled stock model takes sizes: a few, each compiled by itself, or any. Else each is compiled anew."""
    if "torch_compile" not in arguments:
        return {}
    few = "pad_to_multiple_of" in arguments
    return {"automatic_dynamic_shapes": False} if few else {"assume_static_by_default": False}


@dataclass
class Loop:
    """A training run of some steps on the same rows, in several ways."""

    model: str
    size: str | None
    tokenizer: Any
    rows: dict[str, Any]
    batch_size: int
    steps: int
    bf16: bool

    def run(self, kind: str = "minbert", attn: str = "sdpa", dtype: bool = True, **arguments: Any) -> dict[str, float]:
        """Examples per second, and the GPU's memory at its fullest."""
        torch.manual_seed(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "output_dir": folder, "max_steps": self.steps + self.steps // 4, "save_strategy": "no", "seed": 0,
                "per_device_train_batch_size": self.batch_size, "logging_steps": 100, "report_to": "none",
                "disable_tqdm": True, "bf16": self.bf16 and dtype, "learning_rate": 1e-5,
            }  # fmt: skip
            clock = Clock(self.steps // 4)
            make = {
                "minbert": self._minbert,
                "stock": self._stock,
                "cross_encoder": self._cross_encoder,
                "naive": self._naive,
            }[kind]
            with torch._dynamo.config.patch(_sizes(arguments)):
                trainer = make({**settings, **arguments}, attn)
                trainer.add_callback(clock)
                trainer.train()
        examples = self.batch_size * self.steps * (1 if kind in OF_ONE_TASK else len(self.rows))
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        return {"examples_per_second": examples / clock.seconds, "peak_gb": memory}

    def _minbert(self, settings: dict[str, Any], attn: str) -> MultiTaskTrainer:
        tasks = get_tasks(list(self.rows))
        made = {"tasks": tasks, "attention_probs_dropout_prob": 0.0, "attn_implementation": attn}
        if self.size:
            model = MinBertForMultiTask._from_config(MinBertConfig(**{**made, **SIZES[self.size]}))
        else:
            model = MinBertForMultiTask.from_pretrained(self.model, dtype="float32", **made)
        args = MultiTaskTrainingArguments(**settings)
        return MultiTaskTrainer(
            model, args, train_dataset=self.rows, processing_class=self.tokenizer, max_length=MAX_LENGTH
        )

    def _naive(self, settings: dict[str, Any], attn: str) -> NaiveLoop:
        return NaiveLoop(self._minbert({**settings, "packing": False}, attn))

    def _cross_encoder(self, settings: dict[str, Any], attn: str) -> Trainer:
        """`sentence-transformers`' own, with its default loss for one label."""
        from sentence_transformers.cross_encoder import (
            CrossEncoder,
            CrossEncoderTrainer,
            CrossEncoderTrainingArguments,
            losses,
        )

        name, kwargs = self.model, {"attn_implementation": attn}
        if self.size:
            name = settings["output_dir"]
            BertForSequenceClassification(BertConfig(**SIZES[self.size], num_labels=1)).save_pretrained(name)
            self.tokenizer.save_pretrained(name)
        model = CrossEncoder(
            name, num_labels=1, max_length=MAX_LENGTH, model_kwargs=kwargs,
            config_kwargs={"attention_probs_dropout_prob": 0.0},
        )  # fmt: skip
        (task,) = get_tasks([list(self.rows)[-1]])
        return CrossEncoderTrainer(
            model=model, args=CrossEncoderTrainingArguments(**settings), loss=losses.BinaryCrossEntropyLoss(model),
            train_dataset=self.rows[task.name].select_columns([*task.text_columns, "label"]),
        )  # fmt: skip

    def _stock(self, settings: dict[str, Any], attn: str) -> Trainer:
        multiple = settings.pop("pad_to_multiple_of", None)
        (task,) = get_tasks([list(self.rows)[-1]])
        made = {
            "num_labels": max(task.num_outputs, 2),
            "attention_probs_dropout_prob": 0.0,
            "attn_implementation": attn,
        }
        if self.size:
            model = BertForSequenceClassification._from_config(BertConfig(**{**made, **SIZES[self.size]}))
        else:
            model = BertForSequenceClassification.from_pretrained(self.model, dtype="float32", **made)
        encoded = self.rows[task.name].map(
            lambda batch: self.tokenizer(
                *(batch[name] for name in task.text_columns), truncation=True, max_length=MAX_LENGTH
            ),
            batched=True,
        )
        columns = ["input_ids", "token_type_ids", "attention_mask", "label"]
        return Trainer(
            model, TrainingArguments(**settings), train_dataset=encoded.select_columns(columns),
            data_collator=DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple),
        )  # fmt: skip


class NaiveLoop:
    """A loop in the course's style: padded batches of every task in turn, and `_naive_step` on them."""

    def __init__(self, trainer: MultiTaskTrainer):
        self.trainer = trainer
        self.clock: Clock | None = None

    def add_callback(self, clock: Clock) -> None:
        self.clock = clock

    def train(self) -> None:
        args, model = self.trainer.args, self.trainer.model.train()
        device = args.device.type
        calls: list[dict[str, Any]] = []
        run, state = _naive_step(model, calls, device, args.bf16), self.trainer.state
        while state.global_step < args.max_steps:
            for batches in self.trainer.get_train_dataloader():
                calls[:] = [send_to_device(batch, device) for batch in batches.values()]
                run()
                state.global_step += 1
                self.clock.on_step_end(args, state, None)
                if state.global_step == args.max_steps:
                    break
        self.clock.on_train_end(args, state, None)


class Clock(TrainerCallback):
    """The time between the end of one step and the end of training."""

    def __init__(self, first: int):
        self.first, self.start, self.seconds = first, 0.0, 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first:
            self.start = self._now()

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = self._now() - self.start

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return perf_counter()


@app.command()
def step(
    model: Annotated[str | None, typer.Option(help="A BERT checkpoint. Without one, random weights.")] = None,
    size: Annotated[Literal["base", "tiny"], typer.Option(help="Shape of the random weights.")] = "base",
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the longest row.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each model.")] = 20,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward under bf16 autocast.")] = False,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    at_most: Annotated[float | None, typer.Option(help="Exit with status 1 if the ratio is above this.")] = None,
) -> None:
    """One training step (forward, backward, AdamW) of MinBertForMultiTask and of BertForSequenceClassification."""
    torch.manual_seed(0)
    models = {"minbert": _minbert(model, size), "stock": _stock(model, size)}
    vocab_size = models["stock"].config.vocab_size
    batch = {key: value.to(device) for key, value in _padded_batch(batch_size, length, vocab_size).items()}
    calls = {"minbert": {**batch, "task": "sst"}, "stock": batch}
    runs = {
        name: _training_step(m.to(device).train(), lambda m=m, name=name: m(**calls[name]).loss, device, bf16)
        for name, m in models.items()
    }

    _print_setting(device, bf16)
    typer.echo(f"{model or f'random weights, {size}'}; batch {batch_size} x {length} tokens, half of the rows shorter")
    seconds = _in_turns(runs, steps, device)
    for name, measured in seconds.items():
        parameters = sum(p.numel() for p in models[name].parameters()) / 1e6
        _print_times(name, measured, seconds, "stock", f", {parameters:.2f}M parameters")
    _check_ratio(seconds, "minbert", "stock", at_most)


@app.command()
def smart(
    model: Annotated[
        str | None, typer.Option(help="A BERT checkpoint, on sentences of the sample. Without one, random weights.")
    ] = None,
    size: Annotated[Literal["base", "tiny"], typer.Option(help="Shape of the random weights.")] = "base",
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each kind.")] = 20,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward under bf16 autocast.")] = False,
    peer: Annotated[
        bool, typer.Option("--peer", help="With smart-pytorch, around the stock model; it must be installed.")
    ] = False,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    at_most: Annotated[float | None, typer.Option(help="Exit with status 1 if the ratio is above this.")] = None,
) -> None:
    """One training step (forward, backward, AdamW) of sst, plain and with SMART's term: time and memory."""
    torch.manual_seed(0)
    minbert = _minbert(model, size).to(device).train()
    batch = _padded_batch(batch_size, 64, minbert.config.vocab_size) if model is None else _sample(model, batch_size)
    batch = {key: value.to(device) for key, value in batch.items() if key != "task"}
    call = {**batch, "task": "sst"}
    losses = {
        "plain": (minbert, lambda: minbert(**call).loss),
        "smart": (minbert, lambda: Smart()(minbert, call, Place(0, 0, 0)).loss),
    }
    if peer:
        stock = _stock(model, size).to(device).train()
        losses["stock"] = (stock, lambda: stock(**batch).loss)
        losses["smart-pytorch"] = (stock, _peer_loss(stock, batch))
    runs = {name: _training_step(*given, device, bf16) for name, given in losses.items()}

    _print_setting(device, bf16)
    rows, tokens = batch["input_ids"].shape
    typer.echo(f"{model or f'random weights, {size}'}; batch {rows} x {tokens} tokens, padding included")
    seconds = _in_turns(runs, steps, device)
    for name, measured in seconds.items():
        first, memory = "stock" if name == "smart-pytorch" else "plain", ""
        if torch.device(device).type == "cuda":
            used, before = (_working_memory(runs[run], device) for run in (name, first))
            memory = f", {used / 1e9:.2f} GB beside weights and optimizer ({used / before:.2f} x)"
        _print_times(name, measured, seconds, first, memory)
    _check_ratio(seconds, "smart", "plain", at_most)


@app.command()
def surgery(
    model: Annotated[
        str | None, typer.Option(help="A BERT checkpoint, on sentences of the sample. Without one, random weights.")
    ] = None,
    size: Annotated[Literal["base", "tiny"], typer.Option(help="Shape of the random weights.")] = "base",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of each task.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the longest row, where there is no checkpoint.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each kind.")] = 20,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward under bf16 autocast.")] = False,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    at_most: Annotated[float | None, typer.Option(help="Exit with status 1 if pcgrad / sum is above this.")] = None,
) -> None:
    """One training step (forward, backward, AdamW) of three tasks, summed and by surgery: time and memory."""
    torch.manual_seed(0)
    minbert = _minbert(model, size, SURGERY_TASKS).to(device).train()
    calls = [
        {**{key: value.to(device) for key, value in batch.items() if key != "task"}, "task": task}
        for task, batch in _task_batches(model, batch_size, length, minbert.config.vocab_size).items()
    ]
    makers = {
        name: lambda name=name: _surgery_step(minbert, calls, name, device, bf16)
        for name in ("sum", "pcgrad", "gradvac")
    }
    makers["naive"] = lambda: _naive_step(minbert, calls, device, bf16)
    # Memory first, each by itself: later all optimizers and rows are there at once.
    on_gpu = torch.device(device).type == "cuda"
    peaks = {name: _peak_memory(make, device) for name, make in makers.items()} if on_gpu else {}
    seconds = _in_turns({name: make() for name, make in makers.items()}, steps, device)

    _print_setting(device, bf16)
    shapes = ", ".join(f"{call['task']} {' x '.join(map(str, call['input_ids'].shape))}" for call in calls)
    shared = sum(p.numel() for name, p in minbert.named_parameters() if not name.startswith("heads."))
    typer.echo(f"{model or f'random weights, {size}'}; {shapes} tokens; {shared / 1e6:.2f}M shared parameters")
    for name, measured in seconds.items():
        memory = ""
        if on_gpu:
            extra = (peaks[name] - peaks["sum"]) / shared
            memory = f", {peaks[name] / 1e9:.2f} GB at most ({extra:+.1f} bytes per shared parameter)"
        _print_times(name, measured, seconds, "sum", memory)
    _check_ratio(seconds, "pcgrad", "sum", at_most)


SURGERY_TASKS = ("sst", "para", "sts")


def _task_batches(model: str | None, rows: int, length: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    if model is not None:
        return {task: _sample(model, rows, task) for task in SURGERY_TASKS}
    batches = {task: _padded_batch(rows, length, vocab_size) for task in SURGERY_TASKS}
    batches["para"]["labels"] %= 2
    return batches


def _surgery_step(
    model: MinBertForMultiTask, calls: list[dict[str, Any]], aggregator: str, device: str, bf16: bool
) -> Callable[[], None]:
    """A step as the trainer takes it, its measurements of conflicts included."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.Generator().manual_seed(0)
    gradients: Gradients = collector(
        model.parameters(), make_aggregator(aggregator), meter=ConflictMeter([call["task"] for call in calls])
    )

    def run() -> None:
        for call in calls:
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16):
                loss = model(**call).loss
            gradients.add(call["task"], loss)
        gradients.combine(generator)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _naive_step(
    model: MinBertForMultiTask, calls: list[dict[str, Any]], device: str, bf16: bool
) -> Callable[[], None]:
    """PCGrad as its popular code for torch has it: all graphs kept, whole gradients flattened, copied and compared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def flat_gradient(loss: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.clone()).flatten() for p in parameters])

    def run() -> None:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16):
            losses = [model(**call).loss for call in calls]
        gradients = [flat_gradient(loss) for loss in losses]
        projected = copy.deepcopy(gradients)
        for mine in projected:
            random.shuffle(gradients)
            for other in gradients:
                dot = torch.dot(mine, other)
                if dot < 0:  # waits for the GPU, each time
                    mine -= dot * other / other.norm() ** 2
        total = torch.stack(projected).sum(dim=0)
        for parameter, piece in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _peak_memory(make: Callable[[], Callable[[], None]], device: str) -> int:
    """The GPU's memory at its fullest over some steps, with this one's optimizer and gradients alone."""
    gc.collect()
    torch.cuda.empty_cache()
    run = make()
    for _ in range(WARM_UP):
        run()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)


@app.command()
def predict(
    model: Annotated[
        str, typer.Option(help="A BERT checkpoint or a finished run; its tokenizer is used in any case.")
    ],
    random_size: Annotated[
        Literal["base", "tiny"] | None, typer.Option(help="Random weights of this shape instead of the checkpoint's.")
    ] = None,
    data_dir: Annotated[
        str, typer.Option(envvar="CS224N_DATA", help="The course's files; or `sample`, for the package's.")
    ] = "sample",
    pairs: Annotated[int, typer.Option(min=1, help="The training pairs of para, over again where they end.")] = 4000,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way answers all pairs.")] = 3,
    bf16: Annotated[bool, typer.Option("--bf16", help="All under bf16 autocast.")] = False,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_file: Annotated[Path | None, typer.Option(help="Where to write the numbers too.")] = None,
) -> None:
    """Pairs per second, from text to logits: the same weights in Predictor and in BertForSequenceClassification.

    `stock` pads batches of the rows as they stand, `stock-sorted` of rows sorted by their length in characters.
    """
    torch.manual_seed(0)
    answers = Answers(model, random_size, batch_size, bf16, device)
    (task,) = get_tasks(["para"])
    table = load_split(task, data_dir, "train").to_list()
    rows = [table[place % len(table)] for place in range(pairs)]
    ways = {"stock": answers.stock, "stock-sorted": answers.stock_sorted, "minbert": answers.minbert}
    found = {name: way(rows[: 4 * batch_size]) for name, way in ways.items()}  # warms up
    runs = {name: lambda name=name: found.update({name: ways[name](rows)}) for name in ways}

    _print_setting(device, bf16)
    weights = random_size or model
    typer.echo(f"{weights}; {pairs:,} pairs of {len(table):,} different ones of {data_dir}; batch {batch_size}")
    measured, seconds = {}, _in_turns(runs, rounds, device, warm_up=0)
    for name, times in seconds.items():
        difference = float((found[name] - found["stock"]).abs().max())
        changed = int(((found[name] > 0) != (found["stock"] > 0)).sum())
        measured[name] = {"seconds": times, "largest_difference": difference, "changed_classes": changed}
        note = f", {pairs / median(times):.0f} pairs/s, logits differ by {difference:.1e}, {changed} other classes"
        _print_times(name, times, seconds, "stock", note)
    _write(json_file, device, bf16, model=weights, data=data_dir, pairs=pairs, batch_size=batch_size, ways=measured)


class Answers:
    """The same weights, asked in several ways. Each gives the logits of the rows [N], in their order."""

    def __init__(self, model: str, size: str | None, batch_size: int, bf16: bool, device: str):
        self.tokenizer, tasks = AutoTokenizer.from_pretrained(model), get_tasks(["para"])
        if size is None:
            ours = MinBertForMultiTask.from_pretrained(model, tasks=tasks, dtype=torch.float32)
        else:
            ours = MinBertForMultiTask(MinBertConfig(tasks=tasks, **SIZES[size]))
        dtype = "bfloat16" if bf16 else "float32"
        self.predictor = Predictor(ours.to(device), self.tokenizer, batch_size, dtype)
        shape = {name: getattr(ours.config, name) for name in SHAPE}
        self.model = BertForSequenceClassification(BertConfig(num_labels=1, **shape)).to(device).eval()
        head = ours.heads.get("para").linear
        self.model.bert.load_state_dict(ours.bert.state_dict())
        self.model.classifier.load_state_dict(head.state_dict())
        self.batch_size, self.bf16, self.device = batch_size, bf16, device

    def minbert(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        return torch.from_numpy(self.predictor.logits("para", rows))[:, 0]

    def stock_sorted(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["sentence1"] + rows[i]["sentence2"]))
        return self.stock([rows[place] for place in order])[torch.tensor(order).argsort()]

    @torch.inference_mode()
    def stock(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        """The loop that one writes by hand."""
        found = []
        # Around the loop: autocast keeps the weights that it converts until its end.
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=self.bf16):
            for start in range(0, len(rows), self.batch_size):
                texts = (
                    [row[side] for row in rows[start : start + self.batch_size]] for side in ("sentence1", "sentence2")
                )
                batch = self.tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
                found.append(self.model(**batch.to(self.device)).logits[:, 0].float().cpu())
        return torch.cat(found)


def _peer_loss(model: BertForSequenceClassification, batch: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The loss with smart-pytorch's term, used as its README does."""
    from smart_pytorch import SMARTLoss, kl_loss, sym_kl_loss

    rest = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
    term = SMARTLoss(lambda words: model(inputs_embeds=words, **rest).logits, kl_loss, sym_kl_loss)

    def compute() -> torch.Tensor:
        words = model.bert.embeddings(batch["input_ids"], batch["token_type_ids"])
        outputs = model(inputs_embeds=words, labels=batch["labels"], **rest)
        return outputs.loss + 0.02 * term(words, outputs.logits)

    return compute


def _sample(model: str, rows: int, name: str = "sst") -> dict[str, Any]:
    """The first rows of the package's sample of a task, as the checkpoint's tokenizer encodes them."""
    (task,), tokenizer = get_tasks([name]), AutoTokenizer.from_pretrained(model)
    encoded = encode(load_split(task, "sample", "train"), task, tokenizer, MAX_LENGTH)
    return PaddedCollator(task, tokenizer.pad_token_id)([encoded[i] for i in range(rows)])


def _working_memory(run: Callable[[], None], device: str) -> int:
    """What a step takes beside what is there before and after it."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _minbert(path: str | None, size: str, names: tuple[str, ...] = ("sst",)) -> MinBertForMultiTask:
    tasks = get_tasks([*names])
    if path is not None:
        return MinBertForMultiTask.from_pretrained(path, tasks=tasks, attn_implementation="sdpa")
    config = MinBertConfig(tasks=tasks, **SIZES[size])
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def _stock(path: str | None, size: str) -> BertForSequenceClassification:
    num_labels = get_tasks(["sst"])[0].num_outputs
    if path is not None:
        return BertForSequenceClassification.from_pretrained(path, num_labels=num_labels, attn_implementation="sdpa")
    config = BertConfig(num_labels=num_labels, **SIZES[size])
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def _padded_batch(batch_size: int, length: int, vocab_size: int) -> dict[str, torch.Tensor]:
    # With padding, because without any the library drops the mask and the step is not the usual one.
    lengths = torch.full((batch_size, 1), length)
    lengths[1::2] = torch.randint(length // 2, length, (batch_size // 2, 1))
    attention_mask = (torch.arange(length) < lengths).long()  # [B, T]
    return {
        "input_ids": torch.randint(5, vocab_size, (batch_size, length)) * attention_mask,
        "attention_mask": attention_mask,
        "token_type_ids": torch.zeros_like(attention_mask),
        "labels": torch.arange(batch_size) % 5,
    }


def _training_step(
    model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], device: str, bf16: bool
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    device_type = torch.device(device).type

    def run() -> None:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=bf16):
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _in_turns(
    runs: dict[str, Callable[[], Any]], rounds: int, device: str, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of every call, by name. Who goes first changes from round to round."""
    on_gpu = torch.device(device).type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for index in range(warm_up + rounds):
        for name in order:
            start = perf_counter()
            runs[name]()
            if on_gpu:  # a GPU's calls return before their work is done
                torch.cuda.synchronize(device)
            if index >= warm_up:
                seconds[name].append(perf_counter() - start)
        order.reverse()
    return seconds


def _print_times(name: str, measured: list[float], seconds: dict[str, list[float]], first: str, note: str) -> None:
    """A line of a table: what was measured, and its ratio to the one called `first`."""
    ratio = median(measured) / median(seconds[first])
    spread = f"{1e3 * min(measured):.2f} to {1e3 * max(measured):.2f}"
    typer.echo(f"{name:14} {1e3 * median(measured):9.2f} ms median ({spread}), {ratio:5.3f} x {first}{note}")


def _check_ratio(seconds: dict[str, list[float]], name: str, first: str, at_most: float | None) -> None:
    if at_most is not None and median(seconds[name]) / median(seconds[first]) > at_most:
        typer.echo(f"The ratio is above {at_most}.", err=True)
        raise typer.Exit(1)


def _setting(device: str, bf16: bool) -> dict[str, str]:
    on_gpu = torch.device(device).type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "precision": "bf16 autocast" if bf16 else "fp32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _print_setting(device: str, bf16: bool) -> None:
    machine, precision, *versions = _setting(device, bf16).values()
    typer.echo("{}; {}, sdpa; Python {}, torch {}, transformers {}".format(machine, precision, *versions))


def _write(path: Path | None, device: str, bf16: bool, **numbers: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({**_setting(device, bf16), **numbers}, indent=1) + "\n")


if __name__ == "__main__":
    app()
