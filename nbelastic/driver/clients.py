"""The driver's end of its socket: who is connected is told what changes, and asks."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from nbelastic.core.state import ClusterState
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.faults import Faults
from nbelastic.driver.run import Run
from nbelastic.errors import JobError, NbelasticError, UsageError
from nbelastic.protocol import requests as r
from nbelastic.protocol import updates as u
from nbelastic.protocol.output_buffer import MOST
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system import versions

NEWS, STATUS = 0.02, 0.25  # seconds between two updates at least: with news, and with a status alone
SHARE = 10  # an update costs at most one part in so many of the driver's time
LONGEST_WHO = 80  # characters of what a client says who it is
FULL = 1 << 20  # bytes that a client has not read; it gets no update before it has
FIRST = 10.0  # seconds that the client which has started the driver may take to connect, if the cluster ends at once
GOODBYE, LONG_GOODBYE = (
    2.0,
    6.0,
)  # seconds that clients have at the end to take what there is: at first, and if they read


_requests = msgspec.msgpack.Decoder(r.AnyRequest)


class Shown(Protocol):
    """What clients see of the driver, and how they ask it."""

    settings: Settings
    chronicle: EventLog
    faults: Faults

    @property
    def cluster(self) -> ClusterState: ...

    @property
    def status(self) -> Status: ...

    @property
    def runs(self) -> Mapping[str, Run]: ...

    @property
    def submitted(self) -> int: ...

    @property
    def why_ended(self) -> str: ...

    def request(self, request: r.AnyRequest) -> Future[Any]: ...

    def remove_values(self, job: str) -> None: ...


class Clients:
    """Lives in the driver's thread. `arguments`: those of `Cluster`; `folder`: the run folder."""

    def __init__(self, driver: Shown, folder: Path, arguments: Mapping[str, Any]) -> None:
        self._driver, self._folder = driver, folder
        self.arguments = dict(arguments)
        self._open: set[_Client] = set()
        self._doomed: set[str] = set()  # jobs that the driver has forgotten, but not their values
        self._there: set[_Client] = set()  # of these, who is told what changes
        self._come, self._gone = asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._told_at, self._cost = 0.0, 0.0  # of the last update: when, and how long it took
        self._server: asyncio.Server | None = None
        self.alone_since = time.monotonic()  # if nobody is connected

    async def start(self) -> None:
        """Listen, for this user alone."""
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = u.socket_in(folder)
            with suppress(FileNotFoundError):  # of a driver that was killed
                os.unlink(path)
            listener.bind(path)
            os.chmod(path, 0o600)
            self._server = await self._loop.create_unix_server(lambda: _Client(self, self._driver), sock=listener)
        finally:
            os.close(folder)

    @property
    def anybody(self) -> bool:
        return bool(self._there)

    @property
    def alone(self) -> bool:
        """Whether there is one client."""
        return len(self._there) == 1

    def changed(self, *, news: bool) -> None:
        """Something has. `news`: more than what the status alone shows."""
        if not self._there:
            return
        pause = max(NEWS if news else STATUS, SHARE * self._cost)
        due = max(self._loop.time(), self._told_at + pause)
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._loop.call_at(due, self._tell)

    def _tell(self) -> None:
        began = self._loop.time()
        self._timer, self._due = None, float("inf")
        status = u.encoded(self._driver.status)
        for client in list(self._there):
            client.update(status)
        self._told_at = self._loop.time()
        self._cost = self._told_at - began

    def opened(self, client: _Client) -> None:
        self._open.add(client)

    def come(self, client: _Client) -> None:
        self._there.add(client)
        self._come.set()

    def go(self, client: _Client, *, closed: bool) -> None:
        if closed:
            self._open.discard(client)
        if client not in self._there:
            return
        self._there.discard(client)
        self.sweep()
        if not self._there:
            self.alone_since = time.monotonic()
            self._gone.set()

    def forget(self, job: str) -> None:
        """Nobody asks for its values any more but who was told of its end, and has yet to map them."""
        self._doomed.add(job)
        self.sweep()

    def sweep(self) -> None:
        """Remove the values that everybody has who was told of them."""
        for job in [job for job in self._doomed if not any(job in client.takes for client in self._there)]:
            self._doomed.discard(job)
            self._driver.remove_values(job)

    async def close(self) -> None:
        """Say how it ended, and wait until the clients have what they need of the run folder."""
        if self._server is not None:
            with suppress(TimeoutError):  # who has started the driver is to be told too
                await asyncio.wait_for(self._come.wait(), FIRST)
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        status = u.encoded(self._driver.status)
        for client in list(self._there):
            client.update(status, last=True)
        self._gone.clear()
        left, end = float("inf"), time.monotonic() + LONG_GOODBYE
        while self._there and (size := sum(client.unread for client in self._there)) < left and time.monotonic() < end:
            left = size or -1.0  # nothing is left to be read: once more, for them to say so
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), GOODBYE)

    def kernel_ended(self) -> None:
        """The one that has started the driver, perhaps before it has connected."""
        self._come.set()

    def hang_up(self, why: str | None) -> None:
        """Close the connections: from now on nothing is there any more. None: the cluster is, for the next driver."""
        for client in list(self._open):
            client.hang_up(why)


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, clients: Clients, driver: Shown) -> None:
        self._clients, self._driver = clients, driver
        self._frames = u.Frames(u.FROM_CLIENT, u.LONGEST)
        self._known = False  # it has said hello, and speaks as we do
        self._who = ""
        self._asked: dict[int, Future[Any]] = {}
        self.takes: set[str] = set()  # jobs of whose end it was told, and whose values it has not mapped yet
        self._events = 0  # of which it was told
        self._setup: dict[str, str] = {}
        self._jobs: dict[str, tuple[int, int, bool]] = {}  # lines and changes of which it was told, and of the end
        self._late = False  # it has not read what it was sent, and gets an update when it has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=FULL)
        peer = self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("iII", peer)
        self._clients.opened(self)
        if uid != os.getuid():
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._clients.go(self, closed=True)
        for future in list(self._asked.values()):
            future.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except (ValueError, msgspec.DecodeError):
            self._transport.abort()

    def _take(self, message: u.ToDriver) -> None:
        match message:
            case u.Hello(version=version, language=language, who=who):
                self._who = "".join(filter(str.isprintable, who[:LONGEST_WHO]))
                self._greet(version, language)
            case u.Ask(number=number, request=request) if self._known:
                self._ask(number, request)
            case u.Took(job=job):
                self.takes.discard(job)
                self._clients.sweep()
            case u.Cancel(number=number):
                if number in self._asked:
                    self._asked[number].cancel()
            case u.Bye():
                self._leave()

    def _ask(self, number: int, raw: msgspec.Raw) -> None:
        try:
            request: r.AnyRequest = _requests.decode(raw)
        except msgspec.ValidationError as error:
            text = f"this cannot be asked of the driver: {error}."
            self._transport.write(u.frame(u.Failed(number, UsageError.__name__, text)))
            return
        if isinstance(request, r.Order) and not self._clients.alone:  # all are to see who has given it
            request = replace(request, by=f"{request.by} ({self._who})")
        future = self._asked[number] = self._driver.request(request)
        future.add_done_callback(lambda future: self._answer(number, future))

    def _greet(self, version: str, language: str) -> None:
        if language != u.language():
            text = f"the cluster's driver is nbelastic {versions.ours()}, this is {version}, and they do not speak the same language"
            self._transport.write(u.frame(u.Failed(0, UsageError.__name__, f"{text}: use that version.")))
            self._transport.close()
            return
        self._known = True
        settings = self._driver.settings
        self._transport.write(u.frame(u.Welcome(self._clients.arguments, str(settings.log_dir), settings.number)))
        self._clients.come(self)
        self.update(u.encoded(self._driver.status))

    def _answer(self, number: int, future: Future[Any]) -> None:
        """In the driver's thread. What the answer is the consequence of is told before it."""
        self._asked.pop(number, None)
        if future.cancelled() or self._transport.is_closing():
            return
        self.update(u.encoded(self._driver.status), whatever=True)
        error = future.exception()
        if error is None:
            self._transport.write(u.frame(u.Answer(number, u.encoded(future.result()))))
            return
        name = type(error).__name__ if isinstance(error, NbelasticError) else NbelasticError.__name__
        text = str(error) if isinstance(error, NbelasticError) else f"{type(error).__name__}: {error}"
        self._transport.write(u.frame(u.Failed(number, name, text)))

    def pause_writing(self) -> None:
        self._late = True

    def resume_writing(self) -> None:
        self._late = False
        self.update(u.encoded(self._driver.status))

    def update(self, status: msgspec.Raw, *, last: bool = False, whatever: bool = False) -> None:
        """Say what has changed: with `whatever` also to a client that has not read what came before; `last`: and that it is over."""
        if not self._known or (self._late and not last and not whatever):
            return
        driver = self._driver
        count, new = driver.chronicle.count, []
        if count != self._events:
            events, _ = driver.chronicle.kept()
            new = events[max(0, len(events) - (count - self._events)) :]
        setup = {cell.key: cell.source for cell in driver.cluster.setup}
        jobs = [job for run in driver.runs.values() if (job := self._job(run)) is not None]
        news = u.Update(
            status,
            count,
            driver.submitted,
            events=new,
            setup=setup if setup != self._setup else None,
            jobs=jobs,
            known=list(driver.runs),
            faulty=driver.faults.decides_not,
            stopping=driver.cluster.stopping,
        )
        self._transport.write(u.frame(news))
        self._events, self._setup = count, setup  # not before it could be said
        self._jobs = {run.name: _state(run) for run in driver.runs.values()}
        self.takes |= {job.job for job in jobs if job.end is not None and job.end.values is not None}
        if last:
            self._transport.write(u.frame(u.Over(driver.why_ended)))

    def _job(self, run: Run) -> u.JobUpdate | None:
        """What is new of a job; None: nothing."""
        known, now = self._jobs.get(run.name), _state(run)
        if now == known:
            return None
        lines, rests, ended = known or (0, 0, False)
        over = run.future.done()
        news = run.printed.since(lines, most=MOST), run.printed.changed_since(rests)
        return u.JobUpdate(run.name, *news, run.members if over else (), _end(run) if over and not ended else None)

    @property
    def unread(self) -> int:
        """Bytes that it was sent and has not read."""
        return self._transport.get_write_buffer_size()

    def hang_up(self, why: str | None) -> None:
        if self._known and why is not None:
            self._transport.write(u.frame(u.Over(why)))
        self._transport.close()

    def _leave(self) -> None:
        self._known = False
        self._clients.go(self, closed=False)


def _state(run: Run) -> tuple[int, int, bool]:
    return run.printed.heard, run.printed.changes, run.future.done()


def _end(run: Run) -> u.JobEnd:
    error = run.future.exception()
    if error is None:
        return u.JobEnd(run.future.result())
    if isinstance(error, JobError):
        text = str(error.args[0])
        return u.JobEnd(None, type(error).__name__, text, error.rank, error.worker, error.remote_traceback)
    return u.JobEnd(None, type(error).__name__, str(error))
