"""What a forked child of this process must not keep open: `multiprocessing` forks a kernel with all its descriptors."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

_in_child: set[Callable[[], object]] = set()


def in_child(function: Callable[[], object]) -> None:
    """Call `function` in each child that is forked from now on, until `no_longer(function)`."""
    _in_child.add(function)


def no_longer(function: Callable[[], object]) -> None:
    _in_child.discard(function)


def close_sockets(port: int) -> None:
    """Close the TCP sockets of this process that are bound to this local port. ZeroMQ does not tell their numbers."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the folder's own descriptor is closed by now
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                found = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port
            if found:
                os.close(fd)


def _forked() -> None:
    for function in list(_in_child):
        function()


os.register_at_fork(after_in_child=_forked)
