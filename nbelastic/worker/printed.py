"""What the program prints, until it is sent; and the end of it for a driver that has not heard the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

BOUND = 64_000  # characters a stream that are kept for one sending


class _Stream:
    """One of a program's two. `end` counts the characters of the present job so far, `tail` is the end of them."""

    def __init__(self) -> None:
        self.parts: deque[tuple[str, str]] = deque()
        self.job = ""
        self.tail = ""
        self.end = 0

    def take(self) -> Iterator[tuple[str, str]]:
        """Each job and what it has written since the last time, if anything."""
        taken = [self.parts.popleft() for _ in range(len(self.parts))]
        for job, own in groupby(taken, itemgetter(0)):
            text = "".join(part for _, part in own)
            if job != self.job:
                self.job, self.tail, self.end = job, "", 0
            self.end += len(text)
            self.tail = (self.tail + text)[-BOUND:]
            yield job, text[-BOUND:]


class Printed:
    """Written by any thread, taken by the link's. What is written belongs to the `job` that is named at that moment."""

    def __init__(self) -> None:
        self.job = ""
        self._streams = {"out": _Stream(), "err": _Stream()}
        self._again = False

    def write(self, stream: str, text: str) -> None:
        self._streams[stream].parts.append((self.job, text))

    def take(self) -> Iterator[tuple[str, str, str, int]]:
        """Of each stream (out, err) that has something: the job, the stream's name, the last `BOUND` characters, and the
        position in the job's output that they end at; once more for the job after it, if that has begun.
        """
        again, self._again = self._again, False
        for name, stream in self._streams.items():
            for job, text in stream.take():
                if not again:
                    yield job, name, text, stream.end
            if again and stream.tail:
                yield stream.job, name, stream.tail, stream.end

    def hold(self) -> None:
        """Nobody listens: no more than the end is kept, and with the next taking it is said again."""
        for stream in self._streams.values():
            for _ in stream.take():
                pass
        self._again = True
