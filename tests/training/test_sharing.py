"""Tasks that share rows: one draw, one tokenization, one forward pass, and each task's own gradient."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from hf_minbert import MultiTaskTrainer, MultiTaskTrainingArguments, Task, get_tasks
from hf_minbert.data import encoding
from hf_minbert.errors import MinBertError
from hf_minbert.training.terms.base import NoiseKey

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
        row = {"text": f"{'a film ' * (1 + i % 4)}{i}", "intent": i % 3, "urgency": i % 2, "mood": i / 8}
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


def test_the_pass_is_computed_in_the_precision_of_the_run(shared):
    trainer, found = shared(rows(), bf16=True, max_steps=1), set()
    layer = trainer.model.bert.encoder.layer[0].output.dense
    layer.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    trainer.train()
    assert found == {torch.bfloat16}


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


@pytest.mark.parametrize("missing", [False, True])
def test_every_kind_of_task_shares_a_pass(shared, tiny_model, missing):
    """Words and sentences too: their inputs are the same, where words are separated by spaces."""
    tasks = [
        *TASKS,
        Task("level", "ordinal", ("text",), label_column="level", labels=("low", "middle", "high")),
        Task("topics", "labels", ("text",), label_column="topics", labels=("a", "b", "c")),
        Task("parts", "tags", ("text",), label_column="parts", labels=("O", "X")),
    ]
    train = rows(9, mood=lambda i: i % 4) if missing else rows(9)
    for i, row in enumerate(train):
        row |= {
            "level": i % 3,
            "topics": [0.0, 1.0, float(i % 2)],
            "parts": [k % 2 for k in range(len(row["text"].split()))],
        }
        if missing and i % 3 == 0:
            row |= {"topics": None, "parts": None}
    names = [task.name for task in tasks]
    trainer = shared(train, tasks=names, model=tiny_model(tasks), aggregator="pcgrad", per_device_train_batch_size=9)
    assert trainer.sharing == [names]
    batches = first_batches(trainer)
    assert len(batches["intent"]["answers"]["parts"]["labels"]) == (6 if missing else 9)
    expected = separate(trainer, batches)
    trainer.training_step(trainer.model, batches)
    parameters = [name for name, _ in trainer.model.named_parameters()]
    for task, row in trainer.step.gradients.rows.items():
        assert_near({parameters[i]: gradient for i, gradient in row.items()}, expected[task])


def test_an_adapter_is_part_of_the_pass(shared, tiny_model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    lora = peft.LoraConfig(**settings, init_lora_weights=False)
    trainer = shared(model=peft.get_peft_model(tiny_model(TASKS), lora), per_device_train_batch_size=12)
    batches = first_batches(trainer)
    expected: dict[str, torch.Tensor] = {}
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    (batch,) = batches.values()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    losses = [trainer.model(**inputs, task=t, labels=a["labels"]).loss for t, a in batch["answers"].items()]
    gradients = torch.autograd.grad(sum(losses), list(trained.values()), allow_unused=True)
    expected = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    trainer.training_step(trainer.model, batches)
    assert any("lora_" in name for name in expected)
    assert_near({name: p.grad for name, p in trained.items() if p.grad is not None}, expected)


def test_rows_are_kept_encoded_without_their_labels(counted, tiny_model, tiny_tokenizer, tmp_path):
    """Other labels of the same texts find the encoded rows of an earlier run."""
    texts = Dataset.from_list(rows())  # whose columns of labels are called as the tasks
    given = {"intent": texts, "urgency": texts.select_columns(["text", "urgency"])}
    args = MultiTaskTrainingArguments(str(tmp_path / "run"), use_cpu=True, share_rows=True, train_tasks=[*given])
    for _ in range(2):
        trainer = MultiTaskTrainer(
            tiny_model(TASKS), args, train_dataset=given, processing_class=tiny_tokenizer,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        assert len(counted) == 12
        assert trainer.train_dataset["urgency"].labels.tolist() == [i % 2 for i in range(12)]


@pytest.fixture
def counted(monkeypatch):
    """Texts that were tokenized."""
    texts, tokenize = [], encoding.tokenize

    def count(tokenizer, columns, max_length=None):
        texts.extend(columns[0])
        return tokenize(tokenizer, columns, max_length)

    monkeypatch.setattr(encoding, "tokenize", count)
    return texts


@pytest.mark.parametrize(("share", "passes", "texts"), [(True, 2, 12), (False, 6, 36)])
def test_a_step_has_one_pass_and_rows_are_tokenized_once(shared, counted, share, passes, texts):
    seen = []
    trainer = shared(share_rows=share)
    trainer.model.bert.register_forward_hook(lambda *_: seen.append(1))
    trainer.train()
    assert (len(seen), len(counted)) == (passes, texts)


def test_all_tasks_of_a_group_have_one_dropout_mask_and_one_noise(shared, tiny_model):
    """Two tasks with the same head and labels have the same loss in each step, which passes of their own have not."""
    twins = [TASKS[0], replace(TASKS[0], name="other")]
    model = tiny_model(twins, hidden_dropout_prob=0.2, classifier_dropout=0.0)
    model.heads.other.load_state_dict(model.heads.intent.state_dict())
    for share in (True, False):
        trainer = shared(
            tasks=["intent", "other"],
            model=copy.deepcopy(model),
            share_rows=share,
            neftune_noise_alpha=5.0,
            max_steps=1,
        )
        trainer.train()
        losses = [trainer.state.log_history[0][f"loss_{name}"] for name in ("intent", "other")]
        assert (losses[0] == losses[1]) == share


def test_a_task_that_reads_other_rows_keeps_its_own_pass(shared, tiny_model):
    tasks = [*TASKS[:2], *get_tasks(["sst"])]
    train = {"intent": rows(), "sst": [{"sentence": f"good {i}", "label": i % 5} for i in range(9)], "urgency": rows()}
    trainer = shared(train, model=tiny_model(tasks))
    assert trainer.sharing == [["intent", "urgency"]]
    batches = first_batches(trainer)
    assert list(batches) == ["intent", "sst"] and "labels" in batches["sst"]
    assert list(batches["intent"]["answers"]) == ["intent", "urgency"]
    trainer.train()
    assert {"loss_intent", "loss_urgency", "loss_sst"} <= trainer.state.log_history[0].keys()


# ---- rows that lack labels


def test_a_row_counts_for_the_tasks_that_label_it(shared):
    trainer = shared(rows(12, urgency=lambda i: i >= 8), per_device_train_batch_size=12)
    (batch,) = first_batches(trainer).values()
    answers = batch["answers"]
    assert len(answers["intent"]["labels"]) == 12 and "rows" not in answers["intent"]
    numbers = (8 * answers["mood"]["labels"][answers["urgency"]["rows"]]).long()  # a row's mood tells which it is
    assert sorted(numbers.tolist()) == [8, 9, 10, 11]
    assert torch.equal(answers["urgency"]["labels"], numbers % 2)


def test_a_batch_without_a_labelled_row_has_no_loss_of_the_task(shared):
    """One row a round: urgency is in the rounds of its labelled rows alone, in rows of gradients as in sums."""
    for aggregator in ("sum", "pcgrad"):
        train = rows(6, urgency=lambda i: i % 2)
        trainer = shared(train, per_device_train_batch_size=1, max_steps=6, aggregator=aggregator)
        rounds = [{*batch["answers"]} for one in trainer.get_train_dataloader() for batch in one.values()]
        assert [len(tasks) for tasks in rounds].count(2) == 3 and [len(tasks) for tasks in rounds].count(3) == 3
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [("loss_urgency" in entry) for entry in logged] == [("urgency" in tasks) for tasks in rounds]
        for entry in logged:
            assert entry["loss"] == pytest.approx(sum(value for name, value in entry.items() if name[:5] == "loss_"))


def test_a_row_without_any_label_is_left_out(shared):
    trainer = shared(rows(12, intent=lambda i: i > 2, urgency=lambda i: i > 2, mood=lambda i: i > 4))
    assert [len(of) for of in trainer.train_dataset.values()] == [9, 9, 9]
    labelled = [of.labelled for of in trainer.train_dataset.values()]
    assert labelled[:2] == [None, None] and labelled[2].tolist() == [False] * 2 + [True] * 7


def test_accumulated_rounds_are_the_rounds_means(shared):
    """Two rounds of a window: a task's gradient is half the sum of those of its batches."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = shared(rows(8, urgency=lambda i: i % 3), **given)
    expected: dict[str, torch.Tensor] = {}
    for batches in trainer.get_train_dataloader():
        for gradients in separate(trainer, batches).values():
            for name, gradient in gradients.items():
                expected[name] = expected.get(name, 0) + gradient / 2
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name: (before[name] - p.detach()) / 1e-3 for name, p in trainer.model.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-3, atol=1e-3)


