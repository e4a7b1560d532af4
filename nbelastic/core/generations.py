"""The life of a generation: gather, form, run, break. How one becomes another by plan is in `planned`."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import arrivals, jobs, provisioning, stores
from nbelastic.core import commands as cmd
from nbelastic.core.ranks import rank_order
from nbelastic.core.reasons import Reason, missing_in_words
from nbelastic.core.state import (
    ClusterState,
    Stage,
    Worker,
    WorkerState,
    difference,
    with_members,
    with_reason,
    with_worker,
)
from nbelastic.core.state_holders import assign_kept_state, keeper
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def worker_formed(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """`w` is in, and holds the state from now on. The world runs when all members do."""
    cluster = with_worker(cluster, replace(cluster.workers[w], has_state=True, failures=0))
    return complete_formation(replace(cluster, awaiting=cluster.awaiting - {w}), now, out)


def complete_formation(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """The world runs if all members are in."""
    job = cluster.active
    assert job is not None
    if cluster.awaiting:
        return cluster
    text = f"world of {len(cluster.members)} at generation {cluster.generation}"
    out.append(cmd.Record("world-formed", text, generation=cluster.generation))
    behind = {
        w: replace(cluster.workers[w], has_state=False) for w in cluster.newcomers if cluster.workers[w].has_state
    }
    cluster = replace(cluster, workers=cluster.workers | behind) if behind else cluster
    job = replace(job, formed=True)
    cluster = replace(cluster, stage=Stage.RUNNING, failed_formations=0, last_formed=cluster.generation, job=job)
    if cluster.kept_state is None:
        return cluster
    return provisioning.provision(
        jobs.forget_kept_state(cluster, now, out), now, out
    )  # for its sake a worker more may have been started


def form_when_enough(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """No world: form one as soon as there are enough."""
    cluster = assign_kept_state(stop_leavers(cluster, staying(cluster), out), out)
    limits = cluster.limits
    if cluster.failed_formations and cluster.partition_check.pairs:
        return with_reason(cluster, Reason("not-formed", generation=cluster.generation), cluster.partition_check.until)
    ready = len(cluster.members) + len(cluster.newcomers)
    if ready < limits.min:
        coming = sum(cluster.workers[w].registered for w in cluster.starting)
        return _too_few(cluster, Reason("too-few", ready, limits.min), now, coming=ready + coming >= limits.min)
    members = next_members(cluster)
    if cluster.kept_state is not None and not any(cluster.workers[w].has_state for w in members):
        host, heir = keeper(cluster), cluster.kept_state.reader
        coming = heir in cluster.newcomers | cluster.member_set or any(
            w.host == host and cluster.workers[w].registered for w in cluster.starting
        )
        return _too_few(cluster, Reason("kept", names=(host,)), now, coming=coming)
    survivors = len(cluster.members) - len(cluster.leaving)
    if survivors < limits.min and ready < limits.most and not arrivals.settled(cluster, now):
        reason = Reason("ready", ready, missing=arrivals.missing(cluster, now))
        return with_reason(
            replace(cluster, too_few_since=None), reason, cluster.settling_since + limits.timeouts.settle
        )
    return form(cluster, members, now, out)


def _too_few(cluster: ClusterState, reason: Reason, now: float, *, coming: bool) -> ClusterState:
    """`elastic_timeout` counts while workers are missing, and not while those are `coming`: they run what comes before the loop."""
    since, paused = cluster.too_few_since, cluster.timeout_paused_since
    if since is None:
        since, paused = now, None
    if coming and paused is None:
        paused = now
    elif not coming and paused is not None:
        since, paused = since + now - paused, None
    cluster = replace(cluster, too_few_since=since, timeout_paused_since=paused)
    return with_reason(cluster, replace(reason, missing=arrivals.missing(cluster, now)))


def elastic_timeout_at(cluster: ClusterState) -> float:
    """When the job fails because there are too few in the elastic loop. Who has none in its program keeps nobody waiting."""
    limits = cluster.limits
    if cluster.too_few_since is None or limits.elastic_timeout is None:
        return NEVER
    if cluster.timeout_paused_since is None:
        return cluster.too_few_since + limits.elastic_timeout
    if not (cluster.members or cluster.newcomers):
        return NEVER
    return max(cluster.timeout_paused_since, cluster.settling_since, cluster.broken_at) + limits.timeouts.program


def fail_too_few(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """That time has come."""
    limits, ready = cluster.limits, len(cluster.members) + len(cluster.newcomers)
    text = f"{ready} of min {limits.min} workers ready"
    if cluster.kept_state is not None:
        text += f", and none with the training state, which is kept on {keeper(cluster)},"
    if cluster.timeout_paused_since is None:
        text += f" for {limits.patience:g} s (elastic_timeout)"
    else:
        text += f", and others have not come to the elastic function within {limits.timeouts.program:g} s"
    text += f"; {missing_in_words(arrivals.missing(cluster, now), now)}"
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
    new = sorted(
        _eligible_newcomers(cluster, len(keep)), key=lambda w: (not _holds_kept_state(cluster, w), seniority[w.host], w)
    )
    new = new[: most - len(keep)]
    return rank_order(keep, new, seniority)


def _eligible_newcomers(cluster: ClusterState, others: int) -> Collection[WorkerId]:
    """Who may join: those that could not be joined before come after the rest, one at a time. Without a world, all that it takes."""
    heirs = [w for w in cluster.newcomers if _holds_kept_state(cluster, w)]
    free = (cluster.newcomers - cluster.held_back.keys()).union(heirs)
    again = [w for w in free.difference(heirs) if cluster.workers[w].failures]
    if not again and not cluster.held_back:
        return free
    once = free.difference(again) or sorted(again, key=lambda w: (cluster.workers[w].failures, w))[:1]
    short = cluster.stage is Stage.GATHERING and others + len(once) < cluster.limits.min
    return cluster.newcomers if short else once


def _holds_kept_state(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether it has read the state that was kept: without it no world is formed."""
    return cluster.kept_state is not None and cluster.workers[w].has_state


