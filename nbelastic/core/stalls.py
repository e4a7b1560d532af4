"""A running world in which nobody commits: who is behind, and why.

The driver sees only that no commits come. The members are asked where they are, and in a wide cluster their hosts whether
they reach one another (`mesh`). Members that are behind the others are named; with `Limits.stall` they are replaced when
the others have waited that long. Where all are equally far, nobody is to blame.
"""

from __future__ import annotations

from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generations, mesh
from nbelastic.core.reasons import Reason, and_also
from nbelastic.core.state import Stage, Still, World
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]
AT_WORK = frozenset((Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING))
NAMED = 3  # of many that are behind
LEFT = (1 << 62, 1 << 62)  # how far those are who have left as agreed: they wait for all others


def heard(world: World, event: ev.StoodStill | ev.WorkerAt | ev.WentOn, now: float, out: Commands) -> World:
    """Word of the present world's standing still; of another one it is no news."""
    if event.epoch != world.epoch or not _at_work(world):
        return world
    match event:
        case ev.StoodStill():
            return _stood_still(world, event, now, out)
        case ev.WentOn():
            return clear(world)
        case ev.WorkerAt(worker=w):
            still = world.still
            if still is None or w not in world.ranked:
                return world
            still = replace(still, where={**still.where, w: event}, unheard=still.unheard - {w})
            world = replace(world, still=still)
            return world if still.unheard else _judge(world, still, now, out)
        case _:
            assert_never(event)


def explain(world: World) -> World:
    """The reason with that of the standing still, as long as it is the same world that stands."""
    still = world.still
    if still is None or still.epoch != world.epoch or not _at_work(world):
        return clear(world)
    return replace(world, reason=and_also(world.reason, Reason("stands", text=still.text)))


def clear(world: World) -> World:
    """It goes on, or is over."""
    still = world.still
    if still is None:
        return world
    return _tell(replace(world, still=None), dict.fromkeys(still.behind, ""))


def _at_work(world: World) -> bool:
    job = world.active
    return job is not None and not job.succeeded and world.stage in AT_WORK


def _tell(world: World, reasons: dict[WorkerId, str]) -> World:
    """What is known of these workers."""
    told = {w: replace(world.workers[w], reason=reason) for w, reason in reasons.items() if w in world.workers}
    return replace(world, workers=world.workers | told) if told else world


def _stood_still(world: World, event: ev.StoodStill, now: float, out: Commands) -> World:
    """What is known by now is judged, and everybody is asked again."""
    still = world.still if world.still is not None and world.still.epoch == event.epoch else Still(event.epoch)
    still = replace(still, seconds=event.seconds)
    world = _judge(replace(world, still=still), still, now, out)
    if world.still is None or not _at_work(world):
        return world
    out.append(cmd.Look(world.epoch, world.members))
    world = replace(world, still=replace(world.still, unheard=world.ranked))
    return mesh.begin(world, now, out)


def _judge(world: World, still: Still, now: float, out: Commands) -> World:
    """Who is where, in words; and who has been behind for too long."""
    inside = [w for w in world.members if world.stage is not Stage.LEAVING or w in world.awaiting]
    at = {w: still.where[w] for w in inside if w in still.where}
    age = f"{still.seconds:.0f} s"
    if not at:
        silent = [f"; {_rank(world, w)}: {world.workers[w].silent}" for w in inside if world.workers[w].silent]
        return replace(world, still=replace(still, text=f"no commit for {age}{''.join(silent[:1])}"))
    far = {w: (a.begun, a.commit) for w, a in at.items()}
    least, most = min(far.values()), max(far.values()) if len(inside) == len(world.members) else LEFT
    slow = [w for w in at if far[w] == least != most]
    before = still.behind
    behind = {w: before[w] if w in before and before[w][0] == far[w] else (far[w], now) for w in slow}
    if not slow:
        world = _tell(world, dict.fromkeys(before, ""))
        text = f"no commit for {age}; {_where(world, inside, at)}"
        return replace(world, still=replace(still, text=text, behind=behind))
    words = {w: f"{age} behind at commit {at[w].commit}" + (f", in {at[w].place}" * bool(at[w].place)) for w in slow}
    world = _tell(world, dict.fromkeys(before, "") | words)
    still = _record(world, still, {w: at[w].commit for w in slow}, words, out)
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    text = f"{_rank(world, slow[0])} is {words[slow[0]]}{more}"
    return _replace_stalled(replace(world, still=replace(still, text=text, behind=behind)), words, now, out)


def _record(world: World, still: Still, slow: dict[WorkerId, int], words: dict[WorkerId, str], out: Commands) -> Still:
    """Once for each commit at which they are behind; if there are many, the first of them stand for all."""
    news = [item for item in islice(slow.items(), NAMED) if item not in still.told]
    for w, _ in news:
        text = f"{_rank(world, w)} is {words[w]}"
        out.append(cmd.Record("worker-behind", text, host=w.host, worker=str(w), epoch=world.epoch))
    return replace(still, told=still.told.union(news))


def _where(world: World, inside: list[WorkerId], at: dict[WorkerId, ev.WorkerAt]) -> str:
    """Where members are that are equally far."""
    places = {a.place for a in at.values()}
    commit = max(a.commit for a in at.values())
    if len(at) == len(inside) and len(places) == 1:
        where = f", in {places.pop()}" if all(places) else ""
        return f"all ranks are at commit {commit}{where}"
    parts = [f"{_rank(world, w)} is in {a.place}" for w, a in at.items() if a.place][:2]
    unheard = [w for w in inside if w not in at]
    parts += [f"{_rank(world, w)}: {world.workers[w].silent}" for w in unheard if world.workers[w].silent][:1] or [
        f"{_rank(world, w)} has not said where it is" for w in unheard[:1]
    ]
    return ", ".join(parts) or f"all ranks are at commit {commit}"


def _replace_stalled(world: World, words: dict[WorkerId, str], now: float, out: Commands) -> World:
    """Others have waited for them long enough."""
    still, stall = world.still, world.limits.stall
    if still is None or stall is None:
        return world
    for w in [w for w, (_, since) in still.behind.items() if now >= since + stall]:
        why = f"{w} stalled ({words[w]}; stall is {stall:g} s)"
        out.append(cmd.StopWorker(w, kill=True))
        world = generations.gone(world, w, why, now, out)
    return world


def _rank(world: World, w: WorkerId) -> str:
    return f"rank {world.members.index(w)} ({w})"
