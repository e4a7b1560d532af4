"""The first line of the standard input, in which a process gets its configuration."""

from __future__ import annotations

import os
import sys


def read_first_line() -> bytes:
    """Read the first line, and leave what follows unread. Exit if the standard input ends before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the standard input has ended without a configuration")
        line += byte
    return bytes(line)
