"""A whole cluster in virtual time: the real core and the real commands to messages, agents and workers; faults and users.

It checks the core's invariants after each decision. No commit may be made twice or lost, and at the end a world must train.
It leaves out the link's repeats (`transport.delivery`) and torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbelastic.core import commands as cmd
from nbelastic.core.reasons import in_words
from nbelastic.core.state import ClusterState, Stage
from nbelastic.core.step import deadline, step
from nbelastic.driver.command_executor import CommandExecutor
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER, Limits
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.worker.formation import Formation
from tests.core.invariants import check
from tests.core.repeats import step_both_ways
from tests.simulation.clock import Clock
from tests.simulation.drivers import Drivers
from tests.simulation.groups import Groups
from tests.simulation.host import Agent
from tests.simulation.liveness import Liveness
from tests.simulation.network import DRIVER, HEARTBEAT, NOTICED, Network
from tests.simulation.worker import Worker

AGENT_START = (0.3, 1.5)  # seconds
LOSSES = ("world-broken", "worker-lost", "host-lost")
SETTLE = 60.0  # seconds in which the driver finds out what earlier faults have done
BOTH_WAYS = 4  # of so many decisions one is compared with one that is made together with others
CALM = 40.0  # seconds without faults, at the end


class Nothing:
    """Stands for a part of the driver that decides nothing: it takes every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class World:
    """`hosts`: with their slots, as `a:2`. The cluster is started with them, and a job is submitted."""

    def __init__(self, seed: int, hosts: Iterable[str], **limits: Any) -> None:
        self.rng = random.Random(seed)
        self.clock, self.seed = Clock(), seed
        self.network = Network(self.clock, self.rng)
        self.groups = Groups(self.network)
        self.transfers: dict[int, dict[str, Any]] = {}  # by generation
        self.cluster = self._before = ClusterState(Limits(**limits))  # `_before`: the last decision
        self.log: list[tuple[float, str]] = []
        self.events: list[tuple[float, ev.Event]] = []
        self.agents: dict[str, Agent] = {}  # the newest of each host, as the driver knows it
        self.running: dict[str, list[Agent]] = {}  # on each machine
        self.down: set[str] = set()  # machines that are off
        self._addresses: dict[str, str] = {}
        self._clocks: dict[str, float] = {}  # seconds by which that of a machine is ahead
        self._agents_started = 0
        self._deadline: Any = None
        self._at_once = 0  # deadlines in a row that have elapsed already, as an end that is announced too late has
        self.liveness = Liveness(self)
        self.drivers = Drivers(self)
        self.trained: dict[tuple[str, int], int] = {}  # by job and commit: in which generation it was made last
        self.jobs = 1
        self._executor = CommandExecutor(
            cluster=lambda: self.cluster,
            agents=self,  # type: ignore[arg-type]
            workers=self,  # type: ignore[arg-type]
            cells=Nothing(),  # type: ignore[arg-type]
            jobs=self,  # type: ignore[arg-type]
            scripts=Nothing(),  # type: ignore[arg-type]
            event_log=Nothing(),  # type: ignore[arg-type]
            record=lambda record, _: self.log.append((self.clock.now, f"{record.kind}: {record.text}")),
            log_dir=Path("logs"),
        )
        for host in hosts:
            self.post(ev.HostAdded(parse_host(host, 1), "a user"))
        self.post(ev.JobSubmitted("job-1"))
        self.clock.after(HEARTBEAT, self._watch)

    # ---- the driver ----

    def post(self, event: ev.Event) -> None:
        """The driver decides on an event."""
        if not self.drivers.decides:
            self.drivers.order(event)
            return
        before, now = self.cluster, self.clock.now
        self._before = before
        self.events.append((now, event))
        self.cluster, commands = (step if len(self.events) % BOTH_WAYS else step_both_ways)(before, event, now)
        check(before, self.cluster, commands, now)
        for command in commands[: self.drivers.survives(len(commands))]:
            self._executor.execute(command, now)
        self._set_deadline()
        self.drivers.end_if_due(len(commands))

    def _set_deadline(self) -> None:
        at = deadline(self.cluster, self.clock.now)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.clock.at(at, self.post, ev.Ticked()) if at != NEVER else None
        self._at_once = self._at_once + 1 if at <= self.clock.now else 0
        assert self._at_once < 100, f"a hot loop: {self.reason}"

    def lose_driver(self) -> None:
        """The driver was killed: agents that have not begun end with it, and of what it has sent last some is lost."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.agents = {host: agent for host, agent in self.agents.items() if agent in self.running.get(host, ())}
        for agent in self.agents.values():
            agent.lose_orders()

    def drop_ended_agents(self) -> None:
        """The next driver finds out at once which ssh has ended."""
        self.agents = {
            host: agent
            for host, agent in self.agents.items()
            if agent.is_alive or not self.network.joined(host, DRIVER)
        }

    def go_on_with(self, cluster: ClusterState, commands: tuple[cmd.Command, ...], reported: set[str]) -> None:
        """The next driver has taken over. Only agents that have `reported` count."""
        self.log.append((self.clock.now, f"driver-came: driver {self.drivers.term}"))
        self.cluster, self.liveness = cluster, Liveness(self)
        for host in self.agents.keys() - reported:
            self.forget_agent(host)
        for command in commands:
            self._executor.execute(command, self.clock.now)
        self._set_deadline()
        if cluster.job is not None and cluster.job.outcome and cluster.job.name == f"job-{self.jobs}":
            self._run_another_job()  # the last driver had no time to say that it has ended

    @property
    def reason(self) -> str:
        return in_words(self.cluster.reason, self.clock.now)

    def _watch(self) -> None:
        self.clock.after(HEARTBEAT, self._watch)
        if self.drivers.decides:
            self.liveness.watch()

    # ---- what the executor calls: agents, workers, jobs ----

    def execute(self, command: cmd.Command, _: Path) -> None:
        match command:
            case cmd.StartAgent(host=spec):
                self._start_agent(spec)
            case cmd.StopAgent(host=host):
                agent = self.agents.get(host)
                if agent is not None:
                    agent.to_here.send(agent.receive, agent_messages.StopAgent())
                    self.clock.after(3.0, self._kill_agent, agent, self.drivers.term)
            case cmd.CancelEnd(host=host):
                self.send(host, agent_messages.CancelEnd())
            case cmd.StartWorker(worker=w):
                self.send(w.host, agent_messages.Spawn(w, "", ""))
            case cmd.StopWorker(worker=w, kill=kill):
                self.send(w.host, agent_messages.StopWorker(w, kill))

    def send(self, to: Any, message: Any) -> None:
        """To a host's agent, by name, or to workers."""
        if isinstance(to, str):
            agent = self.agents.get(to)
            if agent is not None:
                agent.to_here.send(agent.receive, message)
            return
        for w in to:
            agent = self.agents.get(w.host)
            if agent is not None:
                agent.send_to_worker(w, message)

    def rehome(self, host: str, rehome: Any) -> None:
        self.send(host, rehome)

    def run_program(self, w: WorkerId, job: str) -> None:
        self.send((w,), worker_messages.Program(job, ""))

    def keep_program(self, *_: Any) -> None:
        """There are no swaps here."""

    def end(self, command: cmd.EndJob) -> None:
        """The job has failed: no worker could help, or the user has removed those that could. The user runs another one."""
        is_full = len(self._before.members) >= self._before.limits.most
        surplus = self._before.stopped if is_full else ()  # as the user has lowered max
        changes = [event for _, event in self.events if isinstance(event, ev.HostAdded | ev.HostRemoved)]
        newest = {each.name if isinstance(each, ev.HostRemoved) else each.host.name: each for each in changes}
        users_order = "was removed at once" in command.reason or "only hosts that end hold" in command.reason
        for worker in () if users_order else self.workers():
            facts = worker.protocol.facts
            holds = facts.holds_state and facts.state_since >= self.cluster.last_formed  # not that of an older world
            helps = worker.job == command.job and holds and not worker.is_stopped
            ends = worker.id in self.drivers.told_to_end or worker.id in surplus
            ends = ends or getattr(newest.get(worker.id.host), "now", False)  # the user has removed its host at once
            wanted = worker.id in self.cluster.workers and not ends
            reachable = wanted and self.network.joined(worker.id.host, DRIVER)
            assert not (helps and reachable), f"{command.reason}: yet {worker.id} holds the state"
        self._run_another_job()

    def _run_another_job(self) -> None:
        self.jobs += 1
        self.clock.after(1.0, self.post, ev.JobSubmitted(f"job-{self.jobs}"))

    # ---- agents ----

    def _start_agent(self, spec: HostSpec) -> None:
        self.forget_agent(spec.name)
        self._agents_started += 1
        agent = self.agents[spec.name] = Agent(self, spec.name, self._agents_started)
        self.clock.after(self.rng.uniform(*AGENT_START), self._begin_agent, agent)

    def _begin_agent(self, agent: Agent) -> None:
        """ssh has reached the machine, which ends earlier agents of the cluster there first."""
        if self.agents.get(agent.host) is not agent:
            return
        if agent.host in self.down or not self.network.joined(agent.host, DRIVER):
            del self.agents[agent.host]
            self.post(ev.AgentLost(agent.host, "it cannot be reached by ssh", number=agent.number))
            return
        for earlier in self.running.get(agent.host, []):
            earlier.die()
        self.running[agent.host] = [agent]
        agent.start()

    def forget_agent(self, host: str) -> None:
        """The driver no longer counts on the host's agent, which may live on."""
        agent = self.agents.pop(host, None)
        if agent is not None and self.network.joined(host, DRIVER):
            agent.die()

    def _kill_agent(self, agent: Agent, term: int) -> None:
        if self.agents.get(agent.host) is agent and term == self.drivers.term and not self.drivers.is_dead:
            agent.die()

    def agent_died(self, agent: Agent) -> None:
        if self.network.joined(agent.host, DRIVER) and agent.host not in self.down:
            self.clock.after(self.rng.uniform(0.0, 0.1), self._report_end, agent)

    def _report_end(self, agent: Agent) -> None:
        """ssh has ended."""
        if self.agents.get(agent.host) is agent and not self.drivers.is_dead:
            del self.agents[agent.host]
            self.drivers.tell(ev.AgentLost(agent.host, "its agent ended", number=agent.number))

    def from_agent(self, agent: Agent, term: int, message: Any) -> None:
        """A message of an agent has arrived. `term`: of the driver to which it was sent."""
        drivers = self.drivers
        if drivers.is_dead:
            return
        agent.heard_at = self.clock.now
        if self.agents.get(agent.host) is not agent:
            agent.to_here.send(agent.receive, agent_messages.StopAgent())
        elif term != drivers.term:
            return
        elif drivers.reports is not None and isinstance(message, agent_messages.AgentHello | ev.WorkerFrozen):
            drivers.reports.add(message)
        elif isinstance(message, agent_messages.AgentEnding):
            drivers.tell(ev.HostRemoved(message.host, by=message.reason, within=message.within))
        elif isinstance(message, agent_messages.AgentGoodbye):
            self.forget_agent(agent.host)
            drivers.tell(ev.AgentLost(message.host, message.reason))
        elif isinstance(message, agent_messages.AgentHello):
            drivers.tell(ev.AgentReady(message.host, message.pid, message.addresses, message.port))
        else:
            drivers.tell(message)

    def from_worker(self, w: WorkerId, term: int, message: Any) -> None:
        drivers = self.drivers
        if drivers.is_dead or term != drivers.term:
            return
        match message:
            case worker_messages.WorkerReport() | worker_messages.WorkerHello() if drivers.reports is not None:
                drivers.reports.add(message)
            case worker_messages.WorkerReport():
                drivers.handle_late_report(message)
            case worker_messages.WorkerHello():
                if w in self.cluster.workers:
                    self.post(ev.WorkerRegistered(w))
            case _ if drivers.reports is not None or w in self.cluster.workers:
                drivers.tell(message)

    def progress(self, w: WorkerId, generation: int, total: int) -> None:
        """Telemetry: it may be lost."""
        if (w.host, DRIVER) not in self.network.cut:
            self.liveness.stalls.note_commits(generation, total, self.clock.now)

    def is_disconnected(self, host: str) -> bool:
        """Whether the link of this host knows that it has no connection to a driver."""
        drivers, network, now = self.drivers, self.network, self.clock.now
        if drivers.is_dead:
            return now - drivers.died_at > HEARTBEAT
        paths = network.cut & {(host, DRIVER), (DRIVER, host)}
        return any(now - network.cut_at[path] > NOTICED for path in paths)

    # ---- addresses ----

    def address_of(self, host: str) -> str:
        return self._addresses.setdefault(host, f"10.0.0.{len(self._addresses) + 1}")

    def now_on(self, host: str) -> float:
        """The time of the machine's own clock: those of two machines have nothing in common."""
        if host not in self._clocks:
            self._clocks[host] = random.Random(f"{self.seed} {host}").uniform(0.0, 1e6)
        return self._clocks[host] + self.clock.now

    def host_at(self, addresses: tuple[str, ...]) -> str:
        return next(host for host, address in self._addresses.items() if address in addresses)

    def store_of(self, w: WorkerId, number: int) -> str:
        return f"{self.address_of(w.host)}:{w.slot}{number}"

    # ---- what must hold ----

    @property
    def newest_commit(self) -> int:
        """Of the present job."""
        present = self.cluster.job.name if self.cluster.job is not None else ""
        return max((number for job, number in self.trained if job == present), default=0)

    def workers(self) -> list[Worker]:
        """All that live, also those that the driver has given up."""
        return [worker for agents in self.running.values() for agent in agents for worker in agent.workers.values()]

    def check_synced(self, worker: Worker, formation: Formation, shared: dict[str, Any]) -> None:
        """A world begins: all its ranks have the root's commits."""
        known = shared.setdefault("synced", list(worker.commits))
        if "commits" in shared:
            known = shared["commits"]
        assert worker.commits == known, f"{worker.id} begins generation {formation.generation} with other commits"

    def check_commit(self, worker: Worker) -> None:
        """A commit is made once, and none that a living, reachable worker of this job has is made again."""
        number, generation = len(worker.commits), worker.commits[-1]
        first = self.trained.setdefault((worker.job, number), generation)
        if first == generation or worker.id not in self.cluster.workers:  # the driver has given it up
            return
        for other in self.workers():
            if other.job == worker.job and len(other.commits) >= number and other.commits[number - 1] != generation:
                is_used = other.id in self.cluster.workers and other.id not in self.cluster.stopped
                assert not (is_used and not other.is_stopped and other.protocol.facts.holds_state), (
                    f"commit {number} was made in generation {first} and again in {generation}, though {other.id} has it"
                )
        self.trained[worker.job, number] = generation

    def check_none_blocks(self) -> None:
        """There was no driver for a while. So each member that has raised has aborted its world for the others, too."""
        early, members = self.clock.now - 8 * HEARTBEAT, [w for w in self.workers() if w.protocol.generation]
        events = [worker.protocol.facts.last_event for worker in members if worker.raised_at < early]
        over = {event.generation for event in events if isinstance(event, ev.WorkerRaised)}
        over -= {
            w.protocol.generation for w in members if w.is_stopped or w.protocol.has_promised
        }  # others wait for it
        blocked = [worker.id for worker in members if worker.blocks and worker.protocol.generation in over]
        assert self.drivers.died_at > early or not blocked, f"{blocked} block, and no driver aborts their world"

    @contextmanager
    def no_loss(self) -> Iterator[None]:
        """In this block a world of the same size trains, at its usual pace, and no world breaks: there are no faults."""
        before, newest, size, begun = len(self.log), self.newest_commit, len(self.cluster.members), self.clock.now
        yield
        losses = [text for _, text in self.log[before:] if text.startswith(LOSSES)]
        assert losses == [], f"without a fault: {losses}"
        assert len(self.cluster.members) >= size, f"the world went from {size} to {len(self.cluster.members)} members"
        made, seconds = self.newest_commit - newest, self.clock.now - begun
        assert made > seconds / 8, f"{made} commits in {seconds:.0f} s"

    def _check_nothing_is_left_over(self) -> None:
        """Each process that lives is one that the driver knows."""
        agents = [agent for each in self.running.values() for agent in each if agent.is_alive]
        ghosts = [
            f"agent {agent.number} of {agent.host}" for agent in agents if self.agents.get(agent.host) is not agent
        ]
        ghosts += [str(worker.id) for worker in self.workers() if worker.id not in self.cluster.workers]
        assert not ghosts, f"{ghosts} live on, and the driver does not know them"

    def check_trains(self, within: float = 180.0) -> None:
        """With all faults mended a world of all slots trains within this time, or the job has ended with a reason."""
        end = self.clock.now + within
        while self.clock.now < end:
            self.clock.run_until(self.clock.now + 5.0)
            cluster = self.cluster
            slots = sum(host.spec.slots for host in cluster.hosts.values())
            wanted = min(slots, cluster.limits.most)
            settled = self.clock.now > end - within + SETTLE
            if settled and cluster.stage is Stage.RUNNING and len(cluster.members) == wanted:
                with self.no_loss():
                    self.clock.run_until(self.clock.now + CALM)
                self._check_nothing_is_left_over()
                return
        raise AssertionError(f"no world of {wanted} trains {within:g} s after the last fault: {self.reason}")
