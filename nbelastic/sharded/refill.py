"""Fills the tensors of a new generation from shards that ranks hold: from memory, or from another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from nbelastic.errors import StateError
from nbelastic.sharded.arena import Shard, ShardTensor
from nbelastic.sharded.bound import Bound, check_same
from nbelastic.sharded.chunks import Layout, box, owners_of
from nbelastic.sharded.holdings import Record
from nbelastic.sharded.parameters import local_tensor
from nbelastic.sharded.resharding import Move
from nbelastic.sharded.transfer import HAND_OVER, RESHARD, check_same_tensors, exchange, meet
from nbelastic.worker.session import Session

T = TypeVar("T")


def run_in_order(session: Session, device: torch.device, task: Callable[[], T]) -> T:
    """Run `task`, which reads or writes tensors of this device, in a thread that an abort may abandon.

    Each thread has a stream of its own on a GPU. So the task begins after all that was begun, and ends when it is done there.
    """
    session.finish_gpu_work()

    def run() -> T:
        result = task()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return result

    return session.run_abortable(run)


def check_fits(old: Layout, new: Layout, bound: Bound, record: Record) -> None:
    """StateError if the bound models and optimizers are not those of the commit that is restored."""
    source = "the commit that is restored: build and bind the same in every call."
    check_same("parameter", new.parameters, old.parameters, source)
    bound.check_names(record, source)
    for name, parameter in new.parameters.items():
        before = old.parameters[name]
        if (parameter.shape, parameter.dtype) != (before.shape, before.dtype):
            raise StateError(
                f"{name} is {parameter.dtype} {parameter.shape} here and {before.dtype} {before.shape} in the commit "
                "that is restored: build the same model in every call."
            )


def refill(
    bound: Bound,
    names: Sequence[ShardTensor],
    plan: Iterable[Move],
    held: Mapping[int, Shard],
    *,
    rank: int,
    group: Any,
) -> Shard:
    """Carry out the moves of this rank: into the new parameters, and into new tensors for the optimizers, which it returns.

    `held`: the shards that this rank holds, by their rank in the old generation.
    """
    filled: Shard = {}
    by_parameter: dict[str, list[ShardTensor]] = {}
    for name in names:
        own = local_tensor(bound.parameters[name.parameter])
        filled[name] = torch.empty_like(own, dtype=getattr(torch, name.dtype)) if name.optimizer else own
        by_parameter.setdefault(name.parameter, []).append(name)
    sends: dict[int, list[torch.Tensor]] = {}
    receives: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        for move in plan:
            for name in by_parameter[move.name]:
                if move.receiver == rank:
                    target = filled[name][box(move.into, move.sizes)]
                    if move.sender == rank:
                        target.copy_(held[move.shard][name][box(move.start, move.sizes)])
                    else:
                        receives.setdefault(move.sender, []).append(target)
                else:
                    source = held[move.shard][name][box(move.start, move.sizes)]
                    sends.setdefault(move.receiver, []).append(source)
        exchange(sends, receives, group, RESHARD)
    return {name: tensor for name, tensor in filled.items() if name.optimizer}


def equalize(bound: Bound, layout: Layout, rank: int, group: Any) -> None:
    """Give ranks that hold the same chunk the values of the lowest of them."""
    sends: dict[int, list[torch.Tensor]] = {}
    receives: dict[int, list[torch.Tensor]] = {}
    for name, parameter in layout.parameters.items():
        for ranks in owners_of(parameter.chunks).values():
            first = min(ranks)
            if rank == first:
                for other in sorted(ranks - {first}):
                    sends.setdefault(other, []).append(local_tensor(bound.parameters[name]))
            elif rank in ranks:
                receives.setdefault(first, []).append(local_tensor(bound.parameters[name]))
    with torch.no_grad():
        exchange(sends, receives, group, RESHARD)


def send_shards(plan: Mapping[int, int], layout: Layout, rank: int, shard: Shard, group: Any) -> dict[int, Shard]:
    """Collective: ranks send their shard to others, `plan`: sender -> receiver. Returns those that this rank received."""
    received: dict[int, Shard] = {}
    for source, target in plan.items():
        if target == rank:
            chunks = {name: layout.parameters[name.parameter].chunks[source] for name in shard}
            received[source] = {
                name: torch.empty(chunk.sizes if chunk is not None else (0,), dtype=getattr(torch, name.dtype))
                for name, chunk in chunks.items()
            }
    sends = {plan[rank]: list(shard.values())} if rank in plan else {}
    check_same_tensors(tuple(shard), group)
    exchange(sends, {source: list(parts.values()) for source, parts in received.items()}, group, HAND_OVER)
    meet(group)
    return received
