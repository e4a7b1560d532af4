"""The folder of a process, which is removed when that ends, and the folder that contains all of a user's."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile

import pytest

import nbelastic as nbe
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.system import running_agents, tunnel_folder
from nbelastic.system.folder_paths import process_folder, user_folder

DIES = "import os; from nbelastic.system.folder_paths import process_folder; held = process_folder(); print(held.__enter__(), flush=True); os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A temporary folder for these tests and the processes that they start."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_removed_at_the_end():
    with process_folder() as one:
        (one / "profile").mkdir()
        assert one.parent == user_folder()
        assert one.stat().st_mode & 0o077 == 0
    assert list(user_folder().iterdir()) == []


def test_clusters_on_a_full_disk_are_found(monkeypatch):
    """A process that starts when the disk is full looks in the same folder as those before, and can stop their clusters."""
    before = user_folder()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(tempfile, "tempdir", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # has the effect of a full disk
    try:
        assert user_folder() == before
        assert nbe.Cluster.all() == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_folders_of_killed_processes_are_removed_and_others_stay():
    """The next process removes them; two running processes keep their own folders."""
    left = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False).stdout.strip()
    assert [str(path) for path in user_folder().iterdir()] == [left]
    with process_folder() as one, process_folder() as other:
        assert sorted(user_folder().iterdir()) == sorted([one, other])
    assert list(user_folder().iterdir()) == []


def test_folders_of_machines_with_a_similar_name_stay():
    """Machines may share the temporary folder, and may not share its locks."""
    other = user_folder() / f"run-{os.uname().nodename}-2-new-abcdefgh"
    other.mkdir()
    with process_folder() as one:
        assert sorted(user_folder().iterdir()) == sorted([one, other])
    assert list(user_folder().iterdir()) == [other]


def test_a_file_system_without_locks(monkeypatch):
    """Agents work there, as on Lustre without `flock`, and remove no folder of another. The notebook's machine needs locks."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with process_folder() as one, process_folder() as other:
        assert sorted(user_folder().iterdir()) == sorted([one, other])
    assert list(user_folder().iterdir()) == []
    with pytest.raises(nbe.UsageError, match=r"one.lock cannot be locked \(Function not implemented\): set TMPDIR"):
        RunFolder("one").acquire()


def is_cleaned():
    """Whether systemd-tmpfiles would remove old files: it locks each folder first, and leaves out those that are locked."""
    fd = os.open(user_folder(), os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_no_file_of_a_running_cluster_is_cleaned_away():
    """A cluster that runs for weeks needs its sockets, programs and keys. Each driver and each host's agent keeps them."""
    driver, another = RunFolder("one"), RunFolder("two")
    assert is_cleaned()
    driver.acquire()
    with process_folder():
        another.acquire()
        assert not is_cleaned()
        driver.release()
        another.release(keep_folder=True)
        assert not is_cleaned()
    assert is_cleaned()
    driver.acquire()
    assert not is_cleaned()
    driver.release()


def test_a_folder_that_ends_while_it_is_searched(tmp_path, monkeypatch):
    """Another agent of this user removes its folder between two looks: agents start, and are found, nonetheless."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("run-a", "run-b"):
        (user_folder() / name).mkdir()
    (user_folder() / "run-b" / tunnel_folder.name_of("1", "gpu1", 3)).mkdir()
    scandir = os.scandir

    def remove_then_scan(path):
        if os.path.basename(path) == "run-a" and os.path.isdir(path):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_then_scan)
    assert list(tunnel_folder.find("1", "gpu1")) == [3]
    assert running_agents.find() == []
