"""Clears torch's caches of DTensor operations when a generation ends.

Meshes of two generations with the same size are equal, and the caches' results refer to the mesh of the first call. Without
this, a new DTensor would have the old mesh: its closed process groups, and this rank's old coordinate.

On a GPU, the first random operation on a DTensor makes torch's tracker of random numbers, with a broadcast. Newcomers have
none. So all ranks make a new one in each world.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _random

CACHED = (  # functions whose arguments or results refer to a mesh
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh"),
)


def clear_mesh_caches() -> None:
    """Clear them in this thread and, on a GPU, in the thread of its backward passes: each thread has its own."""
    _clear()
    _random._rng_tracker = None
    if torch.cuda.is_initialized():
        _ClearInBackward.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()


class _ClearInBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        _clear()
        return gradients[0]


def _clear() -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, propagator._propagate_tensor_meta_cached):
        cached.cache_clear()
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is not None:
        native()
    redistribute = import_module("torch.distributed.tensor._redistribute")
    planners = getattr(redistribute, "clear_redistribute_planner_cache", None)
    if planners is not None:
        planners()
    for module, path in CACHED:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            found.cache_clear()
