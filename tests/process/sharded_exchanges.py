"""Programs that use parts of `nbelastic.sharded` between real ranks, and programs that `ShardedState` refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import nbelastic as nbe


def tensors(torch: Any, sender: int, receiver: int) -> list[Any]:
    """What a rank sends to another: types, shapes and layouts in memory that have met in one message."""
    base = 10 * sender + receiver
    return [
        torch.full((3, 5), base, dtype=torch.bfloat16),
        torch.full((7,), base, dtype=torch.uint8),
        torch.tensor(base, dtype=torch.float64),
        torch.empty(0, 4),
        torch.arange(base, base + 12.0).view(3, 4).t(),
        torch.tensor([True, False, True]),
        torch.full((1000,), base, dtype=torch.float32),
        torch.full((9,), base, dtype=torch.complex64),
    ]


def exchange_all(folder: str) -> bool:
    """Between all pairs of ranks at once, in pieces and packed."""
    import torch

    from nbelastic.sharded import transfer
    from nbelastic.worker.session import current

    @nbe.elastic
    def loop(state: Any) -> bool:
        group, rank, others = (
            current().side_group("test"),
            nbe.rank(),
            [r for r in range(nbe.size()) if r != nbe.rank()],
        )
        before = transfer.PIECE, transfer.SMALL
        try:
            for transfer.PIECE, transfer.SMALL in (before, (600, 900)):
                got = {r: [torch.zeros_like(one) for one in tensors(torch, r, rank)] for r in others}
                transfer.exchange({r: tensors(torch, rank, r) for r in others}, got, group, 1)
                for r in others:
                    assert all(map(torch.equal, got[r], tensors(torch, r, rank))), (r, got[r])
        finally:
            transfer.PIECE, transfer.SMALL = before
        sent = [b"x" * 1000 * r for r in range(nbe.size())]
        assert transfer.broadcast_bytes(sent[rank], 2, group) == sent[2]
        return transfer.gather_bytes(sent[rank], group) == sent

    found: bool = loop(nbe.ObjectState(step=0))
    return found


def copy_to_buddies(folder: str) -> list[Any]:
    """Two commits of a parameter of which the last rank has no row. Returns what this rank holds of the others."""
    import torch

    from nbelastic.errors import StateError
    from nbelastic.sharded.arena import ShardTensor
    from nbelastic.sharded.chunks import Chunk, Layout, Parameter
    from nbelastic.sharded.replication import Replication
    from nbelastic.sharded.whole_commits import Commit
    from nbelastic.worker.session import current, world

    @nbe.elastic
    def loop(state: Any) -> list[Any]:
        rank, size = nbe.rank(), nbe.size()
        chunks = (*(Chunk((r, 0), (1, 2)) for r in range(size - 1)), None)
        hosts = tuple(host for host, count in world().hosts for _ in range(count))
        layout = Layout(1, hosts, {"w": Parameter((size - 1, 2), "float32", chunks)})
        one = Replication(layout, rank, 1, current().side_group("test"), pinned=False)
        live = torch.full((int(rank < size - 1), 2), float(rank))
        shard = {ShardTensor("w"): live, ShardTensor("w", "optimizer", "momentum"): live}
        assert one.finish(lambda task: task()) is None
        one.begin(Commit(1, 1), shard)
        first = one.finish(lambda task: task())
        live += 10
        one.begin(Commit(1, 2), shard)
        second = one.finish(lambda task: task())
        assert first is not None
        assert second is not None
        assert one.whole is not None
        assert (first[0], second[0], one.whole.commit) == (Commit(1, 1), Commit(1, 2), Commit(1, 2))
        momentum = ShardTensor("w", "optimizer", "momentum")
        held = {ward: copy[momentum].flatten().tolist() for ward, copy in second[1].items()}
        mapped = {
            (of.commit.number, of.shard): copy[momentum].flatten().tolist() for of, copy in one.held_on_host().items()
        }
        if rank == 1:
            shard[ShardTensor("w", "optimizer", "more")] = live
        one.begin(Commit(1, 3), shard)
        try:
            one.finish(lambda task: task())
        except StateError as error:
            text = str(error)
        return [one.wards, held, mapped, text]

    found: list[Any] = loop(nbe.ObjectState(step=0))
    return found


def copy_without_shared_memory(folder: str) -> list[Any]:
    """One commit on one host, where rank 2 cannot map the others' memory. Returns the copies that this rank got."""
    import torch

    from nbelastic.sharded.arena import ShardTensor
    from nbelastic.sharded.chunks import Chunk, Layout, Parameter
    from nbelastic.sharded.replication import Replication
    from nbelastic.sharded.whole_commits import Commit
    from nbelastic.worker.session import current

    @nbe.elastic
    def loop(state: Any) -> list[Any]:
        rank, size = nbe.rank(), nbe.size()
        chunks = tuple(Chunk((r,), (1,)) for r in range(size))
        layout = Layout(1, ("one",) * size, {"w": Parameter((size,), "float32", chunks)})
        one = Replication(layout, rank, 1, current().side_group("test"), pinned=False)
        if rank == 2:
            one._host._open = lambda *_: setattr(one._host, "unreachable", True)
        one.begin(Commit(1, 1), {ShardTensor("w"): torch.tensor([float(rank)])})
        done = one.finish(lambda task: task())
        assert done is not None
        return [[ward, copy[ShardTensor("w")].item()] for ward, copy in done[1].items()]

    found: list[Any] = loop(nbe.ObjectState(step=0))
    return found


def refused(folder: str, what: str) -> None:
    """A program that makes the mistake `what`."""
    import torch
    from torch.distributed.fsdp import fully_shard

    @nbe.elastic
    def loop(state: Any) -> None:
        again = (Path(folder) / "again").exists()
        with torch.device("meta"):
            model = torch.nn.Sequential(
                torch.nn.Linear(4, 8 if again and what == "other" else 4), torch.nn.Linear(4, 4)
            )
        if what != "whole":
            fully_shard(model[1] if what == "uneven" else model, mesh=nbe.device_mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state.bind(model=model, optimizer=optimizer)
        if what == "twice":
            state.bind(model=model, optimizer=optimizer)
        while state.step < 6:
            for parameter in model.parameters():
                if what != "uneven" or nbe.rank() != 1 or parameter is not model[0].bias:
                    parameter.grad = torch.ones_like(parameter)
            if what == "other" and state.step == 3 and nbe.rank() == 3:
                (Path(folder) / "again").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()

    loop(nbe.ShardedState(step=0))
