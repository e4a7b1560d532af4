"""The driver: one inbox, one World. It runs commands and feeds their results back as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.membership import deadline, step
from nbelastic.core.state import ClusterState, is_same
from nbelastic.driver.agents import Fleet
from nbelastic.driver.answers import Answers
from nbelastic.driver.arrivals import Arrivals, cluster_of, coming
from nbelastic.driver.clients import Clients
from nbelastic.driver.discoveries import Discoveries
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.executor import Executor
from nbelastic.driver.faults import Faults, try_each
from nbelastic.driver.inbound import Inbound
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.liveness import LATE, Liveness
from nbelastic.driver.parts import REAL, Parts
from nbelastic.driver.pending import Pending
from nbelastic.driver.run import Run
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot import Saved
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.status import snapshot
from nbelastic.errors import ClusterStoppedError, HostError
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.requests import AnyRequest, Press, Stop
from nbelastic.protocol.run_directory import RunDir
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system.addresses import parted
from nbelastic.system.futures import settle
from nbelastic.system.supervise import supervise
from nbelastic.transport.keys import Keys

LOOK = 5.0  # seconds between looks at whether the run folder is there
JOBS = 2.0  # seconds between looks at batch jobs
FAILURES = ("worker-lost", "host-lost", "world-broken")


class Driver:
    """It has one thread, in which everything of it happens."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        notes: SnapshotWriter,
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
        self._notes = notes
        self.cluster = ClusterState(settings.limits)
        self._clock = parts.clock(settings.heartbeat + LATE)
        self.chronicle = EventLog(settings.log_dir / "events.jsonl", again=notes.found is not None)
        self.faults = Faults(settings.name, self.record)
        self._serves_clients = arguments is not None
        self._clients = Clients(self, run_dir.path, arguments or {})
        self._submitted = submitted
        self._deciding = False
        self._inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._pending = Pending(lambda: self.cluster, self.take_in, self._error, self.tell)
        self._failure: BaseException | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._publishing = False  # it is about to be
        self._watches: list[asyncio.Task[None]] = []
        self._own: list[asyncio.Task[None]] = []  # that goes on when the driver decides nothing any more
        self._gates: asyncio.Task[None] | None = None

    def request(self, request: AnyRequest) -> Future[Any]:
        """The answer to a request, or its error. ClusterStoppedError if the driver cannot answer it."""
        future: Future[Any] = self._pending.track(Future())
        if self.faults.decides_not and not isinstance(request, Press | Stop):  # a button may be one that stops
            settle(future.set_exception, self._error())
            return future
        try:
            self._answers.answer(request, future)
        except Exception as error:  # noqa: BLE001  (it is given to the caller)
            settle(future.set_exception, error)
        return future

    def take_in(self, event: ev.Event) -> None:
        """Put an event into the inbox."""
        self._inbox.put_nowait(event)

    def record(self, record: cmd.Record) -> None:
        """Add a line to the event log."""
        self._record(record, self._clock.now())
        self.save()
        self.tell()

    def _record(self, record: cmd.Record, now: float) -> None:
        if record.kind in FAILURES:
            self.fleet.live.failed_at = time.time()
        self.chronicle.record(record, now, self.cluster.size)

    @property
    def address(self) -> str:
        """Where it listens: `tcp://127.0.0.1:4711`."""
        return self._server.address

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
            lives_on = self._notes.saved and self._failure is not None
            if lives_on:
                self._run_dir.let_go()
            else:
                self._run_dir.release()
            self._clients.hang_up(None if lives_on else self.why_ended)

    async def _main(self, ready: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self.faults.in_callback)
        saved = self._notes.found
        arrivals = Arrivals(saved, self.settings.silence) if saved is not None else None
        await self._build(saved, arrivals)
        try:
            if saved is not None and arrivals is not None:
                self.jobs.recall(saved.job)
                await asyncio.gather(self.fleet.adopt(saved), arrivals.wait())
                self._take_over(saved, arrivals)
            else:
                self._begin_to_save()
            self._notes.save()
            self._publish()
            if self._serves_clients:
                await self._clients.start()
            ready()
            self._gates = self.supervised("the look at the gates", self.fleet.look_after_gates)
            self._watches = [
                self.supervised("the look at silent hosts and workers", self._silence.listen),
                self.supervised("the look at batch jobs", self._look_after_jobs),
            ]
            if self._serves_clients:
                self._own = [self.supervised("the look around", self._look_around)]
            self._discoveries.ask(self.settings.discovery)
            while not self._inbox.empty():
                self._decide(self._inbox.get_nowait())
            self._deciding = True
            while self.cluster.phase != "finished":
                self._decide(await self._inbox.get())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            if self._failure is None:
                await self._end()

    async def _build(self, saved: Saved | None, arrivals: Arrivals | None) -> None:
        """All parts that need the link or the event loop."""
        settings, cluster, post = self.settings, lambda: self.cluster, self.take_in
        self._keys = saved.keys if saved is not None else Keys.make()
        self._term = saved.term + 1 if saved is not None else 1
        self._server = self._parts.transport(self._keys, self._hear, settings.heartbeat, self._term, self._is_known)
        try:
            await self._server.start(port=parted(saved.address)[1] if saved is not None else 0)
        except OSError as error:
            raise HostError(
                f"the driver cannot listen: {error.strerror}; end who has that port, then try again."
            ) from None
        self.fleet = fleet = Fleet(
            settings,
            self._server,
            self._keys,
            self._clock,
            self._parts,
            post=post,
            record=self.record,
            report=self.faults.report,
            save=self.save,
        )
        self._silence = Liveness(settings, fleet, self._clock, cluster, post=post, record=self.record)
        self._discoveries = Discoveries(post, self.record, self.supervised)
        self._scripts = Scripts(
            cluster=cluster,
            settings=settings,
            clock=self._clock,
            server=self._server,
            fleet=fleet,
            notes=self._notes,
            faults=self.faults,
            keys=self._keys.for_clients(),
            decide=self.decide,
            post=post,
            publish=self.tell,
            supervised=self.supervised,
        )
        self.jobs = Jobs(
            cluster=cluster,
            fleet=fleet,
            scripts=self._scripts,
            pending=self._pending,
            notes=self._notes,
            post=post,
            forget_values=self._clients.forget,
            submitted=self._submitted,
        )
        self._executor = Executor(
            cluster=cluster,
            fleet=fleet,
            jobs=self.jobs,
            scripts=self._scripts,
            chronicle=self.chronicle,
            record=self._record,
            log_dir=settings.log_dir,
        )
        self._inbound = Inbound(
            cluster=cluster,
            clock=self._clock,
            server=self._server,
            fleet=fleet,
            jobs=self.jobs,
            scripts=self._scripts,
            notes=self._notes,
            chronicle=self.chronicle,
            commits=self._silence.commits,
            arrivals=arrivals,
            post=post,
            record=self.record,
            publish=self._publish,
            publish_soon=self._publish_soon,
        )
        self._answers = Answers(
            cluster=cluster,
            settings=settings,
            fleet=fleet,
            jobs=self.jobs,
            pending=self._pending,
            discoveries=self._discoveries,
            invitations=self._scripts.invitations,
            status=lambda: self.status,
            post=post,
            record=self.record,
            save_arguments=self._save_arguments,
        )

    def _begin_to_save(self) -> None:
        """Not before there is a world: this driver may be killed while it takes a cluster over."""
        self._notes.begin(
            cluster=lambda: self.cluster,
            settings=self.settings,
            term=self._term,
            address=self.address,
            keys=self._keys,
            fleet=self.fleet,
        )

    def _take_over(self, saved: Saved, arrivals: Arrivals) -> None:
        """All who live have spoken, or have had their time."""
        now = self._clock.now()
        self._inbound.arrivals = None
        self.cluster, commands = cluster_of(saved, arrivals, now)
        self._begin_to_save()
        self.record(cmd.Record("driver-came", f"driver {self._term} has taken over (process {os.getpid()})"))
        for here in arrivals.workers.values():
            if here.worker in self.cluster.workers:
                self._inbound.find(here)
        for w in self.cluster.workers:
            if w not in arrivals.workers:
                self.fleet.expect(w)
        for host in saved.agents.keys() - arrivals.agents.keys() - coming(saved):
            self.fleet.kill_agent(host)
        for command in commands:
            self._executor.carry_out(command, now)
        self._schedule(now)
        for event in arrivals.frozen:
            self.take_in(event)
        self.jobs.go_on(saved.job, arrivals)

    def supervised(self, what: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a background task, which is started again whenever it fails."""
        return asyncio.create_task(supervise(what, run, self.faults.report))

    async def _end(self) -> None:
        """Close everything: the last line first, and each of them even if another one fails."""
        async with contextlib.AsyncExitStack() as lines:
            lines.callback(self._run_dir.release)  # at once after the controller's end, which would do it
            lines.push_async_callback(self.fleet.stop_controller)
            lines.push_async_callback(self._clients.close)
            lines.callback(self._pending.fail_all, close=True)
            lines.callback(self._notes.close)
            lines.callback(self.chronicle.close)
            for run in self.jobs.runs.values():
                lines.callback(run.abandon, f"the cluster {self.settings.name!r} was stopped")
            lines.callback(self._scripts.close)
            lines.push_async_callback(self._server.stop)
            lines.push_async_callback(self.fleet.stop)
            lines.push_async_callback(self._stop_watching)

    async def _stop_watching(self) -> None:
        tasks = [*self._watches, *self._own, *([self._gates] if self._gates is not None else [])]
        for task in tasks:
            task.cancel()
        discovery = self._discoveries.stop()
        tasks += [discovery] if discovery is not None else []
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tick is not None:
            self._tick.cancel()

    def decide(self, event: ev.Event) -> None:
        """Take this event in at once, before those in the inbox: a node's, which is its host's present one now."""
        if not self._deciding:  # there is no world yet, or other events come first
            self.take_in(event)
        else:
            self._decide(event)

    def _decide(self, event: ev.Event) -> None:
        if self.faults.decides_not:
            self._only_stop(event)
            return
        try:
            self._take(event)
        except Exception as error:  # noqa: BLE001  (a bug of ours: what trains must go on)
            self.stop_deciding(event, error)

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.AgentLost) and self.fleet.has_another(event):
            return
        now = self._clock.now()
        before = self.cluster
        if before.phase == "running":
            self.chronicle.sign(event, now)
        self.cluster, commands = step(before, event, now)
        if isinstance(event, sev.NodeReady) and is_same(before, self.cluster):  # who waits says so twice a second
            for command in commands:
                self._executor.carry_out(command, now)
            return
        acts: list[Callable[[], object]]
        acts = [
            self.save,
            partial(self.chronicle.note, event, now),
            *(partial(self._executor.carry_out, c, now) for c in commands),
        ]
        error = try_each(acts)  # saved first: a driver that is killed now has told nobody what the next one cannot know
        self._after(event, before, commands, now)
        if error is not None:
            raise error

    def stop_deciding(self, event: ev.Event, error: Exception) -> None:
        """The state may be wrong: decide nothing with it, leave the workers as they are, and tell whoever waits."""
        self._discoveries.stop()
        for task in self._watches:  # they would have hosts and workers ended
            task.cancel()
        if self._tick is not None:
            self._tick.cancel()
        self._executor.let_stay(self._clock.now())
        self.faults.stop_deciding(event, error)
        self._pending.fail_all()

    def _only_stop(self, event: ev.Event) -> None:
        """After a fault: an order to stop the cluster ends the driver, which then ends everything that it has started."""
        if isinstance(event, ev.StopRequested):
            self.cluster = ClusterState(self.cluster.limits, stopping=event.reason)

    def _after(self, event: ev.Event, before: ClusterState, commands: tuple[cmd.Command, ...], now: float) -> None:
        if not self.cluster.suspects:
            self.chronicle.calm()
        starting = {command.worker.host for command in commands if isinstance(command, cmd.StartWorker)}
        if starting:
            addresses = tuple(at.address for name in sorted(starting) for at in self.cluster.hosts[name].addresses)
            self.fleet.to_workers(self.cluster.members, worker_messages.AllowPeers(addresses))
        if self.cluster.buried != before.buried:
            self.fleet.forget_all(before.workers.keys() - self.cluster.workers.keys())
        self._schedule(now)
        self._pending.decided(event)
        self.save()
        self._publish()

    def save(self) -> None:
        """Save what another driver would need, if it has changed. What fails, as on a full disk, is reported and tried again."""
        try:
            self._notes.save()
        except Exception as error:  # noqa: BLE001  (nobody who trains needs what is saved)
            self.faults.report("the cluster cannot be saved for another driver", error)

    def _schedule(self, now: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        at = deadline(self.cluster, now)
        if at != float("inf"):
            self._tick = self._loop.call_later(at - now, self._inbox.put_nowait, ev.Ticked())

    def _is_known(self, peer: str) -> bool:
        return self._inbound.is_known(peer)

    def _hear(self, peer: str, message: messages.Message | ev.Event) -> None:
        """A message came over the link."""
        try:
            self._inbound.read(peer, message)
        except Exception as error:  # noqa: BLE001  (a bug of ours: the link must go on)
            self.faults.report(f"{type(message).__name__} of {peer}", error)

    async def _look_after_jobs(self) -> None:
        """For ever, those of a batch system."""
        while True:
            await asyncio.sleep(JOBS)
            await self.fleet.look_after_jobs()
            self.save()  # what no event tells: the number of one that has been submitted, another gate

    def _save_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Those of `Cluster` have changed, for who attaches later and for a next driver."""
        self._clients.arguments = self._notes.arguments = dict(arguments)
        self.save()

    def kernel_ended(self, within: float) -> None:
        """The one that has started this driver, for a cluster that is not kept: programs have so many seconds to end."""
        self._clients.kernel_ended()
        self.take_in(ev.StopRequested("its kernel has ended", within))

    async def _look_around(self) -> None:
        """For ever: a kept cluster to which nobody has been connected for the time of its lease ends; so does one whose lock
        file was removed, as by a cleaner of temporary folders: nobody could find it any more.
        """
        lease, clients = None if self.settings.owner else self.settings.lease, self._clients
        while True:
            alone = 0.0 if clients.anybody or lease is None else time.monotonic() - clients.alone_since
            if lease is not None and alone >= lease:
                self.take_in(ev.StopRequested(f"nobody has been connected to it for {lease:g} s"))
                return
            if not self._run_dir.is_there:
                self.take_in(ev.StopRequested("its lock file was removed"))
                return
            await asyncio.sleep(LOOK if lease is None else max(0.01, min(LOOK, lease - alone)))

    # ---- those who look on ----

    @property
    def status(self) -> Status:
        """A snapshot: the world is immutable, and only those who look pay for it."""
        now = self._clock.read()
        status = self._scripts.shown(snapshot(self.settings.name, self.cluster, self.fleet.live, now), now)
        status = replace(status, time=status.time + self._clock.skipped)
        if self.faults.decides_not and not self.cluster.stopping:
            status = replace(status, reason=self.faults.decides_not)
        return status

    @property
    def runs(self) -> Mapping[str, Run]:
        """Of the present job, and of the last one that has ended."""
        return self.jobs.runs

    @property
    def submitted(self) -> int:
        """How many jobs the cluster has had."""
        return self.jobs.submitted

    def remove_values(self, job: str) -> None:
        """No client needs the values of this job's ranks any more."""
        self.fleet.results.remove(job)

    def _publish_soon(self) -> None:
        """Once for all reports that are read in the same turn."""
        if not self._publishing:
            self._publishing = True
            self._loop.call_soon(self._publish, False)

    def _publish(self, news: bool = True) -> None:
        self._publishing = False
        self._pending.check()
        self.tell(news=news)

    def tell(self, news: bool = True) -> None:
        """Clients hear soon of what has changed; later, if it is not `news`."""
        self._clients.changed(news=news)

    def _error(self) -> BaseException:
        """What those are told who can no longer be answered."""
        why = self.cluster.stopping
        text = f"the cluster {self.settings.name!r} has stopped{f': {why}' if why else ''}."
        if self.faults.decides_not and not why:
            text = f"{self.faults.decides_not}."
        return self._failure or ClusterStoppedError(text)

    @property
    def why_ended(self) -> str:
        """Who stopped it, or what failed."""
        failed = f"its driver failed: {self._failure!r}" if self._failure is not None else ""
        return self.cluster.stopping or failed
