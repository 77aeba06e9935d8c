"""A file with labels of several tasks: which tasks share its rows, what each gets of them, the rounds of a group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_minbert import TASKS, Task
from hf_minbert.data import tables
from hf_minbert.data.files import load_split
from hf_minbert.data.leaks import HeldOut, load_training
from hf_minbert.data.rounds import Cycle, Once, RowSampler
from hf_minbert.data.rows import EncodedRows, SharedRows
from hf_minbert.data.sharing import by_training_rows, load_together
from hf_minbert.errors import MinBertError
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

CSV = """id,text,intent,urgency
a,"buy, now",buy,yes
b,what is it,ask,
c,,tell,no
d,a film,,no
e,nothing here,,
f,say so,tell,no
"""
INTENT = Task(
    "intent", "classes", ("text",), label_column="intent", labels=("ask", "tell", "buy"),
    files={"train": "mail.csv", "dev": "mail.csv"},
)  # fmt: skip
URGENCY = replace(INTENT, name="urgency", kind="binary", label_column="urgency", labels=("no", "yes"))


@pytest.fixture
def mail(tmp_path) -> Path:
    (tmp_path / "mail.csv").write_text(CSV)
    return tmp_path


def names(groups: list[list[Task]]) -> list[list[str]]:
    return [[task.name for task in group] for group in groups]


def test_tasks_of_one_file_and_its_texts_are_a_group(mail):
    renamed = replace(URGENCY, name="renamed", text_columns=("words",), columns={"words": "text"})
    subject = replace(INTENT, name="subject", columns={"text": "subject"})
    other = replace(INTENT, name="other", files={"train": "other.csv"})
    borrows = replace(INTENT, name="borrows", sources=({"task": "intent"},))
    found = by_training_rows([INTENT, subject, URGENCY, other, borrows, renamed], mail)
    assert names(found) == [["intent", "urgency", "renamed"], ["subject"], ["other"], ["borrows"]]


def test_a_second_annotator_of_a_task_of_the_package(tmp_path):
    second = replace(TASKS["sst"], name="second", label_column="second")
    assert names(by_training_rows([TASKS["sst"], TASKS["sts"], second], tmp_path)) == [["sst", "second"], ["sts"]]


def test_a_row_stays_for_all_where_one_has_its_label(mail, caplog):
    found = load_together([INTENT, URGENCY], mail, "train")
    assert {name: rows[:]["id"] for name, rows in found.items()} == dict.fromkeys(found, ["a", "b", "d", "f"])
    assert found["intent"][:]["text"] == found["urgency"][:]["text"] == ["buy, now", "what is it", "a film", "say so"]
    assert found["intent"][:]["label"] == [2, 0, None, 1] and found["urgency"][:]["label"] == [1, None, 0, 0]
    assert "2 of 6 rows are left out" in caplog.text and "c, e" in caplog.text


def test_strict_data_allow_a_blank_label_and_no_blank_row(mail):
    with pytest.raises(MinBertError, match="line 4: 'text' must not be blank"):
        load_together([INTENT, URGENCY], mail, "train", strict=True)
    (mail / "mail.csv").write_text("text,intent,urgency\ngood,ask,\nbad,,\n")
    with pytest.raises(MinBertError, match="line 3: 'intent' and 'urgency' must not be blank"):
        load_together([INTENT, URGENCY], mail, "train", strict=True)


def test_a_column_of_labels_that_is_missing_or_empty_is_named(mail):
    (mail / "mail.csv").write_text("text,intent\ngood,ask\n")
    with pytest.raises(MinBertError, match="Task 'urgency': no labels in split 'train': .* no column 'urgency'"):
        load_together([INTENT, URGENCY], mail, "train")
    (mail / "mail.csv").write_text("text,intent,urgency\ngood,ask,\n")
    with pytest.raises(MinBertError, match="Task 'urgency' has no label in split 'train'"):
        load_together([INTENT, URGENCY], mail, "train")


def test_the_file_is_read_once(mail, monkeypatch):
    read = []
    parts = tables.read_parts
    monkeypatch.setattr(tables, "read_parts", lambda file, size: read.append(file.path) or parts(file, size))
    tasks = {task.name: task for task in (INTENT, URGENCY)}
    for together, times in ((True, 1), (False, 2)):
        read.clear()
        loaded, _ = load_training(tasks, tasks, mail, seed=0, held_out=HeldOut(), together=together)
        assert len(read) == times
        assert [len(rows) for rows in loaded.values()] == ([4, 4] if together else [3, 3])


def test_alone_a_task_has_its_own_rows(mail):
    assert load_split(URGENCY, mail, "train")[:]["id"] == ["a", "d", "f"]


# ---- Rounds


def encoded(labelled: list[bool] | None, count: int = 12) -> EncodedRows:
    """Rows of one token, which is their number."""
    ids, starts = np.arange(count, dtype=np.int32), np.arange(count + 1)
    masks = None if labelled is None else np.array(labelled)
    return EncodedRows(ids, np.zeros(count, np.int8), starts, 1, labels=np.arange(count), labelled=masks)


def seen_at(step: list[SharedRows]) -> tuple[list[int], float]:
    """Which rows the processes have at a step, and the mean over processes of what each makes of its labelled ones."""
    means = []
    for one in step:
        assert all(np.array_equal(one.rows["all"].ids, of.ids) for of in one.rows.values())
        assert one.rows.keys() == step[0].rows.keys()
        few = one.rows.get("few")
        own = few.labels[few.labelled] if few is not None else np.array([])
        means.append(one.shares["few"] * own.mean() if len(own) else 0.0)
    return sorted(np.concatenate([one.rows["all"].ids for one in step]).tolist()), float(np.mean(means))


@pytest.mark.parametrize("mixing", [Cycle, Once])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_mean_over_processes_is_that_over_the_labelled_rows_of_all(mixing, batch):
    """Whatever the processes, a step has the same rows, and the same mean over those with a label, if any."""
    data = {"all": encoded(None), "few": encoded([n % 5 == 1 for n in range(12)]), "other": encoded(None, 7)}
    shared = RowSampler("all", 12, seed=3)
    samplers = {"all": shared, "few": shared, "other": RowSampler("other", 7, seed=3)}
    steps = {}
    for processes in (1, 2, 4):
        sizes = dict.fromkeys(data, batch * 4 // processes)
        rounds = mixing(data, sizes, samplers, num_processes=processes, groups=[["all", "few"]])
        held = [rounds[index].get("all") for index in range(len(rounds))]
        of_steps = [held[first : first + processes] for first in range(0, len(held), processes)]
        assert all(None not in step or step == [None] * processes for step in of_steps)
        steps[processes] = [seen_at(step) for step in of_steps if step[0] is not None]
    rows, means = zip(*steps[1], strict=True)
    for several in (2, 4):
        found = tuple(zip(*steps[several], strict=True))
        assert found[0] == rows and found[1] == pytest.approx(means)


# ---- A run


def test_a_recipe_trains_on_a_file_with_two_columns_of_labels(tiny_bert, mail):
    recipe = mail / "mail.yaml"
    recipe.write_text(f"""
model_name_or_path: {tiny_bert}
output_dir: {mail / "run"}
data_dir: {mail}
share_rows: true
disable_tqdm: true
max_steps: 3
logging_steps: 1
tasks:
  intent: {{kind: classes, text_columns: text, label_column: intent, labels: [ask, tell, buy], files: &mail {{train: mail.csv, dev: mail.csv}}}}
  urgency: {{kind: binary, text_columns: text, label_column: urgency, labels: ["no", "yes"], files: *mail}}
""")  # noqa: E501
    metrics = train(read_recipe(recipe))
    assert {"eval_intent_accuracy", "eval_urgency_accuracy"} <= metrics.keys()
    log = [json.loads(line) for line in (mail / "run" / "log.jsonl").read_text().splitlines()]
    assert all({"loss_intent", "loss_urgency"} <= entry.keys() for entry in log if "loss" in entry)
