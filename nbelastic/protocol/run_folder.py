"""The run folder of a cluster, and the lock that gives one driver the cluster's name."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from nbelastic.errors import AnotherDriverError, UsageError
from nbelastic.system import at_fork
from nbelastic.system.folder_paths import kept_from_cleaners, runs_folder, user_folder
from nbelastic.system.process_identity import identity, is_alive, pid_of

LONGEST = 100  # bytes of a cluster's name, which is part of file names


class RunFolder:
    """`<temporary folder>/nbelastic-<uid>/runs/<name>`, mode 0700. A driver has a lock on the file `<name>.lock` beside it."""

    def __init__(self, name: str) -> None:
        known = all(c.isalnum() or c in "-_." for c in name)
        if not (known and 0 < len(name.encode()) <= LONGEST) or name.startswith((".", "-")) or name.endswith(".lock"):
            raise UsageError(
                f"{name!r} is not a valid name for a cluster: use up to {LONGEST} letters, digits, '-', '_' and '.', "
                "no '.' or '-' first and no '.lock' last."
            )
        self.name = name
        self.path = runs_folder() / name
        self.lock = self.path.with_name(f"{name}.lock")
        self._lock_fd = -1
        self._while_locked = ExitStack()

    def acquire(self) -> None:
        """Lock the name, as its one driver. AnotherDriverError if another process has the lock."""
        path = self.lock
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise AnotherDriverError(
                    f"a cluster named {self.name!r} is running already (process {lock_holder(path) or 'unknown'}): "
                    "stop it or choose another name."
                ) from None
            except OSError as error:
                os.close(fd)
                raise UsageError(
                    f"{path} cannot be locked ({error.strerror}): set TMPDIR to a folder of a file system with locks, such as /tmp."
                ) from None
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                break
            os.close(fd)  # the process that had the lock has removed the file
        self._lock_fd = fd
        self._while_locked.enter_context(kept_from_cleaners(path.parents[1]))
        at_fork.register(self._close_in_child)
        os.ftruncate(fd, 0)
        os.pwrite(fd, identity(os.getpid()).encode(), 0)

    def write_number(self, number: str) -> None:
        """Write into the lock file for which start of a cluster this process has the lock."""
        os.pwrite(self._lock_fd, f"{identity(os.getpid())} {number}".encode(), 0)

    @property
    def is_current(self) -> bool:
        """Whether other processes find the file that this object has locked; True if it has no lock."""
        with suppress(OSError):
            return self._lock_fd < 0 or os.path.samestat(self.lock.stat(), os.fstat(self._lock_fd))
        return False

    @property
    def driver(self) -> int:
        """The pid of the process that has the lock; 0 if there is none."""
        return lock_holder(self.lock)

    def make(self) -> None:
        """Make an empty folder. Files of an earlier driver are removed; NFS keeps those that a process still has open."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def release(self, *, keep_folder: bool = False) -> None:
        """Unlock the name, and remove the folder, which contains keys; `keep_folder`: another driver needs it, if it exists.

        Without the lock, do nothing.
        """
        fd = self._take_lock_fd()
        if fd < 0:
            return
        if keep_folder and self.path.exists():
            os.ftruncate(fd, 0)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            self.lock.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(fd)

    def _take_lock_fd(self) -> int:
        at_fork.unregister(self._close_in_child)
        fd, self._lock_fd = self._lock_fd, -1
        self._while_locked.close()
        return fd

    def _close_in_child(self) -> None:
        """In a forked child, close the descriptor: the lock belongs to the parent."""
        os.close(self._take_lock_fd())

    def new_log_dir(self) -> Path:
        """The path of a new log folder, for this start of the cluster."""
        return user_folder() / "logs" / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def lock_holder(lock: Path) -> int:
    """The pid of the process that has the lock, if it still runs; else 0."""
    try:
        process = lock.read_text().partition(" ")[0]
    except OSError:
        return 0
    return pid_of(process) if is_alive(process) else 0
