"""A client's end of the driver's socket: what the driver has said last, and questions to it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import signal
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

from nbelastic import errors
from nbelastic.errors import ClusterStoppedError, DriverLostError, JobError, NbelasticError, UsageError
from nbelastic.protocol import messages
from nbelastic.protocol import requests as r
from nbelastic.protocol import updates as u
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Printed
from nbelastic.protocol.run_directory import START, RunDir
from nbelastic.protocol.status import KEPT, EventRecord, Status
from nbelastic.system import at_fork, pickling, versions
from nbelastic.system.futures import settle

log = logging.getLogger("nbelastic")
AGAIN = 0.02  # seconds to the next try to connect, while it starts or ends
LAST_WORDS = 1.0  # seconds for what is still to be sent when a connection is left
PATIENCE = 10.0  # seconds that a driver may take to greet


class JobCopy:
    """What is known of a job. The future has the packed value of each rank, None for one that died after others had finished."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.printed = Printed()
        self._before = 0  # lines that only an earlier driver has counted
        self.members: tuple[WorkerId, ...] = ()  # of the last world, once it is over
        self.future: Future[list[pickling.Bytes | None]] = Future()

    def take(self, update: u.JobUpdate, *, all_there_is: bool) -> None:
        """`all_there_is`: the driver before this one may have told of a part of it."""
        printed = self.printed
        if all_there_is:
            printed, self._before = Printed(), self._only_known_here(update)
        for worker, line in update.lines:
            printed.add(worker, line._replace(number=line.number + self._before))
        for worker, rest in update.rests:
            printed.begin(worker, rest)
        self.printed = printed
        self.members = update.members or self.members
        if update.end is not None and not self.future.done():
            self._end(update.end)

    def _only_known_here(self, update: u.JobUpdate) -> int:
        """How many lines the driver does not count. Numbers do not go back, though it may know fewer lines than the one before."""
        known = self.printed.heard
        if not update.lines:
            return known
        newest = next(((w, line) for w, line in self.printed.since(known - 1, most=1)), None)
        if newest is not None:
            worker, last = newest
            for w, line in reversed(update.lines):
                if w == worker and line[1:] == last[1:]:
                    return max(0, known - line.number)
        return max(0, known - update.lines[-1][1].number)

    def _end(self, end: u.JobEnd) -> None:
        try:
            if end.values is not None:
                self.future.set_result([_bytes_of(blob) for blob in end.values])
                return
            error = error_of(end.error, end.text)
            if isinstance(error, JobError):
                error.rank, error.worker, error.remote_traceback = end.rank, end.worker, end.traceback
        except (OSError, ValueError) as problem:
            error = JobError(f"{self.name} succeeded, but its results cannot be read: {problem}")
        self.future.set_exception(error)

    def abandon(self, error: NbelasticError) -> None:
        """Nothing more is heard of it."""
        settle(self.future.set_exception, error)


