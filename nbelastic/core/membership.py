"""`step(world, event, now) -> (world, commands)`: every decision about who trains with whom.

The shape is dask.distributed's `worker_state_machine` (stimulus in, instructions out); "not yet" always comes with its
reason, as in torchft's `quorum_compute`. Stale news is dropped first. Nothing in here waits, locks or calls back.
"""

from __future__ import annotations

import signal
from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import jobs
from nbelastic.core import messages as m
from nbelastic.core import staffing
from nbelastic.core.world import HostPhase, Stage, Worker, WorkerState, World

__all__ = ["deadline", "step"]

Commands = list[m.Command]


def step(world: World, event: m.Event, now: float) -> tuple[World, tuple[m.Command, ...]]:
    """The world after `event`, which the driver received at `now` (seconds, monotonic), and what is to be done."""
    out: Commands = []
    worker = getattr(event, "worker", None)
    if worker is not None and worker not in world.workers:
        return world, ()
    world = _take(world, event, now, out)
    world = jobs.progress(world, now, out)
    return world, tuple(out)


def deadline(world: World, now: float) -> float:
    """When after `now`, the time of the last step, to send `Ticked` if nothing else happens; infinity if never."""
    limits = world.limits
    times = [
        world.wake_at,
        world.linger_until,
        world.since + limits.settle,
        world.suspect_since + limits.grace if world.suspects else 0.0,
        world.short_since + limits.elastic_timeout if world.short_since is not None else 0.0,
    ]
    return min((time for time in times if time > now), default=float("inf"))


def _take(world: World, event: m.Event, now: float, out: Commands) -> World:
    match event:
        case m.WorkerReady() | m.WorkerFormed() | m.WorkerOffered() | m.WorkerRaised() | m.WorkerSucceeded():
            return _take_word(world, event, now, out)
        case m.HostAdded() | m.HostRemoved() | m.HostsDiscovered() | m.Scaled():
            return staffing.take_order(world, event, now, out)
        case m.AgentReady(host=name):
            return staffing.agent_ready(world, name, now, out)
        case m.AgentLost(host=name, reason=reason):
            world, gone = staffing.agent_lost(world, name, reason, now, out)
            world = jobs.lose(world, gone, f"host {name} was lost ({reason})", now, out)
            return staffing.staff(world, now, out)
        case m.WorkerStarted(worker=w, pid=pid):
            return _with(world, replace(world.workers[w], pid=pid))
        case m.WorkerExited(worker=w, code=code):
            return _exited(world, w, code, now, out)
        case m.WorkerFroze(worker=w, state=state):
            out.append(m.StopWorker(w, kill=True))
            return _gone(world, w, f"{w} froze ({state})", now, out)
        case m.WorkerRegistered(worker=w, error=error):
            return jobs.registered(world, w, error, now, out)
        case m.ProgramEnded(worker=w, job=job, error=error):
            return jobs.program_ended(world, w, job, error, now, out)
        case m.JobSubmitted(job=job):
            return jobs.submit(world, job, now, out)
        case m.JobStopRequested(job=job, reason=reason):
            return jobs.end(world, "stopped", reason, now, out) if world.active and world.active.name == job else world
        case m.StopRequested(reason=reason):
            return _stop(world, reason, now, out)
        case m.Ticked():
            return staffing.staff(jobs.expire(world, now, out), now, out)
        case _:
            raise TypeError(f"{type(event).__name__} is no event that step() knows")


Word = m.WorkerReady | m.WorkerFormed | m.WorkerOffered | m.WorkerRaised | m.WorkerSucceeded


