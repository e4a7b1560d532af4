"""The life of a generation: gather, form, run, break. How one becomes another by plan is in `planned`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from nbelastic.core import addresses, jobs, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.holders import bequeath, keeper, state_lives
from nbelastic.core.ranks import rank_order
from nbelastic.core.reasons import Reason, missing_in_words
from nbelastic.core.state import (
    NO_BREAKS,
    ClusterState,
    HostPhase,
    Job,
    Stage,
    Worker,
    WorkerState,
    because,
    less,
    put,
    seat,
)
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def gone(
    cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands, *, blameless: bool = False
) -> ClusterState:
    """It died or will never answer: a strike against its slot unless it was told to end; a break if it was a member."""
    if w in cluster.stopped:
        cluster, why = provisioning.vacate(cluster, w), f"{w} was stopped"
    else:
        if not blameless:
            cluster = provisioning.record_failure(_explained(cluster, (w,)), w, why, now, out)
        else:
            cluster = provisioning.vacate(cluster, w, restarts=1)
        out.append(cmd.Record("worker-lost", why, host=w.host, worker=str(w), generation=cluster.generation))
    cluster = lose(cluster, (w,), why, now, out)
    return provisioning.staff(provisioning.retire_empty(cluster, w.host, out), now, out)


def host_gone(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost"
) -> ClusterState:
    """The host is lost, and its workers with it; a record of this `kind` says why."""
    host = cluster.hosts.get(name)
    if host is None or host.phase is HostPhase.LOST:
        return cluster
    workers = provisioning.on_host(cluster, name)
    cluster = provisioning.agent_lost(_explained(cluster, workers), name, reason, now, out, kind=kind)
    cluster = lose(cluster, workers, f"host {name} was lost ({reason})", now, out)
    return provisioning.staff(cluster, now, out)


def _explained(cluster: ClusterState, dead: Iterable[WorkerId]) -> ClusterState:
    """The death of a member explains broken connections: the count of breaks without a death begins anew."""
    return replace(cluster, unexplained=NO_BREAKS) if not cluster.ranked.isdisjoint(dead) else cluster


def leave_out(cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str) -> ClusterState:
    """The host's agent is there but of no use: it is ended, and the host treated as a lost one."""
    out.append(cmd.StopAgent(name))
    return host_gone(cluster, name, reason, now, out, kind=kind)


def lose(
    cluster: ClusterState, gone: Iterable[WorkerId], why: str, now: float, out: Commands, *, keep: bool = False
) -> ClusterState:
    """These are no longer there (`keep`: alive, but out of the job). The members among them break the generation."""
    ids = frozenset(gone)
    hit = ids & cluster.ranked
    if not keep:
        cluster = _bury(cluster, ids)
    cluster = replace(
        cluster,
        awaiting=less(cluster.awaiting, ids),
        waiting=less(cluster.waiting, ids),
        starting=less(cluster.starting, ids),
        leaving=less(cluster.leaving, ids),
        suspects=less(cluster.suspects, ids),
    )
    job = cluster.active
    if job is None or not hit:
        if cluster.plan is not None and not ids.isdisjoint(cluster.plan.members):
            cluster = call_off(cluster, out)
        return jobs.finish(cluster, now, out)
    cluster = seat(cluster, tuple(w for w in cluster.members if w not in ids))
    if hit <= job.ended:
        return jobs.finish(cluster, now, out)
    if job.succeeded:
        return _wind_up(cluster, job, why, now, out)
    if not state_lives(cluster):
        return jobs.end(cluster, "failed", f"{why}; no worker is left that holds the training state", now, out)
    return cluster if cluster.stage is Stage.GATHERING else break_generation(cluster, why, now, out)


def unseat(cluster: ClusterState, ids: Iterable[WorkerId], now: float) -> ClusterState:
    """Survivors of a broken generation that are not to be in the next: they come back as newcomers when they have left this one."""
    those = frozenset(ids)
    cluster = replace(cluster, workers=cluster.workers | {w: replace(cluster.workers[w], since=now) for w in those})
    cluster = seat(cluster, tuple(w for w in cluster.members if w not in those))
    cluster = replace(cluster, awaiting=less(cluster.awaiting, those), leaving=less(cluster.leaving, those))
    return provisioning.expect(cluster, those)


def _bury(cluster: ClusterState, ids: frozenset[WorkerId]) -> ClusterState:
    workers = dict(cluster.workers)
    buried = sum(workers.pop(w, None) is not None for w in ids)
    return replace(
        cluster,
        workers=workers,
        buried=cluster.buried + buried,
        stopped=less(cluster.stopped, ids),
        failed=less(cluster.failed, ids),
    )


