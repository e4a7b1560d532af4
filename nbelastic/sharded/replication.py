"""Copies of shards on other ranks, sent in a thread beside the training.

At a commit that is copied, each rank fills an arena with its shard, and goes on. A thread sends it to the rank's buddies and
receives theirs. Workers of one host map each other's arenas, so a worker that dies leaves its copies to them: a copy is sent
to another host only. When every rank has all copies, the commit is whole, whichever rank or host dies (see `buddies`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import msgspec

from nbelastic.protocol.worker_messages import MOST_RANKS, Continued, Copies
from nbelastic.sharded.arena import Arena, Arenas, Shard, ShardTensor
from nbelastic.sharded.buddies import choose_buddies
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.host_memory import HostMemory, Offer, offer
from nbelastic.sharded.transfer import REPLICATE, check_same_tensors, exchange, gather_bytes, meet
from nbelastic.sharded.whole_commits import Commit, Held
from nbelastic.worker.threads import run_in_thread


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

    def __init__(self, layout: Layout, rank: int, copies: int, group: Any, *, pinned: bool) -> None:
        self.whole: Whole | None = None  # the newest one of this generation
        self.nbytes = 0  # of all arenas of this rank
        self.shared = False  # other workers of this host have mapped the arenas of this rank
        self.continued: Continued | None = None  # for the report
        self._layout, self._rank, self._group, self._pinned = layout, rank, group, pinned
        self._all_buddies = choose_buddies(layout.hosts, layout.owners(), copies)
        self.buddies: tuple[int, ...] = ()  # ranks to which copies are sent
        self.wards: tuple[int, ...] = ()  # ranks whose copies are kept here
        self._sends = False  # copies are sent, to other hosts or because a worker cannot map another's memory
        self._all_mapped = True
        if len(set(layout.hosts)) > 1:
            self._send_to_buddies()
        self._host = HostMemory(layout.hosts, rank)
        self._mapped: Any = None  # the tensors and offers of the last commit
        self._on_host = layout.hosts.count(layout.hosts[rank])  # ranks
        self._arenas: dict[int, Arenas] = {}  # by rank: its shard or copies of it
        self.running: Future[None] | None = None
        self._copying: Commit | None = None
        self._arrived: dict[int, Shard] = {}  # complete copies of the commit that is being copied, by rank

    def _send_to_buddies(self) -> None:
        self._sends = True
        self.buddies = self._all_buddies[self._rank]
        self.wards = tuple(other for other, ranks in enumerate(self._all_buddies) if self._rank in ranks)

    def report(self, now: float) -> Copies:
        """What the driver shows; `now`: monotonic seconds. Any thread may call it."""
        whole, buddies, wards = self.whole, self.buddies[:MOST_RANKS], self.wards[:MOST_RANKS]
        number, age, seconds = (None, 0.0, 0.0)
        if whole is not None:
            number, age, seconds = whole.commit.number, now - whole.made_at, whole.seconds
        return Copies(self.nbytes, number, age, seconds, buddies, wards, self.shared, self.continued)

    def begin(self, commit: Commit, shard: Shard) -> Shard:
        """Copy `shard`, and begin to send it. `finish` must have returned for the commit before. Returns the copy."""
        made_at, names = time.monotonic(), tuple(shard)
        own = self._take(self._rank, names, [tuple(tensor.shape) for tensor in shard.values()])
        own.fill(shard, commit)
        arrived: dict[int, Shard] = {}
        before, self.nbytes = self.nbytes, sum(arenas.nbytes for arenas in self._arenas.values())
        copying = Whole(commit, made_at, 0.0, is_first=before != self.nbytes)
        self._copying, self._arrived = commit, arrived
        self.running = run_in_thread(lambda: self._send(copying, own, arrived))
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
            arenas = self._arenas[rank] = Arenas(names, shapes, pinned=self._pinned, processes=self._on_host)
        return arenas.take()

    def held_on_host(self) -> Mapping[Held, Shard]:
        """The shards in the arenas of this host's other workers, whether these live or not."""
        return self._host.held()

    def _shapes(self, names: Sequence[ShardTensor], rank: int) -> list[tuple[int, ...]]:
        """The shapes of the local tensors of another rank."""
        chunks = (self._layout.parameters[name.parameter].chunks[rank] for name in names)
        return [chunk.sizes if chunk is not None else (0,) for chunk in chunks]

    def _send(self, copying: Whole, own: Arena, arrived: dict[int, Shard]) -> None:
        names = tuple(own.tensors)
        check_same_tensors(names, self._group)
        self._exchange(copying.commit, own, arrived)
        if not self._map_host(names):
            self._send_to_buddies()
            self._exchange(copying.commit, own, arrived)
            meet(self._group)
        self.whole = copying._replace(seconds=time.monotonic() - copying.made_at)

    def _exchange(self, commit: Commit, own: Arena, arrived: dict[int, Shard]) -> None:
        """Send the own copy to the buddies, and receive those of the wards."""
        names = tuple(own.tensors)
        copies = {ward: self._take(ward, names, self._shapes(names, ward)) for ward in self.wards}
        self.nbytes = sum(arenas.nbytes for arenas in self._arenas.values())
        for arena in copies.values():
            arena.unseal()
        exchange(
            {buddy: [own.block] for buddy in self.buddies},
            {ward: [arena.block] for ward, arena in copies.items()},
            self._group,
            REPLICATE,
        )
        for arena in copies.values():
            arena.seal(commit)
        arrived.update({ward: arena.tensors for ward, arena in copies.items()})

    def _map_host(self, names: tuple[ShardTensor, ...]) -> bool:
        """Collective: map what the workers of this host offer. False if one of them cannot, and no copies were sent."""
        data = msgspec.msgpack.encode(offer({shard: arenas.made for shard, arenas in self._arenas.items()}))
        offers = [msgspec.msgpack.decode(one, type=Offer) for one in gather_bytes(data, self._group)]
        self._host.map(offers, names, partial(self._shapes, names))
        if (names, offers) != self._mapped:
            # before this, no worker may begin a commit, which may close what others are opening
            answers = gather_bytes(b"no" if self._host.unreachable else b"yes", self._group)
            self._all_mapped = b"no" not in answers
        self._mapped = names, offers
        self.shared = self._on_host > 1 and self._all_mapped
        return self._all_mapped or self._sends
