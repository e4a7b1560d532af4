"""The rim of the driver: agents, the controller and the link, as the core's commands need them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.driver.clock import Clock
from nbelastic.driver.parts import Controller, Parts, Transport
from nbelastic.driver.results import Outcome, Results
from nbelastic.driver.run import Run
from nbelastic.driver.snapshot import Saved, SavedAgent
from nbelastic.driver.telemetry import Telemetry
from nbelastic.errors import HostError
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.cells import Executed, row
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.settings import NCCL
from nbelastic.provision.launchers import AdoptedAgent, Agent, BatchJobAgent
from nbelastic.provision.tcp_proxy import Doors
from nbelastic.system import pickling
from nbelastic.system.files import make_private
from nbelastic.system.folders import batch_folder
from nbelastic.system.supervise import Report
from nbelastic.transport.keys import Keys

if TYPE_CHECKING:
    from nbelastic.protocol.settings import Settings

GATES = 0.5  # seconds between looks at the gates


class Pace:
    """Steps per second over the last seconds."""

    def __init__(self, window: float = 5.0) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._window = window

    def rate(self, now: float, steps: int) -> float | None:
        if self._seen and steps < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, steps))
        while now - self._seen[0][0] > self._window:
            self._seen.popleft()
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end - start >= 0.2 else None  # two messages at once say nothing


class _Held:
    """One start of an agent: who it is on the link, and, once it is known where the host is, its process."""

    def __init__(self, host: str, number: int) -> None:
        self.number = number
        self.peer = f"agent/{host}~{number}"
        self.agent: Agent | None = None
        self.here = ""  # this machine's address towards a host that is not local
        self.asked = 0  # how many workers it may run
        self.slots = 0  # of a local one
        self.move: messages.Rehome | None = None  # where its workers are since they no longer are where it began
        self.launching: asyncio.Task[None] | None = None

    def kill(self) -> None:
        if self.launching is not None:
            self.launching.cancel()
        if self.agent is not None:
            self.agent.kill()


class Fleet:
    """Lives in the driver's thread; `post` puts events into its inbox."""

    def __init__(
        self,
        settings: Settings,
        server: Transport,
        keys: Keys,
        clock: Clock,
        parts: Parts,
        *,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        report: Report,
        save: Callable[[], None],
    ) -> None:
        self._clock, self._parts = clock, parts
        self._settings, self._server, self._keys, self._post, self._record = settings, server, keys, post, record
        self._report, self._save = report, save
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, _Held] = {}  # by host
        self._started = 0
        self._expected: dict[str, float] = {}  # peers of another driver that were not heard yet, and since when
        self._doors = Doors(settings.presence, self._workers_asked)
        self.engines: dict[WorkerId, str] = {}  # how ipyparallel's client names those that can be spoken to
        self.results = Results(settings.run_dir / "results", lambda w, message: self.to_workers((w,), message))
        self._cells: dict[
            tuple[WorkerId, int], Callable[[worker_messages.CellResult], None]
        ] = {}  # that are not answered
        self._numbers = itertools.count(time.time_ns())  # of cells: no other driver's cell has the same
        self.setup_rows: dict[int, dict[WorkerId, Executed]] = {}  # of versions for which somebody waits
        self._spawns: list[tuple[WorkerId, Path]] = []  # wait for the controller
        self._controller: Controller | None = None
        self._starting: asyncio.Task[None] | None = None
        self._trouble = ""  # why the controller failed, as it was recorded last
        self.live = Telemetry(log_dir=str(settings.log_dir))
        self.pace = Pace()

    async def stop(self) -> None:
        """End every agent and the gates."""
        begun = [
            task for task in (self._starting, *(held.launching for held in self._held.values())) if task is not None
        ]
        for held in self._held.values():
            held.kill()
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        self._doors.close()
        shutil.rmtree(batch_folder(self._settings.name, self._settings.number), ignore_errors=True)

    async def stop_controller(self) -> None:
        """The last of all: if this process is killed before, the controller removes what it leaves."""
        if self._controller is not None:
            await self._controller.stop()

    async def adopt(self, saved: Saved) -> None:
        """What another driver has started. Whatever of it is gone is said by events."""
        self._started = saved.started
        self._doors.adopt(saved.doors, saved.gates)
        for host, old in saved.agents.items():
            held = self._held[host] = _Held(host, old.number)
            held.here, held.move = old.here, old.move
            held.asked = next((h.spec.slots for h in saved.cluster.hosts if h.spec.name == host), 0)
            held.slots = 0 if old.here else held.asked
            stopped = partial(self._agent_stopped, host, held)
            if old.job:
                held.agent = batch = BatchJobAgent(host, self._settings, stopped, old.number)
                batch.adopt(old.job)
            else:
                held.agent = AdoptedAgent(old.process, stopped)
                held.agent.start({})
        if saved.agents:
            self._starting = self._loop.create_task(self._start_controller(attach=bool(saved.controller)))
            await self._starting

    def agents(self) -> dict[str, SavedAgent]:
        """Those that run, for another driver."""
        return {
            host: SavedAgent(held.number, held.agent.process, held.here, held.move, held.agent.job)
            for host, held in self._held.items()
            if held.agent is not None
        }

    @property
    def started(self) -> int:
        """How many agents so far."""
        return self._started

    @property
    def doors(self) -> Doors:
        return self._doors

    @property
    def controller(self) -> str:
        """Its process, as `pid@start`; empty if there is none yet."""
        return self._controller.process if self._controller is not None else ""

    async def look_after_jobs(self) -> None:
        """How do the batch jobs stand whose agents have not spoken yet? One that has failed says so then."""
        self.live.jobs = {
            host: await held.agent.state()
            for host, held in list(self._held.items())
            if isinstance(held.agent, BatchJobAgent) and held.peer not in self._server.heard_at
        }

    async def look_after_gates(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(GATES)
            for address in self._doors.mend():
                text = f"the gate at {address} had ended or was stopped, and was started again"
                self._record(cmd.Record("gate-started", text))

    def do(self, command: cmd.StartAgent | cmd.StopAgent | cmd.StartWorker | cmd.StopWorker, log_dir: Path) -> None:
        match command:
            case cmd.StartAgent(host=spec):
                self._start_agent(spec)
            case cmd.StopAgent(host=host):
                held = self._held.get(host)
                if held is not None:
                    heard = held.peer in self._server.heard_at
                    self._server.send(held.peer, agent_messages.StopAgent())
                    if heard:
                        self._loop.call_later(3.0, self._end, host, held)
                    else:  # it has no workers, and may not be there to hear it; at once: the host may be added again
                        self._end(host, held)
            case cmd.StartWorker(worker=w):
                if self._controller is None or not self._controller.connection:
                    self._spawns.append((w, log_dir))
                else:
                    self._spawn(w, log_dir)
            case cmd.StopWorker(worker=w, kill=kill):
                self.to_agent(w.host, agent_messages.StopWorker(w, kill))

    def to_agent(self, host: str, message: messages.Message) -> None:
        """A host without one does not get it."""
        if host in self._held:
            self._server.send(self._held[host].peer, message)

    def lead(self, here: str, endpoint: str) -> str:
        """Where other machines, to which this one is `here`, come to one of its loopback endpoints."""
        return self._doors.lead(here, endpoint)

    def here_towards(self, host: str) -> str:
        """Where a host on another machine comes to this one; empty if it is on this one."""
        return self._held[host].here if host in self._held else ""

    def peer_of(self, host: str) -> str:
        """How the host's present agent is named on the link; empty if it has none."""
        return self._held[host].peer if host in self._held else ""

    def quiet_for(self, who: str | WorkerId) -> float:
        """Seconds since this host's agent, or this worker, was heard; 0 if it has said nothing yet."""
        peer = self.peer_of(who) if isinstance(who, str) else f"worker/{who}"
        heard_at = self._server.heard_at.get(peer, self._expected.get(peer))
        return self._clock.silence(heard_at) if heard_at is not None else 0.0

    def expect(self, w: WorkerId) -> None:
        """It runs, and has not spoken to this driver: from now on its silence counts."""
        self._expected[f"worker/{w}"] = time.monotonic()

    def pass_on(self, command: cmd.Probe | cmd.Rehome, workers: Iterable[WorkerId]) -> None:
        """What an agent is to do, and of a move what the workers of its host need to know."""
        if isinstance(command, cmd.Probe):
            probe = agent_messages.Probe(command.target, command.addresses, command.port, command.number)
            self.to_agent(command.host, probe)
            return
        move = messages.Rehome(command.address, command.interface)
        if command.host in self._held:
            self._held[command.host].move = move
        self.to_agent(command.host, move)
        self.to_workers([w for w in workers if w.host == command.host], move)

    def _start_agent(self, spec: HostSpec) -> None:
        self.kill_agent(spec.name)
        self._started += 1
        held = self._held[spec.name] = _Held(spec.name, self._started)
        held.asked = spec.slots
        self._save()  # its number: an agent that this driver can no more save is not to have that of another one
        held.launching = self._loop.create_task(self._launch(spec, held, self._started))

    async def _launch(self, spec: HostSpec, held: _Held, number: int) -> None:
        """Find out where the host is and start its agent there."""
        try:
            local, held.here = await self._parts.locate(spec, self._settings.launcher)
            if local:
                held.slots = spec.slots  # they share this machine's cores
                threads = str(max(1, (os.cpu_count() or 1) // sum(each.slots for each in self._held.values())))
                driver = self._server.address
            else:
                threads, driver = "", self._doors.lead(held.here, self._server.address)
            stopped = partial(self._agent_stopped, spec.name, held)
            agent = self._parts.agent_for(spec, local, self._settings, stopped, number)
            agent.start({**self._config(spec, local, number), "driver": driver, "threads": threads})
        except Exception as error:  # noqa: BLE001  (no ssh here, or whatever a launcher raises: the host shows it)
            held.launching = None
            self._agent_stopped(spec.name, held, f"its agent cannot be started: {error}")
            return
        held.agent, held.launching = agent, None
        self._save()  # it has a process that outlives this one
        if self._starting is None:  # after the agent: its template needs longer than the controller
            self._starting = self._loop.create_task(self._start_controller())

    def _config(self, spec: HostSpec, local: str, number: int) -> dict[str, Any]:
        settings = self._settings
        return {
            "host": spec.name,
            "number": number,
            "keys": msgspec.to_builtins(self._keys.for_clients()),
            "presence": settings.presence if local else None,
            "lease": settings.lease,
            "heartbeat": settings.heartbeat,
            "address": local,
            "nics": settings.nics,
            "path": list(sys.path) if local else [],
            "run_dir": str(settings.run_dir) if local else "",
            "log_dir": str(settings.log_dir),
            "preload": list(settings.preload),
            "environment": {**NCCL, **settings.environment},
            "cwd": settings.cwd or "",
            "settings": {"backend": settings.backend, "slots": str(spec.slots)},
        }

    def _workers_asked(self) -> int:
        """For how many workers there are hosts, or how many there may be if that is less."""
        return int(min(self._settings.limits.wanted, sum(held.asked for held in self._held.values())))

    async def _start_controller(self, *, attach: bool = False) -> None:
        """Start ipyparallel's controller, or take the one over that an earlier driver has started."""
        settings = self._settings
        self._controller = self._parts.controller(
            settings.run_dir / "ipython",
            settings.name,
            settings.silence,
            settings.presence,
            on_again=self._controller_came_again,
            on_trouble=self._controller_fails,
            most=self._workers_asked(),
            report=self._report,
        )
        try:
            await (self._controller.attach() if attach else self._controller.start())
        except Exception as error:
            if attach:  # there is a cluster, and it is not to end for that
                raise HostError(f"ipyparallel's controller cannot be started ({error}): attach again.") from error
            self._post(ev.StopRequested(f"ipyparallel's controller could not be started: {error}"))
            return
        self._save()
        for w, log_dir in self._spawns:
            self._spawn(w, log_dir)
        self._spawns.clear()

    def _spawn(self, w: WorkerId, log_dir: Path) -> None:
        assert self._controller is not None
        held = self._held.get(w.host)
        if held is not None:
            connection = self._doors.lead_engines(held.here, self._controller.connection)
            self._server.send(held.peer, agent_messages.Spawn(w, str(log_dir), connection))

    def _end(self, host: str, held: _Held) -> None:
        held.kill()
        if held.agent is None:
            self._agent_stopped(host, held, "it was not started")

    def _agent_stopped(self, host: str, held: _Held, why: str) -> None:
        if self._held.get(host) is held:
            del self._held[host]
            self.live.host_samples.pop(host, None)
            self._server.forget(held.peer)
            self._post(ev.AgentLost(host, why, number=held.number))

    def lose_agent(self, host: str, why: str, quiet: float = 0.0) -> None:
        """It is gone, or of no use: end it, and say so."""
        number = self._held[host].number if host in self._held else 0
        self.kill_agent(host)
        self._post(ev.AgentLost(host, why, quiet, number))

    def has_another(self, lost: ev.AgentLost) -> bool:
        """Whether this host's agent was started again before the loss of the one before was decided on."""
        return lost.number > 0 and lost.host in self._held and self._held[lost.host].number != lost.number

    def kill_agent(self, host: str) -> None:
        """It is taken for lost: make sure that it is."""
        held = self._held.pop(host, None)
        self.live.host_samples.pop(host, None)
        if held is not None:
            self._server.forget(held.peer)
            held.kill()

    def begin_job(self, job: str, last_generation: int) -> None:
        """What was measured, and what is heard of generations up to `last_generation`, belongs to the job before."""
        self.pace = Pace()
        self.live.begin_job(last_generation)
        with contextlib.suppress(OSError):  # without it results are fetched
            make_private(self.results.folder(job))

    def to_workers(self, workers: Iterable[WorkerId], message: messages.Message) -> None:
        self._server.send_to_all((f"worker/{w}" for w in workers), message)

    def hello(self, w: WorkerId, engine: str) -> None:
        """A worker says that it can run programs and cells, and which engine it is."""
        self.engines[w] = engine
        held = self._held.get(w.host)
        if held is not None and held.move is not None:  # it may have come between its fork and its first word
            self._server.send(f"worker/{w}", held.move)
        self._post(ev.WorkerRegistered(w))

    def _controller_fails(self, why: str) -> None:
        if why != self._trouble:
            self._trouble = why
            self._record(
                cmd.Record("controller-failed", f"ipyparallel's controller fails, and nbelastic starts it again: {why}")
            )

    def _controller_came_again(self) -> None:
        self._record(cmd.Record("controller-started", "ipyparallel's controller had ended; it was started again"))

    def run_setup(self, w: WorkerId, version: int, source: str) -> None:
        """Run a setup cell on one worker."""

        def done(result: worker_messages.CellResult) -> None:
            if version in self.setup_rows:
                self.setup_rows[version][w] = row(result)
            self._post(ev.SetupEnded(w, version, result.error))

        self.execute(w, source, done, version)

    def execute(
        self, w: WorkerId, source: str, done: Callable[[worker_messages.CellResult], None], number: int | None = None
    ) -> None:
        """Run a cell on one worker; `done(result)` is called in this thread, unless the worker dies before."""
        number = number or next(self._numbers)
        self._cells[w, number] = done
        self.to_workers((w,), worker_messages.Cell(number, source))

    def cell_ended(self, result: worker_messages.CellResult) -> None:
        """What a cell printed, and its error. That of an earlier driver's nobody waits for."""
        done = self._cells.pop((result.worker, result.number), None)
        if done is not None:
            done(result)

    def run_program(self, w: WorkerId, run: Run, ended: Callable[[WorkerId, str, Outcome], None]) -> None:
        """Have a worker run the program; `ended` is called in a later turn if it is not there any more."""
        program = run.program
        if program is None or (program.call is not None and not _is_whole(program.call)):
            error = Outcome(f"the saved program of {run.name} is missing or damaged: run it again")
            self._loop.call_soon(ended, w, run.name, error)
            return
        call, results = program.call, str(self.results.folder(run.name))
        if w.host not in self._held or self._held[w.host].here:  # another machine, which sees no file of this one
            results = ""
            call = messages.Blob(call.size, call.data) if call is not None else None
        log_dir = str(self._settings.log_dir / run.name)
        self.to_workers((w,), replace(program, log_dir=log_dir, call=call, results=results))

    def send_call(self, fetch: worker_messages.FetchCall, run: Run) -> None:
        """The next pieces of a program that is too long for one message."""
        call = run.program.call if run.program is not None else None
        if call is not None and call.path:
            for at, data in pickling.pieces(pickling.mapped(Path(call.path)), fetch.offset):
                self.to_workers((fetch.worker,), worker_messages.CallPiece(fetch.job, at, data))

    def forget_all(self, workers: Iterable[WorkerId]) -> None:
        """Forget what was known of workers that are gone."""
        gone = frozenset(workers)
        self.results.forget(gone)
        for cell in [cell for cell in self._cells if cell[0] in gone]:
            del self._cells[cell]
        for w in gone:
            self.engines.pop(w, None)
            self._server.forget(f"worker/{w}")
            self._expected.pop(f"worker/{w}", None)
            self.live.steps.pop(w, None)
            self.live.worker_samples.pop(str(w), None)
            self.live.computed_at.pop(str(w), None)
            self.live.blocked.pop(str(w), None)
            self.live.stacks.pop(w, None)

    @property
    def information(self) -> dict[str, Any] | None:
        """How a client comes to ipyparallel's controller; None before that is up."""
        if self._controller is None or not self._controller.connection:
            return None
        return self._controller.information("client")


def _is_whole(call: messages.Blob) -> bool:
    """Whether the file of a call, if it is in one, is there as it was written."""
    try:
        return not call.path or os.path.getsize(call.path) == call.size
    except OSError:
        return False
