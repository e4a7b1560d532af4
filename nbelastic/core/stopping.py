"""The end of the cluster, and of programs and setup cells that have had their time."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generations, jobs, provisioning, setup
from nbelastic.core.state import HostPhase, WorkerState, World
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def stop(world: World, event: ev.StopRequested, now: float, out: Commands) -> World:
    """The cluster is to end: programs first, which may write a last checkpoint, then the agents that they run on."""
    reason = event.reason
    if not world.stopping:
        world = jobs.end(replace(world, stopping=reason), "stopped", f"the cluster was stopped: {reason}", now, out)
        # of the others nothing will be heard that one could wait for
        there = {name: host for name, host in world.hosts.items() if host.phase is not HostPhase.LOST}
        runs = any(worker.job for worker in world.workers.values())
        world = replace(
            world,
            workers={w: replace(worker, state=WorkerState.STOPPED) for w, worker in world.workers.items()},
            hosts={name: replace(host, phase=HostPhase.DRAINING) for name, host in there.items()},
            stopped=frozenset(world.workers),
            starting=frozenset(),
            failed=frozenset(),
            probing={},
            trial=None,
            setup_by=NEVER,
            still=None,
            wake_at=NEVER,
            linger_until=world.linger_until if runs else 0.0,
        )
    if event.within is not None and world.linger_until:
        last = min(world.linger_last, now + event.within)
        world = replace(world, linger_until=min(world.linger_until, last), linger_last=last)
    return world


def retire(world: World, now: float, out: Commands) -> World:
    """Agents are told to end whose workers' programs have ended, or had their time. The last ones are not waited for long."""
    busy = {w.host for w, worker in world.workers.items() if worker.job} if world.linger_until else frozenset()
    idle = [name for name in world.hosts if name not in world.retired and name not in busy]
    if idle:
        out.extend(cmd.StopAgent(name) for name in idle)
        close_by = now + world.limits.timeouts.close
        return replace(world, retired=world.retired.union(idle), close_by=close_by)
    if now >= world.close_by:
        for name in [name for name in world.hosts if name in world.retired]:
            world = generations.host_gone(world, name, "it did not end in time", now, out)
        world = replace(world, close_by=NEVER)
    return world


def kill_lingering(world: World, now: float, out: Commands) -> World:
    """Programs that were told to stop have not: first those that hold no training state are killed, at the end all."""
    job, timeouts = world.active, world.limits.timeouts
    name, late = (job.name, job.late) if job else ("", frozenset())
    told = [w for w, worker in world.workers.items() if worker.job and (worker.job != name or w in late)]
    over = now >= world.linger_last
    stuck = [w for w in told if over or not world.workers[w].has_state]
    world = replace(world, linger_until=0.0 if len(stuck) == len(told) else world.linger_last)
    for w in stuck:
        limit = timeouts.stop if world.workers[w].has_state else timeouts.leave
        text = f"{w} did not stop within {limit:g} s and is killed"
        out.append(cmd.Record("worker-killed", text, host=w.host, worker=str(w)))
        world = generations.lose(world, (w,), f"{w} did not stop", now, out, keep=True)
    return provisioning.stop_workers(world, stuck, out, kill=True)


def expect_ends(world: World, now: float) -> World:
    """Each worker that was told to end has a deadline. When the cluster is stopped, that of its agent counts."""
    told = frozenset[WorkerId]() if world.stopping else world.stopped
    if world.ends.keys() == told:
        return world
    end = now + world.limits.timeouts.end
    return replace(world, ends={w: world.ends.get(w, end) for w in sorted(told)})


def give_up(world: World, now: float, out: Commands) -> World:
    """Workers whose ends were not reported in time count as ended: their slots, and their hosts, do not wait for that."""
    limit = world.limits.timeouts.end
    for w in [w for w, until in world.ends.items() if now >= until and w in world.stopped]:
        text = f"{w} was told to end, and its end was not reported within {limit:g} s: it counts as ended"
        out.append(cmd.Record("worker-lost", text, host=w.host, worker=str(w)))
        world = generations.gone(world, w, text, now, out)
    return world


def kill_overdue(world: World, now: float, out: Commands) -> World:
    """Their setup cells have not ended, and their engines take no other code."""
    late, world = setup.overdue(world, now)
    for w in late:
        out.append(cmd.StopWorker(w, kill=True))
        why = f"{w} had not ended a setup cell after {world.limits.timeouts.setup:g} s and was killed"
        world = generations.gone(world, w, why, now, out)
    return world
