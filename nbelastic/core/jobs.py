"""The beginning and the end of a job, and of its program on each worker."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import provisioning, setup
from nbelastic.core.holders import forget_kept, keeper
from nbelastic.core.state import NO_BREAKS, HostPhase, Job, Stage, WorkerState, World
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def refusal(world: World) -> tuple[str, str] | None:
    """The outcome of a job that cannot begin, and why."""
    if world.stopping:
        return "stopped", f"the cluster is stopping: {world.stopping}"
    if world.present_job:
        return "failed", f"{world.present_job} is still running: wait for it or stop it first"
    return None


def submit(world: World, name: str, now: float, out: Commands) -> World:
    """A new job: its program runs on every worker that is ready."""
    if world.job is not None and world.job.name == name:
        return world
    problem = refusal(world)
    if problem:
        out.append(cmd.EndJob(name, *problem, ()))
        return world
    out.append(cmd.Record("job-started", f"{name} was submitted"))
    workers, starting, behind = dict(world.workers), set(world.starting), []
    for w, worker in world.workers.items():
        if worker.state in (WorkerState.READY, WorkerState.FAILED, WorkerState.SUCCEEDED) and not worker.failed_cell:
            workers[w] = replace(worker, state=WorkerState.READY, failures=0, reason="")
            if not worker.job and setup.due(world, worker) is not None:
                behind.append(w)
            elif not worker.job:
                out.append(cmd.RunProgram(w, name))
                workers[w] = replace(workers[w], job=name, has_state=False, epoch=0)
                starting.add(w)
    world = replace(
        world,
        job=Job(name),
        script=None,
        workers=workers,
        starting=frozenset(starting),
        failed=frozenset(w for w in world.failed if workers[w].failed_cell),
        resets=0,
        since=now,
    )
    for w in behind:
        world = setup.run_next(world, w, now, out)
    return world


def linger(world: World, now: float) -> World:
    """Programs are told to end. Those that hold the training state may write a last checkpoint, and so take longer."""
    timeouts = world.limits.timeouts
    last = now + max(timeouts.leave, timeouts.stop)
    return replace(world, linger_until=now + timeouts.leave, linger_last=last)


def finish(world: World, now: float, out: Commands) -> World:
    """After the first rank has finished, the job ends when no other can: every member (or, without a world, worker) has."""
    job = world.active
    if job is None or not (job.succeeded or job.ended):
        return world
    if len(job.ended) < len(world.members) or not job.ended.issuperset(world.members):
        return world
    if not (job.succeeded or job.formed) and any(worker.job == job.name for worker in world.workers.values()):
        return world
    if not job.ended:
        return end(world, "failed", "every rank that had finished was lost before its program ended", now, out)
    missing = len(frozenset(job.ranks) - job.ended)
    reason = f"{missing} of {len(job.ranks)} ranks did not finish" if missing else "every rank finished"
    return end(world, "succeeded", reason, now, out)


def abort(world: World, why: str, out: Commands) -> World:
    """Everybody in this epoch, or in the one that is prepared after it, is to leave."""
    members, epoch = world.members, world.epoch
    if world.plan is not None:  # an abort counts for older epochs too, so its number is enough
        epoch = world.plan.epoch
        there = world.workers.keys() - world.stopped - world.ranked
        members += tuple(w for w in world.plan.members if w in there)
    if members:
        out.append(cmd.AbortWorld(epoch, members, why))
    return replace(world, epoch=epoch, plan=None, ahead=frozenset())


def forget(world: World, now: float, out: Commands) -> World:
    """What was kept is not needed any more, and a host that only waited for that leaves."""
    name = keeper(world)
    world = forget_kept(world, out)
    if name in world.hosts and world.hosts[name].phase is HostPhase.DRAINING:
        world = provisioning.dismiss(world, provisioning.on_host(world, name), now, out)
        world = provisioning.retire_empty(world, name, out)
    return world


def end(
    world: World, outcome: str, reason: str, now: float, out: Commands, *, culprit: WorkerId | None = None
) -> World:
    """The job is over. Who is still in its program leaves it, or is killed: see `linger`."""
    job = world.active
    if job is None:
        return world
    inside = tuple(w for w, worker in world.workers.items() if worker.job == job.name)
    if inside:
        if outcome != "succeeded":
            world = abort(world, reason, out)
        out.append(cmd.StopProgram(job.name, inside, reason, culprit))
    older = any(worker.job not in ("", job.name) for worker in world.workers.values())  # programs that were told to end
    ranks = job.ranks or tuple(sorted(job.ended))
    # The event first: whoever waits for the job finds it in the log.
    out.append(cmd.Record(f"job-{outcome}", f"{job.name} {outcome}: {reason}", worker=str(culprit or "")))
    out.append(cmd.EndJob(job.name, outcome, reason, ranks, culprit))
    world = forget(world, now, out)
    leaving = sorted(world.leaving)
    world = replace(
        world,
        job=replace(job, outcome=outcome, reason=reason),
        stuck=frozenset(),
        stage=Stage.GATHERING,
        members=(),
        ranked=frozenset(),
        order=None,
        plan=None,
        ahead=frozenset(),
        undone=None,
        awaiting=frozenset(),
        waiting=frozenset(),
        leaving=frozenset(),
        suspects=frozenset(),
        unexplained=NO_BREAKS,
        offers=(),
        change_at=0.0,
        put_off=0,
        unanswered={},
        unformed=0,
        wait=None,
        starting=frozenset(w for w in world.starting if not world.workers[w].job),
        short_since=None,
        until=NEVER,
        linger_until=world.linger_until if older else 0.0,
    )
    world = linger(world, now) if inside else world
    return provisioning.staff(provisioning.stop_workers(world, leaving, out), now, out)