def break_generation(cluster: ClusterState, why: str, now: float, out: Commands) -> ClusterState:
    """The generation is broken: everyone else is aborted wherever it blocks, and the survivors gather."""
    job = cluster.active
    if job is not None and job.succeeded:
        return _wind_up(cluster, job, why, now, out)
    resets = cluster.resets + 1
    limit = cluster.limits.reset_limit
    cluster = replace(cluster, resets=resets, suspects=frozenset())
    if limit is not None and resets > limit:
        return jobs.end(cluster, "failed", f"{resets} resets exceed reset_limit={limit}; the last: {why}", now, out)
    away = cluster.awaiting if cluster.stage is Stage.LEAVING and cluster.plan is None else cluster.ranked
    out.append(cmd.Record("world-broken", why, generation=cluster.generation))
    cluster = jobs.abort(cluster, why, out)
    return replace(cluster, stage=Stage.GATHERING, awaiting=away, offers=(), broken_at=now)


def call_off(cluster: ClusterState, out: Commands) -> ClusterState:
    """What was prepared will not be. Members that leave already go on leaving, and gather for another world."""
    plan, stage = cluster.plan, cluster.stage
    if plan is not None:
        there = tuple(w for w in plan.members if w in cluster.workers and w not in cluster.stopped)
        if there:
            out.append(cmd.DropWorld(plan.generation, there))
        cluster = replace(cluster, plan=None, ahead=frozenset())
        if stage is Stage.LEAVING:  # what they said when they left is old: they may have trained there, or used a store
            cluster = replace(
                cluster, undone=plan, awaiting=cluster.awaiting | cluster.ranked.intersection(plan.members)
            )
    if stage is Stage.ASKED and cluster.members:
        out.append(cmd.CancelLeave(cluster.generation, cluster.members))
    if stage is Stage.ASKED or stage is Stage.PREPARING:
        cluster = replace(cluster, stage=Stage.RUNNING, awaiting=frozenset(), offers=())
    return cluster


def _wind_up(cluster: ClusterState, job: Job, why: str, now: float, out: Commands) -> ClusterState:
    """A death after some rank has finished restarts nothing: who has not finished stops, and the job ends."""
    cluster = replace(cluster, suspects=frozenset())
    late = tuple(w for w in cluster.members if w not in job.succeeded and w not in job.late)
    return jobs.finish(_send_home(cluster, late, f"{why} after other ranks had finished", now, out), now, out)


def _send_home(cluster: ClusterState, late: tuple[WorkerId, ...], why: str, now: float, out: Commands) -> ClusterState:
    job = cluster.active
    if job is None or not late:
        return cluster
    out.append(cmd.StopProgram(job.name, late, why))
    return jobs.linger(replace(cluster, job=replace(job, late=job.late.union(late))), now)


