"""Exit codes with a meaning, and exit codes as text."""

from __future__ import annotations

import signal

HUNG = 75  # of a hung worker, which ended itself: it is replaced, and no failure is counted
GPU_LOST = 77  # of a worker whose GPU failed: it ended itself, and its slot rests before the next one starts
UNSUCCESSFUL_NODE = 76  # of a node that has ended before its workers succeeded: it was stopped, or they failed

CONNECTION_LOST = 79  # of a tunnel whose ssh connection has ended; the agent may run on
AGENT_GONE = 78  # of an ssh client that was to reach an agent again: there is none on the host


def exit_text(code: int) -> str:
    """The end of a process in words: `SIGKILL`, `exit code 3`. A negative code is the number of the signal."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
