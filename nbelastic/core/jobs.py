"""The life of a job: gather, form, run, change, break, end."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import messages as m
from nbelastic.core import staffing
from nbelastic.core.placement import rank_order
from nbelastic.core.world import Job, Stage, Worker, WorkerState, World

Commands = list[m.Command]


def submit(world: World, name: str, now: float, out: Commands) -> World:
    """A new job: its program runs on every worker that is ready."""
    if world.active or world.stopping:
        return world
    job = Job(name)
    out.append(m.Record("job-started", f"{name} was submitted"))
    workers, starting = dict(world.workers), set(world.starting)
    for w, worker in world.workers.items():
        if worker.state in (WorkerState.FAILED, WorkerState.SUCCEEDED):
            workers[w] = worker = replace(worker, state=WorkerState.READY, reason="")
        if worker.state is WorkerState.READY and not worker.job:
            out.append(m.RunProgram(w, name))
            workers[w] = replace(worker, job=name, has_state=False, epoch=0)
            starting.add(w)
    return replace(world, job=job, workers=workers, starting=frozenset(starting), resets=0, since=now)


def registered(world: World, w: m.WorkerId, error: str, now: float, out: Commands) -> World:
    """A new worker takes code. If a job is on, it runs the program from the top and joins as a newcomer."""
    worker = world.workers[w]
    if worker.state is not WorkerState.STARTING:
        return world
    if error:
        out.append(m.Record("worker-failed", f"{w}: a setup cell failed: {error}", host=w.host, worker=str(w)))
        return _put(world, replace(worker, state=WorkerState.FAILED, reason=error), starting=world.starting - {w})
    out.append(m.Record("worker-ready", f"{w} is ready", host=w.host, worker=str(w)))
    worker = replace(worker, state=WorkerState.READY, since=now)
    job = world.active
    if job is None or job.succeeded or job.ended:
        return _put(world, worker, starting=world.starting - {w})
    out.append(m.RunProgram(w, job.name))
    return _put(world, replace(worker, job=job.name))


def program_ended(world: World, w: m.WorkerId, name: str, error: str, now: float, out: Commands) -> World:
    """The program came to its end on `w`: a result, the user's error, or the end of what was told to stop."""
    worker = world.workers[w]
    if worker.job != name:
        return world
    job = world.active
    gone = worker.state is WorkerState.STOPPED
    idle = replace(worker, job="", state=worker.state if gone else WorkerState.READY, has_state=False)
    world = _put(world, idle, starting=world.starting - {w}, waiting=world.waiting - {w})
    if job is None or job.name != name:
        if not any(other.job for other in world.workers.values()):
            world = replace(world, linger_until=0.0)
        return _run_next(world, w, out)
    if not error:
        return _finish(replace(world, job=replace(job, ended=job.ended | {w})), now, out)
    if gone or (job.succeeded and w not in job.succeeded):
        return _finish(lose(world, (w,), f"{w} did not finish", now, out, keep=True), now, out)
    if w not in world.members and job.formed:
        out.append(m.Record("worker-failed", f"newcomer {w} failed: {error}", host=w.host, worker=str(w)))
        return _put(world, replace(idle, state=WorkerState.FAILED, reason=error))
    rank = f"rank {world.members.index(w)} ({w})" if w in world.members else str(w)
    return end(world, "failed", f"{rank} raised {error}", now, out, culprit=w)


def _run_next(world: World, w: m.WorkerId, out: Commands) -> World:
    """A worker that came back from an ended job's program takes the next job's."""
    job, worker = world.active, world.workers[w]
    if job is None or job.succeeded or job.ended or worker.state is not WorkerState.READY:
        return world
    out.append(m.RunProgram(w, job.name))
    return _put(world, replace(worker, job=job.name, epoch=0), starting=world.starting | {w})


def _finish(world: World, now: float, out: Commands) -> World:
    """The job has succeeded when every member (without a world: every worker it ran on) has ended well."""
    job = world.active
    if job is None or not job.ended:
        return world
    if world.members:
        done = job.ended.issuperset(world.members)
    else:
        done = not any(worker.job == job.name for worker in world.workers.values())
    return end(world, "succeeded", "every rank finished", now, out) if done else world