def test_numbers_are_counted_from_labelled_rows(shared, tiny_model):
    tasks = [replace(TASKS[0], loss_options={"class_weights": "auto"}), TASKS[1]]
    train = rows(12, intent=lambda i: i % 3 == 0 or i > 5)  # ask 4, tell 2, buy 2
    trainer = shared(train, tasks=["intent", "urgency"], model=tiny_model(tasks))
    assert trainer.tasks["intent"].loss_options["class_weights"] == pytest.approx([0.6, 1.2, 1.2])


# ---- beside the rest


def test_teachers_answer_for_labelled_rows(shared, make_trainer, tiny_model):
    """The loss is that of a pass over the labelled rows, with their teacher's outputs."""
    train = rows(6, urgency=lambda i: i % 3)
    outputs = {"intent": 3, "urgency": 1}
    teacher = {name: torch.randn(6, size).numpy() for name, size in outputs.items()}
    trainer = shared(
        train, tasks=[*outputs], teachers=["any"], teacher_logits=teacher, per_device_train_batch_size=6, max_steps=1
    )
    (batch,) = first_batches(trainer).values()
    expected = {}
    with torch.no_grad():
        for name, answer in batch["answers"].items():
            keep = answer.get("rows", slice(None))
            inputs = {key: batch[key][keep] for key in ("input_ids", "attention_mask", "token_type_ids")}
            own = {**inputs, "task": name, "labels": answer["labels"], "teacher": answer["teacher"]}
            expected[f"loss_{name}"] = trainer.task_loss(trainer.model, own, NoiseKey(0, 0, 0))["loss"].item()
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(shared, tiny_model, tmp_path, step):
    """Within an epoch and within the next one, with dropout, accumulation and rows that lack labels."""
    given = {
        "save_strategy": "steps", "save_steps": 1, "max_steps": 4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "optim": "adamw_torch", "aggregator": "pcgrad",
    }  # fmt: skip
    ends = []
    for resume in (None, str(tmp_path / "run" / f"checkpoint-{step}")):
        model = tiny_model(TASKS, hidden_dropout_prob=0.1, seed=0 if resume is None else 9)
        trainer = shared(rows(10, mood=lambda i: i % 4), model=model, **given)
        trainer.train(resume_from_checkpoint=resume)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_worker_processes_and_a_frozen_encoder_change_nothing(shared):
    """A frozen encoder without dropout reads each row once: the rounds are the same, and so are the heads."""
    ends = []
    for options in ({}, {"dataloader_num_workers": 2}, {"hold": True}):
        trainer = shared(
            rows(12, urgency=lambda i: i % 3), freeze="encoder", max_steps=4,
            **{name: value for name, value in options.items() if name != "hold"},
        )  # fmt: skip
        if "hold" in options:
            trainer._rows_of_steps = lambda rows: rows
        trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.heads.parameters()]))
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scored", ["full", "running"])
def test_training_scores_are_of_labelled_rows(shared, scored):
    trainer = shared(rows(8, urgency=lambda i: i < 3), train_metrics=scored, max_steps=2)
    trainer.train()
    (scores,) = [entry for entry in trainer.state.log_history if "train_overall" in entry]
    assert scores["train_urgency_accuracy"] * 3 == pytest.approx(round(scores["train_urgency_accuracy"] * 3))


