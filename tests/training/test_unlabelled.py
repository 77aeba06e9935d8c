"""Rows without labels: learnt by the teachers' answers alone, beside those with labels, which train as they did."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import MinBertError
from hf_minbert.data.leaks import HeldOut, key_of, load_training
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.settings.tasks import get_tasks
from hf_minbert.training.terms.base import NoiseKey, unlabelled_in

OUTPUTS = {"sst": 5, "para": 1, "sts": 1}


def partly(rows: dict[str, list[dict]], **labelled: int) -> dict[str, list[dict]]:
    """Toy rows of which the first `labelled` keep their label."""
    return {
        name: [row if i < labelled.get(name, len(of)) else {**row, "label": None} for i, row in enumerate(of)]
        for name, of in rows.items()
    }


def answers(rows: dict[str, list[dict]], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=(len(of), OUTPUTS[name])).astype(np.float32) for name, of in rows.items()}


@pytest.fixture
def taught(make_trainer, toy_rows):
    """`taught(rows, **arguments)`: a trainer whose teachers have answered."""

    def make(rows, teacher=None, **given):
        logits = answers(rows) if teacher is None else teacher
        return make_trainer(train=rows, train_tasks=[*rows], teachers=["said"], teacher_logits=logits, **given)

    return make


def first_batches(trainer) -> dict:
    return next(iter(trainer.get_train_dataloader()))


def moved(trainer) -> dict[str, torch.Tensor]:
    """How far a step of plain SGD moves each parameter, over its rate: the gradient."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return {name: (before[name] - p.detach()) / 1e-3 for name, p in trainer.model.named_parameters()}


def assert_close(one: dict, other: dict) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight", [0.25, 1.0])
@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_the_mean_over_rows_by_hand(taught, toy_rows, weight, packing):
    """A labelled row has its own loss and its divergence, by their shares; another its divergence alone."""
    given = {"distill_weight": weight, "per_device_train_batch_size": 6, "packing": packing}
    trainer = taught(partly(toy_rows(sst=18, sts=9), sst=12, sts=6), **given)
    for task, batch in first_batches(trainer).items():
        labels, teacher = batch["labels"], batch["teacher"]
        assert (len(labels), len(teacher), unlabelled_in(batch)) == (6, 9, 3)
        found = trainer.task_loss(trainer.model, batch, NoiseKey(0, 0, 0))
        with torch.no_grad():
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
            logits = trainer.model(task=task, **inputs).logits
            torch.testing.assert_close(found["logits"], logits)
            if task == "sst":
                own = torch.nn.functional.cross_entropy(logits[:6], labels, reduction="none")
                apart = (teacher.softmax(1) * (teacher.log_softmax(1) - logits.log_softmax(1))).sum(1)
            else:
                own, apart = (logits[:6, 0] - labels) ** 2, (logits - teacher)[:, 0] ** 2
            expected = torch.cat([(1 - weight) * own + weight * apart[:6], apart[6:]]).mean()
        assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
        assert found["own_loss"].item() == pytest.approx(own.mean().item(), rel=1e-4)
        assert found["distill"].item() == pytest.approx(apart.mean().item(), rel=1e-4)


def test_they_are_computed_in_the_precision_of_the_run(taught, toy_rows):
    rows, found = partly(toy_rows(sst=18), sst=12), set()
    trainer = taught(rows, bf16=True, max_steps=1)
    layer = trainer.model.bert.encoder.layer[0].output.dense
    layer.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    trainer.train()
    assert found == {torch.bfloat16}


def test_with_teachers_that_count_for_nothing_rows_without_labels_do_not_either(taught, toy_rows):
    rows = toy_rows(sst=18)
    alone = moved(taught({"sst": rows["sst"][:12]}, distill_weight=0.0))
    beside = moved(taught(partly(rows, sst=12), distill_weight=0.0))
    assert_close(alone, beside)


def test_labelled_rows_come_in_the_order_that_they_have_alone_and_others_in_proportion(taught, toy_rows):
    rows = toy_rows(sst=28)
    both = taught(partly(rows, sst=16), max_steps=4)
    alone = taught({"sst": rows["sst"][:16]}, max_steps=4)
    seen = []
    for one, other in zip(both.get_train_dataloader(), alone.get_train_dataloader(), strict=True):
        assert (len(one["sst"]["labels"]), len(one["sst"]["input_ids"])) == (4, 7)
        assert torch.equal(one["sst"]["labels"], other["sst"]["labels"])
        seen += one["sst"]["teacher"][4:, 0].tolist()
    assert sorted(seen) == sorted(answers(rows)["sst"][16:, 0].tolist())  # an epoch has each once
    assert both.get_train_dataloader().dataset.num_rows == 28


