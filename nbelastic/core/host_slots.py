"""The slots of hosts, and the workers in them."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core.state import ClusterState, Host, HostPhase, Slot
from nbelastic.protocol.ids import WorkerId


def workers_on(cluster: ClusterState, name: str) -> tuple[WorkerId, ...]:
    """Workers that live on the host, by slot."""
    slots = cluster.hosts[name].slots
    ids = (WorkerId(name, index, slot.incarnation) for index, slot in enumerate(slots) if slot.busy)
    return tuple(w for w in ids if w in cluster.workers)


def host_backoff_until(host: Host, now: float) -> float:
    """Until when no worker may start on the host; 0.0 if one may start now."""
    ends = [slot.backoff_until for slot in host.slots[: host.spec.slots]]
    until = max(min(ends, default=0.0), host.retry_at if host.phase is HostPhase.LOST else 0.0)
    return until if until > now else 0.0


def free_slot(cluster: ClusterState, w: WorkerId, *, restarts: int = 0) -> ClusterState:
    """Free the slot of a worker whose process has ended."""
    host = cluster.hosts[w.host]
    slot = host.slots[w.slot]
    return with_slot(cluster, w, replace(slot, busy=False, restarts=slot.restarts + restarts, reason=""))


def with_slots(host: Host, slots: tuple[Slot, ...]) -> Host:
    return replace(host, slots=slots, full=all(slot.busy for slot in slots[: host.spec.slots]))


def with_slot(cluster: ClusterState, w: WorkerId, slot: Slot) -> ClusterState:
    host = cluster.hosts[w.host]
    return with_host(cluster, with_slots(host, (*host.slots[: w.slot], slot, *host.slots[w.slot + 1 :])))


def with_host(cluster: ClusterState, host: Host) -> ClusterState:
    """The state with this record of a host."""
    return replace(cluster, hosts={**cluster.hosts, host.spec.name: host})
