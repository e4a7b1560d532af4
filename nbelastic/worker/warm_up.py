"""Uses torch once in a new fork, where the first use is slow, before the cluster waits for this worker.

A world of one rank trains a tiny model for two steps, in a thread while the engine registers, which is mostly waiting. The
first use of a GPU makes its context, which takes memory and up to some seconds. It also loads NCCL and the libraries for
matrices and convolutions.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from nbelastic.system.log_line import print_line
from nbelastic.worker import accelerator

TIMEOUT = timedelta(seconds=60)  # of NCCL's first use


class WarmUp:
    """`start()` it, and `wait()` before the worker forms its first group. `nccl`: whether a job may use that."""

    def __init__(self, *, nccl: bool = True) -> None:
        self._thread = threading.Thread(target=_warm_up, args=(nccl,), name="nbelastic-warm-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


def _warm_up(nccl: bool) -> None:
    _use_torch()
    if torch.cuda.is_available():
        _try("the GPU", lambda: _use_device(torch.device("cuda", torch.cuda.current_device())))
        if nccl:
            _try("NCCL", lambda: _use_accelerator(accelerator.NCCL))


def _try(what: str, task: Callable[[], None]) -> None:
    """A failure does not end the worker: the program's own first use will fail too, and say more."""
    try:
        task()
    except Exception as error:  # noqa: BLE001  (CUDA, its libraries and NCCL raise many kinds)
        print_line(f"warming up {what} failed: {type(error).__name__}: {error}")


def _use_device(where: torch.device) -> None:
    """Forward and backward passes of a matrix product and of a convolution. No random number is drawn."""
    for kind in (torch.float32, torch.float16):
        matrix = torch.ones(64, 64, device=where, dtype=kind, requires_grad=True)
        images, filters = (torch.ones(8, 8, n, n, device=where, dtype=kind, requires_grad=True) for n in (16, 3))
        convolved = torch.nn.functional.conv2d(images, filters)
        ((matrix @ matrix).sum() + convolved.sum()).backward()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()


def _use_accelerator(one: accelerator.Accelerator) -> None:
    """Connect a communicator of one rank, and abort it."""
    communicator = one.create(dist.HashStore(), 0, 1, one.options(TIMEOUT))
    try:
        one.connect(communicator, lambda: None)
    finally:
        one.abort(communicator)


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
    generator = torch.Generator()  # the global one belongs to the user, whose setup cell may seed it at this moment
    model = torch.nn.Sequential(torch.nn.utils.skip_init(torch.nn.Linear, 2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.rand(2, 2, generator=generator)).sum().backward()
        optimizer.step()
    del ddp  # before its group: DDP's destructor holds the GIL, and the group's waits for threads that may need the GIL
