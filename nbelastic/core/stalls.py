"""A running world in which no commit is made: which members are stragglers, and why.

The driver sees only that no commits come. The members are asked for their positions and, in a wide cluster, their
hosts probe one another (`partitions`). Members that are behind the others are named. With `Limits.stall` they are
replaced when the others have waited that long. If all are equally far, none is to blame.
"""

from __future__ import annotations

from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import breakpoints, losses, partitions
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.reasons import Reason, and_also
from nbelastic.core.state import ClusterState, Stage, Stall, rank_text
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol.ids import WorkerId

RUNNING_STAGES = frozenset((Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING, Stage.HALTED))
NAMED = 3  # stragglers in the event log
LEFT = (1 << 62, 1 << 62)  # the progress of members that have left as agreed: they wait for all others


def handle(
    cluster: ClusterState, event: ev.StallDetected | ev.PositionReported | ev.StallResolved, now: float, out: Commands
) -> ClusterState:
    """Handle an event of the present world's stall; one of another generation is dropped."""
    if event.generation != cluster.generation or not _at_work(cluster):
        return cluster
    match event:
        case ev.StallDetected():
            return cluster if breakpoints.hold(cluster) else _query_members(cluster, event, now, out)
        case ev.StallResolved():
            return clear(cluster)
        case ev.PositionReported(worker=w):
            stall = cluster.stall
            if stall is None or w not in cluster.member_set:
                return cluster
            stall = replace(stall, positions=stall.positions | {w: event}, unanswered=stall.unanswered - {w})
            cluster = replace(cluster, stall=stall)
            return cluster if stall.unanswered else _judge(cluster, stall, now, out)
        case _:
            assert_never(event)


def breakpoint_reached(cluster: ClusterState, event: pev.BreakpointReached, out: Commands) -> ClusterState:
    """A program waits in the debugger: while a member does, no other can be blamed for being late."""
    cluster = breakpoints.reached(cluster, event, out)
    return clear(cluster) if event.worker in cluster.member_set else cluster


def explain(cluster: ClusterState) -> ClusterState:
    """Add the stall to the reason while the world is the same and runs."""
    stall = cluster.stall
    if stall is None or stall.generation != cluster.generation or not _at_work(cluster):
        return clear(cluster)
    return replace(cluster, reason=and_also(cluster.reason, Reason("stall", text=stall.text)))


def clear(cluster: ClusterState) -> ClusterState:
    """Forget the stall: commits are made again, or the world is over."""
    stall = cluster.stall
    if stall is None:
        return cluster
    return _set_reasons(replace(cluster, stall=None), dict.fromkeys(stall.stragglers, ""))


def _at_work(cluster: ClusterState) -> bool:
    job = cluster.active
    runs = job is not None and not job.succeeded and cluster.stage in RUNNING_STAGES
    return runs and not cluster.stands_still


def _set_reasons(cluster: ClusterState, reasons: dict[WorkerId, str]) -> ClusterState:
    """Show these reasons in the status of the workers."""
    workers = {w: replace(cluster.workers[w], reason=reason) for w, reason in reasons.items() if w in cluster.workers}
    return replace(cluster, workers=cluster.workers | workers) if workers else cluster


def _query_members(cluster: ClusterState, event: ev.StallDetected, now: float, out: Commands) -> ClusterState:
    """Judge the answers so far, and ask all members again."""
    old = cluster.stall
    stall = old if old is not None and old.generation == event.generation else Stall(event.generation)
    stall = replace(stall, seconds=event.seconds)
    cluster = _judge(replace(cluster, stall=stall), stall, now, out)
    if cluster.stall is None or not _at_work(cluster):
        return cluster
    out.append(cmd.QueryPosition(cluster.generation, cluster.members))
    before = {w: _progress(position) for w, position in cluster.stall.positions.items()}
    cluster = replace(cluster, stall=replace(cluster.stall, unanswered=cluster.member_set, before=before))
    return partitions.begin(cluster, now, out)


