"""The rim of the driver: agents, engines and the link, as the core's commands need them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.errors import HostError
from nbelastic.driver.launchers import LocalAgent, address_of
from nbelastic.driver.run import Run
from nbelastic.driver.status import Live
from nbelastic.link import Hub, Keys

if TYPE_CHECKING:
    from nbelastic.driver.driver import Settings
    from nbelastic.driver.engines import Engines

LEASE = 8.0  # seconds without the driver after which an agent on another machine ends
NCCL = {  # before torch is imported: aborting NCCL from another thread needs its watchdog out of the way (torch's sources)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


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


class Fleet:
    """Lives in the driver's thread; `post` puts events into its inbox."""

    def __init__(self, settings: Settings, hub: Hub, keys: Keys, post: Callable[[m.Event], None]) -> None:
        self._settings, self._hub, self._keys, self._post = settings, hub, keys, post
        self._loop = asyncio.get_running_loop()
        self._agents: dict[str, LocalAgent] = {}
        self._slots: dict[str, int] = {}  # of each agent's host
        self._engine_of: dict[m.WorkerId, str] = {}
        self._worker_of: dict[str, m.WorkerId] = {}
        self._setup_started: set[m.WorkerId] = set()
        self._spawns: list[tuple[m.WorkerId, Path]] = []  # wait for the controller
        self._programs: dict[m.WorkerId, Run] = {}
        self._engines: Engines | None = None
        self._starting: asyncio.Task[None] | None = None
        self.setup_cells: list[str] = []
        self.live = Live(log_dir=str(settings.log_dir))
        self.pace = Pace()

    async def stop(self) -> None:
        """End every agent and the controller."""
        for agent in self._agents.values():
            agent.kill()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._engines is not None:
            await self._engines.stop()

    def do(self, command: m.StartAgent | m.StopAgent | m.StartWorker | m.StopWorker, log_dir: Path) -> None:
        match command:
            case m.StartAgent(host=spec):
                self._start_agent(spec)
            case m.StopAgent(host=host):
                heard = f"agent/{host}" in self._hub.heard_at
                self._hub.send(f"agent/{host}", wire.Retire())
                # One that has not spoken yet has no workers, and may not be there to hear it.
                self._loop.call_later(3.0 if heard else 0.0, self._end_agent, host, self._agents.get(host))
            case m.StartWorker(worker=w):
                if self._engines is None or not self._engines.connection:
                    self._spawns.append((w, log_dir))
                else:
                    self._spawn(w, log_dir)
            case m.StopWorker(worker=w, kill=kill):
                self._hub.send(f"agent/{w.host}", wire.Reap(w, kill))

    def _start_agent(self, spec: m.HostSpec) -> None:
        try:
            address = address_of(spec)
        except HostError as error:
            self._post(m.AgentLost(spec.name, str(error)))
            return
        self.live.addresses[spec.name] = address
        old = self._agents.pop(spec.name, None)
        if old is not None:
            old.kill()
        self._slots[spec.name] = spec.slots  # they share this machine's cores
        agent = LocalAgent(spec.name, self._settings.run_dir, lambda code: self._agent_stopped(spec.name, agent, code))
        self._agents[spec.name] = agent
        config = {
            "host": spec.name,
            "driver": self._hub.address,
            "keys": msgspec.to_builtins(self._keys.for_clients()),
            "driver_pid": os.getpid(),
            "lease": LEASE,
            "address": address,
            "path": list(sys.path),
            "preload": list(self._settings.preload),
            "settings": {
                "backend": self._settings.backend,
                "slots": str(spec.slots),
                "threads": str(max(1, (os.cpu_count() or 1) // sum(self._slots.values()))),
            },
        }
        self._hub.heard_at.pop(f"agent/{spec.name}", None)
        agent.start(config, {**NCCL, **self._settings.environment})
        if self._starting is None:  # after the agent: its template needs longer than the controller
            self._starting = self._loop.create_task(self._start_engines())

    async def _start_engines(self) -> None:
        from nbelastic.driver.engines import Engines

        self._engines = Engines(str(self._settings.run_dir / "ipython"), self._settings.name, self._engine_registered)
        try:
            await self._engines.start()
        except Exception as error:  # noqa: BLE001  (whatever it is, there will be no cluster)
            self._post(m.StopRequested(f"ipyparallel's controller could not be started: {error}"))
            return
        for w, log_dir in self._spawns:
            self._spawn(w, log_dir)
        self._spawns.clear()

    def _spawn(self, w: m.WorkerId, log_dir: Path) -> None:
        assert self._engines is not None
        self._hub.send(f"agent/{w.host}", wire.Spawn(w, str(log_dir), self._engines.connection))

    def _agent_stopped(self, host: str, agent: LocalAgent, code: int | None) -> None:
        if self._agents.get(host) is not agent:
            return
        del self._agents[host]
        self._slots.pop(host, None)
        self._hub.forget(f"agent/{host}")
        said = agent.output()
        self._post(m.AgentLost(host, f"its agent ended with exit code {code}" + (f": {said}" if code and said else "")))

    def _end_agent(self, host: str, agent: LocalAgent | None) -> None:
        if agent is not None and self._agents.get(host) is agent:
            agent.kill()

    def kill_agent(self, host: str) -> None:
        """It is taken for lost: make sure that it is."""
        agent = self._agents.pop(host, None)
        self._slots.pop(host, None)
        self._hub.forget(f"agent/{host}")
        if agent is not None:
            agent.kill()

    def begin_job(self) -> None:
        """What was measured belongs to the job before."""
        self.pace = Pace()
        self.live.step, self.live.report, self.live.steps_per_second = 0, {}, None

    def to_workers(self, workers: Iterable[m.WorkerId], message: wire.Message) -> None:
        for w in workers:
            self._hub.send(f"worker/{w}", message)

    def hello(self, w: m.WorkerId, engine: str) -> None:
        """A worker says which engine it is."""
        self._engine_of[w], self._worker_of[engine] = engine, w
        self._begin_setup(w)

    def _engine_registered(self, engine: str) -> None:
        w = self._worker_of.get(engine)
        if w is not None:
            self._begin_setup(w)

    def _begin_setup(self, w: m.WorkerId) -> None:
        assert self._engines is not None
        if self._engines.knows(self._engine_of[w]) and w not in self._setup_started:
            self._setup_started.add(w)
            self._set_up(w, 0)

    def _set_up(self, w: m.WorkerId, done: int) -> None:
        """Run the setup cells from number `done` on, then call the worker ready."""
        if w not in self._setup_started:
            return
        if done == len(self.setup_cells):
            self._post(m.WorkerRegistered(w))
            return

        def then(result: Any) -> None:
            error = error_of(result)
            if error:
                self._post(m.WorkerRegistered(w, error))
            else:
                self._set_up(w, done + 1)

        self.execute(w, self.setup_cells[done], then)

    def execute(self, w: m.WorkerId, source: str, done: Callable[[Any], None]) -> None:
        """Run a cell on one worker; `done(AsyncResult)` is called in this thread."""
        assert self._engines is not None
        self._engines.execute(self._engine_of[w], source, done)

    def run_program(
        self, w: m.WorkerId, run: Run, ended: Callable[[m.WorkerId, Run, tuple[str, Any, str]], None]
    ) -> None:
        assert self._engines is not None
        self._programs[w] = run
        log_dir = str(self._settings.log_dir / run.name)

        def done(outcome: tuple[str, Any, str]) -> None:
            ended(w, run, outcome)

        engine = self._engine_of[w]
        if run.cell is not None:
            self._engines.run_cell(engine, run.name, log_dir, run.cell, done)
        else:
            self._engines.run_function(engine, run.name, log_dir, run.call, done)

    def program_of(self, w: m.WorkerId) -> Run | None:
        """The run whose program it has, or had last: its last words may come after its end."""
        return self._programs.get(w)

    def keep_only(self, workers: Collection[m.WorkerId]) -> None:
        """Forget what was known of workers that are gone."""
        for w in [w for w in self._engine_of if w not in workers]:
            engine = self._engine_of.pop(w)
            self._worker_of.pop(engine, None)
            self._setup_started.discard(w)
            if self._engines is not None:
                self._engines.forget(engine)
            self._hub.forget(f"worker/{w}")
            self.live.steps.pop(w, None)
            self.live.worker_samples.pop(str(w), None)
            self._programs.pop(w, None)

    @property
    def client(self) -> Any:
        """ipyparallel's client, for `%px`; None before the controller is up."""
        return self._engines.client if self._engines is not None else None


def error_of(result: Any) -> str:
    """The error of an executed cell in one line, or nothing."""
    try:
        result.get(timeout=0)
    except Exception as error:  # noqa: BLE001  (the user's own error, whatever it is)
        name = getattr(error, "ename", type(error).__name__)
        return f"{name}: {getattr(error, 'evalue', error)}"
    return ""
