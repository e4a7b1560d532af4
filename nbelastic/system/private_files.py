"""Write files and make folders that only their owner can read: keys, programs, results and logs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


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
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    new = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            for piece in pieces:
                file.write(piece)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def append_private(path: Path) -> int:
    """Open a file for appending, and return its descriptor. A missing file is made with mode 0600."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def redirect(path: Path, *descriptors: int) -> None:
    """Append what this process writes to `descriptors` to a file of mode 0600."""
    file = append_private(path)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)
