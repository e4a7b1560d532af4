"""Planned changes, one after the other: a worker leaves, and another joins."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from tests.gpu import programs
from tests.gpu.bench import Bench
from tests.gpu.faults import TIMEOUT, finish

CHANGES = 100
RESERVE = 12.0  # seconds of the part that are left for its end


def run(bench: Bench) -> None:
    """As many as fit. The numbers are the longest times between two steps of each change."""
    world, count = bench.world(), bench.choose(CHANGES, 20, 4)
    options = {"min": 1, "max": world, **bench.nccl()}
    with bench.training(f"localhost:{world}", world, programs.train, options, pause=0.005) as training:
        first = {worker.pid for worker in training.cluster.workers}
        begun: list[float] = []
        with bench.results.case("planned changes") as case:
            while len(begun) < count and bench.left > RESERVE:
                present = world - 1 if len(begun) % 2 == 0 else world
                begun.append(time.time())
                training.cluster.scale(max=present)
                training.wait_for_world(present, TIMEOUT)
            begun.append(time.time())
            case.record("s", *longest_gaps(training.lines(), begun))
            kinds = [event.kind for event in training.cluster.events]
            case.note(changes=len(begun) - 1, formed=kinds.count("world-formed"))
            assert "world-broken" not in kinds, [e.text for e in training.cluster.events if e.kind == "world-broken"]
            stayed = first & {worker.pid for worker in training.cluster.workers}
            assert len(stayed) >= world - 1, "a rank that stays has lost its process"
        finish(bench, training)


def longest_gaps(lines: list[dict[str, Any]], moments: list[float]) -> list[float]:
    """For each span between two moments: the longest time between two steps in it, each completed by any rank."""
    done: dict[int, float] = {}
    for line in lines:
        done.setdefault(line["step"], line["t"])
    times = sorted(done.values())
    gaps = [(a, b - a) for a, b in pairwise(times)]
    spans = [[gap for at, gap in gaps if begun <= at < end] for begun, end in pairwise(moments)]
    return [max(span) for span in spans if span]
