"""What the trainer accepts: rows of every kind, tasks by name, one dataset alone where it is clear whose it is."""

import pytest
import torch

from hf_minbert import MinBertError, Task
from hf_minbert.data.encoding import encode

SIZES = {"sst": 9, "para": 6, "sts": 5}
DEV = {"sst": 4, "para": 4, "sts": 4}


def trained(trainer):
    trainer.train()
    return trainer.model.state_dict()


def assert_equal(found, expected):
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class MapStyle(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def hf_dataset(rows):
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def encoded(rows, trainer):
    return {name: encode(rows[name], trainer.tasks[name], trainer.processing_class, 64) for name in rows}


@pytest.fixture
def expected(make_trainer):
    """What training on plain lists gives."""
    return trained(make_trainer(train=SIZES))


@pytest.mark.parametrize("wrap", [MapStyle, hf_dataset, tuple])
def test_rows_of_every_kind_train_alike(make_trainer, toy_rows, expected, wrap):
    rows = {name: wrap(rows) for name, rows in toy_rows(**SIZES).items()}
    assert_equal(trained(make_trainer(train=rows)), expected)


@pytest.mark.parametrize("wrap", [list, MapStyle, hf_dataset])
def test_encoded_rows_train_alike_and_need_no_tokenizer(make_trainer, toy_rows, expected, wrap):
    rows = encoded(toy_rows(**SIZES), make_trainer())
    assert "sentence" not in rows["sst"][0]
    rows = {name: wrap(rows) for name, rows in rows.items()}
    assert_equal(trained(make_trainer(train=rows, tokenizer=None)), expected)


def test_a_dataset_dict_and_columns_that_nobody_asked_for(make_trainer, toy_rows, expected):
    datasets = pytest.importorskip("datasets")
    rows = {
        name: datasets.Dataset.from_list([{"id": f"{name}-{i}", **row, "note": None} for i, row in enumerate(rows)])
        for name, rows in toy_rows(**SIZES).items()
    }
    assert_equal(trained(make_trainer(train=datasets.DatasetDict(rows))), expected)


def test_labels_by_the_tasks_own_column_or_by_labels(make_trainer, toy_rows, expected):
    rows = toy_rows(**SIZES)
    names = {"sst": "sentiment", "para": "labels", "sts": "similarity"}
    renamed = {
        name: [{names[name] if key == "label" else key: value for key, value in row.items()} for row in rows[name]]
        for name in rows
    }
    assert_equal(trained(make_trainer(train=renamed)), expected)


def test_the_order_in_which_tasks_are_given_does_not_matter(make_trainer, toy_rows, expected):
    rows = toy_rows(**SIZES)
    found = trained(make_trainer(train={name: rows[name] for name in reversed(rows)}))
    assert_equal(found, expected)


def test_longer_inputs_are_cut_to_max_length(build_trainer, make_trainer, toy_rows, tmp_path):
    rows = {"sst": [{"sentence": "good " * 80, "label": 1}] * 4}
    (batch,) = list(make_trainer(train=rows, train_tasks=["sst"]).get_train_dataloader())
    assert batch["sst"]["input_ids"].shape == (4, 64)
    with pytest.raises(MinBertError, match="`max_length` must be from 8 to 64"):
        _with_max_length(make_trainer, 65, rows)
    (batch,) = list(_with_max_length(make_trainer, 10, rows).get_train_dataloader())
    assert batch["sst"]["input_ids"].shape == (4, 10)


def _with_max_length(make_trainer, max_length, rows):
    trainer = make_trainer(train=rows, train_tasks=["sst"])
    return type(trainer)(
        trainer.model,
        trainer.args,
        train_dataset=rows,
        processing_class=trainer.processing_class,
        max_length=max_length,
    )


# ---- which tasks


@pytest.mark.parametrize("missing", ["sst", "para", "sts"])
def test_a_task_in_training_without_rows_is_refused(make_trainer, missing):
    sizes = {name: size for name, size in SIZES.items() if name != missing}
    with pytest.raises(MinBertError) as refusal:
        make_trainer(train=sizes)
    assert f"`train_dataset` has no rows of {missing}." in str(refusal.value)
    assert f"set `train_tasks` to the tasks it has: {', '.join(sizes)}." in str(refusal.value)
    make_trainer(train=sizes, train_tasks=list(sizes))
    with pytest.raises(MinBertError, match=f"`eval_dataset` has no rows of {missing}.*`eval_tasks`"):
        make_trainer(dev=sizes)


def test_rows_of_a_task_that_is_not_trained_are_left_alone(make_trainer, toy_rows):
    rows = {**toy_rows(**SIZES), "para": [{"not": "even rows of para"}]}
    trainer = make_trainer(train=rows, train_tasks=["sst", "sts"])
    assert list(trainer.train_dataset) == ["sst", "sts"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"train": {"sstt": [{"sentence": "a", "label": 1}]}},
            "`train_dataset`: Unknown task 'sstt'. Did you mean 'sst'",
        ),
        ({"dev": {"cfimdb": [{"sentence": "a", "label": 1}]}}, "`eval_dataset`: Unknown task 'cfimdb'"),
        ({"train_tasks": ["sst", "prar"]}, "`train_tasks`: Unknown task 'prar'. Did you mean 'para'"),
        ({"eval_tasks": ["stts"]}, "`eval_tasks`: Unknown task 'stts'. Did you mean 'sts'"),
        ({"task_batch_sizes": {"ssts": 4}}, "`task_batch_sizes`: Unknown task 'ssts'"),
        ({"task_weights": {"ssts": 4}}, "`task_weights`: Unknown task 'ssts'"),
        (
            {"task_weights": {"sst": 0, "para": 0.0, "sts": 0}},
            "`task_weights` are 0 for all tasks in training: sst, para, sts. Nothing would be trained.",
        ),
        ({"task_weights": {"sst": 0}, "train_tasks": ["sst"]}, "0 for all tasks in training: sst. Nothing"),
        ({"train_tasks": []}, "`train_tasks` is empty. Name at least one of: sst, para, sts."),
        ({"eval_strategy": "epoch"}, "Pass `eval_dataset={task: rows}`"),
        ({"tokenizer": None}, "there is no tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(make_trainer, given, said):
    with pytest.raises(MinBertError) as refusal:
        make_trainer(**given)
    assert said in str(refusal.value)


def test_a_task_named_twice_is_trained_once(make_trainer):
    trainer = make_trainer(train_tasks=["sst", "sts", "sst"])
    assert trainer.train_tasks == ["sst", "sts"]


def test_training_without_rows_is_refused(build_trainer, tiny_model, tmp_path, make_trainer):
    trainer = make_trainer()
    bare = type(trainer)(trainer.model, trainer.args, processing_class=trainer.processing_class)
    with pytest.raises(MinBertError, match="nothing to train on"):
        bare.train()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "dataset is empty"),
        ([{"sentence": "good"}], "rows of 'sst' have no labels"),
        ([{"sentence": "good", "label": 5}], "must be a whole number from 0 to 4"),
        ([{"text": "good", "label": 5}], "has no column 'sentence'"),
    ],
)
@pytest.mark.parametrize("argument", ["train", "dev"])
def test_rows_that_cannot_be_used_are_refused(make_trainer, toy_rows, rows, said, argument):
    with pytest.raises(MinBertError, match=said):
        make_trainer(**{argument: {**toy_rows(**SIZES), "sst": rows}})


