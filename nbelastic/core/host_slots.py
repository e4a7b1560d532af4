"""TODO."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, Host, Slot
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]


def workers_on(cluster: ClusterState, name: str) -> tuple[WorkerId, ...]:
    """Its workers that live, by slot."""
    slots = cluster.hosts[name].slots
    ids = (WorkerId(name, index, slot.incarnation) for index, slot in enumerate(slots) if slot.busy)
    return tuple(w for w in ids if w in cluster.workers)


def free(cluster: ClusterState, w: WorkerId, *, restarts: int = 0) -> ClusterState:
    """Its process is gone: the slot is free."""
    host = cluster.hosts[w.host]
    slot = host.slots[w.slot]
    return with_slot(cluster, w, replace(slot, busy=False, restarts=slot.restarts + restarts))


def with_slots(host: Host, slots: tuple[Slot, ...]) -> Host:
    return replace(host, slots=slots, full=all(slot.busy for slot in slots[: host.spec.slots]))


def with_slot(cluster: ClusterState, w: WorkerId, slot: Slot) -> ClusterState:
    host = cluster.hosts[w.host]
    return with_host(cluster, with_slots(host, (*host.slots[: w.slot], slot, *host.slots[w.slot + 1 :])))


def with_host(cluster: ClusterState, host: Host) -> ClusterState:
    """With `host` in the place of what was known of it."""
    return replace(cluster, hosts={**cluster.hosts, host.spec.name: host})
