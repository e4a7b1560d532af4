"""Moves data between ranks over a gloo group: plain bytes, never pickled objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist

from nbelastic.errors import StateError
from nbelastic.sharded.arena import ShardTensor
from nbelastic.state.transfer import wait_for_all

PIECE = 16 << 20  # bytes; longer tensors are sent in pieces, so that no other message waits for long
SMALL = 1 << 16  # bytes; shorter tensors are packed together, because a message costs more than copying them does
BUNDLE = 1 << 20  # bytes; a pack is sent when it is as long
RESHARD, REPLICATE, HAND_OVER = 1, 2, 3  # tags: threads that use the same group do not receive each other's messages


def gather_bytes(data: bytes, group: Any) -> list[bytes]:
    """Collective: the data of each rank, by rank. `group`: a gloo group; None: this rank is alone."""
    if group is None:
        return [data]
    size = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    group.allgather([lengths], [torch.tensor([len(data)])]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    group.allgather([found], [padded]).wait()
    return [one[: int(length)].numpy().tobytes() for one, length in zip(found, lengths, strict=True)]


def broadcast_bytes(data: bytes | bytearray, root: int, group: Any) -> bytes:
    """Collective: the data of rank `root`; what the others give is not used."""
    if group is None:
        return bytes(data)
    length = torch.tensor([len(data)])
    _broadcast(length, root, group)
    body = torch.empty(int(length), dtype=torch.uint8)
    if group.rank() == root:
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _broadcast(body, root, group)
    return bytes(body.numpy().tobytes())


def _broadcast(tensor: torch.Tensor, root: int, group: Any) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def meet(group: Any) -> None:
    """Collective: wait until all ranks are here."""
    if group is not None:
        group.allreduce([torch.ones(1)]).wait()


def check_same_tensors(names: Sequence[ShardTensor], group: Any) -> None:
    """Collective: StateError if the shards of the ranks do not have the same tensors in the same order."""
    if group is None:
        return
    data = msgspec.msgpack.encode(names)
    digest = crc32(data)
    bounds = torch.tensor([digest, -digest])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([bounds], options).wait()
    if bounds.sum() == 0:
        return
    by_rank = [msgspec.msgpack.decode(one, type=list[ShardTensor]) for one in gather_bytes(data, group)]
    for rank, other in enumerate(by_rank):
        odd = sorted(set(other) ^ set(by_rank[0]))
        if odd:
            has, lacks = (rank, 0) if odd[0] in other else (0, rank)
            raise StateError(
                f"rank {has} has {odd[0].key} ({odd[0].dtype}) in its shard, and rank {lacks} has not: let every rank compute "
                "a gradient of each parameter in every step, so that the optimizers keep the same on all ranks."
            )
    raise StateError("the parameters or optimizers of the ranks are in different orders: build the same on each rank.")


def exchange(
    sends: Mapping[int, Sequence[torch.Tensor]],
    receives: Mapping[int, Sequence[torch.Tensor]],
    group: Any,
    tag: int,
) -> None:
    """Send tensors to other ranks of `group` and receive into others, at the same time. Raises what torch raises.

    `sends[rank]` there and `receives[rank]` here are tensors of the same types and sizes in the same order.
    """
    works: list[Any] = []
    arrived: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    try:
        for rank, tensors in receives.items():
            for bundle in _bundles(tensors):
                flat = _as_bytes(bundle[0]) if len(bundle) == 1 else None
                if flat is None:
                    flat = torch.empty(sum(tensor.nbytes for tensor in bundle), dtype=torch.uint8)
                    arrived.append((flat, bundle))
                works += [group.recv([piece], rank, tag) for piece in flat.split(PIECE)]
        for rank, sent in sends.items():
            for bundle in _bundles(sent):
                flat = _as_bytes(bundle[0]) if len(bundle) == 1 else None
                if flat is None:
                    flat = torch.cat(
                        [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in bundle]
                    )
                works += [group.send([piece], rank, tag) for piece in flat.split(PIECE)]
    finally:
        wait_for_all(works)
    for flat, bundle in arrived:
        for piece, tensor in zip(flat.split([tensor.nbytes for tensor in bundle]), bundle, strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))  # its place in `flat` may be odd


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own memory as bytes, if gloo can read and write it."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor.detach().view(-1).view(torch.uint8)
    return None


def _bundles(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Long tensors one by one, short ones together; empty ones not at all."""
    bundle: list[torch.Tensor] = []
    length = 0
    for tensor in tensors:
        if tensor.nbytes >= SMALL:
            yield [tensor]
        elif tensor.numel():
            bundle.append(tensor)
            length += tensor.nbytes
            if length >= BUNDLE:
                yield bundle
                bundle, length = [], 0
    if bundle:
        yield bundle
