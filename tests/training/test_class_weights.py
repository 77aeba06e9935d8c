"""Loss options that are counted from the training rows, and the warnings about them."""

import logging

import pytest
import torch
from torch.nn import functional as F

from hf_minbert import MinBertError, MinBertForMultiTask, get_tasks

BI = {"pair_encoding": "bi", "pooling": "mean"}


@pytest.fixture
def build(make_trainer, tiny_model, toy_rows):
    """`build({"sst": {...}}, {"sst": labels}, ...)`: a trainer of these tasks on rows with these labels."""

    def make(tasks, labels, **arguments):
        rows = toy_rows(**{task: len(of) for task, of in labels.items()})
        for task, of in labels.items():
            for row, label in zip(rows[task], of, strict=True):
                row["label"] = label
        arguments.setdefault("train_tasks", [*labels])
        return make_trainer(tiny_model(get_tasks(tasks)), train=rows, **arguments)

    return make


def options(trainer, task):
    return trainer.model.config.get_task(task)["loss_options"]


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_pos_weight_is_negatives_by_positives(build, caplog):
    with caplog.at_level(logging.INFO, logger="hf_minbert"):
        trainer = build({"para": {"loss_options": {"pos_weight": "auto"}}}, {"para": [1] * 4 + [0] * 10})
    assert options(trainer, "para") == {"pos_weight": 2.5}
    assert "Counted from 14 training rows of para: pos_weight 2.5." in messages(caplog, logging.INFO)
    (batch, *_) = (one["para"] for one in trainer.get_train_dataloader())
    model = trainer.model.eval()
    with torch.no_grad():
        outputs = model(**batch)
    expected = F.binary_cross_entropy_with_logits(
        outputs.logits[:, 0], batch["labels"].float(), pos_weight=torch.tensor(2.5)
    )
    torch.testing.assert_close(outputs.loss, expected)


def test_class_weights_are_inverse_frequencies_with_mean_one(build):
    """Counts 1, 2, 2, 4 and 4: inverses 1, 1/2, 1/2, 1/4, 1/4, which sum to 2.5."""
    trainer = build(
        {"sst": {"loss_options": {"class_weights": "auto", "label_smoothing": 0.1}}},
        {"sst": [0] + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4},
    )
    found = options(trainer, "sst")
    assert found["class_weights"] == pytest.approx([2.0, 1.0, 1.0, 0.5, 0.5])
    assert found["label_smoothing"] == 0.1
    trainer.train()


def test_the_numbers_go_with_the_model(build, tmp_path):
    trainer = build({"para": {"loss_options": {"pos_weight": "auto"}}}, {"para": [1] * 4 + [0] * 8})
    trainer.save_model(tmp_path)
    assert MinBertForMultiTask.from_pretrained(tmp_path).config.get_task("para")["loss_options"] == {"pos_weight": 2.0}


def test_all_rows_that_may_be_drawn_are_counted(build):
    """With a new draw each epoch all rows may come, without one the first draw alone."""
    labels, tasks = [1] * 20 + [0] * 60, {"para": {"loss_options": {"pos_weight": "auto"}}}
    drawn = build(tasks, {"para": labels}, rows_per_epoch={"para": 11})
    assert options(drawn, "para") == {"pos_weight": 3.0}
    kept = build(tasks, {"para": labels}, rows_per_epoch={"para": 11}, redraw_rows=False)
    rows = [one["para"]["labels"].tolist() for one in kept.get_train_dataloader()]
    positives = sum(sum(batch) for batch in rows[:2]) + sum(rows[2][:3])
    assert options(kept, "para") == {"pos_weight": (11 - positives) / positives}


@pytest.mark.parametrize(
    ("task", "option", "labels", "said"),
    [
        ("para", "pos_weight", [0, 0, 0], "'duplicate'"),
        ("para", "pos_weight", [1, 1], "'not duplicate'"),
        ("sst", "class_weights", [0, 1, 4, 4], "'neutral' or 'positive'"),
    ],
)
def test_a_label_without_a_row_is_refused(build, task, option, labels, said):
    with pytest.raises(MinBertError) as refusal:
        build({task: {"loss_options": {option: "auto"}}}, {task: labels})
    assert f"`{option}: auto`" in str(refusal.value) and f"the label {said}." in str(refusal.value)


def test_a_task_that_is_scored_and_not_trained_cannot_be_counted(build, toy_rows):
    tasks = {"sst": None, "para": {"loss_options": {"pos_weight": "auto"}}}
    with pytest.raises(MinBertError, match="'para': `pos_weight: auto` .* the task is not trained"):
        build(tasks, {"sst": [0, 1]}, dev=toy_rows(sst=2, para=2))
    assert options(build(tasks, {"sst": [0, 1]}), "para") == {"pos_weight": "auto"}


# ---- warnings


@pytest.mark.parametrize(
    ("name", "entry", "labels"),
    [
        ("para", {"loss_options": {"pos_weight": "auto"}}, [0, 1, 1]),
        ("para", {"loss_options": {"pos_weight": 2.0}}, [0, 1, 1]),
        ("sst", {"loss_options": {"class_weights": [1, 2, 3, 4, 5]}}, [0, 1]),
    ],
)
def test_weights_and_balanced_sampling_on_one_task_give_one_warning(build, caplog, name, entry, labels):
    build({name: entry}, {name: labels})
    build({name: None}, {name: labels}, task_sampling={name: "balanced"})
    assert messages(caplog, logging.WARNING) == []
    build({name: entry}, {name: labels}, task_sampling={name: "balanced"}).train()
    (warning,) = messages(caplog, logging.WARNING)
    (option,) = entry["loss_options"]
    assert f"'{name}': `{option}` and `task_sampling: balanced` correct the same imbalance" in warning


def test_a_ranking_loss_alone_gives_a_warning(build, caplog):
    for loss_options in ({"bce_weight": 1}, {}):
        build({"para": {**BI, "head": "cosine", "loss": "mnr", "loss_options": loss_options}}, {"para": [0, 1, 1, 0]})
        assert len(messages(caplog, logging.WARNING)) == (not loss_options)
    assert "`loss: mnr` ranks pairs and never learns where a yes begins" in messages(caplog, logging.WARNING)[0]
    assert "loss_options: {bce_weight: 1}" in messages(caplog, logging.WARNING)[0]


# ---- rows to compare

RANKED = {"para": {**BI, "head": "cosine", "loss": "mnr", "loss_options": {"bce_weight": 1}}}
ORDERED = {"sts": {**BI, "head": "cosine", "loss": "cosent"}}


@pytest.mark.parametrize(
    ("tasks", "arguments"),
    [
        (RANKED, {"per_device_train_batch_size": 1}),
        (ORDERED, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
        (ORDERED, {"task_batch_sizes": {"sts": 1}}),
        (ORDERED | {"sst": None}, {"task_batch_sizes": "proportional", "per_device_train_batch_size": 2}),
    ],
    ids=str,
)
def test_a_loss_that_compares_rows_is_refused_where_a_batch_has_one(build, tasks, arguments):
    labels = {"para": [0, 1] * 4, "sts": [0.0, 5.0] * 4, "sst": [0, 1] * 16}
    (name, fields), labels = next(iter(tasks.items())), {task: labels[task] for task in tasks}
    said = f"Task '{name}': `loss: {fields['loss']}` compares the rows of a batch .*`task_batch_sizes: {{{name}: 16}}`"
    with pytest.raises(MinBertError, match=said):
        build(tasks, labels, **arguments)
    build(tasks, labels, **{**arguments, "task_batch_sizes": {name: 2}})
    build(dict.fromkeys(tasks), labels, **arguments)
