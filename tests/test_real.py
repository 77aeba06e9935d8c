"""Tests on real data are skipped with the true reason."""

import pytest
from real import folder_of


def test_a_variable_names_a_folder_or_the_test_is_skipped_with_the_reason(monkeypatch, tmp_path):
    absent = tmp_path / "absent"
    monkeypatch.setenv("SOME_FOLDER", str(tmp_path))
    assert folder_of("SOME_FOLDER", absent) == tmp_path
    monkeypatch.setenv("SOME_FOLDER", "sample")  # as the quick start sets it: a name, which no test can read
    with pytest.raises(pytest.skip.Exception, match=r"\$SOME_FOLDER must be the path of a folder. Found 'sample'."):
        folder_of("SOME_FOLDER", tmp_path)
    monkeypatch.delenv("SOME_FOLDER")
    assert folder_of("SOME_FOLDER", tmp_path) == tmp_path
    with pytest.raises(pytest.skip.Exception, match=r"\$SOME_FOLDER is not set."):
        folder_of("SOME_FOLDER", absent)
