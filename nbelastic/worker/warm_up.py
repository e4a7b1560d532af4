"""The first time of everything is slow in a fresh fork: do it before anybody waits for this worker.

A world of one takes a step of a tiny model. It runs in a thread while the engine registers, which is mostly waiting.
"""

from __future__ import annotations

import io
import threading

import torch
import torch.distributed as dist


class WarmUp:
    """Started by the constructor's caller; `wait()` before the process group is used in earnest."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=_first_time, name="nbelastic-warm-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


def _first_time() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _train()
    finally:  # or the first world would find a default group that is not its own
        dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save({"a": [1, (2, "b")]}, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def _train() -> None:
    generator = torch.Generator()  # the global one is the user's
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.rand(2, 2, generator=generator)).sum().backward()
        optimizer.step()
    del ddp  # before its group: its destructor holds the GIL, and the group's waits for threads that may need it