def _judge(cluster: ClusterState, stall: Stall, now: float, out: Commands) -> ClusterState:
    """Describe the members' positions, and replace stragglers for which the others have waited too long."""
    inside = [w for w in cluster.members if cluster.stage is not Stage.LEAVING or w in cluster.awaiting]
    positions = {w: stall.positions[w] for w in inside if w in stall.positions}
    age = f"{stall.seconds:.0f} s"
    if not positions:
        text = "; ".join((f"no commit for {age}", *_unresponsive(cluster, inside)))
        return replace(cluster, stall=replace(stall, text=text))
    progress = {w: _progress(position) for w, position in positions.items()}
    least, most = min(progress.values()), max(progress.values()) if len(inside) == len(cluster.members) else LEFT
    has_commit = any(commit for _, commit in progress.values())
    before = stall.before
    if before and all(w in before and at > before[w] for w, at in progress.items()):  # no member waits for another
        advice = "" if has_commit else ": does its loop call state.commit()?"
        text = f"no commit for {age}, although the program goes on{advice}"
        cluster = _set_reasons(cluster, dict.fromkeys(stall.stragglers, ""))
        return replace(cluster, stall=replace(stall, text=text, stragglers={}))
    is_clear = has_commit or bool(before)  # a program that has made no commit may just not make any
    stragglers = [w for w in positions if is_clear and progress[w] == least != most]
    known = stall.stragglers
    behind = {w: known[w] if w in known and known[w][0] == progress[w] else (progress[w], now) for w in stragglers}
    if not stragglers:
        cluster = _set_reasons(cluster, dict.fromkeys(known, ""))
        text = f"no commit for {age}; {_where(cluster, inside, positions)}"
        return replace(cluster, stall=replace(stall, text=text, stragglers=behind))
    texts = {w: f"{age} behind at commit {positions[w].commit}" for w in stragglers}
    texts = {w: f"{text}, in {positions[w].place}" if positions[w].place else text for w, text in texts.items()}
    cluster = _set_reasons(cluster, dict.fromkeys(known, "") | texts)
    stall = _record(cluster, stall, {w: positions[w].commit for w in stragglers}, texts, out)
    more = f" (and {len(stragglers) - 1} more)" if len(stragglers) > 1 else ""
    text = f"{rank_text(cluster, stragglers[0])} is {texts[stragglers[0]]}{more}"
    return _replace_stalled(replace(cluster, stall=replace(stall, text=text, stragglers=behind)), texts, now, out)


def _progress(position: ev.PositionReported) -> tuple[int, int]:
    return position.begun, position.commit


def _record(
    cluster: ClusterState, stall: Stall, stragglers: dict[WorkerId, int], texts: dict[WorkerId, str], out: Commands
) -> Stall:
    """Record each straggler once for each commit; if there are many, only the first."""
    new = [item for item in islice(stragglers.items(), NAMED) if item not in stall.reported]
    for w, _ in new:
        text = f"{rank_text(cluster, w)} is {texts[w]}"
        out.append(cmd.Record("worker-behind", text, host=w.host, worker=str(w), generation=cluster.generation))
    return replace(stall, reported=stall.reported.union(new))


def _where(cluster: ClusterState, inside: list[WorkerId], positions: dict[WorkerId, ev.PositionReported]) -> str:
    """The positions of members that are equally far, as text."""
    places = {position.place for position in positions.values()}
    commit = max(position.commit for position in positions.values())
    if len(positions) == len(inside) and len(places) == 1:
        where = f", in {places.pop()}" if all(places) else ""
        return f"all ranks are at commit {commit}{where}"
    known = [f"{rank_text(cluster, w)} is in {position.place}" for w, position in positions.items() if position.place]
    unanswered = [w for w in inside if w not in positions]
    unknown = [f"{rank_text(cluster, w)} has not reported where it is" for w in unanswered[:1]]
    parts = known[:2] + (_unresponsive(cluster, unanswered) or unknown)
    return ", ".join(parts) or f"all ranks are at commit {commit}"


def _unresponsive(cluster: ClusterState, members: list[WorkerId]) -> list[str]:
    """The first member that is unresponsive, with its text."""
    texts = ((w, cluster.workers[w].unresponsive) for w in members)
    return [f"{rank_text(cluster, w)}: {text}" for w, text in texts if text][:1]


def _replace_stalled(cluster: ClusterState, texts: dict[WorkerId, str], now: float, out: Commands) -> ClusterState:
    """Replace stragglers for which the others have waited longer than `Limits.stall`."""
    stall, limit = cluster.stall, cluster.limits.stall
    if stall is None or limit is None:
        return cluster
    for w in [w for w, (_, since) in stall.stragglers.items() if now >= since + limit]:
        why = f"{w} stalled ({texts[w]}; stall is {limit:g} s)"
        cluster = losses.replace_worker(cluster, w, why, now, out)
    return cluster
