"""Starts ipyparallel's controller as a process, restarts it when it ends, and adopts the one of an earlier driver."""

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
from nbelastic.system.backoff import Backoff
from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.fault_handling import Report, report_to_log, supervise
from nbelastic.system.private_files import append_private, make_private, replace_private
from nbelastic.system.process_identity import identity, is_alive, pid_of
from nbelastic.system.processes import is_stopped, last_line, last_output, state_of

CODE = "from nbelastic.ipp.controller import main; main()"
PORTS = 18  # that ipyparallel's controller listens on
MAX_ATTEMPTS = 3  # of the first start: another process may take a port before the controller listens there
LOWEST_PORT = 10_000

HEARTBEAT = 100  # milliseconds between two heartbeats of an engine; above 100 engines, one millisecond per engine
EXTRA_SILENCE = (
    10.0  # seconds that ipyparallel waits longer for an engine than the driver: it drops a lost one's results
)
MIN_PAUSE, MAX_PAUSE = 0.1, 10.0  # seconds between two starts of a controller that ends early
EARLY_END = 10.0  # seconds after its start
START_TIMEOUT = 60.0  # seconds from its start until it can serve
FROZEN_INTERVAL = 1.0  # seconds between two checks whether it is stopped (SIGSTOP)
MAX_FROZEN = 5  # checks that find it stopped, after which it is killed


def heartbeat_period(engines: float) -> int:
    """Milliseconds between two heartbeats of each engine.

    An engine counts only after a heartbeat, so the period is short. Each heartbeat costs the controller about 1.1 ms of CPU
    time. So the period grows with the number of engines, and all heartbeats together take about a tenth of a core.
    """
    return max(HEARTBEAT, int(min(engines, 10 * HEARTBEAT)))


