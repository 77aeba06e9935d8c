"""Measures other encoders: hand-written ones beside BERT, and those of transformers beside the stock Trainer.

All weights and rows are random. It needs neither a network nor `datasets`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from hf_minbert import MinBertConfig, MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.model.families import FAMILIES
from hf_minbert.pretrained.loading import load_config

from .loops import seconds_of_loop
from .shared import DEVICE, SIZES, Bf16, JsonFile, Setting, Table, in_turns, over, report

TASK, PAD = get_tasks(["sst"])[0], 0
VOCABULARY = {"base": 30522, "tiny": 1000}  # BERT's, for every encoder: its table is a part of what AdamW updates

BY_HAND = [name for name in FAMILIES if name != "bert"]

Rows = list[dict[str, Any]]


def encoders(
    families: Annotated[
        str, typer.Option(help=f"Computed by hand, with commas: {', '.join(BY_HAND)}.")
    ] = "roberta,electra,distilbert",
    library: Annotated[
        str, typer.Option(help="Of transformers, by `model_type`, with commas.")
    ] = "modernbert,deberta-v2,mpnet",
    size: Annotated[
        Literal["base", "tiny"], typer.Option(help="Shape of the random weights; base on a GPU, else tiny.")
    ] = {"cuda": "base", "cpu": "tiny"}[DEVICE],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    length: Annotated[int, typer.Option(min=2, max=500, help="Tokens of the longest rows; the shortest have half.")]
    = 128,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps, after a quarter as many that warm up.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="How often each trains, in turns.")] = 3,
    bf16: Bf16 = False,
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Training steps of other encoders, with random weights and rows: no network, no `datasets`.

    A family's steps are packed, and recorded as CUDA graphs on a GPU, beside BERT's of the same size. An encoder of
    transformers is trained by this package and, on the same rows, by the stock Trainer.
    """
    by_hand, others = (list(filter(None, names.split(","))) for names in (families, library))
    _check_names(by_hand, others)
    setting = Setting(DEVICE, bf16)
    theirs = {name: _config(name, size) for name in dict.fromkeys(["bert", *by_hand, *others])}
    ours = {name: _with_task(config) for name, config in theirs.items()}
    rows = _random_rows((steps + max(1, steps // 4)) * batch_size, length, VOCABULARY[size])
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for name in ["bert", *by_hand] if by_hand else []:
        makers[name] = partial(_ours, ours[name], rows, length)
    for name in others:
        makers[f"{name}, stock"] = partial(_stock, theirs[name], rows)
        makers[name] = partial(_ours, ours[name], rows, length)
    seconds = in_turns({name: _timed(name, make, steps, batch_size, bf16) for name, make in makers.items()}, rounds)
    table: Table = {}
    for name, took in seconds.items():
        table[name] = {"seconds": took, "ms_a_step": 1e3 * median(took) / steps}
        table[name] |= {"parameters": _parameters(theirs[name.removesuffix(", stock")])}
        if name in by_hand:
            table[name] |= {"time_over_bert": over(seconds, name, "bert")}
        if name in others:
            table[name] |= {"time_over_stock": over(seconds, name, f"{name}, stock")}
    heading = f"random weights, {size}; batch {batch_size} x {length // 2} to {length} tokens; {steps} steps"
    report(setting, f"{heading}; no dropout on attention by hand", table, json_file)


def _check_names(by_hand: Sequence[str], others: Sequence[str]) -> None:
    for name in by_hand:
        if name not in BY_HAND:
            raise typer.BadParameter(f"--families: {name!r} is none of {', '.join(BY_HAND)}.")
    for name in others:
        if name not in CONFIG_MAPPING or name in FAMILIES:
            raise typer.BadParameter(f"--library: {name!r} is no `model_type` of transformers, or computed by hand.")


def _config(name: str, size: str) -> PreTrainedConfig:
    """An encoder's config of this size, under its own words for it."""
    words = FAMILIES[name].settings if name in FAMILIES else {}
    sizes = {words.get(key, key): value for key, value in SIZES[size].items()}
    config = CONFIG_MAPPING[name](vocab_size=VOCABULARY[size], pad_token_id=PAD, **sizes)
    config.num_labels = TASK.num_outputs
    return config


def _random_rows(count: int, length: int, vocabulary: int) -> Rows:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=draw).tolist()
    return [
        {"input_ids": torch.randint(5, vocabulary, (n,), generator=draw).tolist(), "labels": place % TASK.num_outputs}
        for place, n in enumerate(lengths)
    ]


def _with_task(config: PreTrainedConfig) -> MinBertConfig:
    """Packing cannot have dropout on attention. An error if it is no encoder of one text."""
    off = {"attention_probs_dropout_prob": 0.0} if config.model_type in FAMILIES else {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return load_config(folder, tasks=[TASK], **off)


def _parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config).num_parameters()


def _ours(config: MinBertConfig, rows: Rows, length: int, settings: dict[str, Any]) -> MultiTaskTrainer:
    with torch.device(DEVICE):
        model = MinBertForMultiTask._from_config(config)
    args = MultiTaskTrainingArguments(**settings, packing=config.encoder_config is None)
    return MultiTaskTrainer(model, args, train_dataset={TASK.name: rows}, max_length=length)


def _stock(config: PreTrainedConfig, rows: Rows, settings: dict[str, Any]) -> Trainer:
    with torch.device(DEVICE):
        model = AutoModelForSequenceClassification.from_config(config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": PAD})), pad_token="[PAD]")
    collate = DataCollatorWithPadding(tokenizer)
    return Trainer(model, TrainingArguments(**settings), train_dataset=rows, data_collator=collate)


def _timed(
    name: str, make: Callable[[dict[str, Any]], Any], steps: int, batch_size: int, bf16: bool
) -> Callable[[], float]:
    def run() -> float:
        seconds = seconds_of_loop(make, steps, batch_size, bf16=bf16)
        typer.echo(f"{name}: {steps} steps in {seconds:.1f} s", err=True)  # a later loop may never end
        return seconds

    return run
