"""A model that is none of ours: whatever is a `TaskModel` of `training.protocol` is trained, resumed and scored."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_minbert
from hf_minbert import MinBertError, get_tasks

TASKS = ["sst", "sts"]
ROWS = {"sst": 12, "sts": 8}


class GruConfig(PreTrainedConfig):
    model_type = "test-gru"
    active_task: str | None = None
    pad_token_id: int | None = 0
    max_position_embeddings: int = 64
    tasks: list | None = None


class GruHead(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.kind, outputs = task["kind"], len(task["labels"] or ["score"])
        self.dropout, self.linear = nn.Dropout(0.1), nn.Linear(16, outputs)

    def forward(self, states):
        return self.linear(self.dropout(states))

    def loss(self, logits, labels):
        return F.mse_loss(logits[:, 0], labels) if self.kind == "score" else F.cross_entropy(logits, labels)

    def divergence(self, logits, other, name=None):
        if self.kind == "score":
            return (logits - other).square().sum(dim=-1)
        p, q = logits.log_softmax(dim=-1), other.log_softmax(dim=-1)
        return ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)


class GruHeads(nn.ModuleDict):
    def get(self, task):
        return self[task]


class GruEncoder(nn.Module):
    """An embedding and two GRUs, each a layer."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(100, 16)
        self.grus = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(2))

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, states):
        for gru in self.grus:
            states = states + gru(states)[0]
        return states


class GruModel(PreTrainedModel):
    config_class = GruConfig

    def __init__(self, config):
        super().__init__(config)
        self.gru = GruEncoder()
        self.heads = GruHeads({task["name"]: GruHead(task) for task in config.tasks})
        self.post_init()

    def encoder_path(self, task):
        return [self.gru, *self.gru.grus]

    def forward(self, task, input_ids=None, attention_mask=None, token_type_ids=None, labels=None, inputs_embeds=None):
        states = self.gru(self.gru.embeddings(input_ids) if inputs_embeds is None else inputs_embeds)
        weights = attention_mask[..., None] / attention_mask.sum(dim=1)[:, None, None]
        head = self.heads.get(task)
        logits = head((states * weights).sum(dim=1))
        return SequenceClassifierOutput(None if labels is None else head.loss(logits, labels), logits)


class BareModel(nn.Module):
    """The least there can be: an embedding bag, of which SMART and layers cannot be asked. It returns a plain dict."""

    def __init__(self, config):
        super().__init__()
        self.config, self.bag = config, nn.Module()
        self.bag.embeddings = nn.Embedding(100, 16)
        self.heads = GruHeads({task["name"]: GruHead(task) for task in config.tasks})

    def encoder_path(self, task):
        return [self.bag]

    def forward(self, task, input_ids, attention_mask, token_type_ids, labels=None):
        words = self.bag.embeddings(input_ids) * attention_mask[..., None]
        head = self.heads.get(task)
        logits = head(words.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True))
        answer = {"logits": logits}
        return answer if labels is None else {"loss": head.loss(logits, labels), **answer}


@pytest.fixture
def make_model():
    def make(kind=GruModel):
        torch.manual_seed(0)
        return kind(GruConfig(tasks=[task.to_config() for task in get_tasks(TASKS)]))

    return make


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(trainer):
    before = weights_of(trainer.model)
    trainer.train()
    return {name for name, value in weights_of(trainer.model).items() if not torch.equal(value, before[name])}


SETTINGS = {
    "sum": {},
    "pcgrad": {"aggregator": "pcgrad", "gradient_smoothing": 0.5, "conflict_detail": "tensors"},
    "smart": {"regularizer": "smart", "proximal": "momentum"},
    "mt-dnn": {"regularizer": "smart", "smart_form": "mt-dnn"},
    "fgm": {"regularizer": "fgm"},
    "r_drop": {"regularizer": "r_drop", "proximal": "previous", "proximal_steps": 2},
    "rates": {"learning_rates": {"encoder": 1e-2, "heads": 1e-1}, "layer_decay": 0.5},
    "decay": {"pretrained_decay": 0.1, "weight_decays": {"heads": 0.1}, "gradient_accumulation_steps": 2},
    "frozen": {"freeze": "encoder"},
    "in part": {"freeze": 1},
    "gradual": {"freeze": "encoder", "unfreeze": "gradual", "train_metrics": "running"},
}
BARE = ("sum", "pcgrad", "r_drop", "decay", "frozen")
CASES = [*((GruModel, name) for name in SETTINGS), *((BareModel, name) for name in BARE)]


