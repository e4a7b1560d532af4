"""Pauses between two tries of something that keeps failing."""

from __future__ import annotations


class Backoff:
    """The first pause has `first` seconds; each later one is twice as long, up to `longest` seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._last = 0.0

    def next(self) -> float:
        """The seconds to wait after one more failure."""
        self._last = min(2 * self._last, self._longest) if self._last else self._first
        return self._last

    def reset(self) -> None:
        """Forget earlier failures."""
        self._last = 0.0
