"""What workers report from the elastic loop, and the ends of their programs.

`member_event` and `break_unexplained` decide whose fault an exception is: the user's program, or a lost worker.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generation_end,
    generations,
    halts,
    jobs,
    losses,
    partitions,
    provisioning,
    reconfiguration,
    setup_cells,
    swaps,
)
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import (
    ClusterState,
    HostPhase,
    Stage,
    Worker,
    WorkerState,
    format_ids,
    rank_text,
    with_worker,
    without,
)
from nbelastic.core.state_holders import holds_newest_state, unassign_kept_state
from nbelastic.errors import JobStoppedError
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

ABORT_ARRIVES = 1.0  # seconds; after them a report from the broken generation means that the abort was lost
ABORT_WAITS = 0.001  # seconds more for each member: a report of one of many may have waited for the driver
# In errors after which a process may not be able to use its GPU any more: see `worker.gpu_errors`.
GPU_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUDNN_STATUS_")
# In errors of torch. A newcomer may find memory on its GPU that an ended worker has held for a moment longer.
NO_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")
MAX_ERROR = 200  # characters of an error in the text of a break
MOST_UNEXPLAINED = 3  # breaks in a row at one commit without a lost worker; then the job fails with the program's error


def _defer(cluster: ClusterState, event: ev.WorkerSucceeded | ev.ProgramEnded) -> ClusterState:
    """Keep an event of the next generation until all members have left the present one."""
    deferred = cluster.deferred_events
    return cluster if event in deferred else replace(cluster, deferred_events=(*deferred, event))


def handle_deferred(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Handle events of the next generation, which has begun by now or was cancelled."""
    deferred, cluster = cluster.deferred_events, replace(cluster, deferred_events=())
    for event in deferred:
        if event.worker not in cluster.workers:
            continue
        if isinstance(event, ev.WorkerSucceeded):
            cluster = member_event(cluster, event, now, out)
        else:
            cluster = program_ended(cluster, event, now, out)
        cluster = reconfiguration.progress(cluster, now, out)
    return cluster


def takes_part(worker: Worker) -> bool:
    """Whether it may still take part in the job."""
    return worker.state not in (WorkerState.STOPPED, WorkerState.FAILED)


def ready(old: Worker, event: ev.WorkerReady, *, holds_state: bool) -> Worker:
    """The record of a worker that waits for a world."""
    return replace(
        old,
        state=WorkerState.READY,
        generation=event.generation,
        commit=event.commit,
        clean=event.clean,
        store=event.store,
        has_state=holds_state,
        program=event.program,
        breakpoint_at="",  # pdb does not report each way out of it
    )


def missed_abort(cluster: ClusterState, now: float) -> bool:
    """Whether a report from the broken generation comes so late that the abort did not reach the worker."""
    return now - cluster.broken_at > ABORT_ARRIVES + ABORT_WAITS * len(cluster.members)


def worker_ready(cluster: ClusterState, event: ev.WorkerReady, now: float, out: Commands) -> ClusterState:
    """A worker waits for a world: a newcomer, or a member that has left its generation."""
    w, job, old = event.worker, cluster.active, cluster.workers[event.worker]
    if not takes_part(old):
        return cluster
    if job is None or event.job != job.name:  # the program began after the job had ended
        out.append(cmd.StopProgram(event.job, (w,), "the job is over"))
        return cluster
    if old.job != job.name or not old.generation <= event.generation <= cluster.highest_generation:
        return cluster
    if event.program != swaps.wanted(cluster):
        return swaps.other_program(cluster, event, out)
    worker = ready(old, event, holds_state=holds_newest_state(cluster, old, event))
    cluster = unassign_kept_state(replace(cluster, hung=cluster.hung - {w}), worker)
    if w not in cluster.member_set:
        # settling begins with the first newcomer, and again with the one that makes them enough
        is_first = not cluster.newcomers or cluster.too_few_since is not None
        cluster = replace(cluster, settling_since=now if is_first else cluster.settling_since)
        cluster = replace(without(cluster, (w,), "starting"), newcomers=cluster.newcomers | {w})
        return with_worker(cluster, worker)
    has_left = event.generation >= cluster.generation  # or a later one that was cancelled
    cancelled = cluster.cancelled_formation
    last = cancelled.generation if cancelled is not None and w in cancelled.members else cluster.generation
    match cluster.stage:
        case Stage.GATHERING | Stage.LEAVING if event.generation >= last:
            return generation_end.member_left(without(cluster, (w,), "awaiting"), worker, now, out)
        case Stage.LEAVING if has_left and w in cluster.awaiting:  # it reported before the cancellation reached it
            out.append(cmd.AbortWorld(last, (w,), "the prepared generation was cancelled"))
        case Stage.GATHERING if w in cluster.awaiting:  # it never received the formation that broke
            out.append(cmd.AbortWorld(last, (w,), "this generation is over"))
        case Stage.FORMING if not has_left and w in cluster.awaiting and cluster.formation:  # it did not receive this
            out.append(replace(cluster.formation, to=(w,)))
        case Stage.FORMING | Stage.RUNNING | Stage.PREPARING | Stage.ASKED | Stage.HALTED if has_left:
            # no message asked it to leave
            return _suspect(cluster, w, "its program left the elastic loop without being asked", now)
    return cluster


