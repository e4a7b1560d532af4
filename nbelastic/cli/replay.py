"""Prints the decisions of a cluster's event log, and writes tests and copies of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core import replay
from nbelastic.core.replay import Line, Played
from nbelastic.errors import UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import DECODE_ERRORS, encode
from nbelastic.system import versions
from nbelastic.system.argument_types import user_path
from nbelastic.system.terminal_text import remove_controls

LONGEST = 160  # characters of an event or a command

TEST = '''"""The replay of {data}: what nbelastic {version} decides on the events of a user's cluster."""

from __future__ import annotations

from pathlib import Path

from nbelastic.core.replay import parse, play, summary

LOG = Path(__file__).with_name("{data}")


def test_the_last_decisions_of_the_log():
    """After event {number} the cluster is in this state, by these commands."""
    *_, last = play(parse(line) for line in LOG.read_text().splitlines())
    assert last.error is None
    assert last.number == {number}
    assert [type(command).__name__ for command in last.commands] == {commands}
    assert summary(last.cluster, last.at) == (
        {summary}
    )
'''


class EventLogFile:
    """An event log on the disk; the older half of a long one is in a file beside it."""

    def __init__(self, path: str) -> None:
        self._path = user_path(path)
        older = self._path.with_suffix(".old")
        self._paths = (older, self._path) if older != self._path and older.is_file() else (self._path,)
        self.is_cut_off = False  # a line is incomplete, as after a kill or on a full disk
        self.records: list[replay.LoggedRecord] = []  # of the lines read so far

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Each line, with its place for errors."""
        for path in self._paths:
            try:
                with open(path, "rb") as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield f"{path}, line {number}", line
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}.") from None

    def lines(self) -> Iterator[Line]:
        """The decoded lines. UsageError, with the place, for one that cannot be replayed; one that was cut off is left out."""
        found = False
        for place, text in self.texts():
            try:
                line = replay.parse(text)
            except UsageError as error:
                if not text.endswith(b"\n") or _is_cut_off(text):
                    self.is_cut_off = True
                    continue
                raise UsageError(f"{place}: {error}; this is nbelastic {versions.nbelastic_version()}.") from None
            found = True
            if line.record is not None:
                self.records.append(line.record)
            yield line
        if not found:
            raise UsageError(f"{self._path} has no events: name the events.jsonl of a cluster's log folder.")

    def played(self, last: int | None = None) -> Iterator[Played]:
        """The steps of the log up to event `last`."""
        try:
            yield from takewhile(lambda one: last is None or one.number <= last, replay.play(self.lines()))
        except UsageError as error:
            text = str(error)
            raise UsageError(text if str(self._path) in text else f"{self._path}: {text}") from None

    def share(self, path: str, last: int | None = None) -> str:
        """Write a copy for others. Returns a text that says so."""
        copy = user_path(path)
        if any(copy.exists() and path.exists() and copy.samefile(path) for path in self._paths):
            raise UsageError(f"--share {path}: that is the log itself. Name another file for the copy.")
        for _ in self.played(last):  # UsageError for a log that cannot be replayed
            pass
        written = _write(copy, b"".join(self._shared(last)))
        return (
            f"{written} has been written. It has names and addresses of hosts, and times; texts of your program, cells, "
            "values and records are removed."
        )

    def _shared(self, last: int | None) -> Iterator[bytes]:
        number = 0
        for _, text in self.texts():
            try:
                line: dict[str, Any] = msgspec.json.decode(text)
            except DECODE_ERRORS:
                continue
            number += "event" in line
            if last is not None and number > last:
                return
            if (rest := replay.shared(line)) is not None:
                yield encode(rest) + b"\n"

    def write_test(self, path: str, last: int | None) -> str:
        """Write a test, and the copy that it reads. Returns a text that says so."""
        test = user_path(path)
        if not (test.name.startswith("test_") and test.suffix == ".py"):
            raise UsageError(f"--test {path}: pytest finds files whose names are test_….py.")
        data = test.with_suffix(".jsonl")
        self.share(str(data), last)
        *_, end = EventLogFile(str(data)).played()
        body = TEST.format(
            data=data.name,
            version=versions.nbelastic_version(),
            number=end.number,
            commands=msgspec.json.encode([type(command).__name__ for command in end.commands]).decode(),
            summary=msgspec.json.encode(replay.summary(end.cluster, end.at)).decode(),
        )
        _write(test, body.encode())
        return f"{test} has been written. It reads {data.name} beside it: keep both."


def show(log: EventLogFile, first: int, last: int | None, only: str | None) -> bool:
    """Print the steps of a log. False if the last step raised an error."""
    begun, state = None, ""
    decided: list[tuple[int, replay.LoggedRecord]] = []
    for one in log.played(last):
        begun = one.at if begun is None else begun
        before, state = state, replay.summary(one.cluster, one.at)
        records = (command for command in one.commands if isinstance(command, cmd.Record))
        decided += [(one.number, replay.LoggedRecord(record.kind, record.text)) for record in records]
        if one.number < first and one.error is None:
            continue
        lines = [f"{one.number:>6} {one.at - begun:>+10.3f} s  {described(one.entry)}"]
        lines += [f"{'':>20}→ {described(command)}" for command in one.commands]
        if only is None or any(only in line for line in lines):
            lines += [f"{'':>20}= {state}"] if state != before else []
            print(*(remove_controls(line) for line in lines), sep="\n")
        if one.error is not None:
            print(*traceback.format_exception(one.error), sep="")
            return False
    if log.is_cut_off or any(record.kind == "log-incomplete" for record in log.records):
        print("Lines of the log are cut off or missing: what follows them may differ from what the cluster did.")
    elif (difference := first_difference(decided, log.records)) is not None:
        number, record = difference
        print(
            f"The log differs from event {number} on: this version decides {record.kind}: {remove_controls(record.text)}"
        )
    return True


def first_difference(
    decided: list[tuple[int, replay.LoggedRecord]], logged: list[replay.LoggedRecord]
) -> tuple[int, replay.LoggedRecord] | None:
    """The first decided record, with its event, that the log does not have. The driver adds others, and a shared log has none."""
    rest = iter(logged)
    return next((each for each in decided if each[1] not in rest), None) if logged else None


def described(entry: ev.Event | replay.Begins | cmd.Command) -> str:
    """An event or a command in one line: its name, and the fields that are not empty."""
    if isinstance(entry, replay.Started | replay.TakenOver):
        how = "a driver starts" if isinstance(entry, replay.Started) else "another driver takes over"
        return f"{how} (nbelastic {entry.version})"
    if isinstance(entry, cmd.Record):
        return f"record {entry.kind}: {entry.text}"
    fields = ((name, getattr(entry, name)) for name in entry.__struct_fields__)
    text = " ".join([type(entry).__name__, *(f"{name}={_value(value)}" for name, value in fields if value)])
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _value(value: object) -> str:
    if isinstance(value, tuple) and all(isinstance(each, WorkerId) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, msgspec.Struct) and not isinstance(value, WorkerId):
        return encode(value).decode()
    return str(value)


def _is_cut_off(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except DECODE_ERRORS:
        return text.startswith(b'{"at"')
    return False


def _write(path: Path, data: bytes) -> Path:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    return path
