"""`minbert report`: what is wrong with its words or its folder is said in one line."""

import shutil
import sys

import pytest


def test_a_real_run(minbert, finished_run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    ended = minbert("report", finished_run, "--output-dir", tmp_path / "out", "--examples", 1)
    assert ended.status == 0, ended.err
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert ended.out == f"The report is in {tmp_path / 'out' / 'report.html'}.\n"
    assert 'id="sst-classes"' in page and "sts: dev pearson" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{empty}"], "holds no run: there is none of metrics.json"),
        (["{empty}/none"], "none does not exist. Give the folder of a run"),
        (["{file}"], "is a file. Give the folder of a run"),
        (["{run}", "{empty}"], "A report is of one run. Give those to compare it with by --compare"),
        (["{run}", "--compare", "{empty}"], "holds no run"),
        (["{run}", "--compare", "{run}"], "A run is given twice"),
        (["{run}", "--ordered", "sts"], "Unknown task of `--ordered` 'sts'. "),
        (["{run}", "--output-dir", "{file}"], "is not a folder. Give a path that can be written."),
        (["{run}", "--examples", "0"], "'--examples'"),
    ],
)
def test_mistakes(minbert, finished_run, tmp_path, words, said):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {"empty": tmp_path / "empty", "file": tmp_path / "file", "run": finished_run}
    ended = minbert("report", *(word.format(**places) for word in words))
    assert ended.status == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (finished_run / "report").exists()


def test_without_matplotlib_one_line_says_what_to_install(minbert, finished_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = minbert("report", finished_run)
    assert ended.status == 2 and "pip install 'hf_minbert[report]'" in ended.err


def test_broken_files_are_named(minbert, finished_run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    (folder / "predictions" / "sst-dev.csv").write_text("id,prediction\n1,2\n")
    ended = minbert("report", folder)
    assert (
        ended.status == 2
        and "sst-dev.csv must have the columns id, prediction, label, probability_very negative" in ended.err
    )
    (folder / "predictions" / "sst-dev.csv").write_text("")
    assert "and a row or more. Found none and 0 rows" in minbert("report", folder).err
    (folder / "predictions" / "sst-dev.csv").unlink()
    (folder / "predictions" / "sts-dev.csv").write_text("id,prediction\na,1\nb\n")
    ended = minbert("report", folder)
    assert ended.status == 2 and "sts-dev.csv, row 3: expected 2 cells, found 1" in ended.err
    (folder / "metrics.json").write_text("{")
    ended = minbert("report", folder)
    assert ended.status == 2 and "Reading" in ended.err and "metrics.json" in ended.err
