"""From one world to the next by plan: prepare it, agree on the commit to leave at, change over.

The next world's process group is built beside the training, and newcomers wait in it, before anybody is asked to leave.
Where that is not possible (no store is known yet, or the back end cannot) the group is formed after all have left.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import addresses, epochs, mesh, staffing
from nbelastic.core import messages as m
from nbelastic.core.world import Stage, World, because, first

Commands = list[m.Command]


def progress(world: World, now: float, out: Commands) -> World:
    """One step further where that is possible, and always the reason where it is not."""
    if world.stopping:
        inside = (
            frozenset(w for w, worker in world.workers.items() if worker.job) if world.linger_until else frozenset()
        )
        wait = f"; programs may write a last checkpoint: {first(inside)}" if inside else ""
        return because(world, f"stopping: {world.stopping}{wait}")
    job = world.active
    if job is None:
        return _idle(world, now)
    left, size = len(world.awaiting), len(world.members)
    if job.succeeded:
        return because(world, f"{len(job.succeeded)} of {len(job.ranks)} ranks have finished")
    match world.stage:
        case Stage.GATHERING if left:
            text = f"{size - left} of {size} survivors have left epoch {world.epoch}; not yet {first(world.awaiting)}"
            return because(world, text + _stuck(world))
        case Stage.GATHERING:
            return epochs.gather(world, now, out)
        case Stage.FORMING:
            return because(world, f"{size - left} of {size} have joined epoch {world.epoch}")
        case Stage.RUNNING:
            return _plan(world, now, out)
        case Stage.PREPARING if left and now < world.prepare_by:
            text = (
                f"{size} workers train in epoch {world.epoch}; not yet prepared for the next: {first(world.awaiting)}"
            )
            return because(world, text, world.prepare_by)
        case Stage.PREPARING if left:
            return _not_prepared(world, now, out)
        case Stage.PREPARING:
            return _ask(world, now, out)
        case Stage.ASKED if left:
            return because(world, f"{size - left} of {size} have said where they are")
        case Stage.ASKED:
            return _agree(world, now, out)
        case Stage.LEAVING if left:
            return because(world, f"{size - left} of {size} have left epoch {world.epoch} at the agreed commit")
        case Stage.LEAVING:
            return _change(world, now, out)


def _idle(world: World, now: float) -> World:
    ready = len(world.workers) - len(world.starting) - len(world.stopped) - len(world.failed)
    low = world.limits.min
    if ready < low:
        return because(world, f"{ready} of min {low} workers ready; {staffing.shortage(world, now)}")
    return because(world, f"{ready} workers ready; no job is running")


def _plan(world: World, now: float, out: Commands) -> World:
    """A world runs. Is there a better one, and are the newcomers for it ready?"""
    size, most = len(world.members), world.limits.most
    text = f"{size} workers train in epoch {world.epoch}"
    room = size - len(world.leaving) < most
    if not world.leaving and not (room and world.waiting - world.held.keys()):
        return because(world, text + _held(world) * room)
    if now < world.change_at:
        return because(world, f"{text}; the next change waits, as {world.change_why}", world.change_at)
    if not staffing.settled(world, now):
        return because(world, f"{text}; {staffing.shortage(world, now)}", world.since + world.limits.timeouts.settle)
    target = epochs.next_members(world)
    if not _worth_it(world, target):
        why = "the last one with the training state is to leave: " if target == world.members else ""
        return because(world, f"{text}; {why}{staffing.shortage(world, now)}")
    failed = any(world.workers[w].failures for w in target if w not in world.ranked)
    if failed and not world.plainly and not addresses.has_store(world, target[0]):  # not without trying it beside them
        return because(world, f"{text}; {target[0]} is to offer a store for the next epoch")
    text = f"from {size} to {len(target)} workers"
    out.append(m.Record("change-planned", text, epoch=world.epoch))
    if (
        world.plainly
        or not addresses.has_store(world, target[0])
        or target[0] not in world.ranked
        or len(target) < world.limits.min
    ):
        return _ask(world, now, out)
    world = _prepare(world, target, now, out)
    return because(world, f"{text}: preparing epoch {world.numbered}", world.prepare_by)


def _prepare(world: World, target: tuple[m.WorkerId, ...], now: float, out: Commands) -> World:
    """Members will be equal when they leave: the first of them gives the state to those who are new."""
    receivers = tuple(rank for rank, w in enumerate(target) if w not in world.ranked)
    order = m.FormWorld(world.numbered + 1, target, world.workers[target[0]].store, 0, receivers)
    out.append(m.PrepareWorld(order))
    return replace(
        world,
        stage=Stage.PREPARING,
        plan=order,
        numbered=order.epoch,
        awaiting=frozenset(target),
        complaints={},
        prepare_by=now + world.limits.timeouts.prepare_for(len(target)),
    )


def prepared(world: World, event: m.WorkerPrepared, now: float) -> World:
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
    world = epochs.call_off(world, out)
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
    world = staffing.hold_back(world, blamed, why, now, out)
    world = mesh.begin(world, now, out, among={w.host for w in (*blamed, *members)})
    return _plan(world, now, out)


def _stuck(world: World) -> str:
    """Why those who are waited for are not replaced, as the end of a sentence."""
    if world.wait is None or not world.wait.stuck:
        return ""
    limits = world.limits
    end = "without end, as elastic_timeout is None" if limits.elastic_timeout is None else f"for {limits.patience:g} s"
    return f" ({world.wait.why}; waited for {end})"


def _held(world: World) -> str:
    """Who is left out, and why, as the end of a sentence."""
    if not world.held:
        return ""
    w = min(world.held)
    more = f" (and {len(world.held) - 1} more)" if len(world.held) > 1 else ""
    return f"; {w} is {world.workers[w].reason}{more}"


def _ask(world: World, now: float, out: Commands) -> World:
    """All is prepared, or will not be: ask the members where they are."""
    plan = world.plan
    if plan is not None and not _fits(world, plan):
        return _plan(epochs.call_off(world, out), now, out)
    world = replace(world, stage=Stage.ASKED, asks=world.asks + 1, awaiting=world.ranked, offers=())
    out.append(m.AskLeave(world.epoch, world.members, world.asks))
    return because(world, f"{len(world.members)} workers agree on the commit to leave at")


def _fits(world: World, plan: m.FormWorld) -> bool:
    """It is still what is wanted."""
    return plan.members == epochs.next_members(world) and len(plan.members) >= world.limits.min


def _worth_it(world: World, target: tuple[m.WorkerId, ...]) -> bool:
    """It is another world; and one below min only if somebody has to leave and no replacement is on its way."""
    enough = len(target) >= world.limits.min
    return target != world.members and (enough or bool(world.leaving and not staffing.coming(world)))


def _agree(world: World, now: float, out: Commands) -> World:
    """All have said where they are: leave at the next commit that none has made, if there still is a reason to."""
    target, plan = epochs.next_members(world), world.plan
    if not _worth_it(world, target) or (plan is not None and not _fits(world, plan)):
        return _plan(epochs.call_off(world, out), now, out)
    world = replace(world, put_off=0, unanswered={})
    commit = max(world.offers) + 1
    out.append(m.LeaveAt(world.epoch, commit, world.members))
    if plan is not None:
        out.append(plan)
    world = replace(world, stage=Stage.LEAVING, awaiting=world.ranked, offers=())
    return because(world, f"all leave epoch {world.epoch} at its commit {commit}")


def _change(world: World, now: float, out: Commands) -> World:
    """All have left as agreed, most likely into what was prepared. If too few are to stay, they park."""
    plan = world.plan
    if plan is not None and all(w in world.workers and w not in world.stopped for w in plan.members):
        ahead = world.ahead
        back = (w for w in world.members if w not in world.leaving and w not in plan.members)  # need not leave any more
        world = epochs.release(world, (*plan.members, *back), out)
        world = epochs.complete(epochs.enter(world, plan, ahead), now, out)
        return _plan(world, now, out) if world.stage is Stage.RUNNING else world
    if plan is not None:  # they have to come back from there first
        return progress(epochs.call_off(world, out), now, out)
    target = epochs.next_members(world)
    if len(target) >= world.limits.min:
        return epochs.form(world, target, now, out)
    return epochs.gather(replace(world, stage=Stage.GATHERING), now, out)
