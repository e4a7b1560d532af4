"""Two ranks train on the double with DDP, FSDP2 and DTensor: run by test_nccl_double.py in a process of its own."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.nccl_double.accelerator import register
from tests.support.nccl_double.group import NAME

SIZE = 2


def collectives(rank: int) -> None:
    def ranks(count: int = 3) -> torch.Tensor:
        return torch.full((count,), float(rank))

    for op, total in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 0.5), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 0)):
        for count in (3, 100_003):
            tensor = ranks(count)
            dist.all_reduce(tensor, op)
            assert tensor.eq(total).all()
    parts = [torch.empty(3), torch.empty(3)]
    dist.all_gather(parts, ranks())
    assert torch.equal(torch.stack(parts), torch.tensor([[0.0] * 3, [1.0] * 3]))
    whole = torch.empty(6)
    dist.all_gather_single(whole, ranks())
    assert torch.equal(whole, torch.cat(parts))
    part = torch.empty(3)
    dist.reduce_scatter_single(part, torch.arange(6.0))
    assert torch.equal(part, torch.arange(6.0).chunk(2)[rank] * 2)
    dist.reduce_scatter(part, parts)
    assert part.eq(2.0 * rank).all()
    dist.all_to_all_single(whole, torch.arange(6.0) + 10 * rank)
    assert torch.equal(whole, torch.cat([torch.arange(6.0).chunk(2)[rank], torch.arange(6.0).chunk(2)[rank] + 10]))
    dist.all_to_all(parts, [ranks(), ranks()])
    assert torch.equal(torch.cat(parts), torch.tensor([0.0] * 3 + [1.0] * 3))
    tensor = ranks()
    dist.broadcast(tensor, 1)
    assert tensor.eq(1).all()
    dist.reduce(tensor, 1)
    assert rank == 0 or tensor.eq(2).all()
    dist.gather(ranks(), parts if rank == 0 else None)
    dist.scatter(part, parts if rank == 0 else None)
    assert part.eq(rank).all()
    if rank == 0:
        dist.send(ranks(), 1)
    else:
        dist.recv(part, 0)
        assert part.eq(0).all()
    everybody: list[int] = [0, 0]
    dist.all_gather_object(everybody, rank)
    assert everybody == [0, 1]
    dist.barrier()
    work = dist.all_reduce(tensor := torch.ones(3), async_op=True)
    assert work.get_future().wait()[0] is tensor
    group = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(tensor, group=group)
    assert tensor.eq(2).all()


def train(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights after some steps on this rank's data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
    return [
        weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach() for weight in model.parameters()
    ]


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def models(rank: int) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    values = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    assert values.sum().full_tensor().item() == 28
    assert torch.equal(values.redistribute(mesh, [Replicate()]).to_local(), torch.arange(8.0))
    ddp = torch.nn.parallel.DistributedDataParallel(network())
    sharded = network()
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh)
    torch.manual_seed(rank)
    ours = train(ddp)
    torch.manual_seed(rank)
    for weight, same in zip(ours, train(sharded), strict=True):
        torch.testing.assert_close(weight, same)
        other = weight.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, weight)


def main(file: str) -> None:
    child = os.fork()
    rank = int(child > 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{rank}"
    register()
    dist.init_process_group(NAME, store=dist.FileStore(file, SIZE), rank=rank, world_size=SIZE)
    collectives(rank)
    models(rank)
    dist.destroy_process_group()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    main(sys.argv[1])
