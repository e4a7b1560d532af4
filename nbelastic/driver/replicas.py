"""Compares the hashes of the ranks' commits, and names the rank that differs.

Hashes of one kind are compared: ranks with another layout of the state or other hardware may compute other bits.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import ReplicaHashes

MOST_VALUES = 8  # of one commit; with more of them before one is that of most ranks, none is named
MOST_COMMITS = 64  # that wait for hashes of further ranks


class Differs(Struct, frozen=True):
    """`workers` have other values than most at `commit`. `were_equal`: all of their values were equal earlier."""

    workers: tuple[WorkerId, ...]
    commit: int
    were_equal: bool


class AllDiffer(Struct, frozen=True):
    """The ranks differ at `commit`, and no value is that of most ranks, so none can be named."""

    commit: int


class Replicas:
    """Of one job. Each difference of a worker is returned once in each generation, `AllDiffer` once in each job."""

    def __init__(self) -> None:
        self.differing: dict[WorkerId, int] = {}  # workers of the newest generation, and since which commit they differ
        self._generation = 0
        self._kinds: dict[WorkerId, int] = {}
        self._sizes: Counter[int] = Counter()  # how many workers that do not differ have each kind
        self._hashes: dict[int, dict[tuple[int, int], list[WorkerId]]] = {}  # by commit: who has which kind and hash
        self._equal: set[int] = set()  # kinds of which all workers had the same values
        self._is_unclear = False  # in this generation they differ, and none can be named
        self._was_unclear = False  # in any generation

    def add(self, worker: WorkerId, size: int, hashes: ReplicaHashes) -> list[Differs | AllDiffer]:
        """A member of a generation of `size` has reported. Returns what is new."""
        if hashes.generation > self._generation:
            self._begin(hashes.generation)
        if hashes.generation < self._generation or self._is_unclear or worker in self.differing:
            return []
        self._set_kind(worker, hashes.kind)
        found = []
        for commit, value in hashes.by_commit.items():
            at_commit = self._hashes.setdefault(commit, {})
            alike = at_commit.setdefault((hashes.kind, value), [])
            alike.append(worker)
            if len(at_commit) == 1 and len(alike) < self._sizes[hashes.kind]:
                continue  # the usual case, of which there are many in a large world
            if len(self._kinds) == size and not self._is_unclear and worker not in self.differing:
                found += self._judge(commit, hashes.kind, is_whole=commit >= hashes.whole_at)
        while len(self._hashes) > MOST_COMMITS:
            del self._hashes[min(self._hashes)]
        return found

    def _begin(self, generation: int) -> None:
        self._generation, self.differing, self._is_unclear = generation, {}, False
        self._kinds, self._sizes, self._hashes, self._equal = {}, Counter(), {}, set()

    def _set_kind(self, worker: WorkerId, kind: int) -> None:
        before = self._kinds.get(worker)
        if before != kind:
            if before is not None:
                self._sizes[before] -= 1
            self._kinds[worker] = kind
            self._sizes[kind] += 1

    def _judge(self, commit: int, kind: int, *, is_whole: bool) -> list[Differs | AllDiffer]:
        size, at_commit = self._sizes[kind], self._hashes[commit]
        groups = [workers for (k, _), workers in at_commit.items() if k == kind]
        most, is_complete = max(groups, key=len), sum(map(len, groups)) >= size
        if len(groups) == 1:
            if is_complete:
                self._hashes[commit] = {key: workers for key, workers in at_commit.items() if key[0] != kind}
                self._equal |= {kind} if is_whole else set()
            return []
        if 2 * len(most) > size:
            return [self._name(tuple(w for workers in groups if workers is not most for w in workers), commit, kind)]
        if not is_complete and len(groups) < MOST_VALUES:
            return []
        self._is_unclear, was_unclear, self._was_unclear = True, self._was_unclear, True
        return [] if was_unclear else [AllDiffer(commit)]

    def _name(self, workers: tuple[WorkerId, ...], commit: int, kind: int) -> Differs:
        """From now on these workers are not compared: their later hashes differ too."""
        self.differing.update(dict.fromkeys(workers, commit))
        self._sizes[kind] -= len(workers)
        self._hashes = {}
        return Differs(workers, commit, kind in self._equal)