def _take_word(world: World, event: Word, now: float, out: Commands) -> World:
    """What members and newcomers say of the elastic loop; news of a finished epoch is dropped."""
    if isinstance(event, m.WorkerReady):
        return _ready(world, event, now, out)
    if event.epoch != world.epoch or event.worker not in world.members or world.stage is Stage.GATHERING:
        return world
    match event:
        case m.WorkerFormed(worker=w):
            if world.stage is not Stage.FORMING:
                return world
            world = replace(world, awaiting=world.awaiting - {w})
            return world if world.awaiting else jobs.formed(world, now, out)
        case m.WorkerOffered(worker=w, commit=commit):
            if world.stage is not Stage.ASKED or w not in world.awaiting:
                return world
            return replace(world, awaiting=world.awaiting - {w}, offers=(*world.offers, commit))
        case m.WorkerRaised(worker=w, intact=intact, error=error):
            if intact:
                return jobs.end(world, "failed", f"{_rank(world, w)} raised {error}", now, out, culprit=w)
            since = world.suspect_since if world.suspects else now
            return replace(world, suspects=world.suspects | {w}, suspect_since=since)
        case m.WorkerSucceeded(worker=w):
            return jobs.succeeded(world, w, now, out)
        case _:
            assert_never(event)


def _ready(world: World, event: m.WorkerReady, now: float, out: Commands) -> World:
    """It waits for a world. Said again while a world that it belongs to is forming, it missed the order: send again."""
    w = event.worker
    job = world.active
    old = world.workers[w]
    if job is None or event.job != job.name or old.state in (WorkerState.STOPPED, WorkerState.FAILED):
        return world
    if w in world.members and world.stage in (Stage.FORMING, Stage.RUNNING, Stage.ASKED):
        if world.stage is Stage.FORMING and event.epoch < world.epoch and w in world.awaiting:
            out.append(replace(jobs.formation(world), to=(w,)))
        return world
    if w in world.members and event.epoch < world.epoch:
        return world
    worker = replace(
        old, state=WorkerState.READY, epoch=event.epoch, commit=event.commit, clean=event.clean, store=event.store
    )
    newcomers = bool(world.waiting - frozenset(world.members)) if w not in world.members else True
    return replace(
        _with(world, worker),
        waiting=world.waiting | {w},
        starting=world.starting - {w},
        awaiting=world.awaiting - {w},
        since=world.since if newcomers else now,
    )


def _exited(world: World, w: m.WorkerId, code: int, now: float, out: Commands) -> World:
    worker = world.workers[w]
    if worker.state is WorkerState.STOPPED:
        world = staffing.vacate(world, w)
        world = jobs.lose(world, (w,), f"{w} was stopped", now, out)
        world = staffing.retire_empty(world, w.host, out)
        return staffing.staff(world, now, out)
    return _gone(world, w, f"{w} died ({exit_text(code)})", now, out)


def _gone(world: World, w: m.WorkerId, why: str, now: float, out: Commands) -> World:
    """It died or will never answer: a strike against its slot, and a break if it was a member."""
    world = staffing.strike(world, w, now)
    out.append(m.Record("worker-lost", why, host=w.host, worker=str(w), epoch=world.epoch))
    world = jobs.lose(world, (w,), why, now, out)
    world = staffing.retire_empty(world, w.host, out)
    return staffing.staff(world, now, out)


def _stop(world: World, reason: str, now: float, out: Commands) -> World:
    if world.stopping:
        return world
    if world.active:
        world = jobs.end(world, "stopped", f"the cluster was stopped: {reason}", now, out)
    out.extend(m.StopAgent(name) for name in world.hosts)
    workers = {w: replace(worker, state=WorkerState.STOPPED) for w, worker in world.workers.items()}
    hosts = {name: replace(host, phase=HostPhase.DRAINING) for name, host in world.hosts.items()}
    return replace(world, stopping=reason, workers=workers, hosts=hosts, wake_at=float("inf"), linger_until=0.0)


def exit_text(code: int) -> str:
    """A process's end in words: `SIGKILL`, `exit code 3`."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _rank(world: World, w: m.WorkerId) -> str:
    return f"rank {world.members.index(w)} ({w})" if w in world.members else str(w)


def _with(world: World, worker: Worker) -> World:
    return replace(world, workers={**world.workers, worker.id: worker})
