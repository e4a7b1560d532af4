"""A process's end in words."""

from __future__ import annotations

import signal


def exit_text(code: int) -> str:
    """A process's end in words: `SIGKILL`, `exit code 3`."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
