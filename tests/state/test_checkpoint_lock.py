"""A checkpoint folder belongs to one cluster while one of its jobs runs."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from nbelastic.errors import StateError
from nbelastic.state import checkpoint_lock
from nbelastic.state.checkpoint_lock import FILE, folder_lock

LOGS = Path("/logs/some of mine")


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "TIMEOUT", 0.3)
    monkeypatch.setattr(checkpoint_lock, "PATIENCE", 0.1)


def test_two_clusters_do_not_use_one_folder(tmp_path):
    """The workers of a cluster share the folder. Until the last one ends, those of another get an error that names its logs."""
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(folder_lock(tmp_path, "a1", Path("/logs/longer-than-mine")))
        second.enter_context(folder_lock(tmp_path, "a1", LOGS))
        first.close()
        with pytest.raises(StateError, match=r"a job of another cluster .* \(its logs are in /logs/longer-than-mine\)"):
            first.enter_context(folder_lock(tmp_path, "b2", LOGS))
        second.close()
        first.enter_context(folder_lock(tmp_path, "b2", LOGS))
        with pytest.raises(StateError, match=r"\(its logs are in /logs/some of mine\)"):
            second.enter_context(folder_lock(tmp_path, "a1", LOGS))


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666)])
def test_an_account_that_only_reads_the_folder_cannot_keep_jobs_from_it(tmp_path, folder, file):
    """A lock needs no right to write. So only accounts that may write checkpoints there can open the file."""
    before = os.umask(0)
    try:
        tmp_path.chmod(folder)
        with folder_lock(tmp_path, "a1", LOGS):
            assert (tmp_path / FILE).stat().st_mode & 0o777 == file
    finally:
        os.umask(before)


def test_a_cluster_waits_until_another_one_ends(tmp_path, monkeypatch, capsys):
    """A file server may keep the lock of a lost host for a while: a line says what is waited for, and then the job begins."""
    monkeypatch.setattr(checkpoint_lock, "TIMEOUT", 60.0)
    with ExitStack() as first, ExitStack() as other, ThreadPoolExecutor(1) as pool:
        first.enter_context(folder_lock(tmp_path, "a1", LOGS))
        second = pool.submit(other.enter_context, folder_lock(tmp_path, "b2", LOGS))
        with pytest.raises(TimeoutError):
            second.result(0.4)
        first.close()
        second.result(20)
    line = f"waiting for up to 60 s, as a job of another cluster writes its checkpoints to {tmp_path} (its logs are in {LOGS})."
    assert capsys.readouterr().err == f"nbelastic: {line}\n"


class Clock:
    """Stands for `time`: a second passes in each sleep, and `then` is called."""

    def __init__(self, then):
        self.now, self.then = 0.0, then

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 1
        self.then(self.now)


def test_processes_that_were_killed_have_a_while_to_end(tmp_path, monkeypatch, capsys):
    """A job that begins just after another one was stopped prints no line: the folder is free within `PATIENCE`."""
    monkeypatch.setattr(checkpoint_lock, "PATIENCE", 5.0)
    monkeypatch.setattr(checkpoint_lock, "TIMEOUT", 60.0)
    with ExitStack() as killed:
        killed.enter_context(folder_lock(tmp_path, "a1", LOGS))
        clock = Clock(lambda now: killed.close() if now > 3 else None)
        monkeypatch.setattr(checkpoint_lock, "time", clock)
        with folder_lock(tmp_path, "b2", LOGS):
            assert clock.now == 4
    assert capsys.readouterr().err == ""


def test_a_cluster_that_has_not_written_its_number_yet(tmp_path):
    """The folder is locked, though the file has still the number of the last job: this one does not take the lock for its own."""
    with folder_lock(tmp_path, "a1", LOGS):
        pass
    descriptor = os.open(tmp_path / FILE, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StateError), folder_lock(tmp_path, "a1", LOGS):
        pass
    os.close(descriptor)


def test_clusters_with_one_log_folder_are_two(tmp_path):
    """Two copies of a notebook may name one log folder. Their clusters do not share a checkpoint folder."""
    with folder_lock(tmp_path, "a1", LOGS), pytest.raises(StateError), folder_lock(tmp_path, "b2", LOGS):
        pass


def test_a_host_that_has_read_the_file_before(tmp_path, monkeypatch):
    """NFS shows a host what another one has written only after a lock. The workers of a new cluster on two hosts share the folder."""
    seen, locked, read = b"gone /logs/of/an/old/one", fcntl.flock, os.pread
    (tmp_path / FILE).write_bytes(seen)

    def flock(descriptor, kind):
        nonlocal seen
        locked(descriptor, kind)
        seen = read(descriptor, 4096, 0)

    with folder_lock(tmp_path, "a1", LOGS), monkeypatch.context() as other_host:
        other_host.setattr(checkpoint_lock.fcntl, "flock", flock)
        other_host.setattr(checkpoint_lock.os, "pread", lambda *_: seen)
        with folder_lock(tmp_path, "a1", LOGS):
            pass


def test_a_link_of_another_user(tmp_path):
    """In a shared folder another user may have made a link of that name. The file that it leads to is not written."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / FILE).symlink_to(precious)
    with folder_lock(tmp_path, "a1", LOGS):
        assert precious.read_text() == "mine"


def test_what_the_program_has_forked_does_not_hold_the_lock(tmp_path):
    """A process that the job has forked, and that lives on, does not keep other clusters from the folder."""
    read, write = os.pipe()
    with folder_lock(tmp_path, "a1", LOGS):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    try:
        with folder_lock(tmp_path, "b2", LOGS):
            pass
    finally:
        os.close(write)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch, call):
    """If the file cannot be written, the job goes on without a lock, and so does the next worker."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_lock.os, call, fail)
        with ExitStack() as workers:
            workers.enter_context(folder_lock(tmp_path, "a1", LOGS))
            workers.enter_context(folder_lock(tmp_path, "a1", LOGS))
    with folder_lock(tmp_path, "b2", LOGS):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """The job goes on there too."""

    def without_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(checkpoint_lock.fcntl, "flock", without_locks)
    with folder_lock(tmp_path, "a1", LOGS), folder_lock(tmp_path, "b2", LOGS):
        pass
