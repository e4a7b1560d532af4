"""The invariants are checked again only where something has changed: so each says what it reads."""

from __future__ import annotations

from typing import Any

import pytest

from nbelastic.core.state import ClusterState
from tests.core import invariants
from tests.core.long_story import LongStory

PROPERTIES = {name: value for name, value in vars(ClusterState).items() if isinstance(value, property)}


class Watched:
    """Stands for a cluster, and notes which of its fields are read."""

    def __init__(self, cluster: ClusterState, read: set[str]) -> None:
        self._cluster, self._read = cluster, read

    def __getattr__(self, name: str) -> Any:
        if name in PROPERTIES:
            return PROPERTIES[name].fget(self)
        self._read.add(name)
        return getattr(self._cluster, name)


@pytest.mark.parametrize("seed", [7, 42, 63, 333])
def test_an_invariant_reads_what_it_says(monkeypatch, seed):
    """In long stories it reads no other field: a change of that would not be checked."""
    read = {look: set() for look in invariants.LOOKS}
    check = invariants.check

    def watch(before, cluster, commands, now):
        for look, fields in read.items():
            assert not list(look(Watched(cluster, fields)))
        check(before, cluster, commands, now)

    monkeypatch.setattr("tests.core.story.check", watch)
    LongStory(seed).play(40)
    for look, fields in read.items():
        missing = fields - look.reads - ({"workers"} if "alive" in look.reads else set())
        assert fields, look.__name__
        assert not missing, f"{look.__name__} also reads {missing}"
