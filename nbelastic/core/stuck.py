"""Workers that no abort wakes end themselves. Who alone holds the training state keeps it for its successor first."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import epochs, jobs
from nbelastic.core import messages as m
from nbelastic.core.world import HostPhase, Kept, World, put

Commands = list[m.Command]


def asks(world: World, w: m.WorkerId, out: Commands) -> World:
    """How is it to end? What it holds does not count any more, if it need not keep it."""
    keep = w not in world.stopped and epochs.alone_holds_state(world, w)
    out.append(m.EndStuck(w, keep))
    return world if keep else put(world, replace(world.workers[w], has_state=False))


def kept(world: World, event: m.StateKept, out: Commands) -> World:
    """The state is safe: the worker may end."""
    w, job = event.worker, world.active
    out.append(m.EndStuck(w))
    found = Kept(w.host, event.commit)
    if job is None or job.name != event.job or not job.formed or world.kept == found:
        return world
    text = (
        f"nothing wakes {w}, which alone holds the training state: it has kept commit {event.commit} for its successor"
    )
    out.append(m.Record("state-kept", text, host=w.host, worker=str(w), epoch=world.epoch))
    return replace(world, kept=found)


def progress(world: World, now: float, out: Commands) -> World:
    """What was kept on a host is lost with it."""
    assert world.kept is not None
    name = world.kept.host
    host = world.hosts.get(name)
    if host is not None and host.phase is not HostPhase.LOST:
        return world
    world = replace(world, kept=None)
    if epochs.state_lives(world):
        return world
    return jobs.end(world, "failed", f"the training state was kept on {name}, which is gone", now, out)