@pytest.mark.parametrize(("kind", "setting"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_foreign_model_trains_and_resumes_bit_for_bit(build_trainer, make_model, tmp_path, kind, setting):
    given = {
        "train": ROWS,
        "dev": ROWS,
        "max_steps": 4,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = build_trainer(tmp_path / "whole", make_model(kind), **given, **SETTINGS[setting])
    assert moved(whole)
    assert all(value.isfinite().all() for value in weights_of(whole.model).values())
    cut = build_trainer(tmp_path / "whole", make_model(kind), **given, **SETTINGS[setting])
    cut.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert cut.state.global_step == 4
    for name, value in weights_of(cut.model).items():
        assert torch.equal(value, whole.model.get_parameter(name)), name
    assert all(torch.isfinite(torch.tensor(value)) for value in whole.evaluate().values())
    whole.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in whole.model.state_dict().items())


def test_a_step_is_that_of_a_loop_by_hand(make_trainer, make_model):
    trainer = make_trainer(make_model(), train=ROWS, max_steps=1)
    for head in trainer.model.heads.values():
        head.dropout.p = 0.0
    other = copy.deepcopy(trainer.model)
    rounds = next(iter(trainer.get_train_dataloader()))
    sum(other(**batch).loss for batch in rounds.values()).backward()
    trainer.train()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(trainer.model.get_parameter(name), parameter - 1e-3 * parameter.grad)


@pytest.mark.parametrize(
    ("frozen", "still"),
    [
        ("embeddings", ["gru.embeddings."]),
        (1, ["gru.embeddings.", "gru.grus.0."]),
        (2, ["gru."]),
        ("encoder", ["gru."]),
    ],
)
def test_what_is_frozen_goes_by_the_path(make_trainer, make_model, frozen, still):
    names = moved(make_trainer(make_model(), train=ROWS, freeze=frozen, optim="adamw_torch", learning_rate=0.1))
    assert names == {name for name, _ in make_model().named_parameters() if not name.startswith(tuple(still))}


def test_rates_go_by_heads_and_layers(make_trainer, make_model):
    rates = {"learning_rates": {"encoder": 1e-2, "heads": 1e-1, "sts": 1.0}, "layer_decay": 0.5}
    trainer = make_trainer(make_model(), train=ROWS, optim="adamw_torch", **rates)
    trainer.train()
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found = {names[p]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    expected = {"gru.embeddings": 2.5e-3, "gru.grus.0": 5e-3, "gru.grus.1": 1e-2, "heads.sst": 1e-1, "heads.sts": 1.0}
    for start, rate in expected.items():
        assert {found[name] for name in found if name.startswith(start + ".")} == {rate}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (
            GruModel,
            {"packing": True},
            "`packing: true` needs a model whose `forward` takes `packing`.* Found a GruModel",
        ),
        (
            BareModel,
            {"regularizer": "smart"},
            "`regularizer: smart` needs .* takes `inputs_embeds`.*Leave `regularizer`",
        ),
        (BareModel, {"regularizer": "fgm"}, "`regularizer: fgm` needs a model whose `forward` takes `inputs_embeds`"),
        (BareModel, {"freeze": 1}, "`freeze` is 1 layers, and the model has 0. Give embeddings or encoder"),
        (GruModel, {"compile_layers": True}, "`compile_layers: true` needs a model with layers"),
    ],
)
def test_what_a_setting_lacks_is_said_in_one_line(make_trainer, make_model, kind, given, says):
    with pytest.raises(MinBertError, match=says) as error:
        make_trainer(make_model(kind), train=ROWS, **given)
    assert "\n" not in str(error.value)


class Closed(GruModel):
    """One that passes on what it is given, and shows no parameter by its name."""

    def forward(self, task, **inputs):
        return super().forward(task, **inputs)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    @property
    def heads(self):
        return self.inner.heads

    def encoder_path(self, task):
        return self.inner.encoder_path(task)

    def forward(self, **inputs):
        return self.inner(**inputs)


@pytest.mark.parametrize("setting", ["sum", "smart", "fgm"])
@pytest.mark.parametrize(
    "wrapped", [lambda make: make(Closed), lambda make: Wrapper(make())], ids=["closed", "wrapper"]
)
def test_what_passes_through_counts_as_taken(build_trainer, make_model, tmp_path, wrapped, setting):
    plain, other = make_model(), wrapped(make_model)
    for name, model in (("plain", plain), ("other", other)):
        build_trainer(tmp_path / name, model, train=ROWS, dev=ROWS, max_steps=1, **SETTINGS[setting]).train()
    found = {name.removeprefix("inner."): value for name, value in weights_of(other).items()}
    for name, value in weights_of(plain).items():
        assert torch.equal(found[name], value), name


class TupleModel(GruModel):
    def forward(self, task, **inputs):
        return super().forward(task, **inputs).to_tuple()


@pytest.mark.parametrize("setting", ["sum", "smart", "r_drop", "frozen"])
def test_outputs_without_names_are_refused_in_one_line(make_trainer, make_model, setting):
    with pytest.raises(MinBertError, match="`forward` must return a dict.* Found a tuple of a TupleModel") as error:
        make_trainer(make_model(TupleModel), train=ROWS, **SETTINGS[setting]).train()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (BareModel, {"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` needs encoders with `get_input_embeddings`"),
        *(
            (kind, {"gradient_checkpointing": True}, "`gradient_checkpointing: true` needs a `PreTrainedModel` with")
            for kind in (GruModel, BareModel)
        ),
    ],
)
def test_what_the_stock_trainer_lacks_is_said_in_one_line(make_trainer, make_model, kind, given, says):
    with pytest.raises(MinBertError, match=f"{says}.*Found a {kind.__name__}. Leave it out") as error:
        make_trainer(make_model(kind), train=ROWS, **given)
    assert "\n" not in str(error.value)


