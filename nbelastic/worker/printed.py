"""What the program prints, until it is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

BOUND = 64_000  # characters a stream that are kept for one sending


class Printed:
    """Written by any thread, taken by the link's. What is written belongs to the `job` that is named at that moment."""

    def __init__(self) -> None:
        self.job = ""
        self._dropped = {"out": 0, "err": 0}  # characters that were not taken in time
        self._parts: dict[str, deque[tuple[str, str]]] = {"out": deque(), "err": deque()}

    def write(self, stream: str, text: str) -> None:
        self._parts[stream].append((self.job, text))

    def take(self) -> Iterator[tuple[str, str, str, int]]:
        """Of each stream (out, err) that has something: the job, the stream's name, the last `BOUND` characters, and how
        many are left out; once more for the job after it, if that has begun.
        """
        for stream, parts in self._parts.items():
            taken = [parts.popleft() for _ in range(len(parts))]
            dropped, self._dropped[stream] = self._dropped[stream], 0
            for job, own in groupby(taken, itemgetter(0)):
                text = "".join(part for _, part in own)
                skipped = max(0, len(text) - BOUND)
                yield job, stream, text[skipped:], skipped + dropped
                dropped = 0

    def trim(self) -> None:
        """Nobody takes it: keep the last `BOUND` characters a stream, in whole pieces, and count what goes. In the link's thread."""
        for stream, parts in self._parts.items():
            held = sum(len(text) for _, text in tuple(parts))
            while held > BOUND and len(parts) > 1:
                size = len(parts.popleft()[1])
                held -= size
                self._dropped[stream] += size
