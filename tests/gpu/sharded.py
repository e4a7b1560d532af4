"""A model that is sharded with FSDP2 loses a rank, and trains on from a whole commit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbelastic as nbe
from tests.gpu.bench import Bench
from tests.gpu.faults import TIMEOUT
from tests.process.programs import Log, generation
from tests.process.training import by_rank
from tests.support.waiting import until

WIDTH, LAYERS = 256, 4


def run(bench: Bench) -> None:
    """Two hosts keep copies for one another. The numbers are seconds from the kill to the next step."""
    world = bench.world()
    hosts = f"localhost:{world - 1},127.0.0.2:1"
    options = {"min": 1, "max": world, **bench.nccl()}
    with bench.training(hosts, world, train, options, width=bench.choose(4 * WIDTH, WIDTH)) as training:
        with bench.results.case("a rank is killed") as case:
            for number in range(bench.choose(3, 2, 1)):
                ranks = training.wait_for_world(world, TIMEOUT)
                generation, at = training.cluster.status().generation, time.time()
                os.kill(ranks[-1 if number % 2 else 0].pid, signal.SIGKILL)
                found = until(lambda: [line for line in training.lines() if line["generation"] > generation], TIMEOUT)
                case.record("s", found[0]["t"] - at)
                training.wait_for_world(world, TIMEOUT)
            training.wait_for_world(world, TIMEOUT)
        with bench.results.case("equal on all ranks") as case:
            (training.folder / "finish").touch()
            results = training.job.result(timeout=TIMEOUT)
            assert len({(result["step"], result["sum"]) for result in results}) == 1
            case.note(steps=results[0]["step"], ranks=len(by_rank(training.cluster)) or len(results))


def train(folder: str, width: int) -> dict[str, Any]:
    """Train until `folder/finish` exists."""
    from torch.distributed.fsdp import fully_shard

    log, device = Log(folder), nbe.device()
    state = nbe.ShardedState(step=0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        with torch.device("meta"):
            model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
        mesh = nbe.device_mesh()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state.bind(model=model, optimizer=optimizer)
        while True:
            over = torch.tensor([float((Path(folder) / "finish").exists())], device=device)
            dist.all_reduce(over, dist.ReduceOp.MAX)
            model(torch.randn(16, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            ended = bool(over.item())
            log(step=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank())
            state.commit()
            if ended:
                total = sum(float(parameter.full_tensor().detach().double().sum()) for parameter in model.parameters())
                return {"step": state.step, "sum": total}
            time.sleep(0.01)

    return dict(loop(state))
