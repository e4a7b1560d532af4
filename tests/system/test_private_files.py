"""Files that only their owner can read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbelastic.system.private_files import append_private, make_own, read_private, redirect, replace_private


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


def test_a_file_of_others_is_not_opened_for_appending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a second name of my file, a FIFO or another user's file is refused, and my file stays as it is."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "dangling", "fifo"):
        for open_it in (append_private, read_private):
            with pytest.raises(PermissionError, match="link"):
                open_it(tmp_path / name)
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionError, match="link"):
        append_private(tmp_path / "fifo")
    os.close(reader)
    (tmp_path / "second").hardlink_to(mine)
    with pytest.raises(PermissionError, match="second name"):
        append_private(tmp_path / "second")
    (tmp_path / "second").unlink()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(PermissionError, match="another user"):
        append_private(mine)
    assert mine.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_an_open_file_of_mine_becomes_private(tmp_path: Path) -> None:
    """The mode is 0600 after the open, and the descriptor blocks as usual."""
    path = tmp_path / "file"
    for content in ("ab", "abab"):
        fd = append_private(path)
        assert os.get_blocking(fd)
        os.write(fd, b"ab")
        os.close(fd)
        assert path.read_text() == content
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of a job go into a folder of this user, and through no link."""
    make_own(tmp_path / "logs" / "job-1")
    make_own(tmp_path / "logs" / "job-1")
    assert (tmp_path / "logs" / "job-1").stat().st_mode & 0o777 == 0o700
    (tmp_path / "logs" / "idle").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="link"):
        make_own(tmp_path / "logs" / "idle")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(PermissionError, match="another user"):
        make_own(tmp_path / "logs" / "job-1")


def test_output_is_redirected_though_a_program_has_closed_it(tmp_path: Path) -> None:
    """The log file may get the number of the closed descriptor. Child processes inherit it all the same."""
    closed = os.open(os.devnull, os.O_WRONLY)
    os.close(closed)
    try:
        redirect(tmp_path / "log", closed)
        os.write(closed, b"hello")
        assert os.get_inheritable(closed)
        assert (tmp_path / "log").read_bytes() == b"hello"
    finally:
        os.close(closed)
