"""`step(world, event, now) -> (world, commands)`: every decision about who trains with whom.

The shape is dask.distributed's `worker_state_machine` (stimulus in, instructions out); "not yet" always comes with its
reason, as in torchft's `quorum_compute`. Stale news is dropped first. Nothing in here waits, locks or calls back.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generations,
    hangs,
    jobs,
    liveness,
    mesh,
    networks,
    provisioning,
    reconfiguration,
    script,
    script_rounds,
    setup,
    stalls,
    starting,
    stopping,
    waits,
)
from nbelastic.core.holders import alone_holds_state, claims, unheard
from nbelastic.core.state import ClusterState, HostPhase, Stage, Worker, WorkerState, first, less, put
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

__all__ = ["deadline", "step"]

Commands = list[cmd.Command]


ABORTED = 1.0  # seconds that a member has to hear of an abort; a worker repeats its word after 2 s
YOUNG = 2.0  # seconds of life below which each death counts: nothing is forked again and again without a pause
UNEXPLAINED = 3  # breaks in a row at one commit that no death explains: then the program's own error ends the job


def step(cluster: ClusterState, event: ev.Event, now: float) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The world after `event`, which the driver received at `now` (seconds, monotonic), and what is to be done."""
    out: Commands = []
    before = cluster
    cluster = _pass_time(cluster, now, out)
    worker = getattr(event, "worker", None)
    if worker is None or worker in cluster.workers:
        cluster = _take(cluster, event, now, out)
    if cluster.mesh.pairs:
        cluster = mesh.progress(cluster, now, out)
    if cluster.probing:  # after the mesh, which may have left out a host with which a newcomer is probed
        cluster = networks.progress(cluster, now, out)
    if cluster.kept is not None:  # on a host which any of those may have left out
        cluster = hangs.progress(cluster, now, out)
    if cluster.stopping:
        cluster = stopping.retire(cluster, now, out)
    if cluster.trial is not None or cluster.outdated:
        cluster = setup.progress(cluster, now, out)
    if cluster.script is not None or cluster.external_nodes:
        cluster = script.progress(before, cluster, now, out)
    cluster = reconfiguration.progress(provisioning.let_in(cluster, now), now, out)
    if cluster.early and cluster.plan is None:
        cluster = _hear_early(cluster, now, out)
    cluster = waits.renew(provisioning.let_in(cluster, now), now)
    cluster = stopping.expect_ends(cluster, now)
    if cluster.still is not None:
        cluster = stalls.explain(cluster)
    return cluster, tuple(out)


def _hear_later(cluster: ClusterState, event: ev.WorkerSucceeded | ev.ProgramEnded) -> ClusterState:
    """Keep a word of the planned world until all members have left the present one."""
    return cluster if event in cluster.early else replace(cluster, early=(*cluster.early, event))


