"""The stock `hyperparameter_search` with `MultiTaskTrainer`: a trial is what a trainer of its own would train."""

import pytest
from transformers import TrainerCallback

from hf_minbert import MinBertError, MultiTaskTrainer, MultiTaskTrainingArguments

TRIALS = [
    {"learning_rate": 1e-2, "regularizer": "none", "freeze": "none"},
    {"learning_rate": 1e-1, "regularizer": "fgm", "freeze": "none"},
    {"learning_rate": 1e-2, "regularizer": "none", "freeze": "encoder"},
]


@pytest.fixture
def args(tmp_path):
    def make(**changed):
        given = {
            "output_dir": str(tmp_path / "run"), "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True,
            "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2,
        }  # fmt: skip
        return MultiTaskTrainingArguments(**{**given, **changed})

    return make


@pytest.fixture
def rows(toy_rows, tiny_tokenizer):
    return {
        "train_dataset": toy_rows(sst=20, sts=8), "eval_dataset": toy_rows(sst=10, sts=10),
        "processing_class": tiny_tokenizer,
    }  # fmt: skip


@pytest.fixture
def searching(args, rows, tiny_model) -> MultiTaskTrainer:
    pytest.importorskip("optuna", reason="needs optuna: pip install 'hf_minbert[search]'")
    return MultiTaskTrainer(None, args(), model_init=lambda: tiny_model(("sst", "sts")), **rows)


def test_each_trial_scores_what_a_trainer_of_its_own_does(searching, args, rows, tiny_model, tmp_path):
    scores = []

    def objective(metrics):
        scores.append(metrics["eval_sst_loss"])
        return scores[-1]

    before = searching.model
    best = searching.hyperparameter_search(lambda trial: TRIALS[trial.number], objective, n_trials=3)
    assert len(scores) == 9  # at steps 2 and 3, and of the model that it ends with
    ends = scores[2::3]
    for number, values in enumerate(TRIALS):
        alone = MultiTaskTrainer(tiny_model(("sst", "sts")), args(**values, output_dir=str(tmp_path / "own")), **rows)
        alone.train()
        assert ends[number] == alone.evaluate()["eval_sst_loss"]
    assert len(set(ends)) == 3
    assert best.run_id == str(min(range(3), key=lambda number: ends[number]))
    assert searching.model is before and searching.args.learning_rate == 5e-5
    searching.train()  # as if it had not searched


def test_the_highest_overall_score_wins_unless_told_otherwise(searching, monkeypatch):
    found = iter([0.2, 0.7, 0.5])
    monkeypatch.setattr(
        MultiTaskTrainer, "train", lambda self, trial=None, **kwargs: self.train_trial(trial) if trial else None
    )
    monkeypatch.setattr(MultiTaskTrainer, "evaluate", lambda self: {"eval_overall": next(found)})
    best = searching.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 0, 9)}, n_trials=3)
    assert (best.run_id, best.objective) == ("1", 0.7)


def test_a_trial_that_diverged_is_not_the_best(searching, monkeypatch):
    found = iter([
        {"eval_overall": -0.6}, {"eval_overall": 0.0, "eval_sts_nonfinite_predictions": 1.0}, {"eval_overall": -0.7}
    ])  # fmt: skip
    monkeypatch.setattr(
        MultiTaskTrainer, "train", lambda self, trial=None, **kwargs: self.train_trial(trial) if trial else None
    )
    monkeypatch.setattr(MultiTaskTrainer, "evaluate", lambda self: next(found))
    best = searching.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 0, 9)}, n_trials=3)
    assert (best.run_id, best.objective) == ("0", -0.6)


def test_a_trial_that_is_pruned_ends_at_its_first_evaluation(searching):
    optuna = pytest.importorskip("optuna")
    pruner, steps = optuna.pruners.ThresholdPruner(upper=-1.0), []

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    searching._options["callbacks"] = [Steps()]
    with pytest.raises(ValueError, match="No trials are completed"):
        searching.hyperparameter_search(lambda trial: {"seed": 1}, n_trials=1, pruner=pruner)
    assert steps == [1, 2]


def test_what_a_search_cannot_do_is_said(searching, args, rows, tiny_model):
    with pytest.raises(MinBertError, match=r"`backend` must be 'optuna'. Found 'ray'"):
        searching.hyperparameter_search(backend="ray")
    with pytest.raises(
        MinBertError, match=r"Unknown training argument 'lerning_rate'. Did you mean 'learning_rate'\?"
    ):
        searching.hyperparameter_search(lambda trial: {"lerning_rate": 1.0}, n_trials=1)
    with pytest.raises(MinBertError, match=r"Give the trainer `model_init`, not `model`"):
        MultiTaskTrainer(tiny_model(("sst", "sts")), args(), **rows).hyperparameter_search()
    with pytest.raises(MinBertError, match=r"either `model` or, to search, `model_init`"):
        MultiTaskTrainer(None, args(), **rows)
