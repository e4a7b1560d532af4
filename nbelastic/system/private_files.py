"""Write files and make folders that only their owner can read: keys, programs, results and logs."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def make_private(folder: Path) -> None:
    """Make this folder and its missing parents, with mode 0700."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def replace_private(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of mode 0600 atomically: readers find the whole old file or a whole new one, also after a kill.

    Several processes may do so at once. A process that has mapped the old file keeps it. OSError, for example if the disk is
    full; then the old file remains.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    except OSError as error:  # it names the new file, by another name each time
        raise OSError(error.errno, error.strerror, str(path)) from None
    new = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            for piece in pieces:
                file.write(piece)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def make_own(folder: Path) -> None:
    """Make this folder and its missing parents, with mode 0700. PermissionError if a link or another user's folder is there."""
    make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it is a link or belongs to another user", str(folder)) from None


def append_private(path: Path) -> int:
    """Open a file for appending, and return its descriptor. The file has mode 0600 then.

    PermissionError if something else is there: a link, another user's file, a file with a second name, or a FIFO.
    """
    try:
        return os.open(path, _APPEND | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = _open_own(path, _APPEND)  # it may have been removed meanwhile
    try:
        if os.fstat(fd).st_mode & 0o077:  # a file system without modes refuses to change them
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_private(path: Path) -> int:
    """Open a file for reading, and return its descriptor. PermissionError as for `append_private`."""
    return _open_own(path, os.O_RDONLY | os.O_CLOEXEC)


def _open_own(path: Path, flags: int) -> int:
    refused = PermissionError(errno.EPERM, "it is a link, has a second name, or belongs to another user", str(path))
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # do not wait for the other end of a FIFO
    except OSError as error:
        raise (refused if error.errno in (errno.ELOOP, errno.ENXIO) else error) from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink > 1:
        os.close(fd)
        raise refused
    os.set_blocking(fd, True)
    return fd


def redirect(path: Path, *descriptors: int) -> None:
    """Append what this process writes to `descriptors` to a file of mode 0600. PermissionError as for `append_private`."""
    file = append_private(path)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
        os.set_inheritable(descriptor, True)  # `dup2` does so only if the numbers differ
    if file not in descriptors:  # else the program has closed that one, and the file has its number
        os.close(file)
