"""Lines on stderr, which is the log file of a process, or the output of a program."""

from __future__ import annotations

import sys
from contextlib import suppress


def log_line(text: str) -> None:
    """Print it to stderr, the log file of this process. A full disk costs the line only."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print a line of nbelastic's own among those of the user's program."""
    print(f"nbelastic: {text}", file=sys.stderr, flush=True)
