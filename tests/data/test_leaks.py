"""The leak guard on planted rows, and on the real data, whose overlaps have been counted by hand."""

import csv
from pathlib import Path

import pytest

from hf_minbert.data.files import load_split, pinned
from hf_minbert.data.leaks import HeldOut, drop_leaks, guarded_tasks, load_training, overlap, plain
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, get_tasks

HELD_PAIR = ("A man can't swim, she said.", "“Café” in the São Paulo sun")


@pytest.fixture
def held_out() -> HeldOut:
    found = HeldOut()
    found.add("sts dev", [HELD_PAIR, ("A dog runs.", "A cat sits.")])
    found.add("sst test", ["A tender film, and very funny too.", "!!!"])
    return found


# ---- What counts as the same


@pytest.mark.parametrize(
    "copy",
    [
        "a man CAN'T swim, she said.",
        "  A man\tcan't   swim ,she said . ",
        "A man can\u2019t swim, she said.",
        '"A man can\'t swim", she said',
        "A man can`t swim; she said!",
        "\uff21 man can't sw\u200bim, she sa\u00adid.",  # full width, and what cannot be seen
        "A\u00a0man can't swim,\u2003she said.",
    ],
)
def test_a_planted_copy_is_found(held_out, copy):
    kept, counts = drop_leaks([(copy, HELD_PAIR[1]), ("A man swims", HELD_PAIR[1])], held_out)
    assert kept == [("A man swims", HELD_PAIR[1])]
    assert counts == {"rows": 2, "dropped": 1, "matches": {"sts dev": {"rows": 1, "sentences": 3}}}


def test_letters_are_the_same_however_they_are_composed():
    assert plain("Cafe\u0301 \ufb01lm") == plain("CAFÉ film") == "café film"
    assert plain("cafe") != plain("café")
    assert plain("STRASSE") == plain("Straße")
    assert plain("कि") != plain("क"), "a vowel sign is no punctuation"


def test_a_text_of_punctuation_is_not_like_every_other():
    assert plain(" ?! ") == "?!" and plain("...") != plain("?!")
    assert plain(" ") == ""


def test_other_words_are_other_texts():
    texts = ["a dog", "a dog runs", "dog a", "a dogs", "a d og", "a 1", "a 2"]
    assert len(set(map(plain, texts))) == len(texts)


# ---- What is dropped and counted


def test_a_pair_is_found_in_either_order(held_out):
    pairs = [("a cat sits", "a dog runs"), ("a dog runs", "a cat sits"), ("a dog runs", "a dog runs")]
    kept, counts = drop_leaks(pairs, held_out)
    assert kept == pairs[2:]
    assert counts["matches"] == {"sts dev": {"rows": 2, "sentences": 6}}


def test_single_sentences_are_counted_and_dropped_if_asked(held_out):
    rows = [("a dog runs", "a fox runs"), ("a fox runs", "a wolf runs")]
    kept, counts = drop_leaks(rows, held_out)
    assert kept == rows and counts["dropped"] == 0
    assert counts["matches"] == {"sts dev": {"rows": 0, "sentences": 1}}
    kept, counts = drop_leaks(rows, held_out, drop_sentences=True)
    assert kept == rows[1:] and counts["dropped"] == 1


def test_single_texts_are_whole_rows_of_a_task_of_single_texts(held_out):
    texts = ["a TENDER film and very funny too", "A cat sits", "Something else", "!!!", "???"]
    kept, counts = drop_leaks(texts, held_out)
    assert kept == ["A cat sits", "Something else", "???"]
    assert counts == {
        "rows": 5, "dropped": 2,
        "matches": {"sts dev": {"rows": 0, "sentences": 1}, "sst test": {"rows": 2, "sentences": 2}},
    }  # fmt: skip
    assert drop_leaks(texts, held_out, drop_sentences=True)[0] == ["Something else", "???"]


