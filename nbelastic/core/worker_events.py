"""TODO."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generation_end,
    generations,
    jobs,
    losses,
    partitions,
    provisioning,
    reconfiguration,
    setup_cells,
)
from nbelastic.core.state import ClusterState, Stage, WorkerState, difference, format_ids, rank_text, with_worker
from nbelastic.core.state_holders import holds_newest_state, unassign_kept_state
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]
ABORTED = 1.0  # seconds that a member has to hear of an abort; a worker repeats its word after 2 s
UNEXPLAINED = 3  # breaks in a row at one commit that no death explains: then the program's own error ends the job


def _defer(cluster: ClusterState, event: ev.WorkerSucceeded | ev.ProgramEnded) -> ClusterState:
    """Keep a word of the planned world until all members have left the present one."""
    return (
        cluster
        if event in cluster.deferred_events
        else replace(cluster, deferred_events=(*cluster.deferred_events, event))
    )


def handle_deferred(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What was planned is now, or has come to nothing: words of it that were waiting are heard."""
    early, cluster = cluster.deferred_events, replace(cluster, deferred_events=())
    for event in early:
        if event.worker not in cluster.workers:
            continue
        if isinstance(event, ev.WorkerSucceeded):
            cluster = member_event(cluster, event, now, out)
        else:
            cluster = program_ended(cluster, event, now, out)
        cluster = reconfiguration.progress(cluster, now, out)
    return cluster


def worker_ready(cluster: ClusterState, event: ev.WorkerReady, now: float, out: Commands) -> ClusterState:
    """It waits for a world. Newcomers come at any time; a member is waited for when its generation is over."""
    w, job, old = event.worker, cluster.active, cluster.workers[event.worker]
    if old.state in (WorkerState.STOPPED, WorkerState.FAILED):
        return cluster
    if job is None or event.job != job.name:  # it began the program when the job was already over
        out.append(cmd.StopProgram(event.job, (w,), "the job is over"))
        return cluster
    if old.job != job.name or not old.generation <= event.generation <= cluster.highest_generation:
        return cluster
    worker = replace(
        old,
        state=WorkerState.READY,
        generation=event.generation,
        commit=event.commit,
        clean=event.clean,
        store=event.store,
        has_state=holds_newest_state(cluster, old, event),
    )
    cluster = unassign_kept_state(replace(cluster, hung=difference(cluster.hung, frozenset({w}))), worker)
    if w not in cluster.member_set:
        is_first = (
            not cluster.newcomers or cluster.too_few_since is not None
        )  # that of them which makes them enough counts
        cluster = replace(cluster, settling_since=now if is_first else cluster.settling_since)
        return with_worker(
            replace(cluster, newcomers=cluster.newcomers | {w}, starting=difference(cluster.starting, frozenset({w}))),
            worker,
        )
    left = event.generation >= cluster.generation  # it may have been in a prepared generation that came to nothing
    last = (
        cluster.cancelled_formation.generation
        if cluster.cancelled_formation is not None and w in cluster.cancelled_formation.members
        else cluster.generation
    )
    match cluster.stage:
        case Stage.GATHERING | Stage.LEAVING if event.generation >= last:
            return generation_end.member_left(
                replace(cluster, awaiting=difference(cluster.awaiting, frozenset({w}))), worker, now, out
            )
        case Stage.LEAVING if left and w in cluster.awaiting:  # said before it was told that it will not be
            out.append(cmd.AbortWorld(last, (w,), "the prepared generation was cancelled"))
        case Stage.GATHERING if w in cluster.awaiting:  # it never heard of the generation that broke
            out.append(cmd.AbortWorld(last, (w,), "this generation is over"))
        case Stage.FORMING if not left and w in cluster.awaiting and cluster.formation:  # it missed the order
            out.append(replace(cluster.formation, to=(w,)))
        case Stage.FORMING | Stage.RUNNING | Stage.PREPARING | Stage.ASKED if left:  # nobody told it to leave
            return _suspect(cluster, w, "its program left the elastic loop without being asked", now)
    return cluster


MemberEvent = ev.StoreOffered | ev.WorkerFormed | ev.LeaveAcknowledged | ev.WorkerRaised | ev.WorkerSucceeded


