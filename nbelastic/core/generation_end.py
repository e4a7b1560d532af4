"""How a generation ends: by a break, by the function's return on a rank, or by leaving as agreed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import jobs, provisioning
from nbelastic.core.commands import Commands
from nbelastic.core.halt import Halt
from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.core.state import ClusterState, Job, Stage, Worker, WorkerState, with_members, with_worker, without
from nbelastic.core.state_holders import state_may_live
from nbelastic.protocol.ids import WorkerId


def demote(cluster: ClusterState, ids: Iterable[WorkerId], now: float) -> ClusterState:
    """Make newcomers of survivors that the next generation leaves out. Until they have left, they count as starting."""
    demoted = PersistentSet(ids)
    cluster = replace(cluster, workers=cluster.workers | {w: replace(cluster.workers[w], since=now) for w in demoted})
    cluster = with_members(cluster, tuple(w for w in cluster.members if w not in demoted))
    return provisioning.expect_workers(without(cluster, demoted, "awaiting", "leaving"), demoted)


def break_generation(cluster: ClusterState, why: str, now: float, out: Commands) -> ClusterState:
    """Abort all members wherever they block. The survivors then leave the generation."""
    job = cluster.active
    if job is not None and job.succeeded:
        return finish_after_success(cluster, job, why, now, out)
    resets = cluster.resets + 1
    limit = cluster.limits.reset_limit
    cluster = replace(cluster, resets=resets, suspects=EMPTY)
    if limit is not None and resets > limit:
        return jobs.end(cluster, "failed", f"{resets} resets exceed reset_limit={limit}; the last: {why}", now, out)
    cluster = adopt_entered(cluster)
    some_left = cluster.stage is Stage.LEAVING and cluster.next_formation is None  # and into no other generation
    survivors = cluster.awaiting if some_left else cluster.member_set
    out.append(cmd.Record("world-broken", why, generation=cluster.generation))
    cluster = jobs.abort_generation(cluster, why, out)
    cluster = replace(cluster, stage=Stage.GATHERING, awaiting=survivors, broken_at=now)
    return leave_halt(cluster)


def adopt_entered(cluster: ClusterState) -> ClusterState:
    """Newcomers that are in the next generation already hold the training state: as members they leave it, and report theirs."""
    entered = cluster.entered_next & cluster.newcomers
    if not entered:
        return cluster
    cluster = with_members(without(cluster, entered, "newcomers"), (*cluster.members, *sorted(entered)))
    return replace(cluster, awaiting=cluster.awaiting | sorted(entered))


def ask_for_commits(cluster: ClusterState, out: Commands) -> ClusterState:
    """Ask the members for their commits. They stop at the next one until the driver has decided."""
    number = cluster.ask_number + 1
    out.append(cmd.AskLeave(cluster.generation, cluster.members, number))
    cluster = replace(cluster, stage=Stage.ASKED, awaiting=cluster.member_set)
    return replace(cluster, ask_number=number, highest_acknowledged=0)


def leave_halt(cluster: ClusterState) -> ClusterState:
    """The members do not stand still together any more. A cell that runs is over; later ones wait for the next halt."""
    halt = cluster.halt
    if halt == Halt():
        return cluster
    cells = halt.cells[1:] if halt.running or halt.ended else halt.cells
    return replace(cluster, halt=Halt(cells, halt.swap, halt.paused_by, halt.steps))


def cancel_next(cluster: ClusterState, out: Commands) -> ClusterState:
    """Drop the prepared generation. Members that already leave for it go on leaving, and form another world."""
    prepared, stage = cluster.next_formation, cluster.stage
    if prepared is not None:
        cluster = adopt_entered(cluster)
        workers = tuple(w for w in prepared.members if w in cluster.workers and w not in cluster.stopped)
        if workers:
            out.append(cmd.DropWorld(prepared.generation, workers))
        cluster = replace(cluster, next_formation=None, entered_next=EMPTY)
        if stage is Stage.LEAVING:  # their earlier reports are stale: they may have trained there, or used a store
            awaited = cluster.awaiting | (cluster.member_set & prepared.members)
            cluster = replace(cluster, cancelled_formation=prepared, awaiting=awaited)
    if stage in (Stage.ASKED, Stage.HALTED) and cluster.members:
        out.append(cmd.CancelLeave(cluster.generation, cluster.members))
    if stage in (Stage.ASKED, Stage.HALTED, Stage.PREPARING):
        cluster = replace(cluster, stage=Stage.RUNNING, awaiting=EMPTY)
    return leave_halt(cluster)


def finish_after_success(cluster: ClusterState, job: Job, why: str, now: float, out: Commands) -> ClusterState:
    """End the job after a break: a rank has finished, so nothing is repeated, and the other members stop."""
    cluster = replace(cluster, suspects=EMPTY)
    stragglers = tuple(w for w in cluster.members if w not in job.succeeded and w not in job.asked_to_stop)
    return jobs.finish(
        _stop_stragglers(cluster, stragglers, f"{why} after other ranks had finished", now, out), now, out
    )


def _stop_stragglers(
    cluster: ClusterState, stragglers: tuple[WorkerId, ...], why: str, now: float, out: Commands
) -> ClusterState:
    job = cluster.active
    if job is None or not stragglers:
        return cluster
    out.append(cmd.StopProgram(job.name, stragglers, why))
    return jobs.linger(replace(cluster, job=replace(job, asked_to_stop=job.asked_to_stop | stragglers)), now)


def worker_succeeded(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """The function returned on one rank. From now on the world is not changed, and nothing is repeated."""
    job = cluster.active
    assert job is not None
    if w in job.succeeded or w in job.asked_to_stop or (cluster.stage is Stage.GATHERING and w not in cluster.awaiting):
        return cluster
    job = replace(job, succeeded=job.succeeded | {w})
    cluster = with_worker(
        replace(cluster, job=job, halt=replace(cluster.halt, cells=(), swap=0, paused_by="", steps=0, steps_to=0)),
        replace(cluster.workers[w], state=WorkerState.SUCCEEDED),
    )
    match cluster.stage:
        case Stage.GATHERING:
            return finish_after_success(cluster, job, "the world broke", now, out)
        case Stage.PREPARING | Stage.ASKED | Stage.HALTED:
            return cancel_next(cluster, out)
        case Stage.LEAVING:
            inside = tuple(other for other in cluster.members if other in cluster.awaiting)
            outside = tuple(other for other in cluster.members if other not in cluster.awaiting)
            cluster = _stop_stragglers(
                cancel_next(cluster, out), outside, f"left for a change as {w} finished", now, out
            )
            out.append(cmd.CancelLeave(cluster.generation, inside))
            return replace(cluster, stage=Stage.RUNNING, awaiting=EMPTY)
    return cluster


def member_left(cluster: ClusterState, worker: Worker, now: float, out: Commands) -> ClusterState:
    """A member has left its generation. The job fails if no worker holds the training state any more."""
    cluster = with_worker(cluster, worker)
    if worker.has_state or state_may_live(cluster):
        return cluster
    why = f"the state's transfer to {worker.id} broke off halfway; no worker is left that holds the training state"
    return jobs.end(cluster, "failed", why, now, out)
