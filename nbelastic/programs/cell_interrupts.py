"""Interrupts the cell that runs in the main thread, from another thread or at its time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class CellInterrupts:
    """A signal has the main thread call a function in the middle of the cell, which may raise there.

    A call into C that Python cannot interrupt goes on until it returns.
    """

    def __init__(self) -> None:
        self._running = 0  # number of the cell that runs; 0: none
        self._requested = False  # by another thread, not by the time limit

    def interrupt(self, number: int) -> None:
        """In any thread: interrupt this cell, if it runs."""
        if number == self._running:
            self._requested = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    @contextlib.contextmanager
    def running(self, number: int, end: Callable[[bool], object], limit: float = 0.0) -> Iterator[None]:
        """Cell `number` runs: on an interrupt, or after `limit` seconds, call `end(requested)` once in the main thread."""

        def on_signal(_: int, __: FrameType | None) -> None:
            if self._running:  # else the signal has come late, and must not end the program
                self._running = 0
                end(self._requested)

        before = signal.signal(signal.SIGALRM, on_signal)
        self._running, self._requested = number, False
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            yield
        finally:
            self._running = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            # A late signal of `interrupt` would end the process by default.
            signal.signal(signal.SIGALRM, signal.SIG_IGN if before is signal.SIG_DFL else before)
