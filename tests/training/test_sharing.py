"""Tasks that share rows: one draw, one tokenization, one forward pass, and each task's own gradient."""

from __future__ import annotations

import pytest
import torch

from hf_minbert import MultiTaskTrainer, Task
from hf_minbert.data import encoding

INTENTS = ("ask", "tell", "buy")
TASKS = [
    Task("intent", "classes", ("text",), label_column="intent", labels=INTENTS),
    Task("urgency", "binary", ("text",), label_column="urgency", labels=("no", "yes")),
    Task("mood", "score", ("text",), label_column="mood", range=(0.0, 4.0), layers="mix", pooling="mean"),
]
NAMES = [task.name for task in TASKS]


def rows(count: int = 12, **missing) -> list[dict]:
    """Texts of several lengths. `urgency=lambda i: i % 3` leaves out the label where that is 0."""
    made = []
    for i in range(count):
        row = {"text": f"{'a film ' * (1 + i % 4)}{i}", "intent": i % 3, "urgency": i % 2, "mood": i % 5}
        made.append({**row, **{name: None for name, of in missing.items() if not of(i)}})
    return made


@pytest.fixture
def shared(make_trainer, tiny_model):
    """`shared(train=None, tasks=NAMES, model=None, **arguments)`: a trainer on rows of all tasks."""

    def make(train=None, tasks=NAMES, model=None, **arguments):
        train = rows() if train is None else train
        own = dict.fromkeys(tasks, train) if isinstance(train, list) else train
        model = tiny_model(TASKS) if model is None else model
        return make_trainer(model, train=own, train_tasks=list(own), **{"share_rows": True, **arguments})

    return make


def first_batches(trainer: MultiTaskTrainer) -> dict:
    return next(iter(trainer.get_train_dataloader()))


def separate(trainer: MultiTaskTrainer, batches: dict) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of each task's own pass over its labelled rows, by the names of parameters."""
    (batch,) = batches.values()
    found = {}
    for task, answer in batch["answers"].items():
        keep = answer.get("rows", slice(None))
        inputs = {name: batch[name][keep] for name in ("input_ids", "attention_mask", "token_type_ids")}
        loss = trainer.model(**inputs, task=task, labels=answer["labels"]).loss
        names, parameters = zip(*trainer.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found[task] = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    return found


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


# ---- one pass


WHERE = [
    {},
    {"packing": True},
    {"gradient_checkpointing": True},
    {"task_weights": {"intent": 2.0, "mood": 0.5}},
]


@pytest.mark.parametrize("missing", [{}, {"urgency": lambda i: i % 3, "mood": lambda i: i > 8}])
@pytest.mark.parametrize("options", WHERE, ids=lambda options: "".join(options) or "plain")
def test_the_summed_gradient_is_that_of_separate_passes(shared, options, missing):
    trainer = shared(rows(**missing), per_device_train_batch_size=12, **options)
    batches = first_batches(trainer)
    weights = options.get("task_weights", {})
    expected: dict[str, torch.Tensor] = {}
    for task, gradients in separate(trainer, batches).items():
        for name, gradient in gradients.items():
            expected[name] = expected.get(name, 0) + weights.get(task, 1.0) * gradient
    trainer.training_step(trainer.model, batches)
    assert_near({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("options", WHERE[:3], ids=lambda options: "".join(options) or "plain")
def test_each_tasks_row_is_the_gradient_of_its_own_pass(shared, options):
    trainer = shared(rows(urgency=lambda i: i % 3), aggregator="pcgrad", per_device_train_batch_size=12, **options)
    batches = first_batches(trainer)
    expected = separate(trainer, batches)
    trainer.training_step(trainer.model, batches)
    names = [name for name, _ in trainer.model.named_parameters()]
    assert list(trainer.step.gradients.rows) == NAMES
    for task, row in trainer.step.gradients.rows.items():
        assert_near({names[i]: gradient for i, gradient in row.items()}, expected[task])


def test_a_step_has_one_pass_and_rows_are_tokenized_once(shared, monkeypatch):
    texts, passes = [], []
    tokenize = encoding.tokenize
    monkeypatch.setattr(
        encoding, "tokenize", lambda t, columns, n=None: texts.extend(columns[0]) or tokenize(t, columns, n)
    )
    for wanted in (True, False):
        texts.clear(), passes.clear()
        trainer = shared(share_rows=wanted)
        trainer.model.bert.register_forward_hook(lambda *_: passes.append(1))
        trainer.train()
        assert len(passes) == (2 if wanted else 6)
        assert len(texts) == (12 if wanted else 36)