def member_event(cluster: ClusterState, event: MemberEvent, now: float, out: Commands) -> ClusterState:
    """What members say of the elastic loop; news of a finished generation is dropped."""
    w, plan = event.worker, cluster.next_formation
    if (
        plan is not None and event.generation == plan.generation and w in plan.members
    ):  # it is ahead of those who have not left
        if cluster.stage is not Stage.LEAVING:
            return cluster
        if isinstance(event, ev.WorkerFormed):
            return replace(cluster, entered_next=cluster.entered_next | {w})
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
            return replace(
                cluster, awaiting=cluster.awaiting - {w}, acknowledged_commits=(*cluster.acknowledged_commits, commit)
            )
        case ev.WorkerRaised(intact=intact, error=error):
            late = now - cluster.broken_at > ABORTED  # before that the abort may still be on its way
            if cluster.stage is Stage.GATHERING and w in cluster.awaiting and late:  # it missed the abort
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
    """Connections broke and nobody died. Once that is the network's fault; again and again at one commit, the program's."""
    begun = max((cluster.workers[w].commit for w in cluster.members), default=0)
    count, at = cluster.unexplained_breaks
    count = count + 1 if at == begun else 1
    culprit = min(cluster.suspects)
    if (
        count >= UNEXPLAINED and not cluster.partition_check.pairs
    ):  # while probes are under way it may still be the network
        why = f"{rank_text(cluster, culprit)} raised {cluster.suspect_error} ({count} times in a row, and no lost worker explains it)"
        return jobs.end(cluster, "failed", why, now, out, culprit=culprit)
    why = f"connections of {format_ids(cluster.suspects)} broke though every worker lives"
    cluster = partitions.begin(cluster, now, out)
    return generation_end.break_generation(replace(cluster, unexplained_breaks=(count, begun)), why, now, out)


def _suspect(cluster: ClusterState, w: WorkerId, error: str, now: float) -> ClusterState:
    """It lost a connection though nobody is known to be dead: the news of a death may be on its way."""
    job = cluster.active
    if job is None or w in job.succeeded or w in job.asked_to_stop:
        return cluster
    if cluster.suspects:
        return replace(cluster, suspects=cluster.suspects | {w})
    return replace(cluster, suspects=frozenset((w,)), suspect_since=now, suspect_error=error)


def program_ended(cluster: ClusterState, event: ev.ProgramEnded, now: float, out: Commands) -> ClusterState:
    """The program came to its end on `w`: a result, the user's error, or the end of what was told to stop."""
    w, name, error = event.worker, event.job, event.error
    worker, job = cluster.workers[w], cluster.active
    if worker.job != name:
        return cluster
    if any(word.worker == w for word in cluster.deferred_events):
        return _defer(cluster, event)
    stopped = worker.state is WorkerState.STOPPED
    state = WorkerState.STOPPED if stopped else WorkerState.READY
    gone = frozenset({w})
    cluster = with_worker(cluster, replace(worker, job="", state=state, has_state=False))
    cluster = replace(
        cluster, starting=difference(cluster.starting, gone), newcomers=difference(cluster.newcomers, gone)
    )
    if job is None or job.name != name:
        return setup_cells.run_next(cluster, w, now, out)
    if stopped or w in job.asked_to_stop:
        leavers = cluster.leaving & gone
        cluster = losses.remove_from_job(cluster, gone, f"{w} did not finish", now, out, keep=True)
        return provisioning.stop_workers(cluster, leavers, out)
    if not error:
        return _program_returned(cluster, w, now, out)
    if cluster.kept_state is not None and w == cluster.kept_state.reader:
        why = f"{w} could not read the training state that {cluster.kept_state.by} has kept: {error}"
        return jobs.end(cluster, "failed", why, now, out, culprit=w)
    if job.formed and w not in cluster.member_set:
        out.append(cmd.Record("worker-failed", f"newcomer {w} failed: {error}", host=w.host, worker=str(w)))
        return setup_cells.fail_worker(cluster, w, error)
    return jobs.end(cluster, "failed", f"{rank_text(cluster, w)} raised {error}", now, out, culprit=w)


def _program_returned(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """A member whose program is over has finished, whatever became of its own word of that."""
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
