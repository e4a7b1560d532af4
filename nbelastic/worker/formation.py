"""A group that is about to form, as one of its members sees it."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_layout import rank_numbers


class Formation(Struct, frozen=True):
    """One member's ranks. `receivers` get the training state from rank `root`; `hosts` lists (name, workers) in rank order."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    store: str
    root: int
    receivers: tuple[int, ...]
    hosts: tuple[tuple[str, int], ...]
    backend: str = "gloo"  # or nccl


def formation_of(order: worker_messages.Formation, worker: WorkerId) -> Formation:
    """The part of `worker` in a message that all members get. ValueError if it is not a member."""
    members = [(host, slot) for host, slots in order.hosts for slot in slots]
    rank = members.index((worker.host, worker.slot))
    place = rank_numbers([WorkerId(host, slot, 0) for host, slot in members])[rank]
    return Formation(
        order.generation,
        rank,
        len(members),
        place.local_rank,
        place.local_size,
        place.cross_rank,
        place.cross_size,
        order.store,
        order.root,
        tuple(rank for first, end in order.receivers for rank in range(first, end)),
        tuple((host, len(slots)) for host, slots in order.hosts),
        order.backend,
    )
