"""Fakes of all that a driver is connected to: a clock that a test sets, a message server, agents and workers.

`DriverWithFakes` gives the driver its `Dependencies`. All fakes live in one event loop, whose time changes only in
`advance_time`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nbelastic.driver.clock import Clock
from nbelastic.driver.dependencies import Dependencies
from nbelastic.driver.driver import Driver
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.host_parsing import parse_hosts
from nbelastic.protocol.host_sources import ListedHosts
from nbelastic.protocol.ids import HostSpec, Interface, WorkerId
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.settings import Settings
from nbelastic.system import pickling, versions
from nbelastic.transport.backlog import Backlog

TURNS = 40  # of the event loop: enough for a message and the answers to it to arrive
TIME_STEP = 0.25  # seconds; no timer of the driver is more frequent
SIGKILL = -9
NOTHING = b"".join(pickling.pack(None))


class ManualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def run_story(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story in a loop whose time changes only in `advance_time`."""
    with asyncio.Runner(loop_factory=ManualTimeLoop) as runner:
        runner.run(story())


@dataclass
class FakeWorker:
    """A training worker that answers messages and commits when a test calls `train`."""

    id: WorkerId
    send: Callable[[messages.Message | ev.Event], None]
    job: str = ""
    generation: int = 0  # 0: none
    left: int = 0
    commits: int = 0  # in this generation
    total: int = 0
    holds: bool = False
    busy: bool = False
    connects: bool = False  # it was asked to become an engine
    engine_error: str = ""  # why it cannot become one

    def connect_engine(self) -> None:
        if self.connects and not self.busy:
            engine = "" if self.engine_error else f"engine-{self.id}"
            self.send(worker_messages.EngineConnected(self.id, engine, self.engine_error))

    def end_program(self, error: str = "") -> None:
        """Report that the program has ended."""
        self.busy = False
        blob = None if error else messages.Blob(len(NOTHING), NOTHING)
        self.send(worker_messages.ProgramResult(self.id, self.job, error, value=blob))
        self.connect_engine()

    def report_ready(self) -> None:
        store = f"127.0.0.1:{4000 + self.left}"
        self.send(ev.WorkerReady(self.id, self.job, self.left, self.total, True, store, self.holds))

    def receive(self, message: messages.Message) -> None:
        match message:
            case worker_messages.Formation(generation=generation) if generation > max(self.left, self.generation):
                self.generation, self.commits, self.holds = generation, 0, True
                self.send(ev.WorkerFormed(self.id, generation))
            case worker_messages.Prepare(formation=formation):
                self.send(ev.WorkerPrepared(self.id, formation.generation))
            case worker_messages.Leave(generation=generation, commit=None, ask=ask):
                self.send(ev.LeaveAcknowledged(self.id, generation, self.commits, ask))
            case worker_messages.Leave(commit=commit) if commit != worker_messages.Leave.STAY and self.generation:
                self.total += commit - self.commits
                self.leave(self.generation)
            case worker_messages.Abort(generation=generation) if self.generation and generation >= self.generation:
                self.leave(generation)
            case worker_messages.StopProgram(reason=reason) if self.busy:
                self.generation = 0
                self.end_program(f"JobStoppedError: {reason}")
            case worker_messages.ShowStack(number=number):
                self.send(worker_messages.StackShown(self.id, number, "", ""))
            case worker_messages.ConnectEngine():
                self.connects = True
                self.connect_engine()
            case worker_messages.Program(job=job):  # it calls the elastic function at once
                self.job, self.busy, self.total, self.left, self.holds = job, True, 0, 0, False
                self.report_ready()

    def leave(self, generation: int) -> None:
        self.left, self.generation = generation, 0
        self.report_ready()

    def train(self, commits: int) -> None:
        if self.generation:
            self.commits += commits
            self.total += commits
            self.send(worker_messages.WorkerProgress(self.id, self.generation, self.total, {}))
            self.send(ev.StoreOffered(self.id, self.generation, f"127.0.0.1:{5000 + self.generation}"))