class Supervisor:
    """One cluster's controller, for at most `max_engines` engines. Its files are in the profile's folder, with mode 0600.

    A controller that ends is restarted at the same ports, and `on_restart()` is called. If it ends early or cannot be started,
    `on_problem(reason)` is called. Engines and clients reconnect by themselves. The controller outlives this process:
    `driver_lease` says for how long.
    """

    def __init__(
        self,
        profile: Path,
        name: str,
        silence: float,
        driver_lease: DriverLease,
        *,
        on_restart: Callable[[], None] = lambda: None,
        on_problem: Callable[[str], None] = lambda _: None,
        max_engines: float = 0,
        report: Report = report_to_log,
    ) -> None:
        self._profile, self._name = profile, name
        period = heartbeat_period(max_engines)
        self._arguments = [
            "--nodb",  # else the hub's record of all messages would grow without limit
            "--usethreads",
            f"--HeartMonitor.period={period}",
            f"--HeartMonitor.max_heartmonitor_misses={int((silence + EXTRA_SILENCE) * 1000 / period)}",
            "--log-level=40",
        ]
        self._driver_lease, self._report = driver_lease, report
        self._on_restart, self._on_problem = on_restart, on_problem
        self._stem = profile / "security" / f"ipcontroller-{name}"
        self._log = profile / "log" / f"ipcontroller-{name}.log"
        self._log_begin = 0  # of the output of the newest start, in bytes
        self._state = profile / "log" / f"engines{name}.json"
        self._child: subprocess.Popen[bytes] | None = None
        self._held_ports = contextlib.ExitStack()
        self._extra_ports = contextlib.ExitStack()  # of a restart
        self._has_ports = False
        self._tasks: list[asyncio.Task[None]] = []
        self.process = ""  # pid@start
        self.connection = ""  # JSON with which engines connect to it; empty before the first start

    # ---- start and stop ----

    async def start(self) -> None:
        """Start a controller without state of an earlier one. OSError, or RuntimeError with its output, if it fails several times."""
        await self._attempt(self.start_new)
        self._supervise()

    async def attach(self) -> None:
        """Adopt the controller of an earlier driver; restart it if it has ended. Errors as in `start`."""
        if not self._file("-engine.json").exists():  # the earlier driver was killed before its controller started
            await self.start()
            return
        if not self.adopt():
            await self._attempt(self.restart)
        self._supervise()

    async def _attempt(self, start: Callable[[], Awaitable[None]]) -> None:
        for left in reversed(range(MAX_ATTEMPTS)):
            try:
                await start()
            except (OSError, RuntimeError):
                if not left:
                    raise
                await asyncio.sleep(MIN_PAUSE)
            else:
                return

    async def stop(self) -> None:
        """Kill it. It has nothing to clean up, and a request to end would take longer than a kernel's end allows."""
        await self._close()
        await self.kill()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._extra_ports.close()
        self._held_ports.close()

    def _supervise(self) -> None:
        self.connection = json.dumps(self.information("engine"))
        watches = (
            ("the check of ipyparallel's controller", self._watch),
            ("the check for a frozen controller", self._kill_when_frozen),
        )
        self._tasks = [asyncio.create_task(supervise(name, watch, self._report)) for name, watch in watches]

    # ---- restarts ----

    async def _watch(self) -> None:
        """Restart the controller whenever it ends; if it ends early, after pauses that grow.

        At the longest pause nothing is reported any more: in hours, these reports would be all that the event log shows.
        """
        backoff, now = Backoff(MIN_PAUSE, MAX_PAUSE), asyncio.get_running_loop().time
        while True:
            began = now()
            await self.wait_for_end()
            lived, pause = now() - began, 0.0
            if lived < EARLY_END:
                pause = backoff.next()
                if pause < MAX_PAUSE:
                    self._on_problem(f"it ended after {lived:.1f} s: {self.last_line()}")
                await asyncio.sleep(pause)
            else:
                backoff.reset()
            await self._restart_until_it_runs()
            if pause < MAX_PAUSE:
                self._on_restart()

    async def _restart_until_it_runs(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            try:
                await self.restart()
            except (OSError, RuntimeError) as error:  # another process may use one of its ports for a moment
                self._on_problem(f"the last start failed: {error}")
                await asyncio.sleep(backoff.next())
            else:
                return

    async def _kill_when_frozen(self) -> None:
        """Kill a stopped controller (SIGSTOP), so that it is restarted."""
        frozen = 0
        while True:
            await asyncio.sleep(FROZEN_INTERVAL)
            frozen = frozen + 1 if is_stopped(self._pid) else 0
            if frozen >= MAX_FROZEN:
                await self.kill()

    # ---- its process ----

    def information(self, kind: str) -> dict[str, Any]:
        """The addresses and keys with which an `engine` or a `client` connects."""
        found: dict[str, Any] = json.loads(self._file(f"-{kind}.json").read_text())
        return found

    def _file(self, ending: str) -> Path:
        return self._stem.with_name(self._stem.name + ending)

    async def start_new(self) -> None:
        """Kill an earlier controller, remove its files, and start a new one."""
        for folder in (self._stem.parent, self._log.parent):
            make_private(folder)
        self.adopt()
        await self.kill()
        for file in (*map(self._file, ("-client.json", "-engine.json", ".keys", ".process")), self._state):
            file.unlink(missing_ok=True)
        await self.restart()

    def adopt(self) -> bool:
        """Take over the controller of an earlier driver. Returns whether it runs."""
        with contextlib.suppress(FileNotFoundError):
            self.process = self._file(".process").read_text()
        return is_alive(self.process)

    async def restart(self) -> None:
        """Kill it if it runs, and start it at the same ports. RuntimeError, with its output, if it ends or hangs at its start."""
        await self.kill()
        ready, its_end = os.pipe()
        options = json.dumps({"files": str(self._stem), "ready": its_end, "driver_lease": self._driver_lease})
        location = (f"--profile-dir={self._profile}", f"--cluster-id={self._name}", *self._choose_ports())
        try:
            with os.fdopen(append_private(self._log), "ab") as output:
                self._log_begin = os.fstat(output.fileno()).st_size
                self._child = subprocess.Popen(  # noqa: ASYNC220  (milliseconds)
                    [sys.executable, "-P", "-c", CODE, options, *location, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # a file: a pipe would need a reader
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[its_end],
                )
            self.process = identity(self._child.pid)
            # At once: else a new driver would not find it, and would start a second one at the same ports.
            replace_private(self._file(".process"), [self.process.encode()])
            os.close(its_end)
            its_end = -1
            await self._wait_for_start(ready)
            if not os.read(ready, 1):
                output_text = last_output(self._log, self._log_begin).strip()
                raise RuntimeError(f"it ended at its start: {output_text or 'it printed nothing'}")
        finally:
            os.close(ready)
            if its_end >= 0:
                os.close(its_end)

    async def _wait_for_start(self, ready: int) -> None:
        """Wait until it can serve, or has ended. It is killed if it is stopped (SIGSTOP), and after `START_TIMEOUT`."""
        watch = asyncio.create_task(self._kill_when_frozen())
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await _wait_until_readable(ready)
        except TimeoutError:
            await self.kill()
            raise RuntimeError(f"it could not serve {START_TIMEOUT:g} s after its start, and was killed") from None
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _choose_ports(self) -> list[str]:
        """At the first start all its ports; at a restart those of its internal sockets, which may change."""
        self._extra_ports.close()
        chosen = (self._extra_ports if self._has_ports else self._held_ports).enter_context(_ports())
        self._has_ports = True
        return [f"--ports={','.join(map(str, chosen))}"] if chosen else []

    def last_line(self) -> str:
        """The last line of its output since its newest start; empty if there is none."""
        return last_line(self._log, self._log_begin)

    async def wait_for_end(self) -> None:
        """Wait until its process has ended, also if it is not a child of this process."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._pid)
            try:
                if self._child is not None or is_alive(self.process):  # the pid may belong to another process by now
                    await _wait_until_readable(fd)
            finally:
                os.close(fd)
        self._reap()

    async def kill(self) -> None:
        """Kill its process group; returns when all have ended and their ports are free."""
        pid = self._pid
        if pid and (self._child is not None or identity(pid) in ("", self.process)):  # a group may outlive its leader
            while members := _group(pid):  # in a loop: one may have forked meanwhile
                with contextlib.ExitStack() as closing:
                    for fd in members:
                        closing.callback(os.close, fd)
                    for fd in members:
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(fd, signal.SIGKILL)
                    for fd in members:
                        await _wait_until_readable(fd)
        if self._child is not None:
            await self.wait_for_end()  # its first thread may be a zombie while others still end

    @property
    def _pid(self) -> int:
        return self._child.pid if self._child is not None else pid_of(self.process)

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None


async def _wait_until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


def _group(leader: int) -> list[int]:
    """Descriptors (pidfds) of the controller's processes, which become readable when these end.

    Other processes may have the group's number by now, so compare the command line.
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
    """Free ports, reserved for restarts of the controller. If the list is empty, ipyparallel chooses."""
    found = []
    with contextlib.ExitStack() as holding:
        for port in ports.random_ports(10 * PORTS, LOWEST_PORT):
            holder = holding.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", port))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ZeroMQ may listen; this socket does not
                found.append(port)
            if len(found) == PORTS:
                break
        yield found
