"""A job's progress at a terminal or in a notebook: one line, rewritten in place."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import time
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Self, TextIO

from nbelastic.client.notebook_line import NotebookLine, in_notebook
from nbelastic.protocol.status import Status

INTERVAL = 0.25  # seconds between two updates
CLEAR = "\x1b[K"  # erases to the end of the line
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def describe_progress(status: Status) -> str:
    """`job-1 running · 4 / 2–8 workers · step 1,203 of 3,000 · 55.1 steps/s · 0:33 left · loss 0.232`.

    A job that does not train shows its phase and the reason instead, an ended job its outcome.
    """
    job = f"{status.job} " if status.job else ""
    if status.outcome:
        return f"{job}{status.outcome}"
    if status.phase != "running":
        return f"{job}{status.phase}: {status.reason}" if status.reason else f"{job}{status.phase}"
    rate = status.steps_per_second or 0.0
    reported = [f"{name} {_number(value)}" for name, value in status.report.items()]
    parts = (
        f"{job}running",
        _worker_count(status),
        _restart_count(status),
        _step_count(status),
        _speed(rate, unit(status)),
        _remaining_time(status, rate),
        *reported,
    )
    return " · ".join(part for part in parts if part)


def _worker_count(status: Status) -> str:
    low, high = status.min, status.max
    bounds = f"{low}+" if high is None else f"{low}" if low == high else f"{low}–{high}"
    return f"{status.world_size} / {bounds} workers"


def _restart_count(status: Status) -> str:
    count = sum(worker.restarts for worker in status.workers)
    return f"{count} restart{'' if count == 1 else 's'}" if count else ""


def unit(status: Status) -> str:
    """What the progress counts: commits, which are steps unless the program reports a step of its own, as Lightning does."""
    return "commit" if "step" in status.report else "step"


def _step_count(status: Status) -> str:
    return f"{unit(status)} {status.step:,}" + (f" of {status.total:,}" if status.total is not None else "")


def _speed(rate: float, counted: str) -> str:
    return f"{rate:,.1f} {counted}s/s" if rate >= 1 else f"{rate:.2g} {counted}s/s" if rate > 0 else ""


def _remaining_time(status: Status, rate: float) -> str:
    """The remaining time in hours, minutes and seconds; empty if it is unknown."""
    if status.total is None or status.step >= status.total or rate <= 0:
        return ""
    minutes, seconds = divmod(math.ceil((status.total - status.step) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def _number(value: float | str) -> str:
    """Format a number with three significant digits, a whole number with all. Text stays as it is."""
    if isinstance(value, str):
        return value
    if is_whole(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def is_whole(value: float) -> bool:
    """Whether it is a whole number of which all digits are shown. Larger ones would fill the line."""
    return abs(value) < 1e15 and value == int(value)


def fit(text: str, columns: int) -> str:
    """Cut the text to one line of a terminal, without colours. The last column stays free, as a character there may begin a new line."""
    plain = "".join(c if c.isprintable() else " " for c in _COLOURS.sub("", text))
    ends = list(accumulate(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in plain))
    if not ends or ends[-1] < columns:
        return plain
    return f"{plain[: bisect_right(ends, columns - 2)].rstrip(' ·')}…"


def terminal() -> TextIO | None:
    """Return the standard error if it is a terminal that can rewrite lines. A kernel's goes to a notebook, and is not."""
    stream = sys.stderr
    with contextlib.suppress(AttributeError, ValueError):  # it is None, replaced or closed
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            return stream
    return None


def changing_line() -> TextIO | NotebookLine | None:
    """Where text can change in place, if anywhere."""
    return NotebookLine() if in_notebook() else terminal()


class ProgressLine:
    """The line. `show()` may be called often: the line changes at most 4 times per second. It is cleared at the end of `with`.

    `text` is called only when the line changes. Without a terminal or notebook (`stream` is None) nothing is shown. If the
    terminal is closed, the wait goes on without it.
    """

    def __init__(
        self, text: Callable[[], str], stream: TextIO | NotebookLine | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._text, self._stream, self._clock = text, stream, clock
        self._next_change = 0.0
        self._shown = False

    @property
    def interval(self) -> float | None:
        """Seconds between two changes of the line; None if there is no terminal."""
        return None if self._stream is None else INTERVAL

    def show(self) -> None:
        now = self._clock()
        if self._stream is not None and now >= self._next_change:
            self._next_change = now + INTERVAL
            text = self._text()
            self._write(text if isinstance(self._stream, NotebookLine) else fit(text, _width(self._stream)))
            self._shown = True

    def make_room(self) -> None:
        """Other text is printed next: clear the line at a terminal. A notebook's has its own place, and stays."""
        if not isinstance(self._stream, NotebookLine):
            self.clear()

    def clear(self) -> None:
        if self._shown:
            self._write("")
        self._next_change, self._shown = 0.0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        if isinstance(self._stream, NotebookLine):
            self._stream.show(text)
            return
        try:
            self._stream.write(f"\r{text}{CLEAR}" if text else f"\r{CLEAR}")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def _width(stream: TextIO) -> int:
    """Return the columns of this terminal. `shutil` asks the standard output, which may be a file."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns
