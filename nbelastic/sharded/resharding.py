"""From the chunks of one generation to those of another: which rank sends which part of which chunk to which rank.

Pure. The overlaps of chunks are computed by torch's own planner of distributed checkpoints.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from msgspec import Struct
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nbelastic.sharded.chunks import Chunk, Layout, owners_of


class Move(Struct, frozen=True):
    """`sender` has the shard of the old rank `shard`; `receiver` needs this part of its chunk of the parameter `name`.

    `start` is the part's first index within the old chunk, and `into` within the receiver's new chunk.
    """

    sender: int
    shard: int
    receiver: int
    name: str
    start: tuple[int, ...]
    into: tuple[int, ...]
    sizes: tuple[int, ...]


class Overlap(Struct, frozen=True):
    """Of the chunk that the old ranks `owners` hold, this part is in the new chunk of the rank `receiver`."""

    owners: frozenset[int]
    receiver: int
    start: tuple[int, ...]
    into: tuple[int, ...]
    sizes: tuple[int, ...]


def moves(old: Layout, new: Layout, holders: Mapping[int, Sequence[int]], rank: int | None = None) -> Iterator[Move]:
    """The moves that fill all chunks of `new`, in an order that all ranks share; with `rank`, those that it takes part in.

    `holders`: by rank of `old`, the ranks of `new` that hold its shard. A rank that has a chunk takes it from itself, else
    from a holder on its host, else the receivers are spread over the holders.
    """
    chosen: dict[tuple[frozenset[int], int], tuple[int, int]] = {}
    for name, parameter in new.parameters.items():
        for part in overlaps(old.parameters[name].chunks, parameter.chunks):
            key = (part.owners, part.receiver)
            if key not in chosen:
                chosen[key] = _choose_sender(*key, holders, new.hosts)
            sender, shard = chosen[key]
            if rank is None or rank in (sender, part.receiver):
                yield Move(sender, shard, part.receiver, name, part.start, part.into, part.sizes)


def _choose_sender(
    owners: frozenset[int], receiver: int, holders: Mapping[int, Sequence[int]], hosts: Sequence[str]
) -> tuple[int, int]:
    """The sender for `receiver`, and whose shard it sends."""
    candidates = sorted((rank, shard) for shard in owners for rank in holders.get(shard, ()))
    for nearness in (lambda rank: rank == receiver, lambda rank: hosts[rank] == hosts[receiver]):
        near = [candidate for candidate in candidates if nearness(candidate[0])]
        if near:
            return near[receiver % len(near)]
    return candidates[receiver % len(candidates)]


@lru_cache(256)
def overlaps(old: tuple[Chunk | None, ...], new: tuple[Chunk | None, ...]) -> tuple[Overlap, ...]:
    """The parts of the chunks `old` (by old rank) that make up the chunks `new` (by new rank). Many parameters share one."""
    before, after = owners_of(old), owners_of(new)
    sources, targets = list(before), list(after)
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(), [_metadata(chunk) for chunk in sources])
    found = []
    for item in create_read_items_for_chunk_list("", stored, [_metadata(chunk) for chunk in targets]):
        source, target = sources[item.storage_index.index or 0], targets[item.dest_index.index or 0]
        part = tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)
        found += [Overlap(before[source], receiver, *part) for receiver in sorted(after[target])]
    return tuple(found)


def _metadata(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
