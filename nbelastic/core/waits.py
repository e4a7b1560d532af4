"""Stages that wait for members' words: who keeps the others waiting, and what is done at the deadline.

A member that computes gets longer than one that is silent or sleeps. So those who are waited for are asked now and then where
they are (`Look`), and who has used the processor since, or has begun a collective, is at work.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generations, jobs, mesh, provisioning
from nbelastic.core.holders import state_lives
from nbelastic.core.state import Stage, Wait, World, first
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]
WORDS = frozenset((Stage.GATHERING, Stage.FORMING, Stage.ASKED, Stage.LEAVING))
LOOKS = 4  # how often those who are waited for are asked where they are, in the time that a silent one has
TWICE = 2  # a world that was not formed so often in a row is not tried again with the same processes
DOUBLINGS = 5  # of the pause between two changes that were put off
OFTEN = 3  # times in a row that a member did not answer, though its process lives: then it is replaced
USED = 0.02  # of the time between two answers: who has used more of a processor is at work


def renew(world: World, now: float) -> World:
    """The wait of the present stage. It begins anew when somebody has said the word that was waited for."""
    old, left = world.wait, len(world.awaiting)
    job = world.active
    over = job is None or bool(job.succeeded and world.awaiting <= job.late | job.succeeded)  # they are told to end
    if over or not left or world.stage not in WORDS:
        return world if old is None else replace(world, wait=None)
    if old is None or (old.stage, old.epoch) != (world.stage, world.epoch):
        silent = _silent(world)
        return replace(world, wait=Wait(world.stage, world.epoch, left, now, now, now + silent, now + silent / LOOKS))
    if old.left == left:
        return world
    silent = _silent(world)  # it may be shorter than before, and they are to be asked in time
    look_at = min(old.look_at, now + silent / LOOKS)
    return replace(world, wait=replace(old, left=left, since=now, until=now + silent, look_at=look_at, stuck=()))


def deadline(world: World) -> float:
    """When to look at it again."""
    return NEVER if world.wait is None else min(world.wait.until, world.wait.look_at)


def heard(world: World, event: ev.WorkerAt, now: float) -> World:
    """One of those who are waited for says where it is: was it at work since it last said so?"""
    wait, w = world.wait, event.worker
    if wait is None or event.epoch != wait.epoch or w not in world.awaiting:
        return world
    before = wait.said.get(w)
    wait = replace(wait, said={**wait.said, w: (event, now)})
    if before is not None:
        old, at = before
        if event.begun != old.begun or event.commit != old.commit or event.cpu - old.cpu > USED * (now - at):
            wait = replace(wait, worked={**wait.worked, w: now})
    return replace(world, wait=wait)


def silent(world: World, event: ev.WorkerSilent, now: float) -> World:
    """It cannot answer, as something holds its interpreter; its host says whether it computes."""
    return world if event.idle else works(world, event.worker, now)


def works(world: World, w: WorkerId, now: float) -> World:
    """If it is waited for: it is at work."""
    wait = world.wait
    if wait is None or w not in world.awaiting:
        return world
    return replace(world, wait=replace(wait, worked={**wait.worked, w: now}))


def act(world: World, now: float, out: Commands) -> World:
    """What is due: ask where they are, or end the wait."""
    wait = world.wait
    if wait is None or (wait.stage, wait.epoch) != (world.stage, world.epoch):  # another deadline has ended the stage
        return world
    if now >= wait.look_at and wait.stage is not Stage.ASKED:
        out.append(cmd.Look(wait.epoch, tuple(w for w in world.members if w in world.awaiting)))
        wait = replace(wait, look_at=now + _silent(world) / LOOKS)
    elif now >= wait.look_at:
        wait = replace(wait, look_at=NEVER)
    world = replace(world, wait=wait)
    if now < wait.until:
        return world
    match wait.stage:
        case Stage.ASKED:
            return _do_not_change(world, now, out)
        case Stage.FORMING:
            return _do_not_form(world, wait, now, out)
        case Stage.LEAVING if len(world.awaiting) == len(world.members):
            why = f"no member has come to the agreed commit within {now - wait.since:.0f} s"
            return generations.break_epoch(world, why, now, out)
        case _:
            return _leave_behind(world, wait, now, out)


def _silent(world: World) -> float:
    """For how long a member that does nothing is waited for."""
    timeouts, size = world.limits.timeouts, len(world.members)
    match world.stage:
        case Stage.ASKED:
            return timeouts.ask_for(world.limits.silence)
        case Stage.FORMING:
            return timeouts.form_for(size)
        case Stage.LEAVING if len(world.awaiting) == size:  # they train, and it is still a long step
            return timeouts.step
        case _:
            return timeouts.recover


def _do_not_change(world: World, now: float, out: Commands) -> World:
    """Somebody does not say where it is, so those who have promised to stop wait for it: they go on, and are asked later."""
    late, put_off = world.awaiting, world.put_off + 1
    why = f"{first(late)} did not say where it is"
    pause = world.limits.timeouts.ask * 2.0 ** min(put_off - 1, DOUBLINGS)
    out.append(cmd.Record("change-put-off", f"{why}; asked again in {pause:g} s", epoch=world.epoch))
    world = generations.call_off(world, out)
    unanswered = {w: world.unanswered.get(w, 0) + 1 for w in sorted(late)}
    world = replace(world, change_at=now + pause, change_why=why, put_off=put_off, unanswered=unanswered)
    # those that are not heard are judged by `liveness`
    lost = [w for w, times in unanswered.items() if times >= OFTEN and not world.workers[w].silent]
    if not lost or not state_lives(world, lost):
        return world
    world = replace(world, put_off=0, unanswered={})
    return _replace_members(world, lost, f"said nothing when asked {OFTEN} times", now, out)


def _replace_members(world: World, members: Collection[WorkerId], what: str, now: float, out: Commands) -> World:
    for w in members:
        out.append(cmd.StopWorker(w, kill=True))
        world = generations.gone(world, w, f"{w} {what}", now, out)
    return world


def _leave_behind(world: World, wait: Wait, now: float, out: Commands) -> World:
    """Survivors that never leave their epoch are replaced, if the training state is not lost with them.

    On the way to the agreed commit no epoch is broken: who says where it is may save a file without using the processor.
    """
    timeouts = world.limits.timeouts
    if wait.stuck:
        return _give_up(world, wait, now, out)
    leaves = wait.stage is Stage.LEAVING
    said = {w: at for w, (_, at) in wait.said.items()} if leaves else {}
    due = {w: max(wait.since, wait.worked.get(w, 0.0), said.get(w, 0.0)) + timeouts.recover for w in world.awaiting}
    longest = wait.since + (timeouts.step if leaves else timeouts.recover_working)
    stuck = tuple(w for w in world.members if w in due and now >= min(due[w], longest))
    if not stuck:
        return replace(world, wait=replace(wait, until=min(*due.values(), longest)))
    if not state_lives(world, stuck):
        why = f"{first(frozenset(stuck))} did not leave epoch {world.epoch}, and nobody else holds the training state"
        wait = replace(wait, stuck=stuck, why=why, until=wait.since + world.limits.patience)
        world = replace(world, wait=wait)
        return world if now < wait.until else _give_up(world, wait, now, out)
    return _replace_members(world, stuck, f"did not leave epoch {world.epoch} while others waited", now, out)


def _give_up(world: World, wait: Wait, now: float, out: Commands) -> World:
    why = f"{wait.why}; waited for {world.limits.patience:g} s (elastic_timeout)"
    return jobs.end(world, "failed", why, now, out)


def _do_not_form(world: World, wait: Wait, now: float, out: Commands) -> World:
    """A group does not come to stand, and nobody is at work on it. The next one is formed without newcomers that were late."""
    timeouts = world.limits.timeouts
    idle_since = max((wait.since, *wait.worked.values()))
    due = min(idle_since + timeouts.form_for(len(world.members)), wait.began + timeouts.sync)
    if now < due:
        return replace(world, wait=replace(wait, until=due))
    silent = [w for w in world.members if w in world.awaiting and not (w in wait.said and wait.said[w][0].connected)]
    late = silent or [w for w in world.members if w in world.awaiting]
    word = "connect" if silent else "get ready"
    what = f"did not {word} in epoch {world.epoch} within {now - wait.began:.0f} s"
    why = f"{first(frozenset(late))} {what}"
    unformed = world.unformed + 1
    world = replace(generations.break_epoch(world, why, now, out), unformed=unformed)
    if world.active is None or world.active.succeeded:
        return world
    world = mesh.begin(world, now, out, among={w.host for w in late})
    if world.unformed >= TWICE:
        return _replace_late(world, late, what, now, out)
    if len(late) == len(world.members):
        return world
    new = [w for w in late if not world.workers[w].has_state]
    return provisioning.hold_back(generations.unseat(world, new, now), new, why, now, out)


def _replace_late(world: World, late: list[WorkerId], what: str, now: float, out: Commands) -> World:
    """Leaving newcomers out did not help, or `min` needs them: all who were late are replaced, but for a last holder of state."""
    if not state_lives(world, late):
        keep = max(late, key=lambda w: (world.workers[w].has_state, world.workers[w].clean, world.workers[w].commit))
        late = [w for w in late if w != keep]
    return _replace_members(world, late, what, now, out)
