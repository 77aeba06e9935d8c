"""Words are tagged beside other tasks: every term and aggregator, scores, resuming, two processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hf_minbert import MinBertError, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from hf_minbert.evaluation.metrics import task_metrics
from hf_minbert.pretrained.prediction import Predictor, score
from hf_minbert.training.protocol import draws, shortest_batch

OTHERS = {
    "sst": [{"sentence": f"a good film {n}", "label": n % 5} for n in range(10)],
    "para": [{"sentence1": f"why is it {n}", "sentence2": "how is it", "label": n % 2} for n in range(8)],
    "sts": [{"sentence1": f"the dog {n}", "sentence2": "a man", "label": n % 6} for n in range(8)],
}
QUIET = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "max_steps": 2}


@pytest.fixture
def make(tiny_model, tiny_tokenizer, ner, sentences, tmp_path) -> Callable[..., MultiTaskTrainer]:
    """`make(model=None, task=ner, **arguments)`: a trainer of tags beside sst, para and sts."""

    def build(model=None, task=ner, folder="run", dev=None, max_length=24, only=False, **arguments):
        names = [] if only else [*OTHERS]
        model = tiny_model([task, *names]) if model is None else model
        sizes = {"per_device_train_batch_size": 4, "learning_rate": 1e-3}
        args = MultiTaskTrainingArguments(output_dir=str(tmp_path / folder), **{**QUIET, **sizes, **arguments})
        rows = {"ner": sentences(13), **{name: OTHERS[name] for name in names}}
        return MultiTaskTrainer(
            model, args, train_dataset=rows, eval_dataset=dev, processing_class=tiny_tokenizer, max_length=max_length
        )

    return build


def logged(trainer: MultiTaskTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("aggregator", ["sum", "pcgrad"])
@pytest.mark.parametrize("regularizer", ["none", "smart", "r_drop", "fgm"])
def test_four_kinds_of_answers_train_in_one_round(make, tiny_model, ner, aggregator, regularizer):
    model = tiny_model([ner, *OTHERS], hidden_dropout_prob=0.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = make(model, aggregator=aggregator, regularizer=regularizer, packing=True)
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {*before}
    names = ["loss_ner"] + ([f"{regularizer}_ner"] if regularizer != "none" else [])
    for name in names:
        assert np.isfinite(logged(trainer, name)).all() and logged(trainer, name)[0] > 0, name


@pytest.mark.parametrize("form", ["paper", "mt-dnn", "smart-pytorch"])
def test_packing_changes_no_step_of_smart(make, tiny_model, ner, form):
    found = []
    for packing in (False, True):
        model = tiny_model([ner, *OTHERS])
        plain = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        smart = {"regularizer": "smart", "smart_form": form, "smart_weight": 5.0, "smart_epsilon": 1e-2}
        make(model, packing=packing, **plain, **smart).train()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


def test_the_outputs_of_tokens_without_a_label_are_free_to_move(make, tiny_model, ner):
    """The term sees labelled words alone: one whose logits all others' labels hide is 0."""
    trainer = make(tiny_model([ner], hidden_dropout_prob=0.3), only=True, regularizer="r_drop")
    batch = {**shortest_batch(trainer.model, "ner"), "labels": torch.full((2, 1), -100)}
    found = trainer.terms[0](trainer.model.train(), batch, None)
    assert found.logged["r_drop"].item() == 0 and found.loss.item() == 0
    assert draws(trainer.model, lambda: trainer.model(**batch))


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_learns_tags(make, tiny_model, ner):
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["heads"])
    model = peft.get_peft_model(tiny_model([ner, *OTHERS]), settings)
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    make(model, aggregator="pcgrad").train()
    assert any("ner" in name and not torch.equal(p, before[name]) for name, p in model.named_parameters()
               if name in before)  # fmt: skip


def test_scores_are_those_of_the_predictor_and_count_words_that_were_cut(make, tiny_tokenizer, sentences):
    dev = {"ner": [*sentences(9, seed=3), {"tokens": ["good", "film"] * 20, "tags": ["B-PLACE", "I-PLACE"] * 20}]}
    trainer = make(dev=dev, eval_tasks=["ner"], per_device_eval_batch_size=3)
    trainer.train()
    found = trainer.evaluate()
    unread = 40 - 22  # of 24 tokens two are special, and both words are one
    assert found["eval_ner_unread_words"] == unread
    predictor = Predictor(trainer.model, tiny_tokenizer)
    rows = [{"tokens": row["tokens"]} for row in dev["ner"]]
    logits = predictor.logits("ner", rows)
    assert [len(row) for row in logits] == [len(row["tokens"]) for row in dev["ner"]]
    labels = trainer.eval_dataset["ner"].labels
    expected = task_metrics(predictor.task("ner"), logits, labels)
    assert {f"eval_ner_{name}": value for name, value in expected.items()}.items() <= found.items()
    assert trainer.predict(dev["ner"], task="ner").metrics["test_ner_accuracy"] == expected["accuracy"]
    answer = predictor("ner", [dev["ner"][-1]["tokens"]])[0]
    assert answer["tags"][-unread:] == ["O"] * unread and answer["probabilities"][-unread:] == [None] * unread


