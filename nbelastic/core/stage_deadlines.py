"""Stages that wait for reports of members: which member delays the others, and what happens at the deadline.

A member that computes has more time than one that is unresponsive or sleeps. So awaited members are asked for their
positions from time to time (`QueryPosition`). A member computes if it has used the processor since its last answer, or
has begun a collective.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import backoff, breakpoints, generation_end, jobs, losses, partitions
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, Stage, Wait, format_ids
from nbelastic.core.state_holders import state_lives
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId

WAITING_STAGES = frozenset((Stage.GATHERING, Stage.FORMING, Stage.ASKED, Stage.LEAVING, Stage.HALTED))
QUERIES = 4  # times that awaited members are asked for their positions before the wait ends
MOST_UNFORMED = 2  # worlds in a row that did not form; then the late workers are replaced
MOST_DOUBLINGS = 5  # of the pause between two changes that were postponed
MOST_UNANSWERED = 3  # `AskLeave` in a row that a member did not answer; then it is replaced
CPU_SHARE = 0.02  # of the time between two answers; a member that has used more computes


def update(cluster: ClusterState, now: float) -> ClusterState:
    """Begin, prolong or end the wait of the present stage. A report of an awaited member prolongs it."""
    old, awaited = cluster.wait, len(cluster.awaiting)
    trains = cluster.stage is Stage.HALTED and awaited == len(cluster.members)  # as ever: no member waits for another
    if not awaited or trains or cluster.stage not in WAITING_STAGES or _is_over(cluster):
        return cluster if old is None else replace(cluster, wait=None)
    is_same_stage = old is not None and (old.stage, old.generation) == (cluster.stage, cluster.generation)
    if old is not None and is_same_stage and old.awaited == awaited:
        return cluster
    patience = _patience(cluster)  # it may be shorter than before
    until, ask_at = now + patience, now + patience / QUERIES
    if old is None or not is_same_stage:
        return replace(cluster, wait=Wait(cluster.stage, cluster.generation, awaited, now, now, until, ask_at))
    ask_at = min(old.ask_at, ask_at)
    wait = replace(old, awaited=awaited, since=now, until=until, ask_at=ask_at, irreplaceable=())
    return replace(cluster, wait=wait)


def _is_over(cluster: ClusterState) -> bool:
    """Whether there is no job, or it ends: all awaited members have finished or were asked to stop."""
    job = cluster.active
    if job is None:
        return True
    return bool(job.succeeded) and all(w in job.succeeded or w in job.asked_to_stop for w in cluster.awaiting)


def deadline(cluster: ClusterState) -> float:
    """When `act` has something to do."""
    return NEVER if cluster.wait is None else min(cluster.wait.until, cluster.wait.ask_at)


def position_reported(cluster: ClusterState, event: ev.PositionReported, now: float) -> ClusterState:
    """Note the position of an awaited member, and whether it has computed since its last answer."""
    wait, w = cluster.wait, event.worker
    if wait is None or event.generation != wait.generation or w not in cluster.awaiting:
        return cluster
    before = wait.positions.get(w)
    wait = replace(wait, positions=wait.positions | {w: (event, now)})
    if before is not None:
        old, at = before
        if event.begun != old.begun or event.commit != old.commit or event.cpu - old.cpu > CPU_SHARE * (now - at):
            wait = replace(wait, worked_at=wait.worked_at | {w: now})
    return replace(cluster, wait=wait)


def worker_silent(cluster: ClusterState, event: ev.WorkerSilent, now: float) -> ClusterState:
    """An unresponsive member cannot answer; its agent reports whether it computes."""
    return cluster if event.idle else mark_working(cluster, event.worker, now)


def mark_working(cluster: ClusterState, w: WorkerId, now: float) -> ClusterState:
    """Note that a member computes, if it is awaited."""
    wait = cluster.wait
    if wait is None or w not in cluster.awaiting:
        return cluster
    return replace(cluster, wait=replace(wait, worked_at=wait.worked_at | {w: now}))


def act(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Ask awaited members for their positions, or end the wait, if it is time."""
    wait = cluster.wait
    if wait is None or now < deadline(cluster):
        return cluster
    if (wait.stage, wait.generation) != (cluster.stage, cluster.generation):
        return cluster  # another deadline has ended the stage
    if now >= wait.ask_at and wait.stage is not Stage.ASKED:
        out.append(cmd.QueryPosition(wait.generation, tuple(w for w in cluster.members if w in cluster.awaiting)))
        wait = replace(wait, ask_at=now + _patience(cluster) / QUERIES)
    elif now >= wait.ask_at:
        wait = replace(wait, ask_at=NEVER)
    cluster = replace(cluster, wait=wait)
    if now < wait.until:
        return cluster
    if breakpoints.hold(cluster):
        return replace(cluster, wait=replace(wait, until=now + _patience(cluster)))
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
    """Seconds to wait for a member that does nothing."""
    timeouts, size = cluster.limits.timeouts, len(cluster.members)
    match cluster.stage:
        case Stage.ASKED:
            return timeouts.ask_for(cluster.limits.silence)
        case Stage.FORMING:
            return timeouts.form_for(size)
        case Stage.LEAVING if cluster.active is not None and cluster.active.trial:  # a new program begins
            return timeouts.program
        case Stage.LEAVING if len(cluster.awaiting) == size:  # they train; the step may be long
            return timeouts.step
        case _:
            return timeouts.recover


