"""What happened and how long it took: the event log."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.encoding import encode
from nbelastic.protocol.status import KEPT, EventRecord
from nbelastic.system.files import append_private

LONGEST = 32 << 20  # bytes of a file of another driver that are read
MOST = 64 << 20  # bytes of a file; there are two of them


class _Line(msgspec.Struct):
    record: EventRecord


_RECORD = msgspec.json.Decoder(_Line)


class EventLog:
    """Lives in the driver's thread."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """`again`: go on with what another driver has written."""
        self._path = path
        before = _read(path) if again else ([], True)
        self._file = self._open()
        self.records: deque[EventRecord] = deque(before[0], maxlen=KEPT)
        self.count = len(self.records)  # of all records so far
        self._whole = before[1]  # else the last line was cut off, by a kill or a full disk
        self._incomplete = False  # lines are missing
        self._changed_at = 0.0  # when the present change of the world began
        self._sign_at = 0.0  # when the first sign of a break came that has not been decided on
        self._quiet = 0.0  # for how long who was lost had not been heard
        self._formed_at = 0.0
        self._prepare_at = 0.0  # when the present change began to be prepared
        self._prepared: dict[str, float] = {}  # what a change took before its members were told to leave
        self._leaving = "leave"
        self._took: dict[str, float] = {}

    def close(self) -> None:
        self._file.close()

    def note(self, event: ev.Event, now: float) -> None:
        """Write what `step` was given: the file replays any bug as a test."""
        self._write({"at": now, "event": msgspec.to_builtins(event)})

    def sign(self, event: ev.Event, now: float) -> None:
        """Before `step` decides on it: is this the first that is heard of a break?"""
        if isinstance(event, ev.AgentLost | ev.WorkerFrozen):
            self._quiet = max(self._quiet, event.quiet)
        elif isinstance(event, ev.WorkerSilent):
            self._quiet = max(self._quiet, event.seconds)
        elif not isinstance(event, ev.WorkerExited | ev.WorkerRaised):
            return
        self._sign_at = self._sign_at or now

    def calm(self) -> None:
        """Nothing is suspected any more, or never was."""
        self._sign_at = self._quiet = 0.0

    def record(self, command: cmd.Record, now: float, size: int, took: dict[str, float] | None = None) -> None:
        """Add a line for people. `size`: the world's."""
        record = EventRecord(
            time.time(), command.kind, command.text, command.host, command.worker, command.generation, took or {}, size
        )
        self.records.append(record)
        self.count += 1
        self._write({"at": now, "record": msgspec.to_builtins(record)})

    def kept(self) -> tuple[list[EventRecord], int]:
        """The newest records, and how many there have been in all."""
        return list(self.records), self.count

    def prepare(self, now: float) -> None:
        self._prepare_at = now

    def begin_change(self, now: float, *, broken: bool) -> None:
        """The members are told to leave; `broken`: wherever they are."""
        self._changed_at = now
        self._prepared = {"prepare": (now - self._prepare_at) * 1000} if self._prepare_at else {}
        if broken:
            seen = now - self._sign_at if self._sign_at else 0.0
            self._prepared["detect"] = (self._quiet + seen) * 1000
        self._leaving = "abort" if broken else "leave"
        self._took = {}
        self._prepare_at = 0.0

    def form(self, command: cmd.FormWorld, now: float) -> None:
        if not command.to:
            left = {self._leaving: (now - self._changed_at) * 1000} if self._changed_at else {}
            self._took = {**self._prepared, **left}
            self._prepared = {}
            self._formed_at = now

    def worker_formed(self, event: ev.WorkerFormed) -> None:
        """The slowest member counts for each phase."""
        for phase, took in event.took.items():
            self._took[phase] = max(took, self._took.get(phase, 0.0))

    def first_step(self, message: worker_messages.WorkerProgress, now: float, size: int) -> None:
        """The first commit of a generation, of whoever was first."""
        if not self._formed_at:
            return
        took = {**self._took, "first step": message.first or 0.0}
        if self._changed_at:
            took["all"] = (now - self._changed_at) * 1000 + took.get("detect", 0.0)
        self._formed_at = self._changed_at = 0.0
        text = f"first step of generation {message.generation}: commit {message.commit}"
        self.record(cmd.Record("training", text, generation=message.generation), now, size, took)

    def _open(self) -> FileIO:
        return FileIO(append_private(self._path), "ab")

    def _write(self, line: dict[str, object]) -> None:
        """A line that the disk has no room for is left out: no decision waits for the log."""
        data = (b"" if self._whole else b"\n") + encode(line) + b"\n"
        try:
            self._whole = self._file.write(data) == len(data)
            if self._file.tell() > MOST:
                self._file.close()
                self._path.replace(_older(self._path))
                self._file = self._open()
        except OSError as error:
            if not self._incomplete:
                self._incomplete = True
                self.record(cmd.Record("log-incomplete", f"the event log misses lines: {error}"), time.monotonic(), 0)


def _older(path: Path) -> Path:
    return path.with_suffix(".old")


def _read(path: Path) -> tuple[list[EventRecord], bool]:
    """The newest records in both files, and whether the last line is whole."""
    records, line = [], b"\n"
    for each in (_older(path), path):
        with suppress(FileNotFoundError), open(each, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST))
            for line in file:
                if b'"record"' in line:
                    with suppress(msgspec.DecodeError):  # cut off, at either end
                        records.append(_RECORD.decode(line).record)
    return records, line.endswith(b"\n")
