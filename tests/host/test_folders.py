"""The folder in which everything of ours lies is nobody else's, or there is none."""

import os
import tempfile

import pytest

from nbelastic.core.errors import UsageError
from nbelastic.folders import base

NOBODY = 65534


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_made_for_its_owner_alone(temporary):
    """Whatever the umask says; and it is found again."""
    before = os.umask(0)
    try:
        assert base() == temporary / f"nbelastic-{os.getuid()}"
    finally:
        os.umask(before)
    assert base().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trick", ["open to others", "a link", "a file", "a link to nowhere"])
def test_one_that_was_put_there_is_not_used(temporary, trick):
    """Somebody else knows its name, and may be faster."""
    place = temporary / f"nbelastic-{os.getuid()}"
    mine = temporary / "mine"
    mine.mkdir(mode=0o700)
    match trick:
        case "open to others":
            place.mkdir()
            place.chmod(0o770)
        case "a link":
            place.symlink_to(mine)
        case "a file":
            place.write_text("")
        case _:
            place.symlink_to(temporary / "nowhere")
    with pytest.raises(UsageError, match="belongs to somebody else or is open to others"):
        base()
    assert not list(mine.iterdir())
    assert not (temporary / "nowhere").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_somebody_else_s_is_not_used(temporary):
    """Its owner could read and replace what is put into it, whatever its mode."""
    place = temporary / f"nbelastic-{os.getuid()}"
    place.mkdir(mode=0o700)
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="belongs to somebody else"):
        base()