MemberEvent = (
    ev.StoreOffered | ev.WorkerFormed | ev.LeaveAcknowledged | ev.WorkerHalted | ev.WorkerRaised | ev.WorkerSucceeded
)


def member_event(cluster: ClusterState, event: MemberEvent, now: float, out: Commands) -> ClusterState:
    """A member's report from the elastic loop. Reports of an earlier generation are dropped."""
    w, prepared = event.worker, cluster.next_formation
    joins = w in cluster.member_set or w in cluster.newcomers
    if joins and prepared is not None and event.generation == prepared.generation:
        if cluster.stage is not Stage.LEAVING:
            return cluster
        if isinstance(event, ev.WorkerFormed) and w not in cluster.entered_next:
            cluster = with_worker(cluster, replace(generations.formed(cluster.workers[w]), store=""))
            return replace(cluster, entered_next=cluster.entered_next | {w})
        if isinstance(event, ev.StoreOffered):  # it has made two commits there, and offers a store once
            return with_worker(cluster, replace(cluster.workers[w], store=event.store))
        return _defer(cluster, event) if isinstance(event, ev.WorkerSucceeded) else cluster
    if not cluster.active or event.generation != cluster.generation or w not in cluster.member_set:
        return cluster
    match event:
        case ev.StoreOffered(store=store):
            return with_worker(cluster, replace(cluster.workers[w], store=store))
        case ev.WorkerFormed():
            forming = cluster.stage is Stage.FORMING and w in cluster.awaiting
            return generations.worker_formed(cluster, w, now, out) if forming else cluster
        case ev.LeaveAcknowledged(commit=commit, ask=ask):
            if cluster.stage is not Stage.ASKED or w not in cluster.awaiting or ask != cluster.ask_number:
                return cluster
            highest = max(cluster.highest_acknowledged, commit)
            return replace(without(cluster, (w,), "awaiting"), highest_acknowledged=highest)
        case ev.WorkerHalted():
            return halts.worker_halted(cluster, event)
        case ev.WorkerRaised(intact=intact, error=error):
            if cluster.stage is Stage.GATHERING and w in cluster.awaiting and missed_abort(cluster, now):
                out.append(cmd.AbortWorld(cluster.generation, (w,), "this generation is over"))
            if cluster.stage is Stage.GATHERING or w in cluster.active.asked_to_stop:
                return cluster
            if intact:
                return jobs.end(cluster, "failed", f"{rank_text(cluster, w)} raised {error}", now, out, culprit=w)
            return _suspect(cluster, w, error, now)
        case ev.WorkerSucceeded():
            return generation_end.worker_succeeded(cluster, w, now, out)
        case _:
            assert_never(event)


