"""Copies of shards on other ranks, sent in a thread beside the training.

At a commit that is copied, each rank fills an arena with its shard, and goes on. A thread sends it to the rank's buddies and
receives theirs. When every rank has all copies, the commit is whole, whichever rank dies (see `buddies`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from nbelastic.protocol.worker_messages import Copies
from nbelastic.sharded.arena import Arena, Arenas, Shard, ShardTensor
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.transfer import REPLICATE, exchange, meet
from nbelastic.sharded.whole_commits import Commit
from nbelastic.worker.threads import run_in_thread

MOST_RANKS = 16  # in a report


class Whole(NamedTuple):
    """A commit of which all ranks have all copies. `made_at`: monotonic seconds; `seconds`: that copying took.

    `is_first`: memory was allocated for it.
    """

    commit: Commit
    made_at: float
    seconds: float
    is_first: bool = False


class Replication:
    """Of one generation. `group`: a gloo group of all ranks that no other code uses."""

    def __init__(
        self, layout: Layout, rank: int, buddies: Sequence[Sequence[int]], group: Any, *, pinned: bool
    ) -> None:
        self.whole: Whole | None = None  # the newest one of this generation
        self.nbytes = 0  # of all arenas of this rank
        self.buddies = tuple(buddies[rank])
        self.wards = tuple(other for other, ranks in enumerate(buddies) if rank in ranks)  # whose copies are kept here
        self._layout, self._rank, self._group, self._pinned = layout, rank, group, pinned
        self._arenas: dict[int, Arenas] = {}  # by rank: its shard or copies of it
        self.running: Future[None] | None = None
        self._copying: Commit | None = None
        self._arrived: dict[int, Shard] = {}  # complete copies of the commit that is being copied, by rank

    def report(self, now: float) -> Copies:
        """What the driver shows; `now`: monotonic seconds. Any thread may call it."""
        whole, buddies, wards = self.whole, self.buddies[:MOST_RANKS], self.wards[:MOST_RANKS]
        if whole is None:
            return Copies(self.nbytes, buddies=buddies, wards=wards)
        return Copies(self.nbytes, whole.commit.number, now - whole.made_at, whole.seconds, buddies, wards)

    def begin(self, commit: Commit, shard: Shard) -> Shard:
        """Copy `shard`, and begin to send it. `finish` must have returned for the commit before. Returns the copy."""
        made_at, names = time.monotonic(), tuple(shard)
        own = self._take(self._rank, names, [tuple(tensor.shape) for tensor in shard.values()])
        own.fill(shard)
        copies = {ward: self._take(ward, names, self._shapes(ward, names)) for ward in self.wards}
        arrived: dict[int, Shard] = {}
        before, self.nbytes = self.nbytes, sum(arenas.nbytes for arenas in self._arenas.values())
        copying = Whole(commit, made_at, 0.0, is_first=before != self.nbytes)
        self._copying, self._arrived = commit, arrived
        self.running = run_in_thread(lambda: self._send(copying, own, copies, arrived))
        return own.tensors

    def finish(self, wait: Callable[[Callable[[], None]], None]) -> tuple[Commit, dict[int, Shard]] | None:
        """Wait for the commit that is being copied, if there is one: then it is whole. Raises what torch raised.

        `wait(task)` runs the task, and may abandon it.
        """
        running, commit = self.running, self._copying
        if running is None or commit is None:
            return None
        if not running.done():
            wait(running.result)
        running.result()
        self.running = None
        return commit, self._arrived

    def finish_if_done(self) -> tuple[Commit, dict[int, Shard]] | None:
        """As `finish`, without waiting."""
        if self.running is None or not self.running.done():
            return None
        return self.finish(lambda task: task())

    def arrived(self) -> tuple[Commit, dict[int, Shard]] | None:
        """The commit that was being copied when the generation ended, and the copies that are complete."""
        return (self._copying, dict(self._arrived)) if self.running is not None and self._copying is not None else None

    def _take(self, rank: int, names: tuple[ShardTensor, ...], shapes: list[tuple[int, ...]]) -> Arena:
        """Memory for the shard of `rank`. An optimizer's first step adds tensors: then all memory is allocated anew."""
        arenas = self._arenas.get(rank)
        if arenas is None or arenas.names != names:
            arenas = self._arenas[rank] = Arenas(names, shapes, pinned=self._pinned)
        return arenas.take()

    def _shapes(self, rank: int, names: Sequence[ShardTensor]) -> list[tuple[int, ...]]:
        """The shapes of the local tensors of another rank."""
        chunks = (self._layout.parameters[name.parameter].chunks[rank] for name in names)
        return [chunk.sizes if chunk is not None else (0,) for chunk in chunks]

    def _send(self, copying: Whole, own: Arena, copies: dict[int, Arena], arrived: dict[int, Shard]) -> None:
        exchange(
            {buddy: [own.block] for buddy in self.buddies},
            {ward: [arena.block] for ward, arena in copies.items()},
            self._group,
            REPLICATE,
        )
        arrived.update({ward: arena.tensors for ward, arena in copies.items()})
        meet(self._group)  # every rank has its copies
        self.whole = copying._replace(seconds=time.monotonic() - copying.made_at)
