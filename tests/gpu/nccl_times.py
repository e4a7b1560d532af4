"""How long NCCL takes to connect, for its first collective, and to abort one that a rank does not join."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import nbelastic as nbe
from tests.gpu.bench import Bench

TIMEOUT = timedelta(seconds=60)
HANGS = 0.3  # seconds that a collective waits before it is aborted


def run(bench: Bench) -> None:
    """In a world of all ranks, a few times. Each number is of the slowest rank."""
    world, rows = bench.world(most=8), list[dict[str, list[float]]]()
    with bench.cluster(f"localhost:{world}", min=world, **bench.nccl()) as cluster:
        with bench.results.case("all") as case:
            rows = cluster.run(measure, bench.choose(5, 3, 2)).result(timeout=bench.left)
            case.note(ranks=world)
        for name in rows[0] if rows else ():
            values = [max(rank[name][turn] for rank in rows) for turn in range(len(rows[0][name]))]
            bench.results.numbers(name, "s", values, ranks=world)


def measure(times: int) -> dict[str, list[float]]:
    """Make communicators beside the group of the world. Returns seconds by name; one number per time."""
    found: dict[str, list[float]] = {"init": [], "first large collective": [], "next collective": [], "abort": []}

    @nbe.elastic
    def loop(_: Any) -> None:
        for turn in range(times):
            _measure_once(turn, found)
            dist.barrier()

    loop(nbe.ObjectState())
    return found


def _measure_once(turn: int, found: dict[str, list[float]]) -> None:
    from nbelastic.worker import accelerator

    nccl, rank, size = accelerator.NCCL, nbe.rank(), nbe.size()
    store = dist.PrefixStore(f"times/{turn}", dist.distributed_c10d._get_default_store())
    data = torch.ones(1 << 20, device=nbe.device())
    clock = _Clock(found)
    backend = nccl.create(store, rank, size, nccl.options(TIMEOUT))
    nccl.connect(backend, lambda: None)
    clock.note("init")
    for name in ("first large collective", "next collective"):
        backend.allreduce([data]).wait()
        nccl.synchronize()
        clock.note(name)
    if size > 1 and rank == size - 1:  # the others wait for this one
        store.wait([f"aborted/{other}" for other in range(size - 1)], TIMEOUT)
        nccl.abort(backend)
        found["abort"].append(0.0)
        return
    begun = time.monotonic()
    if size > 1:
        backend.allreduce([data])
    threading.Timer(HANGS, nccl.abort, (backend,)).start()
    if size > 1:
        nccl.synchronize()
        found["abort"].append(time.monotonic() - begun - HANGS)
    store.set(f"aborted/{rank}", "")


class _Clock:
    """Notes the seconds since the last note."""

    def __init__(self, found: dict[str, list[float]]) -> None:
        self._found, self._at = found, time.monotonic()

    def note(self, name: str) -> None:
        now = time.monotonic()
        self._found[name].append(now - self._at)
        self._at = now