def break_unexplained(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Break the generation: connections broke, but no worker was lost.

    The network may be the cause. If that repeats at one commit, it is the program, and the job fails.
    """
    commit = max((cluster.workers[w].commit for w in cluster.members), default=0)
    count, at = cluster.unexplained_breaks
    count = count + 1 if at == commit else 1
    first = cluster.first_suspect
    culprit = first if first is not None and first in cluster.suspects else min(cluster.suspects)
    if count >= MOST_UNEXPLAINED and not cluster.partition_check.pairs:  # the probes may still blame the network
        why = f"{rank_text(cluster, culprit)} raised {cluster.suspect_error} ({count} times in a row, and no lost worker explains it)"
        if swaps.is_on_trial(cluster):
            return swaps.reject(cluster, why, now, out)
        return jobs.end(cluster, "failed", why, now, out, culprit=culprit)
    why = f"connections of {format_ids(cluster.suspects)} broke though every worker lives: {cluster.suspect_error[:MAX_ERROR]}"
    cluster = partitions.begin(cluster, now, out)
    return generation_end.break_generation(replace(cluster, unexplained_breaks=(count, commit)), why, now, out)


def _suspect(cluster: ClusterState, w: WorkerId, error: str, now: float) -> ClusterState:
    """Note that the worker lost a connection. The report of the lost worker that explains it may be on its way."""
    job = cluster.active
    if job is None or w in job.succeeded or w in job.asked_to_stop:
        return cluster
    if cluster.suspects:
        return replace(cluster, suspects=cluster.suspects | {w})
    return replace(cluster, suspects=PersistentSet((w,)), suspect_since=now, first_suspect=w, suspect_error=error)


def program_ended(cluster: ClusterState, event: ev.ProgramEnded, now: float, out: Commands) -> ClusterState:
    """The program on a worker has ended. After an error of the GPU its process may run no other program there."""
    w = event.worker
    cluster = _program_ended(cluster, event, now, out)
    if _is_of_gpu(event.error) and cluster.active is None and w in cluster.workers and w not in cluster.stopped:
        why = f"{w} is replaced, as its process may not be able to use its GPU after {event.error}"
        return losses.replace_worker(cluster, w, why, now, out, blameless=True)
    return cluster


def _program_ended(cluster: ClusterState, event: ev.ProgramEnded, now: float, out: Commands) -> ClusterState:
    """The program has ended with a result, with an error, or because it was asked to stop."""
    w, name, error = event.worker, event.job, event.error
    worker, job = cluster.workers[w], cluster.active
    if worker.job != name:
        return cluster
    if any(deferred.worker == w for deferred in cluster.deferred_events):
        return _defer(cluster, event)
    stopped = worker.state is WorkerState.STOPPED
    state = WorkerState.STOPPED if stopped else WorkerState.READY
    cluster = with_worker(cluster, replace(worker, job="", state=state, has_state=False, breakpoint_at=""))
    cluster = without(cluster, (w,), "starting", "newcomers")
    if job is None or job.name != name:
        host = cluster.hosts[w.host]
        if host.phase is HostPhase.DRAINING or w.slot >= host.spec.slots:
            return provisioning.stop_workers(cluster, (w,), out)
        return setup_cells.run_next(provisioning.scale_down(cluster, now, out), w, now, out)
    if stopped or w in job.asked_to_stop:
        leavers = cluster.leaving & {w}
        cluster = losses.remove_from_job(cluster, (w,), f"{w} did not finish", now, out, alive=True)
        return provisioning.stop_workers(cluster, leavers, out)
    if not error:
        return _program_returned(cluster, w, now, out)
    if cluster.kept_state is not None and w == cluster.kept_state.reader:
        why = f"{w} could not read the training state that {cluster.kept_state.by} has kept: {error}"
        return jobs.end(cluster, "failed", why, now, out, culprit=w)
    if job.formed and w not in cluster.member_set:
        is_first = not cluster.hosts[w.host].slots[w.slot].failures
        if is_first and (_is_of_gpu(error) or any(text in error for text in NO_MEMORY)):
            what = "could not use its GPU" if _is_of_gpu(error) else "found too little memory"
            why = f"newcomer {w} {what}, and is started once more: {error}"
            return losses.replace_worker(cluster, w, why, now, out)
        out.append(cmd.Record("worker-failed", f"newcomer {w} failed: {error}", host=w.host, worker=str(w)))
        return setup_cells.fail_worker(cluster, w, error)
    return jobs.end(cluster, "failed", f"{rank_text(cluster, w)} raised {error}", now, out, culprit=w)


def _is_of_gpu(error: str) -> bool:
    """Whether the error is of this worker's GPU, and not that of another rank, for which the job was stopped."""
    is_others = error.startswith(f"{JobStoppedError.__module__}.{JobStoppedError.__qualname__}")
    return any(text in error for text in GPU_ERRORS) and "out of memory" not in error and not is_others


def _program_returned(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """A member whose program has ended has finished, even if its `WorkerSucceeded` was lost."""
    job = cluster.active
    assert job is not None
    if w in cluster.member_set:
        idle = cluster.workers[w]
        cluster = with_worker(generation_end.worker_succeeded(cluster, w, now, out), idle)
    elif job.formed:
        out.append(cmd.Record("worker-idle", f"newcomer {w} ended its program without training", worker=str(w)))
        return cluster
    job = cluster.active
    assert job is not None
    return jobs.finish(replace(cluster, job=replace(job, ended=job.ended | {w})), now, out)
