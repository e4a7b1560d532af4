"""The user's own modules: which version the hosts must have, and their files. The driver passes them on as bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
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
from nbelastic.protocol.requests import CodeSent
from nbelastic.system.folder_paths import placed_code

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
        self._codes = {other: self._codes[other] for other in kept} | {version: code}
        for known in self._hosts.values():  # they keep no others
            known.stored = {other: copied for other, copied in known.stored.items() if other in self._codes}
        self._snapshot_writer.code = tuple(self._codes)
        self._save()
        self._remove_unneeded_files()
        for host in self._present():
            self._order(host, version)

        def collect(_: ClusterState) -> CodeSent | None:
            present = self._present()
            if not all(version in host.stored for host in present.values()):
                return None
            return CodeSent(tuple(name for name, host in present.items() if host.stored[version]))

        self._pending.resolve(done, collect)

    def _present(self) -> dict[str, _Host]:
        return {name: host for name, host in self._hosts.items() if host.peer == self._agents.peer_of(name)}

    def _read(self, version: str) -> Code:
        try:
            code = msgspec.json.decode(placed_code(self._folder, version).read_bytes(), type=Code)
            problem = why_refused(StoreCode(version, code))
        except (OSError, msgspec.DecodeError) as error:
            problem = str(error)
        if problem:
            raise UsageError(f"your code cannot be sent to the hosts: {problem}.")
        return code

    def send_all_to(self, host: str) -> None:
        """A host's agent has connected: have it get all versions, before it starts workers."""
        self._hosts[host] = _Host(self._agents.peer_of(host))
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
            if message.is_copied and message.version not in host.stored:
                text = f"{name} has your code: {len(code.files)} files, {code.size / 1e3:,.1f} kB"
                self._record(cmd.Record("code-sent", text, host=name))
            host.stored[message.version] = message.is_copied
        self._pending.check_and_publish()

    def _remove_unneeded_files(self) -> None:
        needed = {file.digest for code in self._codes.values() for file in code.files}
        needed |= {placed_code(self._folder, version).name for version in self._codes}
        for path in self._folder.glob("*"):
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()


def _read_piece(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), length, offset)
