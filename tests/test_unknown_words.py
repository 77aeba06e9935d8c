"""Text that the vocabulary does not know: a line per task in the log, the scores, the report and the card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_minbert.publishing.publish import prepare
from hf_minbert.reporting import report
from hf_minbert.reporting.builder import Builder
from hf_minbert.reporting.document import Text, Trouble
from hf_minbert.reporting.runs import read_run

SAID = "of the tokens in {} are unknown to the model's vocabulary"


def write(file: Path, sentence: str, rows: int = 6) -> Path:
    file.write_text("text,label\n" + "".join(f"{sentence},{row % 2}\n" for row in range(rows)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Rows of `known`, whose words are all known, and of `strange`, of whose five tokens three are not."""
    folder = tmp_path_factory.mktemp("strange")
    for split in ("train", "dev"):
        write(folder / f"known-{split}.csv", "a good dog")
        write(folder / f"strange-{split}.csv", "狗 dog 狗 a 狗")
    return folder


@pytest.fixture
def train(folder, tiny_bert, minbert, tmp_path) -> Callable[[], tuple[Path, str]]:
    """`train()`: the folder of a run on both tasks, and what it said."""
    lines = ["tasks:"]
    for name in ("known", "strange"):
        files = f"{{train: {name}-train.csv, dev: {name}-dev.csv}}"
        lines += [f"  {name}: {{kind: binary, text_columns: [text], labels: [no, yes], files: {files}}}"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("\n".join([*lines, f"model_name_or_path: {tiny_bert}", "max_steps: 1", "use_cpu: true", ""]))

    def train() -> tuple[Path, str]:
        ended = minbert("train", recipe, f"data_dir={folder}", f"output_dir={tmp_path / 'run'}")
        assert ended.status == 0, ended.err
        return tmp_path / "run", ended.err

    return train


def said_of(err: str) -> list[str]:
    return re.findall(r"\w+: [\d.]+% of the tokens in .*", err)


def test_a_run_says_it_once_for_each_task_and_keeps_the_share(train):
    path, err = train()
    training, read = SAID.format("the training rows"), SAID.format("the rows to answer")
    assert said_of(err) == [
        f"strange: 60.0% {training}, which does not fit this text.",
        f"strange: 60.0% {read}, which does not fit this text.",  # the dev rows, when they are scored
    ]
    assert json.loads((path / "metrics.json").read_text())["unknown_tokens"] == {"known": 0, "strange": 0.6}


def test_evaluate_and_predict_say_it_of_their_inputs(train, minbert, folder, tmp_path):
    path, _ = train()
    line = f"strange: 60.0% {SAID.format('the rows to answer')}, which does not fit this text."
    ended = minbert("evaluate", path)
    assert (ended.status, said_of(ended.err)) == (0, [line])
    given = ["--input", folder / "strange-dev.csv", "--output", tmp_path / "out.csv"]
    ended = minbert("predict", path, "--task", "strange", *given)
    assert (ended.status, said_of(ended.err)) == (0, [line])
    ended = minbert("predict", path, "--task", "strange", "--input", folder / "known-dev.csv", *given[2:])
    assert (ended.status, said_of(ended.err)) == (0, [])


def test_the_report_and_the_card_say_it(train):
    path, _ = train()
    training = SAID.format("the training rows")
    build = Builder((), 3, 0)
    report._sections(build, [read_run(path)])
    (scores,) = [section for section in build.sections if section.key == "scores"]
    assert not any("known: 0" in block.text for block in scores.blocks if isinstance(block, Text))
    assert Trouble(f"strange: 60.0% {training}, which does not fit this text.") in scores.blocks
    card = prepare(path, "me/model").card
    assert f"- strange: 60.0% {training}, which does not fit this text.\n" in card and "- known:" not in card


def test_real_english_is_known_and_real_chinese_is_not(minilm, cs224n):
    from transformers import AutoTokenizer

    from hf_minbert.data.encoding import MANY_UNKNOWN, encode, unknown_share
    from hf_minbert.data.files import load_split
    from hf_minbert.settings.tasks import TASKS

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    for name in ("sst", "para", "sts"):
        rows = load_split(TASKS[name], cs224n, "dev")
        assert unknown_share(encode(rows, TASKS[name], tokenizer, 128), tokenizer) < 0.01
    chinese = [{"sentence1": "一架飞机正在起飞。", "sentence2": "一个男人在吹一支很大的长笛。", "label": 1.0}]
    assert unknown_share(encode(chinese, TASKS["sts"], tokenizer, 128), tokenizer) > MANY_UNKNOWN
