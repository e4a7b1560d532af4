"""How a job gets on, for those who wait for it at a terminal: one line, rewritten in place."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from nbelastic.protocol.status import Status

INTERVAL = 0.25  # seconds between two looks
CLEAR = "\x1b[K"  # to the end of the line


def line(status: Status) -> str:
    """`job-1 running · 4 / 2–8 workers · step 1,203 of 3,000 · 55.1 steps/s · 0:33 left · loss 0.232`.

    A job that does not train has its phase and the reason instead, one that has ended its outcome.
    """
    job = f"{status.job} " if status.job else ""
    if status.outcome:
        return f"{job}{status.outcome}"
    if status.phase != "running":
        return f"{job}{status.phase}: {status.reason}" if status.reason else f"{job}{status.phase}"
    rate = status.steps_per_second or 0.0
    reported = [f"{name} {_number(value)}" for name, value in status.report.items()]
    parts = (f"{job}running", _workers(status), _step(status), _pace(rate), _left(status, rate), *reported)
    return " · ".join(part for part in parts if part)


def _workers(status: Status) -> str:
    low, high = status.min, status.max
    bounds = f"{low}+" if high is None else f"{low}" if low == high else f"{low}–{high}"
    return f"{status.world_size} / {bounds} workers"


def _step(status: Status) -> str:
    return f"step {status.step:,}" + (f" of {status.total:,}" if status.total is not None else "")


def _pace(rate: float) -> str:
    return f"{rate:,.1f} steps/s" if rate >= 1 else f"{rate:.2g} steps/s" if rate > 0 else ""


def _left(status: Status, rate: float) -> str:
    """Hours, minutes and seconds, as far as can be known."""
    if status.total is None or status.step >= status.total or rate <= 0:
        return ""
    minutes, seconds = divmod(math.ceil((status.total - status.step) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def _number(value: float | str) -> str:
    """Three digits that count, and all of a whole number; a word as it is."""
    if isinstance(value, str):
        return value
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def fitted(text: str, columns: int) -> str:
    """`text` in one line of a terminal of so many columns. The last stays free: writing there may begin a new line."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) < columns else f"{plain[: max(0, columns - 2)].rstrip(' ·')}…"


def terminal() -> TextIO | None:
    """The standard error, if somebody sees it who can have lines rewritten. A kernel's goes to a notebook: it is none."""
    stream = sys.stderr
    with contextlib.suppress(AttributeError, ValueError):  # taken away, replaced or closed
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            return stream
    return None


class Progress:
    """`show()` as often as you like: the line changes at most 4 times a second, and is cleared at the end of `with`.

    `text` is asked for only then. Without a terminal (`stream` None) nothing happens at all; nor does what a terminal that
    goes away raises reach those who wait.
    """

    def __init__(
        self, text: Callable[[], str], stream: TextIO | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._text, self._stream, self._clock = text, stream, clock
        self._next = 0.0
        self._shown = False

    @property
    def interval(self) -> float | None:
        """Seconds after which there is something to show; None: never."""
        return None if self._stream is None else INTERVAL

    def show(self) -> None:
        now = self._clock()
        if self._stream is not None and now >= self._next:
            self._next = now + INTERVAL
            self._write(fitted(self._text(), _columns(self._stream)))
            self._shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(f"\r{text}{CLEAR}" if text else f"\r{CLEAR}")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def _columns(stream: TextIO) -> int:
    """Of this terminal: the standard output, which `shutil` asks, may be a file."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns
