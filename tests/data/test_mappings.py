"""Borrowed rows: what each mapping makes of a label, which rows are drawn, what is refused."""

import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from hf_minbert.data.mappings import borrowed_rows, origin_of, pinned_sources
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import TASKS, Source, Task, get_tasks, revisions, with_revisions

PAIR = "sentence1\tsentence2"


def borrow(name: str = "sts", folder=None, seed: int = 0, strict: bool = False, others=None, **source):
    """The rows that a task borrows from this source."""
    tasks = {task.name: task for task in get_tasks({**(others or {}), name: {"sources": [source]}})}
    return borrowed_rows(tasks[name], 1, tasks, folder, seed, strict)


def labels(*args, **source) -> list:
    return [row["label"] for row in borrow(*args, **source)]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(content, name)` makes a file in the working directory and gives its name."""
    monkeypatch.chdir(tmp_path)

    def make(content: str, name: str = "rows.tsv") -> str:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return name

    return make


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- Values


def test_paraphrases_get_scores_from_their_interval_and_no_others(write):
    file = write(f"{PAIR}\tis_duplicate\n" + "".join(f"a {n}\tb {n}\t{n % 2}\n" for n in range(2000)))
    found = np.array(labels(files=file, mapping="paraphrase_to_score"))
    no, yes = found[::2], found[1::2]
    assert yes.min() >= 4 and yes.max() <= 5 and no.min() >= 0 and no.max() <= 4
    # the standard error of a mean of 1,000 is width / sqrt(12,000): 0.009 and 0.037
    assert yes.mean() == pytest.approx(4.5, abs=0.04) and no.mean() == pytest.approx(2.0, abs=0.15)
    assert yes.max() > 4.9 and no.min() < 0.1 and no.max() > 3.9


def test_scores_that_are_drawn_are_those_of_the_seed(write):
    file = write(f"{PAIR}\tis_duplicate\n" + "".join(f"a {n}\tb {n}\t1\n" for n in range(5)))
    source = {"files": file, "mapping": "paraphrase_to_score"}
    assert labels(seed=1, **source) == labels(seed=1, **source)
    assert not set(labels(seed=1, **source)) & set(labels(seed=2, **source))


def test_relatedness_from_one_to_five_becomes_zero_to_five(write):
    file = write(
        "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
        "7\tA dog runs\tA cat sits\t1\tNEUTRAL\n8\tA man\tA boy\t3\tNEUTRAL\n9\tA sea\tAn ocean\t5.0\tENTAILMENT\n"
        "10\tA fox\tA wolf\t3.4\tNEUTRAL\n"
    )
    rows = borrow(files=file, mapping="relatedness_to_score", columns={"id": "pair_ID"})
    assert [row["label"] for row in rows] == pytest.approx([0, 2.5, 5, 3.0])
    assert rows[0] == {
        "id": "rows.tsv:7", "sentence1": "A dog runs", "sentence2": "A cat sits", "label": 0.0
    }  # fmt: skip


def test_scores_fill_the_range_of_the_task(write):
    file = write(f"{PAIR}\trelatedness_score\na\tb\t1\nc\td\t2\ne\tf\t5\n")
    source = {"files": file, "mapping": "relatedness_to_score", "columns": {name: name for name in PAIR.split("\t")}}
    unit = Task("unit", "score", ("sentence1", "sentence2"), range=(-1, 1), sources=[source])
    assert [row["label"] for row in borrowed_rows(unit, 1, {}, None, 0)] == [-1, -0.5, 1]


def test_votes_are_averaged_and_the_label_counts_where_there_are_none(write):
    names = {"sentence1": "A man", "sentence2": "A boy"}
    votes = [
        (["neutral", "entailment", "entailment", "contradiction", "neutral"], "neutral", 16 / 5),
        (["contradiction", "", "neutral", None, ""], "-", 1.5),
        (["", "", "", "", ""], "entailment", 5),
        ([], "contradiction", 0),
        (None, "neutral", 3),
        (["entailment", "-"], "neutral", 5),
    ]
    file = write(
        lines(*({**names, "annotator_labels": given, "gold_label": label} for given, label, _ in votes)), "snli.jsonl"
    )
    assert labels(files=file, mapping="nli_to_score") == pytest.approx([score for *_, score in votes])


def test_without_votes_each_label_has_its_score_whatever_its_case(write, caplog):
    file = write(
        "sentence_A\tsentence_B\tentailment_judgment\n"
        "a\tb\tENTAILMENT\nc\td\tneutral\ne\tf\t-\ng\th\tContradiction\ni\tj\t\n"
    )
    assert labels(files=file, mapping="nli_to_score") == [5, 3, 0]
    (message,) = caplog.messages
    assert "2 of 5 rows are left out" in message and "2, 4" in message


def test_class_ids_of_a_saved_dataset_are_read_by_their_names(tmp_path):
    names = ["contradiction", "entailment", "neutral"]
    features = datasets.Features(
        premise=datasets.Value("string"), hypothesis=datasets.Value("string"), label=datasets.ClassLabel(names=names)
    )
    columns = {"premise": list("abcd"), "hypothesis": list("efgh"), "label": [0, 1, 2, -1]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"extra": rows}).save_to_disk(tmp_path / "nli")
    source = {"dataset": str(tmp_path / "nli"), "split": "extra", "mapping": "nli_to_score"}
    assert labels(**source) == [0, 5, 3]


def test_stars_become_classes(write):
    file = write(lines(*({"text": f"review {stars}", "stars": stars} for stars in (1, 2.0, 3, 4, 5.0))), "yelp.jsonl")
    assert labels("sst", files=file, mapping="stars_to_classes") == [0, 1, 2, 3, 4]
    file = write("class_index,review_title,review_text\n5,x,lovely\n1,y,awful\n", "yelp.csv")
    assert borrow("sst", files=file, mapping="stars_to_classes") == [
        {"id": "yelp.csv:0", "sentence": "lovely", "label": 4},
        {"id": "yelp.csv:1", "sentence": "awful", "label": 0},
    ]


@pytest.mark.parametrize("stars", ["0", "6", "3.5", "many"])
def test_other_numbers_of_stars_are_refused(write, stars):
    file = write(f"text,stars\nfine,3\nodd,{stars}\n", "yelp.csv")
    with pytest.raises(MinBertError, match=rf"yelp\.csv, line 3: .*one of the names 1, 2, 3, 4, 5.*'{stars}'"):
        borrow("sst", files=file, mapping="stars_to_classes")


def test_labels_of_the_same_meaning_stay_and_quotes_can_be_plain_characters(write):
    file = write(
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t1\t2\t"Go," he said.\tHe said "go".\n0\t3\t4\t"No\tYes"\n'
    )
    columns = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
    assert borrow("para", files=file, columns=columns, quotes=False) == [
        {"id": "rows.tsv:0", "sentence1": '"Go," he said.', "sentence2": 'He said "go".', "label": 1},
        {"id": "rows.tsv:1", "sentence1": '"No', "sentence2": 'Yes"', "label": 0},
    ]
    with pytest.raises(MinBertError, match=r"rows\.tsv, line 2: a double quote"):
        borrow("para", files=file, columns=columns)


def test_another_task_lends_its_training_rows(course_dir):
    rows = borrow(folder=course_dir, task="para", mapping="paraphrase_to_score")
    assert [row["id"] for row in rows] == [f"para:para-train-{number}" for number in range(10)]
    assert all((row["label"] >= 4) == (number % 2 == 1) for number, row in enumerate(rows))
    # its entry in the recipe says where its rows lie
    others = {"para": {"files": {"train": "quora-dev.csv"}}}
    rows = borrow(folder=course_dir, others=others, task="para", mapping="paraphrase_to_score")
    assert rows[0]["id"] == "para:para-dev-0" and len(rows) == 6


@pytest.mark.parametrize(
    "columns",
    [
        ("sentence1", "sentence2", "is_duplicate"), ("question1", "question2", "is_duplicate"),
        ("question1", "question2", "label"), ("sentence1", "sentence2", "label"),
        ("#1 String", "#2 String", "Quality"),
    ],
)  # fmt: skip
def test_columns_are_found_as_the_corpora_of_paraphrases_call_them(write, columns):
    file = write("\t".join(columns) + "\na\tb\t1\n")
    (row,) = borrow(files=file, mapping="paraphrase_to_score")
    assert (row["sentence1"], row["sentence2"]) == ("a", "b") and row["label"] >= 4


def test_columns_of_the_recipe_go_before_the_known_ones(write):
    file = write(f"{PAIR}\tis_duplicate\tother\nwrong\tb\t0\tright\n")
    (row,) = borrow(files=file, mapping="paraphrase_to_score", columns={"sentence1": "other"})
    assert row["sentence1"] == "right"


# ---- Which rows


@pytest.fixture
def hundred(write) -> str:
    return write(f"{PAIR}\tis_duplicate\n" + "".join(f"a {n}\tb {n}\t{n % 2}\n" for n in range(100)))


def test_rows_are_drawn_by_the_seed_and_more_of_them_hold_the_fewer(hundred):
    def drawn(**share) -> dict:
        rows = borrow(files=hundred, mapping="paraphrase_to_score", **share)
        return {row["id"]: row["label"] for row in rows}

    ten, thirty, everything = drawn(rows=10), drawn(fraction=0.3), drawn()
    assert (len(ten), len(thirty), len(everything)) == (10, 30, 100)
    assert ten.items() < thirty.items() < everything.items()
    assert list(ten) == sorted(ten, key=list(everything).index), "they keep the file's order"
    assert drawn(rows=10, seed=1).keys() != ten.keys() == drawn(rows=10).keys()
    assert len(drawn(rows=1000)) == 100 and len(drawn(fraction=0.001)) == 1


def test_each_source_of_a_task_draws_for_itself(hundred):
    source = {"files": hundred, "mapping": "paraphrase_to_score", "rows": 20}
    (task,) = get_tasks({"sts": {"sources": [source, source]}})
    first, second = ([row["id"] for row in borrowed_rows(task, number, {}, None, 0)] for number in (1, 2))
    assert first != second


def test_every_row_is_drawn_about_equally_often(hundred):
    counts = dict.fromkeys(range(100), 0)
    for seed in range(200):
        for row in borrow(files=hundred, mapping="paraphrase_to_score", rows=10, seed=seed):
            counts[int(row["id"].split(":")[1])] += 1
    assert sum(counts.values()) == 2000
    assert min(counts.values()) >= 5 and max(counts.values()) <= 40  # 20 each, standard deviation 4.2


def test_several_files_are_one_source(write):
    one, two = (write(f"{PAIR}\tis_duplicate\na {n}\tb\t{n}\n", f"{n}.tsv") for n in range(2))
    rows = borrow("para", files=[one, two])
    assert [(row["id"], row["sentence1"], row["label"]) for row in rows] == [
        ("0.tsv, 1.tsv:0", "a 0", 0), ("0.tsv, 1.tsv:1", "a 1", 1)
    ]  # fmt: skip


def test_blank_texts_and_labels_are_left_out_and_said_or_refused(write, caplog):
    file = write(f"{PAIR}\tis_duplicate\na\tb\t1\n \td\t1\ne\tf\t\n")
    assert [row["sentence1"] for row in borrow("para", files=file)] == ["a"]
    (message,) = caplog.messages
    assert "2 of 3 rows are left out" in message and "1, 2" in message
    (task,) = get_tasks({"para": {"sources": [{"files": file}]}})
    assert len(borrowed_rows(task, 1, {}, None, 0)) == 1  # not strict unless asked
    with pytest.raises(MinBertError, match=r"rows\.tsv, line 3: 'sentence1' must not be blank"):
        borrow("para", files=file, strict=True)


# ---- Refused


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        (
            "sts",
            {"files": "x", "mapping": "nli_to_scores"},
            "Unknown mapping 'nli_to_scores'. Did you mean 'nli_to_sc",
        ),
        (
            "sts",
            {"files": "x", "mapping": "stars_to_classes"},
            "makes labels of kind 'classes', and .* kind is 'score'",
        ),
        ("para", {"files": "x", "mapping": "nli_to_score"}, "makes labels of kind 'score', and .* kind is 'binary'"),
        (
            "cfimdb",
            {"files": "x", "mapping": "stars_to_classes"},
            "'stars_to_classes' does not make the labels of 'cf",
        ),
        ("sts", {"task": "para"}, "'same' does not make .* those of 'para'. Mappings that do: paraphrase_to_score"),
        ("sts", {"task": "nli", "mapping": "paraphrase_to_score"}, "Mappings that do: nli_to_score"),
        ("sst", {"task": "cfimdb"}, r"does not make .* Mappings that do: \(none\)"),
        ("sts", {"task": "sts"}, "Unknown task 'sts'"),
        ("sts", {"task": "parra"}, "Unknown task 'parra'. Did you mean 'para'"),
        ("sst", {"task": "para"}, "rows of 2 text.s. cannot be borrowed for a task of 1"),
    ],
)
def test_what_cannot_be_borrowed_is_refused_before_data_are_read(name, source, said):
    (task,) = get_tasks({name: {"sources": [source]}})
    with pytest.raises(MinBertError, match=f"Task '{name}', source 1: .*{said}"):
        origin_of(task, 1, {name: task})


def test_a_mapping_of_pairs_is_not_for_single_texts():
    sources = [{"files": "x", "mapping": "nli_to_score"}]
    task = Task("mood", "score", ("text",), range=(0, 5), sources=sources)
    with pytest.raises(MinBertError, match="rows of 2 text.s. cannot be borrowed for a task of 1"):
        origin_of(task, 1, {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("para", "expected keys like {task: para}. Found 'para'"),
        ({}, "give one of `task`, `files` and `dataset`. Found none of them"),
        ({"task": "para", "files": "x"}, "give one of .* Found `task` and `files`"),
        ({"tasks": "para"}, "Unknown key 'tasks'. Did you mean 'task'"),
        ({"files": []}, r"`files` must be a path or a list of them. Found \[\]"),
        ({"files": "x", "split": "test"}, "`split` goes with `dataset`, and the source has `files`"),
        ({"task": "para", "quotes": False}, "`quotes` goes with `files`, and the source has `task`"),
        ({"task": "para", "columns": {"label": "x"}}, "`columns` goes with `dataset` or `files`"),
        ({"files": "x", "columns": {"text": "x"}}, "`columns`: Unknown key 'text'.*id, label, sentence1, sentence2"),
        ({"files": "x", "mapping": 3}, "`mapping` must be text. Found 3"),
        ({"files": "x", "rows": 0}, "`rows` must be a whole number of at least 1. Found 0"),
        ({"files": "x", "rows": 1.5}, "`rows` must be a whole number of at least 1. Found 1.5"),
        ({"files": "x", "fraction": 10}, "`fraction` must be a number above 0 and up to 1. Found 10"),
        ({"files": "x", "rows": 5, "fraction": 0.1}, "give either `rows` or `fraction`, not both"),
        ({"files": "x", "quotes": "no"}, "`quotes` must be true or false. Found 'no'"),
    ],
)
def test_a_source_that_says_too_little_or_too_much(source, said):
    with pytest.raises(MinBertError, match=f"Task 'sts', source 1.*{said}"):
        get_tasks({"sts": {"sources": [source]}})


def test_sources_are_a_list():
    with pytest.raises(MinBertError, match=r"Task 'sts': `sources` must be a list like \[{task: para}\]"):
        get_tasks({"sts": {"sources": {"task": "para"}}})


def test_a_missing_column_is_named_with_those_that_are_there(write):
    file = write("first\tsecond\tscore\na\tb\t1\n")
    with pytest.raises(MinBertError, match="rows.tsv has no column 'relatedness_score'. Columns found: first, second"):
        borrow(files=file, mapping="relatedness_to_score")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("neutral", "expected a list like"),
        ([["neutral"]], "expected a list like"),
        (["maybe"], "a label of task 'sts' must be .*entailment.* Found 'maybe'"),
    ],
)
def test_votes_that_are_none_are_refused_with_their_line(write, given, said):
    row = {"premise": "a", "hypothesis": "b", "label": "neutral"}
    file = write(lines(row | {"annotator_labels": []}, row | {"annotator_labels": given}), "votes.jsonl")
    with pytest.raises(MinBertError, match=rf"votes\.jsonl, line 2, column 'annotator_labels': {said}"):
        borrow(files=file, mapping="nli_to_score")


def test_quotes_are_a_matter_of_files_of_cells(write):
    file = write(lines({"sentence1": "a", "sentence2": "b", "is_duplicate": 1}), "rows.jsonl")
    with pytest.raises(MinBertError, match=r"rows\.jsonl: `quotes` is for \.csv, \.tsv and \.txt files"):
        borrow("para", files=file, quotes=False)


# ---- What a task with sources is elsewhere


def test_sources_on_the_hub_are_pinned_and_read_by_their_split(monkeypatch):
    rows = datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": ["entailment"]})

    class Builder:
        hash = "c" * 40
        info = SimpleNamespace(splits=["extra"])

        def as_dataset(self, split):
            return {"extra": rows}[split]

    asked = []
    monkeypatch.setattr("hf_minbert.data.hub._download", lambda *names: asked.append(names) or Builder())
    hub = {"dataset": "me/pairs", "split": "extra", "mapping": "nli_to_score"}
    (task,) = get_tasks({"sts": {"sources": [{"files": "x"}, hub]}})
    task = pinned_sources(task, {"sts": task}, None)
    assert revisions([task]) == {"sts/2": "c" * 40}
    assert [row["label"] for row in borrowed_rows(task, 2, {}, None, 0)] == [5.0]
    assert asked[0] == ("me/pairs", None, None) and asked[-1] == ("me/pairs", None, "c" * 40)


def test_a_model_knows_nothing_of_sources_and_a_recipe_pins_their_commits():
    commit, sources = "a" * 40, [{"task": "para", "mapping": "paraphrase_to_score"}, {"dataset": "me/pairs"}]
    (task,) = get_tasks({"sts": {"sources": sources}})
    assert task.to_config() == TASKS["sts"].to_config()
    assert task.sources[1] == Source(dataset="me/pairs")
    entries = with_revisions({"sts": {"sources": sources}}, {"sts/2": commit})
    assert entries["sts"]["sources"] == [sources[0], {"dataset": "me/pairs", "dataset_revision": commit}]
    assert revisions(get_tasks(entries)) == {"sts/2": commit}
    assert sources[1] == {"dataset": "me/pairs"}
