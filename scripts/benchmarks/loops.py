"""Whole training loops over the same rows: those of this package and the alternatives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
import typer
from accelerate.utils import send_to_device
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_minbert import MinBertConfig, MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks

from .models import naive_step
from .shared import DEVICE, MAX_LENGTH, SIZES, Setting

#: What each loop changes.
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
    "stock-regional": {
        "kind": "stock",
        "train_sampling_strategy": "group_by_length",
        "layers": "compiled",  # each by itself: one kernel for all of them, in a twelfth of the time of `stock-static`
        "pad_to_multiple_of": 32,
        "dataloader_drop_last": True,
    },
    "cross-encoder": {"kind": "cross_encoder"},
    "naive-pcgrad": {"kind": "naive"},
    "padded": {"packing": False},
    "packed": {"packing": True, "cuda_graphs": "off"},
    "packed-pcgrad": {"packing": True, "cuda_graphs": "off", "aggregator": "pcgrad"},
    "packed-smart": {"packing": True, "cuda_graphs": "off", "regularizer": "smart"},
    "graphs": {"packing": True},
    "graphs-r-drop": {"packing": True, "regularizer": "r_drop"},
    "graphs-smart": {"packing": True, "regularizer": "smart"},
    "compiled": {"packing": True, "compile_layers": True},
    "pcgrad": {"packing": True, "compile_layers": True, "aggregator": "pcgrad"},
    "r-drop": {"packing": True, "compile_layers": True, "regularizer": "r_drop"},
    "smart": {"packing": True, "compile_layers": True, "regularizer": "smart"},
}
#: Work in the encoder of a step with a regularizer, times that of a plain step: SMART's passes make 8 of 3.
WORK = {"r_drop": 2.0, "smart": 8 / 3}
#: Loops that train one task, the last one that is named.
OF_ONE_TASK = ("stock", "cross_encoder")


def check_loops(names: Sequence[str]) -> None:
    """Before anything is measured: whether there are such loops, and what they need."""
    for name in names:
        if name not in LOOPS:
            raise typer.BadParameter(f"There is no loop {name!r}. There are: {', '.join(LOOPS)}.")
        if name == "cross-encoder" and find_spec("sentence_transformers") is None:
            raise typer.BadParameter(
                "The loop cross-encoder needs `pip install sentence-transformers`. Or leave it out."
            )


def trains_one(name: str) -> bool:
    return LOOPS[name].get("kind") in OF_ONE_TASK


def work_of(name: str) -> float:
    """Work in the encoder, times that of a plain step."""
    return WORK.get(LOOPS[name].get("regularizer"), 1.0)


def minbert_config(model: str, size: str | None, names: Sequence[str]) -> MinBertConfig:
    made = {"tasks": [task.to_config() for task in get_tasks([*names])], "attention_probs_dropout_prob": 0.0}
    return MinBertConfig(**made, **SIZES[size]) if size else MinBertConfig.from_pretrained(model, **made)


def minbert_of(model: str, size: str | None, names: Sequence[str], attn: str = "sdpa") -> MinBertForMultiTask:
    """The checkpoint's weights in fp32, or random ones; without dropout on attention, which packing cannot have."""
    config = minbert_config(model, size, names)
    if size:
        return MinBertForMultiTask._from_config(config, attn_implementation=attn)
    return MinBertForMultiTask.from_pretrained(model, config=config, dtype=torch.float32, attn_implementation=attn)


