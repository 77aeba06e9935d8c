"""Scoring within the trainer: names and values of the metrics, the best checkpoint, early stopping."""

import json
import logging

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from torch.nn import functional as F
from transformers import TrainerCallback

import hf_minbert.training.evaluator as evaluation
from hf_minbert import MinBertError, MinBertForMultiTask, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.data.encoding import encode
from hf_minbert.settings.tasks import KIND_METRICS

DEV = {"sst": 11, "para": 7, "sts": 9}
STS = ["eval_sts_loss", "eval_sts_pearson", "eval_sts_spearman"]
ALL = [
    "eval_sst_loss", "eval_sst_accuracy", "eval_sst_macro_f1", "eval_sst_matthews", "eval_para_loss",
    "eval_para_accuracy", "eval_para_f1", "eval_para_matthews", *STS, "eval_overall", "eval_leaderboard",
]  # fmt: skip


@torch.no_grad()
def by_hand(model, task, rows, tokenizer):
    """Each row alone, without padding: logits [N, C], labels [N] and the mean loss."""
    encoded = encode(rows, task, tokenizer, 64)
    logits = [
        model(task=task.name, **{key: torch.tensor([row[key]]) for key in ("input_ids", "token_type_ids")}).logits[0]
        for row in encoded
    ]
    labels = torch.tensor([row["label"] for row in rows])
    logits = torch.stack(logits)
    mean = {
        "classes": lambda: F.cross_entropy(logits, labels),
        "binary": lambda: F.binary_cross_entropy_with_logits(logits[:, 0], labels.float()),
        "score": lambda: F.mse_loss(logits[:, 0], labels),
    }
    return logits.numpy(), labels.numpy(), mean[task.kind]().item()


# ---- names and values


def test_metrics_are_those_of_the_models_own_outputs(make_trainer, tiny_model, tiny_tokenizer, toy_rows, scores):
    trainer = make_trainer(dev=DEV, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert list(scores(metrics)) == ALL
    assert set(trainer.args.metrics_of(trainer.tasks.values())) == set(ALL)
    model = tiny_model().eval()
    found = {}
    for name, rows in toy_rows(**DEV).items():
        logits, labels, loss = by_hand(model, trainer.tasks[name], rows, tiny_tokenizer)
        found[name] = {
            "sst": lambda x, y: (x.argmax(1) == y).mean(),
            "para": lambda x, y: ((x[:, 0] > 0) == y).mean(),
            "sts": lambda x, y: pearsonr(x[:, 0], y).statistic,
        }[name](logits, labels)
        assert metrics[f"eval_{name}_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics[f"eval_{name}_{trainer.tasks[name].metric}"] == pytest.approx(found[name], abs=1e-5)
    assert metrics["eval_overall"] == pytest.approx(sum(found.values()) / 3, abs=1e-5)
    leaderboard = (found["sst"] + found["para"] + (found["sts"] + 1) / 2) / 3
    assert metrics["eval_leaderboard"] == pytest.approx(leaderboard, abs=1e-5)
    seconds = metrics["eval_runtime"]  # rounded to 1e-4, which matters on a fast machine
    assert metrics["eval_samples_per_second"] * seconds == pytest.approx(sum(DEV.values()), rel=1e-3 + 1e-4 / seconds)


def test_the_batch_size_does_not_change_the_metrics(make_trainer, scores):
    small, large = (scores(make_trainer(dev=DEV, per_device_eval_batch_size=size).evaluate()) for size in (3, 16))
    assert small == pytest.approx(large, abs=1e-5)


def test_only_eval_tasks_are_scored_and_the_leaderboard_needs_its_three(make_trainer, scores):
    trainer = make_trainer(dev=DEV, eval_tasks=["sts"])
    metrics = scores(trainer.evaluate())
    assert list(metrics) == [*STS, "eval_overall"]
    assert metrics["eval_overall"] == metrics["eval_sts_pearson"]


def test_other_rows_and_another_prefix(make_trainer, toy_rows, scores):
    trainer = make_trainer(dev=DEV)
    own = scores(trainer.evaluate())
    other = scores(trainer.evaluate({"sts": toy_rows(sts=5)["sts"]}, metric_key_prefix="test"))
    assert {name.split("_", 1)[0] for name in other} == {"test"}
    assert other["test_sts_pearson"] != pytest.approx(own["eval_sts_pearson"])
    assert scores(trainer.evaluate()) == own


def test_evaluation_leaves_training_as_it_was(make_trainer):
    given = {"max_steps": 4, "optim": "adamw_torch", "gradient_accumulation_steps": 2}
    plain, watched = make_trainer(**given), make_trainer(**given, dev=DEV, eval_strategy="steps", eval_steps=1)
    for trainer in (plain, watched):
        trainer.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], value), name


