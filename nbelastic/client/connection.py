"""A client's connection to a driver: the newest state that the driver has sent, and requests to it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
from msgspec.structs import replace

from nbelastic.client.job_copy import JobCopy, create_error
from nbelastic.errors import ClusterStoppedError, DriverLostError, NbelasticError, UsageError
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import requests as r
from nbelastic.protocol.report_history import ReportHistory
from nbelastic.protocol.status import EVENTS_IN_MEMORY, DriverFacts, EventRecord, Status
from nbelastic.system import at_fork, versions
from nbelastic.system.future_results import resolve_if_pending
from nbelastic.system.private_sockets import connect_in

log = logging.getLogger("nbelastic")
LEAVE_TIMEOUT = 1.0  # seconds in which the last requests are sent before a connection is closed
GREETING_TIMEOUT = 10.0  # seconds in which a driver has to greet, and the reader thread to end


def _describe_this_process() -> str:
    """Return the name by which users know this process: its notebook, its terminal or its number."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")  # Jupyter's servers set it to the notebook's path
    if notebook:
        return os.path.basename(notebook)
    with contextlib.suppress(OSError):
        return f"terminal {os.ttyname(0).removeprefix('/dev/')}"
    return f"process {os.getpid()}"


class Connection:
    """A connection to the driver with this run folder. One thread reads and one writes; any thread may call the methods.

    `finished` is set when the driver has ended and everything is closed, or when the client has left. The creator calls `use`
    or `leave`, which decides what happens if the driver dies.
    """

    def __init__(
        self, folder: Path, on_change: Callable[[], object] = lambda: None, predecessor: Connection | None = None
    ) -> None:
        """Connect. OSError if no driver listens there; UsageError if the driver has another version.

        `predecessor`: the connection to a driver that has died, whose jobs go on here.
        """
        self.name = folder.name
        self.on_change = on_change
        self._on_loss: Callable[[], Connection | None] = lambda: None
        self._loss_handling_set = threading.Event()  # by `use` or `leave`
        self._in_use = False
        self.successor: Connection | None = None
        self._predecessor = predecessor
        self._has_stopped = False  # the driver has announced its end
        self.died = False  # the driver has ended unannounced
        self.finished = threading.Event()
        self.forked = False  # this process was forked from the connected one
        self.end_reason = ""
        self.fault = ""  # why the driver no longer decides anything
        self.jobs: dict[str, JobCopy] = {}
        self.setup_cells: dict[str, str] = {}
        self.submitted_jobs = 0
        self.reports = ReportHistory()
        self._events: tuple[deque[EventRecord], int] = deque(maxlen=EVENTS_IN_MEMORY), 0
        self._status = msgspec.Raw()
        self._decoded: tuple[msgspec.Raw, Status] | None = None
        self._pending: dict[int, tuple[type[r.Request], Future[Any], r.OnPiece]] = {}
        self._numbers = itertools.count(1)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._leave_reason = ""  # why the client left, if it has
        self._socket = connect_in(folder, u.SOCKET)
        at_fork.register(self._close_in_child)
        self._send(u.ClientHello(versions.nbelastic_version(), u.fingerprint(), _describe_this_process()))
        self._frames = u.Frames(u.FROM_DRIVER)
        self._greeted = threading.Event()
        self._refusal: NbelasticError | None = None
        self.arguments: dict[str, Any] = {}
        self.driver: DriverFacts | None = None
        self.log_dir = Path()
        self.number = ""  # identifies the start of the cluster
        self._reader = threading.Thread(target=self._read, name="nbelastic-connection", daemon=True)
        self._reader.start()
        self._writer = threading.Thread(target=self._write, name="nbelastic-requests", daemon=True)
        self._writer.start()
        try:
            self._await_greeting()
        except BaseException:  # an interrupt too: the driver must not count this client as attached
            self.leave("")
            raise

    def _await_greeting(self) -> None:
        """Wait for the driver's first update. TimeoutError, ConnectionResetError, or the driver's refusal."""
        if not self._greeted.wait(GREETING_TIMEOUT):
            raise TimeoutError
        if self._refusal is not None:
            raise self._refusal
        if not self._status:
            raise ConnectionResetError  # the driver has just ended

    # ---- what the driver has sent ----

    @property
    def status(self) -> Status:
        """The newest status, decoded on first use."""
        raw, known = self._status, self._decoded
        if known is None or known[0] is not raw:
            self._decoded = known = raw, msgspec.msgpack.decode(raw, type=Status)
        status = known[1]
        if self.finished.is_set() and status.phase != "finished":
            status = replace(status, phase="finished", reason=self.end_reason, world_size=0)
        elif self.died:
            status = replace(status, reason=f"{self.end_reason}; another driver takes over")
        return status

    def events(self) -> tuple[list[EventRecord], int]:
        """Return the events that are kept, and the number of all events so far."""
        while True:
            events, count = self._events
            with contextlib.suppress(RuntimeError):  # the deque grew during the copy
                return list(events), count

    @property
    def present_job(self) -> str:
        """The name of the job that has not ended yet; empty if there is none."""
        return next((name for name, job in list(self.jobs.items()) if not job.future.done()), "")

    # ---- requests ----

    def request(self, request: r.AnyRequest, on_piece: r.OnPiece = r.ignore_piece) -> Future[Any]:
        """Send a request; the future resolves to the driver's answer or error. Cancelling the future cancels the request.

        `on_piece` gets the output before the answer, in the reader's thread.
        ClusterStoppedError, in the future, if the driver has ended. UsageError, at once, if the request cannot be sent.
        """
        future: Future[Any] = Future()
        if self.forked:  # the parent's threads, which send and receive, do not exist here
            self._fail_request(future)
            return future
        number = next(self._numbers)
        try:
            data = u.frame(u.Ask(number, u.encoded(request)))
        except TypeError as error:
            raise UsageError(f"this cannot be sent to the driver: {error}.") from None
        if len(data) > u.LONGEST:
            raise UsageError(
                f"this cannot be sent to the driver: it has {len(data)} bytes, and the limit is {u.LONGEST}."
            )
        self._pending[number] = type(request), future, on_piece
        future.add_done_callback(lambda future: self._forget_request(number, future))
        self._outbox.put(data)
        # The reader sets `finished` before it fails the pending requests: this request is failed here, there, or in both.
        if self.finished.is_set():
            self._fail_request(future)
        return future

    def use(self, on_change: Callable[[], object], on_loss: Callable[[], Connection | None] = lambda: None) -> None:
        """Call `on_change` after each update and at the end, and `on_loss` if the driver dies or has died.

        `on_loss` runs in the reader's thread. It may return a connection to the next driver, the `successor`, where the jobs go on.
        """
        self.on_change, self._on_loss, self._in_use = on_change, on_loss, True
        self._loss_handling_set.set()
        if self.finished.is_set():  # the driver died before
            self.abandon_jobs()

    def _forget_request(self, number: int, future: Future[Any]) -> None:
        if self._pending.pop(number, None) is not None and future.cancelled():
            self._send(u.Cancel(number))

    def leave(self, why: str) -> None:
        """Close the connection; the driver goes on. Calls that still wait raise an error with the text `why`."""
        self._leave_reason = why
        self._loss_handling_set.set()
        self._outbox.put(None)
        end = time.monotonic() + LEAVE_TIMEOUT
        self._writer.join(LEAVE_TIMEOUT)  # the last requests are still sent
        waits = threading.current_thread() is not self._reader and not self.died  # else it may start the next driver
        # Only one direction: a driver that fails to send to this client would not read its requests.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if waits:
            self._reader.join(max(0.0, end - time.monotonic()))
        self._shut_down()
        if waits:
            self._reader.join(GREETING_TIMEOUT)

    def _send(self, message: u.ToDriver) -> None:
        self._outbox.put(u.frame(message))

    def _write(self) -> None:
        """Send what is in the outbox.

        This has its own thread, so that a driver that does not read blocks no caller, and Ctrl-C cuts no message.
        """
        with contextlib.suppress(OSError):  # the driver has ended: the reader handles it
            while (data := self._outbox.get()) is not None:
                self._socket.sendall(data)

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _close_in_child(self) -> None:
        """In a forked child, close the socket, which belongs to the parent."""
        self.forked = True
        self.end_reason = "this process was forked from the one that is connected"
        self.finished = threading.Event()  # another thread may have held the old one's lock at the fork
        self.finished.set()
        self._socket.close()

    # ---- the reader's thread ----

    def _read(self) -> None:
        try:
            while data := self._socket.recv(1 << 20):
                for message in self._frames.feed(data):
                    self._receive(message)
        except OSError:
            pass
        except Exception as error:
            log.exception("the connection to the driver of %r has a fault", self.name)
            self.end_reason = f"the connection to its driver failed: {error!r}"
        finally:
            self._end()

    def _receive(self, message: u.ToClient) -> None:
        match message:
            case u.DriverHello(arguments=arguments, log_dir=log_dir, number=number, driver=driver):
                self.driver = driver
                self.arguments, self.log_dir, self.number = arguments, Path(log_dir), number
                if self._predecessor is not None and self._predecessor.number == number:
                    self.jobs = self._predecessor.jobs
                self._predecessor = None
            case u.Update():
                self._apply(message)
            case u.Part(number=number, piece=piece):
                _, _, on_piece = self._pending.get(number, (None, None, r.ignore_piece))  # another thread may cancel it
                on_piece(piece)
            case u.Answer(number=number, value=value):
                kind, future, _ = self._pending.get(number, (r.Request, None, None))
                answer = msgspec.msgpack.decode(value, type=r.ANSWERS.get(kind, Any))
                self._pending.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(answer)
            case u.Failed(number=0, error=error, text=text):
                self._refusal = create_error(error, text)
                self._greeted.set()
            case u.Failed(number=number, error=error, text=text):
                _, future, _ = self._pending.pop(number, (None, None, None))
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(create_error(error, text))
            case u.Stopped(why=why):
                self._has_stopped = True
                self.end_reason = why or self.end_reason
                self._send(u.Goodbye())

    def _apply(self, update: u.Update) -> None:
        self._status = update.status
        if update.reports is not None:
            self.reports.apply(update.reports)
        events, _ = self._events
        events.extend(update.events)
        self._events = events, update.event_count
        if update.setup_cells is not None:
            self.setup_cells = update.setup_cells
        self.submitted_jobs = update.submitted_jobs
        self.fault, self.end_reason = update.decision_failure, update.stopping
        for job in update.jobs:
            self._job_copy(job.job).apply(job, is_complete=not self._greeted.is_set())
            if job.end is not None and job.end.values is not None:
                self._send(u.ValuesMapped(job.job))
        for name, copy in self.jobs.items():
            if name not in update.known_jobs:  # other clients ran several jobs while this process was suspended
                copy.abandon(ClusterStoppedError(f"{name} has ended, and the driver has forgotten how."))
        self._greeted.set()
        self.on_change()

    def _job_copy(self, name: str) -> JobCopy:
        if name not in self.jobs:
            for old in [name for name, job in self.jobs.items() if job.future.done()][:-1]:
                del self.jobs[old]
            self.jobs[name] = JobCopy(name)
        return self.jobs[name]

    def _end(self) -> None:
        self._greeted.set()
        self.end_reason = self._leave_reason or self.end_reason
        if not self.end_reason:
            self.end_reason = f"the driver of {self.name!r} has ended unexpectedly"
        if not (self._has_stopped or self._leave_reason):
            self._lose_driver()
        at_fork.unregister(self._close_in_child)
        self.finished.set()
        self._outbox.put(None)
        self._socket.close()
        for _, future, _ in list(self._pending.values()):
            self._fail_request(future)
        # With a successor the jobs go on there; before `use` they belong to the predecessor.
        if self._in_use and (self.successor is None or self._leave_reason):
            self.abandon_jobs()
        self.on_change()

    def abandon_jobs(self) -> None:
        """Fail the futures of all jobs that have not ended: no more updates will arrive here."""
        for job in list(self.jobs.values()):
            goes_on = f"; {job.name} goes on there" if self._leave_reason else ""
            job.abandon(ClusterStoppedError(f"{self._leave_reason or self.end_reason}{goes_on}."))

    def _lose_driver(self) -> None:
        """The driver has died: connect to its successor, if `use` has set how to find one."""
        self.died = True
        self.on_change()
        self._loss_handling_set.wait(GREETING_TIMEOUT)
        try:
            self.successor = self._on_loss()
        except Exception as error:
            log.exception("the driver of %r has died, and cannot be replaced", self.name)
            self.end_reason += f", and no other driver could take its place: {error!r}"
        if self.successor is not None and self._leave_reason:
            self.successor.leave(self._leave_reason)

    def _fail_request(self, future: Future[Any]) -> None:
        error = DriverLostError(f"{self.end_reason} before it answered; another driver has taken over: try again.")
        resolve_if_pending(future.set_exception, error if self.successor else ClusterStoppedError(self.stopped_text))

    @property
    def stopped_text(self) -> str:
        """The error text for a request to a driver that has ended."""
        why = f" ({self.end_reason})" if self.end_reason else ""
        return f"the cluster {self.name!r} has stopped{why}: start a new one."
