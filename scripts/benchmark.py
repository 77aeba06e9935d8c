"""What MinBERT costs, measured: `python scripts/benchmark.py step --model google-bert/bert-base-uncased`.

Each sub-command compares two things in one process, in turns, so that a busy machine slows both alike.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Annotated, Literal

import torch
import transformers
import typer
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_minbert import MinBertConfig, MinBertForMultiTask, get_tasks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WARM_UP = 3  # the first steps allocate AdamW's state and choose kernels
SIZES = {
    "base": {},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}


@app.callback()
def main() -> None:
    """What MinBERT costs, measured beside the stock classes of transformers."""
    transformers.logging.set_verbosity_error()  # both models report their new heads as missing
    transformers.logging.disable_progress_bar()


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
    runs = {name: _training_step(m.to(device).train(), calls[name], device, bf16) for name, m in models.items()}

    _print_setting(device, bf16)
    typer.echo(f"{model or f'random weights, {size}'}; batch {batch_size} x {length} tokens, half of the rows shorter")
    seconds = _in_turns(runs, steps, device)
    for name, measured in seconds.items():
        parameters = sum(p.numel() for p in models[name].parameters()) / 1e6
        spread = f"{1e3 * min(measured):.2f} to {1e3 * max(measured):.2f}"
        typer.echo(f"{name:8} {1e3 * median(measured):9.2f} ms median ({spread}), {parameters:.2f}M parameters")
    ratio = median(seconds["minbert"]) / median(seconds["stock"])
    typer.echo(f"ratio    {ratio:9.3f} (minbert / stock, medians of {steps} steps)")
    if at_most is not None and ratio > at_most:
        typer.echo(f"The ratio is above {at_most}.", err=True)
        raise typer.Exit(1)


def _minbert(path: str | None, size: str) -> MinBertForMultiTask:
    tasks = get_tasks(["sst"])
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


def _training_step(model: torch.nn.Module, call: dict, device: str, bf16: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    device_type = torch.device(device).type

    def run() -> None:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=bf16):
            loss = model(**call).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _in_turns(runs: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every call, by name. Who goes first changes from round to round."""
    on_gpu = torch.device(device).type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for index in range(WARM_UP + rounds):
        for name in order:
            start = perf_counter()
            runs[name]()
            if on_gpu:  # a GPU's calls return before their work is done
                torch.cuda.synchronize(device)
            if index >= WARM_UP:
                seconds[name].append(perf_counter() - start)
        order.reverse()
    return seconds


def _print_setting(device: str, bf16: bool) -> None:
    on_gpu = torch.device(device).type == "cuda"
    where = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    typer.echo(
        f"{where}; {'bf16 autocast' if bf16 else 'fp32'}, sdpa; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    app()
