"""Who lives of a cluster whose driver is gone."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from nbelastic.core import commands as cmd
from nbelastic.core import recovery
from nbelastic.core.state import ClusterState, HostPhase
from nbelastic.driver.snapshot import Saved
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import versions
from nbelastic.system.presence import lives

PATIENCE = (
    3.0  # seconds that agents and workers whose processes live may take to say where they are, and `silence` at least
)
A_WORKER = 0.01  # seconds that each worker adds to that
LOOK = 0.25  # seconds between looks at whether agents' processes still live


class Arrivals:
    """Who has said who it is, until all have, or have had their time. Lives in the driver's thread."""

    def __init__(self, saved: Saved, silence: float) -> None:
        self._saved, self._patience = saved, max(silence, PATIENCE)
        self._complete = asyncio.Event()
        self._hosts = {host.spec.name for host in saved.cluster.hosts if host.spec.name in saved.agents} - coming(saved)
        self._missing: dict[str, set[WorkerId]] = {}  # by the hosts whose agents were heard
        self.agents: dict[str, agent_messages.AgentHello] = {}
        self.workers: dict[WorkerId, worker_messages.WorkerReport] = {}
        self.frozen: list[ev.WorkerFrozen] = []  # are taken in when the driver has taken over

    def hear(self, message: agent_messages.AgentHello | worker_messages.WorkerReport | ev.WorkerFrozen) -> None:
        """What a message costs does not grow with the number of workers."""
        match message:
            case agent_messages.AgentHello(host=host, workers=workers):
                self.agents[host] = message
                self._missing[host] = {w for w, _ in workers if w not in self.workers}
                self._patience = max(
                    self._patience, PATIENCE + A_WORKER * sum(len(a.workers) for a in self.agents.values())
                )
            case worker_messages.WorkerReport(worker=w):
                host = w.host
                self.workers[w] = message
                self._missing.get(host, set()).discard(w)
            case ev.WorkerFrozen(worker=w):  # it will not say anything
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
    starting = {host.spec.name for host in saved.cluster.hosts if host.phase is HostPhase.STARTING}
    return {host for host, agent in saved.agents.items() if agent.job and host in starting}


def cluster_of(saved: Saved, arrivals: Arrivals, now: float) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """All who live have spoken: this is the world, and what is to be done first."""
    ours = versions.here()
    problems = {host: versions.difference(agent.versions, ours) for host, agent in arrivals.agents.items()}
    agents, workers = arrivals.agents, arrivals.workers
    return recovery.resume(saved.cluster, agents, workers, now, problems=problems, coming=coming(saved))
