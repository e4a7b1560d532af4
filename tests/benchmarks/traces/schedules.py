"""When nodes join, leave and are killed: read from a recorded trace, or made from a rate and a seed. Nothing here does I/O."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Counts = list[tuple[float, int]]  # from this second on, so many nodes exist
PERIODS = {"torchft-60s": 60.0, "torchft-15s": 15.0, "monarch-3min": 180.0}  # seconds between two kills


@dataclass(frozen=True)
class Change:
    """A node changes, `at` seconds after the begin. A killed node's process is lost; the node itself stays."""

    at: float
    kind: Literal["join", "leave", "kill"]
    node: int


@dataclass(frozen=True)
class Schedule:
    """Changes of the nodes 0 to `workers` - 1, which all exist at the begin, in order of time."""

    workers: int
    seconds: float
    changes: tuple[Change, ...]

    def seconds_below(self, minimum: int) -> float:
        """Return the seconds in which fewer than `minimum` nodes exist: no system can train then."""
        present, since, below = self.workers, 0.0, 0.0
        for change in (*self.changes, Change(self.seconds, "kill", 0)):
            below += (change.at - since) * (present < minimum)
            since = change.at
            present += {"join": 1, "leave": -1, "kill": 0}[change.kind]
        return below


def bamboo_counts(text: str) -> Counts:
    """Read lines of `second,count`. At a change the old count comes first, so the last one of a second is the new one."""
    found: dict[float, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            second, count = line.split(",")
            found[float(second)] = int(count)
        except ValueError:
            raise ValueError(f"line {number}: {line!r} is not `second,count`") from None
    return in_order(list(found.items()))


def parcae_counts(text: str) -> Counts:
    """Read lines of `[millisecond, action, {"nodes": [name, …]}]`; other actions than add and remove change nothing."""
    nodes: set[str] = set()
    found: dict[float, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            millisecond, action, details = json.loads(line)
            named = set(details["nodes"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'line {number}: not `[millisecond, action, {{"nodes": […]}}]`') from None
        if action == "add":
            nodes |= named
        elif action == "remove":
            if unknown := named - nodes:
                raise ValueError(f"line {number}: {', '.join(sorted(unknown))} cannot leave, because it never joined")
            nodes -= named
        found[millisecond / 1000] = len(nodes)
    return in_order(list(found.items()))


def in_order(counts: Counts) -> Counts:
    if not counts or any(a[0] >= b[0] for a, b in pairwise(counts)):
        raise ValueError("the trace is empty, or its times do not increase")
    return counts


def from_counts(counts: Counts, *, workers: int, speed: float, seconds: float, seed: int) -> Schedule:
    """Return the changes of so many workers: each stands for an equal share of the trace's highest count, rounded up.

    The schedule begins when the trace first has its highest count. Time is divided by `speed`, and cut after `seconds`
    or at the end of the trace. The seed draws which nodes leave; the lowest absent ones join.
    """
    peak = max(count for _, count in counts)
    begin = next(at for at, count in counts if count == peak)
    seconds = min(seconds, (counts[-1][0] - begin) / speed)
    rng, present, changes = random.Random(seed), set(range(workers)), []
    for at, count in counts:
        when, wanted = (at - begin) / speed, math.ceil(count * workers / peak)
        if not 0 < when < seconds:
            continue
        while len(present) != wanted:
            if len(present) > wanted:
                node = rng.choice(sorted(present))
                present.remove(node)
                changes.append(Change(when, "leave", node))
            else:
                node = min(set(range(workers)) - present)
                present.add(node)
                changes.append(Change(when, "join", node))
    return Schedule(workers, seconds, tuple(changes))


def from_rate(period: float, *, workers: int, speed: float, seconds: float, seed: int) -> Schedule:
    """Return a kill of a random node every `period` / `speed` seconds, the first one after half of that."""
    rng, changes, at = random.Random(seed), [], period / speed / 2
    while at < seconds:
        changes.append(Change(at, "kill", rng.randrange(workers)))
        at += period / speed
    return Schedule(workers, seconds, tuple(changes))