def _who() -> str:
    """What people know this process by: its notebook, its terminal or its number."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")  # Jupyter's servers set it to the path of the notebook
    if notebook:
        return os.path.basename(notebook)
    with contextlib.suppress(OSError):
        return f"terminal {os.ttyname(0).removeprefix('/dev/')}"
    return f"process {os.getpid()}"


def _bytes_of(blob: messages.Blob | None) -> pickling.Bytes | None:
    if blob is None:
        return None
    return pickling.mapped(Path(blob.path)) if blob.path else bytearray(blob.data)  # arrays in it can be written to


def error_of(name: str, text: str) -> NbelasticError:
    """An error as the driver has said it: the name of its class in `nbelastic.errors`, and its text."""
    kind: type[NbelasticError] = getattr(errors, name, NbelasticError)
    return kind(text)


class Connection:
    """To the driver whose run folder this is. A thread reads; all else is for any thread.

    `finished` is set when the driver has ended and everything is closed, or when it was left. Who has made it says by `use`
    or `leave` what is to become of it.
    """

    def __init__(
        self, folder: Path, on_change: Callable[[], object] = lambda: None, before: Connection | None = None
    ) -> None:
        """OSError if nobody listens there; UsageError for a driver of another version. `before`: to one that has died."""
        self.name = folder.name
        self.on_change = on_change
        self._on_death: Callable[[], Connection | None] = lambda: None
        self._said = threading.Event()  # what is to become of it
        self._used = False
        self.heir: Connection | None = None
        self._before = before
        self._over = False  # the driver has said that it ends
        self.died = False  # it has not, and is gone
        self.finished = threading.Event()
        self.forked = False  # this process, from the one that is connected
        self.why_ended = ""
        self.faulty = ""  # why it decides nothing any more
        self.jobs: dict[str, JobCopy] = {}
        self.setup: dict[str, str] = {}
        self.submitted = 0  # jobs so far
        self._events: tuple[deque[EventRecord], int] = deque(maxlen=KEPT), 0
        self._status = msgspec.Raw()
        self._decoded: tuple[msgspec.Raw, Status] | None = None
        self._asked: dict[int, tuple[type[r.Request], Future[Any]]] = {}
        self._numbers = itertools.count(1)
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self._left = ""  # why, if it was left
        self._socket = self._connect(folder)
        at_fork.in_child(self._forget)
        self._send(u.Hello(versions.ours(), u.language(), _who()))
        self._frames = u.Frames(u.FROM_DRIVER)
        self._greeted = threading.Event()
        self._refused: NbelasticError | None = None
        self.arguments: dict[str, Any] = {}
        self.log_dir = Path()
        self.number = ""  # of the cluster's start
        self._thread = threading.Thread(target=self._read, name="nbelastic-connection", daemon=True)
        self._thread.start()
        self._writer = threading.Thread(target=self._write, name="nbelastic-requests", daemon=True)
        self._writer.start()
        try:
            self._meet()
        except BaseException:  # an interrupt too: nobody is to be taken for attached who is not
            self.leave("")
            raise

    def _meet(self) -> None:
        """Wait for the driver's first words. TimeoutError, ConnectionResetError, or why it refuses."""
        if not self._greeted.wait(PATIENCE):
            raise TimeoutError
        if self._refused is not None:
            raise self._refused
        if not self._status:
            raise ConnectionResetError  # it has just ended

    @staticmethod
    def _connect(folder: Path) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        at = -1
        try:
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            made.connect(u.socket_in(at))
        except BaseException:
            made.close()
            raise
        finally:
            if at >= 0:
                os.close(at)
        return made

    # ---- what the driver has said ----

    @property
    def status(self) -> Status:
        raw, known = self._status, self._decoded
        if known is None or known[0] is not raw:
            self._decoded = known = raw, msgspec.msgpack.decode(raw, type=Status)
        status = known[1]
        if self.finished.is_set() and status.phase != "finished":
            status = replace(status, phase="finished", reason=self.why_ended, world_size=0)
        elif self.died:
            status = replace(status, reason=f"{self.why_ended}; another one takes over")
        return status

    def events(self) -> tuple[list[EventRecord], int]:
        """Those that are kept, and how many there have been in all."""
        while True:
            events, count = self._events
            with contextlib.suppress(RuntimeError):  # it has grown meanwhile
                return list(events), count

    @property
    def present_job(self) -> str:
        """The name of the job whose end is not known yet; empty if there is none."""
        return next((name for name, job in list(self.jobs.items()) if not job.future.done()), "")

    # ---- what is asked ----

    def request(self, request: r.AnyRequest) -> Future[Any]:
        """The answer, or its error; who cancels it does not want it any more. ClusterStoppedError: it has ended.

        UsageError, at once, if there is something in it that cannot be sent.
        """
        future: Future[Any] = Future()
        if self.forked:  # another thread may have been sending as this process was forked
            self._fail(future)
            return future
        number = next(self._numbers)
        try:
            data = u.frame(u.Ask(number, u.encoded(request)))
        except TypeError as error:
            raise UsageError(f"this cannot be asked of the driver: {error}.") from None
        if len(data) > u.LONGEST:
            raise UsageError(
                f"this cannot be asked of the driver: it has {len(data)} bytes, and {u.LONGEST} are possible."
            )
        self._asked[number] = type(request), future
        future.add_done_callback(lambda future: self._unask(number, future))
        self._out.put(data)
        if self.finished.is_set():  # which is set before its thread looks at what was asked: one of us sees the other
            self._fail(future)
        return future

    def use(self, on_change: Callable[[], object], on_death: Callable[[], Connection | None] = lambda: None) -> None:
        """Call `on_change` after each update, and at the end. `on_death`, in the connection's thread, if the driver dies, or has died by
        now: it may give a connection to another one, the `heir`, where the jobs go on.
        """
        self.on_change, self._on_death, self._used = on_change, on_death, True
        self._said.set()
        if self.finished.is_set():  # it has died long before
            self.abandon_jobs()

    def _unask(self, number: int, future: Future[Any]) -> None:
        if self._asked.pop(number, None) is not None and future.cancelled():
            self._send(u.Cancel(number))

    def leave(self, why: str) -> None:
        """Close the connection; the driver stays. `why`, in words for who still waits."""
        self._left = why
        self._said.set()
        self._out.put(None)
        self._writer.join(LAST_WORDS)  # what was asked just before still goes out
        self._shut()
        if threading.current_thread() is not self._thread and not self.died:  # else it may be starting another driver
            self._thread.join(PATIENCE)

    def _send(self, message: u.ToDriver) -> None:
        self._out.put(u.frame(message))

    def _write(self) -> None:
        """In a thread of its own: nobody who asks waits for a driver that does not read, nor cuts a message by Ctrl-C."""
        with contextlib.suppress(OSError):  # the driver has ended: the thread that reads says so
            while (data := self._out.get()) is not None:
                self._socket.sendall(data)

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        """In a forked child: it is the parent's."""
        self.forked = True
        self.why_ended = "this process was forked from the one that is connected"
        self.finished = threading.Event()  # another thread may have held the lock of the old one
        self.finished.set()
        self._socket.close()

    # ---- the thread ----

    def _read(self) -> None:
        try:
            while data := self._socket.recv(1 << 20):
                for message in self._frames.feed(data):
                    self._take(message)
        except OSError:
            pass
        except Exception as error:
            log.exception("the connection to the driver of %r has a fault", self.name)
            self.why_ended = f"the connection to its driver failed: {error!r}"
        finally:
            self._end()

    def _take(self, message: u.ToClient) -> None:
        match message:
            case u.Welcome(arguments=arguments, log_dir=log_dir, number=number):
                self.arguments, self.log_dir, self.number = arguments, Path(log_dir), number
                if self._before is not None and self._before.number == number:
                    self.jobs = self._before.jobs
                self._before = None
            case u.Update():
                self._update(message)
            case u.Answer(number=number, value=value):
                kind, future = self._asked.get(number, (r.Request, None))
                answer = msgspec.msgpack.decode(value, type=r.ANSWERS.get(kind, Any))
                self._asked.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(answer)
            case u.Failed(number=0, error=error, text=text):
                self._refused = error_of(error, text)
                self._greeted.set()
            case u.Failed(number=number, error=error, text=text):
                _, future = self._asked.pop(number, (None, None))
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(error_of(error, text))
            case u.Over(why=why):
                self._over = True
                self.why_ended = why or self.why_ended
                self._send(u.Bye())

    def _update(self, update: u.Update) -> None:
        self._status = update.status
        events, _ = self._events
        events.extend(update.events)
        self._events = events, update.count
        if update.setup is not None:
            self.setup = update.setup
        self.submitted, self.faulty, self.why_ended = update.submitted, update.faulty, update.stopping
        for job in update.jobs:
            self._job(job.job).take(job, all_there_is=not self._greeted.is_set())
            if job.end is not None and job.end.values is not None:
                self._send(u.Took(job.job))
        for name, copy in self.jobs.items():
            if name not in update.known:  # others have run several jobs while this process was stopped
                copy.abandon(ClusterStoppedError(f"{name} has ended, and the driver has forgotten how."))
        self._greeted.set()
        self.on_change()

    def _job(self, name: str) -> JobCopy:
        if name not in self.jobs:
            for old in [name for name, job in self.jobs.items() if job.future.done()][:-1]:
                del self.jobs[old]
            self.jobs[name] = JobCopy(name)
        return self.jobs[name]

    def _end(self) -> None:
        self._greeted.set()
        self.why_ended = self._left or self.why_ended
        if not self.why_ended:
            self.why_ended = f"the driver of {self.name!r} has ended unexpectedly"
        if not (self._over or self._left):
            self._die()
        at_fork.no_longer(self._forget)
        self.finished.set()
        self._out.put(None)
        self._socket.close()
        for _, future in list(self._asked.values()):
            self._fail(future)
        if self._used and (self.heir is None or self._left):  # else it is for the one before, or the heir, to say
            self.abandon_jobs()
        self.on_change()

    def abandon_jobs(self) -> None:
        """Nothing more is heard of them here."""
        for job in list(self.jobs.values()):
            goes_on = f"; {job.name} goes on there" if self._left else ""
            job.abandon(ClusterStoppedError(f"{self._left or self.why_ended}{goes_on}."))

    def _die(self) -> None:
        self.died = True
        self.on_change()
        self._said.wait(PATIENCE)
        try:
            self.heir = self._on_death()
        except Exception as error:
            log.exception("the driver of %r has died, and cannot be replaced", self.name)
            self.why_ended += f", and no other one could take its place: {error!r}"
        if self.heir is not None and self._left:
            self.heir.leave(self._left)

    def _fail(self, future: Future[Any]) -> None:
        error = DriverLostError(f"{self.why_ended} before it answered; another one has taken over: ask again.")
        settle(future.set_exception, error if self.heir else ClusterStoppedError(self.gone))

    @property
    def gone(self) -> str:
        """What to say to who asks a driver that has ended."""
        why = f" ({self.why_ended})" if self.why_ended else ""
        return f"the cluster {self.name!r} has stopped{why}: start a new one."


