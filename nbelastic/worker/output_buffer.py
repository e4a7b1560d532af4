"""The program's output until it is sent, and its end for a new driver, which has not received the rest."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TextIO

from nbelastic.system.terminal_text import drop_replaced_frames

MAX_TEXT = 64_000  # characters per stream that one message holds


class OutputStream(io.TextIOBase):
    """A standard stream: it passes text to `write_to`, and to the worker's log file, which is descriptor `fd`."""

    encoding = "utf-8"

    def __init__(self, write_to: Callable[[str], object], fd: int) -> None:
        self._write_to, self._fd = write_to, fd
        self._file = self._open()

    def _open(self) -> TextIO:
        return open(self._fd, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # who takes it joins it with other text, in another thread
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._write_to(text)
        with self._log_file() as file:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._log_file() as file:
            file.flush()

    @contextlib.contextmanager
    def _log_file(self) -> Iterator[TextIO]:
        """The file, whose own errors are dropped: the client sees the text all the same."""
        file = self._file
        try:
            yield file
        except OSError as error:
            if error.errno is None:  # of a signal handler, which may raise a TimeoutError here
                raise
            # As the disk is full, Python would write the text again when it ends, and report that.
            if file is self._file:
                self._file = self._open()
            with contextlib.suppress(OSError):
                file.close()
        except ValueError:
            if not file.closed:  # by another thread, as the disk is full
                raise
        except RuntimeError as error:
            if "reentrant call" not in str(error):  # a signal handler prints while the program prints
                raise

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


def printable(text: str) -> str:
    """The text without lone surrogates (as in strange file names), which neither files nor messages can hold."""
    return text.encode(errors="replace").decode()


class Piece(NamedTuple):
    """Output of one job, rank and stream (out or err): the last MAX_TEXT characters up to position `end` of the stream."""

    job: str
    rank: int | None
    stream: str
    text: str
    end: int


class _Stream:
    """`end` counts the characters of the present job so far; `tail` holds the last of them.

    Of a progress bar only the newest frame counts: the log file has the others.
    """

    def __init__(self) -> None:
        self.parts: deque[tuple[str, int | None, str]] = deque()
        self.job = ""
        self.rank: int | None = None
        self.tail = ""
        self.end = 0

    def take(self) -> Iterator[tuple[str, int | None, str]]:
        """Yield each job, rank and text that was written since the last call."""
        taken = [self.parts.popleft() for _ in range(len(self.parts))]
        for (job, self.rank), own in groupby(taken, itemgetter(0, 1)):
            text = drop_replaced_frames("".join(part for _, _, part in own))
            if job != self.job:
                self.job, self.tail, self.end = job, "", 0
            self.end += len(text)
            self.tail = (self.tail + text)[-MAX_TEXT:]
            yield job, self.rank, text[-MAX_TEXT:]


class OutputBuffer:
    """Any thread writes, the link thread takes. Text belongs to the `job` and `rank` of the moment when it is written."""

    def __init__(self) -> None:
        self.job = ""
        self.rank: int | None = None
        self._streams = {"out": _Stream(), "err": _Stream()}
        self._repeat = False

    def write(self, stream: str, text: str) -> None:
        self._streams[stream].parts.append((self.job, self.rank, text))

    def take(self) -> Iterator[Piece]:
        """Yield the new output of each stream, one piece per job and rank."""
        repeat, self._repeat = self._repeat, False
        for name, stream in self._streams.items():
            for job, rank, text in stream.take():
                if not repeat:
                    yield Piece(job, rank, name, text, stream.end)
            if repeat and stream.tail:
                yield Piece(stream.job, stream.rank, name, stream.tail, stream.end)

    def discard(self) -> None:
        """Keep no text from now on, in a process that the program has forked: nothing is sent from there."""
        for stream in self._streams.values():
            stream.parts = deque(maxlen=0)

    def hold(self) -> None:
        """No driver takes the output: keep only its end, and send that again with the next `take`."""
        for stream in self._streams.values():
            for _ in stream.take():
                pass
        self._repeat = True
