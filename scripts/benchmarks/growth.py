"""Measures the time per row as the data grow. It is about constant if every part is linear."""

from __future__ import annotations

import csv
import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from hf_minbert import MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.data.encoding import encode
from hf_minbert.data.files import load_split
from hf_minbert.data.leaks import HeldOut, load_training
from hf_minbert.pretrained.prediction import Predictor

from .loops import minbert_of
from .predict import Rows, pairs_of
from .shared import DEVICE, MAX_LENGTH, Bf16, DataDir, JsonFile, RandomSize, Setting, Table, in_turns, over, report
from .train import Model


def growth(
    model: Model,
    random_size: RandomSize = None,
    data_dir: DataDir = "sample",
    rows: Annotated[int, typer.Option(min=1, help="Rows at 1x: the training pairs of para, over again.")] = 500,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 3,
    bf16: Bf16 = False,
    json_file: JsonFile = None,
) -> None:
    """Time per row of 1x, 4x and 16x rows: to load, to tokenize, to train on for an epoch, to predict.

    Processor time on a CPU, as other programs change it little; on a GPU the time that passes.

    `load` reads files of so many rows to train on and to hold out, and compares them. `tokenize, kept` reads what an
    earlier run tokenized. `train` is an epoch, from the trainer to its last step.
    """
    setting, times = Setting(DEVICE, bf16), (1, 4, 16)
    clock = perf_counter if setting.on_gpu else process_time
    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            time: Stages(model, random_size, data_dir, time * rows, batch_size, setting, Path(folder, str(time)))
            for time in times
        }
        stages = list(sizes[1].runs)
        calls = {(stage, time): made.runs[stage] for stage in stages for time, made in sizes.items()}
        gc.collect()
        gc.freeze()  # or a collection, of the libraries' million objects, falls to whoever is measured: 0.4 s
        seconds = in_turns(
            {name: partial(setting.seconds_of, call, clock) for name, call in calls.items()}, rounds, warm_up=1
        )
        gc.unfreeze()
    table: Table = {stage: {} for stage in stages}
    for (stage, time), took in seconds.items():
        table[stage] |= {f"us_a_row_at_{time}x": 1e6 * median(took) / (time * rows), f"seconds_at_{time}x": took}
    for stage, row in table.items():
        row["16x_over_1x"] = over(seconds, (stage, 16), (stage, 1)) / 16
    heading = f"{random_size or model}; {rows:,} rows of para from {data_dir} at 1x; batch {batch_size}"
    report(setting, heading, table, json_file, rows=rows, batch_size=batch_size)


class Stages:
    """What a run does with so many rows, stage by stage."""

    def __init__(
        self, model: str, size: str | None, data_dir: str, rows: int, batch_size: int, setting: Setting, folder: Path
    ):
        self.task, self.folder, self.batch_size, self.setting = get_tasks(["para"])[0], folder, batch_size, setting
        self._write_files(pairs_of(data_dir, 2 * rows))
        self.data = load_split(self.task, folder, "train")
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.make_model = partial(minbert_of, model, size, [self.task.name])
        predictor, listed = Predictor(self.make_model().to(setting.device), self.tokenizer), self.data.to_list()
        self.runs: dict[str, Callable[[], Any]] = {
            "load": self._load,
            "tokenize": self._encode,
            "tokenize, kept": partial(self._encode, folder / "kept"),  # written by the call that warms up
            "train": self._train,
            "predict": partial(predictor.logits, self.task.name, listed),
        }

    def _write_files(self, rows: Rows) -> None:
        """Half of the rows to train on, and half held out."""
        self.folder.mkdir()
        columns = {**dict.fromkeys(self.task.text_columns), "label": self.task.label_column}
        half = len(rows) // 2
        for split, part in (("train", rows[:half]), ("dev", rows[half:])):
            with open(self.folder / self.task.files[split], "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)
                writer.writerow(["id", *(written or name for name, written in columns.items())])
                writer.writerows([place, *(row[name] for name in columns)] for place, row in enumerate(part))

    def _load(self) -> None:
        by_name = {self.task.name: self.task}
        load_training(by_name, by_name, self.folder, seed=0, held_out=HeldOut.of([self.task], self.folder))

    def _encode(self, cache_dir: Path | None = None) -> None:
        encode(self.data, self.task, self.tokenizer, MAX_LENGTH, cache_dir)

    def _train(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = MultiTaskTrainingArguments(
                folder, num_train_epochs=1, per_device_train_batch_size=self.batch_size, packing=True,
                bf16=self.setting.bf16, save_strategy="no", report_to="none", disable_tqdm=True,
            )  # fmt: skip
            MultiTaskTrainer(
                self.make_model(), args, train_dataset={self.task.name: self.data}, processing_class=self.tokenizer,
                max_length=MAX_LENGTH,
            ).train()  # fmt: skip
