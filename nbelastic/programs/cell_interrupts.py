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
        self._requested = 0  # number of the cell that another thread has interrupted last

    def interrupt(self, number: int) -> None:
        """In any thread: interrupt this cell, if it runs."""
        if number == self._running:
            self._requested = number
            alarms.interrupt_main_thread()

    @contextlib.contextmanager
    def running(self, number: int, end: Callable[[bool], object], limit: float = 0.0) -> Iterator[None]:
        """Cell `number` runs: on an interrupt, or after `limit` seconds, call `end(requested)` once in the main thread."""

        def on_interrupt(_: FrameType | None) -> None:
            requested = self._requested == number
            # An interrupt that has come late must end neither the program nor the next cell.
            if self._running and (requested or limit):
                self._running = 0
                end(requested)

        with alarms.handling(on_interrupt):
            self._running = number
            try:
                alarms.interrupt_after(limit)
                yield
            finally:
                self._running = 0
