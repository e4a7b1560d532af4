"""What a sharded recovery cannot do without, bare: three processes that live already, plain torch, and no nbelastic.

Of four ranks, rank 3 is lost, and rank 1 has its copy: the state of the others moves into a world of three. `Floor` times
the whole; `Resharding` times the moves alone, and those of nbelastic in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.benchmarks.sharded_programs import LAYERS, WIDTH, one_step, sharded

OLD, NEW = 4, 3
HOLDERS = {0: (0,), 1: (1,), 2: (2,), 3: (1,)}  # old rank -> who has its shard now
KINDS = ("parameter", "exp_avg", "exp_avg_sq")
Marks = list[tuple[str, float]]


def rows(world: int, rank: int) -> tuple[int, int]:
    """Return the rows of each weight that FSDP2 gives to this rank: from, to."""
    each = -(-WIDTH // world)
    return min(WIDTH, rank * each), min(WIDTH, (rank + 1) * each)


def old_shards(rank: int, kinds: int) -> dict[int, list[Any]]:
    """Return the shards of the old world that this rank holds: `kinds` tensors for each weight."""
    import torch

    shards = {}
    for old, holders in HOLDERS.items():
        if rank in holders:
            first, last = rows(OLD, old)
            shards[old] = [torch.full((last - first, WIDTH), float(old)) for _ in range(LAYERS * kinds)]
    return shards


def move(rank: int, held: dict[int, list[Any]], targets: list[Any], group: Any = None) -> None:
    """Fill `targets`, this rank's new tensors, with the overlaps of the old shards: isend, irecv, and local copies."""
    import torch.distributed as dist

    works = []
    for old, (holder, *_) in HOLDERS.items():
        old_first, old_last = rows(OLD, old)
        for receiver in range(NEW):
            new_first, new_last = rows(NEW, receiver)
            first, last = max(old_first, new_first), min(old_last, new_last)
            if first >= last:
                continue
            for index, target in enumerate(targets):
                there = target[first - new_first : last - new_first] if receiver == rank else None
                here = held[old][index][first - old_first : last - old_first] if holder == rank else None
                if there is not None and here is not None:
                    there.copy_(here)
                elif there is not None:
                    works.append(dist.irecv(there, holder, group=group, tag=old))
                elif here is not None:
                    works.append(dist.isend(here, receiver, group=group, tag=old))
    for work in works:
        work.wait()


class Floor:
    """Each round forms a bare group, shards a meta model, moves the bytes, and makes a step."""

    def __init__(self, rank: int) -> None:
        self._rank, self._held = rank, old_shards(rank, len(KINDS))

    def round(self, store: Any, ready: Callable[[], object]) -> Marks:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from nbelastic.sharded.mesh_caches import clear_mesh_caches

        ready()
        marks = [("begun", time.time())]
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=NEW, timeout=timedelta(seconds=60))
        marks.append(("group", time.time()))
        model, optimizer = sharded(init_device_mesh("cpu", (NEW,)))
        model.to_empty(device="cpu")
        marks.append(("fully_shard", time.time()))
        with torch.no_grad():
            self._fill(list(model.parameters()), optimizer)
        marks.append(("moves", time.time()))
        one_step(model, optimizer)
        marks.append(("first step", time.time()))
        one_step(model, optimizer)
        marks.append(("second step", time.time()))
        dist.barrier()
        dist.destroy_process_group()
        clear_mesh_caches()  # else the next round's tensors have this round's mesh
        return marks

    def _fill(self, parameters: list[Any], optimizer: Any) -> None:
        import torch
        from torch.distributed.tensor import DTensor

        targets = []
        for parameter in parameters:
            local = parameter.to_local()
            entries = {kind: torch.empty_like(local) for kind in KINDS[1:]}
            targets += [local, *entries.values()]
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                **{
                    kind: DTensor.from_local(
                        entry,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                    for kind, entry in entries.items()
                },
            }
        move(self._rank, self._held, targets)


class Resharding:
    """Each round moves the same bytes in two ways, bare and by nbelastic: parameters alone, and with AdamW's tensors."""

    def __init__(self, rank: int) -> None:
        self._rank, self._number = rank, 0
        self._held = old_shards(rank, len(KINDS))

    def round(self, store: Any, ready: Callable[[], object]) -> Marks:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=NEW)
            self._mesh = init_device_mesh("cpu", (NEW,))
            self._group = dist.new_group(backend="gloo")
        self._number += 1
        marks: Marks = []
        for name, kinds in (("parameters", 1), ("with AdamW", len(KINDS))):
            ways = [("bare", self._bare), ("ours", self._ours)]
            for way, run in ways if self._number % 2 else ways[::-1]:
                task = run(kinds)
                dist.barrier()
                ready()
                marks.append((f"{name}, {way}, begun", time.time()))
                check = task()
                marks.append((f"{name}, {way}", time.time()))
                self._check(check)
                dist.barrier()
        return marks

    def _bare(self, kinds: int) -> Callable[[], Any]:
        import torch

        first, last = rows(NEW, self._rank)
        held = {old: tensors[: LAYERS * kinds] for old, tensors in self._held.items()}

        def run() -> Any:
            targets = [torch.empty(last - first, WIDTH) for _ in range(LAYERS * kinds)]
            move(self._rank, held, targets, self._group)
            return targets

        return run

    def _ours(self, kinds: int) -> Callable[[], Any]:
        import msgspec
        import torch

        from nbelastic.sharded import resharding
        from nbelastic.sharded.arena import ShardTensor
        from nbelastic.sharded.bound import Bound
        from nbelastic.sharded.chunks import Chunk, OwnChunk, join
        from nbelastic.sharded.initial_values import allocate
        from nbelastic.sharded.parameters import local_tensor
        from nbelastic.sharded.refill import refill
        from nbelastic.sharded.transfer import gather_bytes

        model, optimizer = sharded(self._mesh)
        bound = Bound({"model": model}, {"optimizer": optimizer})
        allocate(model, torch.device("cpu"))
        tables = gather_bytes(msgspec.msgpack.encode(bound.own_chunks()), self._group)
        new = join(2, ["a"] * NEW, [msgspec.msgpack.decode(one, type=dict[str, OwnChunk]) for one in tables])
        old_chunks = [Chunk((rows(OLD, old)[0], 0), (rows(OLD, old)[1] - rows(OLD, old)[0], WIDTH)) for old in HOLDERS]
        whole = (WIDTH, WIDTH)
        old = join(
            1, ["a"] * OLD, [{name: OwnChunk(whole, "float32", one) for name in bound.parameters} for one in old_chunks]
        )
        names = [ShardTensor(name) for name in bound.parameters]
        names += [ShardTensor(name, "optimizer", kind) for kind in KINDS[1:kinds] for name in bound.parameters]
        held = {old: dict(zip(names, tensors, strict=False)) for old, tensors in self._held.items()}
        resharding.overlaps.cache_clear()

        def run() -> Any:
            plan = list(resharding.moves(old, new, HOLDERS, self._rank))
            filled = refill(bound, names, plan, held, rank=self._rank, group=self._group)
            return [*filled.values(), *map(local_tensor, bound.parameters.values())]

        return run

    def _check(self, tensors: list[Any]) -> None:
        """Every row must have come from the old rank that had it."""
        import torch

        first, last = rows(NEW, self._rank)
        expected = torch.tensor([float(row // -(-WIDTH // OLD)) for row in range(first, last)])
        if not all(torch.equal(tensor[:, 0], expected) and torch.equal(tensor[:, -1], expected) for tensor in tensors):
            raise AssertionError(f"rank {self._rank} has other rows than those of the old ranks")
