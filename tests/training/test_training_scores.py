"""Scores on the training rows: the epoch's own outputs, or another pass."""

import pytest


def _train_scores(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "train_overall" in entry]


def test_none_is_the_default(make_trainer):
    trainer = make_trainer(num_train_epochs=1, max_steps=-1)
    trainer.train()
    assert not _train_scores(trainer)


@pytest.mark.parametrize("mode", ["running", "full"])
def test_each_epoch_is_scored_on_every_training_task(make_trainer, mode):
    trainer = make_trainer(num_train_epochs=2, max_steps=-1, train_metrics=mode)
    trainer.train()
    entries = _train_scores(trainer)
    assert [entry["epoch"] for entry in entries] == [1.0, 2.0]
    assert {"train_sst_accuracy", "train_para_accuracy", "train_sts_pearson"} <= set(entries[0])


@pytest.mark.parametrize("mode", ["running", "full"])
def test_the_epochs_own_log_is_still_written(make_trainer, mode):
    trainer = make_trainer(num_train_epochs=2, max_steps=-1, train_metrics=mode, logging_strategy="epoch")
    trainer.train()
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss_sst" in entry] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("mixing", "rows"),
    [("cycle", {"sst": 8, "para": 8, "sts": 8}), ("once", {"sst": 4, "para": 12, "sts": 8})],
)
def test_running_equals_full_where_the_model_does_not_change(make_trainer, mixing, rows):
    """With learning rate 0, no dropout, and every row seen exactly once."""
    settings = {
        "num_train_epochs": 1,
        "max_steps": -1,
        "learning_rate": 0.0,
        "per_device_train_batch_size": 4,
        "train": rows,
        "mixing": mixing,
    }
    scores = []
    for mode in ("running", "full"):
        trainer = make_trainer(train_metrics=mode, **settings)
        trainer.train()
        scores.append(_train_scores(trainer)[0])
    for name in ("train_sst_accuracy", "train_sst_macro_f1", "train_para_f1", "train_sts_pearson", "train_overall"):
        assert scores[0][name] == pytest.approx(scores[1][name], abs=1e-5)


def test_running_takes_no_extra_pass(make_trainer):
    trainer = make_trainer(num_train_epochs=1, max_steps=-1, train_metrics="running")
    modes = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    trainer.train()
    assert modes and all(modes)


def test_another_word_is_refused(make_trainer):
    with pytest.raises(ValueError, match="train_metrics"):
        make_trainer(train_metrics="always")
