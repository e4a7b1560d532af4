"""The life of an epoch: gather, form, run, break. How one becomes another by plan is in `planned`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from nbelastic.core import addresses, jobs, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.holders import bequeath, keeper, state_lives
from nbelastic.core.ranks import rank_order
from nbelastic.core.reasons import Reason, missing_in_words
from nbelastic.core.state import NO_BREAKS, HostPhase, Job, Stage, Worker, WorkerState, World, because, less, put, seat
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def gone(world: World, w: WorkerId, why: str, now: float, out: Commands, *, blameless: bool = False) -> World:
    """It died or will never answer: a strike against its slot unless it was told to end; a break if it was a member."""
    if w in world.stopped:
        world, why = provisioning.vacate(world, w), f"{w} was stopped"
    else:
        if not blameless:
            world = provisioning.strike(_explained(world, (w,)), w, why, now, out)
        else:
            world = provisioning.vacate(world, w, restarts=1)
        out.append(cmd.Record("worker-lost", why, host=w.host, worker=str(w), epoch=world.epoch))
    world = lose(world, (w,), why, now, out)
    return provisioning.staff(provisioning.retire_empty(world, w.host, out), now, out)


def host_gone(world: World, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost") -> World:
    """The host is lost, and its workers with it; a record of this `kind` says why."""
    host = world.hosts.get(name)
    if host is None or host.phase is HostPhase.LOST:
        return world
    workers = provisioning.on_host(world, name)
    world = provisioning.agent_lost(_explained(world, workers), name, reason, now, out, kind=kind)
    world = lose(world, workers, f"host {name} was lost ({reason})", now, out)
    return provisioning.staff(world, now, out)


def _explained(world: World, dead: Iterable[WorkerId]) -> World:
    """The death of a member explains broken connections: the count of breaks without a death begins anew."""
    return replace(world, unexplained=NO_BREAKS) if not world.ranked.isdisjoint(dead) else world


def leave_out(world: World, name: str, reason: str, now: float, out: Commands, *, kind: str) -> World:
    """The host's agent is there but of no use: it is ended, and the host treated as a lost one."""
    out.append(cmd.StopAgent(name))
    return host_gone(world, name, reason, now, out, kind=kind)


def lose(world: World, gone: Iterable[WorkerId], why: str, now: float, out: Commands, *, keep: bool = False) -> World:
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
        if world.plan is not None and not ids.isdisjoint(world.plan.members):
            world = call_off(world, out)
        return jobs.finish(world, now, out)
    world = seat(world, tuple(w for w in world.members if w not in ids))
    if hit <= job.ended:
        return jobs.finish(world, now, out)
    if job.succeeded:
        return _wind_up(world, job, why, now, out)
    if not state_lives(world):
        return jobs.end(world, "failed", f"{why}; no worker is left that holds the training state", now, out)
    return world if world.stage is Stage.GATHERING else break_epoch(world, why, now, out)


def unseat(world: World, ids: Iterable[WorkerId], now: float) -> World:
    """Survivors of a broken epoch that are not to be in the next: they come back as newcomers when they have left this one."""
    those = frozenset(ids)
    world = replace(world, workers=world.workers | {w: replace(world.workers[w], since=now) for w in those})
    world = seat(world, tuple(w for w in world.members if w not in those))
    world = replace(world, awaiting=less(world.awaiting, those), leaving=less(world.leaving, those))
    return provisioning.expect(world, those)


def _bury(world: World, ids: frozenset[WorkerId]) -> World:
    workers = dict(world.workers)
    buried = sum(workers.pop(w, None) is not None for w in ids)
    return replace(
        world,
        workers=workers,
        buried=world.buried + buried,
        stopped=less(world.stopped, ids),
        failed=less(world.failed, ids),
    )


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
    away = world.awaiting if world.stage is Stage.LEAVING and world.plan is None else world.ranked
    out.append(cmd.Record("world-broken", why, epoch=world.epoch))
    world = jobs.abort(world, why, out)
    return replace(world, stage=Stage.GATHERING, awaiting=away, offers=(), broken_at=now)


def call_off(world: World, out: Commands) -> World:
    """What was prepared will not be. Members that leave already go on leaving, and gather for another world."""
    plan, stage = world.plan, world.stage
    if plan is not None:
        there = tuple(w for w in plan.members if w in world.workers and w not in world.stopped)
        if there:
            out.append(cmd.DropWorld(plan.epoch, there))
        world = replace(world, plan=None, ahead=frozenset())
        if stage is Stage.LEAVING:  # what they said when they left is old: they may have trained there, or used a store
            world = replace(world, undone=plan, awaiting=world.awaiting | world.ranked.intersection(plan.members))
    if stage is Stage.ASKED and world.members:
        out.append(cmd.Stay(world.epoch, world.members))
    if stage is Stage.ASKED or stage is Stage.PREPARING:
        world = replace(world, stage=Stage.RUNNING, awaiting=frozenset(), offers=())
    return world


