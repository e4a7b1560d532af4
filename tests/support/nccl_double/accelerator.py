"""The double as nbelastic sees it: `nbelastic.worker.accelerator.Accelerator`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.nccl_double.communicator import live
from tests.support.nccl_double.group import NAME, NcclDouble


class Double:
    backend = NAME

    def create(self, store: Any, rank: int, size: int, timeout: timedelta) -> NcclDouble:
        return NcclDouble(store, rank, size, timeout, blocking=False)

    def connect(self, backend: NcclDouble) -> None:
        backend.communicator.connect()

    def abort(self, backend: NcclDouble) -> None:
        backend.abort()

    def error(self, backend: NcclDouble) -> str:
        return backend.communicator.error

    def synchronize(self) -> None:
        for communicator in [*live]:
            communicator.synchronize()


def make_blocking(store: Any, rank: int, size: int, timeout: timedelta) -> NcclDouble:
    """What torch calls for a new group: with NCCL's default settings no abort reaches it before it is connected."""
    group = NcclDouble(store, rank, size, timeout, blocking=True)
    group.communicator.connect()
    return group


def register() -> None:
    """Make the name of the double known to torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make_blocking, devices=["cpu"])
