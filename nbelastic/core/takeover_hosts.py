"""The hosts and workers of a cluster whose driver was lost, from its snapshot and the reports of agents and workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_admission, provisioning
from nbelastic.core.cluster_snapshot import SavedCluster, SavedHost
from nbelastic.core.commands import Commands
from nbelastic.core.halt import Halt
from nbelastic.core.persistent import PersistentDict, PersistentSet
from nbelastic.core.state import ClusterState, Host, HostPhase, Job, Slot, Worker, WorkerState
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.worker_messages import WorkerReport
from nbelastic.system.addresses import is_loopback

Reports = Mapping[WorkerId, WorkerReport]
OFFLINE = "while no driver was running"
UNSAVED = 1000  # probes; more than the last driver can have begun after its snapshot


def restore_hosts(
    saved: SavedCluster, agents: Mapping[str, AgentHello], coming: Collection[str], now: float, out: Commands
) -> ClusterState:
    """The cluster state with its hosts, but without workers.

    A host without an agent counts as lost, unless it is `coming`: its agent may still connect.
    """
    hosts = {}
    for number, old in enumerate(sorted(saved.hosts, key=lambda host: host.joined), 1):
        name = old.spec.name
        if name in agents and old.phase is not HostPhase.LOST:
            hosts[name] = _with_agent(old, agents[name], number, now)
        elif name in coming and old.phase is HostPhase.STARTING:
            hosts[name] = _starting(old, now)
        else:
            hosts[name] = _without_agent(old, now, out, was_to_end=name in saved.ending)
    unwanted = [name for name in agents if name not in hosts or hosts[name].phase is HostPhase.LOST]
    out.extend(cmd.StopAgent(name) for name in unwanted)  # the earlier command may be lost
    job, kept = None, saved.kept_state
    if saved.job:
        job = Job(
            saved.job,
            backend=saved.backend,
            formed=saved.formed,
            ranks=saved.ranks,
            at_once=saved.at_once,
            outcome=saved.outcome,
            reason=saved.reason,
            program=saved.program,
        )
    cluster = ClusterState(
        saved.limits,
        hosts=hosts,
        job=job,
        kept_state=kept if kept is not None and _is_up(hosts.get(kept.by.host)) else None,
        last_formed=saved.last_formed,
        resets=saved.resets,
        hosts_joined=saved.hosts_joined,
        discovered=True,
        setup=saved.setup,
        highest_generation=saved.highest_generation,
        last_probe=saved.last_probe + UNSAVED,
        hosts_admitted=len(hosts),
        ending=saved.ending,
        removed_hosts=frozenset(saved.removed_hosts),
        incarnations={**saved.incarnations, **{old.spec.name: old.newest for old in saved.hosts}},
        driver_address=saved.driver_address,
        external_address=saved.external_address,
        halt=Halt(paused_by=saved.paused_by),
        ending_nodes={n: until for n, until in saved.ending_nodes.items() if n in agents and agents[n].nodes},
        settling_since=now,
    )
    return host_admission.widen(cluster, now, out) if host_admission.wide(cluster) else cluster


def _is_up(host: Host | None) -> bool:
    """Whether the host has the agent that it had."""
    return host is not None and host.is_up and bool(host.admitted)


def _starting(old: SavedHost, now: float) -> Host:
    return replace(_unstarted(old, old.newest), since=now)


def _unstarted(old: SavedHost, newest: int) -> Host:
    """A host without an agent."""
    slots = _empty(old, newest)
    return Host(old.spec, old.joined, slots, failures=old.failures, lost_for=old.lost_for, by_hand=old.by_hand)


def _empty(old: SavedHost, newest: int) -> tuple[Slot, ...]:
    return tuple(old.slot(number, incarnation=newest, busy=False) for number in range(old.spec.slots))


def _with_agent(old: SavedHost, agent: AgentHello, number: int, now: float) -> Host:
    """A host whose agent lives. One that was not admitted yet is admitted like any other."""
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
        agreed_addresses=(address,) if address and not is_loopback(address) else (),
        admitted=number,
        gpus=agent.gpus,
    )


def _without_agent(old: SavedHost, now: float, out: Commands, *, was_to_end: bool) -> Host:
    """A host without an agent is tried again at once, unless it drains, has ended as announced, or was lost before.

    Its slots skip an incarnation: it may have started workers that were not saved.
    """
    host = _unstarted(old, old.newest + 1)
    if old.phase is HostPhase.DRAINING or was_to_end:
        return replace(host, phase=HostPhase.DRAINING)
    if old.phase is HostPhase.LOST:
        return replace(host, phase=HostPhase.LOST, reason=old.reason, retry_at=max(now, old.retry_at))
    why = f"its agent was lost {OFFLINE}"
    if old.phase is HostPhase.UP:
        out.append(cmd.Record("host-lost", f"{old.spec.name}: {why}", host=old.spec.name))
        host = replace(host, lost_for=why)
    return replace(host, phase=HostPhase.LOST, reason=why, retry_at=now)


def restore_workers(
    cluster: ClusterState,
    agents: Mapping[str, AgentHello],
    reports: Reports,
    ran: Mapping[WorkerId, tuple[int, ...]],
    now: float,
) -> ClusterState:
    """The state with all workers that agents report. A worker without a report of its own counts as starting."""
    workers: dict[WorkerId, Worker] = {}
    name = cluster.active.name if cluster.active else ""
    used = [agents[n] for n, host in cluster.hosts.items() if n in agents and host.phase is not HostPhase.LOST]
    gpus = {w: gpu for agent in used for w, gpu in agent.worker_gpus.items()}
    for w, pid in (pair for agent in used for pair in agent.workers):
        report = reports.get(w)
        if report is None:
            workers[w] = Worker(w, WorkerState.STARTING, since=now, pid=pid, gpu=gpus.get(str(w), ""))
            continue
        job = report.job if report.busy or report.job == name else ""
        versions = frozenset(cell.version for cell in cluster.setup) if job else frozenset(ran.get(w, ()))
        is_set_up = bool(job) or (w in ran and all(cell.version in versions for cell in cluster.setup))
        state = WorkerState.READY if is_set_up else WorkerState.STARTING
        workers[w] = Worker(
            w,
            WorkerState.RUNNING if job and report.generation else state,
            since=now,
            pid=pid,
            gpu=gpus.get(str(w), ""),
            job=job,
            generation=report.left_generation,
            commit=report.commit,
            store=report.store,
            has_state=bool(job) and report.holds_state and report.state_since >= cluster.last_formed,
            was_ready=is_set_up,
            registered=is_set_up,  # else it registers later
            ran=versions,
        )
    starting = PersistentSet(w for w, worker in workers.items() if worker.state is WorkerState.STARTING)
    unregistered = PersistentSet(w for w in starting if not workers[w].registered)
    numbered = max([cluster.highest_generation, *(report.highest_generation for report in reports.values())])
    cluster = replace(cluster, highest_generation=numbered, generation=numbered)
    cluster = replace(cluster, workers=PersistentDict(workers), unregistered=unregistered)
    return provisioning.expect_workers(cluster, starting)
