"""A world of one on the NCCL that came with torch: what works without a second GPU and without sharing one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import nbelastic as nbe
from tests.gpu.bench import Bench

STEPS = 50


def run(bench: Bench) -> None:
    """The back end is NCCL, a few steps work, and the group is formed a few times. Then the phases that the driver has seen."""
    with bench.cluster("localhost:1", min=1, **bench.alone()) as cluster:
        with bench.results.case("train") as case:
            (found,) = cluster.run(train).result(timeout=bench.left)
            case.note(**found)
            expected = "nccl" if bench.has_gpu else "gloo"
            assert expected in found["backend"], f"{found['backend']} is not {expected}"
            assert found["device"] == ("cuda:0" if bench.has_gpu else "cpu")
        for _ in range(bench.choose(5, 3)):
            cluster.run(train).result(timeout=bench.left)
        phases: dict[str, list[float]] = {}
        for event in cluster.events:
            for phase, milliseconds in event.took.items():
                phases.setdefault(phase, []).append(milliseconds)
        for phase, values in phases.items():
            bench.results.numbers(phase, "ms", values)


def train() -> dict[str, Any]:
    """Convolutions, matrices, and collectives of the world and of its groups."""
    device = nbe.device()
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for group in (nbe.local_group(), nbe.cross_group()):
            dist.all_reduce(torch.ones(1, device=device), group=group)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(8, 3, 32, 32, device=device)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
        dist.barrier()
        return {"backend": dist.get_backend_config(), "device": str(device), "steps": state.step}

    return dict(loop(state))
