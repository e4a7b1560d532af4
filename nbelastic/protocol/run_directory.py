"""A cluster's private run folder and its lock: who has a name."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from nbelastic.errors import AnotherDriverError, UsageError
from nbelastic.system import at_fork
from nbelastic.system.folders import base, runs
from nbelastic.system.presence import identity, lives, pid_of

LONGEST = 100  # bytes of a cluster's name: names of files are made of it
START = 60.0  # seconds that a driver may take to start


class RunDir:
    """`<temporary folder>/nbelastic-<uid>/runs/<name>`, mode 0700, held by a lock for as long as the cluster lives."""

    def __init__(self, name: str) -> None:
        known = all(c.isalnum() or c in "-_." for c in name)
        if not (known and 0 < len(name.encode()) <= LONGEST) or name.startswith((".", "-")) or name.endswith(".lock"):
            raise UsageError(
                f"{name!r} is not a valid name for a cluster: use up to {LONGEST} letters, digits, '-', '_' and '.', "
                "no '.' or '-' first and no '.lock' last."
            )
        self.name = name
        self.path = runs() / name
        self.lock = self.path.with_name(f"{name}.lock")
        self._held = -1

    def hold(self) -> None:
        """Be the one driver of this name. AnotherDriverError if there is one."""
        path = self.lock
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise AnotherDriverError(
                    f"a cluster named {self.name!r} is running already (process {holder(path) or 'unknown'}): "
                    "stop it or choose another name."
                ) from None
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                break
            os.close(fd)  # it was removed by who held it
        self._held = fd
        at_fork.in_child(self._leave_to_parent)
        os.ftruncate(fd, 0)
        os.pwrite(fd, identity(os.getpid()).encode(), 0)

    def sign(self, number: str) -> None:
        """Say which start of a cluster this name is held for."""
        os.pwrite(self._held, f"{identity(os.getpid())} {number}".encode(), 0)

    @property
    def held(self) -> bool:
        """By us."""
        return self._held >= 0

    @property
    def is_there(self) -> bool:
        """Whether what this holds is still what others find by the name; true if it holds nothing."""
        with suppress(OSError):
            return not self.held or os.path.samestat(self.lock.stat(), os.fstat(self._held))
        return False

    @property
    def driver(self) -> int:
        """The process that holds it; 0: none."""
        return holder(self.lock)

    def make(self) -> None:
        """A new folder, without what a dead driver has left."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)

    def release(self) -> None:
        """If this holds the name: remove the folder, as keys are in it, and give up the name. Twice is fine."""
        fd = self._give_up()
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.lock.unlink(missing_ok=True)
            _unlock(fd)

    def let_go(self) -> None:
        """If this holds the name: give it up, and leave all else as it is for another driver. Twice is fine."""
        fd = self._give_up()
        if fd >= 0:
            os.ftruncate(fd, 0)
            _unlock(fd)

    def _give_up(self) -> int:
        at_fork.no_longer(self._leave_to_parent)
        fd, self._held = self._held, -1
        return fd

    def _leave_to_parent(self) -> None:
        """In a forked child: the lock is the parent's, and ends with the parent."""
        os.close(self._give_up())

    def log_dir(self) -> Path:
        """A new folder for the logs of this start."""
        return base() / "logs" / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _unlock(fd: int) -> None:
    """Unlock before closing: a child that is forked at this moment has the descriptor too."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def holder(lock: Path) -> int:
    """The process that holds it, as far as it still lives; 0: none."""
    try:
        who = lock.read_text().partition(" ")[0]
    except OSError:
        return 0
    return pid_of(who) if lives(who) else 0