def test_a_blank_text_is_like_no_other():
    held_out = HeldOut()
    held_out.add("para test", [("", "A dog runs."), "", " "])
    assert drop_leaks([("", "A dog runs."), ""], held_out) == (
        [("", "A dog runs."), ""],
        {"rows": 2, "dropped": 0, "matches": {}},
    )


def test_a_pair_of_equal_texts_is_not_the_single_text():
    held_out = HeldOut()
    held_out.add("sst dev", ["A dog runs."])
    kept, counts = drop_leaks([("a dog runs", "a dog runs")], held_out)
    assert len(kept) == 1 and counts["matches"] == {"sst dev": {"rows": 0, "sentences": 2}}


def test_overlap_counts_the_held_out_rows():
    held_out = HeldOut()
    held_out.add("sts dev", [("One", "two"), ("two", "one!"), ("three", "four")])
    assert overlap([("ONE", "TWO")] * 5, held_out) == {"sts dev": {("one", "two"): 2}}
    assert overlap([("one", "three")], held_out) == {}


# ---- In a run's data


@pytest.fixture
def folder(write_course_files, tmp_path) -> Path:
    """The toy course files, with a file of rows to borrow: one leaks, one shares a sentence, two do neither."""
    folder = write_course_files(tmp_path / "data")
    dev = list(csv.DictReader((folder / "sts-dev.csv").open(encoding="utf-8"), delimiter="\t"))[2]
    first, second = dev["sentence1"], dev["sentence2"]
    rows = [(second.upper(), f'"{first}"', 1), (first, "why", 2), ("a", "b", 3), ("c", "d", 5)]
    with (folder / "mine.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("sentence_A", "sentence_B", "relatedness_score"), *rows])
    return folder


def loaded(folder: Path, chosen: dict, names=None, **options):
    tasks = {task.name: task for task in get_tasks(chosen)}
    held_out = HeldOut.of(guarded_tasks(tasks.values(), None, folder), folder)
    return load_training(tasks, names or tasks, folder, seed=0, held_out=held_out, **options)


MINE = {"files": "mine.csv", "mapping": "relatedness_to_score"}


def test_borrowed_rows_follow_the_tasks_own_without_those_that_leak(folder, caplog):
    rows, counts = loaded(folder, {"sts": {"sources": [MINE]}})
    assert rows["sts"]["id"][:8] == [f"sts-train-{number}" for number in range(8)]
    assert rows["sts"]["id"][8:] == ["mine.csv:1", "mine.csv:2", "mine.csv:3"]
    assert rows["sts"]["label"][8:] == [1.25, 2.5, 5.0]
    (found,) = counts["borrowed"]["sts"]
    assert (found["source"], found["rows"], found["dropped"]) == ("mine.csv", 4, 1)
    assert found["matches"]["sts dev"] == {"rows": 1, "sentences": 3}
    assert "sts borrows 3 rows from mine.csv. 1 more is dropped, as it stands in rows to be scored." in caplog.text
    rows, _ = loaded(folder, {"sts": {"sources": [MINE]}}, drop_sentences=True)
    assert rows["sts"]["id"][8:] == ["mine.csv:2", "mine.csv:3"]


def test_dev_and_test_of_tasks_that_the_run_has_not_are_held_out_too(folder):
    mood = {"kind": "classes", "text_columns": "sentence", "label_column": "sentiment", "labels": list("abcde")}
    _, counts = loaded(folder, {"mood": {**mood, "files": {"train": "ids-sst-dev.csv"}}})
    assert counts["given"]["mood"]["sst dev"] == 7
    tasks = get_tasks({"sst": None})
    assert [task.name for task in guarded_tasks(tasks, None, folder)] == ["sst", "para", "sts"]
    assert guarded_tasks(tasks, ["cfimdb"], folder) == [TASKS["cfimdb"], *tasks]
    assert guarded_tasks(tasks, None, "hub") == guarded_tasks(tasks, [], folder) == tasks


def test_two_tasks_of_one_name_are_both_held_out_and_a_row_of_both_counts_once(folder):
    """As where a later stage scores a task on rows of its own."""
    mine = {"files": {"train": "ids-sst-train.csv", "dev": "ids-sst-test-student.csv", "test": "ids-sst-dev.csv"}}
    tasks = get_tasks({"sst": mine})
    assert guarded_tasks(tasks, ["sst"], folder) == [TASKS["sst"], *tasks]
    both = HeldOut.of(guarded_tasks(tasks, ["sst"], folder), folder)
    alone = HeldOut.of([TASKS["sst"]], folder)
    assert both.rows["sst dev"] == both.rows["sst test"] == alone.rows["sst dev"] | alone.rows["sst test"]
    other = get_tasks({"sst": {"files": {**TASKS["sst"].files, "train": "more.csv"}}})
    assert guarded_tasks(other, ["sst"], folder) == other  # the same rows are scored


def test_what_held_out_names_wrongly_is_said_of_it(folder):
    with pytest.raises(MinBertError, match="`held_out`: Unknown task 'stt'. Did you mean 'sts'?"):
        guarded_tasks([], ["stt"], folder)


def test_overlap_of_a_tasks_own_splits_is_counted_and_stays(folder):
    chosen = {"sst": {"files": {"train": ["ids-sst-train.csv", "ids-sst-dev.csv"], "dev": "ids-sst-dev.csv"}}}
    rows, counts = loaded(folder, chosen)
    assert len(rows["sst"]) == 19
    assert counts["given"]["sst"]["sst dev"] == 7 and counts["borrowed"] == {}


def test_a_task_may_have_borrowed_rows_only(folder):
    entry = {"kind": "score", "text_columns": ["sentence1", "sentence2"], "range": [0, 5]}
    rows, counts = loaded(folder, {"sick": {**entry, "sources": [MINE]}})
    assert len(rows["sick"]) == 3 and "sick" not in counts["given"]
    dev = {"files": "sts-dev.csv", "columns": {"label": "similarity"}}
    with pytest.raises(MinBertError, match="'sick' has no training rows: all rows of its `sources` are also dev"):
        loaded(folder, {"sick": {**entry, "sources": [dev]}})


@pytest.mark.parametrize("name", ["nli", "sick"])
def test_such_a_task_asks_the_hub_for_nothing(folder, monkeypatch, name):
    monkeypatch.setattr("hf_minbert.data.hub._download", lambda *_: pytest.fail("asked"))
    entry = {"kind": "score", "text_columns": ["premise", "hypothesis"], "range": [0, 5], "sources": [MINE]}
    rows, counts = loaded(folder, {name: entry})
    assert rows[name]["id"] == ["mine.csv:1", "mine.csv:2", "mine.csv:3"]
    (task,) = get_tasks({name: entry})
    assert pinned(task, folder) == task
    with pytest.raises(MinBertError, match=rf"Task '{name}' names no file for split 'dev'. Splits it has: \(none\)"):
        load_split(task, folder, "dev")


def test_only_the_tasks_asked_for_are_read(folder):
    chosen = {"sst": None, "para": {"sources": [{"files": "not there"}]}}
    assert list(loaded(folder, chosen, ["sst"])[0]) == ["sst"]


def test_a_bad_source_is_refused_before_any_rows_are_read(folder, monkeypatch):
    monkeypatch.setattr("hf_minbert.data.leaks.load_split", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(MinBertError, match="Task 'sts', source 1: Unknown mapping"):
        loaded(folder, {"sst": None, "sts": {"sources": [{"files": "mine.csv", "mapping": "score"}]}})


def test_a_split_that_is_not_there_is_said(folder, caplog):
    caplog.set_level("INFO", "hf_minbert")
    (folder / "sts-test-student.csv").unlink()
    assert "sts dev" in HeldOut.of([TASKS["sts"]], folder).rows
    assert "No rows of sts test were found, so training rows are not checked against them." in caplog.messages


def test_of_a_run_only_its_own_tasks_and_those_of_held_out_are_said_to_lack_a_split(folder, caplog):
    caplog.set_level("INFO", "hf_minbert")
    (folder / "sts-test-student.csv").unlink()
    (folder / "own.csv").write_text("a,label\nx,1\n", encoding="utf-8")
    entry = {"kind": "score", "text_columns": ["a"], "range": [0, 5], "files": {"dev": "own.csv"}}
    own = get_tasks({"mine": entry})
    held_out = HeldOut.of_run(own, None, str(folder))
    assert {"sts dev", "mine dev"} <= {*held_out.rows}
    assert "No rows of mine test were found, so training rows are not checked against them." in caplog.messages
    caplog.clear()
    HeldOut.of_run(own, ["sts"], str(folder))
    assert (
        "No rows of sts test, mine test were found, so training rows are not checked against them." in caplog.messages
    )


def test_tasks_that_read_the_same_rows_are_told_of_once(folder, caplog):
    caplog.set_level("INFO", "hf_minbert")
    (folder / "train.csv").write_text("text,one,two\na,0,1\nb,1,0\nc,0,0\n", encoding="utf-8")
    (folder / "dev.csv").write_text("text,one,two\na,0,1\nb,1,0\nd,0,0\n", encoding="utf-8")
    (folder / "other.csv").write_text("text,one,two\nc,0,1\n", encoding="utf-8")
    files = {"train": "train.csv", "dev": "dev.csv"}
    same = {"kind": "classes", "text_columns": ["text"], "labels": ["no", "yes"], "files": files}
    entries = {name: {**same, "columns": {"label": name}} for name in ("one", "two")}
    entries["three"] = {**same, "columns": {"label": "two"}, "files": {**files, "dev": "other.csv"}}
    tasks = {task.name: task for task in get_tasks(entries)}
    _, counts = load_training(tasks, tasks, folder, seed=0, held_out=HeldOut.of(tasks.values(), folder))
    assert [said for said in caplog.messages if "also found" in said] == [
        "Dev or test rows were also found in training rows and not removed, so scores on them are too high: "
        "2 rows of one dev, two dev in one, two, three; 1 row of three dev in one, two, three."
    ]
    assert counts["given"] == dict.fromkeys(tasks, {"one dev": 2, "two dev": 2, "three dev": 1})


def test_labels_of_dev_and_test_are_not_looked_at(folder):
    path = folder / "sts-dev.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    broken = [lines[0], *(line.rsplit("\t", 1)[0] + "\tno score" for line in lines[1:])]
    path.write_text("\n".join(broken) + "\n", encoding="utf-8")
    assert sum(HeldOut.of([TASKS["sts"]], folder).rows["sts dev"].values()) == 5


# ---- The real data


def test_the_counts_are_those_of_the_real_files(cs224n):
    extra = cs224n.parent / "extra"
    if not (extra / "sick-train.tsv").is_file():
        pytest.skip(f"{extra / 'sick-train.tsv'} is not there")
    strings = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
    mrpc = {"files": str(extra / "mrpc-train.tsv"), "quotes": False}
    chosen = {
        "sst": None,
        "para": {"sources": [{**mrpc, "columns": strings}]},
        "sts": {
            "sources": [
                {"files": str(extra / "sick-train.tsv"), "mapping": "relatedness_to_score"},
                {**mrpc, "mapping": "paraphrase_to_score"},
            ]
        },
    }
    rows, counts = loaded(cs224n, chosen, ["sst", "sts", "para"])
    mrpc = {"sts dev": {"rows": 69, "sentences": 168}, "sts test": {"rows": 151, "sentences": 359}}
    sick = {"sts dev": {"rows": 13, "sentences": 348}, "sts test": {"rows": 15, "sentences": 566}}
    found = {task: [source["matches"] for source in sources] for task, sources in counts["borrowed"].items()}
    assert found == {"sts": [sick, mrpc], "para": [mrpc]}
    assert (counts["given"]["sts"]["sts dev"], counts["given"]["sst"]["sst dev"]) == (18, 3)
    assert len(rows["sts"]) == 6040 + (4500 - 28) + (4076 - 220)
