"""What the page of `minbert demo` says, without a browser, and the Space that it becomes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_minbert import Predictor, Task, get_tasks
from hf_minbert.publishing.demo import Answer, _examples, _words, answer, replies

APART = Task(
    name="apart", kind="binary", text_columns=("a", "b"), labels=("no", "<i>yes"), pair_encoding="bi", head="cosine"
)
RAW = Task(
    name="raw", kind="score", text_columns=("a", "b"), range=(0.0, 5.0), pair_encoding="bi", head="cosine",
    head_options={"mapping": "raw"},
)  # fmt: skip
TASKS = ("sst", "para", "sts", APART, RAW)
FIRST, SECOND = "The film is not bad, it is very good.", "A man plays."


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(TASKS).eval()


@pytest.fixture
def page(model, tiny_tokenizer):
    """`page(first, second="")`: the HTML that stands there in the end, by task, and all of it under ""."""

    def page(first: str, second: str = "") -> dict[str, str]:
        *_, last = replies(model, tiny_tokenizer, first, second)
        cards = re.findall(r'<section class="mb-card" data-task="(\w+)">(.*?)</section>', last, re.DOTALL)
        return {"": last, **dict(cards)}

    return page


class Text(HTMLParser):
    """The text of a page, and the names of its tags."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.tags = "", set()
        self.feed(html)

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)


def visible(html: str) -> str:
    return Text(html).text


# ---- Answers


@pytest.mark.parametrize("task", ["sst", "para", "sts", "apart", "raw"])
def test_answers_are_the_predictors(model, tiny_tokenizer, task):
    predictor = Predictor(model, tiny_tokenizer)
    for first, second in ((FIRST, SECOND), ("good", "bad " * 100)):
        texts = [first] if task == "sst" else [first, second]
        (expected,) = predictor(task, *([text] for text in texts))
        found = answer(model, tiny_tokenizer, task, texts)
        if "label" in expected:
            assert found.chosen == expected["prediction"]
            assert found.probabilities == pytest.approx(list(expected["probabilities"].values()), abs=1e-5)
        else:
            assert found.score == pytest.approx(expected["prediction"], abs=1e-5)


def test_a_pair_is_answered_by_every_task(page, model, tiny_tokenizer):
    cards = page(FIRST, SECOND)
    assert list(cards) == ["", *model.config.task_names]
    shares = answer(model, tiny_tokenizer, "para", (FIRST, SECOND)).probabilities
    for label, share in zip(("not duplicate", "duplicate"), shares, strict=True):
        assert f"{label}{100 * share:.1f}%" in visible(cards["para"])
    assert "about the first sentence" in visible(cards["sst"])
    assert "on a scale from 0 to 5" in visible(cards["sts"])
    assert "on a scale from -1 to 1" in visible(cards["raw"])  # that of a bare cosine
    for name in ("para", "sts", "apart", "raw"):
        assert FIRST in visible(cards[name]) and SECOND in visible(cards[name])


def test_one_sentence_leaves_tasks_about_two_out_with_a_word(page):
    cards = page(FIRST)
    assert "very positive" in visible(cards["sst"]) and "about the sentence" in visible(cards["sst"])
    for name in ("para", "sts", "apart", "raw"):
        assert visible(cards[name]).endswith("Needs a second sentence.")


@pytest.mark.parametrize(("first", "second"), [("", ""), (" \n ", ""), ("", "good")])
def test_an_empty_text_is_answered_with_a_sentence(page, first, second):
    assert visible(page(first, second)[""]).startswith("Write a sentence")


def test_a_text_without_words_is_answered(page):
    assert "very positive" in visible(page("\u200b")["sst"])


def test_a_long_text_is_cut_with_a_note(page):
    cards = page("good " * 100)
    assert "longer than the model can read" in visible(cards[""]) and "(sst)" in visible(cards[""])
    assert cards["sst"].count('class="mb-word"') == 62  # [CLS] and [SEP] take two of 64 places
    assert "longer" not in visible(page("good " * 62)[""])
    assert "(para, sts)" in visible(page("good " * 40, "bad " * 40)[""])  # apart, each is short enough