def succeeded(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """The function returned on one rank: from now on nobody is disturbed, and nothing begins again."""
    job = cluster.active
    assert job is not None
    if w in job.succeeded or w in job.late or (cluster.stage is Stage.GATHERING and w not in cluster.awaiting):
        return cluster
    job = replace(job, succeeded=job.succeeded | {w})
    cluster = put(replace(cluster, job=job), replace(cluster.workers[w], state=WorkerState.SUCCEEDED))
    match cluster.stage:
        case Stage.GATHERING:
            return _wind_up(cluster, job, "the world broke", now, out)
        case Stage.PREPARING | Stage.ASKED:
            return call_off(cluster, out)
        case Stage.LEAVING:
            there = tuple(other for other in cluster.members if other in cluster.awaiting)
            left = tuple(other for other in cluster.members if other not in cluster.awaiting)
            cluster = _send_home(call_off(cluster, out), left, f"left for a change as {w} finished", now, out)
            out.append(cmd.CancelLeave(cluster.generation, there))
            return replace(cluster, stage=Stage.RUNNING, awaiting=frozenset())
    return cluster


def left(cluster: ClusterState, worker: Worker, now: float, out: Commands) -> ClusterState:
    """A member has left its generation. The job fails if it does not hold the state any more, and nobody else does."""
    cluster = put(cluster, worker)
    if worker.has_state or state_lives(cluster):
        return cluster
    why = f"the state's transfer to {worker.id} broke off halfway; no worker is left that holds the training state"
    return jobs.end(cluster, "failed", why, now, out)


def formed(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """`w` is in, and holds the state from now on. The world runs when all members do."""
    cluster = put(cluster, replace(cluster.workers[w], has_state=True, failures=0))
    return complete(replace(cluster, awaiting=cluster.awaiting - {w}), now, out)


def complete(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """The world runs if all members are in."""
    job = cluster.active
    assert job is not None
    if cluster.awaiting:
        return cluster
    text = f"world of {len(cluster.members)} at generation {cluster.generation}"
    out.append(cmd.Record("world-formed", text, generation=cluster.generation))
    behind = {w: replace(cluster.workers[w], has_state=False) for w in cluster.waiting if cluster.workers[w].has_state}
    cluster = replace(cluster, workers=cluster.workers | behind) if behind else cluster
    job = replace(job, formed=True)
    cluster = replace(cluster, stage=Stage.RUNNING, unformed=0, formed_in=cluster.generation, job=job)
    if cluster.kept is None:
        return cluster
    return provisioning.staff(
        jobs.forget(cluster, now, out), now, out
    )  # for its sake a worker more may have been started


def gather(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """No world: form one as soon as there are enough."""
    cluster = bequeath(release(cluster, staying(cluster), out), out)
    limits = cluster.limits
    if cluster.unformed and cluster.mesh.pairs:
        return because(cluster, Reason("not-formed", generation=cluster.generation), cluster.mesh.until)
    ready = len(cluster.members) + len(cluster.waiting)
    if ready < limits.min:
        coming = sum(cluster.workers[w].registered for w in cluster.starting)
        return _too_few(cluster, Reason("too-few", ready, limits.min), now, coming=ready + coming >= limits.min)
    members = next_members(cluster)
    if cluster.kept is not None and not any(cluster.workers[w].has_state for w in members):
        host, heir = keeper(cluster), cluster.kept.heir
        coming = heir in cluster.waiting | cluster.ranked or any(
            w.host == host and cluster.workers[w].registered for w in cluster.starting
        )
        return _too_few(cluster, Reason("kept", names=(host,)), now, coming=coming)
    survivors = len(cluster.members) - len(cluster.leaving)
    if survivors < limits.min and ready < limits.most and not provisioning.settled(cluster, now):
        reason = Reason("ready", ready, missing=provisioning.missing(cluster, now))
        return because(replace(cluster, short_since=None), reason, cluster.since + limits.timeouts.settle)
    return form(cluster, members, now, out)


def _too_few(cluster: ClusterState, reason: Reason, now: float, *, coming: bool) -> ClusterState:
    """`elastic_timeout` counts while workers are missing, and not while those are `coming`: they run what comes before the loop."""
    since, paused = cluster.short_since, cluster.paused_since
    if since is None:
        since, paused = now, None
    if coming and paused is None:
        paused = now
    elif not coming and paused is not None:
        since, paused = since + now - paused, None
    cluster = replace(cluster, short_since=since, paused_since=paused)
    return because(cluster, replace(reason, missing=provisioning.missing(cluster, now)))


def short_until(cluster: ClusterState) -> float:
    """When the job fails because there are too few in the elastic loop. Who has none in its program keeps nobody waiting."""
    limits = cluster.limits
    if cluster.short_since is None or limits.elastic_timeout is None:
        return NEVER
    if cluster.paused_since is None:
        return cluster.short_since + limits.elastic_timeout
    if not (cluster.members or cluster.waiting):
        return NEVER
    return max(cluster.paused_since, cluster.since, cluster.broken_at) + limits.timeouts.program


def give_up(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """That time has come."""
    limits, ready = cluster.limits, len(cluster.members) + len(cluster.waiting)
    text = f"{ready} of min {limits.min} workers ready"
    if cluster.kept is not None:
        text += f", and none with the training state, which is kept on {keeper(cluster)},"
    if cluster.paused_since is None:
        text += f" for {limits.patience:g} s (elastic_timeout)"
    else:
        text += f", and others have not come to the elastic function within {limits.timeouts.program:g} s"
    text += f"; {missing_in_words(provisioning.missing(cluster, now), now)}"
    return jobs.end(cluster, "failed", text, now, out)


def staying(cluster: ClusterState) -> tuple[WorkerId, ...]:
    """The members that need not leave. If only leavers hold the state, the first of them stays one world more, as rank 0."""
    if not cluster.leaving:
        return cluster.members
    keep = tuple(w for w in cluster.members if w not in cluster.leaving)
    if any(cluster.workers[w].has_state for w in keep):
        return keep
    holder = next((w for w in cluster.members if cluster.workers[w].has_state), None)
    return (holder, *keep) if holder else keep


def next_members(cluster: ClusterState) -> tuple[WorkerId, ...]:
    """Who would be in the next world, by rank."""
    most = cluster.limits.max if cluster.limits.max is not None else len(cluster.workers)
    keep = staying(cluster)[:most]
    seniority = {name: host.joined for name, host in cluster.hosts.items()}
    new = sorted(_newcomers(cluster, len(keep)), key=lambda w: (not _is_heir(cluster, w), seniority[w.host], w))
    new = new[: most - len(keep)]
    return rank_order(keep, new, seniority)


def _newcomers(cluster: ClusterState, others: int) -> Collection[WorkerId]:
    """Who may join: those that could not be joined before come after the rest, one at a time. Without a world, all that it takes."""
    heirs = [w for w in cluster.waiting if _is_heir(cluster, w)]
    free = (cluster.waiting - cluster.held.keys()).union(heirs)
    again = [w for w in free.difference(heirs) if cluster.workers[w].failures]
    if not again and not cluster.held:
        return free
    once = free.difference(again) or sorted(again, key=lambda w: (cluster.workers[w].failures, w))[:1]
    short = cluster.stage is Stage.GATHERING and others + len(once) < cluster.limits.min
    return cluster.waiting if short else once


def _is_heir(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether it has read the state that was kept: without it no world is formed."""
    return cluster.kept is not None and cluster.workers[w].has_state


def release(cluster: ClusterState, staying: tuple[WorkerId, ...], out: Commands) -> ClusterState:
    """Members that are to leave, and need not stay, do."""
    leavers = cluster.leaving.difference(staying)
    if not leavers:
        return cluster
    cluster = replace(
        seat(cluster, staying), leaving=cluster.leaving - leavers, suspects=less(cluster.suspects, leavers)
    )
    return provisioning.stop_workers(cluster, sorted(leavers), out)


def form(cluster: ClusterState, members: tuple[WorkerId, ...], now: float, out: Commands) -> ClusterState:
    """These are to form the next generation; who has left the last one says so no more."""
    moved = addresses.moving_until(cluster, members[0])
    if now < moved:
        address = cluster.hosts[members[0].host].address
        store = Reason("new-store", names=(str(members[0]),), text=f"at {address}")
        reason = Reason("ready", len(members), then=store)
        return because(replace(cluster, short_since=None), reason, moved)
    members = addresses.led(cluster, members)
    cluster = release(cluster, staying(cluster), out)
    order = formation(cluster.numbered + 1, [cluster.workers[w] for w in members])
    out.append(order)
    return enter(cluster, order, frozenset())


def enter(cluster: ClusterState, order: cmd.FormWorld, ahead: frozenset[WorkerId]) -> ClusterState:
    """The generation of `order` begins; those ahead have joined it already."""
    job, members = cluster.active, order.members
    assert job is not None
    workers = dict(cluster.workers)
    for w in members:
        old = workers[w]
        workers[w] = replace(
            old,
            state=WorkerState.RUNNING,
            store="",
            has_state=old.has_state or w in ahead,
            failures=0 if w in ahead else old.failures,
            reason="" if w in cluster.held else old.reason,
        )
    waiting = cluster.waiting | cluster.ranked
    cluster = seat(cluster, members)
    return replace(
        cluster,
        generation=order.generation,
        numbered=max(cluster.numbered, order.generation),
        stage=Stage.FORMING,
        order=order,
        plan=None,
        ahead=frozenset(),
        undone=None,
        plainly=False,
        awaiting=cluster.ranked - ahead,
        waiting=waiting - cluster.ranked,
        suspects=frozenset(),
        stuck=frozenset(),
        workers=workers,
        short_since=None,
        until=NEVER,
        job=replace(job, ranks=members),
        reason=Reason("entered", of=len(members), generation=order.generation),
    )


def formation(generation: int, members: list[Worker]) -> cmd.FormWorld:
    """The order to form a generation: whose state is the newest, and who needs it."""
    claims = [(worker.has_state, worker.clean, worker.commit) for worker in members]
    newest = max(claims)
    root = claims.index(newest)
    stale = (rank for rank, claim in enumerate(claims) if not newest[0] or not newest[1] or claim != newest)
    receivers = tuple(rank for rank in stale if rank != root)
    return cmd.FormWorld(generation, tuple(worker.id for worker in members), members[0].store, root, receivers)
