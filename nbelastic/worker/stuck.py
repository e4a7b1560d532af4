"""Is the main thread stuck inside torch, or is it busy with the user's code?

About one in a hundred aborted ranks stays in gloo on a connection that is already closed (a lost wake-up). Such a
worker must be replaced; one that computes, sleeps or reads data must not: it will meet the abort at its next collective.
"""

from __future__ import annotations

import sys
import threading
import time

_TORCH = ("/torch/", "/nbelastic/worker/rendezvous.py")


class Blocked:
    """Watches the main thread from another one, beginning at `now` (monotonic seconds)."""

    def __init__(self, now: float) -> None:
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._since = now
        self._cpu = time.clock_gettime(self._clock)

    def stuck_for(self, now: float) -> float:
        """Seconds for which it has sat in torch without using the CPU; starts again whenever it moves."""
        cpu = time.clock_gettime(self._clock)
        if cpu - self._cpu > 0.02 * (now - self._since) + 0.001 or not self._in_torch():
            self._since, self._cpu = now, cpu
        return now - self._since

    def _in_torch(self) -> bool:
        frame = sys._current_frames().get(self._main)
        return frame is not None and any(part in frame.f_code.co_filename for part in _TORCH)
