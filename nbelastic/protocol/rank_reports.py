"""What each rank reports about its steps, so that the driver can compare the ranks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MOST_HASHES = 8  # commits in one report


class ReplicaHashes(Struct, frozen=True):
    """Hashes of what all ranks of `generation` hold alike, by commit. Each continues the one before it.

    Ranks with the same `kind` (layout of the state, and hardware) compute the same ones. From the commit `whole_at` on, all of
    the state was read at least once.
    """

    generation: int
    kind: int
    whole_at: int
    by_commit: Annotated[dict[int, int], Meta(max_length=MOST_HASHES)]


class OwnTime(Struct, frozen=True):
    """How many milliseconds a step takes, and how many of them the rank does not wait for others; `place`: where it mostly is then."""

    generation: int
    step: float
    own: float
    place: str = ""
