"""Reports that change little: with many workers they are decided on together.

`step` would lead to the same state, one by one. Together, the sets and records of all workers are changed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from nbelastic.core import deadlines, generations, halts, swaps, worker_events
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, Stage, Worker
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

WAITS_FOR_ALL = (Stage.GATHERING, Stage.FORMING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING)


def only_waits(before: ClusterState, cluster: ClusterState, now: float) -> bool:
    """Whether only the reason would change: the stage waits for reports, or the world trains, and nothing else is under way."""
    job = cluster.active
    if cluster.stage is Stage.RUNNING:
        waits = not (cluster.newcomers or cluster.leaving or halts.is_wanted(cluster))
    else:
        waits = cluster.stage in WAITS_FOR_ALL and bool(cluster.awaiting)
    return (
        waits
        and cluster.stage is before.stage
        and (cluster.stage is not Stage.PREPARING or now < cluster.prepare_by)
        and job is not None
        and not job.succeeded
        and cluster.stopped is before.stopped
        and not (cluster.disconnected or cluster.partition_check.pairs or cluster.probing or cluster.ending)
        and not (cluster.stopping or cluster.external_nodes or cluster.held_back)
        and not cluster.deferred_events
        and not (cluster.wait is not None and cluster.wait.irreplaceable)
        and (cluster.kept_state is None and cluster.trial is None)
        and cluster.script is None
    )


def decide(cluster: ClusterState, events: Sequence[ev.Event], now: float) -> tuple[ClusterState, int]:
    """The state after the first of these events, and how many they are. Another event at the same time must follow them.

    They need no command. The reason to wait is left to the event that follows.
    """
    out: Commands = []
    senders = cluster.member_set if cluster.stage is Stage.RUNNING else cluster.awaiting
    events = events[: len(senders) - 1]  # the last report changes the stage
    if not events or not only_waits(cluster, cluster, now) or deadlines.act(cluster, now, out) is not cluster or out:
        return cluster, 0
    records: dict[WorkerId, Worker] = {}
    reported: dict[WorkerId, None] = {}
    raised: dict[WorkerId, None] = {}
    highest, number = cluster.highest_acknowledged, 0
    for event in events:
        w: Any = getattr(event, "worker", None)
        old = cluster.workers.find(w) if w in senders and w not in reported else None
        new = _record_after(cluster, old, event, now) if old is not None else None
        if old is None or new is None:
            break
        number += 1
        if isinstance(event, ev.WorkerRaised):
            raised[old.id] = None
            continue
        reported[old.id] = None
        if new is not old:
            records[old.id] = new
        if isinstance(event, ev.LeaveAcknowledged):
            highest = max(highest, event.commit)
    if cluster.stage is Stage.RUNNING and raised:
        cluster = replace(cluster, suspects=cluster.suspects | raised)
    if reported:
        awaiting, workers = cluster.awaiting.without(reported), cluster.workers | records
        cluster = replace(cluster, awaiting=awaiting, workers=workers, highest_acknowledged=highest)
    return cluster, number


def _record_after(cluster: ClusterState, old: Worker, event: ev.Event, now: float) -> Worker | None:
    """The record of an awaited worker after its report, if that changes nothing else; None: `step` must decide."""
    prepared = cluster.next_formation
    match event, cluster.stage:
        case ev.WorkerPrepared(error=""), Stage.PREPARING:
            return old if prepared is not None and event.generation == prepared.generation else None
        case ev.WorkerReady(), Stage.GATHERING | Stage.LEAVING:
            return _record_of_leaver(cluster, old, event)
        case ev.WorkerFormed(generation=cluster.generation), Stage.FORMING:
            return generations.formed(old)
        case ev.LeaveAcknowledged(generation=cluster.generation, ask=cluster.ask_number), Stage.ASKED:
            return old
        case ev.StoreOffered(generation=cluster.generation, store=store), Stage.RUNNING:
            return replace(old, store=store)
        case ev.WorkerRaised(generation=cluster.generation, intact=False), Stage.RUNNING if cluster.suspects:
            return old
        case ev.WorkerRaised(generation=cluster.generation), Stage.GATHERING:
            return old if not worker_events.missed_abort(cluster, now) else None
    return None


def _record_of_leaver(cluster: ClusterState, old: Worker, event: ev.WorkerReady) -> Worker | None:
    """The record of a member that leaves its generation as it was asked to, and holds the training state."""
    job = cluster.active
    assert job is not None
    is_present = max(old.generation, cluster.generation) <= event.generation <= cluster.highest_generation
    runs = event.job == old.job == job.name and event.program == swaps.wanted(cluster)
    if not (is_present and runs and event.holds_state and worker_events.takes_part(old)):
        return None
    if cluster.hung or cluster.cancelled_formation is not None or old.id not in cluster.member_set:
        return None
    return worker_events.ready(old, event, holds_state=True)
