"""The host's memory that a state takes: pinned memory on a GPU, else resident memory."""

from __future__ import annotations

import time
from typing import Any

import psutil

import nbelastic as nbe
from tests.gpu.bench import Bench


def run(bench: Bench) -> None:
    """One line per size: MB at each point, and the seconds that the state's constructor takes."""
    with bench.cluster("localhost:1", min=1, **bench.alone()) as cluster:
        for megabytes in bench.choose((256, 2048), (16,)):
            with bench.results.case(f"{megabytes} MB of parameters") as case:
                (found,) = cluster.run(measure, megabytes).result(timeout=bench.left)
                case.note(**found)


def measure(megabytes: int) -> dict[str, Any]:
    """SGD with momentum keeps as much again."""
    import torch

    device, found = nbe.device(), dict[str, Any]()
    layers = [torch.nn.Linear(1024, 1024, bias=False, device=device) for _ in range(megabytes // 4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def note(point: str) -> None:
        if device.type == "cuda":
            stats = torch.cuda.host_memory_stats()
            numbers = {name: stats.get(f"{name}_bytes.current", 0) >> 20 for name in ("allocated", "reserved")}
            found[point] = numbers
        else:
            found[point] = psutil.Process().memory_info().rss >> 20

    def step(ddp: Any) -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 1024, device=device)).square().mean().backward()
        optimizer.step()

    note("before")
    begun = time.monotonic()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    found["constructor_s"] = round(time.monotonic() - begun, 3)
    note("with a state")

    @nbe.elastic
    def loop(state: Any) -> None:
        note("in the loop")
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for _ in range(3):
            step(ddp)
            state.commit()
        note("commits that copy nothing")
        for number in range(6):
            step(ddp)
            if number % 3 == 2:
                state.commit()
        note("commits that copy")

    loop(state)
    del state
    note("at the end")
    return found
