"""The user's own modules: which version the hosts must have, and their files. The driver passes them on as bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.pending import Pending
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.errors import UsageError
from nbelastic.protocol.code_messages import PIECE, Code, CodePiece, CodeStored, FetchCode, StoreCode, why_refused
from nbelastic.protocol.json_encoding import DECODE_ERRORS
from nbelastic.protocol.requests import CodeSent
from nbelastic.system.folder_paths import placed_code

SHOWN = 3  # hosts that an event names
KEPT = 3  # the newest versions, beside that of the present job


class _Host:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.stored: dict[str, bool] = {}  # the versions that it has, and whether they were sent to it


class CodeVersions:
    """Lives in the driver's thread. `folder`: where clients put the lists and the contents of files.

    `job_version()` returns the version of the present job, or of the last one; `record` adds to the event log.
    """

    def __init__(
        self,
        folder: Path,
        agents: Agents,
        pending: Pending,
        snapshot_writer: SnapshotWriter,
        job_version: Callable[[], str],
        *,
        save: Callable[[], None],
        record: Callable[[cmd.Record], None],
    ) -> None:
        self._folder, self._agents, self._pending = folder, agents, pending
        self._snapshot_writer, self._job_version, self._save, self._record = snapshot_writer, job_version, save, record
        self._codes: dict[str, Code] = {}  # the versions that hosts may need, the newest last
        self._hosts: dict[str, _Host] = {}  # those that have connected; an agent may have been replaced since
        self._waiting = 0  # clients that wait for hosts
        self._received: dict[str, int] = {}  # bytes that hosts have received and that are in no event yet
        for version in snapshot_writer.code:  # of the previous driver
            with contextlib.suppress(UsageError):
                self._codes[version] = self._read(version)

    @property
    def newest(self) -> str:
        """The version that cells import; empty before the first one."""
        return next(reversed(self._codes), "")

    def send(self, version: str, done: Future[CodeSent]) -> None:
        """Have each host get this version. `done` is resolved when those have it that are up. UsageError if it cannot be read."""
        code = self._codes.pop(version, None) or self._read(version)
        job = self._job_version()
        kept = [other for other in self._codes if other == job or other in list(self._codes)[1 - KEPT :]]
        dropped = {other: old for other, old in self._codes.items() if other not in kept}
        self._codes = {other: self._codes[other] for other in kept} | {version: code}
        for known in self._hosts.values():  # they keep no others
            known.stored = {other: copied for other, copied in known.stored.items() if other in self._codes}
        self._snapshot_writer.code = tuple(self._codes)
        self._save()
        self._remove_files(dropped)
        for host in self._present():
            self._order(host, version)

        def collect(_: ClusterState) -> CodeSent | None:
            present = self._present()
            if not all(version in host.stored for host in present.values()):
                return None
            return CodeSent(tuple(name for name, host in present.items() if host.stored[version]))

        def on_done(_: Future[CodeSent]) -> None:
            self._waiting -= 1
            self._record_received()

        self._waiting += 1
        done.add_done_callback(on_done)
        self._pending.resolve(done, collect)

    def _present(self) -> dict[str, _Host]:
        return {name: host for name, host in self._hosts.items() if host.peer == self._agents.peer_of(name)}

    def _read(self, version: str) -> Code:
        try:
            code = msgspec.json.decode(placed_code(self._folder, version).read_bytes(), type=Code)
            problem = why_refused(StoreCode(version, code))
            for file in code.files if not problem else ():
                if (self._folder / file.digest).stat().st_size != file.size:
                    problem = f"{file.path} is incomplete"
        except (OSError, *DECODE_ERRORS) as error:
            problem = str(error)
        if problem:
            raise UsageError(f"your code cannot be sent to the hosts: {problem}.")
        return code

    def send_all_to(self, host: str) -> None:
        """A host's agent has connected: have it get all versions, before it starts workers."""
        self._hosts = self._present() | {host: _Host(self._agents.peer_of(host))}
        for version in self._codes:
            self._order(host, version)

    def _order(self, host: str, version: str) -> None:
        if version not in self._hosts[host].stored:
            self._agents.send(host, StoreCode(version, self._codes[version], tuple(self._codes)))

    def receive(self, message: FetchCode | CodeStored) -> None:
        """Handle a message of an agent."""
        if isinstance(message, FetchCode):
            self._send_pieces(message)
        else:
            self._note_stored(message)

    def _send_pieces(self, request: FetchCode) -> None:
        """Answer a host that lacks some files of a version."""
        code = self._codes.get(request.version)
        if code is None:
            return
        for number, offset, length in request.pieces:
            if 0 <= number < len(code.files) and offset >= 0 and 0 < length <= PIECE:
                with contextlib.suppress(OSError):  # a newer version has replaced it
                    data = _read_piece(self._folder / code.files[number].digest, offset, length)
                    self._agents.send(request.host, CodePiece(request.version, number, offset, data))

    def _note_stored(self, message: CodeStored) -> None:
        """A host has a version. One that cannot have it is lost."""
        name, host, code = message.host, self._present().get(message.host), self._codes.get(message.version)
        if message.problem:
            self._agents.lose(name, message.problem)
        elif host is not None and code is not None:
            host.stored[message.version] = message.is_copied
            if message.received:
                self._received[name] = self._received.get(name, 0) + message.received
        self._pending.check_and_publish()
        if not self._waiting:  # a host that has joined
            self._record_received()

    def _record_received(self) -> None:
        """Add what hosts have received to the event log: one event per version, or per host that joins."""
        received, self._received = self._received, {}
        if received:
            names, size = sorted(received), max(received.values())
            who = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            verb = "has" if len(names) == 1 else "have"
            text = f"{who} {verb} your modules: {len(self._codes[self.newest].files)} files, {size / 1e3:,.1f} kB sent"
            self._record(cmd.Record("code-sent", text, host=names[0] if len(names) == 1 else ""))

    def _remove_files(self, dropped: Mapping[str, Code]) -> None:
        """Remove what only these versions need. Files of no version may be those that a client is about to send."""
        needed = {file.digest for code in self._codes.values() for file in code.files}
        for version, code in dropped.items():
            unneeded = [self._folder / file.digest for file in code.files if file.digest not in needed]
            for path in (placed_code(self._folder, version), *unneeded):
                path.unlink(missing_ok=True)


def _read_piece(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), length, offset)