def test_html_in_a_text_or_a_label_is_text(page):
    text = "<script>alert('a')</script><img src=x> & ${7*7} {{7*7}}"
    html = page(text, "<b>bold</b>")[""]
    assert Text(html).tags <= {"div", "section", "h2", "small", "b", "span", "p", "br"}
    assert visible(html).count(text) >= 4 and "49" not in visible(html)
    assert "<b>bold" not in html and "<i>" not in html


# ---- Words


def test_the_answers_come_first_and_then_the_words_of_one_task_after_the_other(model, tiny_tokenizer):
    stages = list(replies(model, tiny_tokenizer, FIRST, SECOND))
    assert [stage.count("Looking at the words") for stage in stages] == [5, 4, 3, 2, 1, 0]
    assert all("very positive" in stage for stage in stages)


def test_the_strongest_words_are_named_and_have_the_strongest_colours(page):
    card = page(FIRST)["sst"]
    found = re.findall(r'rgb\((\d+) \d+ \d+ / ([\d.]+)\)" title="([+-][\d.]+)">([^<]*)<', card)
    assert [word for *_, word in found] == ["The", "film", "is", "not", "bad", ",", "it", "is", "very", "good", "."]
    values = [float(value) for _, _, value, _ in found]
    assert [red == "43" for red, *_ in found] == [value > 0 for value in values]
    strengths = [float(strength) for _, strength, *_ in found]
    assert max(strengths) == 0.75
    assert [strength / 0.75 for strength in strengths] == pytest.approx(
        [abs(value) / max(map(abs, values)) for value in values], abs=0.02
    )
    best = max(zip(values, (word for *_, word in found), strict=True))
    assert f": “{best[1]}” {best[0]:+.2f}" in visible(card)


def test_words_that_round_to_nothing_are_neither_coloured_nor_named():
    text = "good bad dull long ."
    words, start = [], 0
    for word in text.split():
        words.append(SimpleNamespace(start=start, end=start + len(word)))
        start += len(word) + 1
    task = {"name": "sst", "labels": ["no", "yes"]}
    given = Answer(task, [text], SimpleNamespace(words=[words]), 1, (0.4, 0.6), None, None)
    html = _words(given, SimpleNamespace(values=[[0.006, 0.004, -0.004, -0.0051, 0.0]], start=0.0, end=0.001))
    colours = [float(strength) for strength in re.findall(r"/ ([\d.]+)\)", html)]
    assert colours == pytest.approx([0.75, 0, 0, 0.75 * 0.0051 / 0.006, 0], abs=0.005)
    said = visible(html).split("For ")[1]
    assert said.startswith("yes: “good” +0.01Against it: “long” −0.01All words together")


def test_examples_are_those_of_the_models_own_tasks(tiny_model):
    def examples(*tasks):
        return _examples(tiny_model(tasks).config.tasks)

    assert examples("sst", "cfimdb") == [["A tender film, and very funny too.", ""]]
    assert [bool(second) for _, second in examples("sst", "para", "sts")] == [False, True, True]
    news = Task(name="news", kind="binary", text_columns=("text",), labels=("no", "yes"))
    assert examples(news) == [["Which is it: no or yes?", ""]]
    (apart,) = examples(APART)
    assert apart == [f"Which is it: {APART.labels[0]} or {APART.labels[1]}?", "This is another text."]
    names = Task(name="ner", kind="tags", text_columns=("tokens",), labels=("O", "B-PER"))
    assert examples(names) == [["Ada Lovelace wrote to Charles Babbage from London.", ""]]
    cut = replace(
        get_tasks(["sts"])[0], text_columns=("text",), pair_encoding="single"
    )  # a task of one text by its name
    assert examples(cut) == [["This is a text.", ""]]