def end(
    world: World, outcome: str, reason: str, now: float, out: Commands, culprit: m.WorkerId | None = None
) -> World:
    """The job is over. Who is still in its program leaves it, within `limits.leave`."""
    job = world.active
    if job is None:
        return world
    inside = tuple(w for w, worker in world.workers.items() if worker.job == job.name)
    if inside:
        if outcome != "succeeded" and world.members:
            out.append(m.AbortWorld(world.epoch, world.members, reason))
        out.append(m.StopProgram(job.name, inside, reason, culprit))
    ranks = job.ranks or tuple(sorted(job.ended))
    out.append(m.EndJob(job.name, outcome, reason, ranks, culprit))
    out.append(m.Record(f"job-{outcome}", f"{job.name} {outcome}: {reason}", worker=str(culprit or "")))
    leaving = sorted(world.leaving)
    world = replace(
        world,
        job=replace(job, outcome=outcome, reason=reason),
        stage=Stage.GATHERING,
        members=(),
        awaiting=frozenset(),
        waiting=frozenset(),
        leaving=frozenset(),
        suspects=frozenset(),
        starting=frozenset(w for w in world.starting if not world.workers[w].job),
        short_since=None,
        linger_until=now + world.limits.leave if inside else 0.0,
    )
    return staffing.staff(staffing.stop_workers(world, leaving, out), now, out)


def expire(world: World, now: float, out: Commands) -> World:
    """What has a deadline of its own: suspicion, being short of workers, programs that will not stop."""
    limits = world.limits
    if world.linger_until and now >= world.linger_until:
        active = world.active.name if world.active else ""
        stuck = [w for w, worker in world.workers.items() if worker.job and worker.job != active]
        for w in stuck:
            text = f"{w} did not stop within {limits.leave:g} s and is killed"
            out.append(m.Record("worker-killed", text, host=w.host, worker=str(w)))
        world = replace(staffing.stop_workers(world, stuck, out, kill=True), linger_until=0.0)
    if world.suspects and now - world.suspect_since >= limits.grace:
        ranks = ", ".join(str(w) for w in sorted(world.suspects))
        world = _break(world, f"connections of {ranks} broke though every worker lives", now, out)
    if world.short_since is not None and now - world.short_since >= limits.elastic_timeout:
        text = f"fewer than min={limits.min} workers for {limits.elastic_timeout:g} s (elastic_timeout): {world.reason}"
        world = end(world, "failed", text, now, out)
    return world


def lose(
    world: World, gone: Iterable[m.WorkerId], why: str, now: float, out: Commands, *, keep: bool = False
) -> World:
    """These are no longer there (`keep`: alive, but out of the job). The members among them break the epoch."""
    ids = frozenset(gone)
    if not ids:
        return world
    hit = ids & frozenset(world.members)
    workers = world.workers if keep else {w: worker for w, worker in world.workers.items() if w not in ids}
    stage = world.stage
    world = replace(
        world,
        workers=workers,
        members=tuple(w for w in world.members if w not in ids) if hit else world.members,
        awaiting=world.awaiting - ids,
        waiting=world.waiting - ids,
        starting=world.starting - ids,
        leaving=world.leaving - ids,
        suspects=world.suspects - ids,
    )
    job = world.active
    if job is None:
        return world
    if not hit:
        return _finish(world, now, out)
    if job.succeeded:
        return _wind_up(world, why, now, out)
    if job.formed and not any(world.workers[w].has_state for w in world.members):
        return end(world, "failed", f"{why}; no worker is left that holds the training state", now, out)
    return world if stage is Stage.GATHERING else _break(world, why, now, out)


def _wind_up(world: World, why: str, now: float, out: Commands) -> World:
    """A death after some rank has finished restarts nothing: who has not finished stops, and the job ends."""
    job = world.job
    assert job is not None
    late = tuple(w for w in world.members if w not in job.succeeded and w not in job.ended)
    if late:
        out.append(m.StopProgram(job.name, late, f"{why} after other ranks had finished"))
    return _finish(world, now, out)


