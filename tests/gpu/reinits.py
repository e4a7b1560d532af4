"""One process forms its group again and again: memory, descriptors and threads stay as they are."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import Counter
from typing import Any

import psutil

import nbelastic as nbe
from tests.gpu.bench import Bench

SETTLE, WINDOW = 10, 20  # the first rounds do not count; so many are compared with as many at the end
RESERVE = 8.0  # seconds of the part that are left for its end
GROWTH = {"rss": 1.05, "gpu": 1.02, "threads": 1.0}  # at most, from the first window to the last
# More at most. A group may still be there when the next one counts, or not, so the medians differ by one group's own.
# If each group left one behind, they would differ by twice this.
MORE = {"fds": WINDOW / 2}


def run(bench: Bench) -> None:
    """Jobs one after the other; each forms a new group. On a GPU it is NCCL's, of one rank."""
    slots = 1 if bench.has_gpu else 2
    count = bench.choose(200, 200, SETTLE + 2 * WINDOW)
    found: list[dict[str, Any]] = []
    with bench.cluster(f"localhost:{slots}", min=slots, **bench.alone()) as cluster:
        while len(found) < count and bench.left > RESERVE:
            found.append(cluster.run(measure).result(timeout=30)[0])
    for name in (*GROWTH, *MORE):
        with bench.results.case(name) as case:
            values = [one[name] for one in found[SETTLE:]]
            assert len(values) >= 2 * WINDOW, f"only {len(found)} rounds in the time of this part"
            first, last = (statistics.median(part) for part in (values[:WINDOW], values[-WINDOW:]))
            case.record("MB" if name in ("rss", "gpu") else "", first, last)
            case.note(rounds=len(found))
            if name == "fds":
                case.note(kinds=found[-1]["kinds"], kinds_before=found[SETTLE]["kinds"])
            assert last <= first * GROWTH.get(name, 1.0) + MORE.get(name, 0.0), f"from {first} to {last}"


def measure() -> dict[str, Any]:
    """Form a group and make two steps; then what this process uses."""
    import torch

    device = nbe.device()
    model = torch.nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = nbe.TorchState(model=model, optimizer=optimizer)

    @nbe.elastic
    def loop(state: Any) -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.randn(8, 256, device=device)).sum().backward()
            optimizer.step()
            state.commit()

    loop(state)
    used = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return {
        "rss": psutil.Process().memory_info().rss >> 20,
        "gpu": used >> 20,
        "fds": len(os.listdir("/proc/self/fd")),
        "kinds": _kinds_of_descriptors(),
        "threads": len(os.listdir("/proc/self/task")) if device.type == "cuda" else threading.active_count(),
    }


def _kinds_of_descriptors() -> dict[str, int]:
    """How many there are of each kind: socket, pipe, or a path."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]] += 1
    return dict(kinds)
