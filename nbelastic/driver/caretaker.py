"""The controller's process: started, watched, started again in its place, found by a later kernel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nbelastic import ports
from nbelastic.folders import make_private
from nbelastic.presence import identity, lives, pid_of
from nbelastic.processes import leave, state_of, stopped

CODE = "from nbelastic.driver.controller import main; main()"
PORTS = 16  # that ipyparallel's controller listens on
LOWEST = 10_000  # of those that we choose
LAST_WORDS = 2000  # characters of its output in an error


class Caretaker:
    """One cluster's controller. Its files are in the profile's folder, and for their owner alone."""

    def __init__(self, profile: Path, name: str, arguments: Sequence[str], keep: tuple[Path, float] | None) -> None:
        self._profile, self._name = profile, name
        self._arguments = arguments
        self._keep = keep
        self._stem = profile / "security" / f"ipcontroller-{name}"
        self._log = profile / "log" / f"ipcontroller-{name}.log"
        self._state = profile / "log" / f"engines{name}.json"
        self._child: subprocess.Popen[bytes] | None = None
        self._holding = contextlib.ExitStack()  # its ports
        self._extra = contextlib.ExitStack()
        self._chosen = False
        self.process = ""  # pid@start

    def information(self, kind: str) -> dict[str, Any]:
        """How an `engine` or a `client` comes to it: addresses and keys."""
        found: dict[str, Any] = json.loads(self._file(f"-{kind}.json").read_text())
        return found

    def _file(self, ending: str) -> Path:
        return self._stem.with_name(self._stem.name + ending)

    async def begin(self) -> None:
        """Start one that knows nothing of any before. RuntimeError with its last words if it ends instead."""
        for folder in (self._stem.parent, self._log.parent):
            make_private(folder)
        self.adopt()
        await self.end()
        for file in (*map(self._file, ("-client.json", "-engine.json", ".keys", ".process")), self._state):
            file.unlink(missing_ok=True)
        await self.again()

    def adopt(self, process: str = "") -> bool:
        """Take the one over that an earlier kernel has started; whether it lives. Its own word counts more than `process`."""
        self.process = process
        with contextlib.suppress(FileNotFoundError):
            self.process = self._file(".process").read_text()
        return lives(self.process)

    async def again(self) -> None:
        """Start it where the one before was, of which nothing is left then. RuntimeError with its last words."""
        await self.end()
        ours, theirs = os.pipe()
        keep = self._keep and (str(self._keep[0]), self._keep[1])
        options = json.dumps({"files": str(self._stem), "ready": theirs, "keep": keep})
        where = (f"--profile-dir={self._profile}", f"--cluster-id={self._name}", *self._choose_ports())
        try:
            with self._log.open("ab") as output:
                self._child = subprocess.Popen(  # noqa: ASYNC220  (milliseconds)
                    [sys.executable, "-c", CODE, options, *where, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # a file: nobody has to be there to read it
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[theirs],
                )
            os.close(theirs)
            theirs = -1
            await _readable(ours)
            if not os.read(ours, 1):
                raise RuntimeError(
                    f"it ended at its start: {self._log.read_text(errors='replace')[-LAST_WORDS:].strip()}"
                )
            self.process = self._file(".process").read_text()
        finally:
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)

    def _choose_ports(self) -> list[str]:
        """At first for all that it listens at; afterwards for what it needs for itself, and does not need again."""
        self._extra.close()
        chosen = (self._extra if self._chosen else self._holding).enter_context(_ports())
        self._chosen = True
        return [f"--ports={','.join(map(str, chosen))}"] if chosen else []

    def last_line(self) -> str:
        """What it wrote last; empty if it has written nothing."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS))
            return (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        return ""

    async def ended(self) -> None:
        """Return when its process has ended, child of ours or not."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._pid)
            try:
                if self._child is not None or lives(self.process):  # the number may be another's by now
                    await _readable(fd)
            finally:
                os.close(fd)
        self._reap()

    async def end(self) -> None:
        """End it and all of its group; return when they are gone, and their ports free."""
        pid = self._pid
        if pid and (self._child is not None or identity(pid) in ("", self.process)):  # a group may outlive its leader
            while members := _group(pid):  # again: one may have been forked meanwhile
                for fd in members:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                for fd in members:
                    try:
                        await _readable(fd)
                    finally:
                        os.close(fd)
        if self._child is not None:
            await self.ended()  # its first thread may be a zombie while others still end

    def close(self) -> None:
        """It is not needed any more, or not by this process."""
        self._extra.close()
        self._holding.close()

    @property
    def stopped(self) -> bool:
        """Somebody has stopped it (SIGSTOP), and nothing is passed on."""
        return stopped(self._pid)

    def leave(self) -> None:
        """It is to outlive this process."""
        if self._child is not None:
            leave(self._child)
        self._child = None

    @property
    def _pid(self) -> int:
        return self._child.pid if self._child is not None else pid_of(self.process)

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(fd, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(fd)


def _group(leader: int) -> list[int]:
    """Descriptors of the controller's processes, which become readable as they end.

    What is left of its group is told by the command line: the group's number may be another's by now.
    """
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(pid) != leader or state_of(pid) in "ZX":
                continue
            fd = os.pidfd_open(pid)
            if pid == leader or CODE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(fd)
            else:
                os.close(fd)
    return found


@contextlib.contextmanager
def _ports() -> Iterator[list[int]]:
    """Free ones, which nobody else gets meanwhile: to come again, the controller needs the same. None: ipyparallel chooses."""
    found = []
    with contextlib.ExitStack() as holding:
        for port in ports.chosen(10 * PORTS, LOWEST):
            holder = holding.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", port))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ZeroMQ may listen there; we never do
                found.append(port)
            if len(found) == PORTS:
                break
        yield found
