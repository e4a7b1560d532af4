"""Stages that wait for members' words: who keeps the others waiting, and what is done at the deadline.

A member that computes gets longer than one that is silent or sleeps. So those who are waited for are asked now and then where
they are (`QueryPosition`), and who has used the processor since, or has begun a collective, is at work.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import backoff, generation_end, jobs, losses, partitions
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, Stage, Wait, format_ids
from nbelastic.core.state_holders import state_lives
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

WORDS = frozenset((Stage.GATHERING, Stage.FORMING, Stage.ASKED, Stage.LEAVING))
LOOKS = 4  # how often those who are waited for are asked where they are, in the time that a silent one has
TWICE = 2  # a world that was not formed so often in a row is not tried again with the same processes
DOUBLINGS = 5  # of the pause between two changes that were put off
OFTEN = 3  # times in a row that a member did not answer, though its process lives: then it is replaced
USED = 0.02  # of the time between two answers: who has used more of a processor is at work


def update(cluster: ClusterState, now: float) -> ClusterState:
    """The wait of the present stage. It begins anew when somebody has said the word that was waited for."""
    old, left = cluster.wait, len(cluster.awaiting)
    job = cluster.active
    over = job is None or bool(
        job.succeeded and cluster.awaiting <= job.asked_to_stop | job.succeeded
    )  # they are told to end
    if over or not left or cluster.stage not in WORDS:
        return cluster if old is None else replace(cluster, wait=None)
    if old is None or (old.stage, old.generation) != (cluster.stage, cluster.generation):
        silent = _patience(cluster)
        return replace(
            cluster, wait=Wait(cluster.stage, cluster.generation, left, now, now, now + silent, now + silent / LOOKS)
        )
    if old.awaited == left:
        return cluster
    silent = _patience(cluster)  # it may be shorter than before, and they are to be asked in time
    look_at = min(old.ask_at, now + silent / LOOKS)
    return replace(
        cluster, wait=replace(old, awaited=left, since=now, until=now + silent, ask_at=look_at, irreplaceable=())
    )


def deadline(cluster: ClusterState) -> float:
    """When to look at it again."""
    return NEVER if cluster.wait is None else min(cluster.wait.until, cluster.wait.ask_at)


def position_reported(cluster: ClusterState, event: ev.PositionReported, now: float) -> ClusterState:
    """One of those who are waited for says where it is: was it at work since it last said so?"""
    wait, w = cluster.wait, event.worker
    if wait is None or event.generation != wait.generation or w not in cluster.awaiting:
        return cluster
    before = wait.positions.get(w)
    wait = replace(wait, positions={**wait.positions, w: (event, now)})
    if before is not None:
        old, at = before
        if event.begun != old.begun or event.commit != old.commit or event.cpu - old.cpu > USED * (now - at):
            wait = replace(wait, worked_at={**wait.worked_at, w: now})
    return replace(cluster, wait=wait)


def worker_silent(cluster: ClusterState, event: ev.WorkerSilent, now: float) -> ClusterState:
    """It cannot answer, as something holds its interpreter; its host says whether it computes."""
    return cluster if event.idle else mark_working(cluster, event.worker, now)


def mark_working(cluster: ClusterState, w: WorkerId, now: float) -> ClusterState:
    """If it is waited for: it is at work."""
    wait = cluster.wait
    if wait is None or w not in cluster.awaiting:
        return cluster
    return replace(cluster, wait=replace(wait, worked_at={**wait.worked_at, w: now}))


def act(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What is due: ask where they are, or end the wait."""
    wait = cluster.wait
    if wait is None or (wait.stage, wait.generation) != (
        cluster.stage,
        cluster.generation,
    ):  # another deadline has ended the stage
        return cluster
    if now >= wait.ask_at and wait.stage is not Stage.ASKED:
        out.append(cmd.QueryPosition(wait.generation, tuple(w for w in cluster.members if w in cluster.awaiting)))
        wait = replace(wait, ask_at=now + _patience(cluster) / LOOKS)
    elif now >= wait.ask_at:
        wait = replace(wait, ask_at=NEVER)
    cluster = replace(cluster, wait=wait)
    if now < wait.until:
        return cluster
    match wait.stage:
        case Stage.ASKED:
            return _postpone_change(cluster, now, out)
        case Stage.FORMING:
            return _form_without_late(cluster, wait, now, out)
        case Stage.LEAVING if len(cluster.awaiting) == len(cluster.members):
            why = f"no member has come to the agreed commit within {now - wait.since:.0f} s"
            return generation_end.break_generation(cluster, why, now, out)
        case _:
            return _replace_late_leavers(cluster, wait, now, out)


def _patience(cluster: ClusterState) -> float:
    """For how long a member that does nothing is waited for."""
    timeouts, size = cluster.limits.timeouts, len(cluster.members)
    match cluster.stage:
        case Stage.ASKED:
            return timeouts.ask_for(cluster.limits.silence)
        case Stage.FORMING:
            return timeouts.form_for(size)
        case Stage.LEAVING if len(cluster.awaiting) == size:  # they train, and it is still a long step
            return timeouts.step
        case _:
            return timeouts.recover


