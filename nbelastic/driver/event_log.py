"""The event log: what happened, and how long each change of the world took."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core import replay
from nbelastic.driver.lost_steps import LostSteps
from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.json_encoding import DECODE_ERRORS, encode_lines
from nbelastic.protocol.status import EVENTS_IN_MEMORY, EventRecord
from nbelastic.system.private_files import append_private, read_private

EVENTS = "events.jsonl"  # in the log folder
MAX_READ = 32 << 20  # bytes of each file of the previous driver
MAX_SIZE = 64 << 20  # bytes of a file; there are two of them


class _Line(msgspec.Struct):
    record: EventRecord
    number: int = 0  # of all records so far


_RECORD = msgspec.json.Decoder(_Line)


class EventLog:
    """Lives in the driver's thread."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        """`append`: the previous driver has written to these files."""
        self._path = path
        previous, count, is_last_line_complete = _read(path) if append else ([], 0, True)
        self._file = self._open()
        self.records: deque[EventRecord] = deque(previous, maxlen=EVENTS_IN_MEMORY)
        self.count = count  # of all records so far, also of those that are in no file any more
        self.counts: Counter[str] = Counter()  # of records of this driver, by kind
        self.lost_steps = LostSteps()
        self._is_last_line_complete = is_last_line_complete  # a kill or a full disk may cut a line off
        self._trouble = ""  # the error since the last write without one
        self._gap: tuple[dict[str, object], ...] = ()  # the line that reports missing ones, until it is in the file
        self._leave_at = 0.0  # when the driver asked the members to leave
        self._symptom_at = 0.0  # when the first symptom of a break came that has not been decided on
        self._silence = 0.0  # seconds since the last message of the lost worker or host
        self._formed_at = 0.0
        self._prepare_at = 0.0  # when the present reconfiguration began to be prepared
        self._took_before_leave: dict[str, float] = {}  # milliseconds by phase
        self._leave_phase = "leave"
        self._took: dict[str, float] = {}  # milliseconds by phase of the present change

    def close(self) -> None:
        self._file.close()

    def note(self, entry: ev.Event | replay.Begins, now: float) -> None:
        """Write the input of `step`, or the state from which this driver begins: `nbelastic replay` steps through them."""
        self._write(replay.line_of(now, entry))

    def note_all(self, events: Sequence[ev.Event], now: float) -> None:
        """The same for several events, which were decided on at once."""
        if events:
            self._write(*({"at": now, "event": replay.loggable(event)} for event in events))

    def note_symptom(self, event: ev.Event, now: float) -> None:
        """Before `step` decides on an event: note the time if the event is the first symptom of a break."""
        if isinstance(event, ev.AgentLost | ev.WorkerFrozen):
            self._silence = max(self._silence, event.silent_for)
        elif isinstance(event, ev.WorkerSilent):
            self._silence = max(self._silence, event.seconds)
        elif not isinstance(event, ev.WorkerExited | ev.WorkerRaised):
            return
        self._symptom_at = self._symptom_at or now

    def clear_symptoms(self) -> None:
        """No worker is suspected any more."""
        self._symptom_at = self._silence = 0.0

    def record(
        self,
        command: cmd.Record,
        now: float,
        size: int,
        took: dict[str, float] | None = None,
        lost: int | None = None,
    ) -> None:
        """Add a record for users. `size`: of the world. `lost`: see `EventRecord`."""
        if command.kind == "job-started":
            self.lost_steps.begin_job()
            self._leave_at, self._took_before_leave = 0.0, {}  # of the previous job's end
        place = command.host, command.worker, command.generation
        record = EventRecord(time.time(), command.kind, command.text, *place, took or {}, size, lost)
        self._write(self._keep(record, now))

    def _keep(self, record: EventRecord, now: float) -> dict[str, object]:
        """Keep the record in memory. Returns its line."""
        self.records.append(record)
        self.count += 1
        self.counts[record.kind] += 1
        return {"at": now, "record": msgspec.to_builtins(record), "number": self.count}

    def kept(self) -> tuple[list[EventRecord], int]:
        """The newest records, and the number of all records so far."""
        return list(self.records), self.count

    def note_preparation(self, now: float) -> None:
        """A reconfiguration begins to be prepared."""
        self._prepare_at = now

    def note_leave(self, now: float, *, broken: bool) -> None:
        """The driver asks the members to leave at a commit, or aborts the generation if it is `broken`."""
        self._leave_at = now
        self._took_before_leave = {"prepare": (now - self._prepare_at) * 1000} if self._prepare_at else {}
        if broken:
            self.lost_steps.note_break()
            since_symptom = now - self._symptom_at if self._symptom_at else 0.0
            self._took_before_leave["detect"] = (self._silence + since_symptom) * 1000
        self._leave_phase = "abort" if broken else "leave"
        self._took = {}
        self._prepare_at = 0.0

    def note_formation(self, command: cmd.FormWorld, now: float, commit: int) -> None:
        """The driver asks the members to form their generation. `commit`: that of the root."""
        self.lost_steps.note_formation(commit)
        if not command.to:
            leave = {self._leave_phase: (now - self._leave_at) * 1000} if self._leave_at else {}
            self._took = {**self._took_before_leave, **leave}
            self._took_before_leave = {}
            self._formed_at = now

    def note_worker_formed(self, event: ev.WorkerFormed) -> None:
        """Keep the time of the slowest member for each phase."""
        for phase, took in event.took.items():
            self._took[phase] = max(took, self._took.get(phase, 0.0))

    def note_first_step(self, message: worker_messages.WorkerProgress, now: float, size: int) -> None:
        """Record the first commit of a generation, with the times of all phases. Later calls do nothing."""
        if not self._formed_at:
            return
        took = {**self._took, "first step": message.first or 0.0}
        if self._leave_at:
            took["all"] = (now - self._leave_at) * 1000 + took.get("detect", 0.0)
        self._formed_at = self._leave_at = 0.0
        text = f"first step of generation {message.generation}: commit {message.commit}"
        continued = message.copies.continued if message.copies is not None else None
        lost = self.lost_steps.take(continued.commit if continued is not None else None)
        self.record(cmd.Record("training", text, generation=message.generation), now, size, took, lost)

    def _open(self) -> FileIO:
        return FileIO(append_private(self._path), "ab")

    def _write(self, *lines: dict[str, object]) -> None:
        """Write these lines. Lines are dropped while the disk is full, because no decision may depend on the log.

        The first lines after that follow one that reports the gap: a replay must know of it.
        """
        head = (b"" if self._is_last_line_complete else b"\n") + encode_lines(self._gap)
        data = head + encode_lines(lines)
        try:
            written = self._file.write(data)
            self._is_last_line_complete = written == len(data)
            self._gap = () if written >= len(head) else self._gap
            if self._file.tell() > MAX_SIZE:
                self._begin_new_file()
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                text = f"lines are missing in the event log: {error}"
                record = EventRecord(time.time(), kind="log-incomplete", text=text)
                self._gap = (self._keep(record, time.monotonic()),)

    def _begin_new_file(self) -> None:
        """Rename the full file and open a new one. If that fails, later lines go to the full file."""
        with suppress(FileNotFoundError):  # an earlier attempt has renamed it
            if os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno())):
                self._path.replace(_old_path(self._path))
        full, self._file = self._file, self._open()
        full.close()


def _old_path(path: Path) -> Path:
    return path.with_suffix(".old")


def _read(path: Path) -> tuple[list[EventRecord], int, bool]:
    """The newest records in both files, the number of all records so far, and whether the last line is complete."""
    records, count, line = [], 0, b"\n"
    for each in (_old_path(path), path):
        with suppress(OSError), os.fdopen(read_private(each), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ))
            for line in file:
                if b'"record"' in line:
                    with suppress(*DECODE_ERRORS):  # cut off, at either end
                        found = _RECORD.decode(line)
                        records.append(found.record)
                        count = found.number or count + 1
    return records, count, line.endswith(b"\n")
