"""What happened and how long it took: the event log, and those who want to be told."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.driver.status import EventRecord
from nbelastic.link import encode

KEPT = 10_000  # records in memory; the file has all


class Chronicle:
    """Lives in the driver's thread; `records` may be read from any."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        self.records: deque[EventRecord] = deque(maxlen=KEPT)
        self.listener: Callable[[], None] | None = None
        self._changed_at = 0.0  # when the present change of the world began
        self._formed_at = 0.0
        self._prepare_at = 0.0  # when the present change began to be prepared
        self._prepared: dict[str, float] = {}
        self._took: dict[str, float] = {}

    def close(self) -> None:
        self.notify()
        self._file.close()

    def note(self, event: m.Event, now: float) -> None:
        """Write what `step` was given: the file replays any bug as a test. Ticks say nothing by themselves."""
        self._write({"at": now, "event": msgspec.to_builtins(event)})

    def record(self, command: m.Record, now: float, took: dict[str, float] | None = None) -> None:
        """Add a line for people."""
        if command.kind == "world-formed":  # the first step may have been made, and heard of, before
            took = {**self._took, "form": (now - self._formed_at) * 1000} if self._formed_at else self._took
        record = EventRecord(
            time.time(), command.kind, command.text, command.host, command.worker, command.epoch, took or {}
        )
        self.records.append(record)
        self._write({"at": now, "record": msgspec.to_builtins(record)})

    def prepare(self, now: float) -> None:
        self._prepare_at = now

    def begin_change(self, now: float) -> None:
        self._changed_at = now
        self._prepared = {"prepare": (now - self._prepare_at) * 1000} if self._prepare_at else {}
        self._took = {}
        self._prepare_at = 0.0

    def form(self, command: m.FormWorld, now: float) -> None:
        if not command.to:
            gather = {"gather": (now - self._changed_at) * 1000} if self._changed_at else {}
            self._took = {**self._prepared, **gather}
            self._prepared = {}
            self._formed_at = now

    def worker_formed(self, event: m.WorkerFormed) -> None:
        """The slowest member counts for each phase."""
        for phase, took in event.took.items():
            self._took[phase] = max(took, self._took.get(phase, 0.0))

    def first_step(self, message: wire.WorkerProgress, now: float) -> None:
        """The first commit of an epoch, of whoever was first."""
        if not self._formed_at:
            return
        took = {**self._took, "first step": message.first or 0.0}
        if self._changed_at:
            took["all"] = (now - self._changed_at) * 1000
        self._formed_at = self._changed_at = 0.0
        text = f"first step of epoch {message.epoch}: commit {message.commit}"
        self.record(m.Record("training", text, epoch=message.epoch), now, took)

    def notify(self) -> None:
        if self.listener is not None:
            self.listener()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(encode(line) + b"\n")
        self._file.flush()
