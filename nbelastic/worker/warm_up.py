"""Uses torch once in a new fork, where the first use is slow, before the cluster waits for this worker.

A world of one rank trains a tiny model for two steps, in a thread while the engine registers, which is mostly waiting.
"""

from __future__ import annotations

import io
import threading

import torch
import torch.distributed as dist


class WarmUp:
    """`start()` it, and `wait()` before the worker forms its first group."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=_use_torch, name="nbelastic-warm-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


def _use_torch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _train()
    finally:  # else torch would refuse the first world's default group
        dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save({"a": [1, (2, "b")]}, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def _train() -> None:
    generator = torch.Generator()  # the global one belongs to the user
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.rand(2, 2, generator=generator)).sum().backward()
        optimizer.step()
    del ddp  # before its group: DDP's destructor holds the GIL, and the group's waits for threads that may need the GIL