# ---- a dataset alone


def test_a_dataset_alone_belongs_to_the_only_task(make_trainer, tiny_model, toy_rows):
    rows, dev = toy_rows(sts=9)["sts"], toy_rows(sts=5)["sts"]
    alone = make_trainer(tiny_model(["sts"]), train=rows, dev=dev)
    by_name = make_trainer(tiny_model(["sts"]), train={"sts": rows}, dev={"sts": dev})
    assert_equal(trained(alone), trained(by_name))
    assert alone.evaluate()["eval_sts_pearson"] == by_name.evaluate()["eval_sts_pearson"]
    assert alone.evaluate(dev)["eval_sts_pearson"] == by_name.evaluate()["eval_sts_pearson"]


@pytest.mark.parametrize("wrap", [list, hf_dataset])
def test_a_dataset_alone_belongs_to_the_active_task(make_trainer, tiny_model, toy_rows, wrap):
    rows = wrap(toy_rows(sts=9)["sts"])
    alone = make_trainer(tiny_model(active_task="sts"), train=rows, dev=rows)
    assert_equal(trained(alone), trained(make_trainer(train={"sts": rows}, train_tasks=["sts"])))
    assert alone.evaluate()["eval_overall"] == alone.evaluate()["eval_sts_pearson"]
    with pytest.raises(MinBertError, match="Unknown metric 'sst_accuracy'"):
        make_trainer(tiny_model(active_task="sts"), dev=rows, metric_for_best_model="sst_accuracy")


def test_a_dataset_alone_among_several_tasks_is_refused(make_trainer, tiny_model, toy_rows):
    rows = toy_rows(sst=4)["sst"]
    with pytest.raises(MinBertError, match="several tasks: sst, para, sts.*task: rows"):
        make_trainer(train=rows)
    with pytest.raises(MinBertError, match="several tasks: sst, para, sts.*task: rows"):
        make_trainer(dev=rows)
    with pytest.raises(MinBertError, match="has no rows of para"):
        make_trainer(tiny_model(active_task="sst"), train=rows, train_tasks=["sst", "para"])


def test_a_task_that_only_its_recipe_knew(make_trainer, tiny_model):
    """The trainer takes tasks from the model, not from a list of its own."""
    labels = ("no", "perhaps", "yes")
    task = Task(name="mood", kind="classes", text_columns=("words",), label_column="mood", labels=labels)
    rows = [{"words": f"good {i}", "mood": i % 3} for i in range(6)]
    trainer = make_trainer(tiny_model([task, "sts"]), train={"mood": rows}, train_tasks=["mood"], dev=None)
    trainer.train()
    metrics = trainer.evaluate({"mood": rows})
    assert {"eval_mood_accuracy", "eval_overall"} <= metrics.keys()
    assert "eval_leaderboard" not in metrics
