"""Which agents and workers of the previous driver are alive, and the cluster state with which the next driver goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.replay import TakenOver
from nbelastic.core.state import ClusterState, HostPhase
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.driver.event_log import EventLog
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import versions
from nbelastic.system.process_identity import is_alive

MIN_TIMEOUT = 3.0  # seconds within which live agents and workers must report; `silence` seconds if that is longer
REOPEN_TIMEOUT = 15.0  # seconds instead, if a tunnel has broken or ended: ssh has to reach the host again
TIMEOUT_PER_WORKER = 0.01  # seconds
CHECK_INTERVAL = 0.25  # seconds between checks whether agents and nodes have ended
Report = (
    agent_messages.AgentHello
    | EnvironmentReported
    | worker_messages.WorkerReport
    | worker_messages.WorkerHello
    | ev.WorkerFrozen
)


class TakeoverReports:
    """Collects the reports of agents and workers until all have reported or the time is up. Lives in the driver's thread.

    The external nodes of a script's round have to leave it first. This driver kills the other nodes, which breaks the collectives
    of those that are still inside; a torchrun without restarts would end for that.
    """

    def __init__(self, saved: DriverSnapshot, silence: float) -> None:
        tunnelled = [agent for agent in saved.agents.values() if agent.is_tunnelled]
        are_open = all(is_alive(agent.process) and not agent.disconnected for agent in tunnelled)
        self.timeout = max(silence, MIN_TIMEOUT if are_open else REOPEN_TIMEOUT)  # seconds for all reports
        self._complete = asyncio.Event()
        hosts = {host.spec.name for host in saved.cluster.hosts if host.spec.name in saved.agents}
        self.coming = hosts_with_queued_jobs(saved)  # hosts whose agents will report when they can
        self._missing_agents = hosts - self.coming
        self._inside = _external_nodes_inside(saved)  # with their processes, if they are on this machine
        self._missing_workers: dict[str, set[WorkerId]] = {}  # by host, for agents that have reported
        self.agents: dict[str, agent_messages.AgentHello] = {}
        self.workers: dict[WorkerId, worker_messages.WorkerReport] = {}
        self.later: list[ev.WorkerFrozen | EnvironmentReported] = []  # handled after the takeover

    def add(self, message: Report) -> None:
        """Take a report. The cost of a worker's report does not grow with the number of workers."""
        match message:
            case agent_messages.AgentHello(host=host, workers=workers):
                self.agents[host] = message
                self._missing_workers[host] = {w for w, _ in workers if w not in self.workers}
                reported = sum(len(agent.workers) for agent in self.agents.values())
                self.timeout = max(self.timeout, MIN_TIMEOUT + TIMEOUT_PER_WORKER * reported)
            case EnvironmentReported(host=host):  # it has no workers
                self.coming.add(host)
                self._missing_workers[host] = set()
                self.later.append(message)
            case worker_messages.WorkerReport(worker=w):
                host = w.host
                self.workers[w] = message
                self._missing_workers.get(host, set()).discard(w)
            case worker_messages.WorkerHello(worker=w):  # it has become ready since its report
                host = w.host
                if w in self.workers:
                    self.workers[w] = replace(self.workers[w], is_ready=True)
            case ev.WorkerFrozen(worker=w):  # a frozen worker cannot report
                host = w.host
                self.later.append(message)
                self._missing_workers.get(host, set()).discard(w)
        if not self._missing_workers.get(host, {host}):
            del self._missing_workers[host]
            self._missing_agents.discard(host)
            self._check_complete()

    def add_node_event(self, message: messages.Message | ev.Event) -> None:
        """Take a message of a script's node: has it left its round?"""
        if isinstance(message, sev.NodeReady | sev.NodeLeft):
            self._inside.pop(message.host, None)
            self._check_complete()

    def _check_complete(self) -> None:
        if not (self._missing_agents or self._missing_workers or self._inside):
            self._complete.set()

    def is_complete(self, has_agent: Callable[[str], bool]) -> bool:
        """Whether all have reported. Agents and nodes that have ended are not waited for."""
        self._missing_agents = set(filter(has_agent, self._missing_agents))
        self._inside = {host: process for host, process in self._inside.items() if not process or is_alive(process)}
        self._check_complete()
        return self._complete.is_set()

    async def wait(self, has_agent: Callable[[str], bool], now: Callable[[], float]) -> None:
        """Wait for all reports, or until the time is up. `now()`: the driver's time, which stands still while it does not run."""
        begun = now()
        while not self.is_complete(has_agent) and now() < begun + self.timeout:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), CHECK_INTERVAL)


def _external_nodes_inside(saved: DriverSnapshot) -> dict[str, str]:
    """The external nodes of the last round of a script that has not ended."""
    return dict(saved.job.external) if saved.job is not None and saved.job.over is None else {}


def hosts_with_queued_jobs(saved: DriverSnapshot) -> set[str]:
    """Hosts whose agent is a batch job that may not have begun."""
    starting = {host.spec.name for host in saved.cluster.hosts if host.phase is HostPhase.STARTING}
    return {host for host, agent in saved.agents.items() if agent.job and host in starting}


def resume_cluster(
    saved: DriverSnapshot, reports: TakeoverReports, now: float, event_log: EventLog
) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The cluster state according to the snapshot and the reports, and the first commands."""
    ours = versions.installed()
    problems = {host: versions.difference(agent.versions, ours) for host, agent in reports.agents.items()}
    workers, coming = tuple(reports.workers.values()), tuple(sorted(reports.coming))
    taken_over = TakenOver(versions.nbelastic_version(), saved.cluster, reports.agents, workers, problems, coming)
    event_log.note(taken_over, now)
    return taken_over.resume(now)
