"""Unix sockets in a private folder: only this user can connect. The folder's path may be too long for a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def bind_in(folder: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket that is bound to `name` in `folder`, in place of one that a process has left which was killed."""
    with _socket_and_path(folder, name, kind) as (bound, path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        bound.bind(path)
        os.chmod(path, 0o600)
    return bound


def connect_in(folder: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket that is connected to `name` in `folder`. OSError if no process listens there.

    BlockingIOError if too many connections wait there already: a stopped process accepts none.
    """
    with _socket_and_path(folder, name, kind) as (connected, path):
        connected.setblocking(False)
        connected.connect(path)
        connected.setblocking(True)
    return connected


@contextlib.contextmanager
def _socket_and_path(folder: Path, name: str, kind: int) -> Iterator[tuple[socket.socket, str]]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made = socket.socket(socket.AF_UNIX, kind)
        try:
            yield made, f"/proc/self/fd/{descriptor}/{name}"
        except BaseException:
            made.close()
            raise
    finally:
        os.close(descriptor)
