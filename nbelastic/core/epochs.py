"""The life of an epoch: gather, form, run, change, break."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import jobs, staffing
from nbelastic.core import messages as m
from nbelastic.core.placement import rank_order
from nbelastic.core.world import NEVER, Job, Stage, Worker, WorkerState, World, because, first, less, put, seat

Commands = list[m.Command]


def lose(world: World, gone: Iterable[m.WorkerId], why: str, now: float, out: Commands, *, keep: bool = False) -> World:
    """These are no longer there (`keep`: alive, but out of the job). The members among them break the epoch."""
    ids = frozenset(gone)
    hit = ids & world.ranked
    if not keep:
        world = _bury(world, ids)
    world = replace(
        world,
        awaiting=less(world.awaiting, ids),
        waiting=less(world.waiting, ids),
        starting=less(world.starting, ids),
        leaving=less(world.leaving, ids),
        suspects=less(world.suspects, ids),
    )
    job = world.active
    if job is None or not hit:
        return jobs.finish(world, now, out)
    world = seat(world, tuple(w for w in world.members if w not in ids))
    if hit <= job.ended:
        return jobs.finish(world, now, out)
    if job.succeeded:
        return _wind_up(world, job, why, now, out)
    if job.formed and not _state_lives(world):
        return jobs.end(world, "failed", f"{why}; no worker is left that holds the training state", now, out)
    return world if world.stage is Stage.GATHERING else break_epoch(world, why, now, out)


def _bury(world: World, ids: frozenset[m.WorkerId]) -> World:
    workers = dict(world.workers)
    for w in ids:
        workers.pop(w, None)
    return replace(world, workers=workers, stopped=less(world.stopped, ids), failed=less(world.failed, ids))


def _state_lives(world: World) -> bool:
    return any(world.workers[w].has_state for ids in (world.members, world.waiting) for w in ids)


def break_epoch(world: World, why: str, now: float, out: Commands) -> World:
    """The epoch is broken: everyone else is aborted wherever it blocks, and the survivors gather."""
    job = world.active
    if job is not None and job.succeeded:
        return _wind_up(world, job, why, now, out)
    resets = world.resets + 1
    limit = world.limits.reset_limit
    world = replace(world, resets=resets, suspects=frozenset())
    if limit is not None and resets > limit:
        return jobs.end(world, "failed", f"{resets} resets exceed reset_limit={limit}; the last: {why}", now, out)
    if world.members:
        out.append(m.AbortWorld(world.epoch, world.members, why))
    out.append(m.Record("world-broken", why, epoch=world.epoch))
    away = world.awaiting if world.stage is Stage.LEAVING else world.ranked
    return replace(world, stage=Stage.GATHERING, awaiting=away, offers=())


def _wind_up(world: World, job: Job, why: str, now: float, out: Commands) -> World:
    """A death after some rank has finished restarts nothing: who has not finished stops, and the job ends."""
    world = replace(world, suspects=frozenset())
    late = tuple(w for w in world.members if w not in job.succeeded and w not in job.late)
    return jobs.finish(_send_home(world, late, f"{why} after other ranks had finished", now, out), now, out)


def _send_home(world: World, late: tuple[m.WorkerId, ...], why: str, now: float, out: Commands) -> World:
    job = world.active
    if job is None or not late:
        return world
    out.append(m.StopProgram(job.name, late, why))
    return replace(world, job=replace(job, late=job.late.union(late)), linger_until=now + world.limits.leave)


def succeeded(world: World, w: m.WorkerId, now: float, out: Commands) -> World:
    """The function returned on one rank: from now on nobody is disturbed, and nothing begins again."""
    job = world.active
    assert job is not None
    if w in job.succeeded or w in job.late or (world.stage is Stage.GATHERING and w not in world.awaiting):
        return world
    job = replace(job, succeeded=job.succeeded | {w})
    world = put(replace(world, job=job), replace(world.workers[w], state=WorkerState.SUCCEEDED))
    match world.stage:
        case Stage.GATHERING:
            return _wind_up(world, job, "the world broke", now, out)
        case Stage.ASKED | Stage.LEAVING:
            there = world.members
            if world.stage is Stage.LEAVING:
                there = tuple(other for other in world.members if other in world.awaiting)
                left = tuple(other for other in world.members if other not in world.awaiting)
                world = _send_home(world, left, f"left for a change as {w} finished", now, out)
            out.append(m.Stay(world.epoch, there))
            return replace(world, stage=Stage.RUNNING, awaiting=frozenset(), offers=())
    return world


def formed(world: World, w: m.WorkerId, out: Commands) -> World:
    """`w` is in, and holds the state from now on. The world runs when all members do."""
    job = world.active
    assert job is not None
    world = put(world, replace(world.workers[w], has_state=True))
    world = replace(world, awaiting=world.awaiting - {w})
    if world.awaiting:
        return world
    text = f"world of {len(world.members)} at epoch {world.epoch}"
    out.append(m.Record("world-formed", text, epoch=world.epoch))
    return replace(world, stage=Stage.RUNNING, job=replace(job, formed=True))


def progress(world: World, now: float, out: Commands) -> World:
    """One step further where that is possible, and always the reason where it is not."""
    if world.stopping:
        return because(world, f"stopping: {world.stopping}")
    job = world.active
    if job is None:
        return _idle(world, now)
    left, size = len(world.awaiting), len(world.members)
    if job.succeeded:
        return because(world, f"{len(job.succeeded)} of {len(job.ranks)} ranks have finished")
    match world.stage:
        case Stage.GATHERING if left:
            text = f"{size - left} of {size} survivors have left epoch {world.epoch}; not yet {first(world.awaiting)}"
            return because(world, text)
        case Stage.GATHERING:
            return _gather(world, now, out)
        case Stage.FORMING:
            return because(world, f"{size - left} of {size} have joined epoch {world.epoch}")
        case Stage.RUNNING:
            return _plan(world, now, out)
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


def _gather(world: World, now: float, out: Commands) -> World:
    """No world: form one as soon as there are enough."""
    world = _release(world, _staying(world), out)
    limits = world.limits
    ready = len(world.members) + len(world.waiting)
    if ready < limits.min:
        since = world.short_since if world.short_since is not None else now
        reason = f"{ready} of min {limits.min} workers ready; {staffing.shortage(world, now)}"
        return because(replace(world, short_since=since), reason)
    survivors = len(world.members) - len(world.leaving)
    if survivors < limits.min and ready < limits.most and not staffing.settled(world, now):
        reason = f"{ready} workers ready; {staffing.shortage(world, now)}"
        return because(replace(world, short_since=None), reason, world.since + limits.settle)
    return _form(world, _next_members(world), out)


def _plan(world: World, now: float, out: Commands) -> World:
    """A world runs. Is there a better one, and are the newcomers for it ready?"""
    size, most = len(world.members), world.limits.most
    text = f"{size} workers train in epoch {world.epoch}"
    room = size - len(world.leaving) < most
    if not world.leaving and not (world.waiting and room):
        return because(world, text)
    if not staffing.settled(world, now):
        return because(world, f"{text}; {staffing.shortage(world, now)}", world.since + world.limits.settle)
    target = _next_members(world)
    if not _worth_it(world, target):
        why = "the last one with the training state is to leave: " if target == world.members else ""
        return because(world, f"{text}; {why}{staffing.shortage(world, now)}")
    out.append(m.AskLeave(world.epoch, world.members))
    text = f"from {size} to {len(target)} workers"
    out.append(m.Record("change-planned", text, epoch=world.epoch))
    world = replace(world, stage=Stage.ASKED, awaiting=world.ranked, offers=())
    return because(world, f"{text}: agreeing on the commit to leave at")


def _worth_it(world: World, target: tuple[m.WorkerId, ...]) -> bool:
    """It is another world; and one below min only if somebody has to leave and no replacement is on its way."""
    enough = len(target) >= world.limits.min
    return target != world.members and (enough or bool(world.leaving and not staffing.coming(world)))


def _agree(world: World, now: float, out: Commands) -> World:
    """All have said where they are: leave at the next commit that none has made, if there still is a reason to."""
    if not _worth_it(world, _next_members(world)):
        out.append(m.Stay(world.epoch, world.members))
        return _plan(replace(world, stage=Stage.RUNNING, offers=()), now, out)
    commit = max(world.offers) + 1
    out.append(m.LeaveAt(world.epoch, commit, world.members))
    world = replace(world, stage=Stage.LEAVING, awaiting=world.ranked, offers=())
    return because(world, f"all leave epoch {world.epoch} at its commit {commit}")


def _change(world: World, now: float, out: Commands) -> World:
    """All have left as agreed. If too few are to stay, they park."""
    target = _next_members(world)
    if len(target) >= world.limits.min:
        return _form(world, target, out)
    return _gather(replace(world, stage=Stage.GATHERING), now, out)


def _staying(world: World) -> tuple[m.WorkerId, ...]:
    """The members that need not leave. If only leavers hold the state, the first of them stays one world more, as rank 0."""
    if not world.leaving:
        return world.members
    keep = tuple(w for w in world.members if w not in world.leaving)
    if any(world.workers[w].has_state for w in keep):
        return keep
    holder = next((w for w in world.members if world.workers[w].has_state), None)
    return (holder, *keep) if holder else keep


def _next_members(world: World) -> tuple[m.WorkerId, ...]:
    """Who would be in the next world, by rank."""
    most = world.limits.max if world.limits.max is not None else len(world.workers)
    keep = _staying(world)[:most]
    seniority = {name: host.joined for name, host in world.hosts.items()}
    new = sorted(world.waiting, key=lambda w: (seniority[w.host], w))[: most - len(keep)]
    return rank_order(keep, new, seniority)


def _release(world: World, staying: tuple[m.WorkerId, ...], out: Commands) -> World:
    """Members that are to leave, and need not stay, do."""
    leavers = world.leaving.difference(staying)
    if not leavers:
        return world
    world = replace(seat(world, staying), leaving=world.leaving - leavers, suspects=less(world.suspects, leavers))
    return staffing.stop_workers(world, sorted(leavers), out)


def _form(world: World, members: tuple[m.WorkerId, ...], out: Commands) -> World:
    job = world.active
    assert job is not None
    world = _release(world, _staying(world), out)
    workers = dict(world.workers)
    for w in members:
        workers[w] = replace(workers[w], state=WorkerState.RUNNING)
    waiting = world.waiting | world.ranked
    world = seat(world, members)
    world = replace(
        world,
        epoch=world.epoch + 1,
        stage=Stage.FORMING,
        order=formation(world.epoch + 1, [workers[w] for w in members]),
        awaiting=world.ranked,
        waiting=waiting - world.ranked,
        leaving=world.leaving & world.ranked,
        suspects=frozenset(),
        workers=workers,
        short_since=None,
        until=NEVER,
        job=replace(job, ranks=members),
        reason=f"{len(members)} workers join epoch {world.epoch + 1}",
    )
    assert world.order is not None
    out.append(world.order)
    return world


def formation(epoch: int, members: list[Worker]) -> m.FormWorld:
    """The order to form an epoch: whose state is the newest, and who needs it."""
    claims = [(worker.has_state, worker.clean, worker.commit) for worker in members]
    newest = max(claims)
    root = claims.index(newest)
    stale = (rank for rank, claim in enumerate(claims) if not newest[0] or not newest[1] or claim != newest)
    receivers = tuple(rank for rank in stale if rank != root)
    return m.FormWorld(epoch, tuple(worker.id for worker in members), members[0].store, root, receivers)