def connected(folder: Path, patience: float = START, before: Connection | None = None) -> Connection | None:
    """A connection to the driver whose run folder this is; None if it is dead, or was faulty and has been ended.

    `before`: see `Connection`. UsageError if it does not listen within `patience` seconds, does not answer, is of another
    version, or if it is the driver of another cluster than the one `before`.
    """
    run_dir = RunDir(folder.name)
    end = time.monotonic() + patience
    while True:
        pid = run_dir.driver
        if not pid:
            return None
        try:
            connection = Connection(folder, before=before)
        except (ConnectionError, FileNotFoundError):  # it is about to listen, or to end
            if time.monotonic() > end:
                raise silent(folder.name, pid) from None
            time.sleep(AGAIN)
        except TimeoutError:
            raise silent(folder.name, pid) from None
        else:
            break
    if before is not None and connection.number != before.number:
        connection.leave("it is another cluster's")
        raise taken(folder.name)
    if connection.faulty:
        connection.leave("its driver had a fault and was ended")
        kill_driver(run_dir, pid)
        return None
    return connection


def taken(name: str) -> UsageError:
    """To who has lost a driver."""
    return UsageError(f"another cluster has the name {name!r} now.")


def silent(name: str, pid: int) -> UsageError:
    """To who wants to attach."""
    text = f"the driver of the cluster {name!r} does not answer (process {pid}): it is stopped or busy"
    return UsageError(f"{text}; end that process, then attach again.")


def kill_driver(run_dir: RunDir, pid: int) -> None:
    """Kill this process, if it still is the one that holds the name; wait until it has ended."""
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if run_dir.driver == pid:  # the number may be another's by now, or the name
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                ended.poll(PATIENCE * 1000)
        finally:
            os.close(fd)
