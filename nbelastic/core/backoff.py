"""Back-off: when a slot, host or newcomer is tried again after failures."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host, with_slot
from nbelastic.core.state import ClusterState, Host, HostPhase, Slot
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import WorkerId

AGENT_RETRY = 1.0  # seconds between two starts of an agent, even with a cooldown of 0
MOST_DOUBLINGS = 60  # of the back-off: more would overflow a float


def record_failure(
    cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands, *, at_once: bool = True
) -> ClusterState:
    """Count the loss of a worker as a failure of its slot. The first restart comes `at_once`, then the back-off doubles.

    A worker that lived for `healthy` seconds clears earlier failures, unless it never came up.
    """
    slot = cluster.hosts[w.host].slots[w.slot]
    healthy = w not in cluster.unregistered and now - cluster.workers[w].since >= cluster.limits.healthy
    failures = 1 if healthy else slot.failures + 1
    wait = backoff_seconds(cluster.limits, failures - 1 if at_once else failures)
    slot = replace(slot, failures=failures, restarts=slot.restarts + 1, busy=False, reason="")
    if not wait:
        return with_slot(cluster, w, slot)
    reason = f"slot {w.slot} in back-off for {wait:g} s after {failures} failures: {why}"
    out.append(cmd.Record("slot-backoff", reason, host=w.host, worker=str(w)))
    cluster = with_slot(cluster, w, replace(slot, backoff_until=now + wait, reason=reason))
    return with_host(cluster, replace(cluster.hosts[w.host], reason=reason))


def fails_as_before(cluster: ClusterState, w: WorkerId, why: str) -> bool:
    """Whether the worker never came up, as the one before it, for the same reason, and the back-off is the longest already.

    It is not recorded then: a slot may fail for days.
    """
    slot, before = cluster.hosts[w.host].slots[w.slot], replace(w, incarnation=w.incarnation - 1)
    is_longest = 0 < backoff_seconds(cluster.limits, slot.failures - 1) == cluster.limits.cooldown[1]
    is_same = why_in_backoff(slot).removeprefix(str(before)) == why.removeprefix(str(w))
    return w in cluster.unregistered and is_longest and is_same


def why_in_backoff(slot: Slot) -> str:
    """How its last worker was lost."""
    return slot.reason.partition(": ")[2]


def host_backoff(cluster: ClusterState, host: Host, now: float) -> tuple[int, float]:
    """The failures of a host after the loss of its agent, and the seconds until it is tried again.

    A host that was up for `healthy` seconds clears earlier failures.
    """
    healthy = host.phase is HostPhase.UP and now - host.since >= cluster.limits.healthy
    failures = 1 if healthy else host.failures + 1
    return failures, retry_wait(cluster, failures)


def retry_wait(cluster: ClusterState, failures: int) -> float:
    """Seconds until a host or newcomer is tried again after so many failures."""
    return max(AGENT_RETRY, backoff_seconds(cluster.limits, failures))


def waits_longest(cluster: ClusterState, failures: int) -> bool:
    """Whether the back-off of a host or newcomer grows no more after so many failures: they may go on for days."""
    return failures > 0 and retry_wait(cluster, failures + 1) == retry_wait(cluster, failures)


def hold_back(cluster: ClusterState, ids: Iterable[WorkerId], why: str, now: float, out: Commands) -> ClusterState:
    """Leave newcomers out for a while, so that workers that can form a group do not wait for them."""
    workers, held = {}, dict(cluster.held_back)
    for w in ids:
        worker = cluster.workers[w]
        failures = worker.failures + 1
        wait = retry_wait(cluster, failures)
        if not waits_longest(cluster, worker.failures):
            text = f"{w} is left out: {why}; tried again in {wait:g} s"
            out.append(cmd.Record("newcomer-held", text, host=w.host, worker=str(w), generation=cluster.generation))
        workers[w] = replace(worker, failures=failures, reason=f"left out: {why}")
        held[w] = now + wait
    return replace(cluster, workers=cluster.workers | workers, held_back=held)


def release_held(cluster: ClusterState, now: float) -> ClusterState:
    """Let newcomers join again whose time is over. Forget those that were lost."""
    if not cluster.held_back:
        return cluster
    held = {
        w: until
        for w, until in cluster.held_back.items()
        if now < until and (w in cluster.newcomers or w in cluster.starting)
    }
    if len(held) == len(cluster.held_back):
        return cluster
    released = [w for w in cluster.held_back if w not in held and w in cluster.workers]
    cleared = {w: replace(cluster.workers[w], reason="") for w in released if w not in cluster.failed}
    return replace(cluster, held_back=held, workers=cluster.workers | cleared)


def backoff_seconds(limits: Limits, failures: int) -> float:
    """Seconds of back-off after so many failures."""
    low, high = limits.cooldown
    return min(high, low * 2.0 ** min(failures - 1, MOST_DOUBLINGS)) if failures > 0 else 0.0
