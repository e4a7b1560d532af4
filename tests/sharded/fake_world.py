"""One rank of a world whose other ranks do not exist: DTensors are split as there, and collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from nbelastic.sharded.mesh_caches import clear_mesh_caches


@contextmanager
def fake_world(rank: int, *sizes: int, names: tuple[str, ...] = ("shard",), clear: bool = True) -> Iterator[Any]:
    """The mesh of these sizes, as `rank` sees it."""
    size = 1
    for one in sizes:
        size *= one
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        if clear:
            clear_mesh_caches()


def sharded(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shard each layer that has parameters, and the model."""
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
