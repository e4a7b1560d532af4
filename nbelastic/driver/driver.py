"""The driver: one inbox, one World. It runs commands and feeds their results back as events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from nbelastic import versions
from nbelastic.core import messages as m
from nbelastic.core import script_messages as s
from nbelastic.core import wire
from nbelastic.core.addresses import parted
from nbelastic.core.errors import ClusterStoppedError, HostError
from nbelastic.core.membership import deadline, step
from nbelastic.core.placement import ranges
from nbelastic.core.world import World, is_same
from nbelastic.driver.answers import answer
from nbelastic.driver.chronicle import Chronicle
from nbelastic.driver.clients import Clients
from nbelastic.driver.discovery import ByClients, Installed, Listed, Script, Source, opened, watch
from nbelastic.driver.faults import Faults, settle, try_each
from nbelastic.driver.fleet import Fleet
from nbelastic.driver.live import numbers
from nbelastic.driver.notes import Notes
from nbelastic.driver.parts import REAL, Parts
from nbelastic.driver.pending import Pending
from nbelastic.driver.places import RunDir
from nbelastic.driver.requests import AnyRequest, Press, Stop
from nbelastic.driver.results import Outcome
from nbelastic.driver.run import Run
from nbelastic.driver.saved import Saved, SavedJob
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.settings import Settings
from nbelastic.driver.silence import LATE, Silence
from nbelastic.driver.status import Status, snapshot
from nbelastic.driver.takeover import Arrivals, take_over
from nbelastic.link import Keys
from nbelastic.supervision import supervise

T = TypeVar("T")
Change = m.FormWorld | m.PrepareWorld | m.AskLeave | m.LeaveAt | m.Stay | m.AbortWorld

LOOK = 5.0  # seconds between looks at whether the run folder is there
JOBS = 2.0  # seconds between looks at batch jobs
FAILURES = ("worker-lost", "host-lost", "world-broken")


class Driver:
    """It has one thread, in which everything of it happens."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        notes: Notes | None = None,
        parts: Parts = REAL,
        *,
        submitted: int = 0,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`run_dir`, held by the caller, is released (or left to the next driver) when the driver ends. `submitted`: how many
        jobs the cluster has had. `arguments`: those of `Cluster`, for its clients; None: it has no clients.
        """
        self.settings = settings
        self._parts = parts
        self._run_dir = run_dir
        self.notes = notes
        self.world = World(settings.limits)
        self.clock = parts.clock(settings.heartbeat + LATE)
        self.chronicle = Chronicle(
            settings.log_dir / "events.jsonl", again=notes is not None and notes.found is not None
        )
        self.faults = Faults(settings.name, self.record)
        self.runs: dict[str, Run] = {}
        self._clients = Clients(self, run_dir.path, arguments) if arguments is not None else None
        self._asked_to_leave: m.AskLeave | None = None  # while its members do not know where to
        self.submitted = submitted  # jobs so far, those of other drivers included
        self._deciding = False
        self._inbox: asyncio.Queue[m.Event] = asyncio.Queue()
        self.pending = Pending(lambda: self.world, self._inbox.put_nowait, self._error, self.tell)
        self._failure: BaseException | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._publishing = False  # it is about to be
        self._watches: list[asyncio.Task[None]] = []
        self._own: list[asyncio.Task[None]] = []  # that goes on when the driver decides nothing any more
        self._discovery: asyncio.Task[None] | None = None
        self._heard_discovery = ""  # the key of the one in a kernel that is heard
        self._next_discovery = ""  # of the one that is heard from its first word on
        self._gates: asyncio.Task[None] | None = None
        self._arrivals: Arrivals | None = None  # while it takes over

    def request(self, request: AnyRequest) -> Future[Any]:
        """The answer to a request, or its error. ClusterStoppedError if the driver cannot answer it."""
        future: Future[Any] = self.pending.track(Future())
        if self.faults.decides_not and not isinstance(request, Press | Stop):  # a button may be one that stops
            settle(future.set_exception, self._error())
            return future
        try:
            answer(self, request, future)
        except Exception as error:  # noqa: BLE001  (it is given to the caller)
            settle(future.set_exception, error)
        return future

    def take_in(self, event: m.Event) -> None:
        """Put an event into the inbox."""
        self._inbox.put_nowait(event)

    def record(self, record: m.Record) -> None:
        """Add a line to the event log."""
        self._record(record, self.clock.now())
        self.save()
        self.tell()

    def _record(self, record: m.Record, now: float) -> None:
        if record.kind in FAILURES:
            self.fleet.live.failed_at = time.time()
        self.chronicle.record(record, now, self._size)

    @property
    def _size(self) -> int:
        """Of the world, or of what is left of it while it heals."""
        return len(self.world.members) if self.world.active is not None else 0

    @property
    def address(self) -> str:
        """Where it listens: `tcp://127.0.0.1:4711`."""
        return self._hub.address

    async def serve(self, ready: Callable[[], object] = lambda: None) -> None:
        """Be the driver until the cluster has stopped; `ready()` is called when requests can be taken.

        Whatever ends it: who waits is told, and the name of the cluster is given up. A cluster whose driver fails lives on as it
        is, for the next one.
        """
        try:
            await self._main(ready)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            lives_on = self.notes is not None and self.notes.saved and self._failure is not None
            if lives_on:
                self._run_dir.let_go()
            else:
                self._run_dir.release()
            if self._clients is not None:
                self._clients.hang_up(None if lives_on else self.why_ended)

    async def _main(self, ready: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self.faults.in_callback)
        saved = self.notes.found if self.notes is not None else None
        self._arrivals = Arrivals(saved, self.settings.silence) if saved is not None else None
        self.keys = saved.keys if saved is not None else Keys.make()
        self.term = saved.term + 1 if saved is not None else 1
        self._hub = self._parts.transport(self.keys, self._hear, self.settings.heartbeat, self.term, self._is_known)
        try:
            await self._hub.start(port=parted(saved.address)[1] if saved is not None else 0)
        except OSError as error:
            raise HostError(
                f"the driver cannot listen: {error.strerror}; end who has that port, then try again."
            ) from None
        self.fleet = Fleet(
            self.settings,
            self._hub,
            self.keys,
            self.clock,
            self._parts,
            post=self._inbox.put_nowait,
            record=self.record,
            report=self.faults.report,
            save=self.save,
        )
        self._silence = Silence(
            self.settings, self.fleet, self.clock, lambda: self.world, post=self._inbox.put_nowait, record=self.record
        )
        self.scripts = Scripts(self, self._hub, self.keys.for_clients())
        try:
            if saved is not None and self._arrivals is not None:
                self._recall(saved)
                await asyncio.gather(self.fleet.adopt(saved), self._arrivals.wait())
                arrivals, self._arrivals = self._arrivals, None
                take_over(self, saved, arrivals)
            if self.notes is not None:
                self.notes.save(self)
            self._publish()
            if self._clients is not None:
                await self._clients.start()
            ready()
            self._gates = self.supervised("the look at the gates", self.fleet.look_after_gates)
            self._watches = [
                self.supervised("the look at silent hosts and workers", self._silence.listen),
                self.supervised("the look at batch jobs", self._look_after_jobs),
            ]
            self._own = [self.supervised("the look around", self._look_around)]
            self.discover(self.settings.discovery)
            while not self._inbox.empty():
                self._decide(self._inbox.get_nowait())
            self._deciding = True
            while self.world.phase != "finished":
                self._decide(await self._inbox.get())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            if self.notes is None or self._failure is None:
                await self._end()

    def _recall(self, saved: Saved) -> None:
        """Before anybody is heard: the newest job of the last driver, of which workers will tell how it ended."""
        if saved.job is not None:
            self.add_run(Run(saved.job.name, saved.job.program))
        self.fleet.results.remove_all_but(list(self.runs))
        if self.notes is not None:
            self.notes.recall(self)

    def supervised(self, what: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a background task, which is started again whenever it fails."""
        return asyncio.create_task(supervise(what, run, self.faults.report))

    async def _end(self) -> None:
        """Close everything: the last line first, and each of them even if another one fails."""
        async with contextlib.AsyncExitStack() as lines:
            lines.callback(self._run_dir.release)  # at once after the controller's end, which would do it
            lines.push_async_callback(self.fleet.stop_controller)
            if self._clients is not None:
                lines.push_async_callback(self._clients.close)
            lines.callback(self.pending.fail_all, close=True)
            if self.notes is not None:
                lines.callback(self.notes.close)
            lines.callback(self.chronicle.close)
            for run in self.runs.values():
                lines.callback(run.abandon, f"the cluster {self.settings.name!r} was stopped")
            lines.callback(self.scripts.close)
            lines.push_async_callback(self._hub.stop)
            lines.push_async_callback(self.fleet.stop)
            lines.push_async_callback(self._stop_watching)

    async def _stop_watching(self) -> None:
        tasks = [*self._watches, *self._own, *([self._gates] if self._gates is not None else [])]
        tasks += [self._discovery] if self._discovery is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tick is not None:
            self._tick.cancel()

    def decide(self, event: m.Event) -> None:
        """Take this event in at once, before those in the inbox: a node's, which is its host's present one now."""
        if not self._deciding:  # there is no world yet, or other events come first
            self.take_in(event)
        else:
            self._decide(event)

    def _decide(self, event: m.Event) -> None:
        if self.faults.decides_not:
            self._only_stop(event)
            return
        try:
            self._take(event)
        except Exception as error:  # noqa: BLE001  (a bug of ours: what trains must go on)
            self.stop_deciding(event, error)

    def _take(self, event: m.Event) -> None:
        if isinstance(event, m.AgentLost) and self.fleet.has_another(event):
            return
        now = self.clock.now()
        before = self.world
        if before.phase == "running":
            self.chronicle.sign(event, now)
        self.world, commands = step(before, event, now)
        if isinstance(event, s.NodeReady) and is_same(before, self.world):  # who waits says so twice a second
            for command in commands:
                self._do(command, now)
            return
        acts: list[Callable[[], object]]
        acts = [self.save, partial(self.chronicle.note, event, now), *(partial(self._do, c, now) for c in commands)]
        error = try_each(acts)  # saved first: a driver that is killed now has told nobody what the next one cannot know
        self._after(event, before, commands, now)
        if error is not None:
            raise error

    def stop_deciding(self, event: m.Event, error: Exception) -> None:
        """The state may be wrong: decide nothing with it, leave the workers as they are, and tell whoever waits."""
        self.stop_discovery()
        for task in self._watches:  # they would have hosts and workers ended
            task.cancel()
        if self._tick is not None:
            self._tick.cancel()
        if self._asked_to_leave is not None:  # members that have answered wait at their next commit
            self._do(m.Stay(self._asked_to_leave.epoch, self._asked_to_leave.members), self.clock.now())
        self.faults.stop_deciding(event, error)
        self.pending.fail_all()

    def _only_stop(self, event: m.Event) -> None:
        """After a fault: an order to stop the cluster ends the driver, which then ends everything that it has started."""
        if isinstance(event, m.StopRequested):
            self.world = World(self.world.limits, stopping=event.reason)

    def carry_out(self, commands: Iterable[m.Command], now: float) -> None:
        """What was decided when this driver took over."""
        for command in commands:
            self._do(command, now)
        self._schedule(now)

    def submit(self, run: Run, saved: SavedJob) -> None:
        """Take a new job or script in, from the driver's own thread. OSError, and no job, if it cannot be saved."""
        if self.notes is not None:
            self.notes.submit(saved, self)
        self.submitted += 1
        self.add_run(run)
        self.fleet.begin_job(run.name, self.world.numbered)
        if saved.script is None:
            self.take_in(m.JobSubmitted(run.name))
        else:
            self.scripts.begin(run, *saved.script)

    def add_run(self, run: Run) -> None:
        """Keep a run, and of those that have ended the last: the last words of its workers may still come."""
        for name in [name for name, other in self.runs.items() if other.future.done()][:-1]:
            del self.runs[name]
            if self._clients is not None:
                self._clients.forget(name)
            else:
                self.fleet.results.remove(name)
        self.runs[run.name] = run
        self.pending.track(run.future)

    @property
    def present_job(self) -> str:
        """The name of the job whose end is not known yet, a script or not; empty if there is none."""
        return next((name for name, run in self.runs.items() if not run.future.done()), "")

    def _after(self, event: m.Event, before: World, commands: tuple[m.Command, ...], now: float) -> None:
        if not self.world.suspects:
            self.chronicle.calm()
        starting = {command.worker.host for command in commands if isinstance(command, m.StartWorker)}
        if starting:
            addresses = tuple(at.address for name in sorted(starting) for at in self.world.hosts[name].addresses)
            self.fleet.to_workers(self.world.members, wire.Expect(addresses))
        if self.world.buried != before.buried:
            self.fleet.forget_all(before.workers.keys() - self.world.workers.keys())
        self._schedule(now)
        self.pending.decided(event)
        self.save()
        self._publish()

    def save(self) -> None:
        """Save what another driver would need, if it has changed. What fails, as on a full disk, is reported and tried again.

        Not while this one takes over: it has no world yet, and may be killed before it has.
        """
        try:
            if self.notes is not None and self._arrivals is None:
                self.notes.save(self)
        except Exception as error:  # noqa: BLE001  (nobody who trains needs what is saved)
            self.faults.report("the cluster cannot be saved for another driver", error)

    def _schedule(self, now: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        at = deadline(self.world, now)
        if at != float("inf"):
            self._tick = self._loop.call_later(at - now, self._inbox.put_nowait, m.Ticked())

    def _do(self, command: m.Command, now: float) -> None:
        to_workers = self.fleet.to_workers
        match command:
            case m.StartAgent() | m.StopAgent() | m.StartWorker() | m.StopWorker():
                self.fleet.do(command, self._job_dir())
            case m.RunSetup(worker=w, version=version, source=source):
                self.fleet.run_setup(w, version, source)
            case m.RunProgram(worker=w, job=job):
                self.fleet.live.steps.pop(w, None)
                self.fleet.run_program(w, self.runs[job], self.program_ended)
            case m.FormWorld() | m.PrepareWorld() | m.AskLeave() | m.LeaveAt() | m.Stay() | m.AbortWorld():
                self._change(command, now)
            case m.DropWorld(epoch=epoch, members=members):
                to_workers(members, wire.Drop(epoch))
            case m.Look(epoch=epoch, members=members):
                to_workers(members, wire.Look(epoch))
            case m.EndStuck(worker=w, keep=keep):
                to_workers((w,), wire.EndStuck(keep))
            case m.TakeKept(worker=w, by=by, commit=commit):
                to_workers((w,), wire.TakeKept(by, commit))
            case m.ForgetKept(by=by):
                self.fleet.to_agent(by.host, wire.ForgetKept(by))
            case m.StopProgram(job=job, workers=workers, reason=reason, culprit=culprit):
                for w in workers:
                    to_workers((w,), wire.Quit(job, reason, own=w == culprit))
            case m.EndJob(job=job):
                run = self.runs[job]
                run.end(command)
                if not run.future.done():
                    self._loop.call_later(self.world.limits.timeouts.stop + 2, run.settle, True)
            case m.Probe() | m.Rehome():
                self.fleet.pass_on(command, self.world.workers)
                if isinstance(command, m.Rehome):
                    self.scripts.rehome(command.host, wire.Rehome(command.address, command.interface))
            case m.Record():
                self._record(command, now)
            case s.ScriptCommand():
                self.scripts.do(command)
            case _:
                raise TypeError(f"{type(command).__name__} is no command that the driver knows")

    def _change(self, command: Change, now: float) -> None:
        """Tell workers how the world changes, and note how far that is."""
        to_workers = self.fleet.to_workers
        match command:
            case m.FormWorld():
                self.chronicle.form(command, now)
                to_workers(command.to or command.members, _formation(command))
            case m.PrepareWorld(order=order):
                self.chronicle.prepare(now)
                to_workers(order.members, wire.Prepare(_formation(order)))
            case m.AskLeave(epoch=epoch, members=members, number=number):
                self._asked_to_leave = command
                self.chronicle.begin_change(now, broken=False)
                to_workers(members, wire.Leave(epoch, ask=number))
            case m.LeaveAt(epoch=epoch, commit=commit, members=members):
                to_workers(members, wire.Leave(epoch, commit))
            case m.Stay(epoch=epoch, members=members):
                to_workers(members, wire.Leave(epoch, wire.Leave.STAY))
            case m.AbortWorld(epoch=epoch, members=members, reason=reason):
                self.chronicle.begin_change(now, broken=True)
                to_workers(members, wire.Abort(epoch, reason))
        if isinstance(command, m.LeaveAt | m.Stay | m.AbortWorld):
            self._asked_to_leave = None  # now they know

    def _job_dir(self) -> Path:
        job = self.world.active
        return self.settings.log_dir / (job.name if job else "idle")

    def _take_result(self, message: wire.ProgramResult | wire.ResultPiece | wire.FetchCall | wire.CellResult) -> None:
        """A worker speaks of a program or a cell that it is to run, or has run."""
        match message:
            case wire.ProgramResult(worker=w, job=job):
                self.fleet.results.take(message, partial(self.program_ended, w, job))
            case wire.ResultPiece():
                self.fleet.results.piece(message)
            case wire.FetchCall(job=job):
                if job in self.runs:
                    self.fleet.send_call(message, self.runs[job])
            case wire.CellResult():
                self.fleet.cell_ended(message)

    def program_ended(self, w: m.WorkerId, job: str, outcome: Outcome) -> None:
        """A worker's program has ended, and its value is here."""
        self._inbox.put_nowait(m.ProgramEnded(w, job, outcome.error))
        if job in self.runs:
            self.runs[job].ended(w, outcome)

    def _is_known(self, peer: str) -> bool:
        """Whether this agent, worker or node, which is not heard yet, is to be kept in touch with.

        The last words of a dead worker may come after its host's agent has told of its death.
        """
        role, _, name = peer.partition("/")
        if role == "worker":
            try:
                return self._arrivals is not None or m.WorkerId.parse(name) in self.world.workers
            except ValueError:
                return False
        return role == "node" or (role == "agent" and peer == self.fleet.peer_of(name.rpartition("~")[0]))

    def _hear(self, peer: str, message: wire.Message | m.Event) -> None:
        """A message came over the link."""
        try:
            self._read(peer, message, self.clock.now())
        except Exception as error:  # noqa: BLE001  (a bug of ours: the link must go on)
            self.faults.report(f"{type(message).__name__} of {peer}", error)

    def _read(self, peer: str, message: wire.Message | m.Event, now: float) -> None:
        if peer.startswith("agent/") and peer != self.fleet.peer_of(peer[6:].rpartition("~")[0]):
            self._hub.send(peer, wire.Retire())  # given up while it was not heard: it comes back from the dead
            self._hub.forget(peer)
            return
        if peer.startswith("node/"):
            self.scripts.hear(peer, message)
            return
        match message:
            case wire.LaunchEnded():
                self.scripts.launch_ended(message)
            case wire.AgentHello() | wire.WorkerHere() | m.WorkerFroze() if self._arrivals is not None:
                self._arrivals.hear(message)
            case wire.WorkerHere():
                self._late(message)
            case wire.AgentHello():
                problem = versions.difference(message.versions, versions.here())
                here = self.fleet.here_towards(message.host)
                ready = m.AgentReady(message.host, message.pid, message.addresses, message.port, problem, here)
                self._inbox.put_nowait(ready)
            case wire.AgentGoodbye(host=host, reason=reason):
                self.fleet.lose_agent(host, reason)
            case wire.AgentSample():
                self.fleet.live.sample_of(message, self.world.workers, now)
                self._publish_soon()
            case wire.WorkerHello(worker=w, engine=engine):
                if w in self.world.workers:
                    self.fleet.hello(w, engine)
            case wire.WorkerProgress():
                self._progress(message, now)
            case wire.ProgramResult() | wire.ResultPiece() | wire.FetchCall() | wire.CellResult():
                self._take_result(message)
            case wire.StackShown(worker=w):
                if w in self.world.workers:
                    self.fleet.live.stacks[w] = message
                    self._publish()
            case wire.WorkerOutput(job=job):
                if job in self.runs:  # the last words of one may come when the next has begun
                    self.runs[job].hear(message)
                    self.tell()
                if self.notes is not None:
                    self.notes.output(message)
            case m.Event():
                if isinstance(message, m.WorkerFormed):
                    self.chronicle.worker_formed(message)
                self._inbox.put_nowait(message)
            case _:
                raise TypeError(f"{type(message).__name__} from {peer} is no message that the driver knows")

    def find(self, here: wire.WorkerHere) -> None:
        """A worker that another driver has started."""
        if here.engine:
            self.fleet.hello(here.worker, here.engine)
        live = self.fleet.live
        if here.commit:
            live.steps[here.worker] = here.commit
            live.progress(here.commit, self.clock.now())
        if here.rank == 0 and here.holds:
            for commit, report in here.reports:
                self._report(here.worker, commit, report)

    def _late(self, here: wire.WorkerHere) -> None:
        """It was not heard when this driver took over; or it has just started, and has nothing to tell yet."""
        if here.worker not in self.world.workers:
            return
        is_in = here.formed and here.epoch == self.world.epoch and here.worker in self.world.members
        if here.busy and (not is_in or here.bound or here.word is not None):
            self._inbox.put_nowait(m.WorkerFroze(here.worker, "it answered a new driver too late"))
        else:
            self.find(here)

    def _progress(self, message: wire.WorkerProgress, now: float) -> None:
        live, members = self.fleet.live, self.world.members
        if message.worker not in self.world.workers or 0 < message.epoch <= live.last_epoch:
            return  # it is dead, or speaks of the job before
        if message.commit:  # who has just come has made none yet
            live.steps[message.worker] = message.commit
        self._silence.commits.made(message.epoch, message.commit, now)
        live.progress(message.commit, now)
        if members and message.worker == members[0]:
            self._report(message.worker, message.commit, message.report)
            live.steps_per_second = self.fleet.pace.rate(now, message.commit)
        if message.first is not None and message.epoch == self.world.epoch:
            self.chronicle.first_step(message, now, self._size)
        self._publish_soon()
        if self.notes is not None:
            self.notes.live(self, now)

    def _report(self, w: m.WorkerId, commit: int, report: Mapping[str, float | str | None]) -> None:
        """Take what rank 0 reports. The first value of a name that is not finite is an event: the training has diverged."""
        for name in self.fleet.live.report_of(numbers(report)):
            text = f"{name} is not a finite number any more: rank 0 reported so at commit {commit}"
            self.record(m.Record("not-finite", text, worker=str(w), epoch=self.world.epoch))

    async def _look_after_jobs(self) -> None:
        """For ever, those of a batch system."""
        while True:
            await asyncio.sleep(JOBS)
            await self.fleet.look_after_jobs()
            self.save()  # what no event tells: the number of one that has been submitted, another gate

    def discover(self, source: Source, arguments: Mapping[str, Any] | None = None) -> None:
        """Ask from now on there where hosts come from. Who attaches later, and a next driver, find these `arguments`."""
        if isinstance(source, Script | Installed):
            failed, recovered = partial(self.discovered, None, failed=True), partial(self.discovered, None)
            look = partial(watch, opened(source), self.discovered, failed, recovered)
        if isinstance(source, ByClients):
            self._next_discovery = source.key
            if not self._heard_discovery and self._discovery is None:
                self._heard_discovery = source.key
        else:
            self.stop_discovery()
            self._heard_discovery = self._next_discovery = ""
        if isinstance(source, Listed):
            self.discovered(source.hosts)
        elif isinstance(source, Script | Installed):
            self._discovery = self.supervised("the host discovery", look)
        if arguments is not None and self._clients is not None:
            self._clients.arguments = dict(arguments)
        if arguments is not None and self.notes is not None:
            self.notes.arguments = dict(arguments)
            self.save()

    def kernel_ended(self, within: float) -> None:
        """The one that has started this driver, for a cluster that is not kept: programs have so many seconds to end."""
        if self._clients is not None:
            self._clients.kernel_ended()
        self.take_in(m.StopRequested("its kernel has ended", within))

    def found_by_client(self, key: str, hosts: tuple[m.HostSpec, ...] | None, text: str, *, failed: bool) -> None:
        """A discovery in a kernel says something. With its first word it takes the place of the one before it."""
        if key == self._next_discovery and key != self._heard_discovery:
            self.stop_discovery()
            self._heard_discovery = key
        if key == self._heard_discovery:
            self.discovered(hosts, text, failed=failed)

    def stop_discovery(self) -> None:
        """Ask no script or plug-in any more: a client says from now on where hosts are, or nobody does."""
        if self._discovery is not None:
            self._discovery.cancel()
            self._discovery = None

    def discovered(self, hosts: tuple[m.HostSpec, ...] | None, text: str = "", *, failed: bool = False) -> None:
        """Where hosts come from says: these. Or it has failed (None), or answers again, as `text` tells."""
        if hosts is not None:
            self.take_in(m.HostsDiscovered(hosts))
        elif failed:
            self.take_in(m.DiscoveryFailed(text))
        else:
            self.record(m.Record("discovery-recovered", text))

    async def _look_around(self) -> None:
        """For ever: a kept cluster to which nobody has been connected for the time of its lease ends; so does one whose lock
        file was removed, as by a cleaner of temporary folders: nobody could find it any more.
        """
        lease, clients = None if self.settings.owner else self.settings.lease, self._clients
        while clients is not None:
            alone = 0.0 if clients.anybody or lease is None else time.monotonic() - clients.alone_since
            if lease is not None and alone >= lease:
                self.take_in(m.StopRequested(f"nobody has been connected to it for {lease:g} s"))
                return
            if not self._run_dir.is_there:
                self.take_in(m.StopRequested("its lock file was removed"))
                return
            await asyncio.sleep(LOOK if lease is None else max(0.01, min(LOOK, lease - alone)))

    # ---- those who look on ----

    @property
    def status(self) -> Status:
        """A snapshot: the world is immutable, and only those who look pay for it."""
        now = self.clock.read()
        status = self.scripts.shown(snapshot(self.settings.name, self.world, self.fleet.live, now), now)
        status = replace(status, time=status.time + self.clock.skipped)
        if self.faults.decides_not and not self.world.stopping:
            status = replace(status, reason=self.faults.decides_not)
        return status

    def _publish_soon(self) -> None:
        """Once for all reports that are read in the same turn."""
        if not self._publishing:
            self._publishing = True
            self._loop.call_soon(self._publish, False)

    def _publish(self, news: bool = True) -> None:
        self._publishing = False
        self.pending.check()
        self.tell(news=news)

    def tell(self, news: bool = True) -> None:
        """Clients hear soon of what has changed; later, if it is not `news`."""
        if self._clients is not None:
            self._clients.changed(news=news)

    def _error(self) -> BaseException:
        """What those are told who can no longer be answered."""
        why = self.world.stopping
        text = f"the cluster {self.settings.name!r} has stopped{f': {why}' if why else ''}."
        if self.faults.decides_not and not why:
            text = f"{self.faults.decides_not}."
        return self._failure or ClusterStoppedError(text)

    @property
    def why_ended(self) -> str:
        """Who stopped it, or what failed."""
        failed = f"its driver failed: {self._failure!r}" if self._failure is not None else ""
        return self.world.stopping or failed


def _formation(order: m.FormWorld) -> wire.Formation:
    """What each of its members is told."""
    by_host = groupby(order.members, key=lambda w: w.host)
    hosts = tuple((host, tuple(w.slot for w in workers)) for host, workers in by_host)
    return wire.Formation(order.epoch, hosts, order.store, order.root, ranges(order.receivers))