def _wind_up(world: World, job: Job, why: str, now: float, out: Commands) -> World:
    """A death after some rank has finished restarts nothing: who has not finished stops, and the job ends."""
    world = replace(world, suspects=frozenset())
    late = tuple(w for w in world.members if w not in job.succeeded and w not in job.late)
    return jobs.finish(_send_home(world, late, f"{why} after other ranks had finished", now, out), now, out)


def _send_home(world: World, late: tuple[WorkerId, ...], why: str, now: float, out: Commands) -> World:
    job = world.active
    if job is None or not late:
        return world
    out.append(cmd.StopProgram(job.name, late, why))
    return jobs.linger(replace(world, job=replace(job, late=job.late.union(late))), now)


def succeeded(world: World, w: WorkerId, now: float, out: Commands) -> World:
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
        case Stage.PREPARING | Stage.ASKED:
            return call_off(world, out)
        case Stage.LEAVING:
            there = tuple(other for other in world.members if other in world.awaiting)
            left = tuple(other for other in world.members if other not in world.awaiting)
            world = _send_home(call_off(world, out), left, f"left for a change as {w} finished", now, out)
            out.append(cmd.Stay(world.epoch, there))
            return replace(world, stage=Stage.RUNNING, awaiting=frozenset())
    return world


def left(world: World, worker: Worker, now: float, out: Commands) -> World:
    """A member has left its epoch. The job fails if it does not hold the state any more, and nobody else does."""
    world = put(world, worker)
    if worker.has_state or state_lives(world):
        return world
    why = f"the state's transfer to {worker.id} broke off halfway; no worker is left that holds the training state"
    return jobs.end(world, "failed", why, now, out)


def formed(world: World, w: WorkerId, now: float, out: Commands) -> World:
    """`w` is in, and holds the state from now on. The world runs when all members do."""
    world = put(world, replace(world.workers[w], has_state=True, failures=0))
    return complete(replace(world, awaiting=world.awaiting - {w}), now, out)


def complete(world: World, now: float, out: Commands) -> World:
    """The world runs if all members are in."""
    job = world.active
    assert job is not None
    if world.awaiting:
        return world
    text = f"world of {len(world.members)} at epoch {world.epoch}"
    out.append(cmd.Record("world-formed", text, epoch=world.epoch))
    behind = {w: replace(world.workers[w], has_state=False) for w in world.waiting if world.workers[w].has_state}
    world = replace(world, workers=world.workers | behind) if behind else world
    job = replace(job, formed=True)
    world = replace(world, stage=Stage.RUNNING, unformed=0, formed_in=world.epoch, job=job)
    if world.kept is None:
        return world
    return provisioning.staff(
        jobs.forget(world, now, out), now, out
    )  # for its sake a worker more may have been started


def gather(world: World, now: float, out: Commands) -> World:
    """No world: form one as soon as there are enough."""
    world = bequeath(release(world, staying(world), out), out)
    limits = world.limits
    if world.unformed and world.mesh.pairs:
        return because(world, Reason("not-formed", epoch=world.epoch), world.mesh.until)
    ready = len(world.members) + len(world.waiting)
    if ready < limits.min:
        coming = sum(world.workers[w].registered for w in world.starting)
        return _too_few(world, Reason("too-few", ready, limits.min), now, coming=ready + coming >= limits.min)
    members = next_members(world)
    if world.kept is not None and not any(world.workers[w].has_state for w in members):
        host, heir = keeper(world), world.kept.heir
        coming = heir in world.waiting | world.ranked or any(
            w.host == host and world.workers[w].registered for w in world.starting
        )
        return _too_few(world, Reason("kept", names=(host,)), now, coming=coming)
    survivors = len(world.members) - len(world.leaving)
    if survivors < limits.min and ready < limits.most and not provisioning.settled(world, now):
        reason = Reason("ready", ready, missing=provisioning.missing(world, now))
        return because(replace(world, short_since=None), reason, world.since + limits.timeouts.settle)
    return form(world, members, now, out)


def _too_few(world: World, reason: Reason, now: float, *, coming: bool) -> World:
    """`elastic_timeout` counts while workers are missing, and not while those are `coming`: they run what comes before the loop."""
    since, paused = world.short_since, world.paused_since
    if since is None:
        since, paused = now, None
    if coming and paused is None:
        paused = now
    elif not coming and paused is not None:
        since, paused = since + now - paused, None
    world = replace(world, short_since=since, paused_since=paused)
    return because(world, replace(reason, missing=provisioning.missing(world, now)))


def short_until(world: World) -> float:
    """When the job fails because there are too few in the elastic loop. Who has none in its program keeps nobody waiting."""
    limits = world.limits
    if world.short_since is None or limits.elastic_timeout is None:
        return NEVER
    if world.paused_since is None:
        return world.short_since + limits.elastic_timeout
    if not (world.members or world.waiting):
        return NEVER
    return max(world.paused_since, world.since, world.broken_at) + limits.timeouts.program


