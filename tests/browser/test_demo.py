"""`minbert demo` in a browser: a pair goes in, every task's answer comes out, and nothing leaves this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hf_minbert import Predictor

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Python imports a module of this name first: the server notes down whose address it looks up.
WATCH = """
import socket
look_up = socket.getaddrinfo
def watched(host, *arguments, **options):
    if host not in (None, "127.0.0.1", "::1", "localhost"):
        with open({!r}, "a") as calls:
            print(host, file=calls)
    return look_up(host, *arguments, **options)
socket.getaddrinfo = watched
"""


@pytest.fixture(scope="module")
def saved(tiny_model, tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> Path:
    """Where the server notes down whom it calls."""
    return tmp_path_factory.mktemp("watch") / "calls"


@pytest.fixture(scope="module")
def address(browser, saved, calls) -> Iterator[str]:
    """Where the command serves the model's page."""
    pytest.importorskip("gradio", reason="gradio is not installed")
    (calls.parent / "sitecustomize.py").write_text(WATCH.format(str(calls)))
    environment = {**os.environ, "PYTHONPATH": f"{calls.parent}{os.pathsep}{ROOT}", "NO_PROXY": "*"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_minbert", "demo", str(saved), "--port", str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == f"The page is at http://127.0.0.1:{port}. Ctrl-C ends it.\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def card(page, task: str):
    return page.locator(f'#results [data-task="{task}"]')


def ask(page, first: str, second: str) -> None:
    page.get_by_label("Sentence", exact=True).fill(first)
    page.get_by_label("Second sentence").fill(second)
    page.get_by_role("button", name="Answer").click()


def test_a_pair_is_typed_and_three_answers_are_read(browser_page, console_errors, address, saved, calls):
    hosts = []
    browser_page.on("request", lambda request: hosts.append(urlsplit(request.url)))
    browser_page.goto(address)
    first, second = "The film is good.", "A man plays <b>with</b> a dog."
    ask(browser_page, first, second)
    card(browser_page, "sts").get_by_text("All words together").wait_for()
    predictor = Predictor.from_pretrained(saved)
    sst, para = predictor("sst", [first])[0], predictor("para", [first], [second])[0]
    for name, answer in (("sst", sst), ("para", para)):
        seen = card(browser_page, name).inner_text()
        for label, share in answer["probabilities"].items():
            assert f"{label}\n{100 * share:.1f}%" in seen
        assert card(browser_page, name).locator("b").first.inner_text() == answer["label"]
    assert f"{predictor('sts', [first], [second])[0]['prediction']:.2f} on a scale from 0 to 5" in (
        card(browser_page, "sts").inner_text()
    )
    for name in ("para", "sts"):
        assert first in card(browser_page, name).inner_text() and second in card(browser_page, name).inner_text()
    assert "Integrated gradients".lower() in browser_page.inner_text("body").lower()
    assert console_errors == []
    asked = {host.hostname for host in hosts if host.scheme not in ("data", "blob")}
    assert asked == {"127.0.0.1"}
    assert not calls.exists(), calls.read_text()


def test_nothing_typed_is_a_sentence_and_one_sentence_leaves_pairs_out(browser_page, console_errors, address):
    browser_page.goto(address)
    ask(browser_page, "", "")
    browser_page.get_by_text("Write a sentence first.").wait_for()
    browser_page.get_by_label("Sentence", exact=True).fill("good " * 100)
    browser_page.get_by_label("Sentence", exact=True).press("Enter")
    card(browser_page, "sst").get_by_text("All words together").wait_for()
    assert "longer than the model can read" in browser_page.inner_text("#results")
    assert "Needs a second sentence." in card(browser_page, "para").inner_text()
    assert console_errors == []


def test_on_a_phone_nothing_is_wider_than_the_screen(browser_page, console_errors, address):
    browser_page.set_viewport_size({"width": 360, "height": 740})
    browser_page.goto(address)
    ask(browser_page, "a" * 60 + " film", "A man plays, and " + "very " * 20 + "good.")
    card(browser_page, "sts").get_by_text("All words together").wait_for()
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 360
    assert console_errors == []
