"""The life of a generation: wait for enough workers, form, run. Planned changes are in `reconfiguration`."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import arrivals, gpus, jobs, provisioning, stores
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.core.ranks import rank_order
from nbelastic.core.reasons import Reason, missing_in_words
from nbelastic.core.state import (
    ClusterState,
    Stage,
    Worker,
    WorkerState,
    with_members,
    with_reason,
    with_worker,
    without,
)
from nbelastic.core.state_holders import assign_kept_state, holders, keeper, state_lives
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def worker_formed(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """A member has joined the process group and holds the training state. The world runs when all members have."""
    cluster = with_worker(cluster, formed(cluster.workers[w]))
    return complete_formation(without(cluster, (w,), "awaiting"), now, out)


def formed(worker: Worker) -> Worker:
    """The record of a member that has joined the process group."""
    return replace(worker, has_state=True, failures=0)


def complete_formation(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Run the world if all members have joined."""
    job = cluster.active
    assert job is not None
    if cluster.awaiting:
        return cluster
    text = f"world of {len(cluster.members)} at generation {cluster.generation}"
    out.append(cmd.Record("world-formed", text, generation=cluster.generation))
    workers = {w: cluster.workers[w] for w in cluster.newcomers}
    outdated = {w: replace(worker, has_state=False) for w, worker in workers.items() if worker.has_state}
    cluster = replace(cluster, workers=cluster.workers | outdated) if outdated else cluster
    job = replace(job, formed=True)
    cluster = replace(cluster, stage=Stage.RUNNING, failed_formations=0, last_formed=cluster.generation, job=job)
    if cluster.kept_state is None:
        return cluster
    # a worker more may have been started to read the kept state
    return provisioning.provision(jobs.forget_kept_state(cluster, now, out), now, out)


