"""TODO."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import backoff, generation_end, host_lifecycle, host_slots, jobs, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.state import NO_BREAKS, ClusterState, HostPhase, Stage, difference, with_members
from nbelastic.core.state_holders import state_lives
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]
YOUNG = 2.0  # seconds; a worker that ends itself sooner counts as failed, so that its slot gets into back-off


def worker_exited(cluster: ClusterState, event: ev.WorkerExited, now: float, out: Commands) -> ClusterState:
    """A hung worker that ended itself is no failure. A program that exits with that code at once is one."""
    w, code = event.worker, event.code
    was_hung = code == ev.HUNG and now - cluster.workers[w].since >= YOUNG
    return worker_lost(cluster, w, f"{w} died ({exit_text(code)})", now, out, blameless=was_hung)


def worker_frozen(cluster: ClusterState, event: ev.WorkerFrozen, now: float, out: Commands) -> ClusterState:
    """Kill it and replace it."""
    w = event.worker
    out.append(cmd.StopWorker(w, kill=True))
    return worker_lost(cluster, w, f"{w} froze ({event.state})", now, out)


def worker_lost(
    cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands, *, blameless: bool = False
) -> ClusterState:
    """It died or will never answer: a strike against its slot unless it was told to end; a break if it was a member."""
    if w in cluster.stopped:
        cluster, why = host_slots.free(cluster, w), f"{w} was stopped"
    else:
        if not blameless:
            cluster = backoff.record_failure(_reset_unexplained(cluster, (w,)), w, why, now, out)
        else:
            cluster = host_slots.free(cluster, w, restarts=1)
        out.append(cmd.Record("worker-lost", why, host=w.host, worker=str(w), generation=cluster.generation))
    cluster = remove_from_job(cluster, (w,), why, now, out)
    return provisioning.provision(host_lifecycle.remove_if_empty(cluster, w.host, out), now, out)


def host_lost(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost"
) -> ClusterState:
    """The host is lost, and its workers with it; a record of this `kind` says why."""
    host = cluster.hosts.get(name)
    if host is None or host.phase is HostPhase.LOST:
        return cluster
    workers = host_slots.workers_on(cluster, name)
    cluster = host_lifecycle.agent_lost(_reset_unexplained(cluster, workers), name, reason, now, out, kind=kind)
    cluster = remove_from_job(cluster, workers, f"host {name} was lost ({reason})", now, out)
    return provisioning.provision(cluster, now, out)


def _reset_unexplained(cluster: ClusterState, dead: Iterable[WorkerId]) -> ClusterState:
    """The death of a member explains broken connections: the count of breaks without a death begins anew."""
    return replace(cluster, unexplained_breaks=NO_BREAKS) if not cluster.member_set.isdisjoint(dead) else cluster


def exclude_host(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str
) -> ClusterState:
    """The host's agent is there but of no use: it is ended, and the host treated as a lost one."""
    out.append(cmd.StopAgent(name))
    return host_lost(cluster, name, reason, now, out, kind=kind)


def remove_from_job(
    cluster: ClusterState, gone: Iterable[WorkerId], why: str, now: float, out: Commands, *, keep: bool = False
) -> ClusterState:
    """These are no longer there (`keep`: alive, but out of the job). The members among them break the generation."""
    ids = frozenset(gone)
    hit = ids & cluster.member_set
    if not keep:
        cluster = _forget_workers(cluster, ids)
    cluster = replace(
        cluster,
        awaiting=difference(cluster.awaiting, ids),
        newcomers=difference(cluster.newcomers, ids),
        starting=difference(cluster.starting, ids),
        leaving=difference(cluster.leaving, ids),
        suspects=difference(cluster.suspects, ids),
    )
    job = cluster.active
    if job is None or not hit:
        if cluster.next_formation is not None and not ids.isdisjoint(cluster.next_formation.members):
            cluster = generation_end.cancel_next(cluster, out)
        return jobs.finish(cluster, now, out)
    cluster = with_members(cluster, tuple(w for w in cluster.members if w not in ids))
    if hit <= job.ended:
        return jobs.finish(cluster, now, out)
    if job.succeeded:
        return generation_end.finish_after_success(cluster, job, why, now, out)
    if not state_lives(cluster):
        return jobs.end(cluster, "failed", f"{why}; no worker is left that holds the training state", now, out)
    return cluster if cluster.stage is Stage.GATHERING else generation_end.break_generation(cluster, why, now, out)


def _forget_workers(cluster: ClusterState, ids: frozenset[WorkerId]) -> ClusterState:
    workers = dict(cluster.workers)
    buried = sum(workers.pop(w, None) is not None for w in ids)
    return replace(
        cluster,
        workers=workers,
        removed_workers=cluster.removed_workers + buried,
        stopped=difference(cluster.stopped, ids),
        failed=difference(cluster.failed, ids),
    )
