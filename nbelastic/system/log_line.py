"""A line in the log of a process that must go on, whatever becomes of the line."""

from __future__ import annotations

import sys
from contextlib import suppress


def log_line(text: str) -> None:
    """Print it to stderr, the log file of this process. A full disk costs the line only."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