def form_when_enough(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Form a generation if enough workers are ready; else give the reason to wait."""
    cluster = assign_kept_state(stop_leavers(cluster, staying(cluster), out), out)
    limits = cluster.limits
    if cluster.failed_formations and cluster.partition_check.pairs:
        return with_reason(cluster, Reason("not-formed", generation=cluster.generation), cluster.partition_check.until)
    reachable = len(arrivals.reachable_newcomers(cluster))
    ready = len(cluster.members) + reachable
    if ready < limits.min:
        coming = len(cluster.starting) - len(cluster.unregistered) + len(cluster.newcomers) - reachable
        return _too_few(cluster, Reason("too-few", ready, limits.min), now, coming=ready + coming >= limits.min)
    if cluster.kept_state is not None and not any(cluster.workers[w].has_state for w in next_members(cluster)):
        host, reader = keeper(cluster), cluster.kept_state.reader
        coming = reader in cluster.newcomers | cluster.member_set or any(
            w.host == host and cluster.workers[w].registered for w in cluster.starting
        )
        return _too_few(cluster, Reason("kept", names=(host,)), now, coming=coming)
    held_on = {w.host for w in holders(cluster)} if cluster.disconnected else set()
    if held_on and held_on <= cluster.disconnected.keys():  # without it a world would begin from initial values
        return _too_few(cluster, Reason("disconnected", names=tuple(sorted(held_on))), now, coming=True)
    survivors = len(cluster.members) - len(cluster.leaving)
    if survivors < limits.min and ready < limits.most and not arrivals.settled(cluster, now):
        reason = Reason("ready", ready, missing=arrivals.missing(cluster, now))
        settled_at = cluster.settling_since + limits.timeouts.settle
        return with_reason(replace(cluster, too_few_since=None), reason, settled_at)
    return form(cluster, next_members(cluster), now, out)


def _too_few(cluster: ClusterState, reason: Reason, now: float, *, coming: bool) -> ClusterState:
    """Wait for workers. `elastic_timeout` pauses while enough are `coming`: they run code before the elastic loop."""
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
    """When the job fails as too few workers are in the elastic loop.

    No deadline applies while all workers run code before that loop.
    """
    limits = cluster.limits
    if cluster.too_few_since is None or limits.elastic_timeout is None:
        return NEVER
    if cluster.timeout_paused_since is None:
        return cluster.too_few_since + limits.elastic_timeout
    if not (cluster.members or cluster.newcomers):
        return NEVER
    return max(cluster.timeout_paused_since, cluster.settling_since, cluster.broken_at) + limits.timeouts.program


def fail_too_few(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Fail the job: `elastic_timeout` has elapsed, or workers have not come to the elastic loop in time."""
    limits, ready = cluster.limits, len(cluster.members) + len(arrivals.reachable_newcomers(cluster))
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
    """Members that need not leave. If only leavers hold the training state, one of them stays, as rank 0.

    That is the first of those on the host that is announced to end last, or not to end.
    """
    if not cluster.leaving:
        return cluster.members
    keep = tuple(w for w in cluster.members if w not in cluster.leaving)
    if any(cluster.workers[w].has_state for w in keep):
        return keep
    holders = (w for w in cluster.members if cluster.workers[w].has_state)
    ends = {host: ending.at for host, ending in cluster.ending.items()}
    holder = max(holders, key=lambda w: ends.get(w.host, NEVER), default=None)
    return (holder, *keep) if holder else keep


def most_members(cluster: ClusterState) -> float:
    """How many members the next world may have: `max`, and one more if the only one hands its training state over and ends."""
    stays = staying(cluster)
    is_alone = cluster.limits.most == len(stays) and all(w in cluster.leaving for w in stays)
    return cluster.limits.most + is_alone


def next_members(cluster: ClusterState) -> tuple[WorkerId, ...]:
    """Members of the next generation, by rank."""
    most = int(min(most_members(cluster), len(cluster.workers)))
    keep = staying(cluster)[:most]
    seniority = {name: host.joined for name, host in cluster.hosts.items()}
    newcomers = _eligible_newcomers(cluster, len(keep))
    new = sorted(newcomers, key=lambda w: (not _holds_kept_state(cluster, w), seniority[w.host], w))
    return rank_order(keep, new[: most - len(keep)], seniority)


def _eligible_newcomers(cluster: ClusterState, others: int) -> Collection[WorkerId]:
    """Newcomers that may join. One that could not be joined before may join only if no other can, one at a time.

    If `min` needs them, all may join; but beside a world that trains not those that are held back.
    """
    newcomers = arrivals.reachable_newcomers(cluster)
    readers = [w for w in newcomers if _holds_kept_state(cluster, w)]
    free = (newcomers - cluster.held_back.keys()) | readers
    failed_before = [w for w in free - readers if cluster.workers[w].failures]
    if not failed_before and not cluster.held_back:
        return free
    by_failures = sorted(failed_before, key=lambda w: (cluster.workers[w].failures, w))
    eligible = free - failed_before or by_failures[:1]
    if others + len(eligible) >= cluster.limits.min:
        return eligible
    return newcomers if cluster.stage is Stage.GATHERING else free


def _holds_kept_state(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether it has read the kept state, without which no world is formed."""
    return cluster.kept_state is not None and cluster.workers[w].has_state


def stop_leavers(cluster: ClusterState, staying: tuple[WorkerId, ...], out: Commands) -> ClusterState:
    """Stop the members that have to leave and are not `staying`."""
    leavers = cluster.leaving - staying
    if not leavers:
        return cluster
    cluster = without(with_members(cluster, staying), leavers, "leaving", "suspects")
    return provisioning.stop_workers(cluster, sorted(leavers), out)


def form(cluster: ClusterState, members: tuple[WorkerId, ...], now: float, out: Commands) -> ClusterState:
    """Form the next generation with these members."""
    store_by = stores.new_store_by(cluster, members[0])
    if now < store_by:
        address = cluster.hosts[members[0].host].address
        store = Reason("new-store", names=(str(members[0]),), text=f"at {address}")
        reason = Reason("ready", len(members), then=store)
        return with_reason(replace(cluster, too_few_since=None), reason, store_by)
    job = cluster.active
    assert job is not None
    if not state_lives(cluster):  # its last holder was asked to end
        return jobs.end(cluster, "failed", "no worker is left that holds the training state", now, out)
    if not job.backend:
        backend, problem = gpus.choose_back_end(cluster)
        if problem:
            return jobs.end(cluster, "failed", problem, now, out)
        cluster = replace(cluster, job=replace(job, backend=backend))
    members = stores.with_store_first(cluster, members)
    cluster = stop_leavers(cluster, staying(cluster), out)
    formation = choose_root_and_receivers(cluster.highest_generation + 1, [cluster.workers[w] for w in members])
    out.append(formation)
    return enter(cluster, formation, EMPTY)


def enter(cluster: ClusterState, formation: cmd.FormWorld, entered: PersistentSet[WorkerId]) -> ClusterState:
    """Begin the generation of this formation. The workers in `entered` have joined it already."""
    job, members = cluster.active, formation.members
    assert job is not None
    entering: dict[WorkerId, Worker] = {}
    for w in members:
        old = cluster.workers[w]
        entering[w] = replace(
            old,
            state=WorkerState.RUNNING,
            store=old.store if w in entered else "",
            reason="" if w in cluster.held_back else old.reason,
        )
    waiting = cluster.newcomers | cluster.member_set
    cluster = with_members(cluster, members)
    return replace(
        cluster,
        generation=formation.generation,
        highest_generation=max(cluster.highest_generation, formation.generation),
        stage=Stage.FORMING,
        formation=formation,
        next_formation=None,
        entered_next=EMPTY,
        cancelled_formation=None,
        skip_preparing=False,
        awaiting=cluster.member_set - entered,
        newcomers=waiting - cluster.member_set,
        suspects=EMPTY,
        hung=EMPTY,
        workers=cluster.workers | entering,
        too_few_since=None,
        reason_until=NEVER,
        job=replace(job, ranks=members),
        reason=Reason("entered", of=len(members), generation=formation.generation),
    )


def choose_root_and_receivers(generation: int, members: list[Worker]) -> cmd.FormWorld:
    """The formation of a generation: which rank sends the training state (root), and which ranks receive it.

    The root is the first rank with the newest commit, preferably one whose live tensors are those of the commit. Every
    other rank receives, unless it holds the same commit in the same way.
    """
    claims = [(worker.has_state, worker.clean, worker.commit) for worker in members]
    newest = max(claims)
    root = claims.index(newest)
    stale = (rank for rank, claim in enumerate(claims) if not newest[0] or not newest[1] or claim != newest)
    receivers = tuple(rank for rank in stale if rank != root)
    return cmd.FormWorld(generation, tuple(worker.id for worker in members), members[0].store, root, receivers)