def test_dropout_is_off_in_evaluation_and_on_again_after_it(make_trainer, tiny_model, scores):
    trainer = make_trainer(
        tiny_model(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5),
        dev=DEV, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=16, max_steps=2,
    )  # fmt: skip
    trainer.model.train()
    assert scores(trainer.evaluate()) == scores(make_trainer(dev=DEV, per_device_eval_batch_size=16).evaluate())
    modes = []
    trainer.model.register_forward_pre_hook(lambda model, args: modes.append(model.training))
    trainer.train()
    assert modes == [True, True, True, False, False, False] * 2  # three tasks each


def test_each_evaluation_is_logged_whole_and_is_one_event(make_trainer, scores):
    class Listener(TrainerCallback):
        heard = []

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.heard.append((state.global_step, set(scores(metrics))))

    Listener.heard = []
    trainer = make_trainer(
        dev=DEV, eval_strategy="steps", eval_steps=2, max_steps=4, eval_on_start=True, callbacks=[Listener()]
    )
    trainer.train()
    assert Listener.heard == [(step, set(ALL)) for step in (0, 2, 4)]
    logged = [entry for entry in trainer.state.log_history if "eval_overall" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    assert all(set(ALL) <= set(entry) for entry in logged)


def test_a_progress_bar_per_task(make_trainer, capfd):
    make_trainer(dev={"sst": 7, "sts": 30}, eval_tasks=["sst", "sts"], disable_tqdm=False).evaluate()
    bars = capfd.readouterr().err
    assert "1/1" in bars
    assert "4/4" in bars


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hidden_states_and_attentions_in_the_output_are_no_predictions(make_trainer, tiny_model, scores, asked):
    trainer = make_trainer(tiny_model(attn_implementation="eager", **{asked: True}), dev=DEV)
    assert scores(trainer.evaluate()) == scores(make_trainer(dev=DEV).evaluate())


# ---- only real tokens, the longest rows first


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_equal_length_share_a_batch_and_padding_costs_nothing(make_trainer, toy_rows, packing):
    """Whatever the training does; the last of the three batches of sst is the shortest three rows."""
    trainer = make_trainer(dev=DEV, packing=packing, per_device_eval_batch_size=4)
    layer, seen = trainer.model.bert.encoder.layer[0], []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:2]))
    trainer.evaluate({"sst": toy_rows(**DEV)["sst"]})
    lengths = sorted(trainer.eval_dataset["sst"].row_lengths, reverse=True)
    assert len(set(lengths)) > 2
    assert seen == [(1, sum(lengths[start : start + 4])) for start in (0, 4, 8)]


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("para", {"loss": "mnr", "loss_options": {"scores": "head"}, "pair_encoding": "bi"}),
        ("sts", {"loss": "cosent"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_loss_that_compares_rows_sees_those_that_stand_together(make_trainer, tiny_model, toy_rows, task, fields):
    spec, rows = get_tasks({task: fields})[0], toy_rows(**{task: 8})
    trainer = make_trainer(tiny_model([spec]), train=rows, dev=rows, per_device_eval_batch_size=4)
    encoded, collate = trainer.eval_dataset[task], PaddedCollator(spec, 0)
    given, sorted_by_length = (
        np.mean([trainer.model.eval()(**collate(encoded.take(order[part : part + 4]))).loss.item() for part in (0, 4)])
        for order in (np.arange(8), np.argsort(-encoded.row_lengths, kind="stable"))
    )
    assert abs(given - sorted_by_length) > 1e-3
    assert trainer.evaluate()[f"eval_{task}_loss"] == pytest.approx(given, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_with_class_weights_the_loss_is_the_weighted_mean_over_all_rows(make_trainer, tiny_model, toy_rows, options):
    weights = [1.0, 5.0, 1.0, 1.0, 50.0]
    task = {"sst": {"loss_options": {"class_weights": weights, **options}}}
    rows, found = {"sst": toy_rows(sst=6)["sst"]}, {}
    for size in (2, 3, 4, 6):
        trainer = make_trainer(tiny_model(get_tasks(task)), train=rows, dev=rows, per_device_eval_batch_size=size)
        found[size] = trainer.evaluate()["eval_sst_loss"]
    output = trainer.predict(rows["sst"], task="sst")
    assert output.metrics["test_sst_loss"] == pytest.approx(found[6], rel=1e-5)
    # By hand: each row's loss is of weights in its logarithms, and the mean is over the weight of its label.
    logarithms = torch.from_numpy(output.predictions).double().log_softmax(-1)
    w, smoothing = torch.tensor(weights).double(), options.get("label_smoothing", 0.0)
    own = w[output.label_ids]
    hard = -own * logarithms[range(6), output.label_ids]
    soft = -(w * logarithms).sum(-1) / 5
    expected = float(((1 - smoothing) * hard + smoothing * soft).sum() / own.sum())
    assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-5)
    losses = (1 - smoothing) * hard + smoothing * soft
    halves = [losses[half].sum() / own[half].sum() for half in ([0, 1, 2], [3, 4, 5])]
    assert abs(float(sum(halves)) / 2 - expected) > 1e-2  # what a mean over batches would say


@pytest.mark.parametrize(("task", "fields", "told"), [
    ("para", {"loss": "mnr", "pair_encoding": "bi"}, True), ("sts", {"loss": "cosent"}, True), ("sts", {}, False),
])  # fmt: skip
def test_a_loss_of_a_batch_is_said_to_be_one(make_trainer, tiny_model, toy_rows, caplog, task, fields, told):
    rows = toy_rows(**{task: 8})
    trainer = make_trainer(tiny_model(get_tasks({task: fields})), train=rows, dev=rows)
    with caplog.at_level(logging.INFO, logger="hf_minbert"):
        trainer.evaluate()
        trainer.evaluate()
    assert sum(text.startswith(f"eval_{task}_loss is a mean over batches, and") for text in caplog.messages) == told


# ---- predict


def test_predict_gives_the_heads_outputs_in_order(make_trainer, tiny_model, tiny_tokenizer, toy_rows):
    trainer = make_trainer(per_device_eval_batch_size=4)
    model = tiny_model().eval()
    for name, rows in toy_rows(**DEV).items():
        logits, labels, _ = by_hand(model, trainer.tasks[name], rows, tiny_tokenizer)
        output = trainer.predict(rows, task=name)
        np.testing.assert_allclose(output.predictions, logits, atol=1e-5)
        np.testing.assert_allclose(output.label_ids, labels)
        assert f"test_{name}_{trainer.tasks[name].metric}" in output.metrics
        bare = [{key: value for key, value in row.items() if key != "label"} for row in rows]
        unlabelled = trainer.predict(bare, task=name)
        np.testing.assert_array_equal(unlabelled.predictions, output.predictions)
        assert unlabelled.label_ids is None
        assert not any(name in key and "loss" in key for key in unlabelled.metrics)


def test_predictions_of_a_model_in_half_precision_are_float32(make_trainer, tiny_model, toy_rows):
    output = make_trainer(tiny_model().half()).predict(toy_rows(sts=3)["sts"], task="sts")
    assert output.predictions.dtype == np.float32


def test_predict_asks_for_the_task_where_it_cannot_know(make_trainer, tiny_model, toy_rows):
    rows = toy_rows(sts=3)["sts"]
    with pytest.raises(MinBertError, match="several tasks: sst, para, sts.*`task=`"):
        make_trainer().predict(rows)
    with pytest.raises(MinBertError, match="`predict` answers one task"):
        make_trainer().predict({"sts": rows})
    with pytest.raises(MinBertError, match="Unknown task 'stss'. Did you mean 'sts'"):
        make_trainer().predict(rows, task="stss")
    active = make_trainer(tiny_model(active_task="sts"))
    assert active.predict(rows).predictions.shape == (3, 1)


def test_a_binary_tasks_prediction_is_its_one_logit_also_where_it_is_active(make_trainer, tiny_model, toy_rows):
    rows = toy_rows(para=3)["para"]
    by_name = make_trainer().predict(rows, task="para").predictions
    active = make_trainer(tiny_model(active_task="para")).predict(rows).predictions
    assert active.shape == (3, 1)
    np.testing.assert_array_equal(active, by_name)


# ---- what cannot be scored


def test_evaluation_without_rows_or_labels_says_so(make_trainer, toy_rows):
    with pytest.raises(MinBertError, match="nothing to evaluate"):
        make_trainer().evaluate()
    rows = [{"sentence": "a good film"}]
    with pytest.raises(MinBertError, match="rows of 'sst' have no labels"):
        make_trainer(dev=DEV).evaluate({"sst": rows})
    with pytest.raises(MinBertError, match="Unknown task 'sstt'"):
        make_trainer(dev=DEV).evaluate({"sstt": rows})


def test_a_constant_prediction_is_flagged_and_every_number_stays_finite(make_trainer, tiny_model, tmp_path, caplog):
    model = tiny_model()
    with torch.no_grad():
        model.heads.sts.linear.weight.zero_()
        model.heads.sts.linear.bias.fill_(2.5)
    trainer = make_trainer(
        model, dev=DEV, learning_rate=0.0, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True
    )
    with caplog.at_level(logging.WARNING, logger="hf_minbert"):
        trainer.train()
    assert "sts: all 9 predictions are the same" in caplog.text
    metrics = trainer.evaluate()
    assert metrics["eval_sts_pearson"] == metrics["eval_sts_spearman"] == 0.0
    assert metrics["eval_sts_constant_predictions"] == 1.0
    assert metrics["eval_overall"] == pytest.approx((metrics["eval_sst_accuracy"] + metrics["eval_para_accuracy"]) / 3)
    assert metrics["eval_leaderboard"] == pytest.approx(metrics["eval_overall"] + 0.5 / 3)
    (state,) = (tmp_path / "run").glob("checkpoint-*/trainer_state.json")
    json.loads(state.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_a_diverged_head_is_flagged_and_the_overall_score_stays_finite(make_trainer, tiny_model):
    model = tiny_model()
    with torch.no_grad():
        model.heads.sts.linear.bias.fill_(float("nan"))
    metrics = make_trainer(model, dev=DEV).evaluate()
    assert metrics["eval_sts_nonfinite_predictions"] == 1.0
    assert metrics["eval_sts_pearson"] == 0.0
    assert metrics["eval_overall"] == pytest.approx((metrics["eval_sst_accuracy"] + metrics["eval_para_accuracy"]) / 3)


# ---- the best checkpoint


def script(monkeypatch, trainer, table):
    """From now on the trainer's metrics are `table[task][step]`, whatever the model says."""

    def scripted(task, logits, labels):
        return dict.fromkeys(KIND_METRICS[task.kind], table[task.name][trainer.state.global_step])

    monkeypatch.setattr(evaluation, "task_metrics", scripted)


#: The best step is 2 by the mean, 3 by sts, 1 by sst; by para, scored between them, 4.
TABLE = {
    "sst": {1: 0.9, 2: 0.8, 3: 0.1, 4: 0.2},
    "para": {1: 0.1, 2: 0.8, 3: 0.2, 4: 0.9},
    "sts": {1: 0.2, 2: 0.7, 3: 0.9, 4: 0.1},
}
BEST = {"eval_overall": 2, "overall": 2, None: 2, "sts_pearson": 3, "eval_sst_accuracy": 1, "para_f1": 4}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("metric", BEST)
def test_the_best_checkpoint_by_any_metric_is_loaded(make_trainer, monkeypatch, tmp_path, metric):
    chosen = {} if metric is None else {"metric_for_best_model": metric}
    trainer = make_trainer(dev=DEV, max_steps=4, load_best_model_at_end=True, **EACH_STEP, **chosen)
    script(monkeypatch, trainer, TABLE)
    trainer.train()
    assert trainer.state.best_global_step == BEST[metric]
    weights = trainer.model.state_dict()
    for step in range(1, 5):
        saved = MinBertForMultiTask.from_pretrained(tmp_path / "run" / f"checkpoint-{step}").state_dict()
        assert all(torch.equal(weights[name], saved[name]) for name in saved) == (step == BEST[metric])


def test_only_the_best_is_kept_where_the_strategy_says_so(make_trainer, monkeypatch, tmp_path):
    trainer = make_trainer(dev=DEV, max_steps=4, **{**EACH_STEP, "save_strategy": "best", "save_total_limit": 1})
    script(monkeypatch, trainer, TABLE)
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("metric", "hint"),
    [("sts_peason", "Did you mean 'eval_sts_pearson'"), ("loss", "eval_overall"), ("cfimdb_accuracy", "eval_overall")],
)
def test_a_misspelt_metric_is_refused_before_training(make_trainer, metric, hint):
    with pytest.raises(MinBertError) as refusal:
        make_trainer(dev=DEV, load_best_model_at_end=True, metric_for_best_model=metric, **EACH_STEP)
    assert f"`metric_for_best_model`: Unknown metric '{metric}'" in str(refusal.value)
    assert hint in str(refusal.value)
    assert all(name in str(refusal.value) for name in ALL)


def test_a_metric_of_a_task_that_is_not_scored_is_refused(make_trainer):
    with pytest.raises(MinBertError, match="Unknown metric 'eval_leaderboard'"):
        make_trainer(dev=DEV, eval_tasks=["sst", "sts"], metric_for_best_model="eval_leaderboard", **EACH_STEP)


def test_a_plateau_schedule_follows_the_overall_score(make_trainer, monkeypatch):
    trainer = make_trainer(
        dev=DEV, max_steps=4, eval_strategy="steps", eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.1, "mode": "max"},
    )  # fmt: skip
    script(monkeypatch, trainer, TABLE)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-4])  # worse at step 3, lower from step 4


