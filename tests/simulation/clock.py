"""Virtual time: what is due happens in order, and no second is waited for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """A call that is due at a time. `cancel()` drops it."""

    __slots__ = ("arguments", "call")

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments

    def cancel(self) -> None:
        self.call = _nothing


def _nothing(*_: Any) -> None:
    pass


class Clock:
    """Seconds since the beginning, and the calls that are due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Timer]] = []
        self._made = 0

    def after(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> Timer:
        return self._add(self.now + seconds, Timer(call, arguments))

    def at(self, when: float, call: Callable[..., Any], *arguments: Any) -> Timer:
        return self._add(max(when, self.now), Timer(call, arguments))

    def _add(self, when: float, timer: Timer) -> Timer:
        self._made += 1
        heapq.heappush(self._due, (when, self._made, timer))
        return timer

    def run_until(self, end: float) -> None:
        """Make all calls that are due until then."""
        due = self._due
        while due and due[0][0] <= end:
            self.now, _, timer = heapq.heappop(due)
            timer.call(*timer.arguments)
        self.now = end