def test_noise_on_the_embeddings_of_a_foreign_model(make_trainer, make_model):
    losses = []
    for alpha in (None, 5.0):
        trainer = make_trainer(make_model(), train=ROWS, neftune_noise_alpha=alpha)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("regularizer", ["smart", "fgm"])
def test_an_adapter_on_the_embeddings(make_trainer, make_model, regularizer):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["embeddings"]))
    names = moved(make_trainer(model, train=ROWS, regularizer=regularizer, optim="adamw_torch"))
    assert names and all("lora_embedding" in name for name in names)


@pytest.mark.parametrize("path", [None, lambda task: None, lambda task: [], lambda task: [nn.Linear(2, 2)], 3])
def test_an_encoder_path_that_is_none_is_refused(make_trainer, make_model, path):
    model = make_model()
    model.encoder_path = path
    with pytest.raises(MinBertError, match="`encoder_path.*protocol") as error:
        make_trainer(model, train=ROWS)
    assert "\n" not in str(error.value)


def test_an_encoder_path_need_not_be_a_method(make_trainer, make_model):
    model = make_model()
    bound = model.encoder_path
    model.encoder_path = lambda task: bound(task)
    assert moved(make_trainer(model, train=ROWS, regularizer="smart"))


@pytest.mark.parametrize("missing", ["encoder_path", "heads"])
def test_a_model_that_is_no_task_model_is_refused(make_trainer, make_model, missing):
    class Lacking(GruModel):
        def __getattribute__(self, name):
            if name == missing:
                raise AttributeError(name)
            return super().__getattribute__(name)

    model = make_model(Lacking) if missing == "encoder_path" else make_model()
    if missing == "heads":
        del model.heads
    with pytest.raises(MinBertError, match=f"The model lacks `{missing}`. Found a .*protocol"):
        make_trainer(model, train=ROWS)


def test_a_frozen_foreign_encoder_has_nothing_to_train_for_a_frozen_head(make_trainer, make_model):
    model = make_model()
    model.heads.get("sts").requires_grad_(False)
    with pytest.raises(MinBertError, match="Task 'sts' has nothing to train"):
        make_trainer(model, train=ROWS, freeze="encoder").train()


def test_r_drop_warns_of_a_foreign_model_without_dropout(make_trainer, make_model, caplog):
    model = make_model()
    model.heads.get("sts").dropout.p = 0.0
    make_trainer(model, train=ROWS, regularizer="r_drop")
    assert [message.split(":")[1] for message in caplog.messages if "r_drop" in message] == [
        " r_drop` of 'sts' is zero"
    ]


def test_training_knows_no_class_of_ours():
    """Nothing below `training/` imports a model, its heads or its config."""
    for file in Path(hf_minbert.__file__).parent.joinpath("training").rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        for module in ("modeling_minbert", "heads", "configuration_minbert", "pooling"):
            assert not re.search(rf"from \.+(model\.)?{module} import", code), file
        for member in (".bert", ".encoder.", "encoder_of", "num_hidden_layers", "hidden_size", ".pooler"):
            assert member not in code.replace('"""', ""), (file, member)
