"""The folder of an agent's files: there while it lives, and gone after it, even if it was killed."""

import subprocess
import sys
import tempfile

import pytest

from nbelastic.system.folders import base, held_folder

DIES = "import os; from nbelastic.system.folders import held_folder; held = held_folder(); print(held.__enter__(), flush=True); os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """These tests' own temporary folder, for the processes that they start too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_gone_when_it_is_no_longer_held():
    with held_folder() as one:
        (one / "profile").mkdir()
        assert one.parent == base()
        assert one.stat().st_mode & 0o077 == 0
    assert list(base().iterdir()) == []


def test_what_a_killed_process_has_left_goes_and_what_others_hold_stays():
    """The next one to come removes it; of two that live neither touches the other's."""
    left = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False).stdout.strip()
    assert [str(path) for path in base().iterdir()] == [left]
    with held_folder() as one, held_folder() as other:
        assert sorted(base().iterdir()) == sorted([one, other])
    assert list(base().iterdir()) == []