def _postpone_change(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """A member did not report its commit, so members that stop for it wait: they go on, and are asked again later."""
    late, postponements = cluster.awaiting, cluster.postponements + 1
    why = f"{format_ids(late)} did not report where it is"
    pause = cluster.limits.timeouts.ask * 2.0 ** min(postponements - 1, MOST_DOUBLINGS)
    out.append(cmd.Record("change-put-off", f"{why}; asked again in {pause:g} s", generation=cluster.generation))
    cluster = generation_end.cancel_next(cluster, out)
    unanswered = {w: cluster.unanswered.get(w, 0) + 1 for w in sorted(late)}
    cluster = replace(cluster, change_after=now + pause, postponed_because=why)
    cluster = replace(cluster, postponements=postponements, unanswered=unanswered)
    # `liveness` handles members that are unresponsive
    lost = [w for w, times in unanswered.items() if times >= MOST_UNANSWERED and not cluster.workers[w].unresponsive]
    if not lost or not state_lives(cluster, lost):
        return cluster
    cluster = replace(cluster, postponements=0, unanswered={})
    return _replace_members(cluster, lost, f"did not answer when asked {MOST_UNANSWERED} times", now, out)


def _replace_members(
    cluster: ClusterState, members: Collection[WorkerId], what: str, now: float, out: Commands
) -> ClusterState:
    for w in members:
        cluster = losses.replace_worker(cluster, w, f"{w} {what}", now, out)
    return cluster


def _replace_late_leavers(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    """Replace members that never leave their generation, or never come to a halt, unless the state would be lost with them.

    On the way to the agreed commit, a member that answers is not replaced yet: it may save a file without using the
    processor.
    """
    timeouts = cluster.limits.timeouts
    if wait.irreplaceable:
        return _fail(cluster, wait, now, out)
    trains = wait.stage in (Stage.LEAVING, Stage.HALTED)
    answered = {w: at for w, (_, at) in wait.positions.items()} if trains else {}
    active_at = {w: max(wait.worked_at.get(w, 0.0), answered.get(w, 0.0)) for w in cluster.awaiting}
    due = {w: max(wait.since, at) + timeouts.recover for w, at in active_at.items()}
    longest = wait.since + (timeouts.step if trains else timeouts.recover_working)
    late = tuple(w for w in cluster.members if w in due and now >= min(due[w], longest))
    if not late:
        return replace(cluster, wait=replace(wait, until=min(*due.values(), longest)))
    halting = wait.stage is Stage.HALTED
    what = f"did not {'come to the halt in' if halting else 'leave'} generation {cluster.generation}"
    if not state_lives(cluster, late):
        why = f"{format_ids(late)} {what}, and no other worker holds the training state"
        wait = replace(wait, irreplaceable=late, why=why, until=wait.since + cluster.limits.patience)
        cluster = replace(cluster, wait=wait)
        return cluster if now < wait.until else _fail(cluster, wait, now, out)
    return _replace_members(cluster, late, f"{what} while others waited", now, out)


def _fail(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    why = f"{wait.why}; waited for {cluster.limits.patience:g} s (elastic_timeout)"
    return jobs.end(cluster, "failed", why, now, out)


def _form_without_late(cluster: ClusterState, wait: Wait, now: float, out: Commands) -> ClusterState:
    """A process group does not form, and no member computes: form the next one without the newcomers that were late."""
    timeouts = cluster.limits.timeouts
    idle_since = max((wait.since, *wait.worked_at.values()))
    due = min(idle_since + timeouts.form_for(len(cluster.members)), wait.began + timeouts.sync)
    if now < due:
        return replace(cluster, wait=replace(wait, until=due))
    awaited = [w for w in cluster.members if w in cluster.awaiting]
    unconnected = [w for w in awaited if not (w in wait.positions and wait.positions[w][0].connected)]
    late = unconnected or awaited
    word = "connect" if unconnected else "get ready"
    what = f"did not {word} in generation {cluster.generation} within {now - wait.began:.0f} s"
    why = f"{format_ids(late)} {what}"
    unformed = cluster.failed_formations + 1
    cluster = replace(generation_end.break_generation(cluster, why, now, out), failed_formations=unformed)
    if cluster.active is None or cluster.active.succeeded:
        return cluster
    cluster = partitions.begin(cluster, now, out, suspected={w.host for w in late})
    if cluster.failed_formations >= MOST_UNFORMED:
        return _replace_late_joiners(cluster, late, what, now, out)
    if len(late) == len(cluster.members):
        return cluster
    new = [w for w in late if not cluster.workers[w].has_state]
    return backoff.hold_back(generation_end.demote(cluster, new, now), new, why, now, out)


def _replace_late_joiners(
    cluster: ClusterState, late: list[WorkerId], what: str, now: float, out: Commands
) -> ClusterState:
    """Replace all late members but a last holder of the state: forming without newcomers did not help."""
    if not state_lives(cluster, late):
        keep = max(
            late, key=lambda w: (cluster.workers[w].has_state, cluster.workers[w].clean, cluster.workers[w].commit)
        )
        late = [w for w in late if w != keep]
    return _replace_members(cluster, late, what, now, out)