# ---- early stopping


def falling(*overall):
    """Three tasks that agree on these scores, step after step."""
    return dict.fromkeys(DEV, dict(enumerate(overall, start=1)))


STOPPING = {"dev": DEV, "max_steps": 8, "eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("metric", ["eval_overall", "sts_pearson", "eval_sst_accuracy"])
@pytest.mark.parametrize(("patience", "stop"), [(1, 2), (2, 5), (3, 6)])
def test_training_stops_after_that_many_evaluations_without_a_better_one(
    make_trainer, monkeypatch, caplog, metric, patience, stop
):
    trainer = make_trainer(**STOPPING, early_stopping_patience=patience, metric_for_best_model=metric)
    script(monkeypatch, trainer, falling(0.5, 0.4, 0.6, 0.5, 0.5, 0.6, 0.3, 0.9))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    # Counting once per task would stop at the first evaluation that is not better, whatever the patience.
    assert trainer.state.global_step == stop
    assert "early stopping is disabled" not in caplog.text


def test_the_threshold_says_how_much_better_counts(make_trainer, monkeypatch):
    trainer = make_trainer(**STOPPING, early_stopping_patience=2, early_stopping_threshold=0.1)
    script(monkeypatch, trainer, falling(0.1, 0.15, 0.3, 0.35, 0.38, 0.9, 0.9, 0.9))
    trainer.train()
    assert trainer.state.global_step == 5


class StopAt(TrainerCallback):
    """Ends training after a step, as a person with Ctrl-C would, and saves nothing more."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_the_count_of_early_stopping_survives_a_resume(make_trainer, monkeypatch):
    table = falling(0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0)
    given = {**STOPPING, "early_stopping_patience": 3, "save_strategy": "steps", "save_steps": 1}
    interrupted = make_trainer(**given, callbacks=[StopAt(3)])
    script(monkeypatch, interrupted, table)
    interrupted.train()
    assert interrupted.state.global_step == 3
    resumed = make_trainer(**given)
    script(monkeypatch, resumed, table)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4  # two before, one after
    assert resumed.state.best_global_step == 1


# ---- a model that has diverged


class Spoil(TrainerCallback):
    """Fills the weights with NaN after a step, as a rate that is too high does in the end."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))


@pytest.fixture
def opposed(make_trainer, toy_rows):
    """Dev rows of sts whose correlation with the untrained model's predictions is below zero."""
    rows = toy_rows(sts=9)["sts"]
    order = np.argsort(np.argsort(-make_trainer().predict(rows, task="sts").predictions[:, 0]))
    return {"sts": [{**row, "label": float(place) / 2} for row, place in zip(rows, order, strict=True)]}


def spoiled(make_trainer, opposed, step, **given):
    return make_trainer(
        dev=opposed, eval_tasks=["sts"], metric_for_best_model="eval_sts_pearson", learning_rate=0.0,
        callbacks=[Spoil(step)], **{"max_steps": 3, **EACH_STEP, **given},
    )  # fmt: skip


def test_a_model_full_of_nan_is_not_better_than_a_negative_correlation(make_trainer, opposed, tmp_path):
    trainer = spoiled(make_trainer, opposed, 2, load_best_model_at_end=True)
    trainer.train()
    scored = [entry["eval_sts_pearson"] for entry in trainer.state.log_history if "eval_sts_pearson" in entry]
    assert scored[0] < -0.5 and scored[1:] == [0.0, 0.0]
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (1, scored[0])
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"]) == (1, scored[0])


def test_where_no_evaluation_is_finite_nothing_is_loaded_as_best(make_trainer, opposed):
    trainer = spoiled(make_trainer, opposed, 1, load_best_model_at_end=True)
    trainer.train()
    assert trainer.state.best_model_checkpoint is None and trainer.state.best_metric is None
    assert trainer.state.global_step == 3
    assert all(parameter.isnan().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("step", "end"), [(1, 2), (2, 3), (3, 3)])
def test_early_stopping_counts_a_diverged_model_as_no_better(make_trainer, opposed, step, end):
    trainer = spoiled(make_trainer, opposed, step, max_steps=8, early_stopping_patience=2)
    trainer.train()
    # With a rate of 0 the first evaluation is the best, if it is finite, and the second one after it is the last.
    assert trainer.state.global_step == end


def test_only_a_finite_model_is_kept_where_the_best_is(make_trainer, opposed, tmp_path):
    trainer = spoiled(make_trainer, opposed, 2, save_strategy="best", save_total_limit=1)
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
