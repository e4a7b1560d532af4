"""Which workers offer a store where their host is now: one of them becomes rank 0."""

from __future__ import annotations

from nbelastic.core.ranks import rank_order
from nbelastic.core.state import ClusterState
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.addresses import address_of


def has_store(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether it offers a store at its host's present address."""
    store, host = cluster.workers[w].store, cluster.hosts[w.host]
    return bool(store) and (not host.moved_at or address_of(store) == host.address)


def new_store_by(cluster: ClusterState, w: WorkerId) -> float:
    """Until when to wait for its store at the host's new address; 0.0: do not wait."""
    moved_at = cluster.hosts[w.host].moved_at
    return moved_at + cluster.limits.timeouts.store if moved_at and not has_store(cluster, w) else 0.0


def with_store_first(cluster: ClusterState, members: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
    """`members` by rank, with a worker as rank 0 that offers a store, if there is one."""
    leader = next((w for w in members if has_store(cluster, w)), members[0])
    if leader == members[0]:
        return members
    return rank_order((leader, *(w for w in members if w != leader)), (), {})
