"""From one world to the next by plan: prepare it, agree on the leave point, change over.

The next generation's process group is built beside the training, and newcomers wait in it, before any member is asked
to leave. If that is not possible (no store is known yet, or the back end cannot), the group forms after all have left.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import arrivals, backoff, connections, generation_end, generations, halts, partitions, stores, swaps
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import NOTHING, PersistentSet
from nbelastic.core.reasons import Missing, Reason
from nbelastic.core.state import ClusterState, Stage, first_names, format_ids, with_reason
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Do the next step if it is possible; else set the reason to wait."""
    if cluster.stopping:
        workers = cluster.workers if cluster.linger_until else NOTHING
        inside = [w for w, worker in workers.items() if worker.job]
        last = Reason("last-checkpoints", names=first_names(inside)) if inside else None
        return with_reason(cluster, Reason("stopping", text=cluster.stopping, then=last))
    job = cluster.active
    if job is None:
        return _idle(cluster, now)
    missing, size = len(cluster.awaiting), len(cluster.members)
    if job.succeeded:
        return with_reason(cluster, Reason("finishing", len(job.succeeded), len(job.ranks)))
    match cluster.stage:
        case Stage.GATHERING if missing:
            names = first_names(cluster.awaiting)
            then = _irreplaceable(cluster)
            return with_reason(
                cluster, Reason("broken", size - missing, size, cluster.generation, names=names, then=then)
            )
        case Stage.GATHERING:
            return generations.form_when_enough(cluster, now, out)
        case Stage.FORMING:
            return with_reason(cluster, Reason("joining", size - missing, size, cluster.generation))
        case Stage.RUNNING:
            return _plan_change(cluster, now, out)
        case Stage.PREPARING if cluster.disconnected and _lost_newcomer(cluster):
            return _plan_change(generation_end.cancel_next(cluster, out), now, out)
        case Stage.PREPARING if missing and now < cluster.prepare_by:
            preparing = Reason("preparing", names=first_names(cluster.awaiting))
            return with_reason(cluster, _training(cluster, preparing), cluster.prepare_by)
        case Stage.PREPARING if missing:
            return _not_prepared(cluster, now, out)
        case Stage.PREPARING:
            return _ask_to_leave(cluster, now, out)
        case Stage.ASKED if missing:
            return with_reason(cluster, Reason("asked", size - missing, size))
        case Stage.ASKED if not cluster.halt.asked:
            return _agree_on_commit(cluster, now, out)
        case Stage.ASKED | Stage.HALTED:
            decide = halts.agree if cluster.stage is Stage.ASKED else halts.progress
            cluster = decide(cluster, now, out)
            return _plan_change(cluster, now, out) if cluster.stage is Stage.RUNNING else cluster
        case Stage.LEAVING if missing and swaps.is_on_trial(cluster):
            return with_reason(cluster, Reason("swapping", of=size))
        case Stage.LEAVING if missing:
            return with_reason(cluster, Reason("leaving", size - missing, size, cluster.generation))
        case Stage.LEAVING:
            return _enter_next(cluster, now, out)


def _idle(cluster: ClusterState, now: float) -> ClusterState:
    ready = len(cluster.workers) - len(cluster.starting) - len(cluster.stopped) - len(cluster.failed)
    low = cluster.limits.min
    if ready < low:
        return with_reason(cluster, Reason("too-few", ready, low, missing=arrivals.missing(cluster, now)))
    job = cluster.job
    failed = job is not None and job.outcome == "failed"
    then = Reason("job-failed", names=(job.name,), text=job.reason) if job is not None and failed else None
    return with_reason(cluster, Reason("idle", ready, then=then))


def _training(cluster: ClusterState, then: Reason | None = None, missing: tuple[Missing, ...] | None = None) -> Reason:
    return Reason("training", of=len(cluster.members), generation=cluster.generation, missing=missing, then=then)


