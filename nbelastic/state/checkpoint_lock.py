"""The lock of a checkpoint folder. Jobs of two clusters in one folder would remove, and load, each other's checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nbelastic.errors import StateError
from nbelastic.system.log_line import print_line

FILE = ".used-by"  # its text is the number and the log folder of the cluster that has locked the folder
TIMEOUT = 120.0  # seconds; a file server keeps the locks of a lost host for 90
PATIENCE = 5.0  # seconds for processes that were killed to end, before a line says what this one waits for
POLL = 0.1


@contextlib.contextmanager
def folder_lock(folder: Path, cluster: str, logs: Path) -> Iterator[None]:
    """Lock the folder for the processes of this cluster, which share the lock. `cluster`: its number; `logs`: its log folder.

    Waits while those of another cluster have locked it, and prints a line. StateError after `TIMEOUT`. Nothing is locked where
    the file system or its owner prevents it.
    """
    with contextlib.ExitStack() as at_end:
        with contextlib.suppress(OSError):
            # The folder may be shared: another user's link must not choose the file that is written.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            # An account that can read the file can lock it: so only accounts that can write checkpoints here may read it.
            writers = folder.stat().st_mode & 0o022
            descriptor = os.open(folder / FILE, flags, 0o600 | writers | writers << 1)
            at_end.callback(unlock, descriptor)
            try:
                _lock(descriptor, folder, cluster, logs)
            except OSError:  # a full disk, for example: others are not to wait for this text
                at_end.close()
        yield


def unlock(descriptor: int) -> None:
    """Unlock the file or folder, and close it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile have the descriptor too
    os.close(descriptor)


def _lock(descriptor: int, folder: Path, cluster: str, logs: Path) -> None:
    begin, is_said = time.monotonic(), False
    while True:
        if _try(descriptor, fcntl.LOCK_EX):  # no process uses the folder
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{cluster} {logs}".encode(), 0)
        # Read it under the lock: no process writes it then, and NFS shows what another host has written only after a lock.
        is_shared, user = _try(descriptor, fcntl.LOCK_SH), _user(descriptor)
        if is_shared and user[0] == cluster:
            return
        why = f"a job of another cluster writes its checkpoints to {folder} (its logs are in {user[1]})"
        waited = time.monotonic() - begin
        if waited > TIMEOUT:
            raise StateError(f"{why}: stop it, or give checkpoint another folder.")
        if waited > PATIENCE and not is_said:
            print_line(f"waiting for up to {TIMEOUT:g} s, as {why}.")
            is_said = True
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # those who wait want it for themselves
        time.sleep(POLL)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _user(descriptor: int) -> tuple[str, str]:
    """The number and the log folder of the cluster that has written last."""
    number, _, logs = os.pread(descriptor, 4096, 0).decode(errors="replace").partition(" ")
    return number, logs
