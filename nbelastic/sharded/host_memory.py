"""The arenas of the other workers of this host, mapped here: the copies of a worker outlive it as long as one of them lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from nbelastic.sharded.arena import MEMORY_NAME, Arena, Shard, ShardTensor
from nbelastic.sharded.whole_commits import Held

Shapes = list[tuple[int, ...]]


class Offered(Struct, array_like=True):
    """An arena that another worker of the host may map: whose shard it is for, and the descriptor in its process."""

    shard: int
    fd: int


class Offer(Struct):
    """What one rank sends to the others after copying."""

    pid: int
    arenas: tuple[Offered, ...] = ()


class HostMemory:
    """Of one generation. `hosts`: of each rank."""

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        self._others = [other for other, host in enumerate(hosts) if host == hosts[rank] and other != rank]
        self._known: dict[tuple[int, int, int], Arena] = {}  # by rank, whose shard, descriptor
        self.unreachable = False  # an arena that a worker of this host offered could not be mapped

    def map(self, offers: Sequence[Offer], names: Sequence[ShardTensor], shapes: Callable[[int], Shapes]) -> None:
        """Map the arenas that the workers of this host offer, by rank. `shapes(shard)`: of the local tensors of a rank."""
        found: dict[tuple[int, int, int], Arena] = {}
        self.unreachable = False
        for rank in self._others:
            for offered in offers[rank].arenas:
                key = (rank, offered.shard, offered.fd)
                known = self._known.get(key)
                if known is None or tuple(known.tensors) != tuple(names):
                    known = self._open(offers[rank].pid, offered, names, shapes(offered.shard))
                if known is not None:
                    found[key] = known
        self._known = found

    def _open(self, pid: int, offered: Offered, names: Sequence[ShardTensor], shapes: Shapes) -> Arena | None:
        path = f"/proc/{pid}/fd/{offered.fd}"
        try:
            known = MEMORY_NAME in os.readlink(path)  # in another view of /proc the number may be another process's
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if known else -1
        except OSError:  # another view of /proc, or the process has ended
            fd = -1
        if fd < 0:
            self.unreachable = True
            return None
        try:
            return Arena(names, shapes, fd)
        except ValueError:  # it is smaller
            self.unreachable = True
            return None
        finally:
            os.close(fd)

    def held(self) -> Mapping[Held, Shard]:
        """The shards that are complete in these arenas."""
        pairs = ((arena.commit, shard, arena) for (_, shard, _), arena in self._known.items())
        return {Held(commit, shard): arena.tensors for commit, shard, arena in pairs if commit is not None}


def offer(arenas: Mapping[int, Sequence[Arena]]) -> Offer:
    """What this process offers. `arenas`: by whose shard they are for."""
    return Offer(
        os.getpid(), tuple(Offered(shard, arena.fd) for shard, made in sorted(arenas.items()) for arena in made)
    )
