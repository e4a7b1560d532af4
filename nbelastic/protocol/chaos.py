"""Faults that a user injects into a cluster, and the chances that a seed decides. Pure."""

from __future__ import annotations

import hashlib
from typing import Literal

FaultKind = Literal["kill", "stop", "host"]
# A worker's process is killed (SIGKILL); it is stopped (SIGSTOP); the agent of a host is killed, and its workers with it.
KINDS: tuple[FaultKind, ...] = ("kill", "stop", "host")
STOPPED_FOR = 10.0  # seconds after which a host's agent kills a worker that it has stopped, if the driver has not


def draw(seed: int, *place: int | str) -> float:
    """A number from 0 to 1 (excluded) that depends on the seed and the place only. It is the same in each version of Python."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:6]) / (1 << 48)


def pause_before(seed: int, number: int, every: float) -> float:
    """Seconds between fault `number` and the one before it: between a half and one and a half times `every`."""
    return every * (0.5 + draw(seed, number, "pause"))
