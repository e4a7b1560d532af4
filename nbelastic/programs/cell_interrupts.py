"""Interrupts the cell that runs in the main thread, from another thread or at its time limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType

from nbelastic.worker import alarms


class CellInterrupts:
    """Calls a function in the middle of the cell, which may raise there."""

    def __init__(self) -> None:
        self._running = 0  # number of the cell that runs; 0: none
        self._requested = False  # by another thread, not by the time limit

    def interrupt(self, number: int) -> None:
        """In any thread: interrupt this cell, if it runs."""
        if number == self._running:
            self._requested = True
            alarms.interrupt_main_thread()

    @contextlib.contextmanager
    def running(self, number: int, end: Callable[[bool], object], limit: float = 0.0) -> Iterator[None]:
        """Cell `number` runs: on an interrupt, or after `limit` seconds, call `end(requested)` once in the main thread."""

        def on_interrupt(_: FrameType | None) -> None:
            if self._running:  # else the interrupt has come late, and must not end the program
                self._running = 0
                end(self._requested)

        with alarms.handling(on_interrupt):
            self._running, self._requested = number, False
            try:
                alarms.interrupt_after(limit)
                yield
            finally:
                self._running = 0