def _postpone_change(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Somebody does not say where it is, so those who have promised to stop wait for it: they go on, and are asked later."""
    late, put_off = cluster.awaiting, cluster.postponements + 1
    why = f"{format_ids(late)} did not report where it is"
    pause = cluster.limits.timeouts.ask * 2.0 ** min(put_off - 1, DOUBLINGS)
    out.append(cmd.Record("change-put-off", f"{why}; asked again in {pause:g} s", generation=cluster.generation))
    cluster = generation_end.cancel_next(cluster, out)
    unanswered = {w: cluster.unanswered.get(w, 0) + 1 for w in sorted(late)}
    cluster = replace(
        cluster, change_after=now + pause, postponed_because=why, postponements=put_off, unanswered=unanswered
    )
    # those that are not heard are judged by `liveness`
    lost = [w for w, times in unanswered.items() if times >= OFTEN and not cluster.workers[w].unresponsive]
    if not lost or not state_lives(cluster, lost):
        return cluster
    cluster = replace(cluster, postponements=0, unanswered={})
    return _replace_members(cluster, lost, f"did not answer when asked {OFTEN} times", now, out)


def _replace_members(
    cluster: ClusterState, members: Collection[WorkerId], what: str, now: float, out: Commands
) -> ClusterState:
    for w in members:
        out.append(cmd.StopWorker(w, kill=True))
        cluster = losses.worker_lost(cluster, w, f"{w} {what}", now, out)
    return cluster


def _replace_late_leavers(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    """Survivors that never leave their generation are replaced, if the training state is not lost with them.

    On the way to the agreed commit no generation is broken: who says where it is may save a file without using the processor.
    """
    timeouts = cluster.limits.timeouts
    if wait.irreplaceable:
        return _fail(cluster, wait, now, out)
    leaves = wait.stage is Stage.LEAVING
    said = {w: at for w, (_, at) in wait.positions.items()} if leaves else {}
    due = {
        w: max(wait.since, wait.worked_at.get(w, 0.0), said.get(w, 0.0)) + timeouts.recover for w in cluster.awaiting
    }
    longest = wait.since + (timeouts.step if leaves else timeouts.recover_working)
    stuck = tuple(w for w in cluster.members if w in due and now >= min(due[w], longest))
    if not stuck:
        return replace(cluster, wait=replace(wait, until=min(*due.values(), longest)))
    if not state_lives(cluster, stuck):
        why = f"{format_ids(frozenset(stuck))} did not leave generation {cluster.generation}, and no other worker holds the training state"
        wait = replace(wait, irreplaceable=stuck, why=why, until=wait.since + cluster.limits.patience)
        cluster = replace(cluster, wait=wait)
        return cluster if now < wait.until else _fail(cluster, wait, now, out)
    return _replace_members(
        cluster, stuck, f"did not leave generation {cluster.generation} while others waited", now, out
    )


def _fail(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    why = f"{wait.why}; waited for {cluster.limits.patience:g} s (elastic_timeout)"
    return jobs.end(cluster, "failed", why, now, out)


def _form_without_late(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    """A group does not come to stand, and nobody is at work on it. The next one is formed without newcomers that were late."""
    timeouts = cluster.limits.timeouts
    idle_since = max((wait.since, *wait.worked_at.values()))
    due = min(idle_since + timeouts.form_for(len(cluster.members)), wait.began + timeouts.sync)
    if now < due:
        return replace(cluster, wait=replace(wait, until=due))
    silent = [
        w
        for w in cluster.members
        if w in cluster.awaiting and not (w in wait.positions and wait.positions[w][0].connected)
    ]
    late = silent or [w for w in cluster.members if w in cluster.awaiting]
    word = "connect" if silent else "get ready"
    what = f"did not {word} in generation {cluster.generation} within {now - wait.began:.0f} s"
    why = f"{format_ids(frozenset(late))} {what}"
    unformed = cluster.failed_formations + 1
    cluster = replace(generation_end.break_generation(cluster, why, now, out), failed_formations=unformed)
    if cluster.active is None or cluster.active.succeeded:
        return cluster
    cluster = partitions.begin(cluster, now, out, suspected={w.host for w in late})
    if cluster.failed_formations >= TWICE:
        return _replace_late_joiners(cluster, late, what, now, out)
    if len(late) == len(cluster.members):
        return cluster
    new = [w for w in late if not cluster.workers[w].has_state]
    return backoff.hold_back(generation_end.demote(cluster, new, now), new, why, now, out)


def _replace_late_joiners(
    cluster: ClusterState, late: list[WorkerId], what: str, now: float, out: Commands
) -> ClusterState:
    """Leaving newcomers out did not help, or `min` needs them: all who were late are replaced, but for a last holder of state."""
    if not state_lives(cluster, late):
        keep = max(
            late, key=lambda w: (cluster.workers[w].has_state, cluster.workers[w].clean, cluster.workers[w].commit)
        )
        late = [w for w in late if w != keep]
    return _replace_members(cluster, late, what, now, out)