def _break(world: World, why: str, now: float, out: Commands) -> World:
    """The epoch is broken: everyone else is aborted wherever it blocks, and the survivors gather."""
    resets = world.resets + 1
    limit = world.limits.reset_limit
    world = replace(world, resets=resets, suspects=frozenset())
    if limit is not None and resets > limit:
        return end(world, "failed", f"{resets} resets exceed reset_limit={limit}; the last: {why}", now, out)
    out.append(m.AbortWorld(world.epoch, world.members, why))
    out.append(m.Record("world-broken", why, epoch=world.epoch))
    away = frozenset(w for w in world.members if w not in world.waiting)
    return replace(world, stage=Stage.GATHERING, awaiting=away, offers=())


def succeeded(world: World, w: m.WorkerId, now: float, out: Commands) -> World:
    """The function returned on one rank: from now on nobody is disturbed."""
    job = world.job
    assert job is not None
    world = _put(world, replace(world.workers[w], state=WorkerState.SUCCEEDED))
    world = replace(world, job=replace(job, succeeded=job.succeeded | {w}))
    if world.stage in (Stage.ASKED, Stage.LEAVING):
        out.append(m.Stay(world.epoch, world.members))
        world = replace(world, stage=Stage.RUNNING, awaiting=frozenset(), offers=())
    return world


def formed(world: World, now: float, out: Commands) -> World:
    """All members are in: they hold the state from now on."""
    job = world.job
    assert job is not None
    workers = dict(world.workers)
    for w in world.members:
        workers[w] = replace(workers[w], has_state=True)
    size = len(world.members)
    out.append(m.Record("world-formed", f"world of {size} at epoch {world.epoch}", epoch=world.epoch))
    return replace(
        world, stage=Stage.RUNNING, workers=workers, job=replace(job, formed=True), suspects=frozenset(), since=now
    )


def progress(world: World, now: float, out: Commands) -> World:
    """One step further where that is possible, and always the reason where it is not."""
    if world.stopping:
        return _because(world, f"stopping: {world.stopping}")
    job = world.active
    if job is None:
        ready = len(world.workers) - len(world.starting)
        low = world.limits.min
        if ready < low:
            return _because(world, f"{ready} of min {low} workers ready; {staffing.shortage(world, now)}")
        return _because(world, f"{ready} workers ready; no job is running")
    count, size = len(world.awaiting), len(world.members)
    match world.stage:
        case Stage.GATHERING if count:
            names = ", ".join(str(w) for w in sorted(world.awaiting)[:3])
            return _because(world, f"{size - count} of {size} survivors have left epoch {world.epoch}; not yet {names}")
        case Stage.GATHERING:
            return _gather(world, now, out)
        case Stage.FORMING:
            return _because(world, f"{size - count} of {size} have joined epoch {world.epoch}")
        case Stage.RUNNING:
            return _plan(world, job, now, out)
        case Stage.ASKED if not count:
            commit = max(world.offers) + 1
            out.append(m.LeaveAt(world.epoch, commit, world.members))
            awaiting = frozenset(world.members)
            return replace(world, stage=Stage.LEAVING, awaiting=awaiting, offers=())
        case Stage.LEAVING if not count:
            return _form(world, _next_members(world), now, out)
    return _because(world, f"leaving epoch {world.epoch} at the next commit")


def _gather(world: World, now: float, out: Commands) -> World:
    """No world: form one as soon as there are enough."""
    low = world.limits.min
    ready = _next_members(world)
    if len(ready) < low:
        reason = f"{len(ready)} of min {low} workers ready; {staffing.shortage(world, now)}"
        since = world.short_since if world.short_since is not None else now
        return _because(replace(world, short_since=since), reason)
    survivors = len(world.members) - len(world.leaving)
    if survivors < low and not staffing.settled(world, now) and len(ready) < world.limits.wanted:
        return _because(world, f"{len(ready)} workers ready; {staffing.shortage(world, now)}")
    return _form(world, ready, now, out)


