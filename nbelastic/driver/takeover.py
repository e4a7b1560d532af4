"""Taking a cluster over whose driver is gone."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbelastic import versions
from nbelastic.core import messages as m
from nbelastic.core import takeover, wire
from nbelastic.core.world import HostPhase, World
from nbelastic.driver.run import Run
from nbelastic.driver.saved import Saved, SavedJob
from nbelastic.presence import lives

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver

PATIENCE = (
    3.0  # seconds that agents and workers whose processes live may take to say where they are, and `silence` at least
)
A_WORKER = 0.01  # seconds that each worker adds to that
LOOK = 0.25  # seconds between looks at whether agents' processes still live
LATE = 5.0  # seconds within which the results of a job that is over are there


class Arrivals:
    """Who has said who it is, until all have, or have had their time. Lives in the driver's thread."""

    def __init__(self, saved: Saved, silence: float) -> None:
        self._saved, self._patience = saved, max(silence, PATIENCE)
        self._complete = asyncio.Event()
        self._hosts = {host.spec.name for host in saved.world.hosts if host.spec.name in saved.agents} - coming(saved)
        self._missing: dict[str, set[m.WorkerId]] = {}  # by the hosts whose agents were heard
        self.agents: dict[str, wire.AgentHello] = {}
        self.workers: dict[m.WorkerId, wire.WorkerHere] = {}
        self.frozen: list[m.WorkerFroze] = []  # are taken in when the driver has taken over

    def hear(self, message: wire.AgentHello | wire.WorkerHere | m.WorkerFroze) -> None:
        """What a message costs does not grow with the number of workers."""
        match message:
            case wire.AgentHello(host=host, workers=workers):
                self.agents[host] = message
                self._missing[host] = {w for w, _ in workers if w not in self.workers}
                self._patience = max(
                    self._patience, PATIENCE + A_WORKER * sum(len(a.workers) for a in self.agents.values())
                )
            case wire.WorkerHere(worker=w):
                host = w.host
                self.workers[w] = message
                self._missing.get(host, set()).discard(w)
            case m.WorkerFroze(worker=w):  # it will not say anything
                host = w.host
                self.frozen.append(message)
                self._missing.get(host, set()).discard(w)
        if not self._missing.get(host, {host}):
            del self._missing[host]
            self._hosts.discard(host)
            self._look()

    def _look(self) -> None:
        if not self._hosts and not self._missing:
            self._complete.set()

    async def wait(self) -> None:
        """The patience grows with the number of workers; agents whose processes have ended are not waited for."""
        begun = time.monotonic()
        while not self._complete.is_set() and time.monotonic() < begun + self._patience:
            agents = self._saved.agents
            self._hosts -= {host for host in self._hosts if agents[host].process and not lives(agents[host].process)}
            self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), LOOK)


def coming(saved: Saved) -> set[str]:
    """Hosts whose agents have a job that may not have begun."""
    starting = {host.spec.name for host in saved.world.hosts if host.phase is HostPhase.STARTING}
    return {host for host, agent in saved.agents.items() if agent.job and host in starting}


def take_over(driver: Driver, saved: Saved, arrivals: Arrivals) -> None:
    """All who live have spoken: this is the world."""
    now = driver.clock.now()
    ours = versions.here()
    on_the_way = coming(saved)
    driver.world, commands = takeover.resume(
        saved.world,
        arrivals.agents,
        arrivals.workers,
        now,
        problems={host: versions.difference(agent.versions, ours) for host, agent in arrivals.agents.items()},
        coming=on_the_way,
    )
    driver.record(m.Record("driver-came", f"driver {saved.term + 1} has taken over (process {os.getpid()})"))
    for here in arrivals.workers.values():
        if here.worker in driver.world.workers:
            driver.find(here)
    for w in driver.world.workers:
        if w not in arrivals.workers:
            driver.fleet.expect(w)
    for host in saved.agents:
        if host not in arrivals.agents and host not in on_the_way:
            driver.fleet.kill_agent(host)
    driver.carry_out(commands, now)
    for event in arrivals.frozen:
        driver.take_in(event)
    if saved.job is not None and saved.job.script is not None:
        _go_on_with_script(driver, saved.job, arrivals)
    job = driver.world.job
    if saved.job is not None and saved.job.script is None and (job is None or job.name != saved.job.name):
        driver.take_in(m.JobSubmitted(saved.job.name))  # the last driver was killed before it had begun it
    elif job is not None and job.name in driver.runs:
        run = driver.runs[job.name]
        those = [w for w, here in arrivals.workers.items() if here.job == job.name and w in driver.world.workers]
        if job.outcome:
            _end_again(driver, run, those, m.EndJob(job.name, job.outcome, job.reason, job.ranks))


def _go_on_with_script(driver: Driver, job: SavedJob, arrivals: Arrivals) -> None:
    """It has ended, while a driver was there or well without one; or it begins again."""
    codes = [
        arrivals.agents[host].ended.get(node) if host in arrivals.agents else None for host, node in job.nodes.items()
    ]
    if job.over is None and codes and all(code == 0 for code in codes):
        job = replace(
            job, over=m.EndJob(job.name, "succeeded", "every worker ended well, while no driver was there", ())
        )
        if driver.notes is not None:
            driver.notes.job_goes_on(over=job.over)
    if job.over is not None:
        driver.runs[job.name].end(job.over)
    else:
        nodes = {host: agent.nodes for host, agent in arrivals.agents.items()}
        driver.scripts.begin_again(driver.runs[job.name], job, nodes)


def _end_again(driver: Driver, run: Run, workers: list[m.WorkerId], over: m.EndJob) -> None:
    """The job was over when the last driver ended: its workers tell this one as well how their programs ended."""

    def told(world: World) -> bool | None:
        return True if all(w in run.outcomes or w not in world.workers for w in workers) else None

    all_told: Future[bool] = Future()
    all_told.add_done_callback(lambda _: run.end(over))

    def give_up() -> None:
        if driver.fleet.results.coming(workers):
            asyncio.get_running_loop().call_later(LATE, give_up)
        else:
            run.end(over)

    driver.pending.resolve(all_told, told)
    asyncio.get_running_loop().call_later(LATE, give_up)
