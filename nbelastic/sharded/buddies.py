"""Which ranks keep a copy of a rank's shard: on another host if there is one, so that a host's end loses no chunk.

Pure. With ranks of one host next to one another, the copy is half a world away: two ranks keep each other's, and of all
ways to lose two ranks the fewest lose a chunk (the placement of GEMINI, SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def choose_buddies(
    hosts: Sequence[str], owners: Collection[frozenset[int]] = (), copies: int = 1
) -> tuple[tuple[int, ...], ...]:
    """For each rank the ranks that keep a copy of its shard, at most `copies`. `hosts`: of each rank.

    `owners`: sets of ranks with equal chunks. A rank whose chunks all exist on another host too needs no copy. With one
    host, another worker is enough.
    """
    size, loads = len(hosts), [0] * len(hosts)
    one_host = len(set(hosts)) < 2
    needs = [False] * size
    for ranks in owners or [frozenset({rank}) for rank in range(size)]:
        spread = len(ranks) if one_host else len({hosts[rank] for rank in ranks})
        if spread <= copies:
            needs[min(ranks)] = True
    chosen: list[list[int]] = [[] for _ in range(size)]
    for copy in range(1, copies + 1):
        shift = max(1, copy * size // (copies + 1))
        for rank in range(size):
            if not needs[rank]:
                continue
            used = {hosts[rank], *(hosts[other] for other in chosen[rank])}
            free = [other for other in range(size) if other != rank and other not in chosen[rank]]
            if free:
                best = min(free, key=lambda other: (hosts[other] in used, loads[other], (other - rank - shift) % size))
                chosen[rank].append(best)
                loads[best] += 1
    return tuple(map(tuple, chosen))


def hand_over(owners: Collection[frozenset[int]], leaving: Collection[int], size: int) -> dict[int, int]:
    """To which staying rank each leaving rank sends its shard before it leaves: leaving rank -> staying rank.

    A rank whose chunks staying ranks hold too sends nothing.
    """
    stay = [rank for rank in range(size) if rank not in leaving]
    only = sorted({min(ranks) for ranks in owners if ranks.issubset(leaving)})
    return {rank: stay[index % len(stay)] for index, rank in enumerate(only)} if stay else {}
