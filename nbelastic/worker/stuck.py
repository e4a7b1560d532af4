"""Is the main thread stuck in a collective, or is it busy with the user's code?

Aborting gloo does not wake everybody: a send that was partly written when its connection broke is never told
(`Pair::signalException` passes over unbound buffers in its transmit queue), so about one rank in a hundred waits on
until the group's time-out. Nothing wakes it, and DDP's reducer keeps its lock meanwhile, so that no later backward pass
of this process could run either: the worker is replaced. One that computes, sleeps or reads data is not: it will meet
the abort at its next collective.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/",
    "/nbelastic/worker/rendezvous.py",
    "/nbelastic/worker/transfer.py",
)


class Blocked:
    """Watches the main thread from another one, from `now` on (monotonic seconds)."""

    def __init__(self, now: float) -> None:
        main = threading.main_thread()
        self._ident = main.ident or 0
        self._stat = Path(f"/proc/self/task/{os.getpid()}/stat")  # the main thread has the process's number
        self._since = now
        self._used = -1

    def stuck_for(self, now: float) -> float:
        """Seconds for which it has slept inside a collective without a tick of CPU; starts again when it moves."""
        asleep, used = self._look()
        if not asleep or used != self._used or not self._in_a_collective():
            self._since, self._used = now, used
        return now - self._since

    def _look(self) -> tuple[bool, int]:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return False, -1
        return fields[0] == "S", int(fields[11]) + int(fields[12])

    def _in_a_collective(self) -> bool:
        frame = sys._current_frames().get(self._ident)
        return frame is not None and any(part in frame.f_code.co_filename for part in WAITS)


def of_a_collective(error: BaseException | None) -> bool:
    """Whether `error` could be one's: torch.distributed raises RuntimeErrors, which the user's code may have wrapped."""
    while error is not None:
        if isinstance(error, RuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False
