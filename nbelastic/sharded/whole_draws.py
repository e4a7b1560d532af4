"""Random numbers for sharded tensors: each rank takes its part of the numbers that the whole tensor would get.

On a CPU mesh a DTensor's `normal_()` fills the local tensor alone: with equal generators all shards would be equal, with
different ones the values would depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nbelastic.sharded.parameters import chunk_of, like, local_tensor


class WholeDraws(TorchDispatchMode):  # type: ignore[misc]  # mypy does not read torch
    """While it is active, random operations on DTensors draw for the whole tensor. Collective: all ranks do the same.

    The generators of all ranks must be equal. One whole tensor at a time is in memory.
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], DTensor):
            return _draw(func, args, kwargs)
        return func(*args, **kwargs)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *others = args
    in_place = func._schema.is_mutable
    reads = not in_place and not func._schema.name.endswith("_like")  # such as bernoulli(input)
    whole = target.full_tensor() if reads else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    others, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (others, kwargs))
    drawn = func(whole, *others, **kwargs)
    if not isinstance(drawn, torch.Tensor) or drawn.shape != target.shape:
        return func(*args, **kwargs)  # several tensors, or one of another shape, as of multinomial: torch decides
    chunk = chunk_of("a tensor", target)
    local = local_tensor(target) if in_place else torch.empty_like(local_tensor(target), dtype=drawn.dtype)
    if chunk is not None:
        local.copy_(drawn[chunk.part])
    return target if in_place else like(target, local)
