"""What the program prints, until it is sent; and the end of it for a driver that has not heard the rest."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from nbelastic.system.terminal_text import newest

BOUND = 64_000  # characters a stream that are kept for one sending


class Output(io.TextIOBase):
    """A standard stream: what is written goes to `taken`, and into the worker's log file, which is descriptor `fd`."""

    encoding = "utf-8"

    def __init__(self, taken: Callable[[str], object], fd: int) -> None:
        self._taken, self._fd = taken, fd
        self._file = open(fd, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115

    def write(self, text: str) -> int:
        self._taken(text)
        with contextlib.suppress(OSError):  # the disk is full: what is printed is seen all the same
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


def printable(text: str) -> str:
    """Without what no file and no message can hold: lone surrogates, as in strange file names."""
    return text.encode(errors="replace").decode()


class Piece(NamedTuple):
    """What a program wrote to `stream` (out or err) as `rank`: the last `BOUND` characters of it, up to position `end` of all
    that is sent of the job's stream.
    """

    job: str
    rank: int | None
    stream: str
    text: str
    end: int


class _Stream:
    """One of a program's two. `end` counts the characters of the present job so far, `tail` is the end of them.

    Of a progress bar only the newest frame counts: the others are in the log file.
    """

    def __init__(self) -> None:
        self.parts: deque[tuple[str, int | None, str]] = deque()
        self.job = ""
        self.rank: int | None = None
        self.tail = ""
        self.end = 0

    def take(self) -> Iterator[tuple[str, int | None, str]]:
        """Each job, rank, and what was written since the last time, if anything."""
        taken = [self.parts.popleft() for _ in range(len(self.parts))]
        for (job, self.rank), own in groupby(taken, itemgetter(0, 1)):
            text = newest("".join(part for _, _, part in own))
            if job != self.job:
                self.job, self.tail, self.end = job, "", 0
            self.end += len(text)
            self.tail = (self.tail + text)[-BOUND:]
            yield job, self.rank, text[-BOUND:]


class Printed:
    """Written by any thread, taken by the link's. What is written belongs to the `job` and `rank` of that moment."""

    def __init__(self) -> None:
        self.job = ""
        self.rank: int | None = None
        self._streams = {"out": _Stream(), "err": _Stream()}
        self._again = False

    def write(self, stream: str, text: str) -> None:
        self._streams[stream].parts.append((self.job, self.rank, text))

    def take(self) -> Iterator[Piece]:
        """What each stream (out, err) has: a piece for each job and rank."""
        again, self._again = self._again, False
        for name, stream in self._streams.items():
            for job, rank, text in stream.take():
                if not again:
                    yield Piece(job, rank, name, text, stream.end)
            if again and stream.tail:
                yield Piece(stream.job, stream.rank, name, stream.tail, stream.end)

    def hold(self) -> None:
        """Nobody listens: no more than the end is kept, and with the next taking it is said again."""
        for stream in self._streams.values():
            for _ in stream.take():
                pass
        self._again = True