def _plan_change(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """While a world runs: halt it, or prepare a better one, if there is one and its newcomers are ready."""
    if swaps.is_on_trial(cluster):
        return halts.progress(halts.halt_at(cluster, 1, out), now, out)
    if connections.delays_change(cluster):
        reason, until = connections.wait(cluster)
        return with_reason(cluster, _training(cluster, reason), until)
    if halts.is_wanted(cluster) and now >= cluster.change_after:
        return halts.ask(cluster, out)
    size, most = len(cluster.members), generations.most_members(cluster)
    room = size - len(cluster.leaving) < most
    newcomers = arrivals.reachable_newcomers(cluster)
    if not cluster.leaving and not (room and newcomers - cluster.held_back.keys()):
        return with_reason(cluster, _training(cluster, _held_back(cluster) if room else None))
    if now < cluster.change_after:
        reason = _training(cluster, Reason("put-off", text=cluster.postponed_because))
        return with_reason(cluster, reason, cluster.change_after)
    if not arrivals.settled(cluster, now):
        reason = _training(cluster, missing=arrivals.missing(cluster, now))
        return with_reason(cluster, reason, cluster.settling_since + cluster.limits.timeouts.settle)
    target = generations.next_members(cluster)
    if not _worth_it(cluster, target):
        last = Reason("last-holder") if cluster.leaving and target == cluster.members else None
        return with_reason(cluster, _training(cluster, last, arrivals.missing(cluster, now)))
    failed = any(cluster.workers[w].failures for w in target if w not in cluster.member_set)
    # a newcomer that failed before may join only if it can be prepared
    if failed and not cluster.skip_preparing and not stores.has_store(cluster, target[0]):
        store = Reason("new-store", names=(str(target[0]),), text="for the next generation")
        return with_reason(cluster, _training(cluster, store))
    text = f"from {size} to {len(target)} workers"
    out.append(cmd.Record("change-planned", text, generation=cluster.generation))
    if (
        cluster.skip_preparing
        or not stores.has_store(cluster, target[0])
        or target[0] not in cluster.member_set
        or len(target) < cluster.limits.min
    ):
        return _ask_to_leave(cluster, now, out)
    cluster = _prepare(cluster, target, now, out)
    return with_reason(cluster, Reason("changing", size, len(target), cluster.highest_generation), cluster.prepare_by)


def _prepare(cluster: ClusterState, target: tuple[WorkerId, ...], now: float, out: Commands) -> ClusterState:
    """Prepare the next generation. Members will be equal when they leave, so rank 0 sends newcomers the state."""
    receivers = tuple(rank for rank, w in enumerate(target) if w not in cluster.member_set)
    formation = cmd.FormWorld(cluster.highest_generation + 1, target, cluster.workers[target[0]].store, 0, receivers)
    out.append(cmd.PrepareWorld(formation))
    return replace(
        cluster,
        stage=Stage.PREPARING,
        next_formation=formation,
        highest_generation=formation.generation,
        awaiting=PersistentSet(target),
        prepare_errors={},
        prepare_by=now + cluster.limits.timeouts.prepare_for(len(target)),
    )


def worker_prepared(cluster: ClusterState, event: ev.WorkerPrepared, now: float) -> ClusterState:
    """A worker has prepared the next generation, or reports why it cannot. The others then have a moment to report."""
    prepared, w = cluster.next_formation, event.worker
    if prepared is None or cluster.stage is not Stage.PREPARING:
        return cluster
    if event.generation != prepared.generation or w not in cluster.awaiting:
        return cluster
    if not event.error:
        return replace(cluster, awaiting=cluster.awaiting - {w})
    soon = min(cluster.prepare_by, now + cluster.limits.timeouts.grace)
    return replace(cluster, prepare_errors={**cluster.prepare_errors, w: event.error}, prepare_by=soon)


def _not_prepared(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Cancel the prepared generation, and leave newcomers out for a while. The training goes on.

    Newcomers that have not prepared are left out. If all have prepared, a member did not reach one of them, so all are
    left out. If there are no newcomers, the change is made without preparing.
    """
    prepared, not_prepared, errors = cluster.next_formation, cluster.awaiting, cluster.prepare_errors
    assert prepared is not None
    newcomers = [w for w in prepared.members if w not in cluster.member_set]
    cluster = generation_end.cancel_next(cluster, out)
    if cluster.skip_preparing or not newcomers:
        return _plan_change(replace(cluster, skip_preparing=True), now, out)
    blamed = [w for w in newcomers if w in not_prepared] or newcomers
    members = sorted(not_prepared & cluster.member_set)
    why = f"no group was formed within {cluster.limits.timeouts.prepare_for(len(prepared.members)):g} s"
    if errors:
        w = next((w for w in blamed if w in errors), min(errors))
        why = f"{w} could not prepare a group ({errors[w]})"
    if members and len(members) < len(cluster.members):
        why += f"; nor did {format_ids(members)} prepare"
    cluster = backoff.hold_back(cluster, blamed, why, now, out)
    cluster = partitions.begin(cluster, now, out, suspected={w.host for w in (*blamed, *members)})
    return _plan_change(cluster, now, out)


def _irreplaceable(cluster: ClusterState) -> Reason | None:
    """Why late members are not replaced; None if they may be."""
    if cluster.wait is None or not cluster.wait.irreplaceable:
        return None
    limits = cluster.limits
    end = "without end, as elastic_timeout is None" if limits.elastic_timeout is None else f"for {limits.patience:g} s"
    return Reason("irreplaceable", text=f"{cluster.wait.why}; the others wait {end}")


def _held_back(cluster: ClusterState) -> Reason | None:
    """Which newcomers are left out, and why; None: none."""
    if not cluster.held_back:
        return None
    w = min(cluster.held_back)
    more = f" (and {len(cluster.held_back) - 1} more)" if len(cluster.held_back) > 1 else ""
    return Reason("left-out", names=(str(w),), text=f"{cluster.workers[w].reason}{more}")


def _ask_to_leave(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Ask the members for their commits, if the prepared generation is still wanted."""
    prepared = cluster.next_formation
    if prepared is not None and not _fits(cluster, prepared):
        return _plan_change(generation_end.cancel_next(cluster, out), now, out)
    cluster = generation_end.ask_for_commits(cluster, out)
    return with_reason(cluster, Reason("asking", of=len(cluster.members)))


def _fits(cluster: ClusterState, prepared: cmd.FormWorld) -> bool:
    """Whether the prepared generation is still wanted."""
    return prepared.members == generations.next_members(cluster) and len(prepared.members) >= cluster.limits.min


def _lost_newcomer(cluster: ClusterState) -> bool:
    """Whether a newcomer of the prepared generation receives no orders."""
    prepared = cluster.next_formation
    joining = prepared.members if prepared is not None else ()
    return any(w.host in cluster.disconnected and w not in cluster.member_set for w in joining)


def _worth_it(cluster: ClusterState, target: tuple[WorkerId, ...]) -> bool:
    """Whether it is another world. One below `min` counts only if members must leave and no worker is starting."""
    enough = len(target) >= cluster.limits.min
    return target != cluster.members and (enough or bool(cluster.leaving and not arrivals.any_coming(cluster)))


def _agree_on_commit(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All members have reported their commits: set the leave point after the highest, if the change is still wanted."""
    target, prepared = generations.next_members(cluster), cluster.next_formation
    if not _worth_it(cluster, target) or (prepared is not None and not _fits(cluster, prepared)):
        return _plan_change(generation_end.cancel_next(cluster, out), now, out)
    cluster = replace(cluster, postponements=0, unanswered={})
    commit = cluster.highest_acknowledged + 1
    stay = frozenset(target)
    removed = tuple(rank for rank, w in enumerate(cluster.members) if w not in stay)
    out.append(cmd.LeaveAt(cluster.generation, commit, cluster.members, removed))
    if prepared is not None:
        out.append(prepared)
    cluster = replace(cluster, stage=Stage.LEAVING, awaiting=cluster.member_set)
    return with_reason(cluster, Reason("agreed", generation=cluster.generation, commit=commit))


def _enter_next(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All members have left as agreed: enter the prepared generation, or form one, or wait for enough workers."""
    prepared = cluster.next_formation
    if prepared is not None and all(w in cluster.workers and w not in cluster.stopped for w in prepared.members):
        entered = cluster.entered_next
        others = cluster.member_set - cluster.leaving - prepared.members
        cluster = generations.stop_leavers(cluster, (*prepared.members, *others), out)
        cluster = generations.complete_formation(generations.enter(cluster, prepared, entered), now, out)
        return _plan_change(cluster, now, out) if cluster.stage is Stage.RUNNING else cluster
    if prepared is not None:  # members that have entered it must first leave it
        return progress(generation_end.cancel_next(cluster, out), now, out)
    target = generations.next_members(cluster)
    if len(target) >= cluster.limits.min:
        return generations.form(cluster, target, now, out)
    return generations.form_when_enough(replace(cluster, stage=Stage.GATHERING), now, out)