def test_the_loss_of_an_evaluation_is_that_of_all_words_together(make, sentences):
    dev = {"ner": sentences(7, seed=3)}
    losses = [
        make(dev=dev, eval_tasks=["ner"], per_device_eval_batch_size=size).evaluate()["eval_ner_loss"]
        for size in (1, 3, 7)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("which", ["running", "full"])
def test_scores_on_training_rows(make, which):
    trainer = make(train_metrics=which, max_steps=4, only=True)
    trainer.train()
    assert len(logged(trainer, "train_ner_entity_f1")) == 1 and 0 <= logged(trainer, "train_ner_accuracy")[0] <= 1


def test_class_weights_are_counted_by_word(make, ner, sentences, caplog):
    weighted = Task(**{**vars(ner), "labels": ner.labels[:5], "loss_options": {"class_weights": "auto"}})
    with caplog.at_level(logging.INFO, "hf_minbert"):
        trainer = make(task=weighted)
    tags = [tag for row in sentences(13) for tag in row["tags"]]
    inverse = 1 / np.array([tags.count(name) for name in weighted.labels])
    assert trainer.model.config.get_task("ner")["loss_options"]["class_weights"] == pytest.approx(
        inverse / inverse.mean()
    )
    assert f"Counted from {len(tags)} tags of ner" in caplog.text


def test_a_frozen_encoder_reads_the_rows_of_other_tasks_once(make, tiny_model, ner):
    model = tiny_model([ner, *OTHERS])
    encoder = copy.deepcopy(model.bert.state_dict())
    make(model, freeze="encoder").train()
    assert all(torch.equal(value, encoder[name]) for name, value in model.bert.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"task_sampling": {"ner": "balanced"}}, "`task_sampling: balanced` draws rows by their label, and .* 'ner'"),
        ({"teachers": ["somewhere"]}, "`teachers` cannot teach 'ner'"),
        ({"metric_for_best_model": "eval_ner_macro_f1", "eval_strategy": "no"}, "Unknown metric 'eval_ner_macro_f1'"),
    ],
)
def test_what_has_no_meaning_for_tags_is_refused(make, arguments, said):
    with pytest.raises(MinBertError, match=said):
        make(**arguments)


def test_a_resumed_run_ends_with_the_same_bits(make, tiny_model, ner):
    def model(seed):
        return tiny_model([ner, *OTHERS], seed=seed, hidden_dropout_prob=0.2)

    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "aggregator": "pcgrad", "regularizer": "smart"}
    whole, resumed = (make(model(seed), **given) for seed in (0, 9))
    whole.train()
    resumed.train(resume_from_checkpoint=str(whole.args.output_dir) + "/checkpoint-2")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("arguments", [{}, {"regularizer": "smart"}, {"aggregator": "pcgrad", "bf16": True}], ids=str)
def test_steps_with_tags_are_recorded_as_cuda_graphs(make, tiny_model, ner, arguments):
    found = []
    for graphs in ("off", "auto"):
        given = {"packing": True, "cuda_graphs": graphs, "use_cpu": False, "max_steps": 12, "learning_rate": 0.01}
        # By Adam, a bias whose gradient is rounding alone, as that of the keys, would move by the learning rate.
        trainer = make(tiny_model([ner, *OTHERS]), optim="sgd", **given, **arguments)
        trainer.train()
        found.append([parameter.detach().cpu() for parameter in trainer.model.parameters()])
    assert {key[0] for key in trainer.step.graphs._recordings} == {"ner", *OTHERS}
    for plain, graphed in zip(*found, strict=True):
        torch.testing.assert_close(plain, graphed, atol=2e-3 if "bf16" in arguments else 1e-4, rtol=1e-3)


@pytest.mark.slow
def test_two_processes_are_one_that_accumulates(make, tiny_model, ner, sentences, together, tmp_path):
    """Each batch's loss is the mean over its words, and a step's the mean of its batches'."""
    dev = {"ner": sentences(11, seed=4)}

    def job(rank: int, processes: int) -> None:
        model = tiny_model([ner, *OTHERS], initializer_range=0.1)
        given = {"gradient_accumulation_steps": 2 // processes, "max_steps": 4, "per_device_eval_batch_size": 4}
        plain = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.01, "max_grad_norm": 0.0}
        smart = {"regularizer": "smart", "train_metrics": "running"}
        trainer = make(model, folder=f"{processes}", dev=dev, eval_tasks=["ner"], **given, **plain, **smart)
        trainer.train()
        state = {"weights": [*trainer.model.parameters()], "log": trainer.state.log_history}
        torch.save(state | {"scores": trainer.evaluate()}, tmp_path / f"{rank}-of-{processes}.pt")

    for processes in (1, 2):
        ended = together(lambda rank, n=processes: job(rank, n), processes=processes)
        assert ended.status == [0] * processes, ended.said
    one, first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("0-of-1", "0-of-2", "1-of-2")
    )
    for ours, theirs, other in zip(one["weights"], first["weights"], second["weights"], strict=True):
        assert torch.equal(theirs, other)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    losses = [[entry["loss_ner"] for entry in of["log"] if "loss_ner" in entry] for of in (one, first)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    names = [name for name in one["scores"] if name.startswith("eval_ner")]
    assert {n: first["scores"][n] for n in names} == pytest.approx({n: one["scores"][n] for n in names}, rel=1e-5)
    running = [[entry for entry in of["log"] if "train_ner_accuracy" in entry] for of in (one, first)]
    for ours, theirs in zip(*running, strict=True):
        assert theirs["train_ner_accuracy"] == pytest.approx(ours["train_ner_accuracy"])


def test_scores_of_loaded_rows_are_those_of_lists(make, ner, tiny_tokenizer, sentences):
    from hf_minbert.data.files import to_dataset

    trainer, given = make(), sentences(6, seed=5)
    rows = [
        {"id": str(n), "tokens": " ".join(row["tokens"]), "label": [ner.labels.index(tag) for tag in row["tags"]]}
        for n, row in enumerate(given)
    ]
    found, decoded = score(Predictor(trainer.model, tiny_tokenizer), {"ner": to_dataset(rows, ner)})
    assert found["ner_accuracy"] == trainer.evaluate({"ner": given})["eval_ner_accuracy"]
    assert [len(values) for values in decoded["ner"].values] == [len(row["tokens"]) for row in given]
