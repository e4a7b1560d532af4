"""Files that only their owner can read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbelastic.system.private_files import replace_private


def test_two_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    """As two kernels that send the same modules: readers find one whole file or the other, and both succeed."""
    path = tmp_path / "file"

    def pieces() -> Iterator[bytes]:
        yield b"first "
        replace_private(path, [b"second"])
        assert path.read_bytes() == b"second"
        yield b"one"

    replace_private(path, pieces())
    assert path.read_bytes() == b"first one"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_private(path, [b"old"])

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace_private(path, pieces())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
