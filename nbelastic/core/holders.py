"""Who holds the job's training state: workers in the elastic loop, or a disk on which the last of them has kept it."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import Worker, World
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]


def holders(world: World) -> list[WorkerId]:
    """Workers that do."""
    return [w for ids in (world.members, world.waiting) for w in ids if world.workers[w].has_state]


def state_lives(world: World, without: Collection[WorkerId] = ()) -> bool:
    """Whether the job's training state, if there is one yet, is somewhere else than with these workers."""
    job = world.active
    if job is None or not job.formed or world.kept is not None:
        return True
    return any(w not in without for w in holders(world))


def alone_holds_state(world: World, w: WorkerId) -> bool:
    """Whether the job's training state would be lost with it."""
    return world.workers[w].has_state and not state_lives(world, (w,))


def claims(world: World, old: Worker, event: ev.WorkerReady) -> bool:
    """Whether a worker that says so holds the newest state: not if worlds have formed without it since."""
    job, kept = world.active, world.kept
    if not event.holds or job is None or not job.formed or old.id in world.ranked:
        return event.holds
    is_heir = kept is not None and (kept.heir, kept.commit) == (old.id, event.commit)
    return is_heir or event.since >= world.formed_in


def keeper(world: World) -> str:
    """The host on whose disk the state is; empty: none."""
    return world.kept.by.host if world.kept is not None else ""


def bequeath(world: World, out: Commands) -> World:
    """A worker of that host which waits for a world reads the state."""
    kept = world.kept
    if kept is None or holders(world):
        return world
    here = [w for ids in (world.members, world.waiting) for w in ids]
    if kept.heir in here:
        return world
    heir = min((w for w in here if w.host == kept.by.host), key=lambda w: (world.workers[w].failures, w), default=None)
    if heir is None:
        return world
    out.append(cmd.TakeKept(heir, kept.by, kept.commit))
    return replace(world, kept=replace(kept, heir=heir))


def unheard(world: World, worker: Worker) -> World:
    """An heir that says that it holds nothing has not heard that it is to read: it is told again."""
    kept = world.kept
    if kept is None or kept.heir != worker.id or worker.has_state:
        return world
    return replace(world, kept=replace(kept, heir=None))


def forget_kept(world: World, out: Commands) -> World:
    """Workers hold the state again, or nobody needs it."""
    if world.kept is None:
        return world
    out.append(cmd.ForgetKept(world.kept.by))
    return replace(world, kept=None)
