"""Results: one JSON line each, written at once, so that a run that is cut off keeps what it had."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbelastic.errors import JobError

HERE = str(Path(__file__).parent)
MAX_ERROR = 2000  # characters


class Case:
    """One thing that is tried: what it measures, and what else is to be said of it."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.unit = ""
        self.notes: dict[str, Any] = {}

    def record(self, unit: str, *values: float) -> None:
        self.unit = unit
        self.values += values

    def note(self, **notes: Any) -> None:
        self.notes |= notes


class Results:
    """The results of one part. `write` takes a line of text."""

    def __init__(self, part: str, write: Callable[[str], object]) -> None:
        self._part, self._write = part, write
        self._begun = time.monotonic()

    def line(self, name: str, *, ok: bool = True, **more: Any) -> None:
        self._write(json.dumps({"part": self._part, "name": name, "ok": ok, **more}))

    def numbers(self, name: str, unit: str, values: Sequence[float], **more: Any) -> None:
        self.line(name, **summary(unit, values), **more)

    @contextmanager
    def case(self, name: str) -> Iterator[Case]:
        """Try something: a line says how long it took, what it has measured, and why it failed."""
        case, begun = Case(), time.monotonic()
        error = ""
        try:
            yield case
        except Exception as raised:
            error = describe(raised)
        measured = summary(case.unit, case.values) if case.values else {}
        seconds = round(time.monotonic() - begun, 3)
        failed = {"error": error} if error else {}
        self.line(name, ok=not error, **measured, seconds=seconds, **case.notes, **failed)


def summary(unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Minimum, median and maximum of some numbers."""
    if not values:
        return {}
    low, middle, high = min(values), statistics.median(values), max(values)
    return {"min": _short(low), "median": _short(middle), "max": _short(high), "count": len(values), "unit": unit}


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def describe(error: BaseException) -> str:
    """The error, the line of this folder that raised it and, if a job failed, the end of the worker's traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(HERE)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    remote = f"\n{error.remote_traceback}" if isinstance(error, JobError) else ""
    text = f"{type(error).__name__}: {error}"
    text = text if len(text) < MAX_ERROR else f"{text[:MAX_ERROR]}…"
    return f"{text}{place}{remote[-MAX_ERROR:]}"
