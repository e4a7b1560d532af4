"""The worker's half of the protocol: what the link's thread hears, and what the main thread waits for.

The link's thread never touches the training state. It aborts groups, and puts everything else into the inbox that the
main thread reads at commits and between epochs. `attention` tells a commit that there is something to read.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nbelastic import pickles
from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.errors import JobStoppedError, NoWorldError
from nbelastic.link import Spoke
from nbelastic.worker.account import Account
from nbelastic.worker.ahead import Ahead, in_a_thread
from nbelastic.worker.boot import set_interface
from nbelastic.worker.formation import Formation, formation_of
from nbelastic.worker.printed import Printed
from nbelastic.worker.rendezvous import LOOK, Group, Offer, UnsupportedError, backend_for, collectives_of_all
from nbelastic.worker.stuck import REPEAT, Stuck, of_a_collective
from nbelastic.worker.warm import WarmUp
from nbelastic.worker.whereabouts import stack, whereabouts

if TYPE_CHECKING:
    from nbelastic.worker.saving import Plan

T = TypeVar("T")

ABORT_EVERY = 0.02
FORMING_PATIENCE = 0.1  # seconds that an aborted group may take to stop connecting before it is left behind
LEAVE_PATIENCE = 10.0  # seconds that closing a group may take
REPORT_EVERY = 0.25  # seconds between two reports of rank 0
REPORT_RARELY = 1.0  # the same of all other ranks, of whom only is shown how far they are
VERDICT = 0.25  # seconds within which the word that ends the job follows the abort, if the error is its end
PREPARE_BOUND = 200  # characters of an error's text in a preparation
ERROR_BOUND = 500  # characters of an error's text; the traceback has all of it
OFFERED_AT = 2  # commits of an epoch after which the next one's store is offered


class WorldAborted(BaseException):
    """The epoch is broken. No `Exception`: user code that catches those must not swallow it."""


class WorldLeft(BaseException):
    """All ranks leave here, at the same commit, as agreed."""


class Session:
    """One per process. Methods above the line belong to the main thread, those below to the link's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.worker = m.WorkerId.parse(settings["worker"])
        self.address: str = settings["address"]
        self._choice: tuple[str, int] = (settings["backend"], int(settings["slots"]))
        self._backend = ""
        self.job = ""
        self.formation: Formation | None = None
        self.group: Group | None = None
        self._left: Group | None = None  # while it is being closed
        self._left_at = 0.0
        self._rank = 0  # the last one it had in this job
        self.epoch = 0  # the last epoch that was left
        self.commits = 0  # in this epoch
        self.total = 0  # over all epochs
        self.formed_at = 0.0
        self._ahead_by = 0  # collectives that were begun before training did, in this epoch
        self.attention = False
        self._promise = threading.Lock()  # a commit is counted, or a promise is made not to pass one: not both at once
        self.used = False  # an elastic function has run in this job
        self.checkpoints: Plan | None = None  # of this job
        self.rescue: Callable[[], None] | None = None  # writes the last checkpoint, while an elastic function runs
        self.keep: Callable[[Path], int] | None = (
            None  # keeps the last commit in a folder, likewise; returns its number
        )
        self.took_kept = False  # the state here is what another worker of this host had kept
        self._folder = Path(settings["relay"])  # of this host's agent
        self._hold: int | None = None  # commit number at which to wait for word of where to leave
        self._leave_at: int | None = None
        self._coming: Formation | None = None  # what follows when this epoch is left
        self._ahead = Ahead(self.address)
        self._dropped: set[int] = set()  # epochs that were prepared for nothing
        self.warm_up = WarmUp()
        self._inbox: queue.SimpleQueue[wire.Message | Formation] = queue.SimpleQueue()
        self._report: dict[str, float] = {}
        self._not_finite: dict[str, None] = {}  # names that were so at least once since the last sending
        self._diverged: frozenset[str] = frozenset()  # names that were so in the last sending
        self._reported: tuple[int, int] = (0, 0)
        self._report_at = 0.0
        self._first: float | None = None
        self._aborted = 0  # the newest epoch that was aborted
        self._quit: wire.Quit | None = None
        self._last_quit: wire.Quit | None = None  # it may be of a job whose program has not begun
        self._run: Callable[[wire.Message], object] | None = None  # takes programs and cells
        self._unsent: wire.ProgramResult | None = None
        self._value = b""  # of the newest program, for a driver that fetches it
        self.printed = Printed()  # is sent with the next tick
        self.account = Account()
        self._lease = float(settings["lease"])  # seconds without a driver; 0.0: another process sees to that
        self._term = 0  # of the newest driver
        self.link = Spoke(
            self._folder,
            None,
            f"worker/{self.worker}",
            wire.ToWorker,
            self._receive,
            tick=self._tick,
            heartbeat=float(settings["heartbeat"]),
        )
        self._stuck = Stuck(self.worker, self.link.send, self._end_stuck)

    def hello(self, engine: str, run: Callable[[wire.Message], object]) -> None:
        """Say that programs and cells can come: `run(message)` is called in the link's thread for each of them."""
        self._run = run
        self.account.engine = engine
        self.link.send(wire.WorkerHello(self.worker, os.getpid(), engine))

    def begin(self, job: str) -> None:
        """A new program: nothing of the last one counts.

        ValueError if the back end asked for cannot be had; JobStoppedError if the job is over already.
        """
        self.warm_up.wait()
        self._backend = backend_for(*self._choice)
        self.leave_group()
        self._ahead.abort()
        self.job, self.epoch, self.commits, self.total = job, 0, 0, 0
        self.printed.job, self.printed.rank = job, None
        self._hold = self._leave_at = self._coming = None
        self._quit = self._quit_of(job)
        self._inbox = queue.SimpleQueue()
        self.used, self._rank = False, 0
        self.checkpoints = None
        self._report, self._diverged = {}, frozenset()
        self._not_finite.clear()
        self.account.beginning = False
        self.took_kept = False
        for kept in self._folder.glob("kept-*"):
            if kept != self.kept:  # of a job that is over
                shutil.rmtree(kept, ignore_errors=True)
        self.refuse_if_stopped(job)

    def _quit_of(self, job: str) -> wire.Quit | None:
        told = self._last_quit
        return told if told is not None and told.job == job else None

    def refuse_if_stopped(self, job: str) -> None:
        """JobStoppedError if this job is over, also if its program has not begun here."""
        told = self._quit_of(job)
        if told is not None:
            raise JobStoppedError(told.reason)

    def finish(self) -> None:
        """The program has ended. A group that stands is kept: other ranks may not have read its last words yet."""
        if self._quit is not None:
            self.leave_group()

    def program_begins(self, job: str) -> None:
        """A new program, which may have to be fetched first: what the last one has left is not needed any more."""
        self._value = b""
        self.account.begin(job)

    def program_ended(self, result: wire.ProgramResult, value: bytes) -> None:
        """The driver is told with the next tick, after all that the program has printed. `value`: what it will fetch."""
        self._value = value
        self.account.result, self.account.busy = result, False
        self.say_result_again()

    def say_result_again(self) -> None:
        """How the newest program ended, if it has."""
        self._unsent = self.account.result
        self.link.wake()

    def gather(self, commit: int, *, clean: bool) -> tuple[Formation, Offer]:
        """Say that this worker is ready and wait for the world it will be in. JobStoppedError if the job ends."""
        if self.group is not None:
            self.epoch = max(self.epoch, self.group.epoch)
        if self._ahead.offer is None:
            self.leave_group()  # first: an abort shuts down whatever is opened while a group is being formed
        offer = self._ahead.take_offer()
        while True:
            if self._quit is not None:
                raise JobStoppedError(self._quit.reason)
            ready = m.WorkerReady(self.worker, self.job, self.epoch, commit, clean, offer.endpoint, self.account.holds)
            self.account.word = ready
            self.link.send(ready)
            self.leave_group()  # while the word is on its way
            coming, self._coming = self._coming, None
            message = coming or self._hear(REPEAT)
            match message:
                case Formation(epoch=epoch) if epoch > self.epoch and not self._over(epoch):
                    self.commits, self._hold, self._leave_at = 0, None, None
                    self.account.word = None
                    self._stuck.enter(epoch)
                    return message, offer
                case wire.Rehome():  # nobody could connect to the old one
                    offer = self._ahead.take_offer()
                case Formation(epoch=epoch) | wire.Abort(epoch=epoch):
                    self.epoch = max(self.epoch, epoch)  # aborted before it had begun: it has been left already

    def join(self, formation: Formation, offer: Offer) -> Group:
        """Form the epoch's process group. Raises what torch raises, or WorldAborted."""
        prepared = self._ahead.take(formation.epoch)
        self.group = prepared or Group(formation.epoch, device(self.worker.slot), self._backend)
        if self._over(formation.epoch):
            raise WorldAborted
        overdue = self._overdue(formation.epoch)

        def waiting() -> None:
            if overdue():
                self._ahead.leave_behind()
                raise WorldAborted

        self.group.form(formation, offer, self._ahead.run, waiting)
        self.formation, self._rank = formation, formation.rank
        self.printed.rank = formation.rank
        return self.group

    def _overdue(self, epoch: int) -> Callable[[], bool]:
        """A function that returns whether this epoch was aborted at least FORMING_PATIENCE before."""
        since = 0.0

        def overdue() -> bool:
            nonlocal since
            if self._over(epoch):
                since = since or time.monotonic()
            return since > 0 and time.monotonic() - since > FORMING_PATIENCE

        return overdue

    def apart(self, task: Callable[[], T]) -> T:
        """Run `task` in a thread of its own and return its result; raises what it raises.

        An abort does not always wake a transfer. WorldAborted: it did not, and the thread is left behind for good. So
        `task` may write to nothing that is used afterwards.
        """
        assert self.group is not None
        running, overdue = in_a_thread(task), self._overdue(self.group.epoch)
        while not wait((running,), LOOK).done:
            if overdue():
                raise WorldAborted
        return running.result()

    def formed(self, took: dict[str, float]) -> None:
        self.formed_at = time.monotonic()
        self._ahead_by = collectives_of_all()  # who sent the state, or got it, has begun more by now than the others
        if self.checkpoints is not None:
            self.checkpoints.begun = True
        self.account.formed = self.account.holds = True
        self.link.send(m.WorkerFormed(self.worker, self.group.epoch if self.group else 0, took))

    def succeed(self, word: m.WorkerSucceeded) -> None:
        """The elastic function has returned."""
        self.account.word = word
        self.link.send(word)

    def committed(self, total: int) -> None:
        """Count a commit; leave here if that was agreed. Costs nothing but the counting while there is no news."""
        with self._promise:
            self.commits += 1
        self.total = total
        if self.commits == 1:
            self._first = (time.monotonic() - self.formed_at) * 1000
            self.link.wake()
        elif self.commits == OFFERED_AT:  # the next epoch's store, before it is needed
            self._offer_store()
            if self.took_kept:
                self._forget_kept()
        if self.attention:
            self._listen()

    def report(self, values: dict[str, float]) -> None:
        """The newest are sent now and then. One that is not finite is sent at once, and not replaced by newer ones before."""
        self._report = values
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        self._not_finite.update(dict.fromkeys(wrong))
        if not self._diverged.issuperset(wrong):
            self.link.wake()

    def _offer_store(self) -> None:
        """For the epoch after this one, beside the training."""
        if self.group is not None:
            epoch, peers = self.group.epoch, self.group.peers
            self._ahead.make_offer(peers, lambda store: self.link.send(m.StoreOffered(self.worker, epoch, store)))

    def _listen(self) -> None:
        """Read what came, wait at the commit that was promised not to be passed, leave at the one that was agreed."""
        while True:
            waiting = self._hold is not None and self.commits >= self._hold
            try:
                message = self._hear(REPEAT) if waiting else self._inbox.get_nowait()
            except queue.Empty:
                break
            self._heed(message)
        if self._leave_at is not None and self.commits >= self._leave_at:
            self.settle()
            raise WorldLeft
        with self._promise:
            self.attention = self._hold is not None or self._leave_at is not None or not self._inbox.empty()

    def _heed(self, message: wire.Message | Formation | None) -> None:
        epoch = self.group.epoch if self.group else 0
        match message:
            case Formation():
                self._coming = message
            case wire.Abort() | wire.Drop() if self._over(epoch):
                raise WorldAborted

    @property
    def last_rank(self) -> int:
        """In this world or, between worlds, in the last."""
        return self._rank

    @property
    def offered(self) -> str:
        """The store for the next epoch, if there is one."""
        offer = self._ahead.offer
        return offer.endpoint if offer is not None else ""

    @property
    def speaks(self) -> bool:
        """Whether what all ranks have to say is said by this one: rank 0 of this world or, between worlds, of the last."""
        return self._rank == 0

    def check(self, where: torch.device) -> None:
        """WorldAborted if the epoch is broken. The GPU is waited for: aborted kernels end as if all were well."""
        if where.type == "cuda":
            torch.cuda.current_stream(where).synchronize()
        if self.group is not None and self._over(self.group.epoch):
            raise WorldAborted

    def settle(self) -> None:
        """Wait for all that this worker has begun on its GPU: a commit holds it, and closing the group would cut it off.

        WorldAborted if the epoch is broken: collectives that were aborted there end as if all were well.
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
        epoch = self.group.epoch
        own = self.group.intact() or not of_a_collective(error)
        raised = m.WorkerRaised(self.worker, epoch, own, f"{type(error).__name__}: {error}"[:ERROR_BOUND])
        self.account.word = raised
        while not self._over(epoch):
            self.link.send(raised)
            match self._hear(REPEAT):
                case wire.Abort() | wire.Drop() if self._over(epoch):
                    return own and isinstance(self._hear(VERDICT), wire.Quit)
                case wire.Quit():  # its own: the others raise
                    return True
        if self._quit is not None:
            return self._quit.own
        return False

    def leave_group(self) -> None:
        """Close the epoch's group, if there is one."""
        self.formation = None
        self.account.formed = False
        self._left, self.group = self.group, None
        if self._left is not None:
            self._left_at = time.monotonic()
            self._left.leave()
        self._left = None

    def _hear(self, timeout: float) -> wire.Message | Formation | None:
        try:
            message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(message, wire.Quit) and not message.own:
            raise JobStoppedError(message.reason)
        return message

    # ---- the link's thread ----

    def _receive(self, message: wire.Message) -> None:
        self.account.hear(message)
        match message:
            case wire.Welcome(term=term):
                if term >= self._term:
                    self._term = term
                    self.link.begin_again(self._introduction)
                    self._unsent = self.account.result
                return
            case wire.Program() | wire.Cell() | wire.CallPiece():
                if self._run is not None:  # else nobody has been told that it can come
                    self._run(message)
                return
            case wire.FetchResult(job=job, offset=offset):
                self._send_value(job, offset)
                return
            case wire.Abort(epoch=epoch):
                self._aborted = max(self._aborted, epoch)
            case wire.Quit(job=job):
                self._last_quit = message
                if job != self.job:
                    return
                self._quit = message
            case wire.Prepare(formation=formation):
                self._prepare(formation_of(formation, self.worker))
                return
            case wire.Look(epoch=epoch):
                self._say_where(epoch)
                return
            case wire.ShowStack(number=number):
                self.link.send(wire.StackShown(self.worker, number, whereabouts(), stack()))
                return
            case wire.EndStuck(keep=keep):
                self._stuck.answer(partial(self.keep, self.kept) if keep and self.keep is not None else None)
                return
            case wire.Expect(addresses=addresses):
                self._ahead.expect(addresses)
                return
            case wire.Rehome():
                self._move(message)
            case wire.Drop(epoch=epoch):
                self._dropped.add(epoch)
        news = formation_of(message, self.worker) if isinstance(message, wire.Formation) else message
        with self._promise:
            if isinstance(message, wire.Leave):
                self._arrange(message)
            self._inbox.put(news)
            self.attention = True

    def _introduction(self) -> wire.WorkerHere:
        """To a new driver, who has not heard what was said before."""
        self.printed.hold()
        return self._statement()

    def _statement(self) -> wire.WorkerHere:
        group, told = self.group, self._quit
        return self.account.statement(
            self,
            os.getpid(),
            bound=self._hold is not None or self._leave_at is not None,
            over=group is not None and self._over(group.epoch),
            stopped=told.reason if told is not None and not told.own else "",
        )

    def _arrange(self, message: wire.Leave) -> None:
        """Where to leave this epoch. The promise is made here and not at a commit: the main thread may not get to one, as
        others, who have made theirs, take no part in the step that it is in.
        """
        if self.group is None or message.epoch != self.group.epoch:
            return
        match message.commit:
            case None:
                self._hold = self.commits + 1
                self.link.send(m.WorkerOffered(self.worker, message.epoch, self.commits, message.ask))
            case wire.Leave.STAY:
                self._hold = self._leave_at = None
            case commit:
                self._hold, self._leave_at = None, commit

    def _move(self, order: wire.Rehome) -> None:
        """The next epoch's connections are made from another address; the present one keeps its own."""
        set_interface(order.interface)
        self.address = order.address
        self._ahead.move(order.address)
        if self.commits >= OFFERED_AT:
            self._offer_store()

    def _say_where(self, epoch: int) -> None:
        group = self.group
        if group is None or group.epoch > epoch:  # it may not have heard of a newer one, which was broken meanwhile
            return
        used = time.process_time() - time.thread_time()  # by all threads but this one, which repeats aborts
        connected = self.formation is not None and self.formation.epoch == epoch
        with contextlib.suppress(RuntimeError):  # groups are being made: it will be asked again
            begun = collectives_of_all() - self._ahead_by
            self.link.send(m.WorkerAt(self.worker, epoch, self.total, begun, whereabouts(), used, connected))

    def _prepare(self, formation: Formation) -> None:
        def done(failure: Exception | None) -> None:
            error = "" if failure is None else f"{type(failure).__name__}: {failure}"[:PREPARE_BOUND]
            supported = not isinstance(failure, UnsupportedError)
            self.link.send(m.WorkerPrepared(self.worker, formation.epoch, error, supported))

        if not self._over(formation.epoch):
            self._ahead.prepare(formation, device(self.worker.slot), self._backend, done)

    def _over(self, epoch: int) -> bool:
        """Whether nobody is to be in this epoch any more. From any thread."""
        return epoch <= self._aborted or epoch in self._dropped or self._quit is not None

    def _tick(self) -> float:
        now = time.monotonic()
        if self.link.away or 0.0 < self._lease < now - self.link.heard_at:
            self._be_alone(now)
        elif self.link.crowded:
            self.printed.hold()
        else:
            self._send_output()
        self._send_progress(now)
        result, self._unsent = self._unsent, None
        if result is not None:
            self.link.send(result)
        if self._stuck.keeping:
            if self._quit is not None:
                self._end_stuck()
            if not self.link.away:
                self._stuck.say_kept(self.job, now)
            return ABORT_EVERY
        group, following = self.group, self._ahead.group
        gone = following is None or not self._over(following.epoch) or self._ahead.abort()
        if self._left is not None and now - self._left_at > LEAVE_PATIENCE:
            group = self._left
        elif group is None or not self._over(group.epoch):
            self._stuck.forget()
            return REPORT_EVERY if gone else ABORT_EVERY
        group.abort()
        if self._stuck.watch(group.epoch, now):
            if self._quit is not None or not self.account.holds:
                self._end_stuck()
            if not self.link.away:
                self._stuck.ask(now)
        return ABORT_EVERY

    @property
    def kept(self) -> Path:
        """Where a worker of this host that was stuck has kept the training state of this job, if one has."""
        return self._folder / f"kept-{self.job}"

    def _forget_kept(self) -> None:
        """The whole world has it."""
        self.took_kept = False
        in_a_thread(partial(shutil.rmtree, self.kept, ignore_errors=True))

    def _end_stuck(self) -> NoReturn:
        """Of a job that is stopped nobody else keeps what rank 0 would have kept."""
        os.write(2, b"nbelastic: stuck in an aborted collective; this worker ends and is replaced\n")
        try:
            if self._quit is not None and self.rescue is not None:
                self.rescue()
        finally:
            os._exit(m.STUCK)

    def _be_alone(self, now: float) -> None:
        """There is no driver. A broken world is left, as far as that goes, and nobody waits for ever."""
        self.printed.hold()
        word, group = self.account.word, self.group
        if isinstance(word, m.WorkerRaised) and not word.intact and group is not None and word.epoch == group.epoch:
            group.abort()  # those who wait for this one are to raise as well
        if self._lease and now - self.link.heard_at > self._lease:
            if not self.account.busy:
                os._exit(0)
            if self._quit is None:  # as if it were stopped: with a last checkpoint, if the job has those
                reason = f"no driver has come for {self._lease:g} s (lease)"
                self._receive(wire.Abort(self.account.numbered, reason))
                self._receive(wire.Quit(self.job, reason))

    def _send_progress(self, now: float) -> None:
        epoch, seen = self.epoch, (self.group.epoch if self.group else 0, self.commits)
        first = self._first
        if first is not None:  # else the main thread may be about to say it
            self._first = None
        report = self._report
        wrong = frozenset(self._not_finite.copy()).union(n for n, value in report.items() if not math.isfinite(value))
        urgent = not wrong <= self._diverged
        if first is None and not urgent and (seen == self._reported or now < self._report_at):
            return
        for name in wrong:
            self._not_finite.pop(name, None)
        every = REPORT_EVERY if self.speaks else REPORT_RARELY
        self._reported, self._report_at, self._diverged = seen, now + every, wrong
        sent = {**report, **dict.fromkeys(wrong)}
        if self.link.away:
            self.account.reports.add(self.total, sent)
            return
        progress = wire.WorkerProgress(self.worker, seen[0] or epoch, self.total, sent, first)
        if first is None and self.account.busy and not urgent:
            self.link.report(progress)
        else:  # the first one of an epoch, and the last of a program, are the only ones of their kind
            self.link.send(progress)

    def _send_output(self) -> None:
        for job, rank, stream, text, end in self.printed.take():
            self.link.send(wire.WorkerOutput(self.worker, stream, text, end, job, rank))

    def _send_value(self, job: str, offset: int) -> None:
        result, value = self.account.result, self._value
        if result is not None and result.job == job:
            for at, data in pickles.pieces(value, offset):
                self.link.send(wire.ResultPiece(self.worker, job, at, data))


_session: Session | None = None


def start(session: Session) -> None:
    """Make `session` this process's and start its link."""
    global _session
    _session = session
    session.link.start()
    session.link.send(wire.WorkerProgress(session.worker, 0, 0, {}))  # from now on its silence is noticed


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
