"""What the benchmarks train: half a million parameters, 5 ms of sleep per step, each step recorded."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe

SLEEP = 0.005
SIZE = (256, 1024)
LARGE = 1024


def model_and_optimizer() -> Any:
    """Return a network of 0.5 M parameters and its SGD with momentum, the same on every rank."""
    import torch

    torch.manual_seed(0)
    narrow, wide = SIZE
    model = torch.nn.Sequential(torch.nn.Linear(narrow, wide), torch.nn.ReLU(), torch.nn.Linear(wide, narrow))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def one_step(ddp: Any, optimizer: Any) -> Any:
    """Do forward pass, backward pass and update on a random batch of 32."""
    import torch

    x = torch.randn(32, SIZE[0])
    loss = (ddp(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def large_model_and_optimizer() -> Any:
    """Return 25 M parameters in 24 layers and SGD with momentum: 200 MB of state per rank."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(LARGE, LARGE) for _ in range(24)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def one_large_step(ddp: Any, optimizer: Any) -> Any:
    """Do one step like `one_step`, on a random batch of 8."""
    import torch

    loss = ddp(torch.randn(8, LARGE)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def record_steps(folder: str, steps: int) -> int:
    """Train with a commit every step; each process appends its steps to its own file in `folder`."""
    return _record(folder, steps, *model_and_optimizer(), one_step)


def record_slow_steps(folder: str, steps: int) -> int:
    """Do the same as `record_steps` with a sleep of 20 ms per step."""
    return _record(folder, steps, *model_and_optimizer(), one_step, sleep=0.02)


def fail_in_first_step(folder: str, steps: int) -> None:
    """Be a new program that raises on one rank in its first step, while the others wait for it."""
    import torch

    model, optimizer = model_and_optimizer()

    @nbe.elastic
    def loop(state: Any) -> None:
        if nbe.rank() == nbe.size() - 1:
            raise ValueError(f"no step {state.step} of {steps} for {folder}")
        torch.distributed.all_reduce(torch.ones(1))

    loop(nbe.TorchState(model=model, optimizer=optimizer, step=0))


def record_large_steps(folder: str, steps: int) -> int:
    """Do the same as `record_steps` with 25 M parameters."""
    return _record(folder, steps, *large_model_and_optimizer(), one_large_step)


def _record(folder: str, steps: int, model: Any, optimizer: Any, step: Any, sleep: float = SLEEP) -> int:
    import torch

    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1) as log:

        @nbe.elastic
        def train(state: Any) -> int:
            ddp = torch.nn.parallel.DistributedDataParallel(state.model, init_sync=False)
            while state.step < steps:
                step(ddp, optimizer)
                state.step += 1
                line = {
                    "t": time.time(),
                    "step": state.step,
                    "rank": nbe.rank(),
                    "world": nbe.size(),
                    "pid": os.getpid(),
                }
                log.write(json.dumps(line) + "\n")
                state.commit()
                time.sleep(sleep)
            return int(state.step)

        return int(train(state))


def count_steps(seconds: float) -> float:
    """Return the steps per second with a commit every step, after a warm-up of a tenth."""
    import torch

    model, optimizer = model_and_optimizer()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def train(state: Any) -> float:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        return timed(seconds, lambda: (one_step(ddp, optimizer), state.commit(), time.sleep(SLEEP)))

    return float(train(state))


def count_plain_steps(seconds: float) -> float:
    """Return the steps per second of the same loop in plain DDP, without commits, in the same kind of process."""
    import torch

    model, optimizer = model_and_optimizer()
    state = nbe.ObjectState()

    @nbe.elastic
    def train(_: Any) -> float:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        return timed(seconds, lambda: (one_step(ddp, optimizer), time.sleep(SLEEP)))

    return float(train(state))


def timed(seconds: float, step: Any) -> float:
    """Return the steps per second; rank 0 decides every 20 steps whether all ranks end."""
    import torch
    import torch.distributed as dist

    for _ in range(20):
        step()
    done, start = 0, time.perf_counter()
    go_on = torch.ones(1)
    while go_on.item():
        for _ in range(20):
            step()
        done += 20
        go_on[0] = float(time.perf_counter() - start < seconds)
        dist.broadcast(go_on, 0)
    return done / (time.perf_counter() - start)
