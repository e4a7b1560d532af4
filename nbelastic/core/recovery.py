"""A new driver for a cluster whose driver is gone: the world as its agents and workers tell it.

Of what was saved only that counts which nobody else can know: the limits, which hosts are wanted, the job's name. Who lives,
who trains with whom and how far they are is what they say themselves. A world that is whole goes on undisturbed; one that is
not is broken like any other in which somebody has died, and its survivors gather.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generations, jobs, networks, provisioning, setup
from nbelastic.core.holders import forget_kept, state_lives
from nbelastic.core.membership import step
from nbelastic.core.state import (
    ClusterState,
    Host,
    HostPhase,
    Job,
    KeptState,
    SetupCell,
    Slot,
    Stage,
    Worker,
    WorkerState,
    first,
    seat,
)
from nbelastic.protocol import events as ev
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.limits import Limits
from nbelastic.protocol.worker_messages import WorkerReport
from nbelastic.system.addresses import is_loopback

Commands = list[cmd.Command]
Heard = Mapping[WorkerId, WorkerReport]
GONE = "while no driver was there"
UNSAVED = 1000  # probes: more than the last driver can have begun without writing it down


class SavedHost(Struct, frozen=True, omit_defaults=True):
    """`newest`: the highest incarnation of its workers so far. Times are of the clock of this machine (monotonic)."""

    spec: HostSpec
    joined: int
    by_hand: bool
    newest: int
    phase: HostPhase
    slots: tuple[Slot, ...] = ()
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def slot(self, number: int, **now: object) -> Slot:
        """What is to be remembered of it, and how it is `now`."""
        return replace(self.slots[number] if number < len(self.slots) else Slot(), **now)


class SavedCluster(Struct, frozen=True):
    """What of a world its agents and workers cannot know. `gathering`: its last break was counted."""

    limits: Limits
    hosts: tuple[SavedHost, ...]
    removed: tuple[str, ...]
    incarnations: dict[str, int]
    joined: int
    numbered: int
    probes: int
    members: tuple[WorkerId, ...]
    stopped: tuple[WorkerId, ...]
    gathering: bool
    stopping: str
    job: str
    outcome: str
    reason: str
    formed: bool
    kept: KeptState | None
    formed_in: int
    ranks: tuple[WorkerId, ...]
    setup: tuple[SetupCell, ...]
    ran: tuple[tuple[WorkerId, tuple[int, ...]], ...]  # versions of setup cells, of workers that took code
    resets: int
    here: str
    door: str


def summary(cluster: ClusterState) -> SavedCluster:
    """Of this one."""
    hosts = tuple(
        SavedHost(
            host.spec,
            host.joined,
            host.by_hand,
            provisioning.newest(cluster, name),
            host.phase,
            host.slots,
            host.failures,
            host.retry_at,
            host.reason,
        )
        for name, host in cluster.hosts.items()
    )
    job = cluster.job or Job("")
    return SavedCluster(
        limits=cluster.limits,
        hosts=hosts,
        removed=tuple(sorted(cluster.removed)),
        incarnations=cluster.incarnations,
        joined=cluster.joined,
        numbered=cluster.numbered,
        probes=cluster.probes,
        members=cluster.members,
        stopped=tuple(sorted(cluster.stopped)),
        gathering=cluster.stage is Stage.GATHERING,
        stopping=cluster.stopping,
        job=job.name,
        outcome=job.outcome,
        reason=job.reason,
        formed=job.formed,
        kept=replace(cluster.kept, heir=None) if cluster.kept is not None else None,
        formed_in=cluster.formed_in,
        ranks=job.ranks,
        setup=cluster.setup,
        ran=tuple((w, tuple(sorted(worker.ran))) for w, worker in cluster.workers.items() if worker.registered),
        resets=cluster.resets,
        here=cluster.here,
        door=cluster.door,
    )


def resume(
    saved: SavedCluster,
    agents: Mapping[str, AgentHello],
    heard: Heard,
    now: float,
    *,
    problems: Mapping[str, str] | None = None,
    coming: Collection[str] = (),
) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The world at `now` and what is to be done. `problems`: of
    agents that cannot be used, why. `coming`: hosts that were to start, whose agents may still be on their way.
    """
    out: Commands = []
    cluster = _workers(_hosts(saved, agents, coming, now, out), agents, heard, dict(saved.ran), now)
    if saved.stopping:  # programs may still write a last checkpoint
        return _then(_stop_others(cluster, now, out), ev.StopRequested(saved.stopping), now, out), tuple(out)
    cluster = provisioning.stop_workers(cluster, saved.stopped, out)
    cluster = _presume(cluster, saved, heard)
    cluster = _lost(cluster, saved, heard, now, out)
    job = cluster.active
    inside = {}
    if job is not None:
        inside = {w: here for w, here in heard.items() if here.job == job.name and _is_there(cluster, w)}
        cluster = _cluster(cluster, saved, inside, now, out)
    cluster = _stop_others(cluster, now, out)
    cluster = provisioning.staff(_let_go(cluster, now, out), now, out)
    if cluster.active is not None:
        cluster = _send_on(cluster, inside, now, out)
    for name, host in tuple(cluster.hosts.items()):
        if host.phase is HostPhase.STARTING and name in agents:
            agent, problem = agents[name], (problems or {}).get(name, "")
            ready = ev.AgentReady(name, agent.pid, agent.addresses, agent.port, problem)
            cluster = _then(cluster, ready, now, out)
    return _then(cluster, ev.Ticked(), now, out), tuple(out)


