"""Workers and hosts that are lost: what happens to slots, the generation and the job."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse

from msgspec.structs import replace

from nbelastic.core import backoff, generation_end, host_lifecycle, jobs, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import free_slot, workers_on
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import NO_BREAKS, ClusterState, HostPhase, Stage, without
from nbelastic.core.state_holders import state_lives, state_may_live
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import GPU_LOST, HUNG, exit_text
from nbelastic.protocol.ids import WorkerId

YOUNG = 2.0  # seconds; a worker that ends itself sooner counts as failed, so that its slot gets into back-off


def worker_exited(cluster: ClusterState, event: ev.WorkerExited, now: float, out: Commands) -> ClusterState:
    """Handle the end of a worker's process. Exit code HUNG is not a failure, unless the worker lived for less than YOUNG.

    After GPU_LOST its slot is in back-off at once: NVML may need a moment to report the GPU's problem. The last line of a worker
    that never came up explains its end: a file of the user's may hide a module, as `comm.py` does.
    """
    w, code = event.worker, event.code
    if code == GPU_LOST:
        gpu = cluster.workers[w].gpu
        return worker_lost(cluster, w, f"{w} ended, as its GPU {gpu} failed", now, out, at_once=False)
    was_hung = code == HUNG and now - cluster.workers[w].since >= YOUNG
    last_line = f": {event.last_line}" if event.last_line and w in cluster.unregistered else ""
    return worker_lost(cluster, w, f"{w} died ({exit_text(code)}{last_line})", now, out, blameless=was_hung)


def worker_frozen(cluster: ClusterState, event: ev.WorkerFrozen, now: float, out: Commands) -> ClusterState:
    return replace_worker(cluster, event.worker, f"{event.worker} froze ({event.state})", now, out)


def replace_worker(
    cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands, *, blameless: bool = False
) -> ClusterState:
    """Kill a worker and start another one in its place."""
    out.append(cmd.StopWorker(w, kill=True))
    return worker_lost(cluster, w, why, now, out, blameless=blameless)


def worker_lost(
    cluster: ClusterState,
    w: WorkerId,
    why: str,
    now: float,
    out: Commands,
    *,
    blameless: bool = False,
    at_once: bool = True,
) -> ClusterState:
    """Handle the loss of a worker. It is a failure of its slot, unless the worker was asked to end or is `blameless`.

    `at_once`: the first failure in a row leads to no back-off.

    The loss of a member breaks the generation.
    """
    if w in cluster.stopped:
        cluster = free_slot(cluster, w)
        why = f"{w} was stopped"
    else:
        out_if_new = out
        if blameless:
            cluster = free_slot(cluster, w, restarts=1)
        else:
            out_if_new = [] if backoff.fails_as_before(cluster, w, why) else out
            cluster = backoff.record_failure(
                _reset_unexplained(cluster, (w,)), w, why, now, out_if_new, at_once=at_once
            )
        out_if_new.append(cmd.Record("worker-lost", why, host=w.host, worker=str(w), generation=cluster.generation))
    cluster = remove_from_job(cluster, (w,), why, now, out)
    return provisioning.provision(host_lifecycle.remove_if_empty(cluster, w.host, out), now, out)


def host_lost(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost"
) -> ClusterState:
    """Handle the loss of a host and its workers. `kind` is the kind of its record in the event log."""
    host = cluster.hosts.get(name)
    if host is None or host.phase is HostPhase.LOST:
        return cluster
    workers = workers_on(cluster, name)
    cluster = host_lifecycle.agent_lost(_reset_unexplained(cluster, workers), name, reason, now, out, kind=kind)
    cluster = remove_from_job(cluster, workers, f"host {name} was lost ({reason})", now, out)
    return provisioning.provision(cluster, now, out)


def _reset_unexplained(cluster: ClusterState, lost: Iterable[WorkerId]) -> ClusterState:
    """The loss of a member explains broken connections, so count unexplained breaks from zero.

    A hung worker does not count as lost here: it is a consequence of the break.
    """
    if cluster.member_set.isdisjoint(lost):
        return cluster
    return replace(cluster, unexplained_breaks=NO_BREAKS)


def exclude_host(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str
) -> ClusterState:
    """End a host's agent that runs but cannot be used, and treat the host as lost."""
    out.append(cmd.StopAgent(name))
    return host_lost(cluster, name, reason, now, out, kind=kind)


def remove_from_job(
    cluster: ClusterState, workers: Iterable[WorkerId], why: str, now: float, out: Commands, *, alive: bool = False
) -> ClusterState:
    """Remove workers from the job and, unless `alive`, from the state. If one is a member, the generation breaks."""
    removed = PersistentSet(workers)
    lost_members = removed & cluster.member_set
    held_state = any(w in cluster.workers and cluster.workers[w].has_state for w in removed)
    if not alive:
        cluster = _forget_workers(_with_count(cluster, removed), removed)
    cluster = without(cluster, removed, "awaiting", "newcomers", "starting", "unregistered", "leaving", "suspects")
    job = cluster.active
    if job is None or not lost_members:
        if cluster.next_formation is not None and not removed.isdisjoint(cluster.next_formation.members):
            cluster = generation_end.cancel_next(cluster, out)
        if held_state and job is not None and not job.succeeded and not state_lives(cluster):
            return _fail_without_state(cluster, why, now, out)
        return jobs.finish(cluster, now, out)
    members = tuple(filterfalse(frozenset(removed).__contains__, cluster.members))
    cluster = replace(cluster, members=members, member_set=cluster.member_set - removed)
    if lost_members <= job.ended:  # their programs have ended: nothing is lost with them
        return jobs.finish(cluster, now, out)
    if job.succeeded:
        return generation_end.finish_after_success(cluster, job, why, now, out)
    if not state_may_live(cluster):
        return _fail_without_state(cluster, why, now, out)
    return cluster if cluster.stage is Stage.GATHERING else generation_end.break_generation(cluster, why, now, out)


def _with_count(cluster: ClusterState, lost: PersistentSet[WorkerId]) -> ClusterState:
    """Note how many results there would be without this loss, if the job's program has no elastic function."""
    job = cluster.active
    if job is None or job.formed or lost <= job.ended:
        return cluster
    results = job.ended | {w for w, worker in cluster.workers.items() if worker.job == job.name}
    return replace(cluster, job=replace(job, at_once=len(results)))


def _fail_without_state(cluster: ClusterState, why: str, now: float, out: Commands) -> ClusterState:
    return jobs.end(cluster, "failed", f"{why}; no worker is left that holds the training state", now, out)


def _forget_workers(cluster: ClusterState, ids: PersistentSet[WorkerId]) -> ClusterState:
    workers = cluster.workers.without(ids)
    removed = len(cluster.workers) - len(workers)
    cluster = replace(cluster, workers=workers, removed_workers=cluster.removed_workers + removed)
    return without(cluster, ids, "stopped", "failed")
