"""Every mistake in what is given ends `minbert` with one line that says what, where and what to do, and status 2.

Each row of a table is one mistake: its name, what makes it, and words that the line must hold. `TMP`, `PLAIN`,
`DATA` and `RUN` stand for the test's own folder, the tiny BERT, the toy data and a finished run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_minbert import MinBertForMultiTask

ROOT = Path(__file__).parents[2]


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Grows by one whenever weights are loaded."""
    original, loads = MinBertForMultiTask.from_pretrained.__func__, []

    def from_pretrained(cls, name, *args, **kwargs):
        loads.append(name)
        return original(cls, name, *args, **kwargs)

    monkeypatch.setattr(MinBertForMultiTask, "from_pretrained", classmethod(from_pretrained))
    return loads


@pytest.fixture
def place(tmp_path, tiny_bert, course_dir, finished_run) -> Callable[[str], str]:
    """Puts the paths in a text."""
    places = {"TMP": tmp_path, "PLAIN": tiny_bert, "DATA": course_dir, "RUN": finished_run}

    def place(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    (tmp_path / "a_file").write_text("not a model, not a table, no folder\n")
    (tmp_path / "empty").mkdir()
    return place


@pytest.fixture
def refused(minbert, loads, place) -> Callable[..., None]:
    """`refused(words of the command, *words of the line)` asserts the rule of this file."""

    def refused(command: list[str], *said: str, may_load: bool = False) -> None:
        ended = minbert(*map(place, command))
        assert_one_line(ended.status, ended.err, *map(place, said))
        assert ended.out == ""
        assert may_load or not loads, "the weights were loaded before the mistake was seen"

    return refused


def assert_one_line(status: int, err: str, *said: str) -> None:
    *earlier, line = err.splitlines()
    assert status == 2, err
    assert line.startswith("minbert: error: "), err
    for words in said:
        assert words in line
    assert line.endswith((".", "?"))
    # Before it there is nothing but progress: our own lines and bars.
    foreign = [text for text in earlier if text and not text.startswith("minbert: ") and "it/s]" not in text]
    assert [text for text in foreign if "examples/s]" not in text and "%|" not in text] == []
    assert not any("error" in text for text in earlier)


# ---- minbert train: a word after a good recipe

# Mistakes that show before any weights are loaded.
WORDS: dict[str, tuple[str | list[str], list[str]]] = {
    "unknown key": ("learning_rat=1e-4", ["Unknown key 'learning_rat'", "Did you mean 'learning_rate'?"]),
    "unknown key of ours": ("data_dri=x", ["'data_dri'", "'data_dir'", "minbert train --help"]),
    "key of older versions": ("evaluation_strategy=epoch", ["Did you mean 'eval_strategy'?"]),
    "no equals sign": ("learning_rate", ["'learning_rate' is not `key=value`", "learning_rate=1e-4"]),
    "no key": ("=3", ["'=3' is not `key=value`"]),
    "option of another tool": ("--max-length", ["No such option", "--max-length", "minbert train --help"]),
    "given twice": (["seed=1", "seed=2"], ["'seed' is given twice", "Give it once"]),
    "not YAML": ("tasks=[sst", ["`tasks=[sst`", "not readable as YAML", "expected ',' or ']'"]),
    "control character": ("run_name=a\x07", ["not readable as YAML", "#x0007"]),
    "words for a number": ("max_steps=ten", ["`max_steps` must be a whole number. Found ten"]),
    "part of a step": ("max_steps=1.5", ["`max_steps` must be a whole number. Found 1.5"]),
    "words for a rate": ("learning_rate=fast", ["`learning_rate` must be a number. Found fast"]),
    "no for false": ("bf16=no", ["`bf16` must be true or false. Found no"]),
    "mapping for a number": ("per_device_train_batch_size={sst: 4}", ["`per_device_train_batch_size`"]),
    "no tasks": ("tasks=[]", ["`tasks` is empty", "sst, para, sts, cfimdb"]),
    "tasks left blank": ("tasks=", ["`tasks` must be", "a list of text like [a, b]", "Found nothing"]),
    "unknown task": ("tasks=[sst,quora]", ["Unknown task 'quora'", "para", "sst", "sts"]),
    "task twice": ("tasks=[sst,sst]", ["`tasks` names 'sst' twice", "Name each task once"]),
    "train a task that is not there": ("train_tasks=[cfimdb]", ["`train_tasks`", "'cfimdb'", "para, sst, sts"]),
    "score a task that is not there": ("eval_tasks=stss", ["`eval_tasks`", "Did you mean 'sts'?"]),
    "train nothing": ("train_tasks=[]", ["`train_tasks` is empty"]),
    "batch size of no task": ("task_batch_sizes={cfimdb: 4}", ["`task_batch_sizes`", "'cfimdb'"]),
    "batch size 0 of a task": ("task_batch_sizes={sts: 0}", ["`task_batch_sizes` of 'sts'", "from 1", "Found 0"]),
    "batch size in words": ("task_batch_sizes={sts: many}", ["`task_batch_sizes`", "{'sts': 'many'}"]),
    "batch sizes without a task": ("task_batch_sizes=4", ["`task_batch_sizes` must be a mapping", "Found 4"]),
    "batch sizes by no known word": ("task_batch_sizes=equal", ["`task_batch_sizes`", "one of proportional", "equal"]),
    "weights by no known word": ("task_weights=uniform", ["`task_weights`", "one of inverse_batch_size", "uniform"]),
    "weight of no task": ("task_weights={stss: 1}", ["`task_weights`", "Did you mean 'sts'?"]),
    "negative weight": ("task_weights={sts: -1}", ["`task_weights` of 'sts'", "from 0", "-1"]),
    "weight that is no number": ("task_weights={sts: .nan}", ["`task_weights` of 'sts'", "nan"]),
    "no data folder": ("data_dir=TMP/nowhere", ["`data_dir` does not exist: TMP/nowhere", "Give the folder"]),
    "data folder is a file": ("data_dir=TMP/a_file", ["`data_dir` is not a folder: TMP/a_file"]),
    "data folder is empty": ("data_dir=TMP/empty", ["TMP/empty/ids-sst-train.csv does not exist", "(nothing)"]),
    "data folder left blank": ("data_dir=", ["no `data_dir` is given", "ids-sst-train.csv"]),
    "output is a file": ("output_dir=TMP/a_file", ["`output_dir` TMP/a_file is a file", "path of a folder"]),
    "output below a file": ("output_dir=TMP/a_file/run", ["Cannot write TMP/a_file/run", "a_file is not a folder"]),
    "output below a device": ("output_dir=/dev/null/run", ["Cannot write /dev/null/run", "can be written"]),
    "output holds a run": ("output_dir=RUN", ["RUN holds a run already", "overwrite=true", "another output_dir"]),
    "no model": ("model_name_or_path=TMP/nowhere", ["There is no model TMP/nowhere", "Give the folder of an encoder"]),
    "model is a file": ("model_name_or_path=TMP/a_file", ["TMP/a_file is not a folder", "Give the folder"]),
    "model folder is empty": ("model_name_or_path=TMP/empty", ["TMP/empty holds no model", "no config.json"]),
    "model is no path and no id": ("model_name_or_path=bert base", ["There is no model bert base", "on the Hub"]),
    "model is on no hub": ("model_name_or_path=nobody/nothing", ["no folder nobody/nothing", "Give the folder of"]),
    "longer than the positions": ("max_length=600", ["`max_length` must be from 8 to 64", "Found 600", "Change it"]),
    "too short to hold words": ("max_length=4", ["`max_length` must be from 8 to 64", "Found 4"]),
    "too many private layers": ("private_layers=9", ["must be from 0 to 2", "Found 9. Correct the recipe."]),
    "fewer than no private layers": ("private_layers=-1", ["`private_layers` must be from 0 to 2", "Found -1"]),
    "head that is none": ("tasks={sst: {head: mpl}}", ["'sst': unknown head 'mpl'", "blocks, cosine, linear"]),
    "option that no head has": ("tasks={sst: {head_options: {size: 3}}}", ["unknown option 'size'", "dropout, scale"]),
    "encoding for one text": ("tasks={sst: {pair_encoding: bi}}", ["`pair_encoding` must be single with 1 text"]),
    "cosine of one vector": ("tasks={sts: {head: cosine}}", ["`head: cosine` needs a pair", "`pair_encoding: bi`"]),
    "loss of another kind": ("tasks={sts: {loss: bce}}", ["unknown loss 'bce' for kind 'score'", "cosent"]),
    "weight that is none": ("tasks={para: {loss_options: {pos_weight: -1}}}", ["`pos_weight` must be a number above"]),
    "task of a reserved name": (
        "tasks={train: {kind: score, range: [0, 1], text_columns: a, files: {train: x.csv, dev: x.csv}}}",
        ["A task cannot be called 'train'", "Choose another"],
    ),
    "all dropped": ("hidden_dropout_prob=1", ["`hidden_dropout_prob` must be at least 0 and less than 1. Found 1"]),
    "negative dropout": ("attention_probs_dropout_prob=-0.1", ["`attention_probs_dropout_prob`", "-0.1"]),
    "negative rate": ("learning_rate=-1", ["`learning_rate` must be at least 0. Found -1.0"]),
    "rate that is no number": ("learning_rate=.nan", ["`learning_rate`", "nan"]),
    "endless rate": ("learning_rate=.inf", ["`learning_rate` must be finite"]),
    "batch size 0": ("per_device_train_batch_size=0", ["`per_device_train_batch_size` must be at least 1. Found 0"]),
    "no accumulation": ("gradient_accumulation_steps=0", ["`gradient_accumulation_steps` must be at least 1"]),
    "no steps": ("max_steps=0", ["`max_steps` must be at least 1", "num_train_epochs"]),
    "no epochs": (["max_steps=-1", "num_train_epochs=0"], ["`num_train_epochs` must be more than 0. Found 0"]),
    "endless epochs": (["max_steps=-1", "num_train_epochs=.inf"], ["`num_train_epochs` must be finite", "max_steps"]),
    "negative warm-up": ("warmup_steps=-1", ["`warmup_steps` must be at least 0. Found -1"]),
    "negative seed": ("seed=-1", ["`seed` must be at least 0. Found -1"]),
    "huge seed": ("seed=5000000000", ["Seed must be between 0 and 2**32 - 1", "Correct the recipe"]),
    "negative seed of the data": ("data_seed=-1", ["`data_seed` must be at least 0. Found -1"]),
    "evaluate when": ("eval_strategy=epochs", ["`eval_strategy` must be one of no, steps, epoch. Found epochs"]),
    "best model without evaluation": ("load_best_model_at_end=true", ["load_best_model_at_end", "strategy to match"]),
    "best model, other saves": (
        ["load_best_model_at_end=true", "eval_strategy=epoch", "save_strategy=steps"],
        ["load_best_model_at_end", "strategy to match"],
    ),
    "metric misspelt": (
        ["load_best_model_at_end=true", "eval_strategy=steps", "metric_for_best_model=eval_sts_pearsn"],
        ["Unknown metric 'eval_sts_pearsn'", "Did you mean 'eval_sts_pearson'?", "eval_overall"],
    ),
    "metric of a task not scored": (
        ["eval_tasks=sst", "metric_for_best_model=sts_pearson"],
        ["Unknown metric 'sts_pearson'", "eval_sst_accuracy"],
    ),
    "early stopping without evaluation": ("early_stopping_patience=2", ["`early_stopping_patience`", "eval_strategy"]),
    "no patience": (
        ["early_stopping_patience=0", "eval_strategy=epoch"],
        ["`early_stopping_patience` must be at least 1. Found 0"],
    ),
    "mixing misspelt": ("mixing=cycel", ["Unknown mixing 'cycel'", "Did you mean 'cycle'?"]),
    "aggregator misspelt": ("aggregator=summ", ["Unknown aggregator 'summ'", "Did you mean 'sum'?"]),
    "regularizer unknown": ("regularizer=l2", ["Unknown regularizer 'l2'", "none"]),
    "schedule misspelt": ("lr_scheduler_type=linaer", ["`lr_scheduler_type` must be one of linear", "Found linaer"]),
    "optimizer misspelt": ("optim=adamm", ["`optim` must be one of adamw_torch", "Found adamm"]),
    "optimizer that steps early": ("optim=lomo", ["`optim: lomo` is not supported", "Use adamw_torch"]),
    "reports to an unknown service": ("report_to=wandbb", ["Unknown `report_to` 'wandbb'", "Did you mean 'wandb'?"]),
    "deepspeed": ("deepspeed=ds.json", ["`deepspeed: ds.json` is not supported", "Leave it out"]),
    "fsdp": ("fsdp=full_shard", ["`fsdp: full_shard` is not supported", "Leave it out"]),
    "label smoothing": ("label_smoothing_factor=0.1", ["`label_smoothing_factor: 0.1`", "a head owns its loss"]),
    "dispatched batches": ("accelerator_config={dispatch_batches: true}", ["`accelerator_config.dispatch_batches"]),
    "unknown accelerator option": ("accelerator_config={foo: true}", ["'foo'", "Correct the recipe"]),
    "prefetch without workers": ("dataloader_prefetch_factor=2", ["dataloader_prefetch_factor", "num_workers"]),
    "both of overwrite and resume": (
        ["overwrite=true", "resume_from_checkpoint=true"],
        ["`overwrite` and `resume_from_checkpoint` cannot be used together"],
    ),
    "nothing to go on with": ("resume_from_checkpoint=true", ["no complete checkpoint in TMP/run", "to start again"]),
    "no such checkpoint": ("resume_from_checkpoint=TMP/nowhere", ["TMP/nowhere", "no such folder"]),
    "checkpoint without weights": ("resume_from_checkpoint=TMP/empty", ["TMP/empty: it has no weights", "start"]),
    "bf16 and fp16": (["bf16=true", "fp16=true", "use_cpu=true"], ["fp16", "bf16"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_wrong_word_after_the_recipe(refused, write_recipe_file, tmp_path, name):
    words, said = WORDS[name]
    refused(["train", str(write_recipe_file()), *([words] if isinstance(words, str) else words)], *said)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has what is asked for here")
@pytest.mark.parametrize("word", ["fp16=true", "tf32=true"])
def test_what_only_a_gpu_has(refused, write_recipe_file, word):
    refused(["train", str(write_recipe_file()), word], word.split("=")[0], "GPU")


# Mistakes that only the library can see, when it sets up what the weights go into.
LATER = {
    "attention misspelt": ("attn_implementation=sdap", ["sdap", "eager"]),
    "argument of the schedule": ("lr_scheduler_kwargs={foo: 1}", ["Starting to train failed", "'foo'", "Correct"]),
    "argument of the optimizer": ("optim_args=foo", ["Starting to train failed", "Correct the recipe"]),
    "beta out of range": ("adam_beta1=5", ["Starting to train failed", "beta", "5.0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_wrong_word_that_shows_later(refused, write_recipe_file, name):
    word, said = LATER[name]
    refused(["train", str(write_recipe_file()), word], *said, may_load=True)


# ---- minbert train: the recipe

GOOD = "model_name_or_path: PLAIN\ndata_dir: DATA\noutput_dir: TMP/run\nmax_steps: 1\n"
RECIPES: dict[str, tuple[str | bytes, list[str]]] = {
    "not YAML": (GOOD + "tasks: [sst\n", ["TMP/recipe.yaml, line 6", "not readable as YAML"]),
    "tabs": (GOOD + "tasks:\n\t- sst\n", ["TMP/recipe.yaml, line 6", "'\\t'"]),
    "colon in a text": (GOOD + "run_name: a: b\n", ["TMP/recipe.yaml, line 5", "not readable as YAML"]),
    "a key twice": (GOOD + "max_steps: 2\n", ["line 5", "the key 'max_steps' occurs twice; delete one"]),
    "a task twice": (GOOD + "task_weights:\n  sts: 1\n  sts: 2\n", ["line 7", "the key 'sts' occurs twice"]),
    "code": (GOOD + "run_name: !!python/object/apply:os.getcwd []\n", ["line 5", "python/object/apply:os.getcwd"]),
    "a list": ("- a\n- b\n", ["TMP/recipe.yaml", "expected lines of `key: value`", "['a', 'b']"]),
    "a text": ("bert-base-uncased\n", ["expected lines of `key: value`", "'bert-base-uncased'"]),
    "empty": ("", ["TMP/recipe.yaml", "expected lines of `key: value`"]),
    "not UTF-8": (b"run_name: caf\xe9\n", ["TMP/recipe.yaml", "cannot be read as UTF-8 text"]),
    "binary": (b"\x89PNG\x00\x01", ["TMP/recipe.yaml", "cannot be read as UTF-8 text"]),
    "NUL": (GOOD + "run_name: a\0b\n", ["TMP/recipe.yaml", "not readable as YAML", "#x0000"]),
    "a key missing": (GOOD.replace("output_dir", "#"), ["`output_dir` is missing", "Add a line `output_dir: ...`"]),
    "a key blank": (GOOD.replace("PLAIN", ""), ["`model_name_or_path` is missing"]),
    "a number as key": (GOOD + "1: 2\n", ["Unknown key 1"]),
    "unknown key": (GOOD + "num_epochs: 3\n", ["Unknown key 'num_epochs'", "Did you mean 'num_train_epochs'?"]),
    "nested settings": (GOOD + "training:\n  seed: 1\n", ["Unknown key 'training'"]),
    "wrong type": (
        GOOD + "train_tasks: {sst: 1}\n", ["`train_tasks` must be a list of text like [a, b]", "{'sst': 1}"],
    ),
    "null": (GOOD + "seed: null\n", ["`seed` must be a whole number. Found null"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_recipe(refused, place, tmp_path, name):
    text, said = RECIPES[name]
    (tmp_path / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else place(text).encode())
    refused(["train", "TMP/recipe.yaml"], *said)


@pytest.mark.parametrize("path", ["TMP/nowhere.yaml", "TMP/empty"])
def test_no_recipe(refused, path):
    refused(["train", path], f"Recipe {path}: there is no such file", "Give the path of a .yaml file")


# ---- minbert train: the data

SST = "\tid\tsentence\tsentiment\n"
PARA = "\tid\tsentence1\tsentence2\tis_duplicate\n"
STS = "\tid\tsentence1\tsentence2\tsimilarity\n"
FIVE = "a label of task 'sst' must be a whole number from 0 to 4"
TABLES: dict[str, tuple[str, str | bytes | None, list[str]]] = {
    "label is the class count": ("ids-sst-train.csv", SST + "0\ta\tgood\t4 \n1\tb\tbad\t5\n", [FIVE, "line 3", "'5'"]),
    "label below 0": ("ids-sst-dev.csv", SST + "0\ta\tgood\t-1\n", ["ids-sst-dev.csv, line 2", FIVE, "'-1'"]),
    "label between classes": ("ids-sst-train.csv", SST + "0\ta\tgood\t2.5\n", ["line 2", FIVE, "'2.5'"]),
    "label in words": ("quora-train.csv", PARA + "0\ta\tx\ty\tyes\n", ["line 2", "1 = duplicate", "'yes'"]),
    "score above the range": ("sts-train.csv", STS + "0\ta\tx\ty\t7.0\n", ["line 2", "a number from 0 to 5", "'7.0'"]),
    "score is no number": ("sts-dev.csv", STS + "0\ta\tx\ty\tnan\n", ["sts-dev.csv, line 2", "from 0 to 5", "'nan'"]),
    "quote never closed": (
        "ids-sst-train.csv", SST + '0\ta\tgood\t1\n1\tb\t"bad\t1\n2\tc\tfilm\t2\n',
        ["ids-sst-train.csv, line 3", "a double quote is not closed", "Close the quote"],
    ),
    "quote closed in a later row": (
        "ids-sst-train.csv", SST + '0\ta\tgood\t1\n1\tb\t"bad\t1\n2\tc\tfilm"\t2\n',
        ["ids-sst-train.csv, line 3", "a line break inside a cell", "Close the quote"],
    ),
    "cell missing": ("quora-dev.csv", PARA + "0\ta\tx\t1\n", ["quora-dev.csv, line 2", "expected 5", "Found 4"]),
    "cell too many": ("ids-sst-dev.csv", SST + "0\ta\tx\ty\t1\n", ["line 2", "expected 4", "Found 5"]),
    "text column missing": ("sts-dev.csv", SST + "0\ta\tx\t1\n", ["sts-dev.csv", "no column", "found: id,"]),
    "label column missing": ("ids-sst-dev.csv", "id\tsentence\na\tx\n", ["no labels in split 'dev'"]),
    "column twice": ("ids-sst-dev.csv", "sentence\tsentence\tsentiment\nx\ty\t1\n", ["2 columns named 'sentence'"]),
    "empty file": ("sts-dev.csv", "", ["sts-dev.csv is empty", "a header and rows"]),
    "header alone": ("quora-train.csv", PARA, ["quora-train.csv has a header and no rows"]),
    "nothing but blanks": ("ids-sst-train.csv", SST + "0\ta\t\t1\n1\tb\tx\t\n", ["ids-sst-train.csv has no row left"]),
    "not UTF-8": ("ids-sst-train.csv", SST.encode() + b"0\ta\tcaf\xe9\t1\n", ["line 2", "not UTF-8", "as UTF-8"]),
    "no table": ("ids-sst-train.csv", b"PK\x03\x04\0\0", ["ids-sst-train.csv, line 1", "Is it a text file?"]),
    "file missing": ("quora-dev.csv", None, ["quora-dev.csv does not exist", "quora-train.csv"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_wrong_data(refused, write_recipe_file, write_course_files, tmp_path, name):
    file, content, said = TABLES[name]
    path = write_course_files(tmp_path / "data") / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(["train", str(write_recipe_file()), "data_dir=TMP/data"], *said)


def test_a_blank_label_where_none_may_be(refused, write_recipe_file, write_course_files, tmp_path):
    path = write_course_files(tmp_path / "data") / "quora-train.csv"
    path.write_text(PARA + "0\ta\tx\ty\t1.0\n1\tb\tx\t\t\n2\tc\tx\ty\t\n")
    said = ["quora-train.csv, line 3", "'sentence2' and 'is_duplicate' must not be blank", "rows like it: 2"]
    refused(["train", str(write_recipe_file()), "data_dir=TMP/data", "strict_data=true"], *said)


# ---- The checkpoint, of train and of predict


def config(**changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**saved, **changes}))

    return change


def without_weights(part: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        kept = {key: value for key, value in weights.items() if part not in key}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return change


def without_files(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def with_file(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


# What is wrong, words of the line, and whether it shows only as the weights are loaded.
CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str], bool]] = {
    "no weights": (without_files("model.safetensors"), ["no file named model.safetensors"], True),
    "no config": (without_files("config.json"), ["holds no model", "no config.json"], False),
    "no tokenizer": (without_files("tokenizer.json", "tokenizer_config.json"), ["tokenizer"], False),
    "half a tokenizer": (without_files("tokenizer.json"), ["has no tokenizer", "tokenizer.json"], False),
    "config cut": (with_file("config.json", b'{"model_type"'), ["config.json", "not a valid JSON file"], False),
    "tokenizer cut": (with_file("tokenizer.json", b'{"version"'), ["Loading the tokenizer of"], False),
    "t5": (config(model_type="t5"), ["`model_type` 't5'"], False),
    "garbage for weights": (with_file("model.safetensors", b"garbage" * 99), ["Loading the weights of"], True),
    "weights cut": (cut, ["Loading the weights of"], True),
    "a layer missing": (without_weights("layer.1."), ["lacks 16 of", "bert.encoder.layer.1."], True),
    "a layer too many in the config": (config(num_hidden_layers=3), ["lacks 16 of", "bert.encoder.layer.2."], True),
    "other sizes in the config": (config(intermediate_size=48), ["intermediate.dense.bias", "[64]", "[48]"], True),
    "fewer positions in the config": (
        config(max_position_embeddings=32, max_input_length=None), ["position_embeddings", "[64, 32]"], True,
    ),
    "longer than its positions": (
        config(max_input_length=65), ["`max_input_length` must be a whole number of tokens from", "Found 65"], False,
    ),
    "another tokenizer's model": (config(vocab_size=50), ["86 tokens and its model 50"], False),
    "heads that do not fit": (config(num_attention_heads=3), ["`num_attention_heads`. Found 32 and 3"], True),
    "unknown activation": (config(hidden_act="gelo"), ["'gelo'"], True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("verb", ["train", "predict"])
def test_a_wrong_checkpoint(refused, write_recipe_file, tiny_bert, finished_run, tmp_path, verb, name):
    change, said, loads = CHECKPOINTS[name]
    source = tiny_bert if verb == "train" else finished_run
    shutil.copytree(source, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    change(tmp_path / "model")
    if verb == "train":
        command = ["train", str(write_recipe_file()), "model_name_or_path=TMP/model"]
    else:
        command = ["predict", "TMP/model", "--task", "sst", "--text", "good"]
    refused(command, "TMP/model", *said, "Give the folder" if "lacks" not in said[0] else "", may_load=loads)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_weights("heads.sst"), ["lacks 2 of its weights", "heads.sst", "answer at random"]),
        (config(tasks=None), ["has no tasks: it is a plain encoder", "minbert train"]),
        (config(tasks=[{"name": "sst"}]), ["`tasks`: an entry lacks 'kind'"]),
        (config(active_task="quora"), ["Unknown task 'quora'", "sst, para, sts"]),
    ],
    ids=["head missing", "no tasks", "task cut", "active task unknown"],
)
def test_a_wrong_saved_model(refused, finished_run, tmp_path, change, said):
    shutil.copytree(finished_run, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    change(tmp_path / "model")
    refused(
        ["predict", "TMP/model", "--task", "sst", "--text", "good"], "TMP/model", *said, may_load="lacks" in said[0]
    )


# ---- minbert evaluate, minbert predict, and what is no verb

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "no such verb": (["trane"], ["No such command 'trane'", "Did you mean 'train'?", "minbert --help"]),
    "no such option": (["--quiet"], ["No such option", "--quiet", "minbert --help"]),
    "train what": (["train"], ["Missing argument", "minbert train --help"]),
    # evaluate
    "evaluate what": (["evaluate"], ["Missing argument", "minbert evaluate --help"]),
    "evaluate two": (["evaluate", "RUN", "RUN", "--data-dir", "DATA"], ["unexpected extra argument", "--help"]),
    "evaluate nothing": (["evaluate", "TMP/nowhere", "--data-dir", "DATA"], ["There is no model TMP/nowhere"]),
    "evaluate a recipe": (["evaluate", "TMP/a_file", "--data-dir", "DATA"], ["TMP/a_file is not a folder"]),
    "evaluate a plain BERT": (["evaluate", "PLAIN", "--data-dir", "DATA"], ["PLAIN", "has no tasks", "minbert train"]),
    "evaluate an unknown task": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--task", "stss"], ["Unknown task 'stss'", "Did you mean 'sts'?"],
    ),
    "evaluate on no folder": (
        ["evaluate", "RUN", "--data-dir", "TMP/nowhere"],
        ["`data_dir` does not exist: TMP/nowhere", "Give the folder"],
    ),
    "evaluate on an empty folder": (
        ["evaluate", "RUN", "--data-dir", "TMP/empty"], ["TMP/empty/ids-sst-dev.csv does not exist"],
    ),
    "evaluate without labels": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--split", "test"],
        ["no labels in split 'test'", "ids-sst-test-student.csv", "'sentiment'", "predict"],
    ),
    "evaluate an unknown split": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--split", "deve"], ["split 'deve'", "dev, test, train"],
    ),
    "evaluate into a folder": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--output", "TMP"], ["Cannot write TMP", "it is not a file"],
    ),
    "evaluate into nowhere": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--output", "TMP/a_file/x"], ["Cannot write TMP/a_file/x"],
    ),
    "evaluate by no rows": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--batch-size", "0"], ["Invalid value for '--batch-size'", "1"],
    ),
    "evaluate by some rows": (["evaluate", "RUN", "--data-dir", "DATA", "--batch-size", "some"], ["'--batch-size'"]),
    "evaluate two sources": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--input", "TMP/a_file"],
        ["Give either --data-dir FOLDER, or --input"],
    ),
    "evaluate a file of which task": (
        ["evaluate", "RUN", "--input", "DATA/sts-dev.csv"],
        ["--input holds rows of one task", "--task: sst, para, sts"],
    ),
    "evaluate a file of another task": (
        ["evaluate", "RUN", "--input", "DATA/sts-dev.csv", "--task", "sst"],
        ["no labels in", "sts-dev.csv has no column 'sentiment'"],
    ),
    "evaluate a file without labels": (
        ["evaluate", "RUN", "--input", "DATA/sts-test-student.csv", "--task", "sts"],
        ["sts-test-student.csv", "no column 'similarity'"],
    ),
    "columns of no file": (
        ["evaluate", "RUN", "--data-dir", "DATA", "--columns", "{label: stars}"], ["--columns goes with --input"],
    ),
    "columns that are none": (
        ["evaluate", "RUN", "--input", "DATA/sts-dev.csv", "--task", "sts", "--columns", "stars"],
        ["--columns", "stars"],
    ),
    "column misspelt": (
        ["evaluate", "RUN", "--input", "DATA/sts-dev.csv", "--task", "sts", "--columns", "{lable: similarity}"],
        ["--columns", "'lable'", "Did you mean 'label'?"],
    ),
    # quickstart
    "quickstart with a wrong word": (
        ["quickstart", "learning_rat=1"], ["'learning_rat'", "Did you mean 'learning_rate'?"],
    ),
    "quickstart with a path": (["quickstart", "recipe.yaml"], ["'recipe.yaml' is not `key=value`"]),
    # predict
    "predict with what": (["predict"], ["Missing argument", "minbert predict --help"]),
    "predict what": (["predict", "RUN", "--task", "sst"], ["Give either --input FILE with --output FILE, or --text"]),
    "predict with nothing": (["predict", "TMP/nowhere", "--text", "a"], ["There is no model TMP/nowhere"]),
    "predict with a plain BERT": (["predict", "PLAIN", "--text", "a"], ["PLAIN", "has no tasks", "minbert train"]),
    "predict which task of pairs": (
        ["predict", "RUN", "--text", "a", "--text-pair", "b"], ["several tasks for a pair", "--task: para, sts"],
    ),
    "predict which task of a file": (
        ["predict", "RUN", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/o"],
        ["The model has several tasks.", "--task: sst, para, sts"],
    ),
    "predict an unknown task": (["predict", "RUN", "--task", "quora", "--text", "a"], ["Unknown task 'quora'"]),
    "task left blank": (["predict", "RUN", "--text", "a", "--task"], ["'--task' requires an argument"]),
    "file and sentence": (
        ["predict", "RUN", "--task", "sst", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/o", "--text", "a"],
        ["Give either --input FILE with --output FILE, or --text"],
    ),
    "no output": (["predict", "RUN", "--task", "sst", "--input", "DATA/ids-sst-dev.csv"], ["--input and --output"]),
    "output of a sentence": (["predict", "RUN", "--task", "sst", "--text", "a", "--output", "TMP/o"], ["--input and"]),
    "format of a sentence": (["predict", "RUN", "--task", "sst", "--text", "a", "--format", "course"], ["--format"]),
    "second sentence alone": (["predict", "RUN", "--task", "sts", "--text-pair", "a"], ["--text SENTENCE"]),
    "second sentence of a file": (
        ["predict", "RUN", "--task", "sts", "--input", "x", "--output", "y", "--text-pair", "a"],
        ["--text-pair goes with --text"],
    ),
    "second sentence missing": (["predict", "RUN", "--task", "sts", "--text", "a"], ["'sts' needs --text-pair"]),
    "second sentence too many": (
        ["predict", "RUN", "--task", "sst", "--text", "a", "--text-pair", "b"], ["'sst' takes no --text-pair"],
    ),
    "no input": (
        ["predict", "RUN", "--task", "sst", "--input", "TMP/nowhere.csv", "--output", "TMP/o"],
        ["TMP/nowhere.csv does not exist", "Its folder holds: a_file, empty"],
    ),
    "input is a folder": (
        ["predict", "RUN", "--task", "sst", "--input", "DATA", "--output", "TMP/o"], ["DATA is a folder"],
    ),
    "another task's input": (
        ["predict", "RUN", "--task", "sts", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/o"],
        ["ids-sst-dev.csv has no column 'sentence1'", "Columns found: id, sentence, sentiment"],
    ),
    "output is the input": (
        ["predict", "RUN", "--task", "sst", "--input", "TMP/a_file", "--output", "TMP/empty/../a_file"],
        ["is the input", "Give another file"],
    ),
    "output is a folder": (
        ["predict", "RUN", "--task", "sst", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/empty"],
        ["Cannot write TMP/empty", "it is not a file"],
    ),
    "output is nowhere": (
        ["predict", "RUN", "--task", "sst", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/a_file/o.csv"],
        ["Cannot write TMP/a_file/o.csv"],
    ),
    "several tasks into a file": (
        ["predict", "RUN", "--task", "para", "--task", "sts", "--input", "DATA/sts-dev.csv", "--output", "TMP/a_file"],
        ["TMP/a_file is a file", "give a folder"],
    ),
    "several tasks of other columns": (
        ["predict", "RUN", "--task", "para", "--task", "sst", "--input", "DATA/sts-dev.csv", "--output", "TMP/o"],
        ["the same columns", "'para' sentence1, sentence2 and 'sst' sentence", "Predict each alone"],
    ),
    "unknown dtype": (
        ["predict", "RUN", "--task", "sst", "--text", "a", "--dtype", "bf16"], ["'--dtype'", "'bfloat16'"],
    ),
    "unknown format": (
        ["predict", "RUN", "--task", "sst", "--input", "DATA/ids-sst-dev.csv", "--output", "TMP/o", "--format", "tsv"],
        ["'--format'", "'csv', 'course'", "minbert predict --help"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command(refused, finished_run, tmp_path, name):
    command, said = COMMANDS[name]
    refused(command, *said)
    assert not (tmp_path / "o").exists()
    assert (tmp_path / "a_file").read_text().startswith("not a model")


INPUTS: dict[str, tuple[str | bytes, list[str]]] = {
    "quote never closed": (
        'id,sentence\n1,good\n2,"bad\n3,a\n',
        ["TMP/in.csv, line 3", "a double quote is not closed"],
    ),
    "quote closed later": ('id,sentence\n1,"good\n2,"bad\n', ["TMP/in.csv, line 2", "a double quote"]),
    "comma in a sentence": ("id,sentence\n1,good, very good\n", ["TMP/in.csv, line 2", "Found 3", "double quotes"]),
    "empty": ("", ["TMP/in.csv is empty"]),
    "no header": ("\nid,sentence\n", ["TMP/in.csv, line 1", "Name the columns"]),
    "header alone": ("id,sentence\n", ["TMP/in.csv has a header and no rows"]),
    "sentences alone": ("good\nbad\n", ["TMP/in.csv has no column 'sentence'", "Columns found: good"]),
    "not UTF-8": (b"sentence\ncaf\xe9\n", ["TMP/in.csv, line 2", "not UTF-8"]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_wrong_input(refused, tmp_path, name):
    content, said = INPUTS[name]
    (tmp_path / "in.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(["predict", "RUN", "--task", "sst", "--input", "TMP/in.csv", "--output", "TMP/o"], *said)


def test_the_input_through_a_link_is_the_input(refused, tmp_path):
    (tmp_path / "in.csv").write_text("sentence\ngood\n")
    (tmp_path / "link.csv").symlink_to("in.csv")
    refused(
        ["predict", "RUN", "--task", "sst", "--input", "TMP/in.csv", "--output", "TMP/link.csv"],
        "link.csv is the input", "Give another file",
    )  # fmt: skip
    assert (tmp_path / "in.csv").read_text() == "sentence\ngood\n"


@pytest.mark.parametrize(
    ("tasks", "words", "said"),
    [
        (["para", "sts"], ["--text", "a"], "The model has no task for one sentence. Add --text-pair."),
        (["sst", "cfimdb"], ["--text", "a", "--text-pair", "b"], "no task for a pair. Leave out --text-pair."),
        (["sst", "cfimdb"], ["--text", "a"], "several tasks for one sentence. Name one with --task: sst, cfimdb."),
    ],
)
def test_no_task_or_several_fit_the_sentences(refused, tiny_model, tiny_tokenizer, tmp_path, tasks, words, said):
    tiny_model(tasks).save_pretrained(tmp_path / "own")
    tiny_tokenizer.save_pretrained(tmp_path / "own")
    refused(["predict", "TMP/own", *words], said)


def test_a_task_that_the_course_does_not_have(refused, tiny_model, tiny_tokenizer, tmp_path):
    from hf_minbert import Task

    own = Task("mood", "binary", ("sentence",), "mood", labels=("sad", "glad"))
    tiny_model([own]).save_pretrained(tmp_path / "own")
    tiny_tokenizer.save_pretrained(tmp_path / "own")
    (tmp_path / "in.csv").write_text("sentence\ngood\n")
    words = ["--input", "TMP/in.csv", "--output", "TMP/o", "--format", "course"]
    refused(["predict", "TMP/own", *words], "Unknown task of the course's format 'mood'", "cfimdb, para, sst, sts")
    refused(
        ["evaluate", "TMP/own", "--data-dir", "DATA"],
        "Task 'mood' is not one of the package's",
        "--task mood --input FILE",
    )


# ---- As a program of its own

PROGRAMS = {
    "unknown option": ["train", "recipe.yaml", "--foo"],
    "unknown key": ["train", "TMP/recipe.yaml", "learning_rat=1"],
    "schedule": ["train", "TMP/recipe.yaml", "lr_scheduler_kwargs={foo: 1}"],
    "plain BERT": ["evaluate", "PLAIN", "--data-dir", "DATA"],
}


#: One Python for all, as a start takes seconds; it ends as the last one does.
ONE_AFTER_THE_OTHER = """
import json, sys
from hf_minbert.cli import main
*others, last = json.loads(sys.argv[1])
for words in others:
    try:
        main(words)
    except SystemExit as exit:
        print(f"=== {exit.code}", file=sys.stderr)
main(last)
"""


def test_a_program_ends_so_too(place, write_recipe_file):
    write_recipe_file()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = json.dumps([list(map(place, words)) for words in PROGRAMS.values()])
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == ""
    parts = re.split(r"^=== (\d+)\n", done.stderr, flags=re.MULTILINE)
    said, statuses = parts[::2], [*map(int, parts[1::2]), done.returncode]
    assert len(said) == len(PROGRAMS), done.stderr
    for status, err in zip(statuses, said, strict=True):
        assert_one_line(status, err)


def test_the_traceback_can_be_had(monkeypatch, write_recipe_file):
    from hf_minbert import MinBertError
    from hf_minbert.cli import main

    monkeypatch.setenv("MINBERT_TRACEBACK", "1")
    with pytest.raises(MinBertError, match="Unknown key 'learning_rat'"):
        main(["train", str(write_recipe_file()), "learning_rat=1"])
