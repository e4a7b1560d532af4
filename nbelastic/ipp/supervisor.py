"""ipyparallel's controller, a process: started, watched, started again in its place, found by a later driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from nbelastic.system import ports
from nbelastic.system.files import make_private, replace_private
from nbelastic.system.presence import Presence, identity, lives, pid_of
from nbelastic.system.processes import state_of, stopped
from nbelastic.system.supervise import Report, report_to_log, supervise

CODE = "from nbelastic.ipp.controller import main; main()"
PORTS = 18  # that ipyparallel's controller listens on
TRIES = 3  # of a driver's first start: a port may have been taken before the controller listens there
LOWEST = 10_000  # of those that we choose
LAST_WORDS = 2000  # characters of its output in an error


HEARTBEAT = 100  # milliseconds between two heartbeats of an engine, up to so many engines; of more, as many as engines
LONGER = 10.0  # seconds that ipyparallel waits longer for a silent engine than we do: it would throw its results away
FIRST_PAUSE, PAUSE = 0.1, 10.0  # seconds between two starts of a controller that ends soon: at first, and at most
SOON = 10.0  # seconds after its start
LOOK = 1.0  # seconds between two looks at whether it is stopped
STILL = 5  # looks at a stopped controller after which it is ended


def heartbeat(most: float) -> int:
    """Milliseconds between two heartbeats for `most` engines.

    An engine counts only after a heartbeat, so a short period has it known soon. Each heartbeat costs the controller about
    1.1 ms of CPU. So the period grows with the engines, and all of them together take about a tenth of a core.
    """
    return max(HEARTBEAT, int(min(most, 10 * HEARTBEAT)))


class Supervisor:
    """One cluster's controller, for at most `most` engines. Its files are in the profile's folder, and for their owner alone.

    One that ends unasked is started again in its place, and `on_again()` is called; `on_trouble(why)`, if it ends at once or
    cannot be started. Engines and clients come back to it by themselves. It outlives this process, as `presence` tells.
    """

    def __init__(
        self,
        profile: Path,
        name: str,
        silence: float,
        presence: Presence,
        *,
        on_again: Callable[[], None] = lambda: None,
        on_trouble: Callable[[str], None] = lambda why: None,  # noqa: ARG005
        most: float = 0,
        report: Report = report_to_log,
    ) -> None:
        self._profile, self._name = profile, name
        period = heartbeat(most)
        self._arguments = [
            "--nodb",  # the hub's record of every message would grow for ever
            "--usethreads",
            f"--HeartMonitor.period={period}",
            f"--HeartMonitor.max_heartmonitor_misses={int((silence + LONGER) * 1000 / period)}",
            "--log-level=40",
        ]
        self._presence, self._on_again, self._on_trouble, self._report = presence, on_again, on_trouble, report
        self._stem = profile / "security" / f"ipcontroller-{name}"
        self._log = profile / "log" / f"ipcontroller-{name}.log"
        self._state = profile / "log" / f"engines{name}.json"
        self._child: subprocess.Popen[bytes] | None = None
        self._holding = contextlib.ExitStack()  # its ports
        self._extra = contextlib.ExitStack()
        self._chosen = False
        self._tasks: list[asyncio.Task[None]] = []
        self.process = ""  # pid@start
        self.connection = ""  # what engines need to come to it (JSON); empty before there is one

    # ---- beginning and end ----

    async def start(self) -> None:
        """Start one that knows nothing of any before. RuntimeError with its last words if it ends instead, several times."""
        await self._try(self.begin)
        self._supervise()

    async def attach(self) -> None:
        """Take over the one that an earlier driver has started; one that has ended is started again in its place."""
        if not self._file("-engine.json").exists():  # the earlier driver was killed before there was one
            await self.start()
            return
        if not self.adopt():
            await self._try(self.again)
        self._supervise()

    async def _try(self, start: Callable[[], Awaitable[None]]) -> None:
        for left in reversed(range(TRIES)):
            try:
                await start()
            except RuntimeError as error:
                if not left:
                    raise
                self._on_trouble(f"the first start failed: {error}")
                await asyncio.sleep(FIRST_PAUSE)
            else:
                return

    async def stop(self) -> None:
        """End it. It has nothing to tidy up, and asking it takes longer than there is time at the end of a kernel."""
        await self._close()
        await self.end()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._extra.close()
        self._holding.close()

    def _supervise(self) -> None:
        self.connection = json.dumps(self.information("engine"))
        watches = (("the look at ipyparallel's controller", self._watch), ("the look for a stopped one", self._look))
        self._tasks = [asyncio.create_task(supervise(what, watch, self._report)) for what, watch in watches]

    # ---- while it is there ----

    async def _watch(self) -> None:
        """For ever: have a controller. One that ends at once is started again after pauses that grow."""
        pause, now = 0.0, asyncio.get_running_loop().time
        while True:
            began = now()
            await self.ended()
            lived = now() - began
            pause = min(2 * pause or FIRST_PAUSE, PAUSE) if lived < SOON else 0.0
            if pause:
                self._on_trouble(f"it ended after {lived:.1f} s: {self.last_line()}")
                await asyncio.sleep(pause)
            await self._start_again()
            self._on_again()

    async def _start_again(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self.again()
            except (OSError, RuntimeError) as error:  # one of its ports may be taken for a moment
                self._on_trouble(f"the last start failed: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE)
            else:
                return

    async def _look(self) -> None:
        """For ever: a stopped controller is as good as none."""
        still = 0
        while True:
            await asyncio.sleep(LOOK)
            still = still + 1 if stopped(self._pid) else 0
            if still >= STILL:
                await self.end()

    # ---- its process ----

    def information(self, kind: str) -> dict[str, Any]:
        """How an `engine` or a `client` comes to it: addresses and keys."""
        found: dict[str, Any] = json.loads(self._file(f"-{kind}.json").read_text())
        return found

    def _file(self, ending: str) -> Path:
        return self._stem.with_name(self._stem.name + ending)

    async def begin(self) -> None:
        """Start it without a trace of any before."""
        for folder in (self._stem.parent, self._log.parent):
            make_private(folder)
        self.adopt()
        await self.end()
        for file in (*map(self._file, ("-client.json", "-engine.json", ".keys", ".process")), self._state):
            file.unlink(missing_ok=True)
        await self.again()

    def adopt(self) -> bool:
        """Whether the one lives that an earlier driver has started; it is this one's then."""
        with contextlib.suppress(FileNotFoundError):
            self.process = self._file(".process").read_text()
        return lives(self.process)

    async def again(self) -> None:
        """Start it where the one before was, of which nothing is left then. RuntimeError with its last words."""
        await self.end()
        ours, theirs = os.pipe()
        options = json.dumps({"files": str(self._stem), "ready": theirs, "presence": self._presence})
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
            self.process = identity(self._child.pid)
            # At once: another driver that did not find it would start a second one, at the same ports.
            replace_private(self._file(".process"), [self.process.encode()])
            os.close(theirs)
            theirs = -1
            await _readable(ours)
            if not os.read(ours, 1):
                raise RuntimeError(
                    f"it ended at its start: {self._log.read_text(errors='replace')[-LAST_WORDS:].strip()}"
                )
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