@pytest.mark.parametrize(
    "arguments",
    [
        {"regularizer": "smart"}, {"regularizer": "r_drop"}, {"regularizer": "fgm"}, {"proximal": "momentum"},
        {"aggregator": "pcgrad"}, {"gradient_accumulation_steps": 2}, {"task_weights": "uncertainty"},
        {"train_metrics": "running"}, {"neftune_noise_alpha": 5.0}, {"mixing": "proportional"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)  # fmt: skip
def test_the_rest_of_training_goes_with_them(taught, toy_rows, arguments):
    """Packed and padded steps agree, whatever the arguments."""
    rows = partly(toy_rows(sst=12, para=12, sts=8), sst=8, para=8)
    trainer = taught(rows, **arguments)
    found = moved(trainer)
    assert all(value.isfinite().all() for value in found.values())
    assert any(value.abs().sum() > 0 for value in found.values())
    packed = moved(taught(rows, packing=True, **arguments))
    if "neftune_noise_alpha" not in arguments:  # whose noise is by place
        assert_close(found, packed)


def test_two_processes_see_the_rows_that_one_with_batches_of_twice_the_size_sees(taught, toy_rows):
    rows = partly(toy_rows(sst=24), sst=16)
    one = taught(rows, per_device_train_batch_size=8).get_train_dataloader().dataset
    two = taught(rows, per_device_train_batch_size=4).get_train_dataloader().dataset
    two.num_processes = 2
    for step in range(len(one)):
        (whole,), parts = one[step].values(), [two[2 * step + rank]["sst"] for rank in range(2)]
        for kind in ("rows", "unlabelled"):
            teacher = [getattr(part, kind).teacher for part in parts]
            assert np.array_equal(getattr(whole, kind).teacher, np.concatenate(teacher))


def test_a_frozen_encoder_that_reads_each_row_once_trains_the_same_heads(taught, toy_rows, monkeypatch):
    rows = partly(toy_rows(sst=12, sts=8), sst=8)
    cached = moved(taught(rows, freeze="encoder", max_steps=4))
    monkeypatch.setattr("hf_minbert.training.trainer.is_constant", lambda *given: False)
    assert_close(cached, moved(taught(rows, freeze="encoder", max_steps=4)))


def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(taught, toy_rows, tiny_model, tmp_path):
    ends = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-2")):
        given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "optim": "adamw_torch"}
        model = tiny_model(hidden_dropout_prob=0.1, seed=0 if resume is None else 9)
        trainer = taught(partly(toy_rows(sst=14, sts=8), sst=8), model=model, **given)
        trainer.train(resume_from_checkpoint=resume)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_without_teachers_a_row_without_a_label_is_refused(make_trainer, toy_rows):
    with pytest.raises(MinBertError, match="a label of task 'sst' must be"):
        make_trainer(train=partly(toy_rows(sst=8), sst=4), train_tasks=["sst"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("arguments", [{}, {"regularizer": "smart"}, {"regularizer": "fgm"}], ids=str)
def test_graphs_train_as_single_launches_do(taught, toy_rows, tiny_model, arguments):
    """A recorded step with rows of both kinds."""
    found = []
    for graphs in ("off", "auto"):
        given = {"packing": True, "use_cpu": False, "max_steps": 12, "learning_rate": 0.01, "cuda_graphs": graphs}
        trainer = taught(partly(toy_rows(sst=14, sts=8), sst=8), model=tiny_model(), **given, **arguments)
        trainer.train()
        found.append(trainer)
    plain, graphed = found
    assert plain.step.graphs is None and graphed.step.graphs._recordings
    for left, right in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-3)


# ---- Files


@pytest.fixture
def start(tiny_bert, course_dir, saved_teacher, tmp_path):
    """`start(*words)`: trains a recipe with a teacher."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\noutput_dir: {tmp_path / 'student'}\n"
        f"teachers: [{saved_teacher}]\ntasks: [sst, sts]\nmax_steps: 3\nper_device_train_batch_size: 4\n"
        "save_strategy: 'no'\ndisable_tqdm: true\n",
        encoding="utf-8",
    )
    return lambda *words: train(read_recipe(path, [*words, "overwrite=true"]))


@pytest.fixture
def saved_teacher(tiny_model, tiny_tokenizer, tmp_path) -> str:
    tiny_model(["sst", "sts"], seed=1).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer.save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def write(path, texts, labels=None) -> str:
    lines = ["sentence" + ("\tsentiment" if labels else "")]
    lines += [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)] if labels else texts
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_labels_of_unlabelled_files_are_not_read(start, tmp_path):
    texts, weights = ["a good film 1", "the dog plays 2", "why is it 3"], []
    for name, labels in (("none", None), ("some", "013"), ("no.such", ["wrong", "-1", ""])):
        file = write(tmp_path / f"{name}.tsv", texts, labels)
        start(f"tasks={{sst: {{unlabelled: {file}}}, sts: null}}")
        weights.append((tmp_path / "student" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]  # the same steps on the same processor
    start()
    assert (tmp_path / "student" / "model.safetensors").read_bytes() != weights[0]


def test_rows_without_labels_that_are_to_be_scored_are_dropped(course_dir, tmp_path):
    (task,) = get_tasks({"sst": {"unlabelled": [write(tmp_path / "a.tsv", ["new one", "Good 0!", "  "])]}})
    dev = (course_dir / "ids-sst-dev.csv").read_text().splitlines()[1].split("\t")[2]
    assert dev.split()[:2] == ["good", "0"]
    rows, counts = load_training({"sst": task}, ["sst"], course_dir, seed=0, held_out=HeldOut.of([task], course_dir))
    columns = rows["sst"][:]
    assert (columns["sentence"][-1], columns["label"][-1]) == ("new one", None)
    assert len(columns["label"]) == 13 and None not in columns["label"][:-1]
    assert counts["unlabelled"]["sst"]["dropped"] == 1


def test_new_pairs_are_of_the_tasks_sentences_and_the_same_for_every_seed(start, course_dir, tmp_path, caplog):
    caplog.set_level("INFO", "hf_minbert")
    kept = []
    for seed in (1, 2):
        start("tasks={sst: null, sts: {unlabelled_pairs: 1.0}}", f"seed={seed}")
        kept.append({path.name: path.read_text() for path in (tmp_path / "student" / "teachers" / "answers").iterdir()
                     if path.suffix == ".json"})  # fmt: skip
    ((name, text),) = kept[0].items()
    assert kept[1] == kept[0] and name.startswith("pairs-sts-")
    pairs = json.loads(text)
    rows = [line.split("\t")[2:4] for line in (course_dir / "sts-train.csv").read_text().splitlines()[1:]]
    held = [line.split("\t")[2:4] for split in ("dev", "test-student")
            for line in (course_dir / f"sts-{split}.csv").read_text().splitlines()[1:]]  # fmt: skip
    assert len(pairs) == len(rows) == 8
    assert {first for first, _ in pairs} <= {row[0].strip() for row in rows}
    assert not {key_of(tuple(pair)) for pair in pairs} & {key_of(tuple(row)) for row in [*rows, *held]}
    assert "sts: 8 rows have no label: the teachers' answers alone" in caplog.text
    assert json.loads((tmp_path / "student" / "metrics.json").read_text())["global_step"] == 3


def test_new_pairs_change_nothing_of_what_the_student_draws(start, tmp_path):
    """With teachers that count for nothing the student is, but for rounding, that without new pairs."""
    found = []
    for entry in ("null", "{unlabelled_pairs: 1.0}"):
        # By Adam, a bias whose gradient is rounding alone would move by the learning rate.
        start(f"tasks={{sst: null, sts: {entry}}}", "distill_weight=0.0", "optim=sgd")
        found.append(load_file(tmp_path / "student" / "model.safetensors"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)


def test_own_rows_with_a_blank_label_are_learnt_from_teachers_too(start, tmp_path, caplog):
    caplog.set_level("INFO", "hf_minbert")
    texts, labels = ["a good film", "the dog plays", "why is it", "bad", ""], ["0", "", "3", "4", ""]
    file = write(tmp_path / "own.tsv", texts, labels)
    task = f"tasks={{sst: {{files: {{train: {file}, dev: ids-sst-dev.csv}}}}, sts: null}}"
    start(task)
    assert (
        "sst: 1 row has no label: the teachers' answers" in caplog.text and "1 of 5 rows are left out" in caplog.text
    )
    with pytest.raises(MinBertError, match="must not be blank"):
        start(task, "strict_data=true")
    caplog.clear()
    start(task, "teachers=null")
    assert "2 of 5 rows are left out" in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["tasks={sst: {unlabelled_pairs: 1}, sts: null}"],
            "new pairs of the sentences of pairs, and the task has one",
        ),
        (["tasks={sst: null, sts: {unlabelled_pairs: 1}}", "teachers=null"], "`unlabelled_pairs` of 'sts' is learnt"),
        (["tasks={sst: null, sts: {unlabelled_pairs: -1}}"], "`unlabelled_pairs` must be a number from 0. Found -1"),
        (["tasks={sst: {unlabelled: []}, sts: null}"], "`unlabelled` must be a path or a list of them"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(start, words, said):
    with pytest.raises(MinBertError, match=said):
        start(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["teachers=null"], "`unlabelled` of 'sst' is learnt from teachers, and there are none"),
        (["share_rows=true"], "`unlabelled` of 'sst' does not go with `share_rows: true`"),
    ],
)
def test_what_does_not_go_with_them_is_refused(start, tmp_path, words, said):
    file = write(tmp_path / "a.tsv", ["new one"])
    with pytest.raises(MinBertError, match=said):
        start(f"tasks={{sst: {{unlabelled: {file}}}, sts: null}}", *words)
