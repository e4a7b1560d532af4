"""Workers that no abort wakes end themselves. If nobody else holds the training state, one of them keeps it on disk first.

A worker of the same host reads it from there, and then holds it like any other.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import jobs, waits
from nbelastic.core.holders import forget_kept, holders, keeper, state_lives
from nbelastic.core.state import HostPhase, Kept, Stage, World
from nbelastic.protocol import events as ev

Commands = list[cmd.Command]


def asks(world: World, event: ev.WorkerStuck, now: float, out: Commands) -> World:
    """How is it to end? As long as it is open whether others still hold the state it gets no answer, and asks again."""
    w = event.worker
    if event.keeping:
        return waits.works(world, w, now)
    if w in world.ranked:
        world = replace(world, stuck=world.stuck | {w})
    is_kept = world.kept is not None and world.kept.commit >= event.commit
    if w in world.stopped or not world.workers[w].has_state or is_kept or not _is_formed(world):
        out.append(cmd.EndStuck(w))
        return world
    others = [o for o in holders(world) if o != w]
    awake = [o for o in others if o not in world.stuck]
    if any(world.stage is not Stage.GATHERING or o not in world.awaiting for o in awake):
        out.append(cmd.EndStuck(w))
    elif not awake and w == min((w, *others)):
        out.append(cmd.EndStuck(w, keep=True))
    return world


def _is_formed(world: World) -> bool:
    return world.active is not None and world.active.formed


def kept(world: World, event: ev.StateKept, out: Commands) -> World:
    """The state is safe: the worker may end."""
    w, job = event.worker, world.active
    out.append(cmd.EndStuck(w))
    if job is None or job.name != event.job or not job.formed:
        out.append(cmd.ForgetKept(w))
        return world
    old = world.kept
    if old is not None and old.commit >= event.commit:
        if old.by != w:
            out.append(cmd.ForgetKept(w))
        return world
    world = forget_kept(world, out)
    text = f"nothing wakes {w}, which alone holds the training state: it has kept commit {event.commit} on {w.host}"
    out.append(cmd.Record("state-kept", text, host=w.host, worker=str(w), epoch=world.epoch))
    return replace(world, kept=Kept(w, event.commit))


def progress(world: World, now: float, out: Commands) -> World:
    """What was kept on a host is lost with it."""
    name = keeper(world)
    host = world.hosts.get(name)
    if host is not None and host.phase in (HostPhase.UP, HostPhase.DRAINING):
        return world
    world = replace(world, kept=None)
    if state_lives(world):
        return world
    return jobs.end(world, "failed", f"the training state was kept on {name}, which is gone", now, out)
