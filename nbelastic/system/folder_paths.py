"""Where nbelastic keeps its files on a machine: in `<temporary folder>/nbelastic-<uid>`, and of batch jobs in `~/.nbelastic`."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbelastic.errors import UsageError
from nbelastic.system.trusted_folders import why_untrusted

_LOCKED, _NEW = "run-", "new-"  # how the names of locked process folders begin, and of others


def user_folder() -> Path:
    """The private folder of this user, made if it is missing. UsageError if another user could have written to it."""
    name = f"nbelastic-{os.getuid()}"
    # Python passes over a folder whose disk is full. But clusters there must be found, and stopped.
    if tempfile.tempdir is None:
        first = os.path.abspath(next(filter(None, map(os.getenv, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))  # noqa: S108
        tempfile.tempdir = first if os.path.isdir(f"{first}/{name}") else None
    path = Path(tempfile.gettempdir()).resolve() / name
    with contextlib.suppress(FileExistsError):  # the path may also be a file
        path.mkdir(mode=0o700)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} belongs to another user or is open to others: remove it or set TMPDIR.")
    if why := why_untrusted(path, trust_groups=True):
        raise UsageError(f"{why}, or set TMPDIR to another folder.")
    return path


def find_in_user_folder(pattern: str) -> list[Path]:
    """The paths there that match. Processes may remove their folders meanwhile: `Path.glob` of Python 3.11 would raise then."""
    folder = user_folder()
    return [folder / path for path in glob.glob(pattern, root_dir=folder)]


def runs_folder() -> Path:
    """The folder that contains the clusters' run folders: no other file in it can have a cluster's name."""
    path = user_folder() / "runs"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def compiler_cache(run_folder: str) -> Path:
    """Where torch keeps what it has compiled, for later clusters too. `run_folder`: the cluster's on this machine, or empty."""
    return (Path(run_folder).parents[1] if run_folder else user_folder()) / "inductor"


def log_file(log_dir: str | Path, worker: object, stream: str) -> Path:
    """The file for a standard stream of this worker, `out` or `err`."""
    return Path(log_dir) / f"{str(worker).replace('/', '-').replace('#', '-')}.{stream}"


def kept_state_folder(agent_folder: Path, worker: object) -> Path:
    """Where `worker` writes its kept state, in its agent's folder."""
    return agent_folder / f"kept-{str(worker).replace('/', '-')}"


def code_folder(agent_folder: Path) -> Path:
    """Where an agent puts the user's modules, in its folder."""
    return agent_folder / "code"


def placed_code(folder: Path, version: str) -> Path:
    """The file in which an agent says where a code version is, in its `code_folder`."""
    return folder / f"{version}.json"


@contextlib.contextmanager
def process_folder() -> Iterator[Path]:
    """A private folder for this process, removed at the end. First, remove the folders that killed processes have left.

    Not those of other machines, which may share the temporary folder: not every file system shares locks.
    """
    locked = f"{_LOCKED}{os.uname().nodename}-"
    for folder in user_folder().glob(f"{locked}{_NEW}*"):  # not of `gpu1-2` if this machine is `gpu1`
        with contextlib.suppress(OSError), _locked(folder):  # its process still runs, or the file system has no locks
            shutil.rmtree(folder, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=user_folder()))  # until it is locked, no process removes this name
    with _locked(new, always=False), kept_from_cleaners(user_folder()):
        path = new.rename(new.with_name(locked + new.name))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def kept_from_cleaners(folder: Path) -> Iterator[None]:
    """Keep the system from removing old files in `folder`, such as the sockets and programs of a cluster that runs for weeks.

    systemd-tmpfiles leaves a locked folder alone, with all that is in it. Several processes may lock it so.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # it is being cleaned just now, or its file system has no locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: Path, *, always: bool = True) -> Iterator[None]:
    """OSError if it cannot be locked. Without `always`, a folder on a file system without locks stays as it is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if always:
                raise
        yield
    finally:
        os.close(fd)


def batch_folder(name: str, number: str) -> Path:
    """Where batch jobs of a cluster find their scripts and the cluster's keys.

    Machines share home folders, but not temporary folders. Clusters of two machines may have the same name, so the path
    contains `number`, which is random, one per start of a cluster.
    """
    return Path.home() / ".nbelastic" / f"{name}-{number}"


def remove_batch_folder(name: str, number: str) -> None:
    """Remove it, if it is there. A user without a home folder has no batch jobs."""
    with contextlib.suppress(RuntimeError):
        shutil.rmtree(batch_folder(name, number), ignore_errors=True)
