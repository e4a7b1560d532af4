"""The collectives, as exchanges of private buffers over a mesh. Each sum has the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nccl_double.mesh import Mesh

SMALL = 1 << 15  # bytes up to which an all-reduce sends whole tensors to all ranks

Op = dist.ReduceOp.RedOpType
COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy, in one dimension."""
    return tensor.detach().reshape(-1).clone()


def all_to_all(mesh: Mesh, parts: Sequence[torch.Tensor], sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Send a part to each rank; returns what each has sent here. `sizes`: how many elements that is, if not as many."""
    mine = parts[mesh.rank]
    lengths = sizes or [len(mine)] * mesh.size
    found = [mine if rank == mesh.rank else mine.new_empty(length) for rank, length in enumerate(lengths)]
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    mesh.exchange([(rank, parts[rank]) for rank in others], [(rank, found[rank]) for rank in others])
    return found


def all_gather(mesh: Mesh, mine: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
    return all_to_all(mesh, [mine] * mesh.size, sizes)


def combine(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    kind = next(kind for kind in COMBINE if op == kind)
    total = reduce(COMBINE[kind], tensors)
    return total / len(tensors) if kind == Op.AVG else total


def reduce_scatter(mesh: Mesh, parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    return combine(all_to_all(mesh, parts), op)


def all_reduce(mesh: Mesh, mine: torch.Tensor, op: Any) -> torch.Tensor:
    if mine.numel() * mine.element_size() <= SMALL:
        return combine(all_gather(mesh, mine), op)
    parts = mine.tensor_split(mesh.size)
    sizes = [len(part) for part in parts]
    here = combine(all_to_all(mesh, parts, [sizes[mesh.rank]] * mesh.size), op)
    return torch.cat(all_gather(mesh, here, sizes))


def broadcast(mesh: Mesh, data: torch.Tensor, root: int) -> torch.Tensor:
    others = [rank for rank in range(mesh.size) if rank != root]
    mesh.exchange([(rank, data) for rank in others if mesh.rank == root], [(root, data)] if mesh.rank != root else [])
    return data


def gather(mesh: Mesh, mine: torch.Tensor, root: int) -> list[torch.Tensor]:
    """What each rank has sent, on the root; nothing elsewhere."""
    if mesh.rank != root:
        mesh.exchange([(root, mine)], [])
        return []
    found = [mine if rank == root else torch.empty_like(mine) for rank in range(mesh.size)]
    mesh.exchange([], [(rank, data) for rank, data in enumerate(found) if rank != root])
    return found


def scatter(mesh: Mesh, parts: Sequence[torch.Tensor], into: torch.Tensor, root: int) -> torch.Tensor:
    """`parts`: of the root alone."""
    if mesh.rank != root:
        mesh.exchange([], [(root, into)])
        return into
    mesh.exchange([(rank, part) for rank, part in enumerate(parts) if rank != root], [])
    return parts[root]
