"""The first line of the standard input, in which a process gets its configuration."""

from __future__ import annotations

import fcntl
import os
import sys
from typing import IO

_DESCRIPTOR = b"@"  # before the number of the descriptor that has the line


def write_first_line(pipe: IO[bytes], line: bytes) -> tuple[int, ...]:
    """Write the line for a process that is not started yet. Returns descriptors that it must inherit; close them then.

    Until it reads, the pipe must hold all. Linux gives small pipes to a user who has many, and refuses to enlarge them. So a line
    that is too long is in memory of its own.
    """
    if len(line) <= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
        pipe.write(line)
        return ()
    fd = os.memfd_create("nbelastic")
    with os.fdopen(fd, "wb", closefd=False) as memory:
        memory.write(line)
    os.lseek(fd, 0, os.SEEK_SET)
    pipe.write(_DESCRIPTOR + str(fd).encode() + b"\n")
    return (fd,)


def read_first_line() -> bytes:
    """Read the first line, and leave what follows unread. Exit if the standard input ends before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the standard input has ended without a configuration")
        line += byte
    if line.startswith(_DESCRIPTOR):
        with os.fdopen(int(line[1:]), "rb") as memory:
            return memory.read()
    return bytes(line)
