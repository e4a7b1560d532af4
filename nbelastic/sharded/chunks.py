"""How the parameters of a generation are split over its ranks: the terms are those of `torch.distributed.checkpoint`.

A *chunk* is a box of a tensor. The *shard* of a rank is all chunks that the rank holds. Optimizer tensors have the shape
of their parameter and are split in the same way, so a layout lists parameters only.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod

from msgspec import Struct

from nbelastic.errors import StateError


class Chunk(Struct, frozen=True):
    """A box of a tensor: its first index and its length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def part(self) -> tuple[slice, ...]:
        """The index of the box in the whole tensor."""
        return box(self.offsets, self.sizes)

    def __str__(self) -> str:
        ends = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ends)}]"


class Parameter(Struct, frozen=True):
    """Its whole shape, its type (such as `float32`), and the chunk of each rank; None: the rank holds nothing of it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk | None, ...]


class OwnChunk(Struct, frozen=True):
    """What one rank sends to the others: a parameter's shape and type, its own chunk, and whether it is trained."""

    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk | None
    requires_grad: bool = True


class Layout(Struct, frozen=True):
    """`hosts`: the host of each rank. `parameters`: by name."""

    generation: int
    hosts: tuple[str, ...]
    parameters: dict[str, Parameter]

    def owners(self) -> tuple[frozenset[int], ...]:
        """The sets of ranks that hold the same chunk of some parameter, without repetition.

        A commit is whole if of each set at least one rank's shard is there.
        """
        found: dict[frozenset[int], None] = {}
        for parameter in self.parameters.values():
            for ranks in owners_of(parameter.chunks).values():
                found[ranks] = None
        return tuple(found)

    def missing(self, shards: frozenset[int]) -> list[str]:
        """The chunks of which none of these ranks' shards has a copy, as `name[start:end, …]`."""
        return [
            f"{name}{chunk if chunk.sizes else ''}"
            for name, parameter in self.parameters.items()
            for chunk, ranks in owners_of(parameter.chunks).items()
            if ranks.isdisjoint(shards)
        ]


def only(layout: Layout, names: Collection[str]) -> Layout:
    """The same layout, of these parameters alone."""
    kept = {name: parameter for name, parameter in layout.parameters.items() if name in names}
    return Layout(layout.generation, layout.hosts, kept)


def box(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor."""
    return tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))


def owners_of(chunks: Sequence[Chunk | None]) -> dict[Chunk, frozenset[int]]:
    """The different chunks of a parameter, each with the ranks that hold it."""
    found: dict[Chunk, set[int]] = {}
    for rank, chunk in enumerate(chunks):
        if chunk is not None:
            found.setdefault(chunk, set()).add(rank)
    return {chunk: frozenset(ranks) for chunk, ranks in found.items()}


def join(generation: int, hosts: Sequence[str], by_rank: Sequence[Mapping[str, OwnChunk]]) -> Layout:
    """The layout of a generation, from what each of its ranks sent.

    StateError if the ranks have bound different models, or if the chunks of a parameter are not disjoint, or not all of it.
    """
    first = by_rank[0]
    for rank, own in enumerate(by_rank):
        if own.keys() != first.keys():
            odd = min(own.keys() ^ first.keys())
            has, lacks = (rank, 0) if odd in own else (0, rank)
            raise StateError(f"rank {has} has bound the parameter {odd}, and rank {lacks} has not.")
    parameters = {}
    for name, one in first.items():
        for rank, own in enumerate(by_rank):
            if (own[name].shape, own[name].dtype) != (one.shape, one.dtype):
                raise StateError(f"{name} is {own[name].shape} on rank {rank} and {one.shape} on rank 0.")
            if own[name].requires_grad != one.requires_grad:
                raise StateError(
                    f"{name} has requires_grad={own[name].requires_grad} on rank {rank} and {one.requires_grad} on rank 0: set "
                    "it before bind() by what all ranks know, such as a counter in the state."
                )
        parameter = Parameter(one.shape, one.dtype, tuple(own[name].chunk for own in by_rank))
        if not _is_tiling(parameter.shape, parameter.chunks):
            raise StateError(
                f"{name} is split in a way that ShardedState cannot recover: the ranks' chunks overlap or leave a gap. "
                "Use fully_shard, and tensor parallel styles that shard evenly."
            )
        parameters[name] = parameter
    return Layout(generation, tuple(hosts), parameters)


@lru_cache(256)
def _is_tiling(shape: tuple[int, ...], chunks: tuple[Chunk | None, ...]) -> bool:
    """Whether the different chunks are disjoint and together the whole tensor."""
    different = list(owners_of(chunks))
    whole = sum(chunk.numel for chunk in different) == prod(shape)
    return whole and not any(_overlap(one, other) for one, other in combinations(different, 2))


def _overlap(one: Chunk, other: Chunk) -> bool:
    starts = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in starts)