class FakeAgent:
    """A host's agent, whose workers are objects and whom the driver handles like a process."""

    process = job = ""

    def __init__(self, fakes: DriverWithFakes, spec: HostSpec, on_stop: Callable[[str], None], number: int) -> None:
        self._fakes, self.spec, self._on_stop, self._number = fakes, spec, on_stop, number
        self.is_alive = False

    def start(self, config: Mapping[str, Any]) -> None:
        self.is_alive = True
        self._fakes.agents[f"agent/{self.spec.name}~{self._number}"] = self
        self.send(
            agent_messages.AgentHello(
                self.spec.name, self._number, versions.installed(), (Interface("lo", "127.0.0.1"),)
            )
        )

    def send(self, message: messages.Message | ev.Event) -> None:
        self._fakes.deliver(f"agent/{self.spec.name}~{self._number}", message)

    def receive(self, message: messages.Message) -> None:
        match message:
            case agent_messages.Spawn(worker=w):
                worker = self._fakes.workers[w] = FakeWorker(
                    w, lambda message: self._fakes.deliver(f"worker/{w}", message)
                )
                self.send(ev.WorkerStarted(w, 1000 + w.slot))
                worker.send(worker_messages.WorkerHello(w, 1000 + w.slot))
            case agent_messages.StopWorker(worker=w, kill=kill):
                self.lose_worker(w, SIGKILL if kill else 0)
            case agent_messages.InjectFault(kind="kill", worker=w):
                self.lose_worker(w)
            case agent_messages.InjectFault(kind="stop", worker=w):
                self.send(ev.WorkerFrozen(w, "stopped"))
            case agent_messages.InjectFault() | agent_messages.StopAgent():
                self.kill()

    def lose_worker(self, w: WorkerId, code: int = SIGKILL) -> None:
        """End this worker's process."""
        self._fakes.workers.pop(w, None)
        self.send(ev.WorkerExited(w, code))

    def kill(self) -> None:
        if self.is_alive:
            self.is_alive = False
            for w in [w for w in self._fakes.workers if w.host == self.spec.name]:
                del self._fakes.workers[w]
            asyncio.get_running_loop().call_soon(self._on_stop, "its agent ended")


def host_of(peer: str) -> str:
    """The host of an agent or a worker."""
    return peer.partition("/")[2].partition("~")[0].partition("/")[0]


class MemoryServer:
    """A message server without sockets: each message arrives in a later turn of the loop, in order."""

    address = "tcp://127.0.0.1:1"

    def __init__(self, fakes: DriverWithFakes, on_message: Callable[[str, Any], None]) -> None:
        self._fakes, self.on_message = fakes, on_message
        self.heard_at: dict[str, float] = {}
        self.backlog = Backlog(1)

    async def start(self, interface: str = "", port: int = 0) -> None:
        """Do nothing: there are no sockets."""

    async def stop(self) -> None:
        self.on_message = lambda peer, message: None

    def send(self, peer: str, message: messages.Message) -> None:
        self._fakes.sent.append((peer, message))
        asyncio.get_running_loop().call_soon(self._fakes.arrive, peer, message)

    def send_to_all(self, peers: Iterable[str], message: messages.Message) -> None:
        for peer in peers:
            self.send(peer, message)

    def has_acknowledged(self, peer: str) -> bool:
        return host_of(peer) not in self._fakes.silent

    def forget(self, peer: str) -> None:
        self.heard_at.pop(peer, None)


class FakeController:
    """A controller of ipyparallel without a process."""

    connection = process = ""

    def __init__(self, fakes: DriverWithFakes) -> None:
        self._fakes = fakes

    async def start(self) -> None:
        self._fakes.controllers += 1
        self._run()

    async def attach(self) -> None:
        self._fakes.attached += 1
        self._run()

    def _run(self) -> None:
        if self._fakes.no_controller:
            raise OSError(self._fakes.no_controller)
        self.connection, self.process = "{}", "1@1"

    async def stop(self) -> None:
        for _ in range(3):  # it waits until its process has ended
            await asyncio.sleep(0)
        self._fakes.controller_stopped = True

    def information(self, kind: str) -> dict[str, Any]:
        return {}


def settings_for(folder: Path, hosts: str, slots: int = 1, *, chaos: bool = False, **limits: Any) -> Settings:
    """The settings for a cluster of these hosts, with its files in `folder`."""
    return Settings(
        name="fake",
        limits=Limits(**limits),
        discovery=ListedHosts(parse_hosts(hosts, slots)),
        run_folder=folder / "run",
        preload=(),
        environment={},
        nics=(),
        python=None,
        cwd=None,
        launcher="ssh",
        launcher_options={},
        log_dir=folder,
        chaos=chaos,
    )


