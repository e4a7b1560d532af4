"""The worker's half of the protocol: what the link's thread hears, and what the main thread waits for.

The link's thread never touches the training state. It aborts groups, and puts everything else into the inbox that the
main thread reads at commits and between generations. `attention` tells a commit that there is something to read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
import typing
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nbelastic.errors import JobStoppedError, NoWorldError
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.system.folders import kept
from nbelastic.transport.client import Client
from nbelastic.worker.environment import set_interface
from nbelastic.worker.formation import Formation
from nbelastic.worker.hang_detector import REPEAT, Stuck, of_a_collective
from nbelastic.worker.next_generation import Ahead, in_a_thread
from nbelastic.worker.output_buffer import Printed
from nbelastic.worker.process_group import LOOK, Group, Offer, UnsupportedError, backend_for, collectives_of_all
from nbelastic.worker.protocol import (
    REPORT_EVERY,
    Abort,
    Action,
    Build,
    Do,
    End,
    Introduce,
    Line,
    News,
    Post,
    Protocol,
    Say,
    SendOutput,
)
from nbelastic.worker.user_stack import stack, whereabouts
from nbelastic.worker.warm_up import WarmUp
from nbelastic.worker.worker_report import Account

T = TypeVar("T")

LATE = 2.0  # seconds by which a tick may be late; later than that, this process was stopped
ABORT_EVERY = 0.02
FORMING_PATIENCE = 0.1  # seconds that an aborted group may take to stop connecting before it is left behind
LEAVE_PATIENCE = 10.0  # seconds that closing a group may take
VERDICT = 0.25  # seconds within which the word that ends the job follows the abort, if the error is its end
PREPARE_BOUND = 200  # characters of an error's text in a preparation
OFFERED_AT = 2  # commits of a generation after which the next one's store is offered


class WorldAborted(BaseException):
    """The generation is broken. No `Exception`: user code that catches those must not swallow it."""


class WorldLeft(BaseException):
    """All ranks leave here, at the same commit, as agreed."""


class Holder(typing.Protocol):
    """Who has the training state, in this process."""

    @property
    def position(self) -> tuple[int, bool]:
        """The commit, and whether the live tensors are those of it."""

    def rescue(self) -> None:
        """Write the last checkpoint, if the job has those, while the main thread hangs."""

    def keep(self, folder: Path) -> int:
        """Write the last commit into `folder`, likewise; returns its number. Raises what the disk raises."""

    def take(self, folder: Path, commit: int) -> None:
        """Become what another process has kept there. StateError if that is not this commit, whole."""


class JobCheckpoints(typing.Protocol):
    """The checkpoints of a job: see `state.checkpoints.Plan`."""

    begun: bool

    def resume(self, state: Any) -> None: ...

    def committed(self, state: Any) -> None: ...

    def ended(self, state: Any, alone: int = 0) -> None: ...

    def finish(self) -> None: ...


class Session:
    """One per process. Methods above the line belong to the main thread, those below to the link's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.worker = WorkerId.parse(settings["worker"])
        self.address: str = settings["address"]
        self._choice: tuple[str, int] = (settings["backend"], int(settings["slots"]))
        self._backend = ""
        self._protocol = Protocol(self.worker, float(settings["lease"]))
        self._lock = threading.Lock()  # a commit is counted, or a promise is made not to pass one: not both at once
        self.group: Group | None = None
        self._left: Group | None = None  # while it is being closed
        self._left_at = 0.0
        self.formed_at = 0.0
        self._ahead_by = 0  # collectives that were begun before training did, in this generation
        self.attention = False
        self.used = False  # an elastic function has run in this job
        self.checkpoints: JobCheckpoints | None = None  # of this job
        self.holder: Holder | None = None  # while an elastic function runs
        self._folder = Path(settings["relay"])  # of this host's agent
        self._coming: Formation | None = None  # what follows when this generation is left
        self._ahead = Ahead(self.address)
        self.warm_up = WarmUp()
        self._inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._run: Callable[[messages.Message], object] | None = None  # takes programs and cells
        self._value = b""  # of the newest program, for a driver that fetches it
        self.printed = Printed()  # is sent with the next tick
        self.link = Client(
            self._folder,
            None,
            f"worker/{self.worker}",
            worker_messages.ToWorker,
            self._receive,
            tick=self._tick,
            heartbeat=float(settings["heartbeat"]),
        )
        self._heartbeat = float(settings["heartbeat"])
        self._ticked_at = 0.0
        self._back_at = 0.0  # when this process ran again after it was stopped: it has yet to read what was sent
        self._stuck = Stuck(self.worker, self.link.send, self._end_stuck, self._discard_kept)

    @property
    def account(self) -> Account:
        """What a new driver is told."""
        return self._protocol.account

    @property
    def formation(self) -> Formation | None:
        """The world that this worker is in, if its group stands."""
        return self._protocol.formation

    @property
    def last_rank(self) -> int:
        """In this world or, between worlds, in the last."""
        return self._protocol.rank

    @property
    def speaks(self) -> bool:
        """Whether what all ranks have to say is said by this one."""
        return self._protocol.speaks

    def hello(self, engine: str, run: Callable[[messages.Message], object]) -> None:
        """Say that programs and cells can come: `run(message)` is called in the link's thread for each of them."""
        self._run = run
        self.account.engine = engine
        self.link.send(worker_messages.WorkerHello(self.worker, os.getpid(), engine))

    def begin(self, job: str) -> None:
        """A new program: nothing of the last one counts.

        ValueError if the back end asked for cannot be had; JobStoppedError if the job is over already.
        """
        self.warm_up.wait()
        self._backend = backend_for(*self._choice)
        self.leave_group()
        self._ahead.abort()
        self.printed.job, self.printed.rank = job, None
        with self._lock:
            self._coming, self._inbox = None, queue.SimpleQueue()
            self._protocol.begin(job)
        self.used = False
        self.checkpoints = None
        self.refuse_if_stopped(job)

    def refuse_if_stopped(self, job: str) -> None:
        """JobStoppedError if this job is over, also if its program has not begun here."""
        reason = self._protocol.stopped(job)
        if reason is not None:
            raise JobStoppedError(reason)

    def finish(self) -> None:
        """The program has ended. A group that stands is kept: other ranks may not have read its last words yet."""
        if self._protocol.quit is not None:
            self.leave_group()

    def program_begins(self, job: str) -> None:
        """A new program, which may have to be fetched first: what the last one has left is not needed any more."""
        self._value = b""
        self.account.begin(job)

    def program_ended(self, result: worker_messages.ProgramResult, value: bytes) -> None:
        """The driver is told with the next tick, after all that the program has printed. `value`: what it will fetch."""
        self._value = value
        self._protocol.program_ended(result)
        self.link.wake()

    def say_result_again(self) -> None:
        """How the newest program ended, if it has."""
        self._protocol.say_result_again()
        self.link.wake()

    def gather(self, holder: Holder) -> tuple[Formation, Offer]:
        """Say that this worker is ready and wait for the world it will be in. JobStoppedError if the job ends."""
        if self._ahead.offer is None:
            self.leave_group()  # first: an abort shuts down whatever is opened while a group is being formed
        self._protocol.leave()
        offer = self._ahead.take_offer()
        while True:
            if self._protocol.quit is not None:
                raise JobStoppedError(self._protocol.quit.reason)
            commit, clean = holder.position
            self.link.send(self._protocol.ready(commit, clean=clean, store=offer.endpoint))
            self.leave_group()  # while the word is on its way
            coming, self._coming = self._coming, None
            news = coming or self._hear(REPEAT)
            with self._lock:
                formation = self._protocol.enter(news)
            if formation is not None:
                self._stuck.enter(formation.generation)
                return formation, offer
            match news:
                case messages.Rehome():  # nobody could connect to the old one
                    offer = self._ahead.take_offer()
                case worker_messages.LoadKeptState(by=by, commit=commit):
                    holder.take(kept(self._folder, by), commit)
                    self._protocol.total, self.account.holds = commit, True

    def join(self, formation: Formation, offer: Offer) -> Group:
        """Form the generation's process group. Raises what torch raises, or WorldAborted."""
        prepared = self._ahead.take(formation.generation)
        self.group = prepared or Group(formation.generation, device(self.worker.slot), self._backend)
        self._protocol.generation = formation.generation
        if self._protocol.over(formation.generation):
            raise WorldAborted
        overdue = self._overdue(formation.generation)

        def waiting() -> None:
            if overdue():
                self._ahead.leave_behind()
                raise WorldAborted

        self.group.form(formation, offer, self._ahead.run, waiting)
        self._protocol.joined(formation)
        self.printed.rank = formation.rank
        return self.group

    def _overdue(self, generation: int) -> Callable[[], bool]:
        """A function that returns whether this generation was aborted at least FORMING_PATIENCE before."""
        since = 0.0

        def overdue() -> bool:
            nonlocal since
            if self._protocol.over(generation):
                since = since or time.monotonic()
            return since > 0 and time.monotonic() - since > FORMING_PATIENCE

        return overdue

    def apart(self, task: Callable[[], T]) -> T:
        """Run `task` in a thread of its own and return its result; raises what it raises.

        An abort does not always wake a transfer. WorldAborted: it did not, and the thread is left behind for good. So
        `task` may write to nothing that is used afterwards.
        """
        assert self.group is not None
        running, overdue = in_a_thread(task), self._overdue(self.group.generation)
        while not wait((running,), LOOK).done:
            if overdue():
                raise WorldAborted
        return running.result()

    def formed(self, took: dict[str, float]) -> None:
        self.formed_at = time.monotonic()
        self._ahead_by = collectives_of_all()  # who sent the state, or got it, has begun more by now than the others
        if self.checkpoints is not None:
            self.checkpoints.begun = True
        self.link.send(self._protocol.formed(took))

    def succeed(self, word: ev.WorkerSucceeded) -> None:
        """The elastic function has returned."""
        self.account.word = word
        self.link.send(word)

    def committed(self, total: int) -> None:
        """Count a commit; leave here if that was agreed. Costs nothing but the counting while there is no news."""
        protocol = self._protocol
        with self._lock:
            protocol.commits += 1
        protocol.total = total
        if protocol.commits == 1:
            protocol.reports.begin((time.monotonic() - self.formed_at) * 1000)
            self.link.wake()
        elif protocol.commits == OFFERED_AT:  # the next generation's store, before it is needed
            self._offer_store()
        if self.attention:
            self._listen()

    def report(self, values: dict[str, float]) -> None:
        """The newest are sent now and then. One that is not finite is sent at once, and not replaced by newer ones before."""
        if self._protocol.reports.put(values):
            self.link.wake()

    def _offer_store(self) -> None:
        """For the generation after this one, beside the training."""
        if self.group is not None:
            generation, peers = self.group.generation, self.group.peers
            self._ahead.make_offer(peers, lambda store: self.link.send(ev.StoreOffered(self.worker, generation, store)))

    def _listen(self) -> None:
        """Read what came, wait at the commit that was promised not to be passed, leave at the one that was agreed."""
        protocol = self._protocol
        while True:
            waiting = protocol.hold is not None and protocol.commits >= protocol.hold
            try:
                news = self._hear(REPEAT) if waiting else self._inbox.get_nowait()
            except queue.Empty:
                break
            self._heed(news)
        if protocol.leave_at is not None and protocol.commits >= protocol.leave_at:
            self.settle()
            raise WorldLeft
        with self._lock:
            self.attention = protocol.bound or not self._inbox.empty()

    def _heed(self, news: News | None) -> None:
        match news:
            case Formation():
                self._coming = news
            case worker_messages.Abort() | worker_messages.DropGroup() if self._protocol.over(
                self._protocol.generation
            ):
                raise WorldAborted

    def check(self, where: torch.device) -> None:
        """WorldAborted if the generation is broken. The GPU is waited for: aborted kernels end as if all were well."""
        if where.type == "cuda":
            torch.cuda.current_stream(where).synchronize()
        if self.group is not None and self._protocol.over(self.group.generation):
            raise WorldAborted

    def settle(self) -> None:
        """Wait for all that this worker has begun on its GPU: a commit holds it, and closing the group would cut it off.

        WorldAborted if the generation is broken: collectives that were aborted there end as if all were well.
        """
        if torch.cuda.is_initialized():
            where = device(self.worker.slot)
            torch.cuda.synchronize(where)
            self.check(where)

    def on_any_rank(self, mine: bool) -> bool:
        """Collective: whether `mine` is true on any rank."""
        if self.formation is None or self.formation.world_size == 1:
            return mine
        found = torch.tensor([mine], dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def judge(self, error: BaseException) -> bool:
        """The user's function raised: was it a collective? The driver knows. True: the error is the program's own."""
        assert self.group is not None
        protocol, generation = self._protocol, self.group.generation
        own = self.group.intact() or not of_a_collective(error)
        raised = protocol.raised(f"{type(error).__name__}: {error}", intact=own)
        while not protocol.over(generation):
            self.link.send(raised)
            match self._hear(REPEAT):
                case worker_messages.Abort() | worker_messages.DropGroup() if protocol.over(generation):
                    return own and isinstance(self._hear(VERDICT), worker_messages.StopProgram)
                case worker_messages.StopProgram():  # its own: the others raise
                    return True
        return protocol.quit is not None and protocol.quit.own

    def leave_group(self) -> None:
        """Close the generation's group, if there is one."""
        self._protocol.leave()
        self._left, self.group = self.group, None
        if self._left is not None:
            self._left_at = time.monotonic()
            self._left.leave()
        self._left = None

    def _hear(self, timeout: float) -> News | None:
        try:
            news = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(news, worker_messages.StopProgram) and not news.own:
            raise JobStoppedError(news.reason)
        return news

    # ---- the link's thread ----

    def _receive(self, message: messages.Message) -> None:
        with self._lock:
            actions = self._post(self._protocol.receive(message))
        self._act(actions)

    def _post(self, actions: list[Action]) -> list[Action]:
        """Leave the news to the main thread, in the same moment as a promise that they ask for; returns what else is to be done."""
        rest = []
        for action in actions:
            match action:
                case Post(news=news):
                    self._inbox.put(news)
                    self.attention = True
                case Do(message=messages.Rehome() as order):  # before the main thread hears of it, and offers a store
                    self._move(order)
                case _:
                    rest.append(action)
        return rest

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Say(message=message, newest=newest):
                    (self.link.report if newest else self.link.send)(message)
                case Introduce():
                    self.link.reset_session(self._introduction)
                case Do(message=message):
                    self._do(message)
                case Build(formation=formation):
                    self._build(formation)
                case SendOutput(later=later):
                    self.printed.hold() if later else self._send_output()
                case Abort() if self.group is not None:
                    self.group.abort()
                case End():
                    os._exit(0)

    def _do(self, message: messages.Message) -> None:
        match message:
            case worker_messages.Program() | worker_messages.Cell() | worker_messages.CallPiece():
                if self._run is not None:  # else nobody has been told that it can come
                    self._run(message)
            case worker_messages.FetchResult(job=job, offset=offset):
                self._send_value(job, offset)
            case worker_messages.QueryPosition(generation=generation):
                self._say_where(generation)
            case worker_messages.ShowStack(number=number):
                self.link.send(worker_messages.StackShown(self.worker, number, whereabouts(), stack()))
            case worker_messages.EndHungWorker(keep=keep):
                holder, folder = self.holder, kept(self._folder, self.worker)
                task = partial(holder.keep, folder) if keep and holder is not None else None
                self._stuck.answer(task, self._protocol.job, time.monotonic())
            case worker_messages.AllowPeers(addresses=addresses):
                self._ahead.expect(addresses)

    def _introduction(self) -> worker_messages.WorkerReport:
        """To a new driver, who has not heard what was said before."""
        self.printed.hold()
        offer = self._ahead.offer
        return self._protocol.statement(os.getpid(), offer.endpoint if offer is not None else "")

    def _move(self, order: messages.Rehome) -> None:
        """The next generation's connections are made from another address; the present one keeps its own."""
        set_interface(order.interface)
        self.address = order.address
        self._ahead.move(order.address)
        if self._protocol.commits >= OFFERED_AT:
            self._offer_store()

    def _say_where(self, generation: int) -> None:
        group = self.group
        if (
            group is None or group.generation > generation
        ):  # it may not have heard of a newer one, which was broken meanwhile
            return
        used = time.process_time() - time.thread_time()  # by all threads but this one, which repeats aborts
        connected = self.formation is not None and self.formation.generation == generation
        with contextlib.suppress(RuntimeError):  # groups are being made: it will be asked again
            begun = collectives_of_all() - self._ahead_by
            total = self._protocol.total
            self.link.send(ev.PositionReported(self.worker, generation, total, begun, whereabouts(), used, connected))

    def _build(self, formation: Formation) -> None:
        def done(failure: Exception | None) -> None:
            error = "" if failure is None else f"{type(failure).__name__}: {failure}"[:PREPARE_BOUND]
            supported = not isinstance(failure, UnsupportedError)
            self.link.send(ev.WorkerPrepared(self.worker, formation.generation, error, supported))

        self._ahead.prepare(formation, device(self.worker.slot), self._backend, done)

    def _tick(self) -> float:
        now, link = time.monotonic(), self.link
        if now - self._ticked_at > self._heartbeat + LATE:
            self._back_at = now
        self._ticked_at = now
        heard_at = max(link.heard_at, self._back_at)
        with self._lock:
            actions = self._post(self._protocol.tick(now, Line(link.disconnected, link.congested, heard_at)))
        self._act(actions)
        return self._abort(now)

    def _abort(self, now: float) -> float:
        """Whoever is in a generation that is over is woken, again and again; seconds until the next time."""
        protocol = self._protocol
        if self._stuck.keeping:
            if protocol.quit is not None and not self._stuck.moved(now):
                self._end_stuck()
            if not self.link.disconnected or self._stuck.moved(now):
                self._stuck.go_on_keeping(now)
            return ABORT_EVERY
        group, following = self.group, self._ahead.group
        gone = following is None or not protocol.over(following.generation) or self._ahead.abort()
        if self._left is not None and now - self._left_at > LEAVE_PATIENCE:
            group = self._left
        elif group is None or not protocol.over(group.generation):
            self._stuck.forget()
            return REPORT_EVERY if gone else ABORT_EVERY
        group.abort()
        if self._stuck.watch(group.generation, now):
            if protocol.quit is not None or not self.account.holds:
                self._end_stuck()
            if not self.link.disconnected:
                self._stuck.ask(protocol.total, now)
        return ABORT_EVERY

    def _discard_kept(self) -> None:
        in_a_thread(partial(shutil.rmtree, kept(self._folder, self.worker), ignore_errors=True))

    def _end_stuck(self) -> NoReturn:
        """Of a job that is stopped nobody else keeps what rank 0 would have kept."""
        os.write(2, b"nbelastic: stuck in an aborted collective; this worker ends and is replaced\n")
        try:
            if self._protocol.quit is not None and self.holder is not None:
                self.holder.rescue()
        finally:
            os._exit(ev.HUNG)

    def _send_output(self) -> None:
        for job, rank, stream, text, end in self.printed.take():
            self.link.send(messages.WorkerOutput(self.worker, stream, text, end, job, rank))

    def _send_value(self, job: str, offset: int) -> None:
        result, value = self.account.result, self._value
        if result is not None and result.job == job:
            for at, data in pickling.pieces(value, offset):
                self.link.send(worker_messages.ResultPiece(self.worker, job, at, data))


_session: Session | None = None


def start(session: Session) -> None:
    """Make `session` this process's and start its link."""
    global _session
    _session = session
    session.link.start()
    session.link.send(worker_messages.WorkerProgress(session.worker, 0, 0, {}))  # from now on its silence is noticed


def current() -> Session:
    """The session of this process. NoWorldError where there is none: outside nbelastic's workers."""
    if _session is None:
        raise NoWorldError("this runs in no nbelastic worker: use it inside %%elastic_run or Cluster.run().")
    return _session


def device(slot: int) -> torch.device:
    """The device of a slot: its GPU for life, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", slot % torch.cuda.device_count())
    return torch.device("cpu")


def world() -> Formation:
    """The formation this worker is in. NoWorldError outside an elastic function."""
    with contextlib.suppress(NoWorldError):
        formation = current().formation
        if formation is not None:
            return formation
    raise NoWorldError("there is no world here: rank() and its kin work inside a function decorated with @nbe.elastic.")
