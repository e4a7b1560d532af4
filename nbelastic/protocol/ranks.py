"""Ranks as they are told: where each stands, and ranges of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId


class Place(Struct, frozen=True, gc=False):
    """Where one rank stands: the six numbers of Horovod's and torchrun's contracts."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(members: Sequence[WorkerId]) -> tuple[Place, ...]:
    """One `Place` per rank. `members` are packed by host. O(n)."""
    per_host: dict[str, int] = {}
    local: list[int] = []
    cross: list[int] = []
    with_local_rank: dict[int, int] = {}  # how many hosts have a worker of that local rank
    for worker in members:
        local_rank = per_host.get(worker.host, 0)
        per_host[worker.host] = local_rank + 1
        local.append(local_rank)
        cross.append(with_local_rank.get(local_rank, 0))
        with_local_rank[local_rank] = cross[-1] + 1
    return tuple(
        Place(rank, local[rank], per_host[worker.host], cross[rank], with_local_rank[local[rank]])
        for rank, worker in enumerate(members)
    )


def ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges, each from its first number up to, and without, its second."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
