"""The one folder in which everything of ours lies on a machine: `<temporary folder>/nbelastic-<uid>`, ours alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbelastic.errors import UsageError

_HELD = "run-"  # folders that a process holds by a lock for as long as it lives


def base() -> Path:
    """Made if it is not there. UsageError if somebody else could have put something into it."""
    path = Path(tempfile.gettempdir()) / f"nbelastic-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # or something else of that name
        path.mkdir(mode=0o700)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} belongs to somebody else or is open to others: remove it or set TMPDIR.")
    return path


def runs() -> Path:
    """The folder of run folders, one per cluster: other things in `base()` cannot have the name of a cluster."""
    path = base() / "runs"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def kept(folder: Path, worker: object) -> Path:
    """Where this worker keeps the training state for another one, in its agent's folder."""
    return folder / f"kept-{str(worker).replace('/', '-')}"


@contextlib.contextmanager
def held_folder() -> Iterator[Path]:
    """A folder in there while this process needs it. Those that killed processes have left are removed first."""
    for left in base().glob(f"{_HELD}*"):
        with contextlib.suppress(OSError), _locked(left):  # held: BlockingIOError
            shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=base()))  # under a name that nobody sweeps, until it is locked
    with _locked(new):
        path = new.rename(new.with_name(_HELD + new.name))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def batch_folder(name: str, number: str) -> Path:
    """Where batch jobs of this cluster find what they are to run, and its keys, for as long as jobs start.

    Home folders are shared among machines, temporary ones are not. Each machine has names of its own, so that two
    clusters may have the same name: `number` is random, one per start of a cluster.
    """
    return Path.home() / ".nbelastic" / f"{name}-{number}"
