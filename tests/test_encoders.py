"""The README's table of encoders: each cell trains two steps, saves, and answers the same without this package."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from hf_minbert import MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, get_tasks
from hf_minbert.model.families import FAMILIES
from hf_minbert.pretrained.adapted import merged
from hf_minbert.pretrained.adapters import add_adapter
from hf_minbert.training.freezing import levels_of

pytestmark = pytest.mark.slow
SIZES = {"vocab_size": 60, "max_position_embeddings": 40, "initializer_range": 0.2}
BERTS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
OWN = {
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48},
    "electra": {**BERTS, "embedding_size": 16},
}
#: One of each kind: the others of the table have another name and the same computation.
KINDS = [*{repr((f.fixed, f.counted, f.settings)): name for name, f in reversed(FAMILIES.items())}.values()]
#: Training arguments of each cell; `mix`, `private layers` and `LoRA` are of the model.
CELLS = {
    "plain": {},
    "packing": {"packing": True},
    "mix": {},
    "private layers": {},
    "private encoders": {},
    "freezing": {"freeze": 2},
    "unfreezing": {"freeze": "encoder", "unfreeze": {1: 1}},
    "layer decay": {"layer_decay": 0.5},
    "LoRA": {},
    "SMART": {"regularizer": "smart", "packing": True},
    "FGM": {"regularizer": "fgm"},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "pcgrad": {"aggregator": "pcgrad"},
}
CHILD = """
import sys
for name in ("hf_minbert", "accelerate", "datasets", "evaluate", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None  # importing it is an error from here on
import json, torch
from transformers import AutoModelForSequenceClassification
found, kind = {}, None
for folder in json.loads(sys.stdin.read()):
    if kind is None:  # the code is the same in all, and its import takes longer than a test
        kind = type(AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True))
        assert kind.__module__.startswith("transformers_modules.")
    model = kind.from_pretrained(folder)
    given = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        found[folder] = {task: model(task=task, **inputs).logits.tolist() for task, inputs in given.items()}
print(json.dumps(found))
"""


def rows(tasks, pad):
    """Six rows a task, encoded, of three lengths."""
    draw = torch.Generator().manual_seed(0)

    def text(length):
        return torch.randint(5, 60, (length,), generator=draw).tolist()

    made = {}
    for task in tasks:
        lengths = (3, 9, 5, 4, 7, 6)
        ids = [[text(n), text(n + 1)] if task.pair_encoding == "bi" else text(n) for n in lengths]
        labels = [0.0, 5.0, 2.5, 1.0, 4.0, 3.0] if task.kind == "score" else [0, 1, 0, 1, 1, 0]
        made[task.name] = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    return made


def trained(folder, family, cell):
    """A model after two steps of a cell, the model before, and what it trained on."""
    torch.manual_seed(0)
    AutoModel.from_config(CONFIG_MAPPING[family](**SIZES, **OWN.get(family, BERTS))).save_pretrained(folder)
    layers = "mix" if cell == "mix" else "last"
    sts = replace(get_tasks(["sts"])[0], pair_encoding="bi", join="concat", pooling="mean", layers=layers)
    tasks = [replace(get_tasks(["sst"])[0], layers=layers, pooling="mean"), sts]
    sharing = {"private_layers": 1} if cell == "private layers" else {"private_encoders": cell == "private encoders"}
    model = MinBertForMultiTask.from_pretrained(folder, tasks=tasks, **sharing)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    levels_by = levels_of(model)
    levels = {name: levels_by[p] for name, p in model.named_parameters()}
    if cell == "LoRA":
        options = {"r": 2, "init_lora_weights": False}
        model = add_adapter(model, options, str(folder), heads=[task.name for task in tasks])
    args = MultiTaskTrainingArguments(
        str(folder / "run"), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-2, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, **CELLS[cell],
    )  # fmt: skip
    trainer = MultiTaskTrainer(model, args, train_dataset=rows(tasks, model.config.pad_token_id))
    trainer.train()
    model = merged(model) if cell == "LoRA" else model
    return model.eval(), before, levels


def inputs_of(model):
    """A padded batch for each task."""
    draw, pad = torch.Generator().manual_seed(1), model.config.pad_token_id
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    made = {}
    for name in model.config.task_names:
        bi = model.config.get_task(name)["pair_encoding"] == "bi"
        here = torch.stack([mask, mask.flip(0)], 1) if bi else mask
        ids = torch.randint(5, 60, here.shape, generator=draw)
        made[name] = {"input_ids": ids * here + pad * (1 - here), "attention_mask": here}
    return made


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """By family and cell: the folder, the answers of its model, its weights before and after, and their levels."""
    found = {}
    for family in KINDS:
        for cell in CELLS:
            folder = tmp_path_factory.mktemp(f"{family}-{cell.replace(' ', '-')}")
            model, before, levels = trained(folder, family, cell)
            inputs = inputs_of(model)
            with torch.no_grad():
                answers = {task: model(task=task, **given).logits for task, given in inputs.items()}
            model.save_pretrained(folder / "saved")
            torch.save(inputs, folder / "saved" / "inputs.pt")
            found[family, cell] = (folder / "saved", answers, before, model.state_dict(), levels)
    return found


@pytest.fixture(scope="module")
def without(cells, tmp_path_factory):
    """What a process without the package answers, by folder."""
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([str(folder) for folder, *_ in cells.values()]), cwd=home,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONPATH": ""}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", KINDS)
def test_each_cell_trains_and_answers_the_same_without_the_package(cells, without, family, cell):
    folder, answers, before, after, levels = cells[family, cell]
    for task, answer in answers.items():
        assert torch.isfinite(answer).all()
        torch.testing.assert_close(torch.tensor(without[str(folder)][task]), answer, rtol=0, atol=1e-5)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("heads.sst") for name in moved) and any(name.startswith("heads.sts") for name in moved)
    trained_layers = {levels[name] for name in moved if 0 < levels.get(name, 0) <= 3}
    assert trained_layers == ({3} if cell == "freezing" else {2, 3} if cell == "unfreezing" else {1, 2, 3})
    if cell == "LoRA":  # of the encoder nothing but the matrices that were named
        encoder = {name for name in moved if name.startswith("bert.")}
        assert encoder and all(".query." in name or ".value." in name for name in encoder)


@pytest.mark.parametrize("family", KINDS)
def test_what_is_private_differs_after_training(cells, family):
    for cell, prefix in (("private layers", "bert.encoder.private.sts.2."), ("private encoders", "private.sts.")):
        after = cells[family, cell][3]
        own = {name: value for name, value in after.items() if name.startswith(prefix)}
        twin = "bert.encoder.layer.2." if cell == "private layers" else "bert."
        assert own and any(not torch.equal(value, after[twin + name[len(prefix) :]]) for name, value in own.items())
