"""Measures prediction for many pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from hf_minbert import MinBertConfig, MinBertForMultiTask, get_tasks
from hf_minbert.data.files import load_split
from hf_minbert.model.inference import tokenize
from hf_minbert.pretrained.loading import load_config, load_weights
from hf_minbert.pretrained.prediction import Predictor

from .floor import PASSES, Cost, Hardware, forward_flops
from .shared import (
    DEVICE,
    SIZES,
    Bf16,
    DataDir,
    Device,
    JsonFile,
    RandomSize,
    Setting,
    Table,
    bert_checkpoint,
    in_turns,
    report,
    speeds,
)

#: What makes a BERT's weights fit another, and its answers the same.
SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip

Rows = list[dict[str, Any]]


def predict(
    model: Annotated[
        str,
        typer.Option(
            help="A BERT checkpoint or a finished run; its tokenizer is used in any case.", callback=bert_checkpoint
        ),
    ],
    random_size: RandomSize = None,
    data_dir: DataDir = "sample",
    pairs: Annotated[int, typer.Option(min=1, help="The training pairs of para, over again where they end.")] = 4000,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way answers all pairs.")] = 3,
    bf16: Bf16 = False,
    device: Device = DEVICE,
    json_file: JsonFile = None,
) -> None:
    """Pairs per second, from text to logits: the same weights in Predictor and in BertForSequenceClassification.

    `stock` pads batches of the rows as they stand, `stock-sorted` of rows sorted by their length in characters.
    """
    setting = Setting(device, bf16)
    hardware, rows = Hardware.measure(setting), pairs_of(data_dir, pairs)
    answers = Answers(model, random_size, batch_size, setting)
    cost = answers.cost(rows)
    heading = (
        f"{random_size or model}; {pairs:,} pairs of para from {data_dir}; batch {batch_size}\n{cost}\n{hardware}"
    )
    table = run_ways(answers, rows, rounds, hardware)
    report(setting, heading, table, json_file, hardware=hardware, cost=cost, pairs=pairs, batch_size=batch_size)


def pairs_of(data_dir: str | Path, number: int) -> Rows:
    """The training pairs of para, over again where they end."""
    table = load_split(get_tasks(["para"])[0], data_dir, "train").to_list()
    return [table[place % len(table)] for place in range(number)]


def run_ways(answers: Answers, rows: Rows, rounds: int, hardware: Hardware) -> Table:
    """A line for each way: speed, how its answers differ from stock's, and the floor beside."""
    ways = {"stock": answers.stock, "stock-sorted": answers.stock_sorted, "minbert": answers.minbert}
    found = {name: way(rows[: 4 * answers.batch_size]) for name, way in ways.items()}  # warms up

    def run(name: str) -> float:
        return answers.setting.seconds_of(lambda: found.update({name: ways[name](rows)}))

    seconds = in_turns({name: partial(run, name) for name in ways}, rounds)
    table, cost = speeds(seconds, dict.fromkeys(ways, len(rows))), answers.cost(rows)
    for name, row in table.items():
        row["logits_differ_by"] = float((found[name] - found["stock"]).abs().max())
        row["other_classes"] = int(((found[name] > 0) != (found["stock"] > 0)).sum())
        row |= hardware.beside(row["examples_per_s"], cost, answers.batch_size)
    return table


class Answers:
    """The same weights, asked in several ways. Each gives the logits of the rows [N], in their order."""

    def __init__(self, model: str, size: str | None, batch_size: int, setting: Setting):
        torch.manual_seed(0)
        self.tokenizer, tasks = AutoTokenizer.from_pretrained(model), get_tasks(["para"])
        if size is None:
            ours, _ = load_weights(model, load_config(model, tasks=tasks))
        else:
            ours = MinBertForMultiTask(MinBertConfig(tasks=tasks, **SIZES[size]))
        dtype = "bfloat16" if setting.bf16 else "float32"
        self.predictor = Predictor(ours.to(setting.device), self.tokenizer, batch_size, dtype)
        shape = {name: getattr(ours.config, name) for name in SHAPE}
        self.model = BertForSequenceClassification(BertConfig(num_labels=1, **shape)).to(setting.device).eval()
        head = ours.heads.get("para").linear
        self.model.bert.load_state_dict(ours.bert.state_dict())
        self.model.classifier.load_state_dict(head.state_dict())
        self.batch_size, self.setting = batch_size, setting

    def cost(self, rows: Rows) -> Cost:
        """Of one pair."""
        columns = [[row[side] for row in rows] for side in ("sentence1", "sentence2")]
        lengths = list(map(len, tokenize(self.tokenizer, columns, self.predictor.lengths["para"])["input_ids"]))
        flops = PASSES["predict"] * forward_flops(self.model.config, lengths, num_outputs=1)
        return Cost(sum(lengths) / len(lengths), flops)

    def minbert(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(self.predictor.logits("para", rows))[:, 0]

    def stock_sorted(self, rows: Rows) -> torch.Tensor:
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["sentence1"] + rows[i]["sentence2"]))
        return self.stock([rows[place] for place in order])[torch.tensor(order).argsort()]

    @torch.inference_mode()
    def stock(self, rows: Rows) -> torch.Tensor:
        """The loop that one writes by hand."""
        found, length = [], self.predictor.lengths["para"]
        with self.setting.autocast():  # around the loop: autocast keeps the weights that it converts until its end
            for start in range(0, len(rows), self.batch_size):
                part = rows[start : start + self.batch_size]
                texts = ([row[side] for row in part] for side in ("sentence1", "sentence2"))
                batch = self.tokenizer(*texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
                found.append(self.model(**batch.to(self.setting.device)).logits[:, 0].float().cpu())
        return torch.cat(found)
