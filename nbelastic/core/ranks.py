"""Ranks of workers. Survivors keep their order, and each host's ranks follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbelastic.protocol.ids import WorkerId


def rank_order(old: Sequence[WorkerId], new: Iterable[WorkerId], seniority: Mapping[str, int]) -> tuple[WorkerId, ...]:
    """Members by rank: `old` ones (in their old order) before `new` ones, packed by host.

    Hosts are in the order of their oldest survivor. Hosts without one follow by `seniority` (when they came).
    """
    by_host: dict[str, list[WorkerId]] = {}
    for worker in old:
        by_host.setdefault(worker.host, []).append(worker)
    for worker in sorted(new, key=lambda w: (seniority.get(w.host, len(seniority)), w)):
        by_host.setdefault(worker.host, []).append(worker)
    return tuple(worker for workers in by_host.values() for worker in workers)
