"""SIGALRM: other threads and time limits interrupt the main thread with it, whose handler may raise there."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SOON = 0.001  # seconds until an alarm that is overdue


def interrupt_main_thread() -> None:
    """In any thread: have the main thread call its handler. Call it only while there is one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def interrupt_after(seconds: float) -> None:
    """In the main thread: call the handler after so long; 0: never."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextlib.contextmanager
def handling(
    handler: Callable[[FrameType | None], object], goes_on: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """In the main thread: an interrupt calls `handler(frame)`, then again the handler before it. Ends a time limit.

    A call into C that Python cannot interrupt goes on until it returns. An alarm that the program has set comes afterwards, if
    the program `goes_on()` then.
    """
    (left, interval), begin = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    before = signal.signal(signal.SIGALRM, lambda _, frame: handler(frame))
    try:
        yield
    finally:
        interrupt_after(0)
        # A late signal would end the process by default.
        signal.signal(signal.SIGALRM, signal.SIG_IGN if before is signal.SIG_DFL else before)
        if left and goes_on():
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), SOON), interval)