def seconds_of_loop(make: Callable[[dict[str, Any]], Any], steps: int, batch_size: int, **options: Any) -> float:
    """Seconds of the measured steps of a loop, after a quarter as many that warm up.

    Args:
        make: a trainer of training arguments, which `options` are some of.
    """
    torch.manual_seed(0)
    clock = Clock(max(1, steps // 4))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "max_steps": steps + clock.first, "save_strategy": "no", "seed": 0,
            "per_device_train_batch_size": batch_size, "logging_steps": 100, "report_to": "none",
            "disable_tqdm": True, "learning_rate": 1e-5, "use_cpu": DEVICE == "cpu",  # or it refuses bf16 there
        }  # fmt: skip
        trainer = make({**settings, **options})
        trainer.add_callback(clock)
        trainer.train()
    return clock.seconds


@dataclass
class Loops:
    """Makes and runs training loops of some steps over the same rows.

    Args:
        size: of random weights, instead of the checkpoint's.
        rows: task to training rows.
    """

    model: str
    size: str | None
    tokenizer: Any
    rows: Mapping[str, Any]
    batch_size: int
    steps: int
    setting: Setting
    max_length: int = MAX_LENGTH

    def run(self, name: str) -> tuple[float, float]:
        """Seconds of the measured steps of a loop, and the GPU's memory at its fullest, in GB."""
        if self.setting.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        options = dict(LOOPS[name])
        kind, attn, dtype = options.pop("kind", "minbert"), options.pop("attn", "sdpa"), options.pop("dtype", True)
        with torch._dynamo.config.patch(_sizes(options)):
            seconds = seconds_of_loop(
                lambda settings: getattr(self, f"_{kind}")({**settings, **options}, attn),
                self.steps, self.batch_size, bf16=self.setting.bf16 and dtype,
            )  # fmt: skip
        return seconds, torch.cuda.max_memory_allocated() / 1e9 if self.setting.on_gpu else 0.0

    def _minbert(self, settings: dict[str, Any], attn: str) -> MultiTaskTrainer:
        return MultiTaskTrainer(
            minbert_of(self.model, self.size, list(self.rows), attn), MultiTaskTrainingArguments(**settings),
            train_dataset=self.rows, processing_class=self.tokenizer, max_length=self.max_length,
        )  # fmt: skip

    def _naive(self, settings: dict[str, Any], attn: str) -> NaiveLoop:
        return NaiveLoop(self._minbert({**settings, "packing": False}, attn), self.setting)

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
            name, num_labels=1, max_length=self.max_length, model_kwargs=kwargs,
            config_kwargs={"attention_probs_dropout_prob": 0.0},
        )  # fmt: skip
        (task,) = get_tasks([list(self.rows)[-1]])
        return CrossEncoderTrainer(
            model=model, args=CrossEncoderTrainingArguments(**settings), loss=losses.BinaryCrossEntropyLoss(model),
            train_dataset=self.rows[task.name].select_columns([*task.text_columns, "label"]),
        )  # fmt: skip

    def _stock(self, settings: dict[str, Any], attn: str) -> Trainer:
        multiple, compiled = settings.pop("pad_to_multiple_of", None), settings.pop("layers", None) == "compiled"
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
        if compiled:
            for layer in model.bert.encoder.layer:
                layer.compile()
        encoded = self.rows[task.name].map(
            lambda batch: self.tokenizer(
                *(batch[name] for name in task.text_columns), truncation=True, max_length=self.max_length
            ),
            batched=True,
        )
        columns = ["input_ids", "token_type_ids", "attention_mask", "label"]
        return Trainer(
            model, TrainingArguments(**settings), train_dataset=encoded.select_columns(columns),
            data_collator=DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple),
        )  # fmt: skip


def _sizes(options: Mapping[str, Any]) -> dict[str, bool]:
    """How a compiled stock model takes sizes: a few, each compiled by itself, or any. Else each is compiled anew."""
    if not {"torch_compile", "layers"} & {*options}:
        return {}
    few = "pad_to_multiple_of" in options
    return {"automatic_dynamic_shapes": False} if few else {"assume_static_by_default": False}


class NaiveLoop:
    """A loop in the course's style: padded batches of every task in turn, and `naive_step` on them."""

    def __init__(self, trainer: MultiTaskTrainer, setting: Setting):
        self.trainer, self.setting = trainer, setting
        self.clock: Clock | None = None

    def add_callback(self, clock: Clock) -> None:
        self.clock = clock

    def train(self) -> None:
        args, model, state = self.trainer.args, self.trainer.model.train(), self.trainer.state
        calls: list[dict[str, Any]] = []
        run = naive_step(model, calls, self.setting)
        while state.global_step < args.max_steps:
            for batches in self.trainer.get_train_dataloader():
                calls[:] = [send_to_device(batch, args.device) for batch in batches.values()]
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
