"""Workers and hosts that are still starting: which, for how long, and until when."""

from __future__ import annotations

from itertools import islice

from nbelastic.core import backoff
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.reasons import MOST, Missing
from nbelastic.core.state import ClusterState, Host, HostPhase, Worker, WorkerState
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def agent_deadline(cluster: ClusterState, host: Host) -> float:
    """When the agent of a starting host must have connected."""
    awaited = host.phase is HostPhase.STARTING and host.spec.name not in cluster.probing
    return (host.prepares_by or host.since + cluster.limits.timeouts.agent) if awaited else NEVER


def worker_deadline(cluster: ClusterState, w: WorkerId) -> float:
    """When a starting worker must be ready for cells; or when a demoted member must have left its generation."""
    worker, timeouts = cluster.workers[w], cluster.limits.timeouts
    match worker.state:
        case WorkerState.STARTING if not worker.registered:  # what it runs then has deadlines of its own
            return worker.since + timeouts.worker
        case WorkerState.RUNNING:
            return worker.since + timeouts.recover
    return NEVER


def missing(cluster: ClusterState, now: float) -> tuple[Missing, ...]:
    """The first workers, hosts and slots that the cluster waits for."""
    found = [_awaited(cluster, cluster.workers[w]) for w in islice(cluster.starting, MOST)]
    for name, host in cluster.hosts.items():
        if len(found) >= MOST:
            break
        if host.phase is HostPhase.STARTING:
            is_explained = name in cluster.probing or host.prepares_by
            starting = Missing("host starting", name, since=host.since)
            found.append(Missing("host", name, host.reason) if is_explained else starting)
        elif host.phase is HostPhase.LOST:
            found.append(Missing("lost", name, host.reason, until=host.retry_at))
        elif name in cluster.disconnected:
            found.append(Missing("host", name, cluster.disconnected[name].reason))
        elif not host.full:
            found += [
                Missing("backoff", f"{name}/{index}", backoff.why_in_backoff(slot), until=slot.backoff_until)
                for index, slot in enumerate(host.slots[: host.spec.slots])
                if slot.backoff_until > now
            ]
    job = cluster.active.name if cluster.active else ""
    if cluster.linger_until and any(worker.job not in ("", job) for worker in cluster.workers.values()):
        found.append(Missing("programs"))
    found += [Missing("failed", str(w), cluster.workers[w].reason) for w in islice(cluster.failed, 1)]
    return tuple(found[:MOST])


def _awaited(cluster: ClusterState, worker: Worker) -> Missing:
    if worker.running_cell:
        return Missing("in a setup cell", str(worker.id), since=worker.cell_since)
    slot = cluster.hosts[worker.id.host].slots[worker.id.slot]
    if slot.reason:
        return Missing("starting again", str(worker.id), backoff.why_in_backoff(slot), since=worker.since)
    return Missing("starting", str(worker.id), since=worker.since)


def reachable_newcomers(cluster: ClusterState) -> PersistentSet[WorkerId]:
    """Newcomers that may join a world: those whose hosts receive orders."""
    if not cluster.disconnected:
        return cluster.newcomers
    return PersistentSet(w for w in cluster.newcomers if w.host not in cluster.disconnected)


def any_coming(cluster: ClusterState) -> bool:
    """Whether a worker or a host is starting, or the host of a newcomer may receive orders again."""
    if cluster.starting or len(reachable_newcomers(cluster)) < len(cluster.newcomers):
        return True
    return any(host.phase is HostPhase.STARTING for host in cluster.hosts.values())


def settled(cluster: ClusterState, now: float) -> bool:
    """Whether newcomers and leavers have waited long enough for workers that are starting."""
    return now >= cluster.settling_since + cluster.limits.timeouts.settle or not any_coming(cluster)