def stop_leavers(cluster: ClusterState, staying: tuple[WorkerId, ...], out: Commands) -> ClusterState:
    """Members that are to leave, and need not stay, do."""
    leavers = cluster.leaving.difference(staying)
    if not leavers:
        return cluster
    cluster = replace(
        with_members(cluster, staying),
        leaving=cluster.leaving - leavers,
        suspects=difference(cluster.suspects, leavers),
    )
    return provisioning.stop_workers(cluster, sorted(leavers), out)


def form(cluster: ClusterState, members: tuple[WorkerId, ...], now: float, out: Commands) -> ClusterState:
    """These are to form the next generation; who has left the last one says so no more."""
    moved = stores.new_store_by(cluster, members[0])
    if now < moved:
        address = cluster.hosts[members[0].host].address
        store = Reason("new-store", names=(str(members[0]),), text=f"at {address}")
        reason = Reason("ready", len(members), then=store)
        return with_reason(replace(cluster, too_few_since=None), reason, moved)
    members = stores.with_store_first(cluster, members)
    cluster = stop_leavers(cluster, staying(cluster), out)
    order = formation_of(cluster.highest_generation + 1, [cluster.workers[w] for w in members])
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
            reason="" if w in cluster.held_back else old.reason,
        )
    waiting = cluster.newcomers | cluster.member_set
    cluster = with_members(cluster, members)
    return replace(
        cluster,
        generation=order.generation,
        highest_generation=max(cluster.highest_generation, order.generation),
        stage=Stage.FORMING,
        formation=order,
        next_formation=None,
        entered_next=frozenset(),
        cancelled_formation=None,
        skip_preparing=False,
        awaiting=cluster.member_set - ahead,
        newcomers=waiting - cluster.member_set,
        suspects=frozenset(),
        hung=frozenset(),
        workers=workers,
        too_few_since=None,
        reason_until=NEVER,
        job=replace(job, ranks=members),
        reason=Reason("entered", of=len(members), generation=order.generation),
    )


def formation_of(generation: int, members: list[Worker]) -> cmd.FormWorld:
    """The order to form a generation: whose state is the newest, and who needs it."""
    claims = [(worker.has_state, worker.clean, worker.commit) for worker in members]
    newest = max(claims)
    root = claims.index(newest)
    stale = (rank for rank, claim in enumerate(claims) if not newest[0] or not newest[1] or claim != newest)
    receivers = tuple(rank for rank in stale if rank != root)
    return cmd.FormWorld(generation, tuple(worker.id for worker in members), members[0].store, root, receivers)