def driver_for(settings: Settings, dependencies: Dependencies) -> Driver:
    """Return a driver without clients, which does not lock a name."""
    run_folder = RunFolder(settings.name)
    run_folder.path = settings.run_folder
    run_folder.make()
    return Driver(settings, run_folder, SnapshotWriter(run_folder, {}), dependencies=dependencies)


class DriverWithFakes:
    """A driver and all that it is connected to: `async with DriverWithFakes(tmp_path, "a:2", min=2) as fakes`."""

    agent = FakeAgent

    def __init__(self, folder: Path, hosts: str, **limits: Any) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.sent: list[tuple[str, messages.Message]] = []
        self.controllers, self.attached, self.no_controller = 0, 0, ""  # how often one was started, and why none can be
        self.controller_stopped = False
        self.silent: set[str] = set()  # hosts whose messages the driver does not receive
        self.busy: set[str] = set()  # hosts that receive messages, and send no heartbeats
        self.lost: set[tuple[str, type]] = set()  # a worker, and a kind of message that it never receives
        self.driver = driver_for(settings_for(folder, hosts, **limits), self._dependencies())

    def _dependencies(self) -> Dependencies:
        loop = asyncio.get_running_loop()

        return Dependencies(
            server=self._make_server,
            locate=self.locate,
            agent_for=lambda spec, _local, _settings, *, number, on_stop, **_: self.agent(self, spec, on_stop, number),
            controller=lambda *_, **__: FakeController(self),
            clock=lambda most: Clock(most, monotonic=loop.time, boottime=loop.time),
        )

    async def locate(self, spec: HostSpec, launcher: str) -> tuple[str, str]:
        """Report each host as this machine."""
        return "127.0.0.1", ""

    def _make_server(self, _keys: object, on_message: Callable[[str, Any], None], *_: object) -> MemoryServer:
        self.server = MemoryServer(self, on_message)
        return self.server

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self.driver.serve())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._serving.done():
            self.driver.post(ev.StopRequested("the test is over", within=0.0))
            await self.advance_time(20.0)
        await self._serving

    @property
    def ended(self) -> bool:
        """Whether the driver has ended."""
        return self._serving.done()

    async def settle(self) -> None:
        """Let all messages and the answers to them arrive; the time does not change."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def advance_time(self, seconds: float) -> None:
        """Let time pass; hosts and workers that are not silent send heartbeats."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualTimeLoop)
        end = loop.now + seconds
        while loop.now < end:
            loop.now = min(end, loop.now + TIME_STEP)
            for peer in self.server.heard_at:
                if host_of(peer) not in self.silent | self.busy:
                    self.server.heard_at[peer] = loop.now
            await self.settle()

    def deliver(self, peer: str, message: messages.Message | ev.Event) -> None:
        """Send a message of this peer to the driver."""
        if host_of(peer) not in self.silent:
            self.server.heard_at[peer] = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(lambda: self.server.on_message(peer, message))

    def arrive(self, peer: str, message: messages.Message) -> None:
        """Deliver a message of the driver to its receiver, if the receiver is alive."""
        role, _, name = peer.partition("/")
        receiver = self.agents.get(peer) if role == "agent" else self.workers.get(WorkerId.parse(name))
        if receiver is not None and (name, type(message)) not in self.lost and host_of(peer) not in self.silent:
            receiver.receive(message)

    def submit(self, name: str = "job-1") -> JobRun:
        run = JobRun(name, worker_messages.Program(name, "", source="a cell"))
        self.driver.jobs.submit(run, SavedJob(name))
        return run

    def kill(self, w: str) -> None:
        """End the worker's process; its agent reports this."""
        worker = WorkerId.parse(w)
        next(agent for agent in self.agents.values() if agent.spec.name == worker.host and agent.is_alive).lose_worker(
            worker
        )

    def train(self, commits: int = 3) -> None:
        for worker in list(self.workers.values()):
            worker.train(commits)

    @property
    def ranks(self) -> list[str]:
        return [str(w) for w in self.driver.cluster.members] if self.driver.cluster.phase == "running" else []

    def kinds(self) -> list[str]:
        return [record.kind for record in self.driver.event_log.kept()[0]]


@asynccontextmanager
async def training(folder: Path, hosts: str, **limits: Any) -> AsyncIterator[DriverWithFakes]:
    """Start a job on all workers of these hosts; it has made no step yet."""
    async with DriverWithFakes(folder, hosts, **limits) as fakes:
        await fakes.advance_time(2.0)
        fakes.submit()
        await fakes.advance_time(2.0)
        yield fakes