def test_what_all_words_change_together_leads_to_the_answer(page, model, tiny_tokenizer):
    cards = page(FIRST, SECOND)
    given = answer(model, tiny_tokenizer, "sst", (FIRST,))
    assert visible(cards["sst"]).endswith(f"with every word hidden to {100 * max(given.probabilities):.1f}%")
    score = answer(model, tiny_tokenizer, "sts", (FIRST, SECOND)).score
    assert visible(cards["sts"]).endswith(f"with every word hidden to {score:.2f}")


# ---- The command


@pytest.fixture(scope="module")
def saved(model, tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny: <model>"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_a_port_in_use_is_said_in_a_line(minbert, saved):
    pytest.importorskip("gradio", reason="gradio is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = minbert("demo", saved, "--port", port)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"--port {port} cannot be served" in ended.err and "another port" in ended.err


@pytest.mark.parametrize("words", [(), ("--export-space", "space")])
def test_what_is_no_model_is_said_in_a_line(minbert, tiny_bert, tmp_path, monkeypatch, words):
    pytest.importorskip("gradio", reason="gradio is not installed")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        words = words or ("--port", free.getsockname()[1])
    for model, said in ((tmp_path / "nothing", "no such folder"), (tiny_bert, "no tasks")):
        ended = minbert("demo", model, *words)
        assert (ended.status, ended.err.count("\n")) == (2, 1) and said in ended.err
    assert not (tmp_path / "space").exists()


def test_without_gradio_it_says_how_to_get_it(minbert, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = minbert("demo", saved)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "pip install 'hf_minbert[demo]'" in ended.err


# ---- The Space


@pytest.fixture(scope="module")
def space(saved, tmp_path_factory) -> Path:
    pytest.importorskip("gradio", reason="gradio is not installed")
    from hf_minbert.publishing.space import export_space

    folder = tmp_path_factory.mktemp("spaces") / "space"
    export_space(str(saved), folder)
    return folder


RUN_APP = """
import runpy, sys
sys.modules["hf_minbert"] = None  # importing it fails
space = runpy.run_path("app.py")
from minbert_page.publishing.demo import replies
*_, last = replies(space["model"], space["tokenizer"], *sys.argv[1:])
print(last)
"""


def test_a_spaces_app_runs_without_the_package_and_answers_the_same(space, page, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(space)}
    command = [sys.executable, "-c", RUN_APP, FIRST, SECOND]
    done = subprocess.run(command, cwd=space, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert visible(done.stdout).strip() == visible(page(FIRST, SECOND)[""])


def test_a_spaces_readme_and_requirements_name_what_it_runs_with(space):
    import gradio

    readme = (space / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(readme.split("---\n")[1])
    assert front == {
        "title": "tiny: <model>", "sdk": "gradio", "sdk_version": gradio.__version__, "app_file": "app.py",
        "python_version": "{}.{}".format(*sys.version_info),
    }  # fmt: skip
    names = [line.split("==")[0] for line in (space / "requirements.txt").read_text().splitlines()]
    assert names == ["torch", "transformers", "gradio"]
    assert "+" not in (space / "requirements.txt").read_text()  # a local version is on no index


def test_a_model_of_the_hub_is_named_and_not_copied(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("gradio", reason="gradio is not installed")
    from hf_minbert.publishing import space

    monkeypatch.setattr(space, "load_config", lambda name: tiny_model().config)
    monkeypatch.setattr(space, "is_adapter", lambda name: False)
    space.export_space("somebody/three-tasks", tmp_path)
    assert "MODEL = 'somebody/three-tasks'" in (tmp_path / "app.py").read_text(encoding="utf-8")
    assert not (tmp_path / "model").exists()
    front = yaml.safe_load((tmp_path / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert (front["title"], front["models"]) == ("three-tasks", ["somebody/three-tasks"])


def test_a_folder_that_holds_a_space_is_left_as_it_is(minbert, saved, tmp_path):
    pytest.importorskip("gradio", reason="gradio is not installed")
    (tmp_path / "README.md").write_text("mine")
    ended = minbert("demo", saved, "--export-space", tmp_path)
    assert ended.status == 2 and "README.md already" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
