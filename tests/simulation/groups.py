"""Process groups of a simulation: all ranks connect, then make collectives together.

A rank that leaves is missed by the others, as its connections stay open for a while. When it closes them, or ends, the group breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.network import Network

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

CONNECT = 0.04  # seconds, at most
NOTICE = 0.01  # seconds, at most, after which a connection shows that its peer has gone
JITTER = 0.1  # seconds, at most, from the end of a collective on one rank to that on another
Done = Callable[[str], None]  # is called with an error, or ""


class Group:
    """Of one generation. Ranks arrive (`connect`); when all have, and reach one another, each `done("")` is called."""

    def __init__(self, network: Network, size: int) -> None:
        self._network, self._size = network, size
        self._hosts: dict[int, str] = {}  # by rank that has arrived
        self._waiting: dict[int, Done] = {}  # by rank that waits for the others: to connect, or in a collective
        self._is_whole = False
        self._closed: dict[int, str] = {}  # why, by rank that has closed its connections

    def connect(self, worker: Worker, rank: int, done: Done) -> None:
        if self._is_whole:  # it was prepared
            self._call(done, "", CONNECT / 10)
            return
        self._hosts[rank] = worker.id.host
        self._wait(rank, done)

    def collective(self, rank: int, done: Done) -> None:
        """All ranks must call this; then each one's `done("")` is called."""
        self._wait(rank, done)

    def _wait(self, rank: int, done: Done) -> None:
        self._waiting[rank] = done
        if self._closed:
            self._fail_those_that_notice()
        else:
            self.go_on()

    def go_on(self) -> None:
        """End what all ranks have begun, unless the network keeps them apart."""
        if self._closed or len(self._waiting) < self._size or self._network.parts(set(self._hosts.values())):
            return
        most = JITTER if self._is_whole else CONNECT
        self._is_whole = True
        for done in self._take_waiting():
            self._call(done, "", most)

    def awaits(self, rank: int) -> bool:
        """Whether this rank waits for others."""
        return rank in self._waiting

    def leave(self, rank: int) -> None:
        """A rank leaves or aborts: the others wait for it."""
        done = self._waiting.pop(rank, None)
        if done is not None:
            self._call(done, "aborted", 0.0)

    def close(self, rank: int, why: str = "a peer has closed its connections") -> None:
        """A rank closes its connections, or has ended: collectives of its neighbours fail, now or later."""
        self.leave(rank)
        if self._hosts.pop(rank, None) is not None:
            self._closed[rank] = why
            self._fail_those_that_notice()

    def _fail_those_that_notice(self) -> None:
        """A rank exchanges data with its two neighbours. The others wait for these. While they connect, all notice."""
        for other, why in self._closed.items():
            for rank in sorted(self._waiting):
                if not self._is_whole or (rank - other) % self._size in (1, self._size - 1):
                    self._call(self._waiting.pop(rank), why, NOTICE)

    def _take_waiting(self) -> list[Done]:
        taken = [self._waiting[rank] for rank in sorted(self._waiting)]
        self._waiting.clear()
        return taken

    def _call(self, done: Done, error: str, most: float) -> None:
        self._network.clock.after(self._network.rng.random() * most, done, error)


class Groups:
    """All groups, by generation."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._groups: dict[int, Group] = {}

    def of(self, generation: int, size: int) -> Group:
        if generation not in self._groups:
            self._groups[generation] = Group(self._network, size)
            self._groups.pop(generation - 20, None)
        return self._groups[generation]

    def go_on(self) -> None:
        """The network has changed."""
        for group in list(self._groups.values()):
            group.go_on()
