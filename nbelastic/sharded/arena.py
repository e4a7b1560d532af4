"""Memory for copies of a shard: one block per copy, allocated once, as allocating takes longer than copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 64  # bytes


class ShardTensor(NamedTuple):
    """A tensor of the sharded state: a parameter, or the `entry` that an optimizer keeps for it."""

    parameter: str
    optimizer: str = ""
    entry: str = ""
    dtype: str = "float32"

    @property
    def key(self) -> str:
        """Its name in errors and checkpoints."""
        return f"{self.optimizer}.{self.parameter}.{self.entry}" if self.optimizer else self.parameter


Shard = dict[ShardTensor, torch.Tensor]


class Arena:
    """Space for one shard: `tensors` are views of `block`."""

    def __init__(
        self, names: Sequence[ShardTensor], shapes: Sequence[tuple[int, ...]], *, pinned: bool = False
    ) -> None:
        dtypes = [getattr(torch, name.dtype) for name in names]
        lengths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        self.block = torch.empty(sum(padded), dtype=torch.uint8, pin_memory=pinned)
        self.tensors: Shard = {
            name: part[:length].view(dtype).view(shape)
            for name, shape, dtype, length, part in zip(
                names, shapes, dtypes, lengths, self.block.split(padded), strict=True
            )
        }

    def fill(self, shard: Shard) -> None:
        """Copy `shard` into this memory."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.tensors.values()), [shard[name] for name in self.tensors])


class Arenas:
    """Two arenas of one shard, used in turn: while one is filled or sent, the other has the last whole commit."""

    def __init__(
        self, names: Sequence[ShardTensor], shapes: Sequence[tuple[int, ...]], *, pinned: bool = False
    ) -> None:
        self.names, self._shapes, self._pinned = tuple(names), tuple(shapes), pinned
        self._made: list[Arena] = []
        self._next = 0

    def take(self) -> Arena:
        """The arena to fill now: not the one that was taken last."""
        if len(self._made) < 2:
            self._made.append(Arena(self.names, self._shapes, pinned=self._pinned))
            return self._made[-1]
        self._next = 1 - self._next
        return self._made[1 - self._next]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(arena.block.nbytes for arena in self._made)