def _plan(world: World, job: Job, now: float, out: Commands) -> World:
    """A world runs. Is there a better one, and are the newcomers for it ready?"""
    size = len(world.members)
    if job.succeeded:
        return _because(world, f"{len(job.succeeded)} of {size} ranks have finished")
    newcomers = len(world.waiting)
    if not world.leaving and (not newcomers or staffing.full(world)):
        return _because(world, f"{size} workers train in epoch {world.epoch}")
    target = _next_members(world)
    if target == world.members:
        reason = "the last holder of the training state is to leave: waiting for another host" if world.leaving else ""
        return _because(world, reason or f"{size} workers train in epoch {world.epoch}")
    if newcomers and not staffing.settled(world, now):
        return _because(world, f"{newcomers} newcomers ready; {staffing.shortage(world, now)}")
    out.append(m.AskLeave(world.epoch, world.members))
    text = f"from {size} to {len(target)} workers"
    out.append(m.Record("change-planned", text, epoch=world.epoch))
    world = replace(world, stage=Stage.ASKED, awaiting=frozenset(world.members), offers=())
    return _because(world, f"{text}: agreeing on the commit to leave at")


def _next_members(world: World) -> tuple[m.WorkerId, ...]:
    """Who would be in the next world, by rank. If only leavers hold the state, the first of them stays one world more."""
    keep = [w for w in world.members if w not in world.leaving]
    holders = [w for w in world.members if world.workers[w].has_state]
    if holders and not any(world.workers[w].has_state for w in keep):
        keep.insert(0, holders[0])
    high = world.limits.max if world.limits.max is not None else len(world.workers)
    keep = keep[:high]
    seniority = {name: host.joined for name, host in world.hosts.items()}
    newcomers = world.waiting - frozenset(world.members)
    new = sorted(newcomers, key=lambda w: (seniority.get(w.host, len(seniority)), w))[: high - len(keep)]
    return rank_order(keep, new, seniority)


def _form(world: World, members: tuple[m.WorkerId, ...], now: float, out: Commands) -> World:
    job = world.job
    assert job is not None
    staying = frozenset(members)
    leavers = sorted(world.leaving - staying)
    workers = dict(world.workers)
    for w in members:
        workers[w] = replace(workers[w], state=WorkerState.RUNNING)
    world = replace(
        world,
        epoch=world.epoch + 1,
        stage=Stage.FORMING,
        members=members,
        awaiting=staying,
        waiting=world.waiting - staying,
        leaving=world.leaving & staying,
        workers=workers,
        short_since=None,
        job=replace(job, ranks=members),
        reason=f"{len(members)} workers join epoch {world.epoch + 1}",
    )
    out.append(formation(world))
    return staffing.stop_workers(world, leavers, out)


def formation(world: World) -> m.FormWorld:
    """The order to form the present epoch: whose state is the newest, and who needs it."""
    members = [world.workers[w] for w in world.members]
    root = max(range(len(members)), key=lambda rank: (_claim(members[rank]), -rank))
    newest = members[root]
    receivers = tuple(
        rank
        for rank, worker in enumerate(members)
        if rank != root and (not worker.has_state or not newest.clean or _claim(worker) != _claim(newest))
    )
    return m.FormWorld(world.epoch, world.members, members[0].store, root, receivers)


def _claim(worker: Worker) -> tuple[bool, bool, int]:
    """How good its state is: held at all, not changed since its commit, how new."""
    return worker.has_state, worker.clean, worker.commit


def _because(world: World, reason: str) -> World:
    return world if world.reason == reason else replace(world, reason=reason)


def _put(
    world: World,
    worker: Worker,
    *,
    starting: frozenset[m.WorkerId] | None = None,
    waiting: frozenset[m.WorkerId] | None = None,
) -> World:
    return replace(
        world,
        workers={**world.workers, worker.id: worker},
        starting=world.starting if starting is None else starting,
        waiting=world.waiting if waiting is None else waiting,
    )