def test_evaluation_is_of_labelled_rows_too(shared):
    given = {"eval_tasks": ["intent", "urgency"]}
    trainer = shared(dev={"intent": rows(6), "urgency": rows(6, urgency=lambda i: i < 3)}, **given)
    alone = shared(share_rows=False, dev={"intent": rows(6), "urgency": rows(3)}, **given)
    found, expected = trainer.evaluate(), alone.evaluate()
    for name in ("eval_intent_loss", "eval_urgency_loss", "eval_urgency_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_compiled_layers_change_nothing(shared, fresh_compiler, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # needs no compiler
    ends = []
    for compiled in (False, True):
        trainer = shared(compile_layers=compiled)
        trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regularizer": "smart"}, "the term 'smart' needs passes for each task"),
        ({"regularizer": "r_drop"}, "the term 'r_drop' needs"),
        ({"regularizer": "fgm"}, "the term 'fgm' needs"),
        ({"proximal": "momentum"}, "the term 'proximal' needs"),
        ({"mixing": "proportional"}, "with `mixing: proportional` each step has one"),
        ({"compile_layers": True, "aggregator": "pcgrad"}, "compiled layers can be differentiated once"),
        ({"torch_compile": True}, "`torch_compile` compiles the pass of one task"),
        ({"task_batch_sizes": {"intent": 2}}, "`task_batch_sizes` must be the same for tasks that share rows"),
        ({"rows_per_epoch": {"mood": 5}}, "Found intent nothing, urgency nothing, mood 5"),
        ({"task_sampling": {"mood": "balanced"}}, "`task_sampling` of 'mood' must be shuffle"),
        ({"task_weights": "uncertainty"}, "`task_weights: uncertainty` compares the losses of a round"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_words(shared, options, said):
    with pytest.raises(MinBertError, match=re.escape(said)):
        shared(rows(urgency=lambda i: i % 3), **options)


def test_weights_that_follow_the_losses_go_with_rows_that_have_all_labels(shared):
    trainer = shared(task_weights="uncertainty")
    trainer.train()
    assert {f"weight_{name}" for name in NAMES} <= trainer.state.log_history[0].keys()


@pytest.mark.parametrize("why", ["texts", "layers", "alone"])
def test_with_nothing_in_common_each_task_has_its_own_labelled_rows(shared, tiny_model, caplog, why):
    train = {name: rows(12, urgency=lambda i: i % 3) for name in ("intent", "urgency")}
    if why == "texts":
        train["intent"] = rows(11)
    if why == "alone":
        del train["intent"]
    trainer = shared(train, model=tiny_model(TASKS, private_layers=1 if why == "layers" else 0))
    assert "`share_rows: true` has no effect" in caplog.text and trainer.sharing == []
    assert len(trainer.train_dataset["urgency"]) == 8
    trainer.train()


def test_a_task_without_a_label_is_an_error(shared):
    with pytest.raises(MinBertError, match="The rows of 'mood' have no labels"):
        shared(rows(mood=lambda i: False))
