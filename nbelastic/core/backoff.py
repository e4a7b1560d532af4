"""TODO."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_slots
from nbelastic.core.state import ClusterState
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]
AGENT_RETRY = 1.0  # seconds; an agent that cannot start is never tried in a hot loop, whatever the cooldown
MOST_DOUBLINGS = 60  # of a cooldown: more would not fit into a float


def record_failure(cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands) -> ClusterState:
    """A death against the slot: the first restart comes at once, then the cooldown doubles; a healthy spell forgives."""
    slot = cluster.hosts[w.host].slots[w.slot]
    healthy = now - cluster.workers[w].since >= cluster.limits.healthy
    failures = 1 if healthy else slot.failures + 1
    wait = backoff_seconds(cluster, failures - 1)
    slot = replace(slot, failures=failures, restarts=slot.restarts + 1, busy=False)
    if not wait:
        return host_slots.with_slot(cluster, w, slot)
    reason = f"slot {w.slot} in back-off for {wait:g} s after {failures} failures: {why}"
    out.append(cmd.Record("slot-backoff", reason, host=w.host, worker=str(w)))
    cluster = host_slots.with_slot(cluster, w, replace(slot, backoff_until=now + wait, reason=reason))
    return host_slots.with_host(cluster, replace(cluster.hosts[w.host], reason=reason))


def hold_back(cluster: ClusterState, ids: Iterable[WorkerId], why: str, now: float, out: Commands) -> ClusterState:
    """These newcomers are left out for a while: those who train with one another do not wait for them."""
    # (they may have to come out of a generation first, and are among `starting` until they have)
    workers, held = dict(cluster.workers), dict(cluster.held_back)
    for w in ids:
        failures = workers[w].failures + 1
        wait = max(AGENT_RETRY, backoff_seconds(cluster, failures))
        text = f"{w} is left out: {why}; tried again in {wait:g} s"
        out.append(cmd.Record("newcomer-held", text, host=w.host, worker=str(w), generation=cluster.generation))
        workers[w] = replace(workers[w], failures=failures, reason=f"left out: {why}")
        held[w] = now + wait
    return replace(cluster, workers=workers, held_back=held)


def release_held(cluster: ClusterState, now: float) -> ClusterState:
    """Newcomers that were left out may try again when their time has come; those that are gone are forgotten."""
    if not cluster.held_back:
        return cluster
    held = {
        w: until
        for w, until in cluster.held_back.items()
        if now < until and (w in cluster.newcomers or w in cluster.starting)
    }
    if len(held) == len(cluster.held_back):
        return cluster
    back = [w for w in cluster.held_back if w not in held and w in cluster.workers]
    unblamed = {w: replace(cluster.workers[w], reason="") for w in back if w not in cluster.failed}
    return replace(cluster, held_back=held, workers=cluster.workers | unblamed)


def backoff_seconds(cluster: ClusterState, failures: int) -> float:
    low, high = cluster.limits.cooldown
    return min(high, low * 2.0 ** min(failures - 1, MOST_DOUBLINGS)) if failures > 0 else 0.0
