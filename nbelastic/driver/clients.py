"""The driver's socket for clients: it takes their requests and sends them updates."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from nbelastic.core.state import ClusterState
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.internal_errors import InternalErrors
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.status import driver_facts
from nbelastic.driver.telemetry import Telemetry
from nbelastic.errors import JobError, NbelasticError, UsageError
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import requests as r
from nbelastic.protocol.output_buffer import MOST
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system import versions
from nbelastic.system.private_sockets import bind_in

NEWS_INTERVAL = 0.02  # seconds between two updates at least
STATUS_INTERVAL = 0.25  # the same if only the status has changed
COST_FACTOR = 10  # the pause after an update is at least so many times as long as the update took
MAX_NAME_LENGTH = 80  # characters of a client's name
MAX_UNREAD = 1 << 20  # bytes; a client that has not read more gets no updates
MISSED = "… this kernel did not read for a while: output of the cell is missing here …\n"
FIRST_CLIENT_TIMEOUT = (
    10.0  # seconds until the client that has started the driver must connect, if the cluster ends at once
)
CLOSE_TIMEOUT = 2.0  # seconds at the end for clients that read nothing
MAX_CLOSE_TIMEOUT = 6.0  # the same for clients that read what they were sent

_requests = msgspec.msgpack.Decoder(r.AnyRequest)


class ClientView(Protocol):
    """The part of the driver that clients see, and to which they send requests."""

    settings: Settings
    event_log: EventLog
    internal_errors: InternalErrors
    telemetry: Telemetry

    @property
    def cluster(self) -> ClusterState: ...

    @property
    def status(self) -> Status: ...

    @property
    def runs(self) -> Mapping[str, JobRun]: ...

    @property
    def submitted(self) -> int: ...

    @property
    def why_ended(self) -> str: ...

    def request(self, request: r.AnyRequest, on_piece: r.OnPiece = ...) -> Future[Any]: ...

    def remove_values(self, job: str) -> None: ...


class Clients:
    """Lives in the driver's thread.

    `arguments`: those of `Cluster`; `folder`: the run folder; `term`: the driver's number; `now()`: the time of its clock.
    """

    def __init__(
        self, driver: ClientView, folder: Path, arguments: Mapping[str, Any], term: int, now: Callable[[], float]
    ) -> None:
        self.facts = driver_facts(driver.settings, term)
        self._driver, self._folder = driver, folder
        self.arguments = dict(arguments)
        self._open: set[_Connection] = set()
        self._greeted: set[_Connection] = set()  # the open connections that get updates
        self._released_jobs: set[str] = set()  # jobs that the driver has forgotten, but whose values it keeps
        self._has_connected, self._all_left = asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._updated_at, self._cost = 0.0, 0.0  # of the last update: the time, and how many seconds it took
        self._server: asyncio.Server | None = None
        self._now = now
        self._alone_since = now()  # when the last client left; valid while there is none

    async def start(self) -> None:
        """Listen on a socket that only this user can open."""
        self._loop = asyncio.get_running_loop()
        listener = bind_in(self._folder, u.SOCKET)
        self._server = await self._loop.create_unix_server(lambda: _Connection(self, self._driver), sock=listener)

    @property
    def has_any(self) -> bool:
        """Whether a client is connected."""
        return bool(self._greeted)

    @property
    def alone_for(self) -> float:
        """Seconds without a client, but for those in which the driver itself did not run: none could connect then."""
        return 0.0 if self.has_any else self._now() - self._alone_since

    @property
    def has_one(self) -> bool:
        """Whether exactly one client is connected."""
        return len(self._greeted) == 1

    def schedule_update(self, *, news: bool) -> None:
        """Something has changed. `news`: more than the status, so clients get it sooner."""
        if not self._greeted:
            return
        pause = max(NEWS_INTERVAL if news else STATUS_INTERVAL, COST_FACTOR * self._cost)
        due = max(self._loop.time(), self._updated_at + pause)
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._loop.call_at(due, self._send_updates)

    def _send_updates(self) -> None:
        began = self._loop.time()
        self._timer, self._due = None, float("inf")
        status = u.encoded(self._driver.status)
        for client in list(self._greeted):
            client.update(status)
        self._updated_at = self._loop.time()
        self._cost = self._updated_at - began

    def add(self, connection: _Connection) -> None:
        """A connection was opened."""
        self._open.add(connection)

    def add_greeted(self, connection: _Connection) -> None:
        """A client has introduced itself, and gets updates from now on."""
        self._greeted.add(connection)
        self._has_connected.set()

    def remove(self, connection: _Connection, *, closed: bool) -> None:
        """A client has left. `closed`: its connection is closed too."""
        if closed:
            self._open.discard(connection)
        if connection not in self._greeted:
            return
        self._greeted.discard(connection)
        self.remove_unneeded_values()
        if not self._greeted:
            self._alone_since = self._now()
            self._all_left.set()

    def release_values(self, job: str) -> None:
        """The driver forgets a job. Its values stay until each client that knows of its end has mapped them."""
        self._released_jobs.add(job)
        self.remove_unneeded_values()

    def remove_unneeded_values(self) -> None:
        """Remove the values of released jobs that no client has to map any more."""
        for job in [job for job in self._released_jobs if not any(job in each.unmapped_jobs for each in self._greeted)]:
            self._released_jobs.discard(job)
            self._driver.remove_values(job)

    async def close(self) -> None:
        """Send the end to all clients, and wait until they have what they need of the run folder."""
        if self._server is not None:
            with suppress(TimeoutError):  # the client that has started the driver must get the end too
                await asyncio.wait_for(self._has_connected.wait(), FIRST_CLIENT_TIMEOUT)
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        status = u.encoded(self._driver.status)
        for connection in list(self._greeted):
            connection.update(status, last=True)
        self._all_left.clear()
        before, end = float("inf"), time.monotonic() + MAX_CLOSE_TIMEOUT
        while (
            self._greeted
            and (unread := sum(connection.unread for connection in self._greeted)) < before
            and time.monotonic() < end
        ):
            before = unread or -1.0  # all was read: wait once more, for the clients' goodbye
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), CLOSE_TIMEOUT)

    def on_kernel_ended(self) -> None:
        """The kernel that has started the driver has ended, perhaps before it has connected: do not wait for it."""
        self._has_connected.set()

    def disconnect_all(self, reason: str | None) -> None:
        """Close the connections. `reason`: why the cluster has ended; None: it goes on with the next driver."""
        for connection in list(self._open):
            connection.disconnect(reason)


class _Connection(asyncio.Protocol):
    """The connection of one client. Requests are answered only after the client has introduced itself."""

    def __init__(self, clients: Clients, driver: ClientView) -> None:
        self._clients, self._driver = clients, driver
        self._frames = u.Frames(u.FROM_CLIENT, u.LONGEST)
        self._is_greeted = False  # the client has introduced itself, and its messages are of our version
        self._name = ""
        self._pending: dict[int, Future[Any]] = {}  # requests by number
        self.unmapped_jobs: set[str] = set()  # ended jobs that the client knows, and whose values it has not mapped yet
        self._events = 0  # how many were sent
        self._setup: dict[str, str] = {}  # as it was sent
        self._jobs: dict[str, tuple[int, int, bool]] = {}  # what was sent of each job: see `_progress`
        self._reports = ("", 0)  # the version of the reports' history, and how many of its rows were sent
        self._is_writing_paused = False  # the client has not read what it was sent; the next update waits for that
        self._missed_pieces: dict[int, r.Piece] = {}  # by request: the newest output that was left out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNREAD)
        peer = self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("iII", peer)
        self._clients.add(self)
        if uid != os.getuid():
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._clients.remove(self, closed=True)
        for future in list(self._pending.values()):
            future.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except (ValueError, msgspec.DecodeError):
            self._transport.abort()

    def _receive(self, message: u.ToDriver) -> None:
        match message:
            case u.ClientHello(version=version, fingerprint=fingerprint, name=name):
                self._name = "".join(filter(str.isprintable, name[:MAX_NAME_LENGTH]))
                self._greet(version, fingerprint)
            case u.Ask(number=number, request=request) if self._is_greeted:
                self._answer_request(number, request)
            case u.ValuesMapped(job=job):
                self.unmapped_jobs.discard(job)
                self._clients.remove_unneeded_values()
            case u.Cancel(number=number):
                if number in self._pending:
                    self._pending[number].cancel()
            case u.Goodbye():
                self._leave()

    def _answer_request(self, number: int, raw: msgspec.Raw) -> None:
        try:
            request: r.AnyRequest = _requests.decode(raw)
        except msgspec.ValidationError as error:
            text = f"the request is invalid: {error}."
            self._transport.write(u.frame(u.Failed(number, UsageError.__name__, text)))
            return
        # The event log shows which client has sent a request.
        if isinstance(request, r.ChangeRequest) and not self._clients.has_one:
            request = replace(request, by=f"{request.by} ({self._name})")
        future = self._pending[number] = self._driver.request(request, lambda piece: self._send_piece(number, piece))
        future.add_done_callback(lambda future: self._send_answer(number, future))

    def _send_piece(self, number: int, piece: r.Piece) -> None:
        """Send a piece of output. A client that does not read gets a line instead of what it has missed."""
        if self._is_writing_paused:
            self._missed_pieces[number] = piece
        elif not self._transport.is_closing():
            self._transport.write(u.frame(u.Part(number, piece)))

    def _note_missed_pieces(self, number: int) -> None:
        piece = self._missed_pieces.pop(number, None)
        if piece is not None:
            self._transport.write(u.frame(u.Part(number, r.Piece(piece.worker, "err", MISSED, piece.rank))))

    def _greet(self, version: str, fingerprint: str) -> None:
        if fingerprint != u.fingerprint():
            ours = f"nbelastic {versions.nbelastic_version()}"
            text = f"the cluster's driver is {ours}, this is {version}, and their messages differ: use {ours}."
            self._transport.write(u.frame(u.Failed(0, UsageError.__name__, text)))
            self._transport.close()
            return
        self._is_greeted = True
        settings, clients = self._driver.settings, self._clients
        hello = u.DriverHello(clients.arguments, str(settings.log_dir), settings.number, clients.facts)
        self._transport.write(u.frame(hello))
        self._clients.add_greeted(self)
        self.update(u.encoded(self._driver.status))

    def _send_answer(self, number: int, future: Future[Any]) -> None:
        """Send the result of a request, after an update with all that has happened before it. Runs in the driver's thread."""
        self._pending.pop(number, None)
        if future.cancelled() or self._transport.is_closing():
            return
        self.update(u.encoded(self._driver.status), even_if_paused=True)
        self._note_missed_pieces(number)
        error = future.exception()
        if error is None:
            self._transport.write(u.frame(u.Answer(number, u.encoded(future.result()))))
            return
        name = type(error).__name__ if isinstance(error, NbelasticError) else NbelasticError.__name__
        text = str(error) if isinstance(error, NbelasticError) else f"{type(error).__name__}: {error}"
        self._transport.write(u.frame(u.Failed(number, name, text)))

    def pause_writing(self) -> None:
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        for number in list(self._missed_pieces):
            self._note_missed_pieces(number)
        self.update(u.encoded(self._driver.status))

    def update(self, status: msgspec.Raw, *, last: bool = False, even_if_paused: bool = False) -> None:
        """Send what has changed. `last`: and that the cluster has ended.

        A client that has not read the last updates gets none, except with `last` or `even_if_paused`.
        """
        if not self._is_greeted or (self._is_writing_paused and not last and not even_if_paused):
            return
        driver = self._driver
        count, new = driver.event_log.count, []
        if count != self._events:
            events, _ = driver.event_log.kept()
            new = events[max(0, len(events) - (count - self._events)) :]
        setup = {cell.key: cell.source for cell in driver.cluster.setup}
        jobs = [job for run in driver.runs.values() if (job := self._job_update(run)) is not None]
        reports = driver.telemetry.history.since(*self._reports)
        sent = reports.version, reports.start + len(reports.rows)
        message = u.Update(
            status,
            count,
            driver.submitted,
            events=new,
            setup_cells=setup if setup != self._setup else None,
            jobs=jobs,
            known_jobs=list(driver.runs),
            decision_failure=driver.internal_errors.decision_failure,
            stopping=driver.cluster.stopping,
            reports=reports if sent != self._reports else None,
        )
        self._transport.write(u.frame(message))
        self._events, self._setup, self._reports = count, setup, sent  # after the write, which may fail
        self._jobs = {run.name: _progress(run) for run in driver.runs.values()}
        self.unmapped_jobs |= {job.job for job in jobs if job.end is not None and job.end.values is not None}
        if last:
            self._transport.write(u.frame(u.Stopped(driver.why_ended)))

    def _job_update(self, run: JobRun) -> u.JobUpdate | None:
        """The changes of a job since the last update; None if there are none."""
        sent, now = self._jobs.get(run.name), _progress(run)
        if now == sent:
            return None
        lines, changes, ended = sent or (0, 0, False)
        has_ended = run.future.done()
        printed = run.output.since(lines, most=MOST), run.output.changed_since(changes)
        return u.JobUpdate(
            run.name, *printed, run.members if has_ended else (), _end(run) if has_ended and not ended else None
        )

    @property
    def unread(self) -> int:
        """Bytes that the client was sent and has not read."""
        return self._transport.get_write_buffer_size()

    def disconnect(self, why: str | None) -> None:
        if self._is_greeted and why is not None:
            self._transport.write(u.frame(u.Stopped(why)))
        self._transport.close()

    def _leave(self) -> None:
        self._is_greeted = False
        self._clients.remove(self, closed=False)


def _progress(run: JobRun) -> tuple[int, int, bool]:
    """Lines printed, changes of unfinished lines, and whether the run has ended."""
    return run.output.line_count, run.output.changes, run.future.done()


def _end(run: JobRun) -> u.JobEnd:
    error = run.future.exception()
    if error is None:
        return u.JobEnd(run.future.result())
    if isinstance(error, JobError):
        text = str(error.args[0])
        return u.JobEnd(None, type(error).__name__, text, error.rank, error.worker, error.remote_traceback)
    return u.JobEnd(None, type(error).__name__, str(error))
