"""Checks of a cluster that are made only if something they read has changed: most decisions change two or three fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import astuple

from nbelastic.core.state import ClusterState
from nbelastic.protocol.ids import WorkerId

FIELDS = ClusterState.__struct_fields__
Find = Callable[[ClusterState], Iterable[str]]

_plain: dict[str, tuple[object, frozenset[WorkerId]]] = {}  # by name: the newest object, and its keys
_passed: tuple[object, ...] = (None,) * len(FIELDS)  # the values of the last cluster without a fault
_alive: frozenset[WorkerId] = frozenset()  # its workers


def plain(cluster: ClusterState, name: str) -> frozenset[WorkerId]:
    """The workers in this set or dict. Plain sets are compared faster."""
    workers = getattr(cluster, name)
    of, keys = _plain.get(name, (None, frozenset[WorkerId]()))
    if of is not workers:
        keys = frozenset(workers)
        _plain[name] = workers, keys
    return keys


def alive(cluster: ClusterState) -> frozenset[WorkerId]:
    """The workers that live. One who reads no more of `cluster.workers` says that it reads `alive`."""
    return plain(cluster, "workers")


def reads(fields: str) -> Callable[[Find], Find]:
    """The function reads these fields of the cluster, and no others: see `test_invariants`."""

    def note(find: Find) -> Find:
        find.reads = frozenset(fields.split())  # type: ignore[attr-defined]
        return find

    return note


def found_in(cluster: ClusterState, finds: Iterable[Find]) -> Iterator[str]:
    """What these find in the cluster. Who reads nothing that is new since nothing was found last is not asked."""
    global _passed, _alive
    values = astuple(cluster)
    new = {name for name, value, old in zip(FIELDS, values, _passed, strict=True) if value is not old}
    if "workers" in new and alive(cluster) != _alive:
        new.add("alive")
    faultless = True
    for find in finds:
        if not new.isdisjoint(find.reads):  # type: ignore[attr-defined]
            for fault in find(cluster):
                faultless = False
                yield fault
    if faultless:
        _passed, _alive = values, alive(cluster)