def give_up(world: World, now: float, out: Commands) -> World:
    """That time has come."""
    limits, ready = world.limits, len(world.members) + len(world.waiting)
    text = f"{ready} of min {limits.min} workers ready"
    if world.kept is not None:
        text += f", and none with the training state, which is kept on {keeper(world)},"
    if world.paused_since is None:
        text += f" for {limits.patience:g} s (elastic_timeout)"
    else:
        text += f", and others have not come to the elastic function within {limits.timeouts.program:g} s"
    text += f"; {missing_in_words(provisioning.missing(world, now), now)}"
    return jobs.end(world, "failed", text, now, out)


def staying(world: World) -> tuple[WorkerId, ...]:
    """The members that need not leave. If only leavers hold the state, the first of them stays one world more, as rank 0."""
    if not world.leaving:
        return world.members
    keep = tuple(w for w in world.members if w not in world.leaving)
    if any(world.workers[w].has_state for w in keep):
        return keep
    holder = next((w for w in world.members if world.workers[w].has_state), None)
    return (holder, *keep) if holder else keep


def next_members(world: World) -> tuple[WorkerId, ...]:
    """Who would be in the next world, by rank."""
    most = world.limits.max if world.limits.max is not None else len(world.workers)
    keep = staying(world)[:most]
    seniority = {name: host.joined for name, host in world.hosts.items()}
    new = sorted(_newcomers(world, len(keep)), key=lambda w: (not _is_heir(world, w), seniority[w.host], w))
    new = new[: most - len(keep)]
    return rank_order(keep, new, seniority)


def _newcomers(world: World, others: int) -> Collection[WorkerId]:
    """Who may join: those that could not be joined before come after the rest, one at a time. Without a world, all that it takes."""
    heirs = [w for w in world.waiting if _is_heir(world, w)]
    free = (world.waiting - world.held.keys()).union(heirs)
    again = [w for w in free.difference(heirs) if world.workers[w].failures]
    if not again and not world.held:
        return free
    once = free.difference(again) or sorted(again, key=lambda w: (world.workers[w].failures, w))[:1]
    short = world.stage is Stage.GATHERING and others + len(once) < world.limits.min
    return world.waiting if short else once


def _is_heir(world: World, w: WorkerId) -> bool:
    """Whether it has read the state that was kept: without it no world is formed."""
    return world.kept is not None and world.workers[w].has_state


def release(world: World, staying: tuple[WorkerId, ...], out: Commands) -> World:
    """Members that are to leave, and need not stay, do."""
    leavers = world.leaving.difference(staying)
    if not leavers:
        return world
    world = replace(seat(world, staying), leaving=world.leaving - leavers, suspects=less(world.suspects, leavers))
    return provisioning.stop_workers(world, sorted(leavers), out)


def form(world: World, members: tuple[WorkerId, ...], now: float, out: Commands) -> World:
    """These are to form the next epoch; who has left the last one says so no more."""
    moved = addresses.moving_until(world, members[0])
    if now < moved:
        address = world.hosts[members[0].host].address
        store = Reason("new-store", names=(str(members[0]),), text=f"at {address}")
        reason = Reason("ready", len(members), then=store)
        return because(replace(world, short_since=None), reason, moved)
    members = addresses.led(world, members)
    world = release(world, staying(world), out)
    order = formation(world.numbered + 1, [world.workers[w] for w in members])
    out.append(order)
    return enter(world, order, frozenset())


def enter(world: World, order: cmd.FormWorld, ahead: frozenset[WorkerId]) -> World:
    """The epoch of `order` begins; those ahead have joined it already."""
    job, members = world.active, order.members
    assert job is not None
    workers = dict(world.workers)
    for w in members:
        old = workers[w]
        workers[w] = replace(
            old,
            state=WorkerState.RUNNING,
            store="",
            has_state=old.has_state or w in ahead,
            failures=0 if w in ahead else old.failures,
            reason="" if w in world.held else old.reason,
        )
    waiting = world.waiting | world.ranked
    world = seat(world, members)
    return replace(
        world,
        epoch=order.epoch,
        numbered=max(world.numbered, order.epoch),
        stage=Stage.FORMING,
        order=order,
        plan=None,
        ahead=frozenset(),
        undone=None,
        plainly=False,
        awaiting=world.ranked - ahead,
        waiting=waiting - world.ranked,
        suspects=frozenset(),
        stuck=frozenset(),
        workers=workers,
        short_since=None,
        until=NEVER,
        job=replace(job, ranks=members),
        reason=Reason("entered", of=len(members), epoch=order.epoch),
    )


def formation(epoch: int, members: list[Worker]) -> cmd.FormWorld:
    """The order to form an epoch: whose state is the newest, and who needs it."""
    claims = [(worker.has_state, worker.clean, worker.commit) for worker in members]
    newest = max(claims)
    root = claims.index(newest)
    stale = (rank for rank, claim in enumerate(claims) if not newest[0] or not newest[1] or claim != newest)
    receivers = tuple(rank for rank in stale if rank != root)
    return cmd.FormWorld(epoch, tuple(worker.id for worker in members), members[0].store, root, receivers)
