"""A model pushed over HTTP to a Hub on the loopback, and loaded again by a process that has no such package."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from hf_minbert import MinBertForMultiTask, Predictor, get_tasks
from hf_minbert.publishing.demo import EXAMPLES

TEXTS = ["a good film.", "why is the dog very bad"]
#: Loads a model as its card says and asks every task; `result` is task to logits.
ASK = """
import os
os.environ["HF_TOKEN"] = {token!r}
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({repo!r}, trust_remote_code=True, token={token!r} or False)
model = AutoModelForSequenceClassification.from_pretrained({repo!r}, trust_remote_code=True, token={token!r} or False)
model.eval()
pair = {{"text": {texts!r}[0], "text_pair": {texts!r}[1]}}
result = {{}}
for task in model.config.tasks:
    inputs = tokenizer(**(pair if len(task["text_columns"]) == 2 else {{"text": pair["text"]}}), return_tensors="pt")
    result[task["name"]] = model(**inputs, task=task["name"]).logits.tolist()
"""


def ask(repo: str, token: str = "") -> str:
    return ASK.format(repo=repo, token=token, texts=TEXTS)


@pytest.fixture(scope="module")
def published(hub, publisher, finished_run) -> dict[str, bytes]:
    """The files of `me/first` after `minbert publish`."""
    status, out, err = publisher.minbert("publish", finished_run, "me/first")
    assert status == 0, err
    assert f"{hub.url}/me/first" in out
    return hub.repos["models"]["me/first"]


def expected(folder) -> dict[str, torch.Tensor]:
    model, tokenizer = MinBertForMultiTask.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    single, pair = tokenizer(TEXTS[0], return_tensors="pt"), tokenizer(*TEXTS, return_tensors="pt")
    with torch.no_grad():
        return {name: model(**inputs, task=name).logits for name, inputs in
                {"sst": single, "para": pair, "sts": pair}.items()}  # fmt: skip


def assert_same(found: dict[str, list], folder) -> None:
    wanted = expected(folder)
    assert found.keys() == wanted.keys()
    for name, logits in found.items():
        torch.testing.assert_close(torch.tensor(logits), wanted[name], rtol=0, atol=1e-5)


def test_the_package_is_not_there(stranger):
    _, error = stranger.attempt("import hf_minbert")
    assert error == "ModuleNotFoundError: No module named 'hf_minbert'"


def test_every_task_answers_the_same_without_this_package(published, stranger, finished_run):
    assert_same(stranger.run(ask("me/first")), finished_run)


def test_the_code_of_the_card_runs(published, stranger, publisher):
    card = published["README.md"].decode()
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ours = [block for block in blocks if "hf_minbert" in block]
    exported = [block for block in blocks if "exports/" in block]
    assert len(ours) == 1 and len(exported) == 1 and len(blocks) == 5
    command = next(line for line in card.splitlines() if line.startswith("minbert export"))
    status, _, err = publisher.minbert(*command.split()[1:])
    assert status == 0, err
    for block in blocks:
        block_here = block.replace("exports/", f"{publisher.folder}/exports/")
        (publisher if block in ours else stranger).run(block_here)


def test_the_card_of_an_ensemble_with_a_pair_read_apart_asks_it_rightly(
    hub, publisher, stranger, tiny_model, tiny_tokenizer, tmp_path
):
    (apart,) = get_tasks({"sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}})
    tiny_model(tasks=("sst", apart), private_encoders=True).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "merge.json").write_text(json.dumps({"method": "ensemble", "models": ["a", "b"]}))
    status, _, err = publisher.minbert("publish", tmp_path, "me/ensemble")
    assert status == 0, err
    blocks = re.findall(r"```python\n(.*?)```", hub.repos["models"]["me/ensemble"]["README.md"].decode(), re.DOTALL)
    code = next(block for block in blocks if "AutoModel" in block)
    found = stranger.run(f'{code}\nresult = model(**inputs, task="sts").logits.item()')  # the card asks sts last
    (wanted,) = Predictor.from_pretrained(tmp_path, device="cpu")("sts", *([text] for text in EXAMPLES["sts"]))
    assert found == pytest.approx(wanted["prediction"], abs=1e-5)


def test_only_what_the_run_made_goes_up_and_no_local_path(published, finished_run, tiny_bert, course_dir):
    assert {"config.json", "model.safetensors", "modeling_minbert.py", "tokenizer.json", "recipe.yaml"} < set(
        published
    )
    assert not [path for path in published if path.startswith(("checkpoint", "predictions", "training_args"))]
    for path, content in published.items():
        for folder in (finished_run.parent, tiny_bert, course_dir):
            assert str(folder).encode() not in content, path
    assert published["model.safetensors"] == (finished_run / "model.safetensors").read_bytes()


def test_publishing_again_updates_and_sends_no_weights_twice(hub, publisher, published, finished_run, tmp_path):
    hub.repos["models"]["me/first"] |= {"NOTES.md": b"mine", "vocab.txt": b"of an older tokenizer"}
    hub.requests.clear()
    status, _, err = publisher.minbert("publish", finished_run, "me/first", "--license", "apache-2.0")
    assert status == 0, err
    assert b"license: apache-2.0" in published["README.md"]
    assert "NOTES.md" in published and "vocab.txt" not in published
    assert not [line for line in hub.requests if line.startswith("PUT")]


def test_a_private_model_is_for_those_who_may_see_it(hub, publisher, stranger, finished_run):
    status, _, err = publisher.minbert("publish", finished_run, "me/secret", "--private")
    assert status == 0, err
    for token in ("", "hf_you", "hf_refused"):
        result, error = stranger.attempt(ask("me/secret", token))
        assert result is None and "OSError" in error, (token, error)
    assert_same(stranger.run(ask("me/secret", "hf_dummy")), finished_run)
    # Only now: the library answers from its cache whoever asks.
    status, _, err = publisher.minbert("publish", finished_run, "me/first", "--private")
    assert status == 2 and "public" in err and "made private" in err


@pytest.mark.parametrize(
    ("repo", "token", "said"),
    [
        ("me/none", "", "no token.*hf auth login"),
        ("me/none", "hf_refused", "refuses the token"),
        ("me/none", "hf_reader", "token may not write to me/none.*rights"),
        ("you/none", "hf_dummy", "may not write to you/none"),
        ("me/first", "hf_you", "may not write to me/first"),
        ("me/no ne", "hf_dummy", "'me/no ne' is no name on the Hub"),
    ],
)
def test_what_is_not_granted_is_said_in_a_line_and_changes_nothing(
    hub, publisher, published, finished_run, repo, token, said
):
    before = dict(published)
    status, out, err = publisher.minbert("publish", finished_run, repo, token=token)
    assert status == 2 and out == ""
    assert re.search(said, err) and err.startswith("minbert: error: ") and err.count("\n") == 1, err
    assert repo not in hub.repos["models"] or hub.repos["models"][repo] == before


def test_a_connection_that_drops_once_is_tried_again(hub, publisher, finished_run):
    hub.blobs.clear()
    hub.cut = 1
    status, _, err = publisher.minbert("publish", finished_run, "me/dropped")
    assert status == 0 and hub.cut == 0, err
    assert "model.safetensors" in hub.repos["models"]["me/dropped"]


def test_an_upload_that_is_cut_off_changes_nothing_and_says_how_to_go_on(hub, publisher, stranger, finished_run):
    hub.blobs.clear()
    hub.cut = 1000
    status, _, err = publisher.minbert("publish", finished_run, "me/cut")
    hub.cut = 0
    last = err.splitlines()[-1]
    assert status == 2 and "connection" in last and "the same command to continue" in last, err
    assert hub.repos["models"]["me/cut"] == {}
    status, _, err = publisher.minbert("publish", finished_run, "me/cut")
    assert status == 0, err
    assert_same(stranger.run(ask("me/cut")), finished_run)


def test_a_dry_run_sends_nothing_and_shows_everything(hub, publisher, finished_run, tmp_path):
    hub.requests.clear()
    card = tmp_path / "card.md"
    status, out, _ = publisher.minbert(
        "publish", finished_run, "me/dry", "--dry-run", "--card", card, token=""
    )  # fmt: skip
    assert status == 0 and hub.requests == [] and not (finished_run / "README.md").exists()
    assert re.search(r"model\.safetensors", out) and "Not uploaded: checkpoint" in out
    sizes = {path: int(size.replace(",", "")) for size, path in re.findall(r"^ +([\d,]+)  (\S+)$", out, re.MULTILINE)}
    assert sizes["model.safetensors"] == (finished_run / "model.safetensors").stat().st_size
    assert sizes["README.md"] == card.stat().st_size
    assert json.loads((finished_run / "metrics.json").read_text())["seed"] == 42
