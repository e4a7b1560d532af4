"""From one world to the next by plan: prepare it, agree on the commit to leave at, change over.

The next world's process group is built beside the training, and newcomers wait in it, before anybody is asked to leave.
Where that is not possible (no store is known yet, or the back end cannot) the group is formed after all have left.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import addresses, generations, mesh, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.reasons import Missing, Reason
from nbelastic.core.state import Stage, World, because, first, named
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]


def progress(world: World, now: float, out: Commands) -> World:
    """One step further where that is possible, and always the reason where it is not."""
    if world.stopping:
        inside = (
            frozenset(w for w, worker in world.workers.items() if worker.job) if world.linger_until else frozenset()
        )
        last = Reason("last-checkpoints", names=named(inside)) if inside else None
        return because(world, Reason("stopping", text=world.stopping, then=last))
    job = world.active
    if job is None:
        return _idle(world, now)
    left, size = len(world.awaiting), len(world.members)
    if job.succeeded:
        return because(world, Reason("finishing", len(job.succeeded), len(job.ranks)))
    match world.stage:
        case Stage.GATHERING if left:
            names = named(world.awaiting)
            return because(world, Reason("broken", size - left, size, world.epoch, names=names, then=_stuck(world)))
        case Stage.GATHERING:
            return generations.gather(world, now, out)
        case Stage.FORMING:
            return because(world, Reason("joining", size - left, size, world.epoch))
        case Stage.RUNNING:
            return _plan(world, now, out)
        case Stage.PREPARING if left and now < world.prepare_by:
            late = Reason("preparing", names=named(world.awaiting))
            return because(world, _training(world, late), world.prepare_by)
        case Stage.PREPARING if left:
            return _not_prepared(world, now, out)
        case Stage.PREPARING:
            return _ask(world, now, out)
        case Stage.ASKED if left:
            return because(world, Reason("asked", size - left, size))
        case Stage.ASKED:
            return _agree(world, now, out)
        case Stage.LEAVING if left:
            return because(world, Reason("leaving", size - left, size, world.epoch))
        case Stage.LEAVING:
            return _change(world, now, out)


def _idle(world: World, now: float) -> World:
    ready = len(world.workers) - len(world.starting) - len(world.stopped) - len(world.failed)
    low = world.limits.min
    if ready < low:
        return because(world, Reason("too-few", ready, low, missing=provisioning.missing(world, now)))
    return because(world, Reason("idle", ready))


def _training(world: World, then: Reason | None = None, missing: tuple[Missing, ...] | None = None) -> Reason:
    return Reason("training", of=len(world.members), epoch=world.epoch, missing=missing, then=then)


def _plan(world: World, now: float, out: Commands) -> World:
    """A world runs. Is there a better one, and are the newcomers for it ready?"""
    size, most = len(world.members), world.limits.most
    room = size - len(world.leaving) < most
    if not world.leaving and not (room and world.waiting - world.held.keys()):
        return because(world, _training(world, _held(world) if room else None))
    if now < world.change_at:
        return because(world, _training(world, Reason("put-off", text=world.change_why)), world.change_at)
    if not provisioning.settled(world, now):
        reason = _training(world, missing=provisioning.missing(world, now))
        return because(world, reason, world.since + world.limits.timeouts.settle)
    target = generations.next_members(world)
    if not _worth_it(world, target):
        last = Reason("last-holder") if target == world.members else None
        return because(world, _training(world, last, provisioning.missing(world, now)))
    failed = any(world.workers[w].failures for w in target if w not in world.ranked)
    if failed and not world.plainly and not addresses.has_store(world, target[0]):  # not without trying it beside them
        return because(world, _training(world, Reason("new-store", names=(str(target[0]),), text="for the next epoch")))
    text = f"from {size} to {len(target)} workers"
    out.append(cmd.Record("change-planned", text, epoch=world.epoch))
    if (
        world.plainly
        or not addresses.has_store(world, target[0])
        or target[0] not in world.ranked
        or len(target) < world.limits.min
    ):
        return _ask(world, now, out)
    world = _prepare(world, target, now, out)
    return because(world, Reason("changing", size, len(target), world.numbered), world.prepare_by)


def _prepare(world: World, target: tuple[WorkerId, ...], now: float, out: Commands) -> World:
    """Members will be equal when they leave: the first of them gives the state to those who are new."""
    receivers = tuple(rank for rank, w in enumerate(target) if w not in world.ranked)
    order = cmd.FormWorld(world.numbered + 1, target, world.workers[target[0]].store, 0, receivers)
    out.append(cmd.PrepareWorld(order))
    return replace(
        world,
        stage=Stage.PREPARING,
        plan=order,
        numbered=order.epoch,
        awaiting=frozenset(target),
        complaints={},
        prepare_by=now + world.limits.timeouts.prepare_for(len(target)),
    )


def prepared(world: World, event: ev.WorkerPrepared, now: float) -> World:
    """One more can change over at once, or says why it cannot: then the others have a moment to say whether they can."""
    plan, w = world.plan, event.worker
    if plan is None or world.stage is not Stage.PREPARING or event.epoch != plan.epoch or w not in world.awaiting:
        return world
    if not event.supported:
        return replace(world, plainly=True, prepare_by=0.0)
    if not event.error:
        return replace(world, awaiting=world.awaiting - {w})
    soon = min(world.prepare_by, now + world.limits.timeouts.grace)
    return replace(world, complaints={**world.complaints, w: event.error}, prepare_by=soon)


def _not_prepared(world: World, now: float, out: Commands) -> World:
    """The training is not touched by it: newcomers that the others could not be joined with are left out for a while.

    Where a group cannot be prepared at all, or without newcomers, the change is made the plain way. Of newcomers those are
    to blame that have not prepared themselves; if all have, it is one of them that others did not reach.
    """
    plan, late, complaints = world.plan, world.awaiting, world.complaints
    assert plan is not None
    newcomers = [w for w in plan.members if w not in world.ranked]
    world = generations.call_off(world, out)
    if world.plainly or not newcomers:
        return _plan(replace(world, plainly=True), now, out)
    blamed = [w for w in newcomers if w in late] or newcomers
    members = sorted(late & world.ranked)
    why = f"no group stood within {world.limits.timeouts.prepare_for(len(plan.members)):g} s"
    if complaints:
        w = next((w for w in blamed if w in complaints), min(complaints))
        why = f"{w} could not prepare a group ({complaints[w]})"
    if members and len(members) < len(world.members):
        why += f"; nor did {first(frozenset(members))} prepare"
    world = provisioning.hold_back(world, blamed, why, now, out)
    world = mesh.begin(world, now, out, among={w.host for w in (*blamed, *members)})
    return _plan(world, now, out)


def _stuck(world: World) -> Reason | None:
    """Why those who are waited for are not replaced."""
    if world.wait is None or not world.wait.stuck:
        return None
    limits = world.limits
    end = "without end, as elastic_timeout is None" if limits.elastic_timeout is None else f"for {limits.patience:g} s"
    return Reason("irreplaceable", text=f"{world.wait.why}; the others wait {end}")


def _held(world: World) -> Reason | None:
    """Who is left out, and why."""
    if not world.held:
        return None
    w = min(world.held)
    more = f" (and {len(world.held) - 1} more)" if len(world.held) > 1 else ""
    return Reason("left-out", names=(str(w),), text=f"{world.workers[w].reason}{more}")


def _ask(world: World, now: float, out: Commands) -> World:
    """All is prepared, or will not be: ask the members where they are."""
    plan = world.plan
    if plan is not None and not _fits(world, plan):
        return _plan(generations.call_off(world, out), now, out)
    world = replace(world, stage=Stage.ASKED, asks=world.asks + 1, awaiting=world.ranked, offers=())
    out.append(cmd.AskLeave(world.epoch, world.members, world.asks))
    return because(world, Reason("asking", of=len(world.members)))


def _fits(world: World, plan: cmd.FormWorld) -> bool:
    """It is still what is wanted."""
    return plan.members == generations.next_members(world) and len(plan.members) >= world.limits.min


def _worth_it(world: World, target: tuple[WorkerId, ...]) -> bool:
    """It is another world; and one below min only if somebody has to leave and no replacement is on its way."""
    enough = len(target) >= world.limits.min
    return target != world.members and (enough or bool(world.leaving and not provisioning.coming(world)))


def _agree(world: World, now: float, out: Commands) -> World:
    """All have said where they are: leave at the next commit that none has made, if there still is a reason to."""
    target, plan = generations.next_members(world), world.plan
    if not _worth_it(world, target) or (plan is not None and not _fits(world, plan)):
        return _plan(generations.call_off(world, out), now, out)
    world = replace(world, put_off=0, unanswered={})
    commit = max(world.offers) + 1
    out.append(cmd.LeaveAt(world.epoch, commit, world.members))
    if plan is not None:
        out.append(plan)
    world = replace(world, stage=Stage.LEAVING, awaiting=world.ranked, offers=())
    return because(world, Reason("agreed", epoch=world.epoch, commit=commit))


def _change(world: World, now: float, out: Commands) -> World:
    """All have left as agreed, most likely into what was prepared. If too few are to stay, they park."""
    plan = world.plan
    if plan is not None and all(w in world.workers and w not in world.stopped for w in plan.members):
        ahead = world.ahead
        back = (w for w in world.members if w not in world.leaving and w not in plan.members)  # need not leave any more
        world = generations.release(world, (*plan.members, *back), out)
        world = generations.complete(generations.enter(world, plan, ahead), now, out)
        return _plan(world, now, out) if world.stage is Stage.RUNNING else world
    if plan is not None:  # they have to come back from there first
        return progress(generations.call_off(world, out), now, out)
    target = generations.next_members(world)
    if len(target) >= world.limits.min:
        return generations.form(world, target, now, out)
    return generations.gather(replace(world, stage=Stage.GATHERING), now, out)
