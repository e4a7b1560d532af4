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
from nbelastic.core import losses, partitions
from nbelastic.core.commands import Commands
from nbelastic.core.reasons import Reason, and_also
from nbelastic.core.state import ClusterState, Stage, Stall, rank_text
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

AT_WORK = frozenset((Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING))
NAMED = 3  # of many that are behind
LEFT = (1 << 62, 1 << 62)  # how far those are who have left as agreed: they wait for all others


def handle(
    cluster: ClusterState, event: ev.StallDetected | ev.PositionReported | ev.StallResolved, now: float, out: Commands
) -> ClusterState:
    """Word of the present world's standing still; of another one it is no news."""
    if event.generation != cluster.generation or not _at_work(cluster):
        return cluster
    match event:
        case ev.StallDetected():
            return _query_members(cluster, event, now, out)
        case ev.StallResolved():
            return clear(cluster)
        case ev.PositionReported(worker=w):
            still = cluster.stall
            if still is None or w not in cluster.member_set:
                return cluster
            still = replace(still, positions={**still.positions, w: event}, unanswered=still.unanswered - {w})
            cluster = replace(cluster, stall=still)
            return cluster if still.unanswered else _judge(cluster, still, now, out)
        case _:
            assert_never(event)


def explain(cluster: ClusterState) -> ClusterState:
    """The reason with that of the standing still, as long as it is the same world that stands."""
    still = cluster.stall
    if still is None or still.generation != cluster.generation or not _at_work(cluster):
        return clear(cluster)
    return replace(cluster, reason=and_also(cluster.reason, Reason("stands", text=still.text)))


def clear(cluster: ClusterState) -> ClusterState:
    """It goes on, or is over."""
    still = cluster.stall
    if still is None:
        return cluster
    return _set_reasons(replace(cluster, stall=None), dict.fromkeys(still.stragglers, ""))


def _at_work(cluster: ClusterState) -> bool:
    job = cluster.active
    return job is not None and not job.succeeded and cluster.stage in AT_WORK


def _set_reasons(cluster: ClusterState, reasons: dict[WorkerId, str]) -> ClusterState:
    """What is known of these workers."""
    told = {w: replace(cluster.workers[w], reason=reason) for w, reason in reasons.items() if w in cluster.workers}
    return replace(cluster, workers=cluster.workers | told) if told else cluster


def _query_members(cluster: ClusterState, event: ev.StallDetected, now: float, out: Commands) -> ClusterState:
    """What is known by now is judged, and everybody is asked again."""
    still = (
        cluster.stall
        if cluster.stall is not None and cluster.stall.generation == event.generation
        else Stall(event.generation)
    )
    still = replace(still, seconds=event.seconds)
    cluster = _judge(replace(cluster, stall=still), still, now, out)
    if cluster.stall is None or not _at_work(cluster):
        return cluster
    out.append(cmd.QueryPosition(cluster.generation, cluster.members))
    cluster = replace(cluster, stall=replace(cluster.stall, unanswered=cluster.member_set))
    return partitions.begin(cluster, now, out)


def _judge(cluster: ClusterState, still: Stall, now: float, out: Commands) -> ClusterState:
    """Who is where, in words; and who has been behind for too long."""
    inside = [w for w in cluster.members if cluster.stage is not Stage.LEAVING or w in cluster.awaiting]
    at = {w: still.positions[w] for w in inside if w in still.positions}
    age = f"{still.seconds:.0f} s"
    if not at:
        silent = [
            f"; {rank_text(cluster, w)}: {cluster.workers[w].unresponsive}"
            for w in inside
            if cluster.workers[w].unresponsive
        ]
        return replace(cluster, stall=replace(still, text=f"no commit for {age}{''.join(silent[:1])}"))
    far = {w: (a.begun, a.commit) for w, a in at.items()}
    least, most = min(far.values()), max(far.values()) if len(inside) == len(cluster.members) else LEFT
    slow = [w for w in at if far[w] == least != most]
    before = still.stragglers
    behind = {w: before[w] if w in before and before[w][0] == far[w] else (far[w], now) for w in slow}
    if not slow:
        cluster = _set_reasons(cluster, dict.fromkeys(before, ""))
        text = f"no commit for {age}; {_where(cluster, inside, at)}"
        return replace(cluster, stall=replace(still, text=text, stragglers=behind))
    words = {w: f"{age} behind at commit {at[w].commit}" + (f", in {at[w].place}" * bool(at[w].place)) for w in slow}
    cluster = _set_reasons(cluster, dict.fromkeys(before, "") | words)
    still = _record(cluster, still, {w: at[w].commit for w in slow}, words, out)
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    text = f"{rank_text(cluster, slow[0])} is {words[slow[0]]}{more}"
    return _replace_stalled(replace(cluster, stall=replace(still, text=text, stragglers=behind)), words, now, out)


def _record(
    cluster: ClusterState, still: Stall, slow: dict[WorkerId, int], words: dict[WorkerId, str], out: Commands
) -> Stall:
    """Once for each commit at which they are behind; if there are many, the first of them stand for all."""
    news = [item for item in islice(slow.items(), NAMED) if item not in still.reported]
    for w, _ in news:
        text = f"{rank_text(cluster, w)} is {words[w]}"
        out.append(cmd.Record("worker-behind", text, host=w.host, worker=str(w), generation=cluster.generation))
    return replace(still, reported=still.reported.union(news))


def _where(cluster: ClusterState, inside: list[WorkerId], at: dict[WorkerId, ev.PositionReported]) -> str:
    """Where members are that are equally far."""
    places = {a.place for a in at.values()}
    commit = max(a.commit for a in at.values())
    if len(at) == len(inside) and len(places) == 1:
        where = f", in {places.pop()}" if all(places) else ""
        return f"all ranks are at commit {commit}{where}"
    parts = [f"{rank_text(cluster, w)} is in {a.place}" for w, a in at.items() if a.place][:2]
    unheard = [w for w in inside if w not in at]
    parts += [
        f"{rank_text(cluster, w)}: {cluster.workers[w].unresponsive}"
        for w in unheard
        if cluster.workers[w].unresponsive
    ][:1] or [f"{rank_text(cluster, w)} has not reported where it is" for w in unheard[:1]]
    return ", ".join(parts) or f"all ranks are at commit {commit}"


def _replace_stalled(cluster: ClusterState, words: dict[WorkerId, str], now: float, out: Commands) -> ClusterState:
    """Others have waited for them long enough."""
    still, stall = cluster.stall, cluster.limits.stall
    if still is None or stall is None:
        return cluster
    for w in [w for w, (_, since) in still.stragglers.items() if now >= since + stall]:
        why = f"{w} stalled ({words[w]}; stall is {stall:g} s)"
        out.append(cmd.StopWorker(w, kill=True))
        cluster = losses.worker_lost(cluster, w, why, now, out)
    return cluster
