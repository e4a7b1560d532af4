"""From one world to the next by plan: prepare it, agree on the commit to leave at, change over.

The next world's process group is built beside the training, and newcomers wait in it, before anybody is asked to leave.
Where that is not possible (no store is known yet, or the back end cannot) the group is formed after all have left.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import arrivals, backoff, generation_end, generations, partitions, stores
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.reasons import Missing, Reason
from nbelastic.core.state import ClusterState, Stage, first_names, format_ids, with_reason
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """One step further where that is possible, and always the reason where it is not."""
    if cluster.stopping:
        inside = (
            frozenset(w for w, worker in cluster.workers.items() if worker.job) if cluster.linger_until else frozenset()
        )
        last = Reason("last-checkpoints", names=first_names(inside)) if inside else None
        return with_reason(cluster, Reason("stopping", text=cluster.stopping, then=last))
    job = cluster.active
    if job is None:
        return _idle(cluster, now)
    left, size = len(cluster.awaiting), len(cluster.members)
    if job.succeeded:
        return with_reason(cluster, Reason("finishing", len(job.succeeded), len(job.ranks)))
    match cluster.stage:
        case Stage.GATHERING if left:
            names = first_names(cluster.awaiting)
            return with_reason(
                cluster,
                Reason("broken", size - left, size, cluster.generation, names=names, then=_irreplaceable(cluster)),
            )
        case Stage.GATHERING:
            return generations.form_when_enough(cluster, now, out)
        case Stage.FORMING:
            return with_reason(cluster, Reason("joining", size - left, size, cluster.generation))
        case Stage.RUNNING:
            return _plan_change(cluster, now, out)
        case Stage.PREPARING if left and now < cluster.prepare_by:
            late = Reason("preparing", names=first_names(cluster.awaiting))
            return with_reason(cluster, _training(cluster, late), cluster.prepare_by)
        case Stage.PREPARING if left:
            return _not_prepared(cluster, now, out)
        case Stage.PREPARING:
            return _ask_to_leave(cluster, now, out)
        case Stage.ASKED if left:
            return with_reason(cluster, Reason("asked", size - left, size))
        case Stage.ASKED:
            return _agree_on_commit(cluster, now, out)
        case Stage.LEAVING if left:
            return with_reason(cluster, Reason("leaving", size - left, size, cluster.generation))
        case Stage.LEAVING:
            return _enter_next(cluster, now, out)


def _idle(cluster: ClusterState, now: float) -> ClusterState:
    ready = len(cluster.workers) - len(cluster.starting) - len(cluster.stopped) - len(cluster.failed)
    low = cluster.limits.min
    if ready < low:
        return with_reason(cluster, Reason("too-few", ready, low, missing=arrivals.missing(cluster, now)))
    return with_reason(cluster, Reason("idle", ready))


def _training(cluster: ClusterState, then: Reason | None = None, missing: tuple[Missing, ...] | None = None) -> Reason:
    return Reason("training", of=len(cluster.members), generation=cluster.generation, missing=missing, then=then)


def _plan_change(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """A world runs. Is there a better one, and are the newcomers for it ready?"""
    size, most = len(cluster.members), cluster.limits.most
    room = size - len(cluster.leaving) < most
    if not cluster.leaving and not (room and cluster.newcomers - cluster.held_back.keys()):
        return with_reason(cluster, _training(cluster, _held_back(cluster) if room else None))
    if now < cluster.change_after:
        return with_reason(
            cluster, _training(cluster, Reason("put-off", text=cluster.postponed_because)), cluster.change_after
        )
    if not arrivals.settled(cluster, now):
        reason = _training(cluster, missing=arrivals.missing(cluster, now))
        return with_reason(cluster, reason, cluster.settling_since + cluster.limits.timeouts.settle)
    target = generations.next_members(cluster)
    if not _worth_it(cluster, target):
        last = Reason("last-holder") if target == cluster.members else None
        return with_reason(cluster, _training(cluster, last, arrivals.missing(cluster, now)))
    failed = any(cluster.workers[w].failures for w in target if w not in cluster.member_set)
    if (
        failed and not cluster.skip_preparing and not stores.has_store(cluster, target[0])
    ):  # not without trying it beside them
        return with_reason(
            cluster, _training(cluster, Reason("new-store", names=(str(target[0]),), text="for the next generation"))
        )
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
    """Members will be equal when they leave: the first of them gives the state to those who are new."""
    receivers = tuple(rank for rank, w in enumerate(target) if w not in cluster.member_set)
    order = cmd.FormWorld(cluster.highest_generation + 1, target, cluster.workers[target[0]].store, 0, receivers)
    out.append(cmd.PrepareWorld(order))
    return replace(
        cluster,
        stage=Stage.PREPARING,
        next_formation=order,
        highest_generation=order.generation,
        awaiting=frozenset(target),
        prepare_errors={},
        prepare_by=now + cluster.limits.timeouts.prepare_for(len(target)),
    )


def worker_prepared(cluster: ClusterState, event: ev.WorkerPrepared, now: float) -> ClusterState:
    """One more can change over at once, or says why it cannot: then the others have a moment to say whether they can."""
    plan, w = cluster.next_formation, event.worker
    if (
        plan is None
        or cluster.stage is not Stage.PREPARING
        or event.generation != plan.generation
        or w not in cluster.awaiting
    ):
        return cluster
    if not event.supported:
        return replace(cluster, skip_preparing=True, prepare_by=0.0)
    if not event.error:
        return replace(cluster, awaiting=cluster.awaiting - {w})
    soon = min(cluster.prepare_by, now + cluster.limits.timeouts.grace)
    return replace(cluster, prepare_errors={**cluster.prepare_errors, w: event.error}, prepare_by=soon)


def _not_prepared(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """The training is not touched by it: newcomers that the others could not be joined with are left out for a while.

    Where a group cannot be prepared at all, or without newcomers, the change is made the plain way. Of newcomers those are
    to blame that have not prepared themselves; if all have, it is one of them that others did not reach.
    """
    plan, late, complaints = cluster.next_formation, cluster.awaiting, cluster.prepare_errors
    assert plan is not None
    newcomers = [w for w in plan.members if w not in cluster.member_set]
    cluster = generation_end.cancel_next(cluster, out)
    if cluster.skip_preparing or not newcomers:
        return _plan_change(replace(cluster, skip_preparing=True), now, out)
    blamed = [w for w in newcomers if w in late] or newcomers
    members = sorted(late & cluster.member_set)
    why = f"no group was formed within {cluster.limits.timeouts.prepare_for(len(plan.members)):g} s"
    if complaints:
        w = next((w for w in blamed if w in complaints), min(complaints))
        why = f"{w} could not prepare a group ({complaints[w]})"
    if members and len(members) < len(cluster.members):
        why += f"; nor did {format_ids(frozenset(members))} prepare"
    cluster = backoff.hold_back(cluster, blamed, why, now, out)
    cluster = partitions.begin(cluster, now, out, suspected={w.host for w in (*blamed, *members)})
    return _plan_change(cluster, now, out)


def _irreplaceable(cluster: ClusterState) -> Reason | None:
    """Why those who are waited for are not replaced."""
    if cluster.wait is None or not cluster.wait.irreplaceable:
        return None
    limits = cluster.limits
    end = "without end, as elastic_timeout is None" if limits.elastic_timeout is None else f"for {limits.patience:g} s"
    return Reason("irreplaceable", text=f"{cluster.wait.why}; the others wait {end}")


def _held_back(cluster: ClusterState) -> Reason | None:
    """Who is left out, and why."""
    if not cluster.held_back:
        return None
    w = min(cluster.held_back)
    more = f" (and {len(cluster.held_back) - 1} more)" if len(cluster.held_back) > 1 else ""
    return Reason("left-out", names=(str(w),), text=f"{cluster.workers[w].reason}{more}")


def _ask_to_leave(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All is prepared, or will not be: ask the members where they are."""
    plan = cluster.next_formation
    if plan is not None and not _fits(cluster, plan):
        return _plan_change(generation_end.cancel_next(cluster, out), now, out)
    cluster = replace(
        cluster,
        stage=Stage.ASKED,
        ask_number=cluster.ask_number + 1,
        awaiting=cluster.member_set,
        acknowledged_commits=(),
    )
    out.append(cmd.AskLeave(cluster.generation, cluster.members, cluster.ask_number))
    return with_reason(cluster, Reason("asking", of=len(cluster.members)))


