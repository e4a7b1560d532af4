"""Moves data between ranks over a gloo group: plain bytes, never pickled objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbelastic.state.transfer import wait_for_all

PIECE = 16 << 20  # bytes; longer tensors are sent in pieces, so that no other message waits for long
SMALL = 1 << 20  # bytes; shorter tensors are packed together
RESHARD, REPLICATE, HAND_OVER = 1, 2, 3  # tags: threads that use the same group do not receive each other's messages


def gather_bytes(data: bytes, group: Any = None) -> list[bytes]:
    """Collective: the data of each rank, by rank."""
    size = dist.get_world_size(group)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = own
    found = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [one[: int(length)].cpu().numpy().tobytes() for one, length in zip(found, lengths, strict=True)]


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
                works += [dist.irecv(piece, rank, group=group, tag=tag) for piece in flat.split(PIECE)]
        for rank, sent in sends.items():
            for bundle in _bundles(sent):
                flat = _as_bytes(bundle[0]) if len(bundle) == 1 else None
                if flat is None:
                    flat = torch.cat(
                        [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in bundle]
                    )
                works += [dist.isend(piece, rank, group=group, tag=tag) for piece in flat.split(PIECE)]
    finally:
        wait_for_all(works)
    for flat, bundle in arrived:
        for piece, tensor in zip(flat.split([tensor.nbytes for tensor in bundle]), bundle, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


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
            if length >= SMALL:
                yield bundle
                bundle, length = [], 0
    if bundle:
        yield bundle
