"""Files are written whole or not at all, where and as the person can use them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from hf_minbert import MinBertError
from hf_minbert.io import check_writable, write_atomically, write_json


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_text_is_written_to_the_byte_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    write_atomically(path, "ü\nb\r\nc")
    assert path.read_bytes() == "ü\nb\r\nc".encode()
    assert names(path.parent) == {"file.txt"}


def test_an_older_file_is_replaced(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("a much longer text")
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_after_a_failure_the_older_file_stands_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(MinBertError, match=f"Cannot write {path}: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file.txt"}


def test_after_ctrl_c_the_older_file_stands_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file.txt"}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == mode


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("target.txt")
    write_atomically(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "target.txt").read_text() == "new"


def test_a_long_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 250)
    write_atomically(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize("write", [lambda path: write_atomically(path, "x"), check_writable], ids=["write", "check"])
class TestRefused:
    def test_a_folder(self, tmp_path, write):
        with pytest.raises(MinBertError, match="it is not a file"):
            write(tmp_path)

    def test_a_device(self, write):
        with pytest.raises(MinBertError, match="/dev/null: it is not a file"):
            write("/dev/null")

    def test_a_path_through_a_file(self, tmp_path, write):
        (tmp_path / "file").write_text("x")
        with pytest.raises(MinBertError, match=f"Cannot write {tmp_path / 'file' / 'a' / 'b'}: .*can be written"):
            write(tmp_path / "file" / "a" / "b")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission(self, tmp_path, write):
        tmp_path.chmod(0o500)
        with pytest.raises(MinBertError, match="Cannot write"):
            write(tmp_path / "file")


def test_a_check_makes_nothing(tmp_path):
    (tmp_path / "old").write_text("x")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new" / "file")
    assert names(tmp_path) == {"old"}


def test_a_check_asks_for_the_right_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))
    with pytest.raises(MinBertError, match=f"{tmp_path} may not be written"):
        check_writable(tmp_path / "new" / "file")


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_json_is_strict_and_plain(tmp_path):
    value = {
        "nan": float("nan"), "inf": [float("inf"), -float("inf"), np.float32("nan")], "float": np.float32(0.5),
        "int": np.int64(3), "bool": np.bool_(True), "array": np.array([[1.0, np.inf]]), "tuple": (1, 2), "none": None,
        "path": Path("a/b"), 7: "key", "text": "ü\n",
    }  # fmt: skip
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse_constant) == {
        "nan": None, "inf": [None, None, None], "float": 0.5, "int": 3, "bool": True, "array": [[1.0, None]],
        "tuple": [1, 2], "none": None, "path": "a/b", "7": "key", "text": "ü\n",
    }  # fmt: skip
    assert "ü" in text
    assert text.endswith("}\n")


def test_numbers_keep_their_digits(tmp_path):
    write_json(tmp_path / "x.json", [0.1, 1 / 3, 1e-17])
    assert json.loads((tmp_path / "x.json").read_text()) == [0.1, 1 / 3, 1e-17]
