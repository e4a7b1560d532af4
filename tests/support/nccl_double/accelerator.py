"""The double as nbelastic sees it: `nbelastic.worker.accelerator.Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.nccl_double.communicator import live
from tests.support.nccl_double.group import NAME, NcclDouble


class Double:
    """The options of a communicator are the timeout of its collectives."""

    backend = NAME

    def options(self, timeout: timedelta) -> timedelta:
        return timeout

    def create(self, store: Any, rank: int, size: int, options: timedelta) -> NcclDouble:
        return NcclDouble(store, rank, size, options, blocking=False)

    def make_room(self) -> bool:
        return True

    def connect(self, communicator: NcclDouble, meet: Callable[[], object]) -> None:
        communicator.communicator.connect(meet)

    def abort(self, communicator: NcclDouble) -> None:
        communicator.abort()

    def error(self, communicator: NcclDouble) -> str:
        return communicator.communicator.error

    def synchronize(self, *, all_streams: bool = False) -> None:
        for communicator in [*live]:
            communicator.synchronize()

    def use_for_new_groups(self, make: Callable[[Any, int, int, Any], Any] | None) -> None:
        register(make or make_blocking)


def make_blocking(store: Any, rank: int, size: int, timeout: timedelta) -> NcclDouble:
    """What torch does alone: with NCCL's default settings no abort reaches a communicator that connects."""
    return NcclDouble(store, rank, size, timeout, blocking=True)


def register(make: Callable[[Any, int, int, Any], Any] = make_blocking) -> None:
    """Make the name of the double known to torch, which calls `make` for each group."""
    # The flight recorder of torch 2.15 cannot record a group that is made in Python.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])
    dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(make, extended_api=False)