def _fits(cluster: ClusterState, plan: cmd.FormWorld) -> bool:
    """It is still what is wanted."""
    return plan.members == generations.next_members(cluster) and len(plan.members) >= cluster.limits.min


def _worth_it(cluster: ClusterState, target: tuple[WorkerId, ...]) -> bool:
    """It is another world; and one below min only if somebody has to leave and no replacement is on its way."""
    enough = len(target) >= cluster.limits.min
    return target != cluster.members and (enough or bool(cluster.leaving and not arrivals.any_coming(cluster)))


def _agree_on_commit(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All have reported where they are: leave at the next commit that none has made, if there still is a reason to."""
    target, plan = generations.next_members(cluster), cluster.next_formation
    if not _worth_it(cluster, target) or (plan is not None and not _fits(cluster, plan)):
        return _plan_change(generation_end.cancel_next(cluster, out), now, out)
    cluster = replace(cluster, postponements=0, unanswered={})
    commit = max(cluster.acknowledged_commits) + 1
    out.append(cmd.LeaveAt(cluster.generation, commit, cluster.members))
    if plan is not None:
        out.append(plan)
    cluster = replace(cluster, stage=Stage.LEAVING, awaiting=cluster.member_set, acknowledged_commits=())
    return with_reason(cluster, Reason("agreed", generation=cluster.generation, commit=commit))


def _enter_next(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All have left as agreed, most likely into what was prepared. If too few are to stay, they park."""
    plan = cluster.next_formation
    if plan is not None and all(w in cluster.workers and w not in cluster.stopped for w in plan.members):
        ahead = cluster.entered_next
        back = (
            w for w in cluster.members if w not in cluster.leaving and w not in plan.members
        )  # need not leave any more
        cluster = generations.stop_leavers(cluster, (*plan.members, *back), out)
        cluster = generations.complete_formation(generations.enter(cluster, plan, ahead), now, out)
        return _plan_change(cluster, now, out) if cluster.stage is Stage.RUNNING else cluster
    if plan is not None:  # they have to come back from there first
        return progress(generation_end.cancel_next(cluster, out), now, out)
    target = generations.next_members(cluster)
    if len(target) >= cluster.limits.min:
        return generations.form(cluster, target, now, out)
    return generations.form_when_enough(replace(cluster, stage=Stage.GATHERING), now, out)
