"""Ranks: their numbers within hosts, and ranges of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId


class RankNumbers(Struct, frozen=True, gc=False):
    """The ranks of one worker, as Horovod and torchrun define them; the world size is the sixth number."""

    rank: int
    local_rank: int  # among the workers of its host
    local_size: int  # workers of its host
    cross_rank: int  # among the workers with the same local rank, one per host
    cross_size: int  # how many workers have that local rank


def rank_numbers(members: Sequence[WorkerId]) -> tuple[RankNumbers, ...]:
    """One `RankNumbers` per rank. Members of one host must follow one another. O(n)."""
    per_host: dict[str, int] = {}
    local: list[int] = []
    cross: list[int] = []
    with_local_rank: dict[int, int] = {}  # the number of hosts with a worker of that local rank
    for worker in members:
        local_rank = per_host.get(worker.host, 0)
        per_host[worker.host] = local_rank + 1
        local.append(local_rank)
        cross.append(with_local_rank.get(local_rank, 0))
        with_local_rank[local_rank] = cross[-1] + 1
    return tuple(
        RankNumbers(rank, local[rank], per_host[worker.host], cross[rank], with_local_rank[local[rank]])
        for rank, worker in enumerate(members)
    )


def ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges: each pair is the first number, and the one after the last."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