def _then(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    cluster, commands = step(cluster, event, now)
    out.extend(commands)
    return cluster


def _is_there(cluster: ClusterState, w: WorkerId) -> bool:
    return w in cluster.workers and w not in cluster.stopped


def _hosts(
    saved: SavedCluster, agents: Mapping[str, AgentHello], coming: Collection[str], now: float, out: Commands
) -> ClusterState:
    hosts = {}
    for number, old in enumerate(sorted(saved.hosts, key=lambda host: host.joined), 1):
        name = old.spec.name
        if name in agents and old.phase is not HostPhase.LOST:
            hosts[name] = _found(old, agents[name], number, now)
        elif name in coming and old.phase is HostPhase.STARTING:
            hosts[name] = _starting(old, now)
        else:
            hosts[name] = _without_agent(old, now, out)
    unwanted = [name for name in agents if name not in hosts or hosts[name].phase is HostPhase.LOST]
    out.extend(cmd.StopAgent(name) for name in unwanted)  # it was told already, and may not have heard
    job = None
    if saved.job:
        job = Job(saved.job, formed=saved.formed, ranks=saved.ranks, outcome=saved.outcome, reason=saved.reason)
    cluster = ClusterState(
        saved.limits,
        hosts=hosts,
        job=job,
        kept=saved.kept if saved.kept is not None and _is_up(hosts.get(saved.kept.by.host)) else None,
        formed_in=saved.formed_in,
        resets=saved.resets,
        joined=saved.joined,
        discovered=True,
        setup=saved.setup,
        numbered=saved.numbered,
        probes=saved.probes + UNSAVED,
        admissions=len(hosts),
        removed=frozenset(saved.removed),
        incarnations={**saved.incarnations, **{old.spec.name: old.newest for old in saved.hosts}},
        here=saved.here,
        door=saved.door,
        since=now,
    )
    return networks.widen(cluster, now, out) if networks.wide(cluster) else cluster


def _is_up(host: Host | None) -> bool:
    """With the agent that it had."""
    return host is not None and host.phase in (HostPhase.UP, HostPhase.DRAINING) and bool(host.admitted)


def _starting(old: SavedHost, now: float) -> Host:
    return Host(old.spec, old.joined, _empty(old, old.newest), since=now, failures=old.failures, by_hand=old.by_hand)


def _empty(old: SavedHost, newest: int) -> tuple[Slot, ...]:
    return tuple(old.slot(number, incarnation=newest, busy=False) for number in range(old.spec.slots))


def _found(old: SavedHost, agent: AgentHello, number: int, now: float) -> Host:
    """Its agent lives. One that was not admitted yet is admitted like any other."""
    if old.phase is HostPhase.STARTING and not agent.newest:
        return _starting(old, now)
    busy = {w.slot: w.incarnation for w, _ in agent.workers}
    count = max([old.spec.slots, *(slot + 1 for slot in busy), *(slot + 1 for slot in agent.newest)])
    slots = tuple(
        old.slot(i, incarnation=busy.get(i, max(old.newest, agent.newest.get(i, 0))), busy=i in busy)
        for i in range(count)
    )
    address = agent.address or (agent.addresses[0].address if agent.addresses else "")
    draining = old.phase is HostPhase.DRAINING
    return Host(
        old.spec,
        old.joined,
        slots,
        full=all(slot.busy for slot in slots[: old.spec.slots]),
        since=now,
        phase=HostPhase.DRAINING if draining else HostPhase.UP,
        reason="draining" if draining else "",
        failures=old.failures,
        by_hand=old.by_hand,
        addresses=agent.addresses,
        port=agent.port,
        address=address,
        agreed=(address,) if address and not is_loopback(address) else (),
        admitted=number,
    )


def _without_agent(old: SavedHost, now: float, out: Commands) -> Host:
    """It is tried again at once, unless it was to leave, or was lost before and is to wait. It may have started workers of
    which nothing was saved.
    """
    host = Host(old.spec, old.joined, _empty(old, old.newest + 1), failures=old.failures, by_hand=old.by_hand)
    if old.phase is HostPhase.DRAINING:
        return replace(host, phase=HostPhase.DRAINING)
    if old.phase is HostPhase.LOST:
        return replace(host, phase=HostPhase.LOST, reason=old.reason, retry_at=max(now, old.retry_at))
    why = f"its agent was lost {GONE}"
    if old.phase is HostPhase.UP:
        out.append(cmd.Record("host-lost", f"{old.spec.name}: {why}", host=old.spec.name))
    return replace(host, phase=HostPhase.LOST, reason=why, retry_at=now)


def _workers(
    cluster: ClusterState,
    agents: Mapping[str, AgentHello],
    heard: Heard,
    ran: Mapping[WorkerId, tuple[int, ...]],
    now: float,
) -> ClusterState:
    """All whom an agent has. Who has not said a word is starting, or will be found to be frozen."""
    workers: dict[WorkerId, Worker] = {}
    name = cluster.active.name if cluster.active else ""
    there = [
        agents[host] for host in cluster.hosts if host in agents and cluster.hosts[host].phase is not HostPhase.LOST
    ]
    for w, pid in (pair for agent in there for pair in agent.workers):
        here = heard.get(w)
        if here is None:
            workers[w] = Worker(w, WorkerState.STARTING, since=now, pid=pid)
            continue
        job = here.job if here.busy or here.job == name else ""
        versions = frozenset(cell.version for cell in cluster.setup) if job else frozenset(ran.get(w, ()))
        is_set_up = bool(job) or (w in ran and all(cell.version in versions for cell in cluster.setup))
        state = WorkerState.READY if is_set_up else WorkerState.STARTING
        workers[w] = Worker(
            w,
            WorkerState.RUNNING if job and here.generation else state,
            since=now,
            pid=pid,
            job=job,
            generation=here.left,
            commit=here.commit,
            store=here.store,
            has_state=bool(job) and here.holds and here.since >= cluster.formed_in,
            was_ready=is_set_up,
            registered=is_set_up,  # else it comes to be when its engine is known
            ran=versions,
        )
    starting = frozenset(w for w, worker in workers.items() if worker.state is WorkerState.STARTING)
    numbered = max([cluster.numbered, *(here.numbered for here in heard.values())])
    return replace(cluster, workers=workers, starting=starting, numbered=numbered, generation=numbered)


def _presume(cluster: ClusterState, saved: SavedCluster, heard: Heard) -> ClusterState:
    """Members that were not heard, and whose processes live, train on where all the others train: nothing says otherwise.

    Only if the others are the saved members, by rank, in one whole world. Those not heard may hold the interpreter lock.
    """
    job, members = cluster.active, saved.members
    known = [heard[w] for w in members if w in heard and _is_there(cluster, w)]
    quiet = [w for w in members if w not in heard and _is_there(cluster, w)]
    if job is None or not known or not quiet or len(known) + len(quiet) < len(members):
        return cluster
    generation = max(here.generation for here in heard.values())
    for here in known:
        there = (here.job, here.generation, here.size) == (job.name, generation, len(members)) and here.formed
        if not there or members[here.rank] != here.worker or not _calm(here.word) or here.stopped:
            return cluster
    ran = frozenset(cell.version for cell in cluster.setup)
    like = cluster.workers[known[0].worker]
    trains = {
        w: replace(like, id=w, pid=cluster.workers[w].pid, state=WorkerState.RUNNING, store="", ran=ran) for w in quiet
    }
    return replace(cluster, workers=cluster.workers | trains, starting=cluster.starting - trains.keys())


def _lost(cluster: ClusterState, saved: SavedCluster, heard: Heard, now: float, out: Commands) -> ClusterState:
    """Members that are gone, or that do not answer though their processes live."""
    gone = frozenset(w for w in saved.members if w not in cluster.workers)
    if gone:
        out.append(cmd.Record("worker-lost", f"{first(gone)} lost {GONE}"))
    for w in saved.members:
        if _is_there(cluster, w) and w not in heard and cluster.workers[w].state is not WorkerState.RUNNING:
            out.append(cmd.StopWorker(w, kill=True))
            cluster = generations.gone(cluster, w, f"{w} froze (it did not answer a new driver)", now, out)
    return cluster


def _cluster(cluster: ClusterState, saved: SavedCluster, inside: Heard, now: float, out: Commands) -> ClusterState:
    """Who trains with whom. `inside`: those in the job's program."""
    job = cluster.active
    assert job is not None
    holders = tuple(w for w in sorted(inside, key=lambda w: (inside[w].rank, w)) if cluster.workers[w].has_state)
    finished = frozenset(w for w in holders if isinstance(inside[w].word, ev.WorkerSucceeded))
    told = [w for w in inside if inside[w].stopped]
    if told and not finished:
        return _end(seat(cluster, holders), inside, told, now, out)
    if not holders:
        if not state_lives(cluster):
            why = f"no worker is left that holds the training state: the last one was lost {GONE}"
            return jobs.end(cluster, "failed", why, now, out)
        return _call_back(cluster, inside, out)
    if cluster.kept is not None and max(inside[w].commit for w in holders) > cluster.kept.commit:
        cluster = forget_kept(cluster, out)
    late = frozenset(told).intersection(holders)
    cluster = jobs.linger(cluster, now) if late else cluster
    job = replace(job, formed=True, succeeded=finished, late=late)
    members = _whole(inside)
    quiet = [w for w in saved.members if _is_there(cluster, w) and w not in inside]
    if not members and any(cluster.workers[w].state is WorkerState.RUNNING for w in quiet):
        members = saved.members  # as presumed
    if members:
        return _go_on(replace(cluster, job=replace(job, ranks=members)), members, inside, out)
    ranks = saved.ranks if set(holders) <= set(saved.ranks) else holders
    cluster = replace(seat(cluster, holders), job=replace(job, ranks=ranks), stage=Stage.RUNNING)
    cluster = _call_back(cluster, inside, out)
    why = "the world was not whole any more when a new driver came"
    if not finished and (
        saved.gathering or not any(inside[w].generation for w in holders)
    ):  # it had been broken, or left
        return replace(jobs.abort(cluster, why, out), stage=Stage.GATHERING, awaiting=cluster.ranked)
    return generations.break_generation(cluster, why, now, out)


def _whole(inside: Heard) -> tuple[WorkerId, ...]:
    """The members, by rank, of the newest generation that stands, if all of them are in it; else nobody."""
    formed = [here for here in inside.values() if here.formed]
    generation = max((here.generation for here in formed), default=0)
    there = {here.rank: here for here in formed if here.generation == generation and _calm(here.word)}
    whole = bool(there) and len(there) == next(iter(there.values())).size
    return tuple(there[rank].worker for rank in sorted(there)) if whole else ()


def _calm(word: object) -> bool:
    """An error of the user's own takes nothing from a world."""
    return not isinstance(word, ev.WorkerReady) and (not isinstance(word, ev.WorkerRaised) or word.intact)


def _go_on(cluster: ClusterState, members: tuple[WorkerId, ...], inside: Heard, out: Commands) -> ClusterState:
    """Nobody of this world is disturbed. What was to follow it will not be."""
    known = [inside[w] for w in members if w in inside]
    generation = known[0].generation
    cluster = replace(forget_kept(cluster, out), formed_in=generation)
    cluster = _call_back(seat(cluster, members), inside, out)
    for later in range(generation + 1, max(here.numbered for here in known) + 1):
        out.append(cmd.DropWorld(later, members))
    if any(here.bound for here in known):
        out.append(cmd.CancelLeave(generation, members))
    out.append(
        cmd.Record("world-found", f"{len(members)} workers train on in generation {generation}", generation=generation)
    )
    return replace(
        cluster, generation=generation, stage=Stage.RUNNING, order=cmd.FormWorld(generation, members, "", 0, ())
    )


def _call_back(cluster: ClusterState, inside: Heard, out: Commands) -> ClusterState:
    """Who is no member and has heard of a generation that will not be: an abort counts for all up to its number."""
    those = (w for w, here in inside.items() if w not in cluster.ranked and here.busy)
    away = tuple(w for w in those if inside[w].generation or inside[w].numbered > inside[w].left)
    if away:
        out.append(cmd.AbortWorld(cluster.numbered, away, "a new driver forms the world anew"))
    return cluster


def _end(cluster: ClusterState, inside: Heard, told: list[WorkerId], now: float, out: Commands) -> ClusterState:
    """Some were told that the job is over, by a driver that could not write that down any more."""
    for w in cluster.members:
        word = inside[w].word
        if isinstance(word, ev.WorkerRaised) and word.intact:
            why = f"rank {inside[w].rank} ({w}) raised {word.error}"
            return jobs.end(cluster, "failed", why, now, out, culprit=w)
    return jobs.end(cluster, "stopped", inside[told[0]].stopped, now, out)


def _let_go(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Workers for which there is no place any more leave, and hosts that have none of them."""
    for name, host in tuple(cluster.hosts.items()):
        surplus = [
            w
            for w in provisioning.on_host(cluster, name)
            if host.phase is HostPhase.DRAINING or w.slot >= host.spec.slots
        ]
        cluster = provisioning.retire_empty(provisioning.dismiss(cluster, surplus, now, out), name, out)
    return cluster


def _send_on(cluster: ClusterState, inside: Heard, now: float, out: Commands) -> ClusterState:
    """Their last words are heard now: errors, then newcomers, then members. Who has not heard of the job yet is told."""
    job = cluster.active
    assert job is not None
    there = [w for w in inside if _is_there(cluster, w)]
    words = {w: inside[w].word for w in sorted(there, key=lambda w: (w in cluster.ranked, inside[w].rank, w))}
    cluster = provisioning.expect(cluster, [w for w in there if inside[w].busy and w not in cluster.ranked])
    for word in words.values():
        if isinstance(word, ev.WorkerRaised):
            cluster = _then(cluster, word, now, out)
    if all(here.busy or (job.formed and not here.holds) for here in inside.values()):  # else it comes to its end
        for w, worker in tuple(cluster.workers.items()):
            if worker.state is WorkerState.READY and not worker.job:
                cluster = setup.run_next(cluster, w, now, out)
    for w, word in words.items():
        if isinstance(word, ev.WorkerReady) and (
            w not in cluster.ranked or word.generation >= cluster.generation
        ):  # else it says it anew
            cluster = _then(cluster, word, now, out)
    return cluster


def _stop_others(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Programs of a job that is over."""
    name = cluster.active.name if cluster.active else ""
    late = tuple(w for w, worker in cluster.workers.items() if worker.job and worker.job != name)
    for w in late:
        out.append(cmd.StopProgram(cluster.workers[w].job, (w,), "its job is over"))
    return jobs.linger(cluster, now) if late else cluster