def _hear_early(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What was planned is now, or has come to nothing: words of it that were waiting are heard."""
    early, cluster = cluster.early, replace(cluster, early=())
    for event in early:
        if event.worker in cluster.workers:  # type: ignore[attr-defined]  # words and ends of programs have one
            cluster = reconfiguration.progress(_take(cluster, event, now, out), now, out)
    return cluster


def deadline(cluster: ClusterState, now: float) -> float:
    """When, `now` at the earliest, to send `Ticked` if nothing else happens; infinity if never."""
    limits = cluster.limits
    times = (
        cluster.until,
        cluster.wake_at,
        cluster.linger_until or NEVER,
        cluster.close_by,
        min(cluster.ends.values(), default=NEVER),
        cluster.suspect_since + limits.timeouts.grace if cluster.suspects else NEVER,
        generations.short_until(cluster),
        waits.deadline(cluster),
        cluster.mesh.until,
        cluster.setup_by,
        min(cluster.held.values(), default=NEVER),
        min((admission.until for admission in cluster.probing.values()), default=NEVER) if cluster.probing else NEVER,
        script_rounds.deadline(cluster.script) if cluster.script is not None else NEVER,
    )
    return max(now, min(times))


def _pass_time(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What has a deadline of its own, and it has come. Time passes with every event, not only with `Ticked`."""
    limits = cluster.limits
    if cluster.linger_until and now >= cluster.linger_until:
        cluster = stopping.kill_lingering(cluster, now, out)
    if now >= min(cluster.ends.values(), default=NEVER):
        cluster = stopping.give_up(cluster, now, out)
    if now >= cluster.setup_by:
        cluster = stopping.kill_overdue(cluster, now, out)
    if cluster.suspects and now >= cluster.suspect_since + limits.timeouts.grace:
        cluster = _break_unexplained(cluster, now, out)
    cluster = waits.act(cluster, now, out)
    if now >= generations.short_until(cluster):
        cluster = generations.give_up(cluster, now, out)
    return provisioning.staff(starting.overdue(cluster, now, out), now, out) if now >= cluster.wake_at else cluster


def _take(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    match event:
        case ev.WorkerReady():
            return _ready(cluster, event, now, out)
        case ev.WorkerFormed() | ev.LeaveAcknowledged() | ev.WorkerRaised() | ev.WorkerSucceeded() | ev.StoreOffered():
            return _take_word(cluster, event, now, out)
        case ev.WorkerPrepared():
            return reconfiguration.prepared(cluster, event, now)
        case ev.HostAdded() | ev.HostRemoved() | ev.HostsDiscovered() | ev.Scaled():
            return _take_order(cluster, event, now, out)
        case ev.AgentReady():
            return networks.agent_ready(cluster, event, now, out)
        case ev.ExternalAccessOpened(address=address):
            return networks.open_door(cluster, address, now, out)
        case ev.AgentLost(host=name, reason=reason):
            return generations.host_gone(cluster, name, reason, now, out)
        case ev.Probed():
            return mesh.probed(networks.probed(cluster, event), event)
        case ev.WorkerStarted(worker=w, pid=pid):
            return put(cluster, replace(cluster.workers[w], pid=pid))
        case ev.WorkerExited(worker=w, code=code):
            return generations.gone(
                cluster, w, f"{w} died ({exit_text(code)})", now, out, blameless=_stuck(cluster.workers[w], code, now)
            )
        case ev.WorkerFrozen(worker=w, state=state):
            out.append(cmd.StopWorker(w, kill=True))
            return generations.gone(cluster, w, f"{w} froze ({state})", now, out)
        case ev.WorkerSilent():
            return liveness.silent(waits.silent(cluster, event, now), event, now, out)
        case ev.WorkerResponded(worker=w):
            return liveness.heard(cluster, w)
        case ev.WorkerHung():
            return hangs.asks(cluster, event, now, out)
        case ev.StateKept():
            return hangs.kept(cluster, event, out)
        case ev.RestartRequested(worker=w, by=by):
            return _restart(cluster, w, by, now, out)
        case ev.WorkerRegistered(worker=w):
            return setup.registered(cluster, w, now, out)
        case ev.SetupEnded():
            return setup.ended(cluster, event, now, out)
        case ev.SetupSubmitted():
            return setup.submit(cluster, event, now, out)
        case ev.SetupCleared(key=key):
            return setup.clear(cluster, key, now, out)
        case ev.ProgramEnded():
            return _program_ended(cluster, event, now, out)
        case ev.DiscoveryFailed(reason=reason):
            return _discovery_failed(cluster, reason, now, out)
        case ev.JobSubmitted(job=job):
            return jobs.submit(cluster, job, now, out)
        case ev.JobStopRequested(job=job, reason=reason):
            if cluster.active is not None and cluster.active.name == job:
                return jobs.end(cluster, "stopped", reason, now, out)
            return script.stop(cluster, job, reason, now, out)
        case ev.StopRequested():
            return stopping.stop(cluster, event, now, out)
        case ev.PositionReported():
            return stalls.heard(waits.heard(cluster, event, now), event, now, out)
        case ev.StallDetected() | ev.StallResolved():
            return stalls.heard(cluster, event, now, out)
        case sev.ScriptSubmitted():
            return script.submit(cluster, event, now, out)
        case sev.ExternalNodeJoined():
            return script.came(cluster, event, now, out)
        case sev.NodeReady():
            return script.ready(cluster, event, now, out)
        case sev.NodeStarted() | sev.NodeFailed() | sev.NodeSucceeded() | sev.NodeLeft():
            return script.take(cluster, event, now, out)
        case ev.Ticked():
            return cluster
        case _:
            raise TypeError(f"{type(event).__name__} is no event that step() knows")


Order = ev.HostAdded | ev.HostRemoved | ev.HostsDiscovered | ev.Scaled


def _take_order(cluster: ClusterState, event: Order, now: float, out: Commands) -> ClusterState:
    """People and discovery change which hosts there are and how many workers may run."""
    if cluster.stopping:
        return cluster
    before = cluster
    match event:
        case ev.HostAdded(host=spec, by=by):
            cluster = replace(cluster, removed=cluster.removed - {spec.name})
            cluster = provisioning.add(cluster, spec, now, out, by=by or "discovery", by_hand=True)
        case ev.HostRemoved():
            cluster = _remove(replace(cluster, removed=cluster.removed | {event.name}), event, now, out)
            cluster = script.remove(cluster, event, out)
        case ev.HostsDiscovered(hosts=specs):
            cluster = provisioning.discovered(replace(cluster, discovered=True), specs, now, out)
        case ev.Scaled(min=low, max=high, by=by):
            out.append(cmd.Record("scaled", f"min {low}, max {high if high is not None else 'unlimited'} by {by}"))
            cluster = replace(cluster, limits=replace(cluster.limits, min=low, max=high), since=now)
        case _:
            assert_never(event)
    provisioning.tell_of_room(before, cluster, out)
    return provisioning.staff(cluster, now, out)


def _discovery_failed(cluster: ClusterState, reason: str, now: float, out: Commands) -> ClusterState:
    """Fatal only if it has never answered and no other host is known; otherwise the hosts stay as they are."""
    if not cluster.discovered and not cluster.hosts:
        return stopping.stop(cluster, ev.StopRequested(f"host discovery failed: {reason}"), now, out)
    out.append(cmd.Record("discovery-failed", reason))
    return cluster


def _remove(cluster: ClusterState, event: ev.HostRemoved, now: float, out: Commands) -> ClusterState:
    """Drain it; or, `now`, take it away as if it had died, but without a strike."""
    name, by = event.name, event.by or "discovery"
    host = cluster.hosts.get(name)
    if host is None or (host.phase is HostPhase.DRAINING and not event.now):
        return cluster
    cluster = provisioning.drain(cluster, name, "at once" if event.now else "at the next commit", by, out)
    workers = provisioning.on_host(cluster, name)
    if event.now:
        cluster = generations.lose(cluster, workers, f"host {name} was removed at once", now, out, keep=True)
        cluster = provisioning.stop_workers(cluster, workers, out, kill=True)
    else:
        cluster = provisioning.dismiss(cluster, workers, now, out)
    return provisioning.retire_empty(cluster, name, out)


def _restart(cluster: ClusterState, w: WorkerId, by: str, now: float, out: Commands) -> ClusterState:
    """A person has lost patience with it: it is killed and replaced, without a strike. Not if the job would be lost."""
    if cluster.stopping or w in cluster.stopped:
        return cluster
    if alone_holds_state(cluster, w):
        text = f"{by}: {w} is not restarted, as it alone holds the training state"
        out.append(cmd.Record("order-refused", text, host=w.host, worker=str(w)))
        return cluster
    out.append(cmd.StopWorker(w, kill=True))
    return generations.gone(cluster, w, f"{w} was restarted by {by}", now, out, blameless=True)


def _ready(cluster: ClusterState, event: ev.WorkerReady, now: float, out: Commands) -> ClusterState:
    """It waits for a world. Newcomers come at any time; a member is waited for when its generation is over."""
    w, job, old = event.worker, cluster.active, cluster.workers[event.worker]
    if old.state in (WorkerState.STOPPED, WorkerState.FAILED):
        return cluster
    if job is None or event.job != job.name:  # it began the program when the job was already over
        out.append(cmd.StopProgram(event.job, (w,), "the job is over"))
        return cluster
    if old.job != job.name or not old.generation <= event.generation <= cluster.numbered:
        return cluster
    worker = replace(
        old,
        state=WorkerState.READY,
        generation=event.generation,
        commit=event.commit,
        clean=event.clean,
        store=event.store,
        has_state=claims(cluster, old, event),
    )
    cluster = unheard(replace(cluster, stuck=less(cluster.stuck, frozenset({w}))), worker)
    if w not in cluster.ranked:
        is_first = not cluster.waiting or cluster.short_since is not None  # that of them which makes them enough counts
        cluster = replace(cluster, since=now if is_first else cluster.since)
        return put(
            replace(cluster, waiting=cluster.waiting | {w}, starting=less(cluster.starting, frozenset({w}))), worker
        )
    left = event.generation >= cluster.generation  # it may have been in a prepared generation that came to nothing
    last = (
        cluster.undone.generation if cluster.undone is not None and w in cluster.undone.members else cluster.generation
    )
    match cluster.stage:
        case Stage.GATHERING | Stage.LEAVING if event.generation >= last:
            return generations.left(replace(cluster, awaiting=less(cluster.awaiting, frozenset({w}))), worker, now, out)
        case Stage.LEAVING if left and w in cluster.awaiting:  # said before it was told that it will not be
            out.append(cmd.AbortWorld(last, (w,), "the prepared generation was called off"))
        case Stage.GATHERING if w in cluster.awaiting:  # it never heard of the generation that broke
            out.append(cmd.AbortWorld(last, (w,), "this generation is over"))
        case Stage.FORMING if not left and w in cluster.awaiting and cluster.order:  # it missed the order
            out.append(replace(cluster.order, to=(w,)))
        case Stage.FORMING | Stage.RUNNING | Stage.PREPARING | Stage.ASKED if left:  # nobody told it to leave
            return _suspect(cluster, w, "its program left the elastic loop unasked", now)
    return cluster


Word = ev.StoreOffered | ev.WorkerFormed | ev.LeaveAcknowledged | ev.WorkerRaised | ev.WorkerSucceeded


def _take_word(cluster: ClusterState, event: Word, now: float, out: Commands) -> ClusterState:
    """What members say of the elastic loop; news of a finished generation is dropped."""
    w, plan = event.worker, cluster.plan
    if (
        plan is not None and event.generation == plan.generation and w in plan.members
    ):  # it is ahead of those who have not left
        if cluster.stage is not Stage.LEAVING:
            return cluster
        if isinstance(event, ev.WorkerFormed):
            return replace(cluster, ahead=cluster.ahead | {w})
        return _hear_later(cluster, event) if isinstance(event, ev.WorkerSucceeded) else cluster
    if not cluster.active or event.generation != cluster.generation or w not in cluster.ranked:
        return cluster
    match event:
        case ev.StoreOffered(store=store):
            return put(cluster, replace(cluster.workers[w], store=store))
        case ev.WorkerFormed():
            forming = cluster.stage is Stage.FORMING and w in cluster.awaiting
            return generations.formed(cluster, w, now, out) if forming else cluster
        case ev.LeaveAcknowledged(commit=commit, ask=ask):
            if cluster.stage is not Stage.ASKED or w not in cluster.awaiting or ask != cluster.asks:
                return cluster
            return replace(cluster, awaiting=cluster.awaiting - {w}, offers=(*cluster.offers, commit))
        case ev.WorkerRaised(intact=intact, error=error):
            late = now - cluster.broken_at > ABORTED  # before that the abort may still be on its way
            if cluster.stage is Stage.GATHERING and w in cluster.awaiting and late:  # it missed the abort
                out.append(cmd.AbortWorld(cluster.generation, (w,), "this generation is over"))
            if cluster.stage is Stage.GATHERING or w in cluster.active.late:
                return cluster
            if intact:
                return jobs.end(cluster, "failed", f"{_rank(cluster, w)} raised {error}", now, out, culprit=w)
            return _suspect(cluster, w, error, now)
        case ev.WorkerSucceeded():
            return generations.succeeded(cluster, w, now, out)
        case _:
            assert_never(event)


def _break_unexplained(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Connections broke and nobody died. Once that is the network's fault; again and again at one commit, the program's."""
    begun = max((cluster.workers[w].commit for w in cluster.members), default=0)
    count, at = cluster.unexplained
    count = count + 1 if at == begun else 1
    culprit = min(cluster.suspects)
    if count >= UNEXPLAINED and not cluster.mesh.pairs:  # while probes are under way it may still be the network
        why = f"{_rank(cluster, culprit)} raised {cluster.complaint} ({count} times in a row, and no death explains it)"
        return jobs.end(cluster, "failed", why, now, out, culprit=culprit)
    why = f"connections of {first(cluster.suspects)} broke though every worker lives"
    cluster = mesh.begin(cluster, now, out)
    return generations.break_generation(replace(cluster, unexplained=(count, begun)), why, now, out)


def _suspect(cluster: ClusterState, w: WorkerId, error: str, now: float) -> ClusterState:
    """It lost a connection though nobody is known to be dead: the news of a death may be on its way."""
    job = cluster.active
    if job is None or w in job.succeeded or w in job.late:
        return cluster
    if cluster.suspects:
        return replace(cluster, suspects=cluster.suspects | {w})
    return replace(cluster, suspects=frozenset((w,)), suspect_since=now, complaint=error)


def _program_ended(cluster: ClusterState, event: ev.ProgramEnded, now: float, out: Commands) -> ClusterState:
    """The program came to its end on `w`: a result, the user's error, or the end of what was told to stop."""
    w, name, error = event.worker, event.job, event.error
    worker, job = cluster.workers[w], cluster.active
    if worker.job != name:
        return cluster
    if any(word.worker == w for word in cluster.early):  # type: ignore[attr-defined]  # so has this time
        return _hear_later(cluster, event)
    stopped = worker.state is WorkerState.STOPPED
    state = WorkerState.STOPPED if stopped else WorkerState.READY
    gone = frozenset({w})
    cluster = put(cluster, replace(worker, job="", state=state, has_state=False))
    cluster = replace(cluster, starting=less(cluster.starting, gone), waiting=less(cluster.waiting, gone))
    if job is None or job.name != name:
        return setup.run_next(cluster, w, now, out)
    if stopped or w in job.late:
        leavers = cluster.leaving & gone
        cluster = generations.lose(cluster, gone, f"{w} did not finish", now, out, keep=True)
        return provisioning.stop_workers(cluster, leavers, out)
    if not error:
        return _program_returned(cluster, w, now, out)
    if cluster.kept is not None and w == cluster.kept.heir:
        why = f"{w} could not read the training state that {cluster.kept.by} has kept: {error}"
        return jobs.end(cluster, "failed", why, now, out, culprit=w)
    if job.formed and w not in cluster.ranked:
        out.append(cmd.Record("worker-failed", f"newcomer {w} failed: {error}", host=w.host, worker=str(w)))
        return setup.fail_worker(cluster, w, error)
    return jobs.end(cluster, "failed", f"{_rank(cluster, w)} raised {error}", now, out, culprit=w)


def _program_returned(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """A member whose program is over has finished, whatever became of its own word of that."""
    job = cluster.active
    assert job is not None
    if w in cluster.ranked:
        idle = cluster.workers[w]
        cluster = put(generations.succeeded(cluster, w, now, out), idle)
    elif job.formed:
        out.append(cmd.Record("worker-idle", f"newcomer {w} ended its program without training", worker=str(w)))
        return cluster
    job = cluster.active
    assert job is not None
    return jobs.finish(replace(cluster, job=replace(job, ended=job.ended | {w})), now, out)


def _stuck(worker: Worker, code: int, now: float) -> bool:
    """Whether it ended itself as an abort could not wake it. A program that exits with that code at once is no such case."""
    return code == ev.HUNG and now - worker.since >= YOUNG


def _rank(cluster: ClusterState, w: WorkerId) -> str:
    return f"rank {cluster.members.index(w)} ({w})" if w in cluster.ranked else str(w)
